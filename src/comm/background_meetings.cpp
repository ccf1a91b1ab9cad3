// SPDX-License-Identifier: BSD-3-Clause
// Tasks whose buffers may be on devices: what a rank shows before them, and where they run then.
#include <memory>
#include <optional>

#include "comm/lane.hpp"

namespace trib {

/// Ranks have met before `task`, and have seen where the buffers are: from here on nonblocking ones
/// go by devices, or go on as before. Those that go by devices before these are open are staged, to
/// the same bits.
Route Background::answer(const Lane& lane, Task& task) {
  asking_ = nullptr;
  const bool is_yes =
      Devices::are_on_own_devices(*lane.channel, group_.size, group_.config.shared_gpu);
  if (is_yes) {
    opener_ = std::make_unique<DeviceOpener>(main_, group_.rank, group_.size, group_.config,
                                             devices_.backend->opening(task.request_.in));
    posts_have_devices_.store(true, std::memory_order_relaxed);
  }
  hand_out();
  return is_yes ? Route::staged : Route::host;
}

/// What waited for the answer.
void Background::hand_out() {
  while (!waiting_.empty() && asking_ == nullptr) {
    const Waiting next = waiting_.front();
    waiting_.pop_front();
    if (next.task == nullptr) {
      announce(next.note, lane_of(next.number, next.meets || posts_have_devices()));
      continue;
    }
    Task& task = *next.task;
    settle(task);
    Lane& lane = lane_of(next.number, is_in_first_lane(task));
    task.lane_ = &lane;
    if (lane.first != nullptr) {
      lane.last->next_ = &task;
    } else {
      lane.first = &task;
      if (lane.place == Lane::kIdle) add_busy(lane);
    }
    lane.last = &task;
  }
}

/// What `task` shows at its meeting.
Card Background::card_of(const Lane& lane, const Task& task) const {
  const Request& request = task.request_;
  DeviceChannel* const its = device_of(task);
  if (task.meeting_ != Task::Meeting::common) {
    Card card = devices_.card(request, task.call_, its);
    if (task.meeting_ == Task::Meeting::own)
      card.is_ready = its != nullptr;
    else if (card.in == Memory::device)
      card.device = devices_.backend->device_of(request.in);
    return card;
  }
  DeviceChannel& device = *its;
  Card card = devices_.card(request, task.call_);
  const bool is_held = !task.mapped_.empty();
  if (devices_.are_shared && !is_held) {
    const std::size_t out_bytes = lane.plan->out_bytes_of(group_.rank);
    if (!device.keeps_results_aside() && is_scattered_over_input(request, task.bytes_, out_bytes))
      card.is_contended = true;
    device.show(card, {request.in, request.out, task.bytes_, out_bytes});
  }
  card.is_settled = (!devices_.are_shared && !is_held) || lane.is_settled || device.is_settled();
  // Peers' kernels would work on what was there before: then the call goes another way, on all
  // ranks alike.
  if (is_held && !device.is_still_there(task.hold_)) card.is_settled = false;
  return card;
}

/// After a meeting: where `task` is to run. Nothing: ranks meet once more.
std::optional<Route> Background::route_of(Lane& lane, Task& task) {
  if (task.meeting_ == Task::Meeting::first) return answer(lane, task);
  const HostChannel& met = *lane.channel;
  if (task.meeting_ == Task::Meeting::own)
    return devices_.route(met, group_.size, /*can_serve=*/true, named_);
  const Request& request = task.request_;
  DeviceChannel& device = *devices_.of_requests();
  if (lane.meets_again) {
    lane.meets_again = false;
    bool is_reached = true;
    for (int rank = 0; rank < group_.size; ++rank)
      is_reached = is_reached && met.card(rank).is_reached;
    if (!is_reached) named_.refuse_news();
    return is_reached ? Route::device : Route::staged;
  }
  const bool can_serve = devices_.can_serve(request, lane.plan->signature.count);
  const Route route = devices_.route(met, group_.size, can_serve, named_);
  if (route != Route::device) return route;
  const bool are_settled = Devices::are_settled(met, group_.size);
  const bool is_held = !task.mapped_.empty();
  if (!devices_.are_shared) return is_held && are_settled ? Route::device_mapped : Route::device;
  if (!are_settled || !lane.plans.can_use(*lane.plan, route, *task.findings_, &device))
    return Route::staged;
  if (is_held) return route;
  const bool has_news = named_.has_news(met, group_.size);
  lane.card.is_reached = device.reach(met, request.in, request.out, lane.mapped);
  if (has_news) {
    lane.channel->present(lane.card);
    lane.meets_again = true;
    return {};
  }
  if (!lane.card.is_reached) throw Error(Code::device, "another rank's buffers are gone");
  return route;
}

void Background::stage(Task& task, Memory in) {
  const Request& request = task.request_;
  if (is_beyond_host(in)) {
    void* const copy = task.staged_in_.get(*devices_.backend, task.bytes_);
    devices_.backend->copy(copy, request.in, task.bytes_);
    task.in_ = copy;
  }
  if (is_beyond_host(devices_.backend->where(request.out))) {
    const std::size_t length = is_scatter(request.collective)
                                   ? request.part(group_.rank) * bytes(request.dtype)
                                   : task.bytes_;
    task.fetched_bytes_ = length;
    task.out_ = task.staged_out_.get(*devices_.backend, length);
  }
}

}  // namespace trib

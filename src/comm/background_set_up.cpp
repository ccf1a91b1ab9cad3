// SPDX-License-Identifier: BSD-3-Clause
// Lanes come and go: those of nonblocking reductions, and one for each persistent one, whose
// channel the next one that needs the like takes over.
#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <new>

#include "backend/segment.hpp"
#include "comm/lane.hpp"

namespace trib {
namespace {

/// Nonblocking operations of a communicator that run at once.
constexpr int kLanes = 4;
constexpr std::size_t kLaneRows = 8;
/// Scratch of a lane, per rank and window: pieces of large messages. Those of all ranks together
/// should not be more than kLanesBytes. 2 ranks on AMD Zen 4, with 256 rather than 16 KiB:
/// MPI_Iallreduce of 64 KiB 5.0 us rather than 12.3, of 1 MiB 82 rather than 219.
constexpr std::size_t kMostLaneBytes = 256 << 10, kLeastLaneBytes = 16 << 10;
constexpr std::size_t kLanesBytes = 2 << 20;
/// A persistent operation takes what it needs up to kMostBytes, and less where memory is short.
constexpr std::size_t kMostBytes = 512 << 10;
/// Of a vector: shorter ones get no large scratch of their own, which takes milliseconds to set up.
constexpr std::size_t kLeastLarge = 4 << 10;
/// Flags of a persistent operation's lane, at least: what processors fetch ahead of a line should
/// not be the next window's. 2 ranks on AMD Zen 4: 155 ns rather than 180 for 512 bytes.
constexpr int kLeastFlags = 4;

}  // namespace

bool Background::open_lanes() {
  if (has_lanes()) return true;
  const int size = group_.size;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::size_t bytes = std::clamp(std::bit_floor(kLanesBytes / static_cast<std::size_t>(size)),
                                 kLeastLaneBytes, kMostLaneBytes);
  for (;; bytes = std::max(bytes / 4, kLeastLaneBytes)) {
    // The first communicators of a program have much.
    const std::size_t spare = bytes > kLeastLaneBytes ? kSegmentBudget * 3 / 4 : 0;
    const Room room{flags_of_lane(size), std::max(bytes, 256 * static_cast<std::size_t>(size)),
                    spare};
    for (auto& channel : main_.branch(room, kLanes))
      lanes.push_back(std::make_unique<Lane>(group_, std::move(channel), kLaneRows));
    if (!lanes.empty()) break;
    if (bytes == kLeastLaneBytes) return false;
  }
  const std::lock_guard lock(lock_);
  lanes_ = std::move(lanes);
  make_room_for_busy();
  return true;
}

bool Background::prepare(Task& task, const std::optional<Choice>& way) {
  const Request& request = task.request_;
  Plans sketch(group_, main_, 1, /*has_no_data=*/true);
  const Plan& plan = sketch.find(request);
  task.bytes_ = plan.bytes;
  if (plan.bytes == 0) {
    // Nobody leaves before all have come: HostChannel::missing() counts on it.
    std::vector<char> all(static_cast<std::size_t>(group_.size));
    const char mine = 0;
    bootstrap_.exchange(&mine, all.data(), 1);
    return true;
  }
  const Route route = task.meets_             ? Route::staged  // of what is left to the host
                      : !task.mapped_.empty() ? Route::mapped
                                              : Route::host;
  // To the bits of a blocking call.
  const Route as = task.is_staged_ && route == Route::host ? Route::staged : route;
  Choice choice = way && !task.meets_ ? *way : sketch.choose(plan, as, *task.findings_);
  if (way && task.meets_) choice.algorithm = way->algorithm;  // what stands in for it has its bits
  const auto schedule = group_.schedule(request.collective, choice, request.root);
  const std::size_t longest = sketch.longest_chunk_of(plan, *schedule);
  const std::size_t units = static_cast<std::size_t>(std::max(schedule->units, 1));
  const std::size_t least = units * 64;
  std::size_t wanted = units * (std::min(choice.slice_bytes, longest) + 63) / 64 * 64;
  wanted = std::clamp(wanted, least, std::max(least, kMostBytes));
  const bool is_short = longest <= wanted / units || group_.size == 2;
  const bool turns =
      task.may_turn_ && route == Route::host && plan.bytes >= kLeastLarge && is_short;
  const int flags = std::max(schedule->flags, kLeastFlags);
  for (;; wanted = std::max(least, wanted / 8)) {
    // Hundreds of them do not take what later communicators need: they go in smaller pieces.
    const std::size_t spare = wanted > least ? kSegmentBudget / 2 : 0;
    const Room room{flags, wanted, spare};
    std::uint64_t number = 0;
    std::unique_ptr<HostChannel> channel = spare_of_all(room, turns, number);
    if (!channel) {
      auto channels = main_.branch(room, 1);
      if (channels.empty()) {
        {
          const std::lock_guard lock(lock_);
          spares_.clear();
        }
        channels = main_.branch(room, 1);
      }
      if (!channels.empty()) {
        channel = std::move(channels.front());
        if (turns) channel->reserve_data();
        number = ++last_number_;
      }
    }
    if (channel) {
      auto lane = std::make_unique<Lane>(group_, std::move(channel), 1);
      lane->number = number;
      lane->room = room;
      Plan& own = lane->plans.find(request);
      lane->channel->announce(own.signature);
      lane->plan = &own;
      lane->has_own_plan = true;
      lane->turns = lane->channel->has_data();
      turning_lanes_.fetch_add(lane->turns, std::memory_order_relaxed);
      lane->plans.path(own, route, choice);
      DeviceChannel* const device = devices_.of_requests();
      if (task.meets_ && way)
        lane->plans.path(own, Route::device, *way, device);
      else if (task.meets_ && !lane->plans.can_use(own, Route::device, *task.findings_, device) &&
               !devices_.are_shared)
        lane->plans.path(own, Route::device, *task.findings_, device);
      if (task.meets_ && !task.mapped_.empty() && !devices_.are_shared &&
          !lane->plans.can_use(own, Route::device_mapped, *task.findings_, device)) {
        task.mapped_.clear();
        task.hold_.reset();
      }
      task.lane_ = lane.get();
      task.own_lane_ = std::move(lane);
      const std::lock_guard lock(lock_);
      own_lanes_.reserve(own_lanes_.size() + 1);  // nothing may fail once it knows the lane
      make_room_for_busy(1);
      own_lanes_.push_back(task.lane_);
      return true;
    }
    if (wanted == least) return false;
  }
}

void Background::dismiss(Task& task) {
  if (!task.own_lane_) return;
  const std::lock_guard lock(lock_);
  try {
    std::vector<Served> rows;
    task.own_lane_->plans.add_served(Form::persistent, rows);
    for (Served& row : rows) keep(row);
  } catch (const std::bad_alloc&) {  // statistics do without
  }
  std::erase(own_lanes_, task.lane_);
  turning_lanes_.fetch_sub(task.own_lane_->turns, std::memory_order_relaxed);
  const std::unique_ptr<Lane> lane = std::move(task.own_lane_);
  task.lane_ = nullptr;
  if (has_failed() || task.meets_) return;
  if (spares_.size() == kMostSpares) {
    if (are_offered_) return;
    spares_.erase(spares_.begin());
  }
  spares_.push_back({lane->number, lane->room, std::move(lane->channel)});
}

/// Collective: a channel that all ranks have left over. Which of them a rank has depends on when
/// its program freed the requests.
std::unique_ptr<HostChannel> Background::spare_of_all(const Room& room, bool turns,
                                                      std::uint64_t& number) {
  const auto is_like = [&](const Spare& spare) {
    return spare.room.flags == room.flags && spare.room.bytes == room.bytes &&
           spare.channel->has_data() == turns;
  };
  using Numbers = std::array<std::uint64_t, kMostSpares>;
  Numbers mine{};
  {
    const std::lock_guard lock(lock_);
    are_offered_ = true;
    std::size_t next = 0;
    for (const Spare& spare : spares_)
      if (is_like(spare)) mine[next++] = spare.number;
  }
  std::vector<Numbers> all(static_cast<std::size_t>(group_.size));
  bootstrap_.exchange(mine.data(), all.data(), sizeof mine);
  const auto is_everywhere = [&](std::uint64_t wanted) {
    return wanted != 0 && std::all_of(all.begin(), all.end(), [=](const Numbers& its) {
             return std::find(its.begin(), its.end(), wanted) != its.end();
           });
  };
  const std::lock_guard lock(lock_);
  are_offered_ = false;
  const auto wanted = std::find_if(all[0].begin(), all[0].end(), is_everywhere);
  if (wanted == all[0].end()) return nullptr;
  number = *wanted;
  const auto found = std::find_if(spares_.begin(), spares_.end(),
                                  [=](const Spare& spare) { return spare.number == *wanted; });
  std::unique_ptr<HostChannel> channel = std::move(found->channel);
  spares_.erase(found);
  return channel;
}

/// Of a lane that ends: a row for each way of serving, however many lanes come and go.
void Background::keep(Served& row) {
  for (Served& known : served_before_) {
    if (known.collective != row.collective || known.form != row.form ||
        known.algorithm != row.algorithm)
      continue;
    known.calls += row.calls;
    known.bytes += row.bytes;
    known.seconds += row.seconds;
    return;
  }
  served_before_.push_back(std::move(row));
}

void Background::add_served(std::vector<Served>& rows) {
  const std::lock_guard lock(lock_);
  rows.insert(rows.end(), served_before_.begin(), served_before_.end());
  for (const auto& lane : lanes_) lane->plans.add_served(Form::nonblocking, rows);
  for (const Lane* const lane : own_lanes_) lane->plans.add_served(Form::persistent, rows);
}

}  // namespace trib

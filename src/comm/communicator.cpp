// SPDX-License-Identifier: BSD-3-Clause
// One call from the request to the result: run() looks up a plan, launches its program and waits.
// Setup comes after it.
#include "comm/communicator.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <tuple>

#include "base/log.hpp"
#include "comm/cut.hpp"
#include "comm/staging.hpp"
#include "comm/suspects.hpp"
#include "comm/topology.hpp"

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;

/// Polls between two looks at the rest of the world, about a microsecond's worth.
constexpr int kPollsPerYield = 40;
/// Polls before the first such look: the usual wait is over by then.
constexpr int kFirstSpin = 400;
constexpr int kFirstSpinCrowded = 10;
/// Where ranks share cores, sched_yield() lets another one go on, within microseconds. But if
/// something else wants the core, a program that computes, it gets it for as long as the kernel
/// sees fit. When that has been seen, ranks sleep in so many rounds of waiting instead.
constexpr auto kSlowYield = std::chrono::milliseconds(1);
constexpr int kNaps = 1000;
/// For so long at most at first, then twice as long each time: what the rank waits for may need a
/// message that only it can take from the MPI.
constexpr auto kFirstNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::microseconds(2000);
/// A kernel takes ten microseconds at least.
constexpr int kFirstSpinDevice = 2000;

constexpr std::size_t kPlans = 32;

/// Calls that do without mapped memory between two looks whether it is still there.
constexpr std::uint32_t kIdleCalls = 64;

/// Between two looks whether a peer's process is there.
constexpr auto kAliveInterval = std::chrono::milliseconds(100);

/// Between two looks at the peers of an operation that the program tests, unless it tests often.
constexpr auto kLookInterval = std::chrono::milliseconds(10);

/// Some milliseconds behind Clock::now(), and several times as quick.
Clock::time_point coarse_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return Clock::time_point(std::chrono::seconds(now.tv_sec) +
                           std::chrono::nanoseconds(now.tv_nsec));
}

constexpr int kDone = Background::kDone;

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

// ------------------------------------------------------------------------------------------ a call

void Communicator::run(const Request& request) {
  check_usable();
  try {
    run_checked(request);
  } catch (...) {
    fail();
  }
}

inline void Communicator::run_checked(const Request& request) {
  Plan& plan = plans_->find(request);
  channel_->announce(plan.signature);
  if (plan.bytes == 0) {
    count_empty(request);
    return;
  }
  // A buffer that was in the host's memory before there was a device is there still.
  if (!devices_.are_in_use && devices_.backend != nullptr &&
      (request.in != plan.seen_in || request.out != plan.seen_out)) [[unlikely]] {
    devices_.are_in_use = devices_.backend->is_in_use();
    plan.seen_in = request.in;
    plan.seen_out = request.out;
  }
  if (!meets_) meets_ = channel_->is_time_to_meet(Occasion::devices);
  // Which of them comes first must not depend on what only this rank knows, such as whether it uses
  // a device: ranks meet in them.
  if (!meets_ && plan.is_mappable && run_mapped(request, plan)) return;
  if (meets_ || devices_.are_in_use) [[unlikely]]
    return run_with_devices(request, plan);
  run_path(plans_->path(plan, Route::host, group_.findings()), plan, Route::host, request.in,
           request.out);
}

void Communicator::count_empty(const Request& request) {
  last_algorithm_ = "none";
  ++empty_calls_[static_cast<std::size_t>(request.form)]
                [static_cast<std::size_t>(request.collective)];
}

void Communicator::run_path(Path& path, Plan& plan, Route route, const void* in, void* out) {
  if (path.arguments.is_large && !is_on_device(route) && !channel_->has_data())
    reserve_data(plan, route);
  path.arguments.in = in;
  path.arguments.out = out;
  Loaded& loaded = *path.loaded;
  last_algorithm_ = loaded.algorithm.c_str();
  ++loaded.calls;
  loaded.bytes += plan.bytes;
  const bool is_devices = is_on_device(route);
  if (!group_.config.stats) {
    wait(loaded.program->launch(path.arguments), is_devices);
  } else {
    const auto start = Clock::now();
    wait(loaded.program->launch(path.arguments), is_devices);
    loaded.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }
}

// -------------------------------------------------------------------------------- mapped buffers

/// False: not all ranks' buffers are mapped by all.
bool Communicator::run_mapped(const Request& request, Plan& plan) {
  if (heaps_are_refused_) return false;
  const Card card = heap_card(request, plan);
  if (!maps_) {
    // Until all ranks know of it, as if there were no such buffers.
    maps_ = channel_->is_time_to_meet(Occasion::heaps);
    if (!maps_) {
      if (card.in_at != SharedHeap::kNowhere)
        channel_->ask_for_meetings(Occasion::heaps, plan.is_joint);
      return false;
    }
  }
  meet(card);
  if (!map(plan, [&](int rank) { return channel_->card(rank); }, mapped_)) return false;
  Path& path = plans_->path(plan, Route::mapped, group_.findings());
  path.arguments.mapped = mapped_.data();
  run_path(path, plan, Route::mapped, request.in, request.out);
  return true;
}

/// Where this rank's buffers are, if peers may read and write both.
Card Communicator::heap_card(const Request& request, const Plan& plan) const {
  Card card;
  SharedHeap& heap = SharedHeap::get();
  if (!heap.has(request.in)) return card;
  const std::size_t out_bytes = plan.out_bytes_of(group_.rank);
  const auto begin = reinterpret_cast<std::uintptr_t>(request.in);
  const auto out = reinterpret_cast<std::uintptr_t>(request.out);
  const bool has_out = request.out != nullptr && out_bytes > 0;
  // A scattered result in place lies over what peers have yet to read.
  const bool is_in_place = has_out && out < begin + plan.bytes && begin < out + out_bytes;
  if (is_in_place && is_scatter(request.collective)) return card;
  if (has_out) {
    card.out_at = heap.offset_of(request.out, out_bytes);
    if (card.out_at == SharedHeap::kNowhere) return card;
  }
  card.in_at = heap.offset_of(request.in, plan.bytes);
  return card;
}

/// Fills `mapped`, alike on all ranks. Collective where heaps are mapped first. False: not all
/// buffers can be.
template <class CardOf>
bool Communicator::map(const Plan& plan, CardOf&& card_of, std::vector<MappedBuffers>& mapped) {
  if (heaps_are_refused_) return false;
  for (int rank = 0; rank < group_.size; ++rank)
    if (card_of(rank).in_at == SharedHeap::kNowhere) return false;
  if (!heaps_) {
    std::string why;
    heaps_ = PeerHeaps::open(*bootstrap_, why);
    if (!heaps_) {
      heaps_are_refused_ = true;
      if (group_.rank == 0)
        log_once(Config::Log::warn, "buffers in shared heaps are reduced like others: " + why);
      return false;
    }
  }
  mapped.resize(static_cast<std::size_t>(group_.size));
  for (int rank = 0; rank < group_.size; ++rank) {
    const Card card = card_of(rank);
    MappedBuffers& its = mapped[static_cast<std::size_t>(rank)];
    its.in = heaps_->at(rank, card.in_at, plan.bytes);
    its.out = heaps_->at(rank, card.out_at, plan.out_bytes_of(rank));
    if (its.in == nullptr) return false;
  }
  return true;
}

// -------------------------------------------------------------------------------------- devices

/// Some rank uses a device: where the buffers are decides, all ranks' together.
void Communicator::run_with_devices(const Request& request, Plan& plan) {
  DeviceCall call;
  call.begin();
  Card card = device_card(request, plan, call);
  Route route = Route::host;
  if (!meets_) {
    // Peers do not know yet that there are devices: until they do, as if there were none.
    if (is_beyond_host(card.in) || is_beyond_host(card.out))
      channel_->ask_for_meetings(Occasion::devices, plan.is_joint);
  } else {
    route = meet(card, request, plan, call);
    if (route == Route::device && !devices_.channel) {
      open_device(request.in);
      if (devices_.are_shared) plans_->forget(plan);
      card = device_card(request, plan, call);  // the channel's device is known only now
      route = meet(card, request, plan, call);
    }
  }
  if (route == Route::device && devices_.are_shared && !reach(card, request, plan, route))
    route = Route::staged;
  if (route == Route::device && may_map(plan) &&
      Devices::are_mappable(*channel_, group_.size, request, named_) &&
      reach(card, request, plan, Route::device_mapped))
    route = Route::device_mapped;
  else if (devices_.channel && ++idle_calls_ % kIdleCalls == 0)
    devices_.tidy_up();
  while (is_on_device(route)) {
    const Engine engine =
        plans_->path(plan, route, group_.findings(), devices_.channel.get()).choice.engine;
    if (!is_driven_by_host(engine) || devices_.channel->has(engine) || reserve(engine, plan)) break;
  }
  if (is_on_device(route) && plan.signature.count > kMostElements &&
      !is_driven_by_host(
          plans_->path(plan, route, group_.findings(), devices_.channel.get()).choice.engine))
    route = Route::staged;  // too much for a kernel
  Path& path = plans_->path(plan, route, group_.findings(), devices_.channel.get());
  if (is_on_device(route)) {
    path.arguments.mapped = mapped_.data();
    return run_path(path, plan, route, request.in, request.out);
  }

  const void* from = request.in;
  void* to = request.out;
  const DeviceBackend* const device = devices_.backend;
  const Memory in = card.in, out = card.out;
  if (is_beyond_host(in)) {
    void* const copy = staged_in_.get(*device, plan.bytes);
    device->copy(copy, request.in, plan.bytes);
    from = copy;
  }
  if (is_beyond_host(out)) to = staged_out_.get(*device, plan.out_bytes);
  run_path(path, plan, route, from, to);
  if (is_beyond_host(out) && plan.out_bytes > 0) device->copy(request.out, to, plan.out_bytes);
  staged_in_.trim();
  staged_out_.trim();
}

void Communicator::meet(const Card& card, bool looks_ahead) {
  channel_->present(card);
  if (looks_ahead && devices_.channel) devices_.channel->look_ahead();
  const auto step = [&](int polls) {
    int absent = channel_->absent();
    for (int poll = 0; absent >= 0 && poll < polls; ++poll) {
      relax();
      absent = channel_->absent();
    }
    return absent < 0 ? kDone : absent;
  };
  wait_for_ranks(step, spin_);
}

Card Communicator::device_card(const Request& request, const Plan& plan, const DeviceCall& call) {
  Card card = devices_.card(request, call);
  if (!devices_.channel) return card;
  if (devices_.are_shared) {
    if (is_in_the_way(request, plan)) card.is_contended = true;
    devices_.channel->show(card, buffers_of(request, plan));
    devices_.channel->wait_until_settled();
  } else if (may_map(plan)) {
    const ShownBuffers buffers = mappable_buffers(request, plan);
    if (buffers.in != nullptr) devices_.channel->show(card, buffers);
  }
  return card;
}

/// Whether the result lies where it must not: on shared devices.
bool Communicator::is_in_the_way(const Request& request, const Plan& plan) const {
  return devices_.are_shared && !devices_.channel->keeps_results_aside() &&
         is_scattered_over_input(request, plan.bytes, plan.out_bytes);
}

ShownBuffers Communicator::buffers_of(const Request& request, const Plan& plan) const {
  return {request.in, request.out, plan.bytes, plan.out_bytes_of(group_.rank)};
}

/// Those that kernels of other devices are to work on, or none.
ShownBuffers Communicator::mappable_buffers(const Request& request, const Plan& plan) const {
  const bool is_aligned = (reinterpret_cast<std::uintptr_t>(request.in) |
                           reinterpret_cast<std::uintptr_t>(request.out)) %
                              kDeviceUnit ==
                          0;
  if (is_scattered_over_input(request, plan.bytes, plan.out_bytes) ||
      (!is_aligned && group_.config.map == Config::Map::automatic))
    return {};
  ShownBuffers buffers = buffers_of(request, plan);
  if (is_scatter(request.collective)) buffers.out = nullptr;  // stored by their own rank
  return buffers;
}

/// Whether kernels are to work on the buffers of all ranks, if these can be mapped. The same on all
/// ranks.
bool Communicator::may_map(const Plan& plan) const {
  return plan.is_mappable_on_device && !devices_.are_shared && devices_.channel &&
         devices_.channel->can_map();
}

/// After the meeting with `card`, which may be followed by another one: finds out where the buffers
/// are that this rank's kernels are to reach, of all ranks on its device or of all there are. False
/// (on all ranks alike): kernels cannot serve the call on `route`.
bool Communicator::reach(Card& card, const Request& request, Plan& plan, Route route) {
  if (!plans_->can_use(plan, route, group_.findings(), devices_.channel.get())) return false;
  const bool has_news = named_.has_news(*channel_, group_.size);
  card.is_reached = devices_.channel->reach(*channel_, request.in, request.out, mapped_);
  if (!has_news) {
    if (!card.is_reached) throw Error(Code::device, "another rank's buffers are gone");
    return true;
  }
  meet(card);
  bool is_reached = true;
  for (int rank = 0; rank < group_.size; ++rank)
    is_reached = is_reached && channel_->card(rank).is_reached;
  if (!is_reached) named_.refuse_news();
  return is_reached;
}

Route Communicator::meet(Card& card, const Request& request, const Plan& plan,
                         const DeviceCall& call) {
  // A kernel that lingers belongs to the call that was there first: other threads' leave it alone.
  meet(card, /*looks_ahead=*/call.is_first());
  // Kernels of calls that the host drives see a slice at a time.
  std::uint64_t elements = plan.signature.count;
  if (elements > kMostElements &&
      is_driven_by_host(plans_->choose(plan, Route::device, group_.findings()).engine))
    elements = 0;
  return devices_.route(*channel_, group_.size, request, elements, named_);
}

/// The first call for such an engine; all ranks have met.
bool Communicator::reserve(Engine engine, Plan& plan) {
  std::string why;
  if (devices_.channel->reserve(engine, why)) {
    plans_->forget(plan);  // slices may be longer now
    return true;
  }
  if (group_.rank == 0 && !why.empty())
    log_once(Config::Log::warn,
             engine == Engine::copy
                 ? "large reductions of GPU buffers do without copy engines: " + why
                 : "TRIB_ENGINE=gemv is left out: " + why);
  plans_->do_without(engine, plan);
  return false;
}

/// Whether kernels may fold over each device's ranks first.
bool Communicator::may_share(const Level& device_of, std::string& why) const {
  why.clear();
  if (std::string_view(group_.config.algorithm) != "auto")
    why = "ranks share GPUs, and TRIB_ALGORITHM names an algorithm";
  else if (group_.config.determinism == Config::Determinism::order && domains(device_of) > 1)
    why = "ranks share GPUs, and TRIB_DETERMINISM=order asks for sums in rank order";
  return why.empty();
}

/// Collective. `pointer`: into memory of this rank's device.
void Communicator::open_device(const void* pointer) {
  std::string why;
  auto channel = devices_.backend->open(*bootstrap_, group_.config, pointer, why);
  if (channel) {
    const Level device_of = channel->device_of();
    if (device_of.empty() || may_share(device_of, why)) {
      change_devices([&] {
        devices_.are_shared = devices_.may_open_of_requests = !device_of.empty();
        group_.set_device_of(device_of);
        devices_.channel = std::move(channel);
      });
      return adopt(Key::Place::device);
    }
  }
  devices_.are_refused = true;
  if (group_.rank == 0)
    log_once(Config::Log::warn, "reductions of GPU buffers go through host memory: " + why);
}

/// Collective: the same, for nonblocking and persistent reductions.
void Communicator::open_device_of_requests(const void* pointer) {
  if (!devices_.channel) {
    open_device(pointer);
    if (devices_.are_shared) plans_->forget();
  }
  if (!std::exchange(devices_.may_open_of_requests, false)) return;
  // In the same context as the first one: `pointer` may be another device's.
  void* memory = nullptr;
  try {
    memory = devices_.channel->allocate(1);
  } catch (const Error&) {
    // Other ranks go on: open() tells them if this one cannot.
  }
  std::string why;
  auto channel =
      devices_.backend->open(*bootstrap_, group_.config, memory != nullptr ? memory : pointer, why);
  if (memory != nullptr) devices_.channel->free(memory);
  if (channel && channel->device_of() != group_.device_of()) {
    channel.reset();
    why = "ranks came with other GPUs than before";
  }
  if (!channel && group_.rank == 0)
    log_once(Config::Log::warn,
             "nonblocking and persistent reductions of GPU buffers go through host memory: " + why);
  change_devices([&] { devices_.own_of_requests = std::move(channel); });
}

/// The background may be looking at them, in another thread.
template <class Change>
void Communicator::change_devices(Change&& change) {
  if (background_)
    background_->while_still(change);
  else
    change();
}

inline void Communicator::wait(Operation& operation, bool is_devices) {
  wait(operation, is_devices, is_devices ? kFirstSpinDevice : spin_, *channel_);
}

inline void Communicator::wait(Operation& operation, bool is_devices, int spin,
                               HostChannel& channel) {
  if (!operation.advance(spin))
    wait_until([&](int polls) { return operation.advance(polls) ? kDone : operation.blocked_on(); },
               [&](int peer) { diagnose(channel, operation, peer, group_.rank, group_.size); },
               [&](int peer) { check_alive(channel, operation, peer); },
               [&] { return operation.is_guessing(); }, is_devices);
  if (group_.is_crowded) [[unlikely]]
    channel_->wake_waiting();
}

/// Repeats `step(polls)` until it gives kDone; it gives the rank that it waits for, or -1.
template <class Step>
void Communicator::wait_for_ranks(Step&& step, int spin) {
  if (step(spin) != kDone)
    wait_until(
        step, [&](int peer) { channel_->diagnose(peer, 0); },
        [&](int peer) { channel_->check_alive(peer); }, [] { return false; },
        /*is_devices=*/false);
  if (group_.is_crowded) [[unlikely]]
    channel_->wake_waiting();
}

std::atomic<int> Communicator::naps_left = 0;

/// Whether to sleep in this wait.
bool Communicator::is_nap_due() {
  if (naps_left.load(std::memory_order_relaxed) <= 0) return false;
  naps_left.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

/// Yields the core, and sees how long it takes to get it back.
void Communicator::yield_and_look() {
  const auto start = Clock::now();
  ::sched_yield();
  if (Clock::now() - start > kSlowYield) naps_left.store(kNaps, std::memory_order_relaxed);
}

/// `is_guess`: whether that rank is as good as any other. `is_devices`: a device is to do it, which
/// wakes nobody.
template <class Step, class Diagnose, class CheckAlive, class IsGuess>
void Communicator::wait_until(Step&& step, Diagnose&& diagnose, CheckAlive&& check_alive,
                              IsGuess&& is_guess, bool is_devices) {
  const auto start = Clock::now();
  auto alive_at = start;
  const bool may_nap = group_.is_crowded && !is_devices;
  const int polls = group_.is_crowded ? 1 : kPollsPerYield;
  auto nap = kFirstNap;
  bool is_woken = true;
  for (std::uint32_t round = 1;; ++round) {
    const bool is_napping = may_nap && is_nap_due();
    // Open MPI yields where it finds nothing to do.
    if (!is_napping || !is_woken) drive();
    if (may_nap && !is_napping) {
      channel_->wake_waiting();  // others may sleep
      yield_and_look();
    } else if (!may_nap) {
      ::sched_yield();
    }
    const int peer = step(polls);
    if (peer == kDone) return;
    if (is_napping || round % 64 == 0) {
      const auto now = Clock::now();
      const double waited = std::chrono::duration<double>(now - start).count();
      try {
        diagnose(peer);
        if (now - alive_at > kAliveInterval) {
          alive_at = now;
          check_alive(peer);
        }
      } catch (const Error&) {
        const int still = step(polls);
        if (still == kDone) return;
        // Otherwise it did its part before it failed or left.
        if (still == peer || is_guess()) throw;
      }
      check_time(peer, waited);
    }
    if (!is_napping) continue;
    const std::uint32_t ticket = channel_->show_wait(peer);
    const int still = step(1);
    channel_->wake_waiting();  // who waits for what this rank has done so far
    if (still == peer) {
      is_woken = channel_->sleep(ticket, nap);
      nap = is_woken ? kFirstNap : std::min(2 * nap, kLongestNap);
    } else {
      channel_->end_wait();
      if (still == kDone) return;
    }
  }
}

void Communicator::check_time(int peer, double waited) const {
  if (group_.config.timeout > 0 && waited > group_.config.timeout &&
      !is_patient_.load(std::memory_order_relaxed))
    throw Error(Code::timeout,
                "rank " + std::to_string(peer) +
                    " did not arrive within TRIB_TIMEOUT=" + seconds(group_.config.timeout) + " s");
}

/// What everyone who waits does for others.
void Communicator::drive() {
  // The peer may be held up by a message that only our MPI can move, ...
  bootstrap_->progress();
  // ... or by a reduction that it waits for and we do not.
  Background::progress_all();
}

// ----------------------------------------------------------------------------------- in the
// background

bool Communicator::open_background() {
  check_usable();
  try {
    if (!background_)
      background_ = std::make_unique<Background>(group_, *channel_, *bootstrap_, devices_);
    return background_->open_lanes();
  } catch (...) {
    fail();
  }
}

namespace {
/// The 1st, 16th, 256th, ... of `posts`: a program that puts its buffers on devices later costs a
/// look now and then.
bool is_time_to_settle(std::uint64_t posts) {
  return std::has_single_bit(posts) && std::countr_zero(posts) % 4 == 0;
}
}  // namespace

void Communicator::settle_devices() {
  check_usable();
  wants_to_settle_ = false;
  if (is_settled()) return;
  try {
    // The call that this is a part of may wait as long as it likes: it is not ours.
    is_patient_ = true;
    Signature signature;
    signature.collective = static_cast<std::uint8_t>(Collective::allreduce);
    signature.hash = 2;
    channel_->announce(signature);
    // The program may have freed it.
    const void* const posted = posted_on_device_.load(std::memory_order_relaxed);
    const std::int32_t has_posted =
        posted != nullptr && is_beyond_host(devices_.backend->where(posted)) ? 1 : 0;
    const bool have_all = add_words(Collective::allreduce, 0, has_posted) == group_.size;
    is_patient_ = false;
    if (!have_all) return;
    open_device_of_requests(posted);
    if (devices_.channel) meets_ = true;
  } catch (...) {
    fail();
  }
}

void Communicator::post(Task& task, const Request& request) {
  check_usable();
  if (may_use_devices_ && is_time_to_settle(++posts_)) [[unlikely]]
    wants_to_settle_ = !is_settled();
  task.request_ = request;
  task.request_.form = Form::nonblocking;
  std::size_t count = request.count;
  if (request.collective == Collective::reduce_scatter) {
    keep_counts(task);
    count = 0;
    for (const std::int64_t part : task.counts_) count += static_cast<std::size_t>(part);
  } else if (request.collective == Collective::reduce_scatter_block) {
    count *= static_cast<std::size_t>(group_.size);
  }
  task.bytes_ = count * bytes(request.dtype);
  // Mostly they are the last post's: to share them anew would cost more than the look.
  if (task.findings_ != group_.shared_findings()) task.findings_ = group_.shared_findings();
  if (task.bytes_ == 0) {
    background_->announce(plans_->find(task.request_).signature, meets_in_background());
    return count_empty(task.request_);
  }
  task.meets_ = meets_in_background() && devices_.can_serve(request, count);
  try {
    stage(task);
    background_->post(task);
  } catch (...) {
    fail();
  }
}

/// Takes a copy of recvcounts, which the caller may change.
void Communicator::keep_counts(Task& task) const {
  Request& request = task.request_;
  if (request.collective != Collective::reduce_scatter) return;
  task.counts_.resize(static_cast<std::size_t>(group_.size));
  for (int rank = 0; rank < group_.size; ++rank)
    task.counts_[static_cast<std::size_t>(rank)] = static_cast<std::int64_t>(request.counts[rank]);
  request.counts = {task.counts_.data(), 8};
}

/// Ranks meet here: those that disagree must not enter different collective calls.
std::unique_ptr<Task> Communicator::prepare(const Request& request, const Hints& hints) {
  check_usable();
  auto task = std::make_unique<Task>();
  task->request_ = request;
  task->request_.form = Form::persistent;
  keep_counts(*task);
  try {
    channel_->announce(plans_->find(task->request_).signature);
    const auto step = [&](int) {
      const int missing = channel_->missing();
      return missing < 0 ? kDone : missing;
    };
    wait_for_ranks(step, 1);
    settle(*task);
    std::optional<Choice> way;
    // What goes by shared devices, or is staged, keeps the bits of blocking calls.
    const bool is_on_host = !task->meets_ && task->mapped_.empty() && !task->is_staged_;
    if (is_on_host || (task->meets_ && !devices_.are_shared))
      way = tune_for(task->request_, task->meets_, hints);
    else if (group_.rank == 0 && (hints.is_explicit || hints.way.algorithm[0] != '\0'))
      log_once(Config::Log::warn,
               "trib_tune and trib_algorithm are ignored for buffers on GPUs that ranks share, in "
               "shared heaps, or staged through host memory");
    if (way && task->meets_) {
      task->mapped_.clear();
      task->hold_.reset();
    }
    task->findings_ = group_.shared_findings();
    if (!background_)
      background_ = std::make_unique<Background>(group_, *channel_, *bootstrap_, devices_);
    if (!background_->prepare(*task, way)) {
      if (group_.rank == 0)
        log_once(Config::Log::warn,
                 "no shared memory for more persistent reductions: they are left to the MPI");
      return nullptr;
    }
  } catch (...) {
    fail();
  }
  return task;
}

/// What ranks tell each other of a persistent reduction, whose buffers stay where they are.
struct Communicator::Part {
  Card card;
  bool can_serve;  ///< on a device
  bool may_turn;
};

/// Collective: finds out where a persistent reduction is to run.
void Communicator::settle(Task& task) {
  const Request& request = task.request_;
  if (!devices_.are_in_use && devices_.backend != nullptr)
    devices_.are_in_use = devices_.backend->is_in_use();
  DeviceCall none;
  Plan& plan = plans_->find(request);
  Part mine{devices_.card(request, none), devices_.can_serve(request, plan.signature.count),
            (!background_ || background_->turning_lanes() < Background::kTurningLanes) &&
                channel_->has_ample_memory()};
  if (plan.is_mappable) {
    const Card card = heap_card(request, plan);
    mine.card.in_at = card.in_at;
    mine.card.out_at = card.out_at;
  }
  std::vector<Part> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);
  task.meets_ = settle_on_device(request, plan, all);
  if (task.meets_ && devices_.are_shared && is_in_anyones_way(request, plan)) task.meets_ = false;
  if (task.meets_) hold(task, plan);
  // Where ranks share devices, one works on the buffers of others.
  if (task.meets_ && devices_.are_shared && !task.hold_) task.meets_ = false;
  task.is_staged_ = !task.meets_ && std::any_of(all.begin(), all.end(), [](const Part& part) {
    return is_beyond_host(part.card.in) || is_beyond_host(part.card.out);
  });
  // Each rank may have dismissed others by now.
  task.may_turn_ =
      std::all_of(all.begin(), all.end(), [](const Part& part) { return part.may_turn; });
  const auto card_of = [&](int rank) { return all[static_cast<std::size_t>(rank)].card; };
  if (!task.meets_ && (!plan.is_mappable || !map(plan, card_of, task.mapped_)))
    task.mapped_.clear();
}

/// Collective, once devices are open: only they can say. Whether is_in_the_way() on any rank.
bool Communicator::is_in_anyones_way(const Request& request, const Plan& plan) {
  const char mine = is_in_the_way(request, plan);
  std::vector<char> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);
  return std::any_of(all.begin(), all.end(), [](char any) { return any != 0; });
}

/// Collective: lets kernels of other ranks use the task's buffers, if they gain by it or cannot do
/// without.
void Communicator::hold(Task& task, const Plan& plan) {
  const Request& request = task.request_;
  ShownBuffers buffers;
  if (devices_.are_shared) {
    buffers = buffers_of(request, plan);
    if (buffers.out_bytes == 0) buffers.out = nullptr;
    if (buffers.out != nullptr && devices_.where(request.out, request.dtype) != Memory::device)
      buffers = {};
  } else if (may_map(plan)) {
    buffers = mappable_buffers(request, plan);
  } else {
    return;
  }
  if (devices_.where(request.in, request.dtype) != Memory::device) buffers = {};
  task.hold_ = devices_.of_requests()->hold(buffers, task.mapped_);
  if (!task.hold_) return task.mapped_.clear();
  // Of its own, the kernel uses those, too, that no peer is to see.
  task.mapped_[static_cast<std::size_t>(group_.rank)] = {const_cast<void*>(request.in),
                                                         request.out};
}

/// Collective: whether it may run on the ranks' devices.
bool Communicator::settle_on_device(const Request& request, Plan& plan,
                                    const std::vector<Part>& parts) {
  bool is_any_beyond = false;
  for (const Part& part : parts) {
    for (const Memory memory : {part.card.in, part.card.out}) {
      is_any_beyond = is_any_beyond || is_beyond_host(memory);
      if (memory == Memory::host || memory == Memory::distant) return false;
    }
    if (!part.card.is_ready || !part.can_serve) return false;
  }
  if (!is_any_beyond || plan.bytes == 0) return false;
  open_device_of_requests(request.in);
  return devices_.of_requests() != nullptr;
}

namespace {

/// Seconds that this process has measured for, not counting what it was asked for request by
/// request.
std::atomic<double> seconds_of_tuning{0};

/// On devices shorter vectors go by kernels that linger, and what is measured does not: two H100,
/// persistent allreduce of 16 bytes, 9.3 and 11.5 us where it was tuned, 8.0 and 9.0 by default.
constexpr std::size_t kLeastTunedOnDevice = 64 << 10;

/// Where tuning is switched off, and a request asks for it all the same.
constexpr long kUsualBudgetMs = 100;

/// What a rank brings along to tune_for().
struct Wish {
  Hints hints;
  bool is_contended = false;  // another call on a device is under way, or work of the program
  double seconds_of_tuning = 0;
};

/// Where all ranks name the same way: that.
const Variant* common_way(const std::vector<Wish>& wishes) {
  const Variant& way = wishes[0].hints.way;
  for (const Wish& wish : wishes)
    if (std::strcmp(wish.hints.way.algorithm, way.algorithm) != 0 ||
        wish.hints.way.slice_bytes != way.slice_bytes) {
      log_once(Config::Log::warn, "trib_algorithm is ignored: the ranks pass different values");
      return nullptr;
    }
  return way.algorithm[0] == '\0' ? nullptr : &way;
}

}  // namespace

/// Ranks agree on all of it. Nothing: the tables are to be asked, which may know more now.
std::optional<Choice> Communicator::tune_for(const Request& request, bool is_on_device,
                                             const Hints& hints) {
  Plans sketch(group_, *channel_, 1, /*has_no_data=*/true);
  const Plan& plan = sketch.find(request);
  if (plan.bytes == 0) return {};
  const Config& config = group_.config;
  DeviceCall call;
  if (is_on_device) call.begin();
  Wish mine{hints, is_on_device && (!call.is_first() || !devices_.of_requests()->is_settled()),
            seconds_of_tuning};
  if (mine.hints.budget_ms < 0)
    mine.hints.budget_ms = static_cast<double>(
        config.tune_budget_ms > 0 || !hints.is_explicit ? config.tune_budget_ms : kUsualBudgetMs);
  std::vector<Wish> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);

  const Key key = sketch.key_of(plan, is_on_device ? Route::device : Route::host);
  if (const Variant* const way = common_way(all)) {
    Choice choice = select(key, config);
    if (std::strcmp(way->algorithm, "default") != 0) choice.algorithm = way->choice().algorithm;
    if (way->slice_bytes > 0) choice.slice_bytes = way->slice_bytes;
    if (choice.algorithm != nullptr && choice.algorithm->serves(request.collective) &&
        (config.determinism != Config::Determinism::order ||
         association_of(*choice.algorithm, key) == Association::rank_order))
      return choice;
    log_once(Config::Log::warn,
             "trib_algorithm=" + std::string(way->algorithm) + " is ignored: it does not serve " +
                 std::string(name(request.collective)) + ", or TRIB_DETERMINISM forbids it");
    return {};
  }

  bool is_explicit = true, is_again = true, is_contended = false;
  double budget = mine.hints.budget_ms, spent = 0;
  for (const Wish& wish : all) {
    budget = std::min(budget, wish.hints.budget_ms);
    is_explicit = is_explicit && wish.hints.is_explicit;
    is_again = is_again && wish.hints.is_again;
    is_contended = is_contended || wish.is_contended;
    spent = std::max(spent, wish.seconds_of_tuning);
  }
  budget /= 1000;
  // With more ranks than cores it would be the scheduler that is measured, and where the program
  // has something under way on its device, that. Kernels of two calls could wait for each other:
  // see DeviceCall.
  if (budget <= 0 || group_.is_crowded || is_contended || !is_tunable(config) ||
      plan.bytes > kMostTunedBytes)
    return {};
  if (is_on_device && !is_explicit && plan.bytes < kLeastTunedOnDevice) return {};
  if (!is_explicit &&
      spent + budget > kBudgetsPerProcess * static_cast<double>(config.tune_budget_ms) / 1000)
    return {};
  if (!is_again && group_.findings().has_row(key, config)) return {};

  const auto begin = Clock::now();
  const int spin = is_on_device ? kFirstSpinDevice : spin_;
  std::optional<Record> record =
      tune({group_, *channel_, *bootstrap_, is_on_device ? devices_.of_requests() : nullptr,
            [&](Operation& operation, HostChannel& channel) {
              wait(operation, is_on_device, spin, channel);
            }},
           request, budget);
  if (!is_explicit)
    seconds_of_tuning.fetch_add(std::chrono::duration<double>(Clock::now() - begin).count());
  if (!record) return {};
  group_.set(group_.findings().with(record->finding));
  record->machine = machine_of(devices_.backend, key.place);
  TuningFile::of(config.tuning_file).add(*record, /*is_writer=*/group_.rank == 0);
  if (group_.rank == 0 && is_logged(Config::Log::info)) {
    const Finding& finding = record->finding;
    log(Config::Log::info, "tuned " + std::string(name(finding.collective)) + " of " +
                               std::to_string(finding.bytes) +
                               " bytes: " + (finding.is_default ? "the default, " : "") +
                               finding.best.algorithm + ", " + seconds(finding.seconds * 1e6) +
                               " us (default: " + seconds(finding.default_seconds * 1e6) + " us)");
  }
  return {};
}

void Communicator::start(Task& task) {
  check_usable();
  if (task.bytes_ == 0) return count_empty(task.request_);
  try {
    stage(task);
    background_->start(task);
  } catch (...) {
    fail();
  }
}

/// Says where the operation reads and writes: buffers on a device get copies in host memory, unless
/// ranks meet first.
inline void Communicator::stage(Task& task) {
  const Request& request = task.request_;
  task.in_ = request.in;
  task.out_ = request.out;
  task.fetched_bytes_ = 0;
  if (devices_.backend == nullptr || task.meets_) return;
  if (!devices_.are_in_use) {
    // A buffer that was in the host's memory before there was a device is there still.
    if (request.in == seen_in_ && request.out == seen_out_) [[likely]]
      return;
    if (task.is_on_host_) return;
    devices_.are_in_use = devices_.backend->is_in_use();
    if (!devices_.are_in_use) {
      seen_in_ = request.in;
      seen_out_ = request.out;
      task.is_on_host_ = request.form == Form::persistent;
      return;
    }
  }
  background_->stage(task);
  posted_on_device_.store(task.in_ != request.in ? request.in : nullptr, std::memory_order_relaxed);
}

/// What is left to do once `task` is done.
inline void Communicator::end(Task& task) {
  if (task.error_) [[unlikely]] {
    const Error error = *task.error_;
    task.error_.reset();
    throw error;
  }
  fetch(task);
}

void Communicator::fetch(Task& task) {
  if (task.fetched_bytes_ == 0 || task.error_) [[likely]]
    return;
  devices_.backend->copy(task.request_.out, task.out_, task.fetched_bytes_);
  task.fetched_bytes_ = 0;
  task.staged_in_.trim();
  task.staged_out_.trim();
}

bool Communicator::test(Task& task) {
  task.is_waited_for_at_once_ = false;
  if (background_) background_->look_at(task);
  if (!task.is_done() && background_->advance(task, 0) != kDone) {
    drive();
    if (!task.is_done()) {
      look_after(task);
      if (!task.is_done()) {
        // Programs that test in a loop would keep the core from those that they wait for.
        if (group_.is_crowded) ::sched_yield();
        return false;
      }
    }
  }
  end(task);
  return true;
}

void Communicator::look_after(Task& task, double waited) {
  if (background_) background_->look_at(task);
  const auto now = coarse_now();
  if (task.tested_ == Clock::time_point{}) task.tested_ = now;
  // Programs may test all the time, or seldom.
  if (++task.looks_ % 64 != 0 && now - task.looked_at_ < kLookInterval) return;
  task.looked_at_ = now;
  const int peer = background_->advance(task, 0);
  if (peer == kDone) return;
  try {
    background_->diagnose(task, peer);
    check_time(peer, std::max(waited, std::chrono::duration<double>(now - task.tested_).count()));
    if (now - task.alive_at_ < kAliveInterval) return;
    const bool is_first = task.alive_at_ == Clock::time_point{};
    task.alive_at_ = now;
    if (!is_first) background_->check_alive(task, peer);
  } catch (const Error& error) {
    // If it did its part before it left, this has got us on.
    const int still = background_->advance(task, 0);
    if (still == peer || (still != kDone && background_->is_guessing(task)))
      background_->fail(error);
  }
}

void Communicator::wait(Task& task) {
  if (background_) {
    task.is_waited_for_at_once_ = background_->is_last_started(task);
    background_->look_at(task);
  }
  if (background_ && background_->advance(task, spin_) != kDone) {
    try {
      wait_until([&](int polls) { return background_->advance(task, polls); },
                 [&](int peer) { background_->diagnose(task, peer); },
                 [&](int peer) { background_->check_alive(task, peer); },
                 [&] { return background_->is_guessing(task); }, task.meets_);
    } catch (...) {  // the task must not be under way any more
      fail();
    }
  }
  end(task);
}

void Communicator::dismiss(std::unique_ptr<Task> task) {
  if (background_) background_->dismiss(*task);
}

void Communicator::note_declined(Collective collective, int root, Form form, Decline reason) {
  if (!channel_) return;
  Signature signature;
  signature.collective = static_cast<std::uint8_t>(collective);
  signature.form = static_cast<std::uint8_t>(form);
  signature.declined = static_cast<std::int8_t>(reason);
  signature.hash = 1;
  if (form == Form::nonblocking) {
    if (can_post()) background_->announce(signature, meets_in_background());
    return;
  }
  channel_->announce(signature);
  const bool has_root = collective != Collective::reduce || (root >= 0 && root < group_.size);
  if (reason != Decline::user_operator || !has_root) return;
  try {
    add_words(collective, root, 0);
  } catch (...) {
    fail();
  }
}

/// Meets peers by a reduction of a word of each, and gives the sum. In a Reduce ranks that only
/// send need not wait, and get none: they may leave the MPI's own early, too, and there are
/// programs that count on it.
std::int32_t Communicator::add_words(Collective collective, int root, std::int32_t mine) {
  if (!meetings_) meetings_ = std::make_unique<Plans>(group_, *channel_, 1, /*has_no_data=*/true);
  std::int32_t all = 0;
  Request request;
  if (collective == Collective::reduce) {
    request.collective = Collective::reduce;
    request.root = root;
  }
  request.dtype = Dtype::i32;
  request.count = 1;
  Plan& plan = meetings_->find(request);
  Path& path = meetings_->path(plan, Route::host, group_.findings());
  path.arguments.in = &mine;
  path.arguments.out = &all;
  wait(path.loaded->program->launch(path.arguments), /*is_devices=*/false);
  return all;
}

/// In a handler: with the exception that it has caught.
void Communicator::fail() {
  try {
    throw;
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {  // out of memory, say
    fail(Error(Code::system, error.what()));
  }
}

void Communicator::fail(const Error& error) {
  give_up(error);
  throw error;
}

void Communicator::give_up(const Error& error) noexcept {
  {
    // Several threads may come here at once, with requests of their own. None leaves before peers
    // can see that this rank failed.
    const std::lock_guard lock(failure_mutex_);
    if (!has_failed_.load(std::memory_order_relaxed)) {
      try {
        const bool is_known = background_ && background_->has_failed();
        failure_ = is_known ? background_->failure() : error.what();
      } catch (const std::bad_alloc&) {
        failure_ = "out of memory";  // short enough to need none
      }
      has_failed_.store(true, std::memory_order_release);
      if (channel_) channel_->poison(failure_);
      devices_.poison(failure_);
    }
  }
  if (background_) background_->fail(error);
}

/// The first large call. It meets on the small segment first: ranks that disagree must not enter
/// different collective calls.
void Communicator::reserve_data(Plan& plan, Route route) {
  const auto step = [&](int) {
    const int missing = channel_->missing();
    return missing < 0 ? kDone : missing;
  };
  wait_for_ranks(step, 1);
  if (channel_->reserve_data()) {
    plans_->forget(plan);  // programs can be bound to it now
  } else {
    if (group_.rank == 0)
      log_once(
          Config::Log::warn,
          "no shared memory for large messages (64 MiB per rank at most, or /dev/shm is full): "
          "they go in small pieces");
    plans_->do_without_data(plan);
  }
  plans_->path(plan, route, group_.findings());
}

// ------------------------------------------------------------------------------------------- setup

namespace {

std::uint64_t read_node_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  text += host;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

std::uint64_t node_identity() {
  static const std::uint64_t identity = read_node_identity();
  return identity;
}

struct Introduction {
  bool is_ready;  // the backends could be loaded
  bool has_device_backend;
  bool is_amid_crowd;
  bool uses_device;  // meetings from the first call on
  std::uint64_t node;
  cpu_set_t cores;
  Config config;
};

}  // namespace

Communicator::Communicator(std::unique_ptr<Bootstrap> bootstrap, const Config& config,
                           bool is_amid_crowd)
    : bootstrap_(std::move(bootstrap)) {
  group_.rank = bootstrap_->rank();
  group_.size = bootstrap_->size();
  group_.config = config;
  if (group_.size < 2) {
    declined_ = Decline::single_rank;
    return;
  }
  Introduction mine{};
  // What may fail on this rank alone must fail before the others wait for it.
  std::string why;
  try {
    host_backend();
    devices_.backend = device_backend();
    devices_.are_in_use = devices_.backend != nullptr && devices_.backend->is_in_use();
    mine.uses_device = devices_.are_in_use;
    mine.has_device_backend = devices_.backend != nullptr;
    mine.is_ready = true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  mine.is_amid_crowd = is_amid_crowd;
  mine.node = node_identity();
  if (::sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0)
    std::memset(&mine.cores, 0xff, sizeof mine.cores);
  mine.config = config;
  std::vector<Introduction> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);

  group_.config = trib::adopt(config, all[0].config);
  may_use_devices_ = std::all_of(
      all.begin(), all.end(), [](const Introduction& other) { return other.has_device_backend; });
  devices_.are_refused = group_.config.device == Config::Device::off;
  for (const std::string& line : differences(config, all[0].config))
    log_once(Config::Log::warn, line + ": rank 0's value is used");
  cpu_set_t cores;
  CPU_ZERO(&cores);
  int ranks_here = 0;
  std::vector<cpu_set_t> bindings;
  std::map<std::uint64_t, int> nodes;
  for (const Introduction& other : all) {
    group_.node_of.push_back(
        nodes.try_emplace(other.node, static_cast<int>(nodes.size())).first->second);
    bindings.push_back(other.cores);
    meets_ = meets_ || other.uses_device;
    if (other.node != mine.node) continue;
    ++ranks_here;
    CPU_OR(&cores, &cores, &other.cores);
    group_.is_crowded = group_.is_crowded || other.is_amid_crowd;
  }
  const bool is_crowd = CPU_COUNT(&cores) < ranks_here;
  group_.is_crowded = group_.is_crowded || is_crowd;
  spin_ = is_crowd ? kFirstSpinCrowded : kFirstSpin;
  if (!group_.config.enable) {
    declined_ = Decline::disabled;
    return;
  }
  if (nodes.size() > 1) {
    declined_ = Decline::spans_nodes;
    return;
  }
  // A wrong TRIB_ALGORITHM shows here, on all ranks, not when it is too late.
  check_choices(group_.config, group_.size);
  if (!std::all_of(all.begin(), all.end(),
                   [](const Introduction& other) { return other.is_ready; })) {
    declined_ = Decline::no_memory;
    log_once(Config::Log::warn, "all reductions are left to the MPI: " +
                                    (why.empty() ? "another rank has no backend" : why));
    return;
  }
  channel_ = host_backend().open(*bootstrap_, group_.config, why);
  if (!channel_) {
    declined_ = Decline::no_memory;
    if (group_.rank == 0)
      log_once(Config::Log::warn, "no shared memory, all reductions are left to the MPI: " + why);
    return;
  }
  // A rank that fails where the others go on to an exchange never comes there.
  bootstrap_->watch([this] { channel_->check_none_failed(); });
  group_.levels = agree_on_levels(*bootstrap_, group_.config, bindings);
  adopt(Key::Place::host);
  plans_ = std::make_unique<Plans>(group_, *channel_, kPlans, /*has_no_data=*/false);
}

/// Collective: rank 0's findings.
void Communicator::adopt(Key::Place place) {
  std::vector<Finding> rows = adopt_findings(*bootstrap_, group_.config, devices_.backend, place);
  const int nodes = group_.nodes();
  const std::uint64_t layout = layout_of(group_.levels);
  std::erase_if(rows,
                [&](const Finding& row) { return row.nodes != nodes || row.layout != layout; });
  group_.set(group_.findings().with(rows));
}

Communicator::~Communicator() = default;

std::vector<Served> Communicator::served() const {
  std::vector<Served> all;
  if (plans_) plans_->add_served(Form::blocking, all);
  if (background_) background_->add_served(all);
  for (int form = 0; form < kForms; ++form)
    for (int collective = 0; collective < kCollectives; ++collective)
      if (const auto calls =
              empty_calls_[static_cast<std::size_t>(form)][static_cast<std::size_t>(collective)];
          calls > 0)
        all.push_back(
            {static_cast<Collective>(collective), static_cast<Form>(form), "none", calls, 0, 0});
  return all;
}

namespace {

struct DeclineText {
  const char* name;
  const char* text;
};
constexpr DeclineText kDeclineTexts[kDeclines] = {
    {"disabled", "switched off by TRIB_ENABLE=0"},
    {"single_rank", "only one rank in the communicator"},
    {"intercommunicator", "intercommunicator"},
    {"user_operator", "user-defined operator"},
    {"derived_type", "derived or unsupported type"},
    {"undefined_op", "operator not defined on this type"},
    {"bad_argument", "arguments that the MPI has to judge"},
    {"spans_nodes", "ranks on several machines"},
    {"no_memory", "no shared memory"},
    {"not_set_up", "nonblocking, before a blocking call"},
    {"being_freed", "communicator that is being freed"},
    {"passed_by", "nonblocking, and MPI_Wait leads elsewhere"},
    {"of_session", "nonblocking, with a session open"},
};

}  // namespace

const char* name(Decline reason) { return kDeclineTexts[static_cast<int>(reason)].name; }
const char* text(Decline reason) { return kDeclineTexts[static_cast<int>(reason)].text; }

}  // namespace trib

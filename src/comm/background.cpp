// SPDX-License-Identifier: BSD-3-Clause
#include "comm/background.hpp"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "backend/reduce.hpp"
#include "comm/helper.hpp"
#include "comm/lane.hpp"
#include "comm/suspects.hpp"

namespace trib {

std::atomic<int> Background::count{0};

namespace {

/// Looks that a start takes at a peer, if the program waits for it next. Short operations are over
/// by then: 2 ranks on AMD Zen 4, 8 bytes, 4 to 5 % of 110 ns.
constexpr int kPollsOfStart = 8;

/// Bytes from which on a thread that is there for it (TRIB_PROGRESS=thread) does all of the work:
/// below, to wake it costs about as much as it takes off the caller.
constexpr std::size_t kHandedOver = 128 << 10;

/// Starts of persistent operations, whose buffers are mapped, between two looks whether what others
/// had shown is there still.
constexpr std::uint32_t kHeldStarts = 64;

/// All communicators that have lanes. Never destroyed: the helper looks at it until the end.
struct Registry {
  std::mutex mutex;
  std::vector<Background*> all;
};
Registry& registry() {
  static Registry& registry = *new Registry;
  return registry;
}

/// A caller that looks later than that at what it has begun does something else meanwhile.
constexpr auto kAtOnce = std::chrono::microseconds(5);

}  // namespace

Task::Task() = default;
Task::~Task() = default;

Background::Background(Group& group, HostChannel& main, Bootstrap& bootstrap, Devices& devices)
    : group_(group), main_(main), bootstrap_(bootstrap), devices_(devices) {
  spares_.reserve(kMostSpares);
  const std::lock_guard lock(registry().mutex);
  registry().all.push_back(this);
  count.fetch_add(1);
}

Background::~Background() {
  {
    const std::lock_guard lock(registry().mutex);
    std::erase(registry().all, this);
    count.fetch_sub(1);
  }
  const std::lock_guard lock(lock_);
  end_all(Error(Code::unusable, "the communicator is gone"));
}

/// Looks that a start or post takes for each step.
int Background::polls_of(const Task& task) {
  return task.is_waited_for_at_once_ ? kPollsOfStart : 0;
}

void Background::post(Task& task, bool is_first_meeting) {
  const std::lock_guard lock(lock_);
  if (has_failed()) throw Error(passed_on(failure_->code(), Code::unusable), failure_->what());
  const std::uint64_t number = count_post();
  if (is_first_meeting) task.meeting_ = Task::Meeting::first;
  if (asking_ != nullptr) [[unlikely]] {
    waiting_.push_back({&task, {}, number, false});
    task.lane_ = nullptr;
    task.rounding_ = Rounding::of_this_thread();
    return begin(task);
  }
  settle(task);
  enqueue(task, lane_of(number, is_in_first_lane(task)), polls_of(task));
}

/// Those for devices run one after the other, or else all but the first would be staged.
bool Background::is_in_first_lane(const Task& task) {
  return task.meeting_ == Task::Meeting::common || task.meeting_ == Task::Meeting::own;
}

/// Every post counts: ranks that disagree about one should not do so about the lanes of those
/// behind it.
std::uint64_t Background::count_post() {
  const std::uint64_t number = posts_++;
  main_.show_posts(posts_);
  return number;
}

void Background::announce(const Signature& signature, bool meets) {
  const std::lock_guard lock(lock_);
  const std::uint64_t number = count_post();
  if (asking_ != nullptr) [[unlikely]]
    waiting_.push_back({nullptr, signature, number, meets});
  else
    announce(signature, lane_of(number, meets || posts_have_devices()));
}

void Background::announce(const Signature& signature, Lane& lane) {
  if (lane.first != nullptr)
    lane.last->notes_.push_back(signature);
  else
    lane.channel->announce(signature);
}

/// Once it is known what came of the meetings before it.
void Background::settle(Task& task) {
  if (posts_have_devices() && task.may_meet_)
    task.meeting_ = Task::Meeting::own;
  else if (task.meeting_ == Task::Meeting::first)
    asking_ = &task;
}

void Background::start(Task& task) {
  const std::lock_guard lock(lock_);
  if (has_failed()) throw Error(passed_on(failure_->code(), Code::unusable), failure_->what());
  Lane& lane = *task.lane_;
  int polls = polls_of(task);
  // A short one that is waited for at once is mostly through before anyone could ask for it, and
  // then it was never under way.
  if (polls > 0 && lane.first == nullptr && !group_.is_crowded && !group_.config.stats &&
      task.bytes_ < kHandedOver && relaunch(lane, task)) {
    last_started_.store(&task, std::memory_order_relaxed);
    bool is_done = false;
    try {
      is_done = lane.operation->advance_one_pass(polls);
    } catch (const std::exception&) {
      // It is thrown once more below, where it is under way.
    }
    if (is_done) {
      lane.operation = nullptr;
      return;
    }
    polls = 0;
  }
  enqueue(task, lane, polls);
}

/// From here on it is under way.
void Background::begin(Task& task) {
  task.next_ = nullptr;
  task.error_.reset();
  if (group_.config.stats) task.begun_ = std::chrono::steady_clock::now();
  task.is_under_way_.store(true, std::memory_order_relaxed);
  under_way_.store(under_way_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  task.waited_.reset();
  if (task.meets_) {
    task.left_at_ = std::chrono::steady_clock::now();
    Helper::note_devices();
  }
}

void Background::enqueue(Task& task, Lane& lane, int polls) {
  task.lane_ = &lane;
  begin(task);
  if (lane.first != nullptr) {
    task.rounding_ = Rounding::of_this_thread();
    lane.last->next_ = &task;
    lane.last = &task;
    return;
  }
  lane.first = lane.last = &task;
  last_started_.store(&task, std::memory_order_relaxed);
  // Peers wait for the first step: everything else comes after it. The rest of what is long is left
  // to whoever waits, and to the helper: the caller may have something else to do.
  const Config::Progress mode = group_.config.progress;
  if (mode == Config::Progress::thread && task.bytes_ >= kHandedOver) {
    task.rounding_ = Rounding::of_this_thread();
    add_busy(lane);
    return Helper::get_eager().wake();
  }
  const Extent extent = mode == Config::Progress::calls ? Extent::all : Extent::one_pass;
  if (drive(lane, polls, extent, /*is_callers=*/true)) return;
  task.rounding_ = Rounding::of_this_thread();
  if (lane.first != nullptr) add_busy(lane);
  if (mode == Config::Progress::thread) {
    Helper::get_eager().wake();
  } else if (mode == Config::Progress::automatic) {
    if (!has_helper_) [[unlikely]] {
      has_helper_ = true;
      Helper::get();
    }
    const bool is_launched = lane.operation != nullptr && lane.operation->is_guessing();
    if (task.meets_ && !is_launched && is_left_alone_.load(std::memory_order_relaxed) &&
        !group_.is_crowded)
      Helper::get().hurry();
  }
}

void Background::note_first_look(Task& task) {
  const auto left = std::chrono::steady_clock::now() - task.left_at_;
  is_left_alone_.store(left > kAtOnce, std::memory_order_relaxed);
  task.left_at_ = {};
}

namespace {

void count_call(Lane& lane, const std::size_t bytes) {
  Loaded& loaded = *lane.path->loaded;
  ++loaded.calls;
  loaded.bytes += bytes;
}

}  // namespace

/// False: its peers have not all come to the meeting before it.
bool Background::launch(Lane& lane, Task& task) {
  DeviceChannel* const device = device_of(task);
  const bool is_met = task.meeting_ != Task::Meeting::none;
  if (!lane.has_begun) {
    if (!lane.has_own_plan) {
      lane.plan = &lane.plans.find(task.request_);
      lane.channel->announce(lane.plan->signature);
    }
    lane.absent = -1;
    lane.has_begun = true;
    lane.has_come = lane.meets_again = lane.is_settled = false;
    lane.staged_route.reset();
    if (task.meeting_ == Task::Meeting::common) lane.unsettled = device->unsettled();
  }
  if (is_met && !lane.has_come) {
    // Where another rank's kernel is to use its buffers, a copy that is still under way comes
    // first; copies for staging would wait for it as well.
    if (lane.unsettled) {
      ++lane.own_waits;
      if (!lane.unsettled->is_over()) return false;
      lane.unsettled.reset();
      lane.is_settled = true;
    }
    task.call_.begin();
    lane.card = card_of(lane, task);
    lane.channel->present(lane.card);
    lane.has_come = true;
    if (device != nullptr && task.call_.is_first()) device->look_ahead();
    if (!task.mapped_.empty() && ++held_starts_ % kHeldStarts == 0) device->tidy_up();
  }
  std::optional<Route> route = task.mapped_.empty() ? Route::host : Route::mapped;
  if (lane.staged_route) {
    route = lane.staged_route;
  } else if (is_met) {
    do {
      lane.absent = lane.channel->absent();
      if (lane.absent >= 0) return false;
      route = route_of(lane, task);
    } while (!route);
    if (!is_on_device(*route)) task.call_.end();
  }
  if (*route == Route::staged || (*route == Route::host && task.stages_late_)) {
    const Memory in = devices_.backend->where(task.request_.in);
    // The driver would wait for the program's default stream, and nobody for the MPI meanwhile.
    if (!lane.staged_route && is_beyond_host(in))
      lane.unsettled = devices_.backend->unsettled(task.request_.in);
    lane.staged_route = route;
    ++lane.own_waits;
    if (lane.unsettled && !lane.unsettled->is_over()) return false;
    lane.unsettled.reset();
    stage(task, in);
  }
  // Looked up again: the opener may have got ready between the look above and the card, which says
  // so.
  Path& path = lane.plans.path(*lane.plan, *route, *task.findings_, device_of(task));
  path.arguments.in = task.in_;
  path.arguments.out = task.out_;
  path.arguments.mapped = task.mapped_.empty() ? lane.mapped.data() : task.mapped_.data();
  lane.path = &path;
  lane.is_streamed = first_of(path.arguments.store) == Store::stream;
  lane.operation = &path.loaded->program->launch(path.arguments);
  const bool may_repeat = lane.has_own_plan && !is_met && path.binding;
  lane.done = may_repeat ? lane.operation : nullptr;
  count_call(lane, task.bytes_);
  return true;
}

/// A persistent task's operation, if that is as it was.
inline bool Background::relaunch(Lane& lane, const Task& task) {
  if (lane.done == nullptr || task.in_ != lane.path->arguments.in ||
      task.out_ != lane.path->arguments.out || !lane.done->repeat())
    return false;
  lane.operation = lane.done;
  count_call(lane, task.bytes_);
  return true;
}

/// Goes on with the lane's tasks. True: none is left.
inline bool Background::drive(Lane& lane, int polls, Extent extent, bool is_callers) noexcept {
  if (!group_.is_crowded) return go_on(lane, polls, extent, is_callers);
  const auto before = lane.where();
  const bool is_idle = go_on(lane, polls, extent, is_callers);
  if (lane.where() != before) main_.wake_waiting();
  return is_idle;
}

bool Background::go_on(Lane& lane, int polls, Extent extent, bool is_callers) noexcept {
  while (Task* const task = lane.first) {
    try {
      // Whichever thread this is: all parts of a result, on all ranks, get the caller's bits.
      std::optional<RoundingScope> as_caller;
      if (!is_callers) as_caller.emplace(task->rounding_);
      if (lane.operation == nullptr && !relaunch(lane, *task) && !launch(lane, *task)) return false;
      if (!(extent == Extent::all ? lane.operation->advance(polls)
                                  : lane.operation->advance_one_pass(polls))) {
        if (lane.is_streamed) store_fence();  // another thread may end what this one has begun
        return false;
      }
    } catch (const std::exception& error) {
      if (lane.place == Lane::kIdle) add_busy(lane);
      const auto* const known = dynamic_cast<const Error*>(&error);
      fail_all(known != nullptr ? *known
                                : Error(Code::system, error.what()));  // out of memory, say
      return false;
    }
    if (group_.config.stats)
      lane.path->loaded->seconds +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - task->begun_).count();
    lane.operation = nullptr;
    lane.has_begun = false;
    lane.first = task->next_;
    for (const Signature& note : task->notes_) lane.channel->announce(note);
    task->notes_.clear();
    finish(*task);
  }
  return true;
}

void Background::advance_lane(Lane& lane, int polls) noexcept {
  if (of_helper.is_this) [[unlikely]] {
    const auto before = lane.where();
    const bool is_idle = drive(lane, polls, Extent::all);
    // A device goes on by itself.
    const bool is_devices = lane.operation != nullptr && lane.operation->is_guessing();
    of_helper.has_moved = of_helper.has_moved || (lane.where() != before && !is_devices);
    if (!is_idle) return;
  } else {
    if (!drive(lane, polls, Extent::all)) return;
  }
  busy_.back()->place = lane.place;
  busy_[lane.place] = busy_.back();
  busy_.pop_back();
  lane.place = Lane::kIdle;
}

void Background::add_busy(Lane& lane) {
  lane.place = busy_.size();
  busy_.push_back(&lane);  // there is room: see make_room_for_busy()
}

/// For all lanes that there are, and some more: a task must not get lost for want of memory.
void Background::make_room_for_busy(std::size_t more) {
  const std::size_t lanes = lanes_.size() + own_lanes_.size() + more;
  if (lanes > busy_.capacity()) busy_.reserve(std::max(lanes, 2 * busy_.capacity()));
}

/// From here on the task may be gone.
void Background::finish(Task& task) {
  task.call_.end();
  // Release: pairs with is_done(); what the operation wrote comes with it.
  task.is_under_way_.store(false, std::memory_order_release);
  under_way_.store(under_way_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
}

/// Drives the lane that `task` is in, and returns it. Null: the task is done.
Lane* Background::advance_lane_of(const Task& task, int polls) {
  // One that waits for the answer to another's question is in that one's lane, until the answer has
  // come: its own has not been driven then.
  for (const Lane* driven = nullptr; !task.is_done();) {
    Lane& lane = lane_of(task);
    if (&lane == driven) return &lane;
    driven = &lane;
    advance_lane(lane, polls);
  }
  return nullptr;
}

int Background::advance_slowly(const Task& task, int polls) {
  const std::lock_guard lock(lock_);
  const Lane* const lane = advance_lane_of(task, polls);
  if (lane == nullptr) return kDone;
  return lane->operation != nullptr ? lane->operation->blocked_on() : lane->absent;
}

void Background::diagnose(const Task& task, int peer) {
  const std::lock_guard lock(lock_);
  // Another thread that waits for a task of this lane, or this one for another of them, may have
  // been here before. What is seen twice proves only something if nothing was there to be had in
  // between.
  Lane* const found = advance_lane_of(task, 0);
  if (found == nullptr) return;
  Lane& lane = *found;
  if (lane.operation != nullptr)
    trib::diagnose(*lane.channel, *lane.operation, lane.operation->blocked_on(), group_.rank,
                   group_.size);
  else
    lane.channel->diagnose(lane.absent, 0);
  if (task.own_lane_ == nullptr) main_.check_order(peer);  // starts may come in any
  main_.check_none_failed();  // a rank may have failed before it had this lane
}

void Background::check_alive(const Task& task, int peer) {
  const std::lock_guard lock(lock_);
  if (task.is_done()) return;
  Lane& lane = lane_of(task);
  if (lane.operation != nullptr)
    trib::check_alive(*lane.channel, *lane.operation, peer);
  else
    lane.channel->check_alive(peer);
}

bool Background::is_guessing(const Task& task) {
  const std::lock_guard lock(lock_);
  const Operation* const operation = task.is_done() ? nullptr : lane_of(task).operation;
  return operation != nullptr && operation->is_guessing();
}

std::uint64_t Background::where(const Task& task) {
  const std::lock_guard lock(lock_);
  if (task.is_done()) return 0;
  const Lane& lane = lane_of(task);
  const bool is_known = lane.operation != nullptr && !lane.operation->is_guessing();
  // No peer is waited for while it waits for its own program: that has no limit.
  return reinterpret_cast<std::uintptr_t>(lane.first) * 0x9e3779b97f4a7c15u + lane.own_waits +
         (is_known ? lane.operation->position() + 1 : 0);
}

void Background::fail(const Error& error) noexcept {
  const std::lock_guard lock(lock_);
  fail_all(error);
}

void Background::fail_all(const Error& its) noexcept {
  const Error error = cause_of(main_, its);
  if (!has_failed()) {
    failure_ = error;
    has_failed_.store(true, std::memory_order_release);
    main_.poison(*failure_);
    for (const auto& lane : lanes_) lane->channel->poison(*failure_);
    for (Lane* const lane : own_lanes_) lane->channel->poison(*failure_);
    devices_.poison(*failure_);
    if (DeviceChannel* const own = opener_ ? opener_->channel() : nullptr) own->poison(*failure_);
  }
  end_all(error);
}

void Background::end_all(const Error& error) noexcept {
  const auto end = [&](Task& task) {
    task.notes_.clear();
    task.error_ = error;
    finish(task);
  };
  for (Lane* const lane : busy_) {
    lane->place = Lane::kIdle;
    lane->operation = nullptr;
    lane->has_begun = false;
    while (Task* const task = lane->first) {
      lane->first = task->next_;
      end(*task);
    }
  }
  busy_.clear();
  asking_ = nullptr;
  for (const Waiting& waiting : std::exchange(waiting_, {}))
    if (waiting.task != nullptr) end(*waiting.task);
}

bool Background::progress_all_slowly() noexcept {
  Helper::note_look();
  const std::unique_lock lock(registry().mutex, std::try_to_lock);
  if (!lock) return true;  // someone is at it
  bool is_any = false;
  for (Background* const background : registry().all) {
    if (background->under_way_.load(std::memory_order_relaxed) == 0) continue;
    is_any = true;
    background->progress();
  }
  return is_any;
}

bool Background::is_any_under_way() noexcept {
  if (count.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(registry().mutex);
  return std::any_of(registry().all.begin(), registry().all.end(),
                     [](const Background* background) {
                       return background->under_way_.load(std::memory_order_relaxed) > 0;
                     });
}

void Background::start_helper() { Helper::get(); }

void Background::progress() noexcept {
  if (!lock_.try_lock()) return;
  const std::lock_guard lock(lock_, std::adopt_lock);
  // From the end: a lane that comes to its end gives its place to the last one.
  for (std::size_t i = busy_.size(); i > 0; --i)
    if (i <= busy_.size()) advance_lane(*busy_[i - 1], 0);
}

}  // namespace trib

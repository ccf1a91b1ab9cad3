// SPDX-License-Identifier: BSD-3-Clause
#include "comm/background.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "backend/reduce.hpp"
#include "backend/segment.hpp"
#include "base/log.hpp"
#include "comm/suspects.hpp"

namespace trib {

/// A channel and the tasks that take turns on it.
struct Lane {
  std::unique_ptr<HostChannel> channel;
  Plans plans;
  Plan* plan = nullptr;  // of `first`, once it has begun; persistent: of its only task
  bool has_own_plan = false;
  bool turns = false;                    // has more room than it needs
  bool has_begun = false;                // `first` has been announced
  bool has_come = false;                 // ... to its meeting
  std::unique_ptr<Unsettled> unsettled;  // what it waits for before that
  bool is_settled = false;               // that is over
  std::optional<Route> staged_route;     // decided, but its copies have to wait
  std::uint64_t own_waits = 0;           // looks at what this rank's program has under way
  int absent = -1;                       // a rank that has not come to its meeting
  Card card;                             // that this rank shows there
  bool meets_again = false;              // to hear whether all can reach what was shown
  std::vector<MappedBuffers> mapped;     // nonblocking: of the ranks on this rank's device
  Task* first = nullptr;                 // the one that runs, or runs next
  Task* last = nullptr;
  Operation* operation = nullptr;  // of `first`, once launched
  Path* path = nullptr;            // whose operation it is
  Operation* done = nullptr;       // persistent: the last one, if `path` has a binding
  bool is_streamed = false;        // its results go past the caches
  static constexpr std::size_t kIdle = SIZE_MAX;
  std::size_t place = kIdle;  // in Background::busy_
  std::uint64_t number = 0;   // persistent: of its channel, ...
  Room room;                  // ... and what that has room for

  /// Changes whenever it got anywhere.
  auto where() const {
    return std::tuple(first, has_begun, has_come, operation,
                      operation != nullptr ? operation->position() : 0);
  }

  Lane(Group& group, std::unique_ptr<HostChannel> its_channel, std::size_t rows)
      : channel(std::move(its_channel)), plans(group, *channel, rows, !channel->has_data()) {}
};

std::atomic<int> Background::count{0};

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

/// Counts the looks that callers take at all tasks, so that the helper knows when none does.
std::atomic<std::uint64_t> looks{0};

/// In the helper: whether what it drove got anywhere.
struct OfHelper {
  bool is_this = false, has_moved = false;
};
[[gnu::tls_model("initial-exec")]] constinit thread_local OfHelper of_helper;

/// Drives tasks whose ranks do something else: MPI wants them to come to an end although a rank
/// sits in a call that is not ours. It never calls the MPI.
class Helper {
 public:
  static Helper& get() {
    static Helper& helper = *new Helper;
    return helper;
  }
  /// One that from now on does not wait until nobody else looks.
  static Helper& get_eager() {
    get().is_eager_.store(true, std::memory_order_relaxed);
    return get();
  }

  /// There is a task for a device, whose caller will not look for a while: it is to be launched as
  /// soon as all ranks have come.
  void hurry() {
    is_urgent_.store(true, std::memory_order_relaxed);
    wake();
  }

  /// There is a task. Without this call it finds out by itself, later.
  void wake() {
    // Either we see that it sleeps, or it sees the task, or that it is to hurry.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!is_asleep_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(mutex_);
    wake_.notify_one();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kTick = std::chrono::milliseconds(1);
  static constexpr auto kLongTick = std::chrono::milliseconds(20);
  static constexpr int kIdleTicks = 20;  // before they become longer

  Helper() {
    // Signals are for the program's own threads.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::exception& error) {  // the process may have no more threads, say
      log_once(Config::Log::warn,
               std::string("no thread for reductions that nobody waits for, as with "
                           "TRIB_PROGRESS=calls: ") +
                   error.what());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  /// `has_task`: there is one already.
  void sleep(std::chrono::milliseconds tick, bool has_task) {
    std::unique_lock lock(mutex_);
    is_asleep_.store(true, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!is_urgent_.load(std::memory_order_relaxed) &&
        (has_task || !Background::is_any_under_way()))
      wake_.wait_for(lock, tick);
    is_asleep_.store(false, std::memory_order_relaxed);
  }

  void run() {
    of_helper.is_this = true;
    int idle = 0;
    for (std::uint64_t seen = 0;;) {
      const bool is_eager = is_eager_.load(std::memory_order_relaxed);
      // Before the look for tasks: one that comes later asks anew.
      bool is_urgent = is_urgent_.exchange(false, std::memory_order_acquire);
      if (!Background::is_any_under_way()) {
        of_helper.has_moved = false;
        sleep(++idle > kIdleTicks || is_eager ? kLongTick : kTick, /*has_task=*/false);
        continue;
      }
      idle = 0;
      if (!is_eager) {
        if (!of_helper.has_moved && !is_urgent) {
          sleep(kTick, /*has_task=*/true);
          is_urgent = is_urgent_.exchange(false, std::memory_order_acquire);
        }
        const std::uint64_t now = looks.load(std::memory_order_relaxed);
        if (now != seen && !is_urgent) {
          seen = now;
          of_helper.has_moved = false;
          continue;
        }
      }
      // While nobody else looks, and as long as it may be of use.
      of_helper.has_moved = false;
      const std::uint64_t before = looks.load(std::memory_order_relaxed);
      for (const auto start = Clock::now(); Clock::now() - start < kTick; ::sched_yield())
        if (!Background::progress_all() ||
            (!is_eager && looks.load(std::memory_order_relaxed) != before))
          break;
    }
  }

  std::atomic<bool> is_eager_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> is_asleep_{false}, is_urgent_{false};
};

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

DeviceChannel* Background::device_of(const Task& task) const {
  if (task.meeting_ == Task::Meeting::own) return opener_->channel();
  return task.meeting_ == Task::Meeting::common ? devices_.of_requests() : nullptr;
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
  if (task.meets_) task.left_at_ = std::chrono::steady_clock::now();
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
  if (!of_helper.is_this)
    looks.store(looks.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
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

void Background::add_served(std::vector<Served>& rows) {
  const std::lock_guard lock(lock_);
  rows.insert(rows.end(), served_before_.begin(), served_before_.end());
  for (const auto& lane : lanes_) lane->plans.add_served(Form::nonblocking, rows);
  for (const Lane* const lane : own_lanes_) lane->plans.add_served(Form::persistent, rows);
}

}  // namespace trib

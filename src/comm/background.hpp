// SPDX-License-Identifier: BSD-3-Clause
// Reductions that go on while their callers do something else: nonblocking ones, and persistent
// ones that were started. communicator.hpp has the interface; here is who drives them, and when.
//
// Nonblocking ones are dealt out to a few lanes in the order in which they are posted, which is the
// same on all ranks; within a lane one runs after the other. A persistent one has a lane of its
// own, so that starts may come in any order. Every rank that waits for anything drives all lanes of
// its process, and where a rank does not look for some time, a thread does (helper.hpp). Lanes
// are made in background_set_up.cpp, what devices may serve is settled in background_meetings.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/locks.hpp"
#include "base/rounding.hpp"
#include "comm/devices.hpp"
#include "comm/opener.hpp"
#include "comm/plans.hpp"
#include "comm/staging.hpp"

namespace trib {

class Background;
struct Lane;

/// One reduction, from its post (or start) to its end. Must stay where it is until is_done().
class Task {
 public:
  Task();
  ~Task();
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  /// Not under way: never posted, or done.
  bool is_done() const { return !is_under_way_.load(std::memory_order_acquire); }

 private:
  friend class Background;
  friend class Communicator;

  Request request_;
  std::vector<std::int64_t> counts_;  // a copy of recvcounts
  std::size_t bytes_ = 0;             // of the vector
  bool is_on_host_ = false;           // persistent: its buffers are
  bool may_turn_ = false;             // persistent: may have more scratch than it needs
  bool meets_ = false;     // ranks meet before it: its buffers may be on devices. Nonblocking: ...
  bool may_meet_ = false;  // ... as far as this rank knows when it is posted; they may, if ...
  enum class Meeting : std::uint8_t {
    none,
    common,  // before what goes by the devices' channel for requests
    first,   // whose cards say whether nonblocking ones get a channel of their own
    own,     // before what goes by that
  } meeting_ = Meeting::none;           // ... it comes to that here. Written under the lanes' lock
  bool stages_late_ = false;            // nonblocking: not before it begins
  bool is_staged_ = false;              // persistent: some rank's are, and it does not run there
  bool is_waited_for_at_once_ = false;  // persistent: the last time nothing else began in between
  std::vector<MappedBuffers> mapped_;  // persistent: of all ranks, where these are mapped; or empty
  std::shared_ptr<void> hold_;         // persistent: while devices are to have them mapped
  DeviceCall call_;                    // from then on
  std::shared_ptr<const Findings> findings_;  // when it was asked for
  Lane* lane_ = nullptr;
  std::unique_ptr<Lane> own_lane_;  // persistent
  Task* next_ = nullptr;            // in the lane
  std::vector<Signature> notes_;    // to be announced between this one and the next
  Rounding rounding_;               // of the thread that posted or started it
  const void* in_ = nullptr;  // what the operation reads and writes: the caller's buffers, ...
  void* out_ = nullptr;
  StagingBuffer staged_in_, staged_out_;  // ... or these, for buffers on a device
  std::size_t fetched_bytes_ = 0;         // of staged_out_, to be copied to request_.out at the end
  std::chrono::steady_clock::time_point begun_;                 // with TRIB_STATS
  std::chrono::steady_clock::time_point left_at_;               // by its caller, if it meets_
  std::optional<std::chrono::steady_clock::duration> waited_;   // by tests in vain, ...
  std::uint64_t stood_ = 0;                                     // ... while it stood there
  std::chrono::steady_clock::time_point looked_at_, alive_at_;  // its peers were
  std::uint32_t looks_ = 0;
  std::optional<Error> error_;  // written before is_under_way_ is cleared
  std::atomic<bool> is_under_way_{false};
};

/// The lanes of one communicator. Safe to use from several threads.
class Background {
 public:
  /// `main` is the communicator's channel for blocking calls.
  Background(Group& group, HostChannel& main, Bootstrap& bootstrap, Devices& devices);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Collective. False (on all ranks alike): there is no memory. Idempotent.
  bool open_lanes();
  bool has_lanes() const { return !lanes_.empty(); }
  /// What is staged in a lane has to do with so many.
  static constexpr int flags_of_lane(int ranks) { return 2 * ranks + 16; }

  /// Collective: gives `task`, whose request is filled in, a lane and a program: for `way`, or for
  /// what the tables say. False (on all ranks alike): there is no memory.
  bool prepare(Task& task, const std::optional<Choice>& way);
  /// How many of those that prepare() made have more scratch than they need: a few of them should.
  /// Programs with many take turns anyway.
  int turning_lanes() const { return turning_lanes_.load(std::memory_order_relaxed); }
  static constexpr int kTurningLanes = 4;
  /// The task's lane is gone. Not to be called while it is under way.
  void dismiss(Task& task);

  /// Gives the task copies of its buffers that are on a device.
  void stage(Task& task, Memory in);
  /// Whether nonblocking ones have devices of their own, as far as this rank knows.
  bool posts_have_devices() const { return posts_have_devices_.load(std::memory_order_relaxed); }
  /// Ranks find out whether they are to have some.
  bool is_asking() {
    const std::lock_guard lock(lock_);
    return asking_ != nullptr;
  }
  /// Runs `change` while nobody drives the lanes.
  template <class Change>
  void while_still(Change&& change) {
    const std::lock_guard lock(lock_);
    change();
  }
  /// Nonblocking: the next lane that has its turn takes `task`. `is_first_meeting`: before it ranks
  /// find out whether devices are to serve it and those behind it, which wait until that is known.
  void post(Task& task, bool is_first_meeting);
  /// The next lane that has its turn takes note of a reduction in which there is nothing to do, or
  /// that is left to the MPI: ranks that disagree about it find out.
  /// `meets`: ranks meet before most others now, which have the first lane.
  void announce(const Signature& signature, bool meets);
  /// Persistent.
  void start(Task& task);

  /// The caller is back, to wait for `task` or to test it.
  void look_at(Task& task) {
    if (task.meets_ && task.left_at_ != std::chrono::steady_clock::time_point{})
      note_first_look(task);
  }
  /// Drives the task's lane. A rank that is waited for, or -1, or kDone.
  int advance(const Task& task, int polls) {
    return task.is_done() ? kDone : advance_slowly(task, polls);
  }
  static constexpr int kDone = -2;
  /// No other task began after it.
  bool is_last_started(const Task& task) const {
    return last_started_.load(std::memory_order_relaxed) == &task;
  }
  void diagnose(const Task& task, int peer);
  void check_alive(const Task& task, int peer);
  /// Whether the rank that advance() gave is as good as any other.
  bool is_guessing(const Task& task);
  /// Changes if the task, or what comes before it in its lane, got on, unless a device works on it.
  std::uint64_t where(const Task& task);

  /// All tasks end with `error`; peers that wait for this rank get it.
  void fail(const Error& error) noexcept;
  /// Set once a task failed.
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  const Error& failure() const { return *failure_; }  ///< once has_failed()

  /// Adds what was served to `rows`.
  void add_served(std::vector<Served>& rows);

  /// Drives all lanes of all communicators of this process, as far as they go at once. False: there
  /// was nothing to do.
  static bool progress_all() noexcept {
    return count.load(std::memory_order_relaxed) > 0 && progress_all_slowly();
  }
  /// In calls that end at once, however many come one after the other: others' tasks may have
  /// nobody else to drive them.
  static void progress_now_and_then() noexcept {
    if (count.load(std::memory_order_relaxed) == 0) [[likely]]
      return;
    const std::uint32_t calls = ended_at_once.load(std::memory_order_relaxed) + 1;
    ended_at_once.store(calls, std::memory_order_relaxed);
    if (calls % 64 == 0) [[unlikely]]
      progress_all_slowly();
  }
  static bool is_any_under_way() noexcept;
  /// A thread goes on with what is under way from here on, whatever TRIB_PROGRESS says.
  static void start_helper();

 private:
  /// The channel of a persistent task that is gone, for the next one that needs the like.
  struct Spare {
    std::uint64_t number;
    Room room;
    std::unique_ptr<HostChannel> channel;
  };
  static constexpr std::size_t kMostSpares = 4;

  static std::atomic<int> count;  // of objects
  inline static std::atomic<std::uint32_t> ended_at_once{0};
  static bool progress_all_slowly() noexcept;
  void progress() noexcept;
  int advance_slowly(const Task& task, int polls);
  Lane* advance_lane_of(const Task& task, int polls);
  void advance_lane(Lane& lane, int polls) noexcept;
  enum class Extent { all, one_pass };  // as far as it goes
  /// `is_callers`: all that the lane has is of this thread, and so rounds as it does.
  bool drive(Lane& lane, int polls, Extent extent, bool is_callers = false) noexcept;
  bool go_on(Lane& lane, int polls, Extent extent, bool is_callers) noexcept;
  void add_busy(Lane& lane);
  void make_room_for_busy(std::size_t more = 0);
  void note_first_look(Task& task);
  /// A post in its order. It has to wait until ranks have met.
  struct Waiting {
    Task* task;      // null: only ...
    Signature note;  // ... this is to be announced
    std::uint64_t number;
    bool meets;
  };
  std::uint64_t count_post();
  Lane& lane_of(std::uint64_t post, bool meets) {
    return *lanes_[meets ? 0 : post % lanes_.size()];
  }
  Lane& lane_of(const Task& task) { return *(task.lane_ != nullptr ? task.lane_ : asking_->lane_); }
  static void announce(const Signature& signature, Lane& lane);
  static bool is_in_first_lane(const Task& task);
  void settle(Task& task);
  static int polls_of(const Task& task);
  void begin(Task& task);
  void enqueue(Task& task, Lane& lane, int polls);
  Route answer(const Lane& lane, Task& task);
  void hand_out();
  DeviceChannel* device_of(const Task& task) const {
    if (task.meeting_ == Task::Meeting::own) return opener_->channel();
    return task.meeting_ == Task::Meeting::common ? devices_.of_requests() : nullptr;
  }
  Card card_of(const Lane& lane, const Task& task) const;
  std::optional<Route> route_of(Lane& lane, Task& task);
  bool launch(Lane& lane, Task& task);
  bool relaunch(Lane& lane, const Task& task);
  void finish(Task& task);
  void keep(Served& row);
  std::unique_ptr<HostChannel> spare_of_all(const Room& room, bool turns, std::uint64_t& number);
  void fail_all(const Error& error) noexcept;
  void end_all(const Error& error) noexcept;

  Group& group_;
  HostChannel& main_;
  Bootstrap& bootstrap_;
  Devices& devices_;
  BiasedLock lock_;                       // of everything below
  NamedBlocks named_;                     // in nonblocking ones
  std::unique_ptr<DeviceOpener> opener_;  // of the nonblocking ones' own channel of devices
  std::atomic<bool> posts_have_devices_{false};
  Task* asking_ = nullptr;       // of Meeting::first, until its ranks have met; ...
  std::deque<Waiting> waiting_;  // ... and what was posted since
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane*> own_lanes_;   // of persistent tasks
  std::vector<Spare> spares_;      // what such lanes leave behind
  bool are_offered_ = false;       // to the other ranks, so that they have to stay
  std::uint64_t last_number_ = 0;  // of their channels, the same on all ranks
  std::vector<Lane*> busy_;        // of both kinds
  std::atomic<int> under_way_{0};  // tasks; others look at it without the lock
  std::uint64_t posts_ = 0;
  std::uint32_t held_starts_ = 0;
  std::atomic<const Task*> last_started_{nullptr};  // may be gone; others look without the lock
  std::atomic<int> turning_lanes_{0};
  std::atomic<bool> is_left_alone_{false};  // the last task for a device that was looked at
  bool has_helper_ = false;
  std::vector<Served> served_before_;  // by lanes that are gone
  std::optional<Error> failure_;
  std::atomic<bool> has_failed_{false};
};

}  // namespace trib

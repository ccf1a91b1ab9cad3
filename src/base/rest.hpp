// SPDX-License-Identifier: BSD-3-Clause
// What a rank that waits does between two looks. It gives its core to whoever wants it, unless that
// is something that computes, and would keep it for milliseconds.
#pragma once

#include <atomic>
#include <chrono>

namespace trib {

/// Sleeps, or less where a signal comes. (std::this_thread::sleep_for begins anew then, with what
/// the kernel says is left: where signals come every 50 us, as much as that lets a timer be late,
/// that never becomes less.)
void nap(std::chrono::nanoseconds time) noexcept;

/// Yields the core. True: it took more than a millisecond to get it back.
bool yields_for_long();

/// Of one wait for peers, or, in a reduction, for what the program has under way on a device.
/// (Waits of the MPI layer, for requests and copies, know of no group, and yield.)
class Rest {
 public:
  using Clock = std::chrono::steady_clock;
  /// `may_sleep`: on a core that something else computes on it spins, and sleeps once it has waited
  /// for some time: who sleeps gets the core back when he wakes, since he has had less of it than
  /// the other one. Otherwise it yields there as well, as ranks that share cores have to.
  Rest(Clock::time_point now, bool may_sleep)
      : may_sleep_(may_sleep), is_taken_(may_sleep && now < taken()) {}

  /// Between two looks, of about a microsecond. True: it has slept.
  bool take() {
    if (is_taken_ && is_on_taken_core()) return spin_or_sleep();
    const int core = core_now();
    if (yields_for_long() && may_sleep_) note_taken(core);
    return false;
  }
  /// What it waits for has got on: it spins for some time again.
  void restart(Clock::time_point now) {
    rounds_ = 0;
    is_taken_ = is_taken_ && now < taken();
  }

  /// Of this process: something else computes on this core (negative: on all), and is taken to do
  /// so until then, by the steady clock. Tests set them.
  inline static std::atomic<int> taken_core{-1};
  inline static std::atomic<Clock::duration> taken_until{};

 private:
  static Clock::time_point taken() {
    return Clock::time_point(taken_until.load(std::memory_order_relaxed));
  }
  static int core_now();
  static bool is_on_taken_core();
  bool spin_or_sleep();
  void note_taken(int core);

  bool may_sleep_, is_taken_;
  int rounds_ = 0;  // on a taken core, since the last restart
};

}  // namespace trib

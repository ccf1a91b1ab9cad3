// SPDX-License-Identifier: BSD-3-Clause
#include "base/rest.hpp"

#include <sched.h>

#include <ctime>

namespace trib {
namespace {

/// A yield lets another rank go on, within microseconds. But if something else wants the core, a
/// program that computes, it gets it for as long as the kernel sees fit.
constexpr auto kLong = std::chrono::milliseconds(1);
/// For so long a core counts as taken then.
constexpr auto kTaken = std::chrono::seconds(1);
/// Rounds before a rank sleeps there. Half as many cost long vectors more than four times the time,
/// more cost ranks that are not bound: docs/results-many-ranks.md.
constexpr int kSpins = 128;
/// What it waits for may need a message that only it can take from the MPI.
constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

void nap(std::chrono::nanoseconds time) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  const timespec its{seconds.count(), (time - seconds).count()};
  ::nanosleep(&its, nullptr);
}

bool yields_for_long() {
  const auto start = Rest::Clock::now();
  ::sched_yield();
  return Rest::Clock::now() - start > kLong;
}

int Rest::core_now() { return ::sched_getcpu(); }

/// The kernel moves ranks that are not bound: on another core yielding may do.
bool Rest::is_on_taken_core() {
  const int core = taken_core.load(std::memory_order_relaxed);
  return core < 0 || core == ::sched_getcpu();
}

bool Rest::spin_or_sleep() {
  if (++rounds_ <= kSpins) return false;
  nap(kNap);
  is_taken_ = Clock::now() < taken();
  return true;
}

void Rest::note_taken(int core) {
  taken_core.store(core, std::memory_order_relaxed);
  taken_until.store((Clock::now() + kTaken).time_since_epoch(), std::memory_order_relaxed);
  is_taken_ = true;
}

}  // namespace trib

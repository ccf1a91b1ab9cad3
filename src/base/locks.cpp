// SPDX-License-Identifier: BSD-3-Clause
#include "base/locks.hpp"
#include "base/rest.hpp"

#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

namespace trib {
namespace {

/// How often the owner comes, with nobody in between, before it gets its way back: others that come
/// more often than that pay for too many barriers.
constexpr int kStreak = 256;

bool membarrier(int command) {
  const int saved = errno;
  const bool is_done = ::syscall(SYS_membarrier, command, 0, 0) == 0;
  errno = saved;
  return is_done;
}

/// Whether this process may ask for barriers in all its threads. Not where a filter of system calls
/// stands in the way.
bool register_barriers() { return membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED); }

bool has_barriers() {
  static const bool is_registered = register_barriers();
  return is_registered;
}

bool try_barrier() { return membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED); }

void pause_for(int& spins) {
  if (++spins % 64 == 0)
    ::sched_yield();
  else
    relax();
}

}  // namespace

void SpinLock::lock() {
  for (int spins = 0; !try_lock();) pause_for(spins);
}

BiasedLock::BiasedLock() noexcept
    : owner_(__builtin_thread_pointer()), is_biased_(has_barriers()) {}

void BiasedLock::lock_slowly() {
  lock_.lock();
  for (int spins = 0; !settle();) pause_for(spins);
}

bool BiasedLock::try_lock_slowly() {
  if (!lock_.try_lock()) return false;
  if (settle()) return true;
  lock_.unlock();
  return false;
}

/// With lock_ taken: whether that is all that it takes. Otherwise the owner is there without it,
/// for the last time; it may be this thread.
bool BiasedLock::settle() {
  if (is_biased_.load(std::memory_order_relaxed)) {
    is_biased_.store(false, std::memory_order_relaxed);
    // A child of fork() may have to register anew. Where system calls have been forbidden since,
    // time has to do: what the owner has stored is on its way for less than a microsecond.
    if (!try_barrier() && !(register_barriers() && try_barrier()))
      for (const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
           std::chrono::steady_clock::now() < end;)
        nap(std::chrono::microseconds(200));
  }
  // Acquire: pairs with the release in unlock().
  if (is_taken_.load(std::memory_order_acquire)) return false;
  if (!is_owner()) {
    streak_ = 0;
  } else if (++streak_ >= kStreak && has_barriers()) {
    streak_ = 0;
    is_biased_.store(true, std::memory_order_relaxed);
  }
  return true;
}

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// Locks for short critical sections on the path of a call, and how to wait for a moment.
#pragma once

#include <atomic>

namespace trib {

/// Between two looks at what another thread or process is to store.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Seldom contended.
class SpinLock {
 public:
  void lock();
  bool try_lock() { return !is_locked_.exchange(true, std::memory_order_acquire); }
  void unlock() { is_locked_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> is_locked_{false};
};

/// For what one thread, the owner, uses again and again, and others hardly ever do. As long as none
/// of them came the owner takes it by plain stores and loads, without an atomic exchange, which
/// would hold up what it has told its peers just before. Another thread first takes that way from
/// it, by a barrier in all threads of the process (membarrier(2)), which takes microseconds; the
/// owner has it back once it has come often enough with nobody in between.
class BiasedLock {
 public:
  /// The owner is the calling thread.
  BiasedLock() noexcept;
  BiasedLock(const BiasedLock&) = delete;
  BiasedLock& operator=(const BiasedLock&) = delete;

  void lock() {
    if (!take_as_owner()) lock_slowly();
  }
  bool try_lock() { return take_as_owner() || try_lock_slowly(); }
  void unlock() {
    // Only the owner looks at is_taken_, which is its own.
    if (is_owner() && is_taken_.load(std::memory_order_relaxed))
      is_taken_.store(false, std::memory_order_release);  // pairs with the acquire in settle()
    else
      lock_.unlock();
  }

 private:
  bool is_owner() const { return __builtin_thread_pointer() == owner_; }
  bool take_as_owner() {
    if (!is_owner() || is_taken_.load(std::memory_order_relaxed) ||
        !is_biased_.load(std::memory_order_relaxed))
      return false;
    is_taken_.store(true, std::memory_order_relaxed);
    // The processor may let the load overtake the store, the compiler may not. Either the barrier
    // in settle() comes before the load, which then sees that is_biased_ was cleared before it, or
    // the store comes before the barrier, and settle() waits. What others did under the lock is
    // known since the owner got the bias back, which it did under lock_.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (is_biased_.load(std::memory_order_relaxed)) [[likely]]
      return true;
    is_taken_.store(false, std::memory_order_release);
    return false;
  }
  void lock_slowly();
  bool try_lock_slowly();
  bool settle();

  const void* const owner_;
  std::atomic<bool> is_biased_;
  std::atomic<bool> is_taken_{false};  // by the owner, without lock_
  SpinLock lock_;
  int streak_ = 0;  // of the owner, under lock_
};

}  // namespace trib

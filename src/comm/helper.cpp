// SPDX-License-Identifier: BSD-3-Clause
#include "comm/helper.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <exception>
#include <string>
#include <thread>

#include "base/log.hpp"
#include "comm/background.hpp"

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kTick = std::chrono::milliseconds(1);
constexpr auto kLongTick = std::chrono::milliseconds(20);
constexpr int kIdleTicks = 20;  // without a task, before they become longer, ...
/// ... and one after the other in which it has got nothing on, as callers see to their tasks: not
/// where devices serve any. Each tick takes the core from whoever runs there, and a program that
/// computes on it, too, may get it next.
/// 2 ranks bound to two cores (AMD Zen 4), such a program on one: 300 us of computing and 3 ms more
/// in turns, MPI_Iallreduce and messages, 5.1 ms a round with ticks of 1 ms, 4.3 to 4.4 with these
/// (300 rounds).
constexpr int kNeedlessTicks = 200;

}  // namespace

[[gnu::tls_model("initial-exec")]] constinit thread_local OfHelper of_helper;

Helper& Helper::get() {
  static Helper& helper = *new Helper;
  return helper;
}

Helper& Helper::get_eager() {
  get().is_eager_.store(true, std::memory_order_relaxed);
  return get();
}

Helper::Helper() {
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

void Helper::hurry() {
  is_urgent_.store(true, std::memory_order_relaxed);
  wake();
}

void Helper::wake() {
  // Either we see that it sleeps, or it sees the task, or that it is to hurry.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!is_asleep_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  wake_.notify_one();
}

/// `has_task`: there is one already.
void Helper::sleep(std::chrono::milliseconds tick, bool has_task) {
  std::unique_lock lock(mutex_);
  is_asleep_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!is_urgent_.load(std::memory_order_relaxed) && (has_task || !Background::is_any_under_way()))
    wake_.wait_for(lock, tick);
  is_asleep_.store(false, std::memory_order_relaxed);
}

void Helper::run() {
  of_helper.is_this = true;
  int idle = 0, needless = 0;
  for (std::uint64_t seen = 0;;) {
    if (of_helper.has_moved || has_devices.load(std::memory_order_relaxed))
      needless = 0;
    else if (needless <= kNeedlessTicks)
      ++needless;
    const bool is_eager = is_eager_.load(std::memory_order_relaxed);
    // Before the look for tasks: one that comes later asks anew.
    bool is_urgent = is_urgent_.exchange(false, std::memory_order_acquire);
    if (!Background::is_any_under_way()) {
      of_helper.has_moved = false;
      const bool is_long = ++idle > kIdleTicks || needless > kNeedlessTicks || is_eager;
      sleep(is_long ? kLongTick : kTick, /*has_task=*/false);
      continue;
    }
    idle = 0;
    if (!is_eager) {
      if (needless > kNeedlessTicks && !of_helper.has_moved && !is_urgent) {
        sleep(kLongTick, /*has_task=*/true);
        is_urgent = is_urgent_.exchange(false, std::memory_order_acquire);
        seen =
            looks.load(std::memory_order_relaxed);  // whether someone looks in the next short one
      }
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

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// The thread that drives tasks of background.hpp while their ranks do something else: MPI wants
// them to come to an end although a rank sits in a call that is not ours. It never calls the MPI.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace trib {

/// Of a thread. What counts in the helper: whether what it drove got anywhere.
struct OfHelper {
  bool is_this = false, has_moved = false;
};
[[gnu::tls_model("initial-exec")]] extern constinit thread_local OfHelper of_helper;

/// The process has one, from the first call of get() on. Never destroyed.
class Helper {
 public:
  static Helper& get();
  /// One that from now on does not wait until nobody else looks.
  static Helper& get_eager();

  /// There is a task for a device, whose caller will not look for a while: it is to be launched as
  /// soon as all ranks have come.
  void hurry();
  /// There is a task. Without this call it finds out by itself, later.
  void wake();

  /// From now on there may be tasks for devices. It launches them, and has nothing to get on then.
  static void note_devices() { has_devices.store(true, std::memory_order_relaxed); }

  /// A caller looks at all tasks: it knows by that when none does.
  static void note_look() {
    if (!of_helper.is_this)
      looks.store(looks.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

 private:
  Helper();
  void run();
  void sleep(std::chrono::milliseconds tick, bool has_task);

  inline static std::atomic<std::uint64_t> looks{0};
  inline static std::atomic<bool> has_devices{false};
  std::atomic<bool> is_eager_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> is_asleep_{false}, is_urgent_{false};
};

}  // namespace trib

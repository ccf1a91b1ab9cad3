// SPDX-License-Identifier: BSD-3-Clause
// A machine of many cores, for whoever asks which of them he may run on. To be included by one file
// of a program: it defines the function that is asked.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace trib::test {

inline std::atomic<bool> has_many_cores{false};

/// While it lives, ranks are not crowded.
class ManyCores {
 public:
  explicit ManyCores(bool are_there = true) { has_many_cores = are_there; }
  ~ManyCores() { has_many_cores = false; }
  ManyCores(const ManyCores&) = delete;
  ManyCores& operator=(const ManyCores&) = delete;
};

}  // namespace trib::test

/// In place of the C library's.
extern "C" [[gnu::visibility("default")]] int sched_getaffinity(pid_t pid, size_t bytes,
                                                                cpu_set_t* cores) noexcept {
  if (trib::test::has_many_cores) {
    std::memset(cores, 0xff, bytes);
    return 0;
  }
  std::memset(cores, 0, bytes);
  return syscall(SYS_sched_getaffinity, pid, bytes, cores) < 0 ? -1 : 0;
}

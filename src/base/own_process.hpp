// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <pthread.h>

#include <atomic>
#include <new>
#include <string>

#include "base/error.hpp"

namespace trib {

/// The process in which it was made. A child by fork() has copies of its objects, but neither its
/// GPU nor a place among the ranks, and shares the memory in which these meet.
class OwnProcess {
 public:
  /// Throws std::bad_alloc.
  OwnProcess() : forks_(count()) {}
  /// Throws Error(Code::argument) in a child: `what` is the parent's.
  void expect(const char* what) const {
    if (forks().load(std::memory_order_relaxed) != forks_)
      throw Error(Code::argument,
                  std::string(what) + " is that of the process that forked this one");
  }

 private:
  static std::atomic<unsigned>& forks() {
    static std::atomic<unsigned> forks{0};
    return forks;
  }
  static unsigned count() {
    static const int failed =
        ::pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1, std::memory_order_relaxed); });
    if (failed != 0) throw std::bad_alloc();
    return forks().load(std::memory_order_relaxed);
  }

  const unsigned forks_;
};

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// What /proc tells of processes that live, end and have ended.
#include "base/process.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace trib {
namespace {

/// A process of its own, which shows its id and then does what it is to do.
class Child {
 public:
  template <class Work>
  explicit Child(Work&& work) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    pid_ = fork();
    if (pid_ == 0) {
      work([end = ends[1]] {
        const ProcessId mine = ProcessId::of_this();
        if (write(end, &mine, sizeof mine) != sizeof mine) _exit(1);
      });
      _exit(0);
    }
    close(ends[1]);
    EXPECT_EQ(read(ends[0], &id, sizeof id), static_cast<ssize_t>(sizeof id));
    close(ends[0]);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  void kill(int signal) const { ::kill(pid_, signal); }

  ProcessId id;

 private:
  pid_t pid_ = -1;
};

template <class Condition>
bool comes(Condition&& condition) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

TEST(Process, OneThatNobodyHasWaitedForIsGone) {
  const Child child([](auto&& show) {
    show();
    pause();
  });
  EXPECT_TRUE(can_see(child.id));
  EXPECT_FALSE(is_gone(child.id) || is_ending(child.id));
  child.kill(SIGKILL);
  EXPECT_TRUE(comes([&] { return is_ending(child.id); }));
  EXPECT_TRUE(comes([&] { return is_gone(child.id); }));
  EXPECT_TRUE(is_ending(child.id));
}

TEST(Process, OneWhoseFirstThreadHasEndedLives) {
  const Child child([](auto&& show) {
    const pthread_t first = pthread_self();
    std::thread([=] {
      pthread_join(first, nullptr);
      show();
      pause();
    }).detach();
    syscall(SYS_exit, 0);  // of this thread alone
  });
  EXPECT_FALSE(is_gone(child.id) || is_ending(child.id));
  child.kill(SIGKILL);
  EXPECT_TRUE(comes([&] { return is_gone(child.id); }));
}

TEST(Process, OneWhoseMemoryIsTakenDownIsEnding) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const Child child([](auto&& show) {
    auto* const pages = static_cast<char*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(pages, kBytes, MADV_NOHUGEPAGE);
    for (std::size_t at = 0; at < kBytes; at += 4096) pages[at] = 1;
    for (int i = 0; i < 3; ++i) std::thread([] { pause(); }).detach();
    show();
    pause();
  });
  child.kill(SIGKILL);
  bool was_ending_first = false;
  EXPECT_TRUE(comes([&] {
    const bool is_over = is_gone(child.id);
    was_ending_first = was_ending_first || (!is_over && is_ending(child.id) && !is_gone(child.id));
    return is_over;
  }));
  EXPECT_TRUE(was_ending_first);
}

TEST(Process, AnotherOneWithItsNumberIsNotIt) {
  ProcessId other = ProcessId::of_this();
  EXPECT_FALSE(is_gone(other) || is_ending(other));
  ++other.start_time;
  EXPECT_TRUE(is_gone(other) && is_ending(other));
}

}  // namespace
}  // namespace trib

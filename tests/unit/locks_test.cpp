// SPDX-License-Identifier: BSD-3-Clause
#include "base/locks.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace trib {
namespace {

/// Two counters that only stay alike if nobody else is inside.
struct Guarded {
  BiasedLock lock;
  long first = 0, second = 0;
  std::atomic<int> inside{0};
  std::atomic<bool> is_broken{false};

  void step() {
    if (inside.fetch_add(1) != 0) is_broken = true;
    ++first;
    ++second;
    inside.fetch_sub(1);
  }
};

TEST(BiasedLock, keeps_the_others_out_whoever_comes) {
  Guarded guarded;
  std::atomic<bool> is_over{false};
  std::atomic<long> others{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      // Seldom and often: the owner gets its way back in between, or does not.
      for (long n = 0; !is_over; ++n) {
        if (i == 0) {
          const std::lock_guard lock(guarded.lock);
          guarded.step();
          ++others;
        } else if (guarded.lock.try_lock()) {
          guarded.step();
          ++others;
          guarded.lock.unlock();
        }
        std::this_thread::sleep_for(std::chrono::microseconds(i == 2 ? 3000 : 20 * (n % 50)));
      }
    });
  long mine = 0;
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
       std::chrono::steady_clock::now() < end;) {
    for (int i = 0; i < 1000; ++i) {
      const std::lock_guard lock(guarded.lock);
      guarded.step();
      ++mine;
    }
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(guarded.is_broken);
  EXPECT_EQ(guarded.first, mine + others);
  EXPECT_EQ(guarded.second, guarded.first);
  EXPECT_GT(others, 0);
}

TEST(BiasedLock, is_not_to_be_had_while_another_has_it) {
  BiasedLock lock;
  const auto others_try = [&] {
    bool has_it = false;
    std::thread([&] {
      has_it = lock.try_lock();
      if (has_it) lock.unlock();
    }).join();
    return has_it;
  };
  EXPECT_TRUE(others_try());
  for (int i = 0; i < 1000; ++i) {  // until the owner has its way back
    const std::lock_guard held(lock);
  }
  EXPECT_TRUE(others_try());
  for (const int times : {1, 1000}) {
    for (int i = 0; i < times; ++i) {
      const std::lock_guard held(lock);
    }
    std::atomic<bool> is_held{false}, may_end{false};
    std::thread holder([&] {
      const std::lock_guard held(lock);
      is_held = true;
      while (!may_end) std::this_thread::yield();
    });
    while (!is_held) std::this_thread::yield();
    EXPECT_FALSE(lock.try_lock());
    may_end = true;
    holder.join();
    EXPECT_TRUE(lock.try_lock());
    lock.unlock();
  }
}

TEST(BiasedLock, makes_others_wait_for_its_owner) {
  BiasedLock lock;
  std::atomic<bool> is_inside{false};
  lock.lock();
  EXPECT_FALSE(lock.try_lock());  // nor does it get in twice
  std::thread([&] { EXPECT_FALSE(lock.try_lock()); }).join();
  std::thread other([&] {
    const std::lock_guard held(lock);
    is_inside = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(is_inside);
  lock.unlock();
  other.join();
  EXPECT_TRUE(is_inside);
}

}  // namespace
}  // namespace trib

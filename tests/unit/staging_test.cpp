// SPDX-License-Identifier: BSD-3-Clause
// The pool of pinned memory, on a device of ordinary memory.
#include "comm/staging.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "support/stand_in_device.hpp"

namespace trib {
namespace {

/// Counts what is asked of it.
class Device final : public test::StandInDevice {
 public:
  /// Pools keep what they have.
  ~Device() override {
    for (const auto& [memory, bytes] : areas) std::free(const_cast<char*>(memory));  // NOLINT
  }
  Memory where(const void* pointer) const override {
    const std::lock_guard lock(mutex);
    auto found = areas.upper_bound(static_cast<const char*>(pointer));
    if (found == areas.begin()) return Memory::host;
    --found;
    return static_cast<const char*>(pointer) < found->first + found->second ? Memory::pinned
                                                                            : Memory::host;
  }
  void* allocate_host(std::size_t bytes) const override {
    if (is_exhausted) return nullptr;
    if (comes_again != nullptr) return std::exchange(comes_again, nullptr);
    void* const memory = std::malloc(bytes);  // untouched, it costs nothing
    const std::lock_guard lock(mutex);
    areas[static_cast<const char*>(memory)] = bytes;
    ++allocations;
    return memory;
  }
  void free_host(void* pointer) const noexcept override {
    const std::lock_guard lock(mutex);
    areas.erase(static_cast<const char*>(pointer));
    std::free(pointer);
  }

  mutable std::mutex mutex;
  mutable std::map<const char*, std::size_t> areas;
  mutable int allocations = 0;
  bool is_exhausted = false;
  mutable void* comes_again = nullptr;
};

TEST(PinnedPool, GivesTheSameMemoryAgain) {
  Device device;
  PinnedPool pool;
  std::size_t bytes = 3u << 20;
  void* const first = pool.take(device, bytes);
  ASSERT_NE(first, nullptr);
  EXPECT_GE(bytes, 3u << 20);
  pool.give_back(first, bytes);
  std::size_t fewer = 2u << 20;
  EXPECT_EQ(pool.take(device, fewer), first);
  EXPECT_EQ(fewer, bytes);
  EXPECT_EQ(device.allocations, 1);
}

TEST(PinnedPool, CutsShortPiecesFromSlabs) {
  Device device;
  PinnedPool pool;
  std::map<char*, std::size_t> taken;
  for (const std::size_t wanted : {1, 200, 256, 257, 4000, 4096, 65536})
    for (int i = 0; i < 15; ++i) {
      std::size_t bytes = wanted;
      auto* const memory = static_cast<char*>(pool.take(device, bytes));
      ASSERT_NE(memory, nullptr);
      ASSERT_GE(bytes, wanted);
      EXPECT_EQ(device.where(memory + bytes - 1), Memory::pinned);
      taken[memory] = bytes;
    }
  EXPECT_EQ(taken.size(), 7u * 15);
  for (auto piece = taken.begin(); std::next(piece) != taken.end(); ++piece)
    EXPECT_LE(piece->first + piece->second, std::next(piece)->first);
  EXPECT_LE(device.allocations, 5);
}

TEST(PinnedPool, HasABound) {
  Device device;
  PinnedPool pool;
  std::size_t too_many = PinnedPool::kLongest + 1;
  EXPECT_EQ(pool.take(device, too_many), nullptr);
  std::vector<std::pair<void*, std::size_t>> taken;
  for (;;) {
    std::size_t bytes = 100u << 20;
    void* const memory = pool.take(device, bytes);
    if (memory == nullptr) break;
    taken.emplace_back(memory, bytes);
  }
  EXPECT_EQ(taken.size(), PinnedPool::kMost / (100u << 20));
  EXPECT_LE(pool.held(), PinnedPool::kMost);
  for (const auto& [memory, bytes] : taken) pool.give_back(memory, bytes);
  // What is free makes way for what is longer.
  std::size_t bytes = 200u << 20;
  EXPECT_NE(pool.take(device, bytes), nullptr);
  EXPECT_LE(pool.held(), PinnedPool::kMost);
}

TEST(PinnedPool, ForgetsMemoryThatIsGone) {
  Device device;
  PinnedPool pool;
  std::size_t bytes = 1u << 20;
  void* const memory = pool.take(device, bytes);
  pool.give_back(memory, bytes);
  device.free_host(memory);  // as a reset of the device does
  std::size_t again = 1u << 20;
  EXPECT_NE(pool.take(device, again), nullptr);
  EXPECT_EQ(device.allocations, 2);
  EXPECT_EQ(pool.held(), again);
}

TEST(PinnedPool, TellsMemoryOfTheProgramAtTheSameAddress) {
  Device device;
  PinnedPool pool;
  for (const std::size_t wanted : {std::size_t{1000}, std::size_t{1} << 20}) {
    std::size_t bytes = wanted;
    auto* const memory = static_cast<char*>(pool.take(device, bytes));
    pool.give_back(memory, bytes);
    // The device is reset, and the program pins the same pages, which are new.
    std::memset(memory, 0, device.areas[memory]);
    std::size_t again = wanted;
    EXPECT_NE(pool.take(device, again), memory);
  }
}

TEST(PinnedPool, HasNothingTwiceInASlabThatCameAgain) {
  Device device;
  PinnedPool pool;
  std::size_t bytes = 4096;
  auto* const memory = static_cast<char*>(pool.take(device, bytes));
  pool.give_back(memory, bytes);
  std::memset(memory, 0, device.areas[memory]);
  device.comes_again = memory;  // where the pool's next slab lies
  std::size_t other = 256;
  char* const first = static_cast<char*>(pool.take(device, other));
  EXPECT_EQ(first, memory);
  EXPECT_EQ(other, 256);
  bytes = 4096;
  auto* const second = static_cast<char*>(pool.take(device, bytes));
  EXPECT_TRUE(second < memory || second >= memory + device.areas[memory]);
}

TEST(StagingBuffer, TakesOrdinaryMemoryWhereThereIsNoPinned) {
  static Device device;  // the process's pool may hold its memory
  StagingBuffer buffer;
  auto* const memory = static_cast<char*>(buffer.get(device, PinnedPool::kLongest + 1));
  EXPECT_EQ(device.where(memory), Memory::host);
  memory[PinnedPool::kLongest] = 1;
  device.is_exhausted = true;
  StagingBuffer other;
  EXPECT_EQ(device.where(other.get(device, 1000)), Memory::host);
}

TEST(StagingBuffer, ManyThreads) {
  static Device device;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (std::size_t round = 1; round < 300; ++round) {
        StagingBuffer buffer;
        const std::size_t bytes = round * 977 % 200000 + 1;
        auto* const memory = static_cast<unsigned char*>(buffer.get(device, bytes));
        std::memset(memory, t, bytes);
        std::this_thread::yield();
        for (std::size_t i = 0; i < bytes; i += 97) ASSERT_EQ(memory[i], t);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(DeviceBackend, CopiesRows) {
  const Device device;
  std::vector<int> from(60), to(60, -1);
  for (int i = 0; i < 60; ++i) from[static_cast<std::size_t>(i)] = i;
  const Rows pieces[] = {{&to[2], &from[2], 8, 5, 24}, {&to[40], &from[40], 12, 1, 0}};
  static_cast<const DeviceBackend&>(device).copy(pieces);
  for (int i = 0; i < 60; ++i) {
    const bool is_moved = (i >= 2 && i < 30 && (i - 2) % 6 < 2) || (i >= 40 && i < 43);
    EXPECT_EQ(to[static_cast<std::size_t>(i)], is_moved ? i : -1) << i;
  }
}

}  // namespace
}  // namespace trib

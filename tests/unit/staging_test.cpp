// SPDX-License-Identifier: BSD-3-Clause
// The pool of pinned memory, on a device of ordinary memory.
#include "comm/staging.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
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

using Piece = PinnedPool::Piece;

char* begin_of(const Piece& piece) { return static_cast<char*>(piece.memory); }

TEST(PinnedPool, GivesTheSameMemoryAgain) {
  Device device;
  PinnedPool pool;
  const Piece first = pool.take(device, 3u << 20);
  ASSERT_NE(first.memory, nullptr);
  EXPECT_GE(first.bytes, 3u << 20);
  pool.give_back(first);
  const Piece again = pool.take(device, 2u << 20);
  EXPECT_EQ(again.memory, first.memory);
  EXPECT_EQ(again.bytes, first.bytes);
  EXPECT_EQ(device.allocations, 1);
}

TEST(PinnedPool, CutsShortPiecesFromSlabs) {
  Device device;
  PinnedPool pool;
  std::map<char*, std::size_t> taken;
  for (const std::size_t wanted : {1, 200, 256, 257, 4000, 4096, 65536})
    for (int i = 0; i < 15; ++i) {
      const Piece piece = pool.take(device, wanted);
      ASSERT_NE(piece.memory, nullptr);
      ASSERT_GE(piece.bytes, wanted);
      EXPECT_EQ(device.where(begin_of(piece) + piece.bytes - 1), Memory::pinned);
      taken[begin_of(piece)] = piece.bytes;
    }
  EXPECT_EQ(taken.size(), 7u * 15);
  for (auto piece = taken.begin(); std::next(piece) != taken.end(); ++piece)
    EXPECT_LE(piece->first + piece->second, std::next(piece)->first);
  EXPECT_LE(device.allocations, 5);
}

TEST(PinnedPool, HasABound) {
  Device device;
  PinnedPool pool;
  EXPECT_EQ(pool.take(device, PinnedPool::kLongest + 1).memory, nullptr);
  std::vector<Piece> taken;
  for (;;) {
    const Piece piece = pool.take(device, 100u << 20);
    if (piece.memory == nullptr) break;
    taken.push_back(piece);
  }
  EXPECT_EQ(taken.size(), PinnedPool::kMost / (100u << 20));
  EXPECT_LE(pool.held(), PinnedPool::kMost);
  for (const Piece& piece : taken) pool.give_back(piece);
  // What is free makes way for what is longer.
  EXPECT_NE(pool.take(device, 200u << 20).memory, nullptr);
  EXPECT_LE(pool.held(), PinnedPool::kMost);
}

TEST(PinnedPool, ForgetsMemoryThatIsGone) {
  Device device;
  PinnedPool pool;
  const Piece piece = pool.take(device, 1u << 20);
  pool.give_back(piece);
  device.free_host(piece.memory);  // as a reset of the device does
  const Piece again = pool.take(device, 1u << 20);
  EXPECT_NE(again.memory, nullptr);
  EXPECT_EQ(device.allocations, 2);
  EXPECT_EQ(pool.held(), again.bytes);
}

TEST(PinnedPool, TellsMemoryOfTheProgramAtTheSameAddress) {
  Device device;
  PinnedPool pool;
  for (const std::size_t wanted : {std::size_t{1000}, std::size_t{1} << 20}) {
    const Piece piece = pool.take(device, wanted);
    pool.give_back(piece);
    // The device is reset, and the program pins the same pages, which are new.
    std::memset(piece.memory, 0, device.areas[begin_of(piece)]);
    EXPECT_NE(pool.take(device, wanted).memory, piece.memory);
  }
}

TEST(PinnedPool, HasNothingTwiceInASlabThatCameAgain) {
  Device device;
  PinnedPool pool;
  const Piece before = pool.take(device, 4096);
  pool.give_back(before);
  char* const slab = begin_of(before);
  std::memset(slab, 0, device.areas[slab]);
  device.comes_again = slab;  // where the pool's next slab lies
  const Piece first = pool.take(device, 256);
  EXPECT_EQ(first.memory, slab);
  EXPECT_EQ(first.bytes, 256u);
  const Piece second = pool.take(device, 4096);
  EXPECT_TRUE(begin_of(second) < slab || begin_of(second) >= slab + device.areas[slab]);
}

TEST(PinnedPool, WhatAResetTookIsGivenBackLate) {
  Device device;
  PinnedPool pool;
  const Piece first = pool.take(device, 4096), kept = pool.take(device, 4096);
  pool.give_back(first);
  // The device is reset, and the pool's next slab lies where the one before did.
  std::memset(first.memory, 0, device.areas[begin_of(first)]);
  device.comes_again = first.memory;
  std::set<void*> in_use;
  for (int i = 0; i < 100; ++i) in_use.insert(pool.take(device, 4096).memory);
  ASSERT_TRUE(in_use.contains(kept.memory));
  pool.give_back(kept);
  for (int i = 0; i < 300; ++i)
    EXPECT_TRUE(in_use.insert(pool.take(device, 4096).memory).second) << "two have the same memory";
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

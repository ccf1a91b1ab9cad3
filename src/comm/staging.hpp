// SPDX-License-Identifier: BSD-3-Clause
// Host memory that stands in for a buffer on a device while something that knows only host memory
// works on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/backend.hpp"

namespace trib {

/// Pinned memory is slow to come by (milliseconds) and scarce, so that the process keeps what it
/// once got and uses it again. Safe to use from several threads.
class PinnedPool {
 public:
  static PinnedPool& of_process();

  struct Piece {
    void* memory = nullptr;
    std::size_t bytes = 0;         ///< at least as many as were asked for
    std::uint64_t allocation = 0;  ///< that it is a part of
  };
  /// Of at least `bytes` bytes. Without memory: that would be too much.
  Piece take(const DeviceBackend& device, std::size_t bytes);
  void give_back(const Piece& piece);

  std::size_t held() const;  ///< bytes from the device, in use or not

  static constexpr std::size_t kMost = 512u << 20;     ///< bytes in all
  static constexpr std::size_t kLongest = 256u << 20;  ///< bytes of one piece

 private:
  /// Short pieces are cut from a slab and never go back to the device.
  static constexpr std::size_t kSlab = 1u << 20, kShortest = 256, kShort = 64u << 10;

  /// What was allocated at once: a slab or a long piece. A reset of the device takes it along, and
  /// the program may pin memory at the same address then: not with this number behind it.
  struct Allocation {
    std::size_t bytes = 0;
    char* mark = nullptr;
    std::uint64_t number = 0;
  };
  using Allocations = std::map<char*, Allocation>;
  static constexpr std::size_t kMark = 64;

  Allocations::iterator allocation_of(void* memory);
  static bool is_there(const DeviceBackend& device, const Allocation& allocation);
  void forget(Allocations::iterator allocation);
  Piece take_free(const DeviceBackend& device, std::size_t bytes);
  bool make_room(const DeviceBackend& device, std::size_t bytes);
  std::uint64_t add(char* memory, std::size_t bytes);

  mutable std::mutex mutex_;
  Allocations allocations_;
  std::multimap<std::size_t, void*> free_;
  std::size_t held_ = 0;
  std::uint64_t count_ = 0;  // of allocations
};

/// For one call: pinned memory where there is some.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer() { release(); }
  StagingBuffer(StagingBuffer&& other) noexcept { *this = std::move(other); }
  StagingBuffer& operator=(StagingBuffer&& other) noexcept {
    std::swap(piece_, other.piece_);
    return *this;
  }

  /// At least `bytes` bytes, valid until the next call or release(). Throws std::bad_alloc.
  void* get(const DeviceBackend& device, std::size_t bytes);
  /// The call is over. What the pool gives next time is looked at first: the program may have reset
  /// the device by then, which takes pinned memory along.
  void release() {
    if (piece_.memory != nullptr) [[unlikely]]
      give_back();
  }

 private:
  void give_back();

  PinnedPool::Piece piece_;  // of allocation 0: ordinary memory
};

/// Host memory at one distance from each of some ranges of addresses, for a buffer whose parts are
/// so far from each other that one range with all of them cannot be had.
class ShiftedMemory {
 public:
  struct Range {
    std::uintptr_t begin = 0, end = 0;
  };

  ShiftedMemory() = default;
  ~ShiftedMemory() { unmap(); }
  ShiftedMemory(ShiftedMemory&& other) noexcept { std::swap(mapped_, other.mapped_); }
  ShiftedMemory& operator=(ShiftedMemory&& other) noexcept {
    std::swap(mapped_, other.mapped_);
    return *this;
  }

  /// The distance, in bytes, from the ranges to memory in their stead: a multiple of a page's, and
  /// none of which `is_taken`. Throws std::bad_alloc.
  std::ptrdiff_t map(std::vector<Range> ranges,
                     const std::function<bool(std::ptrdiff_t)>& is_taken);

 private:
  bool map_at(const std::vector<Range>& ranges, std::uintptr_t distance);
  void unmap();

  std::vector<Range> mapped_;
};

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
#include "comm/staging.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace trib {

PinnedPool& PinnedPool::of_process() {
  static auto& pool = *new PinnedPool;  // never destroyed: MPI may end very late
  return pool;
}

std::size_t PinnedPool::held() const {
  const std::lock_guard lock(mutex_);
  return held_;
}

/// A free piece that is not too long.
void* PinnedPool::take_free(const DeviceBackend& device, std::size_t& bytes) {
  for (;;) {
    const auto found = free_.lower_bound(bytes);
    if (found == free_.end() || found->first > std::max(2 * bytes, kShort)) return nullptr;
    const auto [length, memory] = *found;
    free_.erase(found);
    if (device.where(memory) == Memory::pinned) {
      bytes = length;
      return memory;
    }
    // The program has reset the device, and the memory went with that.
    held_ -= length;
  }
}

/// Gives long pieces back to the device as long as `bytes` more are too much.
bool PinnedPool::make_room(const DeviceBackend& device, std::size_t bytes) {
  while (held_ + bytes > kMost) {
    if (free_.empty() || free_.rbegin()->first <= kShort) return false;
    const auto longest = std::prev(free_.end());
    device.free_host(longest->second);
    held_ -= longest->first;
    free_.erase(longest);
  }
  return true;
}

void* PinnedPool::take(const DeviceBackend& device, std::size_t& bytes) {
  const bool is_short = bytes <= kShort;
  const std::size_t wanted =
      is_short ? std::bit_ceil(std::max(bytes, kShortest)) : (bytes + kShort - 1) / kShort * kShort;
  if (wanted > kLongest) return nullptr;
  const std::lock_guard lock(mutex_);
  std::size_t length = wanted;
  if (void* const memory = take_free(device, length)) {
    bytes = length;
    return memory;
  }
  const std::size_t allocated = is_short ? kSlab : wanted;
  if (!make_room(device, allocated)) return nullptr;
  auto* const memory = static_cast<char*>(device.allocate_host(allocated));
  if (memory == nullptr) return nullptr;
  held_ += allocated;
  for (std::size_t at = wanted; at < allocated; at += wanted) free_.emplace(wanted, memory + at);
  bytes = wanted;
  return memory;
}

void PinnedPool::give_back(void* memory, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  free_.emplace(bytes, memory);
}

void* StagingBuffer::get(const DeviceBackend& device, std::size_t bytes) {
  if (bytes <= bytes_) return memory_;
  release();
  std::size_t length = bytes;
  memory_ = PinnedPool::of_process().take(device, length);
  is_pinned_ = memory_ != nullptr;
  if (memory_ == nullptr && (memory_ = std::malloc(bytes)) == nullptr) throw std::bad_alloc();
  bytes_ = length;
  return memory_;
}

void StagingBuffer::give_back() {
  if (is_pinned_)
    PinnedPool::of_process().give_back(memory_, bytes_);
  else
    std::free(memory_);
  is_pinned_ = false;
  memory_ = nullptr;
  bytes_ = 0;
}

}  // namespace trib

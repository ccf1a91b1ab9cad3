// SPDX-License-Identifier: BSD-3-Clause
#include "comm/staging.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <iterator>
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

/// Where a piece was cut from; end(): that is gone.
PinnedPool::Allocations::iterator PinnedPool::allocation_of(void* memory) {
  auto* const at = static_cast<char*>(memory);
  const auto behind = allocations_.upper_bound(at);
  if (behind == allocations_.begin()) return allocations_.end();
  const auto found = std::prev(behind);
  return at < found->first + found->second.bytes ? found : allocations_.end();
}

bool PinnedPool::is_there(const DeviceBackend& device, const Allocation& allocation) {
  return device.where(allocation.mark) == Memory::pinned &&
         std::memcmp(allocation.mark, &allocation.number, sizeof allocation.number) == 0;
}

/// The program has reset the device, and the memory went with that.
void PinnedPool::forget(Allocations::iterator allocation) {
  char* const begin = allocation->first;
  char* const end = begin + allocation->second.bytes;
  std::erase_if(free_, [&](const auto& piece) {
    auto* const at = static_cast<char*>(piece.second);
    return at >= begin && at < end;
  });
  held_ -= allocation->second.bytes;
  allocations_.erase(allocation);
}

/// A free piece that is not too long.
PinnedPool::Piece PinnedPool::take_free(const DeviceBackend& device, std::size_t bytes) {
  for (;;) {
    const auto found = free_.lower_bound(bytes);
    if (found == free_.end() || found->first > std::max(2 * bytes, kShort)) return {};
    const auto [length, memory] = *found;
    const auto allocation = allocation_of(memory);
    if (is_there(device, allocation->second)) {
      free_.erase(found);
      return {memory, length, allocation->second.number};
    }
    forget(allocation);
  }
}

/// Gives long pieces back to the device as long as `bytes` more are too much.
bool PinnedPool::make_room(const DeviceBackend& device, std::size_t bytes) {
  while (held_ + bytes > kMost) {
    if (free_.empty() || free_.rbegin()->first <= kShort) return false;
    const auto longest = allocation_of(free_.rbegin()->second);
    if (is_there(device, longest->second)) device.free_host(longest->first);
    forget(longest);
  }
  return true;
}

/// `bytes` and the mark were allocated there. Its number.
std::uint64_t PinnedPool::add(char* memory, std::size_t bytes) {
  // What was there before is gone.
  for (auto old = allocations_.begin(); old != allocations_.end();) {
    const auto next = std::next(old);
    if (old->first < memory + bytes + kMark && memory < old->second.mark + kMark) forget(old);
    old = next;
  }
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::uint64_t number = (static_cast<std::uint64_t>(now) + ++count_) * 0x9e3779b97f4a7c15u;
  const Allocation& added = allocations_[memory] = {bytes, memory + bytes, number};
  std::memcpy(added.mark, &added.number, sizeof added.number);
  held_ += bytes;
  return number;
}

PinnedPool::Piece PinnedPool::take(const DeviceBackend& device, std::size_t bytes) {
  const bool is_short = bytes <= kShort;
  const std::size_t wanted =
      is_short ? std::bit_ceil(std::max(bytes, kShortest)) : (bytes + kShort - 1) / kShort * kShort;
  if (wanted > kLongest) return {};
  const std::lock_guard lock(mutex_);
  if (const Piece piece = take_free(device, wanted); piece.memory != nullptr) return piece;
  const std::size_t allocated = is_short ? kSlab : wanted;
  if (!make_room(device, allocated)) return {};
  auto* const memory = static_cast<char*>(device.allocate_host(allocated + kMark));
  if (memory == nullptr) return {};
  const std::uint64_t number = add(memory, allocated);
  for (std::size_t at = wanted; at < allocated; at += wanted) free_.emplace(wanted, memory + at);
  return {memory, wanted, number};
}

void PinnedPool::give_back(const Piece& piece) {
  const std::lock_guard lock(mutex_);
  const auto allocation = allocation_of(piece.memory);
  // A reset may have taken it along, and a later allocation may lie there.
  if (allocation != allocations_.end() && allocation->second.number == piece.allocation)
    free_.emplace(piece.bytes, piece.memory);
}

namespace {

/// Of which only what is touched takes memory: parts of a buffer may be far from each other.
void* map(std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* StagingBuffer::get(const DeviceBackend& device, std::size_t bytes) {
  if (bytes <= piece_.bytes) return piece_.memory;
  release();
  PinnedPool::Piece piece = PinnedPool::of_process().take(device, bytes);
  if (piece.memory == nullptr) piece = {map(bytes), bytes, 0};
  piece_ = piece;
  return piece_.memory;
}

void StagingBuffer::give_back() {
  if (piece_.allocation != 0)
    PinnedPool::of_process().give_back(piece_);
  else
    ::munmap(piece_.memory, piece_.bytes);
  piece_ = {};
}

// ------------------------------------------------------------------------------ parts far apart

std::ptrdiff_t ShiftedMemory::map(std::vector<Range> ranges,
                                  const std::function<bool(std::ptrdiff_t)>& is_taken) {
  unmap();
  constexpr std::uintptr_t kPage = 64u << 10;  // no machine has longer ones
  for (auto& [begin, end] : ranges) {
    begin = begin / kPage * kPage;
    end = (end + kPage - 1) / kPage * kPage;
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  std::vector<Range> joined;
  for (const Range& range : ranges) {
    if (!joined.empty() && range.begin <= joined.back().end)
      joined.back().end = std::max(joined.back().end, range.end);
    else
      joined.push_back(range);
  }
  // Downwards: the stack is where addresses end. An odd number of some GiB, as others take round
  // ones.
  constexpr std::uintptr_t kStep = 1237ull << 30;
  for (std::uintptr_t step = kStep; step <= 32 * kStep; step += kStep) {
    const std::ptrdiff_t distance = -static_cast<std::ptrdiff_t>(step);
    if (!is_taken(distance) && map_at(joined, static_cast<std::uintptr_t>(distance)))
      return distance;
  }
  throw std::bad_alloc();
}

bool ShiftedMemory::map_at(const std::vector<Range>& ranges, std::uintptr_t distance) {
  for (const Range& range : ranges) {
    auto* const wanted = reinterpret_cast<void*>(range.begin + distance);
    const std::size_t bytes = range.end - range.begin;
    void* const memory =
        ::mmap(wanted, bytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory != MAP_FAILED) {
      const auto at = reinterpret_cast<std::uintptr_t>(memory);
      mapped_.push_back({at, at + bytes});
    }
    if (memory != wanted) {  // taken; a kernel that does not know the flag chooses another place
      unmap();
      return false;
    }
  }
  return true;
}

void ShiftedMemory::unmap() {
  for (const auto& [begin, end] : mapped_) ::munmap(reinterpret_cast<void*>(begin), end - begin);
  mapped_.clear();
}

}  // namespace trib

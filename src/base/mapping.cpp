// SPDX-License-Identifier: BSD-3-Clause
#include "base/mapping.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace trib {
namespace {

void* map(void* at, std::size_t bytes, int protection, int flags, int fd) {
  const long result = ::syscall(SYS_mmap, at, bytes, protection, flags | MAP_NORESERVE, fd, 0L);
  return result == -1 ? MAP_FAILED : reinterpret_cast<void*>(result);
}

}  // namespace

std::byte* map_unseen(int fd, std::size_t bytes, std::size_t alignment) noexcept {
  // Of a reservation that is longer, what is not wanted.
  void* const all = map(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (all == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(all);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(all) % alignment;
  std::byte* const begin = first + before;
  if (before > 0) unmap_unseen(first, before);
  if (before < alignment) unmap_unseen(begin + bytes, alignment - before);
  if (map(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd) != MAP_FAILED)
    return begin;
  unmap_unseen(begin, bytes);
  return nullptr;
}

void unmap_unseen(std::byte* begin, std::size_t bytes) noexcept {
  ::syscall(SYS_munmap, begin, bytes);
}

}  // namespace trib

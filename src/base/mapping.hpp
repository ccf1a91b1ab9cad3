// SPDX-License-Identifier: BSD-3-Clause
// Files in memory past the functions of the C library: networks watch those, for memory that
// programs give them, and keep a note of each call. What ranks share is nothing to them.
#pragma once

#include <cstddef>

namespace trib {

/// Maps `bytes` of a file for reading and writing, at a multiple of `alignment`. Null: errno says
/// why not.
std::byte* map_unseen(int fd, std::size_t bytes, std::size_t alignment) noexcept;
void unmap_unseen(std::byte* begin, std::size_t bytes) noexcept;

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <unistd.h>

#include <cstddef>

namespace trib {

/// What processors fetch ahead in ends with such a page, whatever the system's are.
inline constexpr std::size_t kPage = 4096;
/// At least, and a multiple of the system's pages.
inline constexpr std::size_t kHugePage = 2 << 20;

/// What the system maps at the least.
inline std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace trib

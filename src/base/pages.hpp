// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>

namespace trib {

inline constexpr std::size_t kPage = 4096, kHugePage = 2 << 20;

constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace trib

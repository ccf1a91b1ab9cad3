// SPDX-License-Identifier: BSD-3-Clause
// How recursive_doubling.cpp and rabenseifner.cpp fit any number of ranks to a power of two.
#pragma once

#include <bit>

namespace trib {

/// The corners of a hypercube are ranks, in order; ranks too many are extras: each hands its
/// contribution to the rank before it, a corner. Neighbours join first, so that sums are always
/// over consecutive ranks.
struct Hypercube {
  explicit Hypercube(int size)
      : corners(static_cast<int>(std::bit_floor(static_cast<unsigned>(size)))),
        extras(size - corners) {}

  int corners;
  int extras;

  int rounds() const { return std::bit_width(static_cast<unsigned>(corners)) - 1; }
  bool is_extra(int rank) const { return rank < 2 * extras && rank % 2 == 1; }
  bool has_extra(int rank) const { return rank < 2 * extras && rank % 2 == 0; }
  int corner_of(int rank) const { return rank < 2 * extras ? rank / 2 : rank - extras; }
  int rank_of(int corner) const { return corner < extras ? 2 * corner : corner + extras; }
  int reversed(int corner) const {  ///< its bits, in reverse
    int result = 0;
    for (int bit = 1; bit < corners; bit *= 2) result = 2 * result + ((corner & bit) != 0 ? 1 : 0);
    return result;
  }
};

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// What one rank does in a pass of a lowered schedule that copy engines run: which chunks it pushes
// where, what it folds or copies in its own memory, and what has to come before each. Plain data,
// the same for every pass. copy_program.hpp drives it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/schedule.hpp"

namespace trib::cuda {

inline constexpr int kLargeUnits = 64;  // of a window of a large inbox
inline constexpr int kPushes = 64;      // of a pass
inline constexpr int kMoves = 64;       // of a pass

constexpr std::uint64_t bit(int index) { return std::uint64_t{1} << index; }

struct CopyPlan {
  CopyPlan(const std::vector<Schedule>& all, int rank);

  /// A chunk of `in`, of `out`, or in a unit of this rank's inbox.
  struct Place {
    Buffer buffer = Buffer::in;  // scratch: the inbox
    int chunk = 0;
    int unit = -1;
  };
  /// A copy into a peer's unit.
  struct Push {
    Place from;
    int reader, unit;   // where to
    int arrival = -1;   // the unit that has to be filled before: a peer's data, passed on
    int producer = -1;  // the move that has to be done before
    int hop = 0;        // how many pushes come before it, one after the other, on whatever ranks
  };
  /// What a kernel does in this rank's own memory.
  struct Move {
    bool is_copy;  // of one source; otherwise they are folded
    std::vector<Place> from;
    Place to;
    std::vector<int> arrivals;  // units that have to be filled before
    std::uint64_t after = 0;    // moves that have to be launched before
  };

  /// False (on all ranks alike): the schedule needs more than there is.
  bool is_possible = true;
  std::vector<Push> pushes;
  std::vector<Move> moves;
  /// Of pushes, by how far behind this rank the reader is: the next rank's first. Sorted by hop.
  std::vector<std::vector<int>> lanes;
  int units = 0;  ///< of a window; the same on all ranks
  int hops = 0;   ///< the most that a push has, on whatever rank
  /// Of this rank's units: who fills it, and how many pushes and moves read it.
  std::array<int, kLargeUnits> writer{};
  std::array<std::uint8_t, kLargeUnits> uses{};
  std::uint64_t inputs = 0;  ///< bits of the pushes that read `in`

 private:
  void translate(const std::vector<Schedule>& all, int rank);
  void order(int rank, int size);
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// One row per algorithm: docs/algorithms.md, `trib info` and the tests are made from the table.
// Next: registry.cpp.
#pragma once

#include <span>
#include <string_view>

#include "schedule/schedule.hpp"

namespace trib {

/// How contributions are grouped: what the bits of a floating-point sum depend on. Algorithms of
/// the same association give the same bits in the same layout (ring: also if the chunks are the
/// same), but for types whose sums are made in a wider one: those of chains and rings are rounded
/// to the type on their way, those of two_shot_as_ring at the end.
enum class Association {
  rank_order,   ///< a left fold over ranks 0, 1, 2, ...
  groups,       ///< a left fold in groups of ranks, then one over the groups: see Groups
  devices,      ///< a left fold over the ranks of each device, then one over the devices
  chain,        ///< a left fold over ranks root+1, ..., root
  rounded,      ///< rank_order, but each sum is rounded to the type: the same where that is what
                ///< sums are made in
  ring,         ///< each chunk in ring order, starting behind its owner
  hypercube,    ///< neighbours beyond a power of two first, then pairwise by distance 1, 2, 4, ...
  tree2,        ///< by subtree of a binomial tree rooted at the root (rank 0 where there is none),
                ///< or of several by level: see tree.cpp
  tree4,        ///< the same of radix 4
  tree8,        ///< the same of radix 8
  mixed_tree,   ///< the same of radices that depend on how many ranks make the tree
  paired_tree,  ///< the same, after neighbours beyond a power of two
};
std::string_view name(Association association);
constexpr bool is_tree(Association association) { return association >= Association::tree2; }

/// Sets of collectives, a bit for each.
inline constexpr unsigned kReductions = (1u << kCollectives) - 1;
inline constexpr unsigned kEveryCollective = (1u << kAllCollectives) - 1;

struct Algorithm {
  std::string_view name;
  std::string_view summary;  ///< one line for people
  std::string_view source;   ///< who described it
  std::string_view steps;    ///< number of dependent steps, as a formula in p
  std::string_view
      bytes;  ///< bytes that a rank takes in, allreduce of n bytes, as a formula in n and p
  Association association;
  unsigned collectives = kReductions;  ///< that it serves
  /// Defined for every shape of these collectives with size >= 2: see all_ranks().
  Schedule (*schedule)(const Shape& shape);

  constexpr bool serves(Collective collective) const {
    return (collectives >> static_cast<int>(collective) & 1) != 0;
  }
};

std::span<const Algorithm> algorithms();

/// Null if there is no such row.
const Algorithm* find_algorithm(std::string_view name);

/// The schedules of all ranks. Throws Error(Code::internal) if the algorithm does not serve the
/// shape's collective.
std::vector<Schedule> all_ranks(const Algorithm& algorithm, Shape shape);

}  // namespace trib

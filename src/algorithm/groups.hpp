// SPDX-License-Identifier: BSD-3-Clause
// How grouped_two_shot.cpp divides ranks into groups, and the vector among the ranks of a group.
#pragma once

namespace trib {

/// Blocks of consecutive ranks, about as many as each has ranks. Each group shares out the chunks
/// of the vector, one per rank of the communicator, in consecutive runs.
struct Groups {
  explicit Groups(int ranks) : size(ranks) {
    while (2 * count * count < size) count *= 2;
  }

  int size;       ///< ranks
  int count = 1;  ///< groups

  int first(int group) const { return group * size / count; }
  int size_of(int group) const { return first(group + 1) - first(group); }
  int group_of(int rank) const { return ((rank + 1) * count - 1) / size; }
  int share_begin(int rank) const { return place(rank) * size / size_of(group_of(rank)); }
  int share_end(int rank) const { return (place(rank) + 1) * size / size_of(group_of(rank)); }
  /// The rank of `group` whose share has `chunk`.
  int holder(int group, int chunk) const {
    return first(group) + ((chunk + 1) * size_of(group) - 1) / size;
  }

 private:
  int place(int rank) const { return rank - first(group_of(rank)); }
};

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// How grouped_two_shot.cpp divides ranks into groups, and the vector among the ranks of a group.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "schedule/schedule.hpp"

namespace trib {

/// About as many groups as each has ranks, none across domains of a level: of the innermost one
/// whose domains are not much smaller than that, larger ones are cut. Each group shares out the
/// chunks of the vector, one per rank of the communicator, in consecutive runs.
class Groups {
 public:
  explicit Groups(const Shape& shape);

  int count() const { return static_cast<int>(begin_.size()) - 1; }
  std::span<const int> members(int group) const {  ///< neighbours of inner levels side by side
    return std::span(order_).subspan(begin_at(group), static_cast<std::size_t>(size_of(group)));
  }
  int group_of(int rank) const { return group_[static_cast<std::size_t>(rank)]; }
  int share_begin(int rank) const { return place(rank) * size_ / size_of(group_of(rank)); }
  int share_end(int rank) const { return (place(rank) + 1) * size_ / size_of(group_of(rank)); }
  /// The rank of `group` whose share has `chunk`.
  int holder(int group, int chunk) const {
    return members(group)[static_cast<std::size_t>(((chunk + 1) * size_of(group) - 1) / size_)];
  }

 private:
  std::size_t begin_at(int group) const {
    return static_cast<std::size_t>(begin_[static_cast<std::size_t>(group)]);
  }
  int size_of(int group) const { return static_cast<int>(begin_at(group + 1) - begin_at(group)); }
  int place(int rank) const { return place_[static_cast<std::size_t>(rank)]; }

  int size_;                        // ranks
  std::vector<int> order_;          // the ranks, group by group
  std::vector<int> begin_;          // of each group in order_; last, the end
  std::vector<int> group_, place_;  // of each rank: its group, and which of its members it is
};

}  // namespace trib

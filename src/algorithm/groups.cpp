// SPDX-License-Identifier: BSD-3-Clause
#include "algorithm/groups.hpp"

#include <algorithm>

namespace trib {

Groups::Groups(const Shape& shape) : size_(shape.size) {
  int wanted = 1;  // groups
  while (2 * wanted * wanted < size_) wanted *= 2;

  const auto domain = [](const Level& level, int rank) {
    return level[static_cast<std::size_t>(rank)];
  };
  for (int rank = 0; rank < size_; ++rank) order_.push_back(rank);
  Level cut(static_cast<std::size_t>(size_), 0);
  for (auto level = shape.levels.rbegin(); level != shape.levels.rend(); ++level) {
    // From the innermost on: what an outer level sorts keeps its order within.
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return domain(*level, a) < domain(*level, b); });
  }
  for (const Level& level : shape.levels)
    if (domains(level) <= 2 * wanted) cut = level;

  for (int begin = 0, end = 0; begin < size_; begin = end) {
    const auto domain_at = [&](int at) {
      return domain(cut, order_[static_cast<std::size_t>(at)]);
    };
    while (end < size_ && domain_at(end) == domain_at(begin)) ++end;
    const int ranks = end - begin;
    const int parts = std::max(1, (2 * ranks * wanted + size_) / (2 * size_));  // to the nearest
    for (int part = 0; part < parts; ++part) begin_.push_back(begin + part * ranks / parts);
  }
  begin_.push_back(size_);

  group_.resize(static_cast<std::size_t>(size_));
  place_.resize(static_cast<std::size_t>(size_));
  for (int group = 0; group < count(); ++group) {
    int place = 0;
    for (const int rank : members(group)) {
      group_[static_cast<std::size_t>(rank)] = group;
      place_[static_cast<std::size_t>(rank)] = place++;
    }
  }
}

}  // namespace trib

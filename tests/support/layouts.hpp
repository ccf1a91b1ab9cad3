// SPDX-License-Identifier: BSD-3-Clause
// Ways in which ranks may share sockets and caches.
#pragma once

#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "algorithm/registry.hpp"

namespace trib::test {

/// The domain of each rank, by a formula.
inline Level level_of(int ranks, const std::function<int(int)>& domain) {
  Level level;
  for (int rank = 0; rank < ranks; ++rank) level.push_back(domain(rank));
  return level;
}

/// Each once, none of them empty: consecutive, dealt out in turn, of unequal sizes, ranks that are
/// alone, several levels, and whatever comes.
inline std::vector<Levels> layouts(int ranks) {
  const auto halves = [ranks](int r) { return 2 * r / ranks; };
  const auto quarters = [ranks](int r) { return 4 * r / ranks; };
  std::vector<std::vector<Level>> all{
      {level_of(ranks, halves)},
      {level_of(ranks, [](int r) { return r % 2; })},
      {level_of(ranks, [](int r) { return r % 3; })},
      {level_of(ranks, [](int r) { return r / 2; })},
      {level_of(ranks, [](int r) { return r > 0 ? 1 : 0; })},
      {level_of(ranks, [ranks](int r) { return r == ranks - 1 ? 1 : 0; })},
      {level_of(ranks, [ranks](int r) { return r == ranks / 2 ? 1 : 0; })},
      {level_of(ranks, [ranks](int r) { return 3 * r < ranks ? 0 : r; })},  // most are alone
      {level_of(ranks, halves), level_of(ranks, quarters)},
      {level_of(ranks, [](int r) { return r % 2; }), level_of(ranks, [](int r) { return r % 4; })},
      {level_of(ranks, halves), level_of(ranks, quarters),
       level_of(ranks, [ranks](int r) { return 8 * r / ranks; })},
  };
  std::mt19937 random(static_cast<unsigned>(ranks));  // NOLINT: the same in every run
  for (int i = 0; i < 3; ++i) {
    const Level outer = level_of(ranks, [&](int) { return static_cast<int>(random() % 3); });
    all.push_back({outer, level_of(ranks, [&](int r) {
                     return 3 * outer[static_cast<std::size_t>(r)] + static_cast<int>(random() % 3);
                   })});
  }
  std::vector<Levels> different;
  std::set<std::string> seen;
  for (const auto& partitions : all) {
    Levels levels = make_levels(partitions);
    if (!levels.empty() && seen.insert(to_string(levels)).second)
      different.push_back(std::move(levels));
  }
  return different;
}

/// Whether an algorithm's schedules depend on levels at all.
inline bool knows_levels(const Algorithm& algorithm) {
  const auto text = [&](const Levels& levels) {
    Shape shape;
    shape.size = 8;
    shape.levels = levels;
    std::string all;
    for (const Schedule& schedule : all_ranks(algorithm, shape)) all += to_string(schedule);
    return all;
  };
  return text({}) != text(make_levels({level_of(8, [](int r) { return r % 2; })}));
}

}  // namespace trib::test

// SPDX-License-Identifier: BSD-3-Clause
// What lowering says of a schedule as a whole. That lowered schedules are right:
// every_algorithm_test.cpp.
#include <gtest/gtest.h>

#include "algorithm/registry.hpp"

namespace trib {
namespace {

Shape shape_of(Collective collective, int size) {
  Shape shape;
  shape.collective = collective;
  shape.size = size;
  return shape;
}

TEST(Lower, CountsHandOvers) {
  struct Case {
    const char* algorithm;
    Collective collective;
    int size, hops;
  };
  // Trees: up level by level, and down again.
  const Case cases[] = {
      {"one_shot", Collective::allreduce, 1, 0},  {"one_shot", Collective::allreduce, 16, 1},
      {"two_shot", Collective::allreduce, 16, 2}, {"tree4", Collective::allreduce, 4, 2},
      {"tree4", Collective::allreduce, 9, 4},     {"tree4", Collective::allreduce, 16, 4},
      {"tree4", Collective::allreduce, 64, 6},    {"tree4", Collective::reduce, 16, 2},
      {"tree8", Collective::allreduce, 64, 4},    {"ring", Collective::allreduce, 6, 6},
  };
  for (const auto& [name, collective, size, hops] : cases) {
    const Shape shape = shape_of(collective, size);
    const auto all = all_ranks(*find_algorithm(name), shape);
    for (const Schedule& schedule : lower(all, shape, Reach::scratch))
      EXPECT_EQ(schedule.hops, hops) << name << " over " << size << " ranks";
  }
}

/// Short payload comes in lines of its own, for each chunk: they are what a rank waits for, not the
/// slots that hold several.
TEST(Lower, WaitsAreThoseForChunks) {
  const Shape shape = shape_of(Collective::reduce_scatter, 16);
  const auto waits = [&](const char* name) {
    const auto all = all_ranks(*find_algorithm(name), shape);
    return lower(all, shape, Reach::scratch).front().waits;
  };
  EXPECT_EQ(waits("one_shot"), 15);
  // In four groups of four: a share of four chunks of each other member, then the sums of four
  // chunks, one of which is needed, of a member of each group.
  EXPECT_EQ(waits("grouped_two_shot"), 3 * 4 + 4 * 4);
}

/// Ranks that make their own part alone choose alike by these.
TEST(Lower, ARanksOwnPartSaysTheSameOfTheWhole) {
  for (const char* const name : {"one_shot", "two_shot", "returning_two_shot", "tree4", "ring"}) {
    const Shape shape = shape_of(Collective::allreduce, 7);
    const auto all = all_ranks(*find_algorithm(name), shape);
    const auto whole = lower(all, shape, Reach::scratch);
    for (int rank = 0; rank < shape.size; ++rank) {
      const auto parts = lower(all, shape, Reach::scratch, rank);
      const Schedule& part = parts[static_cast<std::size_t>(rank)];
      const Schedule& first = whole.front();
      EXPECT_EQ(part.hops, first.hops) << name;
      EXPECT_EQ(part.waits, first.waits) << name;
      EXPECT_EQ(part.readers_of_slot, first.readers_of_slot) << name;
      EXPECT_EQ(part.flags, first.flags) << name;
      EXPECT_EQ(part.units, first.units) << name;
      EXPECT_EQ(part.stages, first.stages) << name;
      EXPECT_EQ(part.returns, first.returns) << name;
    }
  }
}

}  // namespace
}  // namespace trib

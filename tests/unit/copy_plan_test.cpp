// SPDX-License-Identifier: BSD-3-Clause
// What copy engines are to do (backend/cuda/copy_plan.hpp), for all algorithms: done in any order
// that the plans permit, with `out` over `in` where it can be, it gives every result.
#include "backend/cuda/copy_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>

#include "algorithm/registry.hpp"
#include "backend/cuda/copy_plan.cpp"  // NOLINT: of a module that nothing can link; has no CUDA in it

namespace trib::cuda {
namespace {

using Value = std::vector<int>;  // the ranks that have contributed, in the order of the fold

struct Rank {
  CopyPlan plan;
  std::map<int, Value> in, out, units;  // by chunk, chunk and unit
  std::uint64_t pushed = 0, moved = 0;
  bool is_in_place = false;

  Value& at(const CopyPlan::Place& place) {
    if (place.buffer == Buffer::scratch) return units[place.unit];
    return place.buffer == Buffer::in || is_in_place ? in[place.chunk] : out[place.chunk];
  }
  bool has(int unit) const { return unit < 0 || units.count(unit) > 0; }
  bool can_push(const CopyPlan::Push& push) const {
    return has(push.arrival) && (push.producer < 0 || (moved & bit(push.producer)) != 0);
  }
  bool can_move(const CopyPlan::Move& move) const {
    if ((moved & move.after) != move.after) return false;
    if (move.to.buffer == Buffer::out && (pushed & plan.inputs) != plan.inputs) return false;
    return std::all_of(move.arrivals.begin(), move.arrivals.end(),
                       [&](int unit) { return has(unit); });
  }
};

void run(const Algorithm& algorithm, const Shape& shape, std::mt19937& random, int& possible) {
  const std::vector<Schedule> all = lower(all_ranks(algorithm, shape), shape, Reach::scratch);
  std::vector<Rank> ranks;
  for (int r = 0; r < shape.size; ++r) {
    ranks.push_back({CopyPlan(all, r), {}, {}, {}});
    for (int c = 0; c < all[0].chunks; ++c) ranks.back().in[c] = {r};
    ranks.back().is_in_place = !is_scatter(shape.collective) && random() % 2 == 0;
    ASSERT_EQ(ranks[0].plan.is_possible, ranks.back().plan.is_possible);
    ASSERT_EQ(ranks[0].plan.units, ranks.back().plan.units);
    ASSERT_EQ(ranks[0].plan.hops, ranks.back().plan.hops);
  }
  if (!ranks[0].plan.is_possible) return;
  ++possible;
  struct Action {
    int rank, index;
    bool is_push;
  };
  for (;;) {
    std::vector<Action> ready;
    for (int r = 0; r < shape.size; ++r) {
      const Rank& rank = ranks[static_cast<std::size_t>(r)];
      for (int i = 0; i < static_cast<int>(rank.plan.pushes.size()); ++i)
        if ((rank.pushed & bit(i)) == 0 &&
            rank.can_push(rank.plan.pushes[static_cast<std::size_t>(i)]))
          ready.push_back({r, i, true});
      for (int i = 0; i < static_cast<int>(rank.plan.moves.size()); ++i)
        if ((rank.moved & bit(i)) == 0 &&
            rank.can_move(rank.plan.moves[static_cast<std::size_t>(i)]))
          ready.push_back({r, i, false});
    }
    if (ready.empty()) break;
    const Action action = ready[random() % ready.size()];
    Rank& rank = ranks[static_cast<std::size_t>(action.rank)];
    if (action.is_push) {
      const auto& push = rank.plan.pushes[static_cast<std::size_t>(action.index)];
      Rank& reader = ranks[static_cast<std::size_t>(push.reader)];
      EXPECT_FALSE(reader.has(push.unit)) << "two pushes into one unit";
      EXPECT_EQ(reader.plan.uses[static_cast<std::size_t>(push.unit)] > 0,
                reader.plan.writer[static_cast<std::size_t>(push.unit)] == action.rank);
      reader.units[push.unit] = rank.at(push.from);
      rank.pushed |= bit(action.index);
    } else {
      const auto& move = rank.plan.moves[static_cast<std::size_t>(action.index)];
      Value value;
      for (const auto& from : move.from)
        value.insert(value.end(), rank.at(from).begin(), rank.at(from).end());
      rank.at(move.to) = value;
      rank.moved |= bit(action.index);
    }
  }
  for (int r = 0; r < shape.size; ++r) {
    Rank& rank = ranks[static_cast<std::size_t>(r)];
    ASSERT_EQ(std::popcount(rank.pushed), static_cast<int>(rank.plan.pushes.size()));
    ASSERT_EQ(std::popcount(rank.moved), static_cast<int>(rank.plan.moves.size()));
    for (int c = 0; c < all[0].chunks; ++c) {
      if (shape.collective == Collective::reduce && r != shape.root) continue;
      if (is_scatter(shape.collective) && c != r && all[0].chunks == shape.size) continue;
      Value value = rank.at({Buffer::out, c, -1});
      if (algorithm.association != Association::rank_order) std::sort(value.begin(), value.end());
      Value wanted(static_cast<std::size_t>(shape.size));
      for (int i = 0; i < shape.size; ++i) wanted[static_cast<std::size_t>(i)] = i;
      EXPECT_EQ(value, wanted) << "chunk " << c << " of rank " << r;
    }
  }
}

TEST(CopyPlan, EveryAlgorithm) {
  std::mt19937 random(7);
  for (const Algorithm& algorithm : algorithms()) {
    int possible = 0;
    for (int collective = 0; collective < kCollectives; ++collective)
      for (int size = 2; size <= 9; ++size)
        for (const int root : {0, size / 2, size - 1}) {
          Shape shape;
          shape.collective = static_cast<Collective>(collective);
          shape.size = size;
          shape.root = root;
          shape.is_on_device = true;
          if (!algorithm.serves(shape.collective)) continue;
          SCOPED_TRACE(std::string(algorithm.name) + " " + std::string(name(shape.collective)) +
                       " over " + std::to_string(size) + " ranks, root " + std::to_string(root));
          run(algorithm, shape, random, possible);
          if (HasFatalFailure()) return;
        }
    EXPECT_GT(possible, 0) << algorithm.name;
  }
}

/// What the table uses is possible over as many GPUs as a machine has.
TEST(CopyPlan, SixteenRanks) {
  std::mt19937 random(7);
  int possible = 0;
  for (const char* const wanted : {"two_shot", "rootless", "one_shot"})
    for (const auto collective :
         {Collective::allreduce, Collective::reduce, Collective::reduce_scatter}) {
      Shape shape;
      shape.collective = collective;
      shape.size = 16;
      shape.is_on_device = true;
      run(*find_algorithm(wanted), shape, random, possible);
    }
  EXPECT_EQ(possible, 9);
}

}  // namespace
}  // namespace trib::cuda

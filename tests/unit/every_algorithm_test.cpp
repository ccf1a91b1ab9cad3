// SPDX-License-Identifier: BSD-3-Clause
// Walks the table of algorithms: every row, collective, number of ranks and root passes verify(),
// as written and lowered, in place and not, alone and among other calls; with levels, too, where an
// algorithm knows them. verify_test.cpp shows that
// verify() would notice.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "algorithm/groups.hpp"
#include "algorithm/registry.hpp"
#include "base/error.hpp"
#include "schedule/verify.hpp"
#include "support/layouts.hpp"
#include "support/sanitizer.hpp"

namespace trib {

void PrintTo(const Algorithm& algorithm, std::ostream* out) { *out << algorithm.name; }

namespace {

constexpr int kMaxSize = test::less_if_sanitized(33, 17);  // one rank more than a power of two

/// Most of the time goes into the largest numbers of ranks. Beyond 17 those beside powers of two
/// and squares, primes, and what radices 3, 4 and 5 make.
bool is_tried(int size) {
  constexpr int kLarge[] = {20, 23, 24, 25, 27, 31, 32, 33};
  return size <= 17 || std::find(std::begin(kLarge), std::end(kLarge), size) != std::end(kLarge);
}

std::vector<int> roots(Collective collective, int size) {
  if (!has_root(collective)) return {0};
  if (size > (collective == Collective::broadcast ? 17 : 9)) return {0, 1, size / 2, size - 1};
  std::vector<int> all(size);
  for (int root = 0; root < size; ++root) all[root] = root;
  return all;
}

template <class F>
void for_each_layout(const Algorithm& algorithm, Shape shape, F&& f) {
  if (!is_reduction(shape.collective) || !test::knows_levels(algorithm)) return;
  int number = 0;
  for (const Levels& levels : test::layouts(shape.size)) {
    if (shape.size > 12 && ++number % 5 != shape.size % 5) continue;  // it takes long
    shape.levels = levels;
    const std::set<int> few{0, 1, shape.size - 1};
    for (const int root : has_root(shape.collective) ? few : std::set<int>{0}) {
      shape.root = root;
      f(shape);
    }
  }
}

template <class F>
void for_each_shape(const Algorithm& algorithm, int max_size, F&& f) {
  for (int collective = 0; collective < kAllCollectives; ++collective) {
    if (!algorithm.serves(static_cast<Collective>(collective))) continue;
    for (int size = 1; size <= max_size; ++size) {
      if (!is_tried(size)) continue;
      Shape shape;
      shape.collective = static_cast<Collective>(collective);
      shape.size = size;
      for (const int root : roots(shape.collective, size)) {
        shape.root = root;
        f(shape);
      }
      for_each_layout(algorithm, shape, f);
    }
  }
}

bool is_rank_order(const Algorithm& algorithm) {
  return algorithm.association == Association::rank_order;
}

VerifiedCall direct_call(const Algorithm& algorithm, Shape shape, bool in_place) {
  shape.in_place = in_place;
  return {shape, all_ranks(algorithm, shape), in_place, 1, is_rank_order(algorithm)};
}

/// Lowered schedules do not depend on whether a call is in place.
VerifiedCall lowered_call(const Algorithm& algorithm, const Shape& shape, Reach reach,
                          bool in_place, int runs) {
  return {shape, lower(all_ranks(algorithm, shape), shape, reach), in_place, runs,
          is_rank_order(algorithm)};
}

std::string describe(const Algorithm& algorithm, const Shape& shape) {
  return std::string(algorithm.name) + " " + std::string(name(shape.collective)) + ", " +
         std::to_string(shape.size) + " ranks, root " + std::to_string(shape.root) +
         (shape.levels.empty() ? "" : ", levels " + to_string(shape.levels)) + " ";
}

class EveryAlgorithm : public testing::TestWithParam<Algorithm> {};

TEST_P(EveryAlgorithm, IsRightAsWritten) {
  for_each_shape(GetParam(), kMaxSize, [](const Shape& shape) {
    for (const bool in_place : {false, true}) {
      const VerifiedCall call = direct_call(GetParam(), shape, in_place);
      EXPECT_EQ(verify({call, call, call}), "")
          << describe(GetParam(), shape) << (in_place ? "in place" : "");
    }
  });
}

TEST_P(EveryAlgorithm, IsRightThroughScratch) {
  for_each_shape(GetParam(), kMaxSize, [](const Shape& shape) {
    for (const Reach reach : {Reach::scratch, Reach::push}) {
      VerifiedCall call = lowered_call(GetParam(), shape, reach, false, 1);
      for (const bool in_place : {false, true}) {
        for (const int runs : {1, 5}) {
          call.in_place = in_place;
          call.runs = runs;
          // Six runs at least, so that all windows come to be used again.
          EXPECT_EQ(verify(std::vector(runs == 1 ? 6 : 3, call)), "")
              << describe(GetParam(), shape) << runs << " runs " << (in_place ? "in place " : "")
              << (reach == Reach::push ? "with results in peers' memory" : "");
        }
      }
    }
  });
}

TEST_P(EveryAlgorithm, IsRightAttached) {
  for_each_shape(GetParam(), kMaxSize, [](const Shape& shape) {
    VerifiedCall call = lowered_call(GetParam(), shape, Reach::attach, false, 1);
    for (const int runs : {1, 5}) {
      call.runs = runs;
      EXPECT_EQ(verify(std::vector(runs == 1 ? 6 : 3, call)), "")
          << describe(GetParam(), shape) << runs << " runs";
    }
  });
}

TEST_P(EveryAlgorithm, IsRightMapped) {
  for_each_shape(GetParam(), kMaxSize, [](Shape shape) {
    for (const bool in_place : {false, true}) {
      shape.in_place = in_place;
      if (!is_without_scratch(all_ranks(GetParam(), shape))) continue;
      VerifiedCall call = lowered_call(GetParam(), shape, Reach::map, in_place, 1);
      for (const int runs : {1, 5}) {
        call.runs = runs;
        EXPECT_EQ(verify(std::vector(runs == 1 ? 6 : 3, call)), "")
            << describe(GetParam(), shape) << runs << " runs " << (in_place ? "in place" : "");
      }
    }
  });
}

/// What Route::mapped relies on: one schedule, whether a rank reduces in place or not.
TEST(TwoShot, NeedsNoScratchWhereBuffersAreMapped) {
  const Algorithm& two_shot = *find_algorithm("two_shot");
  for_each_shape(two_shot, 9, [&](Shape shape) {
    if (!is_reduction(shape.collective)) return;
    const std::vector<Schedule> all = all_ranks(two_shot, shape);
    EXPECT_TRUE(is_without_scratch(all));
    if (is_scatter(shape.collective)) return;  // not in place
    shape.in_place = true;
    const std::vector<Schedule> in_place = all_ranks(two_shot, shape);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      EXPECT_EQ(to_string(all[rank]), to_string(in_place[rank]));
  });
}

/// Attached peers read `in` itself, which an `out` in the same place overwrites. What is safe must
/// not depend on the number of ranks or runs, or else a choice by algorithm and collective would
/// not do.
TEST_P(EveryAlgorithm, IsRightAttachedInPlaceWhereChunksHaveOneReader) {
  const std::string_view row = GetParam().name;
  const auto is_safe = [&](Collective collective) {
    if (collective == Collective::reduce)
      return true;  // only the root has an `out`, and reads its `in` itself
    if (collective == Collective::allreduce) {
      return row != "one_shot" && row != "recursive_doubling";
    }
    if (!is_reduction(collective)) return true;  // what peers read is in its place in `out`
    return is_tree(GetParam().association);
  };
  for_each_shape(GetParam(), 17, [&](const Shape& shape) {
    VerifiedCall call = lowered_call(GetParam(), shape, Reach::attach, true, 1);
    for (const int runs : {1, 5}) {
      call.runs = runs;
      const std::string fault = verify({call, call, call});
      // In some layouts, no rank reads what another one's result covers.
      if (!shape.levels.empty() && !is_safe(shape.collective)) continue;
      EXPECT_EQ(fault.empty(), shape.size == 1 || is_safe(shape.collective))
          << describe(GetParam(), shape) << runs << " runs: " << fault;
    }
  });
}

TEST_P(EveryAlgorithm, FoldsAlikeHoweverItRuns) {
  for_each_shape(GetParam(), kMaxSize, [](const Shape& shape) {
    const std::vector<std::string> expected = folds(direct_call(GetParam(), shape, false));
    const std::string what = describe(GetParam(), shape);
    EXPECT_EQ(folds(direct_call(GetParam(), shape, true)), expected) << what;
    EXPECT_EQ(folds(lowered_call(GetParam(), shape, Reach::scratch, false, 2)), expected) << what;
    EXPECT_EQ(folds(lowered_call(GetParam(), shape, Reach::attach, false, 1)), expected) << what;
    EXPECT_EQ(folds(lowered_call(GetParam(), shape, Reach::push, false, 2)), expected) << what;
    if (!is_without_scratch(all_ranks(GetParam(), shape))) return;
    EXPECT_EQ(folds(lowered_call(GetParam(), shape, Reach::map, false, 1)), expected) << what;
  });
}

/// What TRIB_DETERMINISM=run relies on.
TEST_P(EveryAlgorithm, FoldsLikeOthersOfItsAssociation) {
  for_each_shape(GetParam(), kMaxSize, [](const Shape& shape) {
    const std::vector<std::string> mine = folds(direct_call(GetParam(), shape, false));
    for (const Algorithm& other : algorithms()) {
      if (other.association != GetParam().association || !other.serves(shape.collective)) continue;
      std::vector<std::string> theirs = folds(direct_call(other, shape, false));
      // Parts of a chunk are folded like the chunk.
      if (const auto parts = static_cast<std::size_t>(all_ranks(GetParam(), shape)[0].parts);
          parts > 1 && mine.size() == theirs.size() * parts) {
        std::vector<std::string> all;
        for (const std::string& fold : theirs) all.insert(all.end(), parts, fold);
        theirs = std::move(all);
      } else if (all_ranks(other, shape)[0].parts > 1) {
        continue;  // compared the other way around
      }
      if (mine.size() == theirs.size()) {
        EXPECT_EQ(mine, theirs) << describe(other, shape);
      } else {  // other chunks: then no chunk may be special
        for (const auto* chunks : {&mine, &std::as_const(theirs)}) {
          EXPECT_EQ(*chunks, std::vector(chunks->size(), mine.front())) << describe(other, shape);
        }
      }
    }
  });
}

/// What the scratch of a communicator has slots for: HostChannel::open.
TEST_P(EveryAlgorithm, HasRoomInAllLayouts) {
  for_each_shape(GetParam(), kMaxSize, [](const Shape& shape) {
    if (shape.levels.empty()) return;
    const std::vector<Schedule> all = lower(all_ranks(GetParam(), shape), shape, Reach::scratch);
    EXPECT_LE(all.front().flags, 2 * shape.size + 16) << describe(GetParam(), shape);
  });
}

/// Values cross a border as seldom as can be: each domain hands over its sum, once.
TEST_P(EveryAlgorithm, CrossesBordersSeldomIfATree) {
  if (!is_tree(GetParam().association)) return;
  for_each_shape(GetParam(), 24, [](const Shape& shape) {
    if (shape.collective != Collective::reduce) return;
    const std::vector<Schedule> all = all_ranks(GetParam(), shape);
    for (const Level& level : shape.levels) {
      int crossings = 0;
      for (int rank = 0; rank < shape.size; ++rank)
        for (const Step& step : all[rank].steps)
          for (const Location& from : step.from)
            crossings += level[from.rank] != level[rank] ? 1 : 0;
      EXPECT_EQ(crossings, domains(level) - 1) << describe(GetParam(), shape);
    }
  });
}

TEST_P(EveryAlgorithm, IsRightForManyRanks) {
  Shape shape;
  shape.size = test::less_if_sanitized(128, 64);
  shape.root = 47;
  for (const Collective collective : {Collective::allreduce, Collective::reduce_scatter,
                                      Collective::allgather, Collective::broadcast}) {
    if (!GetParam().serves(collective)) continue;
    shape.collective = collective;
    const VerifiedCall direct = direct_call(GetParam(), shape, true);
    EXPECT_EQ(verify({direct, direct}), "") << describe(GetParam(), shape);
    EXPECT_EQ(verify({lowered_call(GetParam(), shape, Reach::scratch, true, 1)}), "")
        << describe(GetParam(), shape);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryAlgorithm,
                         testing::ValuesIn(algorithms().begin(), algorithms().end()),
                         [](const auto& row) { return std::string(row.param.name); });

/// Calls follow each other without meeting in between: leaves of a reduce run ahead, and find
/// flags, scratch and windows as other calls left them.
class EveryMixture : public testing::TestWithParam<int> {
 protected:
  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }

  /// A call that nobody has thought of.
  VerifiedCall any_call(int size, bool is_lowered) {
    Shape shape;
    shape.size = size;
    // Half of them have a root: there ranks have the loosest ties.
    constexpr Collective rooted[] = {Collective::reduce, Collective::broadcast};
    shape.collective =
        below(2) == 0 ? rooted[below(2)] : static_cast<Collective>(below(kAllCollectives));
    if (has_root(shape.collective)) shape.root = below(size);
    shape.levels = levels_;
    std::vector<const Algorithm*> rows;
    for (const Algorithm& row : algorithms())
      if (row.serves(shape.collective)) rows.push_back(&row);
    const Algorithm& algorithm = *rows[below(static_cast<int>(rows.size()))];
    const bool in_place = below(2) == 0;
    text_ += describe(algorithm, shape) + (in_place ? "in place; " : "; ");
    if (!is_lowered) return direct_call(algorithm, shape, in_place);
    const Reach reach = !in_place && below(2) == 0 ? Reach::attach : Reach::scratch;
    return lowered_call(algorithm, shape, reach, in_place, 1 + below(6));
  }

  void verify_mixtures(bool is_lowered) {
    const int size = GetParam();
    const std::vector<Levels> layouts = test::layouts(size);
    for (int i = 0; i < 6000 / (size + 4); ++i) {
      text_.clear();
      levels_.clear();
      if (below(2) == 0 && !layouts.empty())
        levels_ = layouts[below(static_cast<int>(layouts.size()))];
      std::vector<VerifiedCall> calls;
      const int count = 3 + below(5);
      while (static_cast<int>(calls.size()) < count) calls.push_back(any_call(size, is_lowered));
      ASSERT_EQ(verify(calls), "") << text_;
    }
  }

 private:
  std::mt19937 random_{20240607};  // NOLINT: the same mixtures in every run
  std::string text_;
  Levels levels_;  // of all calls of a mixture
};

TEST_P(EveryMixture, IsRightAsWritten) { verify_mixtures(false); }
TEST_P(EveryMixture, IsRightLowered) { verify_mixtures(true); }

INSTANTIATE_TEST_SUITE_P(Ranks, EveryMixture, testing::Values(2, 3, 4, 5, 7, 8, 13, 16, 33));

TEST(Groups, KeepToDomains) {
  for (int size = 3; size <= 64; ++size) {
    Shape shape;
    shape.size = size;
    const int usual = Groups(shape).count();
    for (const Levels& levels : test::layouts(size)) {
      shape.levels = levels;
      const Groups groups(shape);
      std::set<int> seen;
      for (int group = 0; group < groups.count(); ++group) {
        EXPECT_FALSE(groups.members(group).empty());
        for (const int rank : groups.members(group)) {
          EXPECT_TRUE(seen.insert(rank).second);
          EXPECT_EQ(groups.group_of(rank), group);
          for (int chunk = groups.share_begin(rank); chunk < groups.share_end(rank); ++chunk)
            EXPECT_EQ(groups.holder(group, chunk), rank);
          for (const Level& level : levels)
            EXPECT_TRUE(domains(level) > 2 * usual ||
                        level[rank] == level[groups.members(group).front()])
                << to_string(levels);
        }
      }
      EXPECT_EQ(static_cast<int>(seen.size()), size);
      EXPECT_LE(groups.count(), 3 * usual) << to_string(levels);
    }
  }
}

TEST(Registry, HasRowsThatCanBeFound) {
  for (const Algorithm& algorithm : algorithms()) {
    EXPECT_EQ(find_algorithm(algorithm.name), &algorithm);
    EXPECT_FALSE(algorithm.summary.empty());
    EXPECT_FALSE(name(algorithm.association).empty());
  }
  EXPECT_EQ(find_algorithm("none"), nullptr);
}

TEST(Registry, EveryCollectiveIsServedOrRefused) {
  for (int collective = 0; collective < kAllCollectives; ++collective) {
    Shape shape;
    shape.collective = static_cast<Collective>(collective);
    shape.size = 4;
    int serving = 0;
    for (const Algorithm& algorithm : algorithms()) {
      if (algorithm.serves(shape.collective)) {
        ++serving;
        EXPECT_EQ(all_ranks(algorithm, shape).size(), 4u);
        continue;
      }
      EXPECT_FALSE(is_reduction(shape.collective)) << algorithm.name;
      try {
        all_ranks(algorithm, shape);
        ADD_FAILURE() << algorithm.name << " has schedules for " << name(shape.collective);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::internal);
        EXPECT_NE(std::string(error.what()).find("does not serve"), std::string::npos);
      }
    }
    EXPECT_GE(serving, 2) << name(shape.collective);
  }
}

/// Where nothing is folded, what goes through scratch is each contribution, once; in a broadcast by
/// shares also the shares that are handed on.
TEST(Lowered, CopiesTakeTheFewestSlots) {
  const auto units = [](const std::vector<Schedule>& all, int rank) {
    int sum = 0;
    for (const Slot& slot : all.front().slots[rank]) sum += slot.span;
    return sum;
  };
  for (int size = 2; size <= kMaxSize; ++size) {
    for (const std::string_view row : {"one_shot", "two_shot"}) {
      Shape shape;
      shape.size = size;
      shape.root = size / 2;
      const auto lowered = [&](Collective collective) {
        shape.collective = collective;
        return lower(all_ranks(*find_algorithm(row), shape), shape, Reach::scratch);
      };
      const std::vector<Schedule> allgather = lowered(Collective::allgather);
      EXPECT_EQ(allgather.front().chunks, size);
      EXPECT_EQ(allgather.front().stages, 2);
      EXPECT_EQ(allgather.front().flags, 1);
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(units(allgather, rank), 1);
        EXPECT_EQ(static_cast<int>(allgather[rank].readers.size()), size - 1);
      }
      const bool has_shares = row == "two_shot" && size > 2;
      const std::vector<Schedule> broadcast = lowered(Collective::broadcast);
      EXPECT_EQ(broadcast.front().chunks, row == "two_shot" ? size - 1 : 1);
      EXPECT_EQ(broadcast.front().stages, has_shares ? 3 : 2);
      EXPECT_EQ(broadcast.front().flags, has_shares ? size - 1 : 1);
      for (int rank = 0; rank < size; ++rank) {
        const int shared = has_shares ? 1 : 0;
        EXPECT_EQ(units(broadcast, rank), rank == shape.root ? broadcast.front().chunks : shared);
      }
    }
  }
}

/// What returns needs no scratch of its own: only contributions lie there, and peers write to them.
TEST(Lowered, ResultsReturnWhereTheyCan) {
  const Algorithm& returning = *find_algorithm("returning_two_shot");
  for (int size = 2; size <= kMaxSize; ++size) {
    Shape shape;
    shape.size = size;
    shape.root = size / 2;
    const auto returned = [&](Reach reach) {
      int count = 0;
      const std::vector<Schedule> all = lower(all_ranks(returning, shape), shape, reach);
      for (int rank = 0; rank < size; ++rank)
        for (const Step& step : all[rank].steps)
          for (const Location& to : step.to)
            count += to.buffer == Buffer::scratch && to.rank != rank ? 1 : 0;
      EXPECT_EQ(all.front().returns, count > 0);
      if (reach == Reach::scratch && shape.collective == Collective::allreduce && count > 0) {
        EXPECT_EQ(all.front().units, size - 1);
        EXPECT_EQ(all.front().flags, size);
      }
      return count;
    };
    EXPECT_EQ(returned(Reach::scratch), size * (size - 1));
    EXPECT_EQ(returned(Reach::attach), 0);
    EXPECT_EQ(returned(Reach::push), 0);
    shape.collective = Collective::reduce;
    EXPECT_EQ(returned(Reach::scratch), size - 1);
    shape.collective = Collective::reduce_scatter;
    EXPECT_EQ(returned(Reach::scratch), 0);
    shape.collective = Collective::allreduce;
    shape.is_on_device = true;
    EXPECT_EQ(returned(Reach::scratch), 0);
  }
}

/// GPUs push what peers need: there nothing stays, and who adds to a sum hands it on.
TEST(Lowered, NothingStaysOnDevices) {
  for (int collective = 0; collective < kCollectives; ++collective)
    for (int size = 2; size <= 9; ++size) {
      Shape shape;
      shape.collective = static_cast<Collective>(collective);
      shape.size = size;
      shape.is_on_device = true;
      const Algorithm& ring = *find_algorithm("ring");
      VerifiedCall call = lowered_call(ring, shape, Reach::scratch, false, 5);
      for (const Schedule& schedule : call.schedules) EXPECT_FALSE(schedule.stays);
      EXPECT_EQ(verify({call, call, call}), "") << describe(ring, shape);
      call.in_place = true;
      EXPECT_EQ(verify({call, call, call}), "") << describe(ring, shape) << "in place";
    }
}

/// Peers may go on reading an `in` that a copy in place leaves as it is.
TEST(Lowered, CopiesInPlaceEndangerNoInput) {
  for (const std::string_view row : {"one_shot", "two_shot"}) {
    for (const Collective collective : {Collective::allgather, Collective::broadcast}) {
      Shape shape;
      shape.collective = collective;
      shape.size = 5;
      shape.root = 1;
      for (const Schedule& schedule :
           lower(all_ranks(*find_algorithm(row), shape), shape, Reach::attach))
        EXPECT_FALSE(schedule.endangers_input) << row << " " << name(collective);
    }
  }
}

/// Down to which operand comes first: maxima of NaN and of zeros of either sign depend on it.
TEST(Associations, AlgorithmsOfOneFoldAlike) {
  for (int size = 2; size <= 9; ++size) {
    for (int collective = 0; collective < kCollectives; ++collective) {
      Shape shape;
      shape.collective = static_cast<Collective>(collective);
      shape.size = size;
      for (const int root : roots(shape.collective, size)) {
        shape.root = root;
        std::map<Association, std::pair<const Algorithm*, std::vector<std::string>>> known;
        for (const Algorithm& algorithm : algorithms()) {
          if (!algorithm.serves(shape.collective)) continue;
          const std::vector<std::string> its = folds(direct_call(algorithm, shape, false));
          const auto& [first, firsts] =
              known.try_emplace(algorithm.association, &algorithm, its).first->second;
          // Their chunks may differ in number.
          const std::size_t count = std::lcm(its.size(), firsts.size());
          for (std::size_t i = 0; i < count; ++i)
            EXPECT_EQ(its[i * its.size() / count], firsts[i * firsts.size() / count])
                << algorithm.name << " and " << first->name << ", " << name(shape.collective)
                << " over " << size << ", root " << root << ", part " << i << " of " << count;
        }
      }
    }
  }
}

}  // namespace
}  // namespace trib

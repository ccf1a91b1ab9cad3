// SPDX-License-Identifier: BSD-3-Clause
// Schedules for ranks that share devices, verified for all ways to share few of them.
#include "schedule/share.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "algorithm/registry.hpp"
#include "backend/cuda/inboxes.hpp"
#include "comm/background.hpp"
#include "schedule/verify.hpp"

namespace trib {
namespace {

/// Each once: devices are numbered by their lowest ranks.
std::vector<Level> ways_to_share(int ranks, int most_devices) {
  std::vector<Level> all;
  Level level(static_cast<std::size_t>(ranks), 0);
  const auto extend = [&](auto&& self, int rank, int devices) -> void {
    if (rank == ranks) {
      if (devices < ranks) all.push_back(level);
      return;
    }
    for (int device = 0; device <= std::min(devices, most_devices - 1); ++device) {
      level[static_cast<std::size_t>(rank)] = device;
      self(self, rank + 1, std::max(devices, device + 1));
    }
  };
  extend(extend, 0, 0);
  return all;
}

VerifiedCall shared_call(const Algorithm& algorithm, const Shape& shape, int runs) {
  const Shape leaders = leaders_of(shape);
  VerifiedCall call{shape,
                    share(lower(all_ranks(algorithm, leaders), leaders, Reach::scratch), shape)};
  call.runs = runs;
  return call;
}

std::string text(const Algorithm& algorithm, const Shape& shape) {
  return std::string(algorithm.name) + " " + std::string(name(shape.collective)) + ", devices " +
         to_string(Levels{shape.device_of}) + ", root " + std::to_string(shape.root);
}

constexpr const char* kAlgorithms[] = {"one_shot", "two_shot", "rootless"};

/// All collectives, roots and algorithms for the default table's kernels.
template <class Check>
void for_each_shape(int ranks, int most_devices, Check&& check) {
  for (const Level& device_of : ways_to_share(ranks, most_devices))
    for (int collective = 0; collective < kAllCollectives; ++collective) {
      Shape shape;
      shape.collective = static_cast<Collective>(collective);
      shape.size = ranks;
      shape.device_of = device_of;
      const int roots = has_root(shape.collective) ? ranks : 1;
      for (shape.root = 0; shape.root < roots; ++shape.root)
        for (const char* name : kAlgorithms)
          if (find_algorithm(name)->serves(shape.collective)) check(*find_algorithm(name), shape);
    }
}

TEST(Share, EveryWayIsRight) {
  int verified = 0;
  for (int ranks = 2; ranks <= 6; ++ranks)
    for_each_shape(ranks, 4, [&](const Algorithm& algorithm, const Shape& shape) {
      for (const int runs : {1, 3}) {
        VerifiedCall call = shared_call(algorithm, shape, runs);
        call.in_place = call.shape.in_place = runs == 3 && !is_scatter(shape.collective);
        EXPECT_EQ(verify({call, call, call, call, call}), "") << text(algorithm, shape);
        ++verified;
      }
    });
  EXPECT_GT(verified, 10000);
}

TEST(Share, CallsThatFollowOneAnother) {
  Shape shape;
  shape.size = 7;
  shape.device_of = {0, 1, 0, 1, 0, 1, 0};
  std::vector<VerifiedCall> calls;
  for (int i = 0; i < 72; ++i) {  // every collective by every algorithm, in one run and in two
    shape.collective = static_cast<Collective>(i % kAllCollectives);
    shape.root = has_root(shape.collective) ? i % shape.size : 0;
    const Algorithm* const algorithm = find_algorithm(kAlgorithms[i / kAllCollectives % 3]);
    if (algorithm->serves(shape.collective))
      calls.push_back(shared_call(*algorithm, shape, 1 + i / (3 * kAllCollectives) % 2));
  }
  EXPECT_EQ(verify(calls), "");
}

/// Sixteen ranks on one to four devices, next to each other and in turn.
TEST(Share, SixteenRanks) {
  for (int devices = 1; devices <= 4; ++devices)
    for (const bool is_dealt_out : {false, true}) {
      Shape shape;
      shape.size = 16;
      for (int rank = 0; rank < shape.size; ++rank)
        shape.device_of.push_back(is_dealt_out ? rank % devices : rank * devices / shape.size);
      for (int collective = 0; collective < kAllCollectives; ++collective) {
        shape.collective = static_cast<Collective>(collective);
        shape.root = has_root(shape.collective) ? 13 : 0;
        for (const char* name : kAlgorithms) {
          if (!find_algorithm(name)->serves(shape.collective)) continue;
          const VerifiedCall call = shared_call(*find_algorithm(name), shape, 2);
          EXPECT_EQ(verify({call, call, call}), "") << text(*find_algorithm(name), shape);
        }
      }
    }
}

/// What stands in for kernels on the host gives their bits.
TEST(Share, HostFoldsAlike) {
  for (int ranks = 3; ranks <= 6; ++ranks)
    for_each_shape(ranks, 3, [&](const Algorithm& algorithm, const Shape& shape) {
      if (!is_reduction(shape.collective)) return;
      const VerifiedCall kernels = shared_call(algorithm, shape, 1);
      const Algorithm& by_gpu = *find_algorithm("gpu_two_shot");
      VerifiedCall host{shape, lower(all_ranks(by_gpu, shape), shape, Reach::scratch)};
      EXPECT_EQ(verify({host, host, host}), "") << text(by_gpu, shape);
      const std::vector<std::string> one = folds(kernels), other = folds(host);
      // The vector is cut into other chunks, all of which are folded alike.
      for (const auto* all : {&one, &other})
        for (const std::string& fold : *all) EXPECT_EQ(fold, one.front()) << text(algorithm, shape);
    });
}

/// Nonblocking ones of ranks that share devices are staged there, now and then.
TEST(Share, LanesHaveRoomForStandIns) {
  for (const int ranks : {2, 3, 7, 16, 33, 64})
    for (const int devices : {1, 2, 3, 8, ranks / 2})
      for (const Collective collective :
           {Collective::allreduce, Collective::reduce, Collective::reduce_scatter_block}) {
        if (devices < 1 || devices >= ranks) continue;
        Shape shape;
        shape.collective = collective;
        shape.size = ranks;
        for (int rank = 0; rank < ranks; ++rank) shape.device_of.push_back(rank % devices);
        const Algorithm& by_gpu = *find_algorithm("gpu_two_shot");
        for (const Schedule& schedule : lower(all_ranks(by_gpu, shape), shape, Reach::scratch)) {
          EXPECT_LE(schedule.flags, Background::flags_of_lane(ranks)) << text(by_gpu, shape);
          // Scratch of a lane: 256 bytes for each rank, at least.
          EXPECT_LE(schedule.units * 64, std::max(16 << 10, 256 * ranks)) << text(by_gpu, shape);
        }
      }
}

TEST(Share, FollowersOnlyTellAndWait) {
  Shape shape;
  shape.size = 5;
  shape.device_of = {0, 0, 1, 1, 1};
  const VerifiedCall call = shared_call(*find_algorithm("two_shot"), shape, 1);
  for (const int rank : {1, 3, 4}) {
    ASSERT_EQ(call.schedules[static_cast<std::size_t>(rank)].steps.size(), 2u);
    EXPECT_EQ(call.schedules[static_cast<std::size_t>(rank)].steps[0].verb, Verb::signal);
    EXPECT_EQ(call.schedules[static_cast<std::size_t>(rank)].steps[1].verb, Verb::wait);
  }
}

/// Each step of a shared schedule is needed, and verify() knows.
TEST(Share, MissingStepsAreReported) {
  int mutants = 0;
  for_each_shape(4, 2, [&](const Algorithm& algorithm, const Shape& shape) {
    const VerifiedCall right = shared_call(algorithm, shape, 2);
    for (std::size_t rank = 0; rank < right.schedules.size(); ++rank)
      for (std::size_t step = 0; step < right.schedules[rank].steps.size(); ++step) {
        VerifiedCall wrong = right;
        auto& steps = wrong.schedules[rank].steps;
        steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(step));
        EXPECT_NE(verify({wrong, wrong, right, wrong, wrong, wrong}), "")
            << text(algorithm, shape) << ": rank " << rank << ", step " << step << "\n"
            << to_string(right.schedules[rank]);
        ++mutants;
      }
  });
  EXPECT_GT(mutants, 1000);
}

/// A device's stages go on by themselves, and nobody but peers says that a slot has been read: so
/// no stage reads what an earlier one of the same rank has put into a slot.
TEST(Share, NoSlotIsReadByALaterStageOfItsOwner) {
  for_each_shape(5, 3, [&](const Algorithm& algorithm, const Shape& shape) {
    const VerifiedCall call = shared_call(algorithm, shape, 1);
    for (std::size_t rank = 0; rank < call.schedules.size(); ++rank) {
      std::map<int, int> written;  // slot -> stage
      for (const Step& step : call.schedules[rank].steps) {
        for (const Location& from : step.from) {
          if (from.buffer != Buffer::scratch || from.rank != static_cast<int>(rank)) continue;
          EXPECT_EQ(written.at(from.slot), step.stage) << text(algorithm, shape);
        }
        for (const Location& to : step.to)
          if (to.buffer == Buffer::scratch) written[to.slot] = step.stage;
      }
    }
  });
}

/// Kernels run on leaders only: whatever one waits for comes from the kernel of another device.
TEST(Share, KernelsWaitForKernels) {
  int waits = 0, followers = 0;
  for_each_shape(5, 3, [&](const Algorithm& algorithm, const Shape& shape) {
    const VerifiedCall call = shared_call(algorithm, shape, 1);
    const cuda::Inboxes inboxes(call.schedules, shape.device_of);
    EXPECT_LE(inboxes.most(), inboxes.flags());
    const auto ranks = ranks_of(shape.device_of);
    for (const auto& siblings : ranks) {
      const int leader = siblings.front();
      for (const Step& step : call.schedules[static_cast<std::size_t>(leader)].steps) {
        if (step.verb != Verb::wait) continue;
        const int peer = step.peers.front();
        const Slot& slot =
            call.schedules[static_cast<std::size_t>(peer)]
                .slots[static_cast<std::size_t>(peer)][static_cast<std::size_t>(step.slot)];
        const bool is_flagged = inboxes.unit(leader, peer, step.slot, slot.chunk) >= 0;
        const bool is_sibling = std::count(siblings.begin(), siblings.end(), peer) > 0;
        EXPECT_FALSE(is_flagged && is_sibling) << text(algorithm, shape);
        ++(is_flagged ? waits : followers);
      }
    }
  });
  EXPECT_GT(waits, 1000);
  EXPECT_GT(followers, 1000);
}

TEST(Share, OutOfReach) {
  Shape shape;
  shape.size = 4;
  shape.device_of = {0, 0, 1, 1};
  VerifiedCall call = shared_call(*find_algorithm("two_shot"), shape, 1);
  call.shape.device_of = {0, 1, 2, 3};
  EXPECT_NE(verify({call}).find("out of reach"), std::string::npos);
}

}  // namespace
}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/repeats.hpp"

#include <gtest/gtest.h>

namespace trib::cuda {
namespace {

/// What a driver was told, by one that does nothing else.
struct Told {
  int launches = 0, graphs_made = 0, graphs_launched = 0, settings = 0, graphs_destroyed = 0;
  bool can_instantiate = true;
  FlatLaunch last{};                    // by a launch
  std::vector<FlatLaunch> set;          // of each graph
  std::vector<FlatLaunch> last_graphs;  // as they were launched
};
Told told;

const FlatLaunch& parameter(const CUDA_KERNEL_NODE_PARAMS* node) {
  return *static_cast<const FlatLaunch*>(node->kernelParams[0]);
}
std::size_t number_of(CUgraphExec exec) { return reinterpret_cast<std::size_t>(exec) - 1; }

Driver make_driver() {
  Driver made;
  made.cuLaunchKernel_ = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, CUstream, void** parameters, void**) {
    ++told.launches;
    told.last = *static_cast<const FlatLaunch*>(parameters[0]);
    return CUDA_SUCCESS;
  };
  made.cuGraphCreate_ = [](CUgraph* graph, unsigned) {
    *graph = reinterpret_cast<CUgraph>(1);
    return CUDA_SUCCESS;
  };
  made.cuGraphAddKernelNode_ = [](CUgraphNode*, CUgraph, const CUgraphNode*, std::size_t,
                                  const CUDA_KERNEL_NODE_PARAMS* node) {
    told.set.push_back(parameter(node));
    return CUDA_SUCCESS;
  };
  made.cuGraphKernelNodeSetAttribute_ = [](CUgraphNode, CUkernelNodeAttrID,
                                           const CUkernelNodeAttrValue*) { return CUDA_SUCCESS; };
  made.cuGraphInstantiate_ = [](CUgraphExec* exec, CUgraph, unsigned long long) {
    if (!told.can_instantiate) return CUDA_ERROR_OUT_OF_MEMORY;
    *exec = reinterpret_cast<CUgraphExec>(told.set.size());
    ++told.graphs_made;
    return CUDA_SUCCESS;
  };
  made.cuGraphExecKernelNodeSetParams_ = [](CUgraphExec exec, CUgraphNode,
                                            const CUDA_KERNEL_NODE_PARAMS* node) {
    ++told.settings;
    told.set[number_of(exec)] = parameter(node);
    return CUDA_SUCCESS;
  };
  made.cuGraphLaunch_ = [](CUgraphExec exec, CUstream) {
    ++told.graphs_launched;
    told.last_graphs.push_back(told.set[number_of(exec)]);
    return CUDA_SUCCESS;
  };
  made.cuGraphExecDestroy_ = [](CUgraphExec) {
    ++told.graphs_destroyed;
    return CUDA_SUCCESS;
  };
  made.cuGraphDestroy_ = [](CUgraph) { return CUDA_SUCCESS; };
  return made;
}

/// Whose context needs no driver.
struct TestRepeats : Repeats {
  TestRepeats(const Driver& driver, Replays& common) : Repeats(driver, common, ContextId{}) {}
  ~TestRepeats() { forget(); }
};

/// A channel with one program.
class RepeatsTest : public testing::Test {
 protected:
  RepeatsTest() { told = {}; }

  /// A call with a buffer of its own; gives what the kernel takes for its number and first run.
  std::pair<std::uint64_t, std::uint32_t> call(Repeats& repeats, std::size_t buffer,
                                               std::uint32_t runs = 1, std::size_t function = 1) {
    const std::uint32_t launches = replays_.launches, runs_before = replays_.runs;
    const int by_graph = told.graphs_launched;
    FlatLaunch launch{};
    launch.number = ++number_;
    launch.first_run = last_run_ + 1;
    last_run_ += runs;
    launch.own = reinterpret_cast<const std::byte*>(buffer);
    repeats.launch({reinterpret_cast<CUfunction>(function), 1, 32}, nullptr, launch, sizeof launch,
                   &launch.first_run, runs);
    EXPECT_EQ(launch.number, number_);
    EXPECT_FALSE(launch.is_replayed);
    if (told.graphs_launched == by_graph) return {told.last.number, told.last.first_run};
    const FlatLaunch& seen = told.last_graphs.back();
    EXPECT_TRUE(seen.is_replayed);
    EXPECT_EQ(seen.own, launch.own);
    return {seen.number + launches, seen.first_run + runs_before};
  }
  void check_call(Repeats& repeats, std::size_t buffer, std::uint32_t runs = 1,
                  std::size_t function = 1) {
    const std::uint32_t first = last_run_ + 1;
    const auto [number, first_run] = call(repeats, buffer, runs, function);
    EXPECT_EQ(number, number_);
    EXPECT_EQ(first_run, first);
  }

  const Driver driver_ = make_driver();
  Replays replays_;
  std::uint64_t number_ = 0;
  std::uint32_t last_run_ = 0;
};

TEST_F(RepeatsTest, NothingIsSetForACallLikeTheLast) {
  TestRepeats repeats(driver_, replays_);
  for (int i = 0; i < 100; ++i) check_call(repeats, 5);
  EXPECT_EQ(told.launches, replays_.enough);
  EXPECT_EQ(told.graphs_launched, 100 - replays_.enough);
  EXPECT_EQ(told.graphs_made, 1);
  EXPECT_EQ(told.settings, 0);
  repeats.forget();
  EXPECT_EQ(told.graphs_destroyed, 1);
  EXPECT_EQ(replays_.graphs, 0);
}

TEST_F(RepeatsTest, CallsThatTakeTurnsHaveAGraphEach) {
  TestRepeats one(driver_, replays_), other(driver_, replays_);
  for (std::size_t i = 0; i < 200; ++i) {
    check_call(one, i % 3);
    check_call(other, 7, /*runs=*/5);
  }
  EXPECT_EQ(told.graphs_made, 4);
  EXPECT_EQ(told.settings, 0);
}

TEST_F(RepeatsTest, ManyBuffersShareGraphs) {
  TestRepeats repeats(driver_, replays_);
  for (std::size_t i = 0; i < 1000; ++i) check_call(repeats, i % 50);
  EXPECT_LT(told.graphs_made, 20);
  EXPECT_GT(told.settings, 900);
}

TEST_F(RepeatsTest, NumbersThatOthersTakeAreAllowedFor) {
  TestRepeats repeats(driver_, replays_);
  for (int i = 0; i < 100; ++i) {
    check_call(repeats, 5);
    if (i % 10 == 0) ++number_, last_run_ += 3;  // a launch that is none of ours
  }
}

TEST_F(RepeatsTest, CountsMayWrap) {
  TestRepeats repeats(driver_, replays_);
  replays_.launches = replays_.runs = UINT32_MAX - 20;
  last_run_ = UINT32_MAX - 30;
  number_ = 5;
  for (int i = 0; i < 100; ++i) check_call(repeats, 5, 2);
}

TEST_F(RepeatsTest, GraphsAreBounded) {
  TestRepeats repeats(driver_, replays_);
  for (int round = 0; round < 20; ++round)
    for (std::size_t function = 1; function <= 200; ++function) check_call(repeats, 1, 1, function);
  EXPECT_EQ(told.graphs_made, Replays::kMostGraphs);
  EXPECT_GT(told.launches, 0);
}

TEST_F(RepeatsTest, LaunchesGoOnWithoutGraphs) {
  TestRepeats repeats(driver_, replays_);
  told.can_instantiate = false;
  for (int i = 0; i < 50; ++i) check_call(repeats, 5);
  EXPECT_EQ(told.launches, 50);
  EXPECT_EQ(told.set.size(), 1u);  // it is not tried again
}

}  // namespace
}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Kernels that are launched again and again, as CUDA graphs of a single node: when the driver makes
// a graph, it does most of what it does for a launch. (H200, from the call to the kernel's answer:
// 7.4 us by a launch, 6.1 by a graph whose parameters, 1 KiB, are set anew; 7.6 and, by a graph as
// it is, 5.3 with 24 bytes of them.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/launch.hpp"

namespace trib::cuda {

/// What the programs of a channel have in common.
struct Replays {
  static constexpr int kMostGraphs = 64;  // some 100 KiB of device memory each
  int graphs = 0;                         // there are
  int enough = 8;                         // launches of a kernel, until a graph is worth making
  int priority = 0;                       // of their kernels
  std::uint32_t launches = 0, runs = 0;   // what Counters::replayed will be when all have ended
};

/// A program's launches, and graphs for those that come behind a meeting of the hosts on a stream
/// of the channel's own. All in the channel's context.
class Repeats {
 public:
  Repeats(const Driver& driver, Replays& common, const ContextId& context)
      : driver_(driver), common_(common), context_(context) {}
  ~Repeats();
  Repeats(const Repeats&) = delete;
  Repeats& operator=(const Repeats&) = delete;

  struct Kernel {
    CUfunction function;
    unsigned blocks, threads;
    bool operator==(const Kernel&) const = default;
  };
  /// Enqueues a kernel with `launch`, which has `bytes`, as its only parameter, or as a replay with
  /// other numbers that come to the same. `first_run` is in it, or null, and `runs` is how many
  /// runs it has. Leaves `launch` as it was. Throws Error.
  void launch(const Kernel& kernel, CUstream stream, LaunchRoot& launch, std::size_t bytes,
              std::uint32_t* first_run, std::uint32_t runs);
  /// The same by no graph: on any stream, captured ones included.
  void launch_once(const Kernel& kernel, CUstream stream, const LaunchRoot& launch);
  /// Lets go of all graphs, in the context, which is current.
  void forget() noexcept;

 private:
  /// A launch of a graph costs less if nothing is to be set, so there are some for calls that take
  /// turns.
  static constexpr std::size_t kMostAlike = 8;

  struct Graph {
    Kernel kernel{};
    std::vector<std::byte> parameters;  // what it was set to
    std::uint32_t last_use = 0;
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
    CUgraphExec exec = nullptr;
  };
  /// Launches of a function.
  struct Use {
    CUfunction function = nullptr;
    int launches = 0;
    bool has_failed = false;  // no graph can be had
    std::vector<Graph> graphs;
  };

  Use& use_of(CUfunction function);
  /// One that is set to `kernel` and the parameters. Null: there is none, nor can one be made.
  Graph* find(Use& use, const Kernel& kernel, const void* parameters, std::size_t bytes);
  Graph* make(Use& use, const Kernel& kernel, const void* parameters);
  void destroy(Graph& graph) noexcept;

  const Driver& driver_;
  Replays& common_;
  const ContextId context_;
  std::vector<Use> uses_;
};

}  // namespace trib::cuda

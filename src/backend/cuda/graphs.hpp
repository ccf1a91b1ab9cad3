// SPDX-License-Identifier: BSD-3-Clause
// The program's graphs that hold launches of a channel. When they run, only the program knows; but
// each holds an object whose end the driver tells: once the graph and all that was made of it are
// destroyed, and none of that is under way. To ask costs a replay nothing, where an event behind
// each launch costs 0.7 to 1.3 us.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "backend/cuda/driver.hpp"

namespace trib::cuda {

class Graphs {
 public:
  explicit Graphs(const Driver& driver) : driver_(driver) {}
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  /// Before a launch on a stream that is being captured, in its context. Throws Error.
  void add(CUstream stream);

  /// Whether there may be a graph that was added. If not, what they had under way is over. The
  /// driver tells a little later that one is gone (H200: 10 to 40 us): that is waited for.
  bool any(std::chrono::microseconds patience = {}) const;

 private:
  const Driver& driver_;
  /// Graphs may be destroyed later than this: each object has a share in it.
  std::shared_ptr<std::atomic<int>> count_ = std::make_shared<std::atomic<int>>(0);
  cuuint64_t last_ = 0;  // capture
};

}  // namespace trib::cuda

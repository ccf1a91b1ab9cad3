// SPDX-License-Identifier: BSD-3-Clause
// Which of several ways is the fastest, as all ranks see it. Knows nothing of reductions:
// comm/tuner.cpp makes the calls.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <vector>

#include "base/bootstrap.hpp"

namespace trib {

/// A way must be faster than the first one by this factor to take its place.
inline constexpr double kMargin = 1.03;

struct Measurement {
  int best = 0;  ///< 0 unless another one was faster by kMargin
  /// There was time for all ways, and for rounds enough to tell them apart.
  bool is_thorough = false;
  std::vector<double> seconds;  ///< of each way, of its slowest rank; 0: not measured
};

/// Collective: measures `ways` ways until about `budget` seconds after `begin`, less where the
/// answer is clear sooner. `run(way, samples)` makes a call for each sample, which all ranks begin
/// at the same time, and fills in the seconds it took on this rank. The same answer on all ranks;
/// `begin` alone may differ between them.
Measurement measure(Bootstrap& bootstrap, int ways, double budget,
                    std::chrono::steady_clock::time_point begin,
                    const std::function<void(int way, std::span<double> samples)>& run);

}  // namespace trib

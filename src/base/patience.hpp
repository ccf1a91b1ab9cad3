// SPDX-License-Identifier: BSD-3-Clause
// How long something has been waited for, for limits such as TRIB_TIMEOUT.
#pragma once

#include <chrono>

namespace trib {

/// Asked again and again. What passes between two looks counts up to a second: in what is longer
/// this process was stopped, as a whole job may be, and nobody was waited for.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Patience(Clock::time_point now) : since_(now), looked_at_(now) {}

  /// Seconds that count.
  double look(Clock::time_point now) {
    constexpr auto kLongestGap = std::chrono::seconds(1);
    if (const auto gap = now - looked_at_; gap > kLongestGap) since_ += gap - kLongestGap;
    looked_at_ = now;
    return std::chrono::duration<double>(now - since_).count();
  }
  void restart(Clock::time_point now) { since_ = looked_at_ = now; }

 private:
  Clock::time_point since_, looked_at_;
};

}  // namespace trib

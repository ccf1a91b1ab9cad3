// SPDX-License-Identifier: BSD-3-Clause
// What disturb() in access.cuh is to kernels, for the host that drives them.
#pragma once

#if TRIB_DISTURB_HOST
#include <chrono>
#include <cstdint>
#endif

namespace trib::cuda {

/// Before peers or kernels are told something, and before a look at what they tell, if built with
/// TRIB_DISTURB: sometimes lets others go ahead.
inline void disturb_host() {
#if TRIB_DISTURB_HOST
  using Clock = std::chrono::steady_clock;
  thread_local auto random = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
  random = random * 6364136223846793005u + 1442695040888963407u;
  if (random >> 60 != 0) return;
  const auto end = Clock::now() + std::chrono::nanoseconds((random >> 32) % 20000);
  while (Clock::now() < end) {
  }
#endif
}

}  // namespace trib::cuda

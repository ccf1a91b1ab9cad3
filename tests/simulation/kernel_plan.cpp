// SPDX-License-Identifier: BSD-3-Clause
// The translation of schedules into kernels' tables as it is, but for one mutant: tables that know
// nothing of shared devices, so that kernels wait for flags that no kernel sets.
#include "backend/cuda/inboxes.hpp"
#include "simulation/ranks.hpp"

namespace trib::cuda {

struct SimulatedInboxes : Inboxes {
  SimulatedInboxes(const std::vector<Schedule>& all, const Level& device_of)
      : Inboxes(all, Simulation::forgets_devices ? Level{} : device_of) {}
};

}  // namespace trib::cuda

#define Inboxes SimulatedInboxes
#include "backend/cuda/kernel_plan.cpp"  // NOLINT: see above

// SPDX-License-Identifier: BSD-3-Clause
// Runs the schedules of all ranks in one process, with vector clocks, and finds wrong values, races and deadlocks.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.hpp"

namespace trib {

/// One collective call, as all ranks make it.
struct VerifiedCall {
  Shape shape;                      ///< rank is ignored
  std::vector<Schedule> schedules;  ///< of each rank; all direct or all lowered
  bool in_place = false;            ///< `out` aliases `in` as in Shape::in_place
  int runs = 1;                     ///< lowered: times the schedule runs on successive slices (same windows turn on)
};

/// Empty if the calls, made one after the other by every rank, give the right values on every rank, in whatever order
/// the ranks proceed; otherwise a description of the first fault: the call, rank, step and location.
///
/// `windows`: lowered form: how many generations of slots there are.
std::string verify(const std::vector<VerifiedCall>& calls, int windows = 4);

}  // namespace trib

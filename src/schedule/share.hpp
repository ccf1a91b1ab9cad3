// SPDX-License-Identifier: BSD-3-Clause
// Schedules for ranks that share devices. Of all ranks on a device only one may wait there for
// other devices: the first, their leader. It does the others' part as well, in their own memory.
#pragma once

#include <vector>

#include "schedule/schedule.hpp"

namespace trib {

/// The ranks of each device, ascending. The first one leads.
std::vector<std::vector<int>> ranks_of(const Level& device_of);

/// The shape of what the leaders of Shape::device_of do among themselves: a rank per device.
Shape leaders_of(const Shape& shape);

/// `leaders`: lowered schedules (Reach::scratch) of leaders_of(shape). The result has one for every
/// rank of `shape`: what a leader's schedule reads from its `in` is the left fold of all `in` on
/// its device in rank order (of the only one, in what is no reduction), and what it writes to its
/// `out` goes to all `out` there. The other ranks tell their leader that they are in the call, and
/// wait until it is done. In the reduce_scatters and in allgather the leaders' chunk d stands for
/// the chunks of all ranks on device d; reduce_scatters must not be in place.
std::vector<Schedule> share(const std::vector<Schedule>& leaders, const Shape& shape);

}  // namespace trib

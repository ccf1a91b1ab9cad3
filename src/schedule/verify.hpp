// SPDX-License-Identifier: BSD-3-Clause
// Runs the schedules of all ranks in one process, with vector clocks, and finds wrong values, races
// and deadlocks. What passes is right on every backend that keeps these rules.
//
// Both forms. A caller writes `in` before a call, and again as soon as its rank has left the call;
// then it also reads `out`. So nobody may touch a rank's memory before it entered or after it left.
// A step reads the sources of an element before it writes the element.
//
// Direct form. Signals from one rank to another are counted: each wait takes the next. A call
// leaves none behind.
//
// Lowered form. Runs are numbered over all calls, alike on all ranks. Run n has the slots of window
// n mod `windows`.
// - Signal: sets the slot's flag in that window to n. Wait: until the flag is n. Every slot that is
//   read is waited for in the same run, by the reading rank itself: a backend may send the flag
//   with the data. What a peer has written into a slot since (hosts alone have that) is another
//   matter: who reads it waits for a signal that this peer gave after it, or that was given later.
// - Credit: before its first step in run n, a rank waits until its readers (Schedule::readers of
//   what it ran then) have completed run n - windows.
// - Attach: before it leaves a call, a rank waits until its attached_readers have completed the
//   call's last run.
// - Shared devices: a rank may also read and write `in` and `out` of ranks on its own device.
// - Stages: in tick t = 0, 1, ... of a call, stage s of its run t - s is performed, s = 0, 1, ...
// - In place, a copy of a chunk of `in` to the same chunk of the same rank's `out` touches nothing:
//   it is there already.
// - In place, the `out` of a reduce_scatter is the front of `in`, and counts may be uneven: a piece
//   of `out` may cover pieces of `in` up to its own chunk and slice, its step's own source among
//   them. It covers that from below: a backend goes through a piece in ascending order, reading a
//   block's sources before it writes the block. (In the direct form, algorithms avoid this.)
//
// Next: folds.hpp, verify.cpp.
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
  int runs = 1;  ///< lowered: times the schedule runs on successive slices (same windows turn on)
  /// Reductions: results must be left folds over ranks 0, 1, 2, ...
  bool is_rank_order = false;
};

/// Empty if the calls, made one after the other by every rank, give the right values on every rank,
/// in whatever order the ranks proceed, and the same bits wherever a chunk arrives; otherwise a
/// description of the first fault: the call, rank, step and location.
///
/// `windows`: lowered form: how many generations of slots there are.
std::string verify(const std::vector<VerifiedCall>& calls, int windows = 4);

/// How each chunk of a call's result is folded, e.g. "((0 1) 2)". Throws Error(Code::internal) if
/// the call is faulty.
std::vector<std::string> folds(const VerifiedCall& call);

}  // namespace trib

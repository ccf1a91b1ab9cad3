// SPDX-License-Identifier: BSD-3-Clause
// Runs the schedules of all ranks in one process, with vector clocks, and finds wrong values, races
// and deadlocks. What passes here is right on every backend that keeps the rules below. Next:
// verify.cpp.
//
// Both forms. A caller may write `in` before a call and again once its rank has left it, and reads
// `out` then: nobody may touch a rank's memory before it entered, or stay at it after it left. A
// step reads the sources of an element before it writes the element.
//
// Direct form. Signals from one rank to another are counted: each wait takes the next. A call
// leaves none behind.
//
// Lowered form. Runs are numbered over all calls, alike on all ranks. Slots of run n are in window
// n mod `windows`.
//   signal: sets the slot's flag in that window to n.           wait: until the flag is n.
//   credit: before its first step in run n, a rank waits until the readers (Schedule::readers of
//   what it ran then) of
//     its slots have completed run n - windows.
//   attach: before it leaves a call, a rank waits until its attached_readers have completed the
//   call's last run. stages: tick by tick, stage s of run t - s of the call is performed in tick t,
//   s = 0, 1, ...
// Every slot that is read is waited for first, in the same run, by the reading rank itself: a
// backend may send the flag with the data. In place, `out` of a reduce_scatter lies at the front of
// `in`, and counts may be uneven: a piece of `out` may cover pieces of `in` of the same or earlier
// chunks, up to its own slice. The covered elements lie at or behind those being read, so a backend
// works through a piece in ascending order, and reads a block's sources before it writes the block;
// the direct form does not rely on that.
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
  bool is_rank_order = false;  ///< results must be left folds over ranks 0, 1, 2, ...
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

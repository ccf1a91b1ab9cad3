// SPDX-License-Identifier: BSD-3-Clause
// The schedules of all ranks as one text, which people can read and change:
//
//     schedule allreduce
//     algorithm two_shot        # optional: a name
//     ranks 2
//     rank_order                # optional: results must be left folds over ranks 0, 1, ...
//     chunks 2
//     form lowered              # or direct
//     stages 3                  # lowered, if more than one
//     slots 0: 1 0              # lowered: what rank 0's slots 0, 1, ... hold
//     slots 1: 0 1
//
//     rank 0
//       readers 1
//       0: copy scratch(0 slot 0, 1) <- in(0, 1)
//       0: signal slot 0
//       1: wait 1 slot 0
//       ...
//
// Further lines: `root 1` after the ranks (where there is one), then `in_place`; `attached_readers
// 1` and `endangers_input` where readers stand. `3..5` is chunks 3 to 5. A slot is a range of
// chunks, or `flag` where it has no payload; ` @ 7` behind it says where it lies if not right
// behind the slot before. Everything behind `#` is a comment.
//
// Next: print.cpp, script.cpp, parse.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "schedule/schedule.hpp"

namespace trib {

/// What the text says.
struct Script {
  std::string algorithm;  ///< a name for people, of letters, digits and underscores; may be empty
  Shape shape;            ///< rank, node_of and levels are not in the text
  bool is_rank_order = false;       ///< see VerifiedCall
  std::vector<Schedule> schedules;  ///< of each rank; all direct or all lowered
};

/// The most that a text may hold, so that none takes all memory.
inline constexpr int kMaxScriptRanks = 128, kMaxScriptChunks = 4096, kMaxScriptSlots = 4096,
                     kMaxScriptStages = 64;

std::string to_string(const Script& script);

/// The inverse: to_string of the result is the same text, but for comments and spaces. Every number
/// is in range then; whether the schedule is right is for verify() to say. Throws
/// Error(Code::argument) with the number of the line and what is accepted there.
Script parse_script(std::string_view text);

/// verify() for several calls in a row; lowered also in several runs, and in place where the
/// schedules permit it.
std::string verify(const Script& script);

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// Where in the readers' inboxes the slots of a schedule are. Both programs (program.hpp,
// copy_program.hpp) number their units by it.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "schedule/schedule.hpp"

namespace trib::cuda {

/// Where the slots' chunks arrive: reader, writer, slot, chunk -> unit of the reader's inbox. A
/// slot without payload has a number behind those of all units, as if it were one: its flag's.
/// Between ranks that share a device it has none: their hosts meet, and one kernel serves them.
/// Derived from all ranks' schedules, and so the same on all ranks.
class Inboxes {
 public:
  /// `device_of`: of each rank. Empty: each has its own.
  explicit Inboxes(const std::vector<Schedule>& all, const Level& device_of = {}) {
    const auto is_shared = [&](int a, int b) {
      return !device_of.empty() &&
             device_of[static_cast<std::size_t>(a)] == device_of[static_cast<std::size_t>(b)];
    };
    for (int reader = 0; reader < static_cast<int>(all.size()); ++reader) {
      int units = 0;
      for (const Step& step : all[static_cast<std::size_t>(reader)].steps)
        for (const Location& from : step.from)
          if (from.buffer == Buffer::scratch)
            for (int c = from.chunk; c < from.chunk + from.span; ++c)
              if (units_.try_emplace({reader, from.rank, from.slot, c}, units).second) ++units;
      most_ = std::max(most_, units);
    }
    flags_ = most_;
    for (int reader = 0; reader < static_cast<int>(all.size()); ++reader) {
      int flags = most_;
      for (const Step& step : all[static_cast<std::size_t>(reader)].steps) {
        if (step.verb != Verb::wait) continue;
        const int writer = step.peers.front();
        const Slot& slot =
            all[static_cast<std::size_t>(writer)]
                .slots[static_cast<std::size_t>(writer)][static_cast<std::size_t>(step.slot)];
        if (slot.span == 0 && !is_shared(reader, writer) &&
            units_.try_emplace({reader, writer, step.slot, slot.chunk}, flags).second)
          ++flags;
      }
      flags_ = std::max(flags_, flags);
    }
  }
  int most() const { return most_; }
  /// Units, and flags without one.
  int flags() const { return flags_; }
  /// -1: `reader` does not read it.
  int unit(int reader, int writer, int slot, int chunk) const {
    const auto found = units_.find({reader, writer, slot, chunk});
    return found == units_.end() ? -1 : found->second;
  }

 private:
  std::map<std::tuple<int, int, int, int>, int> units_;
  int most_ = 0, flags_ = 0;
};

}  // namespace trib::cuda

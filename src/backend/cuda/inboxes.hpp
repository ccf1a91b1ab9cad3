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

/// Where the slots' chunks arrive: reader, writer, slot, chunk -> unit of the reader's inbox.
/// Derived from all ranks' schedules, and so the same on all ranks.
class Inboxes {
 public:
  explicit Inboxes(const std::vector<Schedule>& all) {
    for (int reader = 0; reader < static_cast<int>(all.size()); ++reader) {
      int units = 0;
      for (const Step& step : all[static_cast<std::size_t>(reader)].steps)
        for (const Location& from : step.from)
          if (from.buffer == Buffer::scratch)
            for (int c = from.chunk; c < from.chunk + from.span; ++c)
              if (units_.try_emplace({reader, from.rank, from.slot, c}, units).second) ++units;
      most_ = std::max(most_, units);
    }
  }
  int most() const { return most_; }
  /// -1: `reader` does not read it.
  int unit(int reader, int writer, int slot, int chunk) const {
    const auto found = units_.find({reader, writer, slot, chunk});
    return found == units_.end() ? -1 : found->second;
  }

 private:
  std::map<std::tuple<int, int, int, int>, int> units_;
  int most_ = 0;
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Where tasks of background.hpp run one after the other. Private to the files background*.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/background.hpp"

namespace trib {

/// A channel and the tasks that take turns on it.
struct Lane {
  std::unique_ptr<HostChannel> channel;
  Plans plans;
  Plan* plan = nullptr;  // of `first`, once it has begun; persistent: of its only task
  bool has_own_plan = false;
  bool turns = false;                    // has more room than it needs
  bool has_begun = false;                // `first` has been announced
  bool has_come = false;                 // ... to its meeting
  std::unique_ptr<Unsettled> unsettled;  // what it waits for before that
  bool is_settled = false;               // that is over
  std::optional<Route> staged_route;     // decided, but its copies have to wait
  std::uint64_t own_waits = 0;           // looks at what this rank's program has under way
  int absent = -1;                       // a rank that has not come to its meeting
  Card card;                             // that this rank shows there
  bool meets_again = false;              // to hear whether all can reach what was shown
  std::vector<MappedBuffers> mapped;     // nonblocking: of the ranks on this rank's device
  Task* first = nullptr;                 // the one that runs, or runs next
  Task* last = nullptr;
  Operation* operation = nullptr;  // of `first`, once launched
  Path* path = nullptr;            // whose operation it is
  Operation* done = nullptr;       // persistent: the last one, if `path` has a binding
  bool is_streamed = false;        // its results go past the caches
  static constexpr std::size_t kIdle = SIZE_MAX;
  std::size_t place = kIdle;  // in Background::busy_
  std::uint64_t number = 0;   // persistent: of its channel, ...
  Room room;                  // ... and what that has room for

  /// Changes whenever it got anywhere.
  auto where() const {
    return std::tuple(first, has_begun, has_come, operation,
                      operation != nullptr ? operation->position() : 0);
  }

  Lane(Group& group, std::unique_ptr<HostChannel> its_channel, std::size_t rows)
      : channel(std::move(its_channel)), plans(group, *channel, rows, !channel->has_data()) {}
};

}  // namespace trib

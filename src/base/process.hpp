// SPDX-License-Identifier: BSD-3-Clause
// Whether processes of other ranks still live, as /proc says.
#pragma once

#include <cstdint>

namespace trib {

/// A process, also for others: exchanged as bytes.
struct ProcessId {
  std::int32_t pid = 0;
  std::int32_t padding = 0;
  std::uint64_t start_time = 0;  ///< in clock ticks since boot; 0: not known
  /// Equal ones mean that the same pid means the same process: containers may have numberings of
  /// their own, as other hosts have. 0: not known.
  std::uint64_t numbering = 0;

  static ProcessId of_this();
  bool operator==(const ProcessId&) const = default;
};

/// Whether /proc shows us `process`, should it be there.
bool can_see(const ProcessId& process);
/// False if that cannot be told: a process that has no file descriptors left, say, must not take
/// its peers for dead. Only for those that we can see.
bool is_gone(const ProcessId& process);
/// The same as soon as nothing of its program runs any more. Its memory may be yet to be dumped,
/// and taken down, which takes 30 ms for each GiB of small pages; what it left to GPUs may go on.
bool is_ending(const ProcessId& process);

}  // namespace trib

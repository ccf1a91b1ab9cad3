// SPDX-License-Identifier: BSD-3-Clause
// What one rank's kernels do in a lowered schedule: the tables of a Launch, but for what a call
// fills in, and whether the schedule is one that a kernel of its own runs. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/cuda/launch.hpp"
#include "schedule/schedule.hpp"

namespace trib::cuda {

/// Where ranks are. In schedules there are ranks, in a Launch devices.
struct Placement {
  bool is_shared = false;              ///< devices have several ranks
  std::vector<int> device_of;          ///< by rank
  std::vector<int> leader_of;          ///< by device: the rank that launches there
  std::vector<std::uint64_t> inboxes;  ///< addresses, by rank; zero: it has none
};

struct KernelPlan {
  KernelPlan(const Placement& placement, const std::vector<Schedule>& all, int rank);

  /// Batches, phases and flags, operands without addresses and lengths, inboxes.
  FlaggedLaunch launch{};
  /// What an operand of the launch stands for.
  struct Meaning {
    Buffer buffer;
    int rank, chunk;   // whose, if it is not scratch
    int holder, unit;  // scratch: whose inbox, and where in it
  };
  std::vector<Meaning> meanings;
  const Meaning& meaning(int operand) const { return meanings[static_cast<std::size_t>(operand)]; }
  /// What peers push here: an operand that is a source, and which device fills it.
  struct Arrival {
    int operand, from;
  };
  std::vector<Arrival> arrivals;
  std::vector<Flag> bare_signals, bare_waits;                 // of slots without payload
  int units = 0;                                              // of the inbox that has the most
  bool is_packet_possible = true, is_simple_possible = true;  // it fits into a launch
  bool is_delivered = false;                                  // it stores to peers' `out`

  /// What there is to do, where it is one exchange: operands.
  struct Exchange {
    bool is_flat = false, is_pipeline = false, is_relay = false;  // what can run it
    struct Copy {
      int from, to;
    };
    std::vector<Copy> targets;  // from `in` to inboxes
    std::vector<int> sources;   // of the fold, in its order
    int own = -1;               // the one of these that is this rank's
    std::vector<int> outs;      // where its result goes
    std::vector<Copy> results;  // from the inbox to `out`
    std::vector<Copy> kept;     // from `in` to `out`
    /// For a flat kernel, to which a chunk that is only copied is a sum of one.
    struct Fold {
      std::vector<int> sources;
      int own = -1, out = -1;  // out: -1 where there is no source
    };
    Fold fold;
  };
  Exchange exchange;

  /// What such a kernel takes in place of the launch, once that has a call's numbers, and its
  /// operands their addresses and lengths.
  void fill(FlatLaunch& flat) const;
  void fill(PipelineLaunch& line, std::size_t slice_bytes) const;

 private:
  std::byte* place(int operand) const {
    return reinterpret_cast<std::byte*>(launch.operand[operand].address);
  }
};

}  // namespace trib::cuda

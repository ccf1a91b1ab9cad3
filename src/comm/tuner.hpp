// SPDX-License-Identifier: BSD-3-Clause
// Measures the ways in which a reduction can be done, on buffers of its own and a channel of its
// own. Communicator::prepare() says when.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "comm/plans.hpp"
#include "comm/request.hpp"
#include "tune/tuning_file.hpp"

namespace trib {

/// Longer vectors are not measured: that would take as much memory once more, twice.
inline constexpr std::size_t kMostTunedBytes = std::size_t{64} << 20;
/// But on devices, where that is asked for, those that copy engines are for.
inline constexpr std::size_t kMostTunedOnDevice = std::size_t{1} << 30;
/// A process measures for so many budgets at most, unless it asks for more request by request.
inline constexpr double kBudgetsPerProcess = 20;

/// What the caller of Communicator::prepare() may ask for: the values of MPI info keys. Ranks may
/// ask for different things: the least budget holds for all, and a way that not all of them name
/// the same is not taken.
struct Hints {
  double budget_ms = -1;     ///< trib_tune, a number; negative: TRIB_TUNE_BUDGET_MS holds
  bool is_explicit = false;  ///< trib_tune is there: the process's limit does not count
  bool is_again = false;     ///< trib_tune=again: also where there is a finding
  /// trib_algorithm, as read_way() gives it. Nothing is measured then. "": not asked.
  Variant way = {.blocks = 0};
};

/// What a tuner works with. All of it outlives the tuner.
struct TunerParts {
  Group& group;
  HostChannel& main;
  Bootstrap& bootstrap;
  DeviceChannel* device;  ///< null: the request runs on the host
  /// Until an operation on that channel is done.
  std::function<void(Operation&, HostChannel&)> wait;
  bool is_asked_for = false;  ///< the same on all ranks: the program wants this to be measured
};

/// Collective: measures what is worth measuring for `request`, whose pointers are not used but to
/// see whether this rank has a result. Nothing (on all ranks alike): there is no memory.
std::optional<Record> tune(const TunerParts& parts, const Request& request, double budget);

/// The name under which findings for a place are kept.
std::string machine_of(const DeviceBackend* device, Key::Place place);

/// Collective: rank 0's findings of the tuning file, for as many ranks as these are.
std::vector<Finding> adopt_findings(Bootstrap& bootstrap, const Config& config,
                                    const DeviceBackend* device, Key::Place place);

}  // namespace trib

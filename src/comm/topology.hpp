// SPDX-License-Identifier: BSD-3-Clause
// What ranks share on this machine, as hwloc sees it: sockets, NUMA nodes, caches, cores. Next:
// schedule/levels.hpp, what algorithms get to see of it.
#pragma once

#include <sched.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "schedule/levels.hpp"

namespace trib {

/// The domains of one kind, and their processors, by the kernel's numbers.
struct Domains {
  std::string_view kind;  ///< as TRIB_LEVELS names it
  std::vector<cpu_set_t> processors;
};

struct Topology {
  std::vector<Domains> kinds;
  std::string missing;  ///< why nothing is known; empty: it is
};

/// Asks hwloc, which must be there at run time only. `wanted`: automatic for those that are used
/// so, a kind for that one alone, none for all. Plain and slow: milliseconds.
Topology read_topology(Config::Levels wanted);

/// The levels of ranks that may run on these processors each. A rank is in a domain if all its
/// processors are; a kind counts if each rank is in a domain of it.
Levels levels_of(const Topology& topology, std::span<const cpu_set_t> bindings);

/// Collective: the levels of a communicator on one node, the same on all ranks. `bindings` are,
/// too.
Levels agree_on_levels(Bootstrap& bootstrap, const Config& config,
                       std::span<const cpu_set_t> bindings);

}  // namespace trib

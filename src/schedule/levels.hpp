// SPDX-License-Identifier: BSD-3-Clause
// How the ranks of a node share its sockets, NUMA nodes and caches. comm/topology.hpp finds it out;
// algorithm/groups.hpp and algorithm/tree.cpp group ranks by it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trib {

/// The domain of each rank, its socket for instance. Domains are numbered by their lowest ranks.
using Level = std::vector<int>;

/// From the outermost level to the innermost, each of which divides domains of the one before.
/// Empty: all ranks are alike.
using Levels = std::vector<Level>;

/// The number of domains.
int domains(const Level& level);

/// From partitions of the ranks in any order, their domains numbered at will. Leaves out what says
/// nothing (one domain, a domain for each rank, the same again), and what cuts across a coarser
/// level.
Levels make_levels(std::vector<Level> partitions);

/// "0,0,1,1,1,1/0,0,1,1,2,2": two domains, the second of which has two again.
std::string to_string(const Levels& levels);

/// The inverse, through make_levels(). Throws Error(Code::argument).
Levels parse_levels(std::string_view text, int ranks);

/// Tells layouts apart. No levels: 0.
std::uint64_t layout_of(const Levels& levels);

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// The only file that includes hwloc.h. The library is loaded when it is needed first: without it
// there are no levels, and a hwloc that the program has already is left alone.
#include "comm/topology.hpp"

#include <dlfcn.h>
#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

#include "base/error.hpp"
#include "base/log.hpp"

namespace trib {
namespace {

// ------------------------------------------------------------------------------------------- hwloc

#define TRIB_HWLOC(X)              \
  X(get_api_version)               \
  X(topology_init)                 \
  X(topology_set_flags)            \
  X(topology_set_all_types_filter) \
  X(topology_set_type_filter)      \
  X(topology_load)                 \
  X(topology_destroy)              \
  X(get_type_depth)                \
  X(get_nbobjs_by_depth)           \
  X(get_obj_by_depth)              \
  X(bitmap_next)

struct Hwloc {
#define TRIB_MEMBER(name) decltype(&hwloc_##name) name;
  TRIB_HWLOC(TRIB_MEMBER)
#undef TRIB_MEMBER

  /// Throws Error.
  Hwloc() {
    // A hwloc that everyone in the process sees would get the calls that another one makes to
    // itself. So it is this one or none.
    void* library = RTLD_DEFAULT;
    if (::dlsym(RTLD_DEFAULT, "hwloc_get_api_version") == nullptr) {
      library = ::dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) {
        const char* const why = ::dlerror();
        throw Error(Code::system, why != nullptr ? why : "no libhwloc.so.15");
      }
    }
#define TRIB_LOOK_UP(name)                                                               \
  this->name = reinterpret_cast<decltype(this->name)>(::dlsym(library, "hwloc_" #name)); \
  if (this->name == nullptr) throw Error(Code::system, "hwloc has no hwloc_" #name);
    TRIB_HWLOC(TRIB_LOOK_UP)
#undef TRIB_LOOK_UP
    // Versions 2.x have one binary interface; 2.5 brought a flag that is needed.
    if (const unsigned version = get_api_version(); version >> 16 != 2 || version < 0x20500)
      throw Error(Code::system, "hwloc is not of version 2.5 or a later 2.x");
  }
};

#undef TRIB_HWLOC

struct Kind {
  Config::Levels setting;
  std::string_view name;
  hwloc_obj_type_t type;
  bool is_automatic;  ///< not the innermost ones: a step more in each tree, for a few ranks
};

constexpr Kind kKinds[] = {
    {Config::Levels::socket, "socket", HWLOC_OBJ_PACKAGE, true},
    {Config::Levels::numa, "numa", HWLOC_OBJ_NUMANODE, true},
    {Config::Levels::l3, "l3", HWLOC_OBJ_L3CACHE, true},
    {Config::Levels::l2, "l2", HWLOC_OBJ_L2CACHE, false},
    {Config::Levels::core, "core", HWLOC_OBJ_CORE, false},
};

bool is_wanted(const Kind& kind, Config::Levels wanted) {
  if (wanted == Config::Levels::automatic) return kind.is_automatic;
  return wanted == Config::Levels::none || wanted == kind.setting;
}

void check(int status, const char* what) {
  if (status != 0) throw Error(Code::system, std::string("hwloc cannot ") + what);
}

cpu_set_t processors_of(const Hwloc& hwloc, hwloc_const_bitmap_t set) {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  for (int cpu = hwloc.bitmap_next(set, -1); cpu >= 0 && cpu < CPU_SETSIZE;
       cpu = hwloc.bitmap_next(set, cpu))
    CPU_SET(cpu, &processors);
  return processors;
}

std::vector<Domains> ask(const Hwloc& hwloc, Config::Levels wanted) {
  hwloc_topology_t made = nullptr;
  check(hwloc.topology_init(&made), "begin");
  const std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, decltype(&hwloc_topology_destroy)>
      topology(made, hwloc.topology_destroy);
  // The processors of other ranks may not be ours to use. It should not move this thread to each of
  // them in turn, where other ranks are busy, nor read what nobody asks for.
  unsigned long flags =
      HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED | HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING;
  if (hwloc.get_api_version() >= 0x20800)
    flags |= HWLOC_TOPOLOGY_FLAG_NO_DISTANCES | HWLOC_TOPOLOGY_FLAG_NO_MEMATTRS |
             HWLOC_TOPOLOGY_FLAG_NO_CPUKINDS;
  check(hwloc.topology_set_flags(made, flags), "take flags");
  check(hwloc.topology_set_all_types_filter(made, HWLOC_TYPE_FILTER_KEEP_NONE), "filter");
  // NUMA nodes are always there, where something has their processors: a group, if nothing else.
  check(hwloc.topology_set_type_filter(made, HWLOC_OBJ_GROUP, HWLOC_TYPE_FILTER_KEEP_STRUCTURE),
        "filter");
  for (const Kind& kind : kKinds)
    if (is_wanted(kind, wanted) && kind.type != HWLOC_OBJ_NUMANODE)
      check(hwloc.topology_set_type_filter(made, kind.type, HWLOC_TYPE_FILTER_KEEP_ALL), "filter");
  check(hwloc.topology_load(made), "look at the machine");

  std::vector<Domains> kinds;
  for (const Kind& kind : kKinds) {
    if (!is_wanted(kind, wanted)) continue;
    Domains domains{kind.name, {}};
    const int depth = hwloc.get_type_depth(made, kind.type);
    for (unsigned i = 0; i < hwloc.get_nbobjs_by_depth(made, depth); ++i) {
      const cpu_set_t processors =
          processors_of(hwloc, hwloc.get_obj_by_depth(made, depth, i)->cpuset);
      const auto is_same = [&](const cpu_set_t& other) { return CPU_EQUAL(&other, &processors); };
      // NUMA nodes may have no processors, or those of another node, such as fast memory.
      if (CPU_COUNT(&processors) > 0 &&
          std::none_of(domains.processors.begin(), domains.processors.end(), is_same))
        domains.processors.push_back(processors);
    }
    kinds.push_back(std::move(domains));
  }
  return kinds;
}

/// Each is read once per process.
const Topology& topology_of_process(Config::Levels wanted) {
  static std::mutex mutex;
  static auto& topologies = *new std::map<Config::Levels, Topology>;  // MPI may end very late
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = topologies.try_emplace(wanted);
  if (is_new) found->second = read_topology(wanted);
  return found->second;
}

}  // namespace

Topology read_topology(Config::Levels wanted) {
  const int saved_errno = errno;
  Topology topology;
  try {
    static const auto& hwloc = *new Hwloc;
    topology.kinds = ask(hwloc, wanted);
  } catch (const std::exception& error) {
    topology.missing = error.what();
  }
  errno = saved_errno;
  return topology;
}

// ------------------------------------------------------------------------------------------ levels

namespace {

/// The number of the domain that `binding` is in as a whole, or -1.
int domain_of(const Domains& domains, const cpu_set_t& binding) {
  for (std::size_t i = 0; i < domains.processors.size(); ++i) {
    cpu_set_t common;
    CPU_AND(&common, &domains.processors[i], &binding);
    if (CPU_EQUAL(&common, &binding)) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

Levels levels_of(const Topology& topology, std::span<const cpu_set_t> bindings) {
  std::vector<Level> partitions;
  for (const Domains& domains : topology.kinds) {
    Level level;
    for (const cpu_set_t& binding : bindings) level.push_back(domain_of(domains, binding));
    if (std::find(level.begin(), level.end(), -1) == level.end())
      partitions.push_back(std::move(level));
  }
  return make_levels(std::move(partitions));
}

Levels agree_on_levels(Bootstrap& bootstrap, const Config& config,
                       std::span<const cpu_set_t> bindings) {
  // With fewer than 9 ranks, the default table names no algorithm that knows levels; with fewer
  // than 3, there is nothing to know.
  const std::size_t size = bindings.size(),
                    least = config.levels == Config::Levels::automatic ? 9 : 3;
  const auto is_same = [&](const cpu_set_t& other) { return CPU_EQUAL(&other, &bindings[0]); };
  if (config.levels == Config::Levels::none || size < least ||
      std::all_of(bindings.begin(), bindings.end(), is_same))
    return {};

  // Rank 0 looks: it is one process that takes the time, and all see the same machine.
  constexpr std::size_t kMostLevels = std::size(kKinds);
  constexpr std::uint16_t kNone = 0xffff;
  std::vector<std::uint16_t> mine(kMostLevels * size, kNone), all(mine.size() * size);
  if (bootstrap.rank() == 0) {
    const Topology& topology = topology_of_process(config.levels);
    const Levels levels = levels_of(topology, bindings);
    auto at = mine.begin();
    for (const Level& level : levels) at = std::copy(level.begin(), level.end(), at);
    if (is_logged(Config::Log::info))
      log(Config::Log::info,
          "levels: " + (!levels.empty()            ? to_string(levels)
                        : topology.missing.empty() ? "none"
                                                   : "none: " + topology.missing));
  }
  bootstrap.exchange(mine.data(), all.data(), mine.size() * sizeof mine[0]);
  Levels levels;
  for (std::size_t level = 0; level < kMostLevels && all[level * size] != kNone; ++level) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(level * size);
    levels.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(size));
  }
  return levels;
}

}  // namespace trib

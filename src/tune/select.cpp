// SPDX-License-Identifier: BSD-3-Clause
// The default table.
#include "tune/select.hpp"

#include <climits>
#include <span>
#include <string>

#include "base/error.hpp"

namespace trib {
namespace {

constexpr int kAny = INT_MAX;
constexpr std::size_t kAll = SIZE_MAX;
constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// Bytes of a chunk per pass, unless the room in the scratch (Channel::fit) makes them less.
constexpr std::size_t kLong = 256 * KiB;
/// The same for many ranks, whose scratch should leave room in the caches. Not less: the loops over
/// elements store shorter pieces through the caches whatever the size of the result.
constexpr std::size_t kShort = 4 * KiB;

struct Row {
  int ranks;          // up to so many
  std::size_t bytes;  // of the whole vector, up to so many
  const char* algorithm;
  std::size_t slice = kLong;
};

// The first row that fits serves the call. Measured on 2026-11-21 with `trib bench COLLECTIVE -n N
// --algorithm A`: 2 ranks on an AMD EPYC (Zen 5) of 2 cores; 4, 8, 16 and 64 ranks on an Intel Xeon
// of 64 cores, and 24, 32, 61 and 63 ranks where grouped_two_shot stands: there rabenseifner loses
// most.
// clang-format off
constexpr Row kAllreduce[] = {
    {2,    512 * KiB, "one_shot"},
    {8,    256,       "one_shot"},
    {4,    1 * KiB,   "one_shot"},
    {16,   64,        "one_shot"},
    {8,    kAll,      "two_shot"},
    {16,   1 * KiB,   "tree4"},
    {16,   kAll,      "two_shot"},
    {kAny, 512,       "tree8"},
    {kAny, 4 * KiB,   "tree4"},
    {32,   kAll,      "two_shot"},
    {kAny, kAll,      "two_shot", kShort},
};
constexpr Row kReduce[] = {
    {2,    32 * KiB,  "one_shot"},
    {4,    8 * KiB,   "one_shot"},
    {8,    2 * KiB,   "one_shot"},
    {4,    kAll,      "two_shot"},
    {8,    16 * KiB,  "rabenseifner"},
    {8,    kAll,      "two_shot"},
    {kAny, 512,       "tree8"},
    {kAny, 32 * KiB,  "tree4"},
    {32,   512 * KiB, "rabenseifner"},
    {kAny, 512 * KiB, "grouped_two_shot"},
    {32,   kAll,      "two_shot"},
    {kAny, kAll,      "rootless", kShort},
};
constexpr Row kReduceScatter[] = {
    {8,    kAll,      "one_shot"},
    {kAny, 1 * KiB,   "one_shot"},
    {16,   512 * KiB, "rabenseifner"},
    {16,   kAll,      "one_shot"},
    {32,   kAll,      "grouped_two_shot"},
    {kAny, kAll,      "grouped_two_shot", kShort},
};
// Those that only copy: not measured on the host, where no caller has come yet.
constexpr Row kAllgather[] = {
    {kAny, kAll,      "one_shot"},
};
constexpr Row kBroadcast[] = {
    {kAny, 64 * KiB,  "one_shot"},
    {kAny, kAll,      "two_shot"},
};
// TRIB_DETERMINISM=order: rows whose owners fold everything in rank order.
constexpr Row kOrdered[] = {
    {2,    512 * KiB, "one_shot"},
    {8,    4 * KiB,   "one_shot"},
    {kAny, 512,       "one_shot"},
    {32,   kAll,      "two_shot"},
    {kAny, kAll,      "two_shot", kShort},
};
constexpr Row kOrderedScatter[] = {
    {32,   kAll,      "one_shot"},
    {kAny, kAll,      "one_shot", kShort},
};
// clang-format on

struct DeviceRow {
  int ranks;
  std::size_t bytes;
  const char* algorithm;
  bool is_packet;
  int blocks;
  std::size_t slice;  // bytes of a chunk per pass, at least
  Engine engine = Engine::kernel;
};

// GPUs, one rank each. All of these fold in rank order, and so does what stands in for them.
// Measured on 2026-11-21 with `trib bench allreduce --memory cuda`: 2 and 4 H200. Copy engines:
// `TRIB_ENGINE=copy trib bench COLLECTIVE -n 2 --memory cuda`, docs/results.md has the figures.
// clang-format off
constexpr DeviceRow kDevice[] = {
    {2,    128 * KiB,  "one_shot", true,  32,  1 * KiB},
    {kAny, 96 * KiB,   "one_shot", true,  32,  1 * KiB},
    {kAny, 256 * KiB,  "two_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "two_shot", false, 132, 4 * KiB},
    {kAny, 64 * MiB,   "two_shot", false, 132, 16 * KiB},
    {2,    kAll,       "two_shot", false, 132, 64 * MiB, Engine::copy},
    {kAny, kAll,       "two_shot", false, 132, 16 * KiB},
};
constexpr DeviceRow kDeviceReduce[] = {
    {2,    128 * KiB,  "one_shot", true,  32,  1 * KiB},
    {kAny, 96 * KiB,   "one_shot", true,  32,  1 * KiB},
    {kAny, 256 * KiB,  "two_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "two_shot", false, 132, 4 * KiB},
    {kAny, 32768 * KiB, "two_shot", false, 132, 16 * KiB},
    {kAny, 64 * MiB,   "rootless", false, 132, 16 * KiB},
    {2,    kAll,       "one_shot", false, 132, 64 * MiB, Engine::copy},
    {kAny, kAll,       "rootless", false, 132, 16 * KiB},
};
// The reduce_scatters, and allgather, which moves as much from each rank to each.
constexpr DeviceRow kDeviceScatter[] = {
    {kAny, 256 * KiB,  "one_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "one_shot", false, 132, 4 * KiB},
    {kAny, 64 * MiB,   "one_shot", false, 132, 16 * KiB},
    {2,    kAll,       "one_shot", false, 132, 64 * MiB, Engine::copy},
    {kAny, kAll,       "one_shot", false, 132, 16 * KiB},
};
// Not measured yet.
constexpr DeviceRow kDeviceBroadcast[] = {
    {kAny, 64 * KiB,   "one_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "two_shot", false, 132, 4 * KiB},
    {kAny, kAll,       "two_shot", false, 132, 16 * KiB},
};
// clang-format on

/// What a copy engine moves at a time.
constexpr std::size_t kCopySlice = 64 * MiB;

/// The table's row, of those that `can_copy` permits.
Choice device_choice(const Key& key, bool can_copy) {
  std::span<const DeviceRow> rows = kDevice;
  if (has_chunk_per_rank(key.collective)) rows = kDeviceScatter;
  if (key.collective == Collective::broadcast) rows = kDeviceBroadcast;
  if (key.collective == Collective::reduce) rows = kDeviceReduce;
  for (const DeviceRow& row : rows)
    if (key.size <= row.ranks && key.bytes <= row.bytes &&
        (row.engine == Engine::kernel || (can_copy && is_reduction(key.collective))))
      return {find_algorithm(row.algorithm),
              Reach::scratch,
              row.slice,
              row.engine,
              row.is_packet,
              row.blocks};
  throw Error(Code::internal, "select: no row");
}

Choice find(std::span<const Row> rows, const Key& key) {
  for (const Row& row : rows)
    if (key.size <= row.ranks && key.bytes <= row.bytes)
      return {find_algorithm(row.algorithm), Reach::scratch, row.slice};
  throw Error(Code::internal, "select: no row");
}

Choice host_choice(const Key& key, bool is_ordered) {
  if (key.collective == Collective::allgather) return find(kAllgather, key);
  if (key.collective == Collective::broadcast) return find(kBroadcast, key);
  if (is_scatter(key.collective))
    return find(is_ordered ? std::span<const Row>(kOrderedScatter) : kReduceScatter, key);
  if (is_ordered) return find(kOrdered, key);
  return find(key.collective == Collective::reduce ? std::span<const Row>(kReduce) : kAllreduce,
              key);
}

}  // namespace

Choice select(const Key& key, const Config& config) {
  const bool is_ordered =
      config.determinism == Config::Determinism::order || key.place != Key::Place::host;
  Choice choice;
  if (key.place == Key::Place::device) {
    const bool is_protocol_named = config.protocol != Config::Protocol::automatic;
    // Protocols are the kernels': who names one wants these. Copy engines wait for a measurement of
    // their last form before they serve calls unasked.
    choice = device_choice(
        key, key.can_copy && config.engine == Config::Engine::copy && !is_protocol_named);
    if (is_protocol_named) choice.is_packet = config.protocol == Config::Protocol::packet;
    if (config.engine == Config::Engine::copy && key.can_copy && is_reduction(key.collective) &&
        choice.engine != Engine::copy) {
      choice.engine = Engine::copy;
      choice.is_packet = false;
      choice.slice_bytes = kCopySlice;
    }
    if (config.blocks > 0) choice.blocks = static_cast<int>(config.blocks);
  } else {
    choice = host_choice(key, is_ordered);
  }
  if (const std::string_view wanted = config.algorithm; wanted != "auto") {
    const Algorithm* const named = find_algorithm(wanted);
    if (named == nullptr) {
      std::string names = "auto";
      for (const Algorithm& algorithm : algorithms()) names += ", " + std::string(algorithm.name);
      throw Error(Code::argument, "TRIB_ALGORITHM=" + std::string(wanted) +
                                      ": no such algorithm; accepted are " + names);
    }
    if (config.determinism == Config::Determinism::order &&
        named->association != Association::rank_order)
      throw Error(Code::argument,
                  "TRIB_ALGORITHM=" + std::string(wanted) +
                      " does not fold in rank order, which TRIB_DETERMINISM=order asks for");
    if (named->serves(key.collective)) choice.algorithm = named;
  }
  // Two ranks on two cores: the system call that reads a peer costs more than the copy it saves, at
  // every size.
  if (key.can_attach && config.attach == Config::Attach::always) choice.reach = Reach::attach;
  if (config.slice > 0) choice.slice_bytes = static_cast<std::size_t>(config.slice);
  return choice;
}

}  // namespace trib

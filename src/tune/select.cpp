// SPDX-License-Identifier: BSD-3-Clause
// The default table, and what may take its place.
#include "tune/select.hpp"

#include <algorithm>
#include <array>
#include <climits>
#include <concepts>
#include <span>
#include <string>

#include "base/error.hpp"
#include "tune/findings.hpp"

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

/// Of the vector, to be reduced in one pass where buffers are mapped. Measured with
/// TRIB_SHARED_HEAP=1 on 2026-11-21 and 22: 2 ranks on an AMD EPYC (Zen 5) of 2 cores, 4, 8 and 16
/// on an Intel Xeon of 16: at 8 KiB it pays everywhere, at 4 KiB only for some. All ranks meet
/// before it, which takes longer the more there are: for more than 16 it is a guess.
constexpr std::size_t least_mapped(int ranks) {
  return std::max(8 * KiB, KiB / 2 * static_cast<std::size_t>(ranks));
}

struct Row {
  int ranks;          // up to so many
  std::size_t bytes;  // of the whole vector, up to so many
  const char* algorithm;
  std::size_t slice = kLong;
  bool is_intel = false;  // only there: Key::is_intel
};

// The first row that fits serves the call; some only come to that where everything is to be folded
// in rank order. Measured on 2026-11-21 with `trib bench COLLECTIVE -n N --algorithm A`: 2 ranks on
// an AMD EPYC (Zen 5) of 2 cores; 4, 8, 16 and 64 ranks on an Intel Xeon of 64 cores, and 24, 32,
// 61 and 63 ranks where grouped_two_shot stands: there rabenseifner loses most. The reduce_scatters
// of 8 and 16 ranks again on 2026-11-22, on 16 cores, and Reduce of 3, 4, 6, 8 and 16 ranks there
// and of 24 and 32 on 32 cores on the day after, with 3 to 7 launches of each way in turns. 2 ranks
// again on 2026-11-22, while the two cores shared a cache and while they did not: the rows are
// those that lose least in either state. Slices of their Reduce: on an AMD EPYC (Zen 4) of 2 cores,
// where the root folds one while the other rank copies the next. 17 to 32 ranks again up to 128
// KiB, and Reduces of 31: on 32 cores on 2026-11-25. Up to 8 ranks again on 2026-11-26, on 16 cores
// of an Intel Xeon and 2 of another, with returning_two_shot. 9 to 32 ranks up to 2 KiB again that
// day, on 16 and 32 cores of Intel Xeons, and what else was slower by a tenth than another row
// there, up to 16 ranks; then 17 to 64 ranks up to 32 KiB, on 64 cores; and on the evening of that
// day, when ranks took lines back, short allreduces of 2 to 16 ranks and Reduces of 5 to 16; and
// then what goes by ring, since chunks stay where they set out: 3 to 32 ranks, inputs that are
// written before each call, five machines. Allreduces of 2 ranks by returning_two_shot on an AMD
// EPYC (Zen 4), cores near and far, on 2026-11-28; on other processors than Intel's for more ranks
// by nobody: what hands a line back and forth may be slow there.
// clang-format off
constexpr bool kIntel = true;
constexpr Row kAllreduce[] = {
    {2,    4 * KiB,   "one_shot"},
    {2,    14 * KiB,  "returning_two_shot", kLong, kIntel},
    {2,    40 * KiB,  "one_shot", kLong, kIntel},
    {2,    kAll,      "returning_two_shot", 64 * KiB, kIntel},
    {2,    20 * KiB,  "one_shot"},
    {2,    6 * MiB,   "returning_two_shot"},
    {3,    24 * KiB,  "one_shot"},
    {3,    kAll,      "returning_two_shot", 64 * KiB, kIntel},
    {7,    1 * KiB,   "one_shot"},
    {8,    1 * KiB,   "one_shot", kLong, kIntel},
    {8,    800,       "one_shot"},
    {4,    3 * KiB,   "one_shot", kLong, kIntel},
    {4,    kAll,      "returning_two_shot", 32 * KiB, kIntel},
    {6,    5 * KiB,   "returning_two_shot", kLong, kIntel},
    {6,    28 * KiB,  "two_shot"},
    {5,    2 * MiB,   "returning_two_shot", 32 * KiB, kIntel},
    {6,    384 * KiB, "returning_two_shot", 32 * KiB, kIntel},
    {8,    40 * KiB,  "two_shot"},
    {8,    128 * KiB, "returning_two_shot", 32 * KiB, kIntel},
    {8,    kAll,      "two_shot"},
    {10,   1 * KiB,   "one_shot", kLong, kIntel},
    {12,   896,       "one_shot"},
    {10,   44 * KiB,  "two_shot"},
    {10,   160 * KiB, "returning_two_shot", kLong, kIntel},
    {16,   640,       "one_shot"},
    {16,   1 * KiB,   "tree4"},
    {kAny, 512,       "tree8"},
    {kAny, 512,       "one_shot"},
    {16,   224 * KiB, "two_shot"},
    {32,   1536,      "tree8"},
    {32,   224 * KiB, "two_shot"},
    {32,   kAll,      "ring",     32 * KiB},
    {32,   kAll,      "two_shot"},
    {48,   2560,      "tree8"},
    {48,   kAll,      "two_shot", kShort},
    {kAny, 4 * KiB,   "tree8"},
    {kAny, kAll,      "two_shot", kShort},
};
constexpr Row kReduce[] = {
    {2,    256 * KiB, "one_shot", 32 * KiB},
    {2,    2 * MiB,   "one_shot", 64 * KiB},
    {2,    kAll,      "one_shot", 128 * KiB},
    {4,    40 * KiB,  "one_shot"},
    {6,    20 * KiB,  "one_shot", kLong, kIntel},
    {8,    7 * KiB,   "one_shot"},
    {4,    96 * KiB,  "two_shot"},
    {4,    160 * KiB, "returning_two_shot", 128 * KiB, kIntel},
    {4,    160 * KiB, "two_shot", 128 * KiB},
    {4,    8 * MiB,   "ring",     32 * KiB},
    {4,    kAll,      "ring",     kLong},
    {8,    80 * KiB,  "two_shot"},
    {8,    8 * MiB,   "ring",     32 * KiB},
    {8,    kAll,      "ring",     128 * KiB},
    {8,    640 * KiB, "returning_two_shot", 128 * KiB, kIntel},
    {8,    640 * KiB, "two_shot", 128 * KiB},
    {6,    kAll,      "two_shot"},
    {8,    2 * MiB,   "two_shot"},
    {12,   512,       "tree8"},
    {16,   4 * KiB,   "tree4"},
    {kAny, 512,       "tree8"},
    {kAny, 512,       "one_shot"},
    {16,   20 * KiB,  "two_shot"},
    {11,   112 * KiB, "two_shot"},
    {16,   72 * KiB,  "grouped_two_shot"},
    {16,   112 * KiB, "two_shot"},
    {16,   2 * MiB,   "ring",     16 * KiB},
    {16,   8 * MiB,   "ring",     32 * KiB},
    {16,   kAll,      "ring",     128 * KiB},
    {16,   192 * KiB, "two_shot"},
    {16,   384 * KiB, "returning_two_shot", 64 * KiB, kIntel},
    {16,   384 * KiB, "two_shot", 64 * KiB},
    {16,   2 * MiB,   "two_shot"},
    {16,   kAll,      "rootless", 128 * KiB},
    {32,   6 * KiB,   "tree4"},
    {32,   192 * KiB, "grouped_two_shot"},
    {32,   8 * MiB,   "ring",     16 * KiB},
    {32,   kAll,      "ring",     32 * KiB},
    {kAny, 12 * KiB,  "tree4"},
    {32,   512 * KiB, "rabenseifner"},
    {kAny, 512 * KiB, "grouped_two_shot"},
    {32,   kAll,      "two_shot"},
    {kAny, kAll,      "rootless", kShort},
};
constexpr Row kReduceScatter[] = {
    {2,    kAll,      "one_shot"},
    {6,    80 * KiB,  "one_shot"},
    {6,    kAll,      "ring",     128 * KiB},
    {11,   112 * KiB, "one_shot"},
    {11,   kAll,      "ring",     128 * KiB},
    {11,   kAll,      "one_shot"},
    {16,   10 * KiB,  "one_shot"},
    {15,   72 * KiB,  "grouped_two_shot"},
    {15,   112 * KiB, "one_shot"},
    {15,   kAll,      "ring",     64 * KiB},
    {16,   144 * KiB, "grouped_two_shot"},
    {16,   kAll,      "ring",     64 * KiB},
    {15,   kAll,      "one_shot"},
    {16,   288 * KiB, "grouped_two_shot"},
    {16,   kAll,      "one_shot"},
    {24,   1 * KiB,   "one_shot"},
    {32,   160 * KiB, "grouped_two_shot"},
    {32,   kAll,      "ring",     64 * KiB},
    {32,   kAll,      "grouped_two_shot"},
    {kAny, kAll,      "grouped_two_shot", kShort},
    {32,   kAll,      "one_shot"},
    {kAny, kAll,      "one_shot", kShort},
};
// Those that only copy: not measured on the host, where no caller has come yet.
constexpr Row kAllgather[] = {
    {kAny, kAll,      "one_shot"},
};
constexpr Row kBroadcast[] = {
    {kAny, 64 * KiB,  "one_shot"},
    {kAny, kAll,      "two_shot"},
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
  Reach reach =
      Reach::scratch;        // others: for buffers that are mapped; the rows behind for the rest
  bool is_enqueued = false;  // for calls on a caller's stream only
};

/// For kernels that wait for nobody: as many as the channel permits.
constexpr int kAnyBlocks = INT_MAX;

/// Kernels that work on mapped buffers: a block takes so many bytes of a chunk, at least. And they
/// count in 32 bits.
constexpr std::size_t kMappedSlice = 2 * KiB;
constexpr std::size_t kMostMapped = 2048 * MiB;

// GPUs, one rank each; a single one is shared by all. All of these fold in rank order but `chain`;
// what stands in for them does as they do. Measured on 2026-11-22 with
// `trib bench COLLECTIVE --memory cuda`, in blocking calls, on streams and in graphs: 2 and 4 H200.
// docs/results-gpus.md has the figures. Two GPUs again on 2026-11-24, where inboxes end and
// mappings and copy engines begin: 2 H200 and 2 H100; and on 2026-11-26 Reduces from 2 MiB on that
// are not on a stream, reduce_scatters of 64 MiB and, over 4 GPUs, Reduces of 1 GiB, by kernels:
// H100; what is longer than 64 KiB and goes by packets over 3 and 4 GPUs, and, a day later, Reduces
// of more than 32 MiB there, on streams of more than 64, and what 3 GPUs copy: H200.
// `ordered_chain` has no row: it takes as long as what is there. A single GPU hands nothing over,
// so packets are of no use there: 2, 4 and 16 ranks on one H200, 2026-11-24.
// clang-format off
constexpr DeviceRow kDevice[] = {
    {1,    kAll,       "one_shot", false, kAnyBlocks, 4 * KiB},
    {2,    240 * KiB,  "one_shot", true,  132, 512},
    {2,    2048 * KiB, "one_shot", false, 132, 4 * KiB},
    {2,    16 * MiB,   "two_shot", false, 132, kMappedSlice, Engine::kernel, Reach::map},
    {2,    4096 * KiB, "one_shot", false, 132, 4 * KiB},
    {2,    8192 * KiB, "two_shot", false, 132, 32 * KiB},
    {4,    192 * KiB,  "one_shot", true,  132, 512},
    {kAny, 64 * KiB,   "one_shot", true,  132, 512},
    {kAny, 4096 * KiB, "two_shot", false, 132, kMappedSlice, Engine::kernel, Reach::map},
    {kAny, 8192 * KiB, "two_shot", false, 132, 16 * KiB, Engine::kernel, Reach::push},
    {kAny, 32 * MiB,   "two_shot", false, 132, 32 * KiB, Engine::kernel, Reach::push},
    {4,    512 * KiB,  "one_shot", false, 132, 4 * KiB},
    {kAny, 256 * KiB,  "two_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "two_shot", false, 132, 4 * KiB},
    {2,    32 * MiB,   "two_shot", false, 132, 32 * KiB},
    {2,    128 * MiB,  "two_shot", false, 132, 64 * KiB},
    {2,    kAll,       "two_shot", false, 132, 64 * MiB, Engine::copy},
    {2,    kAll,       "two_shot", false, 132, 64 * KiB},
    {kAny, 64 * MiB,   "two_shot", false, 132, 32 * KiB, Engine::kernel, Reach::push},
    {4,    256 * MiB,  "two_shot", false, 132, 16 * KiB},
    {3,    kAll,       "two_shot", false, 132, 96 * MiB, Engine::copy},
    {4,    kAll,       "two_shot", false, 132, 64 * MiB, Engine::copy},
    {kAny, kAll,       "two_shot", false, 132, 16 * KiB},
};
constexpr DeviceRow kDeviceReduce[] = {
    {1,    kAll,       "one_shot", false, kAnyBlocks, 4 * KiB},
    {2,    256 * KiB,  "one_shot", true,  132, 512},
    {2,    2048 * KiB, "one_shot", false, 132, 28 * KiB},
    {2,    16 * MiB,   "two_shot", false, 132, kMappedSlice, Engine::kernel, Reach::map},
    {2,    4096 * KiB, "one_shot", false, 132, 28 * KiB, Engine::kernel, Reach::scratch, true},
    {2,    16 * MiB,   "one_shot", false, 132, 64 * KiB, Engine::kernel, Reach::scratch, true},
    {2,    128 * MiB,  "one_shot", false, 132, 128 * KiB, Engine::kernel, Reach::scratch, true},
    {2,    8192 * KiB, "two_shot", false, 132, 16 * KiB},
    {2,    96 * MiB,   "two_shot", false, 132, 64 * KiB},
    {2,    128 * MiB,  "one_shot", false, 132, 128 * KiB},
    {2,    kAll,       "one_shot", false, 132, 64 * MiB, Engine::copy},
    {2,    kAll,       "one_shot", false, 132, 128 * KiB},
    {4,    192 * KiB,  "one_shot", true,  132, 512},
    {kAny, 64 * KiB,   "one_shot", true,  132, 512},
    {kAny, 16 * MiB,   "two_shot", false, 132, kMappedSlice, Engine::kernel, Reach::map},
    {4,    256 * KiB,  "one_shot", false, 132, 8 * KiB},
    {4,    8 * MiB,    "chain",    false, 132, 28 * KiB, Engine::kernel, Reach::scratch, true},
    {4,    64 * MiB,   "chain",    false, 132, 56 * KiB, Engine::kernel, Reach::scratch, true},
    {4,    kAll,       "chain",    false, 132, 128 * KiB, Engine::kernel, Reach::scratch, true},
    {4,    512 * KiB,  "one_shot", false, 132, 8 * KiB},
    {kAny, 256 * KiB,  "two_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "two_shot", false, 132, 4 * KiB},
    {kAny, 16 * MiB,   "two_shot", false, 132, 8 * KiB},
    {kAny, 32 * MiB,   "two_shot", false, 132, 16 * KiB},
    {4,    kAll,       "chain",    false, 132, 56 * KiB},
    {kAny, 512 * MiB,  "rootless", false, 132, 16 * KiB},
    {kAny, kAll,       "rootless", false, 132, 64 * KiB},
};
// The reduce_scatters.
constexpr DeviceRow kDeviceScatter[] = {
    {1,    kAll,       "one_shot", false, kAnyBlocks, 4 * KiB},
    {2,    1 * MiB,    "one_shot", true,  132, 512},
    {2,    4096 * KiB, "one_shot", false, 132, 4 * KiB},
    {2,    16 * MiB,   "two_shot", false, 132, kMappedSlice, Engine::kernel, Reach::map},
    {kAny, 512 * KiB,  "one_shot", true,  132, 512},
    {kAny, 4096 * KiB, "one_shot", false, 132, 4 * KiB},
    {2,    8 * MiB,    "one_shot", false, 132, 16 * KiB},
    {2,    16 * MiB,   "one_shot", false, 132, 32 * KiB},
    {2,    96 * MiB,   "one_shot", false, 132, 64 * KiB},
    {2,    128 * MiB,  "one_shot", false, 132, 128 * KiB},
    {2,    kAll,       "one_shot", false, 132, 64 * MiB, Engine::copy},
    {2,    kAll,       "one_shot", false, 132, 128 * KiB},
    {kAny, 32 * MiB,   "one_shot", false, 132, 16 * KiB},
    {4,    256 * MiB,  "one_shot", false, 132, 32 * KiB},
    {4,    kAll,       "one_shot", false, 132, 64 * MiB, Engine::copy},
    {kAny, kAll,       "one_shot", false, 132, 32 * KiB},
};
// Those that only copy: on streams and in graphs, 2 H200, 3 and 4 H100, 2026-11-28. The rows of one
// GPU, which its ranks share, as kDevice has them.
constexpr DeviceRow kDeviceAllgather[] = {
    {1,    kAll,       "one_shot", false, kAnyBlocks, 4 * KiB},
    {2,    64 * KiB,   "one_shot", true,  32,  1 * KiB},
    {2,    4096 * KiB, "one_shot", false, 132, 4 * KiB},
    {kAny, 256 * KiB,  "one_shot", true,  32,  1 * KiB},
    {kAny, 4096 * KiB, "one_shot", false, 132, 4 * KiB},
    {kAny, 12 * MiB,   "one_shot", false, 132, 16 * KiB},
    {2,    64 * MiB,   "one_shot", false, 132, 64 * KiB},
    {2,    kAll,       "one_shot", false, 132, 128 * KiB},
    {kAny, kAll,       "one_shot", false, 132, 32 * KiB},
};
constexpr DeviceRow kDeviceBroadcast[] = {
    {1,    kAll,       "one_shot", false, kAnyBlocks, 4 * KiB},
    {kAny, 64 * KiB,   "one_shot", true,  132, 512},
    {kAny, 4096 * KiB, "two_shot", false, 132, 4 * KiB},
    {2,    16 * MiB,   "two_shot", false, 132, 64 * KiB},
    {2,    kAll,       "two_shot", false, 132, 128 * KiB},
    {kAny, kAll,       "two_shot", false, 132, 32 * KiB},
};
// clang-format on

/// What a copy engine moves at a time.
constexpr std::size_t kCopySlice = 64 * MiB;

/// Whether ranks get equal bits from cuBLAS, whose order of addition differs between a rank's own
/// row and the others: each chunk has to be folded by one rank, or be a sum of two.
bool is_folded_once(const Algorithm& algorithm, const Key& key) {
  return key.collective != Collective::allreduce || key.size == 2 || algorithm.name != "one_shot";
}

/// `choice` with another engine.
Choice by_copies(Choice choice, Engine engine) {
  if (!is_driven_by_host(choice.engine)) choice.slice_bytes = kCopySlice;
  choice.engine = engine;
  choice.is_packet = false;
  return choice;
}

/// Whether kernels may work on mapped buffers, as far as the settings go.
bool may_map(const Key& key, const Config& config) {
  if (!key.can_map || !is_reduction(key.collective) || key.bytes > kMostMapped) return false;
  if (config.map != Config::Map::automatic) return config.map != Config::Map::off;
  return std::string_view(config.algorithm) == "auto" && config.slice == 0 &&
         config.protocol == Config::Protocol::automatic &&
         (config.engine == Config::Engine::automatic || config.engine == Config::Engine::kernel);
}

/// Whether the bits are those that calls in this place are to have.
bool is_foldable(const Algorithm& algorithm, const Key& key, const Config& config) {
  const Association association = association_of(algorithm, key);
  if (association == Association::rank_order) return true;
  // Types that are folded in a wider one are rounded once: not on their way.
  if (association != Association::chain || key.is_widened || key.shares_devices ||
      freedom_of(key, config) == Config::Determinism::order)
    return false;
  // What may go another way where buffers or memory permit it has one association with all ways.
  return key.is_enqueued ||
         (config.protocol == Config::Protocol::automatic &&
          (config.engine == Config::Engine::automatic || config.engine == Config::Engine::kernel) &&
          (config.map == Config::Map::automatic || config.map == Config::Map::off));
}

/// On a stream nobody knows whether peers are there, so none may read their buffers; and shorter
/// results have not been seen to gain by it.
bool may_deliver(const DeviceRow& row, const Key& key) {
  return row.reach == Reach::scratch || (row.reach == Reach::push && key.bytes > 512 * KiB);
}

/// The table's row, of those that `config`, `can_copy` and `can_map` permit.
Choice device_choice(const Key& key, const Config& config, bool can_copy, bool can_map) {
  std::span<const DeviceRow> rows = kDevice;
  if (is_scatter(key.collective)) rows = kDeviceScatter;
  if (key.collective == Collective::allgather) rows = kDeviceAllgather;
  if (key.collective == Collective::broadcast) rows = kDeviceBroadcast;
  if (key.collective == Collective::reduce) rows = kDeviceReduce;
  for (const DeviceRow& row : rows)
    if (key.size <= row.ranks && key.bytes <= row.bytes &&
        (row.reach == Reach::scratch || can_map) && (key.is_enqueued || !row.is_enqueued) &&
        !(key.is_enqueued && !may_deliver(row, key)) &&
        (row.engine == Engine::kernel || (can_copy && is_reduction(key.collective))) &&
        is_foldable(*find_algorithm(row.algorithm), key, config))
      return {find_algorithm(row.algorithm),
              row.reach,
              row.slice,
              row.engine,
              row.is_packet,
              row.blocks};
  throw Error(Code::internal, "select: no row");
}

/// What is handed from rank to rank has to wait for each of them to get a core, and takes slices
/// that are worth a step each.
bool can_travel(const Key& key) { return !key.is_crowded && !key.has_little_room; }

/// A ring rounds sums of a wider type on their way.
bool is_for(const Algorithm& algorithm, const Key& key, bool is_ordered) {
  if (is_ordered) return association_of(algorithm, key) == Association::rank_order;
  return algorithm.association != Association::ring || !key.is_widened;
}

constexpr std::string_view kTravelling = "ring";
/// What gives its bits where it cannot be.
constexpr std::string_view kStandIn = "two_shot_as_ring";

Choice host_choice(const Key& key, bool is_ordered) {
  std::span<const Row> rows = kAllreduce;
  if (key.collective == Collective::reduce) rows = kReduce;
  if (is_scatter(key.collective)) rows = kReduceScatter;
  if (key.collective == Collective::allgather) rows = kAllgather;
  if (key.collective == Collective::broadcast) rows = kBroadcast;
  for (const Row& row : rows)
    if (key.size <= row.ranks && key.bytes <= row.bytes && (key.is_intel || !row.is_intel) &&
        is_for(*find_algorithm(row.algorithm), key, is_ordered)) {
      if (row.algorithm == kTravelling && !can_travel(key))
        return {find_algorithm(kStandIn), Reach::scratch, kLong};
      return {find_algorithm(row.algorithm), Reach::scratch, row.slice};
    }
  throw Error(Code::internal, "select: no row");
}

template <class T>
constexpr bool kIsWhole = std::integral<T>;
template <class T>
constexpr bool kIsWhole<Logical<T>> = true;
template <>
constexpr bool kIsWhole<Byte> = true;
template <class Value, class Index>
constexpr bool kIsWhole<Pair<Value, Index>> = std::integral<Value> && std::integral<Index>;

/// Whether a call that is staged has to have the bits of `chain`, as its like have on devices.
bool stands_in_for_chain(const Key& key, const Config& config) {
  Key device = key;
  device.place = Key::Place::device;
  const Choice its = device_choice(device, config, /*can_copy=*/false, /*can_map=*/false);
  return association_of(*its.algorithm, device) == Association::chain;
}

/// What the default table says.
Choice default_choice(const Key& key, const Config& config) {
  // Protocols are the kernels': who names one wants these.
  if (key.place == Key::Place::device) {
    const bool can_map = may_map(key, config);
    if (can_map && config.map == Config::Map::always && !key.is_enqueued)
      return {find_algorithm("two_shot"), Reach::map, kMappedSlice, Engine::kernel, false, 132};
    return device_choice(key, config,
                         key.can_copy && config.engine != Config::Engine::kernel &&
                             config.protocol == Config::Protocol::automatic,
                         can_map && config.map == Config::Map::automatic);
  }
  if (key.shares_devices) return {find_algorithm("gpu_two_shot"), Reach::scratch, kLong};
  if (key.place == Key::Place::staged && stands_in_for_chain(key, config))
    return {find_algorithm("chain"), Reach::scratch, can_travel(key) ? 32 * KiB : kLong};
  return host_choice(
      key, config.determinism == Config::Determinism::order || key.place != Key::Place::host);
}

}  // namespace

Choice select(const Key& key, const Config& config, const Findings* findings) {
  if (config.engine == Config::Engine::gemv && config.determinism == Config::Determinism::order)
    throw Error(Code::argument,
                "TRIB_ENGINE=gemv adds in an order of its own, and TRIB_DETERMINISM=order asks for "
                "that of the ranks");
  const std::string_view wanted = config.algorithm;
  Choice choice = default_choice(key, config);
  if (choice.reach != Reach::scratch) {  // tuning does not try it, and knows nothing better
    if (config.blocks > 0) choice.blocks = static_cast<int>(config.blocks);
    return choice;
  }
  if (findings != nullptr && wanted == "auto" && !key.shares_devices)
    choice = findings->choose(key, config, choice);
  if (key.place == Key::Place::device) {
    if (config.protocol != Config::Protocol::automatic)
      choice.is_packet = config.protocol == Config::Protocol::packet;
    if (is_reduction(key.collective)) {
      if (config.engine == Config::Engine::copy && key.can_copy)
        choice = by_copies(choice, Engine::copy);
    }
    if (config.blocks > 0) choice.blocks = static_cast<int>(config.blocks);
  }
  if (wanted != "auto") {
    const Algorithm* const named = find_algorithm(wanted);
    if (named == nullptr) {
      std::string names = "auto";
      for (const Algorithm& algorithm : algorithms()) names += ", " + std::string(algorithm.name);
      throw Error(Code::argument, "TRIB_ALGORITHM=" + std::string(wanted) +
                                      ": no such algorithm; accepted are " + names);
    }
    if (config.determinism == Config::Determinism::order &&
        association_of(*named, key) != Association::rank_order)
      throw Error(Code::argument,
                  "TRIB_ALGORITHM=" + std::string(wanted) +
                      " does not fold in rank order, which TRIB_DETERMINISM=order asks for");
    if (named->serves(key.collective)) choice.algorithm = named;
  }
  if (config.engine == Config::Engine::gemv && key.place == Key::Place::device && key.can_copy &&
      key.can_gemv && is_reduction(key.collective)) {
    if (wanted == "auto" && !is_folded_once(*choice.algorithm, key))
      choice.algorithm = find_algorithm("two_shot");
    if (is_folded_once(*choice.algorithm, key)) choice = by_copies(choice, Engine::gemv);
  }
  // For inputs that were written since the last call, the system call that reads a peer costs more
  // than the copy it saves, but for the longest (docs/results-many-ranks.md).
  if (key.can_attach && config.attach == Config::Attach::always &&
      key.place != Key::Place::device)  // whose memory no system call reads
    choice.reach = Reach::attach;
  if (config.slice > 0) choice.slice_bytes = static_cast<std::size_t>(config.slice);
  const bool is_delivered =
      config.map == Config::Map::results || (config.map == Config::Map::always && key.is_enqueued);
  if (is_delivered && may_map(key, config) && !is_scatter(key.collective) &&
      !is_driven_by_host(choice.engine)) {
    choice.reach = Reach::push;
    choice.is_packet = false;
  }
  return choice;
}

void check_choices(const Config& config, int size) {
  for (int collective = 0; collective < kCollectives; ++collective) {
    Key key;
    key.collective = static_cast<Collective>(collective);
    key.size = size;
    key.is_widened = true;
    select(key, config);
  }
}

bool is_exact(Dtype dtype) {
#define TRIB_EXACT(name, element, accumulator) kIsWhole<element>,
  constexpr std::array<bool, kDtypes> exact{TRIB_DTYPES(TRIB_EXACT)};
#undef TRIB_EXACT
  return exact[static_cast<std::size_t>(dtype)];
}

bool is_widened(Dtype dtype) {
#define TRIB_WIDENED(name, element, accumulator) (sizeof(accumulator) > sizeof(element)),
  constexpr std::array<bool, kDtypes> widened{TRIB_DTYPES(TRIB_WIDENED)};
#undef TRIB_WIDENED
  return widened[static_cast<std::size_t>(dtype)];
}

Association association_of(const Algorithm& algorithm, const Key& key) {
  const bool is_chained = key.collective == Collective::reduce && key.size > 2;
  if (algorithm.association == Association::chain && !is_chained) return Association::rank_order;
  if (algorithm.association == Association::rounded && !(is_chained && key.is_widened))
    return Association::rank_order;
  return algorithm.association;
}

Config::Determinism freedom_of(const Key& key, const Config& config) {
  if (key.is_exact) return Config::Determinism::any;
  // What stands in for a device gives the bits that it has by default.
  const bool is_free = config.determinism == Config::Determinism::any;
  return key.place == Key::Place::staged && is_free ? Config::Determinism::run : config.determinism;
}

bool is_permitted(const Choice& choice, const Key& key, const Config& config) {
  const Algorithm* const algorithm = choice.algorithm;
  if (algorithm == nullptr || !algorithm->serves(key.collective)) return false;
  if (!is_reduction(key.collective)) return choice.engine == Engine::kernel;
  if (key.place != Key::Place::device && algorithm->name == kTravelling && !can_travel(key))
    return false;
  if (is_driven_by_host(choice.engine) &&
      (!key.can_copy || key.bytes < kLeastCopied || config.engine == Config::Engine::kernel ||
       config.protocol != Config::Protocol::automatic))
    return false;
  if (choice.engine == Engine::gemv && (!key.can_gemv || !is_folded_once(*algorithm, key) ||
                                        freedom_of(key, config) != Config::Determinism::any))
    return false;
  // What the ranks of a device are is not known from the start.
  if (algorithm->association == Association::devices) return key.shares_devices;
  switch (freedom_of(key, config)) {
    case Config::Determinism::run:
      return association_of(*algorithm, key) ==
             association_of(*default_choice(key, config).algorithm, key);
    case Config::Determinism::order:
      return association_of(*algorithm, key) == Association::rank_order;
    case Config::Determinism::any:
      break;
  }
  return true;
}

bool is_tunable(const Config& config) {
  const Config defaults;
  return std::string_view(config.algorithm) == "auto" && config.slice == 0 && config.blocks == 0 &&
         config.protocol == defaults.protocol && config.engine == defaults.engine &&
         config.attach == defaults.attach;
}

std::optional<Choice> mapped_choice(const Key& key, const Config& config) {
  if (key.bytes < least_mapped(key.size) || !is_reduction(key.collective) ||
      std::string_view(config.algorithm) != "auto" || config.slice > 0 ||
      config.attach == Config::Attach::always)
    return {};
  for (const std::string_view algorithm : {std::string_view("two_shot"), kStandIn}) {
    const Choice choice{find_algorithm(algorithm), Reach::map};
    if (is_permitted(choice, key, config)) return choice;
  }
  return {};
}

std::vector<Choice> candidates(const Key& key, const Config& config) {
  std::vector<Choice> all{default_choice(key, config)};
  const auto add = [&](const Choice& choice) {
    if (is_permitted(choice, key, config) && all.size() < kMostCandidates &&
        std::find(all.begin(), all.end(), choice) == all.end())
      all.push_back(choice);
  };
  const bool is_device = key.place == Key::Place::device;
  const bool is_long = key.bytes >= kLeastCopied;
  if (is_device) add(device_choice(key, config, /*can_copy=*/false, /*can_map=*/false));
  if (is_device && is_long)
    for (const char* const algorithm : {"two_shot", "one_shot", "rootless"})
      for (const Engine engine : {Engine::copy, Engine::gemv})
        add({find_algorithm(algorithm), Reach::scratch, kCopySlice, engine, false, 132});
  // The default's slice first: where time is short, the algorithms matter more.
  const std::size_t default_slice = all.front().slice_bytes;
  const std::size_t host_slices[] = {default_slice, 64 * KiB, kLong,    128 * KiB,
                                     32 * KiB,      4 * KiB,  512 * KiB};
  for (const std::size_t slice : host_slices)
    for (const Algorithm& algorithm : algorithms()) {
      // A slice that is longer than the vector is the same as one that is just as long.
      if (is_device || (slice != default_slice && slice >= key.bytes)) continue;
      add({&algorithm, Reach::scratch, slice});
    }
  if (!is_device) return all;
  // Packets double what is moved; flags cost another trip.
  for (const Algorithm& algorithm : algorithms()) {
    if (key.bytes <= 1024 * KiB) {
      add({&algorithm, Reach::scratch, 512, Engine::kernel, true, 132});
      for (const int blocks : {32, 16, 64})
        add({&algorithm, Reach::scratch, 1 * KiB, Engine::kernel, true, blocks});
    }
    if (key.bytes < 16 * KiB) continue;
    // Long ones gain by longer slices, and take 1.15 to 1.6 times as long with fewer blocks (8 MiB
    // to 1 GiB, 2 H100).
    for (const int blocks : {132, 64, 32})
      for (const std::size_t slice : {4 * KiB, 16 * KiB, 64 * KiB, 128 * KiB})
        if (is_long ? blocks == 132 : slice <= 16 * KiB)
          add({&algorithm, Reach::scratch, slice, Engine::kernel, false, blocks});
  }
  return all;
}

}  // namespace trib

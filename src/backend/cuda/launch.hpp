// SPDX-License-Identifier: BSD-3-Clause
// What the host tells a kernel: one Launch, passed by value. Shared by kernels.cu, which runs it,
// and kernel_plan.cpp and program.cpp, which fill it in.
//
// A lowered schedule has slots that one rank writes and others read. Here a slot lives at its
// readers: each reader has an inbox with a unit for every chunk of a slot that it reads, and
// whoever writes the slot pushes the chunk into all of these units. Stores travel, loads stay at
// home.
//
// The vector's chunks are cut into passes of `slice` elements each; block b of every rank works on
// passes b, b + blocks, ..., one after the other, and talks only to block b of its peers. A block's
// passes are its runs: run n uses window n % kWindows of the block's inbox.
//
// A block has a group of threads for every stage of the schedule: while one waits for what it
// pushed to arrive, the others go on, each in its own pass.
//
//   - simple protocol: payload is pushed, then a flag per unit, set to the number of the run.
//   - packet protocol: the payload carries the number of the run in every other word; no flags.
//
// A schedule of one exchange that fits into one pass per block is run by a kernel of its own, with
// tables and code for no more than that (FlatLaunch): most of the time that the general one takes
// for a short message goes by while it looks up what to do.
//
// Before a block pushes anything in run n, all peers have completed run n - kWindows: their credits
// say what they have completed. Launches that come after a meeting of the hosts need none for their
// first kWindows runs; a stream-ordered one begins by telling the peers that those before it are
// over.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trib::cuda {

inline constexpr int kWindows = 4;
inline constexpr int kMaxRanks = 16;     // in one launch: one per GPU
inline constexpr int kMaxSharers = 32;   // ranks that are alone on one GPU together
inline constexpr int kMaxBlocks = 132;   // that wait for peers
inline constexpr int kMaxThreads = 768;  // of a block, all stages together
inline constexpr int kWarp = 32;         // threads that run together
inline constexpr int kMaxFlatThreads = 512;
inline constexpr int kMaxMappedThreads = 512;
inline constexpr int kMaxLocalThreads = 512;
inline constexpr int kLocalDepth = 4;  // units of a thread in a tile of long messages
inline constexpr int kMaxPipelineThreads = 512;
inline constexpr int kMaxStages = 3;
inline constexpr int kMaxUnits = 64;  // of an inbox
inline constexpr int kMaxPhases = 24;
inline constexpr int kMaxBatches = 32;
inline constexpr int kMaxOperands = 104;  // a reduce_scatter of 16 ranks on 4 GPUs has 100
inline constexpr int kMaxFlags = 64;
inline constexpr int kBatch = 4;                        // sources of a batch
inline constexpr std::size_t kWindowBytes = 128 << 10;  // of a block
inline constexpr std::size_t kPacketWindowBytes = 64 << 10;
inline constexpr std::size_t kUnitBytes = 16;  // what a thread handles at a time

// An inbox, from its start: flags, credits, other words, payload, packets. Where packets go nothing
// else is ever stored, or else payload from an earlier run could pass for the number of a later
// one.
inline constexpr std::size_t kFlagBytes = sizeof(std::uint32_t) * kMaxBlocks * kWindows * kMaxUnits;
inline constexpr std::size_t kCreditBytes = sizeof(std::uint32_t) * (kMaxBlocks + 1) * kMaxRanks;
inline constexpr std::size_t kAbortAt = kFlagBytes + kCreditBytes;  // a word: a peer gave up
/// Mapped launches: the number of the last one in which a rank was through, by block and rank.
inline constexpr std::size_t kThroughAt = (kAbortAt + 128) / 128 * 128;
inline constexpr std::size_t kThroughBytes = sizeof(std::uint64_t) * kMaxBlocks * kMaxRanks;
inline constexpr std::size_t kPayloadAt = (kThroughAt + kThroughBytes + 4095) / 4096 * 4096;
constexpr std::size_t packets_at(int blocks) {
  return kPayloadAt + static_cast<std::size_t>(blocks) * kWindows * kWindowBytes;
}
constexpr std::size_t inbox_bytes(int blocks) {
  return packets_at(blocks) + static_cast<std::size_t>(blocks) * kWindows * kPacketWindowBytes;
}

/// The number of the first of `runs` runs of a launch that comes behind run `last`. When numbers
/// start again from zero, those around it are left out: words that nobody has written yet hold
/// zero, and must not pass for the flag of a run, nor for a credit, which is no further from its
/// run than 2 * kWindows (turn.cuh). Derived from what is equal on all ranks.
constexpr std::uint32_t first_run_behind(std::uint32_t last, std::uint32_t runs) {
  constexpr std::uint32_t kLeftOut = 2 * kWindows;  // on either side
  return UINT32_MAX - last < runs + kLeftOut ? kLeftOut : last + 1;
}

/// What a channel knows to be over, `known`, as run `first` begins: an old number must not pass for
/// a new one when numbers start again from zero. So it never falls further behind than this.
constexpr std::uint32_t kept_near(std::uint32_t known, std::uint32_t first) {
  constexpr std::uint32_t kFar = 1u << 31;
  return first - known > kFar ? first - kFar : known;
}

/// Where a chunk is: at `address`, of the first pass of the first block in the first window.
struct alignas(16) Operand {
  std::uint64_t address;
  std::uint32_t length;  // elements
  bool is_inbox;         // otherwise the caller's memory
  bool is_out;           // the caller's `out`, otherwise `in`
  std::uint8_t rank;     // inbox: as a source, who fills it
};

/// Up to kBatch sources that are loaded together. Either each of them is copied to destinations of
/// its own, or they are folded into what the batch before has left (`is_first`: into nothing), and
/// the result stored (`is_last`).
struct Batch {
  std::uint8_t from_count;
  bool is_copy, is_first, is_last;
  bool is_local;       // reads what the stage before has left in this rank's own memory
  std::uint16_t from;  // operand
  std::uint16_t to;    // operand: destinations of the first source, of the second, ...
  std::uint8_t to_count[kBatch];
};

/// Waits, then batches that do not depend on each other, then signals.
struct Phase {
  std::uint8_t waits, signals, batches;                // how many
  std::uint8_t first_wait, first_signal, first_batch;  // indices
};

/// A unit's flag, of the first block in the first window.
struct Flag {
  std::uint64_t address : 56;
  std::uint64_t rank : 8;  // a wait: who sets it
};

/// Words in host memory that the GPU can reach.
struct Doorbell {
  alignas(64) std::uint64_t done;    // by the kernel: number of the last launch that ended
  alignas(64) std::uint32_t failed;  // by the kernel: 1 + the rank that did not come in time
  alignas(64) std::uint32_t abort;   // by either: kernels stop waiting
  /// By the host, for a kernel that lingers: another call like the last one. Two numbers of 8
  /// bytes, how far `in` and `out` are from where they were when the kernel was launched, 4 bytes
  /// to a word, each with the number of the order in its upper half: no word is ever torn.
  alignas(64) std::uint64_t order[4];
  alignas(64) std::uint64_t left;  // by a kernel that lingered: the last call that it served
};
/// In place of the first distance: the kernel is to end.
inline constexpr std::int64_t kLeave = INT64_MIN;

/// Words in device memory.
struct alignas(16) Counters {
  std::uint32_t arrived;  // blocks that have ended; zero between launches
  /// Launches that were replays, in the upper half, and the runs that these had.
  std::uint64_t replayed;
  /// Stream-ordered channels, of all launches so far: the last run, and in the upper half
  /// Launch::known_run for the next one.
  std::uint64_t runs;
};

/// What every kernel that talks to peers has to know.
struct LaunchRoot {
  Doorbell* doorbell;
  Counters* counters;
  std::uint64_t number;      // of this launch, for the doorbell
  std::uint64_t time_limit;  // nanoseconds that a wait may take
  /// To `number` and to `first_run` belongs what Counters::replayed says, so that a launch like it
  /// needs no other parameters. Only where has_met.
  bool is_replayed;
};

struct LaunchHead : LaunchRoot {
  std::uint64_t linger;     // nanoseconds to wait for orders; packet protocol, one block and pass
  std::uint32_t order;      // the number of the last order before the launch
  std::uint32_t slice;      // elements of a chunk per pass
  std::uint32_t first_run;  // of this launch, unless is_counted: first_run_behind()
  std::uint32_t known_run;  // stream-ordered: over on all ranks, unless is_counted
  std::uint32_t passes;     // of all blocks together
  std::uint8_t rank, size;  // among the GPUs, as all ranks in these tables
  std::uint8_t stages;
  /// All ranks have met on the host: whatever was launched before is over everywhere.
  bool has_met;
  bool is_counted;  // the number of the last run stands in `counters`: launches may be replayed
  /// Stream-ordered: the launch ends only when it has data from every peer. Then all have begun it,
  /// and what came before it is over everywhere: later launches know that without a look.
  bool hears_from_all;
};

struct Launch : LaunchHead {
  std::uint8_t first_batch[kMaxStages + 1];  // of each stage, and behind the last
  std::byte* inbox[kMaxRanks];
  Batch batch[kMaxBatches];
  Operand operand[kMaxOperands];
};

/// The simple protocol's: what follows would only make launches of the packet protocol slower. 4
/// KiB of parameters cost 0.5 us, 1 KiB and less nothing (H200, 2026-11-21).
struct FlaggedLaunch : Launch {
  std::uint8_t first_phase[kMaxStages + 1];
  Phase phase[kMaxPhases];
  Flag flag[2 * kMaxFlags];
};
static_assert(sizeof(Launch) <= 2448 && sizeof(FlaggedLaunch) <= 4096);

/// One exchange and one fold, of one pass per block: chunks of this rank's `in` are pushed, and
/// what the others push is folded with a chunk of its own, or a chunk is only copied. What a short
/// message needs comes first.
struct FlatLaunch : LaunchHead {
  std::uint8_t targets, sources;
  bool is_same;                          // the targets get what is this rank's own
  std::uint32_t own_length, out_length;  // elements
  const std::byte* own;                  // chunk of `in`
  std::byte* out;
  const std::byte* source[kMaxRanks];  // in the order of the fold: an inbox, or null: `own`
  struct Target {
    const std::byte* from;
    std::byte* to;
    std::uint32_t length;  // elements
  };
  Target target[kMaxRanks];
  std::uint8_t source_rank[kMaxRanks];
  std::byte* inbox[kMaxRanks];
};
static_assert(sizeof(FlatLaunch) <= 1024);

/// With flags, one exchange, one fold at most, and results that go to peers: pipeline.cuh. Or what
/// travels from rank to rank: relay.cuh. Flags are in the order of what they tell of, where there
/// is any.
struct PipelineLaunch : LaunchHead {
  std::uint8_t targets, sources, outs, results;
  std::uint8_t push_waits, result_signals, result_waits;
  bool is_aligned;       // this rank's chunk and all places of the result, in every pass
  bool is_relay;         // one target, or one fold of two sources; one result at most
  std::uint32_t length;  // elements of the chunk that is folded
  const std::byte* own;  // this rank's
  /// From this rank's `in` to an inbox; from this rank's inbox to `out`.
  struct Move {
    const std::byte* from;
    std::byte* to;
    std::uint32_t length;  // elements
  };
  struct Out {
    std::byte* to;
    bool is_inbox;
  };
  const std::byte* source[kMaxRanks];  // in the order of the fold: in the inbox, or null: `own`
  Out out[kMaxRanks];
  Move target[kMaxRanks], result[kMaxRanks];
  Flag push_signal[kMaxRanks], push_wait[kMaxRanks];
  Flag result_signal[kMaxRanks], result_wait[kMaxRanks];
  std::byte* inbox[kMaxRanks];
};
static_assert(sizeof(PipelineLaunch) <= 2432);

/// For the ranks' buffers themselves, which all have mapped: nothing goes through inboxes. Each
/// rank folds one chunk of all ranks' `in`, and stores the result wherever it is wanted. Its
/// number, as a replay or not, is equal on all ranks.
struct MappedLaunch : LaunchRoot {
  std::uint32_t length;  // elements of the chunk
  std::uint32_t units;   // of these, at its front: none, unless all places below are aligned
  std::uint8_t rank, size, outs;
  const std::byte* in[kMaxRanks];  // where the chunk is, of each rank
  std::byte* out[kMaxRanks];       // where results go
  std::byte* inbox[kMaxRanks];
};
static_assert(sizeof(MappedLaunch) <= 1024);

/// For ranks that all share one GPU: chunks of their buffers, folded where they are. It waits for
/// nobody: local.cuh.
struct LocalLaunch : LaunchRoot {
  std::uint32_t tiles;  // of all folds: units for the threads of a block, one each or more
  std::uint8_t sources, folds, outs;
  bool is_scattered;  // each fold has an `out` of its own; other results go to all, at its `begin`
  bool is_gathered;   // each fold has an `in` of its own, the only source
  bool is_long;       // kLocalDepth units of a tile for each thread, and all of them aligned
  bool is_last;       // of the call's launches
  struct Fold {
    std::uint64_t begin;  // bytes in `in` before the chunk, and in `out`, unless it is scattered
    std::uint32_t first_tile;
    std::uint32_t length;  // elements
  };
  const std::byte* in[kMaxSharers];
  std::byte* out[kMaxSharers];
  Fold fold[kMaxSharers];
};
static_assert(sizeof(LocalLaunch) <= 1152);

/// What there is to fold: whole units, and elements before and behind, so that the first source's
/// units are aligned.
struct LocalUnits {
  std::uint32_t head, units, tail;
};
/// `in`: the first source's. `element`: bytes of one.
constexpr LocalUnits units_of(const LocalLaunch::Fold& fold, std::uint64_t in,
                              std::size_t element) {
  auto head = static_cast<std::uint32_t>(-(in + fold.begin) % kUnitBytes / element);
  if (head > fold.length) head = fold.length;
  const std::uint32_t left = fold.length - head;
  const auto in_unit = static_cast<std::uint32_t>(kUnitBytes / element);
  return {head, left / in_unit, left % in_unit};
}

/// Which kernel: see above.
enum class Protocol : std::uint8_t { simple, packet, flat, mapped, pipeline, local };
inline constexpr int kProtocols = 6;

}  // namespace trib::cuda

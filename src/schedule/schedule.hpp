// SPDX-License-Identifier: BSD-3-Clause
// What is to be done, as data: a Schedule is the list of steps of one rank. algorithm/ writes
// schedules, lower.cpp rewrites them for memory that peers cannot reach, verify.cpp proves them,
// backends run them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "schedule/levels.hpp"

namespace trib {

enum class Collective : std::uint8_t {
  allreduce,
  reduce,
  reduce_scatter,
  reduce_scatter_block,
  allgather,
  broadcast
};
/// The reductions: they come first, and MPI programs call no others of us.
inline constexpr int kCollectives = 4;
/// With those that only copy, which the C API adds.
inline constexpr int kAllCollectives = 6;

constexpr std::string_view name(Collective collective) {
  constexpr std::string_view names[] = {
      "allreduce", "reduce", "reduce_scatter", "reduce_scatter_block", "allgather", "broadcast"};
  return names[static_cast<int>(collective)];
}

/// Otherwise nothing is folded: every chunk of a result is one rank's.
constexpr bool is_reduction(Collective collective) {
  return static_cast<int>(collective) < kCollectives;
}

/// Whether every rank ends with a part of the vector: the chunks are then the ranks' parts.
constexpr bool is_scatter(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::reduce_scatter_block;
}

/// Whether chunk r is what rank r ends with, or what it begins with.
constexpr bool has_chunk_per_rank(Collective collective) {
  return is_scatter(collective) || collective == Collective::allgather;
}

constexpr bool has_root(Collective collective) {
  return collective == Collective::reduce || collective == Collective::broadcast;
}

/// Everything an algorithm may depend on.
struct Shape {
  Collective collective = Collective::allreduce;
  int rank = 0;
  int size = 1;
  int root = 0;  ///< reduce and broadcast only
  /// `out` is the same memory as `in` (reduce_scatter: as the front of `in`; allgather: `in` is the
  /// rank's chunk of `out`; broadcast: at the root).
  bool in_place = false;
  std::vector<int> node_of;  ///< each rank's node; empty: all on one
  Levels levels;             ///< what ranks share within the node
  Level device_of;           ///< each rank's device; empty: none has two ranks
  /// Devices push what peers need into their memory. On hosts, peers fetch it.
  bool is_on_device = false;

  bool has_output() const { return collective != Collective::reduce || rank == root; }
  /// Whether chunk `chunk` is in the `in` of rank `of`.
  bool has_input(int of, int chunk) const {
    if (collective == Collective::allgather) return chunk == of;
    return collective != Collective::broadcast || of == root;
  }
};

constexpr int wrap(int value, int size) { return ((value % size) + size) % size; }

enum class Buffer : std::uint8_t { in, out, scratch };

constexpr std::string_view name(Buffer buffer) {
  constexpr std::string_view names[] = {"in", "out", "scratch"};
  return names[static_cast<int>(buffer)];
}

/// `span` chunks from `chunk` on, in one rank's buffer.
///
/// The vector is cut into Schedule::chunks parts. `in` holds all of them on every rank in
/// reductions and at the root in broadcast (elsewhere there is no `in`), and in allgather only
/// chunk `rank`. `out` holds all on every rank in allreduce, allgather and broadcast, at the root
/// in reduce (elsewhere there is no `out`), and in the reduce_scatters only chunk `rank`, at its
/// front. `scratch` is a set of slots, and a slot holds the range of chunks written to it.
struct Location {
  int rank = 0;
  Buffer buffer = Buffer::in;
  int chunk = 0;
  int span = 1;
  int slot = -1;  ///< scratch only

  bool operator==(const Location&) const = default;
};

/// Locations: `in(3, c)` is chunk c of rank 3's input.
constexpr Location in(int rank, int chunk, int span = 1) { return {rank, Buffer::in, chunk, span}; }
constexpr Location out(int rank, int chunk, int span = 1) {
  return {rank, Buffer::out, chunk, span};
}
constexpr Location scratch(int rank, int slot, int chunk, int span = 1) {
  return {rank, Buffer::scratch, chunk, span, slot};
}

enum class Verb : std::uint8_t {
  copy,    ///< each of `to` = from[0]
  reduce,  ///< each of `to` = from[0] op from[1] op ..., folded left to right
  signal,  ///< tells `peers` (lowered: whoever waits for it) that all steps before it are done
  wait,    ///< until peers[0] has given a signal
};

constexpr std::string_view name(Verb verb) {
  constexpr std::string_view names[] = {"copy", "reduce", "signal", "wait"};
  return names[static_cast<int>(verb)];
}

/// All locations of a copy or reduce step have the same chunk and span.
struct Step {
  Verb verb = Verb::copy;
  std::vector<Location> to;
  std::vector<Location> from;
  std::vector<int> peers;
  int slot = -1;  ///< lowered signal and wait: which of the signalling rank's slots
  int stage = 0;  ///< lowered: see Schedule::stages
};

/// What a scratch slot of a lowered schedule holds, and where: `offset` counts chunk-sized units.
struct Slot {
  int chunk = 0;
  int span = 0;  ///< zero: the slot is a flag without payload
  int offset = 0;
};

/// One rank's steps.
///
/// As an algorithm writes it (direct form), every rank can reach every buffer of its peers; a wait
/// for a peer takes the next signal that the peer has sent to this rank, in order.
///
/// As lower() leaves it (lowered form), a rank touches only its own `in` and `out`, and scratch. It
/// writes its own slots, each at most once per run of the schedule, and gives the slot's signal
/// after that; others wait for the slot before they read it. Backends keep several generations of
/// the slots (windows), used in turn, so that a signal can be the number of the run: see verify.hpp
/// for the rules of reuse. On hosts, the only peer that reads a slot may then write into it, and
/// say so by a flag: what the slot's rank is to have (`returns`), or what it has made of what was
/// there (`stays`). With Reach::attach, reads of peers' `in` remain; with Reach::push, the results
/// of an allreduce or a reduce are written to peers' `out` by who folds them, once each of these
/// peers has contributed, and so is in the call; with Reach::map, all that the direct form does.
struct Schedule {
  int chunks = 1;
  /// The vector is cut into chunks / parts, and each of these into so many: where the chunks of
  /// another schedule of fewer chunks count.
  int parts = 1;
  std::vector<Step> steps;
  /// Results may go back to where the contributions lay in scratch, if each of these has but one
  /// reader. Lowered form: some rank's do.
  bool returns = false;
  /// Results may lie where, in scratch, one of those lay that they are made of, if nobody else
  /// reads that: a partial result stays in one place while ranks add to it. Lowered form: some
  /// rank's do.
  bool stays = false;

  // Lowered form only.
  bool is_lowered = false;
  std::vector<std::vector<Slot>> slots;  ///< of each rank, in the order of its signals
  int flags = 0;                         ///< the largest number of slots that a rank has
  int units = 0;                         ///< the largest sum of spans that a rank has
  int waits = 0;  ///< the most units that a rank waits for; a slot without payload counts as one
  /// The largest number of ranks that wait for one. Zero where slots need not hold what is read
  /// (other than Reach::scratch).
  int readers_of_slot = 0;
  int hops = 0;  ///< the most hand-overs from rank to rank between an input and a result
  /// Steps carry stages 0, 1, ... in order, each used by some rank. A backend that runs a schedule
  /// again and again on slices of the data may run stage 0 of run i + 1 before stage 1 of run i,
  /// and so on (software pipelining).
  int stages = 1;
  std::vector<int> readers;           ///< ranks that read slots of this rank, ascending
  std::vector<int> attached_readers;  ///< ranks that read this rank's `in` directly, ascending
  /// Whether this rank may overwrite a part of `in` that an attached reader still needs if `out`
  /// aliases `in`. The backend then offers its peers a copy of `in`.
  bool endangers_input = false;
  bool is_mapped = false;     ///< peers' `in` and `out` are read and written
  bool is_delivered = false;  ///< peers' `out` is written
};

/// Writes a schedule step by step.
class Builder {
 public:
  explicit Builder(int chunks, int parts = 1) {
    schedule_.chunks = chunks;
    schedule_.parts = parts;
  }

  void copy(std::vector<Location> to, Location from) {
    schedule_.steps.push_back({Verb::copy, std::move(to), {from}, {}});
  }
  void copy(Location to, Location from) { copy(std::vector{to}, from); }
  void reduce(std::vector<Location> to, std::vector<Location> from) {
    schedule_.steps.push_back({Verb::reduce, std::move(to), std::move(from), {}});
  }
  void reduce(Location to, std::vector<Location> from) { reduce(std::vector{to}, std::move(from)); }
  void signal(std::vector<int> peers) {
    if (!peers.empty()) schedule_.steps.push_back({Verb::signal, {}, {}, std::move(peers)});
  }
  void signal(int peer) { signal(std::vector{peer}); }
  void wait(int peer) { schedule_.steps.push_back({Verb::wait, {}, {}, {peer}}); }
  void wait(const std::vector<int>& peers) {
    for (const int peer : peers) wait(peer);
  }

  Schedule finish() { return std::move(schedule_); }

 private:
  Schedule schedule_;
};

/// How a backend's ranks reach each other's `in` and `out`.
enum class Reach : std::uint8_t {
  scratch,  ///< not at all: everything goes through shared scratch
  attach,   ///< they can read `in` (cross-memory attach)
  push,     ///< they can write `out`: results need not go through scratch
  map,      ///< they can read and write both (mapped memory)
};

/// Whether schedules need nothing but the ranks' `in` and `out`: Reach::map is for these.
bool is_without_scratch(const std::vector<Schedule>& all);

/// What moves the data of a schedule between devices.
enum class Engine : std::uint8_t {
  kernel,  ///< kernels that wait for each other
  copy,    ///< copy engines, which the host drives; for large messages
  gemv,    ///< the same, but the library for matrices sums what has arrived
};
constexpr bool is_driven_by_host(Engine engine) { return engine != Engine::kernel; }
constexpr const char* name(Engine engine) {
  constexpr const char* names[] = {"kernel", "copy", "gemv"};
  return names[static_cast<int>(engine)];
}

/// Rewrites the direct schedules of all ranks into lowered form, keeping their association: which
/// values are folded in which order is untouched. `all[r]` is rank r's schedule for `shape` with
/// rank = r; the result is indexed alike. In the lowered form `in` of a peer is never read after
/// that peer may have overwritten it, also where `out` aliases `in`, unless endangers_input says
/// so: unless shape.in_place, the result is good for calls in place, too. With Reach::map the steps
/// stay as they are, for calls that are in place or not as `shape` says; only signals get numbers.
/// `only`: that rank's alone, and nothing for others, as each holds what is known of all: those of
/// 256 ranks take gigabytes. Throws Error(Code::internal) if the schedules deadlock.
std::vector<Schedule> lower(const std::vector<Schedule>& all, const Shape& shape, Reach reach,
                            std::optional<int> only = {});

/// One line per step, for people and tests. Those of all ranks, to be read back: see script.hpp.
std::string to_string(const Location& location);
std::string to_string(const Step& step);
std::string to_string(const Schedule& schedule);

}  // namespace trib

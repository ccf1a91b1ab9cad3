// SPDX-License-Identifier: BSD-3-Clause
// Lowering: from schedules that reach into peers' buffers to schedules that go through bounded
// shared scratch.
//
// The schedules of all ranks are run once, symbolically, to find out which value every step reads.
// Values are what the lowered form is built from: an input that a peer reads, and every result that
// anyone reads, gets a slot of its own, written once and followed by its signal. Who reads a slot
// waits for it. (Results that return or stay need no slot: see Node::returns_to and Node::home.)
// The signals and waits of the direct form are not needed any more: without two writes to one place
// there is nothing left to protect but the reuse of the slots by later runs, and that is the
// backend's business (credits, see verify.hpp).
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "schedule/schedule.hpp"

namespace trib {
namespace {

/// Where a chunk's worth of data comes from: a rank's input, or the result of a node.
struct Value {
  int node = -1;  ///< -1: input of `rank`
  int rank = 0;
  int chunk = 0;

  auto operator<=>(const Value&) const = default;
};

/// A copy or reduce step whose sources and results are known. Local copies leave no node: they only
/// rename a value.
struct Node {
  int rank = 0;
  Verb verb = Verb::reduce;
  int chunk = 0, span = 1;
  std::vector<Value>
      from;  ///< first chunk of each source; a source is one node's (or input's) consecutive chunks
  bool is_live = false;
  bool is_read_by_peer = false, is_read_by_self = false;
  bool is_delivered = false;  // some of it goes straight to a peer's `out`
  int slot = -1, flag = -1;
  /// Schedule::returns: the slot of each peer that reads the result and nothing else of this node.
  /// This node alone reads the peer's input there, and puts the result in its place.
  std::map<int, int> returns_to = {};
  /// Schedule::stays: the slot, of another rank, that held a source which this node alone reads,
  /// and that holds the result since.
  std::optional<std::pair<int, int>> home = {};
};

/// One chunk in one buffer of one rank.
using Cell = std::tuple<int, Buffer, int, int>;  // rank, buffer, slot, chunk

class Lowering {
 public:
  Lowering(const std::vector<Schedule>& all, const Shape& shape, Reach reach)
      : all_(all),
        shape_(shape),
        reach_(reach),
        // A scattered result in place would lie over other chunks that its rank still reads.
        delivers_(reach == Reach::push && is_reduction(shape.collective) &&
                  !is_scatter(shape.collective)),
        returns_(reach == Reach::scratch && all[0].returns),
        stays_(reach == Reach::scratch && all[0].stays),
        size_(static_cast<int>(all.size())),
        chunks_(all[0].chunks) {}

  std::vector<Schedule> run(std::optional<int> only) {
    trace();
    find_outputs();
    split_inputs();
    mark_live();
    place();
    return emit(only);
  }

 private:
  Value value_of(const Location& at, int chunk) const {
    if (at.buffer == Buffer::in) return {-1, at.rank, chunk};
    const auto found = cells_.find({at.rank, at.buffer, at.slot, chunk});
    if (found == cells_.end())
      throw Error(Code::internal, "lower: a step reads what nobody wrote: rank " +
                                      std::to_string(at.rank) + ", buffer " +
                                      std::to_string(static_cast<int>(at.buffer)) + ", slot " +
                                      std::to_string(at.slot) + ", chunk " + std::to_string(chunk));
    return found->second;
  }

  /// Runs all ranks' steps in an order that the signals permit. Signals make the order irrelevant:
  /// verify() says so.
  void trace() {
    std::vector<std::size_t> at(size_, 0);
    std::vector<int> sent(static_cast<std::size_t>(size_) * size_, 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < size_; ++rank) {
        const auto& steps = all_[rank].steps;
        for (; at[rank] < steps.size(); ++at[rank], moved = true) {
          const Step& step = steps[at[rank]];
          if (step.verb == Verb::signal) {
            for (const int peer : step.peers) ++sent[rank * size_ + peer];
          } else if (step.verb == Verb::wait) {
            int& edge = sent[step.peers[0] * size_ + rank];
            if (edge == 0) break;
            --edge;
          } else {
            perform(rank, step);
          }
        }
      }
    }
    for (int rank = 0; rank < size_; ++rank)
      if (at[rank] < all_[rank].steps.size())
        throw Error(Code::internal, "lower: rank " + std::to_string(rank) +
                                        " waits for ever at step " + std::to_string(at[rank]));
  }

  void perform(int rank, const Step& step) {
    const Location& shape = step.to[0];
    // Pieces within which every source is one producer's consecutive chunks.
    for (int begin = 0; begin < shape.span;) {
      std::vector<Value> from;
      for (const Location& source : step.from)
        from.push_back(value_of(source, source.chunk + begin));
      int end = begin + 1;
      for (; end < shape.span; ++end) {
        bool is_same = true;
        for (std::size_t s = 0; s < from.size(); ++s) {
          const Value next = value_of(step.from[s], step.from[s].chunk + end);
          is_same = is_same && next.node == from[s].node && next.rank == from[s].rank &&
                    next.chunk == from[s].chunk + end - begin;
        }
        if (!is_same) break;
      }
      const bool is_rename = step.verb == Verb::copy && from[0].rank == rank;
      int node = -1;
      if (!is_rename) {
        node = static_cast<int>(nodes_.size());
        nodes_.push_back({rank, step.verb, shape.chunk + begin, end - begin, from});
      }
      for (const Location& to : step.to)
        for (int i = begin; i < end; ++i) {
          const int chunk = to.chunk + i;
          cells_[{to.rank, to.buffer, to.slot, chunk}] =
              is_rename ? Value{from[0].node, rank, from[0].chunk + i - begin}
                        : Value{node, rank, chunk};
        }
      begin = end;
    }
  }

  void find_outputs() {
    outputs_.resize(size_);
    for (const auto& [cell, value] : cells_)
      if (std::get<1>(cell) == Buffer::out) outputs_[std::get<0>(cell)][std::get<3>(cell)] = value;
  }

  /// Cuts nodes so that no source straddles two input slots. Only inputs need it: a node's slot
  /// holds all its chunks.
  void split_inputs() {
    cuts_.resize(size_);
    for (const Node& node : nodes_)
      for (const Value& from : node.from)
        if (from.node < 0 && from.rank != node.rank)
          cuts_[from.rank].insert({from.chunk, from.chunk + node.span});
    for (int rank = 0; rank < size_; ++rank)
      for (const auto& [chunk, value] : outputs_[rank])
        if (value.node < 0 && value.rank != rank)
          cuts_[value.rank].insert({value.chunk, value.chunk + 1});
  }

  void mark_live() {
    std::vector<int> todo;
    const auto touch = [&](const Value& value, int reader) {
      if (value.node < 0) return;
      Node& node = nodes_[value.node];
      (node.rank == reader ? node.is_read_by_self : node.is_read_by_peer) = true;
      if (!node.is_live) {
        node.is_live = true;
        todo.push_back(value.node);
      }
    };
    for (int rank = 0; rank < size_; ++rank)
      for (const auto& [chunk, value] : outputs_[rank]) {
        if (!is_stored(value, rank, chunk)) {
          touch(value, rank);
          continue;
        }
        Node& node = nodes_[value.node];
        if (value.rank != rank) node.is_delivered = true;
        if (!std::exchange(node.is_live, true)) todo.push_back(value.node);
      }
    while (!todo.empty()) {
      const int index = todo.back();
      todo.pop_back();
      const int reader = nodes_[index].rank;
      for (const Value& from : std::vector<Value>(nodes_[index].from)) touch(from, reader);
    }
  }

  /// Whether the node that makes a chunk of `rank`'s `out` stores it there itself.
  bool is_stored(const Value& value, int rank, int chunk) const {
    return value.node >= 0 && value.chunk == chunk && (value.rank == rank || delivers_);
  }
  bool is_output_of(int rank, const Value& value) const {
    const auto found = outputs_[rank].find(value.chunk);
    return found != outputs_[rank].end() && found->second == value;
  }
  /// Which of a node's chunks are the final value of its own rank's `out`.
  bool is_output(const Node& node, int index, int chunk) const {
    return is_output_of(node.rank, {index, node.rank, chunk});
  }
  /// Whose `out` the node stores a chunk to: its own rank's last, before that those behind it in
  /// turn.
  std::vector<int> owners_of(const Node& node, int index, int chunk) const {
    std::vector<int> owners;
    for (int i = delivers_ ? 1 : size_; i <= size_; ++i)
      if (const int rank = wrap(node.rank + i, size_);
          is_output_of(rank, {index, node.rank, chunk}))
        owners.push_back(rank);
    return owners;
  }
  bool is_all_output(const Node& node, int index) const {
    for (int i = 0; i < node.span; ++i)
      if (!is_output(node, index, node.chunk + i)) return false;
    return true;
  }

  /// Gives slots to inputs that peers read and to results that need one.
  void place() {
    slots_.resize(size_);
    input_slots_.resize(size_);
    entry_.assign(size_, -1);
    for (int rank = 0; rank < size_; ++rank) {
      if (cuts_[rank].empty()) continue;
      if (reach_ == Reach::attach) {
        entry_[rank] = add_slot(rank, 0, 0);
        continue;
      }
      std::set<int> bounds;
      for (const auto& [begin, end] : cuts_[rank]) bounds.insert({begin, end});
      std::vector<std::pair<int, int>> pieces;
      for (auto low = bounds.begin(), high = std::next(low); high != bounds.end(); ++low, ++high)
        if (std::any_of(cuts_[rank].begin(), cuts_[rank].end(),
                        [&](const auto& cut) { return cut.first <= *low && *high <= cut.second; }))
          pieces.emplace_back(*low, *high);
      // Everyone starts behind its own chunk, so that the owners get their first pieces at
      // different times.
      std::stable_partition(pieces.begin(), pieces.end(),
                            [&](const auto& piece) { return piece.first > rank; });
      for (const auto& [begin, end] : pieces)
        input_slots_[rank].push_back(add_slot(rank, begin, end - begin));
    }
    if (returns_) find_returns();
    if (stays_) count_uses();
    for (std::size_t index = 0; index < nodes_.size(); ++index) {
      Node& node = nodes_[index];
      if (!node.is_live) continue;
      const bool needs_slot =
          node.is_read_by_peer ||
          (node.is_read_by_self && !is_all_output(node, static_cast<int>(index)));
      if (!node.returns_to.empty())
        node.flag = add_slot(node.rank, 0, 0);
      else if (needs_slot && stays_ && (node.home = find_home(node)))
        node.flag = add_slot(node.rank, 0, 0);
      else if (needs_slot)
        node.slot = add_slot(node.rank, node.chunk, node.span);
      if (node.is_delivered)
        node.flag = node.is_read_by_peer ? node.slot : add_slot(node.rank, node.chunk, 0);
    }
  }

  /// The slot of a peer's input that holds just these chunks; -1: none does.
  int input_slot(int rank, int chunk, int span) const {
    for (const int slot : input_slots_[rank])
      if (const Slot& piece = slots_[rank][slot]; piece.chunk == chunk && piece.span == span)
        return slot;
    return -1;
  }

  /// Finds the nodes whose results all their readers can get in place of their own contributions.
  void find_returns() {
    // Who reads a rank's chunk: a node, or several.
    constexpr int kSeveral = -1;
    std::map<std::pair<int, int>, int> readers;
    std::vector<bool> is_source(nodes_.size());
    for (int index = 0; index < static_cast<int>(nodes_.size()); ++index) {
      const Node& node = nodes_[index];
      if (!node.is_live) continue;
      for (const Value& from : node.from) {
        if (from.node >= 0) {
          is_source[from.node] = true;
        } else if (from.rank != node.rank) {
          for (int chunk = from.chunk; chunk < from.chunk + node.span; ++chunk)
            if (!readers.insert({{from.rank, chunk}, index}).second)
              readers[{from.rank, chunk}] = kSeveral;
        }
      }
    }
    for (int rank = 0; rank < size_; ++rank)
      for (const auto& [chunk, value] : outputs_[rank])
        if (value.node < 0 && value.rank != rank) readers[{value.rank, value.chunk}] = kSeveral;
    for (int index = 0; index < static_cast<int>(nodes_.size()); ++index) {
      Node& node = nodes_[index];
      if (!node.is_live || !node.is_read_by_peer || is_source[index]) continue;
      if (node.is_read_by_self && !is_all_output(node, index)) continue;
      std::map<int, int> slots;
      bool is_possible = true;
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == node.rank || !wants(rank, index)) continue;
        slots[rank] = input_slot(rank, node.chunk, node.span);
        is_possible = is_possible && slots[rank] >= 0;
        for (int chunk = node.chunk; chunk < node.chunk + node.span; ++chunk)
          is_possible = is_possible && readers[{rank, chunk}] == index &&
                        is_output_of(rank, {index, node.rank, chunk});
      }
      if (is_possible) node.returns_to = std::move(slots);
    }
  }

  /// How often each chunk is read, of an input or of a node.
  void count_uses() {
    for (const Node& node : nodes_)
      for (const Value& from : node.from)
        for (int i = 0; node.is_live && i < node.span; ++i)
          ++uses_[{from.node, from.rank, from.chunk + i}];
    for (int rank = 0; rank < size_; ++rank)
      for (const auto& [chunk, value] : outputs_[rank])
        if (!is_stored(value, rank, chunk)) ++uses_[value];
  }

  /// The slot that the node may take over from one of its sources, if there is one.
  std::optional<std::pair<int, int>> find_home(const Node& node) const {
    for (const Value& from : node.from) {
      if (from.rank == node.rank) continue;
      std::optional<std::pair<int, int>> home;
      if (from.node < 0) {
        if (const int slot = input_slot(from.rank, from.chunk, node.span); slot >= 0)
          home.emplace(from.rank, slot);
      } else if (const Node& source = nodes_[from.node];
                 source.chunk == from.chunk && source.span == node.span) {
        home = source.home;
        if (source.slot >= 0) home.emplace(source.rank, source.slot);
      }
      for (int i = 0; home && i < node.span; ++i)
        if (uses_.at({from.node, from.rank, from.chunk + i}) != 1) home.reset();
      if (home) return home;
    }
    return {};
  }

  /// Whether some of a node's result is in a rank's `out` in the end.
  bool wants(int rank, int index) const {
    return std::any_of(outputs_[rank].begin(), outputs_[rank].end(),
                       [&](const auto& output) { return output.second.node == index; });
  }

  int add_slot(int rank, int chunk, int span) {
    auto& slots = slots_[rank];
    const int offset = slots.empty() ? 0 : slots.back().offset + slots.back().span;
    slots.push_back({chunk, span, offset});
    return static_cast<int>(slots.size()) - 1;
  }

  /// The part of `value`, `span` chunks long, that lies in one slot, as `reader` sees it. `taken`
  /// says how much that is.
  Location locate(const Value& value, int span, int reader, int& taken) const {
    taken = span;
    if (value.node >= 0) {
      const Node& node = nodes_[value.node];
      if (const auto found = node.returns_to.find(reader); found != node.returns_to.end())
        return scratch(reader, found->second, value.chunk, span);
      if (node.home) return scratch(node.home->first, node.home->second, value.chunk, span);
      if (node.slot >= 0) return scratch(value.rank, node.slot, value.chunk, span);
      return out(value.rank, value.chunk, span);
    }
    if (value.rank == reader || reach_ == Reach::attach) return in(value.rank, value.chunk, span);
    for (const int slot : input_slots_[value.rank]) {
      const Slot& piece = slots_[value.rank][slot];
      if (piece.chunk <= value.chunk && value.chunk < piece.chunk + piece.span) {
        taken = std::min(span, piece.chunk + piece.span - value.chunk);
        return scratch(value.rank, slot, value.chunk, taken);
      }
    }
    throw Error(Code::internal, "lower: an input without a slot");
  }

  struct Emitter {
    Schedule schedule;
    std::set<std::pair<int, int>> waited;
    std::set<int> stages;  // that it has steps in
    int stage = 0;
    bool is_wanted = true;
    void add(Step step) {
      stages.insert(stage);
      if (!is_wanted) return;
      step.stage = stage;
      schedule.steps.push_back(std::move(step));
    }
  };

  /// Waits for the value that a step is about to read at `from`. `to`: where it writes.
  void await(Emitter& emitter, int rank, const Value& value, const Location& from,
             const std::vector<Location>& to) {
    if (value.node >= 0 && is_elsewhere(nodes_[value.node])) {
      if (value.rank != rank) await_flag(emitter, rank, value.rank, nodes_[value.node].flag);
      // Whose slot it is writes there again after those that read there last: they come after all
      // that have taken it over.
      const bool is_taken_over = std::find(to.begin(), to.end(), from) != to.end();
      if (from.rank != rank && !is_taken_over) readers_[from.rank].insert(rank);
      return;
    }
    if (from.rank == rank) return;
    if (from.buffer == Buffer::in) attached_readers_[from.rank].insert(rank);
    await_flag(emitter, rank, from.rank, from.buffer == Buffer::in ? entry_[from.rank] : from.slot);
  }
  /// Whether the node's results lie in slots of other ranks.
  static bool is_elsewhere(const Node& node) { return node.home || !node.returns_to.empty(); }
  void await_flag(Emitter& emitter, int rank, int of, int slot) {
    readers_[of].insert(rank);
    if (emitter.waited.insert({of, slot}).second) emitter.add({Verb::wait, {}, {}, {of}, slot});
  }

  /// See Schedule::hops. Nodes come after those that they read.
  int hops() const {
    std::vector<int> of_node(nodes_.size());
    const auto at = [&](const Value& value, int reader) {
      return (value.node < 0 ? 0 : of_node[value.node]) + (value.rank != reader ? 1 : 0);
    };
    int most = 0;
    for (std::size_t index = 0; index < nodes_.size(); ++index)
      for (const Value& from : nodes_[index].from)
        of_node[index] = std::max(of_node[index], at(from, nodes_[index].rank));
    for (int rank = 0; rank < size_; ++rank)
      for (const auto& [chunk, value] : outputs_[rank]) most = std::max(most, at(value, rank));
    return most;
  }

  /// `only`: of one rank, all others empty. Each knows all slots of all ranks: of many ranks, that
  /// is a lot of memory.
  std::vector<Schedule> emit(std::optional<int> only) {
    readers_.resize(size_);
    attached_readers_.resize(size_);
    std::vector<Emitter> emitters(size_);
    for (int rank = 0; rank < size_; ++rank) {
      Emitter& emitter = emitters[rank];
      emitter.is_wanted = !only || *only == rank;
      emitter.schedule.chunks = chunks_;
      emitter.schedule.parts = all_[rank].parts;
      if (entry_[rank] >= 0) emitter.add({Verb::signal, {}, {}, {}, entry_[rank]});
      for (const int slot : input_slots_[rank]) {
        const Slot& piece = slots_[rank][slot];
        std::vector<Location> to{scratch(rank, slot, piece.chunk, piece.span)};
        if (kept(rank).span > 0) to.insert(to.begin(), out(rank, piece.chunk, piece.span));
        emitter.add({Verb::copy, std::move(to), {in(rank, piece.chunk, piece.span)}, {}});
        emitter.add({Verb::signal, {}, {}, {}, slot});
      }
      emitter.stage = 1;
    }
    for (std::size_t index = 0; index < nodes_.size(); ++index)
      if (nodes_[index].is_live) emit_node(emitters[nodes_[index].rank], static_cast<int>(index));
    for (int rank = 0; rank < size_; ++rank) emit_outputs(emitters[rank], rank);

    std::vector<Schedule> lowered;
    const int stages = close_stages(emitters);
    int flags = 0, units = 0;
    for (int rank = 0; rank < size_; ++rank) {
      flags = std::max(flags, static_cast<int>(slots_[rank].size()));
      if (!slots_[rank].empty())
        units = std::max(units, slots_[rank].back().offset + slots_[rank].back().span);
    }
    int waits = 0, readers_of_slot = 0;
    std::map<std::pair<int, int>, int> readers;
    if (reach_ == Reach::scratch)
      for (const Emitter& emitter : emitters) {
        int awaited = 0;
        for (const auto& slot : emitter.waited) {
          awaited += std::max(slots_[slot.first][slot.second].span, 1);
          readers_of_slot = std::max(readers_of_slot, ++readers[slot]);
        }
        waits = std::max(waits, awaited);
      }
    const int hops_of_all = hops();
    const bool has_returns = std::any_of(nodes_.begin(), nodes_.end(),
                                         [](const Node& node) { return !node.returns_to.empty(); });
    const bool has_homes = std::any_of(nodes_.begin(), nodes_.end(),
                                       [](const Node& node) { return node.home.has_value(); });
    lowered.resize(static_cast<std::size_t>(size_));
    for (int rank = only.value_or(0); rank < (only ? *only + 1 : size_); ++rank) {
      Schedule& schedule = emitters[rank].schedule;
      schedule.is_lowered = true;
      schedule.is_delivered = delivers_;
      schedule.returns = has_returns;
      schedule.stays = has_homes;
      schedule.slots = slots_;
      schedule.flags = flags;
      schedule.units = units;
      schedule.waits = waits;
      schedule.readers_of_slot = readers_of_slot;
      schedule.hops = hops_of_all;
      schedule.stages = stages;
      schedule.readers.assign(readers_[rank].begin(), readers_[rank].end());
      schedule.attached_readers.assign(attached_readers_[rank].begin(),
                                       attached_readers_[rank].end());
      schedule.endangers_input = endangers_input(rank);
      lowered[static_cast<std::size_t>(rank)] = std::move(schedule);
    }
    return lowered;
  }

  /// Leaves out stages that no rank has: where nothing is computed, results are inputs. Gives how
  /// many remain.
  static int close_stages(std::vector<Emitter>& emitters) {
    std::set<int> used;
    for (const Emitter& emitter : emitters)
      used.insert(emitter.stages.begin(), emitter.stages.end());
    for (Emitter& emitter : emitters)
      for (Step& step : emitter.schedule.steps)
        step.stage = static_cast<int>(std::distance(used.begin(), used.find(step.stage)));
    return std::max(1, static_cast<int>(used.size()));
  }

  /// Whether a chunk of a rank's `out` is the rank's own input.
  bool is_own_input(int rank, int chunk) const {
    const auto found = outputs_[rank].find(chunk);
    return found != outputs_[rank].end() && found->second == Value{-1, rank, chunk};
  }

  /// What a rank puts into a slot of its input and, by the same step, into its `out`; span zero:
  /// nothing. Of several slots it keeps none like that: since `out` may lie over other chunks of
  /// `in`, such steps would have to come one after the other.
  Slot kept(int rank) const {
    if (input_slots_[rank].size() != 1) return {};
    const Slot& piece = slots_[rank][input_slots_[rank].front()];
    for (int i = 0; i < piece.span; ++i)
      if (!is_own_input(rank, piece.chunk + i)) return {};
    return piece;
  }

  /// A chunk that peers read directly is safe if `out` gets there only what its one reader made of
  /// it: by then it was read. Or if it stays there.
  bool endangers_input(int rank) const {
    if (attached_readers_[rank].empty()) return false;
    if (is_scatter(shape_.collective)) return true;  // `out` lies over other chunks
    for (const auto& [chunk, value] : outputs_[rank]) {
      if (is_own_input(rank, chunk)) continue;
      for (std::size_t index = 0; index < nodes_.size(); ++index) {
        const Node& node = nodes_[index];
        if (!node.is_live || node.rank == rank || static_cast<int>(index) == value.node) continue;
        for (const Value& from : node.from)
          if (from.node < 0 && from.rank == rank && from.chunk <= chunk &&
              chunk < from.chunk + node.span)
            return true;
      }
    }
    return false;
  }

  void emit_node(Emitter& emitter, int index) {
    const Node& node = nodes_[index];
    for (int begin = 0; begin < node.span;) {
      int span = node.span - begin, taken = 0;
      std::vector<Location> from;
      const auto look_up = [&] {
        from.clear();
        for (const Value& source : node.from) {
          from.push_back(
              locate({source.node, source.rank, source.chunk + begin}, span, node.rank, taken));
          if (taken < span) return false;
        }
        return true;
      };
      // Output chunks are a prefix property of no algorithm: cut where the destinations change.
      const std::vector<int> owners = owners_of(node, index, node.chunk + begin);
      for (int i = 1; i < span; ++i)
        if (owners_of(node, index, node.chunk + begin + i) != owners) span = i;
      while (!look_up()) span = taken;
      std::vector<Location> to;
      for (const int owner : owners) to.push_back(out(owner, node.chunk + begin, span));
      if (node.slot >= 0) to.push_back(scratch(node.rank, node.slot, node.chunk + begin, span));
      if (node.home)
        to.push_back(scratch(node.home->first, node.home->second, node.chunk + begin, span));
      for (const auto& [peer, slot] : node.returns_to)
        to.push_back(scratch(peer, slot, node.chunk + begin, span));
      if (to.empty()) {  // of several chunks, one that nobody wants
        begin += span;
        continue;
      }
      for (std::size_t i = 0; i < from.size(); ++i)
        await(emitter, node.rank, node.from[i], from[i], to);
      emitter.add({node.verb, std::move(to), std::move(from), {}});
      begin += span;
    }
    if (node.is_read_by_peer && node.slot >= 0) emitter.add({Verb::signal, {}, {}, {}, node.slot});
    if (node.flag >= 0 && node.flag != node.slot)
      emitter.add({Verb::signal, {}, {}, {}, node.flag});
  }

  /// Fetches what other ranks computed (or renamed copies) into `out`, starting behind the own
  /// rank's chunk, or waits for what they store there.
  void emit_outputs(Emitter& emitter, int rank) {
    emitter.stage = 2;
    const Slot done = kept(rank);
    std::vector<std::pair<int, Value>> missing;
    for (const auto& [chunk, value] : outputs_[rank]) {
      if (done.chunk <= chunk && chunk < done.chunk + done.span) continue;
      if (!is_stored(value, rank, chunk))
        missing.emplace_back(chunk, value);
      else if (value.rank != rank)
        await_flag(emitter, rank, value.rank, nodes_[value.node].flag);
    }
    std::stable_partition(missing.begin(), missing.end(),
                          [&](const auto& item) { return item.first > rank; });
    for (std::size_t begin = 0; begin < missing.size();) {
      const auto& [chunk, value] = missing[begin];
      std::size_t end = begin + 1;  // neighbours from the same producer go in one step
      for (int next = 1; end < missing.size(); ++end, ++next) {
        const Value expected{value.node, value.rank, value.chunk + next};
        if (missing[end].first != chunk + next || missing[end].second != expected) break;
      }
      int taken = 0;
      const Location from = locate(value, static_cast<int>(end - begin), rank, taken);
      await(emitter, rank, value, from, {});
      emitter.add({Verb::copy, {out(rank, chunk, taken)}, {from}, {}});
      begin += static_cast<std::size_t>(taken);
    }
  }

  const std::vector<Schedule>& all_;
  const Shape& shape_;
  const Reach reach_;
  const bool delivers_;  // results go straight to peers' `out`
  const bool returns_;   // results go to peers' scratch, if they can
  const bool stays_;     // so do partial results
  const int size_, chunks_;
  std::map<Cell, Value> cells_;
  std::vector<Node> nodes_;
  std::vector<std::map<int, Value>> outputs_;        // of each rank: final value of each out chunk
  std::vector<std::set<std::pair<int, int>>> cuts_;  // of each rank: ranges of `in` that peers read
  std::vector<std::vector<Slot>> slots_;
  std::vector<std::vector<int>> input_slots_;
  std::vector<int> entry_;     // attach: the flag "my input is ready"
  std::map<Value, int> uses_;  // stays: how often each chunk is read
  std::vector<std::set<int>> readers_, attached_readers_;
};

/// Every signal becomes the flag of a slot without payload, and every wait one for that slot.
std::vector<Schedule> number_signals(const std::vector<Schedule>& all) {
  const std::size_t size = all.size();
  std::vector<Schedule> numbered = all;
  std::vector<std::vector<Slot>> slots(size);
  std::vector<std::set<int>> readers(size);
  std::map<std::pair<int, int>, std::vector<int>> sent;  // from, to: slots, in order
  int flags = 0;
  for (std::size_t rank = 0; rank < size; ++rank) {
    for (Step& step : numbered[rank].steps) {
      if (step.verb != Verb::signal) continue;
      step.slot = static_cast<int>(slots[rank].size());
      slots[rank].push_back({});
      for (const int peer : step.peers) sent[{static_cast<int>(rank), peer}].push_back(step.slot);
      step.peers.clear();
    }
    flags = std::max(flags, static_cast<int>(slots[rank].size()));
  }
  for (std::size_t rank = 0; rank < size; ++rank) {
    std::map<int, std::size_t> taken;
    for (Step& step : numbered[rank].steps) {
      if (step.verb != Verb::wait) continue;
      const int peer = step.peers[0];
      const std::vector<int>& theirs = sent[{peer, static_cast<int>(rank)}];
      const std::size_t next = taken[peer]++;
      if (next >= theirs.size())
        throw Error(Code::internal, "lower: rank " + std::to_string(rank) + " waits for ever");
      step.slot = theirs[next];
      readers[static_cast<std::size_t>(peer)].insert(static_cast<int>(rank));
    }
  }
  for (std::size_t rank = 0; rank < size; ++rank) {
    Schedule& schedule = numbered[rank];
    schedule.is_lowered = true;
    schedule.is_mapped = true;
    schedule.returns = schedule.stays = false;
    schedule.slots = slots;
    schedule.flags = flags;
    schedule.readers.assign(readers[rank].begin(), readers[rank].end());
  }
  return numbered;
}

}  // namespace

bool is_without_scratch(const std::vector<Schedule>& all) {
  const auto is_scratch = [](const Location& at) { return at.buffer == Buffer::scratch; };
  for (const Schedule& schedule : all)
    for (const Step& step : schedule.steps)
      if (std::any_of(step.to.begin(), step.to.end(), is_scratch) ||
          std::any_of(step.from.begin(), step.from.end(), is_scratch))
        return false;
  return true;
}

std::vector<Schedule> lower(const std::vector<Schedule>& all, const Shape& shape, Reach reach,
                            std::optional<int> only) {
  return reach == Reach::map ? number_signals(all) : Lowering(all, shape, reach).run(only);
}

}  // namespace trib

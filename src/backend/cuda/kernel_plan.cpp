// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/kernel_plan.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "backend/cuda/inboxes.hpp"

namespace trib::cuda {
namespace {

using Exchange = KernelPlan::Exchange;

/// Steps of one stage that may be done together: first all waits, then all moves, then all signals.
struct Group {
  int stage = 0;
  std::vector<const Step*> waits, moves, signals;

  static bool touch(const Location& a, const Location& b) {
    if (a.rank != b.rank) return false;
    if (a.buffer == Buffer::scratch || b.buffer == Buffer::scratch)
      return a.buffer == b.buffer && a.slot == b.slot;
    // `out` may be `in`, or lie over other chunks of it.
    return a.buffer != b.buffer || (a.chunk < b.chunk + b.span && b.chunk < a.chunk + a.span);
  }
  static bool is_elementwise(const Location& a, const Location& b) {
    return a.buffer != Buffer::scratch && b.buffer != Buffer::scratch && a.chunk == b.chunk;
  }
  /// Whether a step has to come after what is in the group already.
  bool depends(const Step& step) const {
    if (step.verb == Verb::wait) return !signals.empty();
    if (step.verb == Verb::signal) return false;
    for (const Step* earlier : moves) {
      for (const Location& written : earlier->to) {
        for (const Location& from : step.from)
          if (touch(written, from)) return true;
        for (const Location& to : step.to)
          if (touch(written, to)) return true;
      }
      for (const Location& read : earlier->from)
        for (const Location& to : step.to)
          if (touch(read, to) && !is_elementwise(read, to)) return true;
    }
    return false;
  }
  bool is_empty() const { return waits.empty() && moves.empty() && signals.empty(); }
};

/// Makes the tables.
class Translator {
 public:
  Translator(KernelPlan& plan, const Placement& placement, const std::vector<Schedule>& all,
             int rank)
      : plan_(plan),
        launch_(plan.launch),
        placement_(placement),
        all_(all),
        schedule_(all[static_cast<std::size_t>(rank)]),
        rank_(rank),
        inboxes_(all, placement.is_shared ? placement.device_of : Level{}) {}

  void run() {
    plan_.units = inboxes_.most();
    if (inboxes_.flags() > kMaxUnits) give_up();
    plan_.is_delivered = schedule_.is_delivered;
    if (plan_.is_delivered) plan_.is_packet_possible = false;  // `out` has no room for packets
    launch_.stages = static_cast<std::uint8_t>(schedule_.stages);
    launch_.rank = device(rank_);
    launch_.size = static_cast<std::uint8_t>(placement_.leader_of.size());
    for (std::size_t peer = 0; peer < placement_.leader_of.size(); ++peer)
      launch_.inbox[peer] = reinterpret_cast<std::byte*>(inbox(placement_.leader_of[peer]));
    if (schedule_.stages > kMaxStages) return give_up();
    Group group;
    for (const Step& step : schedule_.steps) {
      if (step.stage != group.stage || group.depends(step)) {
        add(group);
        begin_stage(step.stage);
        group = {};
        group.stage = step.stage;
      }
      (step.verb == Verb::wait     ? group.waits
       : step.verb == Verb::signal ? group.signals
                                   : group.moves)
          .push_back(&step);
    }
    add(group);
    begin_stage(schedule_.stages);
  }
  int batches() const { return batches_; }

 private:
  struct Unit {
    int reader, writer, unit;
  };
  /// One chunk of a step.
  struct Piece {
    const Step* step;
    int chunk;
    std::vector<Unit> units;  // where it is pushed to
    std::vector<int> outs;    // whose `out` it goes to
  };

  void give_up() { plan_.is_packet_possible = plan_.is_simple_possible = false; }
  std::uint8_t device(int rank) const {
    return static_cast<std::uint8_t>(placement_.device_of[static_cast<std::size_t>(rank)]);
  }
  std::uint64_t inbox(int rank) const { return placement_.inboxes[static_cast<std::size_t>(rank)]; }

  void begin_stage(int stage) {
    for (; stage_ < stage; ++stage_) {
      launch_.first_batch[stage_ + 1] = static_cast<std::uint8_t>(batches_);
      launch_.first_phase[stage_ + 1] = static_cast<std::uint8_t>(phases_);
    }
  }

  /// Waits, batches, signals. One flag per unit, though a step waits for a slot: it reads several
  /// of its chunks, maybe.
  void add(const Group& group) {
    if (group.is_empty()) return;
    Phase overflow;
    Phase& phase = phases_ == kMaxPhases ? overflow : launch_.phase[phases_++];
    if (&phase == &overflow) plan_.is_simple_possible = false;
    phase = {};
    phase.first_batch = static_cast<std::uint8_t>(batches_);
    add_batches(group.moves);
    phase.batches = static_cast<std::uint8_t>(batches_ - phase.first_batch);
    phase.first_wait = static_cast<std::uint8_t>(flags_);
    for (const Step* step : group.waits) add_waits(*step, phase);
    phase.first_signal = static_cast<std::uint8_t>(flags_);
    for (const Step* step : group.signals) add_signals(*step, phase);
  }

  void add_waits(const Step& step, Phase& phase) {
    const int peer = step.peers.front();
    const Slot& slot = slot_of(peer, step.slot);
    for (int c = slot.chunk; c < slot.chunk + std::max(slot.span, 1); ++c) {
      const int unit = inboxes_.unit(rank_, peer, step.slot, c);
      if (unit < 0 || !add_flag({rank_, peer, unit}, peer)) continue;
      ++phase.waits;
      if (slot.span == 0) plan_.bare_waits.push_back(launch_.flag[flags_ - 1]);
    }
  }

  void add_signals(const Step& step, Phase& phase) {
    const Slot& slot = slot_of(rank_, step.slot);
    for (int c = slot.chunk; c < slot.chunk + std::max(slot.span, 1); ++c)
      for (const Unit& unit : units_of(step.slot, c))
        if (unit.reader != rank_ && add_flag(unit, unit.reader)) {
          ++phase.signals;
          if (slot.span == 0) plan_.bare_signals.push_back(launch_.flag[flags_ - 1]);
        }
  }

  const Slot& slot_of(int rank, int slot) const {
    return all_[static_cast<std::size_t>(rank)]
        .slots[static_cast<std::size_t>(rank)][static_cast<std::size_t>(slot)];
  }

  bool add_flag(const Unit& unit, int peer) {
    if (flags_ == 2 * kMaxFlags) {
      plan_.is_simple_possible = false;
      return false;
    }
    Flag& flag = launch_.flag[flags_++];
    flag.address = inbox(unit.reader) + static_cast<std::size_t>(unit.unit) * sizeof(std::uint32_t);
    flag.rank = device(peer);
    return true;
  }

  /// A slot stands for its units at all readers, nearest behind this rank first: at any time, every
  /// rank then pushes to another peer.
  std::vector<Unit> units_of(int slot, int chunk) const {
    std::vector<Unit> units;
    const int size = static_cast<int>(all_.size());
    for (int i = 0; i < size; ++i) {
      const int reader = wrap(rank_ + i, size);
      const int unit = inboxes_.unit(reader, rank_, slot, chunk);
      if (unit >= 0) units.push_back({reader, rank_, unit});
    }
    return units;
  }

  std::vector<Piece> pieces_of(const std::vector<const Step*>& moves) const {
    std::vector<Piece> pieces;
    for (const Step* step : moves) {
      const Location& any = step->to.front();
      for (int c = any.chunk; c < any.chunk + any.span; ++c) {
        Piece piece{step, c, {}, {}};
        for (const Location& at : step->to) {
          if (at.buffer == Buffer::scratch) {
            const auto units = units_of(at.slot, c);
            piece.units.insert(piece.units.end(), units.begin(), units.end());
          } else {
            piece.outs.push_back(at.rank);
          }
        }
        // Otherwise a part of a slot that nobody reads.
        if (!piece.outs.empty() || !piece.units.empty()) pieces.push_back(std::move(piece));
      }
    }
    return pieces;
  }

  /// Copies that follow each other go together, and the sources of a fold.
  void add_batches(const std::vector<const Step*>& moves) {
    const std::vector<Piece> pieces = pieces_of(moves);
    for (std::size_t i = 0; i < pieces.size();) {
      const auto sources = static_cast<int>(pieces[i].step->from.size());
      if (sources > 1) {
        for (int first = 0; first < sources; first += kBatch) add_fold(pieces[i], first);
        ++i;
        continue;
      }
      std::size_t end = i + 1;
      while (end < pieces.size() && end - i < kBatch && pieces[end].step->from.size() == 1) ++end;
      add_copies({&pieces[i], end - i});
      i = end;
    }
  }

  void add_copies(std::span<const Piece> pieces) {
    Batch* const batch = begin_batch(pieces);
    if (!batch) return;
    batch->is_copy = batch->is_first = batch->is_last = true;
    batch->from_count = static_cast<std::uint8_t>(pieces.size());
    for (const Piece& piece : pieces) add_source(piece, 0);
    add_targets(*batch, pieces);
  }

  /// Its sources from `first` on.
  void add_fold(const Piece& piece, int first) {
    Batch* const batch = begin_batch({&piece, 1});
    if (!batch) return;
    const int sources = static_cast<int>(piece.step->from.size());
    batch->is_first = first == 0;
    batch->is_last = first + kBatch >= sources;
    batch->from_count = static_cast<std::uint8_t>(std::min(kBatch, sources - first));
    for (int i = 0; i < batch->from_count; ++i) add_source(piece, first + i);
    if (batch->is_last) add_targets(*batch, {&piece, 1});
  }

  /// Null: there is no room.
  Batch* begin_batch(std::span<const Piece> pieces) {
    if (batches_ == kMaxBatches) {
      give_up();
      return nullptr;
    }
    Batch& batch = launch_.batch[batches_++];
    batch = {};
    for (const Piece& piece : pieces)
      for (const Location& from : piece.step->from) {
        // What another stage of this rank has written, maybe.
        if (from.buffer == Buffer::out || (from.buffer == Buffer::scratch && from.rank == rank_))
          batch.is_local = true;
        // Reach::attach is not for devices.
        if (from.buffer == Buffer::in && device(from.rank) != device(rank_)) give_up();
      }
    batch.from = static_cast<std::uint16_t>(operands_);
    return &batch;
  }

  void add_source(const Piece& piece, int index) {
    const Location& from = piece.step->from[static_cast<std::size_t>(index)];
    if (from.buffer != Buffer::scratch) return add_operand(nullptr, from.buffer, from.rank, piece);
    const Unit unit{rank_, from.rank, inboxes_.unit(rank_, from.rank, from.slot, piece.chunk)};
    if (from.rank != rank_) plan_.arrivals.push_back({operands_, device(from.rank)});
    add_operand(&unit, from.buffer, from.rank, piece);
  }

  void add_targets(Batch& batch, std::span<const Piece> pieces) {
    batch.to = static_cast<std::uint16_t>(operands_);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      for (const Unit& unit : piece.units) add_operand(&unit, Buffer::scratch, unit.reader, piece);
      for (const int of : piece.outs) add_operand(nullptr, Buffer::out, of, piece);
      batch.to_count[i] = static_cast<std::uint8_t>(piece.units.size() + piece.outs.size());
    }
  }

  void add_operand(const Unit* unit, Buffer buffer, int of, const Piece& piece) {
    if (operands_ == kMaxOperands) return give_up();
    Operand& operand = launch_.operand[operands_++];
    operand = {};
    operand.is_inbox = unit != nullptr;
    operand.is_out = unit == nullptr && buffer == Buffer::out;
    if (unit != nullptr) operand.rank = device(unit->writer);
    plan_.meanings.push_back({buffer, of, piece.chunk, unit != nullptr ? device(unit->reader) : -1,
                              unit != nullptr ? unit->unit : -1});
  }

  KernelPlan& plan_;
  FlaggedLaunch& launch_;
  const Placement& placement_;
  const std::vector<Schedule>& all_;
  const Schedule& schedule_;
  const int rank_;
  const Inboxes inboxes_;
  int operands_ = 0, flags_ = 0, batches_ = 0, phases_ = 0;
  int stage_ = 0;  // that has begun
};

// ------------------------------------------------------------------------ kernels of one exchange

/// The batches, where they are copies to inboxes, one fold at the most, of what others push and one
/// chunk of this rank's own, and copies to `out`, of what has arrived or of this rank's own.
std::optional<Exchange> exchange_of(const FlaggedLaunch& launch, int batches) {
  Exchange found;
  const auto is_own = [&](int operand) {
    return !launch.operand[operand].is_inbox && !launch.operand[operand].is_out;
  };
  for (int i = 0; i < batches; ++i) {
    const Batch& batch = launch.batch[i];
    int to = batch.to;
    for (int j = 0; j < batch.from_count; ++j) {
      const int from = batch.from + j;
      if (launch.operand[from].is_out) return {};
      if (!batch.is_copy) {
        if (batch.is_first ? !found.outs.empty() : false) return {};
        if (is_own(from) && std::exchange(found.own, from) >= 0) return {};
        found.sources.push_back(from);
        continue;
      }
      for (const int end = to + batch.to_count[j]; to < end; ++to) {
        const bool goes_out = launch.operand[to].is_out;
        if (!goes_out && !is_own(from)) return {};
        (!goes_out      ? found.targets
         : is_own(from) ? found.kept
                        : found.results)
            .push_back({from, to});
      }
    }
    if (batch.is_copy || !batch.is_last) continue;
    for (const int end = to + batch.to_count[0]; to < end; ++to) found.outs.push_back(to);
  }
  if (!found.sources.empty() && found.own < 0) return {};
  const bool has_room = found.sources.size() <= kMaxRanks && found.outs.size() <= kMaxRanks &&
                        found.targets.size() <= kMaxRanks && found.results.size() <= kMaxRanks;
  return has_room ? std::optional(std::move(found)) : std::nullopt;
}

void look_whether_flat(const KernelPlan& plan, Exchange& found) {
  std::vector<Exchange::Copy> copied = found.results;
  copied.insert(copied.end(), found.kept.begin(), found.kept.end());
  std::vector<int> outs = found.outs;
  for (const auto [from, to] : copied) outs.push_back(to);
  // A thread may have several units. It waits for what belongs to one before it pushes the next, so
  // what it waits for must not need that: what has been through a peer's fold does.
  const bool is_answered = !found.results.empty() && !found.targets.empty();
  const bool is_elsewhere = !outs.empty() && !plan.launch.operand[outs.front()].is_out;
  if (is_answered || outs.size() > 1 || is_elsewhere) return;
  Exchange::Fold& fold = found.fold;
  fold.sources = found.sources;
  for (const auto [from, to] : copied) fold.sources.push_back(from);
  fold.own = found.kept.empty() ? found.own : found.kept.front().from;
  if (!outs.empty()) fold.out = outs.front();
  found.is_flat = plan.is_packet_possible && fold.sources.empty() == outs.empty() &&
                  !(fold.sources.empty() && found.targets.empty());
}

void look_whether_pipeline(const KernelPlan& plan, const Placement& placement, Exchange& found) {
  const FlaggedLaunch& launch = plan.launch;
  // Who reads what this rank pushes, and from whom it hears each pass: Pipeline says why.
  std::uint32_t sources = 0, heard = 0;
  const auto bit = [](int device) { return 1u << device; };
  for (const int from : found.sources)
    if (from != found.own) sources |= bit(launch.operand[from].rank);
  heard = sources;
  for (const auto [from, to] : found.results) heard |= bit(launch.operand[from].rank);
  for (const Flag& flag : plan.bare_waits) heard |= bit(static_cast<int>(flag.rank));
  bool is_safe = (heard & bit(launch.rank)) == 0;
  for (const auto [from, to] : found.targets)
    is_safe = is_safe && (heard & bit(plan.meaning(to).holder)) != 0;
  std::size_t signals = plan.bare_signals.size();
  for (const int to : found.outs) {
    if (!launch.operand[to].is_inbox) continue;
    is_safe = is_safe && (sources & bit(plan.meaning(to).holder)) != 0;
    ++signals;
  }
  const std::size_t waits = found.results.size() + plan.bare_waits.size();
  const bool is_simple = plan.is_simple_possible && !placement.is_shared && found.kept.empty();
  found.is_pipeline = is_simple && is_safe && signals <= kMaxRanks && waits <= kMaxRanks;
  // One that pushes, or adds to what one other pushes, and takes what another one has added to.
  found.is_relay = is_simple && found.targets.size() + found.outs.size() <= 1 &&
                   found.sources.size() == 2 * found.outs.size() && found.results.size() <= 1 &&
                   plan.bare_waits.empty() && plan.bare_signals.empty();
  for (const auto [from, to] : found.results)
    found.is_relay = found.is_relay && (sources & bit(launch.operand[from].rank)) == 0;
}

}  // namespace

KernelPlan::KernelPlan(const Placement& placement, const std::vector<Schedule>& all, int rank) {
  Translator translator(*this, placement, all, rank);
  translator.run();
  if (!is_packet_possible && !is_simple_possible) return;
  auto found = exchange_of(launch, translator.batches());
  if (!found) return;
  look_whether_flat(*this, *found);
  look_whether_pipeline(*this, placement, *found);
  exchange = std::move(*found);
}

void KernelPlan::fill(FlatLaunch& flat) const {
  static_cast<LaunchHead&>(flat) = launch;
  std::copy(std::begin(launch.inbox), std::end(launch.inbox), flat.inbox);
  const Exchange::Fold& fold = exchange.fold;
  flat.sources = static_cast<std::uint8_t>(fold.sources.size());
  flat.targets = static_cast<std::uint8_t>(exchange.targets.size());
  for (std::size_t i = 0; i < fold.sources.size(); ++i) {
    const int from = fold.sources[i];
    flat.source[i] = from == fold.own ? nullptr : place(from);
    flat.source_rank[i] = launch.operand[from].rank;
  }
  for (std::size_t i = 0; i < exchange.targets.size(); ++i) {
    const auto [from, to] = exchange.targets[i];
    flat.target[i] = {place(from), place(to), launch.operand[from].length};
  }
  // Who only receives has none.
  const int own = fold.own >= 0              ? fold.own
                  : exchange.targets.empty() ? -1
                                             : exchange.targets.front().from;
  flat.own = own >= 0 ? place(own) : nullptr;
  flat.own_length = own >= 0 ? launch.operand[own].length : 0;
  flat.out = fold.out >= 0 ? place(fold.out) : nullptr;
  flat.out_length = fold.out >= 0 ? launch.operand[fold.out].length : 0;
  flat.is_same = true;
  for (const auto& target : exchange.targets)
    flat.is_same = flat.is_same && meaning(target.from).chunk == meaning(own).chunk;
}

void KernelPlan::fill(PipelineLaunch& line, std::size_t slice_bytes) const {
  static_cast<LaunchHead&>(line) = launch;
  std::copy(std::begin(launch.inbox), std::end(launch.inbox), line.inbox);
  /// Of the unit that an operand stands for.
  const auto flag = [&](int operand, int peer) {
    const auto& [buffer, of, chunk, holder, unit] = meaning(operand);
    Flag made;
    made.address = reinterpret_cast<std::uintptr_t>(launch.inbox[holder]) +
                   static_cast<std::size_t>(unit) * sizeof(std::uint32_t);
    made.rank = static_cast<std::uint8_t>(peer);
    return made;
  };
  const auto source_of = [&](int operand) { return launch.operand[operand].rank; };
  const auto reader_of = [&](int operand) { return meaning(operand).holder; };
  line.is_relay = exchange.is_relay;
  line.targets = line.sources = line.outs = line.results = 0;
  line.push_waits = line.result_signals = line.result_waits = 0;
  for (const auto [from, to] : exchange.targets) {
    line.push_signal[line.targets] = flag(to, reader_of(to));
    line.target[line.targets++] = {place(from), place(to), launch.operand[from].length};
  }
  for (const int from : exchange.sources) {
    const bool is_own = from == exchange.own;
    line.source[line.sources++] = is_own ? nullptr : place(from);
    if (!is_own) line.push_wait[line.push_waits++] = flag(from, source_of(from));
  }
  line.own = exchange.own >= 0 ? place(exchange.own) : nullptr;
  line.length = exchange.own >= 0 ? launch.operand[exchange.own].length : 0;
  std::uintptr_t bits = launch.passes > 1 ? slice_bytes : 0;
  bits |= reinterpret_cast<std::uintptr_t>(line.own);
  for (const int to : exchange.outs) {
    const bool is_inbox = launch.operand[to].is_inbox;
    bits |= reinterpret_cast<std::uintptr_t>(place(to));
    line.out[line.outs++] = {place(to), is_inbox};
    if (is_inbox) line.result_signal[line.result_signals++] = flag(to, reader_of(to));
  }
  line.is_aligned = bits % kUnitBytes == 0;
  for (const Flag& bare : bare_signals) line.result_signal[line.result_signals++] = bare;
  for (const auto [from, to] : exchange.results) {
    line.result_wait[line.result_waits++] = flag(from, source_of(from));
    line.result[line.results++] = {place(from), place(to), launch.operand[from].length};
  }
  for (const Flag& bare : bare_waits) line.result_wait[line.result_waits++] = bare;
}

}  // namespace trib::cuda

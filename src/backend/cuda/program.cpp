// SPDX-License-Identifier: BSD-3-Clause
// From a lowered schedule to a kernel's tables, and from a call to a launch.
#include "backend/cuda/program.hpp"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <optional>
#include <utility>

#include "backend/cuda/inboxes.hpp"
#include "base/locks.hpp"

namespace trib::cuda {
namespace {

/// Passes of a block from which on the general kernel is as fast as the pipeline or faster: its
/// stages go on side by side (4 H200, 2026-11-22). With no more than there are windows, none is
/// used twice; the pipeline is made for more, but has run on GPUs with that only while it was
/// measured.
constexpr std::uint32_t kMostRounds = 4;

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

}  // namespace

Program::Program(Channel& channel, const std::vector<Schedule>& all)
    : Program(channel, all, channel.rank_) {}

Program::Program(Channel& channel, const std::vector<Schedule>& all, int rank)
    : channel_(channel),
      rank_(rank),
      repeats_(channel.driver_, channel.replays_, channel.context_id_),
      aside_(channel.context_id_) {
  translate(all);
}

void Program::translate(const std::vector<Schedule>& all) {
  const int rank = rank_, size = channel_.size_;
  const auto device = [&](int of) { return static_cast<std::uint8_t>(channel_.device_of(of)); };
  const Schedule& schedule = all[static_cast<std::size_t>(rank)];
  const Inboxes inboxes(all, channel_.device_of());
  units_ = inboxes.most();
  if (inboxes.flags() > kMaxUnits) is_packet_possible_ = is_simple_possible_ = false;
  is_delivered_ = schedule.is_delivered;
  if (is_delivered_) is_packet_possible_ = false;  // `out` has no room for packets
  launch_.stages = static_cast<std::uint8_t>(schedule.stages);
  launch_.rank = device(rank);
  launch_.size = static_cast<std::uint8_t>(channel_.devices());
  for (int peer = 0; peer < channel_.devices(); ++peer)
    launch_.inbox[peer] = reinterpret_cast<std::byte*>(
        channel_.inboxes_[static_cast<std::size_t>(channel_.leader_of(peer))]);
  launch_.doorbell = channel_.doorbell_;
  launch_.counters = reinterpret_cast<Counters*>(channel_.counters_);
  launch_.time_limit = channel_.time_limit_;
  launch_.has_met = true;

  struct Unit {
    int reader, writer, unit;
  };
  int operands = 0, flags = 0, batches = 0, phases = 0;
  const auto add_operand = [&](const Unit* unit, Buffer buffer, int of, int chunk) {
    if (operands == kMaxOperands) {
      is_packet_possible_ = is_simple_possible_ = false;
      return;
    }
    Operand& operand = launch_.operand[operands++];
    operand = {};
    operand.is_inbox = unit != nullptr;
    operand.is_out = unit == nullptr && buffer == Buffer::out;
    if (unit != nullptr) {
      operand.rank = device(unit->writer);
    }
    meanings_.push_back({buffer, of, chunk, unit != nullptr ? device(unit->reader) : -1,
                         unit != nullptr ? unit->unit : -1});
  };
  /// A slot stands for its units at all readers, nearest behind this rank first: at any time, every
  /// rank then pushes to another peer.
  const auto units_of = [&](int slot, int chunk) {
    std::vector<Unit> units;
    for (int i = 0; i < size; ++i) {
      const int reader = wrap(rank + i, size);
      const int unit = inboxes.unit(reader, rank, slot, chunk);
      if (unit >= 0) units.push_back({reader, rank, unit});
    }
    return units;
  };
  const auto add_flag = [&](const Unit& unit, int peer) {
    if (flags == 2 * kMaxFlags) {
      is_simple_possible_ = false;
      return false;
    }
    Flag& flag = launch_.flag[flags++];
    flag.address = channel_.inboxes_[static_cast<std::size_t>(unit.reader)] +
                   static_cast<std::size_t>(unit.unit) * sizeof(std::uint32_t);
    flag.rank = device(peer);
    return true;
  };

  /// One chunk of a step, in the making.
  struct Piece {
    const Step* step;
    int chunk;
    std::vector<Unit> units;  // where it is pushed to
    std::vector<int> outs;    // whose `out` it goes to
  };
  const auto add_batch = [&](const Piece* const* pieces, int copies, int first_source) {
    if (batches == kMaxBatches) {
      is_packet_possible_ = is_simple_possible_ = false;
      return;
    }
    const Piece& piece = **pieces;
    const int sources = static_cast<int>(piece.step->from.size());
    Batch& batch = launch_.batch[batches++];
    batch = {};
    batch.is_copy = copies > 0;
    batch.is_first = first_source == 0;
    batch.is_last = batch.is_copy || first_source + kBatch >= sources;
    for (int i = 0; i < std::max(copies, 1); ++i)
      for (const Location& from : pieces[i]->step->from) {
        // What another stage of this rank has written, maybe.
        if (from.buffer == Buffer::out || (from.buffer == Buffer::scratch && from.rank == rank))
          batch.is_local = true;
        // Reach::attach is not for devices.
        if (from.buffer == Buffer::in && device(from.rank) != device(rank))
          is_packet_possible_ = is_simple_possible_ = false;
      }
    batch.from = static_cast<std::uint16_t>(operands);
    batch.from_count = static_cast<std::uint8_t>(
        batch.is_copy ? copies : std::min(kBatch, sources - first_source));
    for (int i = 0; i < batch.from_count; ++i) {
      const Piece& source = batch.is_copy ? *pieces[i] : piece;
      const Location& from =
          source.step->from[static_cast<std::size_t>(batch.is_copy ? 0 : first_source + i)];
      if (from.buffer == Buffer::scratch) {
        const Unit unit{rank, from.rank, inboxes.unit(rank, from.rank, from.slot, source.chunk)};
        if (from.rank != rank) arrivals_.push_back({operands, device(from.rank)});
        add_operand(&unit, from.buffer, from.rank, source.chunk);
      } else {
        add_operand(nullptr, from.buffer, from.rank, source.chunk);
      }
    }
    if (!batch.is_last) return;
    batch.to = static_cast<std::uint16_t>(operands);
    for (int i = 0; i < std::max(copies, 1); ++i) {
      const Piece& target = *pieces[i];
      for (const Unit& unit : target.units)
        add_operand(&unit, Buffer::scratch, unit.reader, target.chunk);
      for (const int of : target.outs) add_operand(nullptr, Buffer::out, of, target.chunk);
      batch.to_count[i] = static_cast<std::uint8_t>(target.units.size() + target.outs.size());
    }
  };

  const auto emit = [&](const Group& group) {
    if (group.is_empty()) return;
    Phase overflow;
    Phase& phase = phases == kMaxPhases ? overflow : launch_.phase[phases++];
    if (&phase == &overflow) is_simple_possible_ = false;
    phase = {};
    phase.first_batch = static_cast<std::uint8_t>(batches);
    std::vector<Piece> pieces;
    for (const Step* step : group.moves) {
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
    for (std::size_t i = 0; i < pieces.size();) {
      const Piece* together[kBatch];
      int copies = 0;
      while (copies < kBatch && i + static_cast<std::size_t>(copies) < pieces.size() &&
             pieces[i + static_cast<std::size_t>(copies)].step->from.size() == 1) {
        together[copies] = &pieces[i + static_cast<std::size_t>(copies)];
        ++copies;
      }
      if (copies > 0) {
        add_batch(together, copies, 0);
        i += static_cast<std::size_t>(copies);
        continue;
      }
      together[0] = &pieces[i++];
      const int sources = static_cast<int>(together[0]->step->from.size());
      for (int first = 0; first < sources; first += kBatch) add_batch(together, 0, first);
    }
    phase.batches = static_cast<std::uint8_t>(batches - phase.first_batch);
    // One flag per unit, though a step waits for a slot: it reads several of its chunks, maybe.
    phase.first_wait = static_cast<std::uint8_t>(flags);
    for (const Step* step : group.waits) {
      const int peer = step->peers.front();
      const Slot& slot =
          all[static_cast<std::size_t>(peer)]
              .slots[static_cast<std::size_t>(peer)][static_cast<std::size_t>(step->slot)];
      for (int c = slot.chunk; c < slot.chunk + std::max(slot.span, 1); ++c) {
        const int unit = inboxes.unit(rank, peer, step->slot, c);
        if (unit < 0 || !add_flag({rank, peer, unit}, peer)) continue;
        ++phase.waits;
        if (slot.span == 0) bare_waits_.push_back(launch_.flag[flags - 1]);
      }
    }
    phase.first_signal = static_cast<std::uint8_t>(flags);
    for (const Step* step : group.signals) {
      const Slot& slot =
          schedule.slots[static_cast<std::size_t>(rank)][static_cast<std::size_t>(step->slot)];
      for (int c = slot.chunk; c < slot.chunk + std::max(slot.span, 1); ++c)
        for (const Unit& unit : units_of(step->slot, c))
          if (unit.reader != rank && add_flag(unit, unit.reader)) {
            ++phase.signals;
            if (slot.span == 0) bare_signals_.push_back(launch_.flag[flags - 1]);
          }
    }
  };

  if (schedule.stages > kMaxStages) {
    is_packet_possible_ = is_simple_possible_ = false;
    return;
  }
  Group group;
  int group_stage = 0;
  for (const Step& step : schedule.steps) {
    if (step.stage != group.stage || group.depends(step)) {
      emit(group);
      group = {};
      for (; group_stage < step.stage; ++group_stage) {
        launch_.first_batch[group_stage + 1] = static_cast<std::uint8_t>(batches);
        launch_.first_phase[group_stage + 1] = static_cast<std::uint8_t>(phases);
      }
      group.stage = step.stage;
    }
    (step.verb == Verb::wait     ? group.waits
     : step.verb == Verb::signal ? group.signals
                                 : group.moves)
        .push_back(&step);
  }
  emit(group);
  for (; group_stage < schedule.stages; ++group_stage) {
    launch_.first_batch[group_stage + 1] = static_cast<std::uint8_t>(batches);
    launch_.first_phase[group_stage + 1] = static_cast<std::uint8_t>(phases);
  }
  if (is_packet_possible_ || is_simple_possible_) find_exchange(batches);
}

/// Whether the batches are copies to inboxes, one fold at the most, of what others push and one
/// chunk of this rank's own, and copies to `out`, of what has arrived or of this rank's own.
void Program::find_exchange(int batches) {
  Exchange found;
  const auto is_own = [&](int operand) {
    return !launch_.operand[operand].is_inbox && !launch_.operand[operand].is_out;
  };
  const auto meaning = [&](int operand) -> const Meaning& {
    return meanings_[static_cast<std::size_t>(operand)];
  };
  for (int i = 0; i < batches; ++i) {
    const Batch& batch = launch_.batch[i];
    int to = batch.to;
    for (int j = 0; j < batch.from_count; ++j) {
      const int from = batch.from + j;
      if (launch_.operand[from].is_out) return;
      if (!batch.is_copy) {
        if (batch.is_first ? !found.outs.empty() : false) return;
        if (is_own(from) && std::exchange(found.own, from) >= 0) return;
        found.sources.push_back(from);
        continue;
      }
      for (const int end = to + batch.to_count[j]; to < end; ++to) {
        const bool goes_out = launch_.operand[to].is_out;
        if (!goes_out && !is_own(from)) return;
        (!goes_out      ? found.targets
         : is_own(from) ? found.kept
                        : found.results)
            .push_back({from, to});
      }
    }
    if (batch.is_copy || !batch.is_last) continue;
    for (const int end = to + batch.to_count[0]; to < end; ++to) found.outs.push_back(to);
  }
  if (!found.sources.empty() && found.own < 0) return;
  for (const auto* const some : {&found.sources, &found.outs})
    if (some->size() > kMaxRanks) return;
  for (const auto* const some : {&found.targets, &found.results})
    if (some->size() > kMaxRanks) return;
  std::vector<Exchange::Copy> copied = found.results;
  copied.insert(copied.end(), found.kept.begin(), found.kept.end());
  std::vector<int> outs = found.outs;
  for (const auto [from, to] : copied) outs.push_back(to);
  // A thread may have several units. It waits for what belongs to one before it pushes the next, so
  // what it waits for must not need that: what has been through a peer's fold does.
  const bool is_answered = !found.results.empty() && !found.targets.empty();
  if (!is_answered && outs.size() <= 1 && (outs.empty() || launch_.operand[outs.front()].is_out)) {
    Exchange::Fold& fold = found.fold;
    fold.sources = found.sources;
    for (const auto [from, to] : copied) fold.sources.push_back(from);
    fold.own = found.kept.empty() ? found.own : found.kept.front().from;
    if (!outs.empty()) fold.out = outs.front();
    found.is_flat = is_packet_possible_ && fold.sources.empty() == outs.empty() &&
                    !(fold.sources.empty() && found.targets.empty());
  }

  // Who reads what this rank pushes, and from whom it hears each pass: Pipeline says why.
  std::uint32_t sources = 0, heard = 0;
  const auto bit = [](int device) { return 1u << device; };
  for (const int from : found.sources)
    if (from != found.own) sources |= bit(launch_.operand[from].rank);
  heard = sources;
  for (const auto [from, to] : found.results) heard |= bit(launch_.operand[from].rank);
  for (const Flag& flag : bare_waits_) heard |= bit(static_cast<int>(flag.rank));
  bool is_safe = (heard & bit(launch_.rank)) == 0;
  for (const auto [from, to] : found.targets)
    is_safe = is_safe && (heard & bit(meaning(to).holder)) != 0;
  std::size_t signals = bare_signals_.size();
  for (const int to : found.outs) {
    if (!launch_.operand[to].is_inbox) continue;
    is_safe = is_safe && (sources & bit(meaning(to).holder)) != 0;
    ++signals;
  }
  const std::size_t waits = found.results.size() + bare_waits_.size();
  const bool is_simple = is_simple_possible_ && !channel_.sharing_ && found.kept.empty();
  found.is_pipeline = is_simple && is_safe && signals <= kMaxRanks && waits <= kMaxRanks;
  // One that pushes, or adds to what one other pushes, and takes what another one has added to.
  found.is_relay = is_simple && found.targets.size() + found.outs.size() <= 1 &&
                   found.sources.size() == 2 * found.outs.size() && found.results.size() <= 1 &&
                   bare_waits_.empty() && bare_signals_.empty();
  for (const auto [from, to] : found.results)
    found.is_relay = found.is_relay && (sources & bit(launch_.operand[from].rank)) == 0;
  exchange_ = std::move(found);
}

/// From the operands of the launch.
void Program::fill_flat() {
  FlatLaunch& flat = flat_launch_;
  static_cast<LaunchHead&>(flat) = launch_;
  std::copy(std::begin(launch_.inbox), std::end(launch_.inbox), flat.inbox);
  const Exchange& exchange = exchange_;
  const Exchange::Fold& fold = exchange.fold;
  flat.sources = static_cast<std::uint8_t>(fold.sources.size());
  flat.targets = static_cast<std::uint8_t>(exchange.targets.size());
  for (std::size_t i = 0; i < fold.sources.size(); ++i) {
    const int from = fold.sources[i];
    flat.source[i] = from == fold.own ? nullptr : place(from);
    flat.source_rank[i] = launch_.operand[from].rank;
  }
  for (std::size_t i = 0; i < exchange.targets.size(); ++i) {
    const auto [from, to] = exchange.targets[i];
    flat.target[i] = {place(from), place(to), launch_.operand[from].length};
  }
  // Who only receives has none.
  const int own = fold.own >= 0              ? fold.own
                  : exchange.targets.empty() ? -1
                                             : exchange.targets.front().from;
  flat.own = own >= 0 ? place(own) : nullptr;
  flat.own_length = own >= 0 ? launch_.operand[own].length : 0;
  flat.out = fold.out >= 0 ? place(fold.out) : nullptr;
  flat.out_length = fold.out >= 0 ? launch_.operand[fold.out].length : 0;
  flat.is_same = true;
  for (const auto& target : exchange.targets)
    flat.is_same = flat.is_same && meanings_[static_cast<std::size_t>(target.from)].chunk ==
                                       meanings_[static_cast<std::size_t>(own)].chunk;
}

void Program::fill_pipeline(std::size_t slice_bytes) {
  PipelineLaunch& line = pipeline_launch_;
  static_cast<LaunchHead&>(line) = launch_;
  std::copy(std::begin(launch_.inbox), std::end(launch_.inbox), line.inbox);
  const Exchange& exchange = exchange_;
  /// Of the unit that an operand stands for.
  const auto flag = [&](int operand, int peer) {
    const Meaning& meaning = meanings_[static_cast<std::size_t>(operand)];
    Flag made;
    made.address = reinterpret_cast<std::uintptr_t>(launch_.inbox[meaning.holder]) +
                   static_cast<std::size_t>(meaning.unit) * sizeof(std::uint32_t);
    made.rank = static_cast<std::uint8_t>(peer);
    return made;
  };
  const auto source_of = [&](int operand) { return launch_.operand[operand].rank; };
  const auto reader_of = [&](int operand) {
    return meanings_[static_cast<std::size_t>(operand)].holder;
  };
  line.is_relay = exchange.is_relay;
  line.targets = line.sources = line.outs = line.results = 0;
  line.push_waits = line.result_signals = line.result_waits = 0;
  for (const auto [from, to] : exchange.targets) {
    line.push_signal[line.targets] = flag(to, reader_of(to));
    line.target[line.targets++] = {place(from), place(to), launch_.operand[from].length};
  }
  for (const int from : exchange.sources) {
    const bool is_own = from == exchange.own;
    line.source[line.sources++] = is_own ? nullptr : place(from);
    if (!is_own) line.push_wait[line.push_waits++] = flag(from, source_of(from));
  }
  line.own = exchange.own >= 0 ? place(exchange.own) : nullptr;
  line.length = exchange.own >= 0 ? launch_.operand[exchange.own].length : 0;
  std::uintptr_t bits = launch_.passes > 1 ? slice_bytes : 0;
  bits |= reinterpret_cast<std::uintptr_t>(line.own);
  for (const int to : exchange.outs) {
    const bool is_inbox = launch_.operand[to].is_inbox;
    bits |= reinterpret_cast<std::uintptr_t>(place(to));
    line.out[line.outs++] = {place(to), is_inbox};
    if (is_inbox) line.result_signal[line.result_signals++] = flag(to, reader_of(to));
  }
  line.is_aligned = bits % kUnitBytes == 0;
  for (const Flag& bare : bare_signals_) line.result_signal[line.result_signals++] = bare;
  for (const auto [from, to] : exchange.results) {
    line.result_wait[line.result_waits++] = flag(from, source_of(from));
    line.result[line.results++] = {place(from), place(to), launch_.operand[from].length};
  }
  for (const Flag& bare : bare_waits_) line.result_wait[line.result_waits++] = bare;
}

bool Program::agree(const std::vector<Schedule>& all) {
  for (int rank = 0; rank < channel_.size_; ++rank) {
    const Program its(channel_, all, rank);
    is_packet_possible_ = is_packet_possible_ && its.is_packet_possible_;
    is_simple_possible_ = is_simple_possible_ && its.is_simple_possible_;
    exchange_.is_pipeline = exchange_.is_pipeline && its.exchange_.is_pipeline;
    exchange_.is_relay = exchange_.is_relay && its.exchange_.is_relay;
  }
  return is_packet_possible_ && is_simple_possible_;
}

std::size_t Program::fit(bool is_large) const {
  if (is_large ? !is_simple_possible_ : !is_packet_possible_) return 0;
  // A packet is half number.
  const std::size_t room = is_large ? kWindowBytes : kPacketWindowBytes / 2;
  return room / static_cast<std::size_t>(std::max(units_, 1)) / kUnitBytes * kUnitBytes;
}

/// Where ranks share devices such calls do not come here, see Communicator::is_in_the_way.
bool Program::is_to_go_aside(const Arguments& arguments) const {
  return !channel_.sharing_ && covers_input(arguments, channel_.rank_);
}

Operation& Program::launch(const Arguments& arguments) {
  Launch& launch = launch_;
  // Even if it fails: the host's numbers of runs are no longer the device's.
  if (arguments.is_captured) channel_.is_captured_ = true;
  launch.slice = static_cast<std::uint32_t>(arguments.slice);
  launch.passes =
      static_cast<std::uint32_t>((arguments.longest + arguments.slice - 1) / arguments.slice);
  const auto blocks =
      std::min<std::uint32_t>(static_cast<std::uint32_t>(arguments.blocks), launch.passes);
  const std::uint32_t runs = (launch.passes + blocks - 1) / blocks;
  launch.first_run = first_run_behind(channel_.last_run_, runs);
  // Kernels that linger count on by themselves.
  const bool is_next = launch.first_run == channel_.last_run_ + 1;
  channel_.last_run_ = launch.first_run + runs - 1;
  launch.number = ++channel_.launches_;
  stalls_ = 0;
  is_ordered_ = false;
  launch.linger = 0;
  if (!channel_.leads()) return *this;
  if (!arguments.is_enqueued && !channel_.sharing_) {
    // What lies over its input takes a result aside, which is not for a kernel that lingers.
    const bool may_linger = arguments.linger > 0 && !arguments.is_large && launch.passes == 1 &&
                            look_for_repeat(arguments) && !is_to_go_aside(arguments);
    if (order(arguments, may_linger && is_next)) return *this;
    if (may_linger && channel_.is_worth_lingering())
      launch.linger = static_cast<std::uint64_t>(arguments.linger) * 1000;
  }
  start(arguments);
  return *this;
}

/// Whether the call is like the one before, but for its buffers.
bool Program::look_for_repeat(const Arguments& arguments) {
  const std::size_t* const begin = arguments.chunk_begin;
  const std::size_t* const end = begin + arguments.chunks + 1;
  const bool is_repeated = arguments.op == last_.op && arguments.dtype == last_.dtype &&
                           arguments.slice == last_.slice &&
                           std::equal(begin, end, last_.begin.begin(), last_.begin.end());
  if (!is_repeated) {
    last_.op = arguments.op;
    last_.dtype = arguments.dtype;
    last_.slice = arguments.slice;
    last_.begin.assign(begin, end);
  }
  return is_repeated;
}

/// True: a kernel that lingers was told to serve the call. `may_be`: it is like the call before.
bool Program::order(const Arguments& arguments, bool may_be) {
  Channel::Resident& resident = channel_.resident_;
  if (resident.program == nullptr) return false;
  if (channel_.has_left()) {
    channel_.forget();
    return false;
  }
  if (resident.program != this || !may_be || !std::exchange(channel_.was_idle_, false)) {
    channel_.dismiss();
    return false;
  }
  pending_ = arguments;
  is_ordered_ = true;
  const auto moved = [](const void* from, const void* to) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                     reinterpret_cast<std::uintptr_t>(from));
  };
  channel_.order(moved(resident.in, arguments.in), moved(resident.out, arguments.out));
  return true;
}

/// Whether the kernel ends only when it has data from every peer.
bool Program::hears_from_all(const Arguments& arguments) const {
  std::uint32_t heard = 1u << launch_.rank;
  for (const auto [operand, from] : arrivals_) {
    const int chunk = meanings_[static_cast<std::size_t>(operand)].chunk;
    if (arguments.chunk_begin[chunk + 1] > arguments.chunk_begin[chunk]) heard |= 1u << from;
  }
  return heard == (1u << launch_.size) - 1;
}

/// Launches a kernel for the call that launch_ has the numbers of.
void Program::start(const Arguments& arguments) {
  const bool is_packet = !arguments.is_large;
  const std::size_t element = bytes(arguments.dtype);
  Launch& launch = launch_;
  const auto blocks =
      std::min<std::uint32_t>(static_cast<std::uint32_t>(arguments.blocks), launch.passes);
  launch.has_met = !arguments.is_enqueued;

  // A flat kernel's threads take whole units, which must not belong to two blocks.
  const bool may_be_flat = launch.passes <= blocks &&
                           (launch.passes == 1 || arguments.slice * element % kUnitBytes == 0);
  const Protocol protocol =
      is_packet ? exchange_.is_flat && may_be_flat ? Protocol::flat : Protocol::packet
      : exchange_.is_relay || (exchange_.is_pipeline && launch.passes <= kMostRounds * blocks)
          ? Protocol::pipeline
          : Protocol::simple;
  const CUfunction function = channel_.kernels_->find(arguments.op, arguments.dtype, protocol);
  const Current current(channel_.context_);
  is_aside_ = is_to_go_aside(arguments);
  const std::size_t own =
      is_aside_
          ? (arguments.chunk_begin[channel_.rank_ + 1] - arguments.chunk_begin[channel_.rank_]) *
                element
          : 0;
  if (is_aside_) aside_at_ = aside_.reserve(own);
  const bool is_mapped = channel_.sharing_ || is_delivered_;
  const MappedBuffers own_buffers{const_cast<void*>(arguments.in),
                                  is_aside_ ? reinterpret_cast<void*>(aside_at_) : arguments.out};
  const bool is_scattered = is_scatter(static_cast<Collective>(arguments.signature.collective));
  const std::uint64_t stride =
      (arguments.slice * element + kUnitBytes - 1) / kUnitBytes * kUnitBytes * (is_packet ? 2 : 1);
  const std::size_t payload_at = is_packet ? packets_at(channel_.max_blocks_) : kPayloadAt;
  for (std::size_t i = 0; i < meanings_.size(); ++i) {
    const Meaning& meaning = meanings_[i];
    Operand& operand = launch.operand[i];
    const std::size_t begin = arguments.chunk_begin[meaning.chunk];
    operand.length = static_cast<std::uint32_t>(arguments.chunk_begin[meaning.chunk + 1] - begin);
    const MappedBuffers buffers = is_mapped ? arguments.mapped[meaning.rank] : own_buffers;
    const std::size_t out_origin = is_scattered ? arguments.chunk_begin[meaning.rank] : 0;
    operand.address =
        meaning.buffer == Buffer::in ? reinterpret_cast<std::uint64_t>(buffers.in) + begin * element
        : meaning.buffer == Buffer::out
            ? reinterpret_cast<std::uint64_t>(buffers.out) + (begin - out_origin) * element
            : reinterpret_cast<std::uint64_t>(launch.inbox[meaning.holder]) + payload_at +
                  static_cast<std::uint64_t>(meaning.unit) * stride;
  }
  CUstream stream = channel_.stream_;
  std::optional<Queue::Place> place;
  if (arguments.is_enqueued) {
    stream = static_cast<CUstream>(arguments.stream);
    if (arguments.is_captured) {
      channel_.graphs_.add(stream);
    } else {
      unsigned long long stream_id = 0;
      check(channel_.driver_.cuStreamGetId_(stream, &stream_id), "cannot look at the stream");
      place.emplace(*channel_.queue_, stream, stream_id);
    }
  }
  launch.is_counted = channel_.is_captured_;
  if (arguments.is_enqueued) {
    channel_.known_run_ = kept_near(channel_.known_run_, launch.first_run);
    launch.known_run = channel_.known_run_;
    launch.hears_from_all = hears_from_all(arguments);
    if (launch.hears_from_all) channel_.known_run_ = launch.first_run - 1;
  }
  if (is_aside_) launch.linger = 0;
  if (launch.linger > 0) {
    launch.order = channel_.orders_;
    stream = channel_.resident_stream_;
  }
  // `threads` of each stage. In other kernels than the general one, threads go through all of them.
  int threads =
      std::min(arguments.threads, kMaxThreads / launch.stages / kWarp * kWarp) * launch.stages;
  LaunchHead* parameters = &launch;
  std::size_t length = is_packet ? sizeof(Launch) : sizeof(FlaggedLaunch);
  if (protocol == Protocol::flat || protocol == Protocol::pipeline) {
    const bool is_flat = protocol == Protocol::flat;
    is_flat ? fill_flat() : fill_pipeline(arguments.slice * element);
    parameters = is_flat ? static_cast<LaunchHead*>(&flat_launch_) : &pipeline_launch_;
    length = is_flat ? sizeof flat_launch_ : sizeof pipeline_launch_;
    const std::size_t units = (arguments.slice * element + kUnitBytes - 1) / kUnitBytes;
    threads = static_cast<int>(std::min<std::size_t>(
        (units + kWarp - 1) / kWarp * kWarp, is_flat ? kMaxFlatThreads : kMaxPipelineThreads));
    if (!is_flat && exchange_.is_relay) threads = kMaxPipelineThreads;
  }
  const Repeats::Kernel kernel{function, blocks, static_cast<unsigned>(threads)};
  if (launch.has_met && launch.linger == 0)
    repeats_.launch(kernel, stream, *parameters, length, &parameters->first_run,
                    (launch.passes + blocks - 1) / blocks);
  else
    repeats_.launch_once(kernel, stream, *parameters);
  if (is_aside_)
    check(channel_.driver_.cuMemcpyAsync_(reinterpret_cast<CUdeviceptr>(arguments.out), aside_at_,
                                          own, stream),
          "cannot copy the result");
  if (place) {
    place->end(channel_.last_);
    channel_.is_enqueued_ = true;
  }
  if (launch.linger > 0) channel_.resident_ = {this, launch.number, arguments.in, arguments.out};
}

bool Program::advance(int polls) {
  if (!channel_.leads()) return channel_.sharing_->await(launch_.number, polls);
  const std::atomic_ref done(channel_.doorbell_->done);
  for (int poll = 0;; ++poll) {
    // Acquire: pairs with the kernel's last store; what it wrote to pinned memory comes with it.
    if (done.load(std::memory_order_acquire) == launch_.number) break;
    // At the end of every look, too: few polls more may never come.
    if (is_ordered_ && (poll % 64 == 63 || poll >= polls) && channel_.has_left()) {
      // It left before it saw the order, or after it had served the call.
      is_ordered_ = false;
      channel_.forget();
      if (done.load(std::memory_order_acquire) == launch_.number) break;
      start(pending_);
    }
    if (poll >= polls) {
      if (++stalls_ % 4096 == 0) channel_.check_stream();
      return false;
    }
    relax();
  }
  channel_.check_result();
  if (is_aside_) {
    const Current current(channel_.context_);
    check(channel_.driver_.cuStreamSynchronize_(channel_.stream_), "cannot copy the result");
  }
  if (channel_.sharing_) channel_.sharing_->end(launch_.number);
  return true;
}

int Program::blocked_on() const {
  if (!channel_.leads()) return channel_.leader_of(channel_.device_of(channel_.rank_));
  return channel_.any_peer(++looks_);
}

}  // namespace trib::cuda

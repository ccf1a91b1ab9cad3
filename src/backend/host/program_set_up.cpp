// SPDX-License-Identifier: BSD-3-Clause
// From a lowered schedule to instructions, once; and from these, for a call of a single run, to
// steps that are bound to its size. program.cpp runs both.
#include <algorithm>
#include <string>
#include <utility>

#include "backend/host/program.hpp"

namespace trib::host {
namespace {

/// Scratch that a run writes, if it is no more than so much, is taken back as soon as the run is
/// over: so much where few ranks read it, and where many do.
///
/// To write a line that a peer has read takes a message to the peer and back, and the peer waits
/// for what is written. So a rank asks for the lines of its next run's window when it is through
/// with this run's, rather than when it has something to write there; its peers have read them some
/// runs ago. `trib bench --mpi intel` on 2 and 16 cores of Intel Xeons, 2026-11-26, 2, 4 and 8
/// ranks: reduce_scatter_block of 4 KiB 0.68, 0.68 and 0.8 of the time, Reduce of 4 KiB 0.80, 0.80
/// and 0.9. Where many read: allreduce over 16 ranks, 1 and 2 KiB 0.75 and 0.87, but 8 KiB 1.1. Not
/// lines with flags, which peers look at before they are written; nor where copies into scratch go
/// past the caches.
constexpr int kFewReaders = 3;
constexpr std::size_t kTakenBackFromFew = 16 << 10, kTakenBackFromMany = 2 << 10;

/// What goes through cells: chunks of up to so many, where one rank reads them or several; and in
/// all so many that a rank waits for. Readers that fetch lines while they are being written delay
/// that. 4 ranks on an Intel Xeon, one_shot, allreduce: 256 B take 0.95 of the time, 512 B 1.6; 16
/// ranks, two_shot, 4 KiB: 1.5; docs/results-2-ranks.md has more.
struct CellLimits {
  int of_chunk, awaited;
};
/// Of one reader, scratch that was taken back is quicker from 128 B on: reduce_scatter_block of 1
/// and 2 KiB over 8 ranks 0.8 and 0.7 of the time, of 2 KiB over 4 ranks 0.8 (16 cores of a Xeon,
/// 2026-11-26).
constexpr CellLimits kOfOneReader{2, 42}, kOfReaders{5, 42};
/// Where a value goes from rank to rank so many times, to several in the end, all of these are
/// quicker by cells: allreduce by trees, 9 to 32 ranks, 512 to 896 B 0.74 to 0.93 of the time, 1
/// KiB 1.1.
constexpr CellLimits kOfManyHops{kMostCellsOfChunk, 100};
constexpr int kManyHops = 3;
static_assert(std::max(kOfOneReader.of_chunk, kOfReaders.of_chunk) <= kMostCellsOfChunk);

/// Payload, of two ranks and one chunk, that a rank asks for each time it has found that the flag
/// is not there yet.
///
/// As long as nothing has come that costs nothing: the lines are in its cache, old. When the peer
/// has written them they are not, and they come while the flag's line does. Otherwise it depends on
/// what the processor predicts of the loop that waits, and so on where the code happens to lie,
/// whether both are fetched at once or one after the other. `trib bench -n 2 --mpi intel`, us,
/// without and with, a Xeon of 16 cores, 2026-11-29: Reduce of 64, 128, 256 and 512 B 0.51, 0.50,
/// 0.53, 0.57 and 0.45, 0.43, 0.43, 0.45; allreduce 0.51, 0.50, 0.53, 0.59 and 0.46, 0.48, 0.51,
/// 0.59. Of more the writer loses lines that it has not filled yet (AMD Zen 4, allreduce of 1 KiB:
/// 0.51, and 0.57 to 1.06), and so it does where several read (4 to 16 ranks: up to 1.8 times as
/// long).
///
/// A peer that is late loses those that it has taken back (kFewReaders), and so calls of ranks that
/// both wait take longer if they come at different times. On such a Xeon, allreduces of 64, 128,
/// 256 and 512 B after random times of up to 3 us took 0.38, 0.36, 0.40 and 0.44 us beyond the
/// later rank's, and 0.39, 0.42, 0.48 and 0.60 with this. So where lines are taken back, only ranks
/// ask that write no scratch themselves: roots of Reduces, whose peers mostly are ahead.
constexpr std::size_t kMostAskedForEarly = 512;

/// A number that an instruction has room for.
template <class To>
To narrow(std::int64_t value) {
  if (!std::in_range<To>(value))
    throw Error(Code::internal,
                "a schedule's " + std::to_string(value) + " is too much for an instruction");
  return static_cast<To>(value);
}

}  // namespace

Program::Program(Channel& channel, const Schedule& schedule)
    : channel_(channel),
      rank_(channel.rank_),
      chunks_(schedule.chunks),
      stages_(schedule.stages),
      flags_(schedule.flags),
      units_(schedule.units),
      most_waits_(schedule.waits),
      readers_of_slot_(schedule.readers_of_slot),
      hops_(schedule.hops),
      readers_(*channel.reader_lists_.insert(schedule.readers).first),
      attached_readers_(schedule.attached_readers),
      endangers_input_(schedule.endangers_input),
      returns_(schedule.returns),
      stays_(schedule.stays) {
  stage_end_.assign(static_cast<std::size_t>(stages_), 0);
  waits_end_ = stage_end_;
  std::size_t most_from = 1, most_to = 1;
  std::vector<int> entry(static_cast<std::size_t>(channel.size_), -1);
  for (const Step& step : schedule.steps) {
    Instruction instruction{step.verb, 0, 0, 0, 0, 0, 0};
    const auto count = [](std::size_t value) {
      return narrow<std::uint16_t>(static_cast<std::int64_t>(value));
    };
    if (step.verb == Verb::signal || step.verb == Verb::wait) {
      const int owner = step.verb == Verb::signal ? rank_ : step.peers[0];
      const Slot& slot = schedule.slots[owner][step.slot];
      instruction.peer = narrow<std::uint16_t>(owner);
      instruction.slot = narrow<std::uint16_t>(step.slot);
      instruction.span = narrow<std::uint16_t>(slot.span);
      if (step.verb == Verb::wait) {
        if (slot.span == 0) entry[owner] = step.slot;
        instruction.first = count(waits_.size());
        waits_.push_back(line(owner, step.slot));
        awaited_.push_back(slot);
      }
    } else {
      instruction.span = narrow<std::uint16_t>(step.to[0].span);
      instruction.to_count = count(step.to.size());
      instruction.from_count = count(step.from.size());
      instruction.first = narrow<std::uint32_t>(static_cast<std::int64_t>(operands_.size()));
      most_to = std::max(most_to, step.to.size());
      most_from = std::max(most_from, step.from.size());
      for (const auto* list : {&step.to, &step.from})
        for (const Location& at : *list) {
          const bool is_foreign = at.rank != rank_ && at.buffer != Buffer::scratch;
          Operand operand{at.buffer,
                          is_foreign && !schedule.is_mapped,
                          is_foreign && schedule.is_mapped,
                          narrow<std::uint16_t>(at.rank),
                          narrow<std::uint16_t>(at.chunk),
                          0,
                          0,
                          0,
                          0};
          if (at.buffer == Buffer::scratch) {
            const Slot& slot = schedule.slots[at.rank][at.slot];
            operand.slot = narrow<std::uint16_t>(at.slot);
            operand.slot_span = narrow<std::uint16_t>(slot.span);
            operand.slot_first = narrow<std::uint16_t>(at.chunk - slot.chunk);
            operand.offset = narrow<std::uint32_t>(slot.offset + operand.slot_first);
          } else if (operand.is_remote) {
            operand.slot = narrow<std::uint16_t>(entry[at.rank]);
            is_attached_ = true;
          }
          operands_.push_back(operand);
        }
    }
    instructions_.push_back(instruction);
    stage_end_[static_cast<std::size_t>(step.stage)] = static_cast<int>(instructions_.size());
    waits_end_[static_cast<std::size_t>(step.stage)] = static_cast<int>(waits_.size());
  }
  for (auto* const ends : {&stage_end_, &waits_end_})
    for (std::size_t stage = 1; stage < ends->size(); ++stage)
      (*ends)[stage] = std::max((*ends)[stage], (*ends)[stage - 1]);
  to_.resize(most_to);
  from_.resize(most_from);
  if (is_attached_) bounce_.resize(most_from * kBounceBytes);
}

/// What follows from the arguments, whatever the buffers.
void Program::set(const Arguments& arguments) {
  arguments_ = arguments;
  kernel_ = reduce_kernel(arguments.op, arguments.dtype);
  element_ = bytes(arguments.dtype);
  stride_ = round_up(arguments.slice * element_, kCacheLine);
  inline_stride_ = round_up(arguments.slice * element_, 16);
  scratch_stride_ =
      static_cast<std::ptrdiff_t>(arguments.is_large ? kLargeBytes : channel_.small_stride_);
  is_scattered_ = is_scatter(static_cast<Collective>(arguments.signature.collective));
  const std::size_t length =
      arguments.is_contiguous ? arguments.chunk_begin[chunks_] : arguments.longest;
  const std::size_t pass =
      arguments.is_contiguous ? arguments.slice * arguments.chunks : arguments.slice;
  runs_ = length <= pass ? 1 : static_cast<long>((length + pass - 1) / pass);
  run_ = 0;
  window_ = 0;
  pass_bytes_ = round_up(static_cast<std::size_t>(units_) * stride_, kPage);
  // What returns lies where whoever writes it has just read, and so does what stays. Allreduce over
  // 2 ranks of an Intel Xeon (Granite Rapids), us with turns and without: 64 KiB 6.5 and 5.4, 256
  // KiB 23.1 and 20.5.
  turns_ = 1;
  if (pass_bytes_ > 0 && !returns_ && !stays_)
    turns_ = std::max(channel_.turning_bytes(arguments.is_large, runs_) / pass_bytes_, turns_);
}

/// Steps with all that need not be worked out anew in each call. Most of a small call's time would
/// go into that.
std::unique_ptr<trib::Binding> Program::bind(const Arguments& arguments) {
  set(arguments);
  const bool is_mapped = std::any_of(operands_.begin(), operands_.end(),
                                     [](const Operand& operand) { return operand.is_mapped; });
  const std::size_t unit_cells = runs_ == 1 ? cells_of_unit() : 0;
  const bool has_scratch = !arguments.is_large || channel_.has_data() || unit_cells > 0;
  if (runs_ != 1 || !has_scratch || is_attached_ || is_mapped || !attached_readers_.empty())
    return nullptr;
  auto bound = std::make_unique<Bound>();
  bound->kernel = kernel_;
  bound->unit_cells = unit_cells;
  if (unit_cells > 0) {
    bound->heads.assign(waits_.size(), nullptr);
    taken_.resize(std::max(taken_.size(), (from_.size() + 1) * kCellsRoom));
  }
  bound->is_streamed = first_of(arguments.store) == Store::stream;
  for (const Instruction& instruction : instructions_) {
    BoundStep step{};
    step.verb = instruction.verb;
    step.store = Store::shared;
    step.peer = instruction.peer;
    if (instruction.verb == Verb::wait) {
      step.number = static_cast<std::uint16_t>(instruction.first);
      step.line = waits_[step.number];
      bind_wait(*bound, step, awaited_[step.number]);
      continue;
    }
    if (instruction.verb == Verb::signal) {
      step.line = line(instruction.peer, instruction.slot);
      bound->steps.push_back(step);
      continue;
    }
    step.to_count = instruction.to_count;
    step.from_count = instruction.from_count;
    const Operand* const operands = &operands_[instruction.first];
    const int joined = is_joined() ? instruction.span : 1;
    if (operands->buffer == Buffer::out) step.store = arguments.store;
    for (int index = 0; index < instruction.span; index += joined) {
      const std::size_t count = slice_count(operands->chunk + index, joined);
      if (count == 0) continue;
      step.count = instruction.verb == Verb::copy ? count * element_ : count;
      step.first = narrow<std::uint32_t>(static_cast<std::int64_t>(bound->places.size()));
      step.cell_count = 0;
      for (int i = 0; i < instruction.to_count + instruction.from_count; ++i) {
        const Operand& operand = operands[i];
        if (unit_cells == 0 || operand.buffer != Buffer::scratch || is_inline(operand.slot_span)) {
          bound->places.push_back(place(operand, index));
          if (i < instruction.to_count && operand.rank == rank_ &&
              bound->places.back().base == Place::scratch)
            bound->own.push_back({bound->places.back(), count * element_});
          continue;
        }
        const std::size_t unit = operand.offset + static_cast<std::size_t>(index);
        bound->places.push_back(
            shared(Place::cell, channel_.peers_[operand.rank].cells + unit * unit_cells));
        ++step.cell_count;
      }
      bound->steps.push_back(step);
    }
  }
  std::size_t own_bytes = 0;
  for (const Range& range : bound->own) own_bytes += range.bytes;
  if (!channel_.takes_back_ ||
      own_bytes > (readers_of_slot_ <= kFewReaders ? kTakenBackFromFew : kTakenBackFromMany))
    bound->own.clear();
  bound->element = element_;
  bound->pass_bytes = pass_bytes_;
  bound->turns = turns_;
  bound->scratch_stride = scratch_stride_;
  return bound;
}

/// Cells that a unit takes; zero: nothing goes through cells. Equal on all ranks. What returns or
/// stays is written more than once, for which cells have one tag too few. Where a rank waits for no
/// more than one, who has no other reader, scratch that is taken back is quicker: 2 ranks, 256 B to
/// 3 KiB 0.66 to 0.9 of the time.
std::size_t Program::cells_of_unit() const {
  const std::size_t bytes = arguments_.longest * element_;
  const bool is_of_pair = readers_of_slot_ == 1 && most_waits_ == 1;
  const CellLimits most = readers_of_slot_ == 1 ? kOfOneReader
                          : hops_ < kManyHops   ? kOfReaders
                                                : kOfManyHops;
  if (units_ == 0 || readers_of_slot_ == 0 || is_of_pair || returns_ || stays_ ||
      arguments_.is_contiguous || bytes > static_cast<std::size_t>(most.of_chunk) * kCellBytes)
    return 0;
  const int cells = cells_of(bytes);
  const auto all = static_cast<std::size_t>(cells * units_);
  return cells * most_waits_ <= most.awaited && all <= channel_.cells_
             ? static_cast<std::size_t>(cells)
             : 0;
}

/// Whether waits ask for payload: see kMostAskedForEarly.
bool Program::may_ask_early() const {
  const auto writes_scratch = [&](const Instruction& instruction) {
    if (instruction.verb == Verb::wait || instruction.verb == Verb::signal) return false;
    const auto to = operands_.begin() + instruction.first;
    return std::any_of(to, to + instruction.to_count, [&](const Operand& operand) {
      return operand.buffer == Buffer::scratch && operand.rank == rank_;
    });
  };
  return channel_.size_ == 2 &&
         (!channel_.takes_back_ ||
          std::none_of(instructions_.begin(), instructions_.end(), writes_scratch));
}

/// A wait for a slot that is in cells is one for each unit's. Where all are empty, there is the
/// line.
void Program::bind_wait(Bound& bound, const BoundStep& step, const Slot& slot) const {
  const std::size_t first = bound.steps.size();
  if (bound.unit_cells > 0 && slot.span > 0 && !is_inline(slot.span)) {
    for (int index = 0; index < slot.span; ++index) {
      const std::size_t count = slice_count(slot.chunk + index, 1);
      if (count == 0) continue;
      BoundStep each = step;
      each.first = static_cast<std::uint32_t>(slot.offset + index) *
                   static_cast<std::uint32_t>(bound.unit_cells);
      each.cell_count = static_cast<std::uint16_t>(cells_of(count * element_));
      bound.steps.push_back(each);
    }
  }
  if (bound.steps.size() > first) {
    bound.heads[step.number] = channel_.peers_[step.peer].cells + bound.steps[first].first;
    return;
  }
  BoundStep whole = step;
  whole.lines = 0;
  const std::size_t bytes = slot.span == 1 ? slice_count(slot.chunk, 1) * element_ : 0;
  if (bytes > 0 && !is_inline(slot.span) && bytes <= kMostAskedForEarly && may_ask_early()) {
    whole.first = narrow<std::uint32_t>(static_cast<std::int64_t>(bound.places.size()));
    whole.lines = static_cast<std::uint16_t>((bytes + kCacheLine - 1) / kCacheLine);
    bound.places.push_back(in_scratch(step.peer, static_cast<std::size_t>(slot.offset)));
  }
  bound.steps.push_back(whole);
}

}  // namespace trib::host

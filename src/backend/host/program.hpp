// SPDX-License-Identifier: BSD-3-Clause
// A lowered schedule as the host runs it: an array of small instructions, and one of operands that
// they refer to. Program::advance in program.cpp is the loop that everything comes down to; for
// calls of a single run, advance_bound, which goes through arrays made for that very size, with
// their places in shared memory looked up. program_set_up.cpp makes both, and `trib schedule
// --program` prints them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/host/channel.hpp"
#include "base/pages.hpp"

namespace trib::host {

/// Tests set it to a function that is called before every signal and wait, in meetings too, to
/// shake the order of events. Normally null.
inline void (*disturb)() = nullptr;
inline void shake() {
  if (disturb != nullptr) [[unlikely]]
    disturb();
}

/// A longer chunk does not go through cells.
inline constexpr int kMostCellsOfChunk = 16;

class Program final : public trib::Program, public Operation {
 public:
  Program(Channel& channel, const Schedule& schedule);

  std::size_t fit(bool is_large) const override { return channel_.fit(flags_, units_, is_large); }
  std::unique_ptr<trib::Binding> bind(const Arguments& arguments) override;
  Operation& launch(const Arguments& arguments) override;
  bool repeat() override;
  bool advance(int polls) override;
  bool advance_one_pass(int polls) override {
    is_brief_ = true;
    const bool is_done = advance(polls);
    is_brief_ = false;
    return is_done;
  }
  int blocked_on() const override { return blocked_on_; }
  std::string text() const override;
  std::string text(const trib::Binding& binding) const override;
  std::uint64_t position() const override {
    return (static_cast<std::uint64_t>(tick_) << 32) + static_cast<std::uint64_t>(next_) * 8 +
           static_cast<std::uint64_t>(stage_);
  }

 private:
  /// Bytes of a peer's memory that are read at a time: all sources of a reduction together should
  /// stay in the L2 cache.
  static constexpr std::size_t kBounceBytes = 64 << 10;
  /// Where a chunk is put together that goes through cells.
  static constexpr std::size_t kCellsRoom = round_up(kMostCellsOfChunk * kCellBytes, kCacheLine);

  /// Where a step's operand is. What the steps' ranks, chunks and slots do not fit into is refused
  /// when a schedule is loaded.
  struct Operand {
    Buffer buffer;
    bool is_remote : 1;  // `in` of a peer, read by cross-memory attach
    bool is_mapped : 1;  // `in` or `out` of a peer, in mapped memory
    std::uint16_t rank;
    std::uint16_t chunk;
    std::uint16_t slot;        // for a remote `in`, the entry flag that holds its address
    std::uint16_t slot_span;   // chunks in its slot
    std::uint16_t slot_first;  // units from the slot's start to this chunk
    std::uint32_t offset;      // units from the scratch's start to this chunk
  };
  static_assert(sizeof(Operand) == 16);
  struct Instruction {
    Verb verb;
    std::uint16_t span;                  // of a signal or wait: zero if there is no payload
    std::uint16_t to_count, from_count;  // copy, reduce
    std::uint16_t peer, slot;            // signal, wait
    std::uint32_t first;  // copy, reduce: into operands_, `to`, then `from`; wait: into waits_
  };
  static_assert(sizeof(Instruction) == 16);  // four to a cache line

  /// Where bytes are: so many behind a base. What lies in shared memory lies there once per window:
  /// the address is that of window 0, in scratch that of the first turn there.
  struct Place {
    enum Base : std::uint8_t { absolute, in, out, line, cell, scratch } base;
    static constexpr int kBases = scratch + 1;
    std::intptr_t offset;
  };
  static_assert(sizeof(Place) == 16);
  struct Range {
    Place place;
    std::size_t bytes;
  };
  /// A step of a single run.
  struct BoundStep {
    Verb verb;
    Store store;
    std::uint16_t cell_count = 0;  // wait: that are to come; zero: the line is. Others: operands in
                                   // cells
    union {
      std::uint16_t to_count;  // copy, reduce
      std::uint16_t lines;     // wait, not for cells: of payload, to be asked for early
    };
    std::uint16_t from_count;    // copy, reduce
    std::uint16_t peer, number;  // wait; its place in waits_
    std::uint32_t first = 0;     // copy, reduce: into places, `to`, then `from`; wait: the peer's
                                 // cell, or into places, where the payload is
    union {
      Line* line;         // signal, wait: window 0
      std::size_t count;  // reduce: elements, copy: bytes
    };
  };
  static_assert(sizeof(BoundStep) == 24);
  struct Bound final : Binding {
    std::vector<BoundStep> steps;
    std::vector<Place> places;
    ReduceKernel kernel = nullptr;
    bool is_streamed = false;
    std::size_t element = 0, pass_bytes = 0, turns = 1;
    std::ptrdiff_t scratch_stride = 0;
    std::size_t unit_cells = 0;      // of a chunk; zero: nothing is in cells
    std::vector<const Cell*> heads;  // of each wait: the first cell that it waits for, or null
    std::vector<Range> own;          // of this rank's scratch, what it writes: see take_back()
  };

  void set(const Arguments& arguments);
  void begin();
  void turn_to(std::uint64_t number);
  bool has_credit();
  void give_signal(Line& line, bool has_payload);
  bool is_signalled(Line* line, int peer, int number, int end, int polls,
                    const std::byte* payload = nullptr, int lines = 0);
  std::size_t cells_of_unit() const;
  void bind_wait(Bound& bound, const BoundStep& step, const Slot& slot) const;
  bool may_ask_early() const;
  bool are_filled(const BoundStep& step, int polls);
  void move_cells(const BoundStep& step);
  bool is_inline(int slot_span) const {
    return static_cast<std::size_t>(slot_span) * inline_stride_ <= kInlineBytes;
  }
  void take_signal(const Line& line, int peer, std::uint64_t run);
  bool advance_bound(int polls);
  void move(const Instruction& instruction);
  void copy(void* const* to, int to_count, const void* from, std::size_t bytes, Store store);
  void reduce(ReduceKernel kernel, void* const* to, int to_count, const void* const* from,
              int from_count, std::size_t count, Store store);
  void take_back();
  bool may_write(std::uint64_t number) const;
  void check_stayed(int peer);
  void complete();
  std::size_t slice_begin(int chunk) const;
  std::size_t slice_count(int chunk, int span) const;
  Place place(const Operand& operand, int index) const;
  static Place shared(Place::Base base, const void* address) {
    return {base, reinterpret_cast<std::intptr_t>(address)};
  }
  Place in_scratch(int rank, std::size_t unit) const {
    const Channel::Peer& peer = channel_.peers_[static_cast<std::size_t>(rank)];
    return shared(Place::scratch, (arguments_.is_large ? peer.large : peer.small) + unit * stride_);
  }
  std::byte* address(const Place& place) const {
    return reinterpret_cast<std::byte*>(bases_[place.base] + place.offset);
  }
  Line* line(int rank, int slot) const {  // window 0
    return channel_.peers_[static_cast<std::size_t>(rank)].lines + slot;
  }
  std::string text_of(const Operand& operand, int span) const;
  std::string text_of(const Bound& bound, const Place& place, std::size_t bytes) const;
  std::byte* address(const Operand& operand, int index) const {
    return address(place(operand, index));
  }
  bool is_joined() const;
  bool drain();
  void offer_input();

  Channel& channel_;
  const int rank_;
  const int chunks_, stages_, flags_, units_;
  const int most_waits_, readers_of_slot_, hops_;  // Schedule::waits, readers_of_slot, hops
  const std::vector<int>& readers_;
  const std::vector<int> attached_readers_;
  std::vector<Instruction> instructions_;
  std::vector<Operand> operands_;
  std::vector<int> stage_end_;  // index behind the last instruction of each stage
  std::vector<Line*> waits_;    // the lines of all waits, in order: window 0
  std::vector<Slot> awaited_;   // their slots
  std::vector<int> waits_end_;  // index behind the last wait of each stage
  bool is_attached_ = false;
  const bool endangers_input_;
  const bool returns_, stays_;  // Schedule::returns, Schedule::stays

  // The operation under way.
  Arguments arguments_;
  const Bound* bound_ = nullptr;
  std::uint64_t hash_ = 0;                   // of the signature
  std::intptr_t bases_[Place::kBases] = {};  // by Place::Base, of the current run
  std::ptrdiff_t scratch_stride_ = 0;        // from window to window
  ReduceKernel kernel_ = nullptr;
  std::size_t element_ = 0;        // bytes
  std::size_t stride_ = 0;         // bytes of a unit in small or large scratch
  std::size_t inline_stride_ = 0;  // bytes of a unit in a line
  std::size_t pass_bytes_ = 0;     // of scratch that a run needs
  std::size_t turns_ = 1;          // such places in a window, used in turn
  bool is_scattered_ = false;      // `out` starts with the rank's chunk
  std::uint64_t first_run_ = 0;    // number of the operation's first run
  std::uint64_t tag_ = 0;          // of cells, in an operation of one run
  long runs_ = 0;
  long tick_ = 0;
  int stage_ = 0;
  int next_ = 0;  // instruction
  bool is_credited_ = false;
  bool is_brief_ = false;  // see advance_one_pass()
  long run_ = 0;           // of the current stage: counts from 0
  int window_ = 0;         // of the current run
  int misses_ = 0;         // waits for cells that came to nothing, in this call
  int blocked_on_ = -1;

  // Scratch for move(): no allocation on the path of a call.
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<std::byte> bounce_;
  std::vector<std::byte> taken_;       // from cells, and what is to go there
  std::vector<std::byte> input_copy_;  // grows to the largest `in` that had to be copied
};

/// Elements before the current run's part of a chunk.
inline std::size_t Program::slice_begin(int chunk) const {
  const std::size_t* const begin = arguments_.chunk_begin;
  const auto run = static_cast<std::size_t>(run_), number = static_cast<std::size_t>(chunk);
  if (!arguments_.is_contiguous)
    return std::min(begin[chunk] + run * arguments_.slice, begin[chunk + 1]);
  return std::min((run * arguments_.chunks + number) * arguments_.slice, begin[chunks_]);
}

/// Elements of the current run's part of `span` chunks, where these lie side by side, or of one.
inline std::size_t Program::slice_count(int chunk, int span) const {
  const std::size_t end = arguments_.chunk_begin[arguments_.is_contiguous ? chunks_ : chunk + 1];
  return std::min(static_cast<std::size_t>(span) * arguments_.slice, end - slice_begin(chunk));
}

/// Where the current run's part of an operand's `index`-th chunk is.
inline Program::Place Program::place(const Operand& operand, int index) const {
  const int chunk = operand.chunk + index;
  if (operand.buffer != Buffer::scratch) {
    const bool is_out = operand.buffer == Buffer::out;
    const std::size_t origin = is_out && is_scattered_ ? arguments_.chunk_begin[operand.rank] : 0;
    const auto offset = static_cast<std::intptr_t>((slice_begin(chunk) - origin) * element_);
    if (!operand.is_mapped) return {is_out ? Place::out : Place::in, offset};
    const MappedBuffers& theirs = arguments_.mapped[operand.rank];
    return {Place::absolute,
            reinterpret_cast<std::intptr_t>(is_out ? theirs.out : theirs.in) + offset};
  }
  const auto unit = static_cast<std::size_t>(index);
  if (is_inline(operand.slot_span))
    return shared(Place::line, line(operand.rank, operand.slot)->payload +
                                   (operand.slot_first + unit) * inline_stride_);
  return in_scratch(operand.rank, operand.offset + unit);
}

/// Whether chunks that lie side by side in memory do so in scratch.
inline bool Program::is_joined() const {
  return arguments_.is_contiguous && stride_ == arguments_.slice * element_;
}

}  // namespace trib::host

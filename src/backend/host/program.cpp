// SPDX-License-Identifier: BSD-3-Clause
// The loop over steps on the host. backend/reduce.hpp has the loops over elements.
#include "backend/host/program.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "backend/host/attach.hpp"

namespace trib::host {
namespace {

/// Bytes of a peer's memory that are read at a time: all sources of a reduction together should
/// stay in the L2 cache.
constexpr std::size_t kBounceBytes = 64 << 10;

/// Lines that a rank asks for ahead of its turn to wait for them: peers write theirs at about the
/// same time, and to fetch one line takes about as long as to fetch several. Reduce over 64 ranks
/// on an Intel Xeon of 64 cores, 2026-11-21, `trib bench reduce -n 64 --mpi intel`: 1.79 us rather
/// than 2.00 for 64 B, 5.27 rather than 5.54 for 4 KiB.
constexpr int kLookAhead = 8;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

Program::Program(Channel& channel, const Schedule& schedule)
    : channel_(channel),
      rank_(channel.rank_),
      chunks_(schedule.chunks),
      stages_(schedule.stages),
      flags_(schedule.flags),
      units_(schedule.units),
      readers_(*channel.reader_lists_.insert(schedule.readers).first),
      attached_readers_(schedule.attached_readers),
      endangers_input_(schedule.endangers_input) {
  stage_end_.assign(static_cast<std::size_t>(stages_), 0);
  waits_end_ = stage_end_;
  std::size_t most_from = 1, most_to = 1;
  std::vector<int> entry(static_cast<std::size_t>(channel.size_), -1);
  for (const Step& step : schedule.steps) {
    Instruction instruction{step.verb, step.stage, 1, 0, 0, static_cast<int>(operands_.size()),
                            -1,        nullptr,    -1};
    if (step.verb == Verb::signal || step.verb == Verb::wait) {
      const int owner = step.verb == Verb::signal ? rank_ : step.peers[0];
      instruction.peer = owner;
      instruction.line = channel.peers_[owner].lines + step.slot;
      instruction.span = schedule.slots[owner][step.slot].span;
      if (step.verb == Verb::wait) {
        if (instruction.span == 0) entry[owner] = step.slot;
        instruction.number = static_cast<int>(waits_.size());
        waits_.push_back(instruction.line);
      }
    } else {
      instruction.span = step.to[0].span;
      instruction.to_count = static_cast<int>(step.to.size());
      instruction.from_count = static_cast<int>(step.from.size());
      most_to = std::max(most_to, step.to.size());
      most_from = std::max(most_from, step.from.size());
      for (const auto* list : {&step.to, &step.from})
        for (const Location& at : *list) {
          const bool is_foreign = at.rank != rank_ && at.buffer != Buffer::scratch;
          Operand operand{at.buffer, is_foreign && !schedule.is_mapped,
                          is_foreign && schedule.is_mapped, at.rank, at.chunk, 0, 0, 0, nullptr};
          if (at.buffer == Buffer::scratch) {
            const Slot& slot = schedule.slots[at.rank][at.slot];
            operand.slot_span = slot.span;
            operand.slot_first = at.chunk - slot.chunk;
            operand.offset = slot.offset + operand.slot_first;
            operand.line = channel.peers_[at.rank].lines + at.slot;
          } else if (operand.is_remote) {
            operand.line = channel.peers_[at.rank].lines + entry[at.rank];
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

Operation& Program::launch(const Arguments& arguments) {
  arguments_ = arguments;
  arguments_.signature = channel_.current_;
  kernel_ = reduce_kernel(arguments.op, arguments.dtype);
  element_ = bytes(arguments.dtype);
  stride_ = round_up(arguments.slice * element_, kCacheLine);
  inline_stride_ = round_up(arguments.slice * element_, 16);
  is_scattered_ = is_scatter(static_cast<Collective>(arguments.signature.collective));
  const std::size_t length =
      arguments.is_contiguous ? arguments.chunk_begin[chunks_] : arguments.longest;
  const std::size_t pass =
      arguments.is_contiguous ? arguments.slice * arguments.chunks : arguments.slice;
  runs_ = length <= pass ? 1 : static_cast<long>((length + pass - 1) / pass);
  first_run_ = channel_.last_run_ + 1;
  channel_.last_run_ += static_cast<std::uint64_t>(runs_);
  tick_ = 0;
  stage_ = 0;
  next_ = 0;
  is_credited_ = false;
  if (endangers_input_) protect_input();
  return *this;
}

/// Where `out` lies over an `in` that peers may still be reading when we write: they get a copy to
/// read. Whether a rank reduces in place is its own affair (MPI asks for agreement in some
/// collectives only), so it is settled here.
void Program::protect_input() {
  const std::size_t length = arguments_.chunk_begin[chunks_] * element_;
  const auto* const in = static_cast<const std::byte*>(arguments_.in);
  const auto* const out = static_cast<const std::byte*>(arguments_.out);
  if (out == nullptr || in >= out + length || out >= in + length) return;
  if (input_copy_.size() < length) input_copy_.resize(length);
  void* const copy = input_copy_.data();
  copy_bytes(&copy, 1, in, length, Store::cached);
  arguments_.in = copy;
}

bool Program::advance(int polls) {
  while (tick_ < runs_ + stages_ - 1) {
    run_ = tick_ - stage_;
    if (run_ >= 0 && run_ < runs_) {
      const std::uint64_t number = first_run_ + static_cast<std::uint64_t>(run_);
      window_ = static_cast<int>(number % kWindows);
      if (stage_ == 0 && !is_credited_) {
        for (int poll = 0; !has_credit(); relax())
          if (++poll > polls) return false;
        is_credited_ = true;
      }
      const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
      for (const int end = stage_end_[static_cast<std::size_t>(stage_)]; next_ < end; ++next_) {
        const Instruction& instruction = instructions_[static_cast<std::size_t>(next_)];
        switch (instruction.verb) {
          case Verb::signal: {
            if (disturb != nullptr) [[unlikely]]
              disturb();
            Line& line = instruction.line[line_offset];
            line.signature = arguments_.signature.hash;
            if (instruction.span == 0) {
              std::memcpy(line.payload, &arguments_.in, sizeof arguments_.in);
              store_fence();  // peers read `in` itself, which the program may have written by
                              // streamed stores
            }
            // Release: pairs with the acquire in is_signalled(); the slot's payload comes with it.
            line.run.store(number, std::memory_order_release);
            break;
          }
          case Verb::wait:
            if (disturb != nullptr) [[unlikely]]
              disturb();
            if (!is_signalled(instruction, polls)) return false;
            break;
          default:
            move(instruction);
        }
      }
      // Release: pairs with the acquire in has_credit() and drain(); our reads of the peers' slots
      // are over.
      if (stage_ == stages_ - 1)
        channel_.peers_[rank_].control->completed.run.store(number, std::memory_order_release);
    }
    if (++stage_ == stages_) {
      stage_ = 0;
      ++tick_;
      next_ = 0;
      is_credited_ = false;
    } else {
      next_ = stage_end_[static_cast<std::size_t>(stage_) - 1];
    }
  }
  for (int poll = 0; !drain(); relax())
    if (++poll > polls) return false;
  if (arguments_.store == Store::stream) store_fence();
  blocked_on_ = -1;
  return true;
}

/// Whether all who read our slots in the window's last run have completed that run.
bool Program::has_credit() {
  const std::uint64_t number = first_run_ + static_cast<std::uint64_t>(run_);
  const std::vector<int>*& readers = channel_.window_readers_[window_];
  if (readers != nullptr) {
    for (const int rank : *readers) {
      Channel::Peer& peer = channel_.peers_[static_cast<std::size_t>(rank)];
      if (peer.completed + kWindows >= number) continue;
      peer.completed =
          std::max(peer.completed, peer.control->completed.run.load(std::memory_order_acquire));
      if (peer.completed + kWindows >= number) continue;
      blocked_on_ = rank;
      return false;
    }
  }
  readers = &readers_;
  return true;
}

/// Whether all who read our `in` directly have done so: before that the caller may not have it
/// back.
bool Program::drain() {
  for (const int rank : attached_readers_) {
    Channel::Peer& peer = channel_.peers_[static_cast<std::size_t>(rank)];
    if (peer.completed >= channel_.last_run_) continue;
    peer.completed =
        std::max(peer.completed, peer.control->completed.run.load(std::memory_order_acquire));
    if (peer.completed >= channel_.last_run_) continue;
    blocked_on_ = rank;
    return false;
  }
  return true;
}

bool Program::is_signalled(const Instruction& wait, int polls) {
  const std::uint64_t number = first_run_ + static_cast<std::uint64_t>(run_);
  const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
  Line& line = wait.line[line_offset];
  const int end = std::min(waits_end_[static_cast<std::size_t>(stage_)], wait.number + kLookAhead);
  const auto look_at = [&](int number_of_wait) {
    __builtin_prefetch(&waits_[static_cast<std::size_t>(number_of_wait)][line_offset]);
  };
  if (end == wait.number + kLookAhead) look_at(end - 1);
  // Acquire: pairs with the release in advance().
  for (int poll = 0; line.run.load(std::memory_order_acquire) != number; relax()) {
    for (int next = wait.number + 1; next < end; ++next) look_at(next);
    if (++poll <= polls) continue;
    blocked_on_ = wait.peer;
    return false;
  }
  if (line.signature != arguments_.signature.hash) channel_.disagree(wait.peer);
  // In program order a peer that is in run n has finished every run of earlier calls, and with s
  // stages run n - s.
  Channel::Peer& peer = channel_.peers_[static_cast<std::size_t>(wait.peer)];
  peer.completed =
      std::max({peer.completed, first_run_ - 1, number - static_cast<std::uint64_t>(stages_)});
  return true;
}

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
inline std::byte* Program::address(const Operand& operand, int index) const {
  const int chunk = operand.chunk + index;
  if (operand.buffer != Buffer::scratch) {
    const MappedBuffers theirs =
        operand.is_mapped ? arguments_.mapped[operand.rank]
                          : MappedBuffers{const_cast<void*>(arguments_.in),  // NOLINT: only read
                                          arguments_.out};
    const bool is_out = operand.buffer == Buffer::out;
    const std::size_t origin = is_out && is_scattered_ ? arguments_.chunk_begin[operand.rank] : 0;
    return static_cast<std::byte*>(is_out ? theirs.out : theirs.in) +
           (slice_begin(chunk) - origin) * element_;
  }
  if (static_cast<std::size_t>(operand.slot_span) * inline_stride_ <= kInlineBytes)
    return operand.line[static_cast<std::ptrdiff_t>(window_) * channel_.flags_].payload +
           static_cast<std::size_t>(operand.slot_first + index) * inline_stride_;
  const Channel::Peer& peer = channel_.peers_[static_cast<std::size_t>(operand.rank)];
  std::byte* const base =
      arguments_.is_large ? peer.large + static_cast<std::size_t>(window_) * kLargeBytes
                          : peer.small + static_cast<std::size_t>(window_) * channel_.small_bytes_;
  return base + static_cast<std::size_t>(operand.offset + index) * stride_;
}

/// Performs a copy or reduce step on the current run's slice.
void Program::move(const Instruction& instruction) {
  const Operand* const to = &operands_[static_cast<std::size_t>(instruction.first)];
  const Operand* const from = to + instruction.to_count;
  // Chunks that lie side by side in all operands move at once.
  const bool is_joined = arguments_.is_contiguous && stride_ == arguments_.slice * element_;
  const int joined = is_joined ? instruction.span : 1;
  for (int index = 0; index < instruction.span; index += joined) {
    const int chunk = to->chunk + index;
    const std::size_t count = slice_count(chunk, joined);
    if (count == 0) continue;
    const Store store = to->buffer == Buffer::out ? arguments_.store : Store::shared;
    bool is_remote = false;
    for (int i = 0; i < instruction.to_count; ++i)
      to_[static_cast<std::size_t>(i)] = address(to[i], index);
    for (int i = 0; i < instruction.from_count; ++i) {
      is_remote = is_remote || from[i].is_remote;
      from_[static_cast<std::size_t>(i)] = address(from[i], index);
    }
    if (!is_remote) {
      if (instruction.verb == Verb::reduce)
        kernel_(to_.data(), instruction.to_count, from_.data(), instruction.from_count, count,
                store);
      else
        copy_bytes(to_.data(), instruction.to_count, from_[0], count * element_, store);
      continue;
    }
    // Pieces small enough that what was read stays in the cache until it is reduced.
    const std::size_t piece = std::max<std::size_t>(kBounceBytes / element_, 1);
    for (std::size_t at = 0; at < count; at += piece) {
      const std::size_t part = std::min(piece, count - at);
      for (int i = 0; i < instruction.from_count; ++i) {
        const std::size_t offset = (slice_begin(chunk) + at) * element_;
        if (from[i].is_remote) {
          const std::byte* base = nullptr;
          std::memcpy(&base,
                      from[i].line[static_cast<std::ptrdiff_t>(window_) * channel_.flags_].payload,
                      sizeof base);
          std::byte* const bounce = bounce_.data() + static_cast<std::size_t>(i) * kBounceBytes;
          if (!read_process(channel_.peers_[static_cast<std::size_t>(from[i].rank)].pid,
                            base + offset, bounce, part * element_))
            throw Error(Code::system, "cannot read the memory of rank " +
                                          std::to_string(from[i].rank) + ": " +
                                          std::strerror(errno));
          // A peer that failed has left the call: its caller may have changed what we just read.
          if (channel_.peers_[static_cast<std::size_t>(from[i].rank)].control->state.failed.load(
                  std::memory_order_acquire) != 0)
            channel_.diagnose(from[i].rank, position());
          from_[static_cast<std::size_t>(i)] = bounce;
        } else {
          from_[static_cast<std::size_t>(i)] = address(from[i], index) + at * element_;
        }
      }
      for (int i = 0; i < instruction.to_count; ++i)
        to_[static_cast<std::size_t>(i)] = address(to[i], index) + at * element_;
      if (instruction.verb == Verb::reduce)
        kernel_(to_.data(), instruction.to_count, from_.data(), instruction.from_count, part,
                store);
      else
        copy_bytes(to_.data(), instruction.to_count, from_[0], part * element_, store);
    }
  }
}

}  // namespace trib::host

// SPDX-License-Identifier: BSD-3-Clause
// The loop over steps on the host. backend/reduce.hpp has the loops over elements.
#include "backend/host/program.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "backend/host/attach.hpp"
#include "base/locks.hpp"

namespace trib::host {
namespace {

/// Lines that a rank asks for ahead of its turn to wait for them: peers write theirs at about the
/// same time, and to fetch one line takes about as long as to fetch several. Reduce over 64 ranks
/// on an Intel Xeon of 64 cores, 2026-11-21, `trib bench reduce -n 64 --mpi intel`: 1.79 us rather
/// than 2.00 for 64 B, 5.27 rather than 5.54 for 4 KiB.
constexpr int kLookAhead = 8;

/// Bytes, and chunks that return to the one peer there is and are folded a piece at a time: see
/// write_to_pair(). Of 12 KiB and more that takes 1.05 to 1.1 of the time (that Xeon of 2 cores).
constexpr std::size_t kPieceToCopy = 1 << 10, kPieceToFold = 2 << 10, kMostReturned = 8 << 10;

/// Waits for cells that came to nothing, between two looks whether the peer is in another call.
constexpr int kMissesPerLook = 4;

/// Writes `bytes` to cells. Release: pairs with the acquire in are_filled(); what a cell holds
/// comes with its tag, and so does all that this rank has written before.
inline void fill(Cell* cells, const void* from, std::size_t bytes, std::uint64_t tag) {
  const auto* source = static_cast<const std::byte*>(from);
  for (; bytes > kCellBytes; bytes -= kCellBytes, source += kCellBytes, ++cells) {
    std::memcpy(cells->payload, source, kCellBytes);
    cells->tag.store(tag, std::memory_order_release);
  }
  std::memcpy(cells->payload, source, bytes);
  cells->tag.store(tag, std::memory_order_release);
}

/// Whether a system call reads this rank's `bytes` at `from`: their ends, as no buffer is known
/// that is partly so.
bool is_readable_by_peers(const std::byte* from, std::size_t bytes) {
  const int before = errno;
  std::byte seen;
  const bool is_readable = bytes == 0 || (read_process(::getpid(), from, &seen, 1) &&
                                          read_process(::getpid(), from + bytes - 1, &seen, 1));
  errno = before;
  return is_readable;
}

/// The inverse, of cells that have been waited for.
inline void take(void* to, const Cell* cells, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  for (; bytes > kCellBytes; bytes -= kCellBytes, target += kCellBytes, ++cells)
    std::memcpy(target, cells->payload, kCellBytes);
  std::memcpy(target, cells->payload, bytes);
}

/// Of a clock that takes little to read: 2 to 4 in a nanosecond, or one.
inline std::uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

/// Asks for a line in order to write to it.
inline void fetch_to_write(const std::byte* line) {
#if defined(__x86_64__)
  // All that run 64-bit code take it, the oldest for nothing; compilers use it only if told to.
  asm volatile("prefetchw %0" : : "m"(*line));
#else
  __builtin_prefetch(line, 1);
#endif
}

/// Writes to lines that a single peer has read or written, and will read: those of a piece are
/// asked for while the ones before are written by `write(at, bytes)`. 2 ranks, Granite Rapids,
/// 2026-11-26: copies for a Reduce of 256 KiB 15.7 us instead of 17.6, 32 KiB 3.9 instead of 4.1;
/// folds into lines that return, allreduce of 8 KiB 1.34 instead of 1.61.
template <class Write>
void write_to_pair(const void* to, std::size_t bytes, std::size_t piece, const Write& write) {
  std::size_t asked = 0;
  for (std::size_t at = 0; at < bytes; at += piece) {
    for (const std::size_t end = std::min(at + 2 * piece, bytes); asked < end; asked += kCacheLine)
      fetch_to_write(static_cast<const std::byte*>(to) + asked);
    write(at, std::min(piece, bytes - at));
  }
}

}  // namespace

/// Chooses the current run's scratch.
inline void Program::turn_to(std::uint64_t number) {
  window_ = static_cast<int>(number % kWindows);
  bases_[Place::line] = static_cast<std::intptr_t>(sizeof(Line)) * channel_.flags_ * window_;
  bases_[Place::cell] = static_cast<std::intptr_t>(channel_.cell_stride_) * window_;
  bases_[Place::scratch] =
      scratch_stride_ * window_ +
      static_cast<std::intptr_t>(turns_ == 1 ? 0 : number / kWindows % turns_ * pass_bytes_);
}

Operation& Program::launch(const Arguments& arguments) {
  bound_ = static_cast<const Bound*>(arguments.binding);
  if (bound_ != nullptr) {
    arguments_.in = arguments.in;
    arguments_.out = arguments.out;
    runs_ = 1;
    run_ = 0;
    element_ = bound_->element;
    pass_bytes_ = bound_->pass_bytes;
    turns_ = bound_->turns;
    scratch_stride_ = bound_->scratch_stride;
    bases_[Place::in] = reinterpret_cast<std::intptr_t>(arguments.in);
    bases_[Place::out] = reinterpret_cast<std::intptr_t>(arguments.out);
  } else {
    set(arguments);
  }
  begin();
  if (!attached_readers_.empty()) offer_input();
  if (bound_ == nullptr) {
    bases_[Place::in] = reinterpret_cast<std::intptr_t>(arguments_.in);
    bases_[Place::out] = reinterpret_cast<std::intptr_t>(arguments_.out);
  }
  return *this;
}

bool Program::repeat() {
  if (bound_ == nullptr) return false;
  begin();
  return true;
}

inline void Program::begin() {
  hash_ = channel_.current_.hash;
  first_run_ = channel_.last_run_ + 1;
  tag_ = hash_ + first_run_;
  channel_.last_run_ += static_cast<std::uint64_t>(runs_);
  turn_to(first_run_);
  tick_ = 0;
  stage_ = 0;
  next_ = 0;
  is_credited_ = false;
  misses_ = 0;
}

/// For peers to read. They get a copy where `out` lies over an `in` that they may still be reading
/// when we write, and of memory that no system call reads, such as a device's. Whether a rank
/// reduces in place is its own affair (MPI asks for agreement in some collectives only), so it is
/// settled here.
void Program::offer_input() {
  const std::size_t length = arguments_.chunk_begin[chunks_] * element_;
  const auto* const in = static_cast<const std::byte*>(arguments_.in);
  const auto* const out = static_cast<const std::byte*>(arguments_.out);
  const bool is_over = endangers_input_ && out != nullptr && in < out + length && out < in + length;
  if (!is_over && is_readable_by_peers(in, length)) return;
  if (input_copy_.size() < length) input_copy_.resize(length);
  void* const copy = input_copy_.data();
  copy_bytes(&copy, 1, in, length, Store::cached);
  arguments_.in = copy;
}

bool Program::advance(int polls) {
  if (bound_ != nullptr) return advance_bound(polls);
  while (tick_ < runs_ + stages_ - 1) {
    run_ = tick_ - stage_;
    if (run_ >= 0 && run_ < runs_) {
      const std::uint64_t number = first_run_ + static_cast<std::uint64_t>(run_);
      turn_to(number);
      if (stage_ == 0 && !is_credited_) {
        for (int poll = 0; !has_credit(); relax())
          if (++poll > polls) return false;
        is_credited_ = true;
      }
      const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
      for (const int end = stage_end_[static_cast<std::size_t>(stage_)]; next_ < end; ++next_) {
        const Instruction& instruction = instructions_[static_cast<std::size_t>(next_)];
        switch (instruction.verb) {
          case Verb::signal:
            give_signal(line(rank_, instruction.slot)[line_offset], instruction.span == 0);
            break;
          case Verb::wait:
            shake();
            if (!is_signalled(waits_[instruction.first], instruction.peer,
                              static_cast<int>(instruction.first),
                              waits_end_[static_cast<std::size_t>(stage_)], polls))
              return false;
            break;
          default:
            move(instruction);
        }
      }
      if (stage_ == stages_ - 1) complete();
    }
    if (++stage_ == stages_) {
      stage_ = 0;
      ++tick_;
      next_ = 0;
      is_credited_ = false;
      if (is_brief_ && tick_ < runs_ + stages_ - 1) return false;
    } else {
      next_ = stage_end_[static_cast<std::size_t>(stage_) - 1];
    }
  }
  for (int poll = 0; !drain(); relax())
    if (++poll > polls) return false;
  if (first_of(arguments_.store) == Store::stream) store_fence();
  blocked_on_ = -1;
  return true;
}

/// The same for a single run: its stages come one after the other, as they stand.
bool Program::advance_bound(int polls) {
  const Bound& bound = *bound_;
  if (!is_credited_) {
    for (int poll = 0; !has_credit(); relax())
      if (++poll > polls) return false;
    is_credited_ = true;
  }
  const std::uint64_t run = first_run_;
  const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
  const int last_wait = static_cast<int>(waits_.size());
  const BoundStep* const steps = bound.steps.data();
  for (const int end = static_cast<int>(bound.steps.size()); next_ < end; ++next_) {
    const BoundStep& step = steps[next_];
    switch (step.verb) {
      case Verb::signal:
        give_signal(step.line[line_offset], /*has_payload=*/false);
        break;
      case Verb::wait: {
        Line& line = step.line[line_offset];
        shake();
        if (step.cell_count > 0) {
          if (!are_filled(step, polls)) return false;
          break;
        }
        // Acquire: pairs with the release in give_signal().
        if (line.run.load(std::memory_order_acquire) == run) [[likely]]
          take_signal(line, step.peer, run);
        else if (!is_signalled(step.line, step.peer, step.number, last_wait, polls,
                               step.lines > 0 ? address(bound.places[step.first]) : nullptr,
                               step.lines))
          return false;
        break;
      }
      default: {
        if (step.cell_count > 0) {
          move_cells(step);
          break;
        }
        const Place* const places = &bound.places[step.first];
        for (int i = 0; i < step.to_count; ++i)
          to_[static_cast<std::size_t>(i)] = address(places[i]);
        for (int i = 0; i < step.from_count; ++i)
          from_[static_cast<std::size_t>(i)] = address(places[step.to_count + i]);
        if (step.verb == Verb::reduce)
          reduce(bound.kernel, to_.data(), step.to_count, from_.data(), step.from_count, step.count,
                 step.store);
        else
          copy(to_.data(), step.to_count, from_[0], step.count, step.store);
      }
    }
  }
  complete();
  if (!bound.own.empty()) take_back();
  if (bound.is_streamed) store_fence();
  blocked_on_ = -1;
  return true;
}

/// Asks for the lines that the next run would write if it were of the same call: see
/// kFewReaders in program_set_up.cpp.
void Program::take_back() {
  const std::uint64_t next = first_run_ + 1;
  if (!may_write(next) || channel_.stores_.is_past()) return;
  turn_to(next);
  for (const Range& range : bound_->own) {
    const std::byte* const begin = address(range.place);
    for (std::size_t at = 0; at < range.bytes; at += kCacheLine) fetch_to_write(begin + at);
  }
}

/// The current run.
void Program::complete() {
  // Release: pairs with the acquire in has_credit() and drain(); we are done with the peers' slots.
  channel_.peers_[static_cast<std::size_t>(rank_)].control->completed.run.store(
      first_run_ + static_cast<std::uint64_t>(run_), std::memory_order_release);
}

/// The line of the current window.
inline void Program::give_signal(Line& line, bool has_payload) {
  shake();
  line.signature = hash_;
  if (has_payload) {
    std::memcpy(line.payload, &arguments_.in, sizeof arguments_.in);
    store_fence();  // peers read `in` itself, which the program may have written by streamed stores
  }
  // Release: pairs with the acquire in is_signalled(); the slot's payload comes with it, or what
  // was written to peers' slots, and so does what this rank has acquired before.
  line.run.store(first_run_ + static_cast<std::uint64_t>(run_), std::memory_order_release);
}

/// Whether has_credit() would find so in run `number`, without a look at the peers.
bool Program::may_write(std::uint64_t number) const {
  const std::vector<int>* const readers = channel_.window_readers_[number % kWindows];
  return readers == nullptr || std::all_of(readers->begin(), readers->end(), [&](int rank) {
           return channel_.peers_[static_cast<std::size_t>(rank)].completed + kWindows >= number;
         });
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

/// After our reads of memory that belongs to `peer`'s caller, and before we tell anyone: a peer
/// that failed has left the call, and what we read may have been changed already.
void Program::check_stayed(int peer) {
  // Acquire: pairs with the fence in Channel::poison(); who has read what was written after that
  // sees the failure.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (channel_.peers_[static_cast<std::size_t>(peer)].control->state.failed.load(
          std::memory_order_relaxed) != 0) [[unlikely]]
    channel_.diagnose(peer, position());
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

/// Whether a wait is over. `number`: its place in waits_; `end`: behind the last one that it is
/// worth to look ahead to. `lines` of `payload` are asked for meanwhile: see kMostAskedForEarly in
/// program_set_up.cpp.
bool Program::is_signalled(Line* const first, int peer, int number, int end, int polls,
                           const std::byte* payload, int lines) {
  const std::uint64_t run = first_run_ + static_cast<std::uint64_t>(run_);
  const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
  Line& line = first[line_offset];
  end = std::min(end, number + kLookAhead);
  const auto look_at = [&](int number_of_wait) {
    __builtin_prefetch(&waits_[static_cast<std::size_t>(number_of_wait)][line_offset]);
  };
  if (end == number + kLookAhead) look_at(end - 1);
  // Acquire: pairs with the release in give_signal().
  for (int poll = 0; line.run.load(std::memory_order_acquire) != run; relax()) {
    for (int next = number + 1; next < end; ++next) look_at(next);
    for (int i = 0; i < lines; ++i)
      __builtin_prefetch(payload + static_cast<std::size_t>(i) * kCacheLine);
    if (++poll <= polls) continue;
    blocked_on_ = peer;
    return false;
  }
  take_signal(line, peer, run);
  return true;
}

/// Whether the cells that a step waits for have come.
bool Program::are_filled(const BoundStep& step, int polls) {
  const auto in_window = [&](const Cell* cell) {
    return reinterpret_cast<const Cell*>(reinterpret_cast<const std::byte*>(cell) +
                                         static_cast<std::size_t>(window_) * channel_.cell_stride_);
  };
  const Cell* const cells = in_window(channel_.peers_[step.peer].cells + step.first);
  const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
  for (int i = 0; i < step.cell_count; ++i) {
    // Acquire: pairs with the release in fill().
    for (int poll = 0; cells[i].tag.load(std::memory_order_acquire) != tag_; relax()) {
      if (poll == 0) {
        const auto& heads = bound_->heads;
        const std::size_t end = std::min<std::size_t>(step.number + kLookAhead, heads.size());
        for (std::size_t next = step.number + std::size_t{1}; next < end; ++next)
          __builtin_prefetch(heads[next] != nullptr
                                 ? static_cast<const void*>(in_window(heads[next]))
                                 : static_cast<const void*>(&waits_[next][line_offset]));
      }
      if (++poll <= polls) continue;
      // In another call than this the tags are others, and so is the signature. Not at once: the
      // peer is about to write the line, and would have to take it back.
      const Line& line = step.line[line_offset];
      if (++misses_ % kMissesPerLook == 0 &&
          line.run.load(std::memory_order_acquire) == first_run_ && line.signature != hash_)
        channel_.disagree(step.peer);
      blocked_on_ = step.peer;
      return false;
    }
  }
  Channel::Peer& its = channel_.peers_[step.peer];
  its.completed = std::max(its.completed, first_run_ - 1);  // as in take_signal()
  return true;
}

/// Performs a copy or reduce step some of whose operands lie in cells.
void Program::move_cells(const BoundStep& step) {
  const Place* const places = &bound_->places[step.first];
  const std::size_t bytes = step.verb == Verb::copy ? step.count : step.count * bound_->element;
  std::byte* room = taken_.data();
  for (int i = 0; i < step.from_count; ++i) {
    const Place& place = places[step.to_count + i];
    const void* source = address(place);
    if (place.base == Place::cell) {
      take(room, static_cast<const Cell*>(source), bytes);
      source = room;
      room += kCellsRoom;
    }
    from_[static_cast<std::size_t>(i)] = source;
  }
  int plain = 0;
  for (int i = 0; i < step.to_count; ++i)
    if (places[i].base != Place::cell) to_[static_cast<std::size_t>(plain++)] = address(places[i]);
  const void* result = from_[0];
  if (step.verb == Verb::reduce) {
    if (plain == 0) to_[static_cast<std::size_t>(plain++)] = room;
    bound_->kernel(to_.data(), plain, from_.data(), step.from_count, step.count, Store::cached);
    result = to_[0];
  }
  for (int i = 0; i < step.to_count; ++i) {
    if (places[i].base != Place::cell) continue;
    shake();
    fill(reinterpret_cast<Cell*>(address(places[i])), result, bytes, tag_);
  }
  // Last: peers wait for cells, and a copy may lie over its source.
  if (step.verb == Verb::copy && plain > 0) copy(to_.data(), plain, result, bytes, step.store);
}

/// What the signal tells besides.
inline void Program::take_signal(const Line& line, int peer, std::uint64_t run) {
  if (line.signature != hash_) [[unlikely]]
    channel_.disagree(peer);
  // In program order a peer that is in run n has finished every run of earlier calls, and with s
  // stages run n - s.
  Channel::Peer& its = channel_.peers_[static_cast<std::size_t>(peer)];
  its.completed =
      std::max({its.completed, first_run_ - 1, run - static_cast<std::uint64_t>(stages_)});
}

/// `store` is that of to[0]: Store::shared if it is scratch, as all further destinations are where
/// no rank's results are mapped.
inline void Program::copy(void* const* to, int to_count, const void* from, std::size_t bytes,
                          Store store) {
  constexpr std::size_t kFewBytes =
      256;  // for which the kernel's choices take longer than the copy
  if (to_count == 1 && bytes <= kFewBytes) {
    std::memmove(to[0], from, bytes);
    return;
  }
  const bool is_into_scratch = to_count > 1 || store == Store::shared;
  if (bytes < ScratchStores::kLeastBytes || !is_into_scratch) {
    copy_bytes(to, to_count, from, bytes, store);
    return;
  }
  ScratchStores& stores = channel_.stores_;
  const auto [is_past, is_timed] = returns_        ? ScratchStores::Copy{false, false}
                                   : to_count == 1 ? stores.next_copy(bytes)
                                                   : ScratchStores::Copy{stores.is_past(), false};
  const std::uint64_t begun = is_timed ? ticks() : 0;
  if (channel_.takes_back_ && channel_.size_ == 2 && to_count == 1 && !is_past)
    write_to_pair(to[0], bytes, kPieceToCopy, [&](std::size_t at, std::size_t part) {
      void* const piece = static_cast<std::byte*>(to[0]) + at;
      copy_bytes(&piece, 1, static_cast<const std::byte*>(from) + at, part, store);
    });
  else
    copy_bytes(to, to_count, from, bytes, is_past ? past(store) : store);
  if (is_past) store_fence();
  if (is_timed) stores.learn(is_past, ticks() - begun, bytes);
}

inline void Program::reduce(ReduceKernel kernel, void* const* to, int to_count,
                            const void* const* from, int from_count, std::size_t count,
                            Store store) {
  const bool is_into_scratch = to_count > 1 || store == Store::shared;
  const std::size_t bytes = count * element_;
  // What stays, or returns, was just read: it is in the caches, and goes there again.
  const bool is_past = is_into_scratch && !stays_ && !returns_ &&
                       bytes >= ScratchStores::kLeastBytes && channel_.stores_.is_past();
  if (channel_.takes_back_ && returns_ && channel_.size_ == 2 && to_count == 2 && from_count == 2 &&
      !is_past && bytes <= kMostReturned) {
    const std::size_t whole = kPieceToFold / element_;  // elements
    write_to_pair(to[1], bytes, whole * element_, [&](std::size_t at, std::size_t part) {
      const auto behind = [at](void* place) { return static_cast<std::byte*>(place) + at; };
      void* const pieces[] = {behind(to[0]), behind(to[1])};
      const void* const sources[] = {static_cast<const std::byte*>(from[0]) + at,
                                     static_cast<const std::byte*>(from[1]) + at};
      kernel(pieces, 2, sources, 2, part / element_, store);
    });
    return;
  }
  kernel(to, to_count, from, from_count, count, is_past ? past(store) : store);
  if (is_past) store_fence();
}

/// Performs a copy or reduce step on the current run's slice.
void Program::move(const Instruction& instruction) {
  const Operand* const to = &operands_[instruction.first];
  const Operand* const from = to + instruction.to_count;
  // Chunks that lie side by side in all operands move at once.
  const int joined = is_joined() ? instruction.span : 1;
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
        reduce(kernel_, to_.data(), instruction.to_count, from_.data(), instruction.from_count,
               count, store);
      else
        copy(to_.data(), instruction.to_count, from_[0], count * element_, store);
      for (int i = 0; i < instruction.from_count; ++i)
        if (from[i].is_mapped) check_stayed(from[i].rank);
      continue;
    }
    const std::ptrdiff_t line_offset = static_cast<std::ptrdiff_t>(window_) * channel_.flags_;
    // Pieces small enough that what was read stays in the cache until it is reduced.
    const std::size_t piece = std::max<std::size_t>(kBounceBytes / element_, 1);
    for (std::size_t at = 0; at < count; at += piece) {
      const std::size_t part = std::min(piece, count - at);
      // Each rank begins with another peer: the kernel lets in one reader of a process after the
      // other. reduce_scatter_block of 1 MiB over 16 ranks, Intel Xeon, inputs that were not
      // written since the last call: 230 us instead of 400.
      for (int k = 1; k <= instruction.from_count; ++k) {
        const int i = (rank_ + k) % instruction.from_count;
        const std::size_t offset = (slice_begin(chunk) + at) * element_;
        if (from[i].is_remote) {
          const std::byte* base = nullptr;
          std::memcpy(&base, line(from[i].rank, from[i].slot)[line_offset].payload, sizeof base);
          std::byte* const bounce = bounce_.data() + static_cast<std::size_t>(i) * kBounceBytes;
          if (!read_process(channel_.peers_[static_cast<std::size_t>(from[i].rank)].process.pid,
                            base + offset, bounce, part * element_)) {
            const std::string why = std::strerror(errno);
            check_stayed(from[i].rank);
            channel_.check_alive(from[i].rank);
            throw Error(Code::system, "cannot read the memory of rank " +
                                          std::to_string(from[i].rank) + ": " + why +
                                          " (TRIB_ATTACH=off does without)");
          }
          check_stayed(from[i].rank);
          from_[static_cast<std::size_t>(i)] = bounce;
        } else {
          from_[static_cast<std::size_t>(i)] = address(from[i], index) + at * element_;
        }
      }
      for (int i = 0; i < instruction.to_count; ++i)
        to_[static_cast<std::size_t>(i)] = address(to[i], index) + at * element_;
      if (instruction.verb == Verb::reduce)
        reduce(kernel_, to_.data(), instruction.to_count, from_.data(), instruction.from_count,
               part, store);
      else
        copy(to_.data(), instruction.to_count, from_[0], part * element_, store);
    }
  }
}

}  // namespace trib::host

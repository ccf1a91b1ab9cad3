// SPDX-License-Identifier: BSD-3-Clause
// Device code: one block of threads that runs a Launch (launch.hpp), whatever schedule it came from.
//
// Memory order. Pushes into a peer's inbox are plain stores. In the simple protocol a barrier of
// the block stands behind them, then one thread per signal stores the flag with release semantics
// at system scope: barrier and release together order all the block's pushes before the flag. At
// the reader one thread per flag loads it with acquire semantics at system scope, and a barrier
// behind that lets the whole block read the payload. In the packet protocol each aligned 8 bytes
// hold 4 of payload and the number of the run; an 8-byte store is never torn, so whoever sees the
// number has the payload, and no order is needed. Credits work like flags, the other way round: the
// barrier and the release order the block's last loads from its inbox before the credit.
#pragma once

#include "backend/cuda/access.cuh"
#include "backend/cuda/elements.cuh"

namespace trib::cuda {

enum class Protocol { simple, packet };

/// Of each stage.
__shared__ volatile int passes_done[kMaxStages];

/// One block of threads at work, as one of them sees it. The code is short on purpose: a kernel's
/// instructions are in no near cache when it starts, and 1 KiB of them takes about as long to fetch
/// as a peer takes to answer. For the same reason the stages have threads of their own from the
/// start: they fetch their instructions while there is nothing to do yet.
///
/// Thread t of a stage handles units t, t + width, ... of every chunk: what one step leaves for the
/// next, in memory that only this rank touches, needs no barrier within the stage, and `out` may be
/// the same memory as `in`. A stage stores nothing of a pass before the stage before it is through
/// with the pass.
template <Protocol protocol, class T, class A, class Operator>
class Block {
 public:
  using Launched = std::conditional_t<protocol == Protocol::packet, Launch, FlaggedLaunch>;

  __device__ Block(const Launched& launch)
      : launch_(launch),
        width_(static_cast<int>(blockDim.x) / launch.stages),
        stage_(static_cast<int>(threadIdx.x) / width_),
        thread_(static_cast<int>(threadIdx.x) % width_) {}

  __device__ void run() {
    if (launch_.has_met) {
      first_run_ = launch_.first_run;
      known_run_ = first_run_ - 1;
    } else {
      take_turn();
    }
    if constexpr (protocol == Protocol::packet) {
#pragma unroll 1
      do {
        serve();
      } while (launch_.linger > 0 && is_called_again());
    } else {
      serve();
    }
  }

 private:
  /// Of a stream-ordered launch: earlier ones have ended on this rank, and so all that they loaded
  /// and stored comes before what this one does. Now is the time to tell the peers: at the end of a
  /// kernel it would take a fence that waits for all that was pushed, a microsecond.
  __device__ void take_turn() {
    __shared__ std::uint32_t first, known;
    disturb();
    if (threadIdx.x == 0) {
      Counters* const counters = launch_.counters;
      // The launch may be a graph's, replayed: its number stands in memory. Acquire: it is read
      // before `arrived` grows. So when the last block has come here, nobody will read the old
      // number any more.
      first = launch_.first_run;
      known = launch_.known_run;
      bool is_last = blockIdx.x == 0;
      if (launch_.is_counted) {
        const std::uint64_t runs = load_acquire(&counters->runs);
        first = static_cast<std::uint32_t>(runs) + 1;
        known = static_cast<std::uint32_t>(runs >> 32);
        is_last = gridDim.x == 1 || atomicAdd(&counters->arrived, 1) + 1 == gridDim.x;
      }
      known = kept_near(known, first);
      if (is_last) {
        counters->arrived = 0;
        const std::uint32_t next_known = launch_.hears_from_all ? first - 1 : known;
        const std::uint32_t last = first + static_cast<std::uint32_t>(passes_of(0)) - 1;
        counters->runs = std::uint64_t{next_known} << 32 | last;
      }
    }
    __syncthreads();
    first_run_ = first;
    known_run_ = known;
    if (blockIdx.x == 0 && threadIdx.x < launch_.size && threadIdx.x != launch_.rank)
      store_relaxed(credit(static_cast<int>(threadIdx.x), launch_.rank, kMaxBlocks),
                    first_run_ - 1);
  }

  __device__ void serve() {
    if (threadIdx.x < kMaxStages) passes_done[threadIdx.x] = 0;
    __syncthreads();
    const int passes = passes_of(blockIdx.x);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      enter(pass);
      if (stage_ == 0) wait_for_credit();
      if constexpr (protocol == Protocol::packet) {
#pragma unroll 1
        for (int i = launch_.first_batch[stage_]; i < launch_.first_batch[stage_ + 1];) i = work(i);
      } else {
#pragma unroll 1
        for (int i = launch_.first_phase[stage_]; i < launch_.first_phase[stage_ + 1]; ++i) {
          const Phase& phase = launch_.phase[i];
          wait(phase);
#pragma unroll 1
          for (int j = phase.first_batch; j < phase.first_batch + phase.batches;) j = work(j);
          signal(phase);
        }
      }
      leave(pass + kWindows < passes);
    }
    end();
  }

  static constexpr int kElements = kUnitBytes / sizeof(T);
  static constexpr std::uint32_t kMostAhead = 1u << 20;
  /// Units that a thread has under way at once, per source.
  static constexpr int kDeep = protocol == Protocol::packet ? 1 : 2;

  __device__ int passes_of(unsigned block) const {
    return static_cast<int>((launch_.passes + gridDim.x - 1 - block) / gridDim.x);
  }

  /// Of the stage's threads.
  __device__ void barrier() const {
    asm volatile("bar.sync %0, %1;" ::"r"(stage_ + 1), "r"(width_) : "memory");
  }

  __device__ void enter(int pass) {
    pass_ = pass;
    run_ = first_run_ + static_cast<std::uint32_t>(pass);
    const std::uint32_t window = blockIdx.x * kWindows + run_ % kWindows;
    done_ = static_cast<std::uint64_t>(launch_.slice) *
            (static_cast<std::uint32_t>(pass) * gridDim.x + blockIdx.x);
    in_inbox_ = static_cast<std::uint64_t>(window) *
                (protocol == Protocol::packet ? kPacketWindowBytes : kWindowBytes);
    in_flags_ = window * static_cast<std::uint32_t>(kMaxUnits * sizeof(std::uint32_t));
  }

  // --------------------------------------------------------------------------------------- waiting

  /// The stage is through with the pass. `will_reuse`: a later pass needs the window.
  __device__ void leave(bool will_reuse) {
    wait_for_stage_before();  // it may have had nothing to do here
    if (stage_ + 1 < launch_.stages) {
      barrier();
      if (thread_ == 0) {
        __threadfence_block();
        passes_done[stage_] = pass_ + 1;
      }
    } else if (will_reuse) {
      barrier();
      if (thread_ < launch_.size && thread_ != launch_.rank)
        store_release(credit(thread_, launch_.rank, blockIdx.x), run_);
    }
  }
  __device__ void wait_for_stage_before() const {
    if (stage_ == 0) return;
    disturb();
    while (passes_done[stage_ - 1] <= pass_) {
    }
    __threadfence_block();  // pairs with the fence in leave()
  }

  /// While a wait goes on: how long it has lasted.
  struct Patience {
    std::uint32_t polls = 0;
    std::uint64_t deadline = 0;
  };
  /// True: the wait is over.
  __device__ bool gives_up(Patience& patience, int peer) {
    if ((++patience.polls & 0x3ff) != 0) return is_aborted_;
    patience.deadline = look_around(launch_.doorbell, launch_.inbox[launch_.rank],
                                    patience.deadline, launch_.time_limit, peer);
    if (patience.deadline == 0) is_aborted_ = true;
    return is_aborted_;
  }

  /// What `of` has completed, as `holder` knows it: of one block, or in the last row of launches
  /// before its current one.
  __device__ std::uint32_t* credit(int holder, int of, unsigned row) const {
    return reinterpret_cast<std::uint32_t*>(launch_.inbox[holder] + kFlagBytes) + row * kMaxRanks +
           of;
  }
  /// Whether the window is free if run `completed` and those before it are over. A number that is
  /// far behind stands for one that is: no peer is far ahead.
  __device__ bool is_enough(std::uint32_t completed) const {
    return completed - (run_ - kWindows) <= kMostAhead;
  }
  /// Until all peers are done with what the window holds. Numbers of runs are the same everywhere.
  __device__ void wait_for_credit() {
    if (is_enough(known_run_)) return;
    disturb();
    const unsigned row = pass_ < kWindows ? kMaxBlocks : blockIdx.x;
    if (thread_ < launch_.size && thread_ != launch_.rank) {
      Patience patience;
      const std::uint32_t* const at = credit(launch_.rank, thread_, row);
      while (!is_enough(load_acquire(at)))
        if (gives_up(patience, thread_)) break;
    }
    barrier();
  }

  __device__ void wait(const Phase& phase) {
    if (phase.waits == 0) return;
    disturb();
#pragma unroll 1
    for (int i = thread_; i < phase.waits; i += width_) {
      const Flag& flag = launch_.flag[phase.first_wait + i];
      const auto* const at = reinterpret_cast<const std::uint32_t*>(flag.address + in_flags_);
      Patience patience;
      while (load_acquire(at) != run_)
        if (gives_up(patience, flag.rank)) break;
    }
    barrier();
  }
  __device__ void signal(const Phase& phase) {
    if (phase.signals == 0) return;
    disturb();
    barrier();
#pragma unroll 1
    for (int i = thread_; i < phase.signals; i += width_) {
      const Flag& flag = launch_.flag[phase.first_signal + i];
      store_release(reinterpret_cast<std::uint32_t*>(flag.address + in_flags_), run_);
    }
  }

  // ---------------------------------------------------------------------------------------- moving

  __device__ std::byte* address(const Operand& operand) const {
    std::uint64_t from = operand.is_inbox ? in_inbox_ : done_ * sizeof(T);
    if (protocol == Protocol::packet && !operand.is_inbox) from += moved_[operand.is_out];
    return reinterpret_cast<std::byte*>(operand.address + from);
  }
  /// Elements of the chunk that belong to the pass.
  __device__ int elements_of(const Operand& operand) const {
    if (operand.length <= done_) return 0;
    return static_cast<int>(
        min(operand.length - done_, static_cast<std::uint64_t>(launch_.slice)));
  }
  __device__ static bool is_whole(const Operand& operand, const std::byte* at, int left) {
    return operand.is_inbox ||
           (reinterpret_cast<std::uintptr_t>(at) % kUnitBytes == 0 && left >= kElements);
  }

  /// Units first + d * threads of up to kBatch sources.
  __device__ void load(const Operand* from, int count, int first, uint4 (&value)[kBatch][kDeep]) {
    disturb();
    Patience patience;
    int missing;
    do {
      missing = -1;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= count) break;
        const Operand& operand = from[i];
        const std::byte* const base = address(operand);
        const int elements = elements_of(operand);
#pragma unroll
        for (int d = 0; d < kDeep; ++d) {
          const int unit = first + d * width_;
          const int left = elements - unit * kElements;
          if (left <= 0) break;
          if (protocol == Protocol::packet && operand.is_inbox) {
            const std::byte* const at = base + unit * (2 * kUnitBytes);
            const uint4 a = load_packet(at), b = load_packet(at + kUnitBytes);
            if (a.y != run_ || a.w != run_ || b.y != run_ || b.w != run_) missing = operand.rank;
            value[i][d] = make_uint4(a.x, a.z, b.x, b.z);
          } else {
            const std::byte* const at = base + unit * kUnitBytes;
            value[i][d] =
                is_whole(operand, at, left) ? load_vector(at) : load_elements<T>(at, left);
          }
        }
      }
    } while (protocol == Protocol::packet && missing >= 0 && !gives_up(patience, missing));
  }

  __device__ void store(const Operand& operand, int first, const uint4 (&value)[kDeep]) const {
    disturb();
    std::byte* const base = address(operand);
    const int elements = elements_of(operand);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int unit = first + d * width_;
      const int left = elements - unit * kElements;
      if (left <= 0) break;
      if (protocol == Protocol::packet && operand.is_inbox) {
        std::byte* const at = base + unit * (2 * kUnitBytes);
        store_packet(at, value[d].x, value[d].y, run_);
        store_packet(at + kUnitBytes, value[d].z, value[d].w, run_);
      } else {
        std::byte* const at = base + unit * kUnitBytes;
        if (is_whole(operand, at, left))
          store_vector(at, value[d]);
        else
          store_elements<T>(at, value[d], left);
      }
    }
  }

  /// A batch of copies, or all batches of a fold. Gives the number of the next batch.
  __device__ int work(int number) {
    const Batch& batch = launch_.batch[number];
    int most = 0;
    const int chunks = batch.is_copy ? batch.from_count : 1;
    for (int i = 0; i < chunks; ++i) most = max(most, elements_of(launch_.operand[batch.from + i]));
    int next = number;
#pragma unroll 1
    for (int first = thread_; first * kElements < most; first += kDeep * width_) {
      uint4 value[kBatch][kDeep];
      Lane<T, A, Operator> lane[kDeep];
      next = number;
      if (batch.is_local) wait_for_stage_before();
#pragma unroll 1
      for (;;) {
        const Batch& part = launch_.batch[next++];
        load(&launch_.operand[part.from], part.from_count, first, value);
        if (batch.is_copy) break;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (i >= part.from_count) break;
#pragma unroll
          for (int d = 0; d < kDeep; ++d) {
            if (i == 0 && part.is_first)
              lane[d].set(value[i][d]);
            else
              lane[d].fold(value[i][d]);
          }
        }
        if (!part.is_last) continue;
#pragma unroll
        for (int d = 0; d < kDeep; ++d) value[0][d] = lane[d].get();
        break;
      }
      wait_for_stage_before();
      const Batch& last = launch_.batch[next - 1];
      int to = last.to;
#pragma unroll 1
      for (int i = 0; i < chunks; ++i) {
#pragma unroll 1
        for (int end = to + last.to_count[i]; to < end; ++to)
          store(launch_.operand[to], first, value[0]);
#pragma unroll
        for (int j = 0; j + 1 < kBatch; ++j)  // registers have no index
#pragma unroll
          for (int d = 0; d < kDeep; ++d) value[j][d] = value[j + 1][d];
      }
    }
    if (next == number)  // nothing for this thread
      while (!launch_.batch[next++].is_last) {
      }
    return next;
  }

  // --------------------------------------------------------------------------------------- the end

  __device__ void end() {
    if (!launch_.has_met) return;  // see take_turn()
    disturb();
    __syncthreads();
    if (threadIdx.x != 0) return;
    // What all blocks did comes before `done`: each block's barrier and fence, then
    // the chain of read-modify-writes of `arrived`, then the release below, which is cumulative.
    if (gridDim.x > 1) {
      __threadfence();
      if (atomicAdd(&launch_.counters->arrived, 1) + 1 != gridDim.x) return;
      launch_.counters->arrived = 0;
      __threadfence();
    }
    store_release(&launch_.doorbell->done, launch_.number + served_);
  }

  /// A call is served, and the host may order another one like it, with its buffers elsewhere.
  /// Waits for that, not for long; false: the kernel is to end.
  __device__ bool is_called_again() {
    __shared__ volatile std::int64_t ordered[2];
    if (threadIdx.x < 32) {
      // The even lanes look at one distance, the odd ones at the other: a single read over the bus.
      const std::uint64_t* const order = launch_.doorbell->order + 2 * (threadIdx.x % 2);
      const std::uint32_t awaited = launch_.order + served_ + 1;
      const std::uint64_t deadline = nanoseconds() + launch_.linger;
      uint4 seen;
      bool is_there;
      do {
        seen = load_packet(order);
        is_there = __all_sync(~0u, seen.y == awaited && seen.w == awaited);
      } while (!is_there && __all_sync(~0u, nanoseconds() < deadline));
      // Acquire, for the whole block with the barrier below: what was in the buffers when the host
      // gave the order must not be hidden by what caches hold of the call before.
      __threadfence_system();
      const auto distance = static_cast<std::int64_t>(std::uint64_t{seen.z} << 32 | seen.x);
      if (threadIdx.x < 2) ordered[threadIdx.x] = is_there ? distance : kLeave;
      // The kernel's last store: a host that sees it launches another kernel for later calls.
      if (threadIdx.x == 0 && (!is_there || distance == kLeave))
        store_release(&launch_.doorbell->left, launch_.number + served_);
    }
    __syncthreads();
    moved_[0] = ordered[0];
    moved_[1] = ordered[1];
    ++served_;
    ++first_run_;
    ++known_run_;
    return moved_[0] != kLeave;
  }

  const Launched& launch_;
  const int width_, stage_, thread_;  // threads of a stage, this one's stage, its number there
  int pass_ = 0;
  std::uint32_t first_run_ = 0, run_ = 0;
  std::uint32_t known_run_ = 0;  // this one and all before it are over on all ranks
  std::uint64_t done_ = 0;      // elements of each chunk before the pass
  std::uint64_t in_inbox_ = 0;  // bytes from an inbox operand's address to the block's window
  std::uint32_t in_flags_ = 0;  // the same of a flag
  // A kernel that lingers: calls before this one, and where its buffers are, from those of the
  // first.
  std::uint32_t served_ = 0;
  std::int64_t moved_[2] = {};
  bool is_aborted_ = false;
};

}  // namespace trib::cuda

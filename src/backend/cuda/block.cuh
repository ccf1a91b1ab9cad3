// SPDX-License-Identifier: BSD-3-Clause
// Device code: one block of threads that runs a Launch (launch.hpp), whatever schedule it came
// from.
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
#include "backend/cuda/turn.cuh"

namespace trib::cuda {

/// Of each stage.
__shared__ Shared<volatile int> passes_done[kMaxStages];

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
class Block
    : private Turn<std::conditional_t<protocol == Protocol::packet, Launch, FlaggedLaunch>> {
 public:
  using Launched = std::conditional_t<protocol == Protocol::packet, Launch, FlaggedLaunch>;

  __device__ Block(const Launched& launch)
      : Turn<Launched>(launch),
        width_(static_cast<int>(blockDim.x) / launch.stages),
        stage_(static_cast<int>(threadIdx.x) / width_),
        thread_(static_cast<int>(threadIdx.x) % width_) {}

  __device__ void run() {
    this->begin();
    if constexpr (protocol == Protocol::packet) {
#pragma unroll 1
      do {
        serve();
      } while (launch_.linger > 0 && this->is_called_again());
    } else {
      serve();
    }
  }

 private:
  __device__ void serve() {
    if (threadIdx.x < kMaxStages) passes_done[threadIdx.x] = 0;
    __syncthreads();
    const int passes = passes_of(launch_, blockIdx.x);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      enter(pass);
      if (stage_ == 0) wait_for_credits();
      if constexpr (protocol == Protocol::packet) {
#pragma unroll 1
        for (int i = launch_.first_batch[stage_]; i < launch_.first_batch[stage_ + 1];) i = work(i);
      } else {
#pragma unroll 1
        for (int i = launch_.first_phase[stage_]; i < launch_.first_phase[stage_ + 1]; ++i) {
          const Phase& phase = launch_.phase[i];
          wait(phase);
          if (has_given_up() == 0) {
#pragma unroll 1
            for (int j = phase.first_batch; j < phase.first_batch + phase.batches;) j = work(j);
          }
          signal(phase);
        }
      }
      leave(pass + kWindows < passes);
    }
    this->end();
  }

  static constexpr int kElements = kUnitBytes / sizeof(T);
  /// Units that a thread has under way at once, per source.
  static constexpr int kDeep = protocol == Protocol::packet ? 1 : 2;

  /// Of the stage's threads.
  __device__ void barrier() const { synchronise(stage_ + 1, width_); }

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
        store_release(credit(launch_, thread_, launch_.rank, blockIdx.x), run_);
    }
  }
  __device__ void wait_for_stage_before() const {
    if (stage_ == 0) return;
    disturb();
    while (passes_done[stage_ - 1] <= pass_) {
    }
    __threadfence_block();  // pairs with the fence in leave()
  }

  /// Until all peers are done with what the window holds.
  __device__ void wait_for_credits() {
    if (is_enough(known_run_, run_)) return;
    disturb();
    if (thread_ < launch_.size && thread_ != launch_.rank)
      this->wait_for_credit(thread_, pass_ < kWindows ? kMaxBlocks : blockIdx.x);
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
        if (this->gives_up(patience, flag.rank)) break;
      this->is_lost();
    }
    barrier();
  }
  __device__ void signal(const Phase& phase) {
    if (phase.signals == 0) return;
    disturb();
    barrier();
    if (has_given_up() != 0 || this->is_lost()) return;
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
    return static_cast<int>(min(operand.length - done_, static_cast<std::uint64_t>(launch_.slice)));
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
            Packets packets;
            packets.load(base + unit * (2 * kUnitBytes));
            if (!packets.is_of(run_)) missing = operand.rank;
            value[i][d] = packets.unit();
          } else {
            const std::byte* const at = base + unit * kUnitBytes;
            value[i][d] =
                is_whole(operand, at, left) ? load_vector(at) : load_elements<T>(at, left);
          }
        }
      }
    } while (protocol == Protocol::packet && missing >= 0 && !this->gives_up(patience, missing));
  }

  __device__ void store(const Operand& operand, int first, const uint4 (&value)[kDeep]) {
    disturb();
    // In the simple protocol a wait's phase sees to what the block has given up; what has no wait
    // must not go to buffers that are the caller's again either.
    if ((protocol == Protocol::packet && has_given_up() != 0) || this->is_lost()) return;
    std::byte* const base = address(operand);
    const int elements = elements_of(operand);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int unit = first + d * width_;
      const int left = elements - unit * kElements;
      if (left <= 0) break;
      if (protocol == Protocol::packet && operand.is_inbox) {
        Packets::store(base + unit * (2 * kUnitBytes), value[d], run_);
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

  using Turn<Launched>::launch_, Turn<Launched>::first_run_, Turn<Launched>::run_;
  using Turn<Launched>::known_run_, Turn<Launched>::moved_;
  const int width_, stage_, thread_;  // threads of a stage, this one's stage, its number there
  int pass_ = 0;
  std::uint64_t done_ = 0;      // elements of each chunk before the pass
  std::uint64_t in_inbox_ = 0;  // bytes from an inbox operand's address to the block's window
  std::uint32_t in_flags_ = 0;  // the same of a flag
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Device code: a chunk of all ranks' buffers, folded where they are (MappedLaunch in launch.hpp).
//
// Memory order. When the kernel starts, the ranks have met on the host: every `in` is complete, and
// no kernel is at work on any `out`. So nothing is waited for, and loads need no more than to miss
// what this GPU's caches hold of another time; a kernel starts with an empty first-level cache,
// others do not keep peers' memory, and loads leave nothing in it that could grow old. Each element
// is loaded once from each rank, and then stored, by one thread: `out` may be `in`. At its end each
// block tells its peers' block of the same number that it is through: a barrier of the block, then
// a store with release semantics at system scope, which together order the block's loads from the
// peer's `in` and its stores into the peer's `out` before the word; its partner is the load with
// acquire semantics here, and a barrier behind it. Grids are equal on all ranks, so when all blocks
// have heard from all peers, this rank's `out` is complete, and its `in` is its own again. Who
// gives up that wait tells the peer, before its own host hears of it: what the caller then writes
// to `in` comes later, and so a block that has loaded it finds the word when it is through, and
// tells nobody that it is.
#pragma once

#include "backend/cuda/access.cuh"
#include "backend/cuda/elements.cuh"

namespace trib::cuda {

template <class T, class A, class Operator>
class Mapped {
 public:
  __device__ explicit Mapped(const MappedLaunch& launch) : launch_(launch) {}

  __device__ void run() {
    const std::uint64_t replayed = replayed_before(launch_);
    number_ = launch_.number + (replayed >> 32);
    was_aborted_ = load_relaxed(abort_word(launch_.inbox[launch_.rank]));
    const unsigned width = gridDim.x * blockDim.x;
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (unsigned unit = thread; unit < launch_.units; unit += width) fold_unit(unit);
#pragma unroll 1
    // From the other end: these threads may have had no unit.
    for (unsigned i = launch_.units * kElements + (width - 1 - thread); i < launch_.length;
         i += width)
      fold_element(i);
    part();
    tell_host(launch_, number_, replayed + (std::uint64_t{1} << 32));
  }

 private:
  static constexpr int kElements = kUnitBytes / sizeof(T);

  /// There are threads enough to keep the links busy with one unit each; and code that does more is
  /// fetched when the kernel starts, which short messages feel.
  __device__ void fold_unit(unsigned unit) const {
    const std::uint64_t at = std::uint64_t{unit} * kUnitBytes;
    Lane<T, A, Operator> lane;
#pragma unroll 1
    for (int first = 0; first < launch_.size; first += kBatch) {
      uint4 value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < launch_.size) value[i] = load_vector(launch_.in[first + i] + at);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= launch_.size) break;
        if (i == 0 && first == 0)
          lane.set(value[i]);
        else
          lane.fold(value[i]);
      }
    }
    const uint4 result = lane.get();
    if (was_aborted_ != 0) return;
#pragma unroll 1
    for (int i = 0; i < launch_.outs; ++i) store_vector(launch_.out[i] + at, result);
  }

  /// Of a chunk's last unit, or of buffers that are not aligned.
  __device__ void fold_element(unsigned index) const {
    A folded{};
#pragma unroll 1
    for (int first = 0; first < launch_.size; first += kBatch) {
      T value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < launch_.size)
          value[i] = load_element(reinterpret_cast<const T*>(launch_.in[first + i]) + index);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= launch_.size) break;
        if (i == 0 && first == 0)
          folded = widen(value[i]);
        else
          folded = Operator::apply(folded, static_cast<A>(widen(value[i])));
      }
    }
    const T result = narrow<T>(folded);
    if (was_aborted_ != 0) return;
#pragma unroll 1
    for (int i = 0; i < launch_.outs; ++i)
      store_element(reinterpret_cast<T*>(launch_.out[i]) + index, result);
  }

  /// Whether `of` is through with the launch, as `holder` knows it.
  __device__ std::uint64_t* through(int holder, int of) const {
    return reinterpret_cast<std::uint64_t*>(launch_.inbox[holder] + kThroughAt) +
           blockIdx.x * kMaxRanks + of;
  }

  /// Until the peers are through with this rank's buffers, and know that it is with theirs.
  __device__ void part() const {
    disturb();
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer >= launch_.size || peer == launch_.rank) return;
    // What a peer that has not waited for this block has written since may have been loaded, or
    // nothing was stored: no peer may take what is there for a result. The word stays set, and the
    // barrier is between this look and those of all threads of the block as it began.
    if (load_relaxed(abort_word(launch_.inbox[launch_.rank])) != 0) {
      store_release(abort_word(launch_.inbox[peer]), 1);
      store_release(&launch_.doorbell->abort, 1);
    } else {
      store_release(through(peer, launch_.rank), number_);
    }
    disturb();
    const std::uint64_t* const at = through(launch_.rank, peer);
    std::uint64_t deadline = 0;
    for (std::uint32_t polls = 1; load_acquire(at) != number_; ++polls) {
      if (polls % kPollsPerLook != 0) continue;
      deadline = look_around(launch_.doorbell, launch_.inbox[launch_.rank], deadline,
                             launch_.time_limit, peer);
      if (deadline == 0) {
        // The buffers are the caller's again, and the peer is not through with them.
        store_release(abort_word(launch_.inbox[peer]), 1);
        break;
      }
    }
  }

  const MappedLaunch& launch_;
  std::uint64_t number_ = 0;  // of this launch
  // The abort word as the kernel began, which is looked at when it has long come. Set: the call had
  // failed by then, and the buffers may be their callers' again.
  std::uint32_t was_aborted_ = 0;
};

}  // namespace trib::cuda

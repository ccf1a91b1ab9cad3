// SPDX-License-Identifier: BSD-3-Clause
// Device code: a FlatLaunch (launch.hpp), which is one exchange by packets and one fold.
#pragma once

#include "backend/cuda/elements.cuh"
#include "backend/cuda/turn.cuh"

namespace trib::cuda {

/// One thread of a block, of which each has one pass. It pushes its units of what peers need, and
/// folds the same units of what they push: nothing is handed from thread to thread, so the block
/// has no barrier before its end. Memory order: that of packets (block.cuh).
template <class T, class A, class Operator>
class Flat : private Turn<FlatLaunch> {
 public:
  __device__ explicit Flat(const FlatLaunch& launch) : Turn<FlatLaunch>(launch) {}

  __device__ void run() {
    begin();
#pragma unroll 1
    do {
      serve();
      end();
    } while (launch_.linger > 0 && is_called_again());
  }

 private:
  static constexpr int kElements = kUnitBytes / sizeof(T);

  __device__ void serve() {
    run_ = first_run_;
    if (!launch_.has_met) wait_for_credits();
    const std::uint32_t window = blockIdx.x * kWindows + run_ % kWindows;
#pragma unroll 1
    for (std::uint32_t unit = threadIdx.x;
         unit * static_cast<std::uint32_t>(kElements) < launch_.slice; unit += blockDim.x) {
      first_ = blockIdx.x * launch_.slice + unit * kElements;
      const uint4 own = load(launch_.own, launch_.own_length);
      // The number of the run is on its way as well, if this is a replay.
      in_inbox_ = window * static_cast<std::uint32_t>(kPacketWindowBytes) + unit * (2 * kUnitBytes);
      if ((launch_.has_met || has_given_up() == 0) && !is_lost()) push(own);
      fold(own);
    }
  }

  /// Until all peers are done with what the window holds.
  __device__ void wait_for_credits() {
    if (is_enough(known_run_, run_)) return;
    disturb();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < launch_.size && peer != launch_.rank) wait_for_credit(peer, kMaxBlocks);
    __syncthreads();
  }

  /// Elements of this thread's unit that a chunk of `length` has.
  __device__ std::uint32_t left(std::uint32_t length) const {
    return length <= first_ ? 0 : min(length - first_, static_cast<std::uint32_t>(kElements));
  }

  __device__ uint4 load(const std::byte* chunk, std::uint32_t length) const {
    const auto elements = static_cast<int>(left(length));
    if (elements == 0) return make_uint4(0, 0, 0, 0);
    const std::byte* const at = chunk + moved_[0] + std::uint64_t{first_} * sizeof(T);
    return is_whole(at, elements) ? load_vector(at) : load_elements<T>(at, elements);
  }
  __device__ static bool is_whole(const std::byte* at, int elements) {
    return elements == kElements && reinterpret_cast<std::uintptr_t>(at) % kUnitBytes == 0;
  }

  __device__ void push(uint4 value) const {
    disturb();
#pragma unroll 1
    for (int i = 0; i < launch_.targets; ++i) {
      const FlatLaunch::Target& target = launch_.target[i];
      if (left(target.length) == 0) continue;
      if (!launch_.is_same) value = load(target.from, target.length);
      Packets::store(target.to + in_inbox_, value, run_);
    }
  }

  __device__ void fold(uint4 own) {
    const auto elements = static_cast<int>(left(launch_.out_length));
    if (launch_.sources == 0 || elements == 0) return;
    disturb();
    Lane<T, A, Operator> lane;
#pragma unroll 1
    for (int first = 0; first < launch_.sources; first += kBatch) {
      uint4 value[kBatch];
      await(first, own, value);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= launch_.sources) break;
        if (i == 0 && first == 0)
          lane.set(value[i]);
        else
          lane.fold(value[i]);
      }
    }
    if (is_lost()) return;
    std::byte* const at = launch_.out + moved_[1] + std::uint64_t{first_} * sizeof(T);
    if (is_whole(at, elements))
      store_vector(at, lane.get());
    else
      store_elements<T>(at, lane.get(), elements);
  }

  /// Up to kBatch sources, which are looked for together.
  __device__ void await(int first, uint4 own, uint4 (&value)[kBatch]) {
    const std::byte* at[kBatch];
    Packets packets[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      at[i] = first + i < launch_.sources ? launch_.source[first + i] : nullptr;
    Patience patience;
    int missing;
    do {
      // All are loaded before any is looked at.
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (at[i] != nullptr) packets[i].load(at[i] + in_inbox_);
      missing = -1;
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (at[i] != nullptr && !packets[i].is_of(run_)) missing = first + i;
    } while (missing >= 0 && !gives_up(patience, launch_.source_rank[missing]));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) value[i] = at[i] != nullptr ? packets[i].unit() : own;
  }

  std::uint32_t first_ = 0;     // the first element of the unit, from the beginning of each chunk
  std::uint32_t in_inbox_ = 0;  // bytes from an inbox's address to the unit in the block's window
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Device code: where a pass of a PipelineLaunch (launch.hpp) is, for pipeline.cuh and relay.cuh.
#pragma once

#include "backend/cuda/elements.cuh"
#include "backend/cuda/turn.cuh"

namespace trib::cuda {

template <class T>
class Passes : protected Turn<PipelineLaunch> {
 protected:
  static constexpr int kElements = kUnitBytes / sizeof(T);

  __device__ explicit Passes(const PipelineLaunch& launch) : Turn<PipelineLaunch>(launch) {}

  __device__ void begin() {
    Turn<PipelineLaunch>::begin();
    __syncthreads();
  }

  __device__ void enter(int pass) {
    pass_ = pass;
    run_ = first_run_ + static_cast<std::uint32_t>(pass);
    done_ = static_cast<std::uint64_t>(launch_.slice) *
            (static_cast<std::uint32_t>(pass) * gridDim.x + blockIdx.x);
    in_inbox_ = static_cast<std::uint64_t>(window_of(run_)) * kWindowBytes;
  }
  __device__ static std::uint32_t window_of(std::uint32_t run) {
    return blockIdx.x * kWindows + run % kWindows;
  }
  __device__ static std::uint32_t* word_of(const Flag& flag, std::uint32_t run) {
    return reinterpret_cast<std::uint32_t*>(flag.address) + window_of(run) * kMaxUnits;
  }
  /// Until the pass's flag is set.
  __device__ void await(const Flag& flag) {
    const std::uint32_t* const at = word_of(flag, run_);
    Patience patience;
    while (load_acquire(at) != run_)
      if (gives_up(patience, flag.rank)) break;
    is_lost();
  }

  /// Elements of a chunk that belong to the pass, and bytes of it that come before.
  __device__ int elements_of(std::uint32_t length) const {
    return length <= done_ ? 0
                           : static_cast<int>(min(length - done_, std::uint64_t{launch_.slice}));
  }
  __device__ std::uint64_t in_chunk() const { return done_ * sizeof(T); }
  /// Bytes from an inbox's address to the block's window.
  __device__ std::uint64_t in_inbox() const { return in_inbox_; }

  /// Threads take units in turns: of `width` threads, `thread` has those that are equal to it
  /// modulo `width`. The first of these that is not among the first `units`.
  __device__ static int behind(int units, int thread, int width) {
    return thread + (max(units - thread, 0) + width - 1) / width * width;
  }
  /// By the `width` threads.
  template <int deep>
  __device__ static void copy(std::byte* to, const std::byte* from, int elements, int thread,
                              int width) {
    const int units = is_aligned(from) && is_aligned(to) ? elements / kElements : 0;
#pragma unroll 1
    for (int first = thread; first < units; first += deep * width) {
      uint4 value[deep];
#pragma unroll
      for (int d = 0; d < deep; ++d)
        if (const int unit = first + d * width; unit < units)
          value[d] = load_vector(from + unit * kUnitBytes);
#pragma unroll
      for (int d = 0; d < deep; ++d)
        if (const int unit = first + d * width; unit < units)
          store_vector(to + unit * kUnitBytes, value[d]);
    }
    if (units * kElements == elements) return;
#pragma unroll 1
    for (int unit = behind(units, thread, width); unit * kElements < elements; unit += width) {
      const int left = min(elements - unit * kElements, kElements);
      // Whole units of inboxes go as such, whatever the caller's memory is aligned to: of elements,
      // each store would take its own way over the link.
      store_unit<T>(to + unit * kUnitBytes, load_unit<T>(from + unit * kUnitBytes, left), left);
    }
  }

  int pass_ = 0;

 private:
  std::uint64_t done_ = 0;  // elements of each chunk before the pass
  std::uint64_t in_inbox_ = 0;
};

}  // namespace trib::cuda

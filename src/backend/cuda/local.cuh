// SPDX-License-Identifier: BSD-3-Clause
// Device code: the buffers of ranks that share the GPU, folded or copied where they are
// (LocalLaunch in launch.hpp).
//
// Memory order. When the kernel starts, the ranks have met on the host, with nothing under way on
// their default streams: every `in` is complete. No thread waits for another one, so a grid may
// have any number of blocks. Each element is loaded once from each source, and then stored, by one
// thread: `out` may be `in`; where it may lie over another chunk of it, a first launch stores to
// memory aside. Then tell_host().
#pragma once

#include "backend/cuda/access.cuh"
#include "backend/cuda/elements.cuh"

namespace trib::cuda {

template <class T, class A, class Operator>
class Local {
 public:
  __device__ explicit Local(const LocalLaunch& launch) : launch_(launch) {}

  __device__ void run() {
    const std::uint64_t replayed = replayed_before(launch_);
    int fold = 0;
#pragma unroll 1
    for (std::uint32_t tile = blockIdx.x; tile < launch_.tiles; tile += gridDim.x) {
#pragma unroll 1
      while (fold + 1 < launch_.folds && launch_.fold[fold + 1].first_tile <= tile) ++fold;
      const std::uint32_t number = tile - launch_.fold[fold].first_tile;
      const LocalUnits in =
          units_of(launch_.fold[fold], reinterpret_cast<std::uint64_t>(launch_.in[first_in(fold)]),
                   sizeof(T));
      if (launch_.is_long)
        work<kLocalDepth, kFew>(fold, in, number);
      else
        work<1, kMany>(fold, in, number);
      work_on_elements(fold, in, number);
    }
    if (launch_.is_last)
      tell_host(launch_, launch_.number + (replayed >> 32), replayed + (std::uint64_t{1} << 32));
  }

 private:
  static constexpr int kElements = kUnitBytes / sizeof(T);
  /// Sources of which a thread has loads under way at a time. In long messages they are few, with
  /// several units each: memory gives more where each source is read in long pieces.
  static constexpr int kMany = 8, kFew = 2;

  template <int deep, int together>
  __device__ void work(int number, const LocalUnits& in, std::uint32_t tile) const {
    std::uint64_t at[deep];  // bytes of the chunk before a unit
    bool is_any[deep];
#pragma unroll
    for (int d = 0; d < deep; ++d) {
      const std::uint64_t unit = (std::uint64_t{tile} * deep + d) * blockDim.x + threadIdx.x;
      at[d] = in.head * sizeof(T) + unit * kUnitBytes;
      is_any[d] = unit < in.units;
    }
    if (is_any[0]) fold_units<deep, together>(number, at, is_any);
  }

  /// Those of a chunk that make no unit, by threads that may have had none in the first and the
  /// last tile.
  __device__ void work_on_elements(int number, const LocalUnits& in, std::uint32_t tile) const {
    const unsigned thread = blockDim.x - 1 - threadIdx.x, behind = thread - kElements;
    const unsigned depth = launch_.is_long ? kLocalDepth : 1;
    const bool is_last = (std::uint64_t{tile} + 1) * depth * blockDim.x >= in.units;
    const bool is_head = tile == 0 && thread < in.head;
    if (is_head || (is_last && behind < in.tail))
      fold_element(number, is_head ? thread : launch_.fold[number].length - in.tail + behind);
  }

  /// What is long is aligned.
  template <bool may_be_misaligned>
  __device__ static uint4 load(const std::byte* at) {
    return may_be_misaligned ? load_unit<T>(at, kElements) : load_vector(at);
  }
  template <bool may_be_misaligned>
  __device__ static void store(std::byte* at, uint4 value) {
    if (may_be_misaligned)
      store_unit<T>(at, value, kElements);
    else
      store_vector(at, value);
  }
  /// The number of a fold's first source.
  __device__ int first_in(int number) const { return launch_.is_gathered ? number : 0; }
  /// Where the result of a fold goes: numbers of `out`.
  __device__ int first_out(int number) const { return launch_.is_scattered ? number : 0; }
  __device__ int end_out(int number) const {
    return launch_.is_scattered ? number + 1 : launch_.outs;
  }
  /// Bytes before it there.
  __device__ std::uint64_t before_out(int number) const {
    return launch_.is_scattered ? 0 : launch_.fold[number].begin;
  }
  /// Whether it is a copy of what is in its place.
  __device__ bool is_there(int number, int out) const {
    return launch_.is_gathered && launch_.out[out] == launch_.in[number];
  }

  template <int deep, int together>
  __device__ void fold_units(int number, const std::uint64_t (&at)[deep],
                             const bool (&is_any)[deep]) const {
    const std::byte* const* const in = launch_.in + first_in(number);
    const std::uint64_t before = launch_.fold[number].begin;
    uint4 value[together][deep];
    Lane<T, A, Operator> lane[deep];
#pragma unroll 1
    for (int first = 0; first < launch_.sources; first += together) {
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (first + i >= launch_.sources) break;
#pragma unroll
        for (int d = 0; d < deep; ++d)
          if (is_any[d]) value[i][d] = load<deep == 1>(in[first + i] + before + at[d]);
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (first + i >= launch_.sources) break;
#pragma unroll
        for (int d = 0; d < deep; ++d) {
          if (i == 0 && first == 0)
            lane[d].set(value[i][d]);
          else
            lane[d].fold(value[i][d]);
        }
      }
    }
    if (launch_.sources > 1) {  // a copy is one of bits
#pragma unroll
      for (int d = 0; d < deep; ++d) value[0][d] = lane[d].get();
    }
#pragma unroll 1
    for (int i = first_out(number); i < end_out(number); ++i) {
      if (is_there(number, i)) continue;
#pragma unroll
      for (int d = 0; d < deep; ++d)
        if (is_any[d]) store<deep == 1>(launch_.out[i] + before_out(number) + at[d], value[0][d]);
    }
  }

  __device__ void fold_element(int number, std::uint32_t index) const {
    const std::byte* const* const in = launch_.in + first_in(number);
    const std::uint64_t at = std::uint64_t{index} * sizeof(T);
    const std::uint64_t before = launch_.fold[number].begin + at;
    T value[kMany];
    A folded{};
#pragma unroll 1
    for (int first = 0; first < launch_.sources; first += kMany) {
#pragma unroll
      for (int i = 0; i < kMany; ++i)
        if (first + i < launch_.sources)
          value[i] = load_element(reinterpret_cast<const T*>(in[first + i] + before));
#pragma unroll
      for (int i = 0; i < kMany; ++i) {
        if (first + i >= launch_.sources) break;
        if (i == 0 && first == 0)
          folded = widen(value[i]);
        else
          folded = Operator::apply(folded, static_cast<A>(widen(value[i])));
      }
    }
    const T result = launch_.sources > 1 ? narrow<T>(folded) : value[0];
#pragma unroll 1
    for (int i = first_out(number); i < end_out(number); ++i)
      if (!is_there(number, i))
        store_element(reinterpret_cast<T*>(launch_.out[i] + before_out(number) + at), result);
  }

  const LocalLaunch& launch_;
};

}  // namespace trib::cuda

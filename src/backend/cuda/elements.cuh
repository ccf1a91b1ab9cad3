// SPDX-License-Identifier: BSD-3-Clause
// Device code: elements of every type, as they are folded, and units of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/instructions.cuh"
#include "backend/cuda/launch.hpp"
#include "base/types.hpp"

namespace trib::cuda {

// Of 8-bit floats, GPUs before compute capability 8.9 have no conversions.
#if __CUDA_ARCH__ >= 890
constexpr bool kHasFloat8 = true;
#else
constexpr bool kHasFloat8 = false;
#endif

template <class T>
__device__ inline auto widen(T value) {
  if constexpr (std::is_same_v<T, half>)
    return __half2float(__ushort_as_half(value.bits));
  else if constexpr (std::is_same_v<T, bfloat16>)
    return __bfloat162float(__ushort_as_bfloat16(value.bits));
  else if constexpr (std::is_same_v<T, f8e5m2>)  // the upper half of a half
    return __half2float(__ushort_as_half(static_cast<unsigned short>(value.bits << 8)));
  else if constexpr (std::is_same_v<T, f8e4m3> && kHasFloat8)
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(value.bits, __NV_E4M3)));
  else if constexpr (requires { to_float(value); })
    return to_float(value);
  else
    return value;
}
template <class T, class A>
__device__ inline T narrow(A value) {
  if constexpr (std::is_same_v<T, half>)
    return {__half_as_ushort(__float2half_rn(value))};
  else if constexpr (std::is_same_v<T, bfloat16>)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  else if constexpr (std::is_same_v<T, f8e4m3> && kHasFloat8)
    return {__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)};
  else if constexpr (std::is_same_v<T, f8e5m2> && kHasFloat8) {
    // The instruction only saturates: infinities are made here, of what rounds past 57344.
    if (fabsf(value) >= 61440.0f)
      return {static_cast<std::uint8_t>((__float_as_uint(value) >> 24 & 0x80u) | 0x7cu)};
    return {__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2)};
  } else if constexpr (requires { from_float<T>(value); })
    return from_float<T>(value);
  else
    return value;
}

/// The elements of one unit, as they are folded.
template <class T, class A, class Operator>
struct Lane {
  static constexpr int kElements = kUnitBytes / sizeof(T);
  A value[kElements];

  union Raw {
    uint4 vector;
    T element[kElements];
    __device__ Raw() {}
  };
  __device__ void set(uint4 vector) {
    Raw raw;
    raw.vector = vector;
#pragma unroll
    for (int i = 0; i < kElements; ++i) value[i] = widen(raw.element[i]);
  }
  __device__ void fold(uint4 vector) {
    Raw raw;
    raw.vector = vector;
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      value[i] = Operator::apply(value[i], static_cast<A>(widen(raw.element[i])));
  }
  __device__ uint4 get() const {
    Raw raw;
#pragma unroll
    for (int i = 0; i < kElements; ++i) raw.element[i] = narrow<T>(value[i]);
    return raw.vector;
  }
};

/// `elements` of a unit in the caller's memory, where a whole vector is too much or not aligned.
template <class T>
__device__ __noinline__ uint4 load_elements(const std::byte* at, int elements) {
  constexpr int kElements = kUnitBytes / sizeof(T);
  union {
    uint4 vector;
    T element[kElements];
  } raw;
  raw.vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    if (i < elements) raw.element[i] = load_element(reinterpret_cast<const T*>(at) + i);
  return raw.vector;
}
template <class T>
__device__ __noinline__ void store_elements(std::byte* at, uint4 vector, int elements) {
  constexpr int kElements = kUnitBytes / sizeof(T);
  union {
    uint4 vector;
    T element[kElements];
  } raw;
  raw.vector = vector;
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    if (i < elements) store_element(reinterpret_cast<T*>(at) + i, raw.element[i]);
}

__device__ inline bool is_aligned(const std::byte* at) {
  return reinterpret_cast<std::uintptr_t>(at) % kUnitBytes == 0;
}
/// A unit of which `left` elements are there: at once, if that is all of it and it is aligned.
template <class T>
__device__ inline uint4 load_unit(const std::byte* at, int left) {
  constexpr int kElements = kUnitBytes / sizeof(T);
  return left == kElements && is_aligned(at) ? load_vector(at) : load_elements<T>(at, left);
}
template <class T>
__device__ inline void store_unit(std::byte* at, uint4 unit, int left) {
  constexpr int kElements = kUnitBytes / sizeof(T);
  if (left == kElements && is_aligned(at))
    store_vector(at, unit);
  else
    store_elements<T>(at, unit, left);
}

}  // namespace trib::cuda

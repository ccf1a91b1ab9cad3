// SPDX-License-Identifier: BSD-3-Clause
// Device code: loads and stores that reach other GPUs and the host, barriers, and what else is a
// matter of single instructions. Tests run the kernels on the host, with another file in place of
// this one: tests/simulation. So device code touches memory that others see by these functions, and
// what a block shares is of type Shared.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trib::cuda {

/// What __shared__ variables are made of.
template <class T>
using Shared = T;

/// A wait looks around once in so many polls: a power of two.
inline constexpr std::uint32_t kPollsPerLook = 1024;

__device__ inline void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ inline void store_release(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline void store_relaxed(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
/// With relaxed stores behind it, a release at system scope for several of them.
__device__ inline void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline std::uint64_t load_acquire(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline std::uint64_t load_relaxed(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline uint4 load_vector(const void* at) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at)
               : "memory");
  return value;
}
__device__ inline void store_vector(void* at, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ inline uint4 load_packet(const void* at) {
  uint4 value;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at)
               : "memory");
  return value;
}
__device__ inline void store_packet(void* at, std::uint32_t low, std::uint32_t high,
                                    std::uint32_t run) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(low), "r"(run),
               "r"(high), "r"(run)
               : "memory");
}
/// The lower word of both, shifted right by so many bits below 32.
__device__ inline std::uint32_t shift_right(std::uint32_t low, std::uint32_t high, unsigned bits) {
  return __funnelshift_r(low, high, bits);
}
/// Plain, of an element in memory that others may read or have written.
template <class T>
__device__ inline T load_element(const T* at) {
  return *at;
}
template <class T>
__device__ inline void store_element(T* at, T value) {
  *at = value;
}

/// A barrier of `threads` threads of the block: whole warps. Zero is that of __syncthreads().
__device__ inline void synchronise(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/// The same for one that does not wait: what it did comes before what those do that wait there.
__device__ inline void arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace trib::cuda

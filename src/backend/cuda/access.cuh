// SPDX-License-Identifier: BSD-3-Clause
// Device code: units as they travel, what a wait does besides, and how a kernel tells that it is
// done. Made of what instructions.cuh has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/instructions.cuh"
#include "backend/cuda/launch.hpp"

namespace trib::cuda {

/// A unit as it travels in the packet protocol: twice as long.
struct Packets {
  uint4 a, b;

  __device__ void load(const std::byte* at) {
    a = load_packet(at);
    b = load_packet(at + kUnitBytes);
  }
  /// All of it has come, in this run.
  __device__ bool is_of(std::uint32_t run) const {
    return a.y == run && a.w == run && b.y == run && b.w == run;
  }
  __device__ uint4 unit() const { return make_uint4(a.x, a.z, b.x, b.z); }
  __device__ static void store(std::byte* at, uint4 unit, std::uint32_t run) {
    store_packet(at, unit.x, unit.y, run);
    store_packet(at + kUnitBytes, unit.z, unit.w, run);
  }
};

/// The 16 bytes that begin `bytes`, less than 16, behind the first of two units.
__device__ inline uint4 shifted(uint4 unit, uint4 next, unsigned bytes) {
  std::uint32_t word[8] = {unit.x, unit.y, unit.z, unit.w, next.x, next.y, next.z, next.w};
  if (bytes & 4) {
#pragma unroll
    for (int i = 0; i < 7; ++i) word[i] = word[i + 1];
  }
  if (bytes & 8) {
#pragma unroll
    for (int i = 0; i < 5; ++i) word[i] = word[i + 2];
  }
  const unsigned bits = bytes % 4 * 8;
  return make_uint4(shift_right(word[0], word[1], bits), shift_right(word[1], word[2], bits),
                    shift_right(word[2], word[3], bits), shift_right(word[3], word[4], bits));
}

/// Before every wait and signal, if built with TRIB_DISTURB: sometimes lets others go ahead. For
/// tests: orders that are rare otherwise must be right, too.
__device__ inline void disturb() {
#if TRIB_DISTURB
  std::uint64_t random =
      (nanoseconds() ^ threadIdx.x * 2654435761u ^ blockIdx.x << 20) * 0x9e3779b97f4a7c15u;
  random ^= random >> 29;
  if (random % 16 == 0) __nanosleep(static_cast<unsigned>(random >> 40) % 4000);
#endif
}

/// Whether a kernel of this rank has given up, or a peer.
__device__ inline std::uint32_t* abort_word(std::byte* inbox) {
  return reinterpret_cast<std::uint32_t*>(inbox + kAbortAt);
}

/// Every so often while a wait goes on. Gives its deadline, or zero: the wait should end. Not
/// inline: it would be fetched with the loops that it is in.
__device__ __noinline__ std::uint64_t look_around(Doorbell* doorbell, std::byte* inbox,
                                                  std::uint64_t deadline, std::uint64_t time_limit,
                                                  int peer) {
  if (load_relaxed(&doorbell->abort) != 0 || load_relaxed(abort_word(inbox)) != 0) {
    store_release(&doorbell->abort, 1);   // this rank's host: the result is none
    store_relaxed(abort_word(inbox), 1);  // its later kernels: neither are theirs
    return 0;
  }
  const std::uint64_t now = nanoseconds();
  if (deadline == 0) return now + time_limit;
  if (now < deadline) return deadline;
  store_release(&doorbell->failed, static_cast<std::uint32_t>(peer) + 1);
  // The other blocks need not wait as long.
  store_release(&doorbell->abort, 1);
  store_relaxed(abort_word(inbox), 1);
  return 0;
}

/// What Counters::replayed says as a launch begins. Its last block to end changes it, which comes
/// after all blocks' looks at it: as `done` does, see below.
__device__ inline std::uint64_t replayed_before(const LaunchRoot& launch) {
  return launch.is_replayed ? load_relaxed(&launch.counters->replayed) : 0;
}

/// The block is done; the last one to be tells the host that launch `number` is. `replayed` is what
/// to leave there for the next replay.
template <class Launched>
__device__ void tell_host(const Launched& launch, std::uint64_t number, std::uint64_t replayed) {
  disturb();
  __syncthreads();
  if (threadIdx.x != 0) return;
  // What all blocks did comes before `done`: each block's barrier and fence, then the chain of
  // read-modify-writes of `arrived`, then the release below, which is cumulative.
  if (gridDim.x > 1) {
    __threadfence();
    if (atomicAdd(&launch.counters->arrived, 1) + 1 != gridDim.x) return;
    launch.counters->arrived = 0;
    __threadfence();
  }
  if (launch.is_replayed) launch.counters->replayed = replayed;
  store_release(&launch.doorbell->done, number);
}

}  // namespace trib::cuda

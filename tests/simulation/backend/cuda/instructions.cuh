// SPDX-License-Identifier: BSD-3-Clause
// In place of src/backend/cuda/instructions.cuh, for tests that run device code on the host: the
// same on a simulated machine (simulation/machine.hpp).
#pragma once

#include <vector_functions.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "simulation/machine.hpp"

#undef __shared__
#define __shared__ static
#define __noinline__
#define threadIdx (::trib::simulation::machine().position().thread)
#define blockIdx (::trib::simulation::machine().position().block)
#define blockDim (::trib::simulation::machine().position().threads)
#define gridDim (::trib::simulation::machine().position().blocks)

namespace trib::cuda {

using simulation::machine;
using simulation::Site;
using std::max;
using std::min;

/// A key: each block has a value of its own.
template <class T>
class Shared {
 public:
  using Value = std::remove_volatile_t<T>;

  constexpr Shared() = default;
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  Shared& operator=(Value value) {
    machine().write_shared(this, static_cast<std::int64_t>(value));
    return *this;
  }
  operator Value() const {
    machine().pause(3, Site::current());  // it may be looked at again and again
    return static_cast<Value>(machine().read_shared(this));
  }
};

inline constexpr std::uint32_t kPollsPerLook = 8;

template <class T>
void store_relaxed(T* at, std::type_identity_t<T> value, Site site = Site::current()) {
  machine().pause(3, site);
  *at = value;
  machine().has_changed();
  machine().pause(3, site);
}
template <class T>
void store_release(T* at, std::type_identity_t<T> value, Site site = Site::current()) {
  machine().publish(site);
  store_relaxed(at, value, site);
}
inline void fence(Site site = Site::current()) { machine().publish(site); }
template <class T>
T load_acquire(const T* at, Site site = Site::current()) {
  machine().pause(1, site, at);
  return *at + machine().excess(at);
}
template <class T>
T load_relaxed(const T* at) {
  return *at;
}

/// As hardware has it.
template <class T>
void check_alignment(const void* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % alignof(T) != 0)
    machine().report("an access that is not aligned");
}
template <class T>
T load_element(const T* at) {
  T value;
  check_alignment<T>(at);
  machine().load(&value, at, sizeof value);
  return value;
}
template <class T>
void store_element(T* at, T value) {
  check_alignment<T>(at);
  machine().store(at, &value, sizeof value);
}
inline std::uint32_t shift_right(std::uint32_t low, std::uint32_t high, unsigned bits) {
  return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) >> bits);
}
inline uint4 load_vector(const void* at) { return load_element(static_cast<const uint4*>(at)); }
inline void store_vector(void* at, uint4 value) { store_element(static_cast<uint4*>(at), value); }

// Of a packet each half comes as a whole, in any order.
inline uint4 load_packet(const void* at, Site site = Site::current()) {
  uint4 value;
  const auto load_half = [&](int half) {
    std::memcpy(reinterpret_cast<std::byte*>(&value) + 8 * half,
                static_cast<const std::byte*>(at) + 8 * half, 8);
  };
  const int first = machine().one_in(2) ? 0 : 1;
  load_half(first);
  machine().pause(2, site, at);
  load_half(1 - first);
  return value;
}
inline void store_packet(void* at, std::uint32_t low, std::uint32_t high, std::uint32_t run,
                         Site site = Site::current()) {
  const std::uint32_t value[2][2] = {{low, run}, {high, run}};
  const int first = machine().one_in(2) ? 0 : 1;
  for (const int half : {first, 1 - first}) {
    std::memcpy(static_cast<std::byte*>(at) + 8 * half, value[half], 8);
    machine().has_changed();
    machine().pause(4, site);
  }
}

inline void synchronise(int barrier, int threads, Site site = Site::current()) {
  machine().synchronise(barrier, threads, site);
}
inline void arrive(int barrier, int threads, Site site = Site::current()) {
  machine().arrive(barrier, threads, site);
}
inline std::uint64_t nanoseconds() { return machine().time(); }

// CUDA's own.
inline void __syncthreads(Site site = Site::current()) {
  synchronise(0, static_cast<int>(blockDim.x), site);
}
inline void __syncwarp() {}  // what a warp's threads wait for together, each waits for by itself
inline void __threadfence(Site site = Site::current()) { machine().publish(site); }
inline void __threadfence_block() {}  // words of the block are in order anyway
inline void __nanosleep(unsigned, Site site = Site::current()) { machine().pause(1, site); }
inline std::uint32_t atomicAdd(std::uint32_t* at, std::uint32_t more, Site site = Site::current()) {
  machine().pause(3, site);
  return std::exchange(*at, *at + more);
}
inline bool __all_sync(unsigned, bool value, Site site = Site::current()) {
  const auto all = machine().exchange(value ? 1 : 0, site);
  return std::find(all.begin(), all.end(), 0) == all.end();
}
inline std::uint32_t __shfl_sync(unsigned, std::uint32_t value, int lane,
                                 Site site = Site::current()) {
  return static_cast<std::uint32_t>(machine().exchange(value, site)[static_cast<unsigned>(lane)]);
}

}  // namespace trib::cuda

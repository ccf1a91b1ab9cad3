// SPDX-License-Identifier: BSD-3-Clause
// The loops over elements on the host: n-ary reduce and copy, for the instruction set found at run
// time. reduce_kernels.cpp holds the loops and is compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.hpp"

namespace trib {

/// How results are stored. `stream` goes past the caches: for results beyond the last-level cache.
/// `shared` is for scratch that a peer has read and will read again: its lines are claimed without
/// being fetched. `past(store)`: further destinations, and scratch wherever it stands among them,
/// are written past the caches.
enum class Store : std::uint8_t {
  cached,
  stream,
  shared,
  cached_past = 4,
  stream_past,
  shared_past
};
constexpr Store past(Store store) { return static_cast<Store>(static_cast<unsigned>(store) | 4u); }
constexpr bool is_past(Store store) { return (static_cast<unsigned>(store) & 4u) != 0; }
/// Without past().
constexpr Store first_of(Store store) {
  return static_cast<Store>(static_cast<unsigned>(store) & 3u);
}

/// Each of to[0..to_count) = from[0] op from[1] op ... (left to right), element by element.
/// Accumulates in the table's accumulator type and rounds once. No pointer needs to be aligned. A
/// destination may be the same memory as a source, or overlap it from below (to < from); other
/// overlaps, and overlaps between destinations, are not allowed. `from_count` >= 1. `store` applies
/// to to[0]; further destinations are shared scratch, or results (`stream_past`). What was streamed
/// is fenced by the caller.
using ReduceKernel = void (*)(void* const* to, int to_count, const void* const* from,
                              int from_count, std::size_t count, Store store);

/// Null where `op` is not defined on `dtype`. The pointer stays valid for the life of the process.
ReduceKernel reduce_kernel(Op op, Dtype dtype);

/// Each of `to` = `from`, under the same rules (`to` may overlap `from` from below). A destination
/// that is `from` itself is left alone.
void copy_bytes(void* const* to, int to_count, const void* from, std::size_t bytes, Store store);

/// Orders streamed stores before the stores that follow; call it before telling anyone that
/// streamed data is there.
void store_fence();

/// The instruction set in use, for `trib info`: "x86-64-v4", "x86-64-v3" or "generic".
const char* kernel_isa();

}  // namespace trib

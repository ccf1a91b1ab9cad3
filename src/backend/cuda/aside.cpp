// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/aside.hpp"

#include <algorithm>

#include "schedule/schedule.hpp"

namespace trib::cuda {

bool covers_input(const Arguments& arguments, int rank) {
  if (!is_scatter(static_cast<Collective>(arguments.signature.collective))) return false;
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t* const begin = arguments.chunk_begin;
  const std::size_t own = (begin[rank + 1] - begin[rank]) * element;
  const auto* const in = static_cast<const std::byte*>(arguments.in);
  const auto* const out = static_cast<const std::byte*>(arguments.out);
  if (out + own <= in || in + begin[arguments.chunks] * element <= out) return false;
  return out != in || own > begin[1] * element;
}

Aside::~Aside() {
  if (blocks_.empty()) return;
  try {
    const Current current(context_);
    for (const Block& block : blocks_)
      block.is_pinned ? driver()->cuMemFreeHost_(reinterpret_cast<void*>(block.memory))
                      : driver()->cuMemFree_(block.memory);
  } catch (const Error&) {
    // The context is gone, and the memory with it.
  }
}

CUdeviceptr Aside::reserve(std::size_t bytes) {
  const std::size_t before = blocks_.empty() ? 0 : blocks_.back().bytes;
  if (bytes <= before) return blocks_.back().memory;
  Block block;
  for (const std::size_t wanted : {std::max(bytes, 2 * before), bytes}) {
    if (driver()->cuMemAlloc_(&block.memory, wanted) != CUDA_SUCCESS) continue;
    block.bytes = wanted;
    break;
  }
  if (block.bytes == 0) {
    void* memory = nullptr;
    check(driver()->cuMemHostAlloc_(&memory, bytes,
                                    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
          "cannot allocate room for a result");
    block = {reinterpret_cast<CUdeviceptr>(memory), bytes, true};
  }
  blocks_.push_back(block);
  return block.memory;
}

}  // namespace trib::cuda

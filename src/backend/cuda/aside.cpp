// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/aside.hpp"

#include <algorithm>
#include <new>

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

Asides::~Asides() { give_back(blocks_); }

void Asides::give_back(const std::vector<Block>& blocks) const noexcept {
  if (blocks.empty()) return;
  try {
    const Current current(context_);
    for (const Block& block : blocks)
      block.is_pinned ? driver()->cuMemFreeHost_(reinterpret_cast<void*>(block.memory))
                      : driver()->cuMemFree_(block.memory);
  } catch (const Error&) {
    // The context is gone, and the memory with it.
  }
}

Asides::Block Asides::take(std::size_t bytes, std::size_t wanted) {
  {
    const std::lock_guard lock(mutex_);
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block)
      if (block->bytes >= bytes && (best == blocks_.end() || block->bytes < best->bytes))
        best = block;
    if (best != blocks_.end()) {
      const Block found = *best;
      blocks_.erase(best);
      return found;
    }
  }
  Block block;
  for (const std::size_t its : {wanted, bytes})
    if (driver()->cuMemAlloc_(&block.memory, its) == CUDA_SUCCESS) {
      block.bytes = its;
      return block;
    }
  void* memory = nullptr;
  check(driver()->cuMemHostAlloc_(&memory, bytes,
                                  CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cannot allocate room for a result");
  return {reinterpret_cast<CUdeviceptr>(memory), bytes, true};
}

void Asides::put_back(const std::vector<Block>& blocks) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    blocks_.insert(blocks_.end(), blocks.begin(), blocks.end());
  } catch (const std::bad_alloc&) {
    give_back(blocks);
  }
}

CUdeviceptr Aside::reserve(std::size_t bytes) {
  const std::size_t before = blocks_.empty() ? 0 : blocks_.back().bytes;
  if (bytes > before) blocks_.push_back(asides_->take(bytes, std::max(bytes, 2 * before)));
  return blocks_.back().memory;
}

}  // namespace trib::cuda

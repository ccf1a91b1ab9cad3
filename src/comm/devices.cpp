// SPDX-License-Identifier: BSD-3-Clause
#include "comm/devices.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace trib {
namespace {

std::atomic<int> calls{0};

}  // namespace

void DeviceCall::begin() {
  is_first_ = calls.fetch_add(1) == 0;
  is_under_way_ = true;
}

void DeviceCall::end() {
  if (is_under_way_) calls.fetch_sub(1);
  is_under_way_ = false;
}

Memory Devices::where(const void* pointer, Dtype dtype) const {
  if (!are_in_use) return Memory::host;
  const Memory memory = channel ? channel->where(pointer) : backend->where(pointer);
  // Kernels cannot load elements that are not aligned.
  if (memory == Memory::host || reinterpret_cast<std::uintptr_t>(pointer) % alignment(dtype) == 0)
    return memory;
  return memory == Memory::pinned ? Memory::host : Memory::distant;
}

Card Devices::card(const Request& request, const DeviceCall& call) const {
  return {where(request.in, request.dtype), where(request.out, request.dtype), !call.is_first(),
          are_in_use};
}

bool Devices::can_serve(const Request& request, std::uint64_t elements) const {
  return !are_refused && backend != nullptr && elements <= kMostElements &&
         backend->is_defined(request.op, request.dtype);
}

Route Devices::route(const HostChannel& met, int size, const Request& request,
                     std::uint64_t elements) const {
  bool is_any_beyond = false, is_any_host = false, is_any_contended = false, are_all_ready = true;
  for (int rank = 0; rank < size; ++rank) {
    const Card card = met.card(rank);
    for (const Memory memory : {card.in, card.out}) {
      is_any_beyond = is_any_beyond || is_beyond_host(memory);
      is_any_host = is_any_host || memory == Memory::host || memory == Memory::distant;
    }
    is_any_contended = is_any_contended || card.is_contended ||
                       (are_shared && (refused_.count({rank, card.in_block}) > 0 ||
                                       refused_.count({rank, card.out_block}) > 0));
    are_all_ready = are_all_ready && card.is_ready;
  }
  if (!is_any_beyond) return Route::host;
  const bool is_served =
      are_all_ready && !is_any_host && !is_any_contended && can_serve(request, elements);
  return is_served ? Route::device : Route::staged;
}

bool Devices::has_news(const HostChannel& met, int size) {
  bool is_new = false;
  seen_.resize(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    const Card card = met.card(rank);
    std::uint64_t& seen = seen_[static_cast<std::size_t>(rank)];
    const std::uint64_t highest = std::max(card.in_block, card.out_block);
    is_new = is_new || highest > seen;
    seen = std::max(seen, highest);
  }
  return is_new;
}

void Devices::refuse(const HostChannel& met, int size) {
  for (int rank = 0; rank < size; ++rank)
    for (const std::uint64_t block : {met.card(rank).in_block, met.card(rank).out_block})
      if (block != 0) refused_.insert({rank, block});
}

}  // namespace trib

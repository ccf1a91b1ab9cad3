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

Memory Devices::where(const void* pointer, Dtype dtype, const DeviceChannel* its) const {
  if (!are_in_use) return Memory::host;
  const Memory memory = its != nullptr ? its->where(pointer) : backend->where(pointer);
  // Kernels cannot load elements that are not aligned.
  if (memory == Memory::host || reinterpret_cast<std::uintptr_t>(pointer) % alignment(dtype) == 0)
    return memory;
  return memory == Memory::pinned ? Memory::host : Memory::distant;
}

Card Devices::card(const Request& request, const DeviceCall& call, const DeviceChannel* its) const {
  return {where(request.in, request.dtype, its), where(request.out, request.dtype, its),
          !call.is_first(), are_in_use};
}

bool Devices::is_defined(const Request& request, std::uint64_t elements) const {
  return backend != nullptr && elements <= kMostElements &&
         backend->is_defined(request.op, request.dtype);
}

Route Devices::route(const HostChannel& met, int size, bool can_serve,
                     const NamedBlocks& named) const {
  bool is_any_beyond = false, is_any_host = false, is_any_contended = false, are_all_ready = true;
  for (int rank = 0; rank < size; ++rank) {
    const Card card = met.card(rank);
    for (const Memory memory : {card.in, card.out}) {
      is_any_beyond = is_any_beyond || is_beyond_host(memory);
      is_any_host = is_any_host || memory == Memory::host || memory == Memory::distant;
    }
    is_any_contended =
        is_any_contended || card.is_contended || (are_shared && named.is_any_refused(rank, card));
    are_all_ready = are_all_ready && card.is_ready;
  }
  if (!is_any_beyond) return Route::host;
  const bool is_served = are_all_ready && !is_any_host && !is_any_contended && can_serve;
  return is_served ? Route::device : Route::staged;
}

bool Devices::are_on_own_devices(const HostChannel& met, int size, Config::SharedGpu mode) {
  for (int rank = 0; rank < size; ++rank) {
    const Card card = met.card(rank);
    const bool is_there = card.is_ready && card.in == Memory::device &&
                          (card.out == Memory::device || card.out == Memory::none);
    if (!is_there || card.device == 0) return false;
    for (int other = 0; other < rank && mode != Config::SharedGpu::all; ++other)
      if (met.card(other).device == card.device) return false;
  }
  return true;
}

void Devices::poison(const Error& why) noexcept {
  if (channel) channel->poison(why);
  if (own_of_requests) own_of_requests->poison(why);
}

void Devices::tidy_up() {
  if (channel) channel->tidy_up();
  if (own_of_requests) own_of_requests->tidy_up();
}

bool Devices::are_mappable(const HostChannel& met, int size, const Request& request,
                           const NamedBlocks& named) {
  for (int rank = 0; rank < size; ++rank) {
    const Card card = met.card(rank);
    const bool gets_results = request.collective == Collective::allreduce ||
                              (request.collective == Collective::reduce && rank == request.root);
    if (card.in_block == 0 || (gets_results && card.out_block == 0) ||
        named.is_any_refused(rank, card))
      return false;
  }
  return true;
}

bool Devices::are_settled(const HostChannel& met, int size) {
  for (int rank = 0; rank < size; ++rank)
    if (!met.card(rank).is_settled) return false;
  return true;
}

bool NamedBlocks::has_news(const HostChannel& met, int size) {
  news_.clear();
  blocks_.resize(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    const Card card = met.card(rank);
    for (const std::uint64_t block : {card.in_block, card.out_block}) {
      std::uint64_t& seen = blocks_[static_cast<std::size_t>(rank)].seen[block % kShownBlocks];
      if (block == 0 || block == seen) continue;
      seen = block;
      news_.emplace_back(rank, block);
    }
  }
  return !news_.empty();
}

void NamedBlocks::refuse_news() {
  for (const auto& [rank, block] : news_)
    blocks_[static_cast<std::size_t>(rank)].refused[block % kShownBlocks] = block;
}

bool NamedBlocks::is_refused(int rank, std::uint64_t block) const {
  return block != 0 && static_cast<std::size_t>(rank) < blocks_.size() &&
         blocks_[static_cast<std::size_t>(rank)].refused[block % kShownBlocks] == block;
}

}  // namespace trib

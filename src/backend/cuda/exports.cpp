// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/exports.hpp"

#include <algorithm>
#include <atomic>

namespace trib::cuda {

struct Exports::Shown {
  std::atomic<std::uint64_t> number;  // zero: taken back
  CUipcMemHandle handle;              // written before `number`
};

/// Of a rank, in shared memory. It alone writes it.
struct Exports::Table {
  alignas(64) std::atomic<std::uint64_t> taken_back;  // counts
  Shown shown[kShown];
};

Exports::Exports(int rank, int size, CUcontext context, const Habits& habits)
    : rank_(rank),
      context_(context),
      driver_(*driver()),
      own_(kShown),
      habits_(habits),
      peers_(static_cast<std::size_t>(size)) {}

std::unique_ptr<Exports> Exports::open(Bootstrap& bootstrap, Config::Segment mode,
                                       CUcontext context, const Habits& habits, std::string& why) {
  auto exports =
      std::unique_ptr<Exports>(new Exports(bootstrap.rank(), bootstrap.size(), context, habits));
  exports->segment_ = Segment::open(bootstrap, sizeof(Table), mode, why);
  return exports->segment_ ? std::move(exports) : nullptr;
}

Exports::~Exports() {
  try {
    const Current current(context_);
    for (Peer& peer : peers_)
      for (Mapped& mapped : peer.mapped) close(mapped);
  } catch (const Error&) {
    // The context is gone, and its mappings with it.
  }
}

Exports::Table& Exports::table(int rank) const {
  return *reinterpret_cast<Table*>(segment_->of(rank));
}

// ---------------------------------------------------------------------------- this rank's memory

std::uint64_t Exports::show(const void* pointer, std::uint64_t& at) {
  ++shows_;
  unsigned long long id = 0;
  CUdeviceptr base = 0;
  unsigned is_managed = 0, has_handle = 0;
  CUpointer_attribute wanted[] = {
      CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
      CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&id, &base, &is_managed, &has_handle};
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  if (driver_.cuPointerGetAttributes_(4, wanted, values, address) != CUDA_SUCCESS || id == 0 ||
      base == 0 || is_managed != 0 || has_handle == 0)
    return 0;
  at = address - base;
  Own* own = find(base, id);
  if (own == nullptr) own = add(base, id);
  if (own == nullptr) return 0;
  own->used = shows_;
  if (own->uses++ == habits_.trials) publish(*own);
  return own->is_shown ? own->number : 0;
}

Exports::Own* Exports::find(CUdeviceptr base, unsigned long long id) {
  for (Own& own : own_)
    if (own.number != 0 && own.id == id && own.base == base) return &own;
  return nullptr;
}

/// In a free place, or that of the one that was not used for the longest time. Null: that was too
/// recently.
Exports::Own* Exports::add(CUdeviceptr base, unsigned long long id) {
  constexpr std::uint64_t kPause = 32;  // all are looked at, which takes microseconds
  if (shows_ < full_until_) return nullptr;
  // It may lie where another one was, which its peers have to let go first.
  take_back_freed(kShown);
  const auto place = std::min_element(own_.begin(), own_.end(), [](const Own& a, const Own& b) {
    return a.used < b.used;  // of a free place: zero
  });
  if (place->number != 0 && shows_ - place->used <= habits_.patience) {
    full_until_ = shows_ + kPause;
    return nullptr;
  }
  take_back(*place);
  // The next number of this place.
  const auto index = static_cast<std::uint64_t>(place - own_.begin());
  last_number_ += 1 + (index + kShown - (last_number_ + 1) % kShown) % kShown;
  place->number = last_number_;
  place->base = base;
  place->id = id;
  return &*place;
}

void Exports::publish(Own& own) {
  CUipcMemHandle handle;
  own.is_shown = driver_.cuIpcGetMemHandle_(&handle, own.base) == CUDA_SUCCESS;
  if (!own.is_shown) return;
  Shown& shown = table(rank_).shown[own.number % kShown];
  shown.handle = handle;
  // Release: pairs with the acquire in map(). The card that names the number comes later still.
  shown.number.store(own.number, std::memory_order_release);
}

void Exports::take_back(Own& own) {
  if (own.is_shown) {
    Table& mine = table(rank_);
    mine.shown[own.number % kShown].number.store(0, std::memory_order_relaxed);
    // Release: pairs with the acquire in close_taken_back().
    mine.taken_back.fetch_add(1, std::memory_order_release);
  }
  own = {};
}

void Exports::take_back_freed(std::size_t looks) {
  for (std::size_t i = 0, looked = 0; i < kShown && looked < looks; ++i) {
    next_look_ = (next_look_ + 1) % kShown;
    Own& own = own_[next_look_];
    if (own.number == 0) continue;
    ++looked;
    unsigned long long id = 0;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID};
    void* values[] = {&id};
    if (driver_.cuPointerGetAttributes_(1, wanted, values, own.base) == CUDA_SUCCESS &&
        id == own.id)
      continue;
    take_back(own);
  }
}

// ------------------------------------------------------------------------------------ the others'

bool Exports::reach(int rank, const Card& card, MappedBuffers& buffers) {
  close_taken_back(rank);
  bool is_reached = true;
  const auto find = [&](std::uint64_t block, std::uint64_t at) -> void* {
    if (block == 0) return nullptr;
    const CUdeviceptr base = map(rank, block);
    if (base == 0) is_reached = false;
    return base == 0 ? nullptr : reinterpret_cast<void*>(base + at);
  };
  buffers = {find(card.in_block, card.in_at), find(card.out_block, card.out_at)};
  return is_reached;
}

/// The base of an allocation that `rank` shows, or zero.
CUdeviceptr Exports::map(int rank, std::uint64_t number) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.mapped.resize(kShown);
  Mapped& mapped = peer.mapped[number % kShown];
  if (mapped.number == number) return mapped.base;
  close(mapped);
  const Shown& shown = table(rank).shown[number % kShown];
  if (shown.number.load(std::memory_order_acquire) != number) return 0;
  mapped.number = number;
  if (driver_.cuIpcOpenMemHandle_(&mapped.base, shown.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) !=
      CUDA_SUCCESS)
    mapped.base = 0;
  return mapped.base;
}

void Exports::close_taken_back() {
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) close_taken_back(rank);
}

void Exports::close_taken_back(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const std::uint64_t count = table(rank).taken_back.load(std::memory_order_acquire);
  if (count == peer.taken_back) return;
  peer.taken_back = count;
  for (Mapped& mapped : peer.mapped)
    if (mapped.number != 0 && table(rank).shown[mapped.number % kShown].number.load(
                                  std::memory_order_relaxed) != mapped.number)
      close(mapped);
}

void Exports::close(Mapped& mapped) {
  if (mapped.base != 0) driver_.cuIpcCloseMemHandle_(mapped.base);
  mapped = {};
}

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/sharing.hpp"

#include "schedule/share.hpp"

namespace trib::cuda {

struct Sharing::Shown {
  std::atomic<std::uint64_t> number;  // zero: taken back
  CUipcMemHandle handle;              // written before `number`
};

/// Of a rank, in shared memory. Each word has one writer: the rank.
struct Sharing::Table {
  alignas(64) std::atomic<std::uint64_t> done;  // leaders: number of the last launch that ended
  alignas(64) std::atomic<std::uint64_t> taken_back;  // counts
  Shown shown[kShown];
};

Sharing::Sharing(int rank, const Level& device_of, CUcontext context)
    : rank_(rank),
      device_of_(device_of),
      context_(context),
      driver_(*driver()),
      own_(kShown),
      followers_(device_of.size()) {
  for (const auto& ranks : ranks_of(device_of)) leaders_.push_back(ranks.front());
}

std::unique_ptr<Sharing> Sharing::open(Bootstrap& bootstrap, Config::Segment mode,
                                       CUcontext context, const Level& device_of,
                                       std::string& why) {
  auto sharing = std::unique_ptr<Sharing>(new Sharing(bootstrap.rank(), device_of, context));
  sharing->segment_ = Segment::open(bootstrap, sizeof(Table), mode, why);
  return sharing->segment_ ? std::move(sharing) : nullptr;
}

Sharing::~Sharing() {
  try {
    const Current current(context_);
    for (Follower& follower : followers_)
      for (Mapped& mapped : follower.mapped) close(mapped);
  } catch (const Error&) {
    // The context is gone, and its mappings with it.
  }
}

Sharing::Table& Sharing::table(int rank) const {
  return *reinterpret_cast<Table*>(segment_->of(rank));
}

// ------------------------------------------------------------------------------------- followers

void Sharing::show(Card& card, const void* in, const void* out) {
  if (leads()) return;
  const Current current(context_);
  take_back_freed(2);  // some now, others in the next call
  const auto show_one = [&](Memory& memory, const void* pointer, std::uint64_t& block,
                            std::uint64_t& at) {
    if (memory == Memory::pinned) memory = Memory::host;
    if (memory != Memory::device) return;
    block = number_of(pointer, card.in_block, at);
    if (block == 0) memory = Memory::distant;
  };
  show_one(card.in, in, card.in_block, card.in_at);
  show_one(card.out, out, card.out_block, card.out_at);
  // The leader's kernel is ordered behind its own default stream, not behind this rank's.
  if (driver_.cuStreamQuery_(CU_STREAM_LEGACY) == CUDA_ERROR_NOT_READY)
    check(driver_.cuStreamSynchronize_(CU_STREAM_LEGACY), "the default stream failed");
}

std::uint64_t Sharing::number_of(const void* pointer, std::uint64_t kept, std::uint64_t& at) {
  unsigned long long id = 0;
  CUdeviceptr base = 0;
  unsigned is_managed = 0;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                  CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void* values[] = {&id, &base, &is_managed};
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  if (driver_.cuPointerGetAttributes_(3, wanted, values, address) != CUDA_SUCCESS || id == 0 ||
      base == 0 || is_managed != 0)
    return 0;
  at = address - base;
  for (const Own& own : own_)
    if (own.number != 0 && own.id == id && own.base == base) return own.is_shown ? own.number : 0;
  // It may lie where another one was, which its leader has to let go first.
  take_back_freed(kShown);
  // A new one takes the place of the oldest.
  if (kept != 0 && (last_number_ + 1) % kShown == kept % kShown) ++last_number_;
  const std::uint64_t number = ++last_number_;
  Own& own = own_[number % kShown];
  Table& mine = table(rank_);
  Shown& shown = mine.shown[number % kShown];
  shown.number.store(0, std::memory_order_relaxed);
  if (own.is_shown) mine.taken_back.fetch_add(1, std::memory_order_relaxed);
  own = {number, base, id, false};
  CUipcMemHandle handle;
  own.is_shown = driver_.cuIpcGetMemHandle_(&handle, base) == CUDA_SUCCESS;
  if (!own.is_shown) return 0;
  shown.handle = handle;
  // Release: pairs with the acquire in map(). The card that names the number comes later still.
  shown.number.store(number, std::memory_order_release);
  return number;
}

/// Looks at `looks` of the allocations that this rank shows: whether the program has freed them.
void Sharing::take_back_freed(std::size_t looks) {
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
    Table& mine = table(rank_);
    mine.shown[own.number % kShown].number.store(0, std::memory_order_relaxed);
    mine.taken_back.fetch_add(1, std::memory_order_relaxed);  // the next meeting carries both
    own = {};
  }
}

bool Sharing::is_told(std::uint64_t number) const {
  // Acquire: pairs with tell(); what the kernel wrote comes before.
  return table(leader(device(rank_))).done.load(std::memory_order_acquire) >= number;
}

// --------------------------------------------------------------------------------------- leaders

void Sharing::tell(std::uint64_t number) {
  table(rank_).done.store(number, std::memory_order_release);
}

bool Sharing::reach(const HostChannel& met, const void* in, void* out,
                    std::vector<MappedBuffers>& mapped) {
  mapped.assign(device_of_.size(), {});
  if (!leads()) return true;
  mapped[static_cast<std::size_t>(rank_)] = {const_cast<void*>(in), out};
  const Current current(context_);
  bool is_reached = true;
  for (int rank = 0; rank < static_cast<int>(device_of_.size()); ++rank) {
    if (rank == rank_ || device(rank) != device(rank_)) continue;
    close_taken_back(rank);
    const Card card = met.card(rank);
    const auto find = [&](std::uint64_t block, std::uint64_t at) -> void* {
      if (block == 0) return nullptr;
      const CUdeviceptr base = map(rank, block);
      if (base == 0) is_reached = false;
      return base == 0 ? nullptr : reinterpret_cast<void*>(base + at);
    };
    mapped[static_cast<std::size_t>(rank)] = {find(card.in_block, card.in_at),
                                              find(card.out_block, card.out_at)};
  }
  return is_reached;
}

/// The base of an allocation that `rank` shows, or zero.
CUdeviceptr Sharing::map(int rank, std::uint64_t number) {
  Follower& follower = followers_[static_cast<std::size_t>(rank)];
  follower.mapped.resize(kShown);
  Mapped& mapped = follower.mapped[number % kShown];
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

void Sharing::close_taken_back(int rank) {
  Follower& follower = followers_[static_cast<std::size_t>(rank)];
  const std::uint64_t count = table(rank).taken_back.load(std::memory_order_relaxed);
  if (count == follower.taken_back) return;
  follower.taken_back = count;
  for (Mapped& mapped : follower.mapped)
    if (mapped.number != 0 && table(rank).shown[mapped.number % kShown].number.load(
                                  std::memory_order_relaxed) != mapped.number)
      close(mapped);
}

void Sharing::close(Mapped& mapped) {
  if (mapped.base != 0) driver_.cuIpcCloseMemHandle_(mapped.base);
  mapped = {};
}

}  // namespace trib::cuda

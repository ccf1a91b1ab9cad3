// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/sharing.hpp"

#include "base/locks.hpp"
#include "schedule/share.hpp"

namespace trib::cuda {

Sharing::Sharing(int rank, const Level& device_of, CUcontext context)
    : rank_(rank), device_of_(device_of), context_(context) {
  for (const auto& ranks : ranks_of(device_of)) leaders_.push_back(ranks.front());
}

std::unique_ptr<Sharing> Sharing::open(Bootstrap& bootstrap, Config::Segment mode,
                                       const ContextId& context, const Level& device_of,
                                       std::string& why) {
  auto sharing = std::unique_ptr<Sharing>(new Sharing(bootstrap.rank(), device_of, context.handle));
  sharing->segment_ = Segment::open(bootstrap, sizeof(Words), mode, why);
  if (!sharing->segment_) return nullptr;
  std::vector<ProcessId> processes(device_of.size());
  const ProcessId mine = ProcessId::of_this();
  bootstrap.exchange(&mine, processes.data(), sizeof mine);
  sharing->process_of_leader_ =
      processes[static_cast<std::size_t>(sharing->leader(sharing->device(sharing->rank_)))];
  sharing->can_see_leader_ = can_see(sharing->process_of_leader_);
  std::vector<int> readers;
  if (!sharing->leads()) readers.push_back(sharing->leader(sharing->device(sharing->rank_)));
  sharing->exports_ = Exports::open(bootstrap, mode, context, readers, {}, why);
  return sharing->exports_ ? std::move(sharing) : nullptr;
}

Sharing::Words& Sharing::words(int rank) const {
  return *reinterpret_cast<Words*>(segment_->of(rank));
}

// Release and acquire: who has read, or got from a GPU that has read, what the rank wrote into its
// buffers after it gave up, sees that it did.
void Sharing::give_up() noexcept {
  if (segment_) words(rank_).has_given_up.store(true, std::memory_order_release);
}

void Sharing::end_all() noexcept {
  if (segment_) words(rank_).has_ended.store(true, std::memory_order_release);
}

// Acquire: pairs with end_all(); what kernels stored comes before.
bool Sharing::has_leader_ended() const noexcept {
  if (!segment_) return true;
  if (words(leader(device(rank_))).has_ended.load(std::memory_order_acquire)) return true;
  return can_see_leader_ && is_gone(process_of_leader_);
}

bool Sharing::has_anyone_given_up() const {
  for (int rank = 0; rank < static_cast<int>(device_of_.size()); ++rank)
    if (words(rank).has_given_up.load(std::memory_order_acquire)) return true;
  return false;
}

// ------------------------------------------------------------------------------------- followers

void Sharing::show(Card& card, const ShownBuffers& buffers) {
  if (leads()) return exports_->look_for_letters();
  const Current current(context_);
  exports_->take_back_freed(2);  // some now, others in the next call
  const auto show_one = [&](Memory& memory, const void* pointer, std::size_t bytes,
                            std::uint64_t& block, std::uint64_t& at, std::uint64_t beside) {
    if (memory == Memory::pinned) memory = Memory::host;
    if (memory != Memory::device) return;
    block = exports_->show(pointer, bytes, at, beside);
    if (block == 0) memory = Memory::distant;
  };
  show_one(card.in, buffers.in, buffers.in_bytes, card.in_block, card.in_at, 0);
  show_one(card.out, buffers.out, buffers.out_bytes, card.out_block, card.out_at, card.in_block);
}

std::shared_ptr<void> Sharing::hold(Bootstrap& bootstrap, const ShownBuffers& buffers,
                                    std::vector<MappedBuffers>& mapped) {
  mapped.assign(device_of_.size(), {});
  mapped[static_cast<std::size_t>(rank_)] = {const_cast<void*>(buffers.in),
                                             const_cast<void*>(buffers.out)};
  const Current current(context_);
  const auto reach = [&](int rank, const Card& card) {
    return !leads() || device(rank) != device(rank_) ||
           exports_->reach(rank, card, mapped[static_cast<std::size_t>(rank)]);
  };
  // Nobody maps what leaders have.
  return leads() ? exports_->hold_none(bootstrap, reach)
                 : exports_->hold_all(bootstrap, buffers, reach);
}

bool Sharing::is_still_there(const std::shared_ptr<void>& held) const {
  if (leads()) return true;
  const Current current(context_);
  return exports_->is_still_there(held);
}

void Sharing::tidy_up() {
  const Current current(context_);
  leads() ? exports_->close_taken_back() : exports_->take_back_freed(kShownBlocks / 8);
}

void Sharing::take_back_freed() {
  if (!leads()) exports_->take_back_freed(kShownBlocks);
}

bool Sharing::await(std::uint64_t number, int polls) const {
  const Words& leaders = words(leader(device(rank_)));
  // Acquire: pairs with end(); what the kernel wrote comes before.
  for (int poll = 0; leaders.done.load(std::memory_order_acquire) < number; ++poll) {
    if (poll >= polls) return false;
    relax();
  }
  return true;
}

// --------------------------------------------------------------------------------------- leaders

void Sharing::end(std::uint64_t number) {
  if (has_anyone_given_up())
    throw Error(Code::peer, "a rank whose buffers a kernel was reading gave up the reduction");
  words(rank_).done.store(number, std::memory_order_release);
}

bool Sharing::reach(const HostChannel& met, const void* in, void* out,
                    std::vector<MappedBuffers>& mapped) {
  mapped.assign(device_of_.size(), {});
  if (!leads()) return true;
  mapped[static_cast<std::size_t>(rank_)] = {const_cast<void*>(in), out};
  const Current current(context_);
  bool is_reached = true;
  for (int rank = 0; rank < static_cast<int>(device_of_.size()); ++rank)
    if (rank != rank_ && device(rank) == device(rank_) &&
        !exports_->reach(rank, met.card(rank), mapped[static_cast<std::size_t>(rank)]))
      is_reached = false;
  return is_reached;
}

}  // namespace trib::cuda

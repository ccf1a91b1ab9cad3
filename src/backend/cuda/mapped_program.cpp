// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/mapped_program.hpp"

#include <algorithm>

namespace trib::cuda {
namespace {

/// The only step of a schedule that moves anything, if it is a fold of one chunk of all `size`
/// ranks' `in`, in their order. Otherwise null.
const Step* only_fold(const Schedule& schedule, int size) {
  const Step* found = nullptr;
  for (const Step& step : schedule.steps) {
    if (step.verb == Verb::signal || step.verb == Verb::wait) continue;
    if (found != nullptr || step.verb != Verb::reduce) return nullptr;
    found = &step;
  }
  if (found == nullptr || static_cast<int>(found->from.size()) != size) return nullptr;
  for (int rank = 0; rank < size; ++rank)
    if (found->from[static_cast<std::size_t>(rank)] != in(rank, found->to.front().chunk))
      return nullptr;
  for (const Location& to : found->to)
    if (to.buffer != Buffer::out || to.span != 1) return nullptr;
  return found;
}

}  // namespace

std::unique_ptr<MappedProgram> MappedProgram::of(Channel& channel,
                                                 const std::vector<Schedule>& all) {
  for (const Schedule& schedule : all)
    if (only_fold(schedule, channel.size_) == nullptr) return nullptr;
  const Step* const fold = only_fold(all[static_cast<std::size_t>(channel.rank_)], channel.size_);
  return std::unique_ptr<MappedProgram>(new MappedProgram(channel, *fold));
}

MappedProgram::MappedProgram(Channel& channel, const Step& fold)
    : channel_(channel),
      chunk_(fold.to.front().chunk),
      repeats_(channel.driver_, channel.replays_, channel.context_id_) {
  for (const Location& to : fold.to) to_.push_back(to.rank);
  // The nearest behind this rank first, itself last: at any time, every rank stores to another one.
  const auto distance = [&](int rank) { return wrap(rank - channel.rank_ - 1, channel.size_); };
  std::sort(to_.begin(), to_.end(), [&](int a, int b) { return distance(a) < distance(b); });
  launch_.doorbell = channel.doorbell_;
  launch_.counters = reinterpret_cast<Counters*>(channel.counters_);
  launch_.time_limit = channel.time_limit_;
  launch_.rank = static_cast<std::uint8_t>(channel.rank_);
  launch_.size = static_cast<std::uint8_t>(channel.size_);
  launch_.outs = static_cast<std::uint8_t>(to_.size());
  for (int rank = 0; rank < channel.size_; ++rank)
    launch_.inbox[rank] =
        reinterpret_cast<std::byte*>(channel.inboxes_[static_cast<std::size_t>(rank)]);
}

Operation& MappedProgram::launch(const Arguments& arguments) {
  channel_.do_without_resident();
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t* const begin = arguments.chunk_begin;
  const bool is_scattered = is_scatter(static_cast<Collective>(arguments.signature.collective));
  launch_.number = ++channel_.launches_;
  launch_.length = static_cast<std::uint32_t>(begin[chunk_ + 1] - begin[chunk_]);
  std::uintptr_t bits = 0;
  const auto place = [&](void* buffer, std::size_t elements_before) {
    const auto address = reinterpret_cast<std::uintptr_t>(buffer) + elements_before * element;
    bits |= address;
    return reinterpret_cast<std::byte*>(address);
  };
  for (std::size_t rank = 0; rank < launch_.size; ++rank)
    launch_.in[rank] = place(arguments.mapped[rank].in, begin[chunk_]);
  for (std::size_t i = 0; i < to_.size(); ++i) {
    const std::size_t origin = is_scattered ? begin[to_[i]] : 0;
    launch_.out[i] =
        place(arguments.mapped[static_cast<std::size_t>(to_[i])].out, begin[chunk_] - origin);
  }
  launch_.units = bits % kUnitBytes == 0
                      ? static_cast<std::uint32_t>(launch_.length * element / kUnitBytes)
                      : 0;

  const CUfunction function =
      channel_.kernels_->find(arguments.op, arguments.dtype, Protocol::mapped);
  const int threads = std::min(arguments.threads, kMaxMappedThreads);
  const Current current(channel_.context_);
  repeats_.launch(
      {function, static_cast<unsigned>(arguments.blocks), static_cast<unsigned>(threads)},
      channel_.stream_, launch_, sizeof launch_, nullptr, 0);
  return *this;
}

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/local_program.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace trib::cuda {
namespace {

/// Whose `out` gets the chunk of a step that folds it over all `size` ranks in their order.
/// Nothing: the step is another one.
std::optional<std::vector<int>> targets_of(const Step& step, int size) {
  const Location& first = step.to.front();
  if (step.verb != Verb::reduce || first.span != 1 || static_cast<int>(step.from.size()) != size)
    return {};
  for (int rank = 0; rank < size; ++rank)
    if (step.from[static_cast<std::size_t>(rank)] != in(rank, first.chunk)) return {};
  std::vector<int> ranks;
  for (const Location& to : step.to) {
    if (to.buffer != Buffer::out || to.chunk != first.chunk) return {};
    ranks.push_back(to.rank);
  }
  return ranks;
}

}  // namespace

std::unique_ptr<LocalProgram> LocalProgram::of(Channel& channel, const std::vector<Schedule>& all) {
  std::vector<std::vector<int>> targets(static_cast<std::size_t>(all.front().chunks));
  for (const Step& step : all[static_cast<std::size_t>(channel.leader_of(0))].steps) {
    if (step.verb == Verb::signal || step.verb == Verb::wait) continue;
    auto ranks = targets_of(step, channel.size_);
    if (!ranks) return nullptr;
    std::vector<int>& known = targets[static_cast<std::size_t>(step.to.front().chunk)];
    if (!std::exchange(known, std::move(*ranks)).empty()) return nullptr;
  }
  // Either all chunks go to the same ranks, or each to the one of its number.
  const bool is_same = std::all_of(targets.begin(), targets.end(),
                                   [&](const auto& ranks) { return ranks == targets.front(); });
  if (is_same && !targets.front().empty())
    return std::unique_ptr<LocalProgram>(new LocalProgram(channel, targets.front()));
  std::vector<int> to;
  for (int rank = 0; rank < channel.size_; ++rank) to.push_back(rank);
  for (const int rank : to)
    if (targets.size() != to.size() || targets[static_cast<std::size_t>(rank)] != std::vector{rank})
      return nullptr;
  return std::unique_ptr<LocalProgram>(new LocalProgram(channel, std::move(to)));
}

LocalProgram::LocalProgram(Channel& channel, std::vector<int> to)
    : channel_(channel),
      to_(std::move(to)),
      repeats_(channel.driver_, channel.replays_, channel.context_id_),
      aside_(channel.context_id_) {
  launch_.doorbell = channel.doorbell_;
  launch_.counters = reinterpret_cast<Counters*>(channel.counters_);
  launch_.time_limit = channel.time_limit_;
}

/// Whether a reduce_scatter's result lies over what other threads have yet to read.
bool LocalProgram::covers_any_input(const Arguments& arguments, int size) {
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t* const begin = arguments.chunk_begin;
  for (int rank = 0; rank < size; ++rank) {
    const MappedBuffers& buffers = arguments.mapped[rank];
    const auto* const input = static_cast<const std::byte*>(buffers.in);
    const auto* const output = static_cast<const std::byte*>(buffers.out);
    const std::size_t own = (begin[rank + 1] - begin[rank]) * element;
    if (output < input + begin[arguments.chunks] * element && input < output + own) return true;
  }
  return false;
}

Operation& LocalProgram::launch(const Arguments& arguments) {
  LocalLaunch& launch = launch_;
  launch.number = ++channel_.launches_;
  if (!channel_.leads()) return *this;
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t* const begin = arguments.chunk_begin;
  const int size = channel_.size_;
  launch.is_scattered = is_scatter(static_cast<Collective>(arguments.signature.collective));
  launch.sources = static_cast<std::uint8_t>(size);
  for (int rank = 0; rank < size; ++rank)
    launch.in[rank] = static_cast<const std::byte*>(arguments.mapped[rank].in);

  launch.folds = launch.outs = 0;
  const auto add_fold = [&](std::size_t from, std::size_t to) {
    launch.fold[launch.folds++] = {from * element, 0, static_cast<std::uint32_t>(to - from)};
  };
  for (const int rank : to_) {
    if (launch.is_scattered && begin[rank + 1] == begin[rank]) continue;
    if (launch.is_scattered) add_fold(begin[rank], begin[rank + 1]);
    launch.out[launch.outs++] = static_cast<std::byte*>(arguments.mapped[rank].out);
  }
  if (!launch.is_scattered) add_fold(begin[0], begin[arguments.chunks]);

  const Current current(channel_.context_);
  launch.is_last = true;
  Repeats::Kernel kernel = lay_out(launch, arguments);
  if (launch.is_scattered && covers_any_input(arguments, size)) {
    // Its chunks are as far from each other there as in `in`.
    auto* const aside =
        reinterpret_cast<std::byte*>(aside_.reserve(begin[arguments.chunks] * element));
    LocalLaunch first = launch;
    for (int i = 0; i < launch.folds; ++i) first.out[i] = aside + launch.fold[i].begin;
    first.is_last = false;
    repeats_.launch_once(kernel, channel_.stream_, first);
    launch.sources = 1;
    launch.in[0] = aside;
    kernel = lay_out(launch, arguments);
  }
  repeats_.launch(kernel, channel_.stream_, launch, sizeof launch, nullptr, 0);
  return *this;
}

/// Gives the folds their tiles. Measured on one H200 with 2, 4 and 16 ranks under MPS, 2026-11-24.
Repeats::Kernel LocalProgram::lay_out(LocalLaunch& launch, const Arguments& arguments) const {
  const auto units_in = [&](const LocalLaunch::Fold& fold) {
    return units_of(fold, reinterpret_cast<std::uint64_t>(launch.in[0]), bytes(arguments.dtype))
        .units;
  };
  std::uint64_t longest = 1, total = 0, bits = 0;
  for (int i = 0; i < launch.folds; ++i) {
    longest = std::max<std::uint64_t>(longest, units_in(launch.fold[i]));
    total += units_in(launch.fold[i]);
    bits |= launch.fold[i].begin;
  }
  for (int i = 0; i < launch.sources; ++i) bits |= reinterpret_cast<std::uintptr_t>(launch.in[i]);
  for (int i = 0; i < launch.outs; ++i) bits |= reinterpret_cast<std::uintptr_t>(launch.out[i]);
  // There, more blocks would only make memory jump between more places.
  launch.is_long = total * kUnitBytes >= channel_.least_long_ && bits % kUnitBytes == 0;
  const auto most_blocks = static_cast<unsigned>(
      launch.is_long ? std::min(arguments.blocks, kMaxBlocks) : arguments.blocks);
  const auto most_threads =
      static_cast<unsigned>(launch.is_long ? kMaxLocalThreads : arguments.threads);
  const unsigned depth = launch.is_long ? kLocalDepth : 1;
  const std::uint64_t needed = (longest + kWarp * depth - 1) / (kWarp * depth) * kWarp;
  const auto threads = static_cast<unsigned>(std::min<std::uint64_t>(needed, most_threads));
  const std::uint64_t tile = depth * threads;
  launch.tiles = 0;
  for (int i = 0; i < launch.folds; ++i) {
    LocalLaunch::Fold& fold = launch.fold[i];
    fold.first_tile = launch.tiles;
    launch.tiles += std::max(1u, static_cast<unsigned>((units_in(fold) + tile - 1) / tile));
  }
  return {channel_.kernels_->find(arguments.op, arguments.dtype, Protocol::local),
          std::clamp(launch.tiles, 1u, most_blocks), threads};
}

bool LocalProgram::advance(int polls) {
  if (!channel_.leads()) return channel_.sharing_->await(launch_.number, polls);
  if (!channel_.await(launch_.number, polls)) return false;
  channel_.sharing_->end(launch_.number);
  return true;
}

int LocalProgram::blocked_on() const {
  return channel_.leads() ? channel_.any_peer(++looks_) : channel_.leader_of(0);
}

}  // namespace trib::cuda

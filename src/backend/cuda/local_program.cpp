// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/local_program.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace trib::cuda {
namespace {

/// Of one chunk: of whose `in`, in which order, and for whose `out`.
struct Move {
  std::vector<int> from, to;
  bool operator==(const Move&) const = default;
};

/// Nothing: the step is another one.
std::optional<Move> move_of(const Step& step) {
  const int chunk = step.to.front().chunk;
  Move move;
  for (const Location& from : step.from) {
    if (from != in(from.rank, chunk)) return {};
    move.from.push_back(from.rank);
  }
  for (const Location& to : step.to) {
    if (to != out(to.rank, chunk)) return {};
    move.to.push_back(to.rank);
  }
  return move;
}

}  // namespace

std::optional<LocalProgram::Moves> LocalProgram::moves_of(const Schedule& schedule, int size) {
  std::vector<Move> moves(static_cast<std::size_t>(schedule.chunks));
  for (const Step& step : schedule.steps) {
    if (step.verb == Verb::signal || step.verb == Verb::wait) continue;
    auto move = move_of(step);
    if (!move) return {};
    Move& known = moves[static_cast<std::size_t>(step.to.front().chunk)];
    if (!std::exchange(known, std::move(*move)).from.empty()) return {};
  }
  std::vector<int> everyone(static_cast<std::size_t>(size));
  std::iota(everyone.begin(), everyone.end(), 0);
  const Move& first = moves.front();
  const auto are_all = [&](const auto& wanted) {
    for (std::size_t chunk = 0; chunk < moves.size(); ++chunk)
      if (moves[chunk] != wanted(static_cast<int>(chunk))) return false;
    return true;
  };
  if (are_all([&](int) { return first; }) && !first.to.empty() &&
      (first.from == everyone || first.from.size() == 1))
    return Moves{Moves::Kind::whole, first.from, first.to};
  if (moves.size() != everyone.size()) return {};
  if (are_all([&](int chunk) { return Move{everyone, {chunk}}; }))
    return Moves{Moves::Kind::scatter, everyone, everyone};
  if (are_all([&](int chunk) { return Move{{chunk}, everyone}; }))
    return Moves{Moves::Kind::gather, everyone, everyone};
  return {};
}

std::unique_ptr<LocalProgram> LocalProgram::of(Channel& channel, const std::vector<Schedule>& all) {
  auto moves = moves_of(all[static_cast<std::size_t>(channel.leader_of(0))], channel.size_);
  if (!moves) return nullptr;
  return std::unique_ptr<LocalProgram>(new LocalProgram(channel, std::move(*moves)));
}

LocalProgram::LocalProgram(Channel& channel, Moves moves)
    : channel_(channel),
      moves_(std::move(moves)),
      repeats_(channel.driver_, channel.replays_, channel.context_id_),
      aside_(channel.asides_) {
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

/// Where the folds of a call are.
void LocalProgram::place(const Arguments& arguments) {
  LocalLaunch& launch = launch_;
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t* const begin = arguments.chunk_begin;
  launch.is_scattered = moves_.kind == Moves::Kind::scatter;
  launch.is_gathered = moves_.kind == Moves::Kind::gather || moves_.from.size() == 1;
  launch.sources = launch.is_gathered ? 1 : static_cast<std::uint8_t>(moves_.from.size());
  launch.folds = launch.outs = 0;
  int ins = 0;
  const auto add_in = [&](int rank) {
    launch.in[ins++] = static_cast<const std::byte*>(arguments.mapped[rank].in);
  };
  const auto add_out = [&](int rank) {
    launch.out[launch.outs++] = static_cast<std::byte*>(arguments.mapped[rank].out);
  };
  const auto add_fold = [&](std::size_t from, std::size_t to) {
    launch.fold[launch.folds++] = {from * element, 0, static_cast<std::uint32_t>(to - from)};
  };
  if (moves_.kind != Moves::Kind::gather)
    std::for_each(moves_.from.begin(), moves_.from.end(), add_in);
  if (moves_.kind != Moves::Kind::scatter)
    std::for_each(moves_.to.begin(), moves_.to.end(), add_out);
  if (moves_.kind == Moves::Kind::whole) return add_fold(begin[0], begin[arguments.chunks]);
  for (int rank = 0; rank < channel_.size_; ++rank) {
    if (begin[rank + 1] == begin[rank]) continue;
    add_fold(begin[rank], begin[rank + 1]);
    launch.is_gathered ? add_in(rank) : add_out(rank);
  }
}

Operation& LocalProgram::launch(const Arguments& arguments) {
  LocalLaunch& launch = launch_;
  launch.number = ++channel_.launches_;
  if (!channel_.leads()) return *this;
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t* const begin = arguments.chunk_begin;
  place(arguments);

  const Current current(channel_.context_);
  launch.is_last = true;
  Repeats::Kernel kernel = lay_out(launch, arguments);
  if (launch.is_scattered && covers_any_input(arguments, channel_.size_)) {
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
    const auto first = launch.is_gathered ? &fold - launch.fold : 0;
    return units_of(fold, reinterpret_cast<std::uint64_t>(launch.in[first]), bytes(arguments.dtype))
        .units;
  };
  std::uint64_t longest = 1, total = 0, bits = 0;
  for (int i = 0; i < launch.folds; ++i) {
    longest = std::max<std::uint64_t>(longest, units_in(launch.fold[i]));
    total += units_in(launch.fold[i]);
    bits |= launch.fold[i].begin;
  }
  const int ins = launch.is_gathered ? launch.folds : launch.sources;
  for (int i = 0; i < ins; ++i) bits |= reinterpret_cast<std::uintptr_t>(launch.in[i]);
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

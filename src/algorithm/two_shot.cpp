// SPDX-License-Identifier: BSD-3-Clause
// Two-shot: each rank folds a p-th of the vector for all.
// Next: grouped_two_shot.cpp, the same in two levels.
#include "algorithm/algorithms.hpp"

namespace trib {

/// `from`: all ranks' inputs of this rank's chunk, in the order in which they are folded.
Schedule fold_by_owners(const Shape& shape, const std::vector<Location>& from) {
  const int rank = shape.rank;
  const std::vector<int> peers = peers_of(shape);
  Builder b(/*chunks=*/shape.size);

  // In place, a reduce_scatter's `out` covers chunks of `in` that peers may still read. In the
  // other collectives it covers chunk for chunk, and only this rank reads this chunk.
  const bool is_staged = shape.in_place && is_scatter(shape.collective);
  std::vector<Location> to;
  if (shape.collective == Collective::reduce) {
    to = {out(shape.root, rank)};
  } else {
    to = {is_staged ? scratch(rank, 0, rank) : out(rank, rank)};
  }
  if (shape.collective == Collective::allreduce) {
    for (const int peer : peers) to.push_back(out(peer, rank));
  }

  b.signal(peers);
  b.wait(peers);
  b.reduce(to, from);
  b.signal(peers);
  b.wait(peers);
  if (is_staged) b.copy(out(rank, rank), to.front());
  return b.finish();
}

/// Two-shot: rank c reduces chunk c of all ranks, straight into the `out` of every rank that wants
/// it. Known from GPU libraries' allreduce over peer memory.
///
/// - steps: 1; 2 where peers' memory cannot be written
/// - bytes read per rank: (p-1)n/p; as many are written
/// - scratch: none; reduce_scatter in place: a chunk
/// - association: a left fold over ranks 0, 1, 2, ...
///
/// Allgather and broadcast: see hand_to_all and scatter_allgather.
Schedule two_shot(const Shape& shape) {
  if (shape.collective == Collective::allgather) return hand_to_all(shape);
  if (shape.collective == Collective::broadcast) return scatter_allgather(shape);
  return fold_by_owners(shape, every_in(shape, shape.rank));
}

/// Two-shot whose results take the place of the contributions, which only their owner has read, in
/// the scratch of those who want them: a cache line of it has two users, and there is half as much
/// of it. On hosts and through scratch; elsewhere it is two_shot.
///
/// - steps, bytes and association: as `two_shot`
Schedule returning_two_shot(const Shape& shape) {
  Schedule schedule = two_shot(shape);
  schedule.returns = !shape.is_on_device;
  return schedule;
}

/// Two-shot to the bits of `ring`: whoever folds a chunk does so in the order in which it would
/// travel around. For buffers that peers have mapped, where it is faster not to hand anything on,
/// for nonblocking calls and for more ranks than cores. A Reduce: see rootless_as_ring.
///
/// - steps, bytes and scratch: as `two_shot`
/// - association: chunk c in the order c+1, c+2, ..., c; in a Reduce without the root, which comes
///   last; rounded once
Schedule two_shot_as_ring(const Shape& shape) {
  if (shape.collective == Collective::reduce) return rootless_as_ring(shape);
  std::vector<Location> from;
  for (const int peer : peers_of(shape)) from.push_back(in(peer, shape.rank));
  from.push_back(in(shape.rank, shape.rank));
  return fold_by_owners(shape, from);
}

}  // namespace trib

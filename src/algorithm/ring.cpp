// SPDX-License-Identifier: BSD-3-Clause
// Ring: chunks travel around the ranks. Next: recursive_doubling.cpp, for fewer steps.
#include "algorithm/algorithms.hpp"

namespace trib {
namespace {

/// The root stands outside: chunks travel around the others, and from the last of them to the root,
/// which folds its own input in. So no rank takes in more than n bytes, and only one chunk of an
/// input in p-1 is copied for somebody else to read.
Schedule ring_to_root(const Shape& shape) {
  const int rank = shape.rank, root = shape.root;
  std::vector<int> others;  // chunk c is completed by others[c]
  for (int other = 0; other < shape.size; ++other)
    if (other != root) others.push_back(other);
  const int count = static_cast<int>(others.size());
  Builder b(/*chunks=*/count);

  if (rank == root) {
    for (int c = 0; c < count; ++c) {
      b.wait(others[c]);
      const Location sum = count == 1 ? in(others[c], c) : partial(shape, others[c], c);
      b.reduce(out(root, c), {sum, in(root, c)});
    }
    b.signal(others);  // nobody reads anybody's buffers any more: all others told us so
    return b.finish();
  }
  const int place = rank < root ? rank : rank - 1;
  const int prev = others[wrap(place - 1, count)], next = others[wrap(place + 1, count)];
  if (count > 1) b.signal(next);
  for (int k = 0; k < count - 1; ++k) {  // then chunk place-k-2 holds k+2 contributions
    const int c = wrap(place - k - 2, count);
    b.wait(prev);
    b.reduce(partial(shape, rank, c),
             {k == 0 ? in(prev, c) : partial(shape, prev, c), in(rank, c)});
    if (k < count - 2) b.signal(next);
  }
  b.signal(root);
  b.wait(root);
  return b.finish();
}

/// Rank c completes chunk c.
Schedule ring_to_owners(const Shape& shape) {
  const int rank = shape.rank, size = shape.size;
  const int prev = wrap(rank - 1, size), next = wrap(rank + 1, size);
  const bool is_allreduce = shape.collective == Collective::allreduce;
  const bool is_staged = shape.in_place && !is_allreduce;
  std::vector<Location> results{is_staged ? partial(shape, rank, rank) : out(rank, rank)};
  if (is_allreduce)
    for (const int peer : peers_of(shape)) results.push_back(out(peer, rank));
  Builder b(/*chunks=*/size);

  b.signal(next);
  for (int k = 0; k < size - 1; ++k) {  // after step k, chunk rank-k-2 holds k+2 contributions
    const int c = wrap(rank - k - 2, size);
    const bool is_last = k == size - 2;  // c == rank
    b.wait(prev);
    b.reduce(is_last ? results : std::vector{partial(shape, rank, c)},
             {k == 0 ? in(prev, c) : partial(shape, prev, c), in(rank, c)});
    if (!is_last) b.signal(next);
  }
  if (is_allreduce) {
    b.signal(peers_of(shape));
    b.wait(peers_of(shape));
  } else {
    b.signal(prev);  // we no longer read its buffers
    b.wait(next);
  }
  if (is_staged)
    b.copy(out(rank, rank), results.front());  // only now: next was reading what `out` covers
  return b.finish();
}

}  // namespace

/// Ring: a chunk sets out at each rank, and each that it comes to adds its input (the
/// reduce-scatter of Patarasuk and Yuan, 2009). Whoever completes one hands it to all that want it.
/// On hosts, where cache lines go to who writes them, a chunk stays in the scratch of the rank at
/// which it set out: a line is handed over once for each rank, not twice.
///
/// - steps: p-1; in allreduce p where peers' memory cannot be written
/// - bytes read per rank: allreduce 2n(p-1)/p, reduce_scatter half of that; reduce at most n
/// - scratch: none in allreduce; others less than a vector
/// - association: chunk c in the order c+1, c+2, ..., c; in reduce without the root, which comes
/// last
Schedule ring(const Shape& shape) {
  Schedule schedule =
      shape.collective == Collective::reduce ? ring_to_root(shape) : ring_to_owners(shape);
  schedule.stays = !shape.is_on_device;
  return schedule;
}

}  // namespace trib

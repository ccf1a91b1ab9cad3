// SPDX-License-Identifier: BSD-3-Clause
// Ring: chunks travel around the ranks. Next: recursive_doubling.cpp, for fewer steps.
#include "algorithm/algorithms.hpp"

namespace trib {

/// Ring: reduce-scatter, then allgather (Patarasuk and Yuan, 2009).
///
/// - steps: allreduce 2(p-1), others p-1
/// - bytes read per rank: allreduce 2n(p-1)/p, others half of that
/// - scratch: none in allreduce; others less than a vector
/// - association: chunk c in the order c+1, c+2, ..., c
///
/// In reduce, whoever completes a chunk writes it to the root, which then need not collect it.
Schedule ring(const Shape& shape) {
  const int rank = shape.rank, size = shape.size, root = shape.root;
  const int prev = wrap(rank - 1, size), next = wrap(rank + 1, size);
  const bool is_reduce = shape.collective == Collective::reduce;
  const bool is_allreduce = shape.collective == Collective::allreduce;
  const bool is_staged = shape.in_place && is_scatter(shape.collective);
  const Location result =
      is_staged ? partial(shape, rank, rank) : out(is_reduce ? root : rank, rank);
  Builder b(/*chunks=*/size);

  b.signal(next);
  for (int k = 0; k < size - 1; ++k) {  // after step k, chunk rank-k-2 holds k+2 contributions
    const int c = wrap(rank - k - 2, size);
    const bool is_last = k == size - 2;  // c == rank
    b.wait(prev);
    b.reduce(is_last ? result : partial(shape, rank, c),
             {k == 0 ? in(prev, c) : partial(shape, prev, c), in(rank, c)});
    if (!is_last || is_allreduce) b.signal(next);
  }
  for (int k = 0; is_allreduce && k < size - 1; ++k) {  // chunk rank-k-1 is complete at prev
    const int c = wrap(rank - k - 1, size);
    b.wait(prev);
    b.copy(out(rank, c), out(prev, c));
    if (k < size - 2) b.signal(next);
  }
  // To prev: we no longer read its buffers; and where it is the root, that our chunk has arrived.
  b.signal(prev);
  if (is_reduce && rank != root && prev != root) b.signal(root);
  b.wait(next);
  if (is_reduce && rank == root) {
    for (const int peer : peers_of(shape)) {
      if (peer != next) b.wait(peer);
    }
  }
  if (is_staged) b.copy(out(rank, rank), result);  // only now: next was reading what `out` covers
  return b.finish();
}

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// One-shot: whoever needs a result reads all contributions.
// Next: two_shot.cpp, which shares the work out.
#include "algorithm/algorithms.hpp"

namespace trib {

/// One-shot: each rank that needs a result folds it alone. Known from GPU libraries' allreduce of
/// small messages.
///
/// - steps: 1
/// - bytes read per rank: (p-1)n; reduce: so many by the root only; reduce_scatter: (p-1)n/p
/// - scratch: none; in place, unless in reduce: a result, since peers still read `in`
/// - association: a left fold over ranks 0, 1, 2, ...
///
/// Allgather and broadcast: see hand_to_all.
Schedule one_shot(const Shape& shape) {
  if (!is_reduction(shape.collective)) return hand_to_all(shape);
  const int rank = shape.rank;
  const bool scatter = is_scatter(shape.collective);
  Builder b(/*chunks=*/scatter ? shape.size : 1);
  if (!shape.has_output()) {
    b.signal(shape.root);
    b.wait(shape.root);  // the root has read our `in`
    return b.finish();
  }
  const std::vector<int> peers = peers_of(shape);
  const bool is_read = shape.collective != Collective::reduce;
  const bool is_staged = shape.in_place && is_read;  // peers may still read what `out` covers
  const int chunk = scatter ? rank : 0;
  const Location result = out(rank, chunk);
  const Location staged = scratch(rank, 0, chunk);

  if (is_read) b.signal(peers);
  b.wait(peers);
  b.reduce(is_staged ? staged : result, every_in(shape, chunk));
  b.signal(peers);
  if (is_read) b.wait(peers);
  if (is_staged) b.copy(result, staged);
  return b.finish();
}

}  // namespace trib

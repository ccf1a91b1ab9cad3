// SPDX-License-Identifier: BSD-3-Clause
// Two-shot for links that are the bottleneck: in a Reduce, the root folds nothing.
// Next: chain.cpp, where partial sums travel.
#include "algorithm/algorithms.hpp"

namespace trib {

/// Two-shot whose root owns no chunk: the others fold a (p-1)-th of the vector each and hand it to
/// the root. In `two_shot` the root takes in the contributions to its own chunk, too, which makes
/// 2n(p-1)/p, twice what any other rank takes in. Only a Reduce over three ranks or more differs
/// from `two_shot`.
///
/// - steps: 1; 2 where peers' memory cannot be written
/// - bytes read per rank: at most n; the root: n
/// - scratch: none
/// - association: a left fold over ranks 0, 1, 2, ...
Schedule rootless(const Shape& shape) {
  if (shape.collective != Collective::reduce || shape.size < 3) return two_shot(shape);
  const int rank = shape.rank, root = shape.root;
  const std::vector<int> peers = peers_of(shape);
  Builder b(/*chunks=*/shape.size - 1);
  if (rank == root) {
    b.signal(peers);
    b.wait(peers);  // their chunks are here
    return b.finish();
  }
  const int chunk = rank < root ? rank : rank - 1;
  std::vector<int> others = peers;
  std::erase(others, root);
  b.signal(others);
  b.wait(peers);
  b.reduce(out(root, chunk), every_in(shape, chunk));
  b.signal(peers);
  b.wait(others);
  return b.finish();
}

}  // namespace trib

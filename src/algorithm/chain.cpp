// SPDX-License-Identifier: BSD-3-Clause
// Chain: the whole vector travels from rank to rank. Next: ring.cpp, where every rank begins with a
// chunk of its own.
#include "algorithm/algorithms.hpp"

namespace trib {

/// Chain, of a Reduce over three ranks or more: the vector sets out at the rank behind the root,
/// each rank adds its input to what the rank before it has handed on, and the root is the last.
/// Nobody takes in or gives out more than n bytes, and nobody folds more than two vectors; in
/// return the first bytes of a result have to travel over all ranks. Known from MPI libraries as a
/// pipelined chain, and from GPU libraries as a ring that a reduction goes around once.
///
/// - steps: p-1
/// - bytes read per rank: n
/// - scratch: the vector, but for the root and the first
/// - association: a left fold that begins behind the root; each sum is rounded to the type on its
///   way
///
/// Everything else is as in `two_shot`.
Schedule chain(const Shape& shape) {
  const int size = shape.size, rank = shape.rank, root = shape.root;
  if (shape.collective != Collective::reduce || size < 3) return two_shot(shape);
  const int first = wrap(root + 1, size), before = wrap(rank - 1, size);
  Builder b(/*chunks=*/1);
  if (rank != first) {
    b.wait(before);
    b.reduce(rank == root ? out(root, 0) : scratch(rank, 0, 0),
             {before == first ? in(first, 0) : scratch(before, 0, 0), in(rank, 0)});
    b.signal(before);  // its memory is not read any more
  }
  if (rank != root) {
    b.signal(wrap(rank + 1, size));
    b.wait(wrap(rank + 1, size));
  }
  return b.finish();
}

/// The same in the order of the ranks, of a Reduce to the first or the last of them: the vector
/// sets out at rank 0, and the last rank hands the sum to the root. Another root would take in n
/// bytes as one of the chain, and the result as well.
///
/// - steps: p-1, and one to a root that is not the last rank
/// - bytes read per rank: n
/// - scratch: the vector
/// - association: a left fold over ranks 0, 1, 2, ..., but each sum is rounded to the type on its
///   way
///
/// A Reduce to another root is as in `rootless`, everything else as in `two_shot`.
Schedule ordered_chain(const Shape& shape) {
  const int rank = shape.rank, last = shape.size - 1, root = shape.root;
  if (shape.collective != Collective::reduce || shape.size < 3) return two_shot(shape);
  if (root > 0 && root < last) return rootless(shape);
  Builder b(/*chunks=*/1);
  if (rank > 0) {
    b.wait(rank - 1);
    b.reduce(rank == last ? out(root, 0) : scratch(rank, 0, 0),
             {rank == 1 ? in(0, 0) : scratch(rank - 1, 0, 0), in(rank, 0)});
    b.signal(rank - 1);  // its memory is not read any more
  }
  if (rank < last) {
    b.signal(rank + 1);
    b.wait(rank + 1);
  }
  if (root == 0) {
    if (rank == last) b.signal(root);
    if (rank == root) b.wait(last);
  }
  return b.finish();
}

}  // namespace trib

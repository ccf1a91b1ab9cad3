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

/// Ranks up to which the root of rootless_as_ring folds, too. With more there would be no room for
/// all the slots of the lowered form.
constexpr int kFew = 5;

/// A Reduce to the bits of `ring`, whose chunks the ranks but the root complete. With few ranks
/// each rank, the root as well, folds a part of every chunk; with more, whoever completes a chunk
/// folds it, and the root nothing.
///
/// - steps: 1; 2 where peers' memory cannot be written
/// - bytes read per rank: at most n
/// - scratch: none
/// - association: chunk c in the order c+1, c+2, ..., c without the root, which comes last; rounded
///   once
Schedule rootless_as_ring(const Shape& shape) {
  if (shape.size < 2) return two_shot(shape);
  const int rank = shape.rank, root = shape.root, count = shape.size - 1;
  const int parts = shape.size <= kFew ? shape.size : 1;
  std::vector<int> others;  // chunk c is completed by others[c]
  for (int other = 0; other < shape.size; ++other)
    if (other != root) others.push_back(other);
  const std::vector<int> peers = peers_of(shape);
  std::vector<int> readers = peers;  // who fold, of them
  if (parts == 1) std::erase(readers, root);
  const bool folds = parts > 1 || rank != root;
  Builder b(/*chunks=*/count * parts, parts);
  b.signal(readers);
  if (folds) b.wait(peers);
  for (int c = 0; c < count; ++c) {
    if (parts == 1 && others[c] != rank) continue;
    const int part = parts == 1 ? c : c * parts + rank;
    std::vector<Location> from;
    for (int i = 1; i <= count; ++i) from.push_back(in(others[wrap(c + i, count)], part));
    from.push_back(in(root, part));
    b.reduce(out(root, part), from);
  }
  if (folds) b.signal(peers);
  b.wait(readers);
  return b.finish();
}

}  // namespace trib

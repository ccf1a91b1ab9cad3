// SPDX-License-Identifier: BSD-3-Clause
// Allgather and broadcast: nothing is folded, contributions only have to arrive.
// Next: registry.cpp, the list of all algorithms.
#include <algorithm>

#include "algorithm/algorithms.hpp"

namespace trib {

/// Whoever has a contribution writes it to all: one_shot's allgather and broadcast, two_shot's
/// allgather.
///
/// - steps: 1
/// - bytes written per rank: allgather (p-1)n/p; broadcast (p-1)n, by the root
/// - scratch: none
Schedule hand_to_all(const Shape& shape) {
  const int rank = shape.rank;
  const bool is_broadcast = shape.collective == Collective::broadcast;
  const std::vector<int> peers = peers_of(shape);
  std::vector<int> givers = peers;
  if (is_broadcast) givers = rank == shape.root ? std::vector<int>{} : std::vector{shape.root};
  const int chunk = is_broadcast ? 0 : rank;
  Builder b(/*chunks=*/is_broadcast ? 1 : shape.size);

  b.signal(givers);
  if (shape.has_input(rank, chunk)) {
    std::vector<Location> to;
    for (const int peer : peers) to.push_back(out(peer, chunk));
    if (!shape.in_place) to.push_back(out(rank, chunk));
    b.wait(peers);
    b.copy(to, in(rank, chunk));
    b.signal(peers);
  }
  b.wait(givers);
  return b.finish();
}

/// Scatter, then allgather (Barnett et al., 1994): two_shot's broadcast. Each rank but the root
/// takes a share of the root's `in` and writes it to all the others.
///
/// - steps: 1; 2 where peers' memory cannot be written
/// - bytes read per rank but the root: n/(p-1), n from the root in all; written: n(p-2)/(p-1)
/// - scratch: none
///
/// Chunk c is the share of the c-th rank that is not the root. The root has none: it would have to
/// give that one to everyone, in all 2n(p-1)/p.
Schedule scatter_allgather(const Shape& shape) {
  const int rank = shape.rank, root = shape.root;
  const int chunks = std::max(shape.size - 1, 1);  // a rank alone copies it to itself
  const std::vector<int> peers = peers_of(shape);
  Builder b(chunks);
  if (rank == root) {
    b.signal(peers);
    if (!shape.in_place) b.copy(out(root, 0, chunks), in(root, 0, chunks));
    b.wait(peers);  // they have read our `in`
    return b.finish();
  }
  const int chunk = rank < root ? rank : rank - 1;
  std::vector<int> others = peers;
  std::erase(others, root);
  std::vector<Location> to{out(rank, chunk)};
  for (const int other : others) to.push_back(out(other, chunk));

  b.signal(others);
  b.wait(peers);
  b.copy(to, in(root, chunk));
  b.signal(peers);
  b.wait(others);
  return b.finish();
}

}  // namespace trib

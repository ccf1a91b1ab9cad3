// SPDX-License-Identifier: BSD-3-Clause
// Recursive doubling: partners exchange whole vectors.
// Next: rabenseifner.cpp, where they exchange halves.
#include <algorithm>

#include "algorithm/algorithms.hpp"
#include "algorithm/hypercube.hpp"

namespace trib {

/// Recursive doubling (Thakur, Rabenseifner and Gropp, 2005).
///
/// - steps: log2 p; beyond a power of two one more to join neighbours
/// - bytes read per rank: n log2 p; beyond a power of two, some ranks read n more
/// - scratch: a vector per step but the last, since a partner may still read the one before; in
///   place also for the last
/// - association: pairwise by distance 1, 2, 4, ..., the lower rank first, so that both partners
///   compute the same bits
///
/// The last step computes only what is wanted. In reduce, so does every step: that makes it a
/// binomial tree, with the bits of allreduce wherever the root is.
Schedule recursive_doubling(const Shape& shape) {
  const int rank = shape.rank;
  const Hypercube cube(shape.size);
  const int rounds = cube.rounds();
  const bool scatter = is_scatter(shape.collective);
  const bool is_reduce = shape.collective == Collective::reduce;
  const int chunks = scatter ? shape.size : 1;
  Builder b(chunks);
  if (cube.is_extra(rank)) {
    b.signal(rank - 1);
    b.wait(rank - 1);  // which has read our `in` and written our `out`
    return b.finish();
  }

  // Two contributions of neighbours count as round 0's value, as does the contribution of a rank
  // that has no extra.
  const auto value = [&](int r, int round, int chunk, int span) {
    return round == 0 && !cube.has_extra(r) ? in(r, chunk, span) : scratch(r, round, chunk, span);
  };
  const auto combine = [&](const std::vector<Location>& to, int partner, int round) {
    const auto [chunk, span] = std::pair(to.front().chunk, to.front().span);
    b.reduce(to, {value(std::min(rank, partner), round, chunk, span),
                  value(std::max(rank, partner), round, chunk, span)});
  };
  // Each group of results is written by one step.
  std::vector<std::vector<Location>> results;
  for (const int r : {rank, rank + 1}) {
    if (r != rank && !cube.has_extra(rank)) continue;
    if (is_reduce && r != shape.root) continue;
    if (results.empty() || scatter) results.emplace_back();
    results.back().push_back(out(r, scatter ? r : 0));
  }

  // Round r is of use to the root if its partners of all rounds from r on lead there.
  const auto computes = [&](int corner, int round) {
    const int root = cube.is_extra(shape.root) ? shape.root - 1 : shape.root;
    const int low = (2 << round) - 1;
    return !is_reduce || ((corner ^ cube.corner_of(root)) & low) == 0;
  };
  // Partners may still read what `out` covers; in reduce nobody but this rank reads there.
  const bool is_staged = shape.in_place && !is_reduce;

  if (cube.has_extra(rank)) {
    b.wait(rank + 1);
    b.reduce(scratch(rank, 0, 0, chunks), {in(rank, 0, chunks), in(rank + 1, 0, chunks)});
  }
  std::vector<int> read, readers;
  for (int round = 0; round < rounds; ++round) {
    const int other = cube.corner_of(rank) ^ (1 << round), partner = cube.rank_of(other);
    if (computes(other, round)) {
      readers.push_back(partner);
      b.signal(partner);
    }
    if (!computes(cube.corner_of(rank), round)) break;  // nor in any round after it
    read.push_back(partner);
    b.wait(partner);
    if (round < rounds - 1) {
      combine({scratch(rank, round + 1, 0, chunks)}, partner, round);
      continue;
    }
    for (const std::vector<Location>& to : results) {
      combine(is_staged ? std::vector{scratch(rank, rounds, to.front().chunk)} : to, partner,
              round);
    }
  }
  b.signal(read);
  b.wait(readers);
  if (is_staged) {
    for (const std::vector<Location>& to : results) {
      b.copy(to, scratch(rank, rounds, to.front().chunk));
    }
  }
  if (cube.has_extra(rank)) b.signal(rank + 1);
  return b.finish();
}

}  // namespace trib

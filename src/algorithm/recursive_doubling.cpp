// SPDX-License-Identifier: BSD-3-Clause
// Recursive doubling: partners exchange whole vectors. Next: rabenseifner.cpp, where they exchange
// halves.
#include <algorithm>

#include "algorithm/algorithms.hpp"
#include "algorithm/hypercube.hpp"

namespace trib {

/// Recursive doubling (Thakur, Rabenseifner and Gropp, 2005).
///
///   any rank count | log2 p steps, one more unless p is a power of two | n log2 p bytes read per
///   rank scratch: a vector per step but the last (in place: also for the last), since a partner
///   may still read the one before pairwise by distance 1, 2, 4, ..., the lower rank first: both
///   partners compute the same bits
///
/// In reduce and reduce_scatter, the last step computes only what is wanted.
Schedule recursive_doubling(const Shape& shape) {
  const int rank = shape.rank;
  const Hypercube cube(shape.size);
  const int rounds = cube.rounds();
  const bool scatter = is_scatter(shape.collective);
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
    if (shape.collective == Collective::reduce && r != shape.root) continue;
    if (results.empty() || scatter) results.emplace_back();
    results.back().push_back(out(r, scatter ? r : 0));
  }

  if (cube.has_extra(rank)) {
    b.wait(rank + 1);
    b.reduce(scratch(rank, 0, 0, chunks), {in(rank, 0, chunks), in(rank + 1, 0, chunks)});
  }
  std::vector<int> partners;
  for (int round = 0; round < rounds; ++round) {
    const int partner = cube.rank_of(cube.corner_of(rank) ^ (1 << round));
    partners.push_back(partner);
    b.signal(partner);
    b.wait(partner);
    if (round < rounds - 1) {
      combine({scratch(rank, round + 1, 0, chunks)}, partner, round);
      continue;
    }
    for (const std::vector<Location>& to : results) {
      if (shape.in_place) {  // a partner may still read what `out` covers
        combine({scratch(rank, rounds, to.front().chunk)}, partner, round);
      } else {
        combine(to, partner, round);
      }
    }
  }
  b.signal(partners);
  b.wait(partners);
  if (shape.in_place) {
    for (const std::vector<Location>& to : results) {
      b.copy(to, scratch(rank, rounds, to.front().chunk));
    }
  }
  if (cube.has_extra(rank)) b.signal(rank + 1);
  return b.finish();
}

}  // namespace trib

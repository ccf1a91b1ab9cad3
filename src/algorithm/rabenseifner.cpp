// SPDX-License-Identifier: BSD-3-Clause
// Rabenseifner's algorithm: partners exchange halves of halves.
// Next: tree.cpp, which gathers at one rank.
#include <algorithm>
#include <set>

#include "algorithm/algorithms.hpp"
#include "algorithm/hypercube.hpp"

namespace trib {

/// Recursive halving of the vector, then an allgather by recursive doubling (Rabenseifner, 2004).
///
/// - steps: allreduce 2 log2 p, others log2 p; beyond a power of two one more to join neighbours
/// - bytes read per rank: allreduce 2n(p-1)/p, others half of that; beyond a power of two, some
///   ranks read n more
/// - scratch: none in allreduce; others a vector
/// - association: as in recursive doubling
///
/// In reduce and reduce_scatter, the last step of the halving writes to whoever wants its result.
Schedule rabenseifner(const Shape& shape) {
  const int rank = shape.rank, size = shape.size;
  const Hypercube cube(size);
  const int corner = cube.corner_of(rank);
  const bool is_allreduce = shape.collective == Collective::allreduce;
  const bool is_reduce = shape.collective == Collective::reduce;
  const bool scatter = is_scatter(shape.collective);
  const bool is_staged = scatter && shape.in_place;  // `out` covers what a partner may still read
  const int chunks = scatter ? size : cube.corners;
  Builder b(chunks);

  // Halving leaves each corner one of `corners` parts; part i is the chunks from begin(i) to
  // begin(i + 1).
  const auto begin = [&](int part) { return part * chunks / cube.corners; };
  const auto owner = [&](int chunk) {
    return cube.rank_of(cube.reversed(((chunk + 1) * cube.corners - 1) / chunks));
  };
  const int part = cube.reversed(corner);
  std::set<int> touched, touching;  // peers whose memory we touch, and who touch ours

  if (cube.is_extra(rank)) {
    b.signal(rank - 1);
    touching.insert(rank - 1);
  } else {
    const int extra = cube.has_extra(rank) ? rank + 1 : -1;
    if (extra >= 0) {
      touched.insert(extra);
      b.wait(extra);
      b.reduce(partial(shape, rank, 0, chunks), {in(rank, 0, chunks), in(extra, 0, chunks)});
    }
    const auto results = [&](int chunk, int span) {
      std::vector<Location> to{out(rank, chunk, span)};
      if (extra >= 0) to.push_back(out(extra, chunk, span));
      return to;
    };
    int parts = cube.corners;
    for (int distance = 1; distance < cube.corners; distance *= 2) {
      parts /= 2;
      const int partner = cube.rank_of(corner ^ distance);
      const int kept = part & ~(parts - 1);  // the first of `parts` parts
      const int chunk = begin(kept), span = begin(kept + parts) - chunk;
      const auto combine = [&](const std::vector<Location>& to) {
        const auto value = [&](int r) {
          const bool is_first = distance == 1 && !cube.has_extra(r);
          return is_first ? in(r, to.front().chunk, to.front().span)
                          : partial(shape, r, to.front().chunk, to.front().span);
        };
        b.reduce(to, {value(std::min(rank, partner)), value(std::max(rank, partner))});
      };
      touched.insert(partner);
      touching.insert(partner);
      b.signal(partner);
      b.wait(partner);
      if (parts > 1 || is_staged) {
        combine({partial(shape, rank, chunk, span)});
      } else if (is_allreduce) {
        combine(results(chunk, span));
      } else if (is_reduce) {
        combine({out(shape.root, chunk, span)});
        touched.insert(shape.root);
      } else {
        for (int c = chunk; c < chunk + span; ++c) combine({out(c, c)});
      }
    }
    if (scatter) {
      for (int c = begin(part); c < begin(part + 1); ++c) touched.insert(c);
    }
    for (; is_allreduce && parts < cube.corners; parts *= 2) {
      const int partner = cube.rank_of(corner ^ (cube.corners / 2 / parts));
      const int gained = (part ^ parts) & ~(parts - 1);
      const int chunk = begin(gained), span = begin(gained + parts) - chunk;
      b.signal(partner);
      b.wait(partner);
      b.copy(results(chunk, span), out(partner, chunk, span));
    }
  }
  if (is_reduce && rank == shape.root) {
    for (int c = 0; c < cube.corners; ++c) touching.insert(cube.rank_of(c));
  }
  if (scatter) touching.insert(owner(rank));

  touched.erase(rank);
  touching.erase(rank);
  b.signal({touched.begin(), touched.end()});
  b.wait({touching.begin(), touching.end()});
  if (is_staged) {
    const int source = owner(rank);
    b.copy(out(rank, rank), partial(shape, source, rank));
    if (source != rank) b.signal(source);
    if (!cube.is_extra(rank)) {
      for (int c = begin(part); c < begin(part + 1); ++c) {
        if (c != rank) b.wait(c);
      }
    }
  }
  return b.finish();
}

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// The functions that registry.cpp lists, and what several of them share. Each is described in the
// file that has its name.
//
// All are written for ranks that read and write each other's buffers, and follow two rules:
// - Entry: a rank's `in` and `out` are touched only after it signalled, directly or through others,
//   that it is in the call.
// - Exit: a rank stays in the call until its peers have signalled, likewise, that they no longer
//   touch its memory.
//
// Next: one_shot.cpp, the shortest.
#pragma once

#include <vector>

#include "schedule/schedule.hpp"

namespace trib {

Schedule one_shot(const Shape& shape);
Schedule two_shot(const Shape& shape);
Schedule returning_two_shot(const Shape& shape);
Schedule two_shot_as_ring(const Shape& shape);
Schedule grouped_two_shot(const Shape& shape);
Schedule gpu_two_shot(const Shape& shape);
Schedule rootless(const Shape& shape);
Schedule chain(const Shape& shape);
Schedule ordered_chain(const Shape& shape);
Schedule ring(const Shape& shape);
Schedule recursive_doubling(const Shape& shape);
Schedule rabenseifner(const Shape& shape);
Schedule binomial(const Shape& shape);
Schedule tree4(const Shape& shape);
Schedule tree8(const Shape& shape);
Schedule mixed_tree(const Shape& shape);
Schedule paired_tree(const Shape& shape);

/// What two_shot_as_ring does in a Reduce: see rootless.cpp.
Schedule rootless_as_ring(const Shape& shape);

/// What one_shot and two_shot do where nothing is folded: see gather.cpp.
Schedule hand_to_all(const Shape& shape);
Schedule scatter_allgather(const Shape& shape);

/// All ranks but this one, starting behind it: so the ranks do not all turn to one peer first.
inline std::vector<int> peers_of(const Shape& shape) {
  std::vector<int> peers;
  for (int i = 1; i < shape.size; ++i) peers.push_back(wrap(shape.rank + i, shape.size));
  return peers;
}

/// One chunk, or range of chunks, of every rank's `in`: in rank order, which makes it a left fold.
inline std::vector<Location> every_in(const Shape& shape, int chunk, int span = 1) {
  std::vector<Location> all;
  for (int rank = 0; rank < shape.size; ++rank) all.push_back(in(rank, chunk, span));
  return all;
}

/// Where `rank` gathers partial sums: its `out` if that holds the whole vector, otherwise scratch.
inline Location partial(const Shape& shape, int rank, int chunk, int span = 1) {
  const bool has_all = shape.collective == Collective::allreduce ||
                       (shape.collective == Collective::reduce && rank == shape.root);
  return has_all ? out(rank, chunk, span) : scratch(rank, 0, chunk, span);
}

}  // namespace trib

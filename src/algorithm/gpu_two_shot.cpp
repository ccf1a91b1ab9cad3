// SPDX-License-Identifier: BSD-3-Clause
// Two-shot with the sums of GPUs that several ranks share.
#include "algorithm/algorithms.hpp"
#include "schedule/share.hpp"

namespace trib {

/// Two-shot, but rank c folds chunk c over the ranks of each GPU first, and then over the GPUs: on
/// the host, to the bits that kernels make where ranks share GPUs (schedule/share.hpp).
///
/// - steps: 2
/// - bytes read per rank: 2(p-1)n/p, reduce_scatter half of that
/// - scratch: a chunk for each GPU, and what two_shot needs
/// - association: a left fold over the ranks of each GPU, then one over the GPUs
///
/// Where there is one GPU, or none is shared: `two_shot`.
Schedule gpu_two_shot(const Shape& shape) {
  Schedule schedule = two_shot(shape);
  if (domains(shape.device_of) < 2) return schedule;
  const int rank = shape.rank;
  Schedule result;
  result.chunks = schedule.chunks;
  for (Step& step : schedule.steps) {
    if (step.verb == Verb::reduce) {
      std::vector<Location> sums;
      int slot = 1;  // two_shot uses slot 0
      for (const std::vector<int>& ranks : ranks_of(shape.device_of)) {
        Step fold{Verb::reduce, {scratch(rank, slot, rank)}, {}, {}};
        for (const int of : ranks) fold.from.push_back(in(of, rank));
        if (ranks.size() == 1) {
          sums.push_back(fold.from.front());
          continue;
        }
        ++slot;
        sums.push_back(fold.to.front());
        result.steps.push_back(std::move(fold));
      }
      step.from = std::move(sums);
    }
    result.steps.push_back(std::move(step));
  }
  return result;
}

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/agree.hpp"

#include <vector>

namespace trib::cuda {

bool all_agree(Bootstrap& bootstrap, const std::string& trouble, std::string& why) {
  struct Answer {
    bool is_good;
    char why[160];
  };
  Answer mine{trouble.empty(), {}};
  trouble.copy(mine.why, sizeof mine.why - 1);
  std::vector<Answer> all(static_cast<std::size_t>(bootstrap.size()));
  bootstrap.exchange(&mine, all.data(), sizeof mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].is_good) continue;
    why = "rank " + std::to_string(rank) + ": " + all[rank].why;
    return false;
  }
  return true;
}

}  // namespace trib::cuda

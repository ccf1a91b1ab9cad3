// SPDX-License-Identifier: BSD-3-Clause
// A step of a set-up that all ranks have to get through.
#pragma once

#include <string>

#include "base/bootstrap.hpp"

namespace trib::cuda {

/// Collective: whether no rank is in trouble; otherwise `why` says what the first that is has met.
bool all_agree(Bootstrap& bootstrap, const std::string& trouble, std::string& why);

}  // namespace trib::cuda

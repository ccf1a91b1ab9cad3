// SPDX-License-Identifier: BSD-3-Clause
// What `trib info` says of GPUs. Nothing else asks for it.
#pragma once

#include <string>

#include "base/config.hpp"

namespace trib::cuda {

/// DeviceBackend::inventory().
std::string inventory(const Config& config);

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// What `trib info` says of GPUs. Nothing else asks for it.
#pragma once

#include <string>

#include "backend/cuda/driver.hpp"
#include "base/config.hpp"

namespace trib::cuda {

/// "13.0"
std::string driver_version(const Driver& driver);

/// DeviceBackend::inventory().
std::string inventory(const Config& config);

}  // namespace trib::cuda

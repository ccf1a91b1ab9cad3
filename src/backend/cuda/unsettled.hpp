// SPDX-License-Identifier: BSD-3-Clause
// What a program has under way on the default stream, to be waited for without the driver.
#pragma once

#include <memory>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"

namespace trib::cuda {

/// Null: nothing, the context is gone, or a capture forbids to look. What is enqueued later has
/// nothing to do with it, or a program that never stops enqueuing would be waited for for ever.
std::unique_ptr<Unsettled> unsettled(const ContextId& context);

}  // namespace trib::cuda

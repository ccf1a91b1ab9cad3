// SPDX-License-Identifier: BSD-3-Clause
// What kind of memory a pointer is, and which context it belongs to.
#pragma once

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"

namespace trib::cuda {

/// About 100 ns. Memory::device also for memory of other devices than the current one.
Memory where(const void* pointer);

/// The same for kernels of `context`, which reach nothing if that is gone. The first time that it
/// comes to an allocation it sees to it that the program's copies there, on whatever default
/// stream, are over when they return; not if `is_ordered`: the program does so itself.
Memory where_in(const ContextId& context, const void* pointer, bool is_ordered);

/// The context in which the buffer was allocated; for memory of pools and virtual address ranges,
/// which have none, the current context or the primary one of the buffer's device. Null: none.
CUcontext context_of(const void* pointer);

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Tells device memory from host memory without a device backend: such buffers are left to the MPI, which may know what to
// do with them. A guard until a backend claims them.
#pragma once

namespace trib {

/// Whether the process has loaded a GPU driver whose pointers is_device_memory() can tell. Not for the path of a call.
bool has_device_driver();

/// About 50 ns. False where there is no driver or the pointer is not known to it.
bool is_device_memory(const void* pointer);

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// MPI_Alloc_mem: memory that the program means for communication. Large blocks come from the shared
// heap, which peers can map.
#pragma once

#include <cstddef>

namespace trib::mpi {

/// Null: the MPI is to be asked.
void* allocate_shared(std::size_t bytes);
/// False: the block is the MPI's.
bool free_shared(void* block);

}  // namespace trib::mpi

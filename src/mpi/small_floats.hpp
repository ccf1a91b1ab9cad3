// SPDX-License-Identifier: BSD-3-Clause
// half, bfloat16 and the 8-bit floats as MPI datatypes, in every MPI: trib_mpi_type() of
// tributary.h.
#pragma once

#include "base/types.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

// Defined in translate.cpp.
void add_type(MPI_Datatype handle, Dtype dtype);
void remove_type(MPI_Datatype handle);

void free_small_floats();

}  // namespace trib::mpi

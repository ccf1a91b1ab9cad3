// SPDX-License-Identifier: BSD-3-Clause
// What the MPI refuses. A call that one rank makes with wrong arguments was none: this rank gets
// its error, and the others must neither hear of the call nor be waited for.
#pragma once

#include <atomic>

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// Whether the MPI refuses to reduce elements of `dtype` by `op`, whatever else the call says. It
/// is asked, in a reduction of nothing over a communicator of this rank alone. False where that
/// cannot be: without MPI_COMM_WORLD.
bool is_refused(MPI_Datatype dtype, MPI_Op op) noexcept;

/// By MPI_Type_free and MPI_Op_free: handles may come to mean something else.
extern std::atomic<unsigned> handles_freed;

/// Before MPI ends.
void end_judging() noexcept;

}  // namespace trib::mpi

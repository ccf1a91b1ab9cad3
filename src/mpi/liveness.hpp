// SPDX-License-Identifier: BSD-3-Clause
// How waits of ours keep the MPI going: a message that it is about to move may be what a peer waits
// for before it comes to the reduction that we wait in.
#pragma once

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// Lets the MPI go on with whatever it has under way, on any communicator. It tests a generalised
/// request that never ends: a probe would find the same message again and again where one has come
/// that nobody has asked for yet, and go no further. (While MPI_Finalize runs it has to do.) From
/// any thread that may call the MPI. False: MPI_COMM_WORLD is not there.
bool keep_mpi_alive() noexcept;
/// The same without that request, by a look for a message on `comm` that is unlikely to be there.
void look_into(MPI_Comm comm, int rank, int size) noexcept;

/// Before MPI_Finalize: there must be no request left.
void end_keeping_mpi_alive() noexcept;

}  // namespace trib::mpi

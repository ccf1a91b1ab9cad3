// SPDX-License-Identifier: BSD-3-Clause
// What TRIB_STATS=1 prints at the end of the job.
#pragma once

#include "mpi/communicators.hpp"

namespace trib::mpi {

/// Counts a call that is left to the MPI.
void count_declined(Decline reason);

/// Counts one of them that got copies of its GPU buffers, or any other call that did.
void count_staged(bool is_reduction);

/// Keeps the counters of a communicator that goes away.
void keep_counters(const Member& member);

/// Collective over MPI_COMM_WORLD where `is_world`; its rank 0 prints the averages of all ranks.
/// Otherwise (sessions have no common communicator) the rank 0 of the largest communicator that was
/// seen prints its own.
void print_stats(bool is_world);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// Requests of the MPI whose buffers are copies in host memory (staging.hpp). The program holds the
// MPI's own handle. A record by that handle keeps the copies, and whatever function says that the
// request has come to its end copies the result to the device before it returns. These functions
// stand before those of requests.hpp, which see to requests of ours in the same lists.
#pragma once

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// Puts away what was freed while it was active and has come to its end since.
void sweep_staged() noexcept;
/// Before MPI, or its world, ends. `are_all`: nothing of a session is left either.
void end_staged(bool are_all) noexcept;

namespace staged {

// The MPI's functions of these names, for lists in which any requests may stand.
int start(MPI_Request* request);
int start_all(int count, MPI_Request* requests);
int wait(MPI_Request* request, MPI_Status* status);
int wait_all(int count, MPI_Request* requests, MPI_Status* statuses);
int wait_any(int count, MPI_Request* requests, int* index, MPI_Status* status);
int wait_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses);
int test(MPI_Request* request, int* flag, MPI_Status* status);
int test_all(int count, MPI_Request* requests, int* flag, MPI_Status* statuses);
int test_any(int count, MPI_Request* requests, int* index, int* flag, MPI_Status* status);
int test_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses);
int free_request(MPI_Request* request);
int get_status(MPI_Request request, int* flag, MPI_Status* status);
int get_status_all(int count, const MPI_Request* requests, int* flag, MPI_Status* statuses);
int get_status_any(int count, const MPI_Request* requests, int* index, int* flag,
                   MPI_Status* status);
int get_status_some(int count, const MPI_Request* requests, int* done, int* indices,
                    MPI_Status* statuses);

}  // namespace staged

}  // namespace trib::mpi

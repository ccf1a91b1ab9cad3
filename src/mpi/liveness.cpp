// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/liveness.hpp"

#include <atomic>

#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"

namespace trib::mpi {
namespace {

// One thread at a time tests a request; who finds another one at it need not.
std::atomic_flag is_busy;
MPI_Request endless;  // if there is one: Open MPI's handles are not known before it is loaded
bool is_there = false, is_over = false;

extern "C" {
int trib_mpi_query(void* /*state*/, MPI_Status* /*status*/) { return MPI_SUCCESS; }
int trib_mpi_free(void* /*state*/) { return MPI_SUCCESS; }
int trib_mpi_cancel(void* /*state*/, int /*is_complete*/) { return MPI_SUCCESS; }
}

}  // namespace

bool keep_mpi_alive() noexcept {
  if (is_busy.test_and_set(std::memory_order_acquire)) return true;
  const Library& mpi = library();
  if (!is_there && !is_over && is_world_running())
    is_there = mpi.Grequest_start(trib_mpi_query, trib_mpi_free, trib_mpi_cancel, nullptr,
                                  &endless) == MPI_SUCCESS;
  bool result = is_there;
  int flag = 0;
  if (is_there) {
    mpi.Test(&endless, &flag, MPI_STATUS_IGNORE);
  } else if (is_over && is_world_running()) {
    // In a callback of the program's that MPI_Finalize calls: nobody can free the world.
    int rank = 0, size = 1;
    mpi.Comm_rank(MPI_COMM_WORLD, &rank);
    mpi.Comm_size(MPI_COMM_WORLD, &size);
    look_into(MPI_COMM_WORLD, rank, size);
    result = true;
  }
  is_busy.clear(std::memory_order_release);
  return result;
}

void look_into(MPI_Comm comm, int rank, int size) noexcept {
  constexpr int kTag = 32767;  // the largest that every MPI has
  int flag = 0;
  library().Iprobe((rank + 1) % size, kTag, comm, &flag, MPI_STATUS_IGNORE);
}

void end_keeping_mpi_alive() noexcept {
  while (is_busy.test_and_set(std::memory_order_acquire)) {
  }
  is_over = true;
  if (is_there) {
    library().Grequest_complete(endless);
    library().Wait(&endless, MPI_STATUS_IGNORE);
  }
  is_there = false;
  is_busy.clear(std::memory_order_release);
}

}  // namespace trib::mpi

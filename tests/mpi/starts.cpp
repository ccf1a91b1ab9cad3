// SPDX-License-Identifier: BSD-3-Clause
// Reductions that are started by MPI_Startall, freed, and looked at by MPI_Request_get_status: for
// behaviour.py, which preloads a tool in front of just these.
#include <unistd.h>

#include "check.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int rank = world_rank(), size = world_size(), sum = size * (size - 1) / 2;
#if HAS_PERSISTENT_REDUCTIONS
  for (int round = 0; round < 20; ++round) {
    int result = -1, received = -1;
    MPI_Request request;
    MPI_Allreduce_init(&rank, &result, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL,
                       &request);
    MPI_Startall(1, &request);
    MPI_Waitall(1, &request, MPI_STATUSES_IGNORE);
    CHECK(result == sum, "round %d: %d", round, result);
    MPI_Request_free(&request);
    // The MPI may give what was freed away again. Messages are late.
    MPI_Irecv(&received, 1, MPI_INT, (rank + size - 1) % size, 5, MPI_COMM_WORLD, &request);
    if (rank == 0 && round % 5 == 0) usleep(20000);
    MPI_Send(&rank, 1, MPI_INT, (rank + 1) % size, 5, MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(received == (rank + size - 1) % size, "round %d: %d", round, received);
  }
#endif
  for (int round = 0; round < 20; ++round) {
    int result = -1, flag = 0;
    MPI_Request request;
    if (rank == 0 && round % 5 == 0) usleep(20000);
    MPI_Iallreduce(&rank, &result, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request);
    while (!flag) MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE);
    CHECK(result == sum, "nonblocking, round %d: %d", round, result);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
  MPI_Finalize();
}

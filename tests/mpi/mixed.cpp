// SPDX-License-Identifier: BSD-3-Clause
// The ranks in C of a job whose others run fortran/mixed.F90, which makes the same calls.
//   mixed [thread]    begins with MPI_Init_thread
#include "check.hpp"

namespace {

void reduce(MPI_Comm comm) {
  int mine = 1, all = -1, size = 0;
  MPI_Comm_size(comm, &size);
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, comm);
  CHECK(all == size, "allreduce gave %d", all);
}

void post(MPI_Comm comm) {
  int mine = 1, all = -1, size = 0;
  MPI_Comm_size(comm, &size);
  MPI_Request request;
  MPI_Iallreduce(&mine, &all, 1, MPI_INT, MPI_SUM, comm, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(all == size, "iallreduce gave %d", all);
}

void tell(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  int value = rank == 0 ? 7 : -1;
  MPI_Bcast(&value, 1, MPI_INT, 0, comm);
  CHECK(value == 7, "bcast gave %d", value);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  if (argc > 1)
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &provided);
  else
    MPI_Init(&argc, &argv);
  tell(MPI_COMM_WORLD);
  post(MPI_COMM_WORLD);
  reduce(MPI_COMM_WORLD);
  post(MPI_COMM_WORLD);
  MPI_Barrier(MPI_COMM_WORLD);

  MPI_Comm copy, part;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  post(copy);
  tell(copy);
  post(copy);
  MPI_Barrier(copy);
  reduce(copy);
  post(copy);
  MPI_Comm_split(copy, 0, world_rank(), &part);
  tell(part);
  post(part);
  MPI_Comm_free(&part);

  // A communicator of ranks in C alone is like any other, once they have met.
  MPI_Comm_split(copy, 1, world_rank(), &part);
  reduce(part);
  post(part);
  MPI_Barrier(part);
  post(part);
  MPI_Comm_free(&part);
  MPI_Comm_free(&copy);
  std::printf("c: fine\n");
  MPI_Finalize();
}

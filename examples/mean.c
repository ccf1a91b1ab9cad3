/* SPDX-License-Identifier: BSD-3-Clause */
/* An ordinary MPI program: the mean of one number per rank. It knows nothing of Tributary. */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char** argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);

  const double mine = rank;
  double sum = 0;
  MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) printf("mean of 0 to %d: %g\n", size - 1, sum / size);

  MPI_Finalize();
  return 0;
}

/* SPDX-License-Identifier: BSD-3-Clause */
/* A program as a user writes it. With WITH_API it also uses what MPI itself does not offer,
 * with WITH_PERSISTENT what only MPI-4 does. */
#include <mpi.h>
#include <stdio.h>
#ifdef WITH_PERSISTENT
#include <tributary/mpi_persistent.h>
#endif
#ifdef WITH_API
#include <tributary/tributary.h>
#endif

int main(int argc, char** argv) {
  int rank, size;
  float in, out = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  in = (float)(rank + 1);
#ifdef WITH_PERSISTENT
  {
    MPI_Request request;
    MPI_Allreduce_init(&in, &out, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &request);
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    MPI_Request_free(&request);
  }
#else
  MPI_Allreduce(&in, &out, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#endif
  if (rank == 0) printf("ranks %d sum %g\n", size, out);
#ifdef WITH_API
  {
    /* 1.0 in bfloat16 is 0x3f80, 2.0 is 0x4000. */
    unsigned short ones = 0x3f80, sum = 0;
    MPI_Datatype type = trib_mpi_type("bfloat16");
    if (type == MPI_DATATYPE_NULL) MPI_Abort(MPI_COMM_WORLD, 3);
    MPI_Allreduce(&ones, &sum, 1, type, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
      printf("version %s algorithm %s bfloat16 %#x\n", trib_version(),
             trib_mpi_last_algorithm(MPI_COMM_WORLD), (unsigned)sum);
  }
#endif
  MPI_Finalize();
  return 0;
}

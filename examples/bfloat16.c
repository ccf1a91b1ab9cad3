/* SPDX-License-Identifier: BSD-3-Clause */
/* A sum of bfloat16 numbers: a type that MPI does not have. Linked with the preload library, see
 * Makefile. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tributary/tributary.h>

enum { kCount = 1000 };

/* A bfloat16 is the upper half of a float. */
static uint16_t from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16); /* cuts off, which is exact for the numbers used here */
}

static float to_float(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

int main(int argc, char** argv) {
  int rank;
  uint16_t mine[kCount], sum[kCount];
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);

  const MPI_Datatype bfloat16 = trib_mpi_type("bfloat16"); /* not to be freed */
  if (bfloat16 == MPI_DATATYPE_NULL) {
    fprintf(stderr, "this program was linked for another MPI\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (int i = 0; i < kCount; ++i) mine[i] = from_float(0.5f);
  MPI_Allreduce(mine, sum, kCount, bfloat16, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) {
    printf("sum: %g, by %s\n", to_float(sum[0]), trib_mpi_last_algorithm(MPI_COMM_WORLD));
  }

  MPI_Finalize();
  return 0;
}

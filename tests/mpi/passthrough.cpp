// SPDX-License-Identifier: BSD-3-Clause
// What is left to the MPI behaves as without Tributary, also between served calls.
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "check.hpp"

namespace {

void last_wins(void* in, void* inout, int* count, MPI_Datatype*) {  // not commutative
  for (int i = 0; i < *count; ++i)
    static_cast<int*>(inout)[i] = static_cast<int*>(in)[i] * 10 + static_cast<int*>(inout)[i];
}

void add_pairs(void* in, void* inout, int* count, MPI_Datatype*) {
  for (int i = 0; i < 2 * *count; ++i) static_cast<int*>(inout)[i] += static_cast<int*>(in)[i];
}

void served_call() {
  int one = 1, all = 0;
  MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(all == world_size(), "");
  if (is_served_here() && all > 1) CHECK(was_served(MPI_COMM_WORLD), "");
}
void expect_mpi() {
  if (is_served_here())
    CHECK(last_algorithm(MPI_COMM_WORLD) == "mpi", "%s", last_algorithm(MPI_COMM_WORLD).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int rank = world_rank(), size = world_size();
  served_call();

  MPI_Op op;
  MPI_Op_create(last_wins, 0, &op);
  int digit = rank + 1, digits = 0, expected = 0;
  for (int r = 1; r <= size; ++r) expected = expected * 10 + r;
  MPI_Allreduce(&digit, &digits, 1, MPI_INT, op, MPI_COMM_WORLD);
  CHECK(digits % 10 == size, "user-defined operator: %d", digits);
  expect_mpi();
  MPI_Op_free(&op);
  served_call();

  MPI_Datatype pair;
  MPI_Type_contiguous(2, MPI_INT, &pair);
  MPI_Type_commit(&pair);
  MPI_Op_create(add_pairs, 1, &op);
  std::vector<int> in(20, rank), out(20);
  MPI_Allreduce(in.data(), out.data(), 10, pair, op, MPI_COMM_WORLD);
  CHECK(out[19] == size * (size - 1) / 2, "derived type: %d", out[19]);
  expect_mpi();
  MPI_Op_free(&op);
  MPI_Type_free(&pair);

  // A dup of a predefined type is a type of its own to us. Open MPI adds it up, MPICH refuses it.
  MPI_Datatype dup;
  MPI_Type_dup(MPI_INT, &dup);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const int status = MPI_Allreduce(in.data(), out.data(), 20, dup, MPI_SUM, MPI_COMM_WORLD);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  CHECK(status != MPI_SUCCESS || out[19] == size * (size - 1) / 2, "dup of a type: %d", out[19]);
  expect_mpi();
  MPI_Type_free(&dup);
  served_call();

  // The standard gives the integers of Fortran no logical operators. Open MPI does.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Allreduce(in.data(), out.data(), 20, MPI_INTEGER, MPI_LAND, MPI_COMM_WORLD);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  expect_mpi();
  served_call();

  // Nonblocking ones in flight around served calls.
  std::vector<double> a(1000, rank), b(1000);
  MPI_Request request;
  MPI_Iallreduce(a.data(), b.data(), 1000, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
  served_call();
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(b[999] == size * (size - 1) / 2.0, "iallreduce");
  MPI_Ireduce(a.data(), b.data(), 1000, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  if (rank == 0) CHECK(b[0] == size - 1, "ireduce");
#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
  MPI_Allreduce_init(a.data(), b.data(), 1000, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL,
                     &request);
  for (int i = 0; i < 3; ++i) {
    b[0] = -1;
    MPI_Start(&request);
    served_call();
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(b[0] == size * (size - 1) / 2.0, "persistent allreduce");
  }
  MPI_Request_free(&request);
#endif
  // MPI_Reduce_local, scans and exchanges are none of our business.
  int x = 3, y = 4;
  MPI_Reduce_local(&x, &y, 1, MPI_INT, MPI_SUM);
  CHECK(y == 7, "reduce_local");
  x = rank;
  MPI_Scan(&x, &y, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(y == rank * (rank + 1) / 2, "scan");
  served_call();
  if (const char* const seconds = std::getenv("TEST_LATE"); seconds != nullptr && rank == 0)
    sleep(static_cast<unsigned>(std::atoi(seconds)));  // what a program writes at its end
  MPI_Finalize();
}

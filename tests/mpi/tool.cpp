// SPDX-License-Identifier: BSD-3-Clause
// A tool as many are: it stands in front of a few functions, and knows of nobody between itself and
// the MPI. behaviour.py preloads those that this makes before Tributary, and one behind it.
#include <mpi.h>

#include <cstdio>

#if defined(TOOL_STARTS)
extern "C" int MPI_Startall(int count, MPI_Request* requests) {
  return PMPI_Startall(count, requests);
}
extern "C" int MPI_Request_free(MPI_Request* request) { return PMPI_Request_free(request); }
extern "C" int MPI_Request_get_status(MPI_Request request, int* flag, MPI_Status* status) {
  return PMPI_Request_get_status(request, flag, status);
}
#elif defined(TOOL_DUP)
extern "C" int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* result) { return PMPI_Comm_dup(comm, result); }
#elif defined(TOOL_REDUCE)
extern "C" int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                             MPI_Comm comm) {
  return PMPI_Allreduce(in, out, count, type, op, comm);
}
#elif defined(TOOL_STATE)
// What it counts in is there from MPI_Init on.
namespace {
struct Counts {
  int allreduces = 0, waits = 0, others = 0;
}* counts = nullptr;
}  // namespace

extern "C" int MPI_Init(int* argc, char*** argv) {
  counts = new Counts;
  return PMPI_Init(argc, argv);
}
extern "C" int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  counts = new Counts;
  return PMPI_Init_thread(argc, argv, required, provided);
}
extern "C" int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  ++counts->others;
  return PMPI_Comm_rank(comm, rank);
}
extern "C" int MPI_Barrier(MPI_Comm comm) {
  ++counts->others;
  return PMPI_Barrier(comm);
}
extern "C" int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                             MPI_Comm comm) {
  ++counts->allreduces;
  return PMPI_Allreduce(in, out, count, type, op, comm);
}
extern "C" int MPI_Wait(MPI_Request* request, MPI_Status* status) {
  ++counts->waits;
  return PMPI_Wait(request, status);
}
extern "C" int MPI_Finalize() {
  std::printf("tool: %d allreduces, %d waits, %d others\n", counts->allreduces, counts->waits,
              counts->others);
  std::fflush(stdout);
  delete counts;
  counts = nullptr;
  return PMPI_Finalize();
}
#else
extern "C" int MPI_Wait(MPI_Request* request, MPI_Status* status) {
  return PMPI_Wait(request, status);
}
#endif

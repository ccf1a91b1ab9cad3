// SPDX-License-Identifier: BSD-3-Clause
// A tool as many are: it stands in front of a few functions, and knows of nobody between itself and
// the MPI. behaviour.py preloads one of the three that this makes before Tributary.
#include <mpi.h>

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
#else
extern "C" int MPI_Wait(MPI_Request* request, MPI_Status* status) {
  return PMPI_Wait(request, status);
}
#endif

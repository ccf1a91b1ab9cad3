/* SPDX-License-Identifier: BSD-3-Clause
 *
 * MPI-4's persistent reductions for programs of an older MPI, such as Open MPI 4:
 * MPI_Allreduce_init and its like, which then are Tributary's. Include this instead of mpi.h, or
 * after it, and link the preload library of the MPI's family before the MPI itself:
 *
 *     mpicc program.c -ltributary_openmpi
 *
 * The program needs no LD_PRELOAD then. What Tributary does not take over, it begins at each start
 * as a nonblocking reduction of the MPI. An mpi.h of MPI-4 has all this, and nothing is declared
 * here. There are no PMPI_ names.
 */
#ifndef TRIBUTARY_MPI_PERSISTENT_H
#define TRIBUTARY_MPI_PERSISTENT_H

#include <mpi.h>

#if MPI_VERSION < 4

#ifdef __cplusplus
extern "C" {
#endif

/* Open MPI 5 calls itself MPI 3.1 and has these, just so. */
int MPI_Allreduce_init(const void* sendbuf, void* recvbuf, int count, MPI_Datatype datatype,
                       MPI_Op op, MPI_Comm comm, MPI_Info info, MPI_Request* request);
int MPI_Reduce_init(const void* sendbuf, void* recvbuf, int count, MPI_Datatype datatype, MPI_Op op,
                    int root, MPI_Comm comm, MPI_Info info, MPI_Request* request);
int MPI_Reduce_scatter_init(const void* sendbuf, void* recvbuf, const int recvcounts[],
                            MPI_Datatype datatype, MPI_Op op, MPI_Comm comm, MPI_Info info,
                            MPI_Request* request);
int MPI_Reduce_scatter_block_init(const void* sendbuf, void* recvbuf, int recvcount,
                                  MPI_Datatype datatype, MPI_Op op, MPI_Comm comm, MPI_Info info,
                                  MPI_Request* request);

int MPI_Allreduce_init_c(const void* sendbuf, void* recvbuf, MPI_Count count, MPI_Datatype datatype,
                         MPI_Op op, MPI_Comm comm, MPI_Info info, MPI_Request* request);
int MPI_Reduce_init_c(const void* sendbuf, void* recvbuf, MPI_Count count, MPI_Datatype datatype,
                      MPI_Op op, int root, MPI_Comm comm, MPI_Info info, MPI_Request* request);
int MPI_Reduce_scatter_init_c(const void* sendbuf, void* recvbuf, const MPI_Count recvcounts[],
                              MPI_Datatype datatype, MPI_Op op, MPI_Comm comm, MPI_Info info,
                              MPI_Request* request);
int MPI_Reduce_scatter_block_init_c(const void* sendbuf, void* recvbuf, MPI_Count recvcount,
                                    MPI_Datatype datatype, MPI_Op op, MPI_Comm comm, MPI_Info info,
                                    MPI_Request* request);

#ifdef __cplusplus
}
#endif

#endif /* MPI_VERSION < 4 */

#endif

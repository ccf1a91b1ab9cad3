/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The C API of Tributary. Programs need it only for what MPI itself does not offer; reductions
 * through MPI need no change at all. Link libtributary_mpich, libtributary_openmpi or
 * libtributary_abi (before the MPI library), or look the functions up with dlsym(RTLD_DEFAULT,
 * ...), which finds them where the library is preloaded.
 */
#ifndef TRIBUTARY_H
#define TRIBUTARY_H

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0" */
const char* trib_version(void);

/* The following need mpi.h, included before this file. */
#ifdef MPI_VERSION

/* "half" (IEEE binary16) or "bfloat16": a committed MPI datatype of two bytes. MPI_SUM, MPI_PROD,
 * MPI_MAX and MPI_MIN work on it in the blocking reductions, computed in float. one_shot and
 * two_shot round once; algorithms that pass on partial results (rings, trees, hypercubes) round at
 * every step. MPI must be initialised; any thread. The type belongs to Tributary: do not free it;
 * it is gone after MPI_Finalize. MPI_DATATYPE_NULL for other names, and where the process runs an
 * MPI of another family. */
MPI_Datatype trib_mpi_type(const char* name);

/* Who served the last reduction on `comm`: the name of an algorithm, or "mpi" if it was left to the
 * MPI, or "none" if there was none. */
const char* trib_mpi_last_algorithm(MPI_Comm comm);

#endif /* MPI_VERSION */

#ifdef __cplusplus
}
#endif
#endif

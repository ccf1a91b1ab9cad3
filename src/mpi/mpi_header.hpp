// SPDX-License-Identifier: BSD-3-Clause
// The one place that includes mpi.h. Handles of Open MPI are addresses of objects in its library;
// as a preload library must not link any MPI, MPI_INT and the like turn into look-ups here. Which
// MPI is below: library.hpp.
#pragma once

#include <cstdint>

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#if TRIB_MPI_ABI
#include <mpi_abi.h>
#else
#include <mpi.h>
#endif

namespace trib::mpi {

/// What every argument of an MPI function fits in, whatever MPI it is: an int, a count or address,
/// a handle of either width. Of an int the upper half is undefined.
using Word = std::intptr_t;

template <class T>
T from_word(Word word) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    return (T)word;  // a pointer or a count
  } else {
    return static_cast<T>(word);
  }
}
template <class T>
Word to_word(T value) {
  return (Word)value;
}

/// The address of an object in the MPI library, or null. Slow: for setup only.
void* predefined(const char* symbol);

}  // namespace trib::mpi

#if TRIB_MPI_OPENMPI
#undef OMPI_PREDEFINED_GLOBAL
#define OMPI_PREDEFINED_GLOBAL(type, global) static_cast<type>(trib::mpi::predefined(#global))
// A header configured without Fortran leaves these out, but the library that runs may have them.
#define TRIB_OPTIONAL(symbol) OMPI_PREDEFINED_GLOBAL(MPI_Datatype, symbol)
#else
#define TRIB_OPTIONAL(symbol) MPI_DATATYPE_NULL
#endif

#ifndef MPI_INTEGER1
#define MPI_INTEGER1 TRIB_OPTIONAL(ompi_mpi_integer1)
#endif
#ifndef MPI_INTEGER2
#define MPI_INTEGER2 TRIB_OPTIONAL(ompi_mpi_integer2)
#endif
#ifndef MPI_INTEGER4
#define MPI_INTEGER4 TRIB_OPTIONAL(ompi_mpi_integer4)
#endif
#ifndef MPI_INTEGER8
#define MPI_INTEGER8 TRIB_OPTIONAL(ompi_mpi_integer8)
#endif
#ifndef MPI_REAL2
#define MPI_REAL2 TRIB_OPTIONAL(ompi_mpi_real2)
#endif
#ifndef MPI_REAL4
#define MPI_REAL4 TRIB_OPTIONAL(ompi_mpi_real4)
#endif
#ifndef MPI_REAL8
#define MPI_REAL8 TRIB_OPTIONAL(ompi_mpi_real8)
#endif
#ifndef MPI_COMPLEX8
#define MPI_COMPLEX8 TRIB_OPTIONAL(ompi_mpi_complex8)
#endif
#ifndef MPI_COMPLEX16
#define MPI_COMPLEX16 TRIB_OPTIONAL(ompi_mpi_complex16)
#endif
#ifndef MPI_LOGICAL1
#define MPI_LOGICAL1 TRIB_OPTIONAL(ompi_mpi_logical1)
#endif
#ifndef MPI_LOGICAL2
#define MPI_LOGICAL2 TRIB_OPTIONAL(ompi_mpi_logical2)
#endif
#ifndef MPI_LOGICAL4
#define MPI_LOGICAL4 TRIB_OPTIONAL(ompi_mpi_logical4)
#endif
#ifndef MPI_LOGICAL8
#define MPI_LOGICAL8 TRIB_OPTIONAL(ompi_mpi_logical8)
#endif
// 16-bit floats. Handles of the MPICH family are numbers, and no number has had two meanings, so
// that those of Intel MPI can stand beside those of MPICH.
#ifndef MPIX_C_FLOAT16
#define MPIX_C_FLOAT16 MPI_DATATYPE_NULL
#endif
#ifndef MPIX_BFLOAT16
#define MPIX_BFLOAT16 MPI_DATATYPE_NULL
#endif
#ifndef MPIX_C_BF16
#if TRIB_MPI_MPICH
#define MPIX_C_BF16 ((MPI_Datatype)0x4c000247)
#else
#define MPIX_C_BF16 MPI_DATATYPE_NULL
#endif
#endif
// What MPIs that tolerate faults call a peer's death and a revoked communicator.
#if TRIB_MPI_OPENMPI && defined MPI_ERR_REVOKED
#define TRIB_ERR_PROC_FAILED MPI_ERR_PROC_FAILED
#define TRIB_ERR_REVOKED MPI_ERR_REVOKED
#elif defined MPIX_ERR_REVOKED
#define TRIB_ERR_PROC_FAILED MPIX_ERR_PROC_FAILED
#define TRIB_ERR_REVOKED MPIX_ERR_REVOKED
#else
#define TRIB_ERR_PROC_FAILED MPI_ERR_OTHER
#define TRIB_ERR_REVOKED MPI_ERR_OTHER
#endif

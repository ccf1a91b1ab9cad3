// SPDX-License-Identifier: BSD-3-Clause
// What the MPI test programs share. They are ordinary MPI programs: Tributary comes in by
// LD_PRELOAD, or not at all.
#pragma once

#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

// Open MPI 4 lacks persistent reductions, so that the program has to be linked with Tributary, as
// TEST_LINKED says; Open MPI 5 has them, and calls itself MPI 3.1. Those of MPICH 4.0.2 are not to
// be used: MPI_Test of an inactive one gives flag 0.
#if defined(MPICH_NUMVERSION) && MPICH_NUMVERSION < 40100000
#define HAS_PERSISTENT_REDUCTIONS 0
#elif MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5) || TEST_LINKED
#define HAS_PERSISTENT_REDUCTIONS 1
#else
#define HAS_PERSISTENT_REDUCTIONS 0
#endif

inline int world_rank() {
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
inline int world_size() {
  int size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// Says what is wrong and ends the job.
[[noreturn]] inline void fail(const char* file, int line, const char* condition, const char* format,
                              ...) {
  char text[1500];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, condition, text);
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
}
#define CHECK(condition, ...)                                               \
  do {                                                                      \
    if (!(condition)) fail(__FILE__, __LINE__, #condition, "" __VA_ARGS__); \
  } while (false)

/// A function of Tributary's C API, or null where it is not preloaded.
template <class Function>
Function* tributary(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

/// For what an MPI by itself does wrong.
inline bool library_is(const char* name) {
  std::string text(MPI_MAX_LIBRARY_VERSION_STRING + 1, 0);
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return text.find(name) != std::string::npos;
}
inline bool is_open_mpi() { return library_is("Open MPI"); }
inline bool is_intel() { return library_is("Intel"); }
inline bool is_mpich() { return library_is("MPICH") || is_intel(); }  ///< or made of it

/// Whether calls are expected to be served: preloaded, and not told otherwise.
inline bool is_served_here() {
  static const bool result =
      dlsym(RTLD_DEFAULT, "trib_mpi_last_algorithm") != nullptr && !std::getenv("TEST_UNSERVED");
  return result;
}

/// "mpi", "none", or an algorithm; "" where Tributary is not preloaded.
inline std::string last_algorithm(MPI_Comm comm) {
  static auto* const function = tributary<const char*(MPI_Comm)>("trib_mpi_last_algorithm");
  return function ? function(comm) : "";
}
inline bool was_served(MPI_Comm comm) {
  const std::string name = last_algorithm(comm);
  return name != "" && name != "mpi" && name != "none";
}

// What MPIs that tolerate faults call a process that has failed and a revoked communicator.
#ifdef MPIX_ERR_REVOKED
constexpr int kProcFailed = MPIX_ERR_PROC_FAILED, kRevoked = MPIX_ERR_REVOKED;
#elif defined MPI_ERR_REVOKED
constexpr int kProcFailed = MPI_ERR_PROC_FAILED, kRevoked = MPI_ERR_REVOKED;
#else
constexpr int kProcFailed = MPI_ERR_OTHER, kRevoked = MPI_ERR_OTHER;
#endif

inline std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}
inline int error_class(int code) {
  int result = MPI_SUCCESS;
  MPI_Error_class(code, &result);
  return result;
}

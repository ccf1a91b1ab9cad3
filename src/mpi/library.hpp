// SPDX-License-Identifier: BSD-3-Clause
// The MPI library that this process has loaded, found when it is first needed: it may come late
// (dlopen) and privately (RTLD_LOCAL), and is never linked. intercept.cpp starts here.
#pragma once

#include <atomic>

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// The functions that are intercepted, in the order of Library::original.
enum class Entry {
  allreduce,
  reduce,
  reduce_scatter,
  reduce_scatter_block,
  allreduce_c,
  reduce_c,
  reduce_scatter_c,
  reduce_scatter_block_c,
  finalize,
  session_init,
  session_finalize,
};
inline constexpr int kEntries = 11;

// clang-format off
// What is called in the MPI. All of it is in MPI 3.
#define TRIB_PMPI(X)                                                                                      \
  X(Initialized) X(Finalized)                                                                             \
  X(Comm_test_inter) X(Comm_size) X(Comm_rank)                                                            \
  X(Comm_create_keyval) X(Comm_free_keyval) X(Comm_set_attr) X(Comm_call_errhandler)                      \
  X(Iallgather) X(Igather) X(Test) X(Iprobe)                                                              \
  X(Get_library_version) X(Add_error_class) X(Add_error_code) X(Add_error_string) X(Error_string)         \
  X(Type_size) X(Type_get_extent) X(Type_get_true_extent)                                                 \
  X(Type_contiguous) X(Type_commit) X(Type_free) X(Type_set_name)                                         \
  X(Type_create_keyval) X(Type_free_keyval) X(Type_set_attr)                                              \
  X(Op_create) X(Op_free)                                                                                 \
  TRIB_PMPI_FORTRAN(X)
#if TRIB_MPI_OPENMPI
#define TRIB_PMPI_FORTRAN(X) X(Comm_f2c) X(Type_f2c) X(Op_f2c)
#else
#define TRIB_PMPI_FORTRAN(X)
#endif
// clang-format on

struct Library {
  /// Its handles and constants are those of this build. If not, only `original` may be used, with
  /// words as they came.
  bool is_ours = false;
  void* handle = nullptr;         ///< for dlsym
  void* original[kEntries] = {};  ///< PMPI_ functions; null where the MPI has none
#define TRIB_MEMBER(name) decltype(&PMPI_##name) name = nullptr;
  TRIB_PMPI(TRIB_MEMBER)
#undef TRIB_MEMBER

  /// A function that not every MPI has, or null. Slow: for setup only.
  void* find(const char* function) const;

  template <class... Words>
  int call(Entry entry, Words... words) const {
    const auto function = reinterpret_cast<int (*)(Words...)>(original[static_cast<int>(entry)]);
    return function ? function(words...) : missing(entry);
  }

 private:
  static int missing(Entry entry);
};

extern std::atomic<const Library*> found_library;
const Library& find_library();

/// The MPI of this process. Where there is none, a Library without any function.
inline const Library& library() {
  const Library* found = found_library.load(std::memory_order_acquire);
  return found ? *found : find_library();
}

/// Throws Error if an MPI function failed.
void check(int status, const char* function);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// The MPI library that this process has loaded, found when it is first needed: it may come late
// (dlopen) and privately (RTLD_LOCAL), and is never linked. intercept.cpp starts here.
#pragma once

#include <atomic>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/request.hpp"
#include "mpi/mpi_header.hpp"
#include "mpi/prototypes.hpp"

namespace trib::mpi {

// clang-format off
// The functions that are intercepted, with those of prototypes.hpp. The reductions come first, in the order of Form, width of a count and Collective:
// see reduction_entry().
#define TRIB_INTERCEPTED(X)                                                                               \
  X(Allreduce) X(Reduce) X(Reduce_scatter) X(Reduce_scatter_block)                                        \
  X(Allreduce_c) X(Reduce_c) X(Reduce_scatter_c) X(Reduce_scatter_block_c)                                \
  X(Iallreduce) X(Ireduce) X(Ireduce_scatter) X(Ireduce_scatter_block)                                    \
  X(Iallreduce_c) X(Ireduce_c) X(Ireduce_scatter_c) X(Ireduce_scatter_block_c)                            \
  X(Allreduce_init) X(Reduce_init) X(Reduce_scatter_init) X(Reduce_scatter_block_init)                    \
  X(Allreduce_init_c) X(Reduce_init_c) X(Reduce_scatter_init_c) X(Reduce_scatter_block_init_c)            \
  X(Init) X(Init_thread) X(Finalize) X(Session_init) X(Session_finalize)                                  \
  X(Start) X(Startall) X(Wait) X(Waitall) X(Waitany) X(Waitsome) X(Test) X(Testall) X(Testany) X(Testsome)\
  X(Request_free) X(Cancel) X(Request_get_status) X(Type_free) X(Op_free)                                 \
  X(Request_get_status_all) X(Request_get_status_any) X(Request_get_status_some)                          \
  X(Barrier) X(Alloc_mem) X(Free_mem)                                                                     \
  X(Comm_dup) X(Comm_dup_with_info) X(Comm_split) X(Comm_split_type) X(Comm_create)                       \
  X(Comm_idup) X(Comm_idup_with_info) X(Cart_create) X(Cart_sub) X(Comm_free) X(Comm_disconnect)

// What else is called in the MPI. All of it is in MPI 3.
#define TRIB_PMPI(X)                                                                                      \
  X(Initialized) X(Finalized)                                                                             \
  X(Comm_test_inter) X(Comm_size) X(Comm_rank) X(Comm_remote_size) X(Comm_split) X(Comm_free)             \
  X(Comm_get_parent) X(Comm_group) X(Group_translate_ranks) X(Group_free)                                \
  X(Comm_get_errhandler) X(Comm_set_errhandler) X(Errhandler_free)                                        \
  X(Comm_create_keyval) X(Comm_free_keyval) X(Comm_set_attr) X(Comm_call_errhandler)                      \
  X(Iallgather) X(Igather) X(Test) X(Iprobe) X(Grequest_start) X(Grequest_complete)                       \
  X(Get_library_version) X(Add_error_class) X(Add_error_code) X(Add_error_string) X(Error_string)         \
  X(Error_class) X(Test_cancelled) X(Get_elements_x)                                                      \
  X(Info_get) X(Type_size) X(Type_size_x) X(Type_get_extent) X(Type_get_true_extent)                      \
  X(Type_get_envelope) X(Type_get_contents)                                                               \
  X(Pack_size) X(Pack_external_size) X(Pack) X(Unpack)                                                    \
  X(Topo_test) X(Cartdim_get) X(Cart_shift) X(Graph_neighbors_count) X(Dist_graph_neighbors_count)        \
  X(Type_contiguous) X(Type_commit) X(Type_free) X(Type_set_name)                                         \
  X(Type_create_keyval) X(Type_free_keyval) X(Type_set_attr)                                              \
  X(Op_create) X(Op_free)                                                                                 \
  X(Recv_init) X(Start) X(Request_free) X(Wait) X(Waitany) X(Waitsome)                                    \
  X(Testall) X(Testany) X(Testsome) X(Request_get_status)                                                 \
  TRIB_PMPI_FORTRAN(X)
#if TRIB_MPI_OPENMPI
#define TRIB_PMPI_FORTRAN(X) X(Comm_f2c) X(Comm_c2f) X(Type_f2c) X(Op_f2c) X(Request_f2c) X(Request_c2f) X(Message_f2c)   \
  X(Message_c2f) X(Info_f2c) X(Group_f2c)
#else
#define TRIB_PMPI_FORTRAN(X)
#endif
// clang-format on

enum class Entry {
#define TRIB_ENTRY(name) name,
#define TRIB_ENTRIES(name, arguments, prototype) name, name##_c,
  TRIB_INTERCEPTED(TRIB_ENTRY) TRIB_STAGED(TRIB_ENTRIES)
#undef TRIB_ENTRY
#undef TRIB_ENTRIES
      count
};
inline constexpr int kEntries = static_cast<int>(Entry::count);

constexpr Entry reduction_entry(Form form, int width, Collective collective) {
  return static_cast<Entry>(static_cast<int>(form) * 2 * kCollectives +
                            (width == 8 ? kCollectives : 0) + static_cast<int>(collective));
}
static_assert(reduction_entry(Form::persistent, 8, Collective::reduce) == Entry::Reduce_init_c);

struct Library {
  /// Its handles and constants are those of this build. If not, only `original` may be used, with
  /// words as they came.
  bool is_ours = false;
  void* handle = nullptr;  ///< for dlsym
  /// PMPI_ functions, or what a tool behind this library, which is to see what goes to the MPI, has
  /// in their place; null where the MPI has none.
  void* original[kEntries] = {};
#define TRIB_MEMBER(name) decltype(&PMPI_##name) name = nullptr;
  TRIB_PMPI(TRIB_MEMBER)
#undef TRIB_MEMBER

  /// A function that not every MPI has, or null. Slow: for setup only.
  void* find(const char* function) const;

  bool has(Entry entry) const { return original[static_cast<int>(entry)] != nullptr; }
  template <class... Words>
  int call(Entry entry, Words... words) const {
    const auto function = reinterpret_cast<int (*)(Words...)>(original[static_cast<int>(entry)]);
    return function ? function(words...) : missing(entry);
  }
  int call_with(Entry entry, std::span<const Word> words) const;

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

/// What the loader finds in an object. For the MPI's own functions, which dlsym() hides:
/// lookup.cpp.
void* look_up_in(void* handle, const char* symbol);
/// Where the object begins that has the address; null if none has.
const void* object_of(const void* address);
/// Where `symbol` is defined in what is loaded, but for this library: dlsym(RTLD_NEXT) does not see
/// what came with RTLD_LOCAL, as modules of Python do. Slow.
std::vector<void*> definitions_of(const char* symbol);
/// Whether the MPI is of the family that this library is for. If not, that is said, once.
bool is_our_family(void* handle, const char* path);
/// Counts objects that came and went: the same number, the same objects.
unsigned long long count_loads();

/// Whether this is a rank of a job that `trib run` was to start with several.
bool is_asked_for_many_ranks();

/// Empty where what the program calls to start requests, wait for them and test them comes here
/// first. Otherwise says what does not: where the program is linked with the MPI before this
/// library, or a tool takes these calls to the MPI's PMPI_ functions.
std::string what_passes_by();
/// Throws Error if that is not empty.
void check_is_in_front();
/// Of the functions in which communicators are set up, a bit each: whether calls of them are seen.
std::uint32_t which_set_up();
/// Of the reductions, likewise.
std::uint32_t which_reduce();
/// Of what copies.hpp may serve, likewise.
std::uint32_t which_copy();

/// No result of any function. Where one leaves it as it was, it has refused the call: MPICH 5.0.2
/// returns MPI_SUCCESS all the same once an error handler of the program's own has returned.
inline constexpr int kUnwritten = -1;

/// The same for a handle that a call of the MPI makes: meanwhile it is zero, which no MPI has. One
/// that was not written is put back, also where an error handler throws.
template <class Handle>
class Unwritten {
 public:
  explicit Unwritten(Handle* its)
      : its_(its), before_(its != nullptr ? std::exchange(*its, none()) : none()) {}
  ~Unwritten() {
    if (its_ != nullptr && *its_ == none()) *its_ = before_;
  }
  Unwritten(const Unwritten&) = delete;
  Unwritten& operator=(const Unwritten&) = delete;
  bool is_written() const { return its_ != nullptr && *its_ != none(); }

 private:
  static Handle none() { return from_word<Handle>(0); }

  Handle* const its_;
  const Handle before_;
};

/// Throws Error if an MPI function failed.
void check(int status, const char* function);
/// Whether a call on several requests says which of them failed in their statuses.
bool is_error_in_status(int status);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// Open MPI's Fortran functions call PMPI_ straight away, so that they are replaced as well: mpif.h
// and the mpi module (four spellings of a name, as compilers differ) and mpi_f08. Fortran of the
// MPICH family calls MPI_, which is intercept.cpp's, but for what has no buffers in mpi_f08 (MPICH
// 4.0.2, Intel MPI 2021.18): requests that it begins by MPI_ it ends by PMPI_. The wheels of Open
// MPI and MPICH have no Fortran; Debian's MPIs and Intel's have.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.hpp"
#include "mpi/allocations.hpp"
#include "mpi/fortran.hpp"
#include "mpi/intercept.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/requests.hpp"
#include "mpi/staged_requests.hpp"

namespace trib::mpi {

namespace {

/// MPI_Init and MPI_Init_thread.
template <class... Arguments>
void init_fortran(const FortranFunction& original, Arguments... arguments) {
  is_begun_in_fortran = true;
  init([&] {
    original(arguments...);  // begin_world() sees whether it has worked
    return MPI_SUCCESS;
  });
}

template <class Original>
void finalize_fortran(const Original& original, int* ierror) {
  finalize([&] {
    original(ierror);
    return MPI_SUCCESS;
  });
}

#if TRIB_MPI_OPENMPI || TRIB_MPI_MPICH

void free_communicator(const FortranFunction& original, int* comm, int* ierror) {
  const Library& mpi = library();
  if (!mpi.is_ours) return original(comm, ierror);
#if TRIB_MPI_OPENMPI
  const Freeing freeing(mpi.Comm_f2c(*comm));  // of an INTEGER of 8 bytes, the lower half
#else
  const Freeing freeing(*comm);
#endif
  original(comm, ierror);
}

#endif

#if TRIB_MPI_OPENMPI

/// Arguments as Fortran passes them: by reference, handles as numbers. `ierror` is null where an
/// mpi_f08 program left it out.
struct Arguments {
  void* in;
  void* out;
  int* count;
  int* dtype;
  int* op;
  int* root;
  int* comm;
  int* ierror;
};

template <Collective collective>
void enter(const FortranFunction& original, const Arguments& arguments) {
  const auto& [in, out, count, dtype, op, root, comm, ierror] = arguments;
  const auto pass_on = [&](int* its_ierror) {
    if constexpr (collective == Collective::reduce)
      original(in, out, count, dtype, op, root, comm, its_ierror);
    else
      original(in, out, count, dtype, op, comm, its_ierror);
  };
  const Library& mpi = library();
  if (!mpi.is_ours || !is_integer_int()) return pass_on(ierror);
  const Call call{.collective = collective,
                  .in = address(in),
                  .out = address(out),
                  .count = collective == Collective::reduce_scatter ? to_word(count) : *count,
                  .width = 4,
                  .dtype = mpi.Type_f2c(*dtype),
                  .op = mpi.Op_f2c(*op),
                  .root = root ? *root : 0,
                  .comm = mpi.Comm_f2c(*comm)};
  const int status = intercept(call, [&](const Call& passed) {
    if (passed.op == call.op && passed.in == call.in && passed.out == call.out) {
      int result = MPI_SUCCESS;
      pass_on(&result);
      return result;
    }
    const Word words[] = {to_word(passed.in),    to_word(passed.out), passed.count,
                          to_word(passed.dtype), to_word(passed.op),  passed.root,
                          to_word(passed.comm)};
    constexpr Entry entry = reduction_entry(Form::blocking, 4, collective);
    if constexpr (collective == Collective::reduce)
      return mpi.call(entry, words[0], words[1], words[2], words[3], words[4], words[5], words[6]);
    else
      return mpi.call(entry, words[0], words[1], words[2], words[3], words[4], words[6]);
  });
  if (ierror) *ierror = status;
}

template <class... Rest>
void idup(const FortranFunction& original, int* ierror, int* comm, Rest*... rest) {
  const Library& mpi = library();
  const int parent = *comm;
  original(comm, rest..., ierror);
  if (!mpi.is_ours || (ierror && *ierror != MPI_SUCCESS)) return;
  const int status = note_idup(mpi.Comm_f2c(parent));
  if (ierror) *ierror = status;
}

void free_memory(const FortranFunction& original, void* block, int* ierror) {
  if (!free_shared(block)) return original(block, ierror);
  if (ierror) std::memset(ierror, 0, is_integer_int() ? sizeof(int) : 8);  // MPI_SUCCESS
}

#endif  // TRIB_MPI_OPENMPI

#if TRIB_MPI_MPICH || TRIB_MPI_ABI

struct PassedBy {
  PassedBy() { is_passed_by_f08 = true; }
  ~PassedBy() { is_passed_by_f08 = false; }
};

#endif

#if TRIB_MPI_MPICH

/// Where mpi_f08 differs from C.
struct Habits {
  int first = 1;    // the first request of a list; 0 in MPICH 4.0.2, contrary to the standard
  int is_true = 1;  // .TRUE., in which compilers differ

  static const Habits& get() {
    static std::atomic<const Habits*> known{nullptr};
    const Habits* habits = known.load(std::memory_order_acquire);
    if (!habits) {  // no lock: the MPI may call the program
      habits = new Habits(look());
      known.store(habits, std::memory_order_release);
    }
    return *habits;
  }

 private:
  /// What its own MPI_Testany says of a request that is done.
  static Habits look() {
    static constinit FortranFunction test_any({"mpi_testany_f08_", nullptr, nullptr, nullptr});
    const Library& mpi = library();
    MPI_Request request = MPI_REQUEST_NULL;
    const auto query = [](void*, MPI_Status*) { return MPI_SUCCESS; };
    const auto free = [](void*) { return MPI_SUCCESS; };
    const auto cancel = [](void*, int) { return MPI_SUCCESS; };
    if (mpi.Grequest_start(query, free, cancel, nullptr, &request) != MPI_SUCCESS) return {};
    mpi.Grequest_complete(request);
    int count = 1, index = 1, flag = 0, ierror = MPI_SUCCESS;
    MPI_Status status;
    test_any(&count, &request, &index, &flag, &status, &ierror);
    return flag != 0 ? Habits{index, flag} : Habits{};
  }
};

// `result` is of a function of C, which has set the rest.
int with_logical(int result, int* flag) {
  *flag = *flag > 0 ? Habits::get().is_true : 0;
  return result;
}
int with_index(int result, int* index) {
  if (*index != MPI_UNDEFINED) *index += Habits::get().first;
  return result;
}
int with_indices(int result, const int* count, int* indices) {
  for (int i = 0; *count != MPI_UNDEFINED && i < *count; ++i) indices[i] += Habits::get().first;
  return result;
}

/// Of a list, too: C has one and the same constant for both.
MPI_Status* status_of_c(MPI_Status* status) {
  return Sentinels::is_in(Sentinels::get().status_ignore, status) ? MPI_STATUS_IGNORE : status;
}

/// `ours()` where a request is held that is not the MPI's alone.
template <bool is_start = false, class Ours, class... Arguments>
void with_requests_f08(const FortranFunction& original, int* ierror, const Ours& ours,
                       Arguments... arguments) {
  if (requests_held.load(std::memory_order_relaxed) == 0 || !library().is_ours) [[likely]] {
    if (is_start) Communicator::note_request_of_mpi();
    return original(arguments..., ierror);
  }
  sweep();
  const int status = ours();
  if (ierror) *ierror = status;
}

#endif

}  // namespace

}  // namespace trib::mpi

using trib::Collective;
using trib::mpi::FortranFunction;

extern "C" void mpi_init_f08_(int* ierror) {
  static constinit FortranFunction original({"mpi_init_f08_", nullptr, nullptr, nullptr});
  trib::mpi::init_fortran(original, ierror);
}

extern "C" void mpi_init_thread_f08_(int* required, int* provided, int* ierror) {
  static constinit FortranFunction original({"mpi_init_thread_f08_", nullptr, nullptr, nullptr});
  trib::mpi::init_fortran(original, required, provided, ierror);
}

extern "C" void mpi_finalize_f08_(int* ierror) {
  static constinit FortranFunction original({"mpi_finalize_f08_", nullptr, nullptr, nullptr});
  trib::mpi::finalize_fortran(original, ierror);
}

#if TRIB_MPI_OPENMPI || TRIB_MPI_MPICH

#define TRIB_FREE_COMM_F08(name)                                                   \
  extern "C" void name(int* comm, int* ierror) {                                   \
    static constinit FortranFunction original({#name, nullptr, nullptr, nullptr}); \
    trib::mpi::free_communicator(original, comm, ierror);                          \
  }
TRIB_FREE_COMM_F08(mpi_comm_free_f08_)
TRIB_FREE_COMM_F08(mpi_comm_disconnect_f08_)

#endif

#if TRIB_MPI_MPICH || TRIB_MPI_ABI

// mpi_f08 of MPICH and Intel MPI (the latter's for the standard ABI, too) begins these with MPI_,
// and waits for them with PMPI_. All arguments are addresses.
#define TRIB_PASSED_BY(name, parameters, ...)                                      \
  extern "C" void name parameters {                                                \
    static constinit FortranFunction original({#name, nullptr, nullptr, nullptr}); \
    const trib::mpi::PassedBy passed_by;                                           \
    original(__VA_ARGS__);                                                         \
  }
#define TRIB_PASSED_BY_8(name)                                                                   \
  TRIB_PASSED_BY(name, (void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h), \
                 a, b, c, d, e, f, g, h)
#define TRIB_PASSED_BY_9(name)                                                                    \
  TRIB_PASSED_BY(                                                                                 \
      name, (void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h, void* i), a, \
      b, c, d, e, f, g, h, i)
#define TRIB_PASSED_BY_10(name)                                                                   \
  TRIB_PASSED_BY(                                                                                 \
      name,                                                                                       \
      (void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h, void* i, void* j), \
      a, b, c, d, e, f, g, h, i, j)
#define TRIB_PASSED_BY_FORMS(suffix)                   \
  TRIB_PASSED_BY_8(mpi_iallreduce_##suffix)            \
  TRIB_PASSED_BY_9(mpi_ireduce_##suffix)               \
  TRIB_PASSED_BY_8(mpi_ireduce_scatter_##suffix)       \
  TRIB_PASSED_BY_8(mpi_ireduce_scatter_block_##suffix) \
  TRIB_PASSED_BY_9(mpi_allreduce_init_##suffix)        \
  TRIB_PASSED_BY_10(mpi_reduce_init_##suffix)          \
  TRIB_PASSED_BY_9(mpi_reduce_scatter_init_##suffix)   \
  TRIB_PASSED_BY_9(mpi_reduce_scatter_block_init_##suffix)
TRIB_PASSED_BY_FORMS(f08ts_)
TRIB_PASSED_BY_FORMS(f08ts_large_)
TRIB_PASSED_BY_FORMS(c_f08ts_)

#endif

#if TRIB_MPI_MPICH

// What mpi_f08 ends by PMPI_. Handles and statuses are those of C.
#define TRIB_REQUESTS_F08(name, parameters, call, ...)                                            \
  extern "C" void mpi_##name##_f08_ parameters {                                                  \
    static constinit FortranFunction original({"mpi_" #name "_f08_", nullptr, nullptr, nullptr}); \
    using namespace trib::mpi;                                                                    \
    constexpr bool is_start = std::string_view(#name).starts_with("start");                       \
    with_requests_f08<is_start>(original, ierror, [&] { return call; }, __VA_ARGS__);             \
  }

TRIB_REQUESTS_F08(start, (MPI_Request * request, int* ierror), staged::start(request), request)
TRIB_REQUESTS_F08(startall, (int* count, MPI_Request* requests, int* ierror),
                  staged::start_all(*count, requests), count, requests)
TRIB_REQUESTS_F08(wait, (MPI_Request * request, MPI_Status* status, int* ierror),
                  staged::wait(request, status_of_c(status)), request, status)
TRIB_REQUESTS_F08(waitall, (int* count, MPI_Request* requests, MPI_Status* statuses, int* ierror),
                  staged::wait_all(*count, requests, status_of_c(statuses)), count, requests,
                  statuses)
TRIB_REQUESTS_F08(waitany,
                  (int* count, MPI_Request* requests, int* index, MPI_Status* status, int* ierror),
                  with_index(staged::wait_any(*count, requests, index, status_of_c(status)), index),
                  count, requests, index, status)
TRIB_REQUESTS_F08(
    waitsome,
    (int* count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses, int* ierror),
    with_indices(staged::wait_some(*count, requests, done, indices, status_of_c(statuses)), done,
                 indices),
    count, requests, done, indices, statuses)
TRIB_REQUESTS_F08(test, (MPI_Request * request, int* flag, MPI_Status* status, int* ierror),
                  with_logical(staged::test(request, flag, status_of_c(status)), flag), request,
                  flag, status)
TRIB_REQUESTS_F08(testall,
                  (int* count, MPI_Request* requests, int* flag, MPI_Status* statuses, int* ierror),
                  with_logical(staged::test_all(*count, requests, flag, status_of_c(statuses)),
                               flag),
                  count, requests, flag, statuses)
TRIB_REQUESTS_F08(
    testany,
    (int* count, MPI_Request* requests, int* index, int* flag, MPI_Status* status, int* ierror),
    with_logical(with_index(staged::test_any(*count, requests, index, flag, status_of_c(status)),
                            index),
                 flag),
    count, requests, index, flag, status)
TRIB_REQUESTS_F08(
    testsome,
    (int* count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses, int* ierror),
    with_indices(staged::test_some(*count, requests, done, indices, status_of_c(statuses)), done,
                 indices),
    count, requests, done, indices, statuses)
TRIB_REQUESTS_F08(request_free, (MPI_Request * request, int* ierror), staged::free_request(request),
                  request)
TRIB_REQUESTS_F08(cancel, (MPI_Request * request, int* ierror), cancel(request), request)
TRIB_REQUESTS_F08(request_get_status,
                  (MPI_Request * request, int* flag, MPI_Status* status, int* ierror),
                  with_logical(staged::get_status(*request, flag, status_of_c(status)), flag),
                  request, flag, status)
#if TRIB_MPI_STATUS_LISTS
TRIB_REQUESTS_F08(
    request_get_status_all,
    (int* count, MPI_Request* requests, int* flag, MPI_Status* statuses, int* ierror),
    with_logical(staged::get_status_all(*count, requests, flag, status_of_c(statuses)), flag),
    count, requests, flag, statuses)
TRIB_REQUESTS_F08(request_get_status_any,
                  (int* count, MPI_Request* requests, int* index, int* flag, MPI_Status* status,
                   int* ierror),
                  with_logical(with_index(staged::get_status_any(*count, requests, index, flag,
                                                                 status_of_c(status)),
                                          index),
                               flag),
                  count, requests, index, flag, status)
TRIB_REQUESTS_F08(
    request_get_status_some,
    (int* count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses, int* ierror),
    with_indices(staged::get_status_some(*count, requests, done, indices, status_of_c(statuses)),
                 done, indices),
    count, requests, done, indices, statuses)
#endif

#endif

#if TRIB_MPI_OPENMPI

#define TRIB_SPELLINGS(lower, upper) {#lower "_", #lower, #lower "__", #upper}
#define TRIB_ALIASES(lower, upper, parameters)                  \
  void lower parameters __attribute__((alias(#lower "_")));     \
  void lower##__ parameters __attribute__((alias(#lower "_"))); \
  void upper parameters __attribute__((alias(#lower "_")));

#define TRIB_PARAMETERS \
  (void* in, void* out, int* count, int* dtype, int* op, int* comm, int* ierror)
#define TRIB_ROOTED \
  (void* in, void* out, int* count, int* dtype, int* op, int* root, int* comm, int* ierror)

#define TRIB_FORTRAN(lower, upper, collective, parameters, root)                               \
  void lower##_ parameters {                                                                   \
    static constinit FortranFunction original(TRIB_SPELLINGS(lower, upper));                   \
    trib::mpi::enter<Collective::collective>(original,                                         \
                                             {in, out, count, dtype, op, root, comm, ierror}); \
  }                                                                                            \
  TRIB_ALIASES(lower, upper, parameters)                                                       \
  void lower##_f08_ parameters {                                                               \
    static constinit FortranFunction original({#lower "_f08_", nullptr, nullptr, nullptr});    \
    trib::mpi::enter<Collective::collective>(original,                                         \
                                             {in, out, count, dtype, op, root, comm, ierror}); \
  }

extern "C" {

TRIB_FORTRAN(mpi_allreduce, MPI_ALLREDUCE, allreduce, TRIB_PARAMETERS, nullptr)
TRIB_FORTRAN(mpi_reduce, MPI_REDUCE, reduce, TRIB_ROOTED, root)
TRIB_FORTRAN(mpi_reduce_scatter, MPI_REDUCE_SCATTER, reduce_scatter, TRIB_PARAMETERS, nullptr)
TRIB_FORTRAN(mpi_reduce_scatter_block, MPI_REDUCE_SCATTER_BLOCK, reduce_scatter_block,
             TRIB_PARAMETERS, nullptr)

void mpi_init_(int* ierror) {
  static constinit FortranFunction original(TRIB_SPELLINGS(mpi_init, MPI_INIT));
  trib::mpi::init_fortran(original, ierror);
}
TRIB_ALIASES(mpi_init, MPI_INIT, (int*))

void mpi_init_thread_(int* required, int* provided, int* ierror) {
  static constinit FortranFunction original(TRIB_SPELLINGS(mpi_init_thread, MPI_INIT_THREAD));
  trib::mpi::init_fortran(original, required, provided, ierror);
}
TRIB_ALIASES(mpi_init_thread, MPI_INIT_THREAD, (int*, int*, int*))

void mpi_finalize_(int* ierror) {
  static constinit FortranFunction original(TRIB_SPELLINGS(mpi_finalize, MPI_FINALIZE));
  trib::mpi::finalize_fortran(original, ierror);
}
TRIB_ALIASES(mpi_finalize, MPI_FINALIZE, (int*))

#define TRIB_FREE_MEM(name, ...)                            \
  void name(void* block, int* ierror) {                     \
    static constinit FortranFunction original(__VA_ARGS__); \
    trib::mpi::free_memory(original, block, ierror);        \
  }
TRIB_FREE_MEM(mpi_free_mem_, TRIB_SPELLINGS(mpi_free_mem, MPI_FREE_MEM))
TRIB_ALIASES(mpi_free_mem, MPI_FREE_MEM, (void*, int*))
TRIB_FREE_MEM(mpi_free_mem_f08_, {"mpi_free_mem_f08_", nullptr, nullptr, nullptr})

#define TRIB_IDUP(name, ...)                                    \
  void name(int* comm, int* child, int* request, int* ierror) { \
    static constinit FortranFunction original(__VA_ARGS__);     \
    trib::mpi::idup(original, ierror, comm, child, request);    \
  }
TRIB_IDUP(mpi_comm_idup_, TRIB_SPELLINGS(mpi_comm_idup, MPI_COMM_IDUP))
TRIB_ALIASES(mpi_comm_idup, MPI_COMM_IDUP, (int*, int*, int*, int*))
TRIB_IDUP(mpi_comm_idup_f08_, {"mpi_comm_idup_f08_", nullptr, nullptr, nullptr})
#define TRIB_IDUP_WITH_INFO(name, ...)                                     \
  void name(int* comm, int* info, int* child, int* request, int* ierror) { \
    static constinit FortranFunction original(__VA_ARGS__);                \
    trib::mpi::idup(original, ierror, comm, info, child, request);         \
  }
TRIB_IDUP_WITH_INFO(mpi_comm_idup_with_info_,
                    TRIB_SPELLINGS(mpi_comm_idup_with_info, MPI_COMM_IDUP_WITH_INFO))
TRIB_ALIASES(mpi_comm_idup_with_info, MPI_COMM_IDUP_WITH_INFO, (int*, int*, int*, int*, int*))
TRIB_IDUP_WITH_INFO(mpi_comm_idup_with_info_f08_,
                    {"mpi_comm_idup_with_info_f08_", nullptr, nullptr, nullptr})

#define TRIB_FREE_COMM(lower, upper)                                         \
  void lower##_(int* comm, int* ierror) {                                    \
    static constinit FortranFunction original(TRIB_SPELLINGS(lower, upper)); \
    trib::mpi::free_communicator(original, comm, ierror);                    \
  }                                                                          \
  TRIB_ALIASES(lower, upper, (int*, int*))
TRIB_FREE_COMM(mpi_comm_free, MPI_COMM_FREE)
TRIB_FREE_COMM(mpi_comm_disconnect, MPI_COMM_DISCONNECT)
}
#endif  // TRIB_MPI_OPENMPI

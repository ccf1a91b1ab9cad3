// SPDX-License-Identifier: BSD-3-Clause
// Open MPI's Fortran functions call PMPI_ straight away, so that they are replaced as well: mpif.h
// and the mpi module (four spellings of a name, as compilers differ) and mpi_f08. Fortran of the
// MPICH family calls MPI_, which is intercept.cpp's, but for those without buffers in mpi_f08 of
// MPICH 4.0. The wheel of Open MPI has no Fortran; Debian's has.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "mpi/allocations.hpp"
#include "mpi/intercept.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/requests.hpp"

namespace trib::mpi {

namespace {

/// One Fortran function of the MPI, found when it is first needed.
class FortranFunction {
 public:
  constexpr FortranFunction(std::array<const char*, 4> names) : names_(names) {}

  template <class... Arguments>
  void operator()(Arguments... arguments) const {
    void* address = address_.load(std::memory_order_acquire);
    if (!address) address = look_up();
    reinterpret_cast<void (*)(Arguments...)>(address)(arguments...);
  }

 private:
  void* look_up() const {
    void* address = nullptr;
    for (const char* name : names_)
      if (name && !address) address = dlsym(RTLD_NEXT, name);
    for (const char* name : names_) {
      if (!name || address) continue;
      const std::vector<void*> all = definitions_of(name);
      if (!all.empty()) address = all.front();
    }
    if (!address) {  // the caller would take its buffers for reduced
      log(Config::Log::error, std::string("no loaded library has ") + names_[0]);
      std::abort();
    }
    Dl_info its{};
    if (dladdr(address, &its) != 0) dlopen(its.dli_fname, RTLD_LAZY | RTLD_NOLOAD);  // stays
    address_.store(address, std::memory_order_release);
    return address;
  }

  std::array<const char*, 4> names_;
  mutable std::atomic<void*> address_{nullptr};
};

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

#if TRIB_MPI_MPICH

struct PassedBy {
  PassedBy() { is_passed_by_f08 = true; }
  ~PassedBy() { is_passed_by_f08 = false; }
};

#endif

#if TRIB_MPI_OPENMPI

/// The addresses that stand for MPI_IN_PLACE and MPI_BOTTOM: of common blocks, one per spelling.
/// Each library of Fortran defines them, and which one its code means depends on how it was loaded.
struct Sentinels {
  unsigned long long loads = 0;  // when these were all
  std::vector<void*> in_place, bottom;

  static const Sentinels& get() {
    static std::atomic<const Sentinels*> latest{nullptr};
    const unsigned long long loads = count_loads();
    const Sentinels* known = latest.load(std::memory_order_acquire);
    if (known && known->loads == loads) [[likely]]
      return *known;
    known = new Sentinels(loads);  // others may be reading the one before
    latest.store(known, std::memory_order_release);
    return *known;
  }

 private:
  explicit Sentinels(unsigned long long now) : loads(now) {
    for (const char* name : {"mpi_fortran_in_place_", "mpi_fortran_in_place",
                             "mpi_fortran_in_place__", "MPI_FORTRAN_IN_PLACE"})
      add(name, in_place);
    for (const char* name : {"mpi_fortran_bottom_", "mpi_fortran_bottom", "mpi_fortran_bottom__",
                             "MPI_FORTRAN_BOTTOM"})
      add(name, bottom);
  }
  static void add(const char* name, std::vector<void*>& all) {
    if (void* const address = dlsym(RTLD_DEFAULT, name)) all.push_back(address);
    const std::vector<void*> others = definitions_of(name);
    all.insert(all.end(), others.begin(), others.end());
  }
};

void* address(void* argument) {
  const Sentinels& known = Sentinels::get();
  const auto is_in = [argument](const std::vector<void*>& all) {
    return std::find(all.begin(), all.end(), argument) != all.end();
  };
  if (is_in(known.in_place)) return MPI_IN_PLACE;
  if (is_in(known.bottom)) return MPI_BOTTOM;
  return argument;
}

/// Open MPI can be built for programs whose INTEGER has 8 bytes (-fdefault-integer-8): their calls
/// are the MPI's.
bool is_integer_int() {
  static std::atomic<int> bytes{0};  // 0: not asked yet
  if (bytes.load(std::memory_order_relaxed) == 0) {
    int size = 0;
    if (!is_world_running() && open_sessions == 0) return true;  // the MPI cannot say
    library().Type_size(MPI_INTEGER, &size);
    bytes.store(size, std::memory_order_relaxed);
  }
  return bytes.load(std::memory_order_relaxed) == sizeof(int);
}

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

void free_memory(const FortranFunction& original, void* block, int* ierror) {
  if (!free_shared(block)) return original(block, ierror);
  if (ierror) std::memset(ierror, 0, is_integer_int() ? sizeof(int) : 8);  // MPI_SUCCESS
}

#endif  // TRIB_MPI_OPENMPI

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

#if TRIB_MPI_MPICH

// mpi_f08 of MPICH 4.0 begins these with MPI_, and waits for them with PMPI_. All arguments are
// addresses.
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

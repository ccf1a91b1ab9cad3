// SPDX-License-Identifier: BSD-3-Clause
// What stands between Fortran and C: the MPI's own Fortran functions, and constants that are
// addresses.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"

namespace trib::mpi {

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

#if TRIB_MPI_OPENMPI || TRIB_MPI_MPICH

/// The addresses that stand for constants of C. Each library of Fortran defines them, and which one
/// its code means depends on how it was loaded.
struct Sentinels {
  unsigned long long loads = 0;  // when these were all
#if TRIB_MPI_OPENMPI
  std::vector<void*> in_place, bottom, status_ignore;  // common blocks, one per spelling
#else
  std::vector<void*> status_ignore;  // objects of mpi_f08, for one status and for a list
#endif

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
  static bool is_in(const std::vector<void*>& all, const void* argument) {
    return std::find(all.begin(), all.end(), argument) != all.end();
  }

 private:
  explicit Sentinels(unsigned long long now) : loads(now) {
#if TRIB_MPI_OPENMPI
    for (const char* name : {"mpi_fortran_in_place_", "mpi_fortran_in_place",
                             "mpi_fortran_in_place__", "MPI_FORTRAN_IN_PLACE"})
      add(name, in_place);
    for (const char* name : {"mpi_fortran_bottom_", "mpi_fortran_bottom", "mpi_fortran_bottom__",
                             "MPI_FORTRAN_BOTTOM"})
      add(name, bottom);
    for (const char* name : {"mpi_fortran_status_ignore_", "mpi_fortran_status_ignore",
                             "mpi_fortran_status_ignore__", "MPI_FORTRAN_STATUS_IGNORE",
                             "mpi_fortran_statuses_ignore_", "mpi_fortran_statuses_ignore",
                             "mpi_fortran_statuses_ignore__", "MPI_FORTRAN_STATUSES_IGNORE"})
      add(name, status_ignore);
#else
    for (const char* name : {"MPIR_F08_MPI_STATUS_IGNORE_OBJ", "MPIR_F08_MPI_STATUSES_IGNORE_OBJ"})
      add(name, status_ignore);
#endif
  }
  static void add(const char* name, std::vector<void*>& all) {
    // The program itself may hold the object, of which definitions_of() knows nothing.
    if (void* const address = dlsym(RTLD_DEFAULT, name)) all.push_back(address);
    const std::vector<void*> others = definitions_of(name);
    all.insert(all.end(), others.begin(), others.end());
  }
};

#endif

#if TRIB_MPI_OPENMPI

inline void* address(void* argument) {
  const Sentinels& known = Sentinels::get();
  if (Sentinels::is_in(known.in_place, argument)) return MPI_IN_PLACE;
  if (Sentinels::is_in(known.bottom, argument)) return MPI_BOTTOM;
  return argument;
}

/// Open MPI can be built for programs whose INTEGER has 8 bytes (-fdefault-integer-8): their calls
/// are the MPI's.
inline bool is_integer_int() {
  static std::atomic<int> bytes{0};  // 0: not asked yet
  if (bytes.load(std::memory_order_relaxed) == 0) {
    int size = 0;
    if (!is_world_running() && open_sessions == 0) return true;  // the MPI cannot say
    library().Type_size(MPI_INTEGER, &size);
    bytes.store(size, std::memory_order_relaxed);
  }
  return bytes.load(std::memory_order_relaxed) == sizeof(int);
}

#endif

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// Looks through the loaded objects for the MPI, and tells its family by symbols that only that
// family has.
#include "mpi/library.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/auxv.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"

namespace trib::mpi {

std::atomic<const Library*> found_library;

namespace {

constexpr const char* kNames[kEntries] = {
#define TRIB_NAME(name) "PMPI_" #name,
#define TRIB_NAMES(name, arguments, prototype) "PMPI_" #name, "PMPI_" #name "_c",
    TRIB_INTERCEPTED(TRIB_NAME) TRIB_STAGED(TRIB_NAMES)
#undef TRIB_NAME
#undef TRIB_NAMES
};

enum class Family { unknown, mpich, openmpi, abi };
#if TRIB_MPI_ABI
constexpr Family kOurs = Family::abi;
#elif TRIB_MPI_OPENMPI
constexpr Family kOurs = Family::openmpi;
#else
constexpr Family kOurs = Family::mpich;
#endif

const char* describe(Family family) {
  switch (family) {
    case Family::mpich:
      return "the MPICH family";
    case Family::openmpi:
      return "Open MPI";
    case Family::abi:
      return "the MPI standard ABI";
    case Family::unknown:
      break;
  }
  return "an MPI that Tributary does not know";
}

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

/// DT_SONAME, which stays when a file is renamed; empty if there is none.
std::string_view soname(void* handle) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !map || !map->l_ld) return {};
  const char* strings = nullptr;
  ElfW(Xword) name = 0;
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_SONAME) name = entry->d_un.d_val;
  }
  if (!strings || !name) return {};
  if (reinterpret_cast<ElfW(Addr)>(strings) < map->l_addr) strings += map->l_addr;
  return strings + name;
}

Family family_of(void* handle, std::string_view path) {
  // MPICH's and Intel MPI's libmpi_abi hold the symbols of their libmpi as well: the name alone
  // tells them apart.
  if (file_name(path).starts_with("libmpi_abi") || soname(handle).starts_with("libmpi_abi"))
    return Family::abi;
  if (look_up_in(handle, "ompi_mpi_comm_world")) return Family::openmpi;
  for (const char* symbol : {"MPII_Comm_get_attr", "MPIR_Err_create_code", "MPIR_CommGetAttr"})
    if (look_up_in(handle, symbol)) return Family::mpich;
  return Family::unknown;
}

std::vector<std::string> loaded_objects() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        static_cast<std::vector<std::string>*>(data)->emplace_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

/// One line per job where the launcher tells us our rank.
bool is_first_rank() {
  for (const char* variable : {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"})
    if (const char* value = std::getenv(variable)) return std::strcmp(value, "0") == 0;
  return true;
}

void warn_of_other(Family family, const std::string& path) {
  if (is_first_rank())
    log_once(Config::Log::warn,
             "this preload library is for " + std::string(describe(kOurs)) + ", but " + path +
                 " is " + describe(family) + ": its reductions are left as they are" +
                 (is_asked_for_many_ranks()
                      ? "; if mpiexec is of the same family as this library, the job falls apart "
                        "into programs of one rank each"
                      : ""));
}

}  // namespace

const void* object_of(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

std::vector<void*> definitions_of(const char* symbol) {
  Dl_info ours{};
  dladdr(&found_library, &ours);
  std::vector<void*> all;
  for (const std::string& object : loaded_objects()) {
    if (object.empty()) continue;  // the program, through which all that is public is seen
    void* const handle = dlopen(object.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) continue;
    // Also what the object's own libraries define.
    void* const address = look_up_in(handle, symbol);
    Dl_info its{};
    if (address && dladdr(address, &its) != 0 && its.dli_fbase != ours.dli_fbase &&
        std::find(all.begin(), all.end(), address) == all.end())
      all.push_back(address);
    dlclose(handle);
  }
  return all;
}

bool is_our_family(void* handle, const char* path) {
  const Family family = family_of(handle, path);
  if (family != kOurs) warn_of_other(family, path);
  return family == kOurs;
}

unsigned long long count_loads() {
  unsigned long long count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        *static_cast<unsigned long long*>(data) = info->dlpi_adds + info->dlpi_subs;
        return 1;  // any one knows
      },
      &count);
  return count;
}

bool is_asked_for_many_ranks() {
  const char* const ranks = std::getenv("TRIB_N");  // of trib run
  return ranks != nullptr && std::atoi(ranks) > 1;
}

namespace {

/// What a tool behind this library has in place of the MPI's `original` of that PMPI_ name; null if
/// there is none. An MPI would have the PMPI_ name as well, and another of these libraries the C
/// API.
void* of_tool_behind(const char* profiling_name, const void* original) {
  void* const function = dlsym(RTLD_NEXT, profiling_name + 1);
  Dl_info its{};
  if (!function || dladdr(function, &its) == 0 || its.dli_fbase == object_of(original))
    return nullptr;
  void* const object = dlopen(its.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!object) return nullptr;
  bool is_tool = true;
  for (const char* const name : {profiling_name, "trib_comm_create"})
    if (const void* const known = look_up_in(object, name))
      is_tool = is_tool && object_of(known) != its.dli_fbase;
  if (!is_tool) dlclose(object);  // otherwise it stays open: what is called must not go away
  return is_tool ? function : nullptr;
}

std::unique_ptr<Library> load() {
  auto result = std::make_unique<Library>();
  Family family = Family::unknown;
  std::string path;
  for (const std::string& object : loaded_objects()) {
    // The first object is the program itself, whose name is empty; through it everything public is
    // seen.
    void* handle = dlopen(object.empty() ? nullptr : object.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) continue;
    void* function = look_up_in(handle, kNames[0]);
    Dl_info info{};
    if (function && dladdr(function, &info) != 0) {
      if (void* owner = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
        dlclose(handle);
        handle = owner;
      }
      const Family candidate = family_of(handle, info.dli_fname);
      if (!result->handle || (candidate == kOurs && family != kOurs)) {
        result->handle = handle;  // stays open: what is called must not go away
        family = candidate;
        path = info.dli_fname;
        if (family == kOurs) break;
        continue;
      }
    }
    dlclose(handle);
  }
  if (!result->handle) return nullptr;

  for (int entry = 0; entry < kEntries; ++entry) {
    result->original[entry] = look_up_in(result->handle, kNames[entry]);
    if (void* const mpis = result->original[entry])
      if (void* const tool = of_tool_behind(kNames[entry], mpis)) result->original[entry] = tool;
  }
  result->is_ours = family == kOurs;
  if (!result->is_ours) {
    warn_of_other(family, path);
    return result;
  }
#define TRIB_LOOK_UP(name)                                                                 \
  result->name =                                                                           \
      reinterpret_cast<decltype(result->name)>(look_up_in(result->handle, "PMPI_" #name)); \
  if (!result->name) {                                                                     \
    log_once(Config::Log::warn,                                                            \
             path + " has no PMPI_" #name ": its reductions are left as they are");        \
    result->is_ours = false;                                                               \
    return result;                                                                         \
  }
  TRIB_PMPI(TRIB_LOOK_UP)
#undef TRIB_LOOK_UP
  return result;
}

}  // namespace

const Library& find_library() {
  static std::mutex mutex;
  static const Library none;
  const std::lock_guard lock(mutex);
  if (const Library* found = found_library.load(std::memory_order_acquire)) return *found;
  const Library* found = load().release();  // lives as long as the process
  if (!found) return none;                  // one may come later
  found_library.store(found, std::memory_order_release);
  return *found;
}

void* Library::find(const char* function) const {
  return handle ? look_up_in(handle, function) : nullptr;
}

int Library::call_with(Entry entry, std::span<const Word> words) const {
  const auto with = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return call(entry, words[i]...);
  };
  switch (words.size()) {
#define TRIB_CASE(arguments) \
  case arguments:            \
    return with(std::make_index_sequence<arguments>())
    TRIB_CASE(5);
    TRIB_CASE(6);
    TRIB_CASE(7);
    TRIB_CASE(8);
    TRIB_CASE(9);
    TRIB_CASE(10);
    TRIB_CASE(11);
    TRIB_CASE(12);
#undef TRIB_CASE
    default:
      return missing(entry);
  }
}

int Library::missing(Entry entry) {
  log_once(Config::Log::error,
           std::string("no loaded MPI library has ") + kNames[static_cast<int>(entry)]);
  return MPI_ERR_UNSUPPORTED_OPERATION;
}

namespace {

/// The file that `name` leads to instead of this library, empty if it leads here.
std::string elsewhere(const char* name) {
  Dl_info ours{}, program{}, its{};
  dladdr(&found_library, &ours);
  dladdr(reinterpret_cast<void*>(getauxval(AT_ENTRY)), &program);
  void* const function = dlsym(RTLD_DEFAULT, name);
  const ElfW(Sym)* symbol = nullptr;
  if (!function ||
      dladdr1(function, &its, const_cast<void**>(reinterpret_cast<const void**>(&symbol)),
              RTLD_DL_SYMENT) == 0)
    return {};  // all is private, as in a module of Python
  if (its.dli_fbase == ours.dli_fbase) return {};
  // A program may have an entry of its own for a function whose address it takes: not a definition.
  if (its.dli_fbase == program.dli_fbase && symbol && symbol->st_shndx == SHN_UNDEF) return {};
  return its.dli_fname;
}

/// Where that function, or one of Open MPI's for it in Fortran, for which fortran_calls.cpp and
/// fortran.cpp have others, leads instead of this library.
std::string elsewhere_in_any_language(std::string_view name) {
  std::string file = elsewhere(std::string(name).c_str());
#if TRIB_MPI_OPENMPI  // the usual spelling, and mpi_f08
  std::string lower(name);
  for (char& letter : lower) letter = static_cast<char>(std::tolower(letter));
  for (const char* const suffix : {"_", "_f08_"})
    if (file.empty()) file = elsewhere((lower + suffix).c_str());
#endif
  return file;
}

}  // namespace

std::string what_passes_by() {
  Dl_info ours{};
  dladdr(&found_library, &ours);
  const auto told = [&](const char* name, const std::string& file) {
    return std::string(name) + " leads to " + file + " instead of " + ours.dli_fname;
  };
  for (const char* const name :
       {"MPI_Start", "MPI_Startall", "MPI_Wait", "MPI_Waitall", "MPI_Waitany", "MPI_Waitsome",
        "MPI_Test", "MPI_Testall", "MPI_Testany", "MPI_Testsome", "MPI_Request_free",
        "MPI_Request_get_status", "MPI_Cancel"})
    if (const std::string file = elsewhere_in_any_language(name); !file.empty())
      return told(name, file);
#if TRIB_MPI_STATUS_LISTS
  for (const char* const name :
       {"MPI_Request_get_status_all", "MPI_Request_get_status_any", "MPI_Request_get_status_some"})
    if (const std::string file = elsewhere(name); !file.empty()) return told(name, file);
#endif
  return {};
}

namespace {

/// A bit for each: of those in any language, and of those in C.
std::uint32_t which_come_here(std::initializer_list<const char*> names,
                              std::initializer_list<const char*> names_in_c) {
  std::uint32_t mask = 0;
  for (const char* const name : names)
    mask = mask << 1 | static_cast<std::uint32_t>(elsewhere_in_any_language(name).empty());
  for (const char* const name : names_in_c)
    mask = mask << 1 | static_cast<std::uint32_t>(elsewhere(name).empty());
  return mask;
}

}  // namespace

std::uint32_t which_set_up() {
  return which_come_here({"MPI_Barrier", "MPI_Comm_dup", "MPI_Comm_dup_with_info", "MPI_Comm_split",
                          "MPI_Comm_split_type", "MPI_Comm_create"},
                         {"MPI_Cart_create", "MPI_Cart_sub"});
}

std::uint32_t which_copy() {
  return which_come_here({"MPI_Bcast", "MPI_Allgather", "MPI_Allgatherv"}, {});
}

std::uint32_t which_reduce() {
  return which_come_here(
      {"MPI_Allreduce", "MPI_Reduce", "MPI_Reduce_scatter", "MPI_Reduce_scatter_block",
       "MPI_Iallreduce", "MPI_Ireduce", "MPI_Ireduce_scatter", "MPI_Ireduce_scatter_block"},
      {"MPI_Allreduce_init", "MPI_Reduce_init", "MPI_Reduce_scatter_init",
       "MPI_Reduce_scatter_block_init"});
}

void check_is_in_front() {
  if (const std::string what = what_passes_by(); !what.empty())
    throw Error(Code::argument, what + ": link the latter before the MPI, or preload it");
}

void* predefined(const char* symbol) {
  // The program may hold the object (a copy relocation), and then the MPI uses that one too. Only
  // an MPI that was loaded privately is not found this way.
  void* address = dlsym(RTLD_DEFAULT, symbol);
  return address ? address : look_up_in(library().handle, symbol);
}

bool is_error_in_status(int status) {
  int error_class = status;
  return status != MPI_SUCCESS && library().Error_class(status, &error_class) == MPI_SUCCESS &&
         error_class == MPI_ERR_IN_STATUS;
}

namespace {

/// What the MPI reports, as far as programs that tolerate faults want to know.
Code code_of_class(int status) {
  int error_class = MPI_ERR_OTHER;
  library().Error_class(status, &error_class);
  if (error_class == MPI_ERR_OTHER) return Code::system;  // also where an MPI has no other
  if (error_class == TRIB_ERR_PROC_FAILED) return Code::dead;
  if (error_class == TRIB_ERR_REVOKED) return Code::revoked;
  return Code::system;
}

}  // namespace

void check(int status, const char* function) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = "";
  int length = 0;
  library().Error_string(status, text, &length);
  throw Error(code_of_class(status), std::string(function) + " failed: " + text);
}

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// Programs that are not linked with the MPI but load it, and look its functions up in it (MPI.jl of
// Julia, ctypes, cffi and Numba of Python), would pass a preload library by: dlsym() looks where it
// is told to. So there is one here, which gives the function of ours in place of the MPI's.
#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "mpi/library.hpp"

// RTLD_DEFAULT and RTLD_NEXT depend on who calls: with these the call goes on as it came, by a jump
// that leaves no trace, which C++ cannot be told to make. Nothing is looked up for them, since a
// preload library is in front anyway, and who asks for the next one wants that. For other
// processors the jump is not written: there such programs' reductions remain the MPI's.
#if defined(__x86_64__)
asm(R"(
    .text
    .globl dlsym
    .type dlsym, @function
dlsym:
    .cfi_startproc
    endbr64
    leaq 1(%rdi), %rax       # RTLD_NEXT is -1, RTLD_DEFAULT 0
    cmpq $1, %rax
    ja trib_look_up
    movq trib_real_dlsym(%rip), %rax
    testq %rax, %rax
    jne 1f
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp            # calls want it a multiple of 16
    .cfi_adjust_cfa_offset 8
    call trib_find_dlsym
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
1:
    jmp *%rax
    .cfi_endproc
    .size dlsym, . - dlsym
)");

namespace {

using Dlsym = void*(void*, const char*);

}  // namespace

extern "C" {

/// The loader's, or that of another library that has one. Threads that find it at the same time
/// find the same.
[[gnu::visibility("hidden"), gnu::used]] Dlsym* trib_real_dlsym = nullptr;

[[gnu::visibility("hidden"), gnu::used]] Dlsym* trib_find_dlsym() {
  // As it is called since glibc 2.34, and before.
  constexpr const char* kVersions[] = {"GLIBC_2.34", "GLIBC_2.2.5"};
  void* found = nullptr;
  for (const char* const version : kVersions)
    if (!found) found = dlvsym(RTLD_NEXT, "dlsym", version);
  // A program may be linked with this library behind the C library.
  if (void* const libc = found ? nullptr : dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD))
    for (const char* const version : kVersions)
      if (!found) found = dlvsym(libc, "dlsym", version);
  return trib_real_dlsym = reinterpret_cast<Dlsym*>(found);
}

}  // extern "C"

namespace trib::mpi {
namespace {

/// Whether `function` is the MPI's: of the family that this library is for, and defined beside its
/// PMPI_ name. Tools define one without the other, and what another namespace of dlmopen() holds is
/// not found here.
bool is_of_mpi(const char* name, const void* function) {
  Dl_info its{};
  if (dladdr(function, &its) == 0 || its.dli_fname == nullptr) return false;
  void* const object = dlopen(its.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (object == nullptr) return false;
  const std::string profiling = (name[0] == 'M' ? "P" : "p") + std::string(name);
  const void* const below = look_up_in(object, profiling.c_str());
  const bool result = below != nullptr && object_of(below) == its.dli_fbase &&
                      look_up_in(object, name) == function && is_our_family(object, its.dli_fname);
  dlclose(object);
  return result;
}

}  // namespace

void* look_up_in(void* handle, const char* symbol) {
  return (trib_real_dlsym != nullptr ? trib_real_dlsym : trib_find_dlsym())(handle, symbol);
}

}  // namespace trib::mpi

extern "C" [[gnu::visibility("hidden"), gnu::used]] void* trib_look_up(void* handle,
                                                                       const char* name) {
  using namespace trib::mpi;
  void* const found = look_up_in(handle, name);
  if (found == nullptr ||
      (std::strncmp(name, "MPI_", 4) != 0 && std::strncmp(name, "mpi_", 4) != 0))
    return found;
  const int error = errno;
  // Another library in front of this one has the last word, as in programs that are linked.
  void* const ours = trib_real_dlsym(RTLD_DEFAULT, name);
  const bool is_ours =
      ours != nullptr && ours != found &&
      object_of(ours) == object_of(reinterpret_cast<const void*>(&trib_real_dlsym)) &&
      is_of_mpi(name, found);
  dlerror();  // what was asked for was found
  errno = error;
  return is_ours ? ours : found;
}
#else
void* trib::mpi::look_up_in(void* handle, const char* symbol) { return dlsym(handle, symbol); }
#endif

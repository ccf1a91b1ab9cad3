// SPDX-License-Identifier: BSD-3-Clause
// Runs the Fortran program that was linked as the library PROGRAM, out of sight of all others, as
// Python does it with its modules.
#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  void* const program = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  auto* const begin =
      program ? reinterpret_cast<int (*)(int, char**)>(dlsym(program, "main")) : nullptr;
  if (!begin) {
    std::fprintf(stderr, "local PROGRAM: %s\n", dlerror());
    return 2;
  }
  return begin(1, argv);
}

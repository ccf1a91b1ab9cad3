// SPDX-License-Identifier: BSD-3-Clause
// A program without MPI that loads a module which has it, privately (RTLD_LOCAL), as Python does.
// The module is this file too, built with MODULE.
#ifdef MODULE
#include "check.hpp"

extern "C" int run_module() {
  MPI_Init(nullptr, nullptr);
  int one = 1, all = 0;
  MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(all == world_size(), "");
  if (is_served_here() && all > 1) CHECK(was_served(MPI_COMM_WORLD), "");
  MPI_Finalize();
  return 0;
}
#else
#include <dlfcn.h>

#include <cstdio>

int main(int, char** argv) {
  void* module = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!module) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (dlsym(RTLD_DEFAULT, "PMPI_Allreduce")) {
    std::fprintf(stderr, "the MPI is not private\n");
    return 1;
  }
  return reinterpret_cast<int (*)()>(dlsym(module, "run_module"))();
}
#endif

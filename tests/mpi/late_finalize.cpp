// SPDX-License-Identifier: BSD-3-Clause
// A program may end its MPI from the destructor of a global object, after objects of libraries that
// were made later are gone, and may use up its file descriptors while it waits.
#include <fcntl.h>
#include <mpi.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

struct Guard {
  ~Guard() {
    float in = 1, out = 0;
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&in, &out, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (out != static_cast<float>(size)) std::abort();
    MPI_Finalize();
  }
} guard;

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  float in = 1, out = 0;
  MPI_Allreduce(&in, &out, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  int files[4096], used = 0;
  if (rank == 0) {
    const rlimit few{256, 4096};
    setrlimit(RLIMIT_NOFILE, &few);
    while (used < 4096 && (files[used] = open("/dev/null", O_RDONLY)) >= 0) ++used;
  } else {
    usleep(400000);
  }
  MPI_Allreduce(&in, &out, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  while (used > 0) close(files[--used]);
  if (out != static_cast<float>(size)) return 1;
  std::puts("fine");
  return 0;
}

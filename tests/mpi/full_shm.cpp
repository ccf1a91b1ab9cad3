// SPDX-License-Identifier: BSD-3-Clause
// Reductions while /dev/shm has room for no more than the argument says, in bytes: for
// behaviour.py, which runs this where that is nobody else's /dev/shm.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "check.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const long room = argc > 1 ? std::atol(argv[1]) : 0;
  const char* const file = "/dev/shm/all-the-room";
  if (world_rank() == 0) {
    const int fd = open(file, O_CREAT | O_RDWR, 0600);
    const std::vector<char> page(4096, 1);
    long written = 0;
    while (write(fd, page.data(), page.size()) == static_cast<ssize_t>(page.size()))
      written += static_cast<long>(page.size());
    CHECK(fd >= 0 && written > room && ftruncate(fd, written - room) == 0, "cannot fill /dev/shm");
    close(fd);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  const int size = world_size();
  for (int round = 0; round < 3; ++round)
    for (const int count : {10, 1000000}) {
      const auto n = static_cast<std::size_t>(count);
      std::vector<double> in(n, world_rank() + 1.0), out(n, -1.0);
      MPI_Allreduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm);
      for (const double sum : out) CHECK(sum == size * (size + 1) / 2.0, "%d: %g", count, sum);
    }
  if (world_rank() == 0) unlink(file);
  MPI_Comm_free(&comm);
  MPI_Finalize();
}

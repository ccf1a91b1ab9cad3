// SPDX-License-Identifier: BSD-3-Clause
// All ranks are stopped for longer than TRIB_TIMEOUT while they wait for rank 0, as a job is that
// its batch system suspends. For behaviour.py.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int rank = world_rank(), size = world_size();
  const auto reduce = [&] {
    int one = 1, all = 0;
    CHECK(MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
    CHECK(all == size, "%d", all);
  };
  for (int i = 0; i < 3; ++i) reduce();
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    usleep(300000);
    kill(parent, SIGSTOP);
    sleep(4);
    kill(parent, SIGCONT);
    _exit(0);
  }
  const double begin = MPI_Wtime();
  if (rank == 0) {
    while (MPI_Wtime() - begin < 0.2) usleep(1000);
    // Behind the stop by a little, where its peers would have lost patience.
    while (waitpid(child, nullptr, WNOHANG) == 0) usleep(1000);
    usleep(100000);
  }
  reduce();
  CHECK(MPI_Wtime() - begin > 4, "nobody was stopped");
  if (rank != 0) waitpid(child, nullptr, 0);
  if (rank == 0) std::printf("stopped ranks checked\n");
  MPI_Finalize();
}

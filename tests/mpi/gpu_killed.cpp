// SPDX-License-Identifier: BSD-3-Clause
// A rank is killed in the middle of reductions of GPU buffers: the others get an MPI error within
// seconds, the communicator says that it is unusable, and the GPU is free. To be started so that
// the launcher lets the others run on. With "inside" it dies while it is in a call, some time
// within a few milliseconds: others may then have met already, and their kernels wait for it. With
// "reduce" behind that the calls are Reduces to rank 0, otherwise allreduces.
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <string>
#include <thread>

#include "check.hpp"
#include "gpu.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int rank = world_rank(), size = world_size();
  skip_without_gpu();
  if (size < 2) skip("one rank has no peers");
  const int count = argc > 1 ? std::atoi(argv[1]) : 300000;
  const bool is_inside = argc > 2 && std::string(argv[2]) == "inside";
  const bool is_reduce = argc > 3 && std::string(argv[3]) == "reduce";
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  auto* const data = static_cast<float*>(Gpu::get().allocate(static_cast<std::size_t>(count) * 4));
  const auto call = [&] {
    if (!is_reduce)
      return MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    return MPI_Reduce(rank == 0 ? MPI_IN_PLACE : data, data, count, MPI_FLOAT, MPI_MAX, 0,
                      MPI_COMM_WORLD);
  };
  int status = MPI_SUCCESS;
  std::time_t begin = 0;
  for (int round = 0; status == MPI_SUCCESS && round < 1000000; ++round) {
    if (round == 1000) {
      begin = std::time(nullptr);
      if (rank == size - 1 && !is_inside) raise(SIGKILL);
      if (rank == size - 1)
        std::thread([] {
          usleep(static_cast<useconds_t>(getpid() * 37 % 3000));
          kill(getpid(), SIGKILL);
        }).detach();
    }
    status = call();
  }
  CHECK(status != MPI_SUCCESS, "nobody noticed");
  const auto seconds = static_cast<long>(std::time(nullptr) - begin);
  const std::string text = error_text(status);
  CHECK(seconds <= 10, "noticed after %ld s", seconds);
  status = call();
  CHECK(status != MPI_SUCCESS, "the communicator still works");
  CHECK(error_text(status).find("unusable") != std::string::npos, "%s", error_text(status).c_str());
  float first = 0;
  Gpu::get().copy(&first, data, 4);  // would wait for a kernel that hangs
  Gpu::get().free(data);
  std::printf("rank %d: noticed after %ld s: %s\n", rank, seconds, text.c_str());
  std::fflush(stdout);
  _exit(0);
}

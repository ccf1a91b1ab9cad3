// SPDX-License-Identifier: BSD-3-Clause
// Two threads, each with a communicator of its own, reduce GPU buffers at once: whichever order the
// calls take on each GPU, none waits for ever (CUDA_DEVICE_MAX_CONNECTIONS=1 makes that hardest).
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

void work(int thread, MPI_Comm comm, void* context, int rounds) {
  Gpu& gpu = Gpu::get();
  CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "no context");
  const int rank = world_rank(), size = world_size();
  constexpr int kMost = 200000;
  std::vector<float> host(kMost);
  auto* const data = static_cast<float*>(gpu.allocate(kMost * 4));
  for (int round = 0; round < rounds; ++round) {
    const int count = 1 + (round * 7919 + thread * 31) % (round % 10 == 0 ? kMost : 3000);
    for (int i = 0; i < count; ++i)
      host[static_cast<std::size_t>(i)] = static_cast<float>((i + round) % 17 + rank);
    gpu.copy(data, host.data(), static_cast<std::size_t>(count) * 4);
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS, "");
    gpu.copy(host.data(), data, static_cast<std::size_t>(count) * 4);
    for (int i = 0; i < count; ++i) {
      const auto expected = static_cast<float>((i + round) % 17 * size + size * (size - 1) / 2);
      CHECK(host[static_cast<std::size_t>(i)] == expected,
            "thread %d, round %d, element %d: %g, not %g", thread, round, i,
            static_cast<double>(host[static_cast<std::size_t>(i)]), static_cast<double>(expected));
    }
  }
  gpu.free(data);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (provided < MPI_THREAD_MULTIPLE) skip("no MPI_THREAD_MULTIPLE here");
  skip_without_gpu();
  void* context = nullptr;
  CHECK(Gpu::get().call("cuCtxGetCurrent", &context) == 0, "");
  std::vector<MPI_Comm> comms(2);
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back(work, i, comms[static_cast<std::size_t>(i)], context, 500);
  for (std::thread& thread : threads) thread.join();
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
  if (world_rank() == 0) std::printf("threads checked\n");
  MPI_Finalize();
}

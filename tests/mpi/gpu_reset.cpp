// SPDX-License-Identifier: BSD-3-Clause
// A program resets its device (cudaDeviceReset), reduces what is in host memory, uses the device
// anew, and ends. With "one": on rank 0 alone. What the GPU served before goes through host memory
// afterwards; nothing fails.
#include <chrono>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu_buffer.hpp"

namespace {

int rank, size;

/// The device of this rank; makes its context current.
void* enter(int* device) {
  Gpu& gpu = Gpu::get();
  void* context = nullptr;
  int count = 1;
  CHECK(gpu.call("cuDeviceGetCount", &count) == 0, "");
  CHECK(gpu.call("cuDeviceGet", device, rank % count) == 0, "");
  CHECK(gpu.call("cuDevicePrimaryCtxRetain", &context, *device) == 0, "");
  CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "");
  return context;
}

unsigned long long id_of(void* context, int* result) {
  unsigned long long id = 0;
  *result = Gpu::get().call("cuCtxGetId", context, &id);
  return id;
}

void host_calls(int calls) {
  for (int call = 0; call < calls; ++call) {
    int mine = rank + call, sum = 0;
    CHECK(MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
    CHECK(sum == size * (size - 1) / 2 + size * call, "host memory, call %d: %d", call, sum);
  }
}

void device_calls(const char* when) {
  for (const std::size_t count : {std::size_t{16}, std::size_t{1} << 18, std::size_t{1} << 22}) {
    std::vector<int> host(count, rank + 1);
    int* const data = static_cast<int*>(Gpu::get().allocate(count * 4));
    // Often enough for buffers to be mapped, where they are.
    for (int call = 0; call < 300; ++call) {
      const bool is_checked = call % 50 == 0 || call > 296;
      if (is_checked) Gpu::get().copy(data, host.data(), count * 4);
      CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_INT,
                          is_checked ? MPI_SUM : MPI_BOR, MPI_COMM_WORLD) == MPI_SUCCESS,
            "%s", when);
      if (!is_checked) continue;
      std::vector<int> got(count);
      Gpu::get().copy(got.data(), data, count * 4);
      for (std::size_t i = 0; i < count; ++i)
        CHECK(got[i] == size * (size + 1) / 2, "%s: %zu ints, call %d, element %zu: %d", when,
              count, call, i, got[i]);
    }
    MPI_Request request;
    Gpu::get().copy(data, host.data(), count * 4);
    MPI_Iallreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_INT, MPI_MAX, MPI_COMM_WORLD,
                   &request);
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "%s", when);
    if (rank == 0)
      std::printf("%s: %zu ints by %s\n", when, count, last_algorithm(MPI_COMM_WORLD).c_str());
    Gpu::get().free(data);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  Gpu& gpu = Gpu::get();
  if (!gpu.is_here()) {
    std::printf("skipped: no GPU\n");
    MPI_Finalize();
    return 77;
  }
  const bool is_mine = argc < 2 || std::string(argv[1]) != "one" || rank == 0;
  for (int round = 0; round < 3; ++round) {
    int device = 0, before = 0, meanwhile = 0, after = 0;
    void* context = enter(&device);
    const unsigned long long id = id_of(context, &before);
    device_calls(round == 0 ? "before" : "after a reset");
    host_calls(10);
    MPI_Barrier(MPI_COMM_WORLD);
    if (is_mine) {
      CHECK(gpu.call("cuDevicePrimaryCtxReset_v2", device) == 0, "");
      const unsigned long long gone = id_of(context, &meanwhile);
      host_calls(300);  // while there is no context
      void* const again = enter(&device);
      const unsigned long long now = id_of(again, &after);
      std::printf(
          "rank %d: context %p, id %llu (%d); reset: id %llu (%d); again: %p, id %llu (%d)\n", rank,
          context, id, before, gone, meanwhile, again, now, after);
      std::fflush(stdout);
    } else {
      host_calls(300);
    }
  }
  device_calls("at the end");
  if (is_mine) {
    int device = 0;
    enter(&device);
    CHECK(gpu.call("cuDevicePrimaryCtxReset_v2", device) == 0, "");
  }
  host_calls(300);
  if (rank == 0) std::printf("checked\n");
  MPI_Finalize();
}

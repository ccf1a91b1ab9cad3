// SPDX-License-Identifier: BSD-3-Clause
// A program of the driver's API: its context is one that it has made, no primary one, and current
// in a thread of its own. The thread that calls MPI has none.
#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

void* driver = nullptr;

template <class... Arguments>
int call(const char* name, Arguments... arguments) {
  void* const function = dlsym(driver, name);
  CHECK(function != nullptr, "%s", name);
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

unsigned long long address(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer);
}

/// In a thread of its own, with the context.
template <class Function>
void in_context(void* context, Function function) {
  std::thread([&] {
    CHECK(call("cuCtxSetCurrent", context) == 0, "no context");
    function();
  }).join();
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  const int rank = world_rank(), size = world_size();
  const char* const stand_in = std::getenv("TEST_DEVICE");
  driver = dlopen(stand_in ? stand_in : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  int count = 0, device = 0;
  if (driver == nullptr || call("cuInit", 0u) != 0 || call("cuDeviceGetCount", &count) != 0 ||
      count == 0)
    skip("no GPU here");
  CHECK(call("cuDeviceGet", &device, rank % count) == 0, "no device");
  void *context = nullptr, *popped = nullptr, *const nothing = nullptr;
  constexpr int kCount = 5000;
  constexpr std::size_t kBytes = kCount * sizeof(float);
  std::vector<float> host(kCount);
  float *in = nullptr, *out = nullptr;
  std::thread([&] {
    CHECK(call("cuCtxCreate_v2", &context, 0u, device) == 0, "no context");
    for (float** memory : {&in, &out}) CHECK(call("cuMemAlloc_v2", memory, kBytes) == 0, "");
    CHECK(call("cuCtxPopCurrent_v2", &popped) == 0, "");
  }).join();
  for (int round = 0; round < 40; ++round) {
    in_context(context, [&] {
      for (int i = 0; i < kCount; ++i)
        host[static_cast<std::size_t>(i)] = static_cast<float>((i + round) % 31 + rank);
      CHECK(call("cuMemcpy", address(in), address(host.data()), kBytes) == 0, "");
    });
    if (round % 3 == 2) {
      MPI_Reduce(in, out, kCount, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
      MPI_Bcast(out, kCount, MPI_FLOAT, 0, MPI_COMM_WORLD);
    } else if (round % 2 == 0) {
      MPI_Allreduce(in, out, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else {
      MPI_Request request;
      MPI_Iallreduce(in, out, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    void* current = nullptr;
    CHECK(call("cuCtxGetCurrent", &current) == 0 && current == nullptr, "a context is left here");
    in_context(context, [&] {
      CHECK(call("cuMemcpy", address(host.data()), address(out), kBytes) == 0, "");
    });
    for (int i = 0; i < kCount; ++i) {
      const auto expected = static_cast<float>((i + round) % 31 * size + size * (size - 1) / 2);
      CHECK(host[static_cast<std::size_t>(i)] == expected, "round %d, element %d: %g, not %g",
            round, i, static_cast<double>(host[static_cast<std::size_t>(i)]),
            static_cast<double>(expected));
    }
  }
  in_context(context, [&] {
    for (float* const memory : {in, out}) CHECK(call("cuMemFree_v2", address(memory)) == 0, "");
  });
  if (stand_in == nullptr) {  // which has no pools: of their memory the driver names no context
    in_context(context, [&] {
      for (float** memory : {&in, &out})
        CHECK(call("cuMemAllocAsync", memory, kBytes, nothing) == 0, "");
      host.assign(kCount, static_cast<float>(rank + 1));
      CHECK(call("cuMemcpy", address(in), address(host.data()), kBytes) == 0, "");
    });
    MPI_Allreduce(in, out, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Bcast(out, kCount, MPI_FLOAT, 0, MPI_COMM_WORLD);  // the MPI's own
    in_context(context, [&] {
      CHECK(call("cuMemcpy", address(host.data()), address(out), kBytes) == 0, "");
      for (float* const memory : {in, out})
        CHECK(call("cuMemFreeAsync", address(memory), nothing) == 0, "");
      CHECK(call("cuCtxSynchronize") == 0, "");
    });
    for (const float found : host)
      CHECK(found == static_cast<float>(size * (size + 1) / 2), "of a pool: %g",
            static_cast<double>(found));
  }
  if (rank == 0) std::printf("a context of the program's checked\n");
  MPI_Finalize();
}

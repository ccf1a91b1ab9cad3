// SPDX-License-Identifier: BSD-3-Clause
// Two threads, each with a communicator of its own, reduce GPU buffers at once: whichever order the
// calls take on each GPU, none waits for ever (CUDA_DEVICE_MAX_CONNECTIONS=1 makes that hardest).
// And whichever context is current in a thread that calls, or none, is current afterwards:
// "other-device" with that of another GPU than the buffers'. "last-error": the CUDA runtime's last
// error is what it was; TEST_CUDA_RUNTIME says where one is.
#include <algorithm>
#include <string>
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

void take_last(void* in, void* inout, int* count, MPI_Datatype*) {
  std::copy_n(static_cast<float*>(in), *count, static_cast<float*>(inout));
}

/// `own`: of the buffers. Each of `contexts` is current during the calls.
void contexts_stay(void* own, const std::vector<void*>& contexts) {
  Gpu& gpu = Gpu::get();
  const int size = world_size();
  MPI_Op op;
  MPI_Op_create(take_last, 0, &op);
  for (void* const context : contexts)
    for (const int count : {3, 5000, 1000000}) {
      CHECK(gpu.call("cuCtxSetCurrent", own) == 0, "");
      const auto total = static_cast<std::size_t>(count * size);
      auto* const in = static_cast<float*>(gpu.allocate(total * 4));
      auto* const out = static_cast<float*>(gpu.allocate(total * 4));
      std::vector<float> host(total, 1);
      gpu.copy(in, host.data(), total * 4);
      const auto expect = [&](const char* call, float wanted) {
        void* found = nullptr;
        CHECK(gpu.call("cuCtxGetCurrent", &found) == 0 && found == context,
              "%s of %d left another context", call, count);
        CHECK(gpu.call("cuCtxSetCurrent", own) == 0, "");
        gpu.copy(host.data(), out, static_cast<std::size_t>(count) * 4);
        for (int i = 0; i < count; ++i)
          CHECK(host[static_cast<std::size_t>(i)] == wanted, "%s: element %d", call, i);
        CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "");
      };
      CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "");
      const auto sum = static_cast<float>(size);
      MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      expect("MPI_Allreduce", sum);
      MPI_Reduce_scatter_block(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      expect("MPI_Reduce_scatter_block", sum);
      MPI_Request request;
      MPI_Iallreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
      expect("MPI_Iallreduce", sum);
      MPI_Allreduce(in, out, count, MPI_FLOAT, op, MPI_COMM_WORLD);
      expect("MPI_Allreduce with an operator of the program's", 1);
      MPI_Alltoall(in, count, MPI_FLOAT, out, count, MPI_FLOAT, MPI_COMM_WORLD);
      expect("MPI_Alltoall", 1);
      CHECK(gpu.call("cuCtxSetCurrent", own) == 0, "");
      gpu.free(in);
      gpu.free(out);
    }
  MPI_Op_free(&op);
  CHECK(gpu.call("cuCtxSetCurrent", own) == 0, "");
}

/// None, another one of the same GPU, and the buffers'.
void contexts_of_its_gpu_stay(void* own) {
  Gpu& gpu = Gpu::get();
  int device = 0;
  void* other = nullptr;
  CHECK(gpu.call("cuCtxGetDevice", &device) == 0 &&
            gpu.call("cuCtxCreate_v2", &other, 0u, device) == 0 &&
            gpu.call("cuCtxPopCurrent_v2", &other) == 0,
        "no second context");
  contexts_stay(own, {nullptr, other, own});
  CHECK(gpu.call("cuCtxDestroy_v2", other) == 0, "");
}

/// The thread's device is another one than the buffers', from the first reduction on.
void contexts_of_another_gpu_stay(void* own) {
  Gpu& gpu = Gpu::get();
  if (gpu.visible() < 2)
    skip("another device than the buffers' needs two GPUs, here is " +
         std::to_string(gpu.visible()));
  int device = 0;
  void* other = nullptr;
  const int number = (gpu.of(world_rank()) + 1) % gpu.visible();
  CHECK(gpu.call("cuDeviceGet", &device, number) == 0 &&
            gpu.call("cuDevicePrimaryCtxRetain", &other, device) == 0,
        "no context on another GPU");
  contexts_stay(own, {other, own, other});
  CHECK(gpu.call("cuDevicePrimaryCtxRelease_v2", device) == 0, "");
}

/// An error that the program has yet to ask for.
void last_error_stays(void* own) {
  void* runtime = nullptr;
  for (const char* const name : {static_cast<const char*>(std::getenv("TEST_CUDA_RUNTIME")),
                                 "libcudart.so.13", "libcudart.so.12", "libcudart.so"})
    if (runtime == nullptr && name != nullptr) runtime = dlopen(name, RTLD_NOW);
  if (runtime == nullptr) skip("no CUDA runtime here, whose last error could be lost");
  const auto set_device = reinterpret_cast<int (*)(int)>(dlsym(runtime, "cudaSetDevice"));
  const auto get_last_error = reinterpret_cast<int (*)()>(dlsym(runtime, "cudaGetLastError"));
  CHECK(set_device != nullptr && get_last_error != nullptr, "");
  get_last_error();
  const int size = world_size();
  MPI_Op op;
  MPI_Op_create(take_last, 0, &op);
  Gpu& gpu = Gpu::get();
  for (const int count : {3, 5000, 1000000}) {
    auto* const in = static_cast<float*>(gpu.allocate(static_cast<std::size_t>(count * size) * 4));
    auto* const out = static_cast<float*>(gpu.allocate(static_cast<std::size_t>(count * size) * 4));
    std::vector<float> host(static_cast<std::size_t>(count * size), 1);
    const auto expect = [&](const char* call, auto&& make) {
      const int provoked = set_device(9999);
      CHECK(provoked != 0, "there is no such device");
      CHECK(gpu.call("cuCtxSetCurrent", own) == 0, "");
      make();
      const int found = get_last_error();
      CHECK(found == provoked, "%s of %d: the last error is %d, not %d", call, count, found,
            provoked);
      CHECK(get_last_error() == 0, "it was not taken away");
      make();
      const int none = get_last_error();
      CHECK(none == 0, "%s of %d: leaves error %d", call, count, none);
    };
    expect("MPI_Allreduce",
           [&] { MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    expect("MPI_Allreduce of host memory", [&] {
      float mine = 1, all = 0;
      MPI_Allreduce(&mine, &all, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
    expect("a staged MPI_Allreduce", [&] {
      MPI_Allreduce(world_rank() == 0 ? host.data() : in, out, count, MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    });
    expect("MPI_Iallreduce", [&] {
      MPI_Request request;
      MPI_Iallreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    });
    expect("MPI_Allreduce with an operator of the program's",
           [&] { MPI_Allreduce(in, out, count, MPI_FLOAT, op, MPI_COMM_WORLD); });
    expect("MPI_Bcast", [&] { MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    gpu.free(in);
    gpu.free(out);
  }
  MPI_Op_free(&op);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (provided < MPI_THREAD_MULTIPLE) skip("no MPI_THREAD_MULTIPLE here");
  skip_without_gpu();
  void* context = nullptr;
  CHECK(Gpu::get().call("cuCtxGetCurrent", &context) == 0, "");
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "") {
    if (what == "other-device") contexts_of_another_gpu_stay(context);
    if (what == "last-error") last_error_stays(context);
    if (world_rank() == 0) std::printf("%s checked\n", what.c_str());
    MPI_Finalize();
    return 0;
  }
  contexts_of_its_gpu_stay(context);
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

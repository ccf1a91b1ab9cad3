// SPDX-License-Identifier: BSD-3-Clause
// Managed memory, which has no place of its own: 3 MiB of it, on all ranks or on some, in blocking,
// nonblocking and persistent reductions and in calls that are the MPI's. Only with TEST_MANAGED=1.
#include <cstdlib>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;

float value(int r, std::size_t i, int round) {
  return static_cast<float>(
      (i * 7 + static_cast<std::size_t>(r) * 13 + static_cast<std::size_t>(round) * 5) % 101);
}

float* allocate_managed(std::size_t bytes) {
  unsigned long long memory = 0;
  CHECK(Gpu::get().call("cuMemAllocManaged", &memory, bytes, 1u) == 0, "no managed memory");
  return reinterpret_cast<float*>(memory);
}

constexpr std::size_t kMost = 393216;  // 1.5 MiB of floats

/// `in` and `out` hold kMost elements each.
void run(const char* where, float* in, float* out) {
  Gpu& gpu = Gpu::get();
  int round = 0;
  std::vector<float> host(kMost);
  const auto fill = [&](std::size_t count) {
    ++round;
    for (std::size_t i = 0; i < count; ++i) host[i] = value(rank, i, round);
    gpu.copy(in, host.data(), count * 4);
    CHECK(gpu.call("cuCtxSynchronize") == 0, "");
  };
  const auto expect = [&](const char* call, std::size_t count, std::size_t first, auto&& element) {
    gpu.copy(host.data(), out, count * 4);
    CHECK(gpu.call("cuCtxSynchronize") == 0, "");
    for (std::size_t i = 0; i < count; ++i)
      CHECK(host[i] == element(first + i), "%s, %s: element %zu of %zu is %g, not %g", where, call,
            i, count, static_cast<double>(host[i]), static_cast<double>(element(first + i)));
  };
  const auto sum = [&](std::size_t i) {
    float total = 0;
    for (int r = 0; r < size; ++r) total += value(r, i, round);
    return total;
  };
  for (const int count : {1, 100, 5000, 60000, static_cast<int>(kMost)}) {
    const auto n = static_cast<std::size_t>(count);
    for (int again = 0; again < 4; ++again) {  // from some call on by other ways
      fill(n);
      CHECK(MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
      expect("MPI_Allreduce", n, 0, sum);
    }
    fill(n);
    CHECK(MPI_Reduce(in, out, count, MPI_FLOAT, MPI_SUM, size - 1, MPI_COMM_WORLD) == MPI_SUCCESS,
          "");
    if (rank == size - 1) expect("MPI_Reduce", n, 0, sum);
    const int part = count / size;
    const std::size_t all = static_cast<std::size_t>(part) * static_cast<std::size_t>(size);
    fill(all);
    CHECK(
        MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS,
        "");
    expect("MPI_Reduce_scatter_block", static_cast<std::size_t>(part),
           static_cast<std::size_t>(part) * static_cast<std::size_t>(rank), sum);
    fill(n);
    MPI_Request request = MPI_REQUEST_NULL;
    CHECK(
        MPI_Iallreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request) == MPI_SUCCESS,
        "");
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
    expect("MPI_Iallreduce", n, 0, sum);
#if HAS_PERSISTENT_REDUCTIONS
    CHECK(MPI_Allreduce_init(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL,
                             &request) == MPI_SUCCESS,
          "");
    for (int again = 0; again < 3; ++again) {
      fill(n);
      CHECK(MPI_Start(&request) == MPI_SUCCESS, "");
      CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
      expect("a persistent reduction", n, 0, sum);
    }
    MPI_Request_free(&request);
#endif
    fill(n);
    CHECK(
        MPI_Sendrecv(in, count, MPI_FLOAT, (rank + 1) % size, 1, out, count, MPI_FLOAT,
                     (rank + size - 1) % size, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE) == MPI_SUCCESS,
        "");
    expect("MPI_Sendrecv", n, 0,
           [&](std::size_t i) { return value((rank + size - 1) % size, i, round); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  const char* const wanted = std::getenv("TEST_MANAGED");
  if (wanted == nullptr || std::string(wanted) != "1")
    skip("managed memory is not touched unless TEST_MANAGED=1 asks for it");
  skip_without_gpu();
  Gpu& gpu = Gpu::get();
  float* const in = allocate_managed(kMost * 4);
  float* const out = allocate_managed(kMost * 4);
  auto* const plain_in = static_cast<float*>(gpu.allocate(kMost * 4));
  auto* const plain_out = static_cast<float*>(gpu.allocate(kMost * 4));
  run("everywhere", in, out);
  const bool is_odd = rank % 2 == 1;
  run("on odd ranks", is_odd ? in : plain_in, is_odd ? out : plain_out);
  run("inputs", in, plain_out);
  run("results", plain_in, out);
  for (float* const memory : {in, out, plain_in, plain_out}) gpu.free(memory);
  if (rank == 0) std::printf("managed memory checked\n");
  MPI_Finalize();
}

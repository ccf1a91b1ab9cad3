// SPDX-License-Identifier: BSD-3-Clause
// GPU memory in all its kinds: offsets inside allocations, buffers that are freed and allocated
// again at the same address, pools, virtual address ranges, and the first GPU buffer after a long
// time of host buffers only. "thorough" takes minutes and 10 GiB.
#include <algorithm>
#include <cstdint>
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
float sum(std::size_t i, int round) {
  float total = 0;
  for (int r = 0; r < size; ++r) total += value(r, i, round);
  return total;
}

/// An in-place allreduce of what is at `data`, which the host cannot reach.
void reduce(float* data, std::size_t count, int round, const char* what) {
  std::vector<float> host(count);
  for (std::size_t i = 0; i < count; ++i) host[i] = value(rank, i, round);
  Gpu::get().copy(data, host.data(), count * 4);
  CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                      MPI_COMM_WORLD) == MPI_SUCCESS,
        "%s", what);
  if (size > 1) CHECK(was_served(MPI_COMM_WORLD), "%s: left to the MPI", what);
  Gpu::get().copy(host.data(), data, count * 4);
  for (std::size_t i = 0; i < count; ++i)
    CHECK(host[i] == sum(i, round), "%s: element %zu of %zu, round %d: %g", what, i, count, round,
          static_cast<double>(host[i]));
}

void late_gpu() {
  // Host buffers only, on a communicator of its own, before this process uses the GPU.
  float in = 1, out = 0;
  for (int i = 0; i < 10; ++i) {
    MPI_Allreduce(&in, &out, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(out == static_cast<float>(size), "host memory, before there is a GPU");
  }
}

void cycles(int count) {
  Gpu& gpu = Gpu::get();
  for (int round = 0; round < count; ++round) {
    const std::size_t elements = 1 + static_cast<std::size_t>(round * 7919 % 50000);
    const std::size_t offset = static_cast<std::size_t>(round % 37);
    float* const memory = static_cast<float*>(gpu.allocate((elements + offset) * 4));
    reduce(memory + offset, elements, round, "freed and allocated again");
    gpu.free(memory);
  }
}

void pool() {
  Gpu& gpu = Gpu::get();
  for (int round = 0; round < 20; ++round) {
    unsigned long long memory = 0;
    void* const no_stream = nullptr;
    CHECK(gpu.call("cuMemAllocAsync", &memory, std::size_t{4000000}, no_stream) == 0, "no pool");
    CHECK(gpu.call("cuStreamSynchronize", no_stream) == 0, "");
    reduce(reinterpret_cast<float*>(memory) + round, 999000, round, "memory of a pool");
    CHECK(gpu.call("cuMemFreeAsync", memory, no_stream) == 0, "");
  }
}

void virtual_memory() {
  for (const int handle_type : {MappedMemory::kNoHandle, MappedMemory::kFile}) {
    MappedMemory memory(4, 2 << 20, handle_type);
    auto* const data = static_cast<float*>(memory.data());
    for (int round = 0; round < 6; ++round) {
      reduce(data, memory.bytes() / 4, 3 + round, "a virtual address range");
      reduce(data + 1, 1001, 4 + round, "a virtual address range");
      reduce(data + memory.piece_bytes() / 4 - 500, 1001, round, "two pieces of a range");
      if (round % 2 == 1) memory.replace(round / 2);
    }
  }
}

/// Kernels know short messages by the number of the run in every other word. Long vectors full of
/// just these numbers come before short ones, and must not pass for them.
void numbers() {
  Gpu& gpu = Gpu::get();
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  constexpr int kLong = 100000, kShort = 7, kShortCalls = 5;
  auto* const data = static_cast<int*>(gpu.allocate(kLong * 4));
  std::vector<int> host(kLong);
  const auto check = [&](int count, int each) {
    std::fill(host.begin(), host.end(), each);
    gpu.copy(data, host.data(), static_cast<std::size_t>(count) * 4);
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_INT, MPI_SUM, comm) == MPI_SUCCESS, "");
    gpu.copy(host.data(), data, static_cast<std::size_t>(count) * 4);
    for (int i = 0; i < count; ++i)
      CHECK(host[static_cast<std::size_t>(i)] == each * size,
            "a vector of %d numbers that are all %d: element %d: %d", count, each, i,
            host[static_cast<std::size_t>(i)]);
  };
  int calls = 0;
  for (int round = 0; round < 200; ++round) {
    check(kLong, calls + round % 12 - 2);
    for (int i = 0; i < kShortCalls; ++i) check(kShort, -1 - i);
    calls += 1 + kShortCalls;
  }
  gpu.free(data);
  MPI_Comm_free(&comm);
}

/// 1 GiB of floats, and more than 2^31 elements of one byte.
void huge() {
  Gpu& gpu = Gpu::get();
  const std::size_t count = std::size_t{1} << 28;
  float* const memory = static_cast<float*>(gpu.allocate(count * 4));
  reduce(memory, count, 1, "1 GiB");
  gpu.free(memory);
#if MPI_VERSION >= 4
  const std::size_t bytes = (std::size_t{1} << 31) + 24;
  auto* const many = static_cast<std::uint8_t*>(gpu.allocate(bytes));
  // The length of the pattern is prime: what lies a power of two off is something else.
  constexpr std::size_t kPattern = 16777213;
  const auto pattern = [](int r) {
    std::vector<std::uint8_t> values(kPattern);
    for (std::size_t i = 0; i < kPattern; ++i)
      values[i] = static_cast<std::uint8_t>(i * 2654435761u >> (8 + r % 8));
    return values;
  };
  const auto for_each_piece = [&](auto&& work) {
    for (std::size_t at = 0; at < bytes; at += kPattern) work(at, std::min(kPattern, bytes - at));
  };
  std::vector<std::uint8_t> host = pattern(rank), expected(kPattern);
  for_each_piece([&](std::size_t at, std::size_t size_of_it) {
    gpu.copy(many + at, host.data(), size_of_it);
  });
  for (int r = 0; r < size; ++r) {
    const std::vector<std::uint8_t> values = pattern(r);
    for (std::size_t i = 0; i < kPattern; ++i) expected[i] ^= values[i];
  }
  CHECK(MPI_Allreduce_c(MPI_IN_PLACE, many, static_cast<MPI_Count>(bytes), MPI_UNSIGNED_CHAR,
                        MPI_BXOR, MPI_COMM_WORLD) == MPI_SUCCESS,
        "2^31 + 24 bytes");
  for_each_piece([&](std::size_t at, std::size_t size_of_it) {
    gpu.copy(host.data(), many + at, size_of_it);
    for (std::size_t i = 0; i < size_of_it; ++i)
      CHECK(host[i] == expected[i], "2^31 + 24 bytes: byte %zu", at + i);
  });
  gpu.free(many);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  late_gpu();
  skip_without_gpu();
  const bool is_thorough = argc > 1 && std::strcmp(argv[1], "thorough") == 0;
  cycles(is_thorough ? 10000 : 300);
  pool();
  virtual_memory();
  numbers();
  if (is_thorough) huge();
  if (rank == 0) std::printf("memory of all kinds checked\n");
  MPI_Finalize();
}

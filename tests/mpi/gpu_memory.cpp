// SPDX-License-Identifier: BSD-3-Clause
// GPU memory in all its kinds: offsets inside allocations, buffers that are freed and allocated
// again at the same address, pools, virtual address ranges, and the first GPU buffer after a long
// time of host buffers only. "thorough" takes minutes and 10 GiB; "cycles" and "huge"
// are its parts with 10,000 allocations and with more than 2^31 elements.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;
KernelCalls kernel_calls;

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
  kernel_calls.note(MPI_COMM_WORLD);
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

/// With TRIB_MAP=always each of these is mapped by all GPUs, and let go.
void cycles(int count) {
  Gpu& gpu = Gpu::get();
  int mapped = 0;
  for (int round = 0; round < count; ++round) {
    const std::size_t elements = 1 + static_cast<std::size_t>(round * 7919 % 50000);
    const std::size_t offset = static_cast<std::size_t>(round % 37);
    float* const memory = static_cast<float*>(gpu.allocate((elements + offset) * 4));
    reduce(memory + offset, elements, round, "freed and allocated again");
    gpu.free(memory);
    if (last_algorithm(MPI_COMM_WORLD).rfind("mapped_", 0) == 0) ++mapped;
  }
  const char* const map = std::getenv("TRIB_MAP");
  if (size > 1 && has_gpu_each() && map != nullptr && std::strcmp(map, "always") == 0)
    CHECK(mapped > count / 10, "only %d of %d buffers were mapped", mapped, count);
  if (rank == 0) std::printf("%d buffers came and went, %d of them mapped\n", count, mapped);
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

#if MPI_VERSION >= 4
/// More than 2^31 elements of one byte: an allreduce in place, Reduces to the first and, in place,
/// to the last rank, and reduce_scatters, of equal parts of which the last ends beyond 2^31 and of
/// others.
void more_than_2_to_the_31() {
  const std::size_t part = (std::size_t{1} << 31) / static_cast<std::size_t>(size) + 24;
  const std::size_t bytes = part * static_cast<std::size_t>(size);
  if (!has_room(2 * bytes)) return;
  const auto count = static_cast<MPI_Count>(bytes);
  const std::vector<std::uint8_t> mine = ManyBytes::pattern_of(rank);
  const std::vector<std::uint8_t> all = ManyBytes::pattern_of_all();
  const auto check = [](int status, const char* what) {
    CHECK(status == MPI_SUCCESS, "%s: %s", what, error_text(status).c_str());
    if (size > 1) CHECK(was_served(MPI_COMM_WORLD), "%s: left to the MPI", what);
    if (has_kernels()) CHECK(!was_staged(MPI_COMM_WORLD), "%s: through host memory", what);
    if (rank == 0)
      std::printf("%s: %s\n", what, size > 1 ? last_algorithm(MPI_COMM_WORLD).c_str() : "alone");
  };
  ManyBytes in(bytes), out(bytes);
  in.fill(mine);
  check(
      MPI_Allreduce_c(MPI_IN_PLACE, in.data(), count, MPI_UNSIGNED_CHAR, MPI_BXOR, MPI_COMM_WORLD),
      "MPI_Allreduce_c of more than 2^31 elements");
  in.expect(all, 0, bytes, "MPI_Allreduce_c");

  in.fill(mine);
  check(MPI_Reduce_c(in.data(), rank == 0 ? out.data() : nullptr, count, MPI_UNSIGNED_CHAR,
                     MPI_BXOR, 0, MPI_COMM_WORLD),
        "MPI_Reduce_c of more than 2^31 elements");
  if (rank == 0) out.expect(all, 0, bytes, "MPI_Reduce_c");
  in.expect(mine, 0, bytes, "the input of MPI_Reduce_c");

  out.fill(mine);  // what is there must not pass for the result
  check(MPI_Reduce_scatter_block_c(in.data(), out.data(), static_cast<MPI_Count>(part),
                                   MPI_UNSIGNED_CHAR, MPI_BXOR, MPI_COMM_WORLD),
        "MPI_Reduce_scatter_block_c of more than 2^31 elements");
  out.expect(all, part * static_cast<std::size_t>(rank), part, "MPI_Reduce_scatter_block_c");
  in.expect(mine, 0, bytes, "the input of MPI_Reduce_scatter_block_c");

  // What the first rank gets, and all others but the last: parts that differ and begin at odd
  // places, and some that begin beyond 2^31.
  using Division = std::pair<std::size_t, std::size_t>;
  for (const auto& [head, middle] :
       {Division(part / 2 + 1, part), Division((std::size_t{1} << 31) + 1, 24)}) {
    if (size == 1) break;
    std::vector<MPI_Count> counts(static_cast<std::size_t>(size), static_cast<MPI_Count>(middle));
    counts.front() = static_cast<MPI_Count>(head);
    counts.back() = count - static_cast<MPI_Count>(head + middle * (counts.size() - 2));
    const auto first = static_cast<std::size_t>(
        std::accumulate(counts.begin(), counts.begin() + rank, MPI_Count{0}));
    out.fill(mine);
    check(MPI_Reduce_scatter_c(in.data(), out.data(), counts.data(), MPI_UNSIGNED_CHAR, MPI_BXOR,
                               MPI_COMM_WORLD),
          "MPI_Reduce_scatter_c of more than 2^31 elements");
    out.expect(all, first, static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]),
               "MPI_Reduce_scatter_c");
  }
  in.expect(mine, 0, bytes, "the input of MPI_Reduce_scatter_c");

  const bool is_root = rank == size - 1;
  check(MPI_Reduce_c(is_root ? MPI_IN_PLACE : in.data(), is_root ? in.data() : nullptr, count,
                     MPI_UNSIGNED_CHAR, MPI_BXOR, size - 1, MPI_COMM_WORLD),
        "MPI_Reduce_c in place of more than 2^31 elements");
  in.expect(is_root ? all : mine, 0, bytes, "MPI_Reduce_c in place");
}
#endif

/// Bytes of the GPU that nobody has.
std::size_t room() {
  std::size_t free = 0, total = 0;
  CHECK(Gpu::get().call("cuMemGetInfo_v2", &free, &total) == 0, "");
  return free;
}

/// What communicators have on GPUs does not pile up where ranks free them one after the other.
void communicators() {
  constexpr int kRounds = 24, kCalls = 5;
  auto* const data = static_cast<float*>(Gpu::get().allocate(4));
  std::size_t before = 0;
  for (int round = 0; round < kRounds; ++round) {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    for (int call = 0; call < kCalls; ++call) {
      float one = 1;
      Gpu::get().copy(data, &one, 4);
      MPI_Allreduce(MPI_IN_PLACE, data, 1, MPI_FLOAT, MPI_SUM, comm);
      Gpu::get().copy(&one, data, 4);
      CHECK(one == static_cast<float>(size), "communicator %d: %g", round,
            static_cast<double>(one));
    }
    if (rank != round % size) std::this_thread::sleep_for(std::chrono::milliseconds(5 + 3 * rank));
    MPI_Comm_free(&comm);
    if (round == 2) before = room();
  }
  MPI_Barrier(MPI_COMM_WORLD);
  constexpr std::size_t kSome = std::size_t{1} << 30;  // an inbox has 99 MiB
  CHECK(room() + kSome > before, "%zu MiB are gone", (before - room()) >> 20);
  Gpu::get().free(data);
}

/// 1 GiB of floats, and more.
void huge() {
  const std::size_t count = std::size_t{1} << 28;
  if (has_room(count * 4)) {
    auto* const memory = static_cast<float*>(Gpu::get().allocate(count * 4));
    reduce(memory, count, 1, "1 GiB");
    Gpu::get().free(memory);
  }
#if MPI_VERSION >= 4
  more_than_2_to_the_31();
#endif
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  late_gpu();
  skip_without_gpu();
  const std::string how = argc > 1 ? argv[1] : "";
  if (how != "huge") {
    cycles(how == "thorough" || how == "cycles" ? 10000 : 300);
    if (how != "cycles") {
      pool();
      virtual_memory();
      numbers();
      communicators();
    }
    kernel_calls.check();
  }
  if (how == "thorough" || how == "huge") huge();
  if (rank == 0) std::printf("memory of all kinds checked\n");
  MPI_Finalize();
}

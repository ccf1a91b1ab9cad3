// SPDX-License-Identifier: BSD-3-Clause
// Several ranks on one GPU: the bits of sums in every collective, size and kind of memory, and
// buffers that come and go. Ranks take the GPUs in turn.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"
#include "gpu_buffer.hpp"

namespace {

int rank, size, gpus;
long checked = 0;

/// Floats whose sums depend on their order.
float value(int r, std::size_t i, int round) {
  std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761u +
                    static_cast<std::uint32_t>(r) * 40503u + static_cast<std::uint32_t>(round);
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return static_cast<float>(x) / 65536.0f - 20000.0f;
}

/// The ranks of each GPU first, in their order, then the GPUs.
float sum(std::size_t i, int round) {
  float total = 0;
  for (int gpu = 0; gpu < gpus && gpu < size; ++gpu) {
    float part = value(gpu, i, round);
    for (int r = gpu + gpus; r < size; r += gpus) part += value(r, i, round);
    total = gpu == 0 ? part : total + part;
  }
  return total;
}

bool is_shared() { return size > gpus; }

struct Case {
  const char* collective;
  std::size_t count;  // of the vector
  bool in_place;
  int root;
  Kind kind;
  std::size_t offset;  // elements before the buffer, in its allocation

  std::string text() const {
    return std::string(collective) + ", " + std::to_string(count) + " elements, in place " +
           std::to_string(in_place) + ", root " + std::to_string(root) + ", offset " +
           std::to_string(offset) + ", memory " + std::to_string(static_cast<int>(kind));
  }
};

/// Elements of the result that `r` gets, and how many come before them.
std::size_t part_of(const Case& c, int r, std::size_t* before = nullptr) {
  const std::string name = c.collective;
  const auto p = static_cast<std::size_t>(size), q = static_cast<std::size_t>(r);
  const std::size_t even = c.count / p;
  std::size_t begin = 0, length = c.count;
  if (name == "reduce_scatter_block") {
    begin = q * even;
    length = even;
  } else if (name == "reduce_scatter") {  // the last rank gets what is left, the second nothing
    begin = q == 0 ? 0 : q == 1 ? even : (q - 1) * even;
    length = q == 1 ? 0 : q + 1 == p ? c.count - begin : even;
  } else if (name == "reduce" && r != c.root) {
    length = 0;
  }
  if (before != nullptr) *before = begin;
  return length;
}

void run(const Case& c, int round) {
  const std::string name = c.collective;
  std::size_t before = 0;
  const std::size_t part = part_of(c, rank, &before);
  Buffer in((c.offset + c.count) * 4, 0, c.kind), out((c.offset + part) * 4, 77, c.kind);
  const std::size_t skip = Buffer::kGuard + c.offset * 4;
  for (std::size_t i = 0; i < c.count; ++i) {
    const float v = value(rank, i, round);
    std::memcpy(in.before.data() + skip + i * 4, &v, 4);
  }
  float* const from = static_cast<float*>(in.ready()) + c.offset;
  float* const to = static_cast<float*>(out.ready()) + c.offset;
  const bool is_root = name != "reduce" || rank == c.root;
  const void* const send = c.in_place && is_root ? MPI_IN_PLACE : from;
  float* const receive = c.in_place ? from : is_root ? to : nullptr;
  const int count = static_cast<int>(c.count);
  int result = MPI_SUCCESS;
  if (name == "allreduce") {
    result = MPI_Allreduce(send, receive, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (name == "reduce") {
    result = MPI_Reduce(send, receive, count, MPI_FLOAT, MPI_SUM, c.root, MPI_COMM_WORLD);
  } else if (name == "reduce_scatter_block") {
    result =
        MPI_Reduce_scatter_block(send, receive, count / size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else {
    std::vector<int> counts;
    for (int r = 0; r < size; ++r) counts.push_back(static_cast<int>(part_of(c, r)));
    result = MPI_Reduce_scatter(send, receive, counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  CHECK(result == MPI_SUCCESS, "%s: %s", c.text().c_str(), error_text(result).c_str());
  const Buffer& where = c.in_place ? in : out;
  const std::vector<unsigned char> now = where.now();
  for (std::size_t i = 0; i < part; ++i) {
    float got = 0;
    std::memcpy(&got, now.data() + skip + i * 4, 4);
    const float expected = sum(before + i, round);
    CHECK(std::memcmp(&got, &expected, 4) == 0, "%s: element %zu: %.9g, not %.9g", c.text().c_str(),
          i, static_cast<double>(got), static_cast<double>(expected));
    ++checked;
  }
  // What is not the result stays as it was.
  for (std::size_t i = 0; i < skip; ++i)
    CHECK(now[i] == where.before[i], "%s: byte %zu before the result", c.text().c_str(), i);
  for (std::size_t i = skip + (c.in_place ? c.count : part) * 4; i < now.size(); ++i)
    CHECK(now[i] == where.before[i], "%s: byte %zu behind it", c.text().c_str(), i);
  if (!c.in_place) CHECK(in.now() == in.before, "%s: the input was changed", c.text().c_str());
}

void all_cases() {
  int round = 0;
  for (const char* collective : {"allreduce", "reduce", "reduce_scatter", "reduce_scatter_block"}) {
    // What kernels take for long, with aligned parts or not, in place or not.
    for (const std::size_t more : {0, 1, 2, 4}) {
      const auto ranks = static_cast<std::size_t>(size);
      const std::size_t each = 1100000 / ranks / 4 * 4 + more;
      run({collective, each * ranks, more > 1, round % size, Kind::device, 0}, round);
      ++round;
    }
    for (const std::size_t count : {1, 3, 64, 1001, 30000, 70001, 400003})
      for (const bool in_place : {false, true}) {
        const bool is_block = std::string(collective) == "reduce_scatter_block";
        const std::size_t whole = is_block ? (count + 1) * static_cast<std::size_t>(size) : count;
        Case c{collective,   whole,        in_place,
               round % size, Kind::device, static_cast<std::size_t>(round % 5)};
        run(c, round++);
        const std::string name = collective;
        // Leaders that wait for each other's kernels do not take all reduce_scatters.
        const bool is_alone = gpus == 1;
        if (is_served_here() && is_shared() &&
            (name == "allreduce" || name == "reduce" ||
             (is_alone && count >= static_cast<std::size_t>(size))))
          CHECK(last_algorithm(MPI_COMM_WORLD).rfind("shared_", 0) == 0, "%s: by %s",
                c.text().c_str(), last_algorithm(MPI_COMM_WORLD).c_str());
        // Not all kinds on all ranks: kernels cannot serve these, the bits are the same.
        c.kind = rank == round % size ? Kind::host : Kind::device;
        run(c, round++);
        c.kind = rank % 2 == 1 ? Kind::pinned : Kind::device;
        run(c, round++);
      }
  }
}

void served_by_kernels() {
  float* const data = static_cast<float*>(Gpu::get().allocate(4096));
  for (int round = 0; round < 3; ++round) {
    CHECK(
        MPI_Allreduce(MPI_IN_PLACE, data, 1000, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD) == MPI_SUCCESS,
        "");
    if (is_served_here() && size > 1 && round > 0) {
      const bool is_shared_kernel = last_algorithm(MPI_COMM_WORLD).rfind("shared_", 0) == 0;
      CHECK(is_shared_kernel == is_shared(), "%s", last_algorithm(MPI_COMM_WORLD).c_str());
    }
  }
  Gpu::get().free(data);
}

/// Allocations of 64 MiB come and go; their leader must not keep what is gone.
void nothing_is_kept() {
  Gpu& gpu = Gpu::get();
  const auto free_bytes = [&] {
    std::size_t now = 0, all = 0;
    CHECK(gpu.call("cuMemGetInfo_v2", &now, &all) == 0, "");
    return now;
  };
  constexpr std::size_t kBytes = 64u << 20;
  void* small = gpu.allocate(64);
  MPI_Barrier(MPI_COMM_WORLD);
  const std::size_t before = free_bytes();
  for (int round = 0; round < 40; ++round) {
    void* const data = gpu.allocate(kBytes);
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, 16, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS,
          "");
    gpu.free(data);
  }
  for (int round = 0; round < 100; ++round)
    CHECK(MPI_Allreduce(MPI_IN_PLACE, small, 16, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS,
          "");
  MPI_Barrier(MPI_COMM_WORLD);
  const std::size_t after = free_bytes();
  // Other ranks and programs use the GPU as well: a few allocations less say nothing, 40 would.
  CHECK(after + 8 * kBytes >= before, "%zu MiB of GPU memory were free, now %zu", before >> 20,
        after >> 20);
  gpu.free(small);
}

/// Memory that the programs map themselves: kernels reach what can be exported.
void mapped_memory() {
  for (const int handle_type : {MappedMemory::kFile, MappedMemory::kNoHandle}) {
    MappedMemory memory(3, 2 << 20, handle_type);
    const std::size_t count = memory.bytes() / 4 - 1000;
    std::vector<float> host(count);
    for (int round = 0; round < 18; ++round) {
      constexpr int kTries = 6;  // with many ranks, not all leaders hear of it at once
      if (round % kTries == 0 && (round < 2 * kTries || rank == size - 1))
        memory.replace(round / kTries);
      for (std::size_t i = 0; i < count; ++i)
        host[i] = static_cast<float>((i + static_cast<std::size_t>(rank + round)) % 100);
      auto* const data = static_cast<float*>(memory.data()) + round;
      Gpu::get().copy(data, host.data(), count * 4);
      CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                          MPI_COMM_WORLD) == MPI_SUCCESS,
            "");
      if (round % kTries == kTries - 1 && is_served_here() && is_shared() &&
          std::getenv("TRIB_P2P") == nullptr)
        CHECK((last_algorithm(MPI_COMM_WORLD).rfind("shared_", 0) == 0) ==
                  (handle_type == MappedMemory::kFile),
              "handle type %d: by %s", handle_type, last_algorithm(MPI_COMM_WORLD).c_str());
      Gpu::get().copy(host.data(), data, count * 4);
      for (std::size_t i = 0; i < count; ++i) {
        std::size_t expected = 0;
        for (int r = 0; r < size; ++r) expected += (i + static_cast<std::size_t>(r + round)) % 100;
        CHECK(host[i] == static_cast<float>(expected), "round %d, element %zu: %g, not %zu", round,
              i, static_cast<double>(host[i]), expected);
      }
    }
  }
}

/// Pairs of ranks at the same time, each on two GPUs if there are two, by kernels that fill them.
void pairs_side_by_side() {
  MPI_Comm pair = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank / 2, rank, &pair);
  int ranks = 0;
  MPI_Comm_size(pair, &ranks);
  constexpr std::size_t kCount = 4 << 20;
  auto* const data = static_cast<int*>(Gpu::get().allocate(kCount * 4));
  const std::vector<int> ones(kCount, 1);
  Gpu::get().copy(data, ones.data(), kCount * 4);
  int expected = 1;
  for (int round = 0; round < 20; ++round, expected *= ranks)
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(kCount), MPI_INT, MPI_SUM, pair) ==
              MPI_SUCCESS,
          "");
  std::vector<int> now(kCount);
  Gpu::get().copy(now.data(), data, kCount * 4);
  for (std::size_t i = 0; i < kCount; ++i)
    CHECK(now[i] == expected, "element %zu: %d, not %d", i, now[i], expected);
  Gpu::get().free(data);
  MPI_Comm_free(&pair);
}

/// Communicators over some of the ranks, in use by turns.
void parts_of_the_world() {
  MPI_Comm half = MPI_COMM_NULL, again = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 3, -rank, &half);
  MPI_Comm_dup(MPI_COMM_WORLD, &again);
  auto* const data = static_cast<int*>(Gpu::get().allocate(20000 * 4));
  for (int round = 0; round < 30; ++round)
    for (MPI_Comm comm : {half, again, MPI_COMM_WORLD}) {
      int ranks = 0;
      MPI_Comm_size(comm, &ranks);
      const std::vector<int> ones(20000, round);
      Gpu::get().copy(data, ones.data(), ones.size() * 4);
      const int count = round % 2 == 0 ? 20000 : 7;
      CHECK(MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_INT, MPI_SUM, comm) == MPI_SUCCESS, "");
      std::vector<int> now(20000);
      Gpu::get().copy(now.data(), data, now.size() * 4);
      for (int i = 0; i < 20000; ++i)
        CHECK(now[static_cast<std::size_t>(i)] == (i < count ? round * ranks : round),
              "round %d, element %d: %d", round, i, now[static_cast<std::size_t>(i)]);
    }
  Gpu::get().free(data);
  MPI_Comm_free(&half);
  MPI_Comm_free(&again);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  gpus = Gpu::get().count();
  const char* const setting = std::getenv("TRIB_SHARED_GPU");
  if (setting != nullptr && std::strcmp(setting, "halves") == 0) gpus *= 2;
  served_by_kernels();  // the first call asks for meetings, before the next all meet
  all_cases();
  nothing_is_kept();
  mapped_memory();
  parts_of_the_world();
  pairs_side_by_side();
  if (rank == 0) std::printf("%ld elements checked\n", checked);
  MPI_Finalize();
}

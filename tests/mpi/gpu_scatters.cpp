// SPDX-License-Identifier: BSD-3-Clause
// reduce_scatters in place whose parts differ in length, so that a rank's result lies over what
// others still have to read: as the first use that a communicator makes of GPUs, and in memory that
// the program maps in pieces, some of which peers know already. Blocking and persistent ones.
#include <numeric>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;

float value(int r, std::size_t i, int round) {
  return static_cast<float>(
      (i * 7 + static_cast<std::size_t>(r) * 13 + static_cast<std::size_t>(round) * 5) % 101);
}

/// Later ranks get more.
std::vector<int> parts(int least, int step) {
  std::vector<int> counts;
  for (int r = 0; r < size; ++r) counts.push_back(least + step * r);
  return counts;
}

void fill(float* data, std::size_t count, int round) {
  std::vector<float> host(count);
  for (std::size_t i = 0; i < count; ++i) host[i] = value(rank, i, round);
  Gpu::get().copy(data, host.data(), count * 4);
}

void check(const float* data, const std::vector<int>& counts, int round, const char* what) {
  const auto mine = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]);
  const auto begin =
      static_cast<std::size_t>(std::accumulate(counts.begin(), counts.begin() + rank, 0));
  std::vector<float> found(mine);
  Gpu::get().copy(found.data(), data, mine * 4);
  for (std::size_t i = 0; i < mine; ++i) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += value(r, begin + i, round);
    CHECK(found[i] == sum, "%s, round %d: element %zu of %zu is %g, not %g", what, round, i, mine,
          static_cast<double>(found[i]), static_cast<double>(sum));
  }
}

void blocking(float* data, const std::vector<int>& counts, MPI_Comm comm, int round,
              const char* what) {
  const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), 0));
  fill(data, total, round);
  CHECK(MPI_Reduce_scatter(MPI_IN_PLACE, data, counts.data(), MPI_FLOAT, MPI_SUM, comm) ==
            MPI_SUCCESS,
        "%s", what);
  check(data, counts, round, what);
}

void persistent(float* data, const std::vector<int>& counts, MPI_Comm comm, int round,
                const char* what) {
#if HAS_PERSISTENT_REDUCTIONS
  const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), 0));
  MPI_Request request = MPI_REQUEST_NULL;
  CHECK(MPI_Reduce_scatter_init(MPI_IN_PLACE, data, counts.data(), MPI_FLOAT, MPI_SUM, comm,
                                MPI_INFO_NULL, &request) == MPI_SUCCESS,
        "%s", what);
  for (int start = 0; start < 5; ++start) {
    fill(data, total, round + start);
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    check(data, counts, round + start, what);
  }
  MPI_Request_free(&request);
#else
  (void)data, (void)counts, (void)comm, (void)round, (void)what;
#endif
}

/// Each on a communicator that has not used GPUs.
void first() {
  int round = 0;
  for (const auto& counts : {parts(1000, 3000), parts(7, 1), parts(0, 5), parts(300000, 200001)}) {
    const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), 0));
    auto* const data = static_cast<float*>(Gpu::get().allocate(total * 4));
    for (const bool is_persistent : {true, false, true}) {
      MPI_Comm comm = MPI_COMM_NULL;
      MPI_Comm_dup(MPI_COMM_WORLD, &comm);
      is_persistent ? persistent(data, counts, comm, ++round, "the first one, persistent")
                    : blocking(data, counts, comm, ++round, "the first one, blocking");
      MPI_Comm_free(&comm);
    }
    Gpu::get().free(data);
  }
}

/// Peers know a piece of the memory before they hear of more of it.
void in_pieces() {
  for (int round = 0; round < 4; ++round) {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    {
      MappedMemory memory(4, 2 << 20, MappedMemory::kFile);
      auto* const data = static_cast<float*>(memory.data());
      const std::vector<int> few = parts(100, 10);
      blocking(data, few, comm, round, "in one piece");
      const auto all = static_cast<int>(memory.bytes() / 4);
      const std::vector<int> counts =
          parts(all / size / 4, (all - all / 4) / (size * (size - 1) / 2 + 1));
      blocking(data, counts, comm, round, "in several pieces");
      persistent(data, counts, comm, round, "in several pieces, persistent");
      blocking(data, counts, comm, round + 50, "in several pieces, again");
      if (round % 2 == 1) {
        memory.replace(3);
        blocking(data, few, comm, round, "in one piece, another one is new");
        blocking(data, counts, comm, round, "in several pieces, one is new");
      }
    }
    MPI_Comm_free(&comm);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  first();
  if (size > 1) in_pieces();
  if (rank == 0) std::printf("scatters checked\n");
  MPI_Finalize();
}

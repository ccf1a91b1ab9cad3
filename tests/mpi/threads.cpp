// SPDX-License-Identifier: BSD-3-Clause
// MPI_THREAD_MULTIPLE: threads reduce on communicators of their own at the same time, the first
// calls included, and in another order on every rank.
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

/// The communicator is freed while another thread waits for a reduction on it.
void free_during_wait(int rank, int size) {
  const int expected = size * (size + 1) / 2;
  for (int round = 0; round < 200; ++round) {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    int mine = rank + 1, sum = 0;
    MPI_Request request;
    for (int i = 0; i < 2; ++i) {  // the first is the MPI's, and the barrier gets us ready
      MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
      MPI_Barrier(comm);
    }
    sum = 0;
    if (rank == size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
    std::thread waiting([&] { MPI_Wait(&request, MPI_STATUS_IGNORE); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 + round % 50 * 10));
    MPI_Comm_free(&comm);
    waiting.join();
    CHECK(sum == expected, "round %d: %d, not %d", round, sum, expected);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int provided;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (provided < MPI_THREAD_MULTIPLE) {
    std::printf("no MPI_THREAD_MULTIPLE here\n");
    MPI_Finalize();
    return 0;
  }
  const int rank = world_rank(), size = world_size();
  constexpr int kThreads = 4;
  for (int round = 0; round < 3; ++round) {
    std::vector<MPI_Comm> comms(kThreads);
    for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      const int index = (t + rank) % kThreads;
      threads.emplace_back([&, index] {
        const MPI_Comm comm = comms[static_cast<std::size_t>(index)];
        for (int i = 0; i < 60; ++i) {
          const int count = 1 + (i * 37 + index * 11) % 500;
          std::vector<long> in(static_cast<std::size_t>(count), rank + index + i), out(in.size());
          MPI_Allreduce(in.data(), out.data(), count, MPI_LONG, MPI_SUM, comm);
          const long expected =
              static_cast<long>(size) * (size - 1) / 2 + static_cast<long>(size) * (index + i);
          for (const long value : out)
            CHECK(value == expected, "thread %d call %d: %ld, not %ld", index, i, value, expected);
        }
        if (is_served_here() && size > 1) CHECK(was_served(comm), "");
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
  }
  // Open MPI 5.0 by itself crashes in it.
  if (is_served_here() && size > 1) free_during_wait(rank, size);
  MPI_Finalize();
}

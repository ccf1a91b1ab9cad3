// SPDX-License-Identifier: BSD-3-Clause
// A legal program: one rank posts a receive, reduces, and waits for the receive; its peer sends a
// large message first. The message moves only if the wait inside the reduction keeps the MPI going.
#include <vector>

#include "check.hpp"

namespace {

void once(int sender, int receiver, std::size_t bytes, MPI_Comm comm, int collective) {
  const int rank = world_rank(), size = world_size();
  std::vector<char> message(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  if (rank == receiver)
    MPI_Irecv(message.data(), static_cast<int>(bytes), MPI_BYTE, sender, 7, MPI_COMM_WORLD,
              &request);
  if (rank == sender) {
    message.assign(bytes, 'x');
    MPI_Send(message.data(), static_cast<int>(bytes), MPI_BYTE, receiver, 7, MPI_COMM_WORLD);
  }
  std::vector<long> in(5000, rank), out(5000);
  long expected = static_cast<long>(size) * (size - 1) / 2;
  if (collective == 0) {
    MPI_Allreduce(in.data(), out.data(), 5000, MPI_LONG, MPI_SUM, comm);
  } else {
    MPI_Reduce(in.data(), out.data(), 5000, MPI_LONG, MPI_SUM, receiver, comm);
    if (rank != receiver) expected = 0;
  }
  CHECK(out[4999] == expected, "%ld", out[4999]);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  if (rank == receiver) CHECK(message.front() == 'x' && message.back() == 'x', "");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int size = world_size();
  MPI_Comm dup;
  MPI_Comm_dup(MPI_COMM_WORLD, &dup);  // set up inside the first round: that wait counts too
  for (int i = 0; i < 2; ++i)
    for (const std::size_t bytes : {std::size_t{1000}, std::size_t{200000}, std::size_t{8000000}})
      for (const int collective : {0, 1}) {
        once(0, size - 1, bytes, MPI_COMM_WORLD, collective);
        once(size - 1, 0, bytes, dup, collective);
      }
  MPI_Comm_free(&dup);
  MPI_Finalize();
}

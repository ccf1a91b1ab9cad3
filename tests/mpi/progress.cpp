// SPDX-License-Identifier: BSD-3-Clause
// A legal program: one rank posts a receive, reduces, and waits for the receive; its peer sends a
// large message first. The message moves only if the wait inside the reduction keeps the MPI going,
// whatever that wait is, and whatever else has come that nobody has asked for yet. The other way
// round a rank that sits in a call of the MPI's does its part in a reduction.
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

constexpr int kCount = 5000;
constexpr const char* kWays[] = {
    "MPI_Allreduce",         "MPI_Reduce",  "MPI_Wait",    "MPI_Test",     "MPI_Waitall",
    "MPI_Testall",           "MPI_Waitany", "MPI_Testany", "MPI_Waitsome", "MPI_Testsome",
    "MPI_Request_get_status"};
constexpr int kWayCount = static_cast<int>(std::size(kWays));

/// Completes a nonblocking reduction.
void end(int way, MPI_Request request) {
  const char* const name = kWays[way];
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  int flag = 0, index = 0, done = 0;
  if (is("MPI_Wait")) MPI_Wait(&request, MPI_STATUS_IGNORE);
  if (is("MPI_Waitall")) MPI_Waitall(1, &request, MPI_STATUSES_IGNORE);
  if (is("MPI_Waitany")) MPI_Waitany(1, &request, &index, MPI_STATUS_IGNORE);
  if (is("MPI_Waitsome")) MPI_Waitsome(1, &request, &done, &index, MPI_STATUSES_IGNORE);
  while (!flag && request != MPI_REQUEST_NULL) {
    if (is("MPI_Test")) MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
    if (is("MPI_Testall")) MPI_Testall(1, &request, &flag, MPI_STATUSES_IGNORE);
    if (is("MPI_Testany")) MPI_Testany(1, &request, &index, &flag, MPI_STATUS_IGNORE);
    if (is("MPI_Testsome")) MPI_Testsome(1, &request, &done, &index, MPI_STATUSES_IGNORE);
    if (is("MPI_Request_get_status")) MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE);
  }
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

/// `early`: the sender's small messages, one on each of the communicators, nobody asks for before
/// all is over.
void once(int sender, int receiver, std::size_t bytes, MPI_Comm comm, int way, bool early) {
  const int rank = world_rank(), size = world_size();
  const MPI_Comm comms[] = {comm, MPI_COMM_WORLD};
  std::vector<char> message(bytes);
  MPI_Request request = MPI_REQUEST_NULL, own = MPI_REQUEST_NULL;
  char small = 'y', mine = 'z';
  if (rank == receiver) {
    MPI_Irecv(message.data(), static_cast<int>(bytes), MPI_BYTE, sender, 7, MPI_COMM_WORLD,
              &request);
    if (early) MPI_Isend(&mine, 1, MPI_BYTE, 0, 9, MPI_COMM_SELF, &own);
  }
  if (rank == sender) {
    message.assign(bytes, 'x');
    if (early)
      for (const MPI_Comm on : comms) MPI_Send(&small, 1, MPI_BYTE, receiver, 8, on);
    MPI_Send(message.data(), static_cast<int>(bytes), MPI_BYTE, receiver, 7, MPI_COMM_WORLD);
  }
  std::vector<long> in(kCount, rank), out(kCount);
  long expected = static_cast<long>(size) * (size - 1) / 2;
  if (way == 0) {
    MPI_Allreduce(in.data(), out.data(), kCount, MPI_LONG, MPI_SUM, comm);
  } else if (way == 1) {
    MPI_Reduce(in.data(), out.data(), kCount, MPI_LONG, MPI_SUM, receiver, comm);
    if (rank != receiver) expected = 0;
  } else {
    MPI_Request reduction;
    MPI_Iallreduce(in.data(), out.data(), kCount, MPI_LONG, MPI_SUM, comm, &reduction);
    end(way, reduction);
  }
  CHECK(out[kCount - 1] == expected, "%s: %ld", kWays[way], out[kCount - 1]);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  if (rank != receiver) return;
  CHECK(message.front() == 'x' && message.back() == 'x', "%s", kWays[way]);
  if (!early) return;
  for (const MPI_Comm on : comms) MPI_Recv(&small, 1, MPI_BYTE, sender, 8, on, MPI_STATUS_IGNORE);
  MPI_Recv(&small, 1, MPI_BYTE, 0, 9, MPI_COMM_SELF, MPI_STATUS_IGNORE);
  MPI_Wait(&own, MPI_STATUS_IGNORE);
}

/// The last rank needs rank 0 in a reduction of many passes, which sits in a call of the MPI's
/// until the last one is through: another thread of rank 0 has to see to it. Before that all have
/// seen to theirs for so many times 8 ms. (Not with TRIB_PROGRESS=calls.)
void left_alone(int rounds) {
  const int rank = world_rank(), size = world_size();
  if (size == 1) return;
  long one = 1, sum = 0;
  for (int round = 0; round < rounds; ++round) {
    if (round % size == rank) std::this_thread::sleep_for(std::chrono::milliseconds(8));
    MPI_Request reduction;
    MPI_Iallreduce(&one, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD, &reduction);
    MPI_Wait(&reduction, MPI_STATUS_IGNORE);
    CHECK(sum == size, "%ld", sum);
  }
  std::vector<long> in(1000000, rank), out(in.size());
  char token = 'x';
  MPI_Request reduction;
  MPI_Iallreduce(in.data(), out.data(), static_cast<int>(in.size()), MPI_LONG, MPI_SUM,
                 MPI_COMM_WORLD, &reduction);
  if (rank == 0) MPI_Recv(&token, 1, MPI_CHAR, size - 1, 10, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Wait(&reduction, MPI_STATUS_IGNORE);
  if (rank == size - 1) MPI_Send(&token, 1, MPI_CHAR, 0, 10, MPI_COMM_WORLD);
  CHECK(out.back() == static_cast<long>(size) * (size - 1) / 2, "%ld", out.back());
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int size = world_size();
  MPI_Comm dup;
  MPI_Comm_dup(MPI_COMM_WORLD, &dup);  // set up inside the first round: that wait counts too
  for (const bool early : {false, true})
    for (const std::size_t bytes : {std::size_t{1000}, std::size_t{200000}, std::size_t{8000000}})
      for (int way = 0; way < kWayCount; ++way) {
        once(0, size - 1, bytes, MPI_COMM_WORLD, way, early);
        once(size - 1, 0, bytes, dup, way, early);
      }
  MPI_Comm_free(&dup);
  for (const int rounds : {0, 60}) left_alone(rounds);
  MPI_Finalize();
}

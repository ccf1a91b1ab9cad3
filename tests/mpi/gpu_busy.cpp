// SPDX-License-Identifier: BSD-3-Clause
// A rank's default stream, or one that the default stream waits for, has something to do that ends
// only when another rank has sent it a large message. The receive is posted, the call on a GPU
// buffer comes next: while it waits for the stream, the message has to get on.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;

/// What all ranks see.
struct Shared {
  std::atomic<int> sent;     // messages that have gone out
  std::atomic<int> expired;  // waits of streams that nobody ended
};
Shared* shared = nullptr;
void* stream = nullptr;  // that is busy
int rounds = 0, awaited = 0;

/// On the stream: until that message has gone out.
void wait_for_message(void*) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (shared->sent.load() < awaited) {
    if (std::chrono::steady_clock::now() > end) {
      ++shared->expired;
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void share() {
  std::string name = "/trib_test_busy_" + std::to_string(getpid());
  char text[64] = {};
  std::snprintf(text, sizeof text, "%s", name.c_str());
  MPI_Bcast(text, sizeof text, MPI_CHAR, 0, MPI_COMM_WORLD);
  int file = -1;
  if (rank == 0) {
    file = shm_open(text, O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK(file >= 0 && ftruncate(file, sizeof(Shared)) == 0, "no shared memory");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank != 0) file = shm_open(text, O_RDWR, 0600);
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  CHECK(memory != MAP_FAILED, "no shared memory");
  close(file);
  shared = static_cast<Shared*>(memory);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) shm_unlink(text);
}

constexpr int kWords = 4 << 20;

/// Begins a round: rank `busy` waits for a long message of the next one, and so does its stream.
MPI_Request await_message(int busy) {
  static std::vector<int> message(kWords);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Barrier(MPI_COMM_WORLD);
  awaited = ++rounds;
  if (rank != busy) return request;
  MPI_Irecv(message.data(), kWords, MPI_INT, (busy + 1) % size, 3, MPI_COMM_WORLD, &request);
  CHECK(Gpu::get().call("cuLaunchHostFunc", stream, &wait_for_message,
                        static_cast<void*>(nullptr)) == 0,
        "");
  return request;
}
void send_message(int busy) {
  const std::vector<int> message(kWords);
  MPI_Send(message.data(), kWords, MPI_INT, busy, 3, MPI_COMM_WORLD);
  ++shared->sent;
}
void end_round(MPI_Request request, const char* what) {
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK(shared->expired.load() == 0, "%s: the message did not get on meanwhile", what);
}

/// `call` on rank `busy` comes while its stream waits; the others' comes behind the message.
template <class Call>
void round(int busy, const char* what, Call call) {
  const MPI_Request request = await_message(busy);
  if (rank == (busy + 1) % size) send_message(busy);
  call();
  end_round(request, what);
}

/// The long message is sent behind the one that the call is for: what a receive does with the
/// stream comes when it has its message.
void receive_before(int busy, float* data, int count) {
  const MPI_Request request = await_message(busy);
  if (rank == busy) {
    MPI_Recv(data, count, MPI_FLOAT, (busy + 1) % size, 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else if (rank == (busy + 1) % size) {
    const std::vector<float> sevens(static_cast<std::size_t>(count), 7);
    MPI_Ssend(sevens.data(), count, MPI_FLOAT, busy, 4, MPI_COMM_WORLD);
    send_message(busy);
  }
  end_round(request, "a receive");
  if (rank != busy) return;
  float last = 0;
  Gpu::get().copy(&last, data + count - 1, 4);
  CHECK(last == 7, "received: %g", static_cast<double>(last));
}

/// A send has nothing to wait for the stream for once its message is gone.
void send_before(int busy, float* data, int count) {
  const int peer = (busy + 1) % size;
  MPI_Request sent = MPI_REQUEST_NULL;
  int word = 0;
  if (rank == busy) MPI_Isend(data, count, MPI_FLOAT, peer, 4, MPI_COMM_WORLD, &sent);
  const MPI_Request request = await_message(busy);
  if (rank == busy) {
    MPI_Wait(&sent, MPI_STATUS_IGNORE);
    MPI_Send(&word, 1, MPI_INT, peer, 5, MPI_COMM_WORLD);
  } else if (rank == peer) {
    std::vector<float> got(static_cast<std::size_t>(count));
    MPI_Recv(got.data(), count, MPI_FLOAT, busy, 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Recv(&word, 1, MPI_INT, busy, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    send_message(busy);
  }
  end_round(request, "a send that is over");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  share();
  constexpr int kCount = 1000;
  std::vector<float> host(kCount);
  auto* const data = static_cast<float*>(Gpu::get().allocate(kCount * 4));
  const auto fill = [&] {
    for (int i = 0; i < kCount; ++i) host[static_cast<std::size_t>(i)] = static_cast<float>(rank);
    Gpu::get().copy(data, host.data(), kCount * 4);
  };
  const auto check = [&](const char* what) {
    Gpu::get().copy(host.data(), data, kCount * 4);
    for (int i = 0; i < kCount; ++i)
      CHECK(host[static_cast<std::size_t>(i)] == static_cast<float>(size * (size - 1) / 2),
            "%s, element %d: %g", what, i, static_cast<double>(host[static_cast<std::size_t>(i)]));
  };
  const auto blocking = [&] {
    MPI_Allreduce(MPI_IN_PLACE, data, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  for (int i = 0; i < 30; ++i) {
    fill();
    blocking();
    check("before");
  }
  const auto nonblocking_on = [&](MPI_Comm comm) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, data, kCount, MPI_FLOAT, MPI_SUM, comm, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  };
  MPI_Comm alone;
  MPI_Comm_dup(MPI_COMM_WORLD, &alone);
  for (int i = 0; i < 40; ++i) {
    fill();
    nonblocking_on(alone);
    check("nonblocking, before");
  }
  void* own = nullptr;
  CHECK(Gpu::get().call("cuStreamCreate", &own, 0u) == 0, "no stream");
  for (int turn = 0; turn < 2 * size; ++turn) {
    const int busy = turn / 2;
    stream = turn % 2 == 0 ? nullptr : own;
    fill();
    round(busy, "a blocking reduction", blocking);
    check("a blocking reduction");
    fill();
    round(busy, "a nonblocking reduction", [&] { nonblocking_on(MPI_COMM_WORLD); });
    check("a nonblocking reduction");
    // Where the MPI knows no GPUs, this is staged.
    round(busy, "a broadcast", [&] { MPI_Bcast(data, kCount, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    check("a broadcast");
    // On a communicator that knows nothing but these.
    fill();
    round(busy, "nonblocking reductions alone", [&] { nonblocking_on(alone); });
    check("nonblocking reductions alone");
    receive_before(busy, data, kCount);
    send_before(busy, data, kCount);
  }
  Gpu::get().call("cuStreamDestroy_v2", own);
  MPI_Comm_free(&alone);
  Gpu::get().free(data);
  if (rank == 0) std::printf("busy streams checked\n");
  MPI_Finalize();
}

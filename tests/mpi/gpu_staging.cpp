// SPDX-License-Identifier: BSD-3-Clause
// Where copies of GPU buffers in host memory go when something unusual happens: an error handler
// that throws, a reduction that fails, a communicator that leaves all to the MPI, a device that is
// reset, a session instead of MPI_Init.
//   gpu_staging              what can be done one after the other
//   gpu_staging failed       with TRIB_TIMEOUT: the communicator is unusable afterwards
//   gpu_staging reset        with protected_driver.cpp only
//   gpu_staging session
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "gpu_buffer.hpp"
#include "tributary/tributary.h"

namespace {

int rank, size;

struct Thrown : std::exception {};
void throwing_handler(MPI_Comm*, int*, ...) { throw Thrown(); }

/// An int at the start of a buffer, as it is now.
int first_of(const Buffer& buffer) {
  int value = 0;
  std::memcpy(&value, buffer.now().data() + Buffer::kGuard, sizeof value);
  return value;
}

/// Of two receives one fails, and the handler throws: the other one still brings its message.
void thrown() {
  if (size == 1) return;
  const MPI_Comm comm = MPI_COMM_WORLD;  // whose handler MPIs may call for a list of requests
  MPI_Errhandler handler;
  MPI_Comm_create_errhandler(throwing_handler, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  using Complete = std::function<void(MPI_Request*)>;
  int index, done, indices[2], flag;
  MPI_Status statuses[2];
  const Complete ways[] = {
      [&](MPI_Request* requests) { MPI_Waitany(2, requests, &index, MPI_STATUS_IGNORE); },
      [&](MPI_Request* requests) { MPI_Waitsome(2, requests, &done, indices, statuses); },
      [&](MPI_Request* requests) {
        for (flag = 0; !flag;) MPI_Testany(2, requests, &index, &flag, MPI_STATUS_IGNORE);
      },
      [&](MPI_Request* requests) { MPI_Wait(requests, MPI_STATUS_IGNORE); },
  };
  int sent[2] = {77, 78}, none = 0;
  for (const Complete& complete : ways) {
    if (rank == 1) {
      Buffer too_short(4, 0), other(4, 0);
      MPI_Request requests[2];
      MPI_Irecv(too_short.ready(), 1, MPI_INT, 0, 1, comm, &requests[0]);
      MPI_Irecv(other.ready(), 1, MPI_INT, 0, 2, comm, &requests[1]);
      MPI_Barrier(comm);
      bool is_thrown = false;
      try {
        complete(requests);
      } catch (const Thrown&) {
        is_thrown = true;
      }
      CHECK(is_thrown && requests[1] != MPI_REQUEST_NULL, "thrown: %d", is_thrown);
      MPI_Send(&none, 0, MPI_INT, 0, 3, comm);
      MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
      CHECK(first_of(other) == 77, "received %d", first_of(other));
    } else {
      MPI_Barrier(comm);
      if (rank > 0) continue;
      MPI_Send(sent, 2, MPI_INT, 1, 1, comm);
      MPI_Recv(&none, 0, MPI_INT, 1, 3, comm, MPI_STATUS_IGNORE);
      MPI_Send(sent, 1, MPI_INT, 1, 2, comm);
    }
  }
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&handler);
}

/// All reductions on a communicator are left to the MPI.
void disabled() {
  const auto set = tributary<int(MPI_Comm, const char*, const char*)>("trib_mpi_set");
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  CHECK(set(comm, "TRIB_ENABLE", "0") == MPI_SUCCESS, "");
  for (const bool is_blocking : {true, false}) {
    Buffer in(4, 0), out(4, 0xff);
    in.set(0, rank + 1);
    void *const from = in.ready(), *const to = out.ready();
    MPI_Request request = MPI_REQUEST_NULL;
    if (is_blocking)
      MPI_Allreduce(from, to, 1, MPI_INT, MPI_SUM, comm);
    else
      MPI_Iallreduce(from, to, 1, MPI_INT, MPI_SUM, comm, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(first_of(out) == size * (size + 1) / 2, "%d", first_of(out));
  }
  MPI_Comm_free(&comm);
}

long resident_megabytes() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;)
    if (word == "RssAnon:") {
      long kilobytes = 0;
      file >> kilobytes;
      return kilobytes >> 10;
    }
  return 0;
}

/// What nonblocking reductions had for their copies others get, once they are done.
void used_again() {
  if (size == 1) return;
  constexpr int kAtOnce = 8, kMessages = 4, kCount = 4 << 20;
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  Buffer in(sizeof(int) * kCount, 0), out(sizeof(int) * kCount, 0);
  void *const from = in.ready(), *const to = out.ready();
  MPI_Request requests[kAtOnce];
  for (int i = 0; i < kAtOnce; ++i)
    MPI_Ireduce(from, to, kCount, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD, &requests[i]);
  MPI_Waitall(kAtOnce, requests, MPI_STATUSES_IGNORE);
  const long before = resident_megabytes();  // messages are shorter, as their copies are aligned
  for (int i = 0; i < kMessages; ++i) {
    MPI_Irecv(to, kCount - 64, MPI_INT, previous, i, MPI_COMM_WORLD, &requests[i]);
    MPI_Isend(from, kCount - 64, MPI_INT, next, i, MPI_COMM_WORLD, &requests[kMessages + i]);
  }
  MPI_Waitall(2 * kMessages, requests, MPI_STATUSES_IGNORE);
  const long grown = resident_megabytes() - before;
  CHECK(grown < 64, "%ld MiB more for %d messages of 16", grown, 2 * kMessages);
}

/// A persistent reduction of which MPI_Test has told that it failed does not write to its buffer
/// when it is freed.
void failed() {
#if HAS_PERSISTENT_REDUCTIONS
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  Buffer in(4, 0), out(4, 0);
  void *const from = in.ready(), *const to = out.ready();
  MPI_Request request;
  MPI_Allreduce_init(from, to, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &request);
  MPI_Start(&request);
  CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) {
    MPI_Start(&request);
    int flag = 0, status = MPI_SUCCESS;
    while (!flag && status == MPI_SUCCESS) status = MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
    CHECK(status != MPI_SUCCESS, "no error");
    out.before.assign(out.before.size(), 0x63);
    out.ready();
    MPI_Request_free(&request);
    expect_bytes("freed", "out", out.now(), out.before);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank != 0) MPI_Request_free(&request);
#endif
}

/// Copies go to memory that is there, also after the program has reset the device.
void reset() {
  constexpr int kCount = 1 << 18;
  for (int round = 0; round < 3; ++round) {
    auto in = std::make_unique<Buffer>(sizeof(int) * kCount, 0);
    auto out = std::make_unique<Buffer>(sizeof(int) * kCount, 0);
    in->set(0, rank + 1);
    void *const from = in->ready(), *const to = out->ready();
    MPI_Allreduce(from, to, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(first_of(*out) == size * (size + 1) / 2, "%d", first_of(*out));
    MPI_Request request;
    MPI_Iallreduce(from, to, kCount, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(first_of(*out) == size, "%d", first_of(*out));
    MPI_Barrier(MPI_COMM_WORLD);
    in.reset();
    out.reset();
    Gpu::get().call("cuDevicePrimaryCtxReset_v2", 0);
  }
}

/// Two columns of a matrix arrive at the same time, without MPI_COMM_WORLD.
void session() {
#if MPI_VERSION >= 4
  MPI_Session its;
  MPI_Group group;
  MPI_Comm comm;
  MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &its);
  MPI_Group_from_session_pset(its, "mpi://WORLD", &group);
  MPI_Comm_create_from_group(group, "tributary/tests", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
  MPI_Group_free(&group);
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Datatype column;
  MPI_Type_vector(4, 1, 4, MPI_INT, &column);
  MPI_Type_commit(&column);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  Buffer theirs(64, 0), mine(64, 0xff);
  for (int i = 0; i < 16; ++i) theirs.set(4 * i, i);
  char *const from = static_cast<char*>(theirs.ready()), *const to =
                                                             static_cast<char*>(mine.ready());
  MPI_Request requests[4];
  for (int i = 0; i < 2; ++i)
    MPI_Irecv(to + 4 * (i + 1), 1, column, previous, i, comm, &requests[i]);
  for (int i = 0; i < 2; ++i)
    MPI_Isend(from + 4 * (i + 1), 1, column, next, i, comm, &requests[2 + i]);
  MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
  for (int row = 0; row < 4; ++row)
    for (int i = 1; i <= 2; ++i) mine.set(16 * row + 4 * i, 4 * row + i);
  expect_bytes("session", "columns", mine.now(), mine.before);
  MPI_Type_free(&column);
  MPI_Comm_free(&comm);
  if (rank == 0) std::printf("checked\n");
  MPI_Session_finalize(&its);
#else
  std::printf("checked\n");
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "session") {
    session();
    return 0;
  }
  MPI_Init(&argc, &argv);
  skip_without_gpu();
  rank = world_rank();
  size = world_size();
  if (what == "failed") {
    failed();
  } else if (what == "reset") {
    reset();
  } else {
    thrown();
    disabled();
    used_again();
  }
  if (rank == 0) std::printf("checked\n");
  MPI_Finalize();
}

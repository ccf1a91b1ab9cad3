// SPDX-License-Identifier: BSD-3-Clause
// Staged calls that fail, or nearly: what arrived all the same is in the program's buffers, and its
// requests are as without Tributary. Error handlers of the program's own, which return or throw;
// lists of which one request failed; addresses from MPI_BOTTOM on, in send and receive types that
// lie between each other.
//   gpu_failures [host]    host: all in host memory, which needs neither a GPU nor Tributary
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;
bool is_on_host;

struct Ints {
  int* data;
  explicit Ints(std::size_t count, int value = -1) {
    const std::vector<int> values(count, value);
    if (is_on_host) {
      data = static_cast<int*>(std::malloc(count * sizeof(int)));
      std::memcpy(data, values.data(), count * sizeof(int));
    } else {
      data = static_cast<int*>(Gpu::get().allocate(count * sizeof(int)));
      Gpu::get().copy(data, values.data(), count * sizeof(int));
    }
  }
  ~Ints() { is_on_host ? std::free(data) : Gpu::get().free(data); }
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;
  int at(std::size_t index) const {
    int value;
    if (is_on_host)
      value = data[index];
    else
      Gpu::get().copy(&value, data + index, sizeof value);
    return value;
  }
};

int heard;
void returns(MPI_Comm*, int*, ...) { ++heard; }
void throws(MPI_Comm*, int*, ...) { throw std::runtime_error("heard"); }

MPI_Comm with_handler(MPI_Comm_errhandler_function* function) {
  MPI_Comm comm;
  MPI_Errhandler handler;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_create_errhandler(function, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);  // whose hears of lists
  MPI_Errhandler_free(&handler);
  return comm;
}

void without_handler(MPI_Comm* comm) {
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  MPI_Comm_free(comm);
}

/// Each rank sends two blocks to itself, from and to absolute addresses that take turns in memory.
template <class Exchange>
void between_each_other(const char* what, Exchange&& exchange) {
  constexpr int kCount = 1000;
  Ints all(4 * kCount);  // sent, received, sent, received
  const std::vector<int> mine(kCount, rank + 1);
  MPI_Aint sent[2], received[2];
  for (int i = 0; i < 2; ++i) {
    int* const from = all.data + 2 * i * kCount;
    if (is_on_host)
      std::memcpy(from, mine.data(), kCount * sizeof(int));
    else
      Gpu::get().copy(from, mine.data(), kCount * sizeof(int));
    MPI_Get_address(from, &sent[i]);
    MPI_Get_address(from + kCount, &received[i]);
  }
  MPI_Datatype out, in;
  int lengths[2] = {kCount, kCount};
  MPI_Type_create_hindexed(2, lengths, sent, MPI_INT, &out);
  MPI_Type_create_hindexed(2, lengths, received, MPI_INT, &in);
  MPI_Type_commit(&out);
  MPI_Type_commit(&in);
  MPI_Request request = MPI_REQUEST_NULL;
  exchange(out, in, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  for (const int block : {1, 3})
    for (const int index : {0, kCount - 1}) {
      const int found = all.at(static_cast<std::size_t>(block * kCount + index));
      CHECK(found == rank + 1, "%s: block %d, element %d is %d", what, block, index, found);
    }
  MPI_Type_free(&out);
  MPI_Type_free(&in);
}

void from_bottom() {
  int one = 1, zero = 0;
  MPI_Comm self = MPI_COMM_SELF;
  between_each_other("MPI_Alltoallw", [&](MPI_Datatype out, MPI_Datatype in, MPI_Request*) {
    MPI_Alltoallw(MPI_BOTTOM, &one, &zero, &out, MPI_BOTTOM, &one, &zero, &in, self);
  });
  between_each_other(
      "MPI_Ialltoallw", [&](MPI_Datatype out, MPI_Datatype in, MPI_Request* request) {
        MPI_Ialltoallw(MPI_BOTTOM, &one, &zero, &out, MPI_BOTTOM, &one, &zero, &in, self, request);
      });
  between_each_other("MPI_Iallgather",
                     [&](MPI_Datatype out, MPI_Datatype in, MPI_Request* request) {
                       MPI_Iallgather(MPI_BOTTOM, 1, out, MPI_BOTTOM, 1, in, self, request);
                     });
  between_each_other("MPI_Igather", [&](MPI_Datatype out, MPI_Datatype in, MPI_Request* request) {
    MPI_Igather(MPI_BOTTOM, 1, out, MPI_BOTTOM, 1, in, 0, self, request);
  });
  between_each_other("MPI_Ialltoall", [&](MPI_Datatype out, MPI_Datatype in, MPI_Request* request) {
    MPI_Ialltoall(MPI_BOTTOM, 1, out, MPI_BOTTOM, 1, in, self, request);
  });
  between_each_other("MPI_Sendrecv", [&](MPI_Datatype out, MPI_Datatype in, MPI_Request*) {
    MPI_Sendrecv(MPI_BOTTOM, 1, out, 0, 7, MPI_BOTTOM, 1, in, 0, 7, self, MPI_STATUS_IGNORE);
  });
}

/// Calls that the MPI refuses make no request, and the handler returns or throws.
void refused(MPI_Comm comm, bool is_thrown) {
  Ints buffer(100);
  MPI_Request before, request;
  std::memset(&before, 0x5c, sizeof before);
  const auto try_one = [&](const char* what, auto&& call) {
    request = before;
    bool has_thrown = false;
    try {
      call();
    } catch (const std::runtime_error&) {
      has_thrown = true;
    }
    CHECK(has_thrown == is_thrown, "%s: thrown %d", what, has_thrown);
  };
  const int nobody = size + 12345;
  try_one("MPI_Irecv", [&] { MPI_Irecv(buffer.data, 100, MPI_INT, nobody, 5, comm, &request); });
  try_one("MPI_Isend", [&] { MPI_Isend(buffer.data, 100, MPI_INT, nobody, 5, comm, &request); });
  try_one("MPI_Recv_init",
          [&] { MPI_Recv_init(buffer.data, 100, MPI_INT, nobody, 5, comm, &request); });
  try_one("MPI_Ibcast", [&] { MPI_Ibcast(buffer.data, 100, MPI_INT, nobody, comm, &request); });
  try_one("no request", [&] { MPI_Irecv(buffer.data, 100, MPI_INT, 0, 5, comm, nullptr); });
  CHECK(buffer.at(99) == -1, "a refused call has written");
}

/// Of two receives, the first one is truncated: the other one's message comes later, or is there.
void one_of_two(MPI_Comm comm, bool is_persistent, bool is_late) {
  constexpr int kCount = 100;
  const std::vector<int> message(kCount, 42);
  const int from = size - 1;  // the receiver's own messages would be there at once
  if (rank == from) {
    MPI_Send(message.data(), kCount, MPI_INT, 0, 1, comm);
    if (is_late) usleep(300000);
    MPI_Send(message.data(), kCount, MPI_INT, 0, 2, comm);
  }
  if (rank == 0) {
    Ints little(kCount), good(kCount);
    MPI_Request requests[2];
    if (is_persistent) {
      MPI_Recv_init(little.data, kCount / 2, MPI_INT, from, 1, comm, &requests[0]);
      MPI_Recv_init(good.data, kCount, MPI_INT, from, 2, comm, &requests[1]);
      MPI_Startall(2, requests);
    } else {
      MPI_Irecv(little.data, kCount / 2, MPI_INT, from, 1, comm, &requests[0]);
      MPI_Irecv(good.data, kCount, MPI_INT, from, 2, comm, &requests[1]);
    }
    usleep(100000);
    MPI_Status statuses[2]{};
    try {
      MPI_Waitall(2, requests, statuses);
    } catch (const std::runtime_error&) {
    }
    // Whether the list, or a later wait, says that it has come: then it is there.
    for (int i = 0; i < 9 && requests[1] != MPI_REQUEST_NULL; ++i) {
      try {
        MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
      } catch (const std::runtime_error&) {
      }
      if (is_persistent) break;
    }
    CHECK(is_persistent || requests[1] == MPI_REQUEST_NULL, "the request does not end");
    CHECK(good.at(0) == 42 && good.at(kCount - 1) == 42, "persistent %d, late %d: %d",
          is_persistent, is_late, good.at(0));
    for (MPI_Request& request : requests)
      if (request != MPI_REQUEST_NULL && is_persistent) MPI_Request_free(&request);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  is_on_host = argc > 1 && std::strcmp(argv[1], "host") == 0;
  if (!is_on_host) skip_without_gpu();
  from_bottom();
  for (const bool is_thrown : {false, true}) {
    MPI_Comm comm = with_handler(is_thrown ? throws : returns);
    refused(comm, is_thrown);
    for (const bool is_late : {false, true}) {
      one_of_two(comm, false, is_late);
      if (!is_thrown) one_of_two(comm, true, is_late);
    }
    without_handler(&comm);
  }
  CHECK(heard > 0, "no error was heard");
  if (rank == 0) std::printf("failures of staged calls checked\n");
  MPI_Finalize();
}

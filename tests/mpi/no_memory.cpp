// SPDX-License-Identifier: BSD-3-Clause
// What happens where the last rank runs out of memory, at every place in turn: it gets an error,
// and so do all others, in that call or in the next. None waits for ever, and none gets a sum of
// contributions that do not belong together. Takes what is to be called as its argument.
#include <mpi.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

constexpr long kPlenty = -2;      // -1: one allocation has failed
std::atomic<long> left{kPlenty};  // allocations until one fails
bool has_failed = false;          // one did

void end_shortage() { has_failed = has_failed || left.exchange(kPlenty) == -1; }

int rank, size;
constexpr int kLong = 1 << 21;

/// `count` ints, of which rank r gives r + `first`.
struct Sum {
  std::vector<int> in, out;
  int expected;
  Sum(int count, int first)
      : in(static_cast<std::size_t>(count), rank + first),
        out(in.size()),
        expected(size * first + size * (size - 1) / 2) {}
  int count() const { return static_cast<int>(in.size()); }
  void check() const {
    for (const int value : out) CHECK(value == expected, "%d, not %d", value, expected);
  }
};

MPI_Comm copy_of_world() {
  MPI_Comm comm = MPI_COMM_NULL;
  if (MPI_Comm_dup(MPI_COMM_WORLD, &comm) != MPI_SUCCESS) return MPI_COMM_NULL;
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

int allreduce(Sum& sum, MPI_Comm comm) {
  const int status =
      MPI_Allreduce(sum.in.data(), sum.out.data(), sum.count(), MPI_INT, MPI_SUM, comm);
  if (status == MPI_SUCCESS) sum.check();
  return status;
}

/// What the last rank does with less memory. Two posts, so that the second could be taken for the
/// first.
int call(const std::string& what, Sum& sum, Sum& next, MPI_Comm comm) {
  if (what == "blocking" || what == "large") return allreduce(sum, comm);
  MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  int status = MPI_SUCCESS;
  if (what == "nonblocking" || what == "waiting") {
    const long most = what == "waiting" ? left.exchange(kPlenty) : kPlenty;
    status = MPI_Iallreduce(sum.in.data(), sum.out.data(), sum.count(), MPI_INT, MPI_SUM, comm,
                            &requests[0]);
    end_shortage();
    const int second = MPI_Iallreduce(next.in.data(), next.out.data(), next.count(), MPI_INT,
                                      MPI_SUM, comm, &requests[1]);
    if (status == MPI_SUCCESS) status = second;
    if (what == "waiting") left = most;
    for (Sum* const its : {&sum, &next}) {
      const int done = MPI_Wait(&requests[its == &next], MPI_STATUS_IGNORE);
      if (done != MPI_SUCCESS)
        status = done;
      else if (status == MPI_SUCCESS)
        its->check();
    }
    return status;
  }
  status = MPI_Allreduce_init(sum.in.data(), sum.out.data(), sum.count(), MPI_INT, MPI_SUM, comm,
                              MPI_INFO_NULL, &requests[0]);
  end_shortage();
  if (status == MPI_SUCCESS) status = MPI_Start(&requests[0]);
  if (status == MPI_SUCCESS) status = MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
  if (status == MPI_SUCCESS) {
    sum.check();
    MPI_Request_free(&requests[0]);
  }
  return status;
}

/// Ranks prepare a communicator for nonblocking reductions or do not, all alike, though the last
/// one's first post on its parent failed.
void check_child(MPI_Comm parent) {
  MPI_Comm child = MPI_COMM_NULL;
  CHECK(MPI_Comm_dup(parent, &child) == MPI_SUCCESS, "a copy of a communicator that failed");
  Sum sum(16, 1000);
  MPI_Request request = MPI_REQUEST_NULL;
  CHECK(MPI_Iallreduce(sum.in.data(), sum.out.data(), sum.count(), MPI_INT, MPI_SUM, child,
                       &request) == MPI_SUCCESS,
        "a copy of a communicator that failed");
  CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "a copy of one that failed");
  sum.check();
  MPI_Comm_free(&child);
}

/// False: the call came to its end before as many allocations.
bool trial(const std::string& what, long allocations) {
  const bool is_set_up = what == "set-up";
  Sum sum(what == "large" ? kLong : 16, 1), next(16, 100);
  MPI_Comm comm = is_set_up ? MPI_COMM_NULL : copy_of_world();
  has_failed = false;
  if (rank == size - 1) left = allocations;
  int status = MPI_SUCCESS;
  if (is_set_up) {
    comm = copy_of_world();
    status = allreduce(sum, comm);  // the first few copies are set up at once, others now
  } else {
    status = call(what, sum, next, comm);
  }
  end_shortage();
  int has_run_out = has_failed;
  MPI_Bcast(&has_run_out, 1, MPI_INT, size - 1, MPI_COMM_WORLD);
  int mine = status != MPI_SUCCESS, all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (all > 0) {  // whoever got off lightly hears of it now
    CHECK(allreduce(next, comm) != MPI_SUCCESS, "%s, %ld: rank %d goes on", what.c_str(),
          allocations, rank);
    // The first child is prepared in any case.
    for (int child = 0; what == "nonblocking" && child < 3; ++child) check_child(comm);
  } else {
    MPI_Comm_free(&comm);
  }
  return has_run_out != 0;
}

}  // namespace

void* operator new(std::size_t bytes) {
  if (left.load() >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
  void* const block = std::malloc(bytes > 0 ? bytes : 1);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }

int main(int argc, char** argv) {
  CHECK(argc == 2, "no case");
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int trials = 0;
  for (long allocations = 0; trial(argv[1], allocations); allocations += 1 + allocations / 5)
    ++trials;
  CHECK(trials > 0 || std::string(argv[1]) == "waiting", "nothing was allocated");
  if (rank == 0) std::printf("%d places tried\n", trials);
  MPI_Finalize();
  return 0;
}

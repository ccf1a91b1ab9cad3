// SPDX-License-Identifier: BSD-3-Clause
// Programs that tolerate faults (ULFM): a communicator that is revoked while ranks reduce on it,
// and one of which a rank dies; what shrinks from it goes on. "revoked", "died" or "died-posted";
// with "cuda" of buffers on GPUs.
#include <signal.h>

#include <chrono>
#include <string>
#include <vector>

#include "gpu.hpp"

namespace {

using Clock = std::chrono::steady_clock;

int revoke(MPI_Comm comm) { return tributary<int(MPI_Comm)>("MPIX_Comm_revoke")(comm); }
int shrink(MPI_Comm comm, MPI_Comm* result) {
  return tributary<int(MPI_Comm, MPI_Comm*)>("MPIX_Comm_shrink")(comm, result);
}
int agree(MPI_Comm comm, int* flag) {
  return tributary<int(MPI_Comm, int*)>("MPIX_Comm_agree")(comm, flag);
}

int rank, size;
constexpr int kCount = 5000;
std::vector<int> values(kCount);
int *in = nullptr, *out = nullptr;
bool is_on_gpu = false;

void copy(int* to, const int* from) {
  if (is_on_gpu)
    Gpu::get().copy(to, from, kCount * sizeof(int));
  else
    std::memcpy(to, from, kCount * sizeof(int));
}

int allreduce(MPI_Comm comm, int count = kCount) {
  return MPI_Allreduce(in, out, count, MPI_INT, MPI_SUM, comm);
}

/// Of all ranks of `comm`.
void expect_sum(MPI_Comm comm, const char* what) {
  int its_rank = 0, its_size = 0;
  MPI_Comm_rank(comm, &its_rank);
  MPI_Comm_size(comm, &its_size);
  for (int i = 0; i < kCount; ++i) values[static_cast<std::size_t>(i)] = i + its_rank;
  copy(in, values.data());
  const int code = allreduce(comm);
  CHECK(code == MPI_SUCCESS, "%s: %s", what, error_text(code).c_str());
  copy(values.data(), out);
  for (int i = 0; i < kCount; ++i)
    CHECK(values[static_cast<std::size_t>(i)] == its_size * i + its_size * (its_size - 1) / 2,
          "%s: element %d", what, i);
  if (is_served_here() && its_size > 1)
    CHECK(last_algorithm(comm) != "mpi", "%s: left to the MPI", what);
}

/// What a rank does on `comm`, which another one revokes meanwhile.
int reduce_by(const std::string& way, MPI_Comm comm) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (way == "blocking") return allreduce(comm);
  if (way == "short") return allreduce(comm, 1);
  if (way == "reduce") return MPI_Reduce(in, out, kCount, MPI_INT, MPI_SUM, 0, comm);
  int code = MPI_Iallreduce(in, out, kCount, MPI_INT, MPI_SUM, comm, &request);
  if (code != MPI_SUCCESS) return code;
  if (way == "wait") return MPI_Wait(&request, MPI_STATUS_IGNORE);
  for (int flag = 0; flag == 0 && code == MPI_SUCCESS;)
    code = MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
  return code;
}

void revoked(const std::string& way) {
  MPI_Comm comm, rest;
  CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm) == MPI_SUCCESS, "");
  expect_sum(comm, "before");
  expect_sum(comm, "before");
  const int revoker = size - 1;
  int code = MPI_SUCCESS;
  const auto start = Clock::now();
  if (rank == revoker) {
    usleep(200000);
    CHECK(revoke(comm) == MPI_SUCCESS, "");
    code = allreduce(comm);
  } else if (rank == 1) {
    // It waits in the MPI, and never comes to the reduction.
    int word = 0;
    code = MPI_Recv(&word, 1, MPI_INT, revoker, 0, comm, MPI_STATUS_IGNORE);
  } else {
    code = reduce_by(way, comm);
    if (way == "reduce" && rank != 0 && code == MPI_SUCCESS)  // which only sends
      for (int i = 0; i < 100 && code == MPI_SUCCESS; ++i) code = reduce_by(way, comm);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  CHECK(error_class(code) == kRevoked, "%s: class %d, %s", way.c_str(), error_class(code),
        error_text(code).c_str());
  CHECK(seconds < 5, "%s: %g s", way.c_str(), seconds);
  code = allreduce(comm);
  CHECK(error_class(code) == kRevoked, "%s, again: class %d, %s", way.c_str(), error_class(code),
        error_text(code).c_str());
  CHECK(shrink(comm, &rest) == MPI_SUCCESS, "");
  MPI_Comm_set_errhandler(rest, MPI_ERRORS_RETURN);
  for (int i = 0; i < 3; ++i) expect_sum(rest, "all that are left");
  MPI_Comm_free(&comm);
  MPI_Comm_free(&rest);
  if (rank == 0) std::printf("revoked, %s: %.3f s\n", way.c_str(), seconds);
}

/// `is_posted`: in nonblocking reductions.
void died(bool is_posted) {
  MPI_Comm comm, rest;
  CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm) == MPI_SUCCESS, "");
  expect_sum(comm, "before");
  expect_sum(comm, "before");
  if (rank == size - 1) {
    usleep(100000);
    raise(SIGKILL);
  }
  const auto start = Clock::now();
  int code = reduce_by(is_posted ? "wait" : "blocking", comm);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  // Whoever noticed first may have revoked it.
  CHECK(error_class(code) == kProcFailed || error_class(code) == kRevoked, "class %d, %s",
        error_class(code), error_text(code).c_str());
  CHECK(seconds < 5, "%g s", seconds);
  const std::string said = error_text(code);
  CHECK(revoke(comm) == MPI_SUCCESS, "");
  code = allreduce(comm);
  CHECK(error_class(code) == kRevoked, "again: class %d, %s", error_class(code),
        error_text(code).c_str());
  code = shrink(comm, &rest);
  CHECK(code == MPI_SUCCESS, "no shrinking: %s", error_text(code).c_str());
  MPI_Comm_set_errhandler(rest, MPI_ERRORS_RETURN);
  int flag = 1, left = 0;
  CHECK(agree(rest, &flag) == MPI_SUCCESS && flag == 1, "");
  MPI_Comm_size(rest, &left);
  CHECK(left == size - 1, "%d ranks are left", left);
  for (int i = 0; i < 3; ++i) expect_sum(rest, "all that are left");
  MPI_Comm_free(&comm);
  MPI_Comm_free(&rest);
  if (rank == 0) std::printf("died: noticed after %.3f s: %s\n", seconds, said.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  const std::string what = argc > 1 ? argv[1] : "revoked";
  is_on_gpu = argc > 2;
  if (is_on_gpu && !Gpu::get().is_here()) {
    std::printf("skipped: no GPU\n");
    MPI_Finalize();
    return 77;
  }
  const auto allocate = [] {
    return static_cast<int*>(is_on_gpu ? Gpu::get().allocate(kCount * sizeof(int))
                                       : std::malloc(kCount * sizeof(int)));
  };
  in = allocate();
  out = allocate();
  if (what == "revoked")
    for (const char* const way : {"wait", "test", "blocking", "short", "reduce"}) revoked(way);
  else
    died(what == "died-posted");
  std::printf("rank %d: faults checked\n", rank);
  std::fflush(stdout);
  MPI_Finalize();
  return 0;
}

// SPDX-License-Identifier: BSD-3-Clause
// Ranks that are bound to two sockets in turn (HWLOC_SYNTHETIC says so of two processors) are
// grouped by them, which shows in the bits of sums; ranks that are not bound, by their numbers.
// For TRIB_ALGORITHM=grouped_two_shot or tree4, and up to 8 ranks.
#include <mpi.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "check.hpp"

namespace {

int rank, size, checked = 0, telling = 0;

/// So different in size that it matters what is added to what.
float value(int of, int i) {
  float scale = 1;
  for (int k = (of * 5 + i * 3) % 8; k > 0; --k) scale *= 10;
  return scale * static_cast<float>((i * 7 + of * 13) % 11 - 5 + 0.3);
}

/// The ranks from `root` on, by group; then one sum after the other.
float folded(int root, int i, const std::function<int(int position, int rank)>& group_of) {
  std::vector<int> groups;
  std::vector<float> sums;
  for (int position = 0; position < size; ++position) {
    const int of = (root + position) % size, group = group_of(position, of);
    std::size_t at = 0;
    while (at < groups.size() && groups[at] != group) ++at;
    if (at < groups.size()) {
      sums[at] += value(of, i);
    } else {
      groups.push_back(group);
      sums.push_back(value(of, i));
    }
  }
  float sum = sums[0];
  for (std::size_t at = 1; at < sums.size(); ++at) sum += sums[at];
  return sum;
}

float expected(bool is_tree, bool is_bound, int root, int i) {
  if (!is_tree) root = 0;
  return folded(root, i, [&](int position, int of) {
    if (is_bound) return of % 2;
    return is_tree ? position / 4 : ((of + 1) * 2 - 1) / size;
  });
}

void compare(const char* what, const std::vector<float>& got, int begin, bool is_tree,
             bool is_bound, int root) {
  for (int i = 0; i < static_cast<int>(got.size()); ++i) {
    const float wanted = expected(is_tree, is_bound, root, begin + i);
    telling += wanted != expected(is_tree, !is_bound, root, begin + i) ? 1 : 0;
    CHECK(std::memcmp(&wanted, &got[static_cast<std::size_t>(i)], sizeof wanted) == 0,
          "%s over %d ranks, root %d, element %d of %zu: %g, expected %g", what, size, root, i,
          got.size(), static_cast<double>(got[static_cast<std::size_t>(i)]),
          static_cast<double>(wanted));
  }
  ++checked;
}

void check_sums(MPI_Comm comm, bool is_tree, bool is_bound) {
  for (const int count : {1, 7, 1000, 50000}) {
    std::vector<float> in, out(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) in.push_back(value(rank, i));
    MPI_Allreduce(in.data(), out.data(), count, MPI_FLOAT, MPI_SUM, comm);
    compare("allreduce", out, 0, is_tree, is_bound, 0);
    for (int root = 0; root < size; ++root) {
      MPI_Reduce(in.data(), out.data(), count, MPI_FLOAT, MPI_SUM, root, comm);
      if (rank == root) compare("reduce", out, 0, is_tree, is_bound, root);
    }
    const int part = count / size;
    std::vector<float> own(static_cast<std::size_t>(part));
    MPI_Reduce_scatter_block(in.data(), own.data(), part, MPI_FLOAT, MPI_SUM, comm);
    compare("reduce_scatter_block", own, rank * part, is_tree, is_bound, 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const char* const algorithm = std::getenv("TRIB_ALGORITHM");
  const bool is_tree = algorithm != nullptr && std::string_view(algorithm) == "tree4";

  // A communicator is set up when it is made, or by its first reduction, where its ranks are bound
  // then.
  cpu_set_t both, one;
  CPU_ZERO(&both);
  CPU_SET(0, &both);
  CPU_SET(1, &both);
  CPU_ZERO(&one);
  CPU_SET(rank % 2, &one);
  cpu_set_t got;
  int can_bind = sched_setaffinity(0, sizeof both, &both) == 0 &&
                         sched_getaffinity(0, sizeof got, &got) == 0 && CPU_EQUAL(&got, &both)
                     ? 1
                     : 0;
  int can_all = 0;
  MPI_Allreduce(&can_bind, &can_all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (can_all == 0) {
    std::printf("skipped: ranks may not run on processors 0 and 1\n");
    MPI_Finalize();
    return 77;
  }
  MPI_Comm bound, unbound;
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
  MPI_Comm_dup(MPI_COMM_WORLD, &bound);
  check_sums(bound, is_tree, true);
  CHECK(sched_setaffinity(0, sizeof both, &both) == 0);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Comm_dup(MPI_COMM_WORLD, &unbound);
  check_sums(unbound, is_tree, false);
  check_sums(bound, is_tree, true);
  CHECK(telling > 0);
  if (rank == 0) std::printf("%d calls checked\n", checked);
  MPI_Comm_free(&bound);
  MPI_Comm_free(&unbound);
  MPI_Finalize();
  return 0;
}

// SPDX-License-Identifier: BSD-3-Clause
#include "bench_world.hpp"

#include <dlfcn.h>
#include <sched.h>

#include <array>
#include <cstring>

namespace trib::bench {

World::World() {
  PMPI_Comm_rank(comm, &rank);
  PMPI_Comm_size(comm, &size);
  cpu_set_t mine;
  CPU_ZERO(&mine);
  sched_getaffinity(0, sizeof mine, &mine);
  MPI_Comm node;
  PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  PMPI_Comm_rank(node, &local_rank);
  PMPI_Comm_size(node, &local_size);
  cpu_set_t all = mine;
  PMPI_Allreduce(&mine, &all, sizeof mine, MPI_BYTE, MPI_BOR, node);
  cores = CPU_COUNT(&all);
  PMPI_Comm_free(&node);
  const int is_mine_oversubscribed = local_size > cores;
  int is_any = 0;
  PMPI_Allreduce(&is_mine_oversubscribed, &is_any, 1, MPI_INT, MPI_MAX, comm);
  is_oversubscribed = is_any != 0;
  has_one_clock = local_size == size;  // on all ranks, if on any
}

/// Where ranks share cores, waiting inside the MPI may cost a scheduler tick per message: test and
/// yield instead.
void World::complete(MPI_Request& request) const {
  int done = 0;
  while (PMPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) sched_yield();
}

void World::barrier() const {
  if (!is_oversubscribed) {
    PMPI_Barrier(comm);
    return;
  }
  MPI_Request request;
  PMPI_Ibarrier(comm, &request);
  complete(request);
}

double World::latest(double time) const {
  double latest = time;
  PMPI_Allreduce(&time, &latest, 1, MPI_DOUBLE, MPI_MAX, comm);
  return latest;
}

void World::combine(std::vector<double>& values, MPI_Op op) const {
  MPI_Request request;
  std::vector<double> all(values.size());
  PMPI_Iallreduce(values.data(), all.data(), static_cast<int>(values.size()), MPI_DOUBLE, op, comm,
                  &request);
  complete(request);
  values.swap(all);
}

void World::broadcast(void* data, std::size_t bytes, int root) const {
  PMPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, root, comm);
}

int World::gather(const void* mine, void* all, std::size_t bytes) const {
  const int count = static_cast<int>(bytes);
  return PMPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, comm);
}

void World::agree(const std::string& problem) const {
  const int mine = problem.empty() ? size : rank;
  int first = size;
  PMPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, comm);
  if (first == size) return;
  std::array<char, 1024> text{};
  std::strncpy(text.data(), problem.c_str(), text.size() - 1);
  broadcast(text.data(), text.size(), first);
  throw SetupFailed(text.data() + (first ? " (rank " + std::to_string(first) + ")" : ""));
}

std::string file_of(const char* symbol) {
  Dl_info info;
  void* address = dlsym(RTLD_DEFAULT, symbol);
  return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

}  // namespace trib::bench

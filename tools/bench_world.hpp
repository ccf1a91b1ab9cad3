// SPDX-License-Identifier: BSD-3-Clause
// The ranks of the job, and what the benchmark asks of MPI for itself: all of it by PMPI_, so that
// nothing but the measured calls reaches Tributary. The only file of the benchmark that includes
// an MPI header.
#pragma once

#ifdef TRIB_STANDARD_ABI
#include <mpi_abi.h>
#else
#include <mpi.h>
#endif

#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace trib::bench {

/// Something is missing or wrong, found before measuring; thrown by all ranks alike, so that the
/// job can end in order.
struct SetupFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class World {
 public:
  World();

  const MPI_Comm comm = MPI_COMM_WORLD;
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  ///< on this node
  int cores = 1;                       ///< that the node's ranks may use together
  bool is_oversubscribed = false;      ///< more ranks than cores, on any node
  bool has_one_clock = false;          ///< all ranks are on one node

  void barrier() const;
  /// The latest of all ranks' times. Ranks leave it one after the other, as they leave a barrier.
  double latest(double time) const;
  /// Every value becomes its reduction over all ranks.
  void combine(std::vector<double>& values, MPI_Op op) const;
  void broadcast(void* data, std::size_t bytes, int root) const;
  /// `all` receives `bytes` of each rank. Returns MPI's error code.
  int gather(const void* mine, void* all, std::size_t bytes) const;

  /// A step of the set-up: if it throws on some rank, SetupFailed is thrown on all.
  template <class Step>
  void together(Step&& step) const {
    std::string problem;
    try {
      step();
    } catch (const std::exception& error) {
      problem = error.what();
      if (problem.empty()) problem = "unknown error";
    }
    agree(problem);
  }

 private:
  void complete(MPI_Request& request) const;
  void agree(const std::string& problem) const;
};

/// The file that defines a symbol; "" if nothing does.
std::string file_of(const char* symbol);

}  // namespace trib::bench

// SPDX-License-Identifier: BSD-3-Clause
// What the core needs from its host program, over PMPI_ functions on the user's own communicator:
// duplicating it would run the user's attribute callbacks.
#pragma once

#include "base/bootstrap.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

class MpiBootstrap : public Bootstrap {
 public:
  MpiBootstrap(MPI_Comm comm, int rank, int size, double timeout)
      : comm_(comm), rank_(rank), size_(size), timeout_(timeout) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const void* mine, void* all, std::size_t bytes) override;
  void progress() override;
  /// The program frees its communicator: from here on only progress() may be called.
  void detach() { comm_ = MPI_COMM_NULL; }

 private:
  bool wait(MPI_Request& request) const;

  MPI_Comm comm_;
  int rank_, size_;
  double timeout_;  // seconds, 0: none
};

/// While one is there, this thread waits for requests. Other threads may free their communicators
/// meanwhile, so that progress() keeps away from these.
class WithoutCommunicator {
 public:
  WithoutCommunicator();
  ~WithoutCommunicator();
  WithoutCommunicator(const WithoutCommunicator&) = delete;
  WithoutCommunicator& operator=(const WithoutCommunicator&) = delete;

 private:
  const bool before_;
};

/// Waits for `request` in our own loop: MPICH's, with more ranks than cores, burns a scheduler tick
/// per message. False: not done within `timeout` seconds (0: for ever); the request then stays
/// active.
bool wait_for(MPI_Request& request, double timeout);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// What the core needs from its host program, over PMPI_ functions on the user's own communicator:
// duplicating it would run the user's attribute callbacks.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/bootstrap.hpp"
#include "base/error.hpp"
#include "base/process.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// What exchange() throws: whatever it was, the other ranks need not be told.
class ExchangeFailed : public Error {
 public:
  using Error::Error;
};

/// How its ranks exchange.
enum class Exchanges {
  nonblocking,  ///< with a look at who is alive and at the time limit
  /// Open MPI counts nonblocking collectives of a communicator to tell their messages apart, those
  /// too that its MPI_Comm_idup makes when something of it is done: ranks that make one meanwhile
  /// count differently.
  blocking
};

/// Until end_set_up() ranks tell each other at the beginning of each exchange that they are well. A
/// rank that fails where the others go on says so by tell_failure(), once, in place of its next
/// one.
class MpiBootstrap : public Bootstrap {
 public:
  MpiBootstrap(MPI_Comm comm, int rank, int size, double timeout, Exchanges exchanges);

  /// Collective: the last occasion for tell_failure(). Throws ExchangeFailed.
  void end_set_up();
  /// Of a rank of `comm`, which others set up.
  static void tell_failure(MPI_Comm comm, Exchanges exchanges) noexcept;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const void* mine, void* all, std::size_t bytes) override;
  void watch(std::function<void()> look) override { look_ = std::move(look); }
  void progress() override;
  /// The same on all ranks.
  void exchange_by(Exchanges exchanges) { exchanges_ = exchanges; }
  /// Says which process is which rank: exchange() looks from then on whether all live, and gives up
  /// if one does not. Those of MPI_COMM_WORLD are known in all communicators made later.
  void know(std::vector<ProcessId> processes);

  /// The program frees its communicator: from here on only progress() may be called.
  void detach() noexcept { comm_ = MPI_COMM_NULL; }
  /// Before that, if requests of the communicator are left over: keeps what their errors need.
  void keep_errhandler() noexcept;
  /// MPI_COMM_NULL: detached.
  MPI_Comm comm() const { return comm_.load(std::memory_order_relaxed); }
  /// By keep_errhandler(): it had MPI_ERRORS_RETURN.
  bool has_returned_errors() const { return has_returned_errors_; }

 private:
  using Buffers = std::unique_ptr<std::vector<char>>;
  void gather(Buffers& buffers, const char* mine, char* all, std::size_t bytes) const;
  void gather_frames(Buffers& buffers) const;
  bool wait(MPI_Request& request) const;
  void find_in_world();

  std::atomic<MPI_Comm> comm_;
  int rank_, size_;
  double timeout_;  // seconds, 0: none
  Exchanges exchanges_;
  bool is_set_up_ = false;
  std::function<void()> look_;        // watch()'s
  std::vector<ProcessId> processes_;  // empty: not known
  bool has_returned_errors_ = false;
};

/// At the end of MPI: the processes of its world are not known any more.
void forget_world() noexcept;

/// Allgather of `bytes` in MPI_COMM_WORLD, which is set up, without a time limit: for the end of
/// MPI. Throws Error once one of its processes is gone.
void gather_in_world(const void* mine, void* all, int bytes, Exchanges exchanges);

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
/// active, as it does if `look`, called every now and then, throws.
bool wait_for(MPI_Request& request, double timeout, const std::function<void()>& look = {});

}  // namespace trib::mpi

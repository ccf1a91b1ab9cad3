// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/bootstrap.hpp"

#include <sched.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/background.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/liveness.hpp"

namespace trib::mpi {

namespace {
// A word of a library that is there from the start needs no call to find it.
[[gnu::tls_model("initial-exec")]] constinit thread_local bool is_without_communicator = false;
}  // namespace

WithoutCommunicator::WithoutCommunicator() : before_(is_without_communicator) {
  is_without_communicator = true;
}

WithoutCommunicator::~WithoutCommunicator() { is_without_communicator = before_; }

bool wait_for(MPI_Request& request, double timeout) {
  using Clock = std::chrono::steady_clock;
  const Library& mpi = library();
  const auto start = Clock::now();
  for (;;) {
    int done = 0;
    check(mpi.Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) return true;
    Background::progress_all();  // a rank that we wait for may be waiting for one of our tasks
    sched_yield();
    if (timeout > 0 && std::chrono::duration<double>(Clock::now() - start).count() > timeout)
      return false;
  }
}

bool MpiBootstrap::wait(MPI_Request& request) const {
  // Elsewhere a rank may well be late.
  constexpr double kPatience = 5;  // seconds
  if (!is_init_under_way() || (timeout_ > 0 && timeout_ <= kPatience))
    return wait_for(request, timeout_);
  if (wait_for(request, kPatience)) return true;
  log_once(Config::Log::warn,
           "MPI_Init waits for ranks that do not come to set up Tributary: it must be preloaded on "
           "all ranks of a job, or on none");
  return wait_for(request, timeout_ > 0 ? timeout_ - kPatience : 0);
}

void MpiBootstrap::exchange(const void* mine, void* all, std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > INT_MAX) throw Error(Code::internal, "exchange: too many bytes for one MPI call");
  // The MPI works on copies: after a time-out it may still write to them, and then they are left to
  // it.
  const std::size_t size = static_cast<std::size_t>(size_);
  auto buffers = std::make_unique<std::vector<char>>((size + 1) * bytes);
  std::memcpy(buffers->data(), mine, bytes);
  char* const received = buffers->data() + bytes;
  MPI_Request request;
  check(library().Iallgather(buffers->data(), static_cast<int>(bytes), MPI_BYTE, received,
                             static_cast<int>(bytes), MPI_BYTE, comm_, &request),
        "MPI_Iallgather");
  if (!wait(request)) {
    static_cast<void>(buffers.release());
    throw Error(Code::timeout, "setting up the communicator: not all ranks arrived within " +
                                   std::to_string(timeout_) + " s (TRIB_TIMEOUT)");
  }
  std::memcpy(all, received, size * bytes);
}

void MpiBootstrap::progress() {
  if (keep_mpi_alive()) [[likely]]
    return;
  if (!is_without_communicator && comm_ != MPI_COMM_NULL) look_into(comm_, rank_, size_);
}

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/lifetime.hpp"

#include <cstdlib>
#include <exception>
#include <functional>
#include <string>

#include "base/log.hpp"
#include "mpi/communicators.hpp"
#include "mpi/judge.hpp"
#include "mpi/layouts.hpp"
#include "mpi/library.hpp"
#include "mpi/liveness.hpp"
#include "mpi/requests.hpp"
#include "mpi/small_floats.hpp"
#include "mpi/staged_requests.hpp"
#include "mpi/staging.hpp"
#include "mpi/stats.hpp"

namespace trib::mpi {

std::atomic<int> open_sessions;
std::atomic<bool> is_begun_in_fortran;

namespace {

// Fortran's MPI_Init and MPI_Finalize may call C's, and both are ours.
std::atomic<int> init_depth, finalize_depth;

// In Intel MPI 2021.18 MPI_Initialized is true once a session was opened. It then has no world.
std::atomic<bool> is_initialized_by_session;

// Its number of ranks is the program's choice, not the one that trib run was asked for.
bool is_spawned() {
  MPI_Comm parent = MPI_COMM_NULL;
  return library().Comm_get_parent(&parent) == MPI_SUCCESS && parent != MPI_COMM_NULL;
}

bool is_initialized() {
  int result = 0;
  library().Initialized(&result);
  return result != 0;
}

void end_of_mpi(bool is_world) noexcept {
  try {
    if (settings_of_process().stats) print_stats(is_world);
  } catch (const std::exception& error) {
    log_once(Config::Log::error, error.what());
  }
  free_small_floats();
  forget_layouts();
}

}  // namespace

bool is_world_running() {
  int is_finalized = 0;
  library().Finalized(&is_finalized);
  return is_initialized() && !is_finalized && !is_initialized_by_session;
}

namespace {

void warn_if_alone() {
  int size = 0;
  if (is_asked_for_many_ranks() && library().is_ours && is_world_running() &&
      library().Comm_size(MPI_COMM_WORLD, &size) == MPI_SUCCESS && size == 1 && !is_spawned())
    log_once(Config::Log::warn,
             "trib run was asked for TRIB_N=" + std::string(std::getenv("TRIB_N")) +
                 " ranks, but this is a job of one: the launcher does not fit the program's MPI");
}

}  // namespace

bool is_init_under_way() { return init_depth.load(std::memory_order_relaxed) > 0; }

void begin_init() noexcept { ++init_depth; }

// So that nonblocking reductions, which may not wait for other ranks, find everything ready.
void end_init(bool is_success) noexcept {
  if (is_success && init_depth == 1) {
    warn_if_alone();
    if (library().is_ours && is_world_running()) watch_self();
    begin_world();
  }
  --init_depth;
}

void begin_finalize() noexcept {
  if (finalize_depth++ > 0) return;
  if (!library().is_ours || !is_world_running()) return;
  end_staged(/*are_all=*/open_sessions == 0);
  end_requests();
  end_keeping_mpi_alive();
  end_judging();
  end_of_mpi(/*is_world=*/true);
}

// After the MPI's part: callbacks of the program that run in it may still reduce. Communicators of
// sessions that are open stay, as other ranks may use them at a different time, and so do requests.
void end_finalize() noexcept {
  if (--finalize_depth > 0) return;
  if (!library().is_ours) return;
  forget_requests();
  if (open_sessions == 0) free_members();
}

int init_session(const std::function<int()>& original) {
  if (!library().is_ours) return original();
  const bool was_initialized = is_initialized();
  const int status = original();
  if (status != MPI_SUCCESS) return status;
  ++open_sessions;
  if (!was_initialized && is_initialized()) is_initialized_by_session = true;
  return status;
}

void begin_finalize_session() noexcept {
  if (!library().is_ours || open_sessions != 1 || is_world_running()) return;
  end_staged(/*are_all=*/true);
  end_of_mpi(/*is_world=*/false);
}

void end_finalize_session() noexcept {
  if (!library().is_ours) return;
  if (--open_sessions > 0 || is_world_running()) return;
  forget_requests();
  free_members();
}

}  // namespace trib::mpi

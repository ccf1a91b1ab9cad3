// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/lifetime.hpp"

#include <exception>
#include <string>

#include "base/log.hpp"
#include "mpi/communicators.hpp"
#include "mpi/library.hpp"
#include "mpi/small_floats.hpp"
#include "mpi/stats.hpp"

namespace trib::mpi {

std::atomic<int> open_sessions;

namespace {

// Fortran's MPI_Finalize may call C's, and both are ours.
std::atomic<int> finalize_depth;

void end_of_mpi(bool is_world) noexcept {
  try {
    if (settings_of_process().stats) print_stats(is_world);
  } catch (const std::exception& error) {
    log_once(Config::Log::error, error.what());
  }
  free_small_floats();
}

}  // namespace

bool is_world_running() {
  int is_initialized = 0, is_finalized = 0;
  library().Initialized(&is_initialized);
  library().Finalized(&is_finalized);
  return is_initialized && !is_finalized;
}

void begin_finalize() noexcept {
  if (finalize_depth++ > 0) return;
  if (library().is_ours && is_world_running()) end_of_mpi(/*is_world=*/true);
}

// After the MPI's part: callbacks of the program that run in it may still reduce. Communicators of sessions that are
// open stay, as other ranks may use them at a different time.
void end_finalize() noexcept {
  if (--finalize_depth > 0) return;
  if (library().is_ours && open_sessions == 0) free_members();
}

void begin_finalize_session() noexcept {
  if (library().is_ours && open_sessions == 1 && !is_world_running()) end_of_mpi(/*is_world=*/false);
}

void end_finalize_session() noexcept {
  if (!library().is_ours) return;
  if (--open_sessions == 0 && !is_world_running()) free_members();
}

}  // namespace trib::mpi

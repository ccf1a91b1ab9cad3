// SPDX-License-Identifier: BSD-3-Clause
// When MPI is there: between MPI_Init and MPI_Finalize, or while a session is open.
#pragma once

#include <atomic>
#include <functional>

namespace trib::mpi {

extern std::atomic<int> open_sessions;

/// MPI_COMM_WORLD can be used.
bool is_world_running();

/// MPI_Session_init, with `original` for the MPI's own.
int init_session(const std::function<int()>& original);

/// MPI_Init is under way, ours included: no rank is late in it.
bool is_init_under_way();
/// MPI_Init was called by a Fortran function that goes past C's. Others of that kind do, too.
extern std::atomic<bool> is_begun_in_fortran;

/// What there is to do before and after the MPI's own MPI_Init.
void begin_init() noexcept;
void end_init(bool is_success) noexcept;

template <class Original>
int init(Original original) {
  begin_init();
  const int status = original();
  end_init(status == 0);
  return status;
}

/// What there is to do before and after the MPI's own MPI_Finalize.
void begin_finalize() noexcept;
void end_finalize() noexcept;
void begin_finalize_session() noexcept;
void end_finalize_session() noexcept;

template <class Original>
int finalize(Original original) {
  begin_finalize();
  const int status = original();
  end_finalize();
  return status;
}

template <class Original>
int finalize_session(Original original) {
  begin_finalize_session();
  const int status = original();
  end_finalize_session();
  return status;
}

}  // namespace trib::mpi

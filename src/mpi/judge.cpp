// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/judge.hpp"

#include <array>
#include <mutex>

#include "mpi/immortal.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"

namespace trib::mpi {
namespace {

struct State {
  std::mutex mutex;  // one thread at a time may reduce on a communicator
  bool is_there = false, is_over = false;
  MPI_Comm comm{};          // if it is there
  Word dtype = 0, op = 0;   // that were not refused the last time; or zero
  unsigned generation = 0;  // of handles, at that time
};
constinit Immortal<State> state;

/// Errors on it, and in making it, are returned, whatever handlers the program has given its own
/// communicators.
bool is_ready() {
  if (state->is_there || state->is_over || !is_world_running()) return state->is_there;
  const Library& mpi = library();
  MPI_Errhandler programs{};
  if (mpi.Comm_get_errhandler(MPI_COMM_SELF, &programs) != MPI_SUCCESS) return false;
  mpi.Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  state->is_there = mpi.Comm_split(MPI_COMM_SELF, 0, 0, &state->comm) == MPI_SUCCESS &&
                    mpi.Comm_set_errhandler(state->comm, MPI_ERRORS_RETURN) == MPI_SUCCESS;
  mpi.Comm_set_errhandler(MPI_COMM_SELF, programs);
  mpi.Errhandler_free(&programs);
  state->is_over = !state->is_there;  // the program may have all that there can be
  return state->is_there;
}

}  // namespace

std::atomic<unsigned> handles_freed{0};

bool is_refused(MPI_Datatype dtype, MPI_Op op) noexcept {
  const std::lock_guard lock(state->mutex);
  const unsigned generation = handles_freed.load(std::memory_order_relaxed);
  if (state->generation == generation && state->dtype == to_word(dtype) && state->op == to_word(op))
    return false;
  if (!is_ready()) return false;
  alignas(64) std::array<char, 64> in{}, out{};  // no MPI likes null here
  const bool is_refused =
      library().call(Entry::Allreduce, to_word(in.data()), to_word(out.data()), Word{0},
                     to_word(dtype), to_word(op), to_word(state->comm)) != MPI_SUCCESS;
  if (!is_refused) {
    state->generation = generation;
    state->dtype = to_word(dtype);
    state->op = to_word(op);
  }
  return is_refused;
}

void end_judging() noexcept {
  const std::lock_guard lock(state->mutex);
  state->is_over = true;
  if (state->is_there) library().Comm_free(&state->comm);
  state->is_there = false;
}

}  // namespace trib::mpi

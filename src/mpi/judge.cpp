// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/judge.hpp"

#include <algorithm>
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
  MPI_Comm comm{};  // if it is there
};
constinit Immortal<State> state;

/// Errors on it are returned, whatever handlers the program has given its own communicators.
bool is_ready() {
  if (state->is_there || state->is_over || !is_world_running()) return state->is_there;
  const Library& mpi = library();
  state->is_there = mpi.Comm_split(MPI_COMM_SELF, 0, 0, &state->comm) == MPI_SUCCESS &&
                    mpi.Comm_set_errhandler(state->comm, MPI_ERRORS_RETURN) == MPI_SUCCESS;
  return state->is_there;
}

}  // namespace

bool is_refused(MPI_Datatype dtype, MPI_Op op) noexcept {
  const std::lock_guard lock(state->mutex);
  if (!is_ready()) return false;
  alignas(64) std::array<char, 64> in{}, out{};  // no MPI likes null here
  return library().call(Entry::Allreduce, to_word(in.data()), to_word(out.data()), Word{0},
                        to_word(dtype), to_word(op), to_word(state->comm)) != MPI_SUCCESS;
}

bool is_refusal(int code) noexcept {
  if (code == MPI_SUCCESS) return false;
  int error_class = code;
  library().Error_class(code, &error_class);
  const int refusals[] = {MPI_ERR_BUFFER, MPI_ERR_COUNT, MPI_ERR_TYPE,  MPI_ERR_COMM, MPI_ERR_RANK,
                          MPI_ERR_ROOT,   MPI_ERR_OP,    MPI_ERR_GROUP, MPI_ERR_ARG};
  return std::ranges::find(refusals, error_class) != std::end(refusals);
}

void end_judging() noexcept {
  const std::lock_guard lock(state->mutex);
  state->is_over = true;
  if (state->is_there) library().Comm_free(&state->comm);
  state->is_there = false;
}

}  // namespace trib::mpi

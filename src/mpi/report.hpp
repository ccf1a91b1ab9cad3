// SPDX-License-Identifier: BSD-3-Clause
// Failures become MPI errors here.
#pragma once

#include <exception>

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// An error code whose text is the error's.
int code_of(const std::exception& error) noexcept;

/// Calls the error handler of `comm` with a code whose text is the error's. Returns the code,
/// unless the handler throws: programs in C++ do. `is_in_mpi`: the error, which has just been
/// caught, came out of a call of the MPI. Where it is not ours, such a handler has thrown it, and
/// it goes on.
int raise(MPI_Comm comm, const std::exception& error, bool is_in_mpi = false);

/// `call()` of the MPI; `is_in_mpi` meanwhile.
template <class Call>
int in_mpi(bool& is_in_mpi, const Call& call) {
  is_in_mpi = true;
  const int status = call();
  is_in_mpi = false;
  return status;
}

}  // namespace trib::mpi

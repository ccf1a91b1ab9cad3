// SPDX-License-Identifier: BSD-3-Clause
// Failures become MPI errors here.
#pragma once

#include <exception>

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// Calls the error handler of `comm` with a code whose text is the error's. Returns the code.
int raise(MPI_Comm comm, const std::exception& error) noexcept;

}  // namespace trib::mpi

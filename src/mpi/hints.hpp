// SPDX-License-Identifier: BSD-3-Clause
// Info keys of MPI_Allreduce_init and its like.
#pragma once

#include "comm/tuner.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// trib_tune: "on", "off", "again" or milliseconds. trib_algorithm: "default" or the name of an
/// algorithm, with the bytes of a slice behind it if need be: "two_shot:65536".
/// A value that is not accepted is reported once and counts as absent, as MPI wants it.
Hints read_hints(MPI_Info info);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// Info keys of MPI_Allreduce_init and its like.
#pragma once

#include "comm/tuner.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// trib_tune: "on", "off", "again" or milliseconds. trib_algorithm: "default" or the name of an
/// algorithm, with more behind it if need be: see read_way().
/// A value that is not accepted is reported once and counts as absent, as MPI wants it.
Hints read_hints(MPI_Info info);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// From MPI handles and arguments to a Request, or the reason why a call is left to the MPI.
#pragma once

#include <atomic>
#include <optional>

#include "comm/communicator.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// The arguments of one intercepted call, as they came.
struct Call {
  Collective collective;
  const void* in;
  void* out;
  Word count;  ///< of elements; reduce_scatter: the address of recvcounts
  int width;   ///< bytes of a count: 4, or 8 in the large-count forms
  MPI_Datatype dtype;
  MPI_Op op;
  int root;
  MPI_Comm comm;
  Form form = Form::blocking;
  MPI_Info info = MPI_INFO_NULL;  ///< persistent

  bool operator==(const Call&) const = default;
  /// No rank can leave it before all have come; for all that is known without a look at counts.
  bool is_meeting_of_all() const {
    return (collective == Collective::allreduce ||
            collective == Collective::reduce_scatter_block) &&
           count > 0;
  }
};

/// Whether the MPI does not mind that the buffers are one. (Open MPI, but from the root of a
/// Reduce.)
inline bool is_aliasing_taken(const Call& call) {
#if TRIB_MPI_OPENMPI
  return call.in == call.out && call.collective != Collective::reduce;
#else
  return static_cast<void>(call), false;
#endif
}

/// Builds the tables of handles. Idempotent, any thread.
void prepare_tables();

/// Whether it is MPI_DATATYPE_NULL.
bool is_null(MPI_Datatype type);

/// Changes when handles come to mean something else.
extern std::atomic<unsigned> generation_of_types;

/// Fills `request`; or returns why not. Looks at nothing but its arguments and the tables.
std::optional<Decline> translate(const Call& call, int rank, int size, Request& request);

/// The types of trib_mpi_type(), which no MPI can reduce by itself: a call with one of them that is
/// left to the MPI takes this operator. Any other call: its own.
MPI_Op operator_for_mpi(const Call& call);

}  // namespace trib::mpi

// SPDX-License-Identifier: BSD-3-Clause
// Persistent reductions that are left to an MPI which has none (MPI 3): each start makes the MPI's
// nonblocking call. handles.hpp has them behind the handles of the program, and
// tributary/mpi_persistent.h declares the functions that such an MPI's header lacks.
#pragma once

#include <vector>

#include "mpi/library.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

class Emulation {
 public:
  /// Collective. Throws Error.
  explicit Emulation(const Call& call);
  ~Emulation();
  Emulation(const Emulation&) = delete;
  Emulation& operator=(const Emulation&) = delete;

  /// Has the MPI judge the arguments, in a reduction of nothing, and makes what start() needs.
  /// Collective. The MPI's error code; it has called the error handler. Throws Error on all other
  /// ranks where one is not ready.
  int prepare(bool is_ready);
  int start() { return post(&request); }

  MPI_Request request = MPI_REQUEST_NULL;  ///< null: inactive

 private:
  int post(MPI_Request* posted);

  Call call_;
  std::vector<int> counts_;        // of reduce_scatter: the program may change its own
  MPI_Comm comm_ = MPI_COMM_NULL;  // ours: starts may come in another order on every rank
};

/// MPI lets programs free what their requests still need. True: a type or an operator that a
/// request here needs, which will be freed with the last of them.
bool put_off_free(Word handle);

}  // namespace trib::mpi

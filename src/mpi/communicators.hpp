// SPDX-License-Identifier: BSD-3-Clause
// From MPI communicators to what Tributary keeps for them. Made at the first reduction on a
// communicator, gone when the program frees it.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/staging.hpp"
#include "mpi/handle_map.hpp"
#include "mpi/immortal.hpp"
#include "mpi/mpi_header.hpp"

namespace trib::mpi {

struct Member {
  int rank = 0, size = 0;
  std::unique_ptr<Communicator> communicator;  ///< null where `declined` or `failure` is set
  std::optional<Decline> declined;             ///< nothing is served here
  std::string failure;                         ///< setting it up went wrong
  bool was_left_to_mpi = false;                ///< the last call
  StagingBuffer staging_in, staging_out;       ///< of calls left to the MPI: staging.hpp
};

extern constinit Immortal<HandleMap> members;

/// Null: not seen before, or freed since. What is on the path of every call.
inline Member* find_member(MPI_Comm comm) {
  return reinterpret_cast<Member*>(members->find(to_word(comm)));
}

/// Collective over `comm`, which was not seen before. Null: MPI is not running, or `comm` is no
/// communicator, so that the MPI has to say so.
Member* make_member(MPI_Comm comm);

/// At the end of MPI.
void free_members();

/// Settings, read once. Throws Error each time if one is wrong.
const Config& settings_of_process();

}  // namespace trib::mpi

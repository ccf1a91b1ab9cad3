// SPDX-License-Identifier: BSD-3-Clause
// MPI_Bcast, MPI_Allgather and MPI_Allgatherv of GPU buffers. On communicators whose reductions
// kernels serve, kernels move these as well, from GPU to GPU, instead of the MPI with copies in
// host memory. Ranks meet for it as for a reduction: each may have its buffer elsewhere.
#pragma once

#include <optional>
#include <span>

#include "mpi/communicators.hpp"
#include "mpi/library.hpp"
#include "mpi/prototypes.hpp"

namespace trib::mpi {

/// The functions that kernels may serve. What ranks need to know of each other for it, see
/// which_copy(), has their names, too.
constexpr bool may_be_copied(Entry entry) {
  return entry == Entry::Bcast || entry == Entry::Bcast_c || entry == Entry::Allgather ||
         entry == Entry::Allgather_c || entry == Entry::Allgatherv || entry == Entry::Allgatherv_c;
}

/// As serve_copy(), on a communicator where kernels may serve it.
std::optional<int> serve_copy_here(MPI_Comm comm, const Member& member, const Prototype& prototype,
                                   int width, std::span<const Word> words);

/// What a call of one of these returns that kernels have served. Nothing: it is the MPI's,
/// on all ranks alike.
inline std::optional<int> serve_copy(const Prototype& prototype, int width,
                                     std::span<const Word> words) {
  const auto comm = from_word<MPI_Comm>(words[prototype.communicator()]);
  const Member* const member = find_member(comm);
  if (!member || !member->communicator || !member->communicator->serves_copies() ||
      member->has_split_copies) [[likely]]
    return {};
  return serve_copy_here(comm, *member, prototype, width, words);
}

}  // namespace trib::mpi

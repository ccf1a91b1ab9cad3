// SPDX-License-Identifier: BSD-3-Clause
// The path of one call, for C (intercept.cpp) and Fortran (fortran.cpp).
#pragma once

#include "base/error.hpp"
#include "mpi/communicators.hpp"
#include "mpi/report.hpp"
#include "mpi/staging.hpp"
#include "mpi/stats.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

/// The call is left to the MPI. Peers that do not leave theirs get an error instead of waiting.
template <class Original>
int leave_to_mpi(const Call& call, Member& member, Decline reason, const Original& original) {
  if (!member.declined) {
    check_usable(member);
    member.communicator->note_declined(call.collective, call.root, call.form, reason);
  }
  member.was_left_to_mpi = true;
  count_declined(reason);
  Call passed = call;
  passed.op = operator_for_mpi(call);
  if (reason == Decline::disabled) return original(passed);
  return with_buffers_on_host(passed, nullptr, original);
}

/// `original(passed)` makes the call in the MPI, with the buffers and the operator of `passed`.
template <class Original>
int intercept(const Call& call, Original original) {
  bool is_in_mpi = false;
  const auto mpis = [&](const Call& passed) {
    return in_mpi(is_in_mpi, [&] { return original(passed); });
  };
  try {
    Member* member = find_member(call.comm);
    if (!member || member->declined || member->wants_to_settle) [[unlikely]] {
      member = make_member(call.comm);
      if (!member) return mpis(call);  // the MPI says what is wrong
      if (member->wants_to_settle) prepare_background(*member, call.is_meeting_of_all());
      if (member->declined) return leave_to_mpi(call, *member, *member->declined, mpis);
    }
    check_set_up(*member);
    const unsigned generation = generation_of_types.load(std::memory_order_relaxed);
    if (member->last_generation != generation || !(call == member->last_call)) {
      Request request;
      member->last_generation = 0;
      if (const auto reason = translate(call, member->rank, member->size, request)) [[unlikely]]
        return leave_to_mpi(call, *member, *reason, mpis);
      member->last_request = request;
      member->last_call = call;
      // The content of recvcounts may change.
      if (call.collective != Collective::reduce_scatter) member->last_generation = generation;
      member->was_left_to_mpi = false;
    }
    member->communicator->run(member->last_request);
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    // Peers may be waiting for us: too late to fall back.
    return raise(call.comm, error, is_in_mpi);
  }
}

}  // namespace trib::mpi

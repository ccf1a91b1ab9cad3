// SPDX-License-Identifier: BSD-3-Clause
// The path of one call, for C (intercept.cpp) and Fortran (fortran.cpp).
#pragma once

#include "base/error.hpp"
#include "mpi/communicators.hpp"
#include "mpi/judge.hpp"
#include "mpi/report.hpp"
#include "mpi/staging.hpp"
#include "mpi/stats.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

/// A call that the MPI refuses was none: this rank gets its error, and the others, who may not have
/// made one, go on.
inline bool may_be_refused(const Call& call, Decline reason) {
  switch (reason) {
    case Decline::bad_argument:
      return !is_aliasing_taken(call);
    case Decline::undefined_op:
    case Decline::derived_type:
    case Decline::user_operator:
      return is_refused(call.dtype, operator_for_mpi(call));
    default:
      return false;
  }
}

/// Whether the MPI has refused a call that was left to it and returned `status`.
inline bool was_refused(const Call& call, Decline reason, int status) {
  return status != MPI_SUCCESS || (may_hide_refusals(call.comm) && may_be_refused(call, reason));
}

/// Why a call on a communicator that is not set up yet is the MPI's, without ranks meeting to set
/// it up. Where arguments are wrong the others may not come. And in a blocking Reduce ranks need
/// not wait for each other: there are programs in which they must not, where the root first awaits
/// a message that another rank sends behind its call. Not so where the MPI has no such Reduce,
/// which few have of half-precision floats.
inline std::optional<Decline> decline_before_set_up(const Call& call, const Member& member) {
  Request request;
  const auto reason = translate(call, member.rank, member.size, request);
  if (reason && may_be_refused(call, *reason)) return reason;
  if (call.collective != Collective::reduce || call.form != Form::blocking) return std::nullopt;
  if (reason) return reason;
  const bool is_small_float = request.dtype >= Dtype::f16 && request.dtype <= Dtype::f8e5m2;
  if (is_small_float || is_refused(call.dtype, operator_for_mpi(call))) return std::nullopt;
  return Decline::not_set_up;
}

/// Makes a call that is declined in the MPI, by `original()`, and shows peers that by `announce()`:
/// before, as the MPI may wait for them, unless it may refuse.
template <class Announce, class Original>
int announced(const Call& call, Decline reason, const Announce& announce,
              const Original& original) {
  const bool is_judged_first = may_be_refused(call, reason);
  if (!is_judged_first) announce();
  const int status = original();
  // Of other reasons it is known that the MPI refuses them. See kUnwritten.
  if (is_judged_first && reason == Decline::bad_argument && status == MPI_SUCCESS &&
      !may_hide_refusals(call.comm))
    announce();
  return status;
}

/// The call is left to the MPI. Peers that do not leave theirs get an error instead of waiting.
template <class Original>
int leave_to_mpi(const Call& call, Member& member, Decline reason, const Original& original) {
  if (!member.declined) check_usable(member);
  member.was_left_to_mpi = true;
  count_declined(reason);
  Call passed = call;
  passed.op = operator_for_mpi(call);
  return announced(
      call, reason,
      [&] {
        if (!member.declined)
          member.communicator->note_declined(call.collective, call.root, call.form, reason);
      },
      [&] { return with_buffers_on_host(passed, nullptr, original); });
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
    const auto leave = [&](Decline reason) {
      const int status = leave_to_mpi(call, *member, reason, mpis);
      if (member->wants_to_settle && call.is_meeting_of_all() && status == MPI_SUCCESS &&
          !may_be_refused(call, reason)) [[unlikely]]
        settle(call.comm);
      return status;
    };
    if (!member || member->declined) [[unlikely]] {
      member = look_up_member(call.comm);
      if (!member) return mpis(call);  // the MPI says what is wrong
      if (member->declined == Decline::not_set_up) {
        if (const auto reason = decline_before_set_up(call, *member)) {
          const int status = leave(*reason);
          // Of no elements the MPI may take one with wrong arguments, without a word to the others.
          if (call.collective == Collective::reduce && call.count > 0 && !member->is_passed_by &&
              !was_refused(call, *reason, status))
            ask_to_settle(*member);
          return status;
        }
        make_member(call.comm);
      }
      if (member->declined) return leave(*member->declined);
    }
    check_set_up(*member);
    const unsigned generation = generation_of_types.load(std::memory_order_relaxed);
    if (member->last_generation != generation || !(call == member->last_call)) {
      Request request;
      member->last_generation = 0;
      if (const auto reason = translate(call, member->rank, member->size, request)) [[unlikely]]
        return leave(*reason);
      member->last_request = request;
      member->last_call = call;
      // The content of recvcounts may change.
      if (call.collective != Collective::reduce_scatter) member->last_generation = generation;
      member->was_left_to_mpi = false;
    }
    member->communicator->run(member->last_request);
    if (member->wants_to_settle && call.is_meeting_of_all()) [[unlikely]]
      settle(call.comm);
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    // Peers may be waiting for us: too late to fall back.
    return end_with_error(call.comm, error, is_in_mpi);
  }
}

}  // namespace trib::mpi

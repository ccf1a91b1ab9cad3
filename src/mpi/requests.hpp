// SPDX-License-Identifier: BSD-3-Clause
// MPI_Requests that are ours: of nonblocking and persistent reductions. To the MPI such a handle is
// a persistent receive from MPI_PROC_NULL that nobody ever starts: valid, different from all
// others, and inactive, should it ever come to the MPI. Lists that mix ours and others are given to
// the MPI with null requests in place of ours, once ours are seen to. handles.hpp says what stands
// behind them; they begin in requests.cpp, and end in completion.cpp.
#pragma once

#include <atomic>
#include <optional>

#include "mpi/intercept.hpp"

namespace trib::mpi {

/// Set while this thread makes a call in mpi_f08 of the MPICH family, whose MPI_Wait and the like
/// are not seen here: the requests have to be the MPI's.
extern constinit thread_local bool is_passed_by_f08;

/// Requests of ours that the program holds, or has freed while they were active: calls that wait
/// drive these, too. While there are none, every call goes straight to the MPI.
extern std::atomic<int> requests_held;
/// Those that it has freed, of them.
extern std::atomic<int> orphans_held;

/// Nonblocking. `original(call)` makes the call in the MPI.
template <class Original>
int post(const Call& call, MPI_Request* request, Original original);
/// Persistent: MPI_Allreduce_init and its like. Collective.
template <class Original>
int prepare(const Call& call, MPI_Request* request, Original original);
/// Persistent, left to an MPI that has no such call: by emulation.hpp. Collective. Throws Error.
int emulate(const Call& call, MPI_Request* request);

// The MPI's functions of these names, for lists in which requests of ours may stand.
int start(MPI_Request* request);
int start_all(int count, MPI_Request* requests);
int wait(MPI_Request* request, MPI_Status* status);
int wait_all(int count, MPI_Request* requests, MPI_Status* statuses);
int wait_any(int count, MPI_Request* requests, int* index, MPI_Status* status);
int wait_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses);
int test(MPI_Request* request, int* flag, MPI_Status* status);
int test_all(int count, MPI_Request* requests, int* flag, MPI_Status* statuses);
int test_any(int count, MPI_Request* requests, int* index, int* flag, MPI_Status* status);
int test_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses);
int free_request(MPI_Request* request);
int cancel(MPI_Request* request);
int get_status(MPI_Request request, int* flag, MPI_Status* status);
/// MPIX_Request_is_complete of MPICH, by `original` where it is not ours, or as well as can be if
/// the MPI has none. It may be called in the midst of the MPI's progress, which it makes none of.
int is_complete(MPI_Request request, int (*original)(Word));
int get_status_all(int count, const MPI_Request* requests, int* flag, MPI_Status* statuses);
int get_status_any(int count, const MPI_Request* requests, int* index, int* flag,
                   MPI_Status* status);
int get_status_some(int count, const MPI_Request* requests, int* done, int* indices,
                    MPI_Status* statuses);

/// Puts away what was freed while it was active and has come to its end since.
void sweep_slowly();
inline void sweep() {
  if (orphans_held.load(std::memory_order_relaxed) > 0) [[unlikely]]
    sweep_slowly();
}
/// Before MPI ends: completes what was freed while it was active, and gives the handles back that
/// the program does not hold.
void end_requests() noexcept;
/// At the end of MPI_Init: has the MPI call end_requests() again when MPI_COMM_SELF goes, behind
/// all callbacks of the program's. Callbacks of MPI_COMM_WORLD may come after that, and all
/// requests in them are the MPI's: ours would be of a communicator that is no more.
void watch_self() noexcept;
extern std::atomic<bool> has_self_gone;
/// After it: puts away what the program has never freed.
void forget_requests() noexcept;

// --------------------------------------------------------------------------------- implementation

/// Why requests on `member`, which is_passed_by, are the MPI's. Says so once, if the user can mend
/// it.
Decline why_passed_by(const Member& member);

/// Takes the call's request in hand. False: the MPI has to make the call.
bool post(const Call& call, Member& member, const Request& reduction, MPI_Request* request);
bool prepare(const Call& call, Member& member, const Request& reduction, MPI_Request* request);

inline void note_declined(const Call& call, Member& member, Decline reason) {
  if (!member.declined && !member.is_passed_by)
    member.communicator->note_declined(call.collective, call.root, call.form, reason);
}

/// A nonblocking call was left to the MPI for that reason, and the MPI has taken it: a blocking
/// call is to set up the communicator, or what later ones need there. All ranks have to meet in the
/// same one, also where arguments were wrong on this rank only.
inline void ask_unless_ready(Member& member, Decline reason) {
  if (reason != Decline::not_set_up && reason != Decline::bad_argument) return;
  if (is_passed_by_f08 || member.is_passed_by || member.has_no_background) return;
  if (member.declined ? *member.declined == Decline::not_set_up : !member.communicator->can_post())
    ask_to_settle(member);
}

template <class Original>
int leave_request_to_mpi(const Call& call, Decline reason, MPI_Request* request,
                         const Original& original) {
  count_declined(reason);
  Communicator::note_request_of_mpi();
  Call passed = call;
  passed.op = operator_for_mpi(call);
  return with_buffers_on_host(passed, request, original);
}

/// What a request's call has to pass before it is ours: fills in `reduction`. A value: it was left
/// to the MPI, with that status. Throws Error.
template <class Leave>
std::optional<int> leave_unless_ours(const Call& call, Member& member, Request& reduction,
                                     const Leave& leave) {
  if (member.declined && *member.declined != Decline::not_set_up) return leave(*member.declined);
  check_usable(member);
  if (const auto reason = translate(call, member.rank, member.size, reduction)) [[unlikely]]
    return announced(
        call, *reason, [&] { note_declined(call, member, *reason); },
        [&] { return leave(*reason); });
  if (is_passed_by_f08) return leave(Decline::passed_by);
  if (has_self_gone.load(std::memory_order_relaxed)) [[unlikely]]
    return leave(Decline::being_freed);
  if (member.is_passed_by) return leave(why_passed_by(member));
  return {};
}

template <class Original>
int post(const Call& call, MPI_Request* request, Original original) {
  bool is_in_mpi = false;
  const auto mpis = [&](const Call& passed) {
    return in_mpi(is_in_mpi, [&] { return original(passed); });
  };
  try {
    Member* const member = look_up_member(call.comm);
    if (!member || !request) return mpis(call);  // the MPI says what is wrong
    const auto leave = [&](Decline reason) {
      const int status = leave_request_to_mpi(call, reason, request, mpis);
      if (was_refused(call, reason, status)) return status;
      member->has_used_requests = true;
      ask_unless_ready(*member, reason);
      return status;
    };
    Request reduction;
    if (const auto status = leave_unless_ours(call, *member, reduction, leave)) return *status;
    // First: others that have made the call do not know if it fails on this rank.
    member->has_used_requests = true;
    if (member->has_no_background) return leave(Decline::no_memory);
    if (member->declined || !post(call, *member, reduction, request)) [[unlikely]]
      return leave(Decline::not_set_up);
    if (member->communicator->wants_to_settle()) [[unlikely]]
      ask_to_settle(*member);
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return end_with_error(call.comm, error, is_in_mpi);
  }
}

template <class Original>
int prepare(const Call& call, MPI_Request* request, Original original) {
  bool is_in_mpi = false;
  const auto mpis = [&](const Call& passed) {
    return in_mpi(is_in_mpi, [&] { return original(passed); });
  };
  try {
    Member* const member = look_up_member(call.comm);
    if (!member || !request) return mpis(call);  // the MPI says what is wrong
    const auto leave = [&](Decline reason) {
      const int status = leave_request_to_mpi(call, reason, request, mpis);
      if (!was_refused(call, reason, status)) member->has_used_requests = true;
      return status;
    };
    if (member->declined == Decline::not_set_up && !is_job_mixed()) {
      if (const auto reason = decline_before_set_up(call, *member)) return leave(*reason);
      make_member(call.comm);
    }
    Request reduction;
    if (const auto status = leave_unless_ours(call, *member, reduction, leave)) return *status;
    member->has_used_requests = true;  // as above
    if (!prepare(call, *member, reduction, request)) return leave(Decline::no_memory);
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return end_with_error(call.comm, error, is_in_mpi);
  }
}

}  // namespace trib::mpi

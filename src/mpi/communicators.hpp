// SPDX-License-Identifier: BSD-3-Clause
// From MPI communicators to what Tributary keeps for them. Made with the communicator or at the
// first reduction on a communicator, gone when the program frees it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "mpi/bootstrap.hpp"
#include "mpi/handle_map.hpp"
#include "mpi/immortal.hpp"
#include "mpi/mpi_header.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

struct Member {
  int rank = 0, size = 0;
  /// Null where `declined` or `failure` is set. Shared with requests that outlive the program's
  /// communicator.
  std::shared_ptr<Communicator> communicator;
  MpiBootstrap* bootstrap = nullptr;  ///< the communicator's
  /// Nothing is served here. not_set_up: not yet, see settle().
  std::optional<Decline> declined;
  std::string failure;             ///< setting it up, or preparing it, went wrong, ...
  Code failure_code{};             ///< ... as an Error of this kind
  bool is_revoked = false;         ///< under a mutex: also in another thread, during the set-up
  std::unique_ptr<Config> config;  ///< its own settings; null: those of the process
  bool was_left_to_mpi = false;    ///< the last blocking call
  /// What the last served call was and came to: the next is often the same. Zero: nothing known.
  unsigned last_generation = 0;
  Call last_call{};
  Request last_request;
  /// A nonblocking reduction was left to the MPI because the communicator is not prepared for them,
  /// or devices may have to serve them: settle() is to see to it. The same on all ranks, like all
  /// that depends on the order of calls.
  bool wants_to_settle = false;
  bool has_no_background = false;  ///< there was no memory for them
  /// On some rank, see what_passes_by(), or its ranks are mixed, see is_job_mixed(), or
  /// `may_outlive_world`: none are served.
  bool is_passed_by = false;
  bool is_split = false;  ///< found when it was set up: reductions of some ranks do not come here
  bool has_split_copies = false;  ///< the same of what copies.hpp may serve
  /// A session was open on some rank when it was set up. Our requests are of MPI_COMM_SELF, and so
  /// end with the world; those on a session's communicator need not.
  bool may_outlive_world = false;
  bool has_used_requests = false;  ///< nonblocking or persistent reductions
  bool all_print_stats = false;    ///< TRIB_STATS=1 on all of its ranks
  Exchanges exchanges{};           ///< the same on all ranks
  /// Children still to be prepared for them at once, though this one has not: a program that makes
  /// no blocking call on a communicator of its own gives no later occasion. Some only, as many
  /// programs make many. The same on all ranks.
  int eager_children = 0;
};

extern constinit Immortal<HandleMap> members;

/// Null: not seen before, or freed since. What is on the path of every call.
inline Member* find_member(MPI_Comm comm) {
  return reinterpret_cast<Member*>(members->find(to_word(comm)));
}

inline void check_set_up(const Member& member) {
  if (!member.failure.empty()) [[unlikely]]
    throw Error(passed_on(member.failure_code, Code::unusable),
                "this communicator could not be set up: " + member.failure);
}
/// Throws Error if something has gone wrong on the communicator. Its calls are not left to the MPI
/// either, where they would meet what was begun to set it up.
inline void check_usable(const Member& member) {
  check_set_up(member);
  if (member.communicator) member.communicator->check_usable();
}

/// A call on `comm` ends with `error` on this rank before its peers could hear of it: they must not
/// take its next call for this one. (What the MPI itself reports is none of them.) Returns or
/// throws what the call does.
int end_with_error(MPI_Comm comm, const std::exception& error, bool is_in_mpi);

/// MPIX_Comm_revoke: peers that wait in reductions of ours do not hear of it from the MPI.
int revoke(Word comm);

/// Whether what the MPI refuses on `comm` may return as if it had not, see kUnwritten.
bool may_hide_refusals(MPI_Comm comm);

/// Stands around the MPI's own MPI_Comm_free and MPI_Comm_disconnect. MPIs delete the newest
/// attributes first: where the program reduces in a callback of an older one, our attribute and the
/// Member are gone, and on another rank it may be a newer one. A new Member's attribute would come
/// too late to be deleted, and the next communicator with this handle would take it for its own. So
/// such calls are left to the MPI, once the Member is gone in this thread only: to others the
/// handle may already be that next communicator's.
class Freeing {
 public:
  explicit Freeing(MPI_Comm comm);
  ~Freeing();
  Freeing(const Freeing&) = delete;
  Freeing& operator=(const Freeing&) = delete;

  /// Stands for `comm`, which this thread is freeing, and declines. Null: it is not.
  static Member* find(MPI_Comm comm);
  /// Every one has its own.
  std::uint64_t serial() const { return serial_; }

 private:
  std::uint64_t serial_;
};

/// Has the MPI call `callback`, which deletes an attribute, when `comm` goes. The key is given back
/// at once and lives on in the attribute, so that nothing is left over when MPI ends and begins
/// again.
void watch(MPI_Comm comm, int (*callback)(MPI_Comm, int, void*, void*));

/// What is known of a communicator without its other ranks: a nonblocking call must not wait for
/// them. Null: MPI is not running, or `comm` is no communicator, so that the MPI has to say so.
Member* look_up_member(MPI_Comm comm);

/// Collective over `comm`: sets it up if that was not done. Null: see look_up_member(). Throws
/// Error.
Member* make_member(MPI_Comm comm);

/// Collective over `comm`, which has reduced nothing yet: gives it another value of a setting.
/// Throws Error.
void change_setting(MPI_Comm comm, const char* variable, const char* value);

/// Members that want to settle().
extern std::atomic<int> wanting;
/// Collective over `comm`, behind a blocking call on it that no rank can leave before all have
/// come, whatever serves it: there ranks may wait for each other. Behind another one, or before
/// any, some may wait for a rank whose call the MPI has refused, and which is elsewhere by then.
void settle_slowly(MPI_Comm comm) noexcept;
inline void settle(MPI_Comm comm) noexcept {
  if (wanting.load(std::memory_order_relaxed) > 0) [[unlikely]]
    settle_slowly(comm);
}
/// The same for a communicator that has just come to be: if its parent used such calls, it may; and
/// for the first few made of MPI_COMM_WORLD and of these.
void adopt(MPI_Comm parent, MPI_Comm child) noexcept;
/// Open MPI's MPI_Comm_idup on `parent` has begun, see Exchanges. Returns what the call does. What
/// it makes is set up when it is first used.
int note_idup(MPI_Comm parent);
/// A later blocking call on its communicator is to settle().
void ask_to_settle(Member& member);
/// Collective: prepares `member`, which serves reductions, for nonblocking ones, also on devices.
/// Throws Error.
void prepare_background(Member& member);
/// MPI_COMM_WORLD, at the end of MPI_Init.
void begin_world() noexcept;
/// Some ranks of MPI_COMM_WORLD began MPI in Fortran, see is_begun_in_fortran, and some in C. Then
/// the ranks set up communicators in blocking reductions only, which all of them see.
bool is_job_mixed();

/// At the end of MPI.
void free_members();

/// Settings, read once. Throws Error each time if one is wrong.
const Config& settings_of_process();

}  // namespace trib::mpi

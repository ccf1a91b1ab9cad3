// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/communicators.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "mpi/bootstrap.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/report.hpp"
#include "mpi/stats.hpp"
#include "mpi/translate.hpp"
#include "tune/select.hpp"
#include "tune/tuning_file.hpp"

namespace trib::mpi {

constinit Immortal<HandleMap> members;
std::atomic<int> wanting;

namespace {

std::atomic<bool> is_mixed;
/// In MPI_Init the ranks differed in which of their reductions come here: those that do would wait
/// for those that do not.
std::atomic<bool> is_split;

/// A Freeing of this thread. Error handlers that jump out of the MPI leave dead ones behind: their
/// frames have gone, or hold other things by now.
struct Begun {
  MPI_Comm comm;
  const Freeing* freeing;
  std::uint64_t serial;
  Member* member;  // null: there is none, or it has gone
  std::optional<Decline> declined_before;

  bool is_alive(const void* frame) const {
    return std::less<const void*>()(frame, freeing) && freeing->serial() == serial;
  }
};

/// Of this thread, if there are any. (Communicators may be freed after what belongs to a thread is
/// destroyed.)
thread_local std::vector<Begun>* begun = nullptr;

/// A callback may have refused, and the communicator lives on.
template <class IsOver>
void end_those(const IsOver& is_over) {
  if (begun == nullptr) return;
  std::erase_if(*begun, [&](const Begun& one) {
    if (!is_over(one)) return false;
    if (one.member != nullptr) one.member->declined = one.declined_before;
    return true;
  });
  if (begun->empty()) delete std::exchange(begun, nullptr);
}

void end_dead_ones(const void* frame) {
  end_those([=](const Begun& one) { return !one.is_alive(frame); });
}

void retire(std::uintptr_t word) {
  if (!word) return;
  const std::unique_ptr<Member> member(reinterpret_cast<Member*>(word));
  if (begun != nullptr)
    for (Begun& one : *begun)
      if (one.member == member.get()) one.member = nullptr;
  keep_counters(*member);
  if (member->wants_to_settle) --wanting;
  if (member->bootstrap) member->bootstrap->detach();
}

int copy_nothing(MPI_Comm, int, void*, void*, void*, int* flag) {
  *flag = 0;
  return MPI_SUCCESS;
}

int forget(MPI_Comm comm, int, void*, void*) {
  const std::uintptr_t word = members->erase(to_word(comm));
  const auto* const member = reinterpret_cast<const Member*>(word);
  if (member && member->bootstrap && member->communicator.use_count() > 1)
    member->bootstrap->keep_errhandler();
  retire(word);
  return MPI_SUCCESS;
}

struct Settings {
  Config config;
  std::string failure;
};

void warn_of_missing_heap() {
  const auto serves = reinterpret_cast<bool (*)()>(dlsym(RTLD_DEFAULT, "trib_heap_serves"));
  if (serves == nullptr)
    log(Config::Log::warn,
        "TRIB_SHARED_HEAP=1, but libtributary_heap.so is not preloaded: only memory from "
        "MPI_Alloc_mem is shared; trib run preloads it, and trib preload prints its path");
  else if (!serves())
    log(Config::Log::warn,
        "TRIB_SHARED_HEAP=1, but the program, or a library before libtributary_heap.so, has a "
        "malloc, realloc or free of its own: only memory from MPI_Alloc_mem is shared");
}

const Settings& read_settings_once() {
  static const Settings& settings = *new Settings([] {
    Settings result;
    try {
      result.config = read_config();
    } catch (const Error& error) {
      result.failure = error.what();
    }
    int rank = -1;
    if (is_world_running()) library().Comm_rank(MPI_COMM_WORLD, &rank);
    set_log(result.config.log, rank);
    if (result.config.shared_heap == Config::SharedHeap::yes && rank <= 0) warn_of_missing_heap();
    return result;
  }());

  return settings;
}

/// A setting that is wrong on one rank is an error on all, as the others would wait for it.
/// Fills in what else is to be the same on all.
void agree_on_settings(MpiBootstrap& bootstrap, Member& member) {
  struct Report {
    char failure[256];
    ProcessId process;
    bool is_passed_by, is_fortran, may_outlive_world, prints_stats;
    std::uint32_t which_set_up, which_reduce, which_copy;
  } mine = {};
  mine.process = ProcessId::of_this();
  mine.is_passed_by = !what_passes_by().empty();
  mine.is_fortran = is_begun_in_fortran;
  mine.which_set_up = which_set_up();
  mine.which_reduce = which_reduce();
  mine.which_copy = which_copy();
  mine.prints_stats = read_settings_once().config.stats;
  // Whose it is the MPI does not tell. But whoever has one of a session's has that session open.
  mine.may_outlive_world =
      !is_world_running() || (open_sessions > 0 && bootstrap.comm() != MPI_COMM_WORLD);
  std::strncpy(mine.failure, read_settings_once().failure.c_str(), sizeof mine.failure - 1);
  std::vector<Report> all(static_cast<std::size_t>(bootstrap.size()));
  bootstrap.exchange(&mine, all.data(), sizeof mine);
  member.is_passed_by = member.is_split = member.has_split_copies = false;
  member.all_print_stats = true;
  std::vector<ProcessId> processes;
  for (const Report& report : all) {
    processes.push_back(report.process);
    const bool differs =
        report.is_fortran != mine.is_fortran || report.which_set_up != mine.which_set_up;
    if (differs && is_init_under_way()) is_mixed = true;
    member.is_split = member.is_split || report.which_reduce != all[0].which_reduce;
    member.has_split_copies = member.has_split_copies || report.which_copy != all[0].which_copy;
    member.is_passed_by = member.is_passed_by || report.is_passed_by || differs;
    member.may_outlive_world = member.may_outlive_world || report.may_outlive_world;
    member.all_print_stats = member.all_print_stats && report.prints_stats;
  }
  member.is_passed_by = member.is_passed_by || member.may_outlive_world;
  if (member.is_split && is_init_under_way()) is_split = true;
  bootstrap.know(std::move(processes));
  if (mine.failure[0]) throw Error(Code::argument, read_settings_once().failure);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].failure[0])
      throw Error(Code::argument, "rank " + std::to_string(rank) + ": " + all[rank].failure);
}

/// Does `step`. What goes wrong is the end of the communicator, also where nobody can be told now:
/// the next reduction reports it.
template <class Step>
void do_or_fail(Member& member, const Step& step) {
  try {
    step();
  } catch (const std::exception& error) {
    if (const auto* const known = dynamic_cast<const Error*>(&error))
      member.failure_code = known->code();
    try {
      member.failure = error.what();
    } catch (const std::exception&) {
      member.failure = "out of memory";  // short enough to need none
    }
    throw;
  }
}

/// Does `step`, which the other ranks of `comm` do, too, and exchange something in: they hear of it
/// if it fails on this rank alone.
template <class Step>
void do_or_tell(MPI_Comm comm, const Step& step) {
  try {
    step();
  } catch (const ExchangeFailed&) {
    throw;
  } catch (...) {
    const Member* const member = find_member(comm);
    MpiBootstrap::tell_failure(comm, member ? member->exchanges : Exchanges::nonblocking);
    throw;
  }
}

/// Whether some communicator of this process has more ranks than cores: MPI_COMM_WORLD comes first.
/// Ranks outside of the others want these cores, too.
std::atomic<bool> is_amid_crowd = false;

/// Where a communicator is set up and revoked in two threads.
std::mutex revoking;

Error revocation(const Member& member) {
  return {Code::revoked, "the communicator was revoked on rank " + std::to_string(member.rank)};
}

void set_up(MPI_Comm comm, Member& member) {
  do_or_fail(member, [&] {
    do_or_tell(comm, [&] {
      member.declined.reset();
      // The defaults, if there was an error.
      const Config& config = member.config ? *member.config : read_settings_once().config;
      auto bootstrap = std::make_unique<MpiBootstrap>(comm, member.rank, member.size,
                                                      config.timeout, member.exchanges);
      MpiBootstrap* const its_bootstrap = bootstrap.get();
      agree_on_settings(*bootstrap, member);
      if (member.is_split) return;
      auto communicator =
          std::make_shared<Communicator>(std::move(bootstrap), config, is_amid_crowd.load());
      its_bootstrap->end_set_up();
      const std::lock_guard lock(revoking);
      member.communicator = std::move(communicator);
      member.bootstrap = its_bootstrap;
      if (member.is_revoked) member.communicator->give_up(revocation(member));
    });
  });
  if (member.is_split) {
    member.declined = Decline::split;
    if (member.rank == 0)
      log_once(Config::Log::warn,
               "reductions are left to the MPI: MPI_Allreduce or its like leads past Tributary on "
               "some ranks, and not on others, by way of the program itself or of a tool");
    return;
  }
  if (member.communicator->is_crowded()) is_amid_crowd = true;
  if (const Decline* reason = member.communicator->declined()) member.declined = *reason;
}

}  // namespace

const Config& settings_of_process() {
  const Settings& settings = read_settings_once();
  if (!settings.failure.empty()) throw Error(Code::argument, settings.failure);
  return settings.config;
}

bool may_hide_refusals([[maybe_unused]] MPI_Comm comm) {
#if TRIB_MPI_OPENMPI
  return false;
#else
  const Library& mpi = library();
  MPI_Errhandler handler{};
  if (comm == MPI_COMM_NULL || mpi.Comm_get_errhandler(comm, &handler) != MPI_SUCCESS) return false;
  const bool is_of_program = handler != MPI_ERRORS_ARE_FATAL && handler != MPI_ERRORS_RETURN;
  mpi.Errhandler_free(&handler);
  return is_of_program;
#endif
}

Freeing::Freeing(MPI_Comm comm) {
  static std::atomic<std::uint64_t> last = 0x6672656564ull << 20;
  serial_ = ++last;
  try {
    end_dead_ones(this);  // callbacks may free other communicators: those are further up
    Member* const member = find_member(comm);
    if (begun == nullptr) begun = new std::vector<Begun>;
    begun->push_back({comm, this, serial_, member, {}});
    if (member != nullptr)
      begun->back().declined_before = std::exchange(member->declined, Decline::being_freed);
  } catch (const std::bad_alloc&) {  // it is not known, then
  }
}

Freeing::~Freeing() {
  end_those([this](const Begun& one) { return one.serial == serial_; });
  serial_ = 0;
}

Member* Freeing::find(MPI_Comm comm) {
  end_dead_ones(__builtin_frame_address(0));
  if (begun == nullptr || std::none_of(begun->begin(), begun->end(),
                                       [=](const Begun& one) { return one.comm == comm; }))
    return nullptr;
  thread_local auto* const member = new Member;
  member->declined = Decline::being_freed;
  return member;
}

void watch(MPI_Comm comm, int (*callback)(MPI_Comm, int, void*, void*)) {
  const Library& mpi = library();
  int keyval = 0;
  check(mpi.Comm_create_keyval(copy_nothing, callback, &keyval, nullptr), "MPI_Comm_create_keyval");
  const int status = mpi.Comm_set_attr(comm, keyval, nullptr);
  check(mpi.Comm_free_keyval(&keyval), "MPI_Comm_free_keyval");
  check(status, "MPI_Comm_set_attr");
}

Member* look_up_member(MPI_Comm comm) {
  if (Member* const its = Freeing::find(comm)) return its;
  if (Member* const known = find_member(comm)) return known;
  // No lock is held here: two threads that enter two communicators in different orders on different
  // ranks would wait for each other.
  if (comm == MPI_COMM_NULL || !(is_world_running() || open_sessions > 0)) return nullptr;
  const Library& mpi = library();
  auto member = std::make_unique<Member>();
  int is_inter = kUnwritten;
  if (mpi.Comm_test_inter(comm, &is_inter) != MPI_SUCCESS || is_inter == kUnwritten) return nullptr;
  check(mpi.Comm_rank(comm, &member->rank), "MPI_Comm_rank");
  check(mpi.Comm_size(comm, &member->size), "MPI_Comm_size");
  prepare_tables();
  watch(comm, forget);
  Member* const result = member.get();
  // In the table even if setting it up fails: this rank must not enter the exchange alone a second
  // time.
  members->insert(to_word(comm), reinterpret_cast<std::uintptr_t>(member.release()));
  result->is_passed_by = is_mixed;  // as long as its ranks are not known
  result->declined = is_inter            ? Decline::intercommunicator
                     : result->size == 1 ? Decline::single_rank
                     : is_split          ? Decline::split
                                         : Decline::not_set_up;
  return result;
}

int end_with_error(MPI_Comm comm, const std::exception& error, bool is_in_mpi) {
  const Member* const member = is_in_mpi ? nullptr : find_member(comm);
  if (member && member->communicator) {
    const auto* const known = dynamic_cast<const Error*>(&error);
    member->communicator->give_up(known != nullptr ? *known : Error(Code::system, error.what()));
  }
  return raise(comm, error, is_in_mpi);
}

int revoke(Word comm) {
  const Library& mpi = library();
  const auto original = reinterpret_cast<int (*)(Word)>(mpi.find("PMPIX_Comm_revoke"));
  if (original == nullptr) return MPI_ERR_OTHER;
  // First: whom the MPI tells of it may go on with other reductions than those that wait.
  if (Member* const member = mpi.is_ours ? find_member(from_word<MPI_Comm>(comm)) : nullptr) {
    try {
      std::shared_ptr<Communicator> its;
      {
        const std::lock_guard lock(revoking);
        member->is_revoked = true;
        its = member->communicator;
      }
      if (its) its->give_up(revocation(*member));
    } catch (const std::exception&) {
      log(Config::Log::error, "out of memory: peers do not hear of MPIX_Comm_revoke");
    }
  }
  return original(comm);
}

Member* make_member(MPI_Comm comm) {
  Member* member = nullptr;
  try {
    do_or_tell(comm, [&] { member = look_up_member(comm); });
  } catch (...) {
    // It must not set it up alone, later: what was missing may be there by then.
    if (Member* const its = look_up_member(comm)) {
      its->declined.reset();
      its->failure = "out of memory";
    }
    throw;
  }
  if (member && member->declined == Decline::not_set_up) set_up(comm, *member);
  return member;
}

void ask_to_settle(Member& member) {
  if (!member.wants_to_settle) ++wanting;
  member.wants_to_settle = true;
}

void prepare_background(Member& member) {
  Communicator* const its =
      member.declined || member.is_passed_by ? nullptr : member.communicator.get();
  const bool is_for_devices = its != nullptr && its->can_post() && its->wants_to_settle();
  if (member.wants_to_settle) --wanting;
  member.wants_to_settle = false;
  if (is_for_devices)
    its->settle_devices();
  else if (its != nullptr && !its->can_post())
    do_or_fail(member, [&] { member.has_no_background = !its->open_background(); });
}

void settle_slowly(MPI_Comm comm) noexcept {
  try {
    Member* const member = find_member(comm);
    if (!member || !member->wants_to_settle) return;
    make_member(comm);
    if (member->has_used_requests) {
      prepare_background(*member);
    } else {  // after Reduces
      --wanting;
      member->wants_to_settle = false;
    }
  } catch (const std::exception&) {
    // The next reduction reports it, as a call that is ours.
  }
}

namespace {

/// Throws Error.
std::unique_ptr<Config> changed_config(const Member& member, const char* variable,
                                       const char* value) {
  check_usable(member);
  if (variable == nullptr || value == nullptr)
    throw Error(Code::argument, "trib_mpi_set: no variable, or no value");
  const bool has_reduced =
      member.was_left_to_mpi || member.has_used_requests ||
      (member.communicator && std::string_view(member.communicator->last_algorithm()) != "none");
  if (has_reduced) throw Error(Code::argument, "trib_mpi_set: the communicator has reduced before");
  const Config& before = member.config ? *member.config : settings_of_process();
  auto config = std::make_unique<Config>(with_setting(before, variable, value));
  check_choices(*config, member.size);
  return config;
}

}  // namespace

void change_setting(MPI_Comm comm, const char* variable, const char* value) {
  Member* const member = look_up_member(comm);
  if (member == nullptr) throw Error(Code::argument, "trib_mpi_set: no communicator");
  if (member->declined && *member->declined != Decline::not_set_up) return;  // nothing is served
  std::unique_ptr<Config> config;
  std::string trouble;
  try {
    config = changed_config(*member, variable, value);
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  // A value that one rank refuses holds on none, and no rank is left waiting.
  std::vector<char> all;
  do_or_tell(comm, [&] {
    MpiBootstrap bootstrap(comm, member->rank, member->size, read_settings_once().config.timeout,
                           member->exchanges);
    const char mine = trouble.empty();
    all.resize(static_cast<std::size_t>(member->size));
    bootstrap.exchange(&mine, all.data(), 1);
  });
  if (!trouble.empty()) throw Error(Code::argument, trouble);
  if (std::find(all.begin(), all.end(), 0) != all.end())
    throw Error(Code::argument, "trib_mpi_set: another rank refuses what it was given");
  member->config = std::move(config);
  // Here ranks meet. Some were prepared when they were made.
  const bool could_post = member->communicator && member->communicator->can_post();
  member->bootstrap = nullptr;
  member->communicator.reset();
  set_up(comm, *member);
  if (could_post) prepare_background(*member);
}

namespace {
// Each takes some milliseconds (3 with 2 ranks, 7 with 8 and 16).
constexpr int kEagerChildren = 3, kEagerGrandchildren = 1;
}  // namespace

void adopt(MPI_Comm parent, MPI_Comm child) noexcept {
  Member* const member = find_member(parent);
  if (!member || member->is_passed_by) return;
  const bool is_eager = !member->has_used_requests && member->eager_children > 0;
  if (is_eager) --member->eager_children;  // also where this rank has no part in the child
  if ((!member->has_used_requests && !is_eager) || child == MPI_COMM_NULL) return;
  try {
    if (Member* const its = make_member(child)) {
      its->has_used_requests = member->has_used_requests;
      if (parent == MPI_COMM_WORLD) its->eager_children = kEagerGrandchildren;
      prepare_background(*its);
    }
  } catch (const std::exception&) {
    // As above.
  }
}

int note_idup(MPI_Comm parent) {
  try {
    if (Member* const member = look_up_member(parent)) {
      member->exchanges = Exchanges::blocking;
      if (member->bootstrap) member->bootstrap->exchange_by(Exchanges::blocking);
    }
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return end_with_error(parent, error, /*is_in_mpi=*/false);
  }
}

void begin_world() noexcept {
  try {
    if (!library().is_ours || !is_world_running()) return;
    if (Member* const world = make_member(MPI_COMM_WORLD)) {
      if (world->communicator) world->eager_children = kEagerChildren;
      prepare_background(*world);
    }
  } catch (const std::exception&) {
    // As above.
  }
}

bool is_job_mixed() { return is_mixed; }

void free_members() {
  forget_world();
  for (const std::uintptr_t word : members->clear()) retire(word);
  TuningFile::flush_all();
  if (const DeviceBackend* const device = loaded_device_backend()) device->free_left();
}

}  // namespace trib::mpi

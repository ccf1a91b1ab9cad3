// SPDX-License-Identifier: BSD-3-Clause
// A group of ranks that reduce together: settings, layout, channel, program cache. One per MPI
// communicator. Read communicator.cpp from run() on; backend/backend.hpp is what it drives.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "comm/background.hpp"
#include "comm/devices.hpp"
#include "comm/plans.hpp"
#include "comm/request.hpp"
#include "comm/staging.hpp"
#include "comm/tuner.hpp"

namespace trib {

/// Why a call is left to the MPI underneath. `name` and `text` of each stand in
/// communicator_set_up.cpp.
enum class Decline : std::uint8_t {
  disabled,     ///< TRIB_ENABLE=0
  single_rank,  ///< nothing to speed up
  intercommunicator,
  user_operator,    ///< user-defined operator
  derived_type,     ///< not a predefined type
  undefined_op,     ///< the MPI standard does not define this operator on this type
  bad_argument,     ///< left to the MPI to report
  spans_nodes,      ///< the communicator's ranks are on several machines
  no_memory,        ///< no shared memory could be had
  not_set_up,       ///< nonblocking or a Reduce, before the ranks had an occasion to meet
  being_freed,      ///< in a callback of MPI_Comm_free
  passed_by,        ///< not blocking, and waits for it may not come here
  of_session,       ///< not blocking, and may outlive the world
  unknown_devices,  ///< a GPU driver is loaded, and no module tells its memory from the host's
  split,            ///< some ranks' reductions do not come here
};
inline constexpr int kDeclines = 15;
const char* name(Decline reason);  ///< "user_operator"
const char* text(Decline reason);  ///< "user-defined operator"

class Communicator {
 public:
  /// Collective over the bootstrap's ranks, which must outlive this. Throws only if the bootstrap
  /// does: where no service is possible, declined() says why, on all ranks alike. `is_amid_crowd`:
  /// this rank shares its core with others, which may be in other communicators.
  Communicator(std::unique_ptr<Bootstrap> bootstrap, const Config& config,
               bool is_amid_crowd = false);
  ~Communicator();  ///< not collective
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return group_.rank; }
  int size() const { return group_.size; }
  /// Whether this rank's machine has fewer cores for them than ranks, or is_amid_crowd of one
  /// there.
  bool is_crowded() const { return group_.is_crowded; }
  /// Of this process: rounds of waiting in which ranks that are crowded sleep rather than yield.
  /// Tests set it.
  static std::atomic<int> naps_left;
  /// The program has made a request of the MPI's own. Who sleeps does not go on with that, and
  /// those who wait for it do not wake him.
  static void note_request_of_mpi() {
    if (naps_left.load(std::memory_order_relaxed) > 0) [[unlikely]]
      mixed_posts_left.store(kMixedPosts, std::memory_order_relaxed);
  }

  /// Set if this communicator serves nothing; the same on all ranks.
  const Decline* declined() const { return declined_ ? &*declined_ : nullptr; }

  /// Blocking. Zero counts are fine. Not to be called where declined(). Throws Error: on
  /// disagreement between the ranks, a time-out, a dead peer; afterwards the communicator is
  /// unusable.
  void run(const Request& request);

  /// Whether devices may serve MPI_Bcast and its like here: from a reduction on that they served,
  /// or might have. The same on all ranks, as far as blocking calls go.
  bool serves_copies() const { return meets_ && devices_.channel != nullptr; }
  /// Blocking: an allgather or a broadcast, in bytes, where serves_copies(). False (on all ranks
  /// alike): not all buffers are where kernels reach them, or on some rank it was not
  /// `is_possible`, and nothing has happened. Throws Error as run().
  bool run_copy(const Request& request, bool is_possible);

  /// Throws Error once something has gone wrong: from then on nothing may be served here, nor left
  /// to the MPI, where calls may meet what other ranks have begun.
  void check_usable() const;
  /// Something has: what was begun in the background ends with `error`, and so does what peers wait
  /// for here. The first error is the one that all later calls name.
  void give_up(const Error& error) noexcept;

  /// Tells peers that this rank's next call on the communicator is left to the MPI, so that ranks
  /// which disagree get an error instead of a hang. To be called once per declined call. `root`: of
  /// a Reduce. Where only the arguments tell that this call is not for us (and not even the MPI
  /// refuses them), a blocking form meets peers that it needs first: one that disagrees would leave
  /// this rank alone in the MPI. Of many such calls some meet: then it may be left alone, but the
  /// other one gets its error. Throws Error as run().
  void note_declined(Collective collective, int root, Form form, Decline reason);

  /// Name of the algorithm that served the last run(); "none" before and after a call without
  /// elements.
  const char* last_algorithm() const { return last_algorithm_; }

  std::vector<Served> served() const;

  /// What is known by measurement, from the tuning file or from prepare().
  const std::vector<Finding>& findings() const { return group_.findings().rows(); }

  // Reductions that go on in the background. No call of these but open_background() and prepare()
  // waits for peers.

  /// Collective: what post() needs. False (on all ranks alike): there is no memory for it. Throws
  /// Error: not all ranks came, say; afterwards the communicator is unusable.
  bool open_background();
  bool can_post() const { return background_ && background_->has_lanes(); }
  /// Collective, in a call that may wait for peers, once wants_to_settle(), which a post may bring
  /// about on all ranks alike: makes devices serve nonblocking reductions if those so far had
  /// buffers there. Throws Error.
  void settle_devices();
  bool wants_to_settle() const { return wants_to_settle_; }
  /// Begins a nonblocking reduction. `task` is not under way, and stays where it is until it is
  /// done. The buffers are the operation's until then, recvcounts are not needed any more. Throws
  /// Error.
  void post(Task& task, const Request& request);
  /// Collective: a persistent reduction, for start(). Where nothing is known of vectors of its
  /// length, measures first what serves them best, for as long as `hints` and settings allow. Does
  /// not touch the buffers. Null (on all ranks alike): there is no memory for it. Throws Error if
  /// the ranks disagree.
  std::unique_ptr<Task> prepare(const Request& request, const Hints& hints = {});
  void start(Task& task);
  /// Goes on with everything that is under way in this process. True: `task` is done; if it failed,
  /// throws Error.
  bool test(Task& task);
  /// For loops of tests and waits outside, with `task` that is not done: now and then looks whether
  /// its peers are well. If not, or if it has not got on for longer than TRIB_TIMEOUT allows, it
  /// ends with an error.
  void look_after(Task& task);
  /// `task`, which is done.
  bool has_failed(const Task& task) const { return task.error_.has_value(); }
  /// Of a task that is done: puts the result where it belongs, which wait() and test() do as well.
  void fetch(Task& task);
  /// The same where nothing of the MPI may be called: what comes before it is waited for in the
  /// driver.
  void fetch_at_once(Task& task);
  /// Until `task` is done. Throws Error if it failed.
  void wait(Task& task);
  /// Does what wait() does, if `task` is done and its result is where it belongs. False: it may not
  /// be.
  bool ends_at_once(Task& task) {
    if (!task.is_done() || task.error_ || task.meets_ || !background_ ||
        task.in_ != task.request_.in || task.out_ != task.request_.out)
      return false;
    task.is_waited_for_at_once_ = background_->is_last_started(task);
    Background::progress_now_and_then();
    return true;
  }
  /// `task`, which prepare() made and which is not under way, ends here.
  void dismiss(std::unique_ptr<Task> task);

 private:
  struct Part;
  void run_checked(const Request& request);
  void run_path(Path& path, Plan& plan, Route route, const void* in, void* out);
  bool run_mapped(const Request& request, Plan& plan);
  void run_with_devices(const Request& request, Plan& plan);
  void meet(const Card& card, bool looks_ahead = false);
  void wait_for(const std::unique_ptr<Unsettled>& unsettled, bool looks_at_peers);
  Route meet(Card& card, const Request& request, const Plan& plan, const DeviceCall& call);
  Card device_card(const Request& request, const Plan& plan, const DeviceCall& call);
  bool may_map(const Plan& plan) const;
  ShownBuffers buffers_of(const Request& request, const Plan& plan) const;
  bool is_in_the_way(const Request& request, const Plan& plan) const;
  bool is_in_anyones_way(const Request& request, const Plan& plan);
  ShownBuffers mappable_buffers(const Request& request, const Plan& plan) const;
  bool reach(Card& card, const Request& request, Plan& plan, Route route);
  void open_device(const void* pointer);
  void open_device_of_requests(const void* pointer);
  template <class Change>
  void change_devices(Change&& change);
  bool may_share(const Level& device_of, std::string& why) const;
  void settle(Task& task);
  void hold(Task& task, const Plan& plan);
  bool settle_on_device(const Request& request, Plan& plan, const std::vector<Part>& parts);
  Card heap_card(const Request& request, const Plan& plan) const;
  template <class CardOf>
  bool map(const Plan& plan, CardOf&& card_of, std::vector<MappedBuffers>& mapped);
  bool reserve(Engine engine, Plan& plan);
  void adopt(Key::Place place);
  void reserve_data(Plan& plan, Route route);
  void wait(Operation& operation, bool is_devices);
  void wait(Operation& operation, bool is_devices, int spin, HostChannel& channel);
  std::optional<Choice> tune_for(const Request& request, bool is_on_device, const Hints& hints);
  void keep_counts(Task& task) const;
  std::int32_t add_words(Collective collective, int root, std::int32_t mine);
  /// Whether ranks meet before nonblocking reductions of what devices can serve.
  bool meets_in_background() const { return meets_ && devices_.of_requests() != nullptr; }
  void stage(Task& task);
  void end(Task& task);
  void drive();
  template <class Step>
  void wait_for_ranks(Step&& step, int spin);
  template <class Step, class Diagnose, class CheckAlive, class IsGuess, class Where>
  void wait_until(Step&& step, Diagnose&& diagnose, CheckAlive&& check_alive, IsGuess&& is_guess,
                  Where&& where, bool is_devices, bool may_nap = true);
  /// Posts and starts of ours during which such requests are taken to be under way.
  static constexpr int kMixedPosts = 16;
  static std::atomic<int> mixed_posts_left;
  static void note_post() {
    if (mixed_posts_left.load(std::memory_order_relaxed) > 0) [[unlikely]]
      mixed_posts_left.fetch_sub(1, std::memory_order_relaxed);
  }
  static bool is_nap_due();
  static void yield();
  void check_time(int peer, double waited) const;
  void check_all_alive(std::chrono::steady_clock::time_point now);
  void wait_for_answer();
  /// Whether it is known if devices serve nonblocking reductions.
  bool is_settled() const {
    return devices_.are_refused || (devices_.channel && meets_ && !devices_.may_open_of_requests);
  }
  void count_empty(const Request& request);
  bool is_data_due(const Path& path, const Plan& plan);
  [[noreturn]] void fail();
  [[noreturn]] void fail(const Error& error);
  [[noreturn]] void refuse(const Error& failure) const;

  const std::unique_ptr<Bootstrap> bootstrap_;
  Group group_;
  std::optional<Decline> declined_;
  int spin_ = 0;                 // polls before a wait lets others run
  std::size_t early_calls_ = 0;  // of paths that want data: the same on all ranks
  std::unique_ptr<HostChannel> channel_;
  Devices devices_;
  NamedBlocks named_;   // in blocking calls
  bool meets_ = false;  // ranks meet before every call: some use a device
  bool maps_ = false;   // ranks meet before calls for Route::mapped: some have such buffers
  std::uint32_t idle_calls_ = 0;    // that did without memory that devices have mapped
  bool heaps_are_refused_ = false;  // ranks cannot map each other's heaps
  std::unique_ptr<PeerHeaps> heaps_;
  std::vector<MappedBuffers> mapped_;  // of the call under way
  std::mutex failure_mutex_;
  std::optional<Error> failure_;         // why it is unusable; written once, before ...
  std::atomic<bool> has_failed_{false};  // ... this is set
  std::atomic<bool> is_revoked_{false};  // since then, or before
  const char* last_algorithm_ = "none";
  std::unique_ptr<Plans> plans_;
  std::unique_ptr<Plans> meetings_;   // before calls that are left to the MPI, ...
  std::uint64_t user_operators_ = 0;  // ... for such a one, so many
  std::array<std::array<std::atomic<std::uint64_t>, kCollectives>, kForms> empty_calls_{};
  StagingBuffer staged_in_, staged_out_;
  // As Plan's, of what goes on in the background. Of several threads' starts: each pointer was
  // seen.
  std::atomic<const void*> seen_in_{nullptr}, seen_out_{nullptr};
  std::uint64_t posts_ = 0;
  std::atomic<bool> is_patient_{false};                                // waits have no limit
  std::atomic<std::chrono::steady_clock::time_point> all_alive_at_{};  // when all were seen
  bool may_use_devices_ = false, wants_to_settle_ = false;  // the same on all ranks, as ...
  bool wants_to_ask_ = false, has_asked_ = false;           // ... whether posts are to meet: ...
  bool may_ask_ = false;  // ... all have threads that go on while their programs do not
  std::atomic<const void*> posted_on_device_{nullptr};  // a buffer of the last such post
  std::unique_ptr<Background> background_;              // from open_background() or prepare() on
};

inline void Communicator::check_usable() const {
  // Acquire: pairs with the release in give_up(); `failure_` comes with it.
  if (has_failed_.load(std::memory_order_acquire)) [[unlikely]]
    refuse(*failure_);
  if (background_ && background_->has_failed()) [[unlikely]]
    refuse(background_->failure());
}

}  // namespace trib

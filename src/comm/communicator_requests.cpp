// SPDX-License-Identifier: BSD-3-Clause
// Reductions that go on in the background: nonblocking ones, and persistent ones with what is found
// out for them beforehand.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/communicator_impl.hpp"
#include "comm/cut.hpp"
#include "comm/staging.hpp"

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;

/// Between two looks at the peers of an operation that the program tests, unless it tests often.
constexpr auto kLookInterval = std::chrono::milliseconds(10);
/// And of these, what counts as waiting for them.
constexpr auto kAway = std::chrono::milliseconds(100);

/// Some milliseconds behind Clock::now(), and several times as quick.
Clock::time_point coarse_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return Clock::time_point(std::chrono::seconds(now.tv_sec) +
                           std::chrono::nanoseconds(now.tv_nsec));
}

constexpr int kDone = Background::kDone;

}  // namespace

bool Communicator::open_background() {
  check_usable();
  try {
    if (!background_)
      background_ = std::make_unique<Background>(group_, *channel_, *bootstrap_, devices_);
    return background_->open_lanes();
  } catch (...) {
    fail();
  }
}

namespace {
/// The 1st, 16th, 256th, ... of `posts`: a program that puts its buffers on devices later costs a
/// look now and then.
bool is_time_to_settle(std::uint64_t posts) {
  return std::has_single_bit(posts) && std::countr_zero(posts) % 4 == 0;
}
}  // namespace

/// All ranks come here, and have posted before what they ask each other: no answer needs more of
/// them. Whether devices serve posts must not depend on how far that is.
void Communicator::wait_for_answer() {
  auto alive_at = Clock::now();
  Rest rest(alive_at, !group_.is_crowded);
  while (background_->is_asking()) {
    Background::progress_all();
    bootstrap_->progress();
    rest.take();
    check_usable();
    const auto now = Clock::now();
    if (now - alive_at < kAliveInterval) continue;
    alive_at = now;
    channel_->check_none_failed();
    channel_->check_all_alive();
  }
}

void Communicator::settle_devices() {
  check_usable();
  wants_to_settle_ = false;
  if (is_settled()) return;
  try {
    // The call that this is a part of may wait as long as it likes: it is not ours.
    is_patient_ = true;
    Signature signature;
    signature.collective = static_cast<std::uint8_t>(Collective::allreduce);
    signature.hash = 2;
    channel_->announce(signature);
    wait_for_answer();
    // The program may have freed it.
    const void* const posted = posted_on_device_.load(std::memory_order_relaxed);
    const bool is_there = posted != nullptr && is_beyond_host(devices_.backend->where(posted));
    const std::int32_t has_posted = is_there && !background_->posts_have_devices() ? 1 : 0;
    const bool have_all = add_words(Collective::allreduce, 0, has_posted) == group_.size;
    is_patient_ = false;
    if (!have_all) return;
    open_device_of_requests(posted);
    if (devices_.channel) meets_ = true;
  } catch (...) {
    fail();
  }
}

void Communicator::post(Task& task, const Request& request) {
  check_usable();
  task.error_.reset();  // of the last post, as below
  task.fetched_bytes_ = 0;
  note_post();
  bool is_first_meeting = false;
  if (may_use_devices_ && is_time_to_settle(++posts_)) [[unlikely]] {
    wants_to_settle_ = !is_settled();
    // Nothing has come of that.
    wants_to_ask_ = wants_to_settle_ && posts_ > 1 && may_ask_;
  }
  task.request_ = request;
  task.request_.form = Form::nonblocking;
  keep_counts(task);
  const std::size_t count = task.request_.elements(group_.size);
  task.bytes_ = count * bytes(request.dtype);
  // Mostly they are the last post's: to share them anew would cost more than the look.
  if (task.findings_ != group_.shared_findings()) task.findings_ = group_.shared_findings();
  if (task.bytes_ == 0) {
    background_->announce(plans_->find(task.request_).signature, meets_in_background());
    return count_empty(task.request_);
  }
  const bool is_common = meets_in_background();
  // A channel of their own stays, whatever becomes of that for blocking calls.
  const bool may_be_own = wants_to_ask_ || has_asked_;
  task.may_meet_ = (may_be_own && devices_.is_defined(request, count)) ||
                   (is_common && devices_.can_serve(request, count));
  if (wants_to_ask_ && task.may_meet_) [[unlikely]] {
    wants_to_ask_ = false;
    is_first_meeting = !is_common;
    has_asked_ = has_asked_ || is_first_meeting;
  }
  task.meets_ = task.may_meet_ && (is_common || background_->posts_have_devices());
  task.meeting_ = is_common && task.may_meet_ ? Task::Meeting::common : Task::Meeting::none;
  try {
    stage(task);
    background_->post(task, is_first_meeting);
  } catch (...) {
    fail();
  }
}

/// Takes a copy of recvcounts, which the caller may change.
void Communicator::keep_counts(Task& task) const {
  Request& request = task.request_;
  if (!request.has_counts()) return;
  task.counts_.resize(static_cast<std::size_t>(group_.size));
  for (int rank = 0; rank < group_.size; ++rank)
    task.counts_[static_cast<std::size_t>(rank)] = static_cast<std::int64_t>(request.counts[rank]);
  request.counts = {task.counts_.data(), 8};
}

namespace {

/// On devices shorter vectors go by kernels that linger, and what is measured does not: two H100,
/// persistent allreduce of 16 bytes, 9.3 and 11.5 us where it was tuned, 8.0 and 9.0 by default. So
/// persistent reductions measure them only where that is asked for, and what is found is for
/// others.
constexpr std::size_t kLeastTunedOnDevice = 64 << 10;

/// Whether a persistent reduction on a device does without findings.
bool is_for_kernels_that_linger(std::size_t bytes, const Config& config) {
  return bytes < kLeastTunedOnDevice && config.resident != 0;
}

}  // namespace

/// Ranks meet here: those that disagree must not enter different collective calls.
std::unique_ptr<Task> Communicator::prepare(const Request& request, const Hints& hints) {
  check_usable();
  auto task = std::make_unique<Task>();
  task->request_ = request;
  task->request_.form = Form::persistent;
  keep_counts(*task);
  try {
    channel_->announce(plans_->find(task->request_).signature);
    const auto step = [&](int) {
      const int missing = channel_->missing();
      return missing < 0 ? kDone : missing;
    };
    wait_for_ranks(step, 1);
    settle(*task);
    std::optional<Choice> way;
    // What goes by shared devices, or is staged, keeps the bits of blocking calls.
    const bool is_on_host = !task->meets_ && task->mapped_.empty() && !task->is_staged_;
    if (is_on_host || (task->meets_ && !devices_.are_shared))
      way = tune_for(task->request_, task->meets_, hints);
    else if (group_.rank == 0 && (hints.is_explicit || hints.way.algorithm[0] != '\0'))
      log_once(Config::Log::warn,
               "trib_tune and trib_algorithm are ignored for buffers on GPUs that ranks share, in "
               "shared heaps, or staged through host memory");
    if (way && task->meets_) {
      task->mapped_.clear();
      task->hold_.reset();
    }
    task->meeting_ = task->meets_ ? Task::Meeting::common : Task::Meeting::none;
    task->findings_ = task->meets_ && is_for_kernels_that_linger(plans_->find(task->request_).bytes,
                                                                 group_.config)
                          ? std::make_shared<const Findings>()
                          : group_.shared_findings();
    if (!background_)
      background_ = std::make_unique<Background>(group_, *channel_, *bootstrap_, devices_);
    if (!background_->prepare(*task, way)) {
      if (group_.rank == 0)
        log_once(Config::Log::warn,
                 "no shared memory for more persistent reductions: they are left to the MPI");
      return nullptr;
    }
  } catch (...) {
    fail();
  }
  return task;
}

/// What ranks tell each other of a persistent reduction, whose buffers stay where they are.
struct Communicator::Part {
  Card card;
  bool can_serve;  ///< on a device
  bool may_turn;
};

/// Collective: finds out where a persistent reduction is to run.
void Communicator::settle(Task& task) {
  const Request& request = task.request_;
  devices_.look_for_use(request);
  DeviceCall none;
  Plan& plan = plans_->find(request);
  Part mine{devices_.card(request, none), devices_.can_serve(request, plan.signature.count),
            (!background_ || background_->turning_lanes() < Background::kTurningLanes) &&
                channel_->has_ample_memory()};
  if (plan.is_mappable) {
    const Card card = heap_card(request, plan);
    mine.card.in_at = card.in_at;
    mine.card.out_at = card.out_at;
  }
  std::vector<Part> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);
  task.meets_ = settle_on_device(request, plan, all);
  if (task.meets_ && devices_.are_shared && is_in_anyones_way(request, plan)) task.meets_ = false;
  if (task.meets_) hold(task, plan);
  // Where ranks share devices, one works on the buffers of others.
  if (task.meets_ && devices_.are_shared && !task.hold_) task.meets_ = false;
  task.is_staged_ = !task.meets_ && std::any_of(all.begin(), all.end(), [](const Part& part) {
    return is_beyond_host(part.card.in) || is_beyond_host(part.card.out);
  });
  // Each rank may have dismissed others by now.
  task.may_turn_ =
      std::all_of(all.begin(), all.end(), [](const Part& part) { return part.may_turn; });
  const auto card_of = [&](int rank) { return all[static_cast<std::size_t>(rank)].card; };
  if (!task.meets_ && (!plan.is_mappable || !map(plan, card_of, task.mapped_)))
    task.mapped_.clear();
}

/// Collective, once devices are open: only they can say. Whether is_in_the_way() on any rank.
bool Communicator::is_in_anyones_way(const Request& request, const Plan& plan) {
  const char mine = is_in_the_way(request, plan);
  std::vector<char> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);
  return std::any_of(all.begin(), all.end(), [](char any) { return any != 0; });
}

/// Collective: lets kernels of other ranks use the task's buffers, if they gain by it or cannot do
/// without.
void Communicator::hold(Task& task, const Plan& plan) {
  const Request& request = task.request_;
  ShownBuffers buffers;
  if (devices_.are_shared) {
    buffers = buffers_of(request, plan);
    if (buffers.out_bytes == 0) buffers.out = nullptr;
    if (buffers.out != nullptr && devices_.where(request.out, request.dtype) != Memory::device)
      buffers = {};
  } else if (may_map(plan)) {
    buffers = mappable_buffers(request, plan);
  } else {
    return;
  }
  if (devices_.where(request.in, request.dtype) != Memory::device) buffers = {};
  task.hold_ = devices_.of_requests()->hold(buffers, task.mapped_);
  if (!task.hold_) return task.mapped_.clear();
  // Of its own, the kernel uses those, too, that no peer is to see.
  task.mapped_[static_cast<std::size_t>(group_.rank)] = {const_cast<void*>(request.in),
                                                         request.out};
}

/// Collective: whether it may run on the ranks' devices.
bool Communicator::settle_on_device(const Request& request, Plan& plan,
                                    const std::vector<Part>& parts) {
  bool is_any_beyond = false;
  for (const Part& part : parts) {
    for (const Memory memory : {part.card.in, part.card.out}) {
      is_any_beyond = is_any_beyond || is_beyond_host(memory);
      if (memory == Memory::host || memory == Memory::distant) return false;
    }
    if (!part.card.is_ready || !part.can_serve) return false;
  }
  if (!is_any_beyond || plan.bytes == 0) return false;
  open_device_of_requests(request.in);
  return devices_.of_requests() != nullptr;
}

namespace {

/// Seconds that this process has measured for, not counting what it was asked for request by
/// request.
std::atomic<double> seconds_of_tuning{0};

/// Where tuning is switched off, and a request asks for it all the same.
constexpr long kUsualBudgetMs = 100;

/// What a rank brings along to tune_for().
struct Wish {
  Hints hints;
  bool is_contended = false;  // another call on a device is under way, or work of the program
  double seconds_of_tuning = 0;
};

/// Where all ranks name the same way: that.
const Variant* common_way(const std::vector<Wish>& wishes) {
  const Variant& way = wishes[0].hints.way;
  for (const Wish& wish : wishes)
    if (wish.hints.way != way) {
      log_once(Config::Log::warn, "trib_algorithm is ignored: the ranks pass different values");
      return nullptr;
    }
  return way.algorithm[0] == '\0' ? nullptr : &way;
}

}  // namespace

/// Ranks agree on all of it. Nothing: the tables are to be asked, which may know more now.
std::optional<Choice> Communicator::tune_for(const Request& request, bool is_on_device,
                                             const Hints& hints) {
  Plans sketch(group_, *channel_, 1, /*has_no_data=*/true);
  const Plan& plan = sketch.find(request);
  if (plan.bytes == 0) return {};
  const Config& config = group_.config;
  DeviceCall call;
  if (is_on_device) call.begin();
  Wish mine{hints, is_on_device && (!call.is_first() || !devices_.of_requests()->is_settled()),
            seconds_of_tuning};
  if (mine.hints.budget_ms < 0)
    mine.hints.budget_ms = static_cast<double>(
        config.tune_budget_ms > 0 || !hints.is_explicit ? config.tune_budget_ms : kUsualBudgetMs);
  std::vector<Wish> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);

  const Key key = sketch.key_of(plan, is_on_device ? Route::device : Route::host);
  if (const Variant* const way = common_way(all)) {
    Choice choice = select(key, config);
    if (std::strcmp(way->algorithm, "default") != 0) choice.algorithm = way->choice().algorithm;
    if (way->slice_bytes > 0) choice.slice_bytes = way->slice_bytes;
    if (way->blocks > 0 && is_on_device) {
      choice.is_packet = way->is_packet;
      choice.blocks = way->blocks;
    }
    if (choice.algorithm != nullptr && choice.algorithm->serves(request.collective) &&
        (config.determinism != Config::Determinism::order ||
         association_of(*choice.algorithm, key) == Association::rank_order))
      return choice;
    log_once(Config::Log::warn,
             "trib_algorithm=" + std::string(way->algorithm) + " is ignored: it does not serve " +
                 std::string(name(request.collective)) + ", or TRIB_DETERMINISM forbids it");
    return {};
  }

  bool is_explicit = true, is_again = true, is_contended = false;
  double budget = mine.hints.budget_ms, spent = 0;
  for (const Wish& wish : all) {
    budget = std::min(budget, wish.hints.budget_ms);
    is_explicit = is_explicit && wish.hints.is_explicit;
    is_again = is_again && wish.hints.is_again;
    is_contended = is_contended || wish.is_contended;
    spent = std::max(spent, wish.seconds_of_tuning);
  }
  budget /= 1000;
  // With more ranks than cores it would be the scheduler that is measured, and where the program
  // has something under way on its device, that. Kernels of two calls could wait for each other:
  // see DeviceCall.
  if (budget <= 0 || group_.is_crowded || is_contended || !is_tunable(config) ||
      plan.bytes > (is_on_device && is_explicit ? kMostTunedOnDevice : kMostTunedBytes))
    return {};
  if (is_on_device && !is_explicit && plan.bytes < kLeastTunedOnDevice) return {};
  if (!is_explicit &&
      spent + budget > kBudgetsPerProcess * static_cast<double>(config.tune_budget_ms) / 1000)
    return {};
  if (!is_again && group_.findings().has_row(key, config)) return {};

  const auto begin = Clock::now();
  const int spin = is_on_device ? kFirstSpinDevice : spin_;
  std::optional<Record> record =
      tune({group_, *channel_, *bootstrap_, is_on_device ? devices_.of_requests() : nullptr,
            [&](Operation& operation, HostChannel& channel) {
              wait(operation, is_on_device, spin, channel);
            },
            is_explicit},
           request, budget);
  if (!is_explicit)
    seconds_of_tuning.fetch_add(std::chrono::duration<double>(Clock::now() - begin).count());
  if (!record) return {};
  group_.set(group_.findings().with(record->finding));
  record->machine = machine_of(devices_.backend, key.place);
  TuningFile::of(config.tuning_file).add(*record, /*is_writer=*/group_.rank == 0);
  if (group_.rank == 0 && is_logged(Config::Log::info)) {
    const Finding& finding = record->finding;
    log(Config::Log::info, "tuned " + std::string(name(finding.collective)) + " of " +
                               std::to_string(finding.bytes) +
                               " bytes: " + (finding.is_default ? "the default, " : "") +
                               finding.best.algorithm + ", " + to_text(finding.seconds * 1e6) +
                               " us (default: " + to_text(finding.default_seconds * 1e6) + " us)");
  }
  return {};
}

void Communicator::start(Task& task) {
  check_usable();
  note_post();
  if (task.bytes_ == 0) return count_empty(task.request_);
  try {
    stage(task);
    background_->start(task);
  } catch (...) {
    fail();
  }
}

/// Says where the operation reads and writes: buffers on a device get copies in host memory, unless
/// ranks meet first.
inline void Communicator::stage(Task& task) {
  const Request& request = task.request_;
  task.in_ = request.in;
  task.out_ = request.out;
  task.fetched_bytes_ = 0;
  task.stages_late_ = false;
  if (devices_.backend == nullptr || task.meeting_ == Task::Meeting::common) return;
  if (!devices_.are_in_use) {
    // A buffer that was in the host's memory before there was a device is there still.
    if (request.in == seen_in_.load(std::memory_order_relaxed) &&
        request.out == seen_out_.load(std::memory_order_relaxed)) [[likely]]
      return;
    if (task.is_on_host_) return;
    if (!devices_.look_for_use(request)) {
      seen_in_.store(request.in, std::memory_order_relaxed);
      seen_out_.store(request.out, std::memory_order_relaxed);
      task.is_on_host_ = request.form == Form::persistent;
      return;
    }
  }
  // Where other posts come first that decide about it, it is too early.
  task.stages_late_ = has_asked_ && request.form == Form::nonblocking;
  bool is_on_device;
  if (task.stages_late_) {
    is_on_device = is_beyond_host(devices_.backend->where(request.in));
  } else {
    const Memory in = devices_.backend->where(request.in);
    if (is_beyond_host(in))
      wait_for(devices_.backend->unsettled(request.in), /*looks_at_peers=*/true);
    background_->stage(task, in);
    is_on_device = task.in_ != request.in;
  }
  posted_on_device_.store(is_on_device ? request.in : nullptr, std::memory_order_relaxed);
}

/// What is left to do once `task` is done.
inline void Communicator::end(Task& task) {
  if (task.error_) [[unlikely]] {
    const Error error = *task.error_;
    task.error_.reset();
    task.fetched_bytes_ = 0;  // there is no result
    throw error;
  }
  fetch(task);
}

void Communicator::fetch(Task& task) {
  // Whoever is gone by now: the result is here.
  if (!task.error_ && task.fetched_bytes_ > 0) [[unlikely]]
    wait_for(devices_.backend->unsettled(task.request_.out), /*looks_at_peers=*/false);
  fetch_at_once(task);
}

void Communicator::fetch_at_once(Task& task) {
  if (task.error_) [[unlikely]]
    return;
  if (task.fetched_bytes_ > 0) [[unlikely]] {
    devices_.backend->copy(task.request_.out, task.out_, task.fetched_bytes_);
    task.fetched_bytes_ = 0;
  }
  task.staged_in_.release();
  task.staged_out_.release();
}

bool Communicator::test(Task& task) {
  task.is_waited_for_at_once_ = false;
  if (background_) background_->look_at(task);
  if (!task.is_done() && background_->advance(task, 0) != kDone) {
    drive();
    if (!task.is_done()) {
      look_after(task);
      if (!task.is_done()) {
        // Programs that test in a loop would keep the core from those that they wait for.
        if (group_.is_crowded) ::sched_yield();
        return false;
      }
    }
  } else {
    Background::progress_now_and_then();
  }
  end(task);
  return true;
}

void Communicator::look_after(Task& task) {
  if (background_) background_->look_at(task);
  const auto now = coarse_now();
  // Programs may test all the time, or seldom.
  if (++task.looks_ % 64 != 0 && now - task.looked_at_ < kLookInterval) return;
  const auto before = std::exchange(task.looked_at_, now);
  const int peer = background_->advance(task, 0);
  if (peer == kDone) return;
  const std::uint64_t where = background_->where(task);
  if (!task.waited_ || where != task.stood_)
    task.waited_ = Clock::duration::zero();
  else  // a program that was away for long has not waited meanwhile
    *task.waited_ += std::min<Clock::duration>(now - before, kAway);
  task.stood_ = where;
  try {
    background_->diagnose(task, peer);
    check_time(peer, std::chrono::duration<double>(*task.waited_).count());
    if (now - task.alive_at_ < kAliveInterval) return;
    const bool is_first = task.alive_at_ == Clock::time_point{};
    task.alive_at_ = now;
    if (is_first) return;
    background_->check_alive(task, peer);
    check_all_alive(now);
  } catch (const Error& error) {
    // If it did its part before it left, this has got us on.
    const int still = background_->advance(task, 0);
    if (still == peer || (still != kDone && background_->is_guessing(task)))
      background_->fail(error);
  }
}

void Communicator::wait(Task& task) {
  if (background_) {
    task.is_waited_for_at_once_ = background_->is_last_started(task);
    background_->look_at(task);
  }
  if (background_ && background_->advance(task, spin_) != kDone) {
    try {
      wait_until([&](int polls) { return background_->advance(task, polls); },
                 [&](int peer) { background_->diagnose(task, peer); },
                 [&](int peer) { background_->check_alive(task, peer); },
                 [&] { return background_->is_guessing(task); },
                 [&] { return background_->where(task); }, task.meets_,
                 /*may_nap=*/mixed_posts_left.load(std::memory_order_relaxed) <= 0);
    } catch (...) {  // the task must not be under way any more
      fail();
    }
    if (group_.is_crowded) [[unlikely]]
      channel_->wake_waiting();
  } else {
    Background::progress_now_and_then();
  }
  end(task);
}

void Communicator::dismiss(std::unique_ptr<Task> task) {
  if (background_) background_->dismiss(*task);
}

}  // namespace trib

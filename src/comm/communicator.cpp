// SPDX-License-Identifier: BSD-3-Clause
// One call from the request to the result: run() looks up a plan, launches its program and waits.
// What goes on in the background is in communicator_requests.cpp, the set-up in
// communicator_set_up.cpp.
#include "comm/communicator.hpp"

#include <chrono>
#include <utility>

#include "base/log.hpp"
#include "comm/communicator_impl.hpp"
#include "comm/cut.hpp"
#include "comm/staging.hpp"
#include "comm/suspects.hpp"

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;

/// Where ranks share cores, and something else wants one, too: rounds of waiting in which they
/// sleep rather than yield.
constexpr int kNaps = 1000;

/// Calls that do without mapped memory between two looks whether it is still there.
constexpr std::uint32_t kIdleCalls = 64;

constexpr int kDone = Background::kDone;

}  // namespace

// ------------------------------------------------------------------------------------------ a call

void Communicator::run(const Request& request) {
  check_usable();
  try {
    run_checked(request);
  } catch (...) {
    fail();
  }
}

inline void Communicator::run_checked(const Request& request) {
  Plan& plan = plans_->find(request);
  channel_->announce(plan.signature);
  if (plan.bytes == 0) {
    last_algorithm_ = "none";
    count_empty(request);
    return;
  }
  // A buffer that was in the host's memory before there was a device is there still.
  if (!devices_.are_in_use && devices_.backend != nullptr &&
      (request.in != plan.seen_in || request.out != plan.seen_out)) [[unlikely]] {
    devices_.look_for_use(request);
    plan.seen_in = request.in;
    plan.seen_out = request.out;
  }
  if (!meets_) meets_ = channel_->is_time_to_meet(Occasion::devices);
  // Which of them comes first must not depend on what only this rank knows, such as whether it uses
  // a device: ranks meet in them.
  if (!meets_ && plan.is_mappable && run_mapped(request, plan)) return;
  if (meets_ || devices_.are_in_use) [[unlikely]]
    return run_with_devices(request, plan);
  run_path(plans_->path(plan, Route::host, group_.findings()), plan, Route::host, request.in,
           request.out);
}

void Communicator::count_empty(const Request& request) {
  empty_calls_[static_cast<std::size_t>(request.form)][static_cast<std::size_t>(request.collective)]
      .fetch_add(1, std::memory_order_relaxed);
}

/// The scratch for large messages takes a millisecond or so to set up. Calls that fit without are
/// by half a microsecond quicker with it, so that there have to be many; longer ones gain more.
constexpr std::size_t kCallsBeforeData = 1000, kBytesOfCall = 8 << 10;

bool Communicator::is_data_due(const Path& path, const Plan& plan) {
  early_calls_ += 1 + plan.bytes / kBytesOfCall;
  // Where ranks hand on their cores, each piece takes several turns of the scheduler.
  const bool is_slow = group_.is_crowded && runs_of(path.arguments) > 1;
  return early_calls_ > kCallsBeforeData || is_slow || path.arguments.is_large;
}

void Communicator::run_path(Path& path, Plan& plan, Route route, const void* in, void* out) {
  if (path.wants_data && !is_on_device(route) && !channel_->has_data() && is_data_due(path, plan))
    reserve_data(plan, route);
  path.arguments.in = in;
  path.arguments.out = out;
  Loaded& loaded = *path.loaded;
  last_algorithm_ = loaded.algorithm.c_str();
  ++loaded.calls;
  loaded.bytes += plan.bytes;
  const bool is_devices = is_on_device(route);
  if (!group_.config.stats) {
    wait(loaded.program->launch(path.arguments), is_devices);
  } else {
    const auto start = Clock::now();
    wait(loaded.program->launch(path.arguments), is_devices);
    loaded.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }
}

// -------------------------------------------------------------------------------- mapped buffers

/// False: not all ranks' buffers are mapped by all.
bool Communicator::run_mapped(const Request& request, Plan& plan) {
  if (heaps_are_refused_) return false;
  const Card card = heap_card(request, plan);
  if (!maps_) {
    // Until all ranks know of it, as if there were no such buffers.
    maps_ = channel_->is_time_to_meet(Occasion::heaps);
    if (!maps_) {
      if (card.in_at != SharedHeap::kNowhere)
        channel_->ask_for_meetings(Occasion::heaps, plan.is_joint);
      return false;
    }
  }
  meet(card);
  if (!map(plan, [&](int rank) { return channel_->card(rank); }, mapped_)) return false;
  Path& path = plans_->path(plan, Route::mapped, group_.findings());
  path.arguments.mapped = mapped_.data();
  run_path(path, plan, Route::mapped, request.in, request.out);
  return true;
}

/// Where this rank's buffers are, if peers may read and write both.
Card Communicator::heap_card(const Request& request, const Plan& plan) const {
  Card card;
  SharedHeap& heap = SharedHeap::get();
  if (!heap.has(request.in)) return card;
  const std::size_t out_bytes = plan.out_bytes_of(group_.rank);
  const auto begin = reinterpret_cast<std::uintptr_t>(request.in);
  const auto out = reinterpret_cast<std::uintptr_t>(request.out);
  const bool has_out = request.out != nullptr && out_bytes > 0;
  // A scattered result in place lies over what peers have yet to read.
  const bool is_in_place = has_out && out < begin + plan.bytes && begin < out + out_bytes;
  if (is_in_place && is_scatter(request.collective)) return card;
  if (has_out) {
    card.out_at = heap.offset_of(request.out, out_bytes);
    if (card.out_at == SharedHeap::kNowhere) return card;
  }
  card.in_at = heap.offset_of(request.in, plan.bytes);
  return card;
}

// -------------------------------------------------------------------------------------- devices

/// Some rank uses a device: where the buffers are decides, all ranks' together.
void Communicator::run_with_devices(const Request& request, Plan& plan) {
  DeviceCall call;
  call.begin();
  Card card = device_card(request, plan, call);
  Route route = Route::host;
  if (!meets_) {
    // Peers do not know yet that there are devices: until they do, as if there were none.
    if (is_beyond_host(card.in) || is_beyond_host(card.out))
      channel_->ask_for_meetings(Occasion::devices, plan.is_joint);
  } else {
    route = meet(card, request, plan, call);
    if (route == Route::device && !devices_.channel) {
      open_device(request.in);
      if (devices_.are_shared) plans_->forget(plan);
      card = device_card(request, plan, call);  // the channel's device is known only now
      route = meet(card, request, plan, call);
    }
  }
  if (route == Route::device && devices_.are_shared && !reach(card, request, plan, route))
    route = Route::staged;
  if (route == Route::device && may_map(plan) &&
      Devices::are_mappable(*channel_, group_.size, request, named_) &&
      reach(card, request, plan, Route::device_mapped))
    route = Route::device_mapped;
  else if (devices_.channel && ++idle_calls_ % kIdleCalls == 0)
    devices_.tidy_up();
  while (is_on_device(route)) {
    const Engine engine =
        plans_->path(plan, route, group_.findings(), devices_.channel.get()).choice.engine;
    if (!is_driven_by_host(engine) || devices_.channel->has(engine) || reserve(engine, plan)) break;
  }
  if (is_on_device(route) && plan.signature.count > kMostElements &&
      !is_driven_by_host(
          plans_->path(plan, route, group_.findings(), devices_.channel.get()).choice.engine))
    route = Route::staged;  // too much for a kernel
  Path& path = plans_->path(plan, route, group_.findings(), devices_.channel.get());
  if (is_on_device(route)) {
    path.arguments.mapped = mapped_.data();
    return run_path(path, plan, route, request.in, request.out);
  }

  const void* from = request.in;
  void* to = request.out;
  const DeviceBackend* const device = devices_.backend;
  const Memory in = card.in, out = card.out;
  if (is_beyond_host(in)) {
    void* const copy = staged_in_.get(*device, plan.bytes);
    wait_for(device->unsettled(request.in), /*looks_at_peers=*/true);
    device->copy(copy, request.in, plan.bytes);
    from = copy;
  }
  if (is_beyond_host(out)) to = staged_out_.get(*device, plan.out_bytes);
  run_path(path, plan, route, from, to);
  if (is_beyond_host(out) && plan.out_bytes > 0) {
    wait_for(device->unsettled(request.out), /*looks_at_peers=*/false);
    device->copy(request.out, to, plan.out_bytes);
  }
  staged_in_.release();
  staged_out_.release();
}

bool Communicator::run_copy(const Request& request, bool is_possible) {
  check_usable();
  try {
    Plan& plan = plans_->find(request);
    channel_->announce(plan.signature);
    DeviceCall call;
    call.begin();
    Card card = is_possible ? device_card(request, plan, call) : devices_.card(request, call);
    if (!is_possible) card.in = card.out = Memory::distant;
    if (meet(card, request, plan, call) != Route::device) return false;
    if (devices_.are_shared && !reach(card, request, plan, Route::device)) return false;
    Path& path = plans_->path(plan, Route::device, group_.findings(), devices_.channel.get());
    // A part, in terms of a vector that nobody has.
    const auto whole = [&](const void* part, int rank) {
      const bool is_part = part != nullptr && request.collective == Collective::allgather;
      const std::size_t before = path.chunk_begin[static_cast<std::size_t>(is_part ? rank : 0)];
      return reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(part) -
                                           before * bytes(request.dtype));
    };
    if (devices_.are_shared) {
      for (int rank = 0; rank < group_.size; ++rank) {
        MappedBuffers& buffers = mapped_[static_cast<std::size_t>(rank)];
        buffers.in = const_cast<void*>(whole(buffers.in, rank));
      }
      path.arguments.mapped = mapped_.data();
    }
    run_path(path, plan, Route::device, whole(request.in, group_.rank), request.out);
    return true;
  } catch (...) {
    fail();
  }
}

/// What the device has to do may depend on a peer that needs this rank's MPI meanwhile.
void Communicator::wait_for(const std::unique_ptr<Unsettled>& unsettled, bool looks_at_peers) {
  if (!unsettled) return;
  // No limit: it is the program's own work.
  auto alive_at = Clock::now();
  for (Rest rest(alive_at, !group_.is_crowded); !unsettled->is_over();) {
    drive();
    rest.take();
    const auto now = Clock::now();
    if (!looks_at_peers || now - alive_at < kAliveInterval) continue;
    alive_at = now;
    check_all_alive(now);
  }
}

void Communicator::meet(const Card& card, bool looks_ahead) {
  channel_->present(card);
  if (looks_ahead && devices_.channel) devices_.channel->look_ahead();
  const auto step = [&](int polls) {
    int absent = channel_->absent();
    for (int poll = 0; absent >= 0 && poll < polls; ++poll) {
      relax();
      absent = channel_->absent();
    }
    return absent < 0 ? kDone : absent;
  };
  wait_for_ranks(step, spin_);
}

Card Communicator::device_card(const Request& request, const Plan& plan, const DeviceCall& call) {
  Card card = devices_.card(request, call);
  if (!devices_.channel) return card;
  if (devices_.are_shared) {
    if (is_in_the_way(request, plan)) card.is_contended = true;
    devices_.channel->show(card, buffers_of(request, plan));
    if (card.in == Memory::device || card.out == Memory::device)
      wait_for(devices_.channel->unsettled(), /*looks_at_peers=*/true);
  } else if (may_map(plan)) {
    const ShownBuffers buffers = mappable_buffers(request, plan);
    if (buffers.in != nullptr) devices_.channel->show(card, buffers);
  }
  return card;
}

/// Whether the result lies where it must not: on shared devices.
bool Communicator::is_in_the_way(const Request& request, const Plan& plan) const {
  return devices_.are_shared && !devices_.channel->keeps_results_aside() &&
         is_scattered_over_input(request, plan.bytes, plan.out_bytes);
}

ShownBuffers Communicator::buffers_of(const Request& request, const Plan& plan) const {
  return {request.in, request.out, plan.in_bytes_of(group_.rank), plan.out_bytes_of(group_.rank)};
}

/// Those that kernels of other devices are to work on, or none.
ShownBuffers Communicator::mappable_buffers(const Request& request, const Plan& plan) const {
  const bool is_aligned = (reinterpret_cast<std::uintptr_t>(request.in) |
                           reinterpret_cast<std::uintptr_t>(request.out)) %
                              kDeviceUnit ==
                          0;
  if (is_scattered_over_input(request, plan.bytes, plan.out_bytes) ||
      (!is_aligned && group_.config.map == Config::Map::automatic))
    return {};
  ShownBuffers buffers = buffers_of(request, plan);
  if (is_scatter(request.collective)) buffers.out = nullptr;  // stored by their own rank
  return buffers;
}

/// Whether kernels are to work on the buffers of all ranks, if these can be mapped. The same on all
/// ranks.
bool Communicator::may_map(const Plan& plan) const {
  return plan.is_mappable_on_device && !devices_.are_shared && devices_.channel &&
         devices_.channel->can_map();
}

/// After the meeting with `card`, which may be followed by another one: finds out where the buffers
/// are that this rank's kernels are to reach, of all ranks on its device or of all there are. False
/// (on all ranks alike): kernels cannot serve the call on `route`.
bool Communicator::reach(Card& card, const Request& request, Plan& plan, Route route) {
  if (!plans_->can_use(plan, route, group_.findings(), devices_.channel.get())) return false;
  const bool has_news = named_.has_news(*channel_, group_.size);
  card.is_reached = devices_.channel->reach(*channel_, request.in, request.out, mapped_);
  if (!has_news) {
    if (!card.is_reached) throw Error(Code::device, "another rank's buffers are gone");
    return true;
  }
  meet(card);
  bool is_reached = true;
  for (int rank = 0; rank < group_.size; ++rank)
    is_reached = is_reached && channel_->card(rank).is_reached;
  if (!is_reached) named_.refuse_news();
  return is_reached;
}

Route Communicator::meet(Card& card, const Request& request, const Plan& plan,
                         const DeviceCall& call) {
  // A kernel that lingers belongs to the call that was there first: other threads' leave it alone.
  meet(card, /*looks_ahead=*/call.is_first());
  // Kernels of calls that the host drives see a slice at a time.
  std::uint64_t elements = plan.signature.count;
  if (elements > kMostElements &&
      is_driven_by_host(plans_->choose(plan, Route::device, group_.findings()).engine))
    elements = 0;
  return devices_.route(*channel_, group_.size, devices_.can_serve(request, elements), named_);
}

/// The first call for such an engine; all ranks have met.
bool Communicator::reserve(Engine engine, Plan& plan) {
  std::string why;
  if (devices_.channel->reserve(engine, why)) {
    plans_->forget(plan);  // slices may be longer now
    return true;
  }
  if (group_.rank == 0 && !why.empty())
    log_once(Config::Log::warn,
             engine == Engine::copy
                 ? "large reductions of GPU buffers do without copy engines: " + why
                 : "TRIB_ENGINE=gemv is left out: " + why);
  plans_->do_without(engine, plan);
  return false;
}

/// Whether kernels may fold over each device's ranks first.
bool Communicator::may_share(const Level& device_of, std::string& why) const {
  why.clear();
  if (std::string_view(group_.config.algorithm) != "auto")
    why = "ranks share GPUs, and TRIB_ALGORITHM names an algorithm";
  else if (group_.config.determinism == Config::Determinism::order && domains(device_of) > 1)
    why = "ranks share GPUs, and TRIB_DETERMINISM=order asks for sums in rank order";
  return why.empty();
}

/// Collective. `pointer`: into memory of this rank's device.
void Communicator::open_device(const void* pointer) {
  std::string why;
  auto channel = devices_.backend->open(*bootstrap_, group_.config, pointer, why);
  if (channel) {
    const Level device_of = channel->device_of();
    if (device_of.empty() || may_share(device_of, why)) {
      change_devices([&] {
        devices_.are_shared = devices_.may_open_of_requests = !device_of.empty();
        group_.set_device_of(device_of);
        devices_.channel = std::move(channel);
      });
      return adopt(Key::Place::device);
    }
  }
  devices_.are_refused = true;
  if (group_.rank == 0)
    log_once(Config::Log::warn, "reductions of GPU buffers go through host memory: " + why);
}

/// Collective: the same, for nonblocking and persistent reductions.
void Communicator::open_device_of_requests(const void* pointer) {
  if (!devices_.channel) {
    open_device(pointer);
    if (devices_.are_shared) plans_->forget();
  }
  if (!std::exchange(devices_.may_open_of_requests, false)) return;
  // In the same context as the first one: `pointer` may be another device's.
  void* memory = nullptr;
  try {
    memory = devices_.channel->allocate(1);
  } catch (const Error&) {
    // Other ranks go on: open() tells them if this one cannot.
  }
  std::string why;
  auto channel =
      devices_.backend->open(*bootstrap_, group_.config, memory != nullptr ? memory : pointer, why);
  if (memory != nullptr) devices_.channel->free(memory);
  if (channel && channel->device_of() != group_.device_of()) {
    channel.reset();
    why = "ranks came with other GPUs than before";
  }
  if (!channel && group_.rank == 0)
    log_once(Config::Log::warn,
             "nonblocking and persistent reductions of GPU buffers go through host memory: " + why);
  change_devices([&] { devices_.own_of_requests = std::move(channel); });
}

/// The background may be looking at them, in another thread.
template <class Change>
void Communicator::change_devices(Change&& change) {
  if (background_)
    background_->while_still(change);
  else
    change();
}

// -------------------------------------------------------------------------------------- waiting

std::atomic<int> Communicator::naps_left = 0, Communicator::mixed_posts_left = 0;

/// Whether to sleep in this wait.
bool Communicator::is_nap_due() {
  if (naps_left.load(std::memory_order_relaxed) <= 0) return false;
  naps_left.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

/// Where ranks are crowded.
void Communicator::yield() {
  if (yields_for_long()) naps_left.store(kNaps, std::memory_order_relaxed);
}

void Communicator::check_time(int peer, double waited) const {
  if (group_.config.timeout > 0 && waited > group_.config.timeout &&
      !is_patient_.load(std::memory_order_relaxed))
    throw Error(Code::timeout, std::string(peer == group_.rank ? "the device of " : "") + "rank " +
                                   std::to_string(peer) + " did not arrive within TRIB_TIMEOUT=" +
                                   to_text(group_.config.timeout) + " s");
}

/// What everyone who waits does for others.
void Communicator::drive() {
  // The peer may be held up by a message that only our MPI can move, ...
  bootstrap_->progress();
  // ... or by a reduction that it waits for and we do not.
  Background::progress_all();
}

// ------------------------------------------------------------------ calls that are left to the MPI

void Communicator::note_declined(Collective collective, int root, Form form, Decline reason) {
  if (!channel_) return;
  Signature signature;
  signature.collective = static_cast<std::uint8_t>(collective);
  signature.form = static_cast<std::uint8_t>(form);
  signature.declined = static_cast<std::int8_t>(reason);
  signature.hash = 1;
  if (form == Form::nonblocking) {
    if (can_post()) background_->announce(signature, meets_in_background());
    return;
  }
  channel_->announce(signature);
  const bool has_root = collective != Collective::reduce || (root >= 0 && root < group_.size);
  if (reason != Decline::user_operator || !has_root) return;
  // To meet takes as long as a short reduction, and programs that do so do it often. Ranks count
  // alike.
  constexpr std::uint64_t kAlways = 64, kThen = 64;
  if (++user_operators_ > kAlways && user_operators_ % kThen != 0) return;
  try {
    add_words(collective, root, 0);
  } catch (...) {
    fail();
  }
}

/// Meets peers by a reduction of a word of each, and gives the sum. In a Reduce ranks that only
/// send need not wait, and get none: they may leave the MPI's own early, too, and there are
/// programs that count on it.
std::int32_t Communicator::add_words(Collective collective, int root, std::int32_t mine) {
  if (!meetings_) meetings_ = std::make_unique<Plans>(group_, *channel_, 1, /*has_no_data=*/true);
  std::int32_t all = 0;
  Request request;
  if (collective == Collective::reduce) {
    request.collective = Collective::reduce;
    request.root = root;
  }
  request.dtype = Dtype::i32;
  request.count = 1;
  Plan& plan = meetings_->find(request);
  Path& path = meetings_->path(plan, Route::host, group_.findings());
  path.arguments.in = &mine;
  path.arguments.out = &all;
  wait(path.loaded->program->launch(path.arguments), /*is_devices=*/false);
  return all;
}

// ------------------------------------------------------------------------------------ failures

/// In a handler: with the exception that it has caught.
void Communicator::fail() {
  try {
    throw;
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {  // out of memory, say
    fail(Error(Code::system, error.what()));
  }
}

void Communicator::fail(const Error& error) {
  const Error cause = channel_ ? cause_of(*channel_, error) : error;
  give_up(cause);
  throw cause;
}

void Communicator::refuse(const Error& failure) const {
  throw Error(is_revoked_.load(std::memory_order_relaxed)
                  ? Code::revoked
                  : passed_on(failure.code(), Code::unusable),
              std::string("this communicator is unusable since: ") + failure.what());
}

void Communicator::give_up(const Error& error) noexcept {
  {
    // Several threads may come here at once, with requests of their own. None leaves before peers
    // can see that this rank failed.
    const std::lock_guard lock(failure_mutex_);
    const bool is_revoked = error.code() == Code::revoked;
    if (is_revoked) is_revoked_.store(true, std::memory_order_relaxed);
    if (!has_failed_.load(std::memory_order_relaxed)) {
      const bool is_known = background_ && background_->has_failed();
      failure_ = is_known ? background_->failure() : error;
      has_failed_.store(true, std::memory_order_release);
      if (channel_) channel_->poison(*failure_);
      devices_.poison(*failure_);
    }
    if (is_revoked && channel_) channel_->poison(error);  // whatever had failed before
  }
  if (background_) background_->fail(error);
}

/// Ranks meet on the small segment first: those that disagree must not enter different collective
/// calls.
void Communicator::reserve_data(Plan& plan, Route route) {
  const auto step = [&](int) {
    const int missing = channel_->missing();
    return missing < 0 ? kDone : missing;
  };
  wait_for_ranks(step, 1);
  if (channel_->reserve_data()) {
    plans_->forget(plan);  // programs can be bound to it now
  } else {
    if (group_.rank == 0)
      log_once(
          Config::Log::warn,
          "no shared memory for large messages (64 MiB per rank at most, or /dev/shm is full): "
          "they go in small pieces");
    plans_->do_without_data(plan);
  }
  plans_->path(plan, route, group_.findings());
}

}  // namespace trib

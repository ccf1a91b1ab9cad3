// SPDX-License-Identifier: BSD-3-Clause
#include "api/stream_communicator.hpp"

#include <chrono>
#include <new>
#include <numeric>
#include <string_view>
#include <system_error>
#include <thread>

#include "algorithm/registry.hpp"
#include "base/rest.hpp"
#include "comm/plans.hpp"
#include "comm/tuner.hpp"

namespace trib {

namespace {

/// The process's settings, and rank 0's where ranks share them. What is wrong on one rank is an
/// error on all, as the others would wait for it.
Config agree_on_settings(Bootstrap& bootstrap) {
  struct Report {
    int rank, size;
    Config config{};
    bool is_good = true;
    Code code{};
    char failure[256] = {};
  };
  std::vector<Report> all(static_cast<std::size_t>(bootstrap.size()));
  Report mine{bootstrap.rank(), bootstrap.size()};
  std::optional<Error> failure;
  try {
    mine.config = read_config();
    host_backend();  // loads the modules, one of which may be missing
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure.emplace(Code::system, error.what());
  }
  if (failure) {
    mine.is_good = false;
    mine.code = failure->code();
    std::string_view(failure->what()).copy(mine.failure, sizeof mine.failure - 1);
  }
  bootstrap.exchange(&mine, all.data(), sizeof mine);
  if (failure) throw Error(*failure);
  for (int rank = 0; rank < mine.size; ++rank)
    if (const Report& its = all[static_cast<std::size_t>(rank)];
        its.rank != rank || its.size != mine.size)
      throw Error(Code::argument, "the exchange function has brought, as rank " +
                                      std::to_string(rank) + "'s of " + std::to_string(mine.size) +
                                      ", what is not, or ranks disagree on who they are: it says " +
                                      "rank " + std::to_string(its.rank) + " of " +
                                      std::to_string(its.size));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].is_good)
      throw Error(all[rank].code, "rank " + std::to_string(rank) + ": " + all[rank].failure);
  return adopt(mine.config, all[0].config);
}

}  // namespace

StreamCommunicator::StreamCommunicator(std::unique_ptr<Bootstrap> bootstrap)
    : bootstrap_(std::move(bootstrap)),
      config_(agree_on_settings(*bootstrap_)),
      rank_(bootstrap_->rank()),
      size_(bootstrap_->size()) {
  if (size_ == 1) {
    if (device_backend() == nullptr || !device_backend()->load())
      throw Error(Code::device, "there is no GPU driver, or Tributary was built without CUDA");
    return;
  }
  std::string why;
  // Each step is agreed between the ranks: either all go on, or all throw.
  host_ = host_backend().open(*bootstrap_, config_, why);
  if (!host_) throw Error(Code::system, "the ranks share no memory: " + why);
  DeviceBackend* const backend = device_backend();
  char is_ready = backend != nullptr && backend->load() ? 1 : 0;
  std::vector<char> ready(static_cast<std::size_t>(size_));
  bootstrap_->exchange(&is_ready, ready.data(), 1);
  for (int rank = 0; rank < size_; ++rank)
    if (ready[static_cast<std::size_t>(rank)] == 0)
      throw Error(Code::device, "rank " + std::to_string(rank) +
                                    " has no GPU driver, or Tributary "
                                    "was built without its CUDA backend");
  device_ = backend->open(*bootstrap_, config_, nullptr, why);
  if (!device_) throw Error(Code::device, why);
  if (!device_->device_of().empty())
    throw Error(
        Code::device,
        "ranks share a GPU: calls on a stream, which wait for each other there, want one each, or "
        "TRIB_SHARED_GPU=all");
  findings_ = Findings(adopt_findings(*bootstrap_, config_, backend, Key::Place::device), size_, 1);
}

/// A plan follows from the call and from what ranks agreed on when the communicator was made. One
/// that was forgotten is made anew, the same as before and without a word to the others: ranks need
/// not forget alike. Programs are never forgotten, and there are no more of them than algorithms
/// and roots. Kernels, also those of graphs, have their parameters by value: a plan is needed until
/// its call is enqueued, and by the Work that refers to it.
std::shared_ptr<const StreamCommunicator::Plan> StreamCommunicator::plan_for(
    const Call& call, std::vector<std::size_t> counts, bool is_registered) {
  PlanKey kind{call.collective, call.dtype, call.op, call.root, std::move(counts), is_registered};
  if (const auto found = plans_.find(kind); found != plans_.end()) {
    plans_by_use_.splice(plans_by_use_.begin(), plans_by_use_, found->second.place);
    return found->second.plan;
  }
  const auto made = std::make_shared<Plan>();
  Plan& plan = *made;
  const std::vector<std::size_t>& parts = std::get<4>(kind);
  const std::size_t total = std::accumulate(parts.begin(), parts.end(), std::size_t{0});
  const std::size_t element = bytes(call.dtype);

  Key key;
  key.collective = call.collective;
  key.size = size_;
  key.bytes = total * element;
  key.place = Key::Place::device;
  key.is_exact = is_exact(call.dtype);
  key.is_widened = is_widened(call.dtype);
  key.is_enqueued = true;
  key.can_map = is_registered;
  Choice choice = select(key, config_, &findings_);
  if (!suits_packets(*device_, key.bytes, config_)) choice.is_packet = false;
  Loaded& loaded = programs_[{call.collective, choice.algorithm, call.root, choice.reach}];
  if (!loaded.program) {
    Shape shape;
    shape.collective = call.collective;
    shape.size = size_;
    shape.root = call.root;
    shape.is_on_device = true;
    const std::vector<Schedule> all =
        lower(all_ranks(*choice.algorithm, shape), shape, choice.reach);
    loaded.chunks = static_cast<std::size_t>(all[static_cast<std::size_t>(rank_)].chunks);
    loaded.parts = static_cast<std::size_t>(all[static_cast<std::size_t>(rank_)].parts);
    loaded.reach = choice.reach;
    loaded.program = device_->load(all, choice.engine);
  }
  plan.loaded = &loaded;
  if (loaded.program->fit(/*is_large=*/!choice.is_packet) < element)
    throw Error(Code::argument, "TRIB_ALGORITHM=" + std::string(choice.algorithm->name) +
                                    " has no room on a GPU for " +
                                    std::string(name(call.collective)) + " over " +
                                    std::to_string(size_) + " ranks");
  const bool is_by_rank = parts.size() > 1 && loaded.chunks == parts.size();
  cut_chunks(plan.chunk_begin, loaded.chunks, loaded.parts, total, element,
             is_by_rank ? parts.data() : nullptr);
  Arguments& arguments = plan.arguments;
  arguments.signature.collective = static_cast<std::uint8_t>(call.collective);
  arguments.dtype = call.dtype;
  arguments.op = call.op;
  arguments.chunk_begin = plan.chunk_begin.data();
  arguments.chunks = loaded.chunks;
  arguments.longest = longest_chunk(plan.chunk_begin);
  arguments.is_enqueued = true;
  cut_passes(arguments, choice, *loaded.program, device_->max_blocks(), config_);
  std::list<const PlanKey*> place(1);
  const auto known = plans_.emplace(std::move(kind), KnownPlan{made, place.begin()}).first;
  place.front() = &known->first;
  plans_by_use_.splice(plans_by_use_.begin(), place);
  if (plans_.size() > kMostPlans) {
    plans_.erase(plans_.find(*plans_by_use_.back()));
    plans_by_use_.pop_back();
  }
  return made;
}

namespace {

/// What ranks have to agree on. Of parts with counts of their own, it is all that they show.
Signature signature_of(const StreamCommunicator::Call& call, const std::vector<std::size_t>& counts,
                       std::size_t total) {
  Signature signature;
  signature.count = total;
  signature.root = call.root;
  signature.collective = static_cast<std::uint8_t>(call.collective);
  signature.dtype = static_cast<std::uint8_t>(call.dtype);
  signature.op = static_cast<std::uint8_t>(call.op);
  signature.form = 3;
  std::uint64_t hash = mix(0x73747265u, static_cast<std::uint64_t>(call.root));
  hash = mix(hash, std::uint64_t{signature.collective} << 16 | std::uint64_t{signature.dtype} << 8 |
                       signature.op);
  for (const std::size_t count : counts) hash = mix(hash, count);
  signature.hash = hash;
  return signature;
}

}  // namespace

StreamCommunicator::Work StreamCommunicator::work_of(const Call& call) {
  Work work;
  work.arguments.in = call.in;
  work.arguments.out = call.out;
  if (size_ == 1) {
    const std::size_t count = call.counts != nullptr ? call.counts[0] : call.count;
    if (call.in != call.out) work.copied = count * bytes(call.dtype);
    return work;
  }
  std::vector<std::size_t> counts;
  if (call.collective == Collective::reduce_scatter)
    counts.assign(call.counts, call.counts + size_);
  else if (call.collective == Collective::reduce_scatter_block ||
           call.collective == Collective::allgather)
    counts.assign(static_cast<std::size_t>(size_), call.count);
  else
    counts.assign(1, call.count);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  Signature& signature = work.arguments.signature;
  signature = signature_of(call, counts, total);
  if (total == 0) return work;
  if (total > kMostElements)
    throw Error(Code::argument, "more than 2^32 - 2^17 - 1 elements in one call");
  std::uint64_t place = 0;
  work.mapped = find_registered(call, total * bytes(call.dtype), place);
  Signature made = signature;
  const auto plan = plan_for(call, std::move(counts), !work.mapped.empty());
  if (plan->loaded->reach == Reach::push) made.hash = mix(made.hash, place);
  work.program = plan->loaded->program.get();
  work.plan = plan;
  work.arguments = plan->arguments;
  work.arguments.signature = made;
  work.arguments.in = call.in;
  if (call.collective == Collective::allgather)  // `in` is one chunk of a vector that nobody has
    work.arguments.in = reinterpret_cast<const void*>(
        reinterpret_cast<std::uintptr_t>(call.in) -
        plan->chunk_begin[static_cast<std::size_t>(rank_)] * bytes(call.dtype));
  work.arguments.out = call.out;
  return work;
}

/// Where all ranks' `out` is, for a call that is to deliver results there; otherwise nothing.
/// `place`: what ranks have to agree on.
std::vector<MappedBuffers> StreamCommunicator::find_registered(const Call& call, std::size_t bytes,
                                                               std::uint64_t& place) {
  if (call.collective != Collective::allreduce) return {};
  const auto out = reinterpret_cast<std::uintptr_t>(call.out);
  for (const auto& known : registrations_) {
    const std::shared_ptr<Registration> registration = known.lock();
    if (!registration || out < registration->begin ||
        registration->begin + registration->bytes < out + bytes)
      continue;
    std::vector<MappedBuffers> mapped;
    for (const MappedBuffers& its : registration->mapped)
      mapped.push_back({nullptr, static_cast<std::byte*>(its.in) + (out - registration->begin)});
    if (mapped.empty()) return {};
    mapped[static_cast<std::size_t>(rank_)].in = const_cast<void*>(call.in);
    place = mix(registration->number, out - registration->begin);
    return mapped;
  }
  return {};
}

std::shared_ptr<StreamCommunicator::Registration> StreamCommunicator::enroll(void* buffer,
                                                                             std::size_t bytes) {
  // Other threads' launches need not wait until all ranks have come.
  const std::lock_guard lock(enroll_mutex_);
  auto registration = std::make_shared<Registration>();
  registration->begin = reinterpret_cast<std::uintptr_t>(buffer);
  registration->bytes = bytes;
  // What is wrong on one rank is told to all: none waits for another.
  struct Offer {
    std::size_t bytes;
    bool is_usable;
  };
  const Offer mine{buffer != nullptr ? bytes : 0, is_usable()};
  std::vector<Offer> all(static_cast<std::size_t>(size_), mine);
  if (size_ > 1) bootstrap_->exchange(&mine, all.data(), sizeof mine);
  if (!mine.is_usable) expect_usable();  // not a new look: the others know of this one
  for (int rank = 0; rank < size_; ++rank) {
    const auto& [its_bytes, its_is_usable] = all[static_cast<std::size_t>(rank)];
    if (!its_is_usable)
      throw Error(Code::unusable, "on rank " + std::to_string(rank) + " the communicator failed");
    if (its_bytes == 0)
      throw Error(Code::argument,
                  "rank " + std::to_string(rank) + " registers null, or nothing: bytes is 0");
    if (its_bytes != all[0].bytes)
      throw Error(Code::argument, "rank 0 registers " + std::to_string(all[0].bytes) +
                                      " bytes, rank " + std::to_string(rank) + " " +
                                      std::to_string(its_bytes));
  }
  if (size_ == 1) return registration;
  ShownBuffers buffers;
  if (device_->where(buffer) == Memory::device) buffers = {buffer, nullptr, bytes, 0};
  registration->hold = device_->hold(buffers, registration->mapped);
  if (!registration->hold) registration->mapped.clear();
  const std::lock_guard lock_of_launches(mutex_);
  registration->number = ++last_registration_;
  std::erase_if(registrations_, [](const auto& known) { return known.expired(); });
  registrations_.push_back(registration);
  return registration;
}

/// Shows peers what this rank calls.
void StreamCommunicator::announce(const Signature& signature) {
  const std::lock_guard lock(state_mutex_);
  host_->announce(signature);
}

bool StreamCommunicator::is_capturing(Stream stream) {
  if (size_ == 1) return false;  // copies, which no peer waits for
  bool is_captured = false;
  or_fail(false, [&] { is_captured = device_->is_capturing(stream); });
  return is_captured;
}

void StreamCommunicator::launch(Work work, Stream stream, bool is_captured) {
  if (size_ == 1) {
    if (work.copied > 0)
      device_backend()->enqueue_copy(work.arguments.out, work.arguments.in, work.copied, stream);
    return;
  }
  work.arguments.stream = stream;
  work.arguments.mapped = work.mapped.data();
  work.arguments.is_captured = is_captured;
  // When a graph is launched, and how often it was captured, is not seen here.
  if (!is_captured) announce(work.arguments.signature);
  if (work.program != nullptr) work.program->launch(work.arguments);
}

/// Peers wait for a call that this rank cannot make, but for one with wrong arguments, which they
/// may not have made either, and for what would have been in the graph of a capture, which has
/// failed then. Nobody waits for a rank that is alone.
template <class Body>
void StreamCommunicator::or_fail(bool is_captured, const Body& body) {
  const auto give_up = [&](const Error& error) {
    if (size_ == 1) throw Error(error);
    if (is_captured) throw Error(Code::argument, error.what());
    fail(error);
  };
  try {
    body();
  } catch (const Error& error) {
    if (error.code() == Code::argument) throw;
    give_up(error);
  } catch (const std::bad_alloc&) {
    give_up(out_of_memory_);
  } catch (const std::exception& error) {
    give_up(Error(Code::system, error.what()));
  }
}

void StreamCommunicator::enqueue(const Call& call, Stream stream) {
  const std::lock_guard lock(mutex_);
  expect_usable();
  const bool is_captured = is_capturing(stream);
  or_fail(is_captured, [&] { launch(work_of(call), stream, is_captured); });
}

StreamCommunicator::Work StreamCommunicator::prepare(const Call& call) {
  const std::lock_guard lock(mutex_);
  expect_usable();
  return work_of(call);
}

void StreamCommunicator::start(const Work& work, Stream stream) {
  const std::lock_guard lock(mutex_);
  expect_usable();
  const bool is_captured = is_capturing(stream);
  or_fail(is_captured, [&] { launch(work, stream, is_captured); });
}

bool StreamCommunicator::is_usable() {
  const std::lock_guard lock(state_mutex_);
  return !failure_;
}

void StreamCommunicator::expect_usable() {
  const std::lock_guard lock(state_mutex_);
  if (failure_) throw Error(Code::unusable, std::string("unusable since: ") + failure_->what());
}

void StreamCommunicator::fail(const Error& error) {
  end(error);
  throw error;
}

void StreamCommunicator::abort(const std::string& why) noexcept { end(Error(Code::unusable, why)); }

void StreamCommunicator::end(const Error& error) noexcept {
  const std::lock_guard lock(state_mutex_);
  if (!failure_) failure_ = error;
  if (host_) host_->poison(*failure_);
  if (device_) device_->poison(*failure_);
}

/// Ends the communicator if `look` finds a failure.
template <class Look>
void StreamCommunicator::end_if(const Look& look) noexcept {
  try {
    look();
  } catch (const Error& error) {
    end(error);
  } catch (const std::exception&) {
    end(out_of_memory_);
  }
}

void StreamCommunicator::check() {
  end_if([&] { look(); });
  const std::lock_guard lock(state_mutex_);
  if (failure_) throw Error(*failure_);
}

/// Throws Error if something is wrong that nobody has seen yet.
void StreamCommunicator::look() {
  if (size_ == 1 || !look_at_words()) return;
  // Last, and without the lock that abort() needs: the driver may be busy with a call of another
  // thread that waits for a kernel, which a peer that is gone would never end. One that may be a
  // launch of this communicator is not waited for.
  if (const std::unique_lock idle(mutex_, std::try_to_lock); idle) device_->check_stream();
}

/// The same without a word to the driver. False: what is wrong is known.
bool StreamCommunicator::look_at_words() {
  const std::lock_guard lock(state_mutex_);
  if (failure_) return false;
  // Who gives up says why on the host before it does so on devices: so a look there comes later,
  // and has the word.
  std::optional<Error> of_device;
  try {
    device_->check_result();
  } catch (const Error& error) {
    of_device = error;
  }
  host_->check_calls();
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) host_->diagnose(rank, ++position_);
  // Looking whether a process lives takes a system call: one per check.
  looked_at_ = (looked_at_ + 1) % size_;
  if (looked_at_ != rank_) host_->check_not_missed(looked_at_);
  if (of_device) throw Error(*of_device);
  return true;
}

void StreamCommunicator::drain() {
  {
    const std::lock_guard lock(state_mutex_);
    if (failure_) throw Error(*failure_);
    if (!device_) return;
  }
  const auto check_calls = [&] {
    const std::lock_guard lock(state_mutex_);
    host_->check_calls();
  };
  std::optional<Error> of_device;
  {
    // Kernels here may wait for a peer that died, and nobody else may be looking.
    std::jthread watch;
    try {
      watch = std::jthread([&](const std::stop_token& is_over) {
        end_if([&] {
          for (; !is_over.stop_requested(); nap(std::chrono::milliseconds(5))) {
            host_->check_all_alive();
            check_calls();
          }
        });
      });
    } catch (const std::system_error&) {
      // There are too many threads: kernels have their own time limit.
    }
    try {
      device_->drain();
    } catch (const Error& error) {
      of_device = error;
    }
  }
  // Whoever ended the kernels knows why.
  if (of_device) {
    check();
    end(*of_device);
  }
  {
    const std::lock_guard lock(state_mutex_);
    if (failure_) throw Error(*failure_);
  }
  // Kernels of peers that lag behind still write into this rank's inbox. One that never comes must
  // not keep this rank for ever; its kernels have their own time limit.
  constexpr auto kLimit = std::chrono::seconds(60);
  const auto start = std::chrono::steady_clock::now();
  while (!host_->have_all_left() && std::chrono::steady_clock::now() - start < kLimit) {
    nap(std::chrono::microseconds(20));
    if (is_usable()) end_if(check_calls);
  }
  end_if([&] { host_->check_none_failed(); });
  const std::lock_guard lock(state_mutex_);
  if (failure_) throw Error(*failure_);
}

}  // namespace trib

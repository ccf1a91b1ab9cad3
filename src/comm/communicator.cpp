// SPDX-License-Identifier: BSD-3-Clause
// One call from the request to the result: run() looks up a plan, launches its program and waits.
// Setup comes after it.
#include "comm/communicator.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <tuple>

#include "base/log.hpp"
#include "comm/cut.hpp"
#include "comm/staging.hpp"
#include "tune/select.hpp"

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;

/// Polls between two looks at the rest of the world, about a microsecond's worth.
constexpr int kPollsPerYield = 40;
/// Polls before the first such look: the usual wait is over by then.
constexpr int kFirstSpin = 400;
constexpr int kFirstSpinCrowded = 10;
/// A kernel takes ten microseconds at least.
constexpr int kFirstSpinDevice = 2000;

/// Results of at least so many bytes are stored past the caches.
constexpr std::size_t kStreamBytes = 8u << 20;

constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

/// A lowered schedule on the channel, and what it has served.
struct Loaded {
  const Algorithm* algorithm = nullptr;
  Collective collective{};
  const char* place = "host";
  std::size_t chunks = 1;
  std::unique_ptr<Program> program;
  std::uint64_t calls = 0, bytes = 0;
  double seconds = 0;
};

struct Communicator::Path {
  bool is_made = false;
  Choice choice;
  Loaded* loaded = nullptr;
  std::vector<std::size_t> chunk_begin;
  Arguments arguments;
};

struct Communicator::Plan {
  bool is_made = false;
  Request request;  // what it is for; pointers unused
  std::vector<std::size_t> counts;
  std::size_t bytes = 0;      // of the vector
  std::size_t out_bytes = 0;  // of this rank's result
  Signature signature;
  std::array<Path, 3> paths;      // by Route, made when they are needed first
  const void* seen_in = nullptr;  // the buffers of the last call, which used no device
  const void* seen_out = nullptr;

  bool is_for(const Request& other, int size) const {
    if (!is_made || request.collective != other.collective || request.dtype != other.dtype ||
        request.op != other.op || request.root != other.root)
      return false;
    if (other.collective != Collective::reduce_scatter) return request.count == other.count;
    for (int rank = 0; rank < size; ++rank)
      if (counts[static_cast<std::size_t>(rank)] != other.counts[rank]) return false;
    return true;
  }
};

struct Communicator::Cache {
  // Direct mapped: calls that alternate between a few shapes all find their plan.
  std::array<Plan, 32> plans;
  std::map<std::tuple<Collective, const Algorithm*, int, Reach, bool>, Loaded> programs;
  std::array<std::uint64_t, kCollectives> empty_calls{};
  bool is_without_data = false;  // there was no memory for large messages
  StagingBuffer in, out;
};

namespace {

/// Calls of this process that are between their meeting and their end.
std::atomic<int> calls_on_devices{0};

struct CallOnDevice {
  const bool is_first = calls_on_devices.fetch_add(1) == 0;
  CallOnDevice() = default;
  CallOnDevice(const CallOnDevice&) = delete;
  CallOnDevice& operator=(const CallOnDevice&) = delete;
  ~CallOnDevice() { calls_on_devices.fetch_sub(1); }
};

bool is_beyond_host(Memory memory) { return memory == Memory::device || memory == Memory::distant; }

}  // namespace

// --------------------------------------------------------------------------------------------- a
// call

void Communicator::run(const Request& request) {
  if (!failure_.empty())
    throw Error(Code::unusable, "this communicator is unusable since: " + failure_);
  try {
    run_checked(request);
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {  // out of memory, say
    fail(Error(Code::system, error.what()));
  }
}

inline void Communicator::run_checked(const Request& request) {
  Plan& plan = plan_for(request);
  channel_->announce(plan.signature);
  if (plan.bytes == 0) {
    last_algorithm_ = "none";
    ++cache_->empty_calls[static_cast<std::size_t>(request.collective)];
    return;
  }
  // A buffer that was in the host's memory before there was a device is there still.
  if (!uses_device_ && device_ != nullptr &&
      (request.in != plan.seen_in || request.out != plan.seen_out)) [[unlikely]] {
    uses_device_ = device_->is_in_use();
    plan.seen_in = request.in;
    plan.seen_out = request.out;
  }
  if (!meets_) meets_ = channel_->is_time_to_meet();
  if (meets_ || uses_device_) [[unlikely]]
    return run_with_devices(request, plan);
  run_path(path_for(plan, Route::host), plan, Route::host, request.in, request.out);
}

void Communicator::run_path(Path& path, Plan& plan, Route route, const void* in, void* out) {
  if (path.arguments.is_large && route != Route::device && !channel_->has_data())
    reserve_data(plan, path, route);
  path.arguments.in = in;
  path.arguments.out = out;
  Loaded& loaded = *path.loaded;
  last_algorithm_ = loaded.algorithm->name.data();
  ++loaded.calls;
  loaded.bytes += plan.bytes;
  const int spin = route == Route::device ? kFirstSpinDevice : spin_;
  if (!config_.stats) {
    wait(loaded.program->launch(path.arguments), spin);
  } else {
    const auto start = Clock::now();
    wait(loaded.program->launch(path.arguments), spin);
    loaded.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }
}

/// Some rank uses a device: where the buffers are decides, all ranks' together.
void Communicator::run_with_devices(const Request& request, Plan& plan) {
  const CallOnDevice call;
  const DeviceBackend* const device = device_;
  Memory in = Memory::host, out = Memory::host;
  const auto look = [&] {
    if (!uses_device_) return;
    const auto where = [&](const void* pointer) {
      const Memory memory =
          device_channel_ ? device_channel_->where(pointer) : device->where(pointer);
      // Kernels cannot load elements that are not aligned.
      const bool is_aligned =
          reinterpret_cast<std::uintptr_t>(pointer) % alignment(request.dtype) == 0;
      if (is_aligned || memory == Memory::host) return memory;
      return memory == Memory::pinned ? Memory::host : Memory::distant;
    };
    in = where(request.in);
    out = where(request.out);
  };
  look();
  Route route = Route::host;
  if (!meets_) {
    // Peers do not know yet that there are devices: until they do, as if there were none.
    if (is_beyond_host(in) || is_beyond_host(out)) channel_->ask_for_meetings();
  } else {
    route = meet(in, out, call.is_first, request, plan);
    if (route == Route::device && !device_channel_) {
      open_device(request);
      look();  // the channel's device is known only now
      route = meet(in, out, call.is_first, request, plan);
    }
  }
  Path& path = path_for(plan, route);
  if (route == Route::device) return run_path(path, plan, route, request.in, request.out);

  const void* from = request.in;
  void* to = request.out;
  if (is_beyond_host(in)) {
    void* const copy = cache_->in.get(*device, plan.bytes);
    device->copy(copy, request.in, plan.bytes);
    from = copy;
  }
  if (is_beyond_host(out)) to = cache_->out.get(*device, plan.out_bytes);
  run_path(path, plan, route, from, to);
  if (is_beyond_host(out) && plan.out_bytes > 0) device->copy(request.out, to, plan.out_bytes);
  cache_->in.trim();
  cache_->out.trim();
}

/// All ranks come to the same answer, from the same cards. Nobody waits on a device for a rank that
/// has not posted the call.
Communicator::Route Communicator::meet(Memory in, Memory out, bool is_first, const Request& request,
                                       const Plan& plan) {
  channel_->present({in, out, !is_first, uses_device_});
  const auto step = [&](int polls) {
    int absent = channel_->absent();
    for (int poll = 0; absent >= 0 && poll < polls; ++poll) {
      __builtin_ia32_pause();
      absent = channel_->absent();
    }
    return absent < 0 ? -2 : absent;
  };
  if (step(spin_) != -2) wait_slowly(step, [] { return 0; });

  bool is_any_beyond = false, is_any_host = false, is_any_contended = false, are_all_ready = true;
  for (int rank = 0; rank < size_; ++rank) {
    const Card card = channel_->card(rank);
    for (const Memory memory : {card.in, card.out}) {
      is_any_beyond = is_any_beyond || is_beyond_host(memory);
      is_any_host = is_any_host || memory == Memory::host || memory == Memory::distant;
    }
    is_any_contended = is_any_contended || card.is_contended;
    are_all_ready = are_all_ready && card.is_ready;
  }
  if (!is_any_beyond) return Route::host;
  // Two kernels of one process that wait for peers could wait for each other, since their order may
  // differ between the GPUs: of calls that are under way at once all but the first go through host
  // memory.
  // Kernels count a chunk's elements in 32 bits.
  const bool is_countable = plan.signature.count <= UINT32_MAX;
  const bool is_served = is_countable && are_all_ready && !is_any_host && !is_any_contended &&
                         !is_device_refused_ && device_ != nullptr &&
                         device_->is_defined(request.op, request.dtype);
  return is_served ? Route::device : Route::staged;
}

void Communicator::open_device(const Request& request) {
  std::string why;
  device_channel_ = device_->open(*bootstrap_, config_, request.in, why);
  if (device_channel_) return;
  is_device_refused_ = true;
  if (rank_ == 0)
    log_once(Config::Log::warn, "reductions of GPU buffers go through host memory: " + why);
}

inline void Communicator::wait(Operation& operation, int spin) {
  if (operation.advance(spin)) return;
  wait_slowly([&](int polls) { return operation.advance(polls) ? -2 : operation.blocked_on(); },
              [&] { return operation.position(); });
}

/// Repeats `step(polls)` until it gives -2 (done); it gives the rank that it waits for, or -1.
template <class Step, class Position>
void Communicator::wait_slowly(Step&& step, Position&& position) {
  const auto start = Clock::now();
  auto alive_at = start;
  const int polls = is_crowded_ ? 1 : kPollsPerYield;
  for (std::uint32_t round = 1;; ++round) {
    // The peer may be held up by a message that only our MPI can move.
    bootstrap_->progress();
    ::sched_yield();
    const int peer = step(polls);
    if (peer == -2) return;
    if (round % 64 != 0) continue;
    channel_->diagnose(peer, position());
    const auto now = Clock::now();
    const double waited = std::chrono::duration<double>(now - start).count();
    if (config_.timeout > 0 && waited > config_.timeout) {
      throw Error(Code::timeout,
                  "rank " + std::to_string(peer) +
                      " did not arrive within TRIB_TIMEOUT=" + seconds(config_.timeout) + " s");
    }
    if (now - alive_at > std::chrono::milliseconds(100)) {
      alive_at = now;
      try {
        channel_->check_alive(peer);
      } catch (const Error&) {
        const int still = step(polls);
        if (still == -2) return;
        if (still == peer) throw;  // otherwise it did its part before it left
      }
    }
  }
}

void Communicator::note_declined(Collective collective, Decline reason) {
  if (!channel_) return;
  Signature signature;
  signature.collective = static_cast<std::uint8_t>(collective);
  signature.declined = static_cast<std::int8_t>(reason);
  signature.hash = 1;
  channel_->announce(signature);
}

void Communicator::fail(const Error& error) {
  failure_ = error.what();
  if (channel_) channel_->poison(failure_);
  if (device_channel_) device_channel_->poison(failure_);
  throw error;
}

// ----------------------------------------------------------------------------------------------
// plans

Communicator::Plan& Communicator::plan_for(const Request& request) {
  std::uint64_t hash = mix(static_cast<std::uint64_t>(request.collective), request.count);
  hash = mix(hash, static_cast<std::uint64_t>(request.dtype) << 8 |
                       static_cast<std::uint64_t>(request.op));
  hash = mix(hash, static_cast<std::uint64_t>(request.root));
  if (request.collective == Collective::reduce_scatter) hash = mix(hash, request.counts[0]);
  Plan& plan = cache_->plans[(hash >> 40) % cache_->plans.size()];
  if (!plan.is_for(request, size_)) make_plan(plan, request);
  return plan;
}

void Communicator::make_plan(Plan& plan, const Request& request) {
  plan.is_made = false;
  plan.request = request;
  plan.seen_in = plan.seen_out = nullptr;
  const auto size = static_cast<std::size_t>(size_);
  std::size_t total = request.count, own = request.count;
  if (request.collective == Collective::reduce_scatter) {
    plan.counts.resize(size);
    total = 0;
    for (int rank = 0; rank < size_; ++rank)
      total += plan.counts[static_cast<std::size_t>(rank)] = request.counts[rank];
    own = plan.counts[static_cast<std::size_t>(rank_)];
  } else if (request.collective == Collective::reduce_scatter_block) {
    plan.counts.assign(size, request.count);
    total = request.count * size;
  }
  plan.bytes = total * bytes(request.dtype);
  plan.out_bytes = own * bytes(request.dtype);

  Signature& signature = plan.signature;
  signature = {};
  signature.count = total;
  signature.root = request.root;
  signature.collective = static_cast<std::uint8_t>(request.collective);
  signature.dtype = static_cast<std::uint8_t>(request.dtype);
  signature.op = static_cast<std::uint8_t>(request.op);
  std::uint64_t hash = mix(0x7472u, total);
  hash = mix(hash, static_cast<std::uint64_t>(request.root));
  hash = mix(hash, std::uint64_t{signature.collective} << 16 | std::uint64_t{signature.dtype} << 8 |
                       signature.op);
  if (request.collective == Collective::reduce_scatter)
    for (const std::size_t count : plan.counts) hash = mix(hash, count);
  signature.hash = hash;

  for (Path& path : plan.paths) path.is_made = false;
  plan.is_made = true;
}

inline Communicator::Path& Communicator::path_for(Plan& plan, Route route) {
  Path& path = plan.paths[static_cast<std::size_t>(route)];
  if (!path.is_made) [[unlikely]]
    make_path(plan, path, route);
  return path;
}

/// Chooses the algorithm, loads its program if it is new here, and cuts the vector into chunks and
/// slices.
void Communicator::make_path(Plan& plan, Path& path, Route route) {
  const Request& request = plan.request;
  const std::size_t element = bytes(request.dtype);
  const bool is_scattered = is_scatter(request.collective);
  const bool is_device = route == Route::device;
  Key key;
  key.collective = request.collective;
  key.size = size_;
  key.bytes = plan.bytes;
  key.can_attach = channel_->can_attach();
  key.place = is_device                ? Key::Place::device
              : route == Route::staged ? Key::Place::staged
                                       : Key::Place::host;
  path.choice = select(key, config_);

  const auto load = [&]() -> Loaded& {
    Loaded& loaded = cache_->programs[{request.collective, path.choice.algorithm, request.root,
                                       path.choice.reach, is_device}];
    if (!loaded.program) {
      Shape shape;
      shape.collective = request.collective;
      shape.size = size_;
      shape.root = request.root;
      shape.node_of = node_of_;
      loaded.algorithm = path.choice.algorithm;
      loaded.collective = request.collective;
      loaded.place = is_device ? "cuda" : "host";
      const std::vector<Schedule> all =
          lower(all_ranks(*path.choice.algorithm, shape), shape, path.choice.reach);
      loaded.chunks = static_cast<std::size_t>(all[static_cast<std::size_t>(rank_)].chunks);
      loaded.program = (is_device ? device_channel_.get() : channel_.get())->load(all);
    }
    return loaded;
  };
  // The room with (large) and without: on the host a larger scratch, on devices another protocol.
  const auto fit = [&](bool is_large) -> std::size_t {
    if (is_device ? is_large == path.choice.is_packet : is_large && cache_->is_without_data)
      return 0;
    return path.loaded->program->fit(is_large);
  };
  path.loaded = &load();
  if (std::max(fit(false), fit(true)) < element) {
    // Only for algorithms that were asked for by name: those of the table need few slots.
    log_once(Config::Log::warn, "TRIB_ALGORITHM=" + std::string(config_.algorithm) +
                                    " has no room in shared memory for " +
                                    std::string(name(request.collective)) + " over " +
                                    std::to_string(size_) + " ranks; the default is used");
    Config automatic = config_;
    std::strcpy(automatic.algorithm, "auto");
    path.choice = select(key, automatic);
    path.loaded = &load();
    if (std::max(fit(false), fit(true)) < element)
      throw Error(Code::internal,
                  "no room in shared memory for " + std::string(path.choice.algorithm->name));
  }

  const std::size_t chunks = path.loaded->chunks;
  const std::size_t total = plan.bytes / element;
  Arguments& arguments = path.arguments;
  arguments.signature = plan.signature;
  arguments.dtype = request.dtype;
  arguments.op = request.op;
  cut_chunks(
      path.chunk_begin, chunks, total, element,
      is_scattered && chunks == static_cast<std::size_t>(size_) ? plan.counts.data() : nullptr);
  arguments.chunk_begin = path.chunk_begin.data();
  arguments.chunks = chunks;
  arguments.longest = longest_chunk(path.chunk_begin);
  if (is_device) {
    cut_passes(arguments, path.choice, *path.loaded->program, device_channel_->max_blocks(),
               config_);
    path.is_made = true;
    return;
  }
  const std::size_t longest = std::max(arguments.longest * element, std::size_t{1});
  std::size_t slice = std::min(path.choice.slice_bytes, longest);
  arguments.is_large = slice > fit(false) && !cache_->is_without_data;
  slice = std::min(slice, fit(arguments.is_large));
  arguments.store = plan.bytes >= kStreamBytes ? Store::stream : Store::cached;
  if (slice > 64) slice = slice / 64 * 64;
  arguments.slice = std::max<std::size_t>(slice / element, 1);
  path.is_made = true;
}

/// The first large call. It meets on the small segment first: ranks that disagree must not enter
/// different collective calls.
void Communicator::reserve_data(Plan& plan, Path& path, Route route) {
  const auto step = [&](int) {
    const int missing = channel_->missing();
    return missing < 0 ? -2 : missing;
  };
  if (step(1) != -2) wait_slowly(step, [] { return 0; });
  if (channel_->reserve_data()) return;
  cache_->is_without_data = true;
  if (rank_ == 0)
    log_once(Config::Log::warn,
             "no shared memory for large messages (64 MiB per rank at most, or /dev/shm is full): "
             "they go in small pieces");
  for (Plan& other : cache_->plans) other.is_made = false;
  make_path(plan, path, route);
  plan.is_made = true;
}

// ----------------------------------------------------------------------------------------------
// setup

namespace {

std::uint64_t node_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  text += host;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

struct Introduction {
  bool is_ready;     // the backends could be loaded
  bool uses_device;  // meetings from the first call on
  std::uint64_t node;
  cpu_set_t cores;
  Config config;
};

}  // namespace

Communicator::Communicator(std::unique_ptr<Bootstrap> bootstrap, const Config& config)
    : bootstrap_(std::move(bootstrap)),
      config_(config),
      rank_(bootstrap_->rank()),
      size_(bootstrap_->size()),
      cache_(std::make_unique<Cache>()) {
  if (size_ < 2) {
    declined_ = Decline::single_rank;
    return;
  }
  Introduction mine{};
  // What may fail on this rank alone must fail before the others wait for it.
  std::string why;
  try {
    host_backend();
    if (config.device != Config::Device::off) device_ = device_backend();
    uses_device_ = device_ != nullptr && device_->is_in_use();
    mine.uses_device = uses_device_;
    mine.is_ready = true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  mine.node = node_identity();
  if (::sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0)
    std::memset(&mine.cores, 0xff, sizeof mine.cores);
  mine.config = config;
  std::vector<Introduction> all(static_cast<std::size_t>(size_));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);

  config_ = adopt(config, all[0].config);
  for (const std::string& line : differences(config, all[0].config))
    log_once(Config::Log::warn, line + ": rank 0's value is used");
  cpu_set_t cores;
  CPU_ZERO(&cores);
  std::map<std::uint64_t, int> nodes;
  for (const Introduction& other : all) {
    node_of_.push_back(nodes.try_emplace(other.node, static_cast<int>(nodes.size())).first->second);
    CPU_OR(&cores, &cores, &other.cores);
    meets_ = meets_ || other.uses_device;
  }
  is_crowded_ = CPU_COUNT(&cores) < size_;
  spin_ = is_crowded_ ? kFirstSpinCrowded : kFirstSpin;
  if (!config_.enable) {
    declined_ = Decline::disabled;
    return;
  }
  if (nodes.size() > 1) {
    declined_ = Decline::spans_nodes;
    return;
  }
  select(Key{}, config_);  // a wrong TRIB_ALGORITHM shows here, on all ranks
  if (!std::all_of(all.begin(), all.end(),
                   [](const Introduction& other) { return other.is_ready; })) {
    declined_ = Decline::no_memory;
    log_once(Config::Log::warn, "all reductions are left to the MPI: " +
                                    (why.empty() ? "another rank has no backend" : why));
    return;
  }
  channel_ = host_backend().open(*bootstrap_, config_, why);
  if (!channel_) {
    declined_ = Decline::no_memory;
    if (rank_ == 0)
      log_once(Config::Log::warn, "no shared memory, all reductions are left to the MPI: " + why);
  }
}

Communicator::~Communicator() = default;

std::vector<Communicator::Served> Communicator::served() const {
  std::vector<Served> all;
  for (const auto& [key, loaded] : cache_->programs)
    if (loaded.calls > 0)
      all.push_back({loaded.collective, loaded.algorithm->name.data(), loaded.calls, loaded.bytes,
                     loaded.seconds});
  for (int collective = 0; collective < kCollectives; ++collective)
    if (const auto calls = cache_->empty_calls[static_cast<std::size_t>(collective)]; calls > 0)
      all.push_back({static_cast<Collective>(collective), "none", calls, 0, 0});
  return all;
}

namespace {

struct DeclineText {
  const char* name;
  const char* text;
};
constexpr DeclineText kDeclineTexts[kDeclines] = {
    {"disabled", "switched off by TRIB_ENABLE=0"},
    {"single_rank", "only one rank in the communicator"},
    {"intercommunicator", "intercommunicator"},
    {"user_operator", "user-defined operator"},
    {"derived_type", "derived or unsupported type"},
    {"undefined_op", "operator not defined on this type"},
    {"bad_argument", "arguments that the MPI has to judge"},
    {"spans_nodes", "ranks on several machines"},
    {"no_memory", "no shared memory"},
};

}  // namespace

const char* name(Decline reason) { return kDeclineTexts[static_cast<int>(reason)].name; }
const char* text(Decline reason) { return kDeclineTexts[static_cast<int>(reason)].text; }

}  // namespace trib

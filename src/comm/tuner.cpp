// SPDX-License-Identifier: BSD-3-Clause
#include "comm/tuner.hpp"

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "base/log.hpp"
#include "comm/cut.hpp"
#include "comm/plans.hpp"
#include "tune/measure.hpp"

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;

/// The room of a communicator's own channel (backend/host/channel.hpp): what is measured are
/// blocking calls. Persistent ones differ from them where slices are short, if at all.
constexpr std::size_t kSmallBytes = 8 << 10, kSmallBytesPerRank = 4 * 64;

/// Rows that are worth an exchange at set-up.
constexpr std::size_t kMostRows = 4096;

/// Memory of the kind that the request's buffers are of. Throws std::bad_alloc or Error.
class PrivateBuffer {
 public:
  PrivateBuffer(DeviceChannel* device, std::size_t bytes, Dtype dtype) : device_(device) {
    if (device_ != nullptr) {
      memory_ = device_->allocate(bytes);
      return;
    }
    memory_ = ::operator new(bytes, std::align_val_t{4096});
    // Pages that nobody has written to are all the same one. These bytes are harmless numbers in
    // all types but long double and what is made of it, where they are none.
    if (dtype == Dtype::f80 || dtype == Dtype::cf80 || dtype == Dtype::f80_i32)
      std::fill_n(static_cast<long double*>(memory_), bytes / sizeof(long double), 1.0L);
    else
      std::fill_n(static_cast<unsigned char*>(memory_), bytes, static_cast<unsigned char>(0x3c));
  }
  ~PrivateBuffer() {
    if (device_ != nullptr)
      device_->free(memory_);
    else
      ::operator delete(memory_, std::align_val_t{4096});
  }
  PrivateBuffer(const PrivateBuffer&) = delete;
  PrivateBuffer& operator=(const PrivateBuffer&) = delete;
  void* get() const { return memory_; }

 private:
  DeviceChannel* const device_;
  void* memory_ = nullptr;
};

class Tuner {
 public:
  Tuner(const TunerParts& parts, const Request& request)
      : parts_(parts),
        request_(request),
        route_(parts.device != nullptr ? Route::device : Route::host),
        sketch_(parts.group, parts.main, 1, /*has_no_data=*/true) {
    request_.form = Form::blocking;
  }

  std::optional<Record> result(double budget) {
    const auto begin = Clock::now();
    const Plan& plan = sketch_.find(request_);
    Key key = sketch_.key_of(plan, route_);
    reserve_engines(key);
    choices_ = distinct(candidates(key, parts_.group.config), plan);
    if (!prepare(plan)) return {};
    const Measurement measured =
        measure(parts_.bootstrap, static_cast<int>(choices_.size()), budget, begin,
                [this](int way, std::span<double> samples) { run(way, samples); });
    return record(key, measured);
  }

  void poison(const Error& why) noexcept {
    if (channel_) channel_->poison(why);
    if (gate_channel_) gate_channel_->poison(why);
  }

 private:
  /// Collective. Persistent reductions go by kernels, but blocking calls use what is found, too.
  /// As long as none has, measuring takes the memory that copy engines need only where it was asked
  /// for.
  void reserve_engines(Key& key) {
    key.can_copy =
        key.can_copy && parts_.device != nullptr &&
        (parts_.device->has(Engine::copy) || (parts_.is_asked_for && key.bytes >= kLeastCopied)) &&
        reserve(Engine::copy);
    key.can_gemv = key.can_copy && key.can_gemv &&
                   freedom_of(key, parts_.group.config) == Config::Determinism::any &&
                   reserve(Engine::gemv);
  }

  bool reserve(Engine engine) {
    std::string why;
    if (parts_.device->reserve(engine, why)) return true;
    if (parts_.is_asked_for && parts_.group.rank == 0 && !why.empty())
      log_once(Config::Log::warn,
               "tuning leaves out engine " + std::string(name(engine)) + ": " + why);
    return false;
  }

  /// Without those that come to the same: since no chunk is as long as their slice, or since an
  /// algorithm is another one in disguise. All ranks look at the schedules of the same two.
  std::vector<Choice> distinct(const std::vector<Choice>& all, const Plan& plan) const {
    std::map<const Algorithm*, std::pair<std::string, std::size_t>> known;
    std::set<std::tuple<std::string, std::size_t, bool, int, Engine>> seen;
    std::vector<Choice> different;
    for (const Choice& choice : all) {
      const auto [found, is_new] = known.try_emplace(choice.algorithm);
      auto& [steps, longest] = found->second;
      if (is_new) {
        Shape shape = parts_.group.shape(request_.collective, request_.root);
        shape.is_on_device = is_on_device(route_);
        for (const int rank : {0, shape.size - 1}) {
          shape.rank = rank;
          const Schedule schedule = choice.algorithm->schedule(shape);
          steps += to_string(schedule) + (schedule.returns ? "returns"
                                          : schedule.stays ? "stays"
                                                           : "");
          longest = sketch_.longest_chunk_of(plan, schedule);
        }
      }
      std::size_t slice = choice.slice_bytes;
      if (route_ == Route::host) slice = std::min(slice, longest);
      if (seen.emplace(steps, slice, choice.is_packet, choice.blocks, choice.engine).second)
        different.push_back(choice);
    }
    return different;
  }

  /// Collective: memory. What is missing on one rank is missing on all.
  bool prepare(const Plan& plan) {
    const auto size = static_cast<std::size_t>(parts_.group.size);
    auto channels = parts_.main.branch(
        {2 * parts_.group.size + 16, std::max(kSmallBytes, kSmallBytesPerRank * size)}, 2);
    if (channels.empty()) return false;
    channel_ = std::move(channels[0]);
    gate_channel_ = std::move(channels[1]);
    const bool is_large = route_ == Route::host && plan.bytes > kSmallBytes / 8;
    if (is_large && !channel_->reserve_data()) return false;
    char has_memory = 1;
    try {
      in_ = std::make_unique<PrivateBuffer>(parts_.device, plan.bytes, request_.dtype);
      out_ = std::make_unique<PrivateBuffer>(parts_.device, plan.bytes, request_.dtype);
      plans_ = std::make_unique<Plans>(parts_.group, *channel_, 1, /*has_no_data=*/!is_large);
      gates_ = std::make_unique<Plans>(parts_.group, *gate_channel_, 1, /*has_no_data=*/true);
      paths_.resize(choices_.size());
    } catch (const std::exception&) {
      has_memory = 0;
    }
    std::vector<char> all(size);
    parts_.bootstrap.exchange(&has_memory, all.data(), 1);
    if (std::find(all.begin(), all.end(), 0) != all.end()) return false;
    Request gate;
    gate.dtype = Dtype::u8;
    gate.op = Op::band;
    gate.count = 1;
    gate_plan_ = &gates_->find(gate);
    gate_ = &gates_->path(*gate_plan_, Route::host, Findings());
    gate_->arguments.in = &gate_in_;
    gate_->arguments.out = &gate_out_;
    plan_ = &plans_->find(request_);
    return true;
  }

  void call(const Path& path, const Plan& plan, HostChannel& channel) {
    channel.announce(plan.signature);
    parts_.wait(path.loaded->program->launch(path.arguments), channel);
  }

  void run(int way, std::span<double> samples) {
    Path& path = paths_[static_cast<std::size_t>(way)];
    // Made when it is its turn: where time is up before, it is not needed.
    if (!path.is_made) {
      const Choice& choice = choices_[static_cast<std::size_t>(way)];
      if (!plans_->make_path_for(choice, *plan_, path, route_, parts_.device)) {
        std::fill(samples.begin(), samples.end(), kNoRoom);
        return;
      }
      path.arguments.in = in_->get();
      path.arguments.out = request_.out != nullptr ? out_->get() : nullptr;
    }
    for (double& seconds : samples) {
      call(*gate_, *gate_plan_, *gate_channel_);  // all ranks have come when this is done
      const auto start = Clock::now();
      call(path, *plan_, *channel_);
      seconds = std::chrono::duration<double>(Clock::now() - start).count();
    }
  }

  Record record(const Key& key, const Measurement& measured) const {
    Record record;
    Finding& finding = record.finding;
    finding.collective = key.collective;
    finding.place = key.place;
    finding.freedom = freedom_of(key, parts_.group.config);
    finding.ranks = parts_.group.size;
    finding.nodes = parts_.group.nodes();
    finding.layout = layout_of(parts_.group.levels);
    finding.bytes = key.bytes;
    const auto best = static_cast<std::size_t>(measured.best);
    record.is_thorough = measured.is_thorough;
    finding.is_default = best == 0;
    finding.best = Variant::of(choices_[best]);
    finding.seconds = measured.seconds[best];
    finding.default_seconds = measured.seconds[0];
    finding.least_seconds = finding.seconds;
    if (is_driven_by_host(choices_[best].engine))
      if (const Choice* const kernel = better_kernel(measured))
        finding.kernel = Variant::of(*kernel);
    for (std::size_t way = 0; way < choices_.size(); ++way) {
      const double seconds = measured.seconds[way];
      if (seconds <= 0 || seconds >= kNoRoom) continue;
      finding.least_seconds = std::min(finding.least_seconds, seconds);
      record.candidates.push_back({Variant::of(choices_[way]), seconds});
    }
    return record;
  }

  /// The best of the kernels, if it is better than the default's, which is the first of them.
  const Choice* better_kernel(const Measurement& measured) const {
    std::optional<std::size_t> usual, best;
    for (std::size_t way = 0; way < choices_.size(); ++way) {
      if (is_driven_by_host(choices_[way].engine)) continue;
      if (!usual) usual = way;
      const double seconds = measured.seconds[way];
      if (seconds <= 0 || seconds >= kNoRoom) continue;
      if (!best || seconds < measured.seconds[*best]) best = way;
    }
    if (!best || measured.seconds[*usual] < kMargin * measured.seconds[*best]) return nullptr;
    return &choices_[*best];
  }

  static constexpr double kNoRoom = 1e5;  // seconds

  const TunerParts& parts_;
  Request request_;
  const Route route_;
  Plans sketch_;
  std::vector<Choice> choices_;
  std::unique_ptr<HostChannel> channel_;
  /// Of the gates, which would take every second place of the scratch where the next run writes.
  /// 2 ranks on AMD Zen 4: one_shot of 8 KiB took 0.95 us there rather than 0.6, as in a program.
  std::unique_ptr<HostChannel> gate_channel_;
  std::unique_ptr<PrivateBuffer> in_, out_;
  std::unique_ptr<Plans> plans_, gates_;
  Plan *plan_ = nullptr, *gate_plan_ = nullptr;
  Path* gate_ = nullptr;
  std::vector<Path> paths_;
  unsigned char gate_in_ = 1, gate_out_ = 0;
};

/// Products and powers of whatever numbers may overflow, or vanish. Programs that have such things
/// trapped, or look for them later, mean their own.
class NoFloatingPointTraps {
 public:
  NoFloatingPointTraps() { std::feholdexcept(&before_); }
  ~NoFloatingPointTraps() { std::fesetenv(&before_); }
  NoFloatingPointTraps(const NoFloatingPointTraps&) = delete;
  NoFloatingPointTraps& operator=(const NoFloatingPointTraps&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace

std::optional<Record> tune(const TunerParts& parts, const Request& request, double budget) {
  const NoFloatingPointTraps no_traps;
  Tuner tuner(parts, request);
  const Error out_of_memory(Code::system, "out of memory");  // while there is some
  try {
    return tuner.result(budget);
  } catch (const Error& error) {
    tuner.poison(error);  // peers wait on a channel that nobody else knows
    throw;
  } catch (const std::exception&) {
    tuner.poison(out_of_memory);
    throw;
  }
}

std::string machine_of(const DeviceBackend* device, Key::Place place) {
  return place == Key::Place::device ? machine_name() + ", " + device->hardware() : machine_name();
}

namespace {

/// Rows that this process adopted, and a digest by which ranks know that they have the same. They
/// are a good deal to send, and communicator after communicator has them alike.
struct Adopted {
  std::uint64_t digest = 0;
  std::vector<Finding> rows;
};

std::mutex adopted_mutex;
/// The last ones, by place and number of ranks.
std::map<std::pair<Key::Place, int>, Adopted>& adopted() {
  static auto& map = *new std::map<std::pair<Key::Place, int>, Adopted>;  // MPI may end very late
  return map;
}

std::uint64_t digest_of(std::span<const Finding> rows) {
  std::uint64_t digest = rows.size();
  for (const std::byte byte : std::as_bytes(rows))
    digest = mix(digest, std::to_integer<std::uint64_t>(byte));
  return digest;
}

}  // namespace

std::vector<Finding> adopt_findings(Bootstrap& bootstrap, const Config& config,
                                    const DeviceBackend* device, Key::Place place) {
  const auto size = static_cast<std::size_t>(bootstrap.size());
  std::vector<Finding> rows;
  if (bootstrap.rank() == 0) {
    rows = TuningFile::of(config.tuning_file)
               .findings(machine_of(device, place), place, bootstrap.size());
    rows.resize(std::min(rows.size(), kMostRows));
  }
  Adopted last;
  {
    const std::lock_guard lock(adopted_mutex);
    last = adopted()[{place, bootstrap.size()}];
  }
  struct Word {
    std::size_t count;
    std::uint64_t digest, last_digest;
  };
  const Word mine{rows.size(), digest_of(rows), last.digest};
  std::vector<Word> words(size);
  bootstrap.exchange(&mine, words.data(), sizeof mine);
  const auto [count, digest, unused] = words[0];
  if (count == 0) return {};
  if (std::all_of(words.begin(), words.end(),
                  [&](const Word& word) { return word.last_digest == digest; }))
    return std::move(last.rows);
  rows.resize(count);
  // Each rank sends as much as rank 0, so not all at once.
  constexpr std::size_t kPiece = 64;
  std::vector<Finding> all(std::min(count, kPiece) * size);
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t piece = std::min(count - at, kPiece);
    bootstrap.exchange(rows.data() + at, all.data(), piece * sizeof(Finding));
    std::copy_n(all.begin(), piece, rows.begin() + static_cast<std::ptrdiff_t>(at));
  }
  const std::lock_guard lock(adopted_mutex);
  adopted()[{place, bootstrap.size()}] = {digest, rows};
  return rows;
}

}  // namespace trib

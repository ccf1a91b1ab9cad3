// SPDX-License-Identifier: BSD-3-Clause
#include "comm/plans.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/log.hpp"
#include "base/processor.hpp"
#include "comm/cut.hpp"
#include "schedule/share.hpp"

namespace trib {
namespace {

/// Results of at least so many bytes are stored past the caches, ...
constexpr std::size_t kStreamBytes = 8u << 20;
/// ... and all ranks' results, where each has so many, more than stay in the cache of a core, and
/// together they are so many. Intel Xeons, `trib bench allreduce --compare mpi`, 2026-11-21: 64
/// ranks, 3.43 ms before and 2.63 since for 3 MiB, 1.97 and 1.88 for 2 MiB, for 1 MiB it does not
/// pay; 2026-11-25, Intel MPI's time over ours: 16 ranks, 0.70 and 0.91 for 2 MiB, 0.61 and 0.97
/// for 4; 8 ranks, 0.76 and 0.98, 0.66 and 0.96.
constexpr std::size_t kStreamEach = 2u << 20, kStreamTotal = 16u << 20;

/// Whether the parts of a vector that ranks end with begin where kernels can load whole units.
bool has_aligned_parts(const Plan& plan) {
  if (!is_scatter(plan.request.collective)) return true;
  std::size_t begin = 0, bits = 0;
  for (const std::size_t count : plan.counts) {
    bits |= begin;
    begin += count * bytes(plan.request.dtype);
  }
  return bits % kDeviceUnit == 0;
}

}  // namespace

Shape Group::shape(Collective collective, int root) const {
  const std::lock_guard lock(mutex_);
  return shape_as_known(collective, root);
}

Shape Group::shape_as_known(Collective collective, int root) const {
  Shape shape;
  shape.collective = collective;
  shape.size = size;
  shape.root = root;
  shape.node_of = node_of;
  shape.levels = levels;
  shape.device_of = device_of_;
  return shape;
}

std::shared_ptr<const Schedule> Group::schedule(Collective collective, const Choice& choice,
                                                int root) {
  constexpr std::size_t kMost = 16;
  const std::lock_guard lock(mutex_);
  const std::tuple key(collective, choice.algorithm, root, choice.reach);
  if (const auto known = schedules_.find(key); known != schedules_.end()) return known->second;
  const Shape all = shape_as_known(collective, root);
  auto made = std::make_shared<const Schedule>(std::move(lower(
      all_ranks(*choice.algorithm, all), all, choice.reach, rank)[static_cast<std::size_t>(rank)]));
  if (schedules_.size() == kMost) schedules_.clear();
  schedules_.emplace(key, made);
  return made;
}

Plans::Plans(Group& group, HostChannel& channel, std::size_t rows, bool has_no_data)
    : group_(group), channel_(channel), has_no_data_(has_no_data), plans_(rows) {}

void Plans::make(Plan& plan, const Request& request) const {
  plan.is_made = false;
  plan.request = request;
  plan.seen_in = plan.seen_out = nullptr;
  if (has_chunk_per_rank(request.collective)) {
    plan.counts.resize(static_cast<std::size_t>(group_.size));
    for (int rank = 0; rank < group_.size; ++rank)
      plan.counts[static_cast<std::size_t>(rank)] = request.part(rank);
  }
  const std::size_t total = request.elements(group_.size);
  plan.bytes = total * bytes(request.dtype);
  plan.out_bytes = plan.out_bytes_of(group_.rank);

  Signature& signature = plan.signature;
  signature = {};
  signature.count = total;
  signature.root = request.root;
  signature.collective = static_cast<std::uint8_t>(request.collective);
  signature.dtype = static_cast<std::uint8_t>(request.dtype);
  signature.op = static_cast<std::uint8_t>(request.op);
  signature.form = static_cast<std::uint8_t>(request.form);
  std::uint64_t hash = mix(0x7472u, total);
  hash = mix(hash, static_cast<std::uint64_t>(request.root));
  hash = mix(hash, std::uint64_t{signature.form} << 24 | std::uint64_t{signature.collective} << 16 |
                       std::uint64_t{signature.dtype} << 8 | signature.op);
  if (request.has_counts())
    for (const std::size_t count : plan.counts) hash = mix(hash, count);
  signature.hash = hash;

  plan.is_joint = request.collective == Collective::allreduce ||
                  (is_scatter(request.collective) &&
                   std::find(plan.counts.begin(), plan.counts.end(), 0) == plan.counts.end());
  for (Path& path : plan.paths) path.is_made = false;
  plan.is_mappable = mapped_choice(key_of(plan, Route::mapped), group_.config).has_value();
  plan.is_mappable_on_device =
      select(key_of(plan, Route::device_mapped), group_.config).reach != Reach::scratch &&
      (group_.config.map != Config::Map::automatic || has_aligned_parts(plan));
  plan.is_made = true;
}

namespace {

Key::Place place_of(Route route) {
  return is_on_device(route)      ? Key::Place::device
         : route == Route::staged ? Key::Place::staged
                                  : Key::Place::host;
}

/// What statistics say of it, before the algorithm's name.
const char* prefix(const Choice& choice, Key::Place place) {
  if (place == Key::Place::staged) return "staged_";
  if (place == Key::Place::device && choice.engine == Engine::copy) return "copied_";
  if (place == Key::Place::device && choice.engine == Engine::gemv) return "gemv_";
  switch (choice.reach) {
    case Reach::map:
      return "mapped_";
    case Reach::push:
      return "direct_";
    case Reach::attach:
      return "attached_";
    case Reach::scratch:
      break;
  }
  return "";
}

}  // namespace

Loaded& Plans::load(const Request& request, const Choice& choice, Route route,
                    DeviceChannel* device) {
  const Key::Place place = place_of(route);
  Loaded& loaded = programs_[{request.collective, choice.algorithm, request.root, choice.reach,
                              place, choice.engine}];
  if (loaded.program || loaded.has_no_room) return loaded;
  loaded.algorithm = prefix(choice, place) + std::string(choice.algorithm->name);
  loaded.collective = request.collective;
  if (device != nullptr) {
    Shape shape = group_.shape(request.collective, request.root);
    shape.is_on_device = true;
    const bool is_shared = !device->device_of().empty();
    const Shape launching = is_shared ? leaders_of(shape) : shape;
    std::vector<Schedule> all =
        lower(all_ranks(*choice.algorithm, launching), launching, choice.reach);
    if (is_shared) {
      all = share(all, shape);
      loaded.algorithm = "shared_" + loaded.algorithm;
    }
    loaded.chunks = static_cast<std::size_t>(all[0].chunks);
    loaded.parts = static_cast<std::size_t>(all[0].parts);
    loaded.program = device->load(all, choice.engine);
    loaded.has_no_room = loaded.program == nullptr;
  } else {
    const auto schedule = group_.schedule(request.collective, choice, request.root);
    loaded.chunks = static_cast<std::size_t>(schedule->chunks);
    loaded.parts = static_cast<std::size_t>(schedule->parts);
    loaded.program = channel_.load(*schedule);
  }
  return loaded;
}

Key Plans::key_of(const Plan& plan, Route route) const {
  Key key;
  key.collective = plan.request.collective;
  key.size = group_.size;
  key.bytes = plan.bytes;
  key.can_attach = channel_.can_attach();
  key.is_crowded = group_.is_crowded;
  key.has_little_room = plan.request.form == Form::nonblocking;
  key.is_intel = runs_on_intel();
  key.place = place_of(route);
  key.shares_devices = key.place != Key::Place::host && !group_.device_of().empty();
  if (key.shares_devices && key.place == Key::Place::device) key.size = domains(group_.device_of());
  // Others are driven by any call that waits, too seldom to keep copy engines busy.
  key.can_copy = !has_no_copies_ && !key.shares_devices && plan.request.form == Form::blocking &&
                 is_reduction(plan.request.collective);
  key.can_gemv = key.can_copy && !has_no_gemv_ && plan.request.op == Op::sum &&
                 (plan.request.dtype == Dtype::f32 || plan.request.dtype == Dtype::f64);
  key.can_map = route == Route::device_mapped && !key.shares_devices &&
                plan.request.form != Form::nonblocking;
  key.is_exact = is_exact(plan.request.dtype);
  key.is_widened = is_widened(plan.request.dtype);
  return key;
}

Choice Plans::choose(const Plan& plan, Route route, const Findings& findings) const {
  if (route == Route::mapped) return mapped_choice(key_of(plan, route), group_.config).value();
  return select(key_of(plan, route), group_.config, &findings);
}

void Plans::cut(std::vector<std::size_t>& begin, const Plan& plan, std::size_t chunks,
                std::size_t parts) const {
  const std::size_t element = bytes(plan.request.dtype);
  const bool is_by_rank = has_chunk_per_rank(plan.request.collective) &&
                          chunks == static_cast<std::size_t>(group_.size);
  cut_chunks(begin, chunks, parts, plan.bytes / element, element,
             is_by_rank ? plan.counts.data() : nullptr);
}

std::size_t Plans::longest_chunk_of(const Plan& plan, const Schedule& schedule) const {
  std::vector<std::size_t> begin;
  cut(begin, plan, static_cast<std::size_t>(schedule.chunks),
      static_cast<std::size_t>(schedule.parts));
  return longest_chunk(begin) * bytes(plan.request.dtype);
}

void Plans::make_path(Plan& plan, Path& path, Route route, const Choice& choice,
                      DeviceChannel* device) {
  if (make_path_for(choice, plan, path, route, device)) return;
  // Asked for by name, or found by tuning: those of the table need few slots.
  Config automatic = group_.config;
  const bool is_set = std::string_view(automatic.algorithm) != "auto";
  log_once(Config::Log::warn,
           (is_set ? "TRIB_ALGORITHM=" : "") + std::string(choice.algorithm->name) +
               " has no room in shared memory for " + std::string(name(plan.request.collective)) +
               " over " + std::to_string(group_.size) + " ranks; the default is used");
  std::strcpy(automatic.algorithm, "auto");
  if (!make_path_for(select(key_of(plan, route), automatic), plan, path, route, device))
    throw Error(Code::internal,
                "no room in shared memory for " + std::string(path.choice.algorithm->name));
}

/// Loads the program if it is new here, and cuts the vector into chunks and slices.
bool Plans::make_path_for(const Choice& choice, const Plan& plan, Path& path, Route route,
                          DeviceChannel* device) {
  const Request& request = plan.request;
  const Config& config = group_.config;
  const std::size_t element = bytes(request.dtype);
  const bool is_device = is_on_device(route);
  if (!is_device) device = nullptr;
  path.is_made = false;
  path.choice = choice;
  if (is_device && !suits_packets(*device, plan.bytes, config)) path.choice.is_packet = false;

  // The room with (large) and without: on the host a larger scratch, on devices another protocol.
  const auto fit = [&](bool is_large) -> std::size_t {
    if (is_device ? is_large == path.choice.is_packet : is_large && has_no_data_) return 0;
    return path.loaded->program->fit(is_large);
  };
  path.loaded = &load(request, path.choice, route, device);
  if (!path.loaded->program) return false;
  if (std::max(fit(false), fit(true)) < element) return false;

  const std::size_t chunks = path.loaded->chunks;
  Arguments& arguments = path.arguments;
  arguments.signature = plan.signature;
  arguments.dtype = request.dtype;
  arguments.op = request.op;
  cut(path.chunk_begin, plan, chunks, path.loaded->parts);
  arguments.chunk_begin = path.chunk_begin.data();
  arguments.chunks = chunks;
  arguments.longest = longest_chunk(path.chunk_begin);
  arguments.binding = nullptr;
  path.is_made = true;
  if (is_device) {
    cut_passes(arguments, path.choice, *path.loaded->program, device->max_blocks(), config);
    return true;
  }
  if (choice.reach == Reach::map) {  // in one pass
    arguments.slice = std::max<std::size_t>(arguments.longest, 1);
    arguments.is_large = arguments.is_contiguous = false;
    // Further destinations are peers' results, not scratch.
    arguments.store = plan.bytes >= kStreamBytes ? Store::stream_past : Store::cached;
    return true;
  }
  path.wants_data = cut_runs(arguments, path.choice, *path.loaded->program,
                             has_no_data_          ? LargeScratch::refused
                             : channel_.has_data() ? LargeScratch::there
                                                   : LargeScratch::to_come);
  const bool is_everywhere = request.collective == Collective::allreduce;
  const bool is_streamed = plan.bytes >= kStreamBytes ||
                           (is_everywhere && plan.bytes >= kStreamEach &&
                            plan.bytes * static_cast<std::size_t>(group_.size) >= kStreamTotal);
  arguments.store = is_streamed ? Store::stream : Store::cached;
  path.binding = path.loaded->program->bind(arguments);
  arguments.binding = path.binding.get();
  return true;
}

void Plans::add_served(Form form, std::vector<Served>& rows) const {
  for (const auto& [key, loaded] : programs_)
    if (loaded.calls > 0)
      rows.push_back(
          {loaded.collective, form, loaded.algorithm, loaded.calls, loaded.bytes, loaded.seconds});
}

void Plans::do_without_data(Plan& plan) {
  has_no_data_ = true;
  forget(plan);
}

void Plans::do_without(Engine engine, Plan& plan) {
  (engine == Engine::gemv ? has_no_gemv_ : has_no_copies_) = true;
  forget(plan);
}

void Plans::forget() {
  for (Plan& plan : plans_) plan.is_made = false;
}

/// All plans, and all paths of `plan`.
void Plans::forget(Plan& plan) {
  forget();
  for (Path& path : plan.paths) path.is_made = false;
  plan.is_made = true;
}

}  // namespace trib

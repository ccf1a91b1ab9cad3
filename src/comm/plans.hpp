// SPDX-License-Identifier: BSD-3-Clause
// What can be worked out before a call, and is kept for the next one like it: the algorithm, its
// program on a channel, how the vector is cut.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "backend/backend.hpp"
#include "base/config.hpp"
#include "comm/request.hpp"
#include "tune/findings.hpp"
#include "tune/select.hpp"

namespace trib {

/// One step of a hash.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

/// What is the same for all calls of a communicator. Safe to use from several threads.
struct Group {
  int rank = 0, size = 1;
  std::vector<int> node_of;
  Levels levels;
  bool is_crowded = false;  ///< more ranks than cores, in this communicator or around it
  Config config;

  /// What was measured, as far as this point of the program: ranks add to it in calls that all make
  /// in the same order. What is launched later than it was asked for, and maybe by another thread,
  /// uses the findings of the time when it was asked for, and shares them until then.
  const Findings& findings() const { return *findings_; }
  const std::shared_ptr<const Findings>& shared_findings() const { return findings_; }
  void set(Findings findings) {
    findings.generation = findings_->generation + 1;
    findings_ = std::make_shared<const Findings>(std::move(findings));
  }
  int nodes() const { return 1 + *std::max_element(node_of.begin(), node_of.end()); }

  /// This rank's lowered schedule. Of those that programs have been made of, the latest few are
  /// kept: each has the slots of all ranks, and there may be one for each root.
  std::shared_ptr<const Schedule> schedule(Collective collective, const Choice& choice, int root);
  Shape shape(Collective collective, int root) const;

  /// Each rank's device, once it is known that kernels serve ranks that share one. Set by the
  /// thread that makes the group's blocking calls, which may ask for it, as may whoever drives the
  /// background: it is still meanwhile.
  const Level& device_of() const { return device_of_; }
  void set_device_of(const Level& device_of) {
    const std::lock_guard lock(mutex_);
    device_of_ = device_of;
  }

 private:
  Shape shape_as_known(Collective collective, int root) const;

  mutable std::mutex mutex_;
  Level device_of_;
  std::map<std::tuple<Collective, const Algorithm*, int, Reach>, std::shared_ptr<const Schedule>>
      schedules_;
  std::shared_ptr<const Findings> findings_ = std::make_shared<const Findings>();
};

/// Where a call runs. Staged: on the host, although buffers are on a device. Mapped: where ranks
/// have mapped each other's buffers.
enum class Route : std::uint8_t { host, staged, device, mapped, device_mapped };
inline constexpr int kRoutes = 5;
constexpr bool is_on_device(Route route) {
  return route == Route::device || route == Route::device_mapped;
}

/// A lowered schedule on a channel, and what it has served.
struct Loaded {
  std::string algorithm;  ///< for people
  Collective collective{};
  std::size_t chunks = 1, parts = 1;
  std::unique_ptr<Program> program;
  bool has_no_room = false;  ///< on the device
  std::uint64_t calls = 0, bytes = 0;
  double seconds = 0;
};

/// Counted per communicator, read at the end.
struct Served {
  Collective collective;
  Form form;
  std::string algorithm;
  std::uint64_t calls, bytes;
  double seconds;
};

/// An algorithm's program, and how a vector is cut for it.
struct Path {
  bool is_made = false;
  Choice choice;
  Loaded* loaded = nullptr;
  /// Of the findings that were looked at; kFixed: of none, the choice was the caller's.
  std::uint64_t generation = 0;
  static constexpr std::uint64_t kFixed = UINT64_MAX;
  std::vector<std::size_t> chunk_begin;
  Arguments arguments;
  /// It would be quicker with the scratch for large messages, which is not there yet, or cannot do
  /// without.
  bool wants_data = false;
  std::unique_ptr<Binding> binding;

  bool is_made_by(const Findings& findings) const {
    return is_made && (generation == findings.generation || generation == kFixed);
  }
};

struct Plan {
  bool is_made = false;
  Request request;  // what it is for; pointers unused
  std::vector<std::size_t> counts;
  std::size_t bytes = 0;      // of the vector
  std::size_t out_bytes = 0;  // of this rank's result
  Signature signature;
  std::array<Path, kRoutes> paths;     // by Route, made when they are needed first
  bool is_mappable = false;            // Route::mapped is for it, if the buffers are
  bool is_mappable_on_device = false;  // the same of Route::device_mapped
  bool is_joint = false;               // every rank's result needs every rank's contribution
  const void* seen_in = nullptr;       // the buffers of the last call, which used no device
  const void* seen_out = nullptr;

  bool is_for(const Request& other, int size) const;
  /// Of `rank`'s contribution.
  std::size_t in_bytes_of(int rank) const {
    if (request.collective == Collective::broadcast) return rank == request.root ? bytes : 0;
    return request.collective == Collective::allgather
               ? counts[static_cast<std::size_t>(rank)] * trib::bytes(request.dtype)
               : bytes;
  }
  /// Of `rank`'s result.
  std::size_t out_bytes_of(int rank) const {
    return is_scatter(request.collective)
               ? counts[static_cast<std::size_t>(rank)] * trib::bytes(request.dtype)
               : bytes;
  }
};

/// The plans and programs of one channel of the host and, for blocking calls, of one of a device.
class Plans {
 public:
  /// Keeps `rows` plans: a power of two. `has_no_data`: HostChannel::reserve_data() is not to be
  /// called.
  Plans(Group& group, HostChannel& channel, std::size_t rows, bool has_no_data);

  Plan& find(const Request& request) {
    if (last_ != nullptr && last_->is_for(request, group_.size)) return *last_;
    Plan& plan = plans_[hash(request) & (plans_.size() - 1)];
    if (!plan.is_for(request, group_.size)) make(plan, request);
    last_ = &plan;
    return plan;
  }
  /// `findings` are those that hold where the plan's call stands in the program. `device` is the
  /// device's channel; it is used on its routes only.
  Path& path(Plan& plan, Route route, const Findings& findings, DeviceChannel* device = nullptr) {
    Path& path = plan.paths[static_cast<std::size_t>(route)];
    if (!path.is_made_by(findings)) [[unlikely]] {
      make_path(plan, path, route, choose(plan, route, findings), device);
      path.generation = findings.generation;
    }
    return path;
  }
  /// The same for a choice of the caller's, or the default where that has no room.
  Path& path(Plan& plan, Route route, const Choice& choice, DeviceChannel* device = nullptr) {
    Path& path = plan.paths[static_cast<std::size_t>(route)];
    make_path(plan, path, route, choice, device);
    path.generation = Path::kFixed;
    return path;
  }
  /// False: kernels have no room for what the tables say, on all ranks alike. Then there is no path
  /// for `route`.
  bool can_use(Plan& plan, Route route, const Findings& findings, DeviceChannel* device) {
    Path& path = plan.paths[static_cast<std::size_t>(route)];
    if (path.is_made_by(findings)) return true;
    path.generation = findings.generation;
    return make_path_for(choose(plan, route, findings), plan, path, route, device);
  }
  /// Makes `path` for a choice of the caller's. False: it has no room.
  bool make_path_for(const Choice& choice, const Plan& plan, Path& path, Route route,
                     DeviceChannel* device = nullptr);
  /// There is no memory for large messages: all paths are made anew. `plan` stays a plan for what
  /// it was for.
  void do_without_data(Plan& plan);
  /// The same of what an engine needs.
  void do_without(Engine engine, Plan& plan);
  /// What is known of the group has changed: all paths are made anew. `plan` stays a plan for what
  /// it was for.
  void forget(Plan& plan);
  /// The same, between calls.
  void forget();

  Key key_of(const Plan& plan, Route route) const;
  /// What the tables say.
  Choice choose(const Plan& plan, Route route, const Findings& findings) const;
  /// Bytes of the longest chunk, if the vector is cut for `schedule`.
  std::size_t longest_chunk_of(const Plan& plan, const Schedule& schedule) const;
  void add_served(Form form, std::vector<Served>& rows) const;

 private:
  std::uint64_t hash(const Request& request) const;
  void make(Plan& plan, const Request& request) const;
  void make_path(Plan& plan, Path& path, Route route, const Choice& choice, DeviceChannel* device);
  void cut(std::vector<std::size_t>& begin, const Plan& plan, std::size_t chunks,
           std::size_t parts) const;
  Loaded& load(const Request& request, const Choice& choice, Route route, DeviceChannel* device);

  Group& group_;
  HostChannel& channel_;
  bool has_no_data_, has_no_copies_ = false, has_no_gemv_ = false;
  Plan* last_ = nullptr;     // found
  std::vector<Plan> plans_;  // direct mapped: calls that alternate between a few shapes find theirs
  std::map<std::tuple<Collective, const Algorithm*, int, Reach, Key::Place, Engine>, Loaded>
      programs_;
};

inline bool Plan::is_for(const Request& other, int size) const {
  if (!is_made || request.collective != other.collective || request.form != other.form ||
      request.dtype != other.dtype || request.op != other.op || request.root != other.root)
    return false;
  if (!other.has_counts()) return !request.has_counts() && request.count == other.count;
  for (int rank = 0; rank < size; ++rank)
    if (counts[static_cast<std::size_t>(rank)] != other.counts[rank]) return false;
  return true;
}

inline std::uint64_t Plans::hash(const Request& request) const {
  std::uint64_t hash = mix(static_cast<std::uint64_t>(request.collective), request.count);
  hash = mix(hash, static_cast<std::uint64_t>(request.dtype) << 8 |
                       static_cast<std::uint64_t>(request.op));
  hash = mix(hash, static_cast<std::uint64_t>(request.root));
  if (request.has_counts()) hash = mix(hash, request.counts[0]);
  return hash >> 40;
}

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// How a communicator comes about, and what it tells of itself.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/topology.hpp"

namespace trib {
namespace {

/// Polls before the first such look: the usual wait is over by then.
constexpr int kFirstSpin = 400;
constexpr int kFirstSpinCrowded = 10;

constexpr std::size_t kPlans = 32;

std::uint64_t read_node_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  text += host;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

std::uint64_t node_identity() {
  static const std::uint64_t identity = read_node_identity();
  return identity;
}

struct Introduction {
  bool is_ready;  // the backends could be loaded
  bool has_device_backend;
  bool has_unknown_devices;
  bool is_amid_crowd;
  bool uses_device;  // meetings from the first call on
  std::uint64_t node;
  cpu_set_t cores;
  Config config;
};

}  // namespace

Communicator::Communicator(std::unique_ptr<Bootstrap> bootstrap, const Config& config,
                           bool is_amid_crowd)
    : bootstrap_(std::move(bootstrap)) {
  group_.rank = bootstrap_->rank();
  group_.size = bootstrap_->size();
  group_.config = config;
  if (group_.size < 2) {
    declined_ = Decline::single_rank;
    return;
  }
  Introduction mine{};
  // What may fail on this rank alone must fail before the others wait for it.
  std::string why;
  try {
    host_backend();
    devices_.backend = device_backend();
    devices_.are_in_use = devices_.backend != nullptr && devices_.backend->is_in_use();
    mine.uses_device = devices_.are_in_use;
    mine.has_device_backend = devices_.backend != nullptr;
    mine.has_unknown_devices = has_unknown_devices();
    mine.is_ready = true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  mine.is_amid_crowd = is_amid_crowd;
  mine.node = node_identity();
  if (::sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0)
    std::memset(&mine.cores, 0xff, sizeof mine.cores);
  mine.config = config;
  std::vector<Introduction> all(static_cast<std::size_t>(group_.size));
  bootstrap_->exchange(&mine, all.data(), sizeof mine);

  group_.config = trib::adopt(config, all[0].config);
  may_use_devices_ = std::all_of(
      all.begin(), all.end(), [](const Introduction& other) { return other.has_device_backend; });
  may_ask_ = std::all_of(all.begin(), all.end(), [](const Introduction& other) {
    return other.config.progress != Config::Progress::calls;
  });
  devices_.are_refused = group_.config.device == Config::Device::off;
  for (const std::string& line : differences(config, all[0].config))
    log_once(Config::Log::warn, line + ": rank 0's value is used");
  cpu_set_t cores;
  CPU_ZERO(&cores);
  int ranks_here = 0;
  std::vector<cpu_set_t> bindings;
  std::map<std::uint64_t, int> nodes;
  for (const Introduction& other : all) {
    group_.node_of.push_back(
        nodes.try_emplace(other.node, static_cast<int>(nodes.size())).first->second);
    bindings.push_back(other.cores);
    meets_ = meets_ || other.uses_device;
    if (other.node != mine.node) continue;
    ++ranks_here;
    CPU_OR(&cores, &cores, &other.cores);
    group_.is_crowded = group_.is_crowded || other.is_amid_crowd;
  }
  const bool is_crowd = CPU_COUNT(&cores) < ranks_here;
  group_.is_crowded = group_.is_crowded || is_crowd;
  spin_ = is_crowd ? kFirstSpinCrowded : kFirstSpin;
  if (!group_.config.enable) {
    declined_ = Decline::disabled;
    return;
  }
  if (std::any_of(all.begin(), all.end(),
                  [](const Introduction& other) { return other.has_unknown_devices; })) {
    declined_ = Decline::unknown_devices;
    if (group_.rank == 0)
      log_once(Config::Log::warn,
               "all reductions are left to the MPI: the program, or its MPI, has loaded a GPU "
               "driver, and the module that knows GPU buffers, trib_backend_cuda.so, is not there "
               "or cannot be loaded (TRIB_LOG=info says why)");
    return;
  }
  if (nodes.size() > 1) {
    declined_ = Decline::spans_nodes;
    return;
  }
  // A wrong TRIB_ALGORITHM shows here, on all ranks, not when it is too late.
  check_choices(group_.config, group_.size);
  if (!std::all_of(all.begin(), all.end(),
                   [](const Introduction& other) { return other.is_ready; })) {
    declined_ = Decline::no_memory;
    log_once(Config::Log::warn, "all reductions are left to the MPI: " +
                                    (why.empty() ? "another rank has no backend" : why));
    return;
  }
  channel_ = host_backend().open(*bootstrap_, group_.config, why);
  if (!channel_) {
    declined_ = Decline::no_memory;
    if (group_.rank == 0)
      log_once(Config::Log::warn, "no shared memory, all reductions are left to the MPI: " + why);
    return;
  }
  // A rank that fails where the others go on to an exchange never comes there.
  bootstrap_->watch([this] { channel_->check_none_failed(); });
  group_.levels = agree_on_levels(*bootstrap_, group_.config, bindings);
  adopt(Key::Place::host);
  plans_ = std::make_unique<Plans>(group_, *channel_, kPlans, /*has_no_data=*/false);
}

/// Collective: rank 0's findings.
void Communicator::adopt(Key::Place place) {
  const Findings known(adopt_findings(*bootstrap_, group_.config, devices_.backend, place),
                       group_.size, group_.nodes(), layout_of(group_.levels));
  group_.set(group_.findings().with(known.rows()));
}

Communicator::~Communicator() = default;

std::vector<Served> Communicator::served() const {
  std::vector<Served> all;
  if (plans_) plans_->add_served(Form::blocking, all);
  if (background_) background_->add_served(all);
  for (int form = 0; form < kForms; ++form)
    for (int collective = 0; collective < kCollectives; ++collective)
      if (const std::uint64_t calls =
              empty_calls_[static_cast<std::size_t>(form)][static_cast<std::size_t>(collective)];
          calls > 0)
        all.push_back(
            {static_cast<Collective>(collective), static_cast<Form>(form), "none", calls, 0, 0});
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
    {"not_set_up", "nonblocking or a Reduce, before ranks met"},
    {"being_freed", "communicator that is being freed"},
    {"passed_by", "nonblocking, and MPI_Wait leads elsewhere"},
    {"of_session", "nonblocking, with a session open"},
    {"unknown_devices", "GPU driver loaded, and no module for it"},
    {"split", "reductions lead elsewhere on some ranks"},
};

}  // namespace

const char* name(Decline reason) { return kDeclineTexts[static_cast<int>(reason)].name; }
const char* text(Decline reason) { return kDeclineTexts[static_cast<int>(reason)].text; }

}  // namespace trib

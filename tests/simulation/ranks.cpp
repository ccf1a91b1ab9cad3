// SPDX-License-Identifier: BSD-3-Clause
#include "simulation/ranks.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>

#include "schedule/share.hpp"

namespace trib::cuda {
namespace {

Simulation* current = nullptr;

constexpr auto some_context = [] { return reinterpret_cast<CUcontext>(1); };

/// What a CUfunction stands for.
struct Function {
  Dtype dtype;
  Protocol protocol;
};

template <class... Any>
CUresult succeed(Any...) {
  return CUDA_SUCCESS;
}

CUresult launch_kernel(CUfunction function, unsigned blocks, unsigned, unsigned, unsigned threads,
                       unsigned, unsigned, unsigned, CUstream, void** parameters, void**) {
  return Simulation::launch_kernel(function, blocks, threads, parameters);
}
/// A graph of one kernel, and one that can be launched.
struct Graph {
  CUDA_KERNEL_NODE_PARAMS node;
  std::vector<std::byte> parameters;

  void set(const CUDA_KERNEL_NODE_PARAMS& to) {
    const auto* const begin = static_cast<const std::byte*>(to.kernelParams[0]);
    node = to;
    parameters.assign(
        begin, begin + Simulation::launch_bytes(reinterpret_cast<Function*>(to.func)->protocol));
  }
};
CUresult create_graph(CUgraph* graph, unsigned) {
  *graph = reinterpret_cast<CUgraph>(new Graph);
  return CUDA_SUCCESS;
}
CUresult add_kernel(CUgraphNode*, CUgraph graph, const CUgraphNode*, std::size_t,
                    const CUDA_KERNEL_NODE_PARAMS* node) {
  reinterpret_cast<Graph*>(graph)->set(*node);
  return CUDA_SUCCESS;
}
CUresult instantiate(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  *exec = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return CUDA_SUCCESS;
}
CUresult set_parameters(CUgraphExec exec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS* node) {
  reinterpret_cast<Graph*>(exec)->set(*node);
  return CUDA_SUCCESS;
}
CUresult launch_graph(CUgraphExec exec, CUstream) {
  Graph& graph = *reinterpret_cast<Graph*>(exec);
  void* parameters[] = {graph.parameters.data()};
  return Simulation::launch_kernel(graph.node.func, graph.node.gridDimX, graph.node.blockDimX,
                                   parameters);
}
CUresult destroy_graph(CUgraph graph) {
  delete reinterpret_cast<Graph*>(graph);
  return CUDA_SUCCESS;
}
CUresult destroy_exec(CUgraphExec exec) {
  delete reinterpret_cast<Graph*>(exec);
  return CUDA_SUCCESS;
}
CUresult copy_async(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
  return Simulation::copy_behind(to, from, bytes);
}
CUresult is_capturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult stream_id(CUstream, unsigned long long* id) {
  *id = 1;
  return CUDA_SUCCESS;
}

Driver make_driver() {
  Driver made;
#define TRIB_MEMBER(name) made.name##_ = succeed;
  TRIB_DRIVER_TO_STAGE(TRIB_MEMBER)
  TRIB_DRIVER_FOR_KERNELS(TRIB_MEMBER)
#undef TRIB_MEMBER
  made.cuLaunchKernel_ = launch_kernel;
  made.cuGraphCreate_ = create_graph;
  made.cuGraphAddKernelNode_ = add_kernel;
  made.cuGraphInstantiate_ = instantiate;
  made.cuGraphExecKernelNodeSetParams_ = set_parameters;
  made.cuGraphLaunch_ = launch_graph;
  made.cuGraphDestroy_ = destroy_graph;
  made.cuGraphExecDestroy_ = destroy_exec;
  made.cuMemAlloc_ = Simulation::allocate;
  made.cuMemcpyAsync_ = copy_async;
  made.cuStreamIsCapturing_ = is_capturing;
  made.cuStreamGetId_ = stream_id;
  return made;
}

}  // namespace

// ------------------------------------------------- in place of driver.cpp and kernels.cpp

Driver& simulated_driver() {
  static Driver made = make_driver();
  return made;
}
const Driver* driver() { return &simulated_driver(); }
const Driver* load_driver() { return driver(); }
std::string describe(CUresult result) { return "CUDA error " + std::to_string(result); }
void fill(CUdeviceptr memory, unsigned char value, std::size_t bytes) {
  std::memset(reinterpret_cast<void*>(memory), value, bytes);
}
CopyStream::CopyStream() = default;
CopyStream::~CopyStream() { (void)stream_; }
void CopyStream::wait() const {}
bool is_default_stream_idle() { return Simulation::is_default_stream_idle(); }
bool is_default_stream_busy() { return false; }
std::string too_old_for_kernels(const Driver&) { return {}; }
ContextId ContextId::of(CUcontext context) { return {context, 0}; }
CUcontext ContextId::known_to_be_there() const {
  if (!is_there()) throw Error(Code::device, "cuda: the context is gone");
  return handle;
}
Current::Current(CUcontext) : driver_(*driver()) {}
Current::Current(const ContextId&) : driver_(*driver()) {}
Current::~Current() { (void)driver_, (void)is_pushed_, (void)mode_; }

Kernels::Kernels() {
  for (auto& of_op : functions_)
    for (int dtype = 0; dtype < kDtypes; ++dtype)
      for (int protocol = 0; protocol < kProtocols; ++protocol)
        of_op[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(protocol)] =
            reinterpret_cast<CUfunction>(
                new Function{static_cast<Dtype>(dtype), static_cast<Protocol>(protocol)});
}
const Kernels& Kernels::of_current() {
  static const auto* const kernels = new Kernels;  // as the real ones, never unloaded
  return *kernels;
}
CUfunction Kernels::find(Op op, Dtype dtype, Protocol protocol) const {
  return functions_[static_cast<std::size_t>(op)][static_cast<std::size_t>(dtype)]
                   [static_cast<std::size_t>(protocol)];
}

// ------------------------------------------------------------------------------------- simulation

class Simulation::Introduction final : public Bootstrap {
 public:
  Introduction(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const void*, void*, std::size_t) override {}
  void progress() override {}

 private:
  const int rank_, size_;
};

void Simulation::Free::operator()(void* memory) const { std::free(memory); }

/// Aligned as GPUs do it; pages that nobody writes cost nothing.
Simulation::Memory Simulation::zeros(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  void* const memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  std::memset(memory, 0, bytes);
  return Memory(static_cast<std::byte*>(memory));
}

Simulation::Simulation(const Setup& setup)
    : setup_(setup),
      machine_(setup.device_of.empty() ? setup.ranks : domains(setup.device_of), setup.seed) {
  current = this;
  forgets_devices = false;
  const Config config;
  for (int rank = 0; rank < setup.ranks; ++rank) {
    bootstraps_.push_back(std::make_unique<Introduction>(rank, setup.ranks));
    channels_.push_back(std::unique_ptr<Channel>(new Channel(*bootstraps_.back(), config)));
    doorbells_.push_back(std::make_unique<Doorbell>());
    counters_.push_back(std::make_unique<Counters>());
    inboxes_.push_back(zeros(inbox_bytes(setup.blocks)));
    fill_inbox(inboxes_.back().get());
    counters_.back()->runs = std::uint64_t{setup.last_run} << 32 | setup.last_run;
  }
  for (int rank = 0; rank < setup.ranks; ++rank) {
    Channel& channel = *channels_[static_cast<std::size_t>(rank)];
    channel.context_ = channel.context_id_.handle = some_context();
    channel.queue_ = Queue::of(channel.context_id_);
    channel.asides_ = std::make_shared<Asides>(channel.context_id_);
    channel.kernels_ = &Kernels::of_current();
    channel.max_blocks_ = setup.blocks;
    channel.least_long_ = setup.least_long;
    channel.time_limit_ = setup.time_limit;
    channel.doorbell_ = doorbells_[static_cast<std::size_t>(rank)].get();
    channel.counters_ =
        reinterpret_cast<CUdeviceptr>(counters_[static_cast<std::size_t>(rank)].get());
    channel.last_run_ = channel.known_run_ = setup.last_run;
    channel.replays_.enough = machine_.below(3);
    for (int peer = 0; peer < setup.ranks; ++peer)
      channel.inboxes_[static_cast<std::size_t>(peer)] =
          reinterpret_cast<CUdeviceptr>(inboxes_[static_cast<std::size_t>(peer)].get());
    if (!setup.device_of.empty())
      channel.sharing_.reset(new Sharing(rank, setup.device_of, channel.context_));
  }
  launched_.resize(static_cast<std::size_t>(gpus()));
  operations_.resize(static_cast<std::size_t>(gpus()));
  is_held_.resize(static_cast<std::size_t>(gpus()));
  copies_.resize(static_cast<std::size_t>(gpus()));
  queued_.resize(static_cast<std::size_t>(gpus()));
}

/// As runs before `last_run` have left it.
void Simulation::fill_inbox(std::byte* inbox) const {
  const std::uint32_t old = setup_.is_fresh ? 0 : setup_.last_run - 100;
  const auto fill = [&](std::size_t begin, std::size_t end, std::uint32_t value) {
    std::fill(reinterpret_cast<std::uint32_t*>(inbox + begin),
              reinterpret_cast<std::uint32_t*>(inbox + end), value);
  };
  fill(0, kFlagBytes, old);
  constexpr std::size_t kOfLaunches = kFlagBytes + kCreditBytes - kMaxRanks * sizeof(std::uint32_t);
  fill(kFlagBytes, kOfLaunches, setup_.is_fresh ? 0 : setup_.last_run);
  fill(kOfLaunches, kFlagBytes + kCreditBytes, setup_.last_run);
  fill(packets_at(setup_.blocks), inbox_bytes(setup_.blocks), old);
}

Simulation::~Simulation() {
  for (const auto& channel : channels_) channel->context_ = nullptr;  // nothing of it is its own
  current = nullptr;
}

const Simulation::Loaded& Simulation::load(const Algorithm& algorithm, Shape shape, Reach reach) {
  shape.is_on_device = true;
  const auto [found, is_new] =
      loaded_.try_emplace({&algorithm, shape.collective, shape.root, shape.in_place, reach});
  Loaded& loaded = found->second;
  if (!is_new) return loaded;
  const bool is_shared = !setup_.device_of.empty();
  const Shape whose = is_shared ? leaders_of(shape) : shape;
  const std::vector<Schedule> direct = all_ranks(algorithm, whose);
  if (reach == Reach::map && !is_without_scratch(direct)) return loaded;
  std::vector<Schedule> all = lower(direct, whose, reach);
  if (is_shared) all = share(all, shape);
  loaded.chunks = all.front().chunks;
  for (const auto& channel : channels_) {
    auto program = channel->load(all, Engine::kernel);
    if (program == nullptr) break;
    loaded.programs.push_back(std::move(program));
  }
  if (loaded.programs.size() < channels_.size()) loaded.programs.clear();
  return loaded;
}

void Simulation::launch(int rank, trib::Program& program, const Arguments& arguments) {
  launching_ = gpu_of(rank);
  Channel& channel = *channels_[static_cast<std::size_t>(rank)];
  if (setup_.is_counted && machine_.one_in(2)) channel.is_captured_ = true;
  if (setup_.lingers) channel.look_ahead();
  operations_[static_cast<std::size_t>(launching_)] = &program.launch(arguments);
}

bool Simulation::is_default_stream_idle() {
  return !current->setup_.lingers || !current->machine_.one_in(10);
}

CUresult Simulation::launch_kernel(CUfunction function, unsigned blocks, unsigned threads,
                                   void** parameters) {
  const auto* const what = reinterpret_cast<const Function*>(function);
  const Protocol protocol = what->protocol;
  Launched& launched = current->launched_[static_cast<std::size_t>(current->launching_)];
  launched = {protocol, false, blocks, 0, 0};
  const auto& root = *static_cast<const LaunchRoot*>(parameters[0]);
  const auto leader = static_cast<std::size_t>(current->leader_of(current->launching_));
  launched.number =
      root.number + (root.is_replayed ? current->channels_[leader]->replays_.launches : 0);
  if (protocol != Protocol::mapped && protocol != Protocol::local)
    launched.passes = static_cast<const LaunchHead*>(parameters[0])->passes;
  if (protocol == Protocol::pipeline)
    launched.is_relay = static_cast<const PipelineLaunch*>(parameters[0])->is_relay;
  // Any number will do for these kernels, so a few: threads take time.
  simulation::Machine& machine = current->machine_;
  if (launched.is_relay)
    threads = 2 * (2 * kWarp + 1 + machine.below(20));  // for two duties
  else if (current->setup_.lingers)                     // whole warps
    threads = protocol == Protocol::flat ? kWarp * (1 + machine.below(2)) : threads;
  else if (protocol == Protocol::flat || protocol == Protocol::pipeline)
    threads = std::min(threads, kMaxRanks + machine.below(48));
  const auto* const begin = static_cast<const std::byte*>(parameters[0]);
  const auto launch =
      std::make_shared<const std::vector<std::byte>>(begin, begin + launch_bytes(protocol));
  const simulation::Kernel kernel{blocks, threads,
                                  [=] { run_thread(protocol, what->dtype, launch->data()); }};
  if (machine.is_running(current->launching_) ||
      current->is_held_[static_cast<std::size_t>(current->launching_)])
    current->queued_[static_cast<std::size_t>(current->launching_)].push_back(kernel);
  else
    machine.launch(current->launching_, kernel);
  return CUDA_SUCCESS;
}

CUresult Simulation::allocate(CUdeviceptr* memory, std::size_t bytes) {
  current->allocated_.push_back(zeros(bytes));
  *memory = reinterpret_cast<CUdeviceptr>(current->allocated_.back().get());
  return CUDA_SUCCESS;
}

CUresult Simulation::copy_behind(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  current->copies_[static_cast<std::size_t>(current->launching_)].push_back({to, from, bytes});
  return CUDA_SUCCESS;
}

bool Simulation::is_told(int gpu) {
  if (setup_.lingers) {
    if (!copies_[static_cast<std::size_t>(gpu)].empty()) return false;
    launching_ = gpu;
    try {
      return operations_[static_cast<std::size_t>(gpu)]->advance(0);
    } catch (const Error&) {
      return true;
    }
  }
  return doorbells_[static_cast<std::size_t>(leader_of(gpu))]->done == launched(gpu).number &&
         copies_[static_cast<std::size_t>(gpu)].empty();
}

bool Simulation::finish(int gpu) {
  if (machine_.is_running(gpu) || is_held_[static_cast<std::size_t>(gpu)]) return false;
  auto& queued = queued_[static_cast<std::size_t>(gpu)];
  if (!queued.empty()) {
    machine_.launch(gpu, queued.front());
    queued.erase(queued.begin());
    return false;
  }
  auto& copies = copies_[static_cast<std::size_t>(gpu)];
  for (const Copy& copy : copies)
    std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from),
                copy.bytes);
  copies.clear();
  return true;
}

void Simulation::let_go(int gpu) {
  is_held_[static_cast<std::size_t>(gpu)] = false;
  finish(gpu);
}

bool Simulation::has_error(int rank) const {
  try {
    channels_[static_cast<std::size_t>(rank)]->check_result();
    return false;
  } catch (const Error&) {
    return true;
  }
}

void Simulation::abort(int rank, bool is_by_peer) {
  if (is_by_peer)
    std::memset(inboxes_[static_cast<std::size_t>(rank)].get() + kAbortAt, 1, 1);
  else
    doorbells_[static_cast<std::size_t>(rank)]->abort = 1;
  machine_.has_changed();
}

void Simulation::poison(int rank) {
  abort(rank, /*is_by_peer=*/false);
  for (int other = 0; other < ranks(); ++other) abort(other, /*is_by_peer=*/true);
}

void Simulation::ignore_credits() {
  for (const Memory& inbox : inboxes_)
    machine_.exaggerate(inbox.get() + kFlagBytes, kCreditBytes, 64);
}

std::string Simulation::name_of(const void* at) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    const auto* const begin = inboxes_[static_cast<std::size_t>(rank)].get();
    if (at < begin || at >= begin + inbox_bytes(setup_.blocks)) continue;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(at) - begin);
    if (offset >= kPayloadAt) return "a packet";
    const auto word = offset / sizeof(std::uint32_t);
    const std::string value = " (" + std::to_string(*static_cast<const std::uint32_t*>(at)) + ")";
    if (offset < kFlagBytes)
      return "flag " + std::to_string(word % kMaxUnits) + " in window " +
             std::to_string(word / kMaxUnits % kWindows) + value;
    if (offset < kFlagBytes + kCreditBytes)
      return "credit of GPU " + std::to_string((offset - kFlagBytes) / 4 % kMaxRanks) + value;
    return "GPU " + std::to_string((offset - kThroughAt) / 8 % kMaxRanks) + " to be through";
  }
  return "something";
}

std::string Simulation::waits(int gpu) const {
  return machine_.waits(gpu, [this](const void* at) { return name_of(at); });
}

}  // namespace trib::cuda

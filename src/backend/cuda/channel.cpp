// SPDX-License-Identifier: BSD-3-Clause
// Setting up a channel: every rank allocates its inbox, and maps those of its peers.
#include "backend/cuda/channel.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include "backend/cuda/agree.hpp"
#include "backend/cuda/copy_program.hpp"
#include "backend/cuda/disturb.hpp"
#include "backend/cuda/local_program.hpp"
#include "backend/cuda/mapped_program.hpp"
#include "backend/cuda/memory.hpp"
#include "backend/cuda/program.hpp"
#include "backend/cuda/unsettled.hpp"
#include "base/locks.hpp"
#include "base/log.hpp"
#include "base/process.hpp"
#include "base/rest.hpp"

namespace trib::cuda {
namespace {

bool has_mps() {
  const char* const pipe = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  return ::access(pipe != nullptr ? pipe : "/tmp/nvidia-mps", F_OK) == 0;
}

/// Under MPS, kernels of several processes share the multiprocessors, and a block that has none
/// waits until one is free. Disjoint communicators' kernels could keep each other's blocks out for
/// ever, in another order on every GPU. Gives how many kernels there may be on this GPU at a time,
/// so that each takes its part only: any other communicator in a call has two ranks at least.
/// Without MPS the GPU takes processes in turns.
int neighbours(int size) {
  if (!has_mps()) return 1;
  int ranks = 0;  // on this node
  for (const char* name : {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE",
                           "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE"})
    if (const char* const text = std::getenv(name)) ranks = std::max(ranks, std::atoi(text));
  return 1 + std::max(0, ranks - size) / 2;
}

/// Most copies on the default stream are through by then.
constexpr auto kSoon = std::chrono::microseconds(50);

/// The driver has told by then that a graph is gone.
constexpr auto kSoonGone = std::chrono::milliseconds(50);

/// For buffers that a program uses seldom, kernels do without mapping them: on two H100 a call that
/// maps takes 0.5 ms longer, with 4 MiB and more for what lay there before 2, and those after it
/// gain 1 to 9 us.
constexpr Exports::Habits kHabits{.trials = 256, .patience = 2000};

/// Blocks of a kernel that works through host memory: the bus is slow, and pinned memory dear.
constexpr int kHostBlocks = 16;

/// Blocks of a kernel that waits for nobody: more than find room at a time.
constexpr int kLocalBlocks = 8 * kMaxBlocks;

/// Makes two devices of each that has several ranks, which go to one and the other in turn; gives
/// how many there are then.
int halve(Level& device_of) {
  std::vector<int> ranks(device_of.size()), halves;  // of each device; known ones, in order
  for (int& device : device_of) {
    const int half = 2 * device + ranks[static_cast<std::size_t>(device)]++ % 2;
    auto known = std::find(halves.begin(), halves.end(), half);
    if (known == halves.end()) known = halves.insert(known, half);
    device = static_cast<int>(known - halves.begin());
  }
  return static_cast<int>(halves.size());
}

}  // namespace

Channel::Channel(Bootstrap& bootstrap, const Config& config)
    : bootstrap_(bootstrap),
      driver_(*driver()),
      rank_(bootstrap.rank()),
      size_(bootstrap.size()),
      inboxes_(static_cast<std::size_t>(size_)),
      graphs_(driver_),
      segment_mode_(config.segment),
      ignores_default_stream_(config.default_stream == Config::DefaultStream::ignore),
      cublas_(config.cublas) {
  time_limit_ =
      static_cast<std::uint64_t>(1e9 * (config.timeout > 0 ? config.timeout : kTimeLimitSeconds));
}

/// This rank's part: context, kernels, memory.
void Channel::set_up(const void* pointer) {
  context_ = context_of(pointer);
  if (context_ == nullptr) throw Error(Code::device, "cuda: no context for the buffer's device");
  const Current current(context_);
  context_id_ = ContextId::of(context_);
  asides_ = std::make_shared<Asides>(context_id_);
  queue_ = Queue::of(context_id_);
  cuda::check(driver_.cuCtxGetDevice_(&device_), "no device");
  cuda::check(driver_.cuDeviceGetAttribute_(&max_blocks_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                            device_),
              "cannot count multiprocessors");
  max_blocks_ = std::clamp(max_blocks_ / neighbours(size_), 1, kMaxBlocks);
  kernels_ = &Kernels::of_current();
  // Above the program's own work: peers wait for ours. Ordered behind the default stream, as the
  // copies are through which other MPIs move such buffers: programs may not know that a copy from
  // pageable memory can still be under way when it has returned.
  int lowest = 0, highest = 0;
  cuda::check(driver_.cuCtxGetStreamPriorityRange_(&lowest, &highest), "cannot get priorities");
  cuda::check(driver_.cuStreamCreateWithPriority_(&stream_, CU_STREAM_DEFAULT, highest),
              "cannot create a stream");
  replays_.priority = highest;
  cuda::check(driver_.cuStreamCreate_(&abort_stream_, CU_STREAM_NON_BLOCKING),
              "cannot create a stream");
  cuda::check(
      driver_.cuStreamCreateWithPriority_(&resident_stream_, CU_STREAM_NON_BLOCKING, highest),
      "cannot create a stream");
  cuda::check(driver_.cuEventCreate_(&last_, CU_EVENT_DISABLE_TIMING), "cannot create an event");
  void* host = nullptr;
  cuda::check(driver_.cuMemHostAlloc_(&host, sizeof(Doorbell),
                                      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
              "cannot pin host memory");
  doorbell_ = new (host) Doorbell{};
  cuda::check(driver_.cuMemAlloc_(&counters_, sizeof(Counters)), "cannot allocate");
  fill(counters_, 0, sizeof(Counters));
}

bool Channel::open_direct(std::string& why) {
  std::vector<int> owners;
  for (int device = 0; device < devices(); ++device) owners.push_back(leader_of(device));
  direct_ = PeerMemory::open(bootstrap_, segment_mode_, context_id_, inbox_bytes(max_blocks_),
                             owners, why);
  if (!direct_) return false;
  for (int rank = 0; rank < size_; ++rank)
    inboxes_[static_cast<std::size_t>(rank)] = direct_->of(rank);
  return true;
}

bool Channel::open_on_host(const Config& config, std::string& why) {
  max_blocks_ = std::min(max_blocks_, kHostBlocks);
  segment_ = Segment::open(bootstrap_, inbox_bytes(max_blocks_), config.segment, why);
  if (!segment_) return false;
  std::string trouble;
  try {
    const Current current(context_);
    pinned_ = Pinned::of(segment_->of(0),
                         segment_->bytes_per_rank() * static_cast<std::size_t>(size_), context_id_);
    for (int rank = 0; rank < size_; ++rank)
      cuda::check(driver_.cuMemHostGetDevicePointer_(&inboxes_[static_cast<std::size_t>(rank)],
                                                     segment_->of(rank), 0),
                  "cannot map shared memory");
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  return all_agree(bootstrap_, trouble, why);
}

Placement Channel::placement() const {
  Placement placement;
  placement.is_shared = sharing_ != nullptr;
  for (int rank = 0; rank < size_; ++rank) placement.device_of.push_back(device_of(rank));
  for (int device = 0; device < devices(); ++device)
    placement.leader_of.push_back(leader_of(device));
  placement.inboxes.assign(inboxes_.begin(), inboxes_.end());
  return placement;
}

std::vector<int> Channel::others() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) ranks.push_back(rank);
  return ranks;
}

std::unique_ptr<Channel> Channel::open(Bootstrap& bootstrap, const Config& config,
                                       const void* pointer, std::string& why) {
  struct Introduction {
    CUuuid device;
    ProcessId process;
    int blocks;
    std::size_t memory;
  };
  std::unique_ptr<Channel> channel;
  Introduction mine{};
  std::string trouble;
  try {
    if (driver() == nullptr) throw Error(Code::device, "the CUDA driver is not loaded");
    if (trouble = too_old_for_kernels(*driver()); !trouble.empty())
      throw Error(Code::device, trouble);
    channel.reset(new Channel(bootstrap, config));
    channel->set_up(pointer);
    mine.blocks = channel->max_blocks_;
    cuda::check(channel->driver_.cuDeviceTotalMem_(&mine.memory, channel->device_),
                "cannot tell how much memory there is");
    cuda::check(channel->driver_.cuDeviceGetUuid_(&mine.device, channel->device_), "no device id");
    mine.process = ProcessId::of_this();
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  if (!all_agree(bootstrap, trouble, why)) return nullptr;
  std::vector<Introduction> all(static_cast<std::size_t>(bootstrap.size()));
  bootstrap.exchange(&mine, all.data(), sizeof mine);
  Level device_of;
  int devices = 0;
  bool are_twins = false;
  std::vector<int> sharers;  // of each device
  for (int rank = 0; rank < channel->size_; ++rank) {
    const Introduction& other = all[static_cast<std::size_t>(rank)];
    channel->max_blocks_ = std::min(channel->max_blocks_, other.blocks);
    mine.memory = std::min(mine.memory, other.memory);
    int before = 0;
    while (std::memcmp(&other.device, &all[static_cast<std::size_t>(before)].device,
                       sizeof mine.device) != 0)
      ++before;
    device_of.push_back(before == rank ? devices++ : device_of[static_cast<std::size_t>(before)]);
    sharers.resize(static_cast<std::size_t>(devices));
    ++sharers[static_cast<std::size_t>(device_of.back())];
    for (int twin = before; twin < rank; ++twin)
      are_twins = are_twins || (device_of[static_cast<std::size_t>(twin)] == device_of.back() &&
                                all[static_cast<std::size_t>(twin)].process == other.process);
  }
  const int most = *std::max_element(sharers.begin(), sharers.end());
  int leaders = 1;  // of a GPU
  // Kernels know so many ranks. And of two in one process, one's kernel on a stream would hold up
  // what the other one synchronises.
  if (config.shared_gpu == Config::SharedGpu::all && channel->size_ <= kMaxRanks && !are_twins) {
    leaders = most;
    devices = channel->size_;
  } else if (config.shared_gpu == Config::SharedGpu::halves && !are_twins) {
    leaders = std::min(most, 2);
    devices = halve(device_of);
  }
  if (leaders > 1) {
    // A kernel's blocks leave room for those of the kernels that they wait for.
    channel->max_blocks_ = std::max(1, channel->max_blocks_ / leaders);
    mine.memory /= static_cast<std::size_t>(leaders);
    if (!has_mps() && channel->rank_ == 0)
      log_once(Config::Log::warn,
               "TRIB_SHARED_GPU=all and halves without MPS: ranks that share a GPU wait for its "
               "turns, some milliseconds in every call");
  }
  channel->wanted_inbox_bytes_ = large_inbox_bytes(mine.memory);
  if (devices > kMaxRanks) {
    why = "more than " + std::to_string(kMaxRanks) + " GPUs";
    return nullptr;
  }
  if (devices < channel->size_) {
    channel->sharing_ =
        Sharing::open(bootstrap, config.segment, channel->context_id_, device_of, why);
    if (!channel->sharing_) return nullptr;
    if (devices == 1) {  // whose kernels wait for nobody
      channel->max_blocks_ = kLocalBlocks;
      if (channel->size_ <= kMaxSharers) return channel;
      why = "more than " + std::to_string(kMaxSharers) + " ranks share the GPU";
      return nullptr;
    }
  }
  if (config.peer_access == Config::PeerAccess::automatic) {
    if (channel->open_direct(why)) {
      if (!channel->sharing_ && config.map != Config::Map::off) {
        channel->exports_ =
            Exports::open(bootstrap, config.segment, channel->context_id_, channel->others(),
                          config.map == Config::Map::automatic ? kHabits : Exports::Habits{}, why);
        if (!channel->exports_ && channel->rank_ == 0)
          log_once(Config::Log::info, "GPUs do not map each other's buffers: " + why);
      }
      return channel;
    }
    if (channel->rank_ == 0)
      log_once(Config::Log::info, "GPUs reach each other through host memory: " + why);
  }
  if (!channel->open_on_host(config, why)) return nullptr;
  return channel;
}

/// Not collective: a peer may still use the inbox. The memory stays until none does.
Channel::~Channel() { release(); }

void Channel::release() noexcept {
  if (context_ == nullptr) return;
  copy_engine_.reset();
  try {
    const Current current(context_id_);
    // Kernels that were enqueued still use all of this. They end: by what poison() tells them, or
    // by their own limit.
    if (is_enqueued_) driver_.cuEventSynchronize_(last_);
    if (graphs_.any()) driver_.cuCtxSynchronize_();
    if (resident_stream_ != nullptr) {
      if (resident_.program != nullptr) dismiss();
      driver_.cuStreamSynchronize_(resident_stream_);
      driver_.cuStreamDestroy_(resident_stream_);
    }
    if (stream_ != nullptr) {
      driver_.cuStreamSynchronize_(stream_);
      driver_.cuStreamDestroy_(stream_);
    }
    if (abort_stream_ != nullptr) {
      driver_.cuStreamSynchronize_(abort_stream_);
      driver_.cuStreamDestroy_(abort_stream_);
    }
    if (last_ != nullptr) {
      queue_->forget(last_);
      driver_.cuEventDestroy_(last_);
    }
    asides_.reset();
    release_inboxes();
    if (counters_ != 0) driver_.cuMemFree_(counters_);
    if (doorbell_ != nullptr) driver_.cuMemFreeHost_(doorbell_);
  } catch (const Error&) {
    // The context is gone, and all of this with it, but for what a peer of this process has.
    pinned_.reset();
    direct_.reset();
  }
  // No kernel uses what these have mapped any more.
  sharing_.reset();
  exports_.reset();
  context_ = nullptr;
}

void Channel::release_inboxes() {
  const Current current(context_);
  pinned_.reset();
  std::fill(inboxes_.begin(), inboxes_.end(), 0);
  direct_.reset();
}

void* Channel::allocate(std::size_t bytes) {
  const Current current(context_);
  CUdeviceptr memory = 0;
  cuda::check(driver_.cuMemAlloc_(&memory, bytes), "cannot allocate");
  fill(memory, 0x3c, bytes);
  return reinterpret_cast<void*>(memory);
}

void Channel::free(void* pointer) noexcept {
  try {
    const Current current(context_);
    driver_.cuMemFree_(reinterpret_cast<CUdeviceptr>(pointer));
  } catch (const Error&) {
    // The context is gone, and the memory with it.
  }
}

std::unique_ptr<trib::Program> Channel::load(const std::vector<Schedule>& all, Engine engine) {
  if (is_driven_by_host(engine))
    return std::make_unique<CopyProgram>(*this, all, engine == Engine::gemv);
  if (all.front().is_mapped) return MappedProgram::of(*this, all);
  if (is_local()) return LocalProgram::of(*this, all);
  auto program = std::make_unique<Program>(*this, all);
  // Where ranks share GPUs, who launches is decided anew in each call.
  if (!program->agree(all) && sharing_) return nullptr;
  return program;
}

bool Channel::reserve(Engine engine, std::string& why) {
  // The GPUs cannot map each other's memory, or one has several ranks.
  if (segment_ || sharing_) return false;
  // A GPU that is nearly full may have room for shorter slices.
  for (const std::size_t bytes : {wanted_inbox_bytes_, kLeastLargeInbox}) {
    if (copy_engine_) break;
    copy_engine_ = CopyEngine::open(bootstrap_, segment_mode_, context_id_, bytes, why);
    if (copy_engine_) large_inbox_bytes_ = bytes;
  }
  if (copy_engine_ == nullptr) return false;
  return engine == Engine::copy || copy_engine_->reserve_gemv(bootstrap_, cublas_, why);
}

void Channel::poison(const Error&) noexcept {
  if (doorbell_ == nullptr) return;
  if (!context_id_.is_there()) {
    // Nothing of ours runs any more, and there is no doorbell.
    if (sharing_) sharing_->give_up();
    if (sharing_) sharing_->end_all();
    return;
  }
  std::atomic_ref(doorbell_->abort).store(1, std::memory_order_release);
  if (sharing_) sharing_->give_up();
  // Kernels look at a word in their own GPU's memory: peers', and this rank's that are yet to
  // begin. On a stream that waits for no other: what they wait for may be enqueued on the default
  // stream.
  try {
    const Current current(context_);
    for (const CUdeviceptr inbox : inboxes_)
      if (inbox != 0) driver_.cuMemsetD32Async_(inbox + kAbortAt, 1, 1, abort_stream_);
  } catch (const Error&) {
    // The context is gone: nothing of ours runs any more.
  }
  if (copy_engine_) copy_engine_->drain();
  if (is_enqueued_ || is_captured_) return;
  // The kernel sees it within a millisecond; the caller's buffers are its own again only then. One
  // that is still queued behind other work stores nothing when it begins, but where it waits for
  // nobody (local.cuh). A follower's buffers are in the hands of its leader, whose host sees that
  // this one has failed, and then comes here, too.
  const auto limit = std::chrono::seconds(leads() ? 2 : 3);
  const auto start = std::chrono::steady_clock::now();
  const auto is_over = [&] {
    return leads() ? std::atomic_ref(doorbell_->done).load(std::memory_order_acquire) >= launches_
                   : sharing_->await(launches_, 0) || sharing_->has_leader_ended();
  };
  while (!is_over() && std::chrono::steady_clock::now() - start < limit) ::sched_yield();
  // Peers' kernels, a dead one's too, may be storing into the caller's buffers until they see it.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  while (std::chrono::steady_clock::now() < end) nap(std::chrono::milliseconds(1));
  if (sharing_) sharing_->end_all();
}

bool Channel::is_capturing(Stream stream) const {
  const Current current(context_id_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  // Nothing was begun: the communicator is as good as before.
  if (const CUresult result = driver_.cuStreamIsCapturing_(static_cast<CUstream>(stream), &status);
      result != CUDA_SUCCESS)
    throw Error(Code::argument, "cuda: cannot use the stream: " + cuda::describe(result));
  if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
    throw Error(Code::argument, "the stream's capture has failed before this call");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void Channel::check_result() const {
  context_id_.known_to_be_there();  // the doorbell is gone with it
  check_doorbell();
}

void Channel::check_doorbell() const {
  const std::uint32_t failed = std::atomic_ref(doorbell_->failed).load(std::memory_order_acquire);
  if (failed != 0)
    throw Error(Code::timeout, "rank " + std::to_string(leader_of(static_cast<int>(failed) - 1)) +
                                   " did not come to a reduction on the GPU within " +
                                   std::to_string(time_limit_ / 1'000'000'000) + " s");
  // Some threads did not wait for their data: what the kernel has left is no result.
  if (is_aborted())
    throw Error(Code::peer, "a peer gave up a reduction on the GPU while this rank waited for it");
}

void Channel::drain() {
  const Current current(context_id_);
  if (is_enqueued_) cuda::check(driver_.cuEventSynchronize_(last_), "a kernel failed");
  // What is replayed is on streams that only the program knows.
  if (graphs_.any(kSoonGone)) cuda::check(driver_.cuCtxSynchronize_(), "a kernel failed");
  check_stream();
  check_result();
}

bool Channel::is_aborted() const {
  return std::atomic_ref(doorbell_->abort).load(std::memory_order_acquire) != 0;
}

Memory Channel::where(const void* pointer) const {
  return where_in(context_id_, pointer, ignores_default_stream_);
}

const Level& Channel::device_of() const {
  static const Level none;
  return sharing_ ? sharing_->device_of() : none;
}

void Channel::show(Card& card, const ShownBuffers& buffers) {
  if (sharing_) {
    // Of a context that is gone there is nothing to show: where().
    if (sharing_->leads() || context_id_.is_there()) sharing_->show(card, buffers);
    return;
  }
  if (!exports_) return;
  exports_->look_for_letters();
  if (card.in != Memory::device) return;
  const Current current(context_);
  exports_->take_back_freed(1);
  card.in_block = exports_->show(buffers.in, buffers.in_bytes, card.in_at);
  if (card.in_block == 0) return;
  if (buffers.out == buffers.in) {
    card.out_block = card.in_block;
    card.out_at = card.in_at;
  } else if (buffers.out != nullptr && card.out == Memory::device) {
    card.out_block = exports_->show(buffers.out, buffers.out_bytes, card.out_at);
  }
  if (!is_settled()) card.in_block = card.out_block = 0;
}

/// The peers' kernels are ordered behind their own default streams, not behind this rank's. What is
/// under way there may wait for a peer that waits for this rank: so not for long.
bool Channel::is_settled() const {
  if (sharing_ && sharing_->leads()) return true;  // only its own kernels use its buffers
  if (!context_id_.is_there()) return true;
  const Current current(context_);
  const auto start = std::chrono::steady_clock::now();
  while (!is_default_stream_idle())
    if (std::chrono::steady_clock::now() - start > kSoon) return false;
  return true;
}

/// The leader's kernel is ordered behind its own default stream, not behind this rank's.
std::unique_ptr<Unsettled> Channel::unsettled() const {
  if (!sharing_ || sharing_->leads() || ignores_default_stream_) return nullptr;
  return cuda::unsettled(context_id_);
}

std::shared_ptr<void> Channel::hold(const ShownBuffers& buffers,
                                    std::vector<MappedBuffers>& mapped) {
  if (sharing_) return sharing_->hold(bootstrap_, buffers, mapped);
  if (!exports_) return nullptr;
  mapped.assign(static_cast<std::size_t>(size_), {});
  mapped[static_cast<std::size_t>(rank_)] = {const_cast<void*>(buffers.in),
                                             const_cast<void*>(buffers.out)};
  // Without its context a rank has nothing to show, which the others have to hear.
  const bool is_there = context_id_.is_there();
  std::optional<Current> current;
  if (is_there) current.emplace(context_);
  const ShownBuffers& shown = is_there ? buffers : ShownBuffers{};
  return exports_->hold_all(bootstrap_, shown, [&](int rank, const Card& card) {
    return exports_->reach(rank, card, mapped[static_cast<std::size_t>(rank)]);
  });
}

bool Channel::is_still_there(const std::shared_ptr<void>& held) const {
  if (!context_id_.is_there()) return false;
  if (sharing_) return sharing_->is_still_there(held);
  if (!exports_) return true;
  const Current current(context_);
  return exports_->is_still_there(held);
}

bool Channel::reach(const HostChannel& met, const void* in, void* out,
                    std::vector<MappedBuffers>& mapped) {
  if (sharing_) return sharing_->reach(met, in, out, mapped);
  mapped.assign(static_cast<std::size_t>(size_), {});
  mapped[static_cast<std::size_t>(rank_)] = {const_cast<void*>(in), out};
  const Current current(context_);
  bool is_reached = true;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_ &&
        !exports_->reach(rank, met.card(rank), mapped[static_cast<std::size_t>(rank)]))
      is_reached = false;
  return is_reached;
}

void Channel::tidy_up() {
  if (!context_id_.is_there()) {
    // What the program had there is kept as long as peers have it mapped.
    if (sharing_) return sharing_->take_back_freed();
    if (exports_) exports_->take_back_freed(kShownBlocks);
    return;
  }
  if (sharing_) return sharing_->tidy_up();
  if (!exports_) return;
  const Current current(context_);
  exports_->take_back_freed(kShownBlocks / 8);
  exports_->close_taken_back();
}

bool Channel::await(std::uint64_t number, int polls) {
  const std::atomic_ref done(doorbell_->done);
  // Acquire: pairs with the kernel's last store.
  for (int poll = 0; done.load(std::memory_order_acquire) != number; ++poll) {
    if (poll >= polls) {
      if (++stalls_ % 4096 == 0) check_stream();
      return false;
    }
    relax();
  }
  check_doorbell();
  return true;
}

void Channel::check_stream() {
  const Current current(context_id_);
  for (const CUstream stream : {stream_, resident_stream_}) {
    const CUresult result = driver_.cuStreamQuery_(stream);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
      cuda::check(result, "a kernel failed");
  }
}

int Channel::any_peer(std::uint64_t look) const {
  const int peer = static_cast<int>(look % static_cast<std::uint64_t>(size_));
  return peer == rank_ ? wrap(peer + 1, size_) : peer;
}

void Channel::order(std::int64_t in_moved, std::int64_t out_moved) {
  const std::uint64_t tag = std::uint64_t{++orders_} << 32;
  const auto in = static_cast<std::uint64_t>(in_moved), out = static_cast<std::uint64_t>(out_moved);
  const std::uint64_t words[4] = {in & UINT32_MAX, in >> 32, out & UINT32_MAX, out >> 32};
  // Release: what the program has put into pinned buffers comes before.
  for (int i = 0; i < 4; ++i) {
    disturb_host();
    std::atomic_ref(doorbell_->order[i]).store(tag | words[i], std::memory_order_release);
  }
}

bool Channel::has_left() const {
  return std::atomic_ref(doorbell_->left).load(std::memory_order_acquire) >= resident_.first;
}

void Channel::dismiss() {
  order(kLeave, 0);
  resident_.program = nullptr;
}

void Channel::do_without_resident() {
  if (resident_.program == nullptr) return;
  if (has_left())
    forget();
  else
    dismiss();
}

void Channel::forget() {
  const bool was_in_vain =
      std::atomic_ref(doorbell_->left).load(std::memory_order_relaxed) == resident_.first;
  vain_ = was_in_vain ? vain_ + 1 : 0;
  resident_.program = nullptr;
}

/// A program that takes longer between its reductions than kernels linger only has to wait for them
/// when it synchronises the device: after some in vain, a pause.
bool Channel::is_worth_lingering() {
  constexpr int kPatience = 8, kPause = 1000;
  if (vain_ >= kPatience && ++vain_ < kPause) return false;
  if (vain_ >= kPause) vain_ = kPatience - 1;
  return is_default_stream_idle();
}

/// The driver takes a microsecond for it while a kernel lingers.
void Channel::look_ahead() { was_idle_ = resident_.program != nullptr && is_default_stream_idle(); }

bool Channel::is_default_stream_idle() const {
  if (ignores_default_stream_) return true;
  try {
    const Current current(context_);
    return cuda::is_default_stream_idle();
  } catch (const Error&) {
    return true;  // the context is gone, and the stream with it
  }
}

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// From a call to a launch of a kernel that waits for peers.
#include "backend/cuda/program.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "base/locks.hpp"

namespace trib::cuda {
namespace {

/// Passes of a block from which on the general kernel is as fast as the pipeline or faster: its
/// stages go on side by side (4 H200, 2026-11-22). With no more than there are windows, none is
/// used twice; the pipeline is made for more, but has run on GPUs with that only while it was
/// measured.
constexpr std::uint32_t kMostRounds = 4;

}  // namespace

Program::Program(Channel& channel, const std::vector<Schedule>& all)
    : channel_(channel),
      plan_(channel.placement(), all, channel.rank_),
      repeats_(channel.driver_, channel.replays_, channel.context_id_),
      aside_(channel.asides_) {
  launch_.doorbell = channel.doorbell_;
  launch_.counters = reinterpret_cast<Counters*>(channel.counters_);
  launch_.time_limit = channel.time_limit_;
  launch_.has_met = true;
}

bool Program::agree(const std::vector<Schedule>& all) {
  const Placement placement = channel_.placement();
  for (int rank = 0; rank < channel_.size_; ++rank) {
    const KernelPlan its(placement, all, rank);
    plan_.is_packet_possible = plan_.is_packet_possible && its.is_packet_possible;
    plan_.is_simple_possible = plan_.is_simple_possible && its.is_simple_possible;
    plan_.exchange.is_pipeline = plan_.exchange.is_pipeline && its.exchange.is_pipeline;
    plan_.exchange.is_relay = plan_.exchange.is_relay && its.exchange.is_relay;
  }
  return plan_.is_packet_possible && plan_.is_simple_possible;
}

std::size_t Program::fit(bool is_large) const {
  if (is_large ? !plan_.is_simple_possible : !plan_.is_packet_possible) return 0;
  // A packet is half number.
  const std::size_t room = is_large ? kWindowBytes : kPacketWindowBytes / 2;
  return room / static_cast<std::size_t>(std::max(plan_.units, 1)) / kUnitBytes * kUnitBytes;
}

/// Where ranks share devices such calls do not come here, see Communicator::is_in_the_way.
bool Program::is_to_go_aside(const Arguments& arguments) const {
  return !channel_.sharing_ && covers_input(arguments, channel_.rank_);
}

Operation& Program::launch(const Arguments& arguments) {
  Launch& launch = launch_;
  // Even if it fails: the host's numbers of runs are no longer the device's.
  if (arguments.is_captured) channel_.is_captured_ = true;
  launch.slice = static_cast<std::uint32_t>(arguments.slice);
  launch.passes =
      static_cast<std::uint32_t>((arguments.longest + arguments.slice - 1) / arguments.slice);
  const auto blocks =
      std::min<std::uint32_t>(static_cast<std::uint32_t>(arguments.blocks), launch.passes);
  const std::uint32_t runs = (launch.passes + blocks - 1) / blocks;
  launch.first_run = first_run_behind(channel_.last_run_, runs);
  // Kernels that linger count on by themselves.
  const bool is_next = launch.first_run == channel_.last_run_ + 1;
  channel_.last_run_ = launch.first_run + runs - 1;
  launch.number = ++channel_.launches_;
  stalls_ = 0;
  is_ordered_ = false;
  launch.linger = 0;
  if (!channel_.leads()) return *this;
  if (!arguments.is_enqueued && !channel_.sharing_) {
    // What lies over its input takes a result aside, which is not for a kernel that lingers.
    const bool may_linger = arguments.linger > 0 && !arguments.is_large && launch.passes == 1 &&
                            look_for_repeat(arguments) && !is_to_go_aside(arguments);
    if (order(arguments, may_linger && is_next)) return *this;
    if (may_linger && channel_.is_worth_lingering())
      launch.linger = static_cast<std::uint64_t>(arguments.linger) * 1000;
  }
  start(arguments);
  return *this;
}

/// Whether the call is like the one before, but for its buffers.
bool Program::look_for_repeat(const Arguments& arguments) {
  const std::size_t* const begin = arguments.chunk_begin;
  const std::size_t* const end = begin + arguments.chunks + 1;
  const bool is_repeated = arguments.op == last_.op && arguments.dtype == last_.dtype &&
                           arguments.slice == last_.slice &&
                           std::equal(begin, end, last_.begin.begin(), last_.begin.end());
  if (!is_repeated) {
    last_.op = arguments.op;
    last_.dtype = arguments.dtype;
    last_.slice = arguments.slice;
    last_.begin.assign(begin, end);
  }
  return is_repeated;
}

/// True: a kernel that lingers was told to serve the call. `may_be`: it is like the call before.
bool Program::order(const Arguments& arguments, bool may_be) {
  Channel::Resident& resident = channel_.resident_;
  if (resident.program == nullptr) return false;
  if (channel_.has_left()) {
    channel_.forget();
    return false;
  }
  if (resident.program != this || !may_be || !std::exchange(channel_.was_idle_, false)) {
    channel_.dismiss();
    return false;
  }
  pending_ = arguments;
  is_ordered_ = true;
  const auto moved = [](const void* from, const void* to) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                     reinterpret_cast<std::uintptr_t>(from));
  };
  channel_.order(moved(resident.in, arguments.in), moved(resident.out, arguments.out));
  return true;
}

/// Whether the kernel ends only when it has data from every peer.
bool Program::hears_from_all(const Arguments& arguments) const {
  std::uint32_t heard = 1u << launch_.rank;
  for (const auto [operand, from] : plan_.arrivals) {
    const int chunk = plan_.meaning(operand).chunk;
    if (arguments.chunk_begin[chunk + 1] > arguments.chunk_begin[chunk]) heard |= 1u << from;
  }
  return heard == (1u << launch_.size) - 1;
}

/// Where the chunks of a call are.
void Program::place_operands(const Arguments& arguments) {
  const std::size_t element = bytes(arguments.dtype);
  const bool is_packet = !arguments.is_large;
  const bool is_mapped = channel_.sharing_ || plan_.is_delivered;
  const MappedBuffers own_buffers{const_cast<void*>(arguments.in),
                                  is_aside_ ? reinterpret_cast<void*>(aside_at_) : arguments.out};
  const bool is_scattered = is_scatter(static_cast<Collective>(arguments.signature.collective));
  const std::uint64_t stride =
      (arguments.slice * element + kUnitBytes - 1) / kUnitBytes * kUnitBytes * (is_packet ? 2 : 1);
  const std::size_t payload_at = is_packet ? packets_at(channel_.max_blocks_) : kPayloadAt;
  for (std::size_t i = 0; i < plan_.meanings.size(); ++i) {
    const KernelPlan::Meaning& meaning = plan_.meanings[i];
    Operand& operand = launch_.operand[i];
    const std::size_t begin = arguments.chunk_begin[meaning.chunk];
    operand.length = static_cast<std::uint32_t>(arguments.chunk_begin[meaning.chunk + 1] - begin);
    const MappedBuffers buffers = is_mapped ? arguments.mapped[meaning.rank] : own_buffers;
    const std::size_t out_origin = is_scattered ? arguments.chunk_begin[meaning.rank] : 0;
    operand.address =
        meaning.buffer == Buffer::in ? reinterpret_cast<std::uint64_t>(buffers.in) + begin * element
        : meaning.buffer == Buffer::out
            ? reinterpret_cast<std::uint64_t>(buffers.out) + (begin - out_origin) * element
            : reinterpret_cast<std::uint64_t>(launch_.inbox[meaning.holder]) + payload_at +
                  static_cast<std::uint64_t>(meaning.unit) * stride;
  }
}

/// Launches a kernel for the call that launch_ has the numbers of.
void Program::start(const Arguments& arguments) {
  const bool is_packet = !arguments.is_large;
  const std::size_t element = bytes(arguments.dtype);
  Launch& launch = launch_;
  const auto blocks =
      std::min<std::uint32_t>(static_cast<std::uint32_t>(arguments.blocks), launch.passes);
  launch.has_met = !arguments.is_enqueued;

  // A flat kernel's threads take whole units, which must not belong to two blocks.
  const bool may_be_flat = launch.passes <= blocks &&
                           (launch.passes == 1 || arguments.slice * element % kUnitBytes == 0);
  const Protocol protocol =
      is_packet ? plan_.exchange.is_flat && may_be_flat ? Protocol::flat : Protocol::packet
      : plan_.exchange.is_relay ||
              (plan_.exchange.is_pipeline && launch.passes <= kMostRounds * blocks)
          ? Protocol::pipeline
          : Protocol::simple;
  const CUfunction function = channel_.kernels_->find(arguments.op, arguments.dtype, protocol);
  const Current current(channel_.context_);
  is_aside_ = is_to_go_aside(arguments);
  const std::size_t own =
      is_aside_
          ? (arguments.chunk_begin[channel_.rank_ + 1] - arguments.chunk_begin[channel_.rank_]) *
                element
          : 0;
  if (is_aside_) aside_at_ = aside_.reserve(own);
  place_operands(arguments);
  CUstream stream = channel_.stream_;
  std::optional<Queue::Place> place;
  if (arguments.is_enqueued) {
    stream = static_cast<CUstream>(arguments.stream);
    if (arguments.is_captured) {
      channel_.graphs_.add(stream);
    } else {
      unsigned long long stream_id = 0;
      check(channel_.driver_.cuStreamGetId_(stream, &stream_id), "cannot look at the stream");
      place.emplace(*channel_.queue_, stream, stream_id);
    }
  }
  launch.is_counted = channel_.is_captured_;
  if (arguments.is_enqueued) {
    channel_.known_run_ = kept_near(channel_.known_run_, launch.first_run);
    launch.known_run = channel_.known_run_;
    launch.hears_from_all = hears_from_all(arguments);
    if (launch.hears_from_all) channel_.known_run_ = launch.first_run - 1;
  }
  if (is_aside_) launch.linger = 0;
  if (launch.linger > 0) {
    launch.order = channel_.orders_;
    stream = channel_.resident_stream_;
  }
  // `threads` of each stage. In other kernels than the general one, threads go through all of them.
  int threads =
      std::min(arguments.threads, kMaxThreads / launch.stages / kWarp * kWarp) * launch.stages;
  LaunchHead* parameters = &launch;
  std::size_t length = is_packet ? sizeof(Launch) : sizeof(FlaggedLaunch);
  if (protocol == Protocol::flat || protocol == Protocol::pipeline) {
    const bool is_flat = protocol == Protocol::flat;
    if (is_flat)
      plan_.fill(flat_launch_);
    else
      plan_.fill(pipeline_launch_, arguments.slice * element);
    parameters = is_flat ? static_cast<LaunchHead*>(&flat_launch_) : &pipeline_launch_;
    length = is_flat ? sizeof flat_launch_ : sizeof pipeline_launch_;
    const std::size_t units = (arguments.slice * element + kUnitBytes - 1) / kUnitBytes;
    threads = static_cast<int>(std::min<std::size_t>(
        (units + kWarp - 1) / kWarp * kWarp, is_flat ? kMaxFlatThreads : kMaxPipelineThreads));
    if (!is_flat && plan_.exchange.is_relay) threads = kMaxPipelineThreads;
  }
  const Repeats::Kernel kernel{function, blocks, static_cast<unsigned>(threads)};
  if (launch.has_met && launch.linger == 0)
    repeats_.launch(kernel, stream, *parameters, length, &parameters->first_run,
                    (launch.passes + blocks - 1) / blocks);
  else
    repeats_.launch_once(kernel, stream, *parameters);
  if (is_aside_)
    check(channel_.driver_.cuMemcpyAsync_(reinterpret_cast<CUdeviceptr>(arguments.out), aside_at_,
                                          own, stream),
          "cannot copy the result");
  if (place) {
    place->end(channel_.last_);
    channel_.is_enqueued_ = true;
  }
  if (launch.linger > 0) channel_.resident_ = {this, launch.number, arguments.in, arguments.out};
}

bool Program::advance(int polls) {
  if (!channel_.leads()) return channel_.sharing_->await(launch_.number, polls);
  const std::atomic_ref done(channel_.doorbell_->done);
  for (int poll = 0;; ++poll) {
    // Acquire: pairs with the kernel's last store; what it wrote to pinned memory comes with it.
    if (done.load(std::memory_order_acquire) == launch_.number) break;
    // At the end of every look, too: few polls more may never come.
    if (is_ordered_ && (poll % 64 == 63 || poll >= polls) && channel_.has_left()) {
      // It left before it saw the order, or after it had served the call.
      is_ordered_ = false;
      channel_.forget();
      if (done.load(std::memory_order_acquire) == launch_.number) break;
      start(pending_);
    }
    if (poll >= polls) {
      if (++stalls_ % 4096 == 0) channel_.check_stream();
      return false;
    }
    relax();
  }
  channel_.check_doorbell();
  if (is_aside_) {
    const Current current(channel_.context_);
    check(channel_.driver_.cuStreamSynchronize_(channel_.stream_), "cannot copy the result");
  }
  if (channel_.sharing_) channel_.sharing_->end(launch_.number);
  return true;
}

int Program::blocked_on() const {
  if (!channel_.leads()) return channel_.leader_of(channel_.device_of(channel_.rank_));
  return channel_.any_peer(++looks_);
}

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// From a lowered schedule to lists of pushes and moves, and how the host drives them.
//
// Memory order. A push is done when its event is: the copy engine's stores have then reached the
// peer's memory. This rank's host sees that, and stores the number of the run in the unit's
// `arrived` with release order. The reader's host loads it with acquire order and only then
// launches the kernel that reads the unit, in its own memory. The way back is alike: a kernel's
// last block stores its number in the doorbell (release, system scope, behind all loads and stores
// of the kernel); this rank's host loads it with acquire order, and either enqueues the push of
// what the kernel has written, or stores the number of the run in the unit's `consumed` with
// release order, which the writer's host loads with acquire order before it enqueues the next push
// into the unit. So between any two operations on one place that are not in one stream stands a
// host that has seen the end of the first before it enqueues the second.
//
// Between calls nothing of this is needed: a rank leaves a call when all its pushes and moves are
// done, and ranks meet before the next.
#include "backend/cuda/copy_program.hpp"
#include "backend/cuda/disturb.hpp"
#include "base/locks.hpp"

#include <algorithm>
#include <atomic>
#include <climits>
#include <utility>

namespace trib::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kThreads = 768;
/// Turns between a push and what depends on it: in the one between them it is folded.
constexpr std::uint64_t kLag = 2;
/// Bundles that a rank may begin before the slowest has begun its own: so many wait in its stream.
constexpr std::uint64_t kLead = 1;

/// What waits: no obstacle, this rank's own device, or otherwise a rank.
constexpr int kNone = -1, kHome = -2;

constexpr std::uint64_t all_bits(std::size_t count) {
  return count >= 64 ? ~std::uint64_t{0} : bit(static_cast<int>(count)) - 1;
}

std::uint64_t load(std::uint64_t& word) {
  disturb_host();
  return std::atomic_ref(word).load(std::memory_order_acquire);
}
void store(std::uint64_t& word, std::uint64_t value) {
  disturb_host();
  std::atomic_ref(word).store(value, std::memory_order_release);
}

}  // namespace

CopyProgram::CopyProgram(Channel& channel, const std::vector<Schedule>& all, bool is_gemv)
    : channel_(channel),
      rank_(channel.rank_),
      size_(channel.size_),
      plan_(all, channel.rank_),
      is_gemv_(is_gemv),
      aside_(channel.asides_) {
  launch_.stages = 1;
  launch_.size = 1;
  launch_.has_met = true;
  launch_.inbox[0] =  // kernels look whether the call has failed
      reinterpret_cast<std::byte*>(channel.inboxes_[static_cast<std::size_t>(rank_)]);
  launch_.first_run = 1;
  launch_.first_phase[1] = 1;
}

std::size_t CopyProgram::fit(bool is_large) const {
  if (!is_large || !plan_.is_possible) return 0;
  return channel_.large_inbox_bytes_ /
         static_cast<std::size_t>(kLargeWindows * std::max(plan_.units, 1)) / kAlignment *
         kAlignment;
}

// --------------------------------------------------------------------------------------- a call

Operation& CopyProgram::launch(const Arguments& arguments) {
  CopyEngine& engine = *channel_.copy_engine_;
  const Current current(channel_.context_);
  arguments_ = arguments;
  kernel_ = channel_.kernels_->find(arguments.op, arguments.dtype, Protocol::simple);
  const std::size_t element = bytes(arguments.dtype);
  is_aside_ = covers_input(arguments, rank_);
  if (is_aside_)
    aside_at_ =
        aside_.reserve((arguments.chunk_begin[rank_ + 1] - arguments.chunk_begin[rank_]) * element);
  in_ = reinterpret_cast<CUdeviceptr>(arguments.in);
  out_ = is_aside_ ? aside_at_ : reinterpret_cast<CUdeviceptr>(arguments.out);
  if (is_scatter(static_cast<Collective>(arguments.signature.collective)))
    out_ -= arguments.chunk_begin[rank_] * element;
  pass_count_ = (arguments.longest + arguments.slice - 1) / arguments.slice;
  first_run_ = engine.last_run_ + 1;
  engine.last_run_ += pass_count_;
  launch_.doorbell = engine.doorbell_;
  launch_.counters = reinterpret_cast<Counters*>(engine.counters_);
  // What is pushed here and not read may be overwritten at any time.
  for (int unit = 0; unit < plan_.units; ++unit)
    if (plan_.uses[static_cast<std::size_t>(unit)] == 0)
      store(engine.words(rank_).consumed[unit], engine.last_run_);
  first_active_ = 0;
  for (Pass& pass : passes_) pass = {0, 0, 0, 0, plan_.uses};
  turns_ = pass_count_ + kLag * static_cast<std::uint64_t>(plan_.hops);
  turn_ = peer_ = 0;
  first_bundle_ = engine.last_bundle_;
  engine.last_bundle_ += turns_ * static_cast<std::uint64_t>(size_ - 1);
  bundles_enqueued_ = bundles_done_ = moves_launched_ = moves_done_ = 0;
  first_launch_ = engine.launches_ + 1;
  ++position_;
  work();
  return *this;
}

bool CopyProgram::advance(int polls) {
  const Current current(channel_.context_);
  // A look at everything takes as long as some dozen looks at one word.
  for (int poll = 0; !work(); poll += 16) {
    if (poll >= polls) return false;
    relax();
  }
  if (is_aside_) {
    const CUstream stream = channel_.copy_engine_->work_stream_;
    const std::size_t own = arguments_.chunk_begin[rank_ + 1] - arguments_.chunk_begin[rank_];
    check(channel_.driver_.cuMemcpyAsync_(reinterpret_cast<CUdeviceptr>(arguments_.out), aside_at_,
                                          own * bytes(arguments_.dtype), stream),
          "cannot copy the result");
    check(channel_.driver_.cuStreamSynchronize_(stream), "cannot copy the result");
  }
  return true;
}

/// A peer that has to push or to make room before this rank can go on; itself, if it waits for its
/// own device.
int CopyProgram::blocked_on() const {
  if (bundles_enqueued_ > bundles_done_ || moves_launched_ > moves_done_) return rank_;
  const std::uint64_t end = std::min(first_active_ + kActive, pass_count_);
  for (std::uint64_t pass = first_active_; pass < end; ++pass) {
    for (std::size_t i = 0; i < plan_.moves.size(); ++i) {
      if ((active(pass).moved & bit(static_cast<int>(i))) != 0) continue;
      const int obstacle = obstacle_to(pass, plan_.moves[i]);
      if (obstacle >= 0) return obstacle;
    }
    for (std::size_t i = 0; i < plan_.pushes.size(); ++i) {
      if ((active(pass).pushed & bit(static_cast<int>(i))) != 0) continue;
      const int obstacle = obstacle_to(pass, plan_.pushes[i]);
      if (obstacle >= 0) return obstacle;
    }
  }
  for (int rank = 0; plan_.hops <= 1 && size_ > 2 && rank < size_; ++rank)
    if (is_behind(rank)) return rank;
  return rank_;
}

bool CopyProgram::work() {
  collect();
  while (launch_move()) {
  }
  while (enqueue_pushes()) {
  }
  if (first_active_ < pass_count_) return false;
  turn_ = turns_;
  peer_ = 0;
  publish();  // peers may not be through
  return true;
}

/// What the device has done.
void CopyProgram::collect() {
  CopyEngine& engine = *channel_.copy_engine_;
  while (bundles_done_ < bundles_enqueued_) {
    const auto slot = bundles_done_ % CopyEngine::kAhead;
    const CUresult result = channel_.driver_.cuEventQuery_(engine.pushed_[slot]);
    if (result == CUDA_ERROR_NOT_READY) break;
    check(result, "a copy to a peer failed");
    ++bundles_done_;
    const Bundle& bundle = bundles_[slot];
    for (std::size_t i = 0; i < bundle.count; ++i)
      settle_push(bundle.flights[i].pass, bundle.flights[i].index);
    publish();
  }
  if (moves_done_ == moves_launched_) return;
  const std::uint64_t number = load(engine.doorbell_->done);
  // By a kernel that began when the call had failed, and stored nothing. It said so before it said
  // that it was done.
  if (std::atomic_ref(engine.doorbell_->abort).load(std::memory_order_relaxed) != 0)
    throw Error(Code::peer, "a peer gave up a reduction on the GPU while this rank took part");
  while (moves_done_ < moves_launched_ && first_launch_ + moves_done_ <= number) {
    const Flight flight = moving_[moves_done_++ % moving_.size()];
    settle_move(flight.pass, flight.index);
  }
  if (++stalls_ % 4096 == 0) {
    const CUresult result = channel_.driver_.cuStreamQuery_(engine.work_stream_);
    if (result != CUDA_ERROR_NOT_READY) check(result, "a kernel failed");
  }
}

void CopyProgram::settle_push(std::uint64_t pass, int index) {
  const Push& push = plan_.pushes[static_cast<std::size_t>(index)];
  active(pass).sent |= bit(index);
  store(channel_.copy_engine_->words(push.reader).arrived[push.unit], run_of(pass));
  if (push.arrival >= 0) consume(pass, push.arrival);
  leave_passes();
}

void CopyProgram::settle_move(std::uint64_t pass, int index) {
  active(pass).done |= bit(index);
  for (const int unit : plan_.moves[static_cast<std::size_t>(index)].arrivals) consume(pass, unit);
  leave_passes();
}

void CopyProgram::consume(std::uint64_t pass, int unit) {
  if (--active(pass).uses[static_cast<std::size_t>(unit)] == 0)
    store(channel_.copy_engine_->words(rank_).consumed[unit], run_of(pass));
}

void CopyProgram::leave_passes() {
  ++position_;
  while (first_active_ < pass_count_) {
    Pass& pass = active(first_active_);
    if (pass.sent != all_bits(plan_.pushes.size()) || pass.done != all_bits(plan_.moves.size()))
      return;
    pass = {0, 0, 0, 0, plan_.uses};
    ++first_active_;
  }
}

/// What keeps it from being enqueued.
int CopyProgram::obstacle_to(std::uint64_t pass, const Push& push) const {
  CopyEngine& engine = *channel_.copy_engine_;
  if (push.producer >= 0 && (active(pass).done & bit(push.producer)) == 0) return kHome;
  if (push.arrival >= 0 && load(engine.words(rank_).arrived[push.arrival]) < run_of(pass))
    return plan_.writer[static_cast<std::size_t>(push.arrival)];
  if (pass >= kLargeWindows &&
      load(engine.words(push.reader).consumed[push.unit]) < run_of(pass - kLargeWindows))
    return push.reader;
  return kNone;
}

int CopyProgram::obstacle_to(std::uint64_t pass, const Move& move) const {
  CopyEngine& engine = *channel_.copy_engine_;
  const Pass& state = active(pass);
  if ((state.moved & move.after) != move.after) return kHome;
  // `out` may lie over `in`.
  if (move.to.buffer == Buffer::out && (state.sent & plan_.inputs) != plan_.inputs) return kHome;
  // The window's room for own results: pushed, and read by later moves.
  if (move.to.buffer == Buffer::scratch && pass >= first_active_ + kLargeWindows &&
      (active(pass - kLargeWindows).sent != all_bits(plan_.pushes.size()) ||
       active(pass - kLargeWindows).moved != all_bits(plan_.moves.size())))
    return kHome;
  for (const int unit : move.arrivals)
    if (load(engine.words(rank_).arrived[unit]) < run_of(pass))
      return plan_.writer[static_cast<std::size_t>(unit)];
  return kNone;
}

/// Pushes go in turns: turn t has those of pass t - kLag * hop, peer by peer, the next rank first.
/// What a turn has for a peer, a later pass's inputs and an earlier one's results, goes together:
/// engines make no pause between the copies of a bundle, but 2.8 us between two that a stream has
/// one after the other (H200). The results were folded meanwhile.
///
/// Since every rank goes through its peers in the same order, each GPU takes in from one peer at a
/// time. Ranks that get out of step would push to one GPU together, while another one idles, and
/// nothing would bring them back: so none begins a bundle before all are at most kLead behind.
///
/// Where results travel over several ranks, pushes that can begin overtake those that cannot:
/// otherwise ranks could wait for each other.
bool CopyProgram::enqueue_pushes() {
  if (bundles_enqueued_ - bundles_done_ == CopyEngine::kAhead) return false;
  if (plan_.hops > 1) return enqueue_any();
  for (; turn_ < turns_; ++turn_, peer_ = 0) {
    for (; peer_ < plan_.lanes.size(); ++peer_) {
      if (is_any_behind()) return false;
      Bundle bundle;
      bool is_any_left = false;
      if (gather(plan_.lanes[peer_], turn_, bundle, is_any_left)) return true;
      if (is_any_left && (bundle.count == 0 || bundles_enqueued_ > bundles_done_)) return false;
      if (bundle.count == 0) continue;
      enqueue(bundle);
      if (!is_any_left) ++peer_;
      return true;
    }
  }
  return false;
}

bool CopyProgram::enqueue_any() {
  const std::uint64_t end = std::min(turns_, turn_ + kActive + turns_ - pass_count_);
  for (std::uint64_t turn = turn_; turn < end; ++turn) {
    bool is_any_left = false;
    for (const std::vector<int>& lane : plan_.lanes) {
      Bundle bundle;
      if (gather(lane, turn, bundle, is_any_left)) return true;
      if (bundle.count == 0) continue;
      enqueue(bundle);
      return true;
    }
    if (!is_any_left && turn == turn_) ++turn_;
  }
  return false;
}

/// Tells the peers how many bundles this rank is through with.
void CopyProgram::publish() {
  if (size_ == 2 || plan_.hops > 1) return;
  const std::uint64_t through = bundles_enqueued_ > bundles_done_
                                    ? bundles_[bundles_done_ % CopyEngine::kAhead].number
                                    : here();
  store(channel_.copy_engine_->words(rank_).bundles, first_bundle_ + through);
}

/// Whether the rank is too far behind for this rank's next bundle.
bool CopyProgram::is_behind(int rank) const {
  return load(channel_.copy_engine_->words(rank).bundles) + kLead < first_bundle_ + here();
}

/// Two ranks are never in each other's way.
bool CopyProgram::is_any_behind() {
  if (size_ == 2) return false;
  publish();
  for (int rank = 0; rank < size_; ++rank)
    if (is_behind(rank)) return true;
  return false;
}

/// Fills `bundle` with pushes of the turn that can begin. True: found one of no length, and
/// settled it.
bool CopyProgram::gather(const std::vector<int>& pushes, std::uint64_t turn, Bundle& bundle,
                         bool& is_any_left) {
  for (const int index : pushes) {
    const Push& push = plan_.pushes[static_cast<std::size_t>(index)];
    const auto behind = kLag * static_cast<std::uint64_t>(push.hop);
    if (turn < behind + first_active_ || turn - behind >= pass_count_) continue;
    const std::uint64_t pass = turn - behind;
    if (pass < first_active_ + kActive && (active(pass).pushed & bit(index)) != 0) continue;
    // Into a unit, passes go in order.
    const bool is_turn = pass < first_active_ + kActive &&
                         (pass == first_active_ || (active(pass - 1).pushed & bit(index)) != 0);
    if (!is_turn || bundle.count == bundle.flights.size() || obstacle_to(pass, push) != kNone) {
      is_any_left = true;
      continue;
    }
    if (elements(pass, push.from.chunk) == 0) {
      // Nor is this one told of before those.
      if (pass > first_active_ && (active(pass - 1).sent & bit(index)) == 0) {
        is_any_left = true;
        continue;
      }
      active(pass).pushed |= bit(index);
      settle_push(pass, index);
      return true;
    }
    bundle.flights[bundle.count++] = {pass, index};
  }
  return false;
}

void CopyProgram::enqueue(Bundle& bundle) {
  bundle.number = here();
  CopyEngine& engine = *channel_.copy_engine_;
  std::array<CUdeviceptr, 4> to{}, from{};
  std::array<std::size_t, 4> lengths{};
  for (std::size_t i = 0; i < bundle.count; ++i) {
    const auto [pass, index] = bundle.flights[i];
    const Push& push = plan_.pushes[static_cast<std::size_t>(index)];
    active(pass).pushed |= bit(index);
    to[i] = unit_address(push.reader, pass, push.unit);
    from[i] = address(pass, push.from);
    lengths[i] = elements(pass, push.from.chunk) * bytes(arguments_.dtype);
  }
  if (bundle.count > 1) {
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    std::size_t first = 0;
    check(channel_.driver_.cuMemcpyBatchAsync_(to.data(), from.data(), lengths.data(), bundle.count,
                                               &attributes, &first, 1, engine.push_stream_),
          "cannot copy to a peer");
  } else {
    check(channel_.driver_.cuMemcpyAsync_(to[0], from[0], lengths[0], engine.push_stream_),
          "cannot copy to a peer");
  }
  const auto slot = bundles_enqueued_++ % CopyEngine::kAhead;
  check(channel_.driver_.cuEventRecord_(engine.pushed_[slot], engine.push_stream_),
        "cannot record an event");
  bundles_[slot] = bundle;
}

bool CopyProgram::launch_move() {
  if (moves_launched_ - moves_done_ == moving_.size()) return false;
  const std::uint64_t end = std::min(first_active_ + kActive, pass_count_);
  for (std::uint64_t pass = first_active_; pass < end; ++pass) {
    Pass& state = active(pass);
    if (state.moved == all_bits(plan_.moves.size())) continue;
    for (int index = 0; index < static_cast<int>(plan_.moves.size()); ++index) {
      const Move& move = plan_.moves[static_cast<std::size_t>(index)];
      if ((state.moved & bit(index)) != 0) continue;
      // Units are given back in the order of the passes.
      if (pass > first_active_ && (active(pass - 1).moved & bit(index)) == 0) continue;
      if (obstacle_to(pass, move) != kNone) continue;
      if (elements(pass, move.to.chunk) == 0) {
        if (pass > first_active_ && (active(pass - 1).done & bit(index)) == 0) continue;
        state.moved |= bit(index);
        settle_move(pass, index);
        return true;
      }
      state.moved |= bit(index);
      if (!is_gemv_ || !multiply(pass, move)) fold(pass, move);
      moving_[moves_launched_ % moving_.size()] = {pass, index};
      ++moves_launched_;
      return true;
    }
  }
  return false;
}

/// By cuBLAS, where what has arrived lies in rows at one distance, with at most one row of this
/// rank's own besides. False: not so, or it is no sum.
bool CopyProgram::multiply(std::uint64_t pass, const Move& move) {
  CopyEngine& engine = *channel_.copy_engine_;
  if (move.is_copy) return false;
  const std::size_t count = elements(pass, move.to.chunk);
  const std::size_t element = bytes(arguments_.dtype);
  std::vector<CUdeviceptr> rows;
  CUdeviceptr own = 0;
  int others = 0;
  for (const Place& place : move.from) {
    const CUdeviceptr at = address(pass, place);
    if (place.buffer == Buffer::scratch) {
      rows.push_back(at);
    } else {
      own = at;
      ++others;
    }
  }
  std::sort(rows.begin(), rows.end());
  const auto row_count = static_cast<int>(rows.size());
  if (row_count == 0 || others > 1 || row_count > Cublas::kMostRows) return false;
  const CUdeviceptr distance = row_count == 1 ? count * element : rows[1] - rows[0];
  for (std::size_t i = 1; i < rows.size(); ++i)
    if (rows[i] - rows[i - 1] != distance) return false;
  if (distance % element != 0 || distance / element > INT_MAX) return false;

  const CUdeviceptr sum = address(pass, move.to);
  if (others == 1 && own != sum)
    check(channel_.driver_.cuMemcpyAsync_(sum, own, count * element, engine.work_stream_),
          "cannot copy");
  engine.cublas_->add_rows(arguments_.dtype, sum, others == 1, rows[0], row_count,
                           distance / element, count);
  // Behind what comes before it in the stream, whose stores are visible system-wide by then.
  check(channel_.driver_.cuStreamWriteValue64_(
            engine.work_stream_, reinterpret_cast<CUdeviceptr>(&engine.doorbell_->done),
            ++engine.launches_, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cannot enqueue a signal");
  return true;
}

/// One kernel: the same as the kernel engine's, with nothing to wait for.
void CopyProgram::fold(std::uint64_t pass, const Move& move) {
  const std::size_t count = elements(pass, move.to.chunk);
  const std::size_t element = bytes(arguments_.dtype);
  Phase& phase = launch_.phase[0];
  phase = {};
  int operands = 0;
  const auto add = [&](const Place& place) {
    Operand& operand = launch_.operand[operands++];
    operand = {};
    operand.address = address(pass, place);
    operand.length = static_cast<std::uint32_t>(count);
  };
  const int sources = static_cast<int>(move.from.size());
  for (int first = 0; first < sources; first += kBatch) {
    Batch& batch = launch_.batch[phase.batches++];
    batch = {};
    batch.is_copy = move.is_copy;
    batch.is_first = first == 0;
    batch.is_last = first + kBatch >= sources;
    batch.from = static_cast<std::uint16_t>(operands);
    batch.from_count = static_cast<std::uint8_t>(std::min(kBatch, sources - first));
    for (int i = 0; i < batch.from_count; ++i) add(move.from[static_cast<std::size_t>(first + i)]);
    if (!batch.is_last) continue;
    batch.to = static_cast<std::uint16_t>(operands);
    batch.to_count[0] = 1;
    add(move.to);
  }
  launch_.first_batch[1] = phase.batches;
  // A pass of the kernel per block, so that none gives or waits for credits.
  const std::size_t per_unit = kUnitBytes / element;
  const std::size_t unit_count = (count + per_unit - 1) / per_unit;
  const auto most = static_cast<std::size_t>(channel_.max_blocks_);
  const std::size_t blocks = std::clamp<std::size_t>(unit_count / kThreads, 1, most);
  const std::size_t slice = (unit_count + blocks - 1) / blocks * per_unit;
  launch_.slice = static_cast<std::uint32_t>(slice);
  launch_.passes = static_cast<std::uint32_t>((count + slice - 1) / slice);
  launch_.number = ++channel_.copy_engine_->launches_;
  void* parameters[] = {&launch_};
  check(channel_.driver_.cuLaunchKernel_(kernel_, launch_.passes, 1, 1, kThreads, 1, 1, 0,
                                         channel_.copy_engine_->work_stream_, parameters, nullptr),
        "cannot launch a kernel");
}

/// Of a chunk's slice in the pass.
std::size_t CopyProgram::elements(std::uint64_t pass, int chunk) const {
  const std::size_t length = arguments_.chunk_begin[chunk + 1] - arguments_.chunk_begin[chunk];
  const std::size_t done = pass * arguments_.slice;
  return length <= done ? 0 : std::min(length - done, arguments_.slice);
}

CUdeviceptr CopyProgram::address(std::uint64_t pass, const Place& place) const {
  if (place.buffer == Buffer::scratch) return unit_address(rank_, pass, place.unit);
  return (place.buffer == Buffer::in ? in_ : out_) +
         (arguments_.chunk_begin[place.chunk] + pass * arguments_.slice) * bytes(arguments_.dtype);
}

CUdeviceptr CopyProgram::unit_address(int rank, std::uint64_t pass, int unit) const {
  const std::size_t stride =
      (arguments_.slice * bytes(arguments_.dtype) + kAlignment - 1) / kAlignment * kAlignment;
  const auto window = run_of(pass) % kLargeWindows;
  return channel_.copy_engine_->inboxes_->of(rank) +
         (window * static_cast<std::uint64_t>(plan_.units) + static_cast<std::uint64_t>(unit)) *
             stride;
}

}  // namespace trib::cuda

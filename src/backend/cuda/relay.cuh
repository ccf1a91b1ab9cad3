// SPDX-License-Identifier: BSD-3-Clause
// Device code: a PipelineLaunch (launch.hpp) in which a vector travels from rank to rank, each of
// which adds to it, pass after pass. Nobody hears from those that come behind it, but for credits.
//
// Memory order: that of flags (block.cuh). What a rank has read it gives back by credits, to the
// one that pushed it: a barrier behind the loads, then a fence and the credit, as for a flag.
#pragma once

#include "backend/cuda/passes.cuh"

namespace trib::cuda {

/// A block has one duty, or two where the vector sets out and comes back as well: for that one may
/// have to wait for as many passes as there are ranks, so each has threads of its own. The last two
/// warps of these move nothing: one waits for what the next pass needs, and one tells the peers of
/// the pass before. To tell takes a fence, which ends when all that was stored is at its peer, and
/// by then the others are at work again. Barriers hand a pass on, from the warp that waits to those
/// that move it, and from these to the one that tells; there are two of each, for passes in turn,
/// and nobody waits for a pass before the last but one has been told of.
template <class T, class A, class Operator>
class Relay : private Passes<T> {
 public:
  __device__ explicit Relay(const PipelineLaunch& launch)
      : Passes<T>(launch),
        threads_(static_cast<int>(blockDim.x) / (launch.results > 0 ? 2 : 1)),
        group_(static_cast<int>(threadIdx.x) / threads_),
        width_(threads_ - 2 * kWarp),
        thread_(static_cast<int>(threadIdx.x) % threads_),
        duty_(group_ == 0 ? first_duty(launch) : second_duty(launch)) {}

  __device__ void run() {
    if (thread_ == 0) passes_told() = 0;
    this->begin();
    const int passes = duty_.to != nullptr ? passes_of(launch_, blockIdx.x) : 0;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      this->enter(pass);
      if (thread_ < width_)
        move();
      else if (thread_ < width_ + kWarp)
        wait();
      else
        tell(!launch_.has_met || pass + kWindows < passes);
    }
    this->end();
  }

 private:
  static constexpr int kDeep = 4;  // units that a thread has under way at once
  static_assert(kMaxPipelineThreads / 2 > 2 * kWarp);

  /// What goes on in each pass. What came and this rank's own are folded, if there is both.
  struct Duty {
    const std::byte* own = nullptr;
    const std::byte* came = nullptr;  // to an inbox of this rank
    std::byte* to = nullptr;
    std::uint32_t length = 0;  // elements of the chunk
    Flag awaited{}, told{};    // of what came, of what goes to a peer's inbox; or none
  };
  __device__ static Duty first_duty(const PipelineLaunch& launch) {
    if (launch.targets > 0) {
      const PipelineLaunch::Move& target = launch.target[0];
      return {target.from, nullptr, target.to, target.length, {}, launch.push_signal[0]};
    }
    if (launch.sources == 0) return {};
    return {launch.own,          launch.source[launch.source[0] == nullptr ? 1 : 0],
            launch.out[0].to,    launch.length,
            launch.push_wait[0], launch.out[0].is_inbox ? launch.result_signal[0] : Flag{}};
  }
  __device__ static Duty second_duty(const PipelineLaunch& launch) {
    const PipelineLaunch::Move& result = launch.result[0];
    return {nullptr, result.from, result.to, result.length, launch.result_wait[0], {}};
  }
  __device__ bool waits() const { return duty_.awaited.address != 0; }
  __device__ bool tells() const { return duty_.told.address != 0; }

  /// Of the duty: passes whose data the telling warp knows to be stored.
  __device__ Shared<volatile int>& passes_told() const {
    __shared__ Shared<volatile int> words[2];
    return words[group_];
  }
  // Barriers, of the threads that move and one warp.
  static constexpr int kReady = 1, kStored = 3;
  __device__ int barrier(int first) const { return first + 4 * group_ + pass_ % 2; }
  __device__ void synchronise_at(int first) const {
    __syncwarp();
    synchronise(barrier(first), width_ + kWarp);
  }
  __device__ void arrive_at(int first) const {
    __syncwarp();
    arrive(barrier(first), width_ + kWarp);
  }

  /// Until the reader is done with what the window holds. Its block says so run by run; and if that
  /// run was another kernel's, which does not, the start of a later launch on the stream does. So a
  /// rank may be ahead of its reader by as much as the windows hold, whatever launch that is of.
  __device__ void await_credit(int reader) {
    if (is_enough(known_run_, run_)) return;
    const std::uint32_t* const of_block = credit(launch_, launch_.rank, reader, blockIdx.x);
    const std::uint32_t* const of_launches = credit(launch_, launch_.rank, reader, kMaxBlocks);
    Patience patience;
    // The block's may be of long ago, and its reader is never ahead: so no number but these counts.
    // The other grows with each launch on a stream, and never else.
    while (load_acquire(of_block) - (run_ - kWindows) >= kWindows &&
           (launch_.has_met || !is_enough(load_acquire(of_launches), run_)))
      if (this->gives_up(patience, reader)) break;
  }

  __device__ void wait() {
    disturb();
    const int lane = thread_ - width_;
    if (lane == 0 && waits()) this->await(duty_.awaited);
    if (lane == 1 && tells()) await_credit(static_cast<int>(duty_.told.rank));
    while (passes_told() < pass_ - 1) {
    }
    arrive_at(kReady);
  }

  /// `will_reuse`: a later pass needs the window. Launches that come after a meeting of the hosts
  /// need no word of earlier ones, and nobody is to store to a rank's memory whose call is over.
  __device__ void tell(bool will_reuse) {
    synchronise_at(kStored);
    disturb();
    if (thread_ != width_ + kWarp) return;
    passes_told() = pass_ + 1;
    if (has_given_up() != 0 || this->is_lost()) return;
    fence();
    if (tells()) store_relaxed(this->word_of(duty_.told, run_), run_);
    if (!waits() || !will_reuse) return;
    const auto writer = static_cast<int>(duty_.awaited.rank);
    store_relaxed(credit(launch_, writer, launch_.rank, blockIdx.x), run_);
  }

  // ---------------------------------------------------------------------------------------- moving

  __device__ void move() {
    disturb();
    const std::byte* const own = duty_.own + this->in_chunk();
    const std::byte* const came = duty_.came + this->in_inbox();
    std::byte* const to = duty_.to + (tells() ? this->in_inbox() : this->in_chunk());
    const bool has_own = duty_.own != nullptr, has_other = duty_.came != nullptr;
    const unsigned skew = reinterpret_cast<std::uintptr_t>(own) % kUnitBytes;
    int elements = this->elements_of(duty_.length);
    // Not a unit with bytes that lie in one with the end of the caller's memory: see load().
    int units = skew == 0 ? elements / kElements : max(elements / kElements - 1, 0);

    // This rank's own comes from memory while the other's is on its way.
    uint4 value[kDeep];
    if (has_own) load(value, own, thread_, units, skew);
    synchronise_at(kReady);
    // The wait for a later pass may end like that at any time: threads need not agree.
    if (has_given_up() != 0) units = elements = 0;
#pragma unroll 1
    for (int first = thread_; first < units; first += kDeep * width_) {
      if (has_own && first != thread_) load(value, own, first, units, skew);
      if (has_other) {
        uint4 other[kDeep];
        load(other, came, first, units);
#pragma unroll
        for (int d = 0; d < kDeep; ++d) value[d] = has_own ? folded(value[d], other[d]) : other[d];
      }
#pragma unroll
      for (int d = 0; d < kDeep; ++d)
        if (const int unit = first + d * width_; unit < units)
          store_unit<T>(to + unit * kUnitBytes, value[d], kElements);
    }
#pragma unroll 1
    for (int unit = this->behind(units, thread_, width_); unit * kElements < elements;
         unit += width_) {
      const int left = min(elements - unit * kElements, kElements);
      uint4 one = load_unit<T>((has_own ? own : came) + unit * kUnitBytes, left);
      if (has_own && has_other) one = folded(one, load_unit<T>(came + unit * kUnitBytes, left));
      store_unit<T>(to + unit * kUnitBytes, one, left);
    }
    arrive_at(kStored);
  }

  __device__ void load(uint4 (&value)[kDeep], const std::byte* from, int first, int units) const {
#pragma unroll
    for (int d = 0; d < kDeep; ++d)
      if (const int unit = first + d * width_; unit < units)
        value[d] = load_vector(from + unit * kUnitBytes);
  }
  /// The same of units that lie `skew` bytes behind the memory's own: each is put together from
  /// two, which are loaded before any is waited for.
  __device__ void load(uint4 (&value)[kDeep], const std::byte* from, int first, int units,
                       unsigned skew) const {
    load(value, from - skew, first, units);
    if (skew == 0) return;
    uint4 next[kDeep];
    load(next, from - skew + kUnitBytes, first, units);
#pragma unroll
    for (int d = 0; d < kDeep; ++d)
      if (first + d * width_ < units) value[d] = shifted(value[d], next[d], skew);
  }
  /// In the order of the fold.
  __device__ uint4 folded(uint4 own, uint4 other) const {
    const bool is_own_first = launch_.source[0] == nullptr;
    Lane<T, A, Operator> lane;
    lane.set(is_own_first ? own : other);
    lane.fold(is_own_first ? other : own);
    return lane.get();
  }

  const int threads_, group_;  // of a duty; which one
  const int width_, thread_;   // threads that move; this one's number
  const Duty duty_;
  using Passes<T>::kElements;
  using Passes<T>::launch_, Passes<T>::first_run_, Passes<T>::run_, Passes<T>::known_run_;
  using Passes<T>::pass_;
};

}  // namespace trib::cuda

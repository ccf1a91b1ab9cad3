// SPDX-License-Identifier: BSD-3-Clause
// Device code: a PipelineLaunch (launch.hpp) in which a vector travels from rank to rank, each of
// which adds to it, pass after pass. Nobody hears from those that come behind it, but for credits.
//
// Memory order: that of flags (block.cuh). What a rank has read it gives back by credits, to the
// one that pushed it: a barrier behind the loads, then a fence and the credit, as for a flag.
#pragma once

#include "backend/cuda/passes.cuh"

namespace trib::cuda {

/// The last two warps of a block move nothing: one waits for what the next pass needs, and one
/// tells the peers of the pass before. To tell takes a fence, which ends when all that was stored
/// is at its peer, and by then the others are at work again. Barriers hand a pass on, from the warp
/// that waits to those that move it, and from these to the one that tells; there are two of each,
/// for passes in turn, and nobody waits for a pass before the last but one has been told of.
template <class T, class A, class Operator>
class Relay : private Passes<T> {
 public:
  __device__ explicit Relay(const PipelineLaunch& launch)
      : Passes<T>(launch),
        width_(static_cast<int>(blockDim.x) - 2 * kWarp),
        thread_(static_cast<int>(threadIdx.x)) {}

  __device__ void run() {
    if (threadIdx.x == 0) passes_told() = 0;
    this->begin();
    const bool is_at_work = launch_.targets > 0 || launch_.sources > 0;
    const int passes = is_at_work ? passes_of(launch_, blockIdx.x) : 0;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      this->enter(pass);
      if (thread_ < width_)
        move();
      else if (thread_ < width_ + kWarp)
        wait();
      else
        tell();
    }
    this->end();
  }

 private:
  static constexpr int kDeep = 4;  // units that a thread has under way at once

  /// Passes whose data the telling warp knows to be stored.
  __device__ static volatile int& passes_told() {
    __shared__ volatile int word;
    return word;
  }
  // Barriers, of the threads that move and one warp.
  __device__ void synchronise_with(int first) const {
    synchronise(first + pass_ % 2, width_ + kWarp);
  }
  __device__ void arrive_at(int first) const { arrive(first + pass_ % 2, width_ + kWarp); }
  static constexpr int kReady = 1, kStored = 3;

  __device__ bool is_first() const { return launch_.sources == 0; }
  __device__ bool is_pushed() const { return is_first() || launch_.out[0].is_inbox; }  // to a peer
  __device__ const Flag& told() const {
    return is_first() ? launch_.push_signal[0] : launch_.result_signal[0];
  }

  /// Until the reader is done with what the window holds. Its block says so run by run; and if that
  /// run was another kernel's, which does not, its launch behind that does. So a rank may be ahead
  /// of its reader by as much as the windows hold, whatever launch that belongs to.
  __device__ void await_credit(int reader) {
    if (is_enough(known_run_, run_)) return;
    const std::uint32_t* const of_block = credit(launch_, launch_.rank, reader, blockIdx.x);
    const std::uint32_t* const of_launches = credit(launch_, launch_.rank, reader, kMaxBlocks);
    Patience patience;
    // The block's may be of long ago, and its reader is never ahead: so no number but these counts.
    while (load_acquire(of_block) - (run_ - kWindows) >= kWindows &&
           !is_enough(load_acquire(of_launches), run_))
      if (this->gives_up(patience, reader)) break;
  }
  __device__ void wait() {
    disturb();
    const int lane = thread_ - width_;
    if (lane == 0 && !is_first()) this->await(launch_.push_wait[0]);
    if (lane == 1 && is_pushed()) await_credit(static_cast<int>(told().rank));
    while (passes_told() < pass_ - 1) {
    }
    __syncwarp();
    arrive_at(kReady);
  }

  __device__ void tell() const {
    synchronise_with(kStored);
    disturb();
    if (thread_ == width_ + kWarp) {
      passes_told() = pass_ + 1;
      if (has_given_up() == 0) {
        fence();
        if (is_pushed()) store_relaxed(this->word_of(told(), run_), run_);
        if (!is_first()) give_back(static_cast<int>(launch_.push_wait[0].rank));
      }
    }
    __syncwarp();
  }
  /// The window, to the rank that filled it.
  __device__ void give_back(int writer) const {
    store_relaxed(credit(launch_, writer, launch_.rank, blockIdx.x), run_);
  }

  // ---------------------------------------------------------------------------------------- moving

  __device__ void move() {
    disturb();
    const bool is_own_first = launch_.source[0] == nullptr;  // in the order of the fold
    const PipelineLaunch::Move& target = launch_.target[0];
    const PipelineLaunch::Out& out = launch_.out[0];
    const std::byte* const own = (is_first() ? target.from : launch_.own) + this->in_chunk();
    const std::byte* const came = launch_.source[is_own_first ? 1 : 0] + this->in_inbox();
    std::byte* const to =
        (is_first() ? target.to : out.to) + (is_pushed() ? this->in_inbox() : this->in_chunk());
    int elements = this->elements_of(is_first() ? target.length : launch_.length);
    int units = launch_.is_aligned ? elements / kElements : 0;

    // This rank's own comes from memory while the other's is on its way.
    uint4 mine[kDeep];
    load(mine, own, thread_, units);
    synchronise_with(kReady);
    // The wait for a later pass may end like that at any time: threads need not agree.
    if (has_given_up() != 0) units = elements = 0;
#pragma unroll 1
    for (int first = thread_; first < units; first += kDeep * width_) {
      if (first != thread_) load(mine, own, first, units);
      if (!is_first()) {
        uint4 others[kDeep];
        load(others, came, first, units);
#pragma unroll
        for (int d = 0; d < kDeep; ++d)
          mine[d] = is_own_first ? folded(mine[d], others[d]) : folded(others[d], mine[d]);
      }
#pragma unroll
      for (int d = 0; d < kDeep; ++d)
        if (const int unit = first + d * width_; unit < units)
          store_vector(to + unit * kUnitBytes, mine[d]);
    }
    if (units * kElements < elements) {
#pragma unroll 1
      for (int unit = units + thread_; unit * kElements < elements; unit += width_) {
        const int left = min(elements - unit * kElements, kElements);
        uint4 value = load_elements<T>(own + unit * kUnitBytes, left);
        if (!is_first()) {
          const uint4 other = load_elements<T>(came + unit * kUnitBytes, left);
          value = is_own_first ? folded(value, other) : folded(other, value);
        }
        store_elements<T>(to + unit * kUnitBytes, value, left);
      }
    }
    arrive_at(kStored);
  }

  __device__ void load(uint4 (&value)[kDeep], const std::byte* from, int first, int units) const {
#pragma unroll
    for (int d = 0; d < kDeep; ++d)
      if (const int unit = first + d * width_; unit < units)
        value[d] = load_vector(from + unit * kUnitBytes);
  }
  __device__ static uint4 folded(uint4 before, uint4 value) {
    Lane<T, A, Operator> lane;
    lane.set(before);
    lane.fold(value);
    return lane.get();
  }

  const int width_, thread_;
  using Passes<T>::kElements;
  using Passes<T>::launch_, Passes<T>::first_run_, Passes<T>::run_, Passes<T>::known_run_;
  using Passes<T>::pass_;
};

}  // namespace trib::cuda

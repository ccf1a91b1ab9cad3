// SPDX-License-Identifier: BSD-3-Clause
// Device code: a PipelineLaunch (launch.hpp) in which a vector travels from rank to rank, each of
// which adds to it, pass after pass. Nobody hears from those that come behind it, but for credits.
//
// Memory order: that of flags (block.cuh). What a rank has read it gives back by credits, to the
// one that pushed it: a barrier behind the loads, then a fence and the credit, as for a flag.
#pragma once

#include "backend/cuda/passes.cuh"

namespace trib::cuda {

template <class T, class A, class Operator>
class Relay : private Passes<T> {
 public:
  __device__ explicit Relay(const PipelineLaunch& launch) : Passes<T>(launch) {}

  __device__ void run() {
    this->begin();
    const int passes =
        launch_.targets > 0 || launch_.sources > 0 ? passes_of(launch_, blockIdx.x) : 0;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      this->enter(pass);
      hand_on();
    }
    this->end();
  }

 private:
  static constexpr int kDeep = 4;  // units that a thread has under way at once

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int width() { return static_cast<int>(blockDim.x); }

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
  /// Behind a barrier, and by one thread, which has made a fence.
  __device__ void set(const Flag& flag) const { store_relaxed(this->word_of(flag, run_), run_); }
  __device__ void give_back(const Flag& from) const {
    store_relaxed(credit(launch_, static_cast<int>(from.rank), launch_.rank, blockIdx.x), run_);
  }

  // ---------------------------------------------------------------------------------------- moving

  __device__ void hand_on() {
    disturb();
    const bool is_first = launch_.sources == 0;
    const bool is_own_first = launch_.source[0] == nullptr;  // in the order of the fold
    const PipelineLaunch::Move& target = launch_.target[0];
    const PipelineLaunch::Out& out = launch_.out[0];
    const bool is_pushed = is_first || out.is_inbox;  // to a peer
    const std::byte* const own = (is_first ? target.from : launch_.own) + this->in_chunk();
    const std::byte* const came = launch_.source[is_own_first ? 1 : 0] + this->in_inbox();
    std::byte* const to = is_first       ? target.to + this->in_inbox()
                          : out.is_inbox ? out.to + this->in_inbox()
                                         : out.to + this->in_chunk();
    const Flag& told = is_first ? launch_.push_signal[0] : launch_.result_signal[0];
    int elements = this->elements_of(is_first ? target.length : launch_.length);
    int units = launch_.is_aligned ? elements / kElements : 0;

    // This rank's own comes from memory while the other's is on its way.
    uint4 mine[kDeep];
    load(mine, own, thread(), units);
    if (thread() == 0 && !is_first) this->await(launch_.push_wait[0]);
    if (thread() == kWarp && is_pushed) await_credit(static_cast<int>(told.rank));
    __syncthreads();
    if (has_given_up() != 0) units = elements = 0;
#pragma unroll 1
    for (int first = thread(); first < units; first += kDeep * width()) {
      if (first != thread()) load(mine, own, first, units);
      if (!is_first) {
        uint4 others[kDeep];
        load(others, came, first, units);
#pragma unroll
        for (int d = 0; d < kDeep; ++d)
          mine[d] = is_own_first ? folded(mine[d], others[d]) : folded(others[d], mine[d]);
      }
#pragma unroll
      for (int d = 0; d < kDeep; ++d)
        if (const int unit = first + d * width(); unit < units)
          store_vector(to + unit * kUnitBytes, mine[d]);
    }
    if (units * kElements < elements) {
#pragma unroll 1
      for (int unit = units + thread(); unit * kElements < elements; unit += width()) {
        const int left = min(elements - unit * kElements, kElements);
        uint4 value = load_elements<T>(own + unit * kUnitBytes, left);
        if (!is_first) {
          const uint4 other = load_elements<T>(came + unit * kUnitBytes, left);
          value = is_own_first ? folded(value, other) : folded(other, value);
        }
        store_elements<T>(to + unit * kUnitBytes, value, left);
      }
    }
    __syncthreads();
    if (thread() != 0 || has_given_up() != 0) return;
    disturb();
    fence();
    if (is_pushed) set(told);
    if (!is_first) give_back(launch_.push_wait[0]);
  }

  __device__ void load(uint4 (&value)[kDeep], const std::byte* from, int first, int units) const {
#pragma unroll
    for (int d = 0; d < kDeep; ++d)
      if (const int unit = first + d * width(); unit < units)
        value[d] = load_vector(from + unit * kUnitBytes);
  }
  __device__ static uint4 folded(uint4 before, uint4 value) {
    Lane<T, A, Operator> lane;
    lane.set(before);
    lane.fold(value);
    return lane.get();
  }

  using Passes<T>::kElements;
  using Passes<T>::launch_, Passes<T>::first_run_, Passes<T>::run_, Passes<T>::known_run_;
  using Passes<T>::pass_;
};

}  // namespace trib::cuda

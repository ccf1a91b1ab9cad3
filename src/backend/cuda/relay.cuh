// SPDX-License-Identifier: BSD-3-Clause
// Device code: a PipelineLaunch (launch.hpp) in which nobody reads what more than one rank pushes:
// a vector that travels from rank to rank, each of which adds to it, pass after pass.
//
// Memory order: that of flags (block.cuh). What a rank has read it gives back by credits, to the
// one that pushed it: a barrier behind the loads, then a fence and the credit, as for a flag.
#pragma once

#include "backend/cuda/passes.cuh"

namespace trib::cuda {

/// A block has one duty, or two: to hand on, which is to push what is its own or to add that to
/// what comes in; and, at a root where the vector sets out as well, to fetch the results. That may
/// have to wait for as many passes as there are ranks, so it has threads of its own.
template <class T, class A, class Operator>
class Relay : private Passes<T> {
 public:
  __device__ explicit Relay(const PipelineLaunch& launch)
      : Passes<T>(launch),
        groups_(launch.results > 0 ? 2 : 1),
        width_(static_cast<int>(blockDim.x) / groups_),
        group_(static_cast<int>(threadIdx.x) / width_),
        thread_(static_cast<int>(threadIdx.x) % width_) {}

  __device__ void run() {
    this->begin();
    const int passes = passes_of(launch_, blockIdx.x);
    if (group_ == 1) {
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        this->enter(pass);
        fetch();
      }
    } else if (launch_.targets > 0 || launch_.sources > 0) {
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        this->enter(pass);
        hand_on();
      }
    }
    // What is stored here directly: who does it goes through its passes in order, so the word of
    // the last one tells of all.
    if (launch_.results == 0 && launch_.result_waits > 0 && passes > 0) {
      this->enter(passes - 1);
      if (thread_ == 0) this->await(launch_.result_wait[0]);
    }
    this->end();
  }

 private:
  static constexpr int kDeep = 4;  // units that a thread has under way at once

  /// Of the group's threads.
  __device__ void barrier() const {
    asm volatile("bar.sync %0, %1;" ::"r"(group_ + 1), "r"(width_) : "memory");
  }

  /// Until the reader is done with what the window holds.
  __device__ void await_credit(int reader) {
    if (!is_enough(known_run_, run_))
      this->wait_for_credit(reader, pass_ < kWindows ? kMaxBlocks : blockIdx.x);
  }
  /// Behind the group's barrier, and by one thread, which has made a fence.
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
    const bool is_pushed = is_first || out.is_inbox;
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
    load(mine, own, thread_, units);
    if (thread_ == 0 && !is_first) this->await(launch_.push_wait[0]);
    if (thread_ == kWarp && is_pushed) await_credit(static_cast<int>(told.rank));
    barrier();
    // The other group may give up at any time: threads need not agree, but all come to the barrier.
    if (has_given_up() != 0) units = elements = 0;
#pragma unroll 1
    for (int first = thread_; first < units; first += kDeep * width_) {
      if (first != thread_) load(mine, own, first, units);
      if (!is_first) {
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
        if (!is_first) {
          const uint4 other = load_elements<T>(came + unit * kUnitBytes, left);
          value = is_own_first ? folded(value, other) : folded(other, value);
        }
        store_elements<T>(to + unit * kUnitBytes, value, left);
      }
    }
    barrier();
    if (thread_ != 0 || has_given_up() != 0) return;
    disturb();
    fence();
    if (is_first || launch_.result_signals > 0) set(told);
    if (!is_first) give_back(launch_.push_wait[0]);
  }

  __device__ void fetch() {
    disturb();
    const PipelineLaunch::Move& result = launch_.result[0];
    if (thread_ == 0) this->await(launch_.result_wait[0]);
    barrier();
    this->template copy<kDeep>(result.to + this->in_chunk(), result.from + this->in_inbox(),
                               this->elements_of(result.length), thread_, width_);
    barrier();
    if (thread_ != 0) return;
    fence();
    give_back(launch_.result_wait[0]);
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

  const int groups_, width_, group_, thread_;
  using Passes<T>::kElements;
  using Passes<T>::launch_, Passes<T>::first_run_, Passes<T>::run_, Passes<T>::known_run_;
  using Passes<T>::pass_;
};

}  // namespace trib::cuda

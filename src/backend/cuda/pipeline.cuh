// SPDX-License-Identifier: BSD-3-Clause
// Device code: a PipelineLaunch (launch.hpp), which is one exchange with flags, one fold, and the
// results on their way to whoever wants them, pass after pass.
//
// Memory order: that of flags (block.cuh). Results that go straight into a peer's `out` are told of
// like what goes into its inbox; its host learns that the launch is over from a kernel that has
// waited for all of them.
#pragma once

#include "backend/cuda/passes.cuh"

namespace trib::cuda {

/// A block does several passes at once, each a step further than the next one: in round i it pushes
/// what peers need of pass i, folds pass i - 1, and fetches the results of pass i - 3. One barrier
/// and one release tell peers of the pushes of pass i and of the results of pass i - 2, which were
/// stored in the round before: a release waits until all that the block has stored is at its
/// peers, so each round has only one.
///
/// Credits are needed for the first passes only. Whoever reads what this block pushes also sends it
/// something, each pass (look_whether_pipeline()). When a block pushes pass i it has folded pass i
/// - 2 and fetched the results of pass i - 4. So its readers have signalled pass i - 2, after they
/// folded pass i - 4, whose window is used again; or else they have signalled the results of pass i
/// - 4, after they folded it. When it stores results of pass i, their readers have signalled pass
/// i, after they fetched the results of pass i - 4.
template <class T, class A, class Operator>
class Pipeline : private Passes<T> {
 public:
  __device__ explicit Pipeline(const PipelineLaunch& launch) : Passes<T>(launch) {}

  __device__ void run() {
    this->begin();
    const int passes = passes_of(launch_, blockIdx.x);
    const auto is_pass = [&](int pass) { return pass >= 0 && pass < passes; };
#pragma unroll 1
    for (int round = 0; round < passes + 3; ++round) {
      if (is_pass(round)) {
        this->enter(round);
        wait_for_credits();
        if (has_given_up() == 0) push();
      }
      if (is_pass(round) || is_pass(round - 2)) {
        disturb();
        __syncthreads();
        tell(is_pass(round) ? launch_.targets : 0, is_pass(round - 2) ? launch_.result_signals : 0,
             round);
      }
      if (is_pass(round - 1) && launch_.sources > 0) {
        this->enter(round - 1);
        wait(launch_.push_wait, launch_.push_waits);
        if (has_given_up() == 0) fold();
      }
      if (is_pass(round - 3) && launch_.result_waits > 0) {
        this->enter(round - 3);
        wait(launch_.result_wait, launch_.result_waits);
        if (has_given_up() == 0) fetch();
      }
    }
    this->end();
  }

 private:
  /// Units that a thread has under way at once, in copies, and in folds from each source.
  static constexpr int kDeep = 4, kFoldDeep = 2;

  /// Until all peers are done with what the window holds. Later passes of the launch: see above.
  __device__ void wait_for_credits() {
    if (run_ - first_run_ >= kWindows || is_enough(known_run_, run_)) return;
    disturb();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < launch_.size && peer != launch_.rank) this->wait_for_credit(peer, kMaxBlocks);
    __syncthreads();
  }

  /// Behind a barrier: `pushes` peers of what was pushed in the round, `results` of the results
  /// that were stored in the round before. One fence serves both.
  __device__ void tell(int pushes, int results, int round) {
    const auto i = static_cast<int>(threadIdx.x);
    if (i >= max(pushes, results) || has_given_up() != 0 || this->is_lost()) return;
    fence();
    const std::uint32_t run = first_run_ + static_cast<std::uint32_t>(round);
    if (i < pushes) store_relaxed(this->word_of(launch_.push_signal[i], run), run);
    if (i < results) store_relaxed(this->word_of(launch_.result_signal[i], run - 2), run - 2);
  }
  __device__ void wait(const Flag* flags, int count) {
    disturb();
    const auto i = static_cast<int>(threadIdx.x);
    if (i < count) this->await(flags[i]);
    __syncthreads();
  }

  // ---------------------------------------------------------------------------------------- moving

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int width() { return static_cast<int>(blockDim.x); }

  /// To one peer after the other: every rank begins with another one.
  __device__ void push() const {
    disturb();
#pragma unroll 1
    for (int i = 0; i < launch_.targets; ++i) {
      const PipelineLaunch::Move& target = launch_.target[i];
      this->template copy<kDeep>(target.to + this->in_inbox(), target.from + this->in_chunk(),
                                 this->elements_of(target.length), thread(), width());
    }
  }
  __device__ void fetch() const {
    disturb();
#pragma unroll 1
    for (int i = 0; i < launch_.results; ++i) {
      const PipelineLaunch::Move& result = launch_.result[i];
      this->template copy<kDeep>(result.to + this->in_chunk(), result.from + this->in_inbox(),
                                 this->elements_of(result.length), thread(), width());
    }
  }

  __device__ void fold() const {
    disturb();
    const int elements = this->elements_of(launch_.length);
    const int units = launch_.is_aligned ? elements / kElements : 0;
#pragma unroll 1
    for (int first = thread(); first < units; first += kFoldDeep * width())
      fold_units<kFoldDeep>(
          first, units, [](const std::byte* at) { return load_vector(at); },
          [](std::byte* at, uint4 value) { store_vector(at, value); });
    if (units * kElements == elements) return;
#pragma unroll 1
    for (int unit = this->behind(units, thread(), width()); unit * kElements < elements;
         unit += width()) {
      const int left = min(elements - unit * kElements, kElements);
      fold_units<1>(
          unit, unit + 1, [&](const std::byte* at) { return load_unit<T>(at, left); },
          [&](std::byte* at, uint4 value) { store_unit<T>(at, value, left); });
    }
  }

  /// Units `first`, first + threads, ..., `deep` of them, below `end`. They are read from
  /// everywhere before they are written: `out` may be `in`.
  template <int deep, class Load, class Store>
  __device__ void fold_units(int first, int end, Load&& load, Store&& store) const {
    Lane<T, A, Operator> lane[deep];
#pragma unroll 1
    for (int source = 0; source < launch_.sources; source += kBatch) {
      uint4 value[kBatch][deep];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (source + i >= launch_.sources) break;
        const std::byte* const pushed = launch_.source[source + i];
        const std::byte* const at =
            pushed != nullptr ? pushed + this->in_inbox() : launch_.own + this->in_chunk();
#pragma unroll
        for (int d = 0; d < deep; ++d)
          if (const int unit = first + d * width(); unit < end)
            value[i][d] = load(at + unit * kUnitBytes);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (source + i >= launch_.sources) break;
#pragma unroll
        for (int d = 0; d < deep; ++d) {
          if (i == 0 && source == 0)
            lane[d].set(value[i][d]);
          else
            lane[d].fold(value[i][d]);
        }
      }
    }
    uint4 result[deep];
#pragma unroll
    for (int d = 0; d < deep; ++d) result[d] = lane[d].get();
#pragma unroll 1
    for (int i = 0; i < launch_.outs; ++i) {
      const PipelineLaunch::Out& out = launch_.out[i];
      std::byte* const at = out.to + (out.is_inbox ? this->in_inbox() : this->in_chunk());
#pragma unroll
      for (int d = 0; d < deep; ++d)
        if (const int unit = first + d * width(); unit < end)
          store(at + unit * kUnitBytes, result[d]);
    }
  }

  using Passes<T>::kElements;
  using Passes<T>::launch_, Passes<T>::first_run_, Passes<T>::run_, Passes<T>::known_run_;
};

}  // namespace trib::cuda

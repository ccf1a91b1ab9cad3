// SPDX-License-Identifier: BSD-3-Clause
// Device code: a PipelineLaunch (launch.hpp), which is one exchange with flags, one fold, and the
// results on their way to whoever wants them, pass after pass.
//
// Memory order: that of flags (block.cuh). Results that go straight into a peer's `out` are told of
// like what goes into its inbox; its host learns that the launch is over from a kernel that has
// waited for all of them.
#pragma once

#include "backend/cuda/elements.cuh"
#include "backend/cuda/turn.cuh"

namespace trib::cuda {

/// A block does several passes at once, each a step further than the next one: in round i it pushes
/// what peers need of pass i, folds pass i - 1, and fetches the results of pass i - 3. One barrier
/// and one release tell peers of the pushes of pass i and of the results of pass i - 2, which were
/// stored in the round before: a release waits until all that the block has stored is at its
/// peers, so each round has only one.
///
/// Credits are needed for the first passes only. Whoever reads what this block pushes also sends it
/// something, each pass (Program::find_pipeline()). When a block pushes pass i it has folded pass i
/// - 2 and fetched the results of pass i - 4. So its readers have signalled pass i - 2, after they
/// folded pass i - 4, whose window is used again; or else they have signalled the results of pass i
/// - 4, after they folded it. When it stores results of pass i, their readers have signalled pass
/// i, after they fetched the results of pass i - 4.
template <class T, class A, class Operator>
class Pipeline : private Turn<PipelineLaunch> {
 public:
  __device__ explicit Pipeline(const PipelineLaunch& launch) : Turn<PipelineLaunch>(launch) {}

  __device__ void run() {
    begin();
    const int passes = passes_of(launch_, blockIdx.x);
    const auto is_pass = [&](int pass) { return pass >= 0 && pass < passes; };
#pragma unroll 1
    for (int round = 0; round < passes + 3; ++round) {
      if (is_pass(round)) {
        enter(round);
        wait_for_credits();
        push();
      }
      if (is_pass(round) || is_pass(round - 2)) {
        disturb();
        __syncthreads();
        tell(is_pass(round) ? launch_.targets : 0, is_pass(round - 2) ? launch_.result_signals : 0,
             round);
      }
      if (is_pass(round - 1) && launch_.sources > 0) {
        enter(round - 1);
        wait(launch_.push_wait, launch_.push_waits);
        fold();
      }
      if (is_pass(round - 3) && launch_.result_waits > 0) {
        enter(round - 3);
        wait(launch_.result_wait, launch_.result_waits);
        fetch();
      }
    }
    end();
  }

 private:
  static constexpr int kElements = kUnitBytes / sizeof(T);
  /// Units that a thread has under way at once, in copies, and in folds from each source.
  static constexpr int kDeep = 4, kFoldDeep = 2;

  __device__ void enter(int pass) {
    run_ = first_run_ + static_cast<std::uint32_t>(pass);
    const std::uint32_t window = blockIdx.x * kWindows + run_ % kWindows;
    done_ = static_cast<std::uint64_t>(launch_.slice) *
            (static_cast<std::uint32_t>(pass) * gridDim.x + blockIdx.x);
    in_inbox_ = static_cast<std::uint64_t>(window) * kWindowBytes;
    in_flags_ = flags_of(run_);
  }
  /// Bytes from a flag's address to the one of the run.
  __device__ static std::uint32_t flags_of(std::uint32_t run) {
    return (blockIdx.x * kWindows + run % kWindows) *
           static_cast<std::uint32_t>(kMaxUnits * sizeof(std::uint32_t));
  }

  /// Until all peers are done with what the window holds. Later passes of the launch: see above.
  __device__ void wait_for_credits() {
    if (run_ - first_run_ >= kWindows || is_enough(known_run_, run_)) return;
    disturb();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < launch_.size && peer != launch_.rank) wait_for_credit(peer, kMaxBlocks);
    __syncthreads();
  }

  /// Behind a barrier: `pushes` peers of what was pushed in the round, `results` of the results
  /// that were stored in the round before. One fence serves both.
  __device__ void tell(int pushes, int results, int round) const {
    const auto i = static_cast<int>(threadIdx.x);
    if (i >= max(pushes, results)) return;
    fence();
    const auto set = [&](const Flag& flag, std::uint32_t run) {
      store_relaxed(reinterpret_cast<std::uint32_t*>(flag.address + flags_of(run)), run);
    };
    const std::uint32_t run = first_run_ + static_cast<std::uint32_t>(round);
    if (i < pushes) set(launch_.push_signal[i], run);
    if (i < results) set(launch_.result_signal[i], run - 2);
  }
  __device__ void wait(const Flag* flags, int count) {
    disturb();
    const auto i = static_cast<int>(threadIdx.x);
    if (i < count) {
      const auto* const at = reinterpret_cast<const std::uint32_t*>(flags[i].address + in_flags_);
      Patience patience;
      while (load_acquire(at) != run_)
        if (gives_up(patience, flags[i].rank)) break;
    }
    __syncthreads();
  }

  // ---------------------------------------------------------------------------------------- moving

  /// Elements of a chunk that belong to the pass.
  __device__ int elements_of(std::uint32_t length) const {
    return length <= done_ ? 0
                           : static_cast<int>(min(length - done_, std::uint64_t{launch_.slice}));
  }
  __device__ std::uint64_t in_chunk() const { return done_ * sizeof(T); }

  /// Thread t handles units t, t + threads, ... of every chunk.
  __device__ static int width() { return static_cast<int>(blockDim.x); }
  /// The first of the thread's units that is not among the first `units`.
  __device__ static int behind(int units) {
    const auto thread = static_cast<int>(threadIdx.x);
    return thread + (max(units - thread, 0) + width() - 1) / width() * width();
  }
  __device__ static bool is_aligned(const std::byte* at) {
    return reinterpret_cast<std::uintptr_t>(at) % kUnitBytes == 0;
  }

  /// `from` and `to`: where the pass's part of the chunk is.
  __device__ static void copy(std::byte* to, const std::byte* from, int elements) {
    const int units = is_aligned(from) && is_aligned(to) ? elements / kElements : 0;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x); first < units; first += kDeep * width()) {
      uint4 value[kDeep];
#pragma unroll
      for (int d = 0; d < kDeep; ++d)
        if (const int unit = first + d * width(); unit < units)
          value[d] = load_vector(from + unit * kUnitBytes);
#pragma unroll
      for (int d = 0; d < kDeep; ++d)
        if (const int unit = first + d * width(); unit < units)
          store_vector(to + unit * kUnitBytes, value[d]);
    }
    if (units * kElements == elements) return;
#pragma unroll 1
    for (int unit = behind(units); unit * kElements < elements; unit += width()) {
      const int left = min(elements - unit * kElements, kElements);
      store_elements<T>(to + unit * kUnitBytes, load_elements<T>(from + unit * kUnitBytes, left),
                        left);
    }
  }

  /// To one peer after the other: every rank begins with another one.
  __device__ void push() const {
    disturb();
#pragma unroll 1
    for (int i = 0; i < launch_.targets; ++i) {
      const PipelineLaunch::Move& target = launch_.target[i];
      copy(target.to + in_inbox_, target.from + in_chunk(), elements_of(target.length));
    }
  }
  __device__ void fetch() const {
    disturb();
#pragma unroll 1
    for (int i = 0; i < launch_.results; ++i) {
      const PipelineLaunch::Move& result = launch_.result[i];
      copy(result.to + in_chunk(), result.from + in_inbox_, elements_of(result.length));
    }
  }

  __device__ void fold() const {
    disturb();
    const int elements = elements_of(launch_.length);
    const int units = launch_.is_aligned ? elements / kElements : 0;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x); first < units; first += kFoldDeep * width())
      fold_units<kFoldDeep>(
          first, units, [](const std::byte* at) { return load_vector(at); },
          [](std::byte* at, uint4 value) { store_vector(at, value); });
    if (units * kElements == elements) return;
#pragma unroll 1
    for (int unit = behind(units); unit * kElements < elements; unit += width()) {
      const int left = min(elements - unit * kElements, kElements);
      fold_units<1>(
          unit, unit + 1, [&](const std::byte* at) { return load_elements<T>(at, left); },
          [&](std::byte* at, uint4 value) { store_elements<T>(at, value, left); });
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
            pushed != nullptr ? pushed + in_inbox_ : launch_.own + in_chunk();
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
      std::byte* const at = out.to + (out.is_inbox ? in_inbox_ : in_chunk());
#pragma unroll
      for (int d = 0; d < deep; ++d)
        if (const int unit = first + d * width(); unit < end)
          store(at + unit * kUnitBytes, result[d]);
    }
  }

  std::uint64_t done_ = 0;      // elements of each chunk before the pass
  std::uint64_t in_inbox_ = 0;  // bytes from an inbox's address to the block's window
  std::uint32_t in_flags_ = 0;  // the same of a flag
};

}  // namespace trib::cuda

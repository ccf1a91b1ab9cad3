// SPDX-License-Identifier: BSD-3-Clause
// What a channel needs to have its largest messages moved by copy engines: a large inbox on each
// rank's GPU, words in shared host memory, streams. Made with the first call that asks for it.
// copy_program.hpp runs schedules on it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "backend/cuda/copy_plan.hpp"
#include "backend/cuda/cublas.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/cuda/launch.hpp"
#include "backend/cuda/peer_memory.hpp"
#include "backend/segment.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"

namespace trib::cuda {

inline constexpr std::size_t kLeastLargeInbox = 256u << 20;  // on each GPU
/// A part of the GPU's memory, within bounds. The longer the copies, the better: with slices of 16
/// MiB a copy engine moves 360 GB/s, with 32 MiB 374, with 64 MiB 382 (H200, 2026-11-21). 768 MiB
/// has room for these in an allreduce over four ranks.
constexpr std::size_t large_inbox_bytes(std::size_t memory) {
  constexpr std::size_t kMost = 768u << 20, kPart = 128;
  return std::clamp(memory / kPart, kLeastLargeInbox, kMost) >> 20 << 20;
}
inline constexpr int kLargeWindows = 2;  // of an inbox, used in turn

class CopyEngine {
 public:
  static constexpr int kAhead = 4;  ///< bundles of pushes that the stream holds at once
  /// Collective. Null on all ranks alike if one of them has no memory for it; `why` then says what
  /// was missing. `context` is where the buffers are.
  static std::unique_ptr<CopyEngine> open(Bootstrap& bootstrap, Config::Segment mode,
                                          const ContextId& context, std::size_t inbox_bytes,
                                          std::string& why);
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  /// Collective: what sums by cuBLAS need. False (on all ranks alike) where it is missing; `why`
  /// says what. Idempotent.
  bool reserve_gemv(Bootstrap& bootstrap, const std::string& path, std::string& why);
  bool can_gemv() const { return cublas_ != nullptr; }

  /// Until nothing of ours runs on the device. Nothing of it waits for a peer, so it is soon.
  void drain() noexcept;

 private:
  friend class CopyProgram;

  /// Of one rank, in shared host memory. Numbers of runs, which only grow: nothing is reset.
  struct Words {
    std::uint64_t arrived[kLargeUnits];   // by whoever pushes into the unit
    std::uint64_t consumed[kLargeUnits];  // by the rank whose unit it is
    std::uint64_t bundles;                // by the rank: bundles of pushes that it is through with
  };

  CopyEngine(Bootstrap& bootstrap, const ContextId& context);
  void set_up();
  void release() noexcept;
  Words& words(int rank) const { return *reinterpret_cast<Words*>(segment_->of(rank)); }

  const Driver& driver_;
  const int rank_, size_;
  const ContextId context_;
  std::unique_ptr<Segment> segment_;
  std::unique_ptr<PeerMemory> inboxes_;
  CUstream push_stream_ = nullptr, work_stream_ = nullptr;
  std::array<CUevent, kAhead> pushed_{};
  CUdeviceptr counters_ = 0;
  Doorbell* doorbell_ = nullptr;  // of the kernels on work_stream_
  std::uint64_t launches_ = 0;    // of these kernels
  std::uint64_t last_run_ = 0, last_bundle_ = 0;
  std::unique_ptr<Cublas> cublas_;  // on work_stream_
};

}  // namespace trib::cuda

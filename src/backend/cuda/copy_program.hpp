// SPDX-License-Identifier: BSD-3-Clause
// A lowered schedule run by copy engines, for the largest messages: the links carry more of their
// copies than of kernels' stores, and no multiprocessor is held by it.
//
// As in launch.hpp, a slot lives at its readers: each has a unit of its large inbox for every chunk
// of a slot that it reads. A pass works on one slice of every chunk. Of a pass, this rank's part is
// a list of pushes (copies into a peer's unit, by a copy engine) and moves (kernels that fold or
// copy what lies in this rank's own memory: units, `in`, `out`).
//
// The host drives it: what is enqueued on the device can begin at once and never waits for a peer,
// so a peer that dies leaves nothing hanging. The ranks' hosts tell each other through words in
// shared memory which units are filled, and which may be filled again.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/cuda/aside.hpp"
#include "backend/cuda/channel.hpp"
#include "backend/cuda/copy_engine.hpp"
#include "backend/cuda/copy_plan.hpp"

namespace trib::cuda {

class CopyProgram final : public trib::Program, public Operation {
 public:
  /// `is_gemv`: cuBLAS folds where it can.
  CopyProgram(Channel& channel, const std::vector<Schedule>& all, bool is_gemv);

  std::size_t fit(bool is_large) const override;
  Operation& launch(const Arguments& arguments) override;
  bool advance(int polls) override;
  int blocked_on() const override;
  std::uint64_t position() const override { return position_; }

 private:
  using Place = CopyPlan::Place;
  using Push = CopyPlan::Push;
  using Move = CopyPlan::Move;

  /// How far a pass is: bits of pushes and moves.
  struct Pass {
    std::uint64_t pushed = 0, sent = 0;            // enqueued; done
    std::uint64_t moved = 0, done = 0;             // launched; done
    std::array<std::uint8_t, kLargeUnits> uses{};  // of each unit, still to come
  };
  /// On the device.
  struct Flight {
    std::uint64_t pass = 0;
    int index = 0;
  };
  /// Pushes to one peer, enqueued together.
  struct Bundle {
    std::array<Flight, 4> flights{};
    std::size_t count = 0;
    std::uint64_t number = 0;  // of the call
  };
  bool gather(const std::vector<int>& pushes, std::uint64_t turn, Bundle& bundle,
              bool& is_any_left);
  void enqueue(Bundle& bundle);
  static constexpr int kActive = 8;  // passes that have begun

  /// True: the call is done.
  bool work();
  void collect();
  bool launch_move();
  bool enqueue_pushes();
  bool enqueue_any();
  /// Number of the next bundle: every turn has one for each peer, though it may be empty.
  std::uint64_t here() const { return turn_ * static_cast<std::uint64_t>(size_ - 1) + peer_; }
  void publish();
  bool is_behind(int rank) const;
  bool is_any_behind();
  int obstacle_to(std::uint64_t pass, const Push& push) const;
  int obstacle_to(std::uint64_t pass, const Move& move) const;
  void fold(std::uint64_t pass, const Move& move);
  bool multiply(std::uint64_t pass, const Move& move);
  void settle_push(std::uint64_t pass, int index);
  void settle_move(std::uint64_t pass, int index);
  void consume(std::uint64_t pass, int unit);
  void leave_passes();

  Pass& active(std::uint64_t pass) { return passes_[pass % kActive]; }
  const Pass& active(std::uint64_t pass) const { return passes_[pass % kActive]; }
  std::uint64_t run_of(std::uint64_t pass) const { return first_run_ + pass; }
  std::size_t elements(std::uint64_t pass, int chunk) const;
  CUdeviceptr address(std::uint64_t pass, const Place& place) const;
  CUdeviceptr unit_address(int rank, std::uint64_t pass, int unit) const;

  Channel& channel_;
  const int rank_, size_;
  const CopyPlan plan_;
  const bool is_gemv_;
  FlaggedLaunch launch_{};

  // Of the call.
  Arguments arguments_;
  CUfunction kernel_ = nullptr;
  CUdeviceptr in_ = 0, out_ = 0;  // where chunk 0 is
  std::uint64_t pass_count_ = 0, first_run_ = 0;
  std::uint64_t first_active_ = 0;
  std::array<Pass, kActive> passes_;
  std::uint64_t turns_ = 0, turn_ = 0;  // in all; pushes of earlier turns have been enqueued
  std::uint64_t first_bundle_ = 0;      // bundles of the channel before the call
  std::size_t peer_ = 0;                // where in the turn
  std::array<Bundle, CopyEngine::kAhead> bundles_{};
  std::uint64_t bundles_enqueued_ = 0, bundles_done_ = 0;
  std::array<Flight, kMoves> moving_{};
  std::uint64_t moves_launched_ = 0, moves_done_ = 0;
  std::uint64_t first_launch_ = 0;  // number of the call's first kernel
  std::uint64_t position_ = 0;
  std::uint32_t stalls_ = 0;

  Aside aside_;
  CUdeviceptr aside_at_ = 0;
  bool is_aside_ = false;
};

}  // namespace trib::cuda

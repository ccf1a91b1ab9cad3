// SPDX-License-Identifier: BSD-3-Clause
// A lowered schedule as kernels run it. kernel_plan.hpp makes the tables of a Launch from it, once.
#pragma once

#include "backend/cuda/aside.hpp"
#include "backend/cuda/channel.hpp"

namespace trib::cuda {

class Program final : public trib::Program, public Operation {
 public:
  Program(Channel& channel, const std::vector<Schedule>& all);

  /// What some rank's schedule has no room for is possible on none. Whether all fit into a launch
  /// of either protocol.
  bool agree(const std::vector<Schedule>& all);

  std::size_t fit(bool is_large) const override;
  Operation& launch(const Arguments& arguments) override;
  bool advance(int polls) override;
  /// All peers in turn: the host does not know which one the kernel waits for. Followers: their
  /// leader.
  int blocked_on() const override;
  bool is_guessing() const override { return channel_.leads(); }
  /// The host cannot see how far the kernel is: never the same, so that nothing is concluded.
  std::uint64_t position() const override { return ++looks_; }

 private:
  bool is_to_go_aside(const Arguments& arguments) const;
  bool look_for_repeat(const Arguments& arguments);
  bool order(const Arguments& arguments, bool may_be);
  bool hears_from_all(const Arguments& arguments) const;
  void place_operands(const Arguments& arguments);
  void start(const Arguments& arguments);

  Channel& channel_;
  KernelPlan plan_;
  FlaggedLaunch& launch_ = plan_.launch;
  Repeats repeats_;
  FlatLaunch flat_launch_{};
  PipelineLaunch pipeline_launch_{};
  /// Takes the result of a call whose `out` lies over parts of `in` that other blocks still read.
  Aside aside_;
  CUdeviceptr aside_at_ = 0;
  bool is_aside_ = false;  // in this call
  /// The last call that a lingering kernel might have served, or one like it.
  struct {
    Op op{};
    Dtype dtype{};
    std::size_t slice = 0;  // says where packets are: some ranks' kernels may not linger any more
    std::vector<std::size_t> begin;
  } last_;
  Arguments pending_;        // what a lingering kernel was told to serve, ...
  bool is_ordered_ = false;  // ... in this call
  mutable std::uint64_t looks_ = 0;
  std::uint32_t stalls_ = 0;
};

}  // namespace trib::cuda

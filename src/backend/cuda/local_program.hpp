// SPDX-License-Identifier: BSD-3-Clause
// A schedule for ranks that share one GPU, and have it to themselves: the leader's kernel folds the
// buffers of all of them where they are (local.cuh). The others wait on the host for its word.
#pragma once

#include <memory>
#include <vector>

#include "backend/cuda/aside.hpp"
#include "backend/cuda/channel.hpp"

namespace trib::cuda {

class LocalProgram final : public trib::Program, public Operation {
 public:
  /// Of a channel with one GPU. Null (on all ranks alike): the schedules do something else than to
  /// fold chunks of all ranks' `in`, in their order, for some ranks' `out`.
  static std::unique_ptr<LocalProgram> of(Channel& channel, const std::vector<Schedule>& all);

  std::size_t fit(bool) const override { return SIZE_MAX; }  // nothing goes through inboxes
  Operation& launch(const Arguments& arguments) override;
  bool advance(int polls) override;
  int blocked_on() const override;
  bool is_guessing() const override { return channel_.leads(); }
  std::uint64_t position() const override { return ++looks_; }  // as Program

 private:
  LocalProgram(Channel& channel, std::vector<int> to);
  static bool covers_any_input(const Arguments& arguments, int size);
  Repeats::Kernel lay_out(LocalLaunch& launch, const Arguments& arguments) const;

  Channel& channel_;
  const std::vector<int> to_;  // whose `out` gets all of the result; reduce_scatters: all in turn
  Repeats repeats_;
  LocalLaunch launch_{};
  Aside aside_;  // for the results of a reduce_scatter whose `out` lies over `in`
  mutable std::uint64_t looks_ = 0;
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// A schedule for buffers that all ranks have mapped (Reach::map), run by one kernel per GPU that
// reaches into all of them: mapped.cuh. For blocking calls: their ranks have met before the launch.
#pragma once

#include <memory>
#include <vector>

#include "backend/cuda/channel.hpp"

namespace trib::cuda {

class MappedProgram final : public trib::Program, public Operation {
 public:
  /// Null (on all ranks alike): the schedules do more than that each rank folds one chunk of all
  /// ranks' `in`, in their order.
  static std::unique_ptr<MappedProgram> of(Channel& channel, const std::vector<Schedule>& all);

  std::size_t fit(bool) const override { return SIZE_MAX; }  // nothing goes through inboxes
  Operation& launch(const Arguments& arguments) override;
  bool advance(int polls) override { return channel_.await(launch_.number, polls); }
  int blocked_on() const override { return channel_.any_peer(++looks_); }
  bool is_guessing() const override { return true; }
  std::uint64_t position() const override { return ++looks_; }  // as Program

 private:
  MappedProgram(Channel& channel, const Step& fold);

  Channel& channel_;
  const int chunk_;
  std::vector<int> to_;  // whose `out` gets this rank's chunk
  Repeats repeats_;
  MappedLaunch launch_{};
  mutable std::uint64_t looks_ = 0;
};

}  // namespace trib::cuda

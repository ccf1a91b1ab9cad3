// SPDX-License-Identifier: BSD-3-Clause
// A schedule for ranks that share one GPU, and have it to themselves: the leader's kernel folds or
// copies the buffers of all of them where they are (local.cuh). The others wait on the host for its
// word.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "backend/cuda/aside.hpp"
#include "backend/cuda/channel.hpp"

namespace trib::cuda {

class LocalProgram final : public trib::Program, public Operation {
 public:
  /// Of a channel with one GPU. Null (on all ranks alike): the schedules do something else than
  /// Moves says.
  static std::unique_ptr<LocalProgram> of(Channel& channel, const std::vector<Schedule>& all);

  std::size_t fit(bool) const override { return SIZE_MAX; }  // nothing goes through inboxes
  Operation& launch(const Arguments& arguments) override;
  bool advance(int polls) override;
  int blocked_on() const override;
  bool is_guessing() const override { return channel_.leads(); }
  std::uint64_t position() const override { return ++looks_; }  // as Program

 private:
  /// What goes where.
  struct Moves {
    enum class Kind { whole, scatter, gather } kind = Kind::whole;
    std::vector<int> from;  // of whose `in`, folded in this order, unless it is one
    std::vector<int> to;    // for whose `out`
    /// In a scatter chunk c goes from all of `from` to rank c alone, in a gather from rank c alone
    /// to all of `to`.
  };
  static std::optional<Moves> moves_of(const Schedule& schedule, int size);

  LocalProgram(Channel& channel, Moves moves);
  static bool covers_any_input(const Arguments& arguments, int size);
  void place(const Arguments& arguments);
  Repeats::Kernel lay_out(LocalLaunch& launch, const Arguments& arguments) const;

  Channel& channel_;
  const Moves moves_;
  Repeats repeats_;
  LocalLaunch launch_{};
  Aside aside_;  // for the results of a reduce_scatter whose `out` lies over `in`
  mutable std::uint64_t looks_ = 0;
};

}  // namespace trib::cuda

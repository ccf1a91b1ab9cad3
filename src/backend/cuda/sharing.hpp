// SPDX-License-Identifier: BSD-3-Clause
// Several ranks on one GPU. The first of them, their leader, launches the kernels that wait for
// other GPUs, and these read and write the others' buffers as well: schedule/share.hpp. The others,
// its followers, show it where their buffers are (exports.hpp), and wait on the host for its word.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/cuda/exports.hpp"
#include "backend/segment.hpp"
#include "base/process.hpp"

namespace trib::cuda {

class Sharing {
 public:
  /// Collective. Null on all ranks alike: `why` says what was missing.
  static std::unique_ptr<Sharing> open(Bootstrap& bootstrap, Config::Segment mode,
                                       const ContextId& context, const Level& device_of,
                                       std::string& why);

  const Level& device_of() const { return device_of_; }
  int devices() const { return static_cast<int>(leaders_.size()); }
  int device(int rank) const { return device_of_[static_cast<std::size_t>(rank)]; }
  int leader(int device) const { return leaders_[static_cast<std::size_t>(device)]; }
  bool leads() const { return leader(device(rank_)) == rank_; }

  /// Followers: what the leader has to know of the buffers. Those that it cannot map are to be
  /// staged.
  void show(Card& card, const ShownBuffers& buffers);
  /// Collective: DeviceChannel::hold().
  std::shared_ptr<void> hold(Bootstrap& bootstrap, const ShownBuffers& buffers,
                             std::vector<MappedBuffers>& mapped);
  /// Followers: DeviceChannel::is_still_there(). Nobody maps what leaders have.
  bool is_still_there(const std::shared_ptr<void>& held) const;
  /// Leaders, after a meeting on `met`: where the buffers of its device's ranks are. False: some
  /// cannot be mapped. Followers: true.
  bool reach(const HostChannel& met, const void* in, void* out, std::vector<MappedBuffers>& mapped);

  /// Lets go of what the programs have freed.
  void tidy_up();
  /// The part of it that needs no context: of what this rank has shown.
  void take_back_freed();

  /// This rank leaves a call that is not over: its buffers are its own again, though a kernel may
  /// still read them.
  void give_up() noexcept;
  /// Behind it: this rank's kernels have ended as well, as far as it could wait for that.
  void end_all() noexcept;
  /// Followers: whether the leader has said so, or is gone with its kernels.
  bool has_leader_ended() const noexcept;
  /// Leaders: the kernel of this number has ended; tells the followers. Throws Error if what it
  /// left may be no result.
  void end(std::uint64_t number);
  /// Followers: looks so many times whether it has.
  bool await(std::uint64_t number, int polls) const;

 private:
  friend class Simulation;  // tests/simulation
  Sharing(int rank, const Level& device_of, CUcontext context);
  /// A rank's words in shared memory.
  struct Words {
    std::atomic<std::uint64_t> done;  // of a leader: number of the last launch that ended
    std::atomic<bool> has_given_up, has_ended;
  };
  Words& words(int rank) const;
  bool has_anyone_given_up() const;

  const int rank_;
  const Level device_of_;
  std::vector<int> leaders_;
  ProcessId process_of_leader_;  // of this rank's device
  bool can_see_leader_ = false;
  const CUcontext context_;
  std::unique_ptr<Segment> segment_;
  std::unique_ptr<Exports> exports_;
};

}  // namespace trib::cuda

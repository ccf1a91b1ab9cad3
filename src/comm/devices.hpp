// SPDX-License-Identifier: BSD-3-Clause
// Which way a call goes whose buffers may be on a device. Ranks show each other cards when they
// meet before the call; all read the same cards, so all come to the same answer, and nobody waits
// on a device for a rank that has not posted the call.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "comm/plans.hpp"

namespace trib {

constexpr bool is_beyond_host(Memory memory) {
  return memory == Memory::device || memory == Memory::distant;
}

/// Kernels that write a scattered result over what they have yet to read keep it aside; not so for
/// several ranks, nor where peers read it. Bytes of the vector, and of this rank's result.
inline bool is_scattered_over_input(const Request& request, std::size_t bytes,
                                    std::size_t out_bytes) {
  const auto in = reinterpret_cast<std::uintptr_t>(request.in);
  const auto out = reinterpret_cast<std::uintptr_t>(request.out);
  return is_scatter(request.collective) && out < in + bytes && in < out + out_bytes;
}

/// A call of this process that may wait on a device, from before its meeting to its end. Two
/// kernels of one process that wait for peers could wait for each other, since their order may
/// differ between the GPUs: of calls that are under way at once all but the first go through host
/// memory.
class DeviceCall {
 public:
  DeviceCall() = default;
  ~DeviceCall() { end(); }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  void begin();
  void end();
  bool is_first() const { return is_first_; }

 private:
  bool is_under_way_ = false, is_first_ = false;
};

/// Allocations that cards have named by their numbers, in the calls on one channel: the same on all
/// ranks, which read the same cards in the same order.
class NamedBlocks {
 public:
  /// Whether the cards of a meeting on `met` name some that no card named before.
  bool has_news(const HostChannel& met, int size);
  /// Not all of these can be reached by those who would have to.
  void refuse_news();
  bool is_any_refused(int rank, const Card& card) const {
    return is_refused(rank, card.in_block) || is_refused(rank, card.out_block);
  }

 private:
  /// Those of a rank by number, modulo kShownBlocks: the named ones, and of these the ones out of
  /// reach.
  struct Blocks {
    std::array<std::uint64_t, kShownBlocks> seen{}, refused{};
  };
  bool is_refused(int rank, std::uint64_t block) const;

  std::vector<Blocks> blocks_;                       // of each rank
  std::vector<std::pair<int, std::uint64_t>> news_;  // of the last meeting: rank, number
};

/// A communicator's use of devices.
struct Devices {
  DeviceBackend* backend = nullptr;     ///< null: none
  std::atomic<bool> are_in_use{false};  ///< by this process
  bool are_refused = false;  ///< switched off, or the ranks' devices cannot work together
  std::unique_ptr<DeviceChannel> channel;
  bool are_shared = false;  ///< several ranks use one: `channel` wants to know all their buffers
  /// Then nonblocking and persistent reductions have a channel of their own: what ranks show each
  /// other goes in the order of a channel's calls, and these come in one of their own. Null: not
  /// yet, or it cannot be had.
  std::unique_ptr<DeviceChannel> own_of_requests;
  bool may_open_of_requests = false;

  /// Whether this process uses a device by now. `request`: of the call that asks.
  bool look_for_use(const Request& request) {
    const void* const buffers[] = {request.in, request.out};
    // Never back to false, which another thread may know better.
    if (!are_in_use && backend != nullptr && backend->is_in_use(buffers)) are_in_use = true;
    return are_in_use;
  }
  /// What nonblocking and persistent reductions use, or null.
  DeviceChannel* of_requests() const { return are_shared ? own_of_requests.get() : channel.get(); }

  /// Where a buffer of such elements is, as far as kernels are concerned: those of `its`, or of any
  /// device.
  Memory where(const void* pointer, Dtype dtype, const DeviceChannel* its) const;
  Memory where(const void* pointer, Dtype dtype) const {
    return where(pointer, dtype, channel.get());
  }
  /// What to show the peers.
  Card card(const Request& request, const DeviceCall& call, const DeviceChannel* its) const;
  Card card(const Request& request, const DeviceCall& call) const {
    return card(request, call, channel.get());
  }
  /// Whether there is a kernel for it, wherever its buffers are. `elements`: of the vector.
  bool is_defined(const Request& request, std::uint64_t elements) const;
  /// Whether it could run on `channel`, or one that is to be opened.
  bool can_serve(const Request& request, std::uint64_t elements) const {
    return !are_refused && is_defined(request, elements);
  }
  /// What the cards of a meeting on `met` come to. `named`: in the calls there. `can_serve`: as all
  /// ranks found when the call was made.
  Route route(const HostChannel& met, int size, bool can_serve, const NamedBlocks& named) const;
  /// Whether the cards of a meeting on `met` have buffers on devices only, each rank on its own.
  static bool are_on_own_devices(const HostChannel& met, int size, Config::SharedGpu mode);
  /// Now and then, in calls of every kind: lets go of what programs have freed.
  void tidy_up();
  /// What this rank's program has under way on its device ends, wherever it waits for peers.
  void poison(const Error& why) noexcept;

  /// Whether peers' kernels may use buffers of all ranks, as the cards of a meeting on `met` say.
  static bool are_settled(const HostChannel& met, int size);

  /// Whether the cards of a meeting on `met` name all the memory that peers' kernels are to reach.
  static bool are_mappable(const HostChannel& met, int size, const Request& request,
                           const NamedBlocks& named);
};

}  // namespace trib

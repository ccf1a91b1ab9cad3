// SPDX-License-Identifier: BSD-3-Clause
// What a communicator's ranks share on their GPUs: an inbox each (launch.hpp), mapped by all peers.
// program.cpp runs schedules on it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/aside.hpp"
#include "backend/cuda/copy_engine.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/cuda/exports.hpp"
#include "backend/cuda/graphs.hpp"
#include "backend/cuda/kernel_plan.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/launch.hpp"
#include "backend/cuda/peer_memory.hpp"
#include "backend/cuda/pinned.hpp"
#include "backend/cuda/queue.hpp"
#include "backend/cuda/repeats.hpp"
#include "backend/cuda/sharing.hpp"
#include "backend/segment.hpp"

namespace trib::cuda {

/// How long a kernel waits for a peer before it gives up. Only a backstop. After a meeting all
/// peers have posted the call before it starts, but one of them may have other work on its default
/// stream first, and a host that sees a peer die ends the wait at once. On a stream a peer may be
/// late for reasons of its own, such as writing a checkpoint.
inline constexpr double kTimeLimitSeconds = 30 * 60;

class Channel final : public trib::DeviceChannel {
 public:
  static std::unique_ptr<Channel> open(Bootstrap& bootstrap, const Config& config,
                                       const void* pointer, std::string& why);
  ~Channel() override;

  std::unique_ptr<trib::Program> load(const std::vector<Schedule>& all, Engine engine) override;
  bool reserve(Engine engine, std::string& why) override;
  bool has(Engine engine) const override {
    return copy_engine_ != nullptr && (engine == Engine::copy || copy_engine_->can_gemv());
  }
  void poison(const Error& why) noexcept override;
  Memory where(const void* pointer) const override;
  bool is_through_host() const override { return segment_ != nullptr; }
  int max_blocks() const override { return max_blocks_; }
  const Level& device_of() const override;
  bool keeps_results_aside() const override { return is_local(); }
  bool can_map() const override { return exports_ != nullptr; }
  void show(Card& card, const ShownBuffers& buffers) override;
  bool reach(const HostChannel& met, const void* in, void* out,
             std::vector<MappedBuffers>& mapped) override;
  std::shared_ptr<void> hold(const ShownBuffers& buffers,
                             std::vector<MappedBuffers>& mapped) override;
  bool is_still_there(const std::shared_ptr<void>& held) const override;
  bool is_settled() const override;
  std::unique_ptr<Unsettled> unsettled() const override;
  void tidy_up() override;
  void look_ahead() override;
  void* allocate(std::size_t bytes) override;
  void free(void* pointer) noexcept override;
  bool is_capturing(Stream stream) const override;
  void check_result() const override;
  void check_stream() override;
  void drain() override;

 private:
  friend class Program;
  friend class CopyProgram;
  friend class LocalProgram;
  friend class MappedProgram;
  friend class Simulation;  // tests/simulation: makes channels without GPUs

  Channel(Bootstrap& bootstrap, const Config& config);
  /// Among the devices: a rank's, and the rank that launches on one.
  int devices() const { return sharing_ ? sharing_->devices() : size_; }
  int device_of(int rank) const { return sharing_ ? sharing_->device(rank) : rank; }
  int leader_of(int device) const { return sharing_ ? sharing_->leader(device) : device; }
  /// Where the ranks and their inboxes are.
  Placement placement() const;
  std::vector<int> others() const;  ///< ranks
  /// check_result() while the context is there.
  void check_doorbell() const;
  /// Some kernel has ended without its data.
  bool is_aborted() const;
  /// All ranks share one GPU: there are no inboxes.
  bool is_local() const { return sharing_ && devices() == 1; }
  bool leads() const { return !sharing_ || sharing_->leads(); }
  void set_up(const void* pointer);
  /// Collective: inboxes in the GPUs' own memory, or else in pinned host memory. False (on all
  /// ranks alike): `why` says what was missing.
  bool open_direct(std::string& why);
  bool open_on_host(const Config& config, std::string& why);
  void release_inboxes();
  void release() noexcept;
  /// Tells a kernel that lingers what to do: a call with the caller's buffers so far from where
  /// they were at its launch, or kLeave.
  void order(std::int64_t in_moved, std::int64_t out_moved);
  /// Whether the lingering kernel has ended, or is about to.
  bool has_left() const;
  void dismiss();
  /// The next call is not for the lingering kernel, if there is one.
  void do_without_resident();
  /// The lingering kernel has left by itself.
  void forget();
  /// Whether a kernel should linger for the next call like its own.
  bool is_worth_lingering();
  /// Whether nothing is under way on the default stream, behind which our launches are ordered; or
  /// the program says that it need not be looked at.
  bool is_default_stream_idle() const;
  /// Looks so many times whether the kernel of this number, the last one, has ended. Throws Error
  /// if it cannot any more, or did so without its data.
  bool await(std::uint64_t number, int polls);
  /// Another rank: the host cannot see whom a kernel waits for.
  int any_peer(std::uint64_t look) const;

  Bootstrap& bootstrap_;
  const Driver& driver_;
  int rank_ = 0, size_ = 1, max_blocks_ = 0;
  CUcontext context_ = nullptr;
  ContextId context_id_;  // of context_
  CUdevice device_ = 0;
  const Kernels* kernels_ = nullptr;
  CUstream stream_ = nullptr, abort_stream_ = nullptr;
  std::vector<CUdeviceptr> inboxes_;    // zero: the rank has none
  std::unique_ptr<PeerMemory> direct_;  // where they are on the GPUs, or else ...
  std::unique_ptr<Segment> segment_;    // ... in host memory, ...
  std::shared_ptr<Pinned> pinned_;      // ... which is pinned
  CUdeviceptr counters_ = 0;
  Doorbell* doorbell_ = nullptr;            // the same address for host and device
  std::atomic<std::uint64_t> launches_{0};  // poison() looks from any thread
  std::uint32_t stalls_ = 0;                // of await(), in vain
  Replays replays_;
  /// A kernel that waits for orders after its first call: see TRIB_RESIDENT.
  struct Resident {
    const Program* program = nullptr;          // null: there is none
    std::uint64_t first = 0;                   // the call that it was launched for
    const void *in = nullptr, *out = nullptr;  // of that call
  };
  Resident resident_;
  std::uint32_t orders_ = 0;  // given so far
  int vain_ = 0;              // kernels that lingered for nothing, lately
  bool was_idle_ = false;     // the default stream, when look_ahead() was called for this call
  // Not ordered behind the default stream, or else a kernel that lingers would hold that up.
  CUstream resident_stream_ = nullptr;
  // Stream-ordered launches run one after the other, on whatever streams they are enqueued.
  CUevent last_ = nullptr;
  std::atomic<bool> is_enqueued_{false};  // poison() looks from any thread
  std::atomic<bool> is_captured_{false};  // graphs may run launches that the host does not see, ...
  Graphs graphs_;                         // ... those here
  std::shared_ptr<Queue> queue_;          // of enqueued launches, with those of other channels
  std::uint32_t last_run_ = 0;
  std::uint32_t known_run_ = 0;   // of enqueued launches: see Launch
  std::uint64_t time_limit_ = 0;  // nanoseconds
  const Config::Segment segment_mode_;
  const bool ignores_default_stream_;
  const std::string cublas_;  // TRIB_CUBLAS
  std::shared_ptr<Asides> asides_;
  std::unique_ptr<CopyEngine> copy_engine_;
  std::size_t wanted_inbox_bytes_ = 0;  // of its inbox; equal on all ranks
  /// What slices are cut for: more only once it is there.
  std::size_t large_inbox_bytes_ = kLeastLargeInbox;
  std::size_t least_long_ = 4 << 20;  // bytes of what a local kernel reads as a long message
  std::unique_ptr<Sharing> sharing_;  // null: every rank has a GPU of its own
  std::unique_ptr<Exports> exports_;  // null: peers' buffers are not to be mapped, or cannot be
};

}  // namespace trib::cuda

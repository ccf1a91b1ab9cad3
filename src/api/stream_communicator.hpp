// SPDX-License-Identifier: BSD-3-Clause
// Ranks that enqueue collectives on their devices' streams, without a word on the host: what stands
// behind trib_comm. The counterpart of comm/communicator.hpp, which meets and waits.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backend/backend.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/error.hpp"
#include "base/own_process.hpp"
#include "comm/cut.hpp"
#include "tune/findings.hpp"

namespace trib {

class StreamCommunicator {
 public:
  /// Collective, with the settings of the process. Throws Error, on all ranks alike once they could
  /// be reached.
  explicit StreamCommunicator(std::unique_ptr<Bootstrap> bootstrap);

  /// Throws Error in a child of the process that made it.
  void expect_own_process() const { process_.expect("the communicator"); }

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// One collective. `count`: elements of the vector, or of each rank's part
  /// (reduce_scatter_block); `counts`: of each rank's part (reduce_scatter).
  struct Call {
    Collective collective = Collective::allreduce;
    Dtype dtype = Dtype::f32;
    Op op = Op::sum;
    int root = 0;
    std::size_t count = 0;
    const std::size_t* counts = nullptr;
    const void* in = nullptr;
    void* out = nullptr;
  };
  /// Memory of each rank, in this process's addresses; where it cannot be mapped, only its own. As
  /// long as it lives, calls deliver results into it.
  struct Registration {
    std::uint64_t number = 0;  ///< from 1, in the order of the calls that made them
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    std::vector<MappedBuffers> mapped;  ///< their `in`, of each rank; or empty
    std::shared_ptr<void> hold;
    OwnProcess process;
  };
  /// Collective. Throws Error, on all ranks alike.
  std::shared_ptr<Registration> enroll(void* buffer, std::size_t bytes);

  /// Returns once the work is enqueued. Any thread. Throws Error where that shows at once.
  void enqueue(const Call& call, Stream stream);

  /// What a call comes to, but for the stream: may be started as often as wanted, as long as the
  /// communicator lives. Programs, which it refers to, stay as they are until then.
  struct Work {
    Program* program = nullptr;  ///< null: nothing needs to go to other ranks
    Arguments arguments;
    std::shared_ptr<const void> plan;   ///< what the arguments point into
    std::size_t copied = 0;             ///< bytes from `in` to `out`, without a program
    std::vector<MappedBuffers> mapped;  ///< where results are delivered, if they are
  };
  /// Does all that can be done before the call: enqueues nothing, and asks no peer. Any thread.
  Work prepare(const Call& call);
  /// As enqueue(). Any thread.
  void start(const Work& work, Stream stream);

  /// Ends what runs; afterwards the communicator is unusable. Any thread.
  void abort(const std::string& why) noexcept;
  /// Throws the first failure since the beginning, if any. Waits for no peer.
  void check();
  /// Until all that was enqueued is done, and no peer will use this rank's memory any more.
  void drain();

 private:
  struct Loaded {
    std::size_t chunks = 1, parts = 1;
    Reach reach = Reach::scratch;
    std::unique_ptr<Program> program;
  };
  /// How vectors of one kind and length are cut.
  struct Plan {
    Loaded* loaded = nullptr;
    std::vector<std::size_t> chunk_begin;
    Arguments arguments;
  };
  using PlanKey = std::tuple<Collective, Dtype, Op, int, std::vector<std::size_t>, bool>;
  struct KnownPlan {
    std::shared_ptr<const Plan> plan;
    std::list<const PlanKey*>::iterator place;  ///< in plans_by_use_
  };
  /// More are forgotten, the least recently used first: a program may have other lengths in every
  /// call. With 8 ranks these are some 2 MiB.
  static constexpr std::size_t kMostPlans = 4096;

  std::shared_ptr<const Plan> plan_for(const Call& call, std::vector<std::size_t> counts,
                                       bool is_registered);
  std::vector<MappedBuffers> find_registered(const Call& call, std::size_t bytes,
                                             std::uint64_t& place);
  Work work_of(const Call& call);
  void announce(const Signature& signature);
  bool is_capturing(Stream stream);
  void launch(Work work, Stream stream, bool is_captured);
  template <class Body>
  void or_fail(bool is_captured, const Body& body);
  bool is_usable();
  void expect_usable();
  [[noreturn]] void fail(const Error& error);
  void end(const Error& error) noexcept;
  template <class Look>
  void end_if(const Look& look) noexcept;
  void look();
  bool look_at_words();

  const std::unique_ptr<Bootstrap> bootstrap_;
  const Config config_;
  const int rank_, size_;
  const OwnProcess process_;
  std::unique_ptr<HostChannel> host_;  // only to see whether peers are well; under state_mutex_
  std::unique_ptr<DeviceChannel> device_;
  Findings findings_;
  // A launch may wait for room on the device as long as kernels there wait for a peer that died:
  // who wants to see that, and end it, must not have to wait for the launch.
  std::mutex mutex_;         // of launches, and what they use
  std::mutex enroll_mutex_;  // of registrations being made; taken before mutex_
  std::mutex state_mutex_;
  std::optional<Error> failure_;                              // the first one
  const Error out_of_memory_{Code::system, "out of memory"};  // made while there is some
  int looked_at_ = 0;
  std::uint64_t position_ = 0;
  std::map<std::tuple<Collective, const Algorithm*, int, Reach>, Loaded> programs_;
  std::map<PlanKey, KnownPlan> plans_;
  std::list<const PlanKey*> plans_by_use_;  // the last one first
  std::vector<std::weak_ptr<Registration>> registrations_;
  std::uint64_t last_registration_ = 0;
};

}  // namespace trib

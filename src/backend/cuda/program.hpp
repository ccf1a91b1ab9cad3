// SPDX-License-Identifier: BSD-3-Clause
// A lowered schedule as kernels run it: translated once into the tables of a Launch.
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
  Program(Channel& channel, const std::vector<Schedule>& all, int rank);
  void translate(const std::vector<Schedule>& all);
  void find_exchange(int batches);
  std::byte* place(int operand) const {
    return reinterpret_cast<std::byte*>(launch_.operand[operand].address);
  }
  void fill_flat();
  void fill_pipeline(std::size_t slice_bytes);
  bool is_to_go_aside(const Arguments& arguments) const;
  bool look_for_repeat(const Arguments& arguments);
  bool order(const Arguments& arguments, bool may_be);
  bool hears_from_all(const Arguments& arguments) const;
  void start(const Arguments& arguments);

  Channel& channel_;
  const int rank_;
  FlaggedLaunch launch_{};
  /// What an operand of the launch stands for: filled in by every call.
  struct Meaning {
    Buffer buffer;
    int rank, chunk;   // whose, if it is not scratch
    int holder, unit;  // scratch: whose inbox, and where in it
  };
  std::vector<Meaning> meanings_;
  /// What peers push here: an operand that is a source, and which device fills it.
  struct Arrival {
    int operand, from;
  };
  std::vector<Arrival> arrivals_;
  /// What there is to do, where it is one exchange: operands.
  struct Exchange {
    bool is_flat = false, is_pipeline = false, is_relay = false;  // what can run it
    struct Copy {
      int from, to;
    };
    std::vector<Copy> targets;  // from `in` to inboxes
    std::vector<int> sources;   // of the fold, in its order
    int own = -1;               // the one of these that is this rank's
    std::vector<int> outs;      // where its result goes
    std::vector<Copy> results;  // from the inbox to `out`
    std::vector<Copy> kept;     // from `in` to `out`
    /// For a flat kernel, to which a chunk that is only copied is a sum of one.
    struct Fold {
      std::vector<int> sources;
      int own = -1, out = -1;  // out: -1 where there is no source
    };
    Fold fold;
  };
  Exchange exchange_;
  std::vector<Flag> bare_signals_, bare_waits_;  // of slots without payload
  Repeats repeats_;
  FlatLaunch flat_launch_{};
  PipelineLaunch pipeline_launch_{};
  int units_ = 0;                                               // of the inbox that has the most
  bool is_packet_possible_ = true, is_simple_possible_ = true;  // the schedule fits into a launch
  bool is_delivered_ = false;                                   // it stores to peers' `out`
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

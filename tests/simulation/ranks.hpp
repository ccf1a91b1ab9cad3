// SPDX-License-Identifier: BSD-3-Clause
// Ranks whose GPUs are simulated (machine.hpp): their channels and programs are those of the CUDA
// backend, and so are the kernels' tables; the driver is not. One at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "algorithm/registry.hpp"
#include "backend/cuda/channel.hpp"
#include "simulation/machine.hpp"

namespace trib::cuda {

/// The driver that is none, for tests that have functions of their own in it.
Driver& simulated_driver();

class Simulation {
 public:
  struct Setup {
    int ranks = 2;
    Level device_of;                        ///< empty: each has a GPU of its own
    int blocks = 1;                         ///< of a kernel, at most
    std::uint64_t time_limit = 1ull << 60;  ///< of a wait, in turns of threads
    std::uint32_t last_run = 0;             ///< what came before
    /// Runs are counted on the GPU, as for graphs: on each rank from some call on.
    bool is_counted = false;
    /// Nothing has been written to inboxes, but for what each launch on a stream writes.
    bool is_fresh = false;
    std::size_t least_long = SIZE_MAX;  ///< bytes of long messages of a single GPU
    bool lingers = false;               ///< kernels may wait for further calls
    std::uint64_t seed = 0;
  };
  explicit Simulation(const Setup& setup);
  ~Simulation();

  simulation::Machine& machine() { return machine_; }
  int ranks() const { return setup_.ranks; }
  int gpus() const { return channels_.front()->devices(); }
  int gpu_of(int rank) const { return channels_.front()->device_of(rank); }
  int leader_of(int gpu) const { return channels_.front()->leader_of(gpu); }

  /// The ranks' programs, and how many chunks they have. Null: there is none.
  struct Loaded {
    std::vector<std::unique_ptr<trib::Program>> programs;
    int chunks = 0;
  };
  const Loaded& load(const Algorithm& algorithm, Shape shape, Reach reach);

  /// What a GPU was told to do last.
  struct Launched {
    Protocol protocol{};
    bool is_relay = false;
    unsigned blocks = 0;
    std::uint32_t passes = 0;
    std::uint64_t number = 0;
  };
  /// The GPU of a rank that leads is idle, then begins.
  void launch(int rank, trib::Program& program, const Arguments& arguments);
  const Launched& launched(int gpu) const { return launched_[static_cast<std::size_t>(gpu)]; }
  /// A GPU has other work before what is launched next, until it is let go.
  void hold(int gpu) { is_held_[static_cast<std::size_t>(gpu)] = true; }
  void let_go(int gpu);
  /// Whether the host has heard that it is done. Where kernels linger it goes on with the call: it
  /// may have to launch another one.
  bool is_told(int gpu);
  /// Launches and copies that follow the kernel; true: it has ended, and they have, too.
  bool finish(int gpu);

  /// Whether the rank's host knows that what it has got is no result.
  bool has_error(int rank) const;
  /// As its host does if a peer is in trouble, or as a peer's host does.
  void abort(int rank, bool is_by_peer);
  /// As Channel::poison() does on a rank that gives a call up.
  void poison(int rank);
  /// What the GPU's threads wait for.
  std::string waits(int gpu) const;

  /// Mutants. Kernels take peers for further than they are.
  void ignore_credits();
  /// Kernels do as if nobody had given up a wait.
  void ignore_giving_up();
  static inline bool forgets_devices = false;
  static inline unsigned weight = 1;  ///< of what was folded before

  /// Element by element as kernels fold.
  static void fold(Dtype dtype, std::byte* into, const std::byte* more);

  // For the driver that is none.
  static CUresult launch_kernel(CUfunction function, unsigned blocks, unsigned threads,
                                void** parameters);
  static std::size_t launch_bytes(Protocol protocol);
  static CUresult allocate(CUdeviceptr* memory, std::size_t bytes);
  static bool is_default_stream_idle();
  static CUresult copy_behind(CUdeviceptr to, CUdeviceptr from, std::size_t bytes);

 private:
  class Introduction;
  struct Copy {
    CUdeviceptr to, from;
    std::size_t bytes;
  };
  struct Free {
    void operator()(void* memory) const;
  };
  using Memory = std::unique_ptr<std::byte, Free>;

  static void run_thread(Protocol protocol, Dtype dtype, const void* launch);
  static Memory zeros(std::size_t bytes);
  std::string name_of(const void* at) const;
  void fill_inbox(std::byte* inbox) const;

  const Setup setup_;
  simulation::Machine machine_;
  std::vector<std::unique_ptr<Introduction>> bootstraps_;
  std::vector<Memory> inboxes_, allocated_;
  std::vector<std::unique_ptr<Doorbell>> doorbells_;
  std::vector<std::unique_ptr<Counters>> counters_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::map<std::tuple<const Algorithm*, Collective, int, bool, Reach>, Loaded> loaded_;
  std::vector<Launched> launched_;
  std::vector<Operation*> operations_;  // of each GPU, the last one
  std::vector<bool> is_held_;
  std::vector<std::vector<Copy>> copies_;
  std::vector<std::vector<simulation::Kernel>> queued_;  // of a GPU, behind the one that runs
  int launching_ = 0;                                    // which GPU
};

}  // namespace trib::cuda

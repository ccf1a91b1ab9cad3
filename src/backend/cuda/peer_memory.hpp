// SPDX-License-Identifier: BSD-3-Clause
// Memory on each GPU that peers store into: its owner allocates it, all others map it, and it goes
// when none of them has it mapped any more.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/driver.hpp"
#include "backend/segment.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/process.hpp"

namespace trib::cuda {

class OwnMemory;

class PeerMemory {
 public:
  /// Collective: `bytes` on the GPU of each of `owners` (ranks, ascending), zero at first, which
  /// they all map. `context` is this rank's. Null on all ranks alike if one of them cannot have
  /// that; `why` then says what was missing.
  static std::unique_ptr<PeerMemory> open(Bootstrap& bootstrap, Config::Segment mode,
                                          const ContextId& context, std::size_t bytes,
                                          const std::vector<int>& owners, std::string& why);
  /// Not collective: a peer may still use this rank's memory, which then stays until that one has
  /// closed it, or is gone. No kernel or copy of this rank's may use peers' any more.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Zero: that rank has none, or this one has no use for it.
  CUdeviceptr of(int rank) const { return peers_[static_cast<std::size_t>(rank)].at; }

  /// Frees what was left since peers had it mapped, and none has now. Waits for that for some
  /// milliseconds.
  static void free_left();

 private:
  struct Peer {
    CUdeviceptr at = 0;
    bool is_elsewhere = false;  // in another process, ...
    bool can_see = false;       // ... of which we would see that it is gone
    ProcessId process;
    std::shared_ptr<OwnMemory> hold;  // of this process: the memory is there as long
  };
  struct Word;
  struct Left;

  PeerMemory(int rank, int size, const ContextId& context);
  void allocate(std::size_t bytes);
  void map(const std::vector<int>& owners, const void* hellos);

  const int rank_;
  const ContextId context_;
  std::vector<Peer> peers_;
  std::unique_ptr<Segment> segment_;  // a Word of each rank
};

}  // namespace trib::cuda

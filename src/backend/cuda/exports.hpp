// SPDX-License-Identifier: BSD-3-Clause
// Memory of the program that ranks show each other, so that peers' kernels can work on it.
//
// What a rank shows is the allocation that holds a buffer, by a number and an IPC handle, in a
// table in shared memory; and the buffer's place in it, on the card of a meeting. A peer maps an
// allocation when it meets the number first. An allocation that the program has freed is taken back
// from the table soon afterwards, and its mappings are closed when the peers look there next: until
// then the driver keeps the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/segment.hpp"

namespace trib::cuda {

/// Between a rank's show() and the end of the call, all ranks meet: none looks at a table while its
/// rank changes it.
class Exports {
 public:
  /// Collective. Null on all ranks alike: `why` says what was missing.
  /// Where all places are taken, a new allocation gets that of one that show() was not asked for
  /// `patience` times: to map it takes as long as many calls that do without.
  static std::unique_ptr<Exports> open(Bootstrap& bootstrap, Config::Segment mode,
                                       CUcontext context, std::uint64_t patience, std::string& why);
  ~Exports();  ///< closes all mappings
  Exports(const Exports&) = delete;
  Exports& operator=(const Exports&) = delete;

  // This rank's memory, in its context.

  /// The number of the allocation that holds the buffer, and the buffer's place in it; zero: peers
  /// cannot map it, or too many others are in use.
  std::uint64_t show(const void* pointer, std::uint64_t& at);
  /// Looks at `looks` of the allocations that this rank shows: whether the program has freed them.
  void take_back_freed(std::size_t looks);

  // The others'.

  /// Where the buffers are that `card` of `rank` names, null for one that it does not. False: some
  /// cannot be mapped. Closes what the rank has taken back: no kernel may be using it.
  bool reach(int rank, const Card& card, MappedBuffers& buffers);
  /// The same of all ranks: closes what they have taken back.
  void close_taken_back();

 private:
  static constexpr std::size_t kShown = kShownBlocks;
  struct Shown;
  struct Table;
  /// An allocation that this rank shows. `number` zero: nothing.
  struct Own {
    std::uint64_t number = 0;
    CUdeviceptr base = 0;
    unsigned long long id = 0;  // unique in the process: addresses are used again
    std::uint64_t used = 0;     // the last show() that asked for it
    bool is_shown = false;      // otherwise the driver has no handle for it
  };
  /// One of a peer's. `base` zero: it could not be mapped.
  struct Mapped {
    std::uint64_t number = 0;
    CUdeviceptr base = 0;
  };
  struct Peer {
    std::vector<Mapped> mapped;
    std::uint64_t taken_back = 0;  // as far as this rank has looked
  };

  Exports(int rank, int size, CUcontext context, std::uint64_t patience);
  Table& table(int rank) const;
  Own* place_for_new();
  CUdeviceptr map(int rank, std::uint64_t number);
  void close_taken_back(int rank);
  void close(Mapped& mapped);

  const int rank_;
  const CUcontext context_;
  const Driver& driver_;
  std::unique_ptr<Segment> segment_;
  std::vector<Own> own_;
  const std::uint64_t patience_;
  std::uint64_t last_number_ = 0, shows_ = 0;
  std::size_t next_look_ = 0;  // in own_
  std::vector<Peer> peers_;    // by rank
};

}  // namespace trib::cuda

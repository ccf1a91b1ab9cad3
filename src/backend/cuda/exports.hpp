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
  /// To map an allocation takes as long as many calls that do without.
  struct Habits {
    std::uint64_t trials = 0;    ///< how often one is named in vain before it is shown
    std::uint64_t patience = 1;  ///< where all places are taken, the names that pass before one
                                 ///< that is not among them loses its place to a new one
  };
  /// Collective. Null on all ranks alike: `why` says what was missing.
  static std::unique_ptr<Exports> open(Bootstrap& bootstrap, Config::Segment mode,
                                       CUcontext context, const Habits& habits, std::string& why);
  ~Exports();  ///< closes all mappings
  Exports(const Exports&) = delete;
  Exports& operator=(const Exports&) = delete;

  // This rank's memory, in its context.

  /// The number of the allocation that holds the buffer, and the buffer's place in it; zero: peers
  /// cannot map it, are not to map it yet, or too many others are in use.
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
    std::uint64_t used = 0;     // the last show() that asked for it, ...
    std::uint64_t uses = 0;     // ... and how many did
    bool is_shown = false;      // otherwise it is not yet, or the driver has no handle for it
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

  Exports(int rank, int size, CUcontext context, const Habits& habits);
  Table& table(int rank) const;
  Own* find(CUdeviceptr base, unsigned long long id);
  Own* add(CUdeviceptr base, unsigned long long id);
  void publish(Own& own);
  void take_back(Own& own);
  CUdeviceptr map(int rank, std::uint64_t number);
  void close_taken_back(int rank);
  void close(Mapped& mapped);

  const int rank_;
  const CUcontext context_;
  const Driver& driver_;
  std::unique_ptr<Segment> segment_;
  std::vector<Own> own_;
  const Habits habits_;
  std::uint64_t last_number_ = 0, shows_ = 0;
  std::uint64_t full_until_ = 0;  // the show() before which no place is looked for
  std::size_t next_look_ = 0;     // in own_
  std::vector<Peer> peers_;       // by rank
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Several ranks on one GPU. The first of them, their leader, launches the kernels that wait for
// other GPUs, and these read and write the others' buffers as well: schedule/share.hpp. The others,
// its followers, show it where their buffers are, and wait on the host for its word.
//
// What a rank shows is the allocation that holds a buffer, by a number and an IPC handle, in a
// table in shared memory; and the buffer's place in it, on the card of a meeting. The leader maps
// an allocation when it meets the number first. An allocation that the program has freed is taken
// back from the table soon afterwards, and its mapping is closed before the leader's next launch:
// until then the driver keeps the memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/segment.hpp"

namespace trib::cuda {

class Sharing {
 public:
  /// Collective. Null on all ranks alike: `why` says what was missing.
  static std::unique_ptr<Sharing> open(Bootstrap& bootstrap, Config::Segment mode,
                                       CUcontext context, const Level& device_of, std::string& why);
  ~Sharing();
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;

  const Level& device_of() const { return device_of_; }
  int devices() const { return static_cast<int>(leaders_.size()); }
  int device(int rank) const { return device_of_[static_cast<std::size_t>(rank)]; }
  int leader(int device) const { return leaders_[static_cast<std::size_t>(device)]; }
  bool leads() const { return leader(device(rank_)) == rank_; }

  /// Followers: what the leader has to know of the buffers, which are ready when this returns.
  /// Those that it cannot map are to be staged.
  void show(Card& card, const void* in, const void* out);
  /// Leaders, after a meeting on `met`: where the buffers of its device's ranks are. False: some
  /// cannot be mapped. Followers: true.
  bool reach(const HostChannel& met, const void* in, void* out, std::vector<MappedBuffers>& mapped);

  /// A leader's kernel of this number has ended.
  void tell(std::uint64_t number);
  bool is_told(std::uint64_t number) const;

 private:
  static constexpr std::size_t kShown = kShownBlocks;
  struct Shown;
  struct Table;
  /// An allocation that this rank shows. `number` zero: nothing.
  struct Own {
    std::uint64_t number = 0;
    CUdeviceptr base = 0;
    unsigned long long id = 0;  // unique in the process: addresses are used again
    bool is_shown = false;      // otherwise the driver has no handle for it
  };
  /// One of a follower's, as its leader has mapped it.
  struct Mapped {
    std::uint64_t number = 0;
    CUdeviceptr base = 0;  // zero: it could not be mapped
  };
  struct Follower {
    std::vector<Mapped> mapped;
    std::uint64_t taken_back = 0;  // as far as this leader has looked
  };

  Sharing(int rank, const Level& device_of, CUcontext context);
  Table& table(int rank) const;
  /// The allocation's number, or zero, and the buffer's place in it. `kept`: a number that must not
  /// lose its place.
  std::uint64_t number_of(const void* pointer, std::uint64_t kept, std::uint64_t& at);
  void take_back_freed(std::size_t looks);
  void close_taken_back(int rank);
  CUdeviceptr map(int rank, std::uint64_t number);
  void close(Mapped& mapped);

  const int rank_;
  const Level device_of_;
  std::vector<int> leaders_;
  const CUcontext context_;
  const Driver& driver_;
  std::unique_ptr<Segment> segment_;
  std::vector<Own> own_;
  std::uint64_t last_number_ = 0;
  std::size_t next_look_ = 0;        // in own_
  std::vector<Follower> followers_;  // by rank
};

}  // namespace trib::cuda

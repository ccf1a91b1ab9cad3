// SPDX-License-Identifier: BSD-3-Clause
// Whether processes of other ranks still live, where /proc does not show them: in containers with
// process numbers of their own. Each holds a lock on a byte of a shared file, which the kernel
// takes back however it ends.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/segment.hpp"
#include "base/file.hpp"

namespace trib {

class LifeLocks {
 public:
  /// Collective. Null on all ranks alike if any of them cannot have its lock.
  static std::shared_ptr<LifeLocks> open(Bootstrap& bootstrap, Config::Segment mode);
  ~LifeLocks();
  LifeLocks(const LifeLocks&) = delete;
  LifeLocks& operator=(const LifeLocks&) = delete;

  /// Whether the process of `rank` has ended. False if that cannot be told.
  bool is_gone(int rank) const;

 private:
  /// A page of the file as this rank has it open with its lock, which lasts as long as that is
  /// mapped: whatever descriptors the program closes, and not in its children.
  struct Page {
    void* at = nullptr;
    ~Page();
  };
  LifeLocks() = default;
  bool hold(const File& file, int rank);
  bool has_file() const;

  Page page_;
  /// The file, opened once more to look at others' locks. The program may have closed it, and
  /// opened another one.
  int file_ = -1;
  std::uint64_t device_ = 0, number_ = 0;
};

}  // namespace trib

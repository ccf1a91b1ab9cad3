// SPDX-License-Identifier: BSD-3-Clause
// Whether processes of other ranks still live, where /proc does not show them: in containers with
// process numbers of their own. Each holds a lock on a byte of a shared file, which the kernel
// takes back however it ends.
#pragma once

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
  explicit LifeLocks(File file);

  File file_;
};

}  // namespace trib

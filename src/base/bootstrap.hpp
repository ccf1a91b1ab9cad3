// SPDX-License-Identifier: BSD-3-Clause
// What the core needs from whoever started the processes. src/mpi implements it over PMPI_, the
// tests over threads.
#pragma once

#include <cstddef>
#include <functional>

namespace trib {

/// Collective calls are made by all ranks in the same order. They may throw Error.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Allgather: `all` has size() x bytes, in rank order. Collective; slow is fine.
  virtual void exchange(const void* mine, void* all, std::size_t bytes) = 0;
  /// `look` is called now and then while exchange() waits, and what it throws ends the wait, where
  /// that is in this class's hands.
  virtual void watch(std::function<void()> /*look*/) {}
  /// Called from every wait for a peer, about once per microsecond: keeps the host program's own
  /// messages moving.
  virtual void progress() = 0;
};

}  // namespace trib

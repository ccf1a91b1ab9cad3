// SPDX-License-Identifier: BSD-3-Clause
// Shared memory that GPUs reach. The driver takes a range of addresses once in a process: ranks
// that are threads hold one registration, which ends with the last of them.
#pragma once

#include <cstddef>
#include <memory>

#include "backend/cuda/driver.hpp"

namespace trib::cuda {

class Pinned {
 public:
  /// For all contexts, `context` is current. Throws Error.
  static std::shared_ptr<Pinned> of(void* at, std::size_t bytes, const ContextId& context);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  Pinned(void* at, std::size_t bytes, const ContextId& context);

  void* const at_;
  const ContextId context_;  // in which it was made
};

}  // namespace trib::cuda

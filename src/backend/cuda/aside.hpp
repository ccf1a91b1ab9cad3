// SPDX-License-Identifier: BSD-3-Clause
// Room for results that may not go where they belong yet, since that lies over what is still to be
// read: in the GPU's memory, or where that is full in the host's.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"

namespace trib::cuda {

/// Whether a reduce_scatter's result, of `rank`, lies over what is yet to be read. In place, `out`
/// is the front of `in`, and over the first chunk it may lie: the same unit or slice of `in` is
/// read before.
bool covers_input(const Arguments& arguments, int rank);

class Aside {
 public:
  explicit Aside(const ContextId& context) : context_(context) {}
  ~Aside();
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

  /// At least so many bytes, in its context, which is current. What is too small is kept to the
  /// end: graphs may use it, and to free it would wait for what the program has under way. Throws
  /// Error.
  CUdeviceptr reserve(std::size_t bytes);

 private:
  struct Block {
    CUdeviceptr memory = 0;  // pinned: the same address on the host
    std::size_t bytes = 0;
    bool is_pinned = false;
  };
  const ContextId context_;
  std::vector<Block> blocks_;  // the last one is in use
};

}  // namespace trib::cuda

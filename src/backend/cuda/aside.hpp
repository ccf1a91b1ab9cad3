// SPDX-License-Identifier: BSD-3-Clause
// Room for results that may not go where they belong yet, since that lies over what is still to be
// read: in the GPU's memory, or where that is full in the host's.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"

namespace trib::cuda {

/// Whether a reduce_scatter's result, of `rank`, lies over what is yet to be read. In place, `out`
/// is the front of `in`, and over the first chunk it may lie: the same unit or slice of `in` is
/// read before.
bool covers_input(const Arguments& arguments, int rank);

/// What the programs of a channel have no use for any more: the next ones get it. Given back with
/// the channel, and not when a request is freed, since CUDA may wait then for all that the program
/// has under way, and that for a rank which waits for this one.
class Asides {
 public:
  struct Block {
    CUdeviceptr memory = 0;  // pinned: the same address on the host
    std::size_t bytes = 0;
    bool is_pinned = false;
  };

  explicit Asides(const ContextId& context) : context_(context) {}
  ~Asides();
  Asides(const Asides&) = delete;
  Asides& operator=(const Asides&) = delete;

  /// Of at least `bytes`, or if there is none of `wanted`, as far as there is room, in the context,
  /// which is current. Throws Error.
  Block take(std::size_t bytes, std::size_t wanted);
  void put_back(const std::vector<Block>& blocks) noexcept;

 private:
  void give_back(const std::vector<Block>& blocks) const noexcept;

  const ContextId context_;
  std::mutex mutex_;  // requests are freed in any thread
  std::vector<Block> blocks_;
};

class Aside {
 public:
  explicit Aside(std::shared_ptr<Asides> asides) : asides_(std::move(asides)) {}
  ~Aside() { asides_->put_back(blocks_); }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

  /// At least so many bytes, in its context, which is current. What is too small is kept to the
  /// end: graphs may use it. Throws Error.
  CUdeviceptr reserve(std::size_t bytes);

 private:
  const std::shared_ptr<Asides> asides_;
  std::vector<Asides::Block> blocks_;  // the last one is in use
};

}  // namespace trib::cuda

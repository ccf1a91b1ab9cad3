// SPDX-License-Identifier: BSD-3-Clause
// Host memory that stands in for a buffer on a device while something that knows only host memory
// works on it.
#pragma once

#include <cstddef>
#include <memory>

#include "backend/backend.hpp"

namespace trib {

/// Grows to what was asked for; memory that the device copies fast where that is not too much.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer() { release(); }
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  /// At least `bytes` bytes, valid until the next call. Throws std::bad_alloc.
  void* get(const DeviceBackend& device, std::size_t bytes);
  /// Gives back what is too large to keep.
  void trim() {
    if (bytes_ > kKept) release();
  }

 private:
  static constexpr std::size_t kKept = 64u << 20;
  void release();

  const DeviceBackend* device_ = nullptr;  // set: pinned
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace trib

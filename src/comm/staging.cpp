// SPDX-License-Identifier: BSD-3-Clause
#include "comm/staging.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace trib {

void* StagingBuffer::get(const DeviceBackend& device, std::size_t bytes) {
  if (bytes <= bytes_) return memory_;
  release();
  const std::size_t wanted = std::max<std::size_t>(bytes, 4096);
  if (wanted <= kKept) memory_ = device.allocate_host(wanted);
  if (memory_ != nullptr) {
    device_ = &device;
  } else if (memory_ = std::malloc(wanted); memory_ == nullptr) {
    throw std::bad_alloc();
  }
  bytes_ = wanted;
  return memory_;
}

void StagingBuffer::release() {
  if (device_ != nullptr)
    device_->free_host(memory_);
  else
    std::free(memory_);
  device_ = nullptr;
  memory_ = nullptr;
  bytes_ = 0;
}

}  // namespace trib

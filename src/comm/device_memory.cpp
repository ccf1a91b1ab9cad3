// SPDX-License-Identifier: BSD-3-Clause
#include "comm/device_memory.hpp"

#include <dlfcn.h>

#include <atomic>

namespace trib {
namespace {

// From the driver API of CUDA, whose header is not needed for a single call: CUresult
// cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer).
using PointerGetAttribute = int (*)(void*, int, unsigned long long);
constexpr int kMemoryType = 2;        // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr unsigned kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE

std::atomic<PointerGetAttribute> pointer_get_attribute{nullptr};

}  // namespace

bool has_device_driver() {
  if (pointer_get_attribute.load(std::memory_order_acquire) != nullptr) return true;
  // Never loaded by us: a program that does not use the GPU must not pay for its driver.
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  const auto function = reinterpret_cast<PointerGetAttribute>(::dlsym(driver, "cuPointerGetAttribute"));
  pointer_get_attribute.store(function, std::memory_order_release);
  return function != nullptr;  // the handle stays open: the function must not go away
}

bool is_device_memory(const void* pointer) {
  const PointerGetAttribute function = pointer_get_attribute.load(std::memory_order_acquire);
  unsigned type = 0;
  return function != nullptr && pointer != nullptr &&
         function(&type, kMemoryType, reinterpret_cast<unsigned long long>(pointer)) == 0 && type == kDeviceMemory;
}

}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/memory.hpp"

namespace trib::cuda {
namespace {

struct Attributes {
  unsigned type = 0;  // CUmemorytype, or zero: unknown to the driver
  bool is_managed = false;
  CUcontext context = nullptr;
  int device = -1;
};

Attributes attributes_of(const void* pointer) {
  Attributes found;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                  CU_POINTER_ATTRIBUTE_CONTEXT,
                                  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* values[] = {&found.type, &found.is_managed, &found.context, &found.device};
  // Unknown pointers are no error: their attributes come back as zero.
  if (driver()->cuPointerGetAttributes_(4, wanted, values,
                                        reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS)
    return {};
  return found;
}

Memory kind(const Attributes& attributes) {
  if (attributes.is_managed || attributes.type == CU_MEMORYTYPE_DEVICE) return Memory::device;
  return attributes.type == CU_MEMORYTYPE_HOST ? Memory::pinned : Memory::host;
}

}  // namespace

Memory where(const void* pointer) {
  if (pointer == nullptr) return Memory::none;
  return kind(attributes_of(pointer));
}

Memory where_in(CUcontext context, const void* pointer) {
  if (pointer == nullptr) return Memory::none;
  const Attributes attributes = attributes_of(pointer);
  const Memory memory = kind(attributes);
  if (memory != Memory::device || attributes.is_managed || attributes.context == context)
    return memory;
  // No context of its own (pools, virtual address ranges), or another one: the device decides.
  const Current current(context);
  CUdevice own = -1;
  if (driver()->cuCtxGetDevice_(&own) != CUDA_SUCCESS || own != attributes.device)
    return Memory::distant;
  return attributes.context == nullptr ? memory : Memory::distant;
}

CUcontext context_of(const void* pointer) {
  const Attributes attributes = attributes_of(pointer);
  if (attributes.context != nullptr && attributes.type == CU_MEMORYTYPE_DEVICE)
    return attributes.context;
  CUcontext current = nullptr;
  CUdevice device = -1;
  if (driver()->cuCtxGetCurrent_(&current) == CUDA_SUCCESS && current != nullptr &&
      driver()->cuCtxGetDevice_(&device) == CUDA_SUCCESS &&
      (attributes.device < 0 || attributes.device == device))
    return current;
  if (attributes.device < 0) return nullptr;
  unsigned flags = 0;
  int is_active = 0;
  if (driver()->cuDeviceGet_(&device, attributes.device) != CUDA_SUCCESS ||
      driver()->cuDevicePrimaryCtxGetState_(device, &flags, &is_active) != CUDA_SUCCESS ||
      is_active == 0)
    return nullptr;
  CUcontext primary = nullptr;
  if (driver()->cuDevicePrimaryCtxRetain_(&primary, device) != CUDA_SUCCESS) return nullptr;
  driver()->cuDevicePrimaryCtxRelease_(device);  // the program holds it, we need not
  return primary;
}

}  // namespace trib::cuda

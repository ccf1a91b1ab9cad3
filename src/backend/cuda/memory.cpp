// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/memory.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <iterator>

namespace trib::cuda {
namespace {

struct Attributes {
  unsigned type = 0;  // CUmemorytype, or zero: unknown to the driver
  bool is_managed = false;
  CUcontext context = nullptr;
  int device = -1;
  unsigned long long id = 0;  // of the allocation, unique in the process
};

Attributes attributes_of(const void* pointer, bool wants_id = false) {
  Attributes found;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                  CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                  CU_POINTER_ATTRIBUTE_BUFFER_ID};
  void* values[] = {&found.type, &found.is_managed, &found.context, &found.device, &found.id};
  // Unknown pointers are no error: their attributes come back as zero.
  const auto at = reinterpret_cast<CUdeviceptr>(pointer);
  constexpr unsigned kAll = std::size(wanted);
  if (wants_id && driver()->cuPointerGetAttributes_(kAll, wanted, values, at) == CUDA_SUCCESS)
    return found;
  found = {};  // of what has no id, maybe
  if (driver()->cuPointerGetAttributes_(kAll - 1, wanted, values, at) == CUDA_SUCCESS) return found;
  return {};
}

/// Some thousand allocations, those that were added last.
class Known {
 public:
  /// True: it was not there.
  bool add(unsigned long long id) {
    auto& places = places_[id % kSets];
    for (auto& place : places)
      if (place.load(std::memory_order_relaxed) == id) return false;
    const unsigned next = next_.fetch_add(1, std::memory_order_relaxed);
    places[next % places.size()].store(id, std::memory_order_relaxed);
    return true;
  }

 private:
  static constexpr std::size_t kSets = 1024;
  std::array<std::array<std::atomic<unsigned long long>, 4>, kSets> places_{};
  std::atomic<unsigned> next_{0};
};

/// Most copies are through by then.
constexpr auto kSoon = std::chrono::microseconds(50);

/// What this thread has under way on its own default stream is done, or takes long.
void wait_for_stream_of_thread() {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (driver()->cuStreamIsCapturing_(CU_STREAM_PER_THREAD, &capture) != CUDA_SUCCESS ||
      capture != CU_STREAM_CAPTURE_STATUS_NONE)
    return;  // to look would end the capture
  const auto start = std::chrono::steady_clock::now();
  while (driver()->cuStreamQuery_(CU_STREAM_PER_THREAD) == CUDA_ERROR_NOT_READY &&
         std::chrono::steady_clock::now() - start < kSoon) {
  }
}

Memory kind(const Attributes& attributes) {
  if (attributes.is_managed || attributes.type == CU_MEMORYTYPE_DEVICE) return Memory::device;
  return attributes.type == CU_MEMORYTYPE_HOST ? Memory::pinned : Memory::host;
}

/// In a range of addresses: memory without a context, which no pool has, either.
bool is_mapped_by_program(const void* pointer, const Attributes& attributes) {
  void* pool = nullptr;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE};
  void* values[] = {&pool};
  return attributes.context == nullptr && !attributes.is_managed &&
         driver()->cuPointerGetAttributes_(
             1, wanted, values, reinterpret_cast<CUdeviceptr>(pointer)) == CUDA_SUCCESS &&
         pool == nullptr;
}

/// Kernels come behind what is on the legacy default stream. Programs may have another one for each
/// thread, and not know that copies from pageable memory, or cudaMemset, go on there when they have
/// returned. Not so on memory of which the driver has been told. Ranges of addresses do not allow
/// that, and compute-sanitizer would report the attempt; nothing is lost there.
void make_synchronous(CUcontext context, const void* pointer, const Attributes& attributes) {
  static auto& known = *new Known;  // never destroyed: programs may end late
  if (attributes.id == 0 || !known.add(attributes.id)) return;
  const Current current(context);
  const unsigned is_synchronous = 1;
  if (!is_mapped_by_program(pointer, attributes) &&
      driver()->cuPointerSetAttribute_(&is_synchronous, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                                       reinterpret_cast<CUdeviceptr>(pointer)) == CUDA_SUCCESS)
    wait_for_stream_of_thread();  // what was begun before is not like that
}

/// The context of each device that was used last: a thread without one may bring memory that has
/// none, either (pools), and the program need not use the primary context.
class Seen {
 public:
  void keep(int device, CUcontext context) {
    if (device >= 0 && device < kDevices)
      last_[static_cast<std::size_t>(device)].store(context, std::memory_order_relaxed);
  }
  /// Null: none that is still there.
  CUcontext of(int device) const {
    if (device < 0 || device >= kDevices) return nullptr;
    const CUcontext last = last_[static_cast<std::size_t>(device)].load(std::memory_order_relaxed);
    if (last == nullptr) return nullptr;
    try {
      const Current current(last);
      CUdevice its = -1;  // another one's handle may be the same now
      return driver()->cuCtxGetDevice_(&its) == CUDA_SUCCESS && its == device ? last : nullptr;
    } catch (const Error&) {
      return nullptr;  // gone
    }
  }

 private:
  static constexpr int kDevices = 64;
  std::array<std::atomic<CUcontext>, kDevices> last_{};
};

Seen& seen() {
  static auto& seen = *new Seen;  // never destroyed: programs may end late
  return seen;
}

}  // namespace

Memory where(const void* pointer) {
  if (pointer == nullptr) return Memory::none;
  return kind(attributes_of(pointer));
}

Memory where_in(const ContextId& context, const void* pointer, bool is_ordered) {
  if (pointer == nullptr) return Memory::none;
  const Attributes attributes = attributes_of(pointer, /*wants_id=*/!is_ordered);
  const Memory memory = kind(attributes);
  if (memory == Memory::host) return memory;
  // After cudaDeviceReset() the program has memory again, maybe by a context of the same handle.
  if (!context.is_there()) return memory == Memory::device ? Memory::distant : Memory::host;
  if (!is_ordered && memory == Memory::device)
    make_synchronous(context.handle, pointer, attributes);
  if (memory != Memory::device || attributes.is_managed || attributes.context == context.handle)
    return memory;
  // No context of its own (pools, virtual address ranges), or another one: the device decides.
  const Current current(context.handle);
  CUdevice own = -1;
  if (driver()->cuCtxGetDevice_(&own) != CUDA_SUCCESS || own != attributes.device)
    return Memory::distant;
  return attributes.context == nullptr ? memory : Memory::distant;
}

CUcontext context_of(const void* pointer) {
  const Attributes attributes = attributes_of(pointer);
  if (attributes.context != nullptr && attributes.type == CU_MEMORYTYPE_DEVICE) {
    seen().keep(attributes.device, attributes.context);
    return attributes.context;
  }
  CUcontext current = nullptr;
  CUdevice device = -1;
  if (driver()->cuCtxGetCurrent_(&current) == CUDA_SUCCESS && current != nullptr &&
      driver()->cuCtxGetDevice_(&device) == CUDA_SUCCESS &&
      (attributes.device < 0 || attributes.device == device)) {
    seen().keep(device, current);
    return current;
  }
  if (attributes.device < 0) return nullptr;
  if (const CUcontext context = seen().of(attributes.device); context != nullptr) return context;
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

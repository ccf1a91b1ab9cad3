// SPDX-License-Identifier: BSD-3-Clause
// A CUDA driver for machines without one, so that staging can be tested there: its "device memory"
// is ordinary memory that nobody may touch. It is mapped twice, once without any access, which is
// what programs and MPI see, and once for the driver's copies. So an MPI that is handed a device
// buffer crashes, as with a real GPU. It is an old driver: of what kernels take it has nothing, and
// so all buffers are staged. Besides it has the few functions that the test programs call
// (TEST_DEVICE names this file to them), and streams.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Area {
  std::size_t bytes = 0;
  char* behind = nullptr;  // device: where its bytes can be reached
  unsigned long long id = 0;
};

class Areas {
 public:
  void* allocate(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    bytes = (bytes + page - 1) / page * page;
    const int file = memfd_create("device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
    void* const front = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* const behind = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (front == MAP_FAILED || behind == MAP_FAILED) return nullptr;
    const std::lock_guard lock(mutex_);
    device_[static_cast<char*>(front)] = {bytes, static_cast<char*>(behind), ++last_id_};
    return front;
  }
  bool free(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = device_.find(static_cast<char*>(memory));
    if (found == device_.end()) return false;
    munmap(found->second.behind, found->second.bytes);
    munmap(memory, found->second.bytes);
    device_.erase(found);
    return true;
  }
  void* allocate_pinned(std::size_t bytes) {
    // Not from the heap: some MPIs write beyond what they allocate there.
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    const std::lock_guard lock(mutex_);
    pinned_[static_cast<char*>(memory)] = {bytes, nullptr, ++last_id_};
    return memory;
  }
  bool free_pinned(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = pinned_.find(static_cast<char*>(memory));
    if (found == pinned_.end()) return false;
    munmap(memory, found->second.bytes);
    pinned_.erase(found);
    return true;
  }

  /// All that there is, is gone.
  void reset() {
    const std::lock_guard lock(mutex_);
    for (const auto& [at, area] : pinned_) munmap(at, area.bytes);
    for (const auto& [at, area] : device_) {
      munmap(area.behind, area.bytes);
      munmap(at, area.bytes);
    }
    pinned_.clear();
    device_.clear();
  }

  struct Kind {
    unsigned type = 0;  // CUmemorytype, or zero: none of these
    unsigned long long id = 0;
  };
  Kind kind(const void* pointer) {
    const std::lock_guard lock(mutex_);
    if (const auto* const area = find(device_, pointer))
      return {CU_MEMORYTYPE_DEVICE, area->second.id};
    if (const auto* const area = find(pinned_, pointer))
      return {CU_MEMORYTYPE_HOST, area->second.id};
    return {};
  }
  bool copy(void* to, const void* from, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    char* const target = reach(to, bytes);
    const char* const source = reach(from, bytes);
    if (target == nullptr || source == nullptr) return false;
    std::memmove(target, source, bytes);
    return true;
  }

 private:
  using Map = std::map<char*, Area>;

  static Map::value_type* find(Map& map, const void* pointer) {
    auto* const at = static_cast<char*>(const_cast<void*>(pointer));
    auto found = map.upper_bound(at);
    if (found == map.begin()) return nullptr;
    --found;
    return at < found->first + found->second.bytes ? &*found : nullptr;
  }
  /// Null: the bytes go beyond an allocation.
  char* reach(const void* pointer, std::size_t bytes) {
    auto* const at = static_cast<char*>(const_cast<void*>(pointer));
    auto* const area = find(device_, pointer);
    if (area == nullptr) return at;
    const auto offset = static_cast<std::size_t>(at - area->first);
    if (offset + bytes > area->second.bytes) return nullptr;
    return area->second.behind + offset;
  }

  std::mutex mutex_;
  Map device_, pinned_;
  unsigned long long last_id_ = 0;
};

Areas& areas() {
  static auto& areas = *new Areas;
  return areas;
}

/// The contexts that are current in a thread, the last one on top. There is but one to be had.
thread_local std::vector<CUcontext> current;
bool is_used = false;
std::atomic<int> functions_running{0};

CUcontext the_context() { return reinterpret_cast<CUcontext>(&areas()); }
void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

/// Most functions want a context.
template <class Function>
CUresult in_context(Function function) {
  if (current.empty() || current.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return function() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the stand-in";
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = 11000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::strncpy(name, "stand-in", static_cast<std::size_t>(length));
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice) {
  *bytes = std::size_t{1} << 30;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute, CUdevice, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = is_used;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  is_used = true;
  *context = the_context();
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxReset(CUdevice) {
  areas().reset();
  return CUDA_SUCCESS;
}
CUresult cuCtxCreate_v2(CUcontext* context, unsigned, CUdevice) {
  *context = the_context();
  current.push_back(*context);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  if (!current.empty()) current.pop_back();
  current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current.empty() ? nullptr : current.back();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return in_context([] { return true; });
}
CUresult cuCtxPushCurrent(CUcontext context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* memory, std::size_t bytes) {
  return in_context([&] {
    *memory = reinterpret_cast<CUdeviceptr>(areas().allocate(bytes));
    return *memory != 0;
  });
}
CUresult cuMemFree(CUdeviceptr memory) {
  return in_context([&] { return areas().free(pointer(memory)); });
}
CUresult cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return in_context([&] {
    *memory = areas().allocate_pinned(bytes);
    return *memory != nullptr;
  });
}
CUresult cuMemFreeHost(void* memory) {
  return in_context([&] { return areas().free_pinned(memory); });
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* wanted, void** values,
                                CUdeviceptr address) {
  const auto [type, id] = areas().kind(pointer(address));
  for (unsigned i = 0; i < count; ++i) {
    switch (wanted[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned*>(values[i]) = type;
        break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *static_cast<bool*>(values[i]) = false;
        break;
      case CU_POINTER_ATTRIBUTE_CONTEXT:
        *static_cast<CUcontext*>(values[i]) = type != 0 ? the_context() : nullptr;
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(values[i]) = type != 0 ? 0 : -2;
        break;
      case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *static_cast<unsigned long long*>(values[i]) = id;
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

// All that is enqueued is done at once, but for functions on the host, which the rest comes behind.
CUresult cuLaunchHostFunc(CUstream, CUhostFn function, void* data) {
  ++functions_running;
  std::thread([=] {
    function(data);
    --functions_running;
  }).detach();
  return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream) {
  return functions_running == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamSynchronize(CUstream) {
  while (functions_running != 0) std::this_thread::yield();
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned) {
  *event = reinterpret_cast<CUevent>(&areas());
  return in_context([] { return true; });
}
CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent) { return cuStreamQuery(nullptr); }
CUresult cuEventDestroy(CUevent) { return CUDA_SUCCESS; }
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  cuStreamSynchronize(stream);
  return in_context([&] { return areas().copy(pointer(to), pointer(from), bytes); });
}
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return cuMemcpyAsync(to, from, bytes, nullptr);
}
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* rows, CUstream stream) {
  cuStreamSynchronize(stream);
  return in_context([&] {
    const bool is_up = rows->dstMemoryType == CU_MEMORYTYPE_DEVICE;
    auto* to = static_cast<char*>(is_up ? pointer(rows->dstDevice) : rows->dstHost);
    auto* from = static_cast<const char*>(is_up ? rows->srcHost : pointer(rows->srcDevice));
    for (std::size_t row = 0; row < rows->Height; ++row)
      if (!areas().copy(to + row * rows->dstPitch, from + row * rows->srcPitch, rows->WidthInBytes))
        return false;
    return true;
  });
}
CUresult cuStreamCreate(CUstream* stream, unsigned) {
  *stream = reinterpret_cast<CUstream>(&areas());
  return in_context([] { return true; });
}
CUresult cuStreamDestroy(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return CUDA_SUCCESS;
}
}

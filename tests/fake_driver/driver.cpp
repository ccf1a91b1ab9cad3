// SPDX-License-Identifier: BSD-3-Clause
// A CUDA driver without GPUs, as much of it as `trib info` asks. FAKE_GPUS says how many there are
// (2), FAKE_CAPABILITY of which compute capability (90), FAKE_LINKS how they are linked (nvlink,
// pcie, none), FAKE_NO names functions that are refused. Fabric handles are, always, with error
// 800, as where nobody runs IMEX. Memory that is not given back before the context is ends the
// process.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <unistd.h>

namespace {

int allocated = 0, retained = 0;

std::string setting(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

int gpus() { return std::atoi(setting("FAKE_GPUS", "2").c_str()); }

bool is_refused(const char* function) {
  return ("," + setting("FAKE_NO", "") + ",").find("," + std::string(function) + ",") !=
         std::string::npos;
}

CUresult allocate(void* pointer, const char* function) {
  if (retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (is_refused(function)) return CUDA_ERROR_NOT_SUPPORTED;
  const std::size_t address = 0x700000000 + static_cast<std::size_t>(++allocated) * (2 << 20);
  std::memcpy(pointer, &address, sizeof address);
  return CUDA_SUCCESS;
}

CUresult give_back() {
  --allocated;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return gpus() == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char** text) {
  switch (static_cast<int>(error)) {
    case CUDA_ERROR_NO_DEVICE:
      *text = "no CUDA-capable device is detected";
      break;
    case CUDA_ERROR_NOT_PERMITTED:
      *text = "operation not permitted";
      break;
    case CUDA_ERROR_NOT_SUPPORTED:
      *text = "operation not supported";
      break;
    default:
      *text = "something else";
  }
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = gpus();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return index < gpus() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(length), "Fake H200");
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice) {
  *bytes = std::size_t{140} << 30;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* id, CUdevice device) {
  for (int i = 0; i < 16; ++i) id->bytes[i] = static_cast<char>(0xa0 + i + device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  std::snprintf(id, static_cast<std::size_t>(length), "FA4E:%02X:00.0", 0x1a + device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const int capability = std::atoi(setting("FAKE_CAPABILITY", "90").c_str());
  switch (static_cast<int>(attribute)) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = capability / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = capability % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
      *value = setting("FAKE_MPS", "0") == "1";
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice, CUdevice) {
  const std::string links = setting("FAKE_LINKS", "nvlink");
  *value =
      attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ? links != "none" : links == "nvlink";
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  if (is_refused("cuDevicePrimaryCtxRetain")) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  ++retained;
  *context = reinterpret_cast<CUcontext>(&retained);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  if (allocated != 0) {
    std::fprintf(stderr, "fake driver: %d allocations were not given back\n", allocated);
    std::abort();
  }
  --retained;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* pointer, std::size_t) { return allocate(pointer, "cuMemAlloc"); }
CUresult cuMemFree(CUdeviceptr) { return give_back(); }
CUresult cuMemAllocAsync(CUdeviceptr* pointer, std::size_t, CUstream) {
  return allocate(pointer, "cuMemAllocAsync");
}
CUresult cuMemFreeAsync(CUdeviceptr, CUstream) { return give_back(); }
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuMemHostAlloc(void** pointer, std::size_t, unsigned) {
  return allocate(pointer, "cuMemHostAlloc");
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void*, unsigned) {
  *address = 1;
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void*) { return give_back(); }

CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr) {
  std::memset(handle, 0, sizeof *handle);
  return is_refused("cuIpcGetMemHandle") ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, std::size_t bytes,
                     const CUmemAllocationProp* wanted, unsigned long long) {
  if (wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_PERMITTED;
  if (bytes % (2 << 20) != 0) return CUDA_ERROR_INVALID_VALUE;
  return allocate(memory, "cuMemCreate");
}

CUresult cuMemExportToShareableHandle(void* handle, CUmemGenericAllocationHandle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  if (is_refused("cuMemExportToShareableHandle")) return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<int*>(handle) = ::dup(0);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle) { return give_back(); }

}  // extern "C"

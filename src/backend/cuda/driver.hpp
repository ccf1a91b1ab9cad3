// SPDX-License-Identifier: BSD-3-Clause
// The CUDA driver, looked up at run time: the module loads on machines that have none. The only
// place, with the rest of this folder, that sees cuda.h.
#pragma once

#include <cuda.h>

#include <compare>
#include <cstdint>
#include <string>

#include "base/error.hpp"

namespace trib::cuda {

/// What tells where buffers are and copies them: drivers since CUDA 11.0 have it.
#define TRIB_DRIVER_TO_STAGE(X) \
  X(cuCtxGetCurrent)            \
  X(cuCtxGetDevice)             \
  X(cuCtxPopCurrent)            \
  X(cuCtxPushCurrent)           \
  X(cuDeviceGet)                \
  X(cuDeviceGetCount)           \
  X(cuDeviceGetName)            \
  X(cuDeviceGetP2PAttribute)    \
  X(cuDevicePrimaryCtxGetState) \
  X(cuDevicePrimaryCtxRelease)  \
  X(cuDevicePrimaryCtxRetain)   \
  X(cuDeviceTotalMem)           \
  X(cuDriverGetVersion)         \
  X(cuEventCreate)              \
  X(cuEventDestroy)             \
  X(cuEventQuery)               \
  X(cuEventRecord)              \
  X(cuGetErrorString)           \
  X(cuInit)                     \
  X(cuMemFreeHost)              \
  X(cuMemHostAlloc)             \
  X(cuMemcpy2DAsync)            \
  X(cuMemcpyAsync)              \
  X(cuPointerGetAttributes)     \
  X(cuStreamCreate)             \
  X(cuStreamDestroy)            \
  X(cuStreamIsCapturing)        \
  X(cuStreamQuery)              \
  X(cuStreamSynchronize)        \
  X(cuThreadExchangeStreamCaptureMode)

/// What kernels and copy engines take besides, some of it since CUDA 13.
#define TRIB_DRIVER_FOR_KERNELS(X)  \
  X(cuCtxGetId)                     \
  X(cuCtxEnablePeerAccess)          \
  X(cuCtxGetStreamPriorityRange)    \
  X(cuCtxSynchronize)               \
  X(cuDeviceGetAttribute)           \
  X(cuDeviceGetUuid)                \
  X(cuDeviceGetPCIBusId)            \
  X(cuEventSynchronize)             \
  X(cuFuncGetAttribute)             \
  X(cuGraphAddKernelNode)           \
  X(cuGraphCreate)                  \
  X(cuGraphDestroy)                 \
  X(cuGraphExecDestroy)             \
  X(cuGraphExecKernelNodeSetParams) \
  X(cuGraphInstantiate)             \
  X(cuGraphKernelNodeSetAttribute)  \
  X(cuGraphLaunch)                  \
  X(cuGraphRetainUserObject)        \
  X(cuIpcCloseMemHandle)            \
  X(cuIpcGetMemHandle)              \
  X(cuIpcOpenMemHandle)             \
  X(cuLaunchKernel)                 \
  X(cuMemAddressFree)               \
  X(cuMemAddressReserve)            \
  X(cuMemAlloc)                     \
  X(cuMemAllocAsync)                \
  X(cuMemCreate)                    \
  X(cuMemExportToShareableHandle)   \
  X(cuMemFree)                      \
  X(cuMemFreeAsync)                 \
  X(cuMemGetAddressRange)           \
  X(cuMemGetAllocationGranularity)  \
  X(cuMemHostGetDevicePointer)      \
  X(cuMemHostRegister)              \
  X(cuMemHostUnregister)            \
  X(cuMemImportFromShareableHandle) \
  X(cuMemMap)                       \
  X(cuMemRelease)                   \
  X(cuMemRetainAllocationHandle)    \
  X(cuMemSetAccess)                 \
  X(cuMemUnmap)                     \
  X(cuMemcpyBatchAsync)             \
  X(cuMemsetD8Async)                \
  X(cuMemsetD32Async)               \
  X(cuModuleGetFunction)            \
  X(cuModuleLoadData)               \
  X(cuModuleUnload)                 \
  X(cuPointerSetAttribute)          \
  X(cuStreamCreateWithPriority)     \
  X(cuStreamGetCaptureInfo)         \
  X(cuStreamGetId)                  \
  X(cuStreamWaitEvent)              \
  X(cuStreamWriteValue64)           \
  X(cuUserObjectCreate)             \
  X(cuUserObjectRelease)

struct Driver {
#define TRIB_MEMBER(name) decltype(&::name) name##_ = nullptr;
  TRIB_DRIVER_TO_STAGE(TRIB_MEMBER)
  TRIB_DRIVER_FOR_KERNELS(TRIB_MEMBER)
#undef TRIB_MEMBER
  /// Otherwise GPU buffers are staged, and nothing of TRIB_DRIVER_FOR_KERNELS is called.
  bool has_all_for_kernels = true;
};

/// Null as long as the process has not loaded the driver, or if it cannot even stage.
const Driver* driver();
/// The same, and loads it: for trib info, and programs that asked for a GPU. Null: `why` says what
/// was missing.
const Driver* load_driver(std::string& why);
const Driver* load_driver();

/// "13.0"
std::string driver_version(const Driver& driver);
/// In words; empty if it is not.
std::string too_old_for_kernels(const Driver& driver);

/// "out of memory (CUDA error 2)"
std::string describe(CUresult result);

/// Throws Error(Code::device): "cuda: WHAT: out of memory".
inline void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) [[unlikely]]
    throw Error(Code::device, std::string("cuda: ") + what + ": " + describe(result));
}

/// A context for as long as it lives: after cudaDeviceReset() another one may have its handle.
struct ContextId {
  CUcontext handle = nullptr;
  unsigned long long id = 0;

  /// Throws Error.
  static ContextId of(CUcontext context);
  /// As far as the driver can tell: an old one has no ids.
  bool is_there() const noexcept {
    unsigned long long now = 0;
    if (!driver()->has_all_for_kernels) return true;
    return driver()->cuCtxGetId_(handle, &now) == CUDA_SUCCESS && now == id;
  }
  /// The handle. Throws Error if the context is gone.
  CUcontext known_to_be_there() const;
  auto operator<=>(const ContextId&) const = default;
};

/// Sets every byte, in the current context, and waits for that. Not by the default stream, where
/// it would end the capture of any stream that is ordered with it.
void fill(CUdeviceptr memory, unsigned char value, std::size_t bytes);

/// The stream for a copy that the host waits for: the default stream, behind whose work programs
/// expect it, or one of its own where that would end the capture of a stream that is ordered with
/// it. What the default stream had to do before such a capture began is then not waited for: nobody
/// can look at it.
class CopyStream {
 public:
  CopyStream();
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  CUstream get() const { return stream_; }
  void wait() const;

 private:
  CUstream stream_ = nullptr;
};

/// Whether nothing is under way on the default stream of the current context, as far as can be said
/// without harm: a look at it would break the capture of any stream that is ordered with it.
bool is_default_stream_idle();
/// Whether something is, likewise.
bool is_default_stream_busy();

/// While it lives, `context` is current in this thread and the driver may be asked for things that
/// another thread's stream capture would forbid. Leaves the thread as it was.
class Current {
 public:
  explicit Current(CUcontext context);
  /// To give back what was made in it. Throws Error if it is gone: then another one's, at the same
  /// addresses, is to be left alone.
  explicit Current(const ContextId& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  bool is_pushed_ = false;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/driver.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <mutex>
#include <type_traits>

#include "base/log.hpp"

namespace trib::cuda {
namespace {

const Driver* look_up(int flags, std::string& why) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY | flags);
  if (library == nullptr) {
    if (flags == 0) why = std::string("no driver: ") + ::dlerror();
    return nullptr;
  }
  static auto& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  static auto& driver = *new Driver;
  const char* missing = nullptr;
  // Whether it is there.
  const auto find = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
#define TRIB_TEXT2(name) #name
#define TRIB_TEXT(name) TRIB_TEXT2(name)
  // The name in cuda.h may be a macro for the version in use, such as cuMemAlloc_v2.
#define TRIB_LOOK_UP(name) \
  if (!find(driver.name##_, TRIB_TEXT(name))) missing = TRIB_TEXT(name);
  TRIB_DRIVER_FOR_KERNELS(TRIB_LOOK_UP)
  driver.has_all_for_kernels = missing == nullptr;
  missing = nullptr;
  TRIB_DRIVER_TO_STAGE(TRIB_LOOK_UP)
  if (missing != nullptr) {
    why = std::string("the CUDA driver is too old even to stage GPU buffers, it lacks ") + missing;
    log_once(Config::Log::warn, why);
    return nullptr;
  }
  return &driver;  // the library stays open: its functions must not go away
}

std::atomic<const Driver*> found{nullptr};

std::string text_of(const Driver& driver, CUresult result) {
  const char* text = nullptr;
  if (driver.cuGetErrorString_(result, &text) != CUDA_SUCCESS || text == nullptr)
    text = "unknown error";
  return std::string(text) + " (CUDA error " + std::to_string(static_cast<int>(result)) + ")";
}

/// How often libraries were loaded into this process.
unsigned long long loads() {
  unsigned long long count = 0;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        *static_cast<unsigned long long*>(result) = info->dlpi_adds;
        return 1;  // every entry says the same
      },
      &count);
  return count;
}

}  // namespace

const Driver* driver() {
  const Driver* const known = found.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  // Never loaded by us: a program that does not use the GPU must not pay for its driver. Looking
  // for it takes a microsecond, so only when there are new libraries.
  static std::atomic<unsigned long long> seen{0};
  const unsigned long long present = loads();
  // Acquire: pairs with the release below; what that look has found comes with it.
  if (seen.load(std::memory_order_acquire) == present) return found.load(std::memory_order_acquire);
  std::string why;
  const Driver* const now = look_up(RTLD_NOLOAD, why);
  if (now != nullptr) found.store(now, std::memory_order_release);
  seen.store(present, std::memory_order_release);
  return now;
}

const Driver* load_driver(std::string& why) {
  const Driver* now = driver();
  if (now == nullptr) now = look_up(0, why);
  if (now == nullptr) return nullptr;
  if (const CUresult result = now->cuInit_(0); result != CUDA_SUCCESS) {
    why = "the driver does not start: " + text_of(*now, result);
    return nullptr;
  }
  found.store(now, std::memory_order_release);
  return now;
}

const Driver* load_driver() {
  std::string why;
  return load_driver(why);
}

std::string driver_version(const Driver& driver) {
  int version = 0;
  driver.cuDriverGetVersion_(&version);
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string too_old_for_kernels(const Driver& driver) {
  if (driver.has_all_for_kernels) return {};
  return "the driver, for CUDA " + driver_version(driver) +
         ", is too old for kernels, which take CUDA 13 (580) or newer";
}

std::string describe(CUresult result) {
  const Driver* const known = found.load(std::memory_order_acquire);
  if (known != nullptr) return text_of(*known, result);
  return "unknown error (CUDA error " + std::to_string(static_cast<int>(result)) + ")";
}

ContextId ContextId::of(CUcontext context) {
  ContextId made{context, 0};
  if (!driver()->has_all_for_kernels) return made;
  check(driver()->cuCtxGetId_(context, &made.id), "cannot tell the context");
  return made;
}

CUcontext ContextId::known_to_be_there() const {
  if (!is_there()) throw Error(Code::device, "cuda: the context is gone");
  return handle;
}

void fill(CUdeviceptr memory, unsigned char value, std::size_t bytes) {
  const Driver& known = *driver();
  CUstream stream = nullptr;
  check(known.cuStreamCreate_(&stream, CU_STREAM_NON_BLOCKING), "cannot create a stream");
  CUresult result = known.cuMemsetD8Async_(memory, value, bytes, stream);
  if (result == CUDA_SUCCESS) result = known.cuStreamSynchronize_(stream);
  known.cuStreamDestroy_(stream);
  check(result, "cannot clear memory");
}

namespace {

/// Whether some stream that is ordered with it is.
bool is_default_stream_captured() {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  return driver()->cuStreamIsCapturing_(CU_STREAM_LEGACY, &capture) != CUDA_SUCCESS ||
         capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace

CopyStream::CopyStream() {
  if (is_default_stream_captured())
    check(driver()->cuStreamCreate_(&stream_, CU_STREAM_NON_BLOCKING), "cannot create a stream");
}
CopyStream::~CopyStream() {
  if (stream_ != nullptr) driver()->cuStreamDestroy_(stream_);
}
void CopyStream::wait() const {
  check(driver()->cuStreamSynchronize_(stream_), "cannot copy between host and device");
}

bool is_default_stream_busy() {
  return !is_default_stream_captured() &&
         driver()->cuStreamQuery_(CU_STREAM_LEGACY) == CUDA_ERROR_NOT_READY;
}

bool is_default_stream_idle() {
  return !is_default_stream_captured() &&
         driver()->cuStreamQuery_(CU_STREAM_LEGACY) == CUDA_SUCCESS;
}

Current::Current(const ContextId& context) : Current(context.known_to_be_there()) {}

Current::Current(CUcontext context) : driver_(*driver()) {
  CUcontext now = nullptr;
  if (driver_.cuCtxGetCurrent_(&now) != CUDA_SUCCESS || now != context) {
    check(driver_.cuCtxPushCurrent_(context), "cannot enter the context");
    is_pushed_ = true;
  }
  driver_.cuThreadExchangeStreamCaptureMode_(&mode_);
}

Current::~Current() {
  driver_.cuThreadExchangeStreamCaptureMode_(&mode_);
  CUcontext popped = nullptr;
  if (is_pushed_) driver_.cuCtxPopCurrent_(&popped);
}

}  // namespace trib::cuda

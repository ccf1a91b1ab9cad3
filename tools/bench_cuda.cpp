// SPDX-License-Identifier: BSD-3-Clause
#include "bench_cuda.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace trib::bench::cuda {
namespace {

using Status = int;                  // CUresult: an enum; 0 is success
using Ordinal = int;                 // CUdevice
using Address = unsigned long long;  // CUdeviceptr
struct Uuid {                        // CUuuid
  std::array<unsigned char, 16> bytes;
};

constexpr Status kNoDevice = 100;           // CUDA_ERROR_NO_DEVICE
constexpr unsigned kNonBlockingStream = 1;  // CU_STREAM_NON_BLOCKING
constexpr int kCaptureModeOfThread = 1;     // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

// The suffix _v2 belongs to the name: cuda.h hides it behind macros, and the names without it are
// those of CUDA 3, with 32-bit addresses.
// clang-format off
#define TRIB_CUDA_FUNCTIONS(X)                                                        \
  X(cuInit,                      (unsigned flags))                                    \
  X(cuDriverGetVersion,          (int* version))                                      \
  X(cuGetErrorName,              (Status status, const char** text))                  \
  X(cuGetErrorString,            (Status status, const char** text))                  \
  X(cuDeviceGetCount,            (int* count))                                        \
  X(cuDeviceGet,                 (Ordinal* device, int index))                        \
  X(cuDeviceGetName,             (char* name, int length, Ordinal device))            \
  X(cuDeviceGetUuid_v2,          (Uuid* uuid, Ordinal device))                        \
  X(cuDevicePrimaryCtxRetain,    (CUctx_st** context, Ordinal device))                \
  X(cuCtxSetCurrent,             (CUctx_st* context))                                 \
  X(cuCtxSynchronize,            ())                                                  \
  X(cuMemAlloc_v2,               (Address* memory, std::size_t bytes))                \
  X(cuMemFree_v2,                (Address memory))                                    \
  X(cuMemHostAlloc,              (void** memory, std::size_t bytes, unsigned flags))  \
  X(cuMemFreeHost,               (void* memory))                                      \
  X(cuMemcpyHtoD_v2,             (Address to, const void* from, std::size_t bytes))   \
  X(cuMemcpyDtoH_v2,             (void* to, Address from, std::size_t bytes))         \
  X(cuMemsetD8_v2,               (Address to, unsigned char value, std::size_t bytes)) \
  X(cuStreamCreate,              (CUstream_st** stream, unsigned flags))              \
  X(cuStreamSynchronize,         (CUstream_st* stream))                               \
  X(cuStreamDestroy_v2,          (CUstream_st* stream))                               \
  X(cuStreamBeginCapture_v2,     (CUstream_st* stream, int mode))                     \
  X(cuStreamEndCapture,          (CUstream_st* stream, CUgraph_st** graph))           \
  X(cuGraphInstantiateWithFlags, (CUgraphExec_st** executable, CUgraph_st* graph, unsigned long long flags)) \
  X(cuGraphUpload,               (CUgraphExec_st* executable, CUstream_st* stream))   \
  X(cuGraphLaunch,               (CUgraphExec_st* executable, CUstream_st* stream))   \
  X(cuGraphExecDestroy,          (CUgraphExec_st* executable))                        \
  X(cuGraphDestroy,              (CUgraph_st* graph))
// clang-format on

struct Driver {
#define TRIB_MEMBER(function, arguments) Status(*function) arguments = nullptr;
  TRIB_CUDA_FUNCTIONS(TRIB_MEMBER)
#undef TRIB_MEMBER
};

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library)
    throw std::runtime_error(std::string("--memory cuda: there is no CUDA driver here: ") +
                             dlerror());
  Driver driver;
#define TRIB_LOAD(function, arguments)                                                \
  driver.function = reinterpret_cast<Status(*) arguments>(dlsym(library, #function)); \
  if (!driver.function)                                                               \
    throw std::runtime_error("--memory cuda: this CUDA driver is too old: it has no " #function);
  TRIB_CUDA_FUNCTIONS(TRIB_LOAD)
#undef TRIB_LOAD
  return driver;
}

/// Stays loaded for good.
const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

void check(Status status, const char* what) {
  if (status == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(status, &name);
  driver().cuGetErrorString(status, &text);
  throw std::runtime_error(std::string("cuda: ") + what + ": " + (text ? text : "unknown error") +
                           " (" + (name ? name : std::to_string(status).c_str()) + ")");
}

Address address(const void* memory) { return reinterpret_cast<Address>(memory); }

bool is_unwinding() { return std::uncaught_exceptions() > 0; }

/// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...": the
/// driver API does not tell this version.
std::string module_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line, word;
  std::getline(file, line);
  for (std::istringstream words(line); words >> word;)
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos)
      return word;
  return "";
}

}  // namespace

Device::Device(int local_rank) {
  const Driver& api = driver();
  int count = 0;
  Status status = api.cuInit(0);
  if (status == 0) status = api.cuDeviceGetCount(&count);
  if (status == kNoDevice || (status == 0 && count == 0))
    throw std::runtime_error(
        "--memory cuda: the CUDA driver finds no GPU here (CUDA_VISIBLE_DEVICES may hide it)");
  check(status, "cuInit");

  Ordinal device = 0;
  check(api.cuDeviceGet(&device, local_rank % count), "cuDeviceGet");
  CUctx_st* context = nullptr;  // never released: the process ends with it
  check(api.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(api.cuCtxSetCurrent(context), "cuCtxSetCurrent");

  std::array<char, 256> text{};
  check(api.cuDeviceGetName(text.data(), static_cast<int>(text.size()) - 1, device),
        "cuDeviceGetName");
  name = text.data();
  Uuid id{};
  check(api.cuDeviceGetUuid_v2(&id, device), "cuDeviceGetUuid");
  for (const unsigned char byte : id.bytes) {
    std::snprintf(text.data(), text.size(), "%02x", byte);
    uuid += text.data();
  }
  int number = 0;
  check(api.cuDriverGetVersion(&number), "cuDriverGetVersion");
  cuda_version = std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  driver_version = module_version();
}

Allocation::Allocation(Kind kind, std::size_t bytes) : kind_(kind) {
  const std::string of = " of " + std::to_string(bytes) + " bytes";
  if (kind == Kind::device) {
    Address memory = 0;
    check(driver().cuMemAlloc_v2(&memory, bytes), ("cuMemAlloc" + of).c_str());
    memory_ = reinterpret_cast<void*>(memory);
  } else {
    check(driver().cuMemHostAlloc(&memory_, bytes, 0), ("cuMemHostAlloc" + of).c_str());
  }
}

Allocation::~Allocation() {
  if (is_unwinding()) return;
  if (kind_ == Kind::device)
    driver().cuMemFree_v2(address(memory_));
  else
    driver().cuMemFreeHost(memory_);
}

void copy_to_device(void* device, const void* host, std::size_t bytes) {
  check(driver().cuMemcpyHtoD_v2(address(device), host, bytes), "cuMemcpyHtoD");
}

void copy_to_host(void* host, const void* device, std::size_t bytes) {
  check(driver().cuMemcpyDtoH_v2(host, address(device), bytes), "cuMemcpyDtoH");
}

void fill(void* device, unsigned char value, std::size_t bytes) {
  check(driver().cuMemsetD8_v2(address(device), value, bytes), "cuMemsetD8");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

Stream::Stream() { check(driver().cuStreamCreate(&stream_, kNonBlockingStream), "cuStreamCreate"); }

Stream::~Stream() {
  if (!is_unwinding()) driver().cuStreamDestroy_v2(stream_);
}

void Stream::synchronize() const {
  check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

Graph::Graph(const Stream& stream, const std::function<void()>& enqueue) {
  const Driver& api = driver();
  // Only this thread's calls are restricted meanwhile: libraries may have threads of their own.
  check(api.cuStreamBeginCapture_v2(stream.get(), kCaptureModeOfThread), "cuStreamBeginCapture");
  enqueue();
  CUgraph_st* graph = nullptr;
  check(api.cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  check(api.cuGraphInstantiateWithFlags(&executable_, graph, 0), "cuGraphInstantiate");
  check(api.cuGraphDestroy(graph), "cuGraphDestroy");
  check(api.cuGraphUpload(executable_, stream.get()), "cuGraphUpload");
  stream.synchronize();
}

Graph::~Graph() {
  if (!is_unwinding()) driver().cuGraphExecDestroy(executable_);
}

void Graph::launch(const Stream& stream) const {
  check(driver().cuGraphLaunch(executable_, stream.get()), "cuGraphLaunch");
}

}  // namespace trib::bench::cuda

// SPDX-License-Identifier: BSD-3-Clause
// The backend for NVIDIA GPUs, as a loadable module. channel.hpp comes next.
#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <string>

#include "backend/backend.hpp"
#include "backend/cuda/canonical.hpp"
#include "backend/cuda/channel.hpp"
#include "backend/cuda/inventory.hpp"
#include "backend/cuda/memory.hpp"
#include "backend/cuda/peer_memory.hpp"
#include "backend/cuda/unsettled.hpp"

namespace trib::cuda {
namespace {

/// "NVIDIA H200 (140 GiB)"
std::string model(const Driver& driver, int index) {
  CUdevice device = 0;
  char name[128] = {};
  std::size_t bytes = 0;
  if (driver.cuDeviceGet_(&device, index) != CUDA_SUCCESS ||
      driver.cuDeviceGetName_(name, sizeof name - 1, device) != CUDA_SUCCESS ||
      driver.cuDeviceTotalMem_(&bytes, device) != CUDA_SUCCESS)
    return "unknown GPU";
  return std::string(name) + " (" + std::to_string(bytes >> 30) + " GiB)";
}

/// How many pairs of GPUs can reach each other's memory, and over what.
std::string links(const Driver& driver, int count) {
  int pairs = 0, reached = 0, fast = 0;
  for (int i = 0; i < count; ++i) {
    for (int j = i + 1; j < count; ++j) {
      CUdevice one = 0, other = 0;
      int access = 0, atomics = 0;
      if (driver.cuDeviceGet_(&one, i) != CUDA_SUCCESS ||
          driver.cuDeviceGet_(&other, j) != CUDA_SUCCESS)
        continue;
      ++pairs;
      if (driver.cuDeviceGetP2PAttribute_(&access, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, one,
                                          other) != CUDA_SUCCESS ||
          access == 0)
        continue;
      ++reached;
      // Atomics on a peer's memory are a mark of NVLink: PCIe has none.
      if (driver.cuDeviceGetP2PAttribute_(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
                                          one, other) == CUDA_SUCCESS &&
          atomics != 0)
        ++fast;
    }
  }
  if (pairs == 0) return "";
  return "; peer access: " + std::to_string(reached) + " of " + std::to_string(pairs) +
         " pairs, NVLink: " + std::to_string(fast);
}

class Cuda final : public DeviceBackend {
 public:
  std::string_view name() const override { return "cuda"; }

  std::string describe() const override {
    std::string why;
    const Driver* const driver = load_driver(why);
    if (driver == nullptr) return why;
    const std::string found = hardware();
    return "driver for CUDA " + driver_version(*driver) +
           (driver->has_all_for_kernels ? "" : ", too old for kernels") + "; " +
           (found.empty() ? "no GPU" : found);
  }

  std::string inventory(const Config& config) const override { return cuda::inventory(config); }

  std::string hardware() const override {
    const Driver* const driver = cuda::driver();
    int count = 0;
    if (driver == nullptr || driver->cuDeviceGetCount_(&count) != CUDA_SUCCESS) return "no GPU";
    std::map<std::string, int> models;
    for (int i = 0; i < count; ++i) ++models[model(*driver, i)];
    std::string names;
    for (const auto& [name, number] : models)
      names += (names.empty() ? "" : ", ") + std::to_string(number) + " x " + name;
    return names + links(*driver, count);
  }

  bool is_in_use(std::span<const void* const> buffers) const override {
    // Once it does it is taken to go on, whichever thread asks with whatever buffers.
    static std::atomic<bool> was_in_use{false};
    if (was_in_use.load(std::memory_order_relaxed)) return true;
    const bool is_now = finds_use(buffers);
    if (is_now) was_in_use.store(true, std::memory_order_relaxed);
    return is_now;
  }

  static bool finds_use(std::span<const void* const> buffers) {
    const Driver* const driver = cuda::driver();
    if (driver == nullptr) return false;
    CUcontext current = nullptr;
    if (driver->cuCtxGetCurrent_(&current) == CUDA_SUCCESS && current != nullptr) return true;
    int count = 0;
    if (driver->cuDeviceGetCount_(&count) != CUDA_SUCCESS) return false;  // not initialised
    for (int i = 0; i < count; ++i) {
      CUdevice device = 0;
      unsigned flags = 0;
      int is_active = 0;
      if (driver->cuDeviceGet_(&device, i) == CUDA_SUCCESS &&
          driver->cuDevicePrimaryCtxGetState_(device, &flags, &is_active) == CUDA_SUCCESS &&
          is_active != 0)
        return true;
    }
    // Of another context, which is current in other threads only.
    return std::any_of(buffers.begin(), buffers.end(),
                       [](const void* buffer) { return cuda::where(buffer) == Memory::device; });
  }

  Memory where(const void* pointer) const override { return cuda::where(pointer); }

  std::unique_ptr<Unsettled> unsettled(const void* pointer) const override {
    if (cuda::where(pointer) != Memory::device) return nullptr;
    const CUcontext context = context_of(pointer);
    // Without one nobody can look. The copy itself comes behind its default stream, or fails.
    return context != nullptr ? cuda::unsettled(ContextId::of(context)) : nullptr;
  }

  bool is_defined(Op op, Dtype dtype) const override {
    return is_on_device(dtype) && trib::is_defined(op, dtype);
  }

  std::unique_ptr<trib::DeviceChannel> open(Bootstrap& bootstrap, const Config& config,
                                            const void* pointer, std::string& why) override {
    return Channel::open(bootstrap, config, pointer, why);
  }

  Opening opening(const void* pointer) override {
    ContextId context;
    // Where it is gone, the others hear of it from the channel, which finds none.
    try {
      context = ContextId::of(context_of(pointer));
    } catch (const Error&) {
    }
    return [context](Bootstrap& bootstrap, const Config& config, std::string& why) {
      std::optional<Current> current;
      try {
        current.emplace(context);
      } catch (const Error&) {
      }
      return Channel::open(bootstrap, config, nullptr, why);
    };
  }

  std::uint64_t device_of(const void* pointer) const override {
    const CUcontext context = context_of(pointer);
    if (context == nullptr || !driver()->has_all_for_kernels) return 0;
    const Current current(context);
    CUdevice device = 0;
    CUuuid id{};
    if (driver()->cuCtxGetDevice_(&device) != CUDA_SUCCESS ||
        driver()->cuDeviceGetUuid_(&id, device) != CUDA_SUCCESS)
      return 0;
    std::uint64_t number = 0xcbf29ce484222325u;
    for (const char byte : id.bytes)
      number = (number ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    return number | 1;
  }

  bool load() const override { return load_driver() != nullptr; }

  void copy(void* to, const void* from, std::size_t bytes) const override {
    const Current current(context_for_copy(to, from));
    const CopyStream stream;
    enqueue(to, from, bytes, stream.get());
    stream.wait();
  }

  void copy(std::span<const Rows> pieces) const override {
    if (pieces.empty()) return;
    const bool is_up = cuda::where(pieces[0].to) == Memory::device;
    const Current current(context_of(is_up ? pieces[0].to : pieces[0].from));
    const CopyStream stream;
    for (const Rows& rows : pieces)
      if (rows.count == 1 || !enqueue_rows(rows, is_up, stream.get()))
        for (std::size_t row = 0; row < rows.count; ++row)
          enqueue(static_cast<std::byte*>(rows.to) + row * rows.pitch,
                  static_cast<const std::byte*>(rows.from) + row * rows.pitch, rows.width,
                  stream.get());
    stream.wait();
  }

  void enqueue_copy(void* to, const void* from, std::size_t bytes, Stream stream) const override {
    CUcontext now = nullptr;
    std::optional<Current> current;
    // In a thread of the program's that has made no call of CUDA yet.
    if (driver()->cuCtxGetCurrent_(&now) != CUDA_SUCCESS || now == nullptr)
      current.emplace(context_for_copy(to, from));
    enqueue(to, from, bytes, static_cast<CUstream>(stream));
  }

  CUcontext context_for_copy(const void* to, const void* from) const {
    return context_of(where(to) == Memory::device ? to : from);
  }

  /// In a context.
  static void enqueue(void* to, const void* from, std::size_t bytes, CUstream stream) {
    check(driver()->cuMemcpyAsync_(reinterpret_cast<CUdeviceptr>(to),
                                   reinterpret_cast<CUdeviceptr>(from), bytes, stream),
          "cannot enqueue a copy");
  }

  /// False: rows so far apart, or so many, have to go one by one.
  static bool enqueue_rows(const Rows& rows, bool is_up, CUstream stream) {
    CUDA_MEMCPY2D copy{};
    copy.srcMemoryType = is_up ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    copy.srcHost = rows.from;
    copy.srcDevice = reinterpret_cast<CUdeviceptr>(rows.from);
    copy.dstMemoryType = is_up ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    copy.dstHost = rows.to;
    copy.dstDevice = reinterpret_cast<CUdeviceptr>(rows.to);
    copy.srcPitch = copy.dstPitch = rows.pitch;
    copy.WidthInBytes = rows.width;
    copy.Height = rows.count;
    return driver()->cuMemcpy2DAsync_(&copy, stream) == CUDA_SUCCESS;
  }

  void* allocate_host(std::size_t bytes) const override {
    CUcontext context = context_of(nullptr);
    if (context == nullptr) return nullptr;
    const Current current(context);
    void* memory = nullptr;
    return driver()->cuMemHostAlloc_(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS
               ? memory
               : nullptr;
  }
  void free_host(void* pointer) const noexcept override {
    try {
      const Current current(context_of(pointer));
      driver()->cuMemFreeHost_(pointer);
    } catch (const Error&) {
      // The context is gone, and the memory with it.
    }
  }

  void free_left() const noexcept override { PeerMemory::free_left(); }
};

}  // namespace
}  // namespace trib::cuda

extern "C" __attribute__((visibility("default"))) trib::DeviceBackend* trib_device_backend() {
  static auto* const cuda = new trib::cuda::Cuda;  // never destroyed: MPI may end very late
  return cuda;
}

// SPDX-License-Identifier: BSD-3-Clause
// A device for machines without one, so that staging can be tested there: a backend module whose
// "device memory" is ordinary memory that nobody may touch. It is mapped twice, once without any
// access, which is what programs and MPI see, and once for the copies that a driver would make. So
// an MPI that is handed a device buffer crashes, as with a real GPU. For programs it has the few
// functions of the CUDA driver that gpu.hpp calls (TEST_DEVICE names this file), and streams.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "backend/backend.hpp"

namespace {

using trib::Memory;

struct Area {
  std::size_t bytes = 0;
  char* behind = nullptr;  // device: where its bytes can be reached
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
    device_[static_cast<char*>(front)] = {bytes, static_cast<char*>(behind)};
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
    pinned_[static_cast<char*>(memory)] = {bytes};
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

  Memory where(const void* pointer) {
    const std::lock_guard lock(mutex_);
    if (find(device_, pointer) != nullptr) return Memory::device;
    return find(pinned_, pointer) != nullptr ? Memory::pinned : Memory::host;
  }
  void copy(void* to, const void* from, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::memmove(reach(to, bytes), reach(from, bytes), bytes);
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
  char* reach(const void* pointer, std::size_t bytes) {
    auto* const at = static_cast<char*>(const_cast<void*>(pointer));
    auto* const area = find(device_, pointer);
    if (area == nullptr) return at;
    const auto offset = static_cast<std::size_t>(at - area->first);
    if (offset + bytes > area->second.bytes)
      throw trib::Error(trib::Code::device, "a copy goes beyond an allocation");
    return area->second.behind + offset;
  }

  std::mutex mutex_;
  Map device_, pinned_;
};

Areas& areas() {
  static auto& areas = *new Areas;
  return areas;
}

bool is_used;

class Protected final : public trib::DeviceBackend {
 public:
  std::string_view name() const override { return "protected"; }
  std::string hardware() const override { return "stand-in"; }
  std::string describe() const override { return "memory that nobody may touch"; }
  bool is_in_use() const override { return is_used; }
  Memory where(const void* pointer) const override {
    return pointer == nullptr ? Memory::none : areas().where(pointer);
  }
  bool is_defined(trib::Op, trib::Dtype) const override { return false; }
  std::unique_ptr<trib::DeviceChannel> open(trib::Bootstrap&, const trib::Config&, const void*,
                                            std::string& why) override {
    why = "it has no kernels";
    return nullptr;
  }
  bool load() const override { return true; }
  void copy(void* to, const void* from, std::size_t bytes) const override {
    areas().copy(to, from, bytes);
  }
  void enqueue_copy(void* to, const void* from, std::size_t bytes, trib::Stream) const override {
    areas().copy(to, from, bytes);
  }
  void* allocate_host(std::size_t bytes) const override { return areas().allocate_pinned(bytes); }
  void free_host(void* pointer) const noexcept override { areas().free_pinned(pointer); }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

trib::DeviceBackend* trib_device_backend() {
  static auto* const device = new Protected;
  return device;
}

int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int* device, int) {
  *device = 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &areas();
  return 0;
}
int cuDevicePrimaryCtxReset_v2(int) {
  areas().reset();
  return 0;
}
int cuCtxSetCurrent(void*) {
  is_used = true;
  return 0;
}
int cuMemAlloc_v2(unsigned long long* memory, std::size_t bytes) {
  *memory = reinterpret_cast<unsigned long long>(areas().allocate(bytes));
  return *memory == 0;
}
int cuMemFree_v2(unsigned long long memory) {
  return !areas().free(reinterpret_cast<void*>(memory));
}
int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = areas().allocate_pinned(bytes);
  return *memory == nullptr;
}
int cuMemFreeHost(void* memory) { return !areas().free_pinned(memory); }
int cuMemcpy(unsigned long long to, unsigned long long from, std::size_t bytes) {
  areas().copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
// All that is enqueued is done at once.
int cuStreamCreate(void** stream, unsigned) {
  *stream = &areas();
  return 0;
}
int cuStreamSynchronize(void*) { return 0; }
}
#pragma GCC visibility pop

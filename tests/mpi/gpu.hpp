// SPDX-License-Identifier: BSD-3-Clause
// GPU memory for the MPI test programs, through the CUDA driver looked up at run time: where there
// is none, programs say so and skip. Or what TEST_DEVICE names, in its place.
#pragma once

#include <dlfcn.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "check.hpp"

class Gpu {
 public:
  /// This rank's GPU: its number on the node, modulo the number of GPUs. Makes its context current.
  static Gpu& get() {
    static Gpu gpu;
    return gpu;
  }
  bool is_here() const { return count_ > 0; }
  int count() const { return count_; }

  void* allocate(std::size_t bytes) {
    unsigned long long memory = 0;
    CHECK(call("cuMemAlloc_v2", &memory, bytes ? bytes : 1) == 0, "%zu bytes on the GPU", bytes);
    return reinterpret_cast<void*>(memory);
  }
  void* allocate_pinned(std::size_t bytes) {
    void* memory = nullptr;
    CHECK(call("cuMemHostAlloc", &memory, bytes ? bytes : 1, 1u) == 0, "%zu pinned bytes", bytes);
    return memory;
  }
  void free(void* memory) {
    CHECK(call("cuMemFree_v2", reinterpret_cast<unsigned long long>(memory)) == 0, "cuMemFree");
  }
  void free_pinned(void* memory) { CHECK(call("cuMemFreeHost", memory) == 0, "cuMemFreeHost"); }
  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    const int result = call("cuMemcpy", reinterpret_cast<unsigned long long>(to),
                            reinterpret_cast<unsigned long long>(from), bytes);
    CHECK(result == 0, "cuMemcpy: %d", result);
  }

  template <class... Arguments>
  int call(const char* name, Arguments... arguments) {
    void* const function = dlsym(driver_, name);
    CHECK(function != nullptr, "%s", name);
    return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
  }

 private:
  Gpu() {
    const char* const driver = std::getenv("TEST_DEVICE");  // protected_device.cpp
    driver_ = dlopen(driver ? driver : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (driver_ == nullptr || call("cuInit", 0u) != 0) return;
    call("cuDeviceGetCount", &count_);
    if (count_ == 0) return;
    int device = 0;
    void* context = nullptr;
    CHECK(call("cuDeviceGet", &device, world_rank() % count_) == 0, "no device");
    CHECK(call("cuDevicePrimaryCtxRetain", &context, device) == 0, "no context");
    CHECK(call("cuCtxSetCurrent", context) == 0, "no context");
  }

  void* driver_ = nullptr;
  int count_ = 0;
};

/// Ends the program: all ranks say why and exit with 77, which launch.py hands on to CTest.
[[noreturn]] inline void skip(const std::string& why) {
  std::printf("skipped: %s\n", why.c_str());
  std::fflush(stdout);  // launchers may kill the others when the first rank exits
  MPI_Finalize();
  std::exit(77);
}
inline void skip_without_gpu() {
  if (!Gpu::get().is_here()) skip("no GPU here");
}
/// The same where not every rank has one of its own, and none is to do as if it had.
inline void skip_without_gpu_each() {
  skip_without_gpu();
  const char* const shared = std::getenv("TRIB_SHARED_GPU");
  if (shared != nullptr && std::strcmp(shared, "all") == 0) return;
  if (Gpu::get().count() < world_size())
    skip(std::to_string(world_size()) + " ranks need as many GPUs, here are " +
         std::to_string(Gpu::get().count()));
}

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
#include <vector>

#include "check.hpp"

class Gpu {
 public:
  /// This rank's GPU: its number on the node, modulo the number of GPUs. Makes its context current.
  static Gpu& get() {
    static Gpu gpu;
    return gpu;
  }
  bool is_here() const { return count_ > 0; }
  /// Of the machine, where this rank sees but one of them (one_gpu_each.sh).
  int count() const {
    const char* const all = std::getenv("TEST_GPUS");
    return all && is_here() ? std::atoi(all) : count_;
  }

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
    // With a session there is no world.
    const int number = count_ > 1 ? world_rank() % count_ : 0;
    CHECK(call("cuDeviceGet", &device, number) == 0, "no device");
    CHECK(call("cuDevicePrimaryCtxRetain", &context, device) == 0, "no context");
    CHECK(call("cuCtxSetCurrent", context) == 0, "no context");
  }

  void* driver_ = nullptr;
  int count_ = 0;
};

/// A range of addresses that is mapped by the program, as PyTorch's expandable segments are: pieces
/// side by side that come and go one by one.
class MappedMemory {
 public:
  static constexpr int kNoHandle = 0, kFile = 1;  // CUmemAllocationHandleType

  /// `bytes` of each piece are rounded up.
  MappedMemory(int pieces, std::size_t bytes, int handle_type) {
    properties_.requested_handles = handle_type;
    int device = 0;
    CHECK(gpu_.call("cuCtxGetDevice", &device) == 0, "");
    properties_.location.id = access_.location.id = device;
    std::size_t unit = 0;
    CHECK(gpu_.call("cuMemGetAllocationGranularity", &unit, &properties_, 0) == 0, "");
    bytes_ = (bytes + unit - 1) / unit * unit;
    memory_.resize(static_cast<std::size_t>(pieces));
    CHECK(gpu_.call("cuMemAddressReserve", &address_, bytes_ * memory_.size(), std::size_t{0}, 0ull,
                    0ull) == 0,
          "");
    for (int piece = 0; piece < pieces; ++piece) map(piece);
  }
  ~MappedMemory() {
    for (std::size_t piece = 0; piece < memory_.size(); ++piece) unmap(static_cast<int>(piece));
    CHECK(gpu_.call("cuMemAddressFree", address_, bytes_ * memory_.size()) == 0, "");
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }
  std::size_t bytes() const { return bytes_ * memory_.size(); }
  std::size_t piece_bytes() const { return bytes_; }
  /// Other memory takes the place of a piece.
  void replace(int piece) {
    unmap(piece);
    map(piece);
  }

 private:
  struct Location {
    int type, id;
  };
  /// CUmemAllocationProp and CUmemAccessDesc, as far as they are used here.
  struct Properties {
    int type, requested_handles;
    Location location;
    void* win32;
    unsigned char flags[8];
  };
  struct Access {
    Location location;
    int flags;
  };
  void map(int piece) {
    unsigned long long& memory = memory_[static_cast<std::size_t>(piece)];
    CHECK(gpu_.call("cuMemCreate", &memory, bytes_, &properties_, 0ull) == 0, "");
    CHECK(gpu_.call("cuMemMap", at(piece), bytes_, std::size_t{0}, memory, 0ull) == 0, "");
    CHECK(gpu_.call("cuMemSetAccess", at(piece), bytes_, &access_, std::size_t{1}) == 0, "");
  }
  void unmap(int piece) {
    CHECK(gpu_.call("cuMemUnmap", at(piece), bytes_) == 0, "");
    CHECK(gpu_.call("cuMemRelease", memory_[static_cast<std::size_t>(piece)]) == 0, "");
  }
  unsigned long long at(int piece) const {
    return address_ + static_cast<std::size_t>(piece) * bytes_;
  }

  Gpu& gpu_ = Gpu::get();
  Properties properties_{1, 0, {1, 0}, nullptr, {}};  // pinned, on a device
  Access access_{{1, 0}, 3};                          // read and write
  std::size_t bytes_ = 0;
  unsigned long long address_ = 0;
  std::vector<unsigned long long> memory_;
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

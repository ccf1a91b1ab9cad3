// SPDX-License-Identifier: BSD-3-Clause
// GPU memory for the MPI test programs, through the CUDA driver looked up at run time: where there
// is none, programs say so and skip. Or what TEST_DEVICE names, in its place.
#pragma once

#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"

class Gpu {
 public:
  /// This rank's GPU. Makes its context current.
  static Gpu& get() {
    static Gpu gpu;
    return gpu;
  }
  bool is_here() const { return count_ > 0; }
  /// Of the machine, where this rank sees but one of them (one_gpu_each.sh); with TEST_GPU_OF as
  /// many as that names.
  int count() const {
    if (!of_.empty()) return 1 + *std::max_element(of_.begin(), of_.end());
    const char* const all = std::getenv("TEST_GPUS");
    return all && is_here() ? std::atoi(all) : count_;
  }
  /// How many of them this process can use.
  int visible() const { return count_; }
  /// The number of a rank's GPU: TEST_GPU_OF has one for each rank, as in 0,0,0,1; otherwise ranks
  /// take them in turn.
  int of(int rank) const {
    if (of_.empty()) return rank % count();
    CHECK(rank < static_cast<int>(of_.size()), "TEST_GPU_OF has no GPU for rank %d", rank);
    return of_[static_cast<std::size_t>(rank)];
  }
  bool has_all_of_list() const { return of_.empty() || count() <= count_; }

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
    if (const char* const list = std::getenv("TEST_GPU_OF")) {
      for (const char* at = list; at != nullptr; at = std::strchr(at, ',')) {
        if (*at == ',') ++at;
        of_.push_back(std::atoi(at));
      }
    }
    const char* const driver = std::getenv("TEST_DEVICE");  // protected_driver.cpp
    driver_ = dlopen(driver ? driver : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (driver_ == nullptr || call("cuInit", 0u) != 0) return;
    call("cuDeviceGetCount", &count_);
    if (count_ == 0) return;
    int device = 0;
    void* context = nullptr;
    // With a session there is no world.
    const int number = count_ > 1 ? of(world_rank()) % count_ : 0;
    CHECK(call("cuDeviceGet", &device, number) == 0, "no device");
    CHECK(call("cuDevicePrimaryCtxRetain", &context, device) == 0, "no context");
    CHECK(call("cuCtxSetCurrent", context) == 0, "no context");
  }

  void* driver_ = nullptr;
  int count_ = 0;
  std::vector<int> of_;
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
/// Whether each rank has a GPU of its own, or is to do as if it had.
inline bool has_gpu_each() {
  const char* const shared = std::getenv("TRIB_SHARED_GPU");
  if (shared != nullptr && std::strcmp(shared, "all") == 0) return true;
  std::vector<int> taken;
  for (int r = 0; r < world_size(); ++r) taken.push_back(Gpu::get().of(r));
  std::sort(taken.begin(), taken.end());
  return std::adjacent_find(taken.begin(), taken.end()) == taken.end();
}
inline void skip_without_gpu() {
  if (!Gpu::get().is_here()) skip("no GPU here");
  if (!Gpu::get().has_all_of_list())
    skip("TEST_GPU_OF names " + std::to_string(Gpu::get().count()) + " GPUs, here are " +
         std::to_string(Gpu::get().visible()));
}
/// The same where not every rank has one of its own, and none is to do as if it had.
inline void skip_without_gpu_each() {
  skip_without_gpu();
  if (!has_gpu_each())
    skip(std::to_string(world_size()) + " ranks need as many GPUs, here are " +
         std::to_string(Gpu::get().count()));
}
/// Whether kernels serve blocking reductions of GPU buffers: nothing sends them through host
/// memory. Where ranks share GPUs, not all buffers are for kernels.
inline bool has_kernels_at_all() {
  const char* const device = std::getenv("TRIB_DEVICE");
  return world_size() > 1 && std::getenv("TEST_DEVICE") == nullptr &&
         (device == nullptr || std::strcmp(device, "off") != 0);
}
/// The same where each rank has a GPU of its own.
inline bool has_kernels() { return has_kernels_at_all() && has_gpu_each(); }
inline bool was_staged(MPI_Comm comm) { return last_algorithm(comm).rfind("staged_", 0) == 0; }
/// Blocking calls that kernels should serve, if there are any.
class KernelCalls {
 public:
  /// The last call on `comm` is one.
  void note(MPI_Comm comm) {
    ++calls_;
    if (was_staged(comm)) ++staged_;
  }
  /// Some may be staged, until ranks know of each other's GPUs and buffers.
  void check() const {
    if (calls_ == 0 || !has_kernels()) return;
    CHECK(staged_ * 10 <= calls_, "%ld of %ld calls went through host memory", staged_, calls_);
  }

 private:
  long calls_ = 0, staged_ = 0;
};

/// The order in which contributions are added up, of blocking calls at least: those of each of
/// these groups by themselves, and then these sums. One rank each, but where ranks share one of
/// several GPUs.
inline std::vector<std::vector<int>> groups_of_ranks() {
  const bool is_flat = has_gpu_each();
  std::vector<std::vector<int>> groups;
  for (int r = 0; r < world_size(); ++r) {
    const auto is_with = [r](const std::vector<int>& group) {
      return Gpu::get().of(group.front()) == Gpu::get().of(r);
    };
    const auto group = std::find_if(groups.begin(), groups.end(), is_with);
    if (is_flat || group == groups.end())
      groups.push_back({r});
    else
      group->push_back(r);
  }
  return groups;
}
/// The sum of what `value` gives for each rank, in that order.
template <class Value>
auto sum_in_groups(const std::vector<std::vector<int>>& groups, const Value& value) {
  using T = decltype(value(0));
  T total{};
  for (const std::vector<int>& group : groups) {
    T part = value(group.front());
    for (std::size_t i = 1; i < group.size(); ++i) part = static_cast<T>(part + value(group[i]));
    total = &group == &groups.front() ? part : static_cast<T>(total + part);
  }
  return total;
}

/// Whether each rank's GPU has room for all ranks' buffers, of `bytes` each, and for what Tributary
/// takes of it.
inline bool has_room(std::size_t bytes) {
  std::size_t now = 0, all = 0;
  CHECK(Gpu::get().call("cuMemGetInfo_v2", &now, &all) == 0, "");
  const std::size_t room = (std::size_t{2} << 30) + bytes * static_cast<std::size_t>(world_size());
  int mine = now > room ? 1 : 0, everywhere = 0;
  CHECK(MPI_Allreduce(&mine, &everywhere, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD) == MPI_SUCCESS, "");
  if (everywhere == 0 && world_rank() == 0)
    std::printf("skipped: %zu MiB of each rank do not fit on a GPU\n", bytes >> 20);
  return everywhere != 0;
}

/// Vectors of more than 2^31 bytes, in pieces of a pattern whose length is prime: what lies a power
/// of two off is something else.
class ManyBytes {
 public:
  explicit ManyBytes(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::uint8_t*>(Gpu::get().allocate(bytes))) {}
  ~ManyBytes() { Gpu::get().free(data_); }
  ManyBytes(const ManyBytes&) = delete;
  ManyBytes& operator=(const ManyBytes&) = delete;

  std::uint8_t* data() const { return data_; }
  void fill(const std::vector<std::uint8_t>& pattern) {
    for (std::size_t at = 0; at < bytes_; at += kPattern)
      Gpu::get().copy(data_ + at, pattern.data(), std::min(kPattern, bytes_ - at));
  }
  /// Whether the first `bytes` are those of the pattern from `first` on.
  void expect(const std::vector<std::uint8_t>& pattern, std::size_t first, std::size_t bytes,
              const char* what) const {
    std::vector<std::uint8_t> found(kPattern);
    for (std::size_t at = 0, piece = 0; at < bytes; at += piece) {
      const std::size_t place = (first + at) % kPattern;
      piece = std::min(kPattern - place, bytes - at);
      Gpu::get().copy(found.data(), data_ + at, piece);
      const auto wrong = std::mismatch(found.begin(), found.begin() + static_cast<long>(piece),
                                       pattern.begin() + static_cast<long>(place));
      const auto right = static_cast<std::size_t>(wrong.first - found.begin());
      CHECK(right == piece, "%s: byte %zu is %d, not %d", what, at + right, *wrong.first,
            *wrong.second);
    }
  }

  static std::vector<std::uint8_t> pattern_of(int r) {
    std::vector<std::uint8_t> values(kPattern);
    for (std::size_t i = 0; i < kPattern; ++i)
      values[i] = static_cast<std::uint8_t>(i * 2654435761u >> (8 + r % 8));
    return values;
  }
  /// Of all ranks' patterns together, by MPI_BXOR.
  static std::vector<std::uint8_t> pattern_of_all() {
    std::vector<std::uint8_t> all(kPattern);
    for (int r = 0; r < world_size(); ++r) {
      const std::vector<std::uint8_t> values = pattern_of(r);
      for (std::size_t i = 0; i < kPattern; ++i) all[i] ^= values[i];
    }
    return all;
  }
  static constexpr std::size_t kPattern = 16777213;

 private:
  std::size_t bytes_;
  std::uint8_t* data_;
};

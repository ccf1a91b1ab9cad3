// SPDX-License-Identifier: BSD-3-Clause
// What the tests of the stream-ordered C API share: buffers of small whole numbers, whose sums are
// exact, streams, and the functions of the API as the preload library brings them along.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"
#include "tributary/tributary.h"

#define API(name) (*tributary<decltype(name)>(#name))

inline int rank, size;

inline int exchange(void*, const void* mine, void* all, std::size_t bytes) {
  return MPI_Allgather(mine, static_cast<int>(bytes), MPI_BYTE, all, static_cast<int>(bytes),
                       MPI_BYTE, MPI_COMM_WORLD);
}

inline std::string last_error() { return API(trib_last_error)(); }

/// protected_driver.cpp has streams, on which everything is done at once, but no graphs.
inline bool has_graphs() { return std::getenv("TEST_DEVICE") == nullptr; }

/// Small whole numbers: sums are exact.
inline float value(int r, std::size_t i, int round) {
  return static_cast<float>(
      (i * 7 + static_cast<std::size_t>(r) * 13 + static_cast<std::size_t>(round) * 5) % 101);
}
inline float sum(std::size_t i, int round) {
  float total = 0;
  for (int r = 0; r < size; ++r) total += value(r, i, round);
  return total;
}

struct Stream {
  void* handle = nullptr;
  Stream() { CHECK(Gpu::get().call("cuStreamCreate", &handle, 1u) == 0, "no stream"); }
  void wait() { CHECK(Gpu::get().call("cuStreamSynchronize", handle) == 0, "the stream failed"); }
};

struct Buffer {
  float* data;
  std::size_t count;
  explicit Buffer(std::size_t count_)
      : data(static_cast<float*>(Gpu::get().allocate(count_ * 4))), count(count_) {}
  ~Buffer() { Gpu::get().free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void fill(int round) {
    std::vector<float> host(count);
    for (std::size_t i = 0; i < count; ++i) host[i] = value(rank, i, round);
    Gpu::get().copy(data, host.data(), count * 4);
    CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "copy");
  }
  std::vector<float> fetch() const {
    std::vector<float> host(count);
    Gpu::get().copy(host.data(), data, count * 4);
    return host;
  }
};

inline void expect(const Buffer& out, std::size_t begin, std::size_t count, int round,
                   const char* what) {
  const std::vector<float> found = out.fetch();
  for (std::size_t i = 0; i < count; ++i)
    CHECK(found[i] == sum(begin + i, round), "%s: element %zu of %zu is %g, not %g", what, i, count,
          static_cast<double>(found[i]), static_cast<double>(sum(begin + i, round)));
}

/// A part of the test is over on this rank.
inline void passed(const char* what) {
  if (rank == 0) std::printf("%s\n", what);
  std::fflush(stdout);
}

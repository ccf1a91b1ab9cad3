// SPDX-License-Identifier: BSD-3-Clause
// Buffers in memory of several kinds, and datatypes with gaps, for the MPI test programs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

#if MPI_VERSION >= 4
#define HAS_LARGE 1
#else
#define HAS_LARGE 0
#endif

enum class Kind { device, pinned, host };

/// Bytes with a guard on both sides, in memory of a kind.
class Buffer {
 public:
  Buffer(std::size_t bytes, unsigned char fill, Kind kind = Kind::device)
      : before(bytes + 2 * kGuard, fill), kind_(kind) {
    if (kind_ == Kind::device) memory_ = Gpu::get().allocate(before.size());
    if (kind_ == Kind::pinned) memory_ = Gpu::get().allocate_pinned(before.size());
  }
  ~Buffer() {
    if (kind_ == Kind::device) Gpu::get().free(memory_);
    if (kind_ == Kind::pinned) Gpu::get().free_pinned(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void set(std::ptrdiff_t at, int value) {
    std::memcpy(before.data() + kGuard + at, &value, sizeof value);
  }
  /// Its address, once it holds `before`.
  void* ready() {
    if (kind_ == Kind::host) {
      host_ = before;
      memory_ = host_.data();
    } else {
      Gpu::get().copy(memory_, before.data(), before.size());
    }
    return static_cast<char*>(memory_) + kGuard;
  }
  std::vector<unsigned char> now() const {
    std::vector<unsigned char> bytes = host_;
    if (kind_ != Kind::host) {
      bytes.resize(before.size());
      Gpu::get().copy(bytes.data(), memory_, bytes.size());
    }
    return bytes;
  }
  static constexpr std::size_t kGuard = 64;

  std::vector<unsigned char> before;  ///< what the call finds

 private:
  const Kind kind_;
  void* memory_ = nullptr;
  std::vector<unsigned char> host_;
};

/// A datatype made of ints, spelt out.
struct Type {
  const char* name;
  MPI_Datatype handle;
  std::ptrdiff_t extent;
  std::vector<std::ptrdiff_t> at;  // the ints of one element

  std::ptrdiff_t place(std::size_t element, std::size_t part) const {
    return static_cast<std::ptrdiff_t>(element) * extent + at[part];
  }
  /// The bytes of some elements, from the first to the last.
  std::ptrdiff_t first(std::size_t count) const {
    std::ptrdiff_t lowest = 0;
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t part = 0; part < at.size(); ++part)
        lowest = std::min(lowest, place(i, part));
    return lowest;
  }
  std::size_t bytes(std::size_t count) const {
    std::ptrdiff_t highest = 0;
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t part = 0; part < at.size(); ++part)
        highest = std::max(highest, place(i, part) + 4);
    return static_cast<std::size_t>(highest - first(count));
  }
};

inline std::vector<Type> make_types() {
  MPI_Datatype contiguous, vector, padded, later, earlier;
  MPI_Type_contiguous(3, MPI_INT, &contiguous);
  MPI_Type_vector(3, 1, 2, MPI_INT, &vector);
  MPI_Type_create_resized(vector, 0, 40, &padded);
  int lengths[] = {1, 1};
  MPI_Aint places[] = {8, 24};  // a lower bound of 8, an extent of 20
  MPI_Type_create_hindexed(2, lengths, places, MPI_INT, &later);
  MPI_Aint negative[] = {-8, 4};
  MPI_Type_create_hindexed(2, lengths, negative, MPI_INT, &earlier);
  std::vector<Type> types = {{"int", MPI_INT, 4, {0}},
                             {"contiguous", contiguous, 12, {0, 4, 8}},
                             {"vector", vector, 20, {0, 8, 16}},
                             {"resized vector", padded, 40, {0, 8, 16}},
                             {"lower bound 8", later, 20, {8, 24}},
                             {"lower bound -8", earlier, 16, {-8, 4}}};
  for (std::size_t i = 1; i < types.size(); ++i) MPI_Type_commit(&types[i].handle);
  return types;
}

inline void expect_bytes(const char* what, const char* which,
                         const std::vector<unsigned char>& found,
                         const std::vector<unsigned char>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    CHECK(found[i] == expected[i], "%s: %s: byte %zd is %02x, expected %02x (rank %d)", what, which,
          static_cast<std::ptrdiff_t>(i - Buffer::kGuard), found[i], expected[i], world_rank());
}

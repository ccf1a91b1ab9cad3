// SPDX-License-Identifier: BSD-3-Clause
// cuBLAS, looked up at run time: a sum over rows of equal length that lie at one distance is the
// product of a matrix with a vector of ones.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

#include "base/types.hpp"

namespace trib::cuda {

class Cublas {
 public:
  /// Null if the library is not to be had; `why` then says so. `path`: a file, or "auto": the
  /// dynamic linker is asked, or "none". Its work goes to `stream`, whose context is current.
  static std::unique_ptr<Cublas> open(const std::string& path, CUstream stream, std::string& why);
  /// The context has to be current.
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  static constexpr int kMostRows = 64;

  /// Enqueues sum[i] = (has_sum ? sum[i] : 0) + the sum over `rows` of
  /// first[row * distance + i], for i < count. f32 or f64; `distance` and `count` are elements
  /// and fit an int. Throws Error(Code::device).
  void add_rows(Dtype dtype, CUdeviceptr sum, bool has_sum, CUdeviceptr first, int rows,
                std::size_t distance, std::size_t count);

 private:
  struct Functions;
  explicit Cublas(const Functions& functions) : functions_(functions) {}

  const Functions& functions_;
  void* handle_ = nullptr;
  CUdeviceptr ones_ = 0;  // kMostRows doubles, then as many floats
};

}  // namespace trib::cuda

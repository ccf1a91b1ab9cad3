// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/cublas.hpp"

#include <dlfcn.h>

#include <array>
#include <mutex>

#include "backend/cuda/driver.hpp"

namespace trib::cuda {

/// What of cuBLAS is used, by its binary interface of versions 12 and 13: its headers come with a
/// package of half a gigabyte.
struct Cublas::Functions {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*set_stream)(void* handle, CUstream stream) = nullptr;
  int (*gemv_f32)(void* handle, int operation, int rows, int columns, const float* alpha,
                  const float* matrix, int distance, const float* vector, int step,
                  const float* beta, float* result, int result_step) = nullptr;
  int (*gemv_f64)(void* handle, int operation, int rows, int columns, const double* alpha,
                  const double* matrix, int distance, const double* vector, int step,
                  const double* beta, double* result, int result_step) = nullptr;
  const char* (*text)(int status) = nullptr;

  bool look_up(void* library) {
    const auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      return function != nullptr;
    };
    return find(create, "cublasCreate_v2") && find(destroy, "cublasDestroy_v2") &&
           find(set_stream, "cublasSetStream_v2") && find(gemv_f32, "cublasSgemv_v2") &&
           find(gemv_f64, "cublasDgemv_v2") && find(text, "cublasGetStatusString");
  }
  void check(int status, const char* what) const {
    if (status != 0)
      throw Error(Code::device, std::string("cuBLAS: ") + what + ": " + text(status));
  }
};

std::unique_ptr<Cublas> Cublas::open(const std::string& path, CUstream stream, std::string& why) {
  static auto& mutex = *new std::mutex;
  static Functions functions;
  static bool is_known = false;
  {
    const std::lock_guard lock(mutex);
    void* library = nullptr;
    std::string trouble = path == "none" ? "TRIB_CUBLAS=none" : "";
    if (path == "auto") {
      for (const char* const name : {"libcublas.so.13", "libcublas.so.12"})
        if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) trouble = "no libcublas.so is found; TRIB_CUBLAS may say where it is";
    } else if (path != "none") {
      library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) trouble = "TRIB_CUBLAS: " + std::string(::dlerror());
    }
    if (library != nullptr && !is_known) is_known = functions.look_up(library);
    if (trouble.empty() && !is_known) trouble = "the library is no cuBLAS";
    if (!trouble.empty()) {
      why = trouble;
      return nullptr;
    }
  }
  std::unique_ptr<Cublas> cublas(new Cublas(functions));
  functions.check(functions.create(&cublas->handle_), "cannot be set up");
  functions.check(functions.set_stream(cublas->handle_, stream), "refuses a stream");
  struct Ones {
    std::array<double, kMostRows> f64;
    std::array<float, kMostRows> f32;
  } ones;
  ones.f64.fill(1);
  ones.f32.fill(1);
  const Driver& driver = *cuda::driver();
  check(driver.cuMemAlloc_(&cublas->ones_, sizeof ones), "cannot allocate");
  const CopyStream copies;
  check(driver.cuMemcpyAsync_(cublas->ones_, reinterpret_cast<CUdeviceptr>(&ones), sizeof ones,
                              copies.get()),
        "cannot fill memory");
  copies.wait();
  return cublas;
}

Cublas::~Cublas() {
  if (handle_ != nullptr) functions_.destroy(handle_);
  if (ones_ != 0) driver()->cuMemFree_(ones_);
}

void Cublas::add_rows(Dtype dtype, CUdeviceptr sum, bool has_sum, CUdeviceptr first, int rows,
                      std::size_t distance, std::size_t count) {
  // cuBLAS stores matrices by columns: ours has `count` rows and a column for each of theirs.
  constexpr int kAsItIs = 0;
  const auto height = static_cast<int>(count), apart = static_cast<int>(distance);
  const auto multiply = [&](auto gemv, auto one, CUdeviceptr ones) {
    using T = decltype(one);
    const T beta = has_sum ? 1 : 0;
    functions_.check(
        gemv(handle_, kAsItIs, height, rows, &one, reinterpret_cast<const T*>(first), apart,
             reinterpret_cast<const T*>(ones), 1, &beta, reinterpret_cast<T*>(sum), 1),
        "a sum failed");
  };
  if (dtype == Dtype::f64)
    multiply(functions_.gemv_f64, 1.0, ones_);
  else
    multiply(functions_.gemv_f32, 1.0F, ones_ + kMostRows * sizeof(double));
}

}  // namespace trib::cuda

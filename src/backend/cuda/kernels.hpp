// SPDX-License-Identifier: BSD-3-Clause
// The compiled kernels, loaded into a context.
#pragma once

#include <array>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/launch.hpp"
#include "base/types.hpp"

namespace trib::cuda {

class Kernels {
 public:
  /// Those of the current context, loaded in full at the first call: a load between the launch and
  /// the end of a kernel that waits for peers could block both. Never unloaded. Throws Error.
  static const Kernels& of_current();

  /// Null where `op` is not defined on `dtype`, or not on a GPU.
  CUfunction find(Op op, Dtype dtype, Protocol protocol) const;

 private:
  Kernels();
  std::array<std::array<std::array<CUfunction, kProtocols>, kDtypes>, kOps> functions_{};
};

}  // namespace trib::cuda

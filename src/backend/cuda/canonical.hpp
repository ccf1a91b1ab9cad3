// SPDX-License-Identifier: BSD-3-Clause
// Pairs of operator and type that do the same to the bits share a kernel: signed integers add like
// unsigned ones. Read by kernels.cu (which kernels to compile) and program.cpp (which to launch).
#pragma once

#include "base/types.hpp"

namespace trib::cuda {

/// The type whose kernel of `op` serves `dtype`.
constexpr Dtype canonical(Op op, Dtype dtype) {
  if (op == Op::max || op == Op::min) return dtype;
  switch (dtype) {
    case Dtype::i8:
    case Dtype::l8:
    case Dtype::byte:
      return Dtype::u8;
    case Dtype::i16:
    case Dtype::l16:
      return Dtype::u16;
    case Dtype::i32:
    case Dtype::l32:
      return Dtype::u32;
    case Dtype::i64:
    case Dtype::l64:
      return Dtype::u64;
    default:
      return dtype;
  }
}

/// GPUs have no 80-bit numbers.
constexpr bool is_on_device(Dtype dtype) {
  return dtype != Dtype::f80 && dtype != Dtype::cf80 && dtype != Dtype::f80_i32;
}

/// Whether there is a kernel of this very type.
constexpr bool is_canonical(Op op, Dtype dtype) {
  return is_on_device(dtype) && is_defined(op, dtype) && canonical(op, dtype) == dtype;
}

}  // namespace trib::cuda

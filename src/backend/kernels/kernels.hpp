// SPDX-License-Identifier: BSD-3-Clause
// The element loops of every instruction set in this build, for reduce.cpp (which picks one) and
// for the tests (which run all that the machine supports). Users of the loops include
// backend/reduce.hpp.
#pragma once

#include <cstddef>
#include <span>

#include "backend/reduce.hpp"

namespace trib {

/// What reduce_kernels.cpp yields, compiled for one instruction set. `reduce` is null where an
/// operator is not defined.
struct KernelTable {
  const char* isa;
  void (*copy)(void* const* to, int to_count, const void* from, std::size_t bytes, Store store);
  ReduceKernel reduce[kOps][kDtypes];
};

/// The tables that this machine can run, the best one first. Never empty. Callable before static
/// initialisation.
std::span<const KernelTable* const> kernel_tables();

}  // namespace trib

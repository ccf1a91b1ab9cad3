// SPDX-License-Identifier: BSD-3-Clause
// The kernels, compiled once per operator, for every element type and protocol. Which
// (operator, type) pairs exist follows from base/types.hpp.
#include "backend/cuda/block.cuh"
#include "backend/cuda/canonical.hpp"
#include "backend/cuda/flat.cuh"
#include "backend/cuda/local.cuh"
#include "backend/cuda/mapped.cuh"
#include "backend/cuda/pipeline.cuh"
#include "backend/cuda/relay.cuh"

namespace trib::cuda {
namespace {

template <bool exists, Protocol protocol, class T, class A, class Operator, class Launched>
__device__ void run(const Launched& launch) {
  if constexpr (!exists)
    return;
  else if constexpr (protocol == Protocol::flat)
    Flat<T, A, Operator>(launch).run();
  else if constexpr (protocol == Protocol::mapped)
    Mapped<T, A, Operator>(launch).run();
  else if constexpr (protocol == Protocol::local)
    Local<T, A, Operator>(launch).run();
  else if constexpr (protocol == Protocol::pipeline)
    launch.is_relay ? Relay<T, A, Operator>(launch).run() : Pipeline<T, A, Operator>(launch).run();
  else
    Block<protocol, T, A, Operator>(launch).run();
}

}  // namespace

// TRIB_OP and TRIB_OPERATOR come from the command line. Kernels of pairs that do not exist are
// empty and never looked up.
#define TRIB_JOIN2(protocol, op, dtype) trib_##protocol##_##op##_##dtype
#define TRIB_JOIN(protocol, op, dtype) TRIB_JOIN2(protocol, op, dtype)
#define TRIB_KERNEL(dtype, protocol, launched, threads, element, accumulator)              \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                 \
      TRIB_JOIN(protocol, TRIB_OP, dtype)(const __grid_constant__ launched launch) {       \
    run<is_canonical(Op::TRIB_OP, Dtype::dtype), Protocol::protocol, element, accumulator, \
        TRIB_OPERATOR>(launch);                                                            \
  }
#define TRIB_KERNELS(dtype, element, accumulator)                                   \
  TRIB_KERNEL(dtype, simple, FlaggedLaunch, kMaxThreads, element, accumulator)      \
  TRIB_KERNEL(dtype, packet, Launch, kMaxThreads, element, accumulator)             \
  TRIB_KERNEL(dtype, flat, FlatLaunch, kMaxFlatThreads, element, accumulator)       \
  TRIB_KERNEL(dtype, mapped, MappedLaunch, kMaxMappedThreads, element, accumulator) \
  TRIB_KERNEL(dtype, local, LocalLaunch, kMaxLocalThreads, element, accumulator)    \
  TRIB_KERNEL(dtype, pipeline, PipelineLaunch, kMaxPipelineThreads, element, accumulator)
TRIB_DTYPES(TRIB_KERNELS)

}  // namespace trib::cuda

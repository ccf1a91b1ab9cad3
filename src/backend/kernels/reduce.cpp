// SPDX-License-Identifier: BSD-3-Clause
// Picks the element loops for this machine's instruction set. The loops are in reduce_kernels.cpp.
#include "backend/reduce.hpp"

#include <array>
#include <atomic>

#include "backend/kernels/kernels.hpp"

#ifdef __x86_64__
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace trib {

// Defined by reduce_kernels.cpp; CMakeLists.txt says for which instruction sets it is compiled.
namespace generic {
[[gnu::visibility("hidden")]] extern const KernelTable table;
}
#ifdef TRIB_X86_64_KERNELS
namespace x86_64_v3 {
[[gnu::visibility("hidden")]] extern const KernelTable table;
}
namespace x86_64_v4 {
[[gnu::visibility("hidden")]] extern const KernelTable table;
}
#endif

namespace {

#ifdef TRIB_X86_64_KERNELS
constexpr std::array kTables{&x86_64_v4::table, &x86_64_v3::table, &generic::table};

/// Those of the level of the x86-64 psABI that processor and operating system support, and of all
/// below. (Level 2 is not there: processors that have no more are of before 2013.)
std::span<const KernelTable* const> supported() {
  __builtin_cpu_init();
  // Compilers know no names for some features of level 3, but may use them.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kFma = 1u << 12, kMovbe = 1u << 22, kF16c = 1u << 29, kLzcnt = 1u << 5;
  constexpr unsigned kBasic = kFma | kMovbe | kF16c;
  const bool has_basic = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kBasic) == kBasic;
  const bool has_extended =
      __get_cpuid(0x80000001u, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kLzcnt) != 0;
  if (!has_basic || !has_extended || !__builtin_cpu_supports("avx2") ||
      !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2"))
    return std::span(kTables).subspan(2);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return std::span(kTables).subspan(1);
  return kTables;
}
#else
constexpr std::array kTables{&generic::table};
std::span<const KernelTable* const> supported() { return kTables; }
#endif

/// Constant-initialised, so that a call from anybody's static constructor works; threads that come
/// here at the same time for the first time find the same.
constinit std::atomic<const KernelTable*> chosen{nullptr};

const KernelTable& table() {
  const KernelTable* found =
      chosen.load(std::memory_order_relaxed);  // points to constants: nothing to order
  if (found == nullptr) [[unlikely]] {
    found = kernel_tables().front();
    chosen.store(found, std::memory_order_relaxed);
  }
  return *found;
}

}  // namespace

std::span<const KernelTable* const> kernel_tables() { return supported(); }

ReduceKernel reduce_kernel(Op op, Dtype dtype) {
  return table().reduce[static_cast<std::size_t>(op)][static_cast<std::size_t>(dtype)];
}

void copy_bytes(void* const* to, int to_count, const void* from, std::size_t bytes, Store store) {
  table().copy(to, to_count, from, bytes, store);
}

void store_fence() {
#ifdef __x86_64__
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

const char* kernel_isa() { return table().isa; }

}  // namespace trib

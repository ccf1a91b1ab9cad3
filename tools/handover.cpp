// SPDX-License-Identifier: BSD-3-Clause
// What two cores need at the least to hand data to each other: a flag's way from one to the other,
// and a vector, which one copies into shared memory and the other folds into its own, by the loops
// that the library uses. An allreduce or reduce of two ranks does nothing else; docs/results.md
// holds its times against this. Usage: handover [BYTES...]
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "backend/reduce.hpp"

namespace {

using Clock = std::chrono::steady_clock;

/// Written by one side, on a line of its own.
struct alignas(64) Flag {
  std::atomic<std::uint64_t> value{0};
};
Flag flags[2];

void await(int side, std::uint64_t value) {
  while (flags[side].value.load(std::memory_order_acquire) < value) __builtin_ia32_pause();
}

void pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Seconds of a flag's way.
double flag_way() {
  constexpr std::uint64_t kRounds = 20000;
  flags[0].value = flags[1].value = 0;
  std::thread other([] {
    pin(1);
    for (std::uint64_t i = 1; i <= kRounds; ++i) {
      await(0, i);
      flags[1].value.store(i, std::memory_order_release);
    }
  });
  pin(0);
  const auto begin = Clock::now();
  for (std::uint64_t i = 1; i <= kRounds; ++i) {
    flags[0].value.store(i, std::memory_order_release);
    await(1, i);
  }
  const std::chrono::duration<double> all = Clock::now() - begin;
  other.join();
  return all.count() / (2.0 * kRounds);
}

/// Seconds of copying in and of folding what the other side has copied in. Both sides do both.
std::array<double, 2> vector_way(std::size_t bytes) {
  constexpr std::uint64_t kRounds = 200, kWindows = 4;
  const std::size_t shared_bytes = 2 * kWindows * bytes;
  void* const shared = ::mmap(nullptr, shared_bytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (shared == MAP_FAILED) return {};
  const trib::ReduceKernel fold = trib::reduce_kernel(trib::Op::sum, trib::Dtype::f32);
  flags[0].value = flags[1].value = 0;
  std::array<double, 2> result{};
  const auto side = [&](int me) {
    pin(me);
    std::vector<float> in(bytes / 4, 1), out(bytes / 4);
    std::vector<double> copies, folds;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      const auto at = [&](int of) {
        return static_cast<std::byte*>(shared) +
               (static_cast<std::size_t>(of) * kWindows + round % kWindows) * bytes;
      };
      flags[me].value.store(2 * round - 1, std::memory_order_release);
      await(1 - me, 2 * round - 1);
      const auto begin = Clock::now();
      void* to = at(me);
      trib::copy_bytes(&to, 1, in.data(), bytes, trib::Store::shared);
      const auto copied = Clock::now();
      flags[me].value.store(2 * round, std::memory_order_release);
      await(1 - me, 2 * round);
      const auto seen = Clock::now();
      void* sum = out.data();
      const void* const from[] = {in.data(), at(1 - me)};
      fold(&sum, 1, from, 2, bytes / 4, trib::Store::cached);
      const auto folded = Clock::now();
      copies.push_back(std::chrono::duration<double>(copied - begin).count());
      folds.push_back(std::chrono::duration<double>(folded - seen).count());
    }
    if (me == 0) result = {median(copies), median(folds)};
  };
  std::thread other(side, 1);
  side(0);
  other.join();
  ::munmap(shared, shared_bytes);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0 || !CPU_ISSET(0, &cores) ||
      !CPU_ISSET(1, &cores)) {
    std::fprintf(stderr, "handover: needs processors 0 and 1\n");
    return 1;
  }
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) {
    char* end = nullptr;
    const unsigned long long bytes = std::strtoull(argv[i], &end, 10);
    if (*end != '\0' || bytes == 0 || bytes % 64 != 0 || bytes > (1u << 28)) {
      std::fprintf(stderr, "handover: BYTES: %s is no multiple of 64 up to 268435456\n",
                   argv[i]);
      return 2;
    }
    sizes.push_back(bytes);
  }
  if (sizes.empty()) sizes = {65536, 131072, 262144, 524288, 1048576};
  std::printf("a flag's way: %.0f ns\n%10s %12s %12s %12s\n", flag_way() * 1e9, "bytes",
              "copy in, us", "fold, us", "sum, us");
  for (const std::size_t bytes : sizes) {
    const auto [copy, fold] = vector_way(bytes);
    std::printf("%10zu %12.2f %12.2f %12.2f\n", bytes, copy * 1e6, fold * 1e6, (copy + fold) * 1e6);
  }
}

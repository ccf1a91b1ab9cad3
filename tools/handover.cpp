// SPDX-License-Identifier: BSD-3-Clause
// What cores need at the least to hand data to each other through shared memory: a flag's way from
// one to another, and a vector, which all copy in and of which each folds its share, by the loops
// that the library uses. No reduction through scratch does less; docs/results-2-ranks.md holds its
// times against this. Usage: handover [-n CORES] [BYTES...]
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
#include "base/locks.hpp"

namespace {

using Clock = std::chrono::steady_clock;

/// Written by one side, on a line of its own.
struct alignas(64) Flag {
  std::atomic<std::uint64_t> value{0};
};
constexpr int kMostCores = 1024;
Flag flags[kMostCores];

void await(int side, std::uint64_t value) {
  while (flags[side].value.load(std::memory_order_acquire) < value) trib::relax();
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

/// Seconds of copying `bytes` in and of folding: with two cores, which need no second step, each
/// folds the whole vector, otherwise its share of all vectors. The slowest core's.
std::array<double, 2> vector_way(int cores, std::size_t bytes) {
  constexpr std::uint64_t kRounds = 100, kWindows = 4;
  const std::size_t shared_bytes = static_cast<std::size_t>(cores) * kWindows * bytes;
  void* const shared = ::mmap(nullptr, shared_bytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (shared == MAP_FAILED) return {};
  const trib::ReduceKernel fold = trib::reduce_kernel(trib::Op::sum, trib::Dtype::f32);
  for (Flag& flag : flags) flag.value = 0;
  std::vector<std::array<double, 2>> results(static_cast<std::size_t>(cores));
  const auto core = [&](int me) {
    pin(me);
    std::vector<float> in(bytes / 4, 1), out(bytes / 4);
    std::vector<double> copies, folds;
    const auto meet = [&](std::uint64_t number) {
      flags[me].value.store(number, std::memory_order_release);
      for (int other = 0; other < cores; ++other) await(other, number);
    };
    const std::size_t lines = bytes / 64, count = static_cast<std::size_t>(cores);
    const std::size_t begin = cores == 2 ? 0 : lines * static_cast<std::size_t>(me) / count * 64;
    const std::size_t end =
        cores == 2 ? bytes : lines * static_cast<std::size_t>(me + 1) / count * 64;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      const auto at = [&](int of) {
        return static_cast<std::byte*>(shared) +
               (static_cast<std::size_t>(of) * kWindows + round % kWindows) * bytes;
      };
      meet(2 * round - 1);
      const auto started = Clock::now();
      void* to = at(me);
      trib::copy_bytes(&to, 1, in.data(), bytes, trib::Store::shared);
      const auto copied = Clock::now();
      meet(2 * round);
      const auto seen = Clock::now();
      void* sum = out.data();
      std::vector<const void*> from;
      for (int of = 0; of < cores; ++of)
        from.push_back((of == me ? reinterpret_cast<const std::byte*>(in.data()) : at(of)) + begin);
      fold(&sum, 1, from.data(), cores, (end - begin) / 4, trib::Store::cached);
      const auto folded = Clock::now();
      copies.push_back(std::chrono::duration<double>(copied - started).count());
      folds.push_back(std::chrono::duration<double>(folded - seen).count());
    }
    results[static_cast<std::size_t>(me)] = {median(copies), median(folds)};
  };
  std::vector<std::thread> others;
  for (int me = 1; me < cores; ++me) others.emplace_back(core, me);
  core(0);
  for (std::thread& other : others) other.join();
  ::munmap(shared, shared_bytes);
  std::array<double, 2> slowest{};
  for (const auto& result : results)
    for (std::size_t i = 0; i < result.size(); ++i) slowest[i] = std::max(slowest[i], result[i]);
  return slowest;
}

}  // namespace

int main(int argc, char** argv) {
  int count = 2;
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) {
    char* end = nullptr;
    if (std::strcmp(argv[i], "-n") == 0 && i + 1 < argc) {
      const long cores = std::strtol(argv[++i], &end, 10);
      if (*end != '\0' || cores < 2 || cores > kMostCores) {
        std::fprintf(stderr, "handover: -n: %s is not from 2 to %d\n", argv[i], kMostCores);
        return 2;
      }
      count = static_cast<int>(cores);
      continue;
    }
    const unsigned long long bytes = std::strtoull(argv[i], &end, 10);
    if (*end != '\0' || bytes == 0 || bytes % 64 != 0 || bytes > (1u << 28)) {
      std::fprintf(stderr, "handover: BYTES: %s is no multiple of 64 up to 268435456\n", argv[i]);
      return 2;
    }
    sizes.push_back(bytes);
  }
  cpu_set_t cores;
  bool has_all = ::sched_getaffinity(0, sizeof cores, &cores) == 0;
  for (int core = 0; core < count; ++core) has_all = has_all && CPU_ISSET(core, &cores);
  if (!has_all) {
    std::fprintf(stderr, "handover: needs processors 0 to %d\n", count - 1);
    return 1;
  }
  if (sizes.empty()) sizes = {65536, 131072, 262144, 524288, 1048576};
  std::printf("a flag's way: %.0f ns\n%10s %12s %12s %12s\n", flag_way() * 1e9, "bytes",
              "copy in, us", "fold, us", "sum, us");
  for (const std::size_t bytes : sizes) {
    const auto [copy, fold] = vector_way(count, bytes);
    std::printf("%10zu %12.2f %12.2f %12.2f\n", bytes, copy * 1e6, fold * 1e6, (copy + fold) * 1e6);
  }
}

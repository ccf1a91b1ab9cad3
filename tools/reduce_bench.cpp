// SPDX-License-Identifier: BSD-3-Clause
// How fast the element loops are, in bytes moved (each source read once, each destination written
// once), beside memcpy on as much memory. For those who change backend/kernels; needs
// google-benchmark. Arguments are google-benchmark's, e.g.
// --benchmark_filter='sum_f32/x86-64-v3'. Sizes are of one vector: 16 KiB stays in L1, 256 KiB in
// L2, 4 MiB in L3.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "backend/kernels/kernels.hpp"

namespace {

using namespace trib;

/// Vectors one behind the other, each with its own offset within a page: equal ones would make
/// loads wait for stores.
struct Vectors {
  Vectors(int number, std::size_t bytes) {
    for (int k = 0; k < number; ++k) {
      memory.emplace_back(bytes + 8192, static_cast<unsigned char>(1));
      auto address = reinterpret_cast<std::uintptr_t>(memory.back().data());
      address = (address + 4095) / 4096 * 4096 + static_cast<std::uintptr_t>(k) % 8 * 320;
      pointers.push_back(reinterpret_cast<void*>(address));
      // 1.0 in bfloat16, near it in float: sums and products stay clear of slow subnormals.
      for (std::size_t i = 0; i + 1 < bytes; i += 2)
        std::memcpy(reinterpret_cast<char*>(address + i), "\x80\x3f", 2);
    }
  }
  std::vector<std::vector<unsigned char>> memory;
  std::vector<void*> pointers;
};

void reduce(benchmark::State& state, const KernelTable* table, Op op, Dtype dtype, int from_count,
            int to_count, Store store) {
  const auto size = static_cast<std::size_t>(state.range(0));
  const std::size_t count = size / bytes(dtype);
  Vectors vectors(from_count + to_count, size);
  void* const* to = vectors.pointers.data();
  const void* const* from = to + to_count;
  const ReduceKernel kernel = table->reduce[static_cast<int>(op)][static_cast<int>(dtype)];
  for (auto _ : state) {
    kernel(to, to_count, from, from_count, count, store);
    if (store == Store::stream) store_fence();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * (from_count + to_count));
}

void copy(benchmark::State& state, const KernelTable* table, int to_count, Store store) {
  const auto size = static_cast<std::size_t>(state.range(0));
  Vectors vectors(1 + to_count, size);
  void* const* to = vectors.pointers.data();
  for (auto _ : state) {
    if (table == nullptr) {
      std::memcpy(to[0], to[1], size);
    } else {
      table->copy(to, to_count, to[to_count], size, store);
      if (store == Store::stream) store_fence();
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * (1 + to_count));
}

void add_sizes(benchmark::internal::Benchmark* benchmark, std::vector<std::int64_t> sizes) {
  for (const std::int64_t size : sizes) benchmark->Arg(size);
}

const std::vector<std::int64_t> kSizes = {4096, 16384, 262144, 4 << 20, 64 << 20};

}  // namespace

int main(int argc, char** argv) {
  add_sizes(benchmark::RegisterBenchmark("memcpy", copy, nullptr, 1, Store::cached), kSizes);
  for (const KernelTable* table : kernel_tables()) {
    const std::string isa = std::string("/") + table->isa;
    add_sizes(
        benchmark::RegisterBenchmark(("copy_1_to_1" + isa).c_str(), copy, table, 1, Store::cached),
        kSizes);
    add_sizes(
        benchmark::RegisterBenchmark(("copy_1_to_2" + isa).c_str(), copy, table, 2, Store::cached),
        kSizes);
    add_sizes(
        benchmark::RegisterBenchmark(("copy_stream" + isa).c_str(), copy, table, 1, Store::stream),
        kSizes);
    const auto add = [&](Op op, Dtype dtype, int from_count, int to_count, Store store,
                         const std::vector<std::int64_t>& sizes) {
      const std::string title = std::string(name(op)) + "_" + std::string(name(dtype)) + isa + "/" +
                                std::to_string(from_count) + "_to_" + std::to_string(to_count) +
                                (store == Store::stream ? "_stream" : "");
      add_sizes(benchmark::RegisterBenchmark(title.c_str(), reduce, table, op, dtype, from_count,
                                             to_count, store),
                sizes);
    };
    for (const int from_count : {2, 3, 4, 8, 16, 64})
      add(Op::sum, Dtype::f32, from_count, 1, Store::cached, kSizes);
    add(Op::sum, Dtype::f32, 2, 2, Store::cached, kSizes);
    add(Op::sum, Dtype::f32, 8, 2, Store::cached, kSizes);
    for (const int from_count : {2, 4, 8})
      add(Op::sum, Dtype::f32, from_count, 1, Store::stream, kSizes);
    for (const int from_count : {2, 8}) {  // what a short call costs
      for (const int to_count : {1, 2})
        add(Op::sum, Dtype::f32, from_count, to_count, Store::cached, {4, 8, 16, 28, 32, 64, 256});
    }
    for (int op = 0; op < kOps; ++op) {  // every loop, where only the loop counts
      for (int dtype = 0; dtype < kDtypes; ++dtype) {
        if (!is_defined(static_cast<Op>(op), static_cast<Dtype>(dtype))) continue;
        for (const int from_count : {2, 8})
          add(static_cast<Op>(op), static_cast<Dtype>(dtype), from_count, 1, Store::cached, {8192});
      }
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}

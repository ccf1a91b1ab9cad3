// SPDX-License-Identifier: BSD-3-Clause
// What no reduction of vectors in host memory can be quicker than: every rank reads its vector and
// writes its part of the result, all at the same time, with no rank waiting for another.
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "bench_side.hpp"
#include "bench_world.hpp"

namespace trib::bench {
namespace {

using Move = void (*)(const std::byte* in, std::byte* out, std::size_t bytes);

/// Of `bytes`, a multiple of 64. By the widest loads there are: in the caches they count.
template <class Vector>
[[gnu::always_inline]] inline void read_by(const std::byte* in, std::size_t bytes) {
  Vector sum = {};
  for (std::size_t at = 0; at < bytes; at += 64) {
    Vector part[64 / sizeof(Vector)];
    std::memcpy(&part, in + at, 64);
    for (const Vector& one : part) sum ^= one;
  }
  volatile auto sink = sum[0];
  static_cast<void>(sink);
}
using Words16 = std::uint64_t __attribute__((vector_size(16)));
#if defined(__x86_64__)
using Words32 = std::uint64_t __attribute__((vector_size(32)));
using Words64 = std::uint64_t __attribute__((vector_size(64)));
[[gnu::target("avx512f")]] void read_64(const std::byte* in, std::size_t bytes) {
  read_by<Words64>(in, bytes);
}
[[gnu::target("avx2")]] void read_32(const std::byte* in, std::size_t bytes) {
  read_by<Words32>(in, bytes);
}
void read(const std::byte* in, std::size_t bytes) {
  if (__builtin_cpu_supports("avx512f")) return read_64(in, bytes);
  if (__builtin_cpu_supports("avx2")) return read_32(in, bytes);
  read_by<Words16>(in, bytes);
}
#else
void read(const std::byte* in, std::size_t bytes) { read_by<Words16>(in, bytes); }
#endif

void copy(const std::byte* in, std::byte* out, std::size_t bytes) { std::memcpy(out, in, bytes); }

/// Past the caches, where this is known how to do. `out` is aligned to 16 bytes, `bytes` a multiple
/// of 64.
void stream(const std::byte* in, std::byte* out, std::size_t bytes) {
#if defined(__x86_64__)
  for (std::size_t at = 0; at < bytes; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at)));
  _mm_sfence();
#else
  copy(in, out, bytes);
#endif
}

class FloorSide final : public Side {
 public:
  explicit FloorSide(const World& world) : world_(world) {}

  std::string name() const override { return "floor"; }
  std::string algorithm() const override { return write_ == stream ? "streamed" : "cached"; }
  bool computes() const override { return false; }

  /// Which way is the quicker one depends on what fits into which cache.
  void prepare(const Call& call) override {
    constexpr int kRuns = 5;
    std::vector<double> seconds;
    for (const Move way : {Move{copy}, Move{stream}}) {
      write_ = way;
      std::vector<double> runs(kRuns);
      for (double& one : runs) {
        world_.barrier();
        const auto begin = std::chrono::steady_clock::now();
        run(call);
        one = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      }
      seconds.push_back(*std::min_element(runs.begin(), runs.end()));
    }
    world_.combine(seconds, MPI_MAX);
    write_ = seconds[1] < seconds[0] ? Move{stream} : Move{copy};
  }

  void run(const Call& call) override {
    const auto* const in = static_cast<const std::byte*>(call.in);
    auto* const out = static_cast<std::byte*>(call.out);
    const std::size_t width = trib::bytes(call.dtype);
    // In whole lines: the rest is nothing where this tells something.
    const std::size_t all = call.count * width / 64 * 64, mine = call.mine.count * width / 64 * 64;
    const std::size_t first = std::min(call.mine.first * width / 64 * 64, all - mine);
    read(in, first);
    write_(in + first, out, mine);
    read(in + first + mine, all - first - mine);
  }

 private:
  const World& world_;
  Move write_ = copy;
};

}  // namespace

std::unique_ptr<Side> make_floor_side(const World& world) {
  return std::make_unique<FloorSide>(world);
}

}  // namespace trib::bench

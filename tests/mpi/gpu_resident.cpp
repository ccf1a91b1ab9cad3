// SPDX-License-Identifier: BSD-3-Clause
// TRIB_RESIDENT: small reductions one after the other, served by a kernel that waits for the next
// one; with "large", others in between, too. Pauses of about as long as it waits, other calls in
// between, buffers that move, values that arrive on the default stream, a thread that synchronises
// the device: whoever serves a call, its result has to be right. With TRIB_DEFAULT_STREAM=ignore,
// this program synchronises.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;
KernelCalls kernel_calls;

float value(int r, int i, int round) {
  return static_cast<float>((i * 7 + r * 13 + round * 5) % 101);
}

void pause(double microseconds) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::duration<double, std::micro>(microseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

/// What fills the buffers is over, if nobody else is to look.
void settle() {
  static const char* const setting = std::getenv("TRIB_DEFAULT_STREAM");
  if (setting == nullptr || std::strcmp(setting, "ignore") != 0) return;
  CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "");
}

/// `linger`: microseconds, as the setting says.
void mixture(int rounds, double linger, bool has_large) {
  Gpu& gpu = Gpu::get();
  constexpr int kMost = 200000, kBuffers = 4;
  float* in[kBuffers];
  float* out[kBuffers];
  for (int i = 0; i < kBuffers; ++i) {
    in[i] = static_cast<float*>(gpu.allocate(kMost * 4 + 64)) + i;
    out[i] = static_cast<float*>(gpu.allocate(kMost * 4 + 64)) + 2 * i;
  }
  std::vector<float> host(kMost);
  std::mt19937 same(1);                                   // the same on all ranks
  std::mt19937 own(static_cast<unsigned>(rank) * 7 + 3);  // pauses
  int count = 1, root = 0, which = 0;
  for (int round = 0; round < rounds; ++round) {
    if (same() % 30 == 0) {
      constexpr int kCounts[] = {1, 2, 3, 255, 256, 1000, 2048, 3000, 20000, 50000, kMost};
      count = kCounts[same() % (has_large ? 11 : 8)];
      root = static_cast<int>(same() % static_cast<unsigned>(size));
    }
    if (same() % 7 == 0) which = static_cast<int>(same() % kBuffers);
    const unsigned kind = same() % 40;
    const bool is_uniform = same() % 5 == 0, is_in_place = same() % 4 == 0;
    float* const from = in[which];
    float* const to = is_in_place ? from : out[which];
    if (is_uniform) {  // on its way while the reduction is called
      const float all = value(rank, 0, round);
      unsigned bits;
      std::memcpy(&bits, &all, 4);
      CHECK(gpu.call("cuMemsetD32Async", reinterpret_cast<unsigned long long>(from), bits,
                     static_cast<std::size_t>(count), static_cast<void*>(nullptr)) == 0,
            "");
    } else {
      for (int i = 0; i < count; ++i) host[static_cast<std::size_t>(i)] = value(rank, i, round);
      gpu.copy(from, host.data(), static_cast<std::size_t>(count) * 4);
    }
    settle();
    switch (own() % 8) {
      case 0:
        pause(linger * (0.8 + 0.05 * (own() % 10)));
        break;  // just when it leaves
      case 1:
        pause(own() % 3);
        break;
      case 2:
        if (own() % 10 == 0) pause(5 * linger);
        break;
      default:
        break;
    }
    bool has_result = true;
    if (kind < 3) {
      has_result = rank == root;
      CHECK(MPI_Reduce(is_in_place && has_result ? MPI_IN_PLACE : from, to, count, MPI_FLOAT,
                       MPI_SUM, root, MPI_COMM_WORLD) == MPI_SUCCESS,
            "");
    } else {
      CHECK(MPI_Allreduce(is_in_place ? MPI_IN_PLACE : from, to, count, MPI_FLOAT, MPI_SUM,
                          MPI_COMM_WORLD) == MPI_SUCCESS,
            "");
    }
    CHECK(was_served(MPI_COMM_WORLD), "round %d: left to the MPI", round);
    kernel_calls.note(MPI_COMM_WORLD);
    if (!has_result) continue;
    gpu.copy(host.data(), to, static_cast<std::size_t>(count) * 4);
    for (int i = 0; i < count; ++i) {
      float expected = 0;
      for (int r = 0; r < size; ++r) expected += value(r, is_uniform ? 0 : i, round);
      CHECK(host[static_cast<std::size_t>(i)] == expected,
            "round %d, element %d of %d, buffer %d, kind %u, uniform %d, in place %d: %g, not %g",
            round, i, count, which, kind, is_uniform, is_in_place,
            static_cast<double>(host[static_cast<std::size_t>(i)]), static_cast<double>(expected));
    }
  }
}

/// The same parts over and over, now and then with results over inputs that others still read.
void scatter(int rounds) {
  Gpu& gpu = Gpu::get();
  std::vector<int> counts(static_cast<std::size_t>(size), 1000);
  counts[0] = 300;
  int total = 0, begin = 0;
  for (int r = 0; r < size; ++r) {
    if (r == rank) begin = total;
    total += counts[static_cast<std::size_t>(r)];
  }
  const int mine = counts[static_cast<std::size_t>(rank)];
  auto* const in = static_cast<float*>(gpu.allocate(static_cast<std::size_t>(total) * 4));
  auto* const out = static_cast<float*>(gpu.allocate(static_cast<std::size_t>(mine) * 4));
  std::vector<float> host(static_cast<std::size_t>(total));
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < total; ++i) host[static_cast<std::size_t>(i)] = value(rank, i, round);
    gpu.copy(in, host.data(), static_cast<std::size_t>(total) * 4);
    settle();
    const bool is_in_place = round % 3 == 2;
    float* const to = is_in_place ? in : out;
    CHECK(MPI_Reduce_scatter(is_in_place ? MPI_IN_PLACE : in, to, counts.data(), MPI_FLOAT, MPI_SUM,
                             MPI_COMM_WORLD) == MPI_SUCCESS,
          "");
    kernel_calls.note(MPI_COMM_WORLD);
    gpu.copy(host.data(), to, static_cast<std::size_t>(mine) * 4);
    for (int i = 0; i < mine; ++i) {
      float expected = 0;
      for (int r = 0; r < size; ++r) expected += value(r, begin + i, round);
      CHECK(host[static_cast<std::size_t>(i)] == expected,
            "reduce_scatter, round %d, element %d of %d, in place %d: %g, not %g", round, i, mine,
            is_in_place, static_cast<double>(host[static_cast<std::size_t>(i)]),
            static_cast<double>(expected));
    }
  }
  gpu.free(in);
  gpu.free(out);
}

/// Another thread synchronises the device while this one reduces without a pause: that must not go
/// on until the reductions end, which here end only after it.
void synchronised_by_another_thread() {
  Gpu& gpu = Gpu::get();
  constexpr int kCount = 16, kTimes = 20;
  auto* const in = static_cast<float*>(gpu.allocate(kCount * 4));
  auto* const out = static_cast<float*>(gpu.allocate(kCount * 4));
  std::vector<float> host(kCount, static_cast<float>(rank + 1));
  gpu.copy(in, host.data(), kCount * 4);
  settle();
  void* context = nullptr;
  CHECK(gpu.call("cuCtxGetCurrent", &context) == 0, "");
  std::atomic<int> times{0};
  std::thread other([&] {
    CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "");
    for (; times < kTimes; ++times) CHECK(gpu.call("cuCtxSynchronize") == 0, "");
  });
  const auto start = std::chrono::steady_clock::now();
  for (int are_all_through = 0; are_all_through == 0;) {
    for (int i = 0; i < 200; ++i)
      CHECK(MPI_Allreduce(in, out, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
    const int is_through = times == kTimes ? 1 : 0;
    CHECK(MPI_Allreduce(&is_through, &are_all_through, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD) ==
              MPI_SUCCESS,
          "");
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    CHECK(waited.count() < 60, "%d of %d synchronisations of the device ended", times.load(),
          kTimes);
  }
  other.join();
  gpu.copy(host.data(), out, kCount * 4);
  for (const float sum : host)
    CHECK(sum == static_cast<float>(size * (size + 1) / 2), "%g", static_cast<double>(sum));
  gpu.free(in);
  gpu.free(out);
}

/// A kernel that lingers keeps a synchronisation of the device waiting no longer than the setting
/// says: right after reductions that it has served, again and again.
void synchronisations_end(double linger) {
  if (Gpu::get().count() < size) return;  // the GPU takes processes in turns, of milliseconds
  Gpu& gpu = Gpu::get();
  constexpr int kCount = 16, kTimes = 2000, kCalls = 4;
  constexpr double kMostOfMedian = 100, kMostOfLongest = 20000;  // microseconds beyond `linger`
  auto* const in = static_cast<float*>(gpu.allocate(kCount * 4));
  auto* const out = static_cast<float*>(gpu.allocate(kCount * 4));
  std::vector<float> host(kCount, static_cast<float>(rank + 1));
  gpu.copy(in, host.data(), kCount * 4);
  CHECK(gpu.call("cuCtxSynchronize") == 0, "");
  std::vector<double> waits, stays;
  for (int i = 0; i < kTimes; ++i) {
    const auto first = std::chrono::steady_clock::now();
    for (int call = 0; call < kCalls; ++call)
      CHECK(MPI_Allreduce(in, out, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
    const auto begin = std::chrono::steady_clock::now();
    CHECK(gpu.call("cuCtxSynchronize") == 0, "");
    const auto end = std::chrono::steady_clock::now();
    if (i < kTimes / 10) continue;  // the first ones load kernels
    waits.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    stays.push_back(std::chrono::duration<double, std::micro>(end - first).count());
  }
  std::sort(waits.begin(), waits.end());
  std::sort(stays.begin(), stays.end());
  const double median = waits[waits.size() / 2], longest = waits.back();
  std::printf("rank %d: synchronisations of the device took %.0f us (median), %.0f us (longest)\n",
              rank, median, longest);
  std::fflush(stdout);
  CHECK(median <= linger + kMostOfMedian, "%.0f us, lingering for %.0f us", median, linger);
  CHECK(longest <= linger + kMostOfLongest, "%.0f us, lingering for %.0f us", longest, linger);
  // A kernel that lingers leaves so long after its first call, at the earliest. Where eight in a
  // row served no other call, most of those behind them do not linger. Four calls by kernels that
  // do not take some 50 us.
  const double stay = stays[stays.size() / 2];
  if (linger >= 100 && has_kernels())
    CHECK(stay >= 0.9 * linger, "%.0f us: no kernels linger for %.0f us and serve calls meanwhile",
          stay, linger);
  gpu.copy(host.data(), out, kCount * 4);
  for (const float sum : host)
    CHECK(sum == static_cast<float>(size * (size + 1) / 2), "%g", static_cast<double>(sum));
  gpu.free(in);
  gpu.free(out);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  const char* const linger = std::getenv("TRIB_RESIDENT");
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20000;
  if (size > 1) scatter(rounds / 10);
  if (size > 1 && linger) synchronisations_end(std::atof(linger));
  if (size > 1) synchronised_by_another_thread();
  if (size > 1) mixture(rounds, linger ? std::atof(linger) : 20, argc > 2);
  kernel_calls.check();
  if (rank == 0) std::printf("%d calls checked\n", size > 1 ? rounds : 0);
  MPI_Finalize();
}

// SPDX-License-Identifier: BSD-3-Clause
// Blocking reductions of GPU buffers in long mixed sequences: all collectives, roots, in place or
// not, uneven and empty parts, odd lengths and offsets. For copy engines, which are driven by all
// ranks' hosts and use their inboxes in turn: run with TRIB_ENGINE=copy and a small TRIB_SLICE, and
// with long vectors among short ones: "long".
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;

std::uint32_t state = 12345;
int choose(int count) {
  state = state * 1664525u + 1013904223u;
  return static_cast<int>((state >> 8) % static_cast<std::uint32_t>(count));
}

/// Sums of few of these are exact in all types.
template <class T>
T value(int r, std::size_t i, int round) {
  return static_cast<T>(
      (i * 7 + static_cast<std::size_t>(r) * 5 + static_cast<std::size_t>(round) * 3) % 11);
}

constexpr const char* kNames[] = {"allreduce", "reduce", "reduce_scatter", "reduce_scatter_block"};

template <class T>
void one_call(MPI_Datatype type, std::size_t count, int round) {
  Gpu& gpu = Gpu::get();
  const auto ranks = static_cast<std::size_t>(size);
  const int collective = choose(4), root = choose(size), shift = choose(4);
  const bool is_in_place = choose(2) == 0;
  std::vector<int> counts(ranks, static_cast<int>(count / ranks));
  if (collective == 2)
    for (int& part : counts) part = choose(4) == 0 ? 0 : part / 2 + choose(part + 2);
  std::size_t total = count, begin = 0, mine = count;
  if (collective >= 2) {
    total = 0;
    for (int r = 0; r < size; ++r) {
      if (r == rank) begin = total;
      total += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
    }
    mine = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]);
  }
  const bool has_result = collective != 1 || rank == root;
  std::vector<T> host(total);
  for (std::size_t i = 0; i < total; ++i) host[i] = value<T>(rank, i, round);
  const std::size_t room = (total + 8) * sizeof(T);
  auto* const in_memory = static_cast<T*>(gpu.allocate(room));
  auto* const out_memory = static_cast<T*>(gpu.allocate(room));
  T *const in = in_memory + shift, *out = out_memory + 3 - shift;
  std::vector<T> guard(total + 8, static_cast<T>(99));
  gpu.copy(out_memory, guard.data(), room);
  gpu.copy(in, host.data(), total * sizeof(T));
  const void* send = in;
  void* receive = has_result ? out : nullptr;
  if (is_in_place && has_result) {
    send = MPI_IN_PLACE;
    receive = out = in;
  }
  int status = MPI_SUCCESS;
  const auto length = static_cast<int>(total);
  if (collective == 0)
    status = MPI_Allreduce(send, receive, length, type, MPI_SUM, MPI_COMM_WORLD);
  else if (collective == 1)
    status = MPI_Reduce(send, receive, length, type, MPI_SUM, root, MPI_COMM_WORLD);
  else if (collective == 2)
    status = MPI_Reduce_scatter(send, receive, counts.data(), type, MPI_SUM, MPI_COMM_WORLD);
  else
    status = MPI_Reduce_scatter_block(send, receive, counts[0], type, MPI_SUM, MPI_COMM_WORLD);
  char what[200];
  std::snprintf(what, sizeof what,
                "%s of %zu elements of %zu bytes, in place %d, root %d, shift %d, round %d",
                kNames[collective], total, sizeof(T), is_in_place, root, shift, round);
  CHECK(status == MPI_SUCCESS, "%s: %s", what, error_text(status).c_str());
  if (has_result) {
    std::vector<T> found(mine);
    gpu.copy(found.data(), out, mine * sizeof(T));
    for (std::size_t i = 0; i < mine; ++i) {
      T expected = 0;
      for (int r = 0; r < size; ++r)
        expected = static_cast<T>(expected + value<T>(r, begin + i, round));
      CHECK(found[i] == expected, "%s: element %zu: %g, not %g", what, i,
            static_cast<double>(found[i]), static_cast<double>(expected));
    }
  }
  if (out != in && has_result) {  // around the result, and in `in`
    gpu.copy(guard.data(), out_memory, room);
    const auto at = static_cast<std::size_t>(out - out_memory);
    for (std::size_t i = 0; i < at; ++i) CHECK(guard[i] == static_cast<T>(99), "%s: before", what);
    for (std::size_t i = at + mine; i < guard.size(); ++i)
      CHECK(guard[i] == static_cast<T>(99), "%s: behind, %zu", what, i - at - mine);
    std::vector<T> after(total);
    gpu.copy(after.data(), in, total * sizeof(T));
    CHECK(total == 0 || std::memcmp(after.data(), host.data(), total * sizeof(T)) == 0,
          "%s: the input has changed", what);
  }
  gpu.free(in_memory);
  gpu.free(out_memory);
}

/// Whether sums are left folds over the ranks. Of two numbers there is but one sum; others cuBLAS
/// makes in an order of its own, as some algorithms do, and ranks that share one of several GPUs
/// are added up first.
bool is_fold_over_ranks() {
  if (!is_served_here()) return false;
  if (size <= 2) return true;
  const char* const engine = std::getenv("TRIB_ENGINE");
  if (engine != nullptr && std::strcmp(engine, "gemv") == 0) return false;
  const char* const named = std::getenv("TRIB_ALGORITHM");
  const std::string algorithm = named != nullptr ? named : "auto";
  if (algorithm != "auto" && algorithm != "one_shot" && algorithm != "two_shot") return false;
  const std::size_t groups = groups_of_ranks().size();
  return groups == 1 || groups == static_cast<std::size_t>(size);
}

/// Sums that depend on the order in which they are made: all ranks get the same bits, and those of
/// a left fold over the ranks unless something else is asked for.
void bits() {
  Gpu& gpu = Gpu::get();
  const bool is_fold = is_fold_over_ranks();
  const auto contribution = [](int r, std::size_t i) {
    const float magnitude = i % 3 == 0 ? 1e8F : 1.0F;
    return (r % 2 == 0 ? magnitude : -magnitude) + static_cast<float>(r) * 0.37F;
  };
  for (const std::size_t count : {1u, 1000u, 20000u, 300000u, 3000001u}) {
    auto* const data = static_cast<float*>(gpu.allocate(count * 4));
    std::vector<float> host(count);
    for (std::size_t i = 0; i < count; ++i) host[i] = contribution(rank, i);
    gpu.copy(data, host.data(), count * 4);
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                        MPI_COMM_WORLD) == MPI_SUCCESS,
          "");
    gpu.copy(host.data(), data, count * 4);
    gpu.free(data);
    std::vector<float> theirs = host;
    CHECK(MPI_Bcast(theirs.data(), static_cast<int>(count), MPI_FLOAT, 0, MPI_COMM_WORLD) ==
              MPI_SUCCESS,
          "");
    for (std::size_t i = 0; i < count; ++i)
      CHECK(std::memcmp(&host[i], &theirs[i], 4) == 0,
            "element %zu of %zu: %.9g here, %.9g on rank 0", i, count, static_cast<double>(host[i]),
            static_cast<double>(theirs[i]));
    if (!is_fold) continue;
    for (std::size_t i = 0; i < count; ++i) {
      float expected = contribution(0, i);
      for (int r = 1; r < size; ++r) expected += contribution(r, i);
      CHECK(std::memcmp(&host[i], &expected, 4) == 0,
            "element %zu of %zu: %.9g, but %.9g in the order of the ranks", i, count,
            static_cast<double>(host[i]), static_cast<double>(expected));
    }
  }
  const std::string served_by = last_algorithm(MPI_COMM_WORLD);
  const char* const engine = std::getenv("TRIB_ENGINE");
  // With one visible GPU (one_gpu_each.sh) it is the driver's business whether they reach the
  // others.
  if (engine != nullptr && std::strcmp(engine, "copy") == 0 && size > 1 && has_gpu_each() &&
      std::getenv("TEST_GPUS") == nullptr)
    CHECK(served_by.rfind("copied_", 0) == 0, "3000001 floats: by %s, not by copy engines",
          served_by.c_str());
  if (rank == 0) std::printf("sums that round: by %s\n", served_by.c_str());
  if (rank == 0)
    std::printf(is_fold ? "the bits are those of a left fold over the ranks\n"
                        : "the bits are the same on all ranks\n");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  // Ranks that share a GPU do without such engines.
  if (argc > 3 && std::string(argv[3]) == "each") skip_without_gpu_each();
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const bool is_long = argc > 1 && std::string(argv[1]) == "long";
  bits();
  int rounds = is_long ? 24 : 400;
  if (argc > 2) rounds = std::atoi(argv[2]);
  for (int round = 0; round < rounds; ++round) {
    const int kind = choose(4), magnitude = choose(is_long ? 4 : 6);
    constexpr int kShort[] = {1, 9, 100, 3000, 70000, 900000};
    constexpr int kLong[] = {5, 30000, 20000000, 30000000};
    const int most = is_long ? kLong[magnitude] : kShort[magnitude];
    const auto count = static_cast<std::size_t>(most / 2 + choose(most) + 1);
    if (kind == 0) one_call<double>(MPI_DOUBLE, count, round);
    if (kind == 1) one_call<float>(MPI_FLOAT, count, round);
    if (kind == 2) one_call<std::int8_t>(MPI_INT8_T, count, round);
    if (kind == 3) one_call<std::int16_t>(MPI_INT16_T, count, round);
  }
  if (rank == 0) std::printf("%d calls checked\n", rounds);
  MPI_Finalize();
  return 0;
}

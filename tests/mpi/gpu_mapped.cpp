// SPDX-License-Identifier: BSD-3-Clause
// Kernels that work on the buffers of all GPUs: the bits of results in every collective, size and
// place, buffers that come and go, memory that cannot be mapped, and calls of other kinds in
// between. One rank per GPU, or TRIB_SHARED_GPU=all. With TRIB_MAP=always whatever can be mapped
// has to be.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"
#include "gpu_buffer.hpp"

namespace {

int rank, size;
bool is_always, is_results;  // TRIB_MAP: always, results
long calls = 0, mapped = 0;

/// Where GPUs reach each other's memory, and calls are served at all.
bool can_map() {
  static const bool result = [] {
    const char* const p2p = std::getenv("TRIB_P2P");
    if (!is_served_here() || (p2p != nullptr && std::string(p2p) == "off")) return false;
    // Of GPUs that this process does not see it cannot ask, but it maps their memory all the same.
    int seen = 0;
    CHECK(Gpu::get().call("cuDeviceGetCount", &seen) == 0, "");
    const int gpus = std::min({size, Gpu::get().count(), seen});
    for (int a = 0; a < gpus; ++a)
      for (int b = 0; b < gpus; ++b) {
        int can = 1, one = 0, other = 0;
        CHECK(Gpu::get().call("cuDeviceGet", &one, a) == 0, "");
        CHECK(Gpu::get().call("cuDeviceGet", &other, b) == 0, "");
        if (a != b) CHECK(Gpu::get().call("cuDeviceCanAccessPeer", &can, one, other) == 0, "");
        if (can == 0) return false;
      }
    return true;
  }();
  return result;
}
/// Whether it works on other ranks' buffers.
bool is_of_mapped(const std::string& algorithm) {
  return algorithm.rfind("mapped_", 0) == 0 || algorithm.rfind("direct_", 0) == 0;
}
bool was_mapped(MPI_Comm comm) { return is_of_mapped(last_algorithm(comm)); }

/// Behind what is under way on the default stream, kernels do not work on peers' buffers.
void settle() {
  void* const default_stream = nullptr;
  CHECK(Gpu::get().call("cuStreamSynchronize", default_stream) == 0, "");
}

std::uint32_t state = 99;  // the same on all ranks
int choose(int count) {
  state = state * 1664525u + 1013904223u;
  return static_cast<int>((state >> 8) % static_cast<std::uint32_t>(count));
}

/// Numbers whose float sums depend on their order.
std::uint32_t mixed(int r, std::size_t i, int round) {
  std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761u +
                    static_cast<std::uint32_t>(r) * 40503u + static_cast<std::uint32_t>(round);
  x ^= x >> 15;
  x *= 2246822519u;
  return x ^ x >> 13;
}

/// A type and an operator, and what they come to.
template <class T>
struct Fold {
  const char* name;
  MPI_Datatype type;
  MPI_Op op;
  T (*value)(std::uint32_t mixed);
  T (*apply)(T a, T b);
};
const Fold<float> kFloatSum{
    "float sum", MPI_FLOAT, MPI_SUM,
    [](std::uint32_t x) { return static_cast<float>(x) / 65536.0f - 20000.0f; },
    [](float a, float b) { return a + b; }};
const Fold<double> kDoubleProduct{
    "double product", MPI_DOUBLE, MPI_PROD,
    [](std::uint32_t x) { return 0.5 + static_cast<double>(x) / 4e9; },
    [](double a, double b) { return a * b; }};
const Fold<std::uint8_t> kByteSum{
    "byte sum", MPI_UINT8_T, MPI_SUM, [](std::uint32_t x) { return static_cast<std::uint8_t>(x); },
    [](std::uint8_t a, std::uint8_t b) { return static_cast<std::uint8_t>(a + b); }};
const Fold<std::int16_t> kShortMin{"short min", MPI_INT16_T, MPI_MIN,
                                   [](std::uint32_t x) { return static_cast<std::int16_t>(x); },
                                   [](std::int16_t a, std::int16_t b) { return b < a ? b : a; }};
const Fold<std::uint64_t> kLongXor{"long xor", MPI_UINT64_T, MPI_BXOR,
                                   [](std::uint32_t x) { return std::uint64_t{x} << 20 | x; },
                                   [](std::uint64_t a, std::uint64_t b) { return a ^ b; }};

struct Call {
  std::string collective;
  std::size_t count = 0;  // of the vector; reduce_scatter_block: a multiple of the ranks
  bool in_place = false;
  int root = 0;
  std::size_t in_shift = 0, out_shift = 0;  // elements before the buffers, in their allocations
  Kind kind = Kind::device;
};

/// Elements of the result that `r` gets, and how many come before them.
std::size_t part_of(const Call& call, int ranks, int r, std::size_t* before = nullptr) {
  const auto p = static_cast<std::size_t>(ranks), q = static_cast<std::size_t>(r);
  const std::size_t even = call.count / p;
  std::size_t begin = 0, length = call.count;
  if (call.collective == "reduce_scatter_block") {
    begin = q * even;
    length = even;
  } else if (call.collective == "reduce_scatter") {  // the first rank gets nothing, the last more
    begin = q == 0 ? 0 : (q - 1) * even;
    length = q == 0 ? 0 : q + 1 == p ? call.count - begin : even;
  } else if (call.collective == "reduce" && r != call.root) {
    length = 0;
  }
  if (before != nullptr) *before = begin;
  return length;
}

template <class T>
void run(const Fold<T>& fold, const Call& call, int round, MPI_Comm comm = MPI_COMM_WORLD) {
  int own = 0, ranks = 0;
  MPI_Comm_rank(comm, &own);
  MPI_Comm_size(comm, &ranks);
  std::size_t before = 0;
  const std::size_t part = part_of(call, ranks, own, &before);
  Buffer in((call.in_shift + call.count) * sizeof(T), 0, call.kind);
  Buffer out((call.out_shift + part) * sizeof(T), 77, call.kind);
  const std::size_t in_at = Buffer::kGuard + call.in_shift * sizeof(T);
  const std::size_t out_at = Buffer::kGuard + call.out_shift * sizeof(T);
  for (std::size_t i = 0; i < call.count; ++i) {
    const T v = fold.value(mixed(own, i, round));
    std::memcpy(in.before.data() + in_at + i * sizeof v, &v, sizeof v);
  }
  T* const from = static_cast<T*>(in.ready()) + call.in_shift;
  T* const to = static_cast<T*>(out.ready()) + call.out_shift;
  const bool is_root = call.collective != "reduce" || own == call.root;
  const void* const send = call.in_place && is_root ? MPI_IN_PLACE : from;
  T* const receive = call.in_place ? from : is_root ? to : nullptr;
  const int count = static_cast<int>(call.count);
  const std::string what = std::string(fold.name) + ", " + call.collective + " of " +
                           std::to_string(count) + ", in place " + std::to_string(call.in_place) +
                           ", root " + std::to_string(call.root) + ", shifts " +
                           std::to_string(call.in_shift) + " and " +
                           std::to_string(call.out_shift) + ", round " + std::to_string(round);
  int result = MPI_SUCCESS;
  if (is_always || is_results) settle();
  if (call.collective == "allreduce") {
    result = MPI_Allreduce(send, receive, count, fold.type, fold.op, comm);
  } else if (call.collective == "reduce") {
    result = MPI_Reduce(send, receive, count, fold.type, fold.op, call.root, comm);
  } else if (call.collective == "reduce_scatter_block") {
    result = MPI_Reduce_scatter_block(send, receive, count / ranks, fold.type, fold.op, comm);
  } else {
    std::vector<int> counts;
    for (int r = 0; r < ranks; ++r) counts.push_back(static_cast<int>(part_of(call, ranks, r)));
    result = MPI_Reduce_scatter(send, receive, counts.data(), fold.type, fold.op, comm);
  }
  CHECK(result == MPI_SUCCESS, "%s: %s", what.c_str(), error_text(result).c_str());
  if (call.count > 0) {
    ++calls;
    mapped += was_mapped(comm) ? 1 : 0;
  }
  const bool is_in = call.in_place;
  const Buffer& where = is_in ? in : out;
  const std::size_t at = is_in ? in_at : out_at;
  const std::vector<unsigned char> now = where.now();
  for (std::size_t i = 0; i < part; ++i) {
    T got, expected = fold.value(mixed(0, before + i, round));
    for (int r = 1; r < ranks; ++r)
      expected = fold.apply(expected, fold.value(mixed(r, before + i, round)));
    std::memcpy(&got, now.data() + at + i * sizeof(T), sizeof(T));
    CHECK(std::memcmp(&got, &expected, sizeof(T)) == 0, "%s: element %zu of %zu: %.17g, not %.17g",
          what.c_str(), i, part, static_cast<double>(got), static_cast<double>(expected));
  }
  // What is not the result stays as it was. In place, a scattered result leaves the rest open.
  for (std::size_t i = 0; i < at; ++i)
    CHECK(now[i] == where.before[i], "%s: byte %zu before the result", what.c_str(), i);
  const std::size_t end = is_in ? at + call.count * sizeof(T) : at + part * sizeof(T);
  for (std::size_t i = end; i < now.size(); ++i)
    CHECK(now[i] == where.before[i], "%s: byte %zu behind it", what.c_str(), i);
  if (!is_in) CHECK(in.now() == in.before, "%s: the input was changed", what.c_str());
}

/// In place, a scattered result lies over what peers read; and it is stored by its own rank.
bool is_mappable(const Call& call) {
  return call.kind == Kind::device && call.count > 0 &&
         !((call.in_place || is_results) && call.collective.rfind("reduce_scatter", 0) == 0);
}

template <class T>
void all_calls(const Fold<T>& fold) {
  int round = 0;
  for (const char* const collective :
       {"allreduce", "reduce", "reduce_scatter", "reduce_scatter_block"})
    for (const std::size_t count : {0, 1, 3, 17, 64, 1001, 4096, 70001, 1 << 18, 1500007})
      for (int variant = 0; variant < 4; ++variant, ++round) {
        Call call{collective, count, variant % 2 == 1, round % size, 0, 0, Kind::device};
        if (call.collective == "reduce_scatter_block") call.count *= static_cast<std::size_t>(size);
        if (variant >= 2) call.in_shift = static_cast<std::size_t>(round % 5);
        if (variant >= 2) call.out_shift = static_cast<std::size_t>(round % 7);
        run(fold, call, round);
        if ((is_always || is_results) && can_map() && is_mappable(call) &&
            last_algorithm(MPI_COMM_WORLD) != "none")
          CHECK(was_mapped(MPI_COMM_WORLD), "%s, %s of %zu: by %s", fold.name, collective,
                call.count, last_algorithm(MPI_COMM_WORLD).c_str());
      }
}

/// Sums in place, again and again: by the last one the buffer has been mapped, if it can be. Gives
/// who served that.
std::string repeated_sums(unsigned* data, std::size_t count, MPI_Comm comm = MPI_COMM_WORLD) {
  // By default a buffer has to have been in use that often.
  const int before = is_always || is_results ? 0 : 256;
  constexpr int kCalls = 5;
  std::vector<unsigned> host(count, static_cast<unsigned>(rank) + 1);
  Gpu::get().copy(data, host.data(), count * sizeof(unsigned));
  settle();
  for (int call = 0; call < before; ++call)
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_UNSIGNED, MPI_MAX, comm) ==
              MPI_SUCCESS,
          "");
  Gpu::get().copy(data, host.data(), count * sizeof(unsigned));
  settle();
  unsigned expected = static_cast<unsigned>(size * (size + 1) / 2);
  for (int call = 0; call < kCalls; ++call) {
    CHECK(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_UNSIGNED, MPI_SUM, comm) ==
              MPI_SUCCESS,
          "");
    if (call > 0) expected *= static_cast<unsigned>(size);
  }
  Gpu::get().copy(host.data(), data, count * sizeof(unsigned));
  for (std::size_t i = 0; i < count; ++i)
    CHECK(host[i] == expected, "sums of %zu, by %s: element %zu: %u, not %u", count,
          last_algorithm(comm).c_str(), i, host[i], expected);
  return last_algorithm(comm);
}

/// By default: some sizes, and buffers that are aligned.
void by_default() {
  if (is_always || is_results) return;
  auto* const data = static_cast<unsigned*>(Gpu::get().allocate(5 << 20));
  std::string by = repeated_sums(data, 1 << 20);
  CHECK(is_of_mapped(by) == can_map(), "4 MiB: by %s", by.c_str());
  by = repeated_sums(data + 1, 1 << 20);
  CHECK(!is_of_mapped(by), "4 MiB, not aligned: by %s", by.c_str());
  by = repeated_sums(data, 16);
  CHECK(!is_of_mapped(by), "64 bytes: by %s", by.c_str());
  Gpu::get().free(data);
}

/// Far more allocations than are mapped at a time.
void come_and_go() {
  constexpr int kRounds = 300;
  int on_mapped = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto count = static_cast<std::size_t>((1 << 20) + choose(100000));
    auto* const data = static_cast<unsigned*>(Gpu::get().allocate(count * sizeof(unsigned)));
    on_mapped += is_of_mapped(repeated_sums(data, count)) ? 1 : 0;
    Gpu::get().free(data);
  }
  if (can_map())
    CHECK(on_mapped >= kRounds * 9 / 10, "only %d of %d buffers were mapped", on_mapped, kRounds);
}

/// More buffers than can be mapped at a time, all of them in use.
void many_at_once() {
  Gpu& gpu = Gpu::get();
  constexpr int kBuffers = 150;
  constexpr std::size_t kCount = 1 << 16;
  std::vector<int*> buffers;
  for (int i = 0; i < kBuffers; ++i)
    buffers.push_back(static_cast<int*>(gpu.allocate(kCount * sizeof(int))));
  std::vector<int> host(kCount);
  for (int round = 0; round < 3000; ++round) {
    // First all of them by turns, later others than at first.
    int* const data = buffers[static_cast<std::size_t>(
        round < 2 * kBuffers ? round % kBuffers : kBuffers - 1 - round % 10)];
    const bool is_checked = round < 2 * kBuffers || round % 50 < 10;
    if (is_checked) {
      host.assign(kCount, rank + round);
      gpu.copy(data, host.data(), kCount * sizeof(int));
    }
    CHECK(
        MPI_Allreduce(MPI_IN_PLACE, data, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS,
        "");
    if (!is_checked) continue;
    gpu.copy(host.data(), data, kCount * sizeof(int));
    for (std::size_t i = 0; i < kCount; ++i)
      CHECK(host[i] == size * (size - 1) / 2 + size * round, "round %d, element %zu: %d", round, i,
            host[i]);
  }
  for (int* const buffer : buffers) gpu.free(buffer);
}

/// Memory that the program maps itself, in pieces: as long as all of a buffer's can be exported,
/// whatever has come to stand in their place.
void pieces() {
  if (is_results) return;
  constexpr int kPieces = 6;
  const auto check = [](const std::string& by, bool is_expected, const char* what) {
    CHECK(is_of_mapped(by) == (is_expected && can_map()), "%s: by %s", what, by.c_str());
  };
  MappedMemory memory(kPieces, 8 << 20, MappedMemory::kFile);
  const std::size_t each = memory.piece_bytes() / sizeof(unsigned);
  auto* const data = static_cast<unsigned*>(memory.data());
  check(repeated_sums(data, each / 2), true, "a part of a piece");
  check(repeated_sums(data + each / 2, each), true, "parts of two");
  check(repeated_sums(data + each, 2 * each), true, "the same two and another one");
  check(repeated_sums(data + each, each / 2), true, "a part of these");
  for (int round = 0; round < 12; ++round) {
    // Now and then on one rank alone.
    if (round % 3 != 0 || rank == round % size) memory.replace(round % kPieces);
    const std::size_t first = static_cast<std::size_t>(choose(3)) * each + 4;
    check(repeated_sums(data + first, each + each / 2), true, "a piece was replaced");
  }
  MappedMemory without(2, 8 << 20, MappedMemory::kNoHandle);
  check(repeated_sums(static_cast<unsigned*>(without.data()), each), false, "no handle");
  // On one rank only, and a buffer in more pieces than go with a letter.
  MappedMemory other(2, 8 << 20, rank == 0 ? MappedMemory::kNoHandle : MappedMemory::kFile);
  check(repeated_sums(static_cast<unsigned*>(other.data()), each), false, "no handle on rank 0");
  MappedMemory many(70, 1, MappedMemory::kFile);
  if (many.piece_bytes() <= (2 << 20) && is_always)
    check(repeated_sums(static_cast<unsigned*>(many.data()), many.bytes() / sizeof(unsigned)),
          false, "70 pieces");
  auto* const usual = static_cast<unsigned*>(Gpu::get().allocate(each * sizeof(unsigned)));
  check(repeated_sums(rank == 0 ? usual : data, each), true, "of cudaMalloc on rank 0");
  Gpu::get().free(usual);
}

/// Memory that has no handle, and other memory than the GPU's, on one rank at a time.
void not_everywhere() {
  Gpu& gpu = Gpu::get();
  constexpr std::size_t kCount = 1200000;
  void* const no_stream = nullptr;
  for (int round = 0; round < 30; ++round) {
    const int odd_one = round % (size + 1);  // `size`: none
    unsigned long long pool = 0;
    void* data = nullptr;
    if (rank == odd_one && round % 3 != 0) {
      CHECK(gpu.call("cuMemAllocAsync", &pool, kCount * 4, no_stream) == 0, "no pool");
      CHECK(gpu.call("cuStreamSynchronize", no_stream) == 0, "");
      data = reinterpret_cast<void*>(pool);
    } else if (rank == odd_one) {
      data = gpu.allocate_pinned(kCount * 4);
    } else {
      data = gpu.allocate(kCount * 4);
    }
    const std::string by = repeated_sums(static_cast<unsigned*>(data), kCount);
    if (can_map())
      CHECK(is_of_mapped(by) == (odd_one == size), "round %d: by %s", round, by.c_str());
    if (pool != 0)
      CHECK(gpu.call("cuMemFreeAsync", pool, no_stream) == 0, "");
    else if (rank == odd_one)
      gpu.free_pinned(data);
    else
      gpu.free(data);
  }
}

/// What is on its way on the default stream when the call is made, of one rank or of all.
void on_its_way() {
  Gpu& gpu = Gpu::get();
  constexpr std::size_t kCount = 800000, kLong = 256u << 20;
  const auto address = [](void* memory) { return reinterpret_cast<unsigned long long>(memory); };
  void* const no_stream = nullptr;
  void* const load = gpu.allocate(kLong);
  void* const in = gpu.allocate(kCount * 4);
  void* const out = gpu.allocate(kCount * 4);
  std::vector<int> host(kCount);
  for (unsigned round = 1; round < 60; ++round) {
    if (static_cast<int>(round) % (size + 1) == rank)
      for (int i = 0; i < 4; ++i)
        CHECK(gpu.call("cuMemsetD32Async", address(load), round, kLong / 4, no_stream) == 0, "");
    CHECK(gpu.call("cuMemsetD32Async", address(in), round + static_cast<unsigned>(rank), kCount,
                   no_stream) == 0,
          "");
    CHECK(MPI_Allreduce(in, out, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
    gpu.copy(host.data(), out, kCount * 4);
    const int expected = size * (size - 1) / 2 + size * static_cast<int>(round);
    for (std::size_t i = 0; i < kCount; ++i)
      CHECK(host[i] == expected, "round %u, element %zu: %d, not %d", round, i, host[i], expected);
  }
  for (void* const memory : {load, in, out}) gpu.free(memory);
}

/// Calls of all kinds and lengths, on several communicators.
void mixture() {
  MPI_Comm again = MPI_COMM_NULL, turned = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &again);
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &turned);
  const MPI_Comm comms[] = {MPI_COMM_WORLD, again, turned};
  constexpr const char* kCollectives[] = {"allreduce", "allreduce", "reduce", "reduce_scatter"};
  for (int round = 0; round < 600; ++round) {
    constexpr int kCounts[] = {1, 7, 256, 2000, 30000, 262144, 1200000};
    Call call;
    call.collective = kCollectives[choose(4)];
    call.count = static_cast<std::size_t>(kCounts[choose(7)]);
    call.in_place = choose(3) == 0;
    call.root = choose(size);
    const int which = choose(3), type = choose(3);
    if (type == 0) run(kFloatSum, call, round, comms[which]);
    if (type == 1) run(kByteSum, call, round, comms[which]);
    if (type == 2) run(kLongXor, call, round, comms[which]);
  }
  MPI_Comm_free(&turned);
  MPI_Comm_free(&again);
}

/// Buffers that stay, with short calls in between: nothing is looked up anew.
void again_and_again() {
  Gpu& gpu = Gpu::get();
  constexpr std::size_t kCount = 600000;
  auto* const data = static_cast<int*>(gpu.allocate(kCount * 4));
  const std::vector<int> ones(kCount, 1);
  for (int series = 0; series < 70; ++series) {
    gpu.copy(data, ones.data(), kCount * 4);
    int expected = 1;
    // They grow by the number of ranks each time: not for long, or they would all be zero.
    for (int i = 0; i < 12; ++i) {
      const bool is_short = choose(4) == 0;
      CHECK(MPI_Allreduce(MPI_IN_PLACE, data, is_short ? 5 : static_cast<int>(kCount), MPI_UINT32_T,
                          is_short ? MPI_MAX : MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS,
            "");
      if (!is_short)
        expected = static_cast<int>(static_cast<unsigned>(expected) * static_cast<unsigned>(size));
    }
    std::vector<int> now(kCount);
    gpu.copy(now.data(), data, kCount * 4);
    for (std::size_t i = 0; i < kCount; ++i)
      CHECK(now[i] == expected, "series %d, element %zu: %d, not %d", series, i, now[i], expected);
  }
  gpu.free(data);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  if (size < 2) skip("one rank has no peers");
  skip_without_gpu_each();
  const char* const map = std::getenv("TRIB_MAP");
  is_always = map != nullptr && std::string(map) == "always";
  is_results = map != nullptr && std::string(map) == "results";
  // The first call finds out that there are GPUs, before the next ranks meet.
  for (int round = 0; round < 3; ++round) run(kFloatSum, {"allreduce", 1000}, round);
  by_default();
  all_calls(kFloatSum);
  all_calls(kDoubleProduct);
  all_calls(kByteSum);
  all_calls(kShortMin);
  come_and_go();
  again_and_again();
  on_its_way();
  not_everywhere();
  pieces();
  many_at_once();
  mixture();
  if (rank == 0) std::printf("%ld calls checked, %ld of them on mapped buffers\n", calls, mapped);
  MPI_Finalize();
}

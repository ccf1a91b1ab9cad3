// SPDX-License-Identifier: BSD-3-Clause
// Derived types of every making, also by the functions with large counts (which mpi4py calls where
// there are some), nested at random, on GPU buffers through an MPI that here knows nothing of GPUs:
// packed, unpacked and sent as the same bytes in host memory are. Types whose parts are far from
// each other, or in memory of several kinds.
//   gpu_types [host]    host: all in host memory, which needs neither a GPU nor Tributary
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpu_buffer.hpp"

namespace {

int rank, size;
bool is_on_host;
Kind on_device() { return is_on_host ? Kind::host : Kind::device; }

std::mt19937 random_bits;
int draw(int from, int to) {
  return from + static_cast<int>(random_bits() % static_cast<unsigned>(to - from + 1));
}

/// Types by every constructor; those with large counts as often, where the MPI has them.
class Maker {
 public:
  std::string text;  ///< how the last type was made

  MPI_Datatype make(int depth) {
    if (depth == 0) {
      const MPI_Datatype bases[] = {MPI_INT, MPI_DOUBLE, MPI_BYTE, MPI_SHORT_INT, MPI_DOUBLE_INT};
      const int which = draw(0, 4);
      text += "base" + std::to_string(which);
      return bases[which];
    }
    const bool is_large = HAS_LARGE && draw(0, 1) == 1;
    const int making = draw(0, 11), count = draw(0, 4);
    text += (is_large ? "large" : "type") + std::to_string(making) + "(";
    MPI_Datatype result = MPI_DATATYPE_NULL;
    if (making == 0) {
      result = make_struct(count, depth, is_large);
    } else {
      MPI_Datatype inner = make(depth - 1);
      result = make_of(inner, making, count, is_large);
      free(inner);
    }
    text += ")";
    return result;
  }

  static void free(MPI_Datatype& type) {
    int combiner;
#if HAS_LARGE
    MPI_Count integers, addresses, counts, types;
    MPI_Type_get_envelope_c(type, &integers, &addresses, &counts, &types, &combiner);
#else
    int integers, addresses, types;
    MPI_Type_get_envelope(type, &integers, &addresses, &types, &combiner);
#endif
    if (combiner != MPI_COMBINER_NAMED) MPI_Type_free(&type);
  }

 private:
  static std::vector<int> numbers(int count, int from, int to) {
    std::vector<int> drawn(static_cast<std::size_t>(count) + 1);
    for (int& number : drawn) number = draw(from, to);
    return drawn;
  }
  /// Displacements that rise, as what is received may not overlap.
  template <class Number>
  static std::vector<Number> places(const std::vector<int>& lengths, Number unit) {
    std::vector<Number> at(lengths.size());
    Number next = static_cast<Number>(draw(-3, 3));
    for (std::size_t i = 0; i < at.size(); ++i) {
      at[i] = next * unit;
      next += static_cast<Number>(lengths[i] + draw(0, 2));
    }
    return at;
  }
  static std::vector<MPI_Count> large(const auto& numbers) {
    return {numbers.begin(), numbers.end()};
  }

  MPI_Datatype make_struct(int count, int depth, bool is_large) {
    std::vector<MPI_Datatype> types(static_cast<std::size_t>(count) + 1, MPI_INT);
    auto lengths = numbers(count, 0, 3);
    std::vector<MPI_Aint> at(types.size());
    MPI_Aint next = draw(-20, 20);
    for (int i = 0; i < count; ++i) {
      const auto index = static_cast<std::size_t>(i);
      types[index] = make(depth - 1);
      MPI_Aint lb, extent, true_lb, true_extent;
      MPI_Type_get_extent(types[index], &lb, &extent);
      MPI_Type_get_true_extent(types[index], &true_lb, &true_extent);
      if (extent < true_extent) lengths[index] = 1;
      at[index] = next - true_lb;
      next += std::max(extent, true_extent) * (lengths[index] + 1) + draw(0, 9);
    }
    MPI_Datatype result;
#if HAS_LARGE
    if (is_large)
      MPI_Type_create_struct_c(count, large(lengths).data(), large(at).data(), types.data(),
                               &result);
    else
#endif
      MPI_Type_create_struct(count, lengths.data(), at.data(), types.data(), &result);
    static_cast<void>(is_large);
    for (int i = 0; i < count; ++i) free(types[static_cast<std::size_t>(i)]);
    return result;
  }

  MPI_Datatype make_of(MPI_Datatype inner, int making, int count, [[maybe_unused]] bool is_large) {
    MPI_Datatype result = MPI_DATATYPE_NULL;
    MPI_Aint lb, extent, true_lb, true_extent;
    MPI_Type_get_extent(inner, &lb, &extent);
    MPI_Type_get_true_extent(inner, &true_lb, &true_extent);
    // Bytes from one element to the next so that none overlap.
    const MPI_Aint unit = std::max(extent, true_extent);
    // With which elements of an inner type may lie in each other: not made longer.
    const bool is_loose = extent < true_extent;
    const int length = is_loose ? 1 : draw(0, 3);
    const auto lengths =
        is_loose ? std::vector<int>(static_cast<std::size_t>(count) + 1, 1) : numbers(count, 0, 3);
    const auto at = places<int>(lengths, 1);
    const auto bytes = places<MPI_Aint>(lengths, unit);
    const int sizes[] = {4, 3, 5}, parts[] = {draw(1, 4), draw(1, 3), draw(1, 5)},
              starts[] = {draw(0, 4 - parts[0]), draw(0, 3 - parts[1]), draw(0, 5 - parts[2])};
    const int order = draw(0, 1) == 0 ? MPI_ORDER_C : MPI_ORDER_FORTRAN;
    const int spread[] = {MPI_DISTRIBUTE_CYCLIC, MPI_DISTRIBUTE_BLOCK, MPI_DISTRIBUTE_NONE},
              arguments[] = {2, MPI_DISTRIBUTE_DFLT_DARG, MPI_DISTRIBUTE_DFLT_DARG},
              grid[] = {2, 2, 1};
#if HAS_LARGE
#define MAKE(Name, narrow, wide) \
  do {                           \
    if (is_large)                \
      MPI_Type_##Name##_c wide;  \
    else                         \
      MPI_Type_##Name narrow;    \
  } while (false)
#else
#define MAKE(Name, narrow, wide) MPI_Type_##Name narrow
#endif
    if (is_loose && (making == 1 || making == 2 || making == 4 || making == 6 || making >= 8))
      making = 11;
    MPI_Count data = 0;
    MPI_Type_size_x(inner, &data);
    if (data == 0 && making == 9) making = 11;  // Open MPI takes such for invalid
    switch (making) {
      case 1:
        MAKE(contiguous, (count, inner, &result), (count, inner, &result));
        break;
      case 2:
        MAKE(vector, (count, length, length + draw(0, 2), inner, &result),
             (count, length, MPI_Count{length + draw(0, 2)}, inner, &result));
        break;
      case 3: {
        const MPI_Aint stride = unit * (length + 1) * (draw(0, 1) ? 1 : -1);
        MAKE(create_hvector, (count, length, stride, inner, &result),
             (count, length, MPI_Count{stride}, inner, &result));
        break;
      }
      case 4:
        MAKE(indexed, (count, lengths.data(), at.data(), inner, &result),
             (count, large(lengths).data(), large(at).data(), inner, &result));
        break;
      case 5:
        MAKE(create_hindexed, (count, lengths.data(), bytes.data(), inner, &result),
             (count, large(lengths).data(), large(bytes).data(), inner, &result));
        break;
      case 6: {
        const std::vector<int> same(lengths.size(), length);
        const auto there = places<int>(same, 1);
        MAKE(create_indexed_block, (count, length, there.data(), inner, &result),
             (count, length, large(there).data(), inner, &result));
        break;
      }
      case 7: {
        const std::vector<int> same(lengths.size(), length);
        const auto there = places<MPI_Aint>(same, unit);
        MAKE(create_hindexed_block, (count, length, there.data(), inner, &result),
             (count, length, large(there).data(), inner, &result));
        break;
      }
      case 8: {
        const std::vector<int> all(sizes, sizes + 3), some(parts, parts + 3),
            from(starts, starts + 3);
        MAKE(create_subarray, (3, sizes, parts, starts, order, inner, &result),
             (3, large(all).data(), large(some).data(), large(from).data(), order, inner, &result));
        break;
      }
      case 9: {
        const std::vector<int> all(sizes, sizes + 3);
        MAKE(create_darray,
             (4, draw(0, 3), 3, sizes, spread, arguments, grid, order, inner, &result),
             (4, draw(0, 3), 3, large(all).data(), spread, arguments, grid, order, inner, &result));
        break;
      }
      case 10: {
        const MPI_Aint longer = unit + draw(0, 16), first = lb - draw(0, 8);
        MAKE(create_resized, (inner, first, longer, &result),
             (inner, MPI_Count{first}, MPI_Count{longer}, &result));
        break;
      }
      default:
        MPI_Type_dup(inner, &result);
    }
#undef MAKE
    return result;
  }
};

/// The same bytes in both kinds of memory.
struct Pair {
  Buffer host, other;

  Pair(std::size_t bytes, unsigned salt)
      : host(bytes, 0x5a, Kind::host), other(bytes, 0x5a, on_device()) {
    for (std::size_t i = 0; i < host.before.size(); ++i)
      host.before[i] = static_cast<unsigned char>(i * 37 + salt + (i >> 8));
    other.before = host.before;
  }
  static char* at(Buffer& buffer, std::ptrdiff_t shift) {
    return static_cast<char*>(buffer.ready()) + shift;
  }
  void expect_same(const std::string& what) const {
    expect_bytes(what.c_str(), "as in host memory", other.now(), host.now());
  }
};

/// Packed, unpacked and passed round.
void check(MPI_Datatype type, const std::string& how) {
  MPI_Aint lb, extent, true_lb, true_extent;
  MPI_Type_commit(&type);
  MPI_Type_get_extent(type, &lb, &extent);
  MPI_Type_get_true_extent(type, &true_lb, &true_extent);
  MPI_Count data = 0;
  MPI_Type_size_x(type, &data);
  if (data == 0) true_lb = true_extent = extent = 0;  // of which an MPI may say anything
  const int count = extent < true_extent ? 1 : 3;
  const std::ptrdiff_t shift = -true_lb;
  const auto bytes = static_cast<std::size_t>(extent * (count - 1) + true_extent);
  int packed = 0, size_of_host = 0, size_of_other = 0;
  MPI_Pack_size(count, type, MPI_COMM_WORLD, &packed);
  std::vector<unsigned char> host(static_cast<std::size_t>(packed) + 1, 1), other = host;
  Pair from(bytes, static_cast<unsigned>(rank)), to(bytes, 99);
  MPI_Pack(Pair::at(from.host, shift), count, type, host.data(), packed, &size_of_host,
           MPI_COMM_WORLD);
  MPI_Pack(Pair::at(from.other, shift), count, type, other.data(), packed, &size_of_other,
           MPI_COMM_WORLD);
  CHECK(size_of_host == size_of_other && host == other, "packed %s", how.c_str());
  int at = 0;
  MPI_Unpack(host.data(), size_of_host, &at, Pair::at(to.host, shift), count, type, MPI_COMM_WORLD);
  at = 0;
  MPI_Unpack(host.data(), size_of_host, &at, Pair::at(to.other, shift), count, type,
             MPI_COMM_WORLD);
  to.expect_same("unpacked " + how);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  char* const to_host = Pair::at(to.host, shift);
  char* const to_other = Pair::at(to.other, shift);
  MPI_Sendrecv(Pair::at(from.host, shift), count, type, next, 1, to_host, count, type, previous, 1,
               MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Sendrecv(Pair::at(from.other, shift), count, type, next, 2, to_other, count, type, previous,
               2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  to.expect_same("passed round " + how);
}

/// Two ints at the ends of that many bytes on the device.
void far_apart(std::size_t bytes) {
  Gpu& gpu = Gpu::get();
  auto* const memory = static_cast<char*>(gpu.allocate(bytes));
  const std::ptrdiff_t last = static_cast<std::ptrdiff_t>(bytes) - 4;
  const int values[] = {rank + 1, rank + 1001};
  gpu.copy(memory, &values[0], 4);
  gpu.copy(memory + last, &values[1], 4);
  MPI_Datatype type;
  const int lengths[] = {1, 1};
  const MPI_Aint places[] = {0, last};
  MPI_Type_create_hindexed(2, lengths, places, MPI_INT, &type);
  MPI_Type_commit(&type);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  int found[2] = {};
  MPI_Sendrecv(memory, 1, type, next, 0, found, 2, MPI_INT, previous, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  CHECK(found[0] == previous + 1 && found[1] == previous + 1001, "%d, %d", found[0], found[1]);
  MPI_Sendrecv(found, 2, MPI_INT, next, 0, memory, 1, type, previous, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  const int before = (previous + size - 1) % size;
  gpu.copy(&found[0], memory, 4);
  gpu.copy(&found[1], memory + last, 4);
  CHECK(found[0] == before + 1 && found[1] == before + 1001, "%d, %d", found[0], found[1]);
  MPI_Type_free(&type);
  gpu.free(memory);
}

/// A type of addresses: ints on the stack, in static memory, on the heap and twice on the device.
void anywhere() {
  static int in_program[1];
  Gpu& gpu = Gpu::get();
  constexpr std::size_t kBytes = 4 << 20;
  int on_stack[1], found[5];
  std::vector<int> on_heap(1);
  auto* const first = static_cast<int*>(is_on_host ? std::malloc(kBytes) : gpu.allocate(kBytes));
  auto* const second = static_cast<int*>(is_on_host ? std::malloc(kBytes) : gpu.allocate(kBytes));
  int* const all[] = {on_stack, first, in_program, second, on_heap.data()};
  const bool is_device[] = {false, !is_on_host, false, !is_on_host, false};
  const auto set = [&](int i, int value) {
    is_device[i] ? gpu.copy(all[i], &value, sizeof value) : void(*all[i] = value);
  };
  const auto get = [&](int i) {
    int value;
    is_device[i] ? gpu.copy(&value, all[i], sizeof value) : void(value = *all[i]);
    return value;
  };
  const int lengths[] = {1, 1, 1, 1, 1};
  MPI_Aint places[5];
  const MPI_Datatype types[] = {MPI_INT, MPI_INT, MPI_INT, MPI_INT, MPI_INT};
  for (int i = 0; i < 5; ++i) MPI_Get_address(all[i], &places[i]);
  // The device's only, the host's only, all.
  for (const std::vector<int>& which :
       {std::vector<int>{1, 3}, std::vector<int>{0, 2, 4}, std::vector<int>{0, 1, 2, 3, 4}}) {
    std::vector<MPI_Aint> its;
    for (const int i : which) its.push_back(places[i]);
    const int count = static_cast<int>(which.size());
    MPI_Datatype type;
    MPI_Type_create_struct(count, lengths, its.data(), types, &type);
    MPI_Type_commit(&type);
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    for (int i = 0; i < 5; ++i) set(i, 100 * rank + i);
    MPI_Sendrecv(MPI_BOTTOM, 1, type, next, 0, found, count, MPI_INT, previous, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    for (int i = 0; i < count; ++i)
      CHECK(found[i] == 100 * previous + which[static_cast<std::size_t>(i)], "%d: %d", i, found[i]);
    MPI_Sendrecv(found, count, MPI_INT, next, 0, MPI_BOTTOM, 1, type, previous, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    const int before = (previous + size - 1) % size;
    for (const int i : which) CHECK(get(i) == 100 * before + i, "%d: %d", i, get(i));
    // A message that ends early, to all memory.
    for (int i = 0; i < 5; ++i) set(i, -1);
    MPI_Sendrecv(found, count - 1, MPI_INT, next, 0, MPI_BOTTOM, 1, type, previous, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (int i = 0; i + 1 < count; ++i)
      CHECK(get(which[static_cast<std::size_t>(i)]) == found[i] + 100 * (before - previous), "%d",
            i);
    CHECK(get(which.back()) == -1, "the last one was touched: %d", get(which.back()));
    // All from one root.
    for (int i = 0; i < 5; ++i) set(i, rank == 0 ? 7 * i : -1);
    MPI_Bcast(MPI_BOTTOM, 1, type, 0, MPI_COMM_WORLD);
    for (const int i : which) CHECK(get(i) == 7 * i, "%d: %d", i, get(i));
    MPI_Type_free(&type);
  }
  for (int* const memory : {first, second}) is_on_host ? std::free(memory) : gpu.free(memory);
}

/// What is sent and what is received have the same address, MPI_BOTTOM, and lie in one allocation,
/// one behind the other: wherever their copies lie, the call is none in place.
void from_one_address(std::size_t distance, bool is_blocking) {
  Gpu& gpu = Gpu::get();
  const auto all = static_cast<std::size_t>(size);
  const std::size_t bytes = distance + all * sizeof(int);
  auto* const memory = static_cast<char*>(is_on_host ? std::malloc(bytes) : gpu.allocate(bytes));
  std::vector<unsigned char> values(bytes, 0xff);
  const auto place = [&](std::size_t i) {
    return reinterpret_cast<int*>(&values[i * sizeof(int)]);
  };
  for (std::size_t i = 0; i < all; ++i) *place(i) = 100 * rank + static_cast<int>(i);
  is_on_host ? void(std::memcpy(memory, values.data(), bytes))
             : gpu.copy(memory, values.data(), bytes);
  std::vector<MPI_Datatype> sent(all), received(all);
  const std::vector<int> ones(all, 1), zeros(all, 0);
  for (std::size_t i = 0; i < all; ++i)
    for (MPI_Datatype* const type : {&sent[i], &received[i]}) {
      MPI_Aint at;
      MPI_Get_address(memory + i * sizeof(int) + (type == &sent[i] ? 0 : distance), &at);
      const int one = 1;
      MPI_Type_create_hindexed(1, &one, &at, MPI_INT, type);
      MPI_Type_commit(type);
    }
  MPI_Request request = MPI_REQUEST_NULL;
  if (is_blocking)
    MPI_Alltoallw(MPI_BOTTOM, ones.data(), zeros.data(), sent.data(), MPI_BOTTOM, ones.data(),
                  zeros.data(), received.data(), MPI_COMM_WORLD);
  else
    MPI_Ialltoallw(MPI_BOTTOM, ones.data(), zeros.data(), sent.data(), MPI_BOTTOM, ones.data(),
                   zeros.data(), received.data(), MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  is_on_host ? void(std::memcpy(values.data(), memory, bytes))
             : gpu.copy(values.data(), memory, bytes);
  for (int i = 0; i < size; ++i) {
    int found;
    std::memcpy(&found, &values[distance + static_cast<std::size_t>(i) * sizeof(int)],
                sizeof found);
    CHECK(found == 100 * i + rank, "distance %zu, blocking %d, of %d: %d", distance, is_blocking, i,
          found);
    MPI_Type_free(&sent[static_cast<std::size_t>(i)]);
    MPI_Type_free(&received[static_cast<std::size_t>(i)]);
  }
  is_on_host ? std::free(memory) : gpu.free(memory);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  is_on_host = argc > 1 && std::strcmp(argv[1], "host") == 0;
  if (!is_on_host) skip_without_gpu();
  constexpr int kTypes = 400;
  Maker maker;
  for (int i = 0; i < kTypes; ++i) {
    random_bits.seed(static_cast<unsigned>(i));
    maker.text.clear();
    MPI_Datatype type = maker.make(draw(1, 3));
    check(type, std::to_string(i) + ": " + maker.text);
    Maker::free(type);
  }
  anywhere();
  for (std::size_t distance = 64; distance <= 4096; distance += 64)
    for (const bool is_blocking : {true, false}) from_one_address(distance, is_blocking);
  if (!is_on_host) far_apart(std::size_t{5} << 30);
  if (rank == 0) std::printf("%d types checked\n", kTypes);
  MPI_Finalize();
}

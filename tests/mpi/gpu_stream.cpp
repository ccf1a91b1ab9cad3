// SPDX-License-Identifier: BSD-3-Clause
// The stream-ordered C API: sums of every collective against what they should be, back to back, on
// changing streams, in every type, and as a CUDA graph that is replayed; errors; abort.
// gpu_stream_requests.cpp has the persistent form. "thorough" has more replays, and more than 2^31
// elements, which takes 5 GiB of each rank.
#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_stream.hpp"

namespace {

void all_collectives(trib_comm* comm) {
  Stream stream, other;
  int round = 0;
  for (const std::size_t count : {1u, 3u, 1000u, 4096u, 33333u, 262144u, 1000003u, 5000000u}) {
    for (const bool in_place : {false, true}) {
      Buffer in(count), out(count);
      const char* what = in_place ? "in place" : "out of place";
      const auto start = [&] {
        (in_place ? out : in).fill(++round);
        return in_place ? out.data : in.data;
      };
      const float* from = start();
      CHECK(API(trib_allreduce)(from, out.data, count, TRIB_FLOAT32, TRIB_SUM, comm,
                                stream.handle) == TRIB_SUCCESS,
            "%s", last_error().c_str());
      stream.wait();
      expect(out, 0, count, round, what);

      for (int root = 0; root < size; ++root) {
        from = start();
        CHECK(API(trib_reduce)(from, out.data, count, TRIB_FLOAT32, TRIB_SUM, root, comm,
                               other.handle) == TRIB_SUCCESS,
              "%s", last_error().c_str());
        other.wait();
        if (rank == root) expect(out, 0, count, round, what);
      }

      const std::size_t part = count / static_cast<std::size_t>(size);
      from = start();
      CHECK(API(trib_reduce_scatter_block)(from, out.data, part, TRIB_FLOAT32, TRIB_SUM, comm,
                                           stream.handle) == TRIB_SUCCESS,
            "%s", last_error().c_str());
      stream.wait();
      expect(out, part * static_cast<std::size_t>(rank), part, round, what);

      std::vector<std::size_t> counts(static_cast<std::size_t>(size));
      std::size_t left = count, begin = 0;
      for (int r = 0; r < size; ++r) {
        const std::size_t mine = r + 1 == size ? left : left / (r % 2 ? 3 : 2);
        if (r < rank) begin += mine;
        counts[static_cast<std::size_t>(r)] = mine;
        left -= mine;
      }
      from = start();
      CHECK(API(trib_reduce_scatter)(from, out.data, counts.data(), TRIB_FLOAT32, TRIB_SUM, comm,
                                     stream.handle) == TRIB_SUCCESS,
            "%s", last_error().c_str());
      stream.wait();
      expect(out, begin, counts[static_cast<std::size_t>(rank)], round, what);
    }
  }
}

void copies(trib_comm* comm) {
  Stream stream;
  const auto p = static_cast<std::size_t>(size);
  int round = 0;
  for (const std::size_t count : {1u, 7u, 5000u, 300000u, 3000001u}) {
    for (const bool in_place : {false, true}) {
      Buffer in(count), out(count * p);
      in.fill(++round);
      const float* from = in.data;
      if (in_place) {
        float* const part = out.data + count * static_cast<std::size_t>(rank);
        Gpu::get().copy(part, in.data, count * 4);
        CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "copy");
        from = part;
      }
      CHECK(API(trib_allgather)(from, out.data, count, TRIB_FLOAT32, comm, stream.handle) ==
                TRIB_SUCCESS,
            "%s", last_error().c_str());
      stream.wait();
      const std::vector<float> found = out.fetch();
      for (std::size_t i = 0; i < count * p; ++i)
        CHECK(found[i] == value(static_cast<int>(i / count), i % count, round),
              "allgather of %zu, in place %d: element %zu", count, in_place, i);
      for (int root = 0; root < size; ++root) {
        in.fill(++round);
        float* const to = in_place && rank == root ? in.data : out.data;
        CHECK(API(trib_broadcast)(rank == root ? in.data : nullptr, to, count, TRIB_FLOAT32, root,
                                  comm, stream.handle) == TRIB_SUCCESS,
              "%s", last_error().c_str());
        stream.wait();
        std::vector<float> copy(count);
        Gpu::get().copy(copy.data(), to, count * 4);
        for (std::size_t i = 0; i < count; ++i)
          CHECK(copy[i] == value(root, i, round), "broadcast of %zu from %d: element %zu", count,
                root, i);
      }
    }
  }
}

/// A thread that has made no call of CUDA before, so that no context is current there.
void in_another_thread(trib_comm* comm) {
  constexpr std::size_t kCount = 1000;
  Buffer in(kCount), out(kCount);
  in.fill(1);
  std::thread([&] {
    CHECK(API(trib_allreduce)(in.data, out.data, kCount, TRIB_FLOAT32, TRIB_SUM, comm, nullptr) ==
              TRIB_SUCCESS,
          "%s", last_error().c_str());
  }).join();
  CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "");
  expect(out, 0, kCount, 1, "in another thread");
}

/// A type of the API, as far as small whole numbers go.
struct Type {
  trib_dtype dtype;
  std::size_t size;
  int exponent_bits, mantissa_bits;  // 0: an integer
  bool is_complex = false;
};
constexpr Type kTypes[] = {{TRIB_INT8, 1, 0, 0},
                           {TRIB_INT16, 2, 0, 0},
                           {TRIB_INT32, 4, 0, 0},
                           {TRIB_INT64, 8, 0, 0},
                           {TRIB_UINT8, 1, 0, 0},
                           {TRIB_UINT16, 2, 0, 0},
                           {TRIB_UINT32, 4, 0, 0},
                           {TRIB_UINT64, 8, 0, 0},
                           {TRIB_FLOAT16, 2, 5, 10},
                           {TRIB_BFLOAT16, 2, 8, 7},
                           {TRIB_FLOAT8_E4M3, 1, 4, 3},
                           {TRIB_FLOAT8_E5M2, 1, 5, 2},
                           {TRIB_FLOAT32, 4, 8, 23},
                           {TRIB_FLOAT64, 8, 11, 52},
                           {TRIB_COMPLEX64, 8, 8, 23, true},
                           {TRIB_COMPLEX128, 16, 11, 52, true}};

/// `number`'s bytes in `type`: from 0 up, and few enough bits for the mantissa.
void encode(const Type& type, unsigned number, unsigned char* bytes) {
  std::memset(bytes, 0, type.size);  // also the imaginary part
  std::uint64_t bits = number;
  if (type.exponent_bits > 0 && number > 0) {
    const int exponent = std::bit_width(number) - 1;
    const int bias = (1 << (type.exponent_bits - 1)) - 1;
    const std::uint64_t rest = number - (1u << exponent);
    CHECK(exponent <= type.mantissa_bits || rest % (1u << (exponent - type.mantissa_bits)) == 0,
          "%u", number);
    const std::uint64_t mantissa = exponent <= type.mantissa_bits
                                       ? rest << (type.mantissa_bits - exponent)
                                       : rest >> (exponent - type.mantissa_bits);
    bits = (static_cast<std::uint64_t>(exponent + bias) << type.mantissa_bits) + mantissa;
  }
  std::memcpy(bytes, &bits, type.is_complex ? type.size / 2 : type.size);
}

/// Whether the API has `op` for `type`.
bool is_defined(const Type& type, trib_op op) {
  if (type.is_complex) return op == TRIB_SUM || op == TRIB_PROD;
  return type.exponent_bits == 0 || op == TRIB_SUM || op == TRIB_PROD || op == TRIB_MAX ||
         op == TRIB_MIN;
}

unsigned apply(trib_op op, unsigned a, unsigned b) {
  switch (op) {
    case TRIB_SUM:
      return a + b;
    case TRIB_PROD:
      return a * b;
    case TRIB_MAX:
      return a > b ? a : b;
    case TRIB_MIN:
      return a < b ? a : b;
    case TRIB_LAND:
      return a != 0 && b != 0 ? 1 : 0;
    case TRIB_LOR:
      return a != 0 || b != 0 ? 1 : 0;
    case TRIB_LXOR:
      return (a != 0) != (b != 0) ? 1 : 0;
    case TRIB_BAND:
      return a & b;
    case TRIB_BOR:
      return a | b;
    case TRIB_BXOR:
      return a ^ b;
  }
  return 0;
}

/// Every type with every operator: whole numbers, so that results are exact in all of them.
void types(trib_comm* comm) {
  constexpr std::size_t kCount = 1003;
  Stream stream;
  Buffer in(kCount * 4), out(kCount * 4);
  std::vector<unsigned char> host(kCount * 16), expected(kCount * 16);
  for (const Type& type : kTypes) {
    // Sums and products of four of these have two bits of mantissa at most.
    const auto number = [&](int r, std::size_t i, trib_op op) {
      const auto salt = static_cast<unsigned>(i * 7 + static_cast<std::size_t>(r) * 3 + i / 5);
      if (type.exponent_bits > 0) return 1 + salt % 2;
      return op == TRIB_PROD ? salt % 3 : salt % 4;
    };
    for (int o = TRIB_SUM; o <= TRIB_BXOR; ++o) {
      const auto op = static_cast<trib_op>(o);
      if (!is_defined(type, op)) {
        CHECK(API(trib_allreduce)(in.data, out.data, kCount, type.dtype, op, comm, stream.handle) ==
                  TRIB_ERROR_ARGUMENT,
              "type %d has no operator %d", type.dtype, o);
        continue;
      }
      for (std::size_t i = 0; i < kCount; ++i) {
        unsigned result = number(0, i, op);
        for (int r = 1; r < size; ++r) result = apply(op, result, number(r, i, op));
        encode(type, number(rank, i, op), host.data() + i * type.size);
        encode(type, result, expected.data() + i * type.size);
      }
      Gpu::get().copy(in.data, host.data(), kCount * type.size);
      CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "copy");
      CHECK(API(trib_allreduce)(in.data, out.data, kCount, type.dtype, op, comm, stream.handle) ==
                TRIB_SUCCESS,
            "%s", last_error().c_str());
      stream.wait();
      Gpu::get().copy(host.data(), out.data, kCount * type.size);
      for (std::size_t i = 0; i < kCount; ++i)
        CHECK(std::memcmp(host.data() + i * type.size, expected.data() + i * type.size,
                          type.size) == 0,
              "type %d, operator %d: element %zu", type.dtype, o, i);
    }
  }
}

/// Without a word between the calls, and on two streams in turn: the communicator keeps the order.
void back_to_back(trib_comm* comm) {
  Stream streams[2];
  constexpr std::size_t kCount = 10000;
  Buffer data(kCount);
  data.fill(0);
  for (int i = 0; i < 300; ++i) {
    // max leaves the sum of the first call as it is
    const std::size_t count = i == 0 ? kCount : static_cast<std::size_t>(1 + i * 33);
    CHECK(
        API(trib_allreduce)(data.data, data.data, count, TRIB_FLOAT32, i == 0 ? TRIB_SUM : TRIB_MAX,
                            comm, streams[i % 2].handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  }
  streams[0].wait();
  streams[1].wait();
  expect(data, 0, kCount, 0, "back to back");
}

/// More than 2^31 elements: an allreduce, and a Reduce to the last rank, in place there.
void more_than_2_to_the_31(trib_comm* comm) {
  constexpr std::size_t kCount = (std::size_t{1} << 31) + 24;
  if (!has_room(2 * kCount)) return;
  const std::vector<std::uint8_t> mine = ManyBytes::pattern_of(rank);
  const std::vector<std::uint8_t> all = ManyBytes::pattern_of_all();
  Stream stream;
  ManyBytes in(kCount), out(kCount);
  in.fill(mine);
  out.fill(mine);
  CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "copy");
  CHECK(API(trib_allreduce)(in.data(), out.data(), kCount, TRIB_UINT8, TRIB_BXOR, comm,
                            stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  stream.wait();
  out.expect(all, 0, kCount, "trib_allreduce");
  in.expect(mine, 0, kCount, "the input of trib_allreduce");

  const bool is_root = rank == size - 1;
  CHECK(API(trib_reduce)(in.data(), is_root ? in.data() : nullptr, kCount, TRIB_UINT8, TRIB_BXOR,
                         size - 1, comm, stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  stream.wait();
  in.expect(is_root ? all : mine, 0, kCount, "trib_reduce");
  trib_result found = TRIB_ERROR_INTERNAL;
  CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS && found == TRIB_SUCCESS, "%s",
        last_error().c_str());
}

void graph(trib_comm* comm, int replays) {
  Gpu& gpu = Gpu::get();
  Stream stream;
  const auto p = static_cast<std::size_t>(size);
  Buffer in(50000), out(50000), part(50000), block(50000 / p), uneven(50000), all(1000 * p),
      copy(7000);
  std::vector<std::size_t> counts(p, 0);
  counts[0] = 20000;
  counts[p - 1] += 30000;
  const std::size_t begin = rank == 0 ? 0 : 20000;
  in.fill(1);
  CHECK(gpu.call("cuStreamBeginCapture_v2", stream.handle, 1) == 0, "no capture");
  CHECK(API(trib_allreduce)(in.data, out.data, in.count, TRIB_FLOAT32, TRIB_SUM, comm,
                            stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  CHECK(API(trib_allreduce)(in.data, out.data, 100, TRIB_FLOAT32, TRIB_SUM, comm, stream.handle) ==
            TRIB_SUCCESS,
        "%s", last_error().c_str());
  CHECK(API(trib_reduce)(in.data, part.data, in.count, TRIB_FLOAT32, TRIB_SUM, 0, comm,
                         stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  CHECK(API(trib_reduce_scatter_block)(in.data, block.data, block.count, TRIB_FLOAT32, TRIB_SUM,
                                       comm, stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  CHECK(API(trib_reduce_scatter)(in.data, uneven.data, counts.data(), TRIB_FLOAT32, TRIB_SUM, comm,
                                 stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  CHECK(API(trib_allgather)(in.data, all.data, 1000, TRIB_FLOAT32, comm, stream.handle) ==
            TRIB_SUCCESS,
        "%s", last_error().c_str());
  CHECK(API(trib_broadcast)(in.data, copy.data, copy.count, TRIB_FLOAT32, size - 1, comm,
                            stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  void *captured = nullptr, *executable = nullptr;
  CHECK(gpu.call("cuStreamEndCapture", stream.handle, &captured) == 0, "the capture was broken");
  CHECK(gpu.call("cuGraphInstantiateWithFlags", &executable, captured, 0ull) == 0, "no graph");
  for (int i = 0; i < replays; ++i) {
    if (i % 97 == 0) {  // other inputs now and then
      stream.wait();
      MPI_Barrier(MPI_COMM_WORLD);
      in.fill(i);
    }
    CHECK(gpu.call("cuGraphLaunch", executable, stream.handle) == 0, "no launch");
    if (i % 97 == 96 || i + 1 == replays) {
      stream.wait();
      const int round = i / 97 * 97;
      expect(out, 0, out.count, round, "replayed");
      if (rank == 0) expect(part, 0, part.count, round, "replayed Reduce");
      expect(block, block.count * static_cast<std::size_t>(rank), block.count, round,
             "replayed Reduce_scatter_block");
      expect(uneven, begin, counts[static_cast<std::size_t>(rank)], round,
             "replayed Reduce_scatter");
      const std::vector<float> gathered = all.fetch(), broadcast = copy.fetch();
      for (std::size_t k = 0; k < all.count; ++k)
        CHECK(gathered[k] == value(static_cast<int>(k / 1000), k % 1000, round),
              "replayed allgather, element %zu", k);
      for (std::size_t k = 0; k < copy.count; ++k)
        CHECK(broadcast[k] == value(size - 1, k, round), "replayed broadcast, element %zu", k);
    }
  }
  stream.wait();
}

/// In place and uneven, a result is kept aside on its way: also in a graph, after longer calls.
void graph_in_place(trib_comm* comm) {
  Gpu& gpu = Gpu::get();
  Stream stream;
  const auto counts_of = [](std::size_t unit) {
    std::vector<std::size_t> counts(static_cast<std::size_t>(size), 3 * unit);
    counts[0] = unit;
    return counts;
  };
  const auto enqueue = [&](Buffer& data, const std::vector<std::size_t>& counts) {
    CHECK(API(trib_reduce_scatter)(data.data, data.data, counts.data(), TRIB_FLOAT32, TRIB_SUM,
                                   comm, stream.handle) == TRIB_SUCCESS,
          "%s", last_error().c_str());
  };
  const std::vector<std::size_t> few = counts_of(1000), many = counts_of(40000);
  std::size_t total = 0, total_many = 0, begin = 0;
  for (int r = 0; r < size; ++r) {
    if (r == rank) begin = total;
    total += few[static_cast<std::size_t>(r)];
    total_many += many[static_cast<std::size_t>(r)];
  }
  const std::size_t mine = few[static_cast<std::size_t>(rank)];
  Buffer data(total), longer(total_many);
  CHECK(gpu.call("cuStreamBeginCapture_v2", stream.handle, 1) == 0, "no capture");
  enqueue(data, few);
  void *captured = nullptr, *executable = nullptr;
  CHECK(gpu.call("cuStreamEndCapture", stream.handle, &captured) == 0, "the capture was broken");
  CHECK(gpu.call("cuGraphInstantiateWithFlags", &executable, captured, 0ull) == 0, "no graph");
  longer.fill(0);
  enqueue(longer, many);
  stream.wait();
  std::vector<std::unique_ptr<Buffer>> fillers;  // one may be where the captured call had its room
  for (int i = 0; i < 200; ++i) {
    fillers.push_back(std::make_unique<Buffer>(mine));
    fillers.back()->fill(5);
  }
  data.fill(3);
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK(gpu.call("cuGraphLaunch", executable, stream.handle) == 0, "no launch");
  stream.wait();
  expect(data, begin, mine, 3, "replayed in place");
  for (const auto& filler : fillers) {
    const std::vector<float> kept = filler->fetch();
    for (std::size_t i = 0; i < mine; ++i)
      CHECK(kept[i] == value(rank, i, 5), "memory of others was written, element %zu", i);
  }
}

/// A communicator is destroyed while a graph that has calls of it is replayed.
void destroyed_in_a_replay() {
  constexpr int kReplays = 500;  // some ten milliseconds
  Gpu& gpu = Gpu::get();
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  Stream stream;
  Buffer in(400000), out(400000);
  in.fill(3);
  CHECK(gpu.call("cuStreamBeginCapture_v2", stream.handle, 1) == 0, "no capture");
  CHECK(API(trib_allreduce)(in.data, out.data, in.count, TRIB_FLOAT32, TRIB_SUM, comm,
                            stream.handle) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  void *captured = nullptr, *executable = nullptr;
  CHECK(gpu.call("cuStreamEndCapture", stream.handle, &captured) == 0, "the capture was broken");
  CHECK(gpu.call("cuGraphInstantiateWithFlags", &executable, captured, 0ull) == 0, "no graph");
  for (int i = 0; i < kReplays; ++i)
    CHECK(gpu.call("cuGraphLaunch", executable, stream.handle) == 0, "no launch");
  CHECK(API(trib_comm_destroy)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  if (size == 1) stream.wait();  // a copy, which needs no communicator
  CHECK(gpu.call("cuStreamQuery", stream.handle) == 0, "destroyed while a graph was replayed");
  expect(out, 0, out.count, 3, "replayed until the end");
  CHECK(gpu.call("cuGraphExecDestroy", executable) == 0, "a graph that was replayed cannot go");
  CHECK(gpu.call("cuGraphDestroy", captured) == 0, "a graph that was replayed cannot go");
}

/// A communicator whose graphs are gone is destroyed while a stream is captured that has nothing to
/// do with it.
void destroyed_beside_a_capture(int mode) {
  Gpu& gpu = Gpu::get();
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  Stream stream, other;
  Buffer in(5000), out(5000), copy(5000);
  in.fill(4);
  void *captured = nullptr, *executable = nullptr;
  for (int graph = 0; graph < 3; ++graph) {  // the second is never launched, the third never made
    CHECK(gpu.call("cuStreamBeginCapture_v2", stream.handle, mode) == 0, "no capture");
    for (int i = 0; i < 2; ++i)
      CHECK(API(trib_allreduce)(in.data, out.data, in.count, TRIB_FLOAT32, TRIB_SUM, comm,
                                stream.handle) == TRIB_SUCCESS,
            "%s", last_error().c_str());
    CHECK(gpu.call("cuStreamEndCapture", stream.handle, &captured) == 0, "the capture was broken");
    if (graph < 2)
      CHECK(gpu.call("cuGraphInstantiateWithFlags", &executable, captured, 0ull) == 0, "no graph");
    CHECK(gpu.call("cuGraphDestroy", captured) == 0, "");
    if (graph == 0) CHECK(gpu.call("cuGraphLaunch", executable, stream.handle) == 0, "no launch");
    if (graph < 2) CHECK(gpu.call("cuGraphExecDestroy", executable) == 0, "");
  }
  stream.wait();
  expect(out, 0, out.count, 4, "replayed");
  CHECK(gpu.call("cuStreamBeginCapture_v2", other.handle, mode) == 0, "no capture");
  CHECK(API(trib_comm_destroy)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  CHECK(gpu.call("cuMemcpyDtoDAsync_v2", copy.data, out.data, std::size_t{5000 * sizeof(float)},
                 other.handle) == 0,
        "the capture was broken");
  CHECK(gpu.call("cuStreamEndCapture", other.handle, &captured) == 0, "the capture was broken");
  CHECK(gpu.call("cuGraphDestroy", captured) == 0, "");
}

/// Rank 0 is through with its part, and with the communicator, long before the others begin.
void early_end() {
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  Stream stream;
  for (int round = 0; round < 6; ++round) {
    Buffer in(100), out(100);
    in.fill(round);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank != 0) usleep(round == 5 ? 100000 : 0);
    CHECK(API(trib_reduce)(in.data, out.data, 100, TRIB_FLOAT32, TRIB_SUM, size - 1, comm,
                           stream.handle) == TRIB_SUCCESS,
          "%s", last_error().c_str());
    if (round < 5 || rank != 0 || size == 1) stream.wait();
    if (rank == size - 1) expect(out, 0, 100, round, "to the last rank");
    if (round == 5) CHECK(API(trib_comm_destroy)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  }
  stream.wait();
}

void errors(trib_comm* comm) {
  float* const nothing = nullptr;
  CHECK(API(trib_allreduce)(nothing, nothing, 1, TRIB_FLOAT32, TRIB_SUM, comm, nullptr) ==
            TRIB_ERROR_ARGUMENT,
        "");
  CHECK(last_error() == "in is null", "%s", last_error().c_str());
  const float something = 0;
  CHECK(API(trib_allreduce)(&something, nothing, 1, TRIB_FLOAT32, TRIB_SUM, comm, nullptr) ==
            TRIB_ERROR_ARGUMENT,
        "");
  CHECK(last_error() == "out is null", "%s", last_error().c_str());
  CHECK(API(trib_allreduce)(nothing, nothing, 0, TRIB_FLOAT32, TRIB_BAND, comm, nullptr) ==
            TRIB_ERROR_ARGUMENT,
        "");
  CHECK(API(trib_reduce)(nothing, nothing, 0, TRIB_FLOAT32, TRIB_SUM, size, comm, nullptr) ==
            TRIB_ERROR_ARGUMENT,
        "");
  CHECK(API(trib_allreduce)(nothing, nothing, 0, TRIB_FLOAT32, TRIB_SUM, comm, nullptr) ==
            TRIB_SUCCESS,
        "%s", last_error().c_str());
  if (size > 1) {  // tributary.h: no more than that many elements, all ranks' parts together
    char byte = 0;
    const std::size_t many = (std::size_t{1} << 32) - (1u << 17),
                      part = many / static_cast<std::size_t>(size) + 1;
    CHECK(API(trib_allreduce)(&byte, &byte, many, TRIB_UINT8, TRIB_BXOR, comm, nullptr) ==
              TRIB_ERROR_ARGUMENT,
          "%zu elements", many);
    CHECK(API(trib_reduce_scatter_block)(&byte, &byte, part, TRIB_UINT8, TRIB_BXOR, comm,
                                         nullptr) == TRIB_ERROR_ARGUMENT,
          "%zu elements for each rank", part);
    CHECK(last_error() == "more than 2^32 - 2^17 - 1 elements in one call", "%s",
          last_error().c_str());
  }
  trib_result found = TRIB_ERROR_INTERNAL;
  CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS && found == TRIB_SUCCESS, "%s",
        last_error().c_str());
}

/// On one rank, or on all, a capture has failed before a call comes to it: the call is refused, and
/// the communicator is as good as before.
void in_a_capture_that_failed(trib_comm* comm) {
  constexpr std::size_t kCount = 1000;
  Stream stream;
  Buffer in(kCount), out(kCount);
  Gpu& gpu = Gpu::get();
  for (int round = 0; round <= size; ++round) {  // the last one: all ranks
    void* graph = nullptr;
    const auto call = [&] {
      return API(trib_allreduce)(in.data, out.data, kCount, TRIB_FLOAT32, TRIB_SUM, comm,
                                 stream.handle);
    };
    if (round == rank || round == size) {
      CHECK(gpu.call("cuStreamBeginCapture_v2", stream.handle, 0) == 0, "no capture");
      CHECK(gpu.call("cuStreamSynchronize", stream.handle) != 0, "a capture that was waited for");
      CHECK(call() == (size > 1 ? TRIB_ERROR_ARGUMENT : TRIB_ERROR_DEVICE), "%s",
            last_error().c_str());
      if (size > 1)
        CHECK(last_error() == "the stream's capture has failed before this call", "%s",
              last_error().c_str());
      CHECK(gpu.call("cuStreamEndCapture", stream.handle, &graph) != 0, "a capture that failed");
    }
    trib_result found = TRIB_ERROR_INTERNAL;
    CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS && found == TRIB_SUCCESS, "%s",
          last_error().c_str());
    in.fill(round);
    CHECK(call() == TRIB_SUCCESS, "%s", last_error().c_str());
    stream.wait();
    expect(out, 0, kCount, round, "behind a capture that failed");
  }
}

/// Calls that differ between the ranks: each rank hears what the others have called, and nobody
/// waits any longer. `behind`: calls that follow, on all ranks alike.
template <class Wrong>
void disagreement(const char* text, int behind, Wrong&& wrong) {
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  Stream stream;
  Buffer in(5000), out(5000);
  const auto right = [&] {
    CHECK(API(trib_allreduce)(in.data, out.data, 1000, TRIB_FLOAT32, TRIB_SUM, comm,
                              stream.handle) == TRIB_SUCCESS,
          "%s", last_error().c_str());
  };
  for (int i = 0; i < 20; ++i) right();
  trib_result found = TRIB_SUCCESS;
  CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS && found == TRIB_SUCCESS, "%s",
        last_error().c_str());
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK(wrong(comm, in.data, out.data, stream.handle) == TRIB_SUCCESS, "%s", last_error().c_str());
  for (int i = 0; i < behind; ++i) right();
  std::string heard;
  for (int i = 0; found == TRIB_SUCCESS; ++i) {
    CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS, "");
    heard = last_error();
    usleep(1000);
    CHECK(i < 5000, "nobody has noticed: %s", text);
  }
  stream.wait();
  // A rank that hears of it from another one has that one's words.
  CHECK(found == TRIB_ERROR_ARGUMENT || found == TRIB_ERROR_PEER, "%d", static_cast<int>(found));
  CHECK(heard.find("ranks disagree") != std::string::npos && heard.find(text) != std::string::npos,
        "\"%s\" has no \"%s\"", heard.c_str(), text);
  API(trib_comm_destroy)(comm);
}

void disagreements() {
  const bool is_odd = rank == size - 1;
  disagreement("trib_allreduce of 2000 f32", 0,
               [&](trib_comm* comm, float* in, float* out, void* stream) {
                 return API(trib_allreduce)(in, out, is_odd ? 2000 : 1000, TRIB_FLOAT32, TRIB_SUM,
                                            comm, stream);
               });
  disagreement("with max", 3, [&](trib_comm* comm, float* in, float* out, void* stream) {
    return API(trib_allreduce)(in, out, 1000, TRIB_FLOAT32, is_odd ? TRIB_MAX : TRIB_SUM, comm,
                               stream);
  });
  disagreement(
      "trib_reduce of 1000 f32", 0, [&](trib_comm* comm, float* in, float* out, void* stream) {
        return is_odd ? API(trib_reduce)(in, out, 1000, TRIB_FLOAT32, TRIB_SUM, 0, comm, stream)
                      : API(trib_allreduce)(in, out, 1000, TRIB_FLOAT32, TRIB_SUM, comm, stream);
      });
  disagreement("trib_allreduce of 0 f32", 1,
               [&](trib_comm* comm, float* in, float* out, void* stream) {
                 return API(trib_allreduce)(in, out, is_odd ? 0 : 1000, TRIB_FLOAT32, TRIB_SUM,
                                            comm, stream);
               });
}

/// Rank 0 does not come, which the others see and end, each in one thread, though the driver is
/// busy with what others of its threads have asked for, which waits for the kernel.
void abort_beside_a_busy_driver(trib_comm* comm) {
  constexpr std::size_t kCount = 1000;
  Stream stream;
  Buffer in(kCount), out(kCount);
  Gpu& gpu = Gpu::get();
  if (rank != 0) {
    void* context = nullptr;
    CHECK(gpu.call("cuCtxGetCurrent", &context) == 0, "");
    CHECK(API(trib_allreduce)(in.data, out.data, kCount, TRIB_FLOAT32, TRIB_SUM, comm,
                              stream.handle) == TRIB_SUCCESS,
          "%s", last_error().c_str());
    std::vector<std::thread> threads;
    const auto start = [&](auto&& body) {
      threads.emplace_back([context, body, &gpu] {
        CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "");
        body();
      });
    };
    start([&] { CHECK(gpu.call("cuCtxSynchronize") == 0, "the context"); });
    start([&] { gpu.free(gpu.allocate(64 << 20)); });
    start([&] {
      trib_result found = TRIB_SUCCESS;
      while (found == TRIB_SUCCESS) CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS, "");
    });
    usleep(100000);
    const auto before = std::chrono::steady_clock::now();
    CHECK(API(trib_comm_abort)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - before;
    CHECK(taken.count() < 20, "the abort took %g s", taken.count());
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

/// Rank 0 aborts while the others wait for it on the device.
void abort_ends_waiting(trib_comm* comm) {
  Stream stream;
  Buffer in(1000), out(1000);
  if (rank != 0)
    CHECK(API(trib_allreduce)(in.data, out.data, 1000, TRIB_FLOAT32, TRIB_SUM, comm,
                              stream.handle) == TRIB_SUCCESS,
          "%s", last_error().c_str());
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) CHECK(API(trib_comm_abort)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  stream.wait();
  for (int i = 0;; ++i) {
    trib_result found = TRIB_SUCCESS;
    CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS, "");
    if (found != TRIB_SUCCESS) break;
    usleep(1000);
    CHECK(i < 5000, "the abort was not noticed");
  }
  CHECK(API(trib_allreduce)(in.data, out.data, 1, TRIB_FLOAT32, TRIB_SUM, comm, stream.handle) ==
            TRIB_ERROR_UNUSABLE,
        "%s", last_error().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu_each();
  const bool is_long = argc > 1 && std::strcmp(argv[1], "thorough") == 0;
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  CHECK(API(trib_comm_rank)(comm) == rank && API(trib_comm_size)(comm) == size, "");
  all_collectives(comm);
  passed("every collective, in place and not");
  copies(comm);
  passed("allgather and broadcast");
  if (size == 1) in_another_thread(comm);
  passed("a thread without a context");
  types(comm);
  passed("every type with every operator");
  back_to_back(comm);
  passed("back to back on two streams");
  if (is_long) {
    more_than_2_to_the_31(comm);
    passed("more than 2^31 elements");
  }
  if (has_graphs()) {
    graph(comm, is_long ? 1000 : 200);
    passed("a graph, replayed");
    graph_in_place(comm);
    passed("a graph in place");
    destroyed_in_a_replay();
    passed("destroyed in a replay");
    for (const int mode : {1, 0}) destroyed_beside_a_capture(mode);  // a thread's, or any
    passed("destroyed beside a capture");
    in_a_capture_that_failed(comm);
    passed("in a capture that failed");
  }
  if (size > 1) disagreements();
  passed("ranks that disagree");
  early_end();
  passed("a rank that ends early");
  errors(comm);
  passed("errors");
  trib_comm* second = nullptr;
  CHECK(API(trib_comm_create)(&second, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  if (size > 1) abort_ends_waiting(second);
  API(trib_comm_destroy)(second);
  CHECK(API(trib_comm_create)(&second, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  if (size > 1) abort_beside_a_busy_driver(second);
  API(trib_comm_destroy)(second);
  passed("aborts");
  all_collectives(comm);
  CHECK(API(trib_comm_destroy)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  if (rank == 0) std::printf("stream-ordered calls checked\n");
  MPI_Finalize();
}

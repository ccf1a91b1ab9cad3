// SPDX-License-Identifier: BSD-3-Clause
// Persistent operations on a stream: started many times on changing streams, several at once, among
// ordinary calls, and from graphs that go on when the requests are freed; lifetimes and errors.
#include <memory>
#include <vector>

#include "gpu_stream.hpp"

namespace {

#define OK(call) CHECK((call) == TRIB_SUCCESS, "%s", last_error().c_str())

void expect_error(trib_result found, trib_result wanted, const std::string& text) {
  CHECK(found == wanted && last_error().find(text) != std::string::npos, "%d: %s, not %d: %s",
        found, last_error().c_str(), wanted, text.c_str());
}

void release(trib_request* request) { OK(API(trib_request_free)(request)); }

/// Rank 0's part is the shortest: in place, the others' results lie over what is still read.
std::vector<std::size_t> uneven(std::size_t count) {
  const auto p = static_cast<std::size_t>(size);
  std::vector<std::size_t> counts(p, count / p);
  for (std::size_t r = 1; r < p; ++r) {
    counts[r] += counts[0] / 2 / p;
    counts[0] -= counts[0] / 2 / p;
  }
  counts.back() += count % p;
  return counts;
}

/// A reduction, and which part of the sum `out` then has here.
struct Reduction {
  const char* what;
  std::size_t begin, count;
  trib_request* request = nullptr;
};

std::vector<Reduction> every_reduction(trib_comm* comm, const float* in, float* out,
                                       std::size_t count) {
  const auto mine = static_cast<std::size_t>(rank);
  const int root = size - 1;
  const std::size_t part = count / static_cast<std::size_t>(size);
  std::vector<std::size_t> counts = uneven(count);
  std::size_t begin = 0;
  for (std::size_t r = 0; r < mine; ++r) begin += counts[r];
  std::vector<Reduction> all{{"allreduce", 0, count},
                             {"reduce", 0, rank == root ? count : 0},
                             {"reduce_scatter", begin, counts[mine]},
                             {"reduce_scatter_block", part * mine, part}};
  OK(API(trib_allreduce_init)(in, out, count, TRIB_FLOAT32, TRIB_SUM, comm, &all[0].request));
  OK(API(trib_reduce_init)(in, rank == root ? out : nullptr, count, TRIB_FLOAT32, TRIB_SUM, root,
                           comm, &all[1].request));
  OK(API(trib_reduce_scatter_init)(in, out, counts.data(), TRIB_FLOAT32, TRIB_SUM, comm,
                                   &all[2].request));
  counts.assign(counts.size(), 0);  // the request has its own
  OK(API(trib_reduce_scatter_block_init)(in, out, part, TRIB_FLOAT32, TRIB_SUM, comm,
                                         &all[3].request));
  return all;
}

void reductions(trib_comm* comm) {
  Stream streams[3];
  int round = 0;
  for (const std::size_t count : {1u, 3u, 1000u, 33333u, 262144u, 1000003u}) {
    for (const bool in_place : {false, true}) {
      Buffer in(count), out(count);
      Buffer& from = in_place ? out : in;
      from.fill(++round);
      const std::vector<float> before = from.fetch();
      const std::vector<Reduction> all = every_reduction(comm, from.data, out.data, count);
      CHECK(from.fetch() == before, "a request that was not started has changed its buffers");
      for (int turn = 0; turn < 3; ++turn) {
        for (const Reduction& reduction : all) {
          from.fill(++round);
          Stream& stream = streams[round % 3];
          OK(API(trib_start)(reduction.request, stream.handle));
          stream.wait();
          expect(out, reduction.begin, reduction.count, round, reduction.what);
        }
      }
      for (const Reduction& reduction : all) release(reduction.request);
    }
  }
}

void copies(trib_comm* comm) {
  Stream streams[2];
  const auto p = static_cast<std::size_t>(size);
  const int root = size / 2;
  int round = 0;
  for (const std::size_t count : {1u, 7u, 5000u, 300000u}) {
    for (const bool in_place : {false, true}) {
      Buffer in(count), out(count * p);
      float* const part = in_place ? out.data + count * static_cast<std::size_t>(rank) : in.data;
      float* const to = in_place && rank == root ? in.data : out.data;
      trib_request *gather = nullptr, *broadcast = nullptr;
      OK(API(trib_allgather_init)(part, out.data, count, TRIB_FLOAT32, comm, &gather));
      OK(API(trib_broadcast_init)(rank == root ? in.data : nullptr, to, count, TRIB_FLOAT32, root,
                                  comm, &broadcast));
      for (int turn = 0; turn < 3; ++turn) {
        in.fill(++round);
        if (in_place) Gpu::get().copy(part, in.data, count * 4);
        CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "copy");
        Stream& stream = streams[turn % 2];
        OK(API(trib_start)(gather, stream.handle));
        stream.wait();
        const std::vector<float> gathered = out.fetch();
        for (std::size_t i = 0; i < count * p; ++i)
          CHECK(gathered[i] == value(static_cast<int>(i / count), i % count, round),
                "allgather of %zu, in place %d: element %zu", count, in_place, i);
        OK(API(trib_start)(broadcast, stream.handle));
        stream.wait();
        std::vector<float> copy(count);
        Gpu::get().copy(copy.data(), to, count * 4);
        for (std::size_t i = 0; i < count; ++i)
          CHECK(copy[i] == value(root, i, round), "broadcast of %zu: element %zu", count, i);
      }
      release(gather);
      release(broadcast);
    }
  }
}

/// Nobody waits between these, whose streams take turns. Ranks make the same call in either form.
void back_to_back(trib_comm* comm) {
  Stream streams[3];
  constexpr std::size_t kCounts[] = {10000, 1, 700, 4096, 9999};
  constexpr std::size_t kCount = kCounts[0];
  Buffer data(kCount);
  trib_request *sums = nullptr, *maxima[std::size(kCounts)] = {};
  OK(API(trib_allreduce_init)(data.data, data.data, kCount, TRIB_FLOAT32, TRIB_SUM, comm, &sums));
  for (std::size_t i = 0; i < std::size(kCounts); ++i)
    OK(API(trib_allreduce_init)(data.data, data.data, kCounts[i], TRIB_FLOAT32, TRIB_MAX, comm,
                                &maxima[i]));
  data.fill(0);
  OK(API(trib_start)(sums, streams[2].handle));
  for (int i = 0; i < 1000; ++i) {  // which leave the sums as they are
    const std::size_t which = static_cast<std::size_t>(i) % std::size(kCounts);
    void* const stream = streams[i / 2 % 3].handle;
    if ((i + rank) % 3 == 0)
      OK(API(trib_allreduce)(data.data, data.data, kCounts[which], TRIB_FLOAT32, TRIB_MAX, comm,
                             stream));
    else
      OK(API(trib_start)(maxima[which], stream));
  }
  for (Stream& stream : streams) stream.wait();
  expect(data, 0, kCount, 0, "among others");

  constexpr int kTimes = 5;  // each of which multiplies by the number of ranks, but for the first
  data.fill(1);
  float factor = 1;
  for (int i = 0; i < kTimes; ++i) {
    OK(API(trib_start)(sums, streams[i % 3].handle));
    if (i > 0) factor *= static_cast<float>(size);
  }
  for (Stream& stream : streams) stream.wait();
  const std::vector<float> found = data.fetch();
  for (std::size_t i = 0; i < kCount; ++i)
    CHECK(found[i] == sum(i, 1) * factor, "sums of sums: element %zu is %g", i,
          static_cast<double>(found[i]));
  release(maxima[3]);  // in any order
  release(sums);
  for (const std::size_t i : {0, 4, 1, 2}) release(maxima[i]);
}

/// Some requests in one graph, replayed with another input each time. The host looks at the results
/// of many replays at once, so that ranks come to be apart.
void graph(trib_comm* comm, int replays) {
  Gpu& gpu = Gpu::get();
  constexpr std::size_t kShort = 3000, kLong = 200000;
  constexpr int kInputs = 7, kTogether = 50;
  const std::vector<std::size_t> counts = uneven(kShort);
  const std::size_t mine = counts[static_cast<std::size_t>(rank)];
  std::size_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += counts[static_cast<std::size_t>(r)];

  Stream streams[2];
  Buffer in(kLong), out(kLong), own(kShort), scattered(kShort);
  std::vector<std::unique_ptr<Buffer>> inputs, outs, owns, parts;
  for (int i = 0; i < kInputs; ++i) {
    inputs.push_back(std::make_unique<Buffer>(kLong));
    inputs.back()->fill(i);
  }
  for (int i = 0; i < kTogether; ++i) {
    outs.push_back(std::make_unique<Buffer>(kLong));
    owns.push_back(std::make_unique<Buffer>(kShort));
    parts.push_back(std::make_unique<Buffer>(kShort));
  }
  const auto copy = [&](Buffer& to, const Buffer& from, Stream& stream) {
    CHECK(
        gpu.call("cuMemcpyAsync", reinterpret_cast<unsigned long long>(to.data),
                 reinterpret_cast<unsigned long long>(from.data), to.count * 4, stream.handle) == 0,
        "no copy");
  };

  trib_request *long_sum = nullptr, *short_sum = nullptr, *scatter = nullptr;
  OK(API(trib_allreduce_init)(in.data, out.data, kLong, TRIB_FLOAT32, TRIB_SUM, comm, &long_sum));
  OK(API(trib_reduce_scatter_init)(scattered.data, scattered.data, counts.data(), TRIB_FLOAT32,
                                   TRIB_SUM, comm, &scatter));
  CHECK(gpu.call("cuStreamBeginCapture_v2", streams[0].handle, 1) == 0, "no capture");
  OK(API(trib_start)(long_sum, streams[0].handle));
  OK(API(trib_allreduce_init)(own.data, own.data, kShort, TRIB_FLOAT32, TRIB_SUM, comm,
                              &short_sum));
  OK(API(trib_start)(short_sum, streams[0].handle));
  OK(API(trib_start)(scatter, streams[0].handle));
  void *captured = nullptr, *executable = nullptr;
  CHECK(gpu.call("cuStreamEndCapture", streams[0].handle, &captured) == 0, "a broken capture");
  CHECK(gpu.call("cuGraphInstantiateWithFlags", &executable, captured, 0ull) == 0, "no graph");
  CHECK(gpu.call("cuGraphDestroy", captured) == 0, "cuGraphDestroy");

  for (int first = 0; first < replays; first += kTogether) {
    Stream& stream = streams[first / kTogether % 2];
    const auto round = [&](int i) { return (first / kTogether + i * 3) % kInputs; };
    for (int i = 0; i < kTogether; ++i) {
      const Buffer& input = *inputs[static_cast<std::size_t>(round(i))];
      for (Buffer* const buffer : {&in, &own, &scattered}) copy(*buffer, input, stream);
      CHECK(gpu.call("cuGraphLaunch", executable, stream.handle) == 0, "no launch");
      copy(*outs[static_cast<std::size_t>(i)], out, stream);
      copy(*owns[static_cast<std::size_t>(i)], own, stream);
      copy(*parts[static_cast<std::size_t>(i)], scattered, stream);
    }
    stream.wait();
    for (int i = 0; i < kTogether; ++i) {
      expect(*outs[static_cast<std::size_t>(i)], 0, kLong, round(i), "replayed");
      expect(*owns[static_cast<std::size_t>(i)], 0, kShort, round(i), "replayed in place");
      expect(*parts[static_cast<std::size_t>(i)], begin, mine, round(i), "replayed, a part");
    }
    // What is no graph's, in either form, comes in between.
    if (long_sum != nullptr) OK(API(trib_start)(long_sum, streams[0].handle));
    OK(API(trib_allreduce)(in.data, out.data, kShort, TRIB_FLOAT32, TRIB_SUM, comm,
                           streams[1].handle));
    for (Stream& each : streams) each.wait();
    expect(out, 0, kShort, round(kTogether - 1), "between replays");
    if (first + kTogether >= replays / 2 && long_sum != nullptr) {  // the graph does without them
      for (trib_request* const request : {short_sum, scatter, long_sum}) release(request);
      long_sum = nullptr;
    }
  }
  CHECK(gpu.call("cuGraphExecDestroy", executable) == 0, "cuGraphExecDestroy");
}

void lifetimes() {
  trib_comm* comm = nullptr;
  OK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr));
  Stream stream;
  Buffer in(1000), out(1000);
  trib_request *early = nullptr, *late = nullptr, *never = nullptr;
  for (trib_request** const request : {&early, &late, &never})
    OK(API(trib_allreduce_init)(in.data, out.data, 1000, TRIB_FLOAT32, TRIB_SUM, comm, request));
  in.fill(1);
  OK(API(trib_start)(early, stream.handle));
  release(early);  // what was started goes on
  stream.wait();
  expect(out, 0, 1000, 1, "freed at once");
  expect_error(API(trib_start)(early, stream.handle), TRIB_ERROR_ARGUMENT, "was freed");
  expect_error(API(trib_request_free)(early), TRIB_ERROR_ARGUMENT, "was freed");
  in.fill(2);
  OK(API(trib_start)(late, stream.handle));
  OK(API(trib_comm_destroy)(comm));
  stream.wait();
  expect(out, 0, 1000, 2, "destroyed at once");
  expect_error(API(trib_start)(late, stream.handle), TRIB_ERROR_ARGUMENT, "destroyed");
  release(never);
  release(late);
  expect_error(API(trib_start)(late, stream.handle), TRIB_ERROR_ARGUMENT, "was freed");
}

void errors(trib_comm* comm) {
  Buffer in(10), out(10);
  float* const nothing = nullptr;
  trib_request* request = nullptr;
  const auto wrong = [&](const char* text, const float* from, float* to, trib_op op, int root) {
    request = reinterpret_cast<trib_request*>(&request);
    expect_error(API(trib_reduce_init)(from, to, 10, TRIB_FLOAT32, op, root, comm, &request),
                 TRIB_ERROR_ARGUMENT, text);
    CHECK(request == nullptr, "there is a request after an error");
  };
  wrong("in is null", nothing, out.data, TRIB_SUM, 0);
  wrong("out is null", in.data, nothing, TRIB_SUM, rank);
  wrong("not defined on", in.data, out.data, TRIB_BAND, 0);
  wrong("is not a rank", in.data, out.data, TRIB_SUM, size);
  wrong("not aligned", reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(in.data) + 2),
        out.data, TRIB_SUM, 0);
  expect_error(API(trib_reduce_scatter_init)(in.data, out.data, nullptr, TRIB_FLOAT32, TRIB_SUM,
                                             comm, &request),
               TRIB_ERROR_ARGUMENT, "counts is null");
  if (size > 1)
    expect_error(API(trib_allreduce_init)(in.data, out.data, std::size_t{1} << 32, TRIB_FLOAT32,
                                          TRIB_SUM, comm, &request),
                 TRIB_ERROR_ARGUMENT, "2^32");
  Stream stream;  // no elements: nothing to do, and no buffers are needed
  OK(API(trib_allreduce_init)(nothing, nothing, 0, TRIB_FLOAT32, TRIB_SUM, comm, &request));
  OK(API(trib_start)(request, stream.handle));
  release(request);
  in.fill(3);
  OK(API(trib_allreduce_init)(in.data, out.data, 10, TRIB_FLOAT32, TRIB_SUM, comm, &request));
  OK(API(trib_start)(request, stream.handle));
  stream.wait();
  expect(out, 0, 10, 3, "after errors");
  release(request);
}

/// Rank 0 aborts while the others wait for it on the device.
void failed_communicator() {
  trib_comm* comm = nullptr;
  OK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr));
  Stream stream;
  Buffer in(1000), out(1000);
  trib_request *request = nullptr, *other = nullptr;
  OK(API(trib_allreduce_init)(in.data, out.data, 1000, TRIB_FLOAT32, TRIB_SUM, comm, &request));
  if (rank != 0) OK(API(trib_start)(request, stream.handle));
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) OK(API(trib_comm_abort)(comm));
  stream.wait();
  for (int i = 0;; ++i) {
    trib_result found = TRIB_SUCCESS;
    OK(API(trib_comm_query)(comm, &found));
    if (found != TRIB_SUCCESS) break;
    usleep(1000);
    CHECK(i < 5000, "the abort was not noticed");
  }
  expect_error(API(trib_start)(request, stream.handle), TRIB_ERROR_UNUSABLE, "unusable since");
  expect_error(API(trib_allreduce_init)(in.data, out.data, 1, TRIB_FLOAT32, TRIB_SUM, comm, &other),
               TRIB_ERROR_UNUSABLE, "unusable since");
  CHECK(other == nullptr, "a request of a communicator that has failed");
  API(trib_comm_destroy)(comm);
  release(request);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu_each();
  trib_comm* comm = nullptr;
  OK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr));
  reductions(comm);
  passed("every reduction, in place and not");
  copies(comm);
  passed("allgather and broadcast");
  back_to_back(comm);
  passed("back to back on three streams");
  if (has_graphs()) {
    graph(comm, 1000);
    passed("a graph, replayed");
    reductions(comm);  // launches now find their numbers on the device
    back_to_back(comm);
    passed("the same after a capture");
  }
  lifetimes();
  passed("lifetimes");
  errors(comm);
  passed("errors");
  failed_communicator();
  passed("a communicator that has failed");
  OK(API(trib_comm_destroy)(comm));
  if (rank == 0) std::printf("persistent calls checked\n");
  MPI_Finalize();
}

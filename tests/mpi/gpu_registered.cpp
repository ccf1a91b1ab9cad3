// SPDX-License-Identifier: BSD-3-Clause
// Registered buffers on a stream: results that peers store directly, in every length and place,
// back to back and in graphs; memory that peers cannot map; registrations that come and go; wrong
// arguments.
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "gpu_stream.hpp"

namespace {

struct Registered {
  trib_registration* handle = nullptr;
  Registered(trib_comm* comm, void* data, std::size_t bytes) {
    CHECK(API(trib_register)(comm, data, bytes, &handle) == TRIB_SUCCESS, "%s",
          last_error().c_str());
  }
  ~Registered() { CHECK(API(trib_deregister)(handle) == TRIB_SUCCESS, "%s", last_error().c_str()); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
};

void allreduce(trib_comm* comm, const float* in, float* out, std::size_t count, Stream& stream) {
  CHECK(API(trib_allreduce)(in, out, count, TRIB_FLOAT32, TRIB_SUM, comm, stream.handle) ==
            TRIB_SUCCESS,
        "%s", last_error().c_str());
}

void expect_fine(trib_comm* comm) {
  trib_result error = TRIB_SUCCESS;
  CHECK(API(trib_comm_query)(comm, &error) == TRIB_SUCCESS && error == TRIB_SUCCESS, "%s",
        last_error().c_str());
}

/// What lies around a result must stay as it is.
void check(const float* out, std::size_t begin, std::size_t count, std::size_t end, int round,
           const char* what) {
  std::vector<float> found(end);
  Gpu::get().copy(found.data(), out, end * 4);
  for (std::size_t i = 0; i < end; ++i) {
    const bool is_result = i >= begin && i < begin + count;
    const float expected = is_result ? sum(i - begin, round) : -1;
    CHECK(found[i] == expected, "%s: %zu elements from %zu, round %d: element %zu is %g, not %g",
          what, count, begin, round, i, static_cast<double>(found[i]),
          static_cast<double>(expected));
  }
}

/// Every length and place, with `in` elsewhere and in place.
void lengths(trib_comm* comm, float* data, std::size_t room, const char* what) {
  Stream stream;
  Buffer in(room);
  const std::vector<float> blank(room, -1);
  int round = 0;
  for (const std::size_t count : {1, 5, 1000, 70001, 262144, 1500007, 3000001})
    for (const std::size_t begin : {0, 1, 4, 1027}) {
      if (begin + count > room) continue;
      ++round;
      in.fill(round);
      Gpu::get().copy(data, blank.data(), room * 4);
      CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "");
      allreduce(comm, in.data, data + begin, count, stream);
      stream.wait();
      check(data, begin, count, room, round, what);
      // In place.
      Gpu::get().copy(data, blank.data(), room * 4);
      Gpu::get().copy(data + begin, in.data, count * 4);
      CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "");
      allreduce(comm, data + begin, data + begin, count, stream);
      stream.wait();
      check(data, begin, count, room, round, what);
      expect_fine(comm);
    }
}

/// A call behind the other, ranks at different paces: none may write where a peer still reads.
void back_to_back(trib_comm* comm) {
  constexpr std::size_t kCount = 1 << 20;
  constexpr int kRounds = 60;
  Stream stream;
  Buffer in(kCount), out(kCount), again(kCount), kept(kCount * 4);
  const Registered first(comm, out.data, kCount * 4), second(comm, again.data, kCount * 4);
  in.fill(3);
  for (int round = 0; round < kRounds; ++round) {
    if (round % size == rank)
      CHECK(Gpu::get().call("cuMemsetD8Async", reinterpret_cast<unsigned long long>(kept.data),
                            std::uint8_t{1}, kCount * 16, stream.handle) == 0,
            "");
    allreduce(comm, in.data, out.data, kCount, stream);
    // Reads what the call before has written, and is overwritten by the next one.
    allreduce(comm, out.data, again.data, kCount, stream);
    allreduce(comm, again.data, again.data, kCount, stream);
  }
  stream.wait();
  expect_fine(comm);
  const std::vector<float> once = out.fetch(), thrice = again.fetch();
  for (std::size_t i = 0; i < kCount; ++i) {
    CHECK(once[i] == sum(i, 3), "element %zu", i);
    CHECK(thrice[i] == sum(i, 3) * static_cast<float>(size) * static_cast<float>(size),
          "element %zu: %g", i, static_cast<double>(thrice[i]));
  }
}

void graph(trib_comm* comm, int replays) {
  constexpr std::size_t kCount = 600000;
  Stream stream;
  Buffer in(kCount), out(kCount);
  const Registered registered(comm, out.data, kCount * 4);
  trib_request* request = nullptr;
  CHECK(API(trib_allreduce_init)(in.data, out.data, kCount, TRIB_FLOAT32, TRIB_SUM, comm,
                                 &request) == TRIB_SUCCESS,
        "%s", last_error().c_str());
  Gpu& gpu = Gpu::get();
  void *recorded = nullptr, *executable = nullptr;
  CHECK(gpu.call("cuStreamBeginCapture_v2", stream.handle, 2) == 0, "no capture");
  allreduce(comm, in.data, out.data, kCount, stream);
  CHECK(API(trib_start)(request, stream.handle) == TRIB_SUCCESS, "%s", last_error().c_str());
  CHECK(gpu.call("cuStreamEndCapture", stream.handle, &recorded) == 0, "the capture was broken");
  CHECK(gpu.call("cuGraphInstantiateWithFlags", &executable, recorded, 0ull) == 0, "");
  for (int round = 0; round < replays; ++round) {
    if (round % 20 == 0) in.fill(round);
    CHECK(gpu.call("cuGraphLaunch", executable, stream.handle) == 0, "");
    if (round % 20 != 19) continue;
    stream.wait();
    expect(out, 0, kCount, round / 20 * 20, "a graph");
  }
  stream.wait();
  CHECK(gpu.call("cuGraphExecDestroy", executable) == 0, "");
  CHECK(gpu.call("cuGraphDestroy", recorded) == 0, "");
  CHECK(API(trib_request_free)(request) == TRIB_SUCCESS, "");
}

/// Registered to no effect on some ranks or on all.
void out_of_reach(trib_comm* comm) {
  constexpr std::size_t kCount = 1100000;
  Gpu& gpu = Gpu::get();
  void* const no_stream = nullptr;
  for (int odd_one = 0; odd_one <= size; ++odd_one) {
    unsigned long long pool = 0;
    const bool is_odd = odd_one == rank || odd_one == size;
    if (is_odd) CHECK(gpu.call("cuMemAllocAsync", &pool, kCount * 4, no_stream) == 0, "no pool");
    CHECK(gpu.call("cuCtxSynchronize") == 0, "");
    void* const memory = is_odd ? reinterpret_cast<void*>(pool) : gpu.allocate(kCount * 4);
    {
      const Registered registered(comm, memory, kCount * 4);
      lengths(comm, static_cast<float*>(memory), kCount, "out of reach");
    }
    if (is_odd)
      CHECK(gpu.call("cuMemFreeAsync", pool, no_stream) == 0, "");
    else
      gpu.free(memory);
  }
  void* const pinned = gpu.allocate_pinned(kCount * 4);
  {
    const Registered registered(comm, pinned, kCount * 4);
    lengths(comm, static_cast<float*>(pinned), kCount, "pinned memory");
  }
  gpu.free_pinned(pinned);
}

/// More of them, one after the other and at once, than there are places; memory is given back.
void come_and_go(trib_comm* comm) {
  constexpr std::size_t kCount = 1 << 20;
  Gpu& gpu = Gpu::get();
  Stream stream;
  Buffer in(kCount);
  in.fill(1);
  std::size_t before = 0, after = 0, all = 0;
  for (int round = 0; round < 150; ++round) {
    if (round == 50) {
      MPI_Barrier(MPI_COMM_WORLD);
      CHECK(gpu.call("cuMemGetInfo_v2", &before, &all) == 0, "");
      MPI_Barrier(MPI_COMM_WORLD);
    }
    Buffer out(kCount);
    const Registered registered(comm, out.data, kCount * 4);
    allreduce(comm, in.data, out.data, kCount, stream);
    stream.wait();
    if (round % 10 == 0) expect(out, 0, kCount, 1, "one after the other");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK(gpu.call("cuMemGetInfo_v2", &after, &all) == 0, "");
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK(after + (std::size_t{200} << 20) > before, "%zu MiB were free, now %zu", before >> 20,
        after >> 20);
  std::vector<std::unique_ptr<Buffer>> outs;
  std::vector<std::unique_ptr<Registered>> registrations;
  for (int i = 0; i < 80; ++i) {
    outs.push_back(std::make_unique<Buffer>(kCount));
    registrations.push_back(std::make_unique<Registered>(comm, outs.back()->data, kCount * 4));
  }
  for (int i = 0; i < 80; ++i)
    allreduce(comm, in.data, outs[static_cast<std::size_t>(i)]->data, kCount, stream);
  stream.wait();
  for (int i = 0; i < 80; i += 9)
    expect(*outs[static_cast<std::size_t>(i)], 0, kCount, 1, "80 at once");
  registrations.clear();
}

/// Ranks that do not pass registered memory alike hear of it, where results go there.
void disagreement() {
  constexpr std::size_t kCount = 4 << 20, kMore = kCount + 16;
  for (const bool is_elsewhere : {false, true}) {
    trib_comm* comm = nullptr;
    CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
          last_error().c_str());
    Stream stream;
    Buffer in(kMore), out(kMore), other(kMore);
    const Registered registered(comm, out.data, kMore * 4);
    float* const wrong = is_elsewhere ? other.data : out.data + 16;
    allreduce(comm, in.data, rank == size - 1 ? wrong : out.data, kCount, stream);
    trib_result found = TRIB_SUCCESS;
    std::string heard;
    for (int i = 0; found == TRIB_SUCCESS; ++i) {
      CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS, "");
      heard = last_error();
      usleep(1000);
      CHECK(i < 5000, "nobody has noticed");
    }
    stream.wait();
    CHECK(heard.find("not registered alike") != std::string::npos, "%s", heard.c_str());
    API(trib_comm_destroy)(comm);
  }
}

void errors(trib_comm* comm) {
  const auto refused = [&](trib_result result, const char* text) {
    CHECK(result == TRIB_ERROR_ARGUMENT && last_error().find(text) != std::string::npos,
          "%d, \"%s\", not \"%s\"", static_cast<int>(result), last_error().c_str(), text);
  };
  Buffer out(1000);
  trib_registration* handle = nullptr;
  refused(API(trib_register)(comm, out.data, 4000, nullptr), "registration is null");
  refused(API(trib_register)(nullptr, out.data, 4000, &handle), "comm is null");
  const int wrong = size - 1;
  const std::string who = "rank " + std::to_string(wrong);
  refused(API(trib_register)(comm, rank == wrong ? nullptr : out.data, 4000, &handle), who.c_str());
  refused(API(trib_register)(comm, out.data, rank == wrong ? 0 : 4000, &handle), who.c_str());
  CHECK(handle == nullptr, "");
  if (size > 1)
    refused(API(trib_register)(comm, out.data, rank == wrong ? 2000 : 4000, &handle), "2000");
  CHECK(API(trib_deregister)(nullptr) == TRIB_SUCCESS, "");
  // Nothing is the worse for it.
  const Registered registered(comm, out.data, 4000);
  Stream stream;
  Buffer in(1000);
  in.fill(1);
  allreduce(comm, in.data, out.data, 1000, stream);
  stream.wait();
  expect(out, 0, 1000, 1, "after wrong arguments");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu_each();
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  constexpr std::size_t kRoom = 3100000;
  {
    Buffer out(kRoom);
    const Registered registered(comm, out.data, kRoom * 4);
    lengths(comm, out.data, kRoom, "registered");
  }
  passed("every length and place");
  back_to_back(comm);
  passed("back to back");
  if (has_graphs()) {
    graph(comm, 200);
    passed("a graph, replayed");
    {
      MappedMemory ranges(7, 2 << 20, MappedMemory::kFile);
      const Registered registered(comm, ranges.data(), kRoom * 4);
      lengths(comm, static_cast<float*>(ranges.data()), kRoom, "mapped by the program");
    }
    passed("memory that the program maps");
    out_of_reach(comm);
    passed("memory out of reach");
    come_and_go(comm);
    passed("registrations that come and go");
  }
  errors(comm);
  passed("errors");
  if (size > 1 && has_graphs()) disagreement();
  trib_registration* late = nullptr;
  Buffer out(100);
  CHECK(API(trib_register)(comm, out.data, 400, &late) == TRIB_SUCCESS, "%s", last_error().c_str());
  CHECK(API(trib_comm_destroy)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  CHECK(API(trib_deregister)(late) == TRIB_SUCCESS, "after the communicator");
  if (rank == 0) std::printf("registered buffers checked\n");
  MPI_Finalize();
}

// SPDX-License-Identifier: BSD-3-Clause
// Two threads, each with a stream communicator and a stream of its own, enqueue hundreds of calls
// of all lengths, and never wait but to look at results. On every rank the calls of a communicator
// come in the same order, and so do those of both together: what one GPU begins with, so do the
// others, as tributary.h asks for: without that order, two kernels that take all of a GPU each keep
// each other out (seen within some hundred calls on two H100, with one hardware queue and with
// eight). CUDA_DEVICE_MAX_CONNECTIONS=1 makes it hardest, since all streams are one queue then.
// First one thread enqueues both communicators' calls in one order, with other work before them
// that differs from rank to rank: the order of enqueuing is enough, whatever else is in the
// streams.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu_stream.hpp"

namespace {

constexpr int kThreads = 2, kCalls = 600, kDepth = 8;
constexpr std::size_t kMost = 500000;

/// Whose turn it is, in the one order of all calls. Made before the threads begin.
std::vector<int> turns;
std::atomic<std::size_t> next{0};

/// Waits for this thread's turn, enqueues, and passes it on.
template <class Enqueue>
void in_turn(int thread, Enqueue&& enqueue) {
  while (turns[next.load(std::memory_order_acquire)] != thread) std::this_thread::yield();
  enqueue();
  next.fetch_add(1, std::memory_order_release);
}

struct Slot {
  explicit Slot() : in(kMost), out(kMost) {}
  Buffer in, out;
  std::size_t count = 0;
  int kind = 0, round = 0;
};

constexpr std::size_t kCounts[] = {1, 7, 250, 1024, 4096, 33333, 200000, kMost};

void enqueue(const Slot& slot, int root, trib_comm* comm, const Stream& stream) {
  const trib_result result =
      slot.kind == 0 ? API(trib_reduce)(slot.in.data, slot.out.data, slot.count, TRIB_FLOAT32,
                                        TRIB_SUM, root, comm, stream.handle)
                     : API(trib_allreduce)(slot.in.data, slot.out.data, slot.count, TRIB_FLOAT32,
                                           TRIB_SUM, comm, stream.handle);
  CHECK(result == TRIB_SUCCESS, "call %d: %s", slot.round, last_error().c_str());
}

/// One call after the other of every kind, so that all programs and kernels are loaded.
void warm_up(Slot& slot, trib_comm* comm, Stream& stream) {
  for (const std::size_t count : kCounts)
    for (int root = -1; root < size; ++root) {
      slot.count = count;
      slot.kind = root < 0 ? 1 : 0;
      enqueue(slot, root, comm, stream);
      stream.wait();
    }
}

/// Work of the program's own: 20 ms.
void pause(void*) { usleep(20000); }

/// Calls that take all of a GPU. On every second rank the first communicator's stream is busy when
/// its call is enqueued, on the others the second one's: there the calls could begin in other
/// orders.
void behind_other_work(trib_comm* const* comms, Stream* streams) {
  constexpr std::size_t kLong = 4 << 20;
  std::vector<std::unique_ptr<Buffer>> in, out;
  for (int i = 0; i < 2; ++i) {
    in.push_back(std::make_unique<Buffer>(kLong));
    out.push_back(std::make_unique<Buffer>(kLong));
  }
  const auto begin = [&](int i) {
    CHECK(API(trib_allreduce)(in[static_cast<std::size_t>(i)]->data,
                              out[static_cast<std::size_t>(i)]->data, kLong, TRIB_FLOAT32, TRIB_SUM,
                              comms[i], streams[i].handle) == TRIB_SUCCESS,
          "%s", last_error().c_str());
  };
  for (int i = 0; i < 2; ++i) {  // programs and kernels are loaded
    begin(i);
    streams[i].wait();
  }
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 2; ++i) in[static_cast<std::size_t>(i)]->fill(2 * round + i);
    for (int i = 0; i < 2; ++i) {
      if ((rank + round) % 2 == i)
        CHECK(Gpu::get().call("cuLaunchHostFunc", streams[i].handle, &pause,
                              static_cast<void*>(nullptr)) == 0,
              "no host function");
      begin(i);
    }
    for (int i = 0; i < 2; ++i) {
      // Kernels that keep each other out end by TRIB_TIMEOUT, and then this says so.
      streams[i].wait();
      trib_result found = TRIB_SUCCESS;
      CHECK(API(trib_comm_query)(comms[i], &found) == TRIB_SUCCESS && found == TRIB_SUCCESS,
            "behind other work, round %d: %s", round, last_error().c_str());
      expect(*out[static_cast<std::size_t>(i)], 0, kLong, 2 * round + i, "behind other work");
    }
  }
}

void work(int thread, trib_comm* comm, void* context, std::vector<Slot>& slots, Stream& stream,
          float* host) {
  Gpu& gpu = Gpu::get();
  CHECK(gpu.call("cuCtxSetCurrent", context) == 0, "no context");
  std::mt19937 same(static_cast<unsigned>(thread) + 5);  // alike on all ranks
  for (int call = 0; call < kCalls; call += kDepth) {
    for (int i = 0; i < kDepth; ++i) {
      Slot& slot = slots[static_cast<std::size_t>(i)];
      slot.count = kCounts[same() % 8];
      slot.kind = static_cast<int>(same() % 3);
      slot.round = call + i + 1000 * thread;
      for (std::size_t k = 0; k < slot.count; ++k) host[k] = value(rank, k, slot.round);
      // On the thread's own stream: the other one's kernels may wait on the device meanwhile.
      CHECK(gpu.call("cuMemcpyHtoDAsync_v2", reinterpret_cast<unsigned long long>(slot.in.data),
                     static_cast<const void*>(host), slot.count * 4, stream.handle) == 0,
            "copy");
      stream.wait();
    }
    for (int i = 0; i < kDepth; ++i) {
      const Slot& slot = slots[static_cast<std::size_t>(i)];
      in_turn(thread, [&] { enqueue(slot, slot.round % size, comm, stream); });
    }
    // A kernel that waits for ever ends by TRIB_TIMEOUT, and then this says so.
    stream.wait();
    trib_result found = TRIB_SUCCESS;
    CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS && found == TRIB_SUCCESS,
          "thread %d, call %d: %s", thread, call, last_error().c_str());
    for (int i = 0; i < kDepth; ++i) {
      const Slot& slot = slots[static_cast<std::size_t>(i)];
      if (slot.kind == 0 && rank != slot.round % size) continue;
      CHECK(gpu.call("cuMemcpyDtoHAsync_v2", static_cast<void*>(host),
                     reinterpret_cast<unsigned long long>(slot.out.data), slot.count * 4,
                     stream.handle) == 0,
            "copy");
      stream.wait();
      for (std::size_t k = 0; k < slot.count; ++k)
        CHECK(host[k] == sum(k, slot.round), "thread %d, call %d: element %zu of %zu is %g, not %g",
              thread, call + i, k, slot.count, static_cast<double>(host[k]),
              static_cast<double>(sum(k, slot.round)));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);  // threads call no MPI
  rank = world_rank();
  size = world_size();
  skip_without_gpu_each();
  void* context = nullptr;
  CHECK(Gpu::get().call("cuCtxGetCurrent", &context) == 0, "");
  trib_comm* comms[kThreads] = {};
  for (trib_comm*& comm : comms)
    CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
          last_error().c_str());
  // The same on all ranks: a thread's group of calls is cut up by the other one's, at random.
  std::mt19937 same(99);
  int left[kThreads] = {kCalls, kCalls};
  while (left[0] + left[1] > 0) {
    int thread = static_cast<int>(same() % kThreads);
    if (left[thread] == 0) thread = 1 - thread;
    turns.push_back(thread);
    --left[thread];
  }
  // Before and after, no thread allocates or frees, which may wait for the whole device.
  std::vector<Slot> slots[kThreads] = {std::vector<Slot>(kDepth), std::vector<Slot>(kDepth)};
  Stream streams[kThreads];
  float* host[kThreads];  // pinned: copies take no way that kernels take
  for (float*& memory : host)
    memory = static_cast<float*>(Gpu::get().allocate_pinned(kMost * sizeof(float)));
  for (int i = 0; i < kThreads; ++i) warm_up(slots[i][0], comms[i], streams[i]);
  CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "");
  behind_other_work(comms, streams);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back(work, i, comms[i], context, std::ref(slots[i]), std::ref(streams[i]),
                         host[i]);
  for (std::thread& thread : threads) thread.join();
  for (float* const memory : host) Gpu::get().free_pinned(memory);
  for (trib_comm* const comm : comms)
    CHECK(API(trib_comm_destroy)(comm) == TRIB_SUCCESS, "%s", last_error().c_str());
  if (rank == 0) std::printf("%d calls of each of two threads checked\n", kCalls);
  MPI_Finalize();
}

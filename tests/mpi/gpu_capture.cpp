// SPDX-License-Identifier: BSD-3-Clause
// MPI calls of every way are made while the program captures a stream, in another thread or in the
// one that calls: the capture goes on, holds what the program put in and nothing else, and the
// results are right. With "blocking" the stream is one that is ordered with the default stream,
// each way has a capture of its own, and all that break it are named at the end.
#include <algorithm>
#include <functional>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;
void* context = nullptr;

/// CUstreamCaptureMode.
struct Mode {
  int number;
  const char* name;
};
constexpr Mode kModes[] = {{2, "relaxed"}, {0, "global"}, {1, "thread-local"}};
constexpr int kRelaxed = 2, kDefaultMode = 0;
constexpr unsigned kBlocking = 0, kNonBlocking = 1;  // flags of cuStreamCreate

unsigned long long address(void* memory) { return reinterpret_cast<unsigned long long>(memory); }

// ----------------------------------------------------------------------------------------- capture

/// A stream in capture, from a node at the beginning to one at the end: each fills half of a
/// buffer.
class Capture {
 public:
  Capture(unsigned flags, int mode, bool is_in_this_thread) : mode_(mode) {
    CHECK(gpu_.call("cuStreamCreate", &stream_, flags) == 0, "no stream");
    memory_ = gpu_.allocate(2 * kCount * 4);
    const std::vector<unsigned> nothing(2 * kCount, 0);
    gpu_.copy(memory_, nothing.data(), nothing.size() * 4);
    CHECK(gpu_.call("cuCtxSynchronize") == 0, "");
    if (is_in_this_thread) {
      begin();
      return;
    }
    thread_ = std::thread([this] {
      CHECK(gpu_.call("cuCtxSetCurrent", context) == 0, "");
      begin();
      has_begun_.release();
      may_end_.acquire();
      finish();
    });
    has_begun_.acquire();
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  /// 0: no longer captured, 1: in capture, 2: invalidated; less than that: an error of the look.
  int status() {
    int now = 0;
    const int result = gpu_.call("cuStreamIsCapturing", stream_, &now);
    return result == 0 ? now : -result;
  }
  /// What is wrong with it, or nothing. Replays what was captured.
  std::string end() {
    if (thread_.joinable()) {
      may_end_.release();
      thread_.join();
    } else {
      finish();
    }
    std::string wrong;
    if (result_ != 0 || graph_ == nullptr) {
      wrong = "the capture failed, error " + std::to_string(result_);
    } else {
      std::size_t nodes = 0;
      void *executable = nullptr, *const none = nullptr, *replay = nullptr;
      CHECK(gpu_.call("cuGraphGetNodes", graph_, none, &nodes) == 0, "");
      CHECK(gpu_.call("cuStreamCreate", &replay, kNonBlocking) == 0, "no stream");
      CHECK(gpu_.call("cuGraphInstantiateWithFlags", &executable, graph_, 0ull) == 0, "no graph");
      CHECK(gpu_.call("cuGraphLaunch", executable, replay) == 0, "no launch");
      CHECK(gpu_.call("cuStreamSynchronize", replay) == 0, "the graph failed");
      std::vector<unsigned> found(2 * kCount);
      gpu_.copy(found.data(), memory_, found.size() * 4);
      std::vector<unsigned> expected(kCount, kFirst);
      expected.resize(2 * kCount, kLast);
      if (nodes != 2) wrong = std::to_string(nodes) + " nodes were captured, not 2";
      if (found != expected) wrong += " the graph does not do what was captured";
      CHECK(gpu_.call("cuGraphExecDestroy", executable) == 0, "");
      CHECK(gpu_.call("cuGraphDestroy", graph_) == 0, "");
      CHECK(gpu_.call("cuStreamDestroy_v2", replay) == 0, "");
    }
    CHECK(gpu_.call("cuStreamDestroy_v2", stream_) == 0, "");
    gpu_.free(memory_);
    return wrong;
  }

 private:
  static constexpr std::size_t kCount = 256;
  static constexpr unsigned kFirst = 11, kLast = 22;

  void begin() {
    CHECK(gpu_.call("cuStreamBeginCapture_v2", stream_, mode_) == 0, "no capture");
    CHECK(gpu_.call("cuMemsetD32Async", address(memory_), kFirst, kCount, stream_) == 0, "");
  }
  /// In the thread that has begun it.
  void finish() {
    const int result = gpu_.call("cuMemsetD32Async", address(memory_) + kCount * 4, kLast, kCount,
                                 stream_);  // fails if the capture is broken
    result_ = gpu_.call("cuStreamEndCapture", stream_, &graph_);
    if (result_ == 0) result_ = result;
  }

  Gpu& gpu_ = Gpu::get();
  const int mode_;
  void *stream_ = nullptr, *memory_ = nullptr, *graph_ = nullptr;
  int result_ = 0;
  std::binary_semaphore has_begun_{0}, may_end_{0};
  std::thread thread_;
};

// ------------------------------------------------------------------------------------------- calls

float value(int r, std::size_t i, int salt) {
  return static_cast<float>(
      (i * 7 + static_cast<std::size_t>(r) * 13 + static_cast<std::size_t>(salt) * 5) % 101);
}

/// Memory on the host or on the GPU that is filled before a capture and looked at after it.
class Vector {
 public:
  Vector(std::size_t count, bool is_on_host) : host_(count), is_on_host_(is_on_host) {
    if (!is_on_host_) memory_ = Gpu::get().allocate(count * 4);
  }
  ~Vector() {
    if (memory_ != nullptr) Gpu::get().free(memory_);
  }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;

  float* data() { return is_on_host_ ? host_.data() : static_cast<float*>(memory_); }
  void put(const std::vector<float>& values) {
    host_ = values;
    if (!is_on_host_) Gpu::get().copy(memory_, host_.data(), host_.size() * 4);
  }
  std::vector<float> fetch() {
    if (!is_on_host_) Gpu::get().copy(host_.data(), memory_, host_.size() * 4);
    return host_;
  }

 private:
  std::vector<float> host_;
  const bool is_on_host_;
  void* memory_ = nullptr;
};

void first_plus_second(void* in, void* inout, int* count, MPI_Datatype*) {
  for (int i = 0; i < *count; ++i) static_cast<float*>(inout)[i] += static_cast<float*>(in)[i];
}

enum class Way {
  allreduce,
  reduce,
  reduce_scatter_block,
  own_operator,
  nonblocking,
  persistent,
  bcast,
  sendrecv
};

/// A call with its buffers.
class Call {
 public:
  enum Where { host, gpu, mixed };

  Call(const char* name, Way way, int count, Where where, int salt)
      : name_(name),
        way_(way),
        count_(count),
        salt_(salt),
        in_(n() * static_cast<std::size_t>(size), is_on_host(where)),
        out_(n(), is_on_host(where)) {}
  const char* name() const { return name_; }

  void fill() {
    std::vector<float> in(n() * static_cast<std::size_t>(size)), out(n(), -1);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = value(rank, i, salt_);
    if (way_ == Way::bcast && rank == 0)
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = value(0, i, salt_);
    in_.put(in);
    out_.put(out);
  }
  /// The MPI's word.
  int make(MPI_Comm comm, MPI_Op own) {
    float* const in = in_.data();
    float* const out = out_.data();
    MPI_Request request = MPI_REQUEST_NULL;
    int status = MPI_SUCCESS;
    switch (way_) {
      case Way::allreduce:
        return MPI_Allreduce(in, out, count_, MPI_FLOAT, MPI_SUM, comm);
      case Way::reduce:
        return MPI_Reduce(in, out, count_, MPI_FLOAT, MPI_SUM, 0, comm);
      case Way::reduce_scatter_block:
        return MPI_Reduce_scatter_block(in, out, count_, MPI_FLOAT, MPI_SUM, comm);
      case Way::own_operator:
        return MPI_Allreduce(in, out, count_, MPI_FLOAT, own, comm);
      case Way::nonblocking:
        status = MPI_Iallreduce(in, out, count_, MPI_FLOAT, MPI_SUM, comm, &request);
        return status == MPI_SUCCESS ? MPI_Wait(&request, MPI_STATUS_IGNORE) : status;
      case Way::persistent:
#if HAS_PERSISTENT_REDUCTIONS
        status =
            MPI_Allreduce_init(in, out, count_, MPI_FLOAT, MPI_SUM, comm, MPI_INFO_NULL, &request);
        for (int i = 0; i < 3 && status == MPI_SUCCESS; ++i) {
          status = MPI_Start(&request);
          if (status == MPI_SUCCESS) status = MPI_Wait(&request, MPI_STATUS_IGNORE);
        }
        if (status == MPI_SUCCESS) status = MPI_Request_free(&request);
        return status;
#else
        return MPI_Allreduce(in, out, count_, MPI_FLOAT, MPI_SUM, comm);
#endif
      case Way::bcast:
        return MPI_Bcast(out, count_, MPI_FLOAT, 0, comm);
      case Way::sendrecv:
        return MPI_Sendrecv(in, count_, MPI_FLOAT, (rank + 1) % size, 3, out, count_, MPI_FLOAT,
                            (rank + size - 1) % size, 3, comm, MPI_STATUS_IGNORE);
    }
    return status;
  }
  /// What is wrong with the result, or nothing.
  std::string check() {
    if (way_ == Way::reduce && rank != 0) return "";
    const std::vector<float> found = out_.fetch();
    const std::size_t first =
        way_ == Way::reduce_scatter_block ? n() * static_cast<std::size_t>(rank) : 0;
    for (std::size_t i = 0; i < n(); ++i) {
      float expected = 0;
      if (way_ == Way::bcast)
        expected = value(0, i, salt_);
      else if (way_ == Way::sendrecv)
        expected = value((rank + size - 1) % size, i, salt_);
      else
        for (int r = 0; r < size; ++r) expected += value(r, first + i, salt_);
      if (found[i] != expected)
        return "element " + std::to_string(i) + " is " + std::to_string(found[i]) + ", not " +
               std::to_string(expected);
    }
    return "";
  }

 private:
  std::size_t n() const { return static_cast<std::size_t>(count_); }
  static bool is_on_host(Where where) { return where == host || (where == mixed && rank == 0); }

  const char* const name_;
  const Way way_;
  const int count_, salt_;
  Vector in_, out_;
};

using Calls = std::vector<std::unique_ptr<Call>>;

/// Last those in which a rank may wait for ever for one whose copy was refused.
Calls all_calls() {
  Calls calls;
  int salt = 0;
  const auto add = [&](const char* name, Way way, int count, Call::Where where) {
    calls.push_back(std::make_unique<Call>(name, way, count, where, ++salt));
  };
  add("host memory", Way::allreduce, 3000, Call::host);
  add("a short allreduce", Way::allreduce, 100, Call::gpu);
  add("an allreduce", Way::allreduce, 300000, Call::gpu);
  add("a Reduce", Way::reduce, 50000, Call::gpu);
  add("a reduce_scatter", Way::reduce_scatter_block, 20000, Call::gpu);
  add("a short nonblocking allreduce", Way::nonblocking, 100, Call::gpu);
  add("a nonblocking allreduce", Way::nonblocking, 200000, Call::gpu);
  add("a persistent allreduce", Way::persistent, 1000, Call::gpu);
  add("a long persistent allreduce", Way::persistent, 400000, Call::gpu);
  add("a staged allreduce", Way::allreduce, 5000, Call::mixed);
  add("a nonblocking, staged allreduce", Way::nonblocking, 5000, Call::mixed);
  add("an operator of the program's", Way::own_operator, 5000, Call::gpu);
  add("MPI_Bcast", Way::bcast, 5000, Call::gpu);
  add("MPI_Sendrecv", Way::sendrecv, 5000, Call::gpu);
  return calls;
}

MPI_Comm duplicate() {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

/// Calls one after the other in one capture, all of them `times` times. What is wrong, or nothing.
std::string in_capture(const std::vector<Call*>& calls, MPI_Comm comm, MPI_Op own, unsigned flags,
                       const Mode& mode, bool is_in_this_thread, int times) {
  for (Call* const call : calls) call->fill();
  std::string wrong;
  const auto note = [&](const std::string& what) {
    if (wrong.empty()) wrong = what;
  };
  Capture capture(flags, mode.number, is_in_this_thread);
  for (int i = 0; i < times; ++i)  // also when it is broken: other ranks may go on
    for (Call* const call : calls) {
      const int result = call->make(comm, own);
      if (result != MPI_SUCCESS) note(std::string(call->name()) + ": " + error_text(result));
      const int status = capture.status();
      if (status != 1)
        note(std::string(call->name()) + ": the capture's status is " + std::to_string(status));
      int thread_mode = kRelaxed;  // the next two calls put back what there was
      Gpu::get().call("cuThreadExchangeStreamCaptureMode", &thread_mode);
      const int found = thread_mode;
      Gpu::get().call("cuThreadExchangeStreamCaptureMode", &thread_mode);
      if (found != kDefaultMode)
        note(std::string(call->name()) + ": the thread's mode is " + std::to_string(found));
    }
  const std::string at_the_end = capture.end();
  if (!at_the_end.empty()) note(at_the_end);
  for (Call* const call : calls)
    if (const std::string bad = call->check(); wrong.empty() && !bad.empty())
      note(std::string(call->name()) + ": " + bad);
  if (wrong.empty()) return wrong;
  return wrong + " (mode " + mode.name + ", " + (is_in_this_thread ? "the same" : "another") +
         " thread)";
}

/// Buffers that peers come to map, and that are gone then: in some later call on the communicator
/// the mappings are closed.
void use_and_free(MPI_Comm comm) {
  constexpr int kCount = 1 << 20;
  const std::vector<float> host(kCount, 1);
  for (int i = 0; i < 3; ++i) {
    auto* const data = static_cast<float*>(Gpu::get().allocate(kCount * sizeof(float)));
    Gpu::get().copy(data, host.data(), kCount * sizeof(float));
    CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "");
    for (int again = 0; again < 6; ++again)
      CHECK(MPI_Allreduce(MPI_IN_PLACE, data, kCount, MPI_FLOAT, MPI_MAX, comm) == MPI_SUCCESS, "");
    Gpu::get().free(data);
  }
}

/// A stream that has nothing to do with the default stream.
int non_blocking(const Calls& calls, MPI_Op own) {
  int captures = 0;
  std::vector<Call*> all;
  for (const auto& call : calls) all.push_back(call.get());
  for (const Mode& mode : kModes)
    for (const bool is_in_this_thread : {false, true}) {
      const MPI_Comm comm = duplicate();  // which is set up in the first capture
      for (const int times : {2, 12}) {   // from some call on, kernels are launched in other ways
        const std::string wrong =
            in_capture(all, comm, own, kNonBlocking, mode, is_in_this_thread, times);
        CHECK(wrong.empty(), "rank %d: %s", rank, wrong.c_str());
        ++captures;
        use_and_free(comm);
      }
      MPI_Comm free_it = comm;
      MPI_Comm_free(&free_it);
    }
  return captures;
}

int blocking(const Calls& calls, MPI_Op own) {
  int captures = 0, broken = 0;
  for (const auto& call : calls)
    for (const Mode& mode : kModes)
      for (const bool is_in_this_thread : {false, true}) {
        const std::string what = std::string(call->name()) + ", mode " + mode.name;
        if (rank == 0) std::printf("%s\n", what.c_str());  // for the case that it hangs
        std::fflush(stdout);
        MPI_Comm comm = duplicate();
        for (const int times : {2, 40}) {
          const std::string wrong =
              in_capture({call.get()}, comm, own, kBlocking, mode, is_in_this_thread, times);
          ++captures;
          if (!wrong.empty()) {
            ++broken;
            std::fprintf(stderr, "rank %d: a blocking stream's capture: %s\n", rank, wrong.c_str());
          }
          // Whether all is well is for all ranks to know: what is broken is used no more.
          const int is_well = wrong.empty() ? 1 : 0;
          int are_all_well = 0;
          MPI_Allreduce(&is_well, &are_all_well, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
          if (are_all_well == 0) break;
          if (times == 2) use_and_free(comm);
        }
        MPI_Comm_free(&comm);
      }
  CHECK(broken == 0, "%d of %d captures of a blocking stream were broken", broken, captures);
  return captures;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  CHECK(Gpu::get().call("cuCtxGetCurrent", &context) == 0 && context != nullptr, "no context");
  MPI_Op own;
  MPI_Op_create(first_plus_second, 1, &own);
  int captures = 0;
  {
    const Calls calls = all_calls();
    const bool is_blocking = argc > 1 && std::string(argv[1]) == "blocking";
    captures = is_blocking ? blocking(calls, own) : non_blocking(calls, own);
  }
  MPI_Op_free(&own);
  if (rank == 0) std::printf("%d captures checked\n", captures);
  MPI_Finalize();
}

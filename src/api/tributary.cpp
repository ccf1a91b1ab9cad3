// SPDX-License-Identifier: BSD-3-Clause
// The C API of include/tributary/tributary.h, but for what needs MPI (src/mpi/intercept.cpp).
#include "tributary/tributary.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>

#include "api/stream_communicator.hpp"
#include "base/error.hpp"

struct trib_comm {
  std::shared_ptr<trib::StreamCommunicator> impl;
};

struct trib_request {
  std::weak_ptr<trib::StreamCommunicator> comm;  // it may be destroyed before the request is freed
  trib::StreamCommunicator::Work work;
  bool is_freed = false;
};

struct trib_registration {
  std::shared_ptr<trib::StreamCommunicator::Registration> impl;
};

namespace trib {
namespace {

thread_local std::string last_error;

trib_result result_of(Code code) {
  switch (code) {
    case Code::argument:
    case Code::request:
      return TRIB_ERROR_ARGUMENT;
    case Code::timeout:
      return TRIB_ERROR_TIMEOUT;
    case Code::peer:
    case Code::dead:
      return TRIB_ERROR_PEER;
    case Code::unusable:
    case Code::revoked:
      return TRIB_ERROR_UNUSABLE;
    case Code::system:
      return TRIB_ERROR_SYSTEM;
    case Code::device:
      return TRIB_ERROR_DEVICE;
    case Code::internal:
      break;
  }
  return TRIB_ERROR_INTERNAL;
}

/// Runs `body`, and turns what it throws into a code and a text.
template <class Body>
trib_result guarded(Body&& body) noexcept {
  try {
    body();
    return TRIB_SUCCESS;
  } catch (const Error& error) {
    last_error = error.what();
    return result_of(error.code());
  } catch (const std::exception& error) {
    last_error = error.what();
    return TRIB_ERROR_SYSTEM;
  } catch (...) {
    last_error = "the caller's exchange function threw what is no std::exception";
    return TRIB_ERROR_SYSTEM;
  }
}

[[noreturn]] void wrong(const std::string& what) { throw Error(Code::argument, what); }

constexpr Dtype kDtypeOf[] = {Dtype::i8,  Dtype::i16,  Dtype::i32,    Dtype::i64,
                              Dtype::u8,  Dtype::u16,  Dtype::u32,    Dtype::u64,
                              Dtype::f16, Dtype::bf16, Dtype::f8e4m3, Dtype::f8e5m2,
                              Dtype::f32, Dtype::f64,  Dtype::cf32,   Dtype::cf64};
constexpr Op kOpOf[] = {Op::sum, Op::prod, Op::max,  Op::min, Op::land,
                        Op::lor, Op::lxor, Op::band, Op::bor, Op::bxor};
static_assert(std::size(kDtypeOf) == TRIB_COMPLEX128 + 1 && std::size(kOpOf) == TRIB_BXOR + 1);

class CallerBootstrap final : public Bootstrap {
 public:
  CallerBootstrap(int rank, int size, trib_exchange function, void* context)
      : rank_(rank), size_(size), exchange_(function), context_(context) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    if (const int status = exchange_(context_, mine, all, bytes); status != 0)
      throw Error(Code::system,
                  "the caller's exchange function returned " + std::to_string(status));
  }
  void progress() override {}

 private:
  const int rank_, size_;
  const trib_exchange exchange_;
  void* const context_;
};

void expect(const trib_comm* comm) {
  if (comm == nullptr) wrong("comm is null");
  comm->impl->expect_own_process();
}

/// The call, of dtype and op, after all checks that need no other rank.
StreamCommunicator::Call checked(const trib_comm* comm, trib_dtype dtype, trib_op op,
                                 StreamCommunicator::Call call) {
  expect(comm);
  if (static_cast<unsigned>(dtype) >= std::size(kDtypeOf))
    wrong("dtype " + std::to_string(static_cast<int>(dtype)) + " is none of trib_dtype");
  if (static_cast<unsigned>(op) >= std::size(kOpOf))
    wrong("op " + std::to_string(static_cast<int>(op)) + " is none of trib_op");
  call.dtype = kDtypeOf[dtype];
  call.op = kOpOf[op];
  const int rank = comm->impl->rank(), size = comm->impl->size();
  if (call.collective == Collective::reduce_scatter && call.counts == nullptr)
    wrong("counts is null");
  // No sum or product of these is too large for a size_t.
  const std::size_t most = SIZE_MAX / 16 / static_cast<std::size_t>(size);
  const bool has_counts = call.collective == Collective::reduce_scatter;
  for (int part = 0; part < (has_counts ? size : 1); ++part)
    if (const std::size_t count = has_counts ? call.counts[part] : call.count; count > most)
      wrong(std::to_string(count) + " elements: a negative number?");
  if (call.collective >= Collective::allgather) {  // only copies: any type of the width
    const std::size_t width = bytes(call.dtype);
    call.count *= width > 8 ? width / 8 : 1;
    call.dtype = width == 1   ? Dtype::u8
                 : width == 2 ? Dtype::u16
                 : width == 4 ? Dtype::u32
                              : Dtype::u64;
    call.op = Op::bor;
  }
  if (!is_defined(call.op, call.dtype))
    wrong(std::string(name(call.op)) + " is not defined on " + std::string(name(call.dtype)));
  if (call.root < 0 || call.root >= size)
    wrong("root " + std::to_string(call.root) + " is not a rank: there are " +
          std::to_string(size));
  std::size_t read = call.count, written = call.count;
  if (call.collective == Collective::reduce_scatter) {
    read = std::accumulate(call.counts, call.counts + size, std::size_t{0});
    written = call.counts[rank];
  }
  if (call.collective == Collective::broadcast && rank != call.root) read = 0;
  if (call.collective == Collective::reduce && rank != call.root) written = 0;
  // What is ignored may be anything: an error would be this rank's alone.
  if (read == 0) call.in = nullptr;
  if (written == 0) call.out = nullptr;
  if (call.in == nullptr && read > 0) wrong("in is null");
  if (call.out == nullptr && written > 0) wrong("out is null");
  for (const void* const buffer : {call.in, static_cast<const void*>(call.out)})
    if (reinterpret_cast<std::uintptr_t>(buffer) % alignment(call.dtype) != 0)
      wrong("a buffer is not aligned to its elements");
  return call;
}

trib_result enqueue(trib_comm* comm, trib_dtype dtype, trib_op op, trib_stream stream,
                    const StreamCommunicator::Call& call) noexcept {
  return guarded([&] {
    const StreamCommunicator::Call valid = checked(comm, dtype, op, call);
    comm->impl->enqueue(valid, stream);
  });
}

trib_result init(trib_comm* comm, trib_dtype dtype, trib_op op, trib_request** request,
                 const StreamCommunicator::Call& call) noexcept {
  return guarded([&] {
    if (request == nullptr) wrong("request is null");
    *request = nullptr;
    const StreamCommunicator::Call valid = checked(comm, dtype, op, call);
    *request = new trib_request{comm->impl, comm->impl->prepare(valid)};
  });
}

void expect_request(const trib_request* request) {
  if (request == nullptr) wrong("request is null");
  if (request->is_freed) wrong("the request was freed");
}

/// Keeps the last ones that were freed, so that a use that comes too late is an error with a text.
void bury(trib_request* request) {
  constexpr std::size_t kKept = 256;
  static auto& mutex = *new std::mutex;  // never destroyed: programs may free late
  static auto& freed = *new std::deque<std::unique_ptr<trib_request>>;
  const std::lock_guard lock(mutex);
  expect_request(request);
  freed.emplace_back(request);
  request->comm.reset();
  request->is_freed = true;
  if (freed.size() > kKept) freed.pop_front();
}

}  // namespace
}  // namespace trib

using trib::Collective;
using trib::enqueue;
using trib::guarded;
using trib::init;

extern "C" {

const char* trib_version(void) { return TRIB_VERSION; }

const char* trib_result_text(trib_result result) {
  switch (result) {
    case TRIB_SUCCESS:
      return "success";
    case TRIB_ERROR_ARGUMENT:
      return "a wrong argument or setting, or ranks that disagree";
    case TRIB_ERROR_TIMEOUT:
      return "a peer did not arrive in time";
    case TRIB_ERROR_PEER:
      return "a peer failed or died";
    case TRIB_ERROR_UNUSABLE:
      return "an earlier failure left the communicator unusable";
    case TRIB_ERROR_SYSTEM:
      return "the operating system refused something";
    case TRIB_ERROR_DEVICE:
      return "the GPU or its driver failed, or is missing";
    case TRIB_ERROR_INTERNAL:
      return "a bug in Tributary";
  }
  return "no result of Tributary";
}

const char* trib_last_error(void) { return trib::last_error.c_str(); }

trib_result trib_comm_create(trib_comm** comm, int rank, int size, trib_exchange exchange,
                             void* context) {
  return guarded([&] {
    if (comm == nullptr) trib::wrong("comm is null");
    *comm = nullptr;
    if (exchange == nullptr) trib::wrong("exchange is null");
    if (size < 1 || rank < 0 || rank >= size)
      trib::wrong("rank " + std::to_string(rank) + " of " + std::to_string(size));
    *comm = new trib_comm{std::make_shared<trib::StreamCommunicator>(
        std::make_unique<trib::CallerBootstrap>(rank, size, exchange, context))};
  });
}

trib_result trib_comm_destroy(trib_comm* comm) {
  return guarded([&] {
    if (comm == nullptr) return;
    comm->impl->expect_own_process();  // nothing of it may be touched in another
    const std::unique_ptr<trib_comm> owned(comm);
    comm->impl->drain();
  });
}

trib_result trib_comm_abort(trib_comm* comm) {
  return guarded([&] {
    trib::expect(comm);
    comm->impl->abort("trib_comm_abort was called");
  });
}

trib_result trib_comm_query(trib_comm* comm, trib_result* error) {
  trib_result found = TRIB_SUCCESS;
  const trib_result status = guarded([&] {
    if (error == nullptr) trib::wrong("error is null");
    trib::expect(comm);
  });
  if (status != TRIB_SUCCESS) return status;
  found = guarded([&] { comm->impl->check(); });
  *error = found;
  return TRIB_SUCCESS;
}

int trib_comm_rank(const trib_comm* comm) { return comm != nullptr ? comm->impl->rank() : -1; }
int trib_comm_size(const trib_comm* comm) { return comm != nullptr ? comm->impl->size() : -1; }

trib_result trib_allreduce(const void* in, void* out, size_t count, trib_dtype dtype, trib_op op,
                           trib_comm* comm, trib_stream stream) {
  return enqueue(comm, dtype, op, stream,
                 {.collective = Collective::allreduce, .count = count, .in = in, .out = out});
}

trib_result trib_reduce(const void* in, void* out, size_t count, trib_dtype dtype, trib_op op,
                        int root, trib_comm* comm, trib_stream stream) {
  return enqueue(
      comm, dtype, op, stream,
      {.collective = Collective::reduce, .root = root, .count = count, .in = in, .out = out});
}

trib_result trib_reduce_scatter(const void* in, void* out, const size_t* counts, trib_dtype dtype,
                                trib_op op, trib_comm* comm, trib_stream stream) {
  return enqueue(
      comm, dtype, op, stream,
      {.collective = Collective::reduce_scatter, .counts = counts, .in = in, .out = out});
}

trib_result trib_reduce_scatter_block(const void* in, void* out, size_t count, trib_dtype dtype,
                                      trib_op op, trib_comm* comm, trib_stream stream) {
  return enqueue(
      comm, dtype, op, stream,
      {.collective = Collective::reduce_scatter_block, .count = count, .in = in, .out = out});
}

trib_result trib_allgather(const void* in, void* out, size_t count, trib_dtype dtype,
                           trib_comm* comm, trib_stream stream) {
  return enqueue(comm, dtype, TRIB_SUM, stream,
                 {.collective = Collective::allgather, .count = count, .in = in, .out = out});
}

trib_result trib_broadcast(const void* in, void* out, size_t count, trib_dtype dtype, int root,
                           trib_comm* comm, trib_stream stream) {
  return enqueue(
      comm, dtype, TRIB_SUM, stream,
      {.collective = Collective::broadcast, .root = root, .count = count, .in = in, .out = out});
}

trib_result trib_allreduce_init(const void* in, void* out, size_t count, trib_dtype dtype,
                                trib_op op, trib_comm* comm, trib_request** request) {
  return init(comm, dtype, op, request,
              {.collective = Collective::allreduce, .count = count, .in = in, .out = out});
}

trib_result trib_reduce_init(const void* in, void* out, size_t count, trib_dtype dtype, trib_op op,
                             int root, trib_comm* comm, trib_request** request) {
  return init(
      comm, dtype, op, request,
      {.collective = Collective::reduce, .root = root, .count = count, .in = in, .out = out});
}

trib_result trib_reduce_scatter_init(const void* in, void* out, const size_t* counts,
                                     trib_dtype dtype, trib_op op, trib_comm* comm,
                                     trib_request** request) {
  return init(comm, dtype, op, request,
              {.collective = Collective::reduce_scatter, .counts = counts, .in = in, .out = out});
}

trib_result trib_reduce_scatter_block_init(const void* in, void* out, size_t count,
                                           trib_dtype dtype, trib_op op, trib_comm* comm,
                                           trib_request** request) {
  return init(
      comm, dtype, op, request,
      {.collective = Collective::reduce_scatter_block, .count = count, .in = in, .out = out});
}

trib_result trib_allgather_init(const void* in, void* out, size_t count, trib_dtype dtype,
                                trib_comm* comm, trib_request** request) {
  return init(comm, dtype, TRIB_SUM, request,
              {.collective = Collective::allgather, .count = count, .in = in, .out = out});
}

trib_result trib_broadcast_init(const void* in, void* out, size_t count, trib_dtype dtype, int root,
                                trib_comm* comm, trib_request** request) {
  return init(
      comm, dtype, TRIB_SUM, request,
      {.collective = Collective::broadcast, .root = root, .count = count, .in = in, .out = out});
}

trib_result trib_register(trib_comm* comm, void* buffer, size_t bytes,
                          trib_registration** registration) {
  return guarded([&] {
    if (registration == nullptr) trib::wrong("registration is null");
    *registration = nullptr;
    trib::expect(comm);
    *registration = new trib_registration{comm->impl->enroll(buffer, bytes)};
  });
}

trib_result trib_deregister(trib_registration* registration) {
  return guarded([&] {
    if (registration == nullptr) return;
    registration->impl->process.expect("the registration");  // not to be touched in another
    delete registration;
  });
}

trib_result trib_start(trib_request* request, trib_stream stream) {
  return guarded([&] {
    trib::expect_request(request);
    const auto comm = request->comm.lock();
    if (!comm) trib::wrong("the request's communicator was destroyed");
    comm->expect_own_process();
    comm->start(request->work, stream);
  });
}

trib_result trib_request_free(trib_request* request) {
  return guarded([&] {
    if (request != nullptr) trib::bury(request);
  });
}
}

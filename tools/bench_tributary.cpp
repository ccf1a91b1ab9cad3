// SPDX-License-Identifier: BSD-3-Clause
// The side of Tributary's C API: operations on a CUDA stream. The functions are those of the
// libtributary.so that the preload library has brought along, as any program under it would find
// them.
#include <dlfcn.h>
#include <utility>

#include "bench_stream.hpp"
#include "bench_world.hpp"
#include "tributary/tributary.h"

namespace trib::bench {
namespace {

#define TRIB_API_FUNCTIONS(X)       \
  X(trib_last_error)                \
  X(trib_result_text)               \
  X(trib_comm_create)               \
  X(trib_comm_destroy)              \
  X(trib_comm_query)                \
  X(trib_register)                  \
  X(trib_deregister)                \
  X(trib_allreduce)                 \
  X(trib_reduce)                    \
  X(trib_reduce_scatter)            \
  X(trib_reduce_scatter_block)      \
  X(trib_allgather)                 \
  X(trib_broadcast)                 \
  X(trib_allreduce_init)            \
  X(trib_reduce_init)               \
  X(trib_reduce_scatter_init)       \
  X(trib_reduce_scatter_block_init) \
  X(trib_allgather_init)            \
  X(trib_broadcast_init)            \
  X(trib_start)                     \
  X(trib_request_free)

struct Library {
  Library() {
    void* place = RTLD_DEFAULT;
    if (!dlsym(place, "trib_allreduce")) {
      const std::string preload = file_of("trib_version");
      const std::string folder = preload.substr(0, preload.find_last_of('/') + 1);
      place = preload.empty() ? nullptr : dlopen((folder + "libtributary.so").c_str(), RTLD_NOW);
      if (!place || !dlsym(place, "trib_allreduce"))
        throw std::runtime_error(
            "--mode stream and graph use Tributary's C API, but there is no trib_allreduce in this "
            "process: " +
            (preload.empty() ? "no preload library is in LD_PRELOAD"
                             : preload + " comes without one (built without CUDA, or too old)"));
    }
#define TRIB_LOAD(function)                                                    \
  function = reinterpret_cast<decltype(&::function)>(dlsym(place, #function)); \
  if (!function) throw std::runtime_error("Tributary's C API has no " #function " here");
    TRIB_API_FUNCTIONS(TRIB_LOAD)
#undef TRIB_LOAD
  }
#define TRIB_MEMBER(function) decltype(&::function) function = nullptr;
  TRIB_API_FUNCTIONS(TRIB_MEMBER)
#undef TRIB_MEMBER

  void check(trib_result result, const char* what) const {
    if (result == TRIB_SUCCESS) return;
    const std::string more = trib_last_error();
    throw std::runtime_error(std::string(what) + ": " + trib_result_text(result) +
                             (more.empty() ? "" : ": " + more));
  }
};

trib_dtype api_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::i8:
      return TRIB_INT8;
    case Dtype::i16:
      return TRIB_INT16;
    case Dtype::i32:
      return TRIB_INT32;
    case Dtype::i64:
      return TRIB_INT64;
    case Dtype::u8:
      return TRIB_UINT8;
    case Dtype::u16:
      return TRIB_UINT16;
    case Dtype::u32:
      return TRIB_UINT32;
    case Dtype::u64:
      return TRIB_UINT64;
    case Dtype::f16:
      return TRIB_FLOAT16;
    case Dtype::bf16:
      return TRIB_BFLOAT16;
    case Dtype::f8e4m3:
      return TRIB_FLOAT8_E4M3;
    case Dtype::f8e5m2:
      return TRIB_FLOAT8_E5M2;
    case Dtype::f32:
      return TRIB_FLOAT32;
    case Dtype::f64:
      return TRIB_FLOAT64;
    case Dtype::cf32:
      return TRIB_COMPLEX64;
    case Dtype::cf64:
      return TRIB_COMPLEX128;
    default:
      throw std::runtime_error("--dtype: Tributary's C API has no type " +
                               std::string(trib::name(dtype)));
  }
}

trib_op api_op(Op op) {
  switch (op) {
    case Op::sum:
      return TRIB_SUM;
    case Op::prod:
      return TRIB_PROD;
    case Op::max:
      return TRIB_MAX;
    case Op::min:
      return TRIB_MIN;
    case Op::land:
      return TRIB_LAND;
    case Op::lor:
      return TRIB_LOR;
    case Op::lxor:
      return TRIB_LXOR;
    case Op::band:
      return TRIB_BAND;
    case Op::bor:
      return TRIB_BOR;
    case Op::bxor:
      return TRIB_BXOR;
    default:
      throw std::runtime_error("--op: Tributary's C API has no operator " +
                               std::string(trib::name(op)));
  }
}

int exchange(void* world, const void* mine, void* all, std::size_t bytes) {
  return static_cast<const World*>(world)->gather(mine, all, bytes);
}

class TributaryStreamSide : public StreamSide {
 public:
  TributaryStreamSide(const World& world, const Options& options, StreamForm form)
      : StreamSide(options),
        world_(world),
        form_(form),
        type_(api_type(options.dtype)),
        op_(api_op(options.op)) {}

  /// Collective, once all ranks have come so far.
  void connect() {
    world_.together([&] {
      api_.check(api_.trib_comm_create(&comm_, world_.rank, world_.size, exchange,
                                       const_cast<World*>(&world_)),
                 "trib_comm_create");
    });
  }

  std::string name() const override {
    return form_ == StreamForm::registered ? "registered"
           : form_ == StreamForm::requests ? "requests"
                                           : "tributary";
  }
  std::string algorithm() const override { return "c_api"; }  // which does not tell its choice
  void prepare(const Call& call) override {
    counts_.assign(call.counts.begin(), call.counts.end());
    if (form_ == StreamForm::registered) enroll(call);
    if (form_ == StreamForm::requests) make_request(call);
    StreamSide::prepare(call);
  }
  void verify() override {
    trib_result error = TRIB_SUCCESS;
    api_.check(api_.trib_comm_query(comm_, &error), "trib_comm_query");
    api_.check(error, "tributary, after the operations");
  }
  void finish() override {
    drop_graph();
    api_.check(api_.trib_deregister(registration_), "trib_deregister");
    api_.check(api_.trib_request_free(request_), "trib_request_free");
    api_.check(api_.trib_comm_destroy(comm_), "trib_comm_destroy");
  }

 protected:
  void enqueue(const Call& call, CUstream_st* stream) override {
    if (form_ == StreamForm::requests)
      return api_.check(api_.trib_start(request_, stream), "trib_start");
    switch (call.collective) {
      case Collective::allreduce:
        api_.check(api_.trib_allreduce(call.in, call.out, call.count, type_, op_, comm_, stream),
                   "trib_allreduce");
        return;
      case Collective::reduce:
        api_.check(
            api_.trib_reduce(call.in, call.out, call.count, type_, op_, call.root, comm_, stream),
            "trib_reduce");
        return;
      case Collective::reduce_scatter:
        api_.check(
            api_.trib_reduce_scatter(call.in, call.out, counts_.data(), type_, op_, comm_, stream),
            "trib_reduce_scatter");
        return;
      case Collective::reduce_scatter_block:
        api_.check(api_.trib_reduce_scatter_block(call.in, call.out, counts_[0], type_, op_, comm_,
                                                  stream),
                   "trib_reduce_scatter_block");
        return;
      case Collective::allgather:
        api_.check(api_.trib_allgather(call.in, call.out, counts_[0], type_, comm_, stream),
                   "trib_allgather");
        return;
      case Collective::broadcast:
        api_.check(
            api_.trib_broadcast(call.in, call.out, call.count, type_, call.root, comm_, stream),
            "trib_broadcast");
    }
  }

 private:
  /// The buffer for results, which is the same in all calls of a length.
  void enroll(const Call& call) {
    drop_graph();
    api_.check(api_.trib_deregister(std::exchange(registration_, nullptr)), "trib_deregister");
    if (call.mine.count > 0)
      api_.check(api_.trib_register(comm_, call.out, call.mine.count * trib::bytes(call.dtype),
                                    &registration_),
                 "trib_register");
  }

  void make_request(const Call& call) {
    drop_graph();
    api_.check(api_.trib_request_free(std::exchange(request_, nullptr)), "trib_request_free");
    switch (call.collective) {
      case Collective::allreduce:
        api_.check(
            api_.trib_allreduce_init(call.in, call.out, call.count, type_, op_, comm_, &request_),
            "trib_allreduce_init");
        return;
      case Collective::reduce:
        api_.check(api_.trib_reduce_init(call.in, call.out, call.count, type_, op_, call.root,
                                         comm_, &request_),
                   "trib_reduce_init");
        return;
      case Collective::reduce_scatter:
        api_.check(api_.trib_reduce_scatter_init(call.in, call.out, counts_.data(), type_, op_,
                                                 comm_, &request_),
                   "trib_reduce_scatter_init");
        return;
      case Collective::reduce_scatter_block:
        api_.check(api_.trib_reduce_scatter_block_init(call.in, call.out, counts_[0], type_, op_,
                                                       comm_, &request_),
                   "trib_reduce_scatter_block_init");
        return;
      case Collective::allgather:
        api_.check(api_.trib_allgather_init(call.in, call.out, counts_[0], type_, comm_, &request_),
                   "trib_allgather_init");
        return;
      case Collective::broadcast:
        api_.check(api_.trib_broadcast_init(call.in, call.out, call.count, type_, call.root, comm_,
                                            &request_),
                   "trib_broadcast_init");
    }
  }

  const Library api_;
  const World& world_;
  const StreamForm form_;
  const trib_dtype type_;
  const trib_op op_;
  trib_comm* comm_ = nullptr;
  trib_registration* registration_ = nullptr;
  trib_request* request_ = nullptr;
  std::vector<std::size_t> counts_;
};

}  // namespace

std::unique_ptr<Side> make_tributary_stream_side(const World& world, const Options& options,
                                                 StreamForm form) {
  std::unique_ptr<TributaryStreamSide> side;
  world.together([&] { side = std::make_unique<TributaryStreamSide>(world, options, form); });
  side->connect();
  return side;
}

}  // namespace trib::bench

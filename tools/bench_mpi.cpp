// SPDX-License-Identifier: BSD-3-Clause
// The sides that are called through MPI: Tributary under MPI_X, the MPI's own PMPI_X, and PMPI_X
// between copies to and from the host.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "bench_cuda.hpp"
#include "bench_side.hpp"
#include "bench_world.hpp"

namespace trib::bench {
namespace {

/// The name of Tributary's own type, for where the MPI has none; or null.
const char* tributary_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f16:
      return "half";
    case Dtype::bf16:
      return "bfloat16";
    case Dtype::f8e4m3:
      return "f8e4m3";
    case Dtype::f8e5m2:
      return "f8e5m2";
    default:
      return nullptr;
  }
}

/// MPI_DATATYPE_NULL: C has no such type.
MPI_Datatype mpi_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::i8:
      return MPI_INT8_T;
    case Dtype::i16:
      return MPI_INT16_T;
    case Dtype::i32:
      return MPI_INT32_T;
    case Dtype::i64:
      return MPI_INT64_T;
    case Dtype::u8:
      return MPI_UINT8_T;
    case Dtype::u16:
      return MPI_UINT16_T;
    case Dtype::u32:
      return MPI_UINT32_T;
    case Dtype::u64:
      return MPI_UINT64_T;
#ifdef MPIX_C_FLOAT16
    case Dtype::f16:
      return MPIX_C_FLOAT16;
#endif
#ifdef MPIX_BFLOAT16
    case Dtype::bf16:
      return MPIX_BFLOAT16;
#endif
    case Dtype::f32:
      return MPI_FLOAT;
    case Dtype::f64:
      return MPI_DOUBLE;
    case Dtype::f80:
      return MPI_LONG_DOUBLE;
    case Dtype::cf32:
      return MPI_C_FLOAT_COMPLEX;
    case Dtype::cf64:
      return MPI_C_DOUBLE_COMPLEX;
    case Dtype::cf80:
      return MPI_C_LONG_DOUBLE_COMPLEX;
    case Dtype::l8:
      return MPI_C_BOOL;
    case Dtype::byte:
      return MPI_BYTE;
    case Dtype::i16_i32:
      return MPI_SHORT_INT;
    case Dtype::i32_i32:
      return MPI_2INT;
    case Dtype::i64_i32:
      return MPI_LONG_INT;
    case Dtype::f32_i32:
      return MPI_FLOAT_INT;
    case Dtype::f64_i32:
      return MPI_DOUBLE_INT;
    case Dtype::f80_i32:
      return MPI_LONG_DOUBLE_INT;
    default:
      break;
  }
  if (const char* const own = tributary_type(dtype)) {
    using Make = MPI_Datatype (*)(const char*);
    const auto make = reinterpret_cast<Make>(dlsym(RTLD_DEFAULT, "trib_mpi_type"));
    if (make) return make(own);
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op mpi_op(Op op) {
  switch (op) {
    case Op::max:
      return MPI_MAX;
    case Op::min:
      return MPI_MIN;
    case Op::sum:
      return MPI_SUM;
    case Op::prod:
      return MPI_PROD;
    case Op::land:
      return MPI_LAND;
    case Op::lor:
      return MPI_LOR;
    case Op::lxor:
      return MPI_LXOR;
    case Op::band:
      return MPI_BAND;
    case Op::bor:
      return MPI_BOR;
    case Op::bxor:
      return MPI_BXOR;
    case Op::maxloc:
      return MPI_MAXLOC;
    case Op::minloc:
      return MPI_MINLOC;
  }
  return MPI_OP_NULL;
}

#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
#define TRIB_HAS_PERSISTENT 1
#endif

// One reduction by functions with a prefix and a tail of arguments: MPI_Allreduce(...),
// PMPI_Iallreduce(..., &request).
#define TRIB_CALL(P, All, Red, Scatter, Block, ...)                                     \
  if (in == out && call.mine.count > 0) in = MPI_IN_PLACE;                              \
  switch (call.collective) {                                                            \
    case Collective::allreduce:                                                         \
      return P##_##All(in, out, count, type_, op_, comm_ __VA_ARGS__);                  \
    case Collective::reduce:                                                            \
      return P##_##Red(in, out, count, type_, op_, call.root, comm_ __VA_ARGS__);       \
    case Collective::reduce_scatter:                                                    \
      return P##_##Scatter(in, out, call.counts.data(), type_, op_, comm_ __VA_ARGS__); \
    case Collective::reduce_scatter_block:                                              \
      return P##_##Block(in, out, call.counts[0], type_, op_, comm_ __VA_ARGS__);       \
    default: /* blocking and on streams only */                                         \
      break;                                                                            \
  }                                                                                     \
  return MPI_ERR_OTHER
#define TRIB_COMMA ,
// The same of those that only copy.
#define TRIB_COPY(P)                                                                            \
  if (call.collective == Collective::broadcast)                                                 \
    return P##_Bcast(rank_ == call.root ? const_cast<void*>(in) : out, count, type_, call.root, \
                     comm_);                                                                    \
  return P##_Allgather(in, call.counts[0], type_, out, call.counts[0], type_, comm_)

/// Made when it is used first.
class Info {
 public:
  Info() = default;
  Info(const Info&) = delete;
  Info& operator=(const Info&) = delete;
  MPI_Info get(const Keys& keys) {
    if (info_ != MPI_INFO_NULL || (keys.trib_tune + keys.trib_algorithm).empty()) return info_;
    PMPI_Info_create(&info_);
    if (!keys.trib_tune.empty()) PMPI_Info_set(info_, "trib_tune", keys.trib_tune.c_str());
    if (!keys.trib_algorithm.empty())
      PMPI_Info_set(info_, "trib_algorithm", keys.trib_algorithm.c_str());
    return info_;
  }
  void free() {
    if (info_ != MPI_INFO_NULL) PMPI_Info_free(&info_);
  }

 private:
  MPI_Info info_ = MPI_INFO_NULL;
};

class MpiSide : public Side {
 public:
  MpiSide(const World& world, Mode mode, MpiCaller caller, const Keys& keys = {})
      : MpiSide(world.comm, mode, caller, keys) {}
  MpiSide(MPI_Comm comm, Mode mode, MpiCaller caller, const Keys& keys)
      : comm_(comm), mode_(mode), caller_(caller), keys_(keys) {
    last_algorithm_ =
        reinterpret_cast<const char* (*)(MPI_Comm)>(dlsym(RTLD_DEFAULT, "trib_mpi_last_algorithm"));
    PMPI_Comm_rank(comm, &rank_);
#ifndef TRIB_HAS_PERSISTENT
    if (mode == Mode::persistent)
      throw std::invalid_argument("--mode persistent: this MPI has no MPI_Allreduce_init");
#endif
  }

  std::string name() const override {
    if (!keys_.trib_algorithm.empty()) return "way " + keys_.trib_algorithm;
    if (caller_ == MpiCaller::tributary_blocking) return "blocking";
    if (caller_ == MpiCaller::intel) return "intel";
    return caller_ == MpiCaller::mpi ? "mpi" : "tributary";
  }
  std::string library() const override {
    if (caller_ == MpiCaller::intel) return "intel";
    return caller_ == MpiCaller::tributary_blocking ? "blocking" : "";
  }
  std::string algorithm() const override {
    if (is_own()) return "mpi";
    if (mode_ != Mode::blocking) return std::string(bench::name(mode_));
    return last_algorithm_ ? last_algorithm_(comm_) : "none";
  }
  void prepare(const Call& call) override {
    type_ = mpi_type(call.dtype);
    op_ = mpi_op(call.op);
    if (mode_ == Mode::nonblocking && !is_own()) {
      // Programs have a blocking call at times. In one GPUs are made ready for nonblocking ones.
      run(call);
      MPI_Barrier(comm_);
    }
    // Such a program reduces GPU buffers, too: from then on these calls are served.
    // (The last one, of nothing, is served by "none".)
    for (int left = 4; is_copy(call.collective) && !is_own() && left >= 0; --left)
      check(MPI_Allreduce(call.in, call.out, std::min(left, 1), MPI_UNSIGNED_CHAR, MPI_MAX, comm_));
    if (mode_ != Mode::persistent) return;
    end_request();
    check(is_own() ? own_init(call, call.in, call.out) : init(call, call.in, call.out));
  }
  /// Ways are many, and a few persistent reductions of a communicator have scratch that others have
  /// not: one after the other, all have the same.
  void resume(const Call& call) override {
    if (!keys_.trib_tune.empty() && request_ == MPI_REQUEST_NULL) prepare(call);
  }
  void pause() override {
    if (!keys_.trib_tune.empty()) end_request();
  }
  void run(const Call& call) override { reduce(call, call.in, call.out); }
  void finish() override {
    end_request();
    info_.free();
  }

 protected:
  /// Elements that this rank contributes.
  std::size_t given_by(const Call& call) const {
    if (call.collective == Collective::allgather) return static_cast<std::size_t>(call.counts[0]);
    return call.collective == Collective::broadcast && rank_ != call.root ? 0 : call.count;
  }
  bool is_own() const { return caller_ == MpiCaller::mpi || caller_ == MpiCaller::intel; }
  void start(const Call& call) {
    if (mode_ == Mode::nonblocking)
      check(is_own() ? own_post(call, call.in, call.out) : post(call, call.in, call.out));
    else
      check(is_own() ? PMPI_Start(&request_) : MPI_Start(&request_));
  }
  void wait() {
    check(is_own() ? PMPI_Wait(&request_, MPI_STATUS_IGNORE)
                   : MPI_Wait(&request_, MPI_STATUS_IGNORE));
  }
  void reduce(const Call& call, const void* in, void* out) {
    switch (mode_) {
      case Mode::nonblocking:
      case Mode::persistent:
        start(call);
        return wait();
      default:
        check(is_own() ? own(call, in, out) : intercepted(call, in, out));
    }
  }

 private:
  void end_request() {
    if (request_ != MPI_REQUEST_NULL)
      check(is_own() ? PMPI_Request_free(&request_) : MPI_Request_free(&request_));
  }
  static void check(int error) {
    if (error == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    PMPI_Error_string(error, text, &length);
    throw CallFailed(text);
  }
  int intercepted(const Call& call, const void* in, void* out) const {
    const int count = static_cast<int>(call.count);
    if (is_copy(call.collective)) {
      TRIB_COPY(MPI);
    }
    TRIB_CALL(MPI, Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, );
  }
  int own(const Call& call, const void* in, void* out) const {
    const int count = static_cast<int>(call.count);
    if (is_copy(call.collective)) {
      TRIB_COPY(PMPI);
    }
    TRIB_CALL(PMPI, Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, );
  }
  int post(const Call& call, const void* in, void* out) {
    const int count = static_cast<int>(call.count);
    TRIB_CALL(MPI, Iallreduce, Ireduce, Ireduce_scatter, Ireduce_scatter_block,
              TRIB_COMMA & request_);
  }
  int own_post(const Call& call, const void* in, void* out) {
    const int count = static_cast<int>(call.count);
    TRIB_CALL(PMPI, Iallreduce, Ireduce, Ireduce_scatter, Ireduce_scatter_block,
              TRIB_COMMA & request_);
  }
#ifdef TRIB_HAS_PERSISTENT
  int init(const Call& call, const void* in, void* out) {
    const int count = static_cast<int>(call.count);
    TRIB_CALL(MPI, Allreduce_init, Reduce_init, Reduce_scatter_init, Reduce_scatter_block_init,
              TRIB_COMMA info_.get(keys_) TRIB_COMMA & request_);
  }
  int own_init(const Call& call, const void* in, void* out) {
    const int count = static_cast<int>(call.count);
    TRIB_CALL(PMPI, Allreduce_init, Reduce_init, Reduce_scatter_init, Reduce_scatter_block_init,
              TRIB_COMMA MPI_INFO_NULL TRIB_COMMA & request_);
  }
#else
  static int init(const Call&, const void*, void*) { return MPI_ERR_OTHER; }
  static int own_init(const Call&, const void*, void*) { return MPI_ERR_OTHER; }
#endif

  const MPI_Comm comm_;
  int rank_ = 0;
  const Mode mode_;
  const MpiCaller caller_;
  const Keys keys_;
  Info info_;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  MPI_Op op_ = MPI_OP_NULL;
  MPI_Request request_ = MPI_REQUEST_NULL;
  const char* (*last_algorithm_)(MPI_Comm) = nullptr;
};

/// By the clock, so that nothing of it depends on what runs beside it.
class OverlappedSide : public MpiSide {
 public:
  OverlappedSide(const World& world, Mode mode, MpiCaller caller)
      : MpiSide(world, mode, caller), world_(world) {}

  std::string name() const override { return is_own() ? "mpi_overlapped" : "overlapped"; }
  double compute_seconds() const override { return compute_.count(); }
  void prepare(const Call& call) override {
    MpiSide::prepare(call);
    constexpr std::size_t kRuns = 15, kWarmUps = 6;
    std::vector<double> seconds;
    for (std::size_t run = 0; run < kRuns; ++run) {
      world_.barrier();
      const auto begin = Clock::now();
      MpiSide::run(call);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
    world_.combine(seconds, MPI_MAX);
    seconds.erase(seconds.begin(), seconds.begin() + kWarmUps);
    std::sort(seconds.begin(), seconds.end());
    compute_ = std::chrono::duration<double>(seconds[seconds.size() / 2]);
  }
  void run(const Call& call) override {
    start(call);
    const auto begin = Clock::now();
    while (Clock::now() - begin < compute_) {
    }
    wait();
  }

 private:
  using Clock = std::chrono::steady_clock;
  const World& world_;
  std::chrono::duration<double> compute_{0};
};

/// With a setting of its own.
class SettingSide : public MpiSide {
 public:
  SettingSide(const World& world, Mode mode, std::string setting)
      : SettingSide(duplicate(world.comm), mode, std::move(setting)) {}

  std::string name() const override { return setting_; }
  std::string library() const override { return setting_; }
  void finish() override {
    MpiSide::finish();
    MPI_Comm_free(&own_comm_);
  }

 private:
  SettingSide(MPI_Comm comm, Mode mode, std::string setting)
      : MpiSide(comm, mode, MpiCaller::tributary, {}),
        own_comm_(comm),
        setting_(std::move(setting)) {
    using Set = int (*)(MPI_Comm, const char*, const char*);
    const auto set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "trib_mpi_set"));
    const std::size_t equals = setting_.find('=');
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    const int error = set == nullptr ? MPI_ERR_OTHER
                                     : set(comm, setting_.substr(0, equals).c_str(),
                                           setting_.substr(equals + 1).c_str());
    if (error == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    PMPI_Error_string(error, text, &length);
    throw std::invalid_argument("--compare " + setting_ + ": " + text);
  }
  static MPI_Comm duplicate(MPI_Comm comm) {
    MPI_Comm own = MPI_COMM_NULL;
    MPI_Comm_dup(comm, &own);
    return own;
  }

  MPI_Comm own_comm_;
  const std::string setting_;
};

/// The host's buffers are page-locked: what someone who cares for speed would do.
class CopySide : public MpiSide {
 public:
  CopySide(const World& world, std::size_t bytes)
      : MpiSide(world, Mode::blocking, MpiCaller::mpi),
        in_(cuda::Allocation::Kind::pinned, bytes),
        out_(cuda::Allocation::Kind::pinned, bytes) {}

  std::string library() const override { return "mpi+copy"; }
  void run(const Call& call) override {
    const std::size_t width = trib::bytes(call.dtype);
    cuda::copy_to_host(in_.get(), call.in, given_by(call) * width);
    reduce(call, in_.get(), out_.get());
    if (call.mine.count > 0) cuda::copy_to_device(call.out, out_.get(), call.mine.count * width);
  }

 private:
  cuda::Allocation in_, out_;
};

}  // namespace

void check_type(Dtype dtype) {
  if (mpi_type(dtype) != MPI_DATATYPE_NULL) return;
  std::string names;
  for (int i = 0; i < kDtypes; ++i)
    if (const auto known = static_cast<Dtype>(i); mpi_type(known) != MPI_DATATYPE_NULL)
      names += (names.empty() ? "" : ", ") + std::string(trib::name(known));
  throw std::invalid_argument("--dtype: this MPI has no C type for " +
                              std::string(trib::name(dtype)) + "; accepted: " + names);
}

std::unique_ptr<Side> make_mpi_side(const World& world, Mode mode, MpiCaller caller,
                                    const Keys& keys) {
  return std::make_unique<MpiSide>(world, mode, caller, keys);
}

std::unique_ptr<Side> make_setting_side(const World& world, Mode mode, const std::string& setting) {
  return std::make_unique<SettingSide>(world, mode, setting);
}

std::unique_ptr<Side> make_overlapped_side(const World& world, Mode mode, MpiCaller caller) {
  return std::make_unique<OverlappedSide>(world, mode, caller);
}

std::unique_ptr<Side> make_copy_side(const World& world, std::size_t bytes) {
  return std::make_unique<CopySide>(world, bytes);
}

}  // namespace trib::bench

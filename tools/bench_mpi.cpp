// SPDX-License-Identifier: BSD-3-Clause
// The sides that are called through MPI: Tributary under MPI_X, the MPI's own PMPI_X, and PMPI_X
// between copies to and from the host.
#include <dlfcn.h>

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
  throw std::invalid_argument("--dtype: this MPI has no C type for " +
                              std::string(trib::name(dtype)));
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

class MpiSide : public Side {
 public:
  MpiSide(const World& world, bool is_own) : comm_(world.comm), is_own_(is_own) {
    last_algorithm_ =
        reinterpret_cast<const char* (*)(MPI_Comm)>(dlsym(RTLD_DEFAULT, "trib_mpi_last_algorithm"));
  }

  std::string name() const override { return is_own_ ? "mpi" : "tributary"; }
  std::string algorithm() const override {
    if (is_own_) return "mpi";
    return last_algorithm_ ? last_algorithm_(comm_) : "none";
  }
  void prepare(const Call& call) override {
    type_ = mpi_type(call.dtype);
    op_ = mpi_op(call.op);
  }
  void run(const Call& call) override { reduce(call, call.in, call.out); }

 protected:
  void reduce(const Call& call, const void* in, void* out) const {
    const int error = is_own_ ? own(call, in, out) : intercepted(call, in, out);
    if (error == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    PMPI_Error_string(error, text, &length);
    throw CallFailed(text);
  }

 private:
  int intercepted(const Call& call, const void* in, void* out) const {
    const int count = static_cast<int>(call.count);
    switch (call.collective) {
      case Collective::allreduce:
        return MPI_Allreduce(in, out, count, type_, op_, comm_);
      case Collective::reduce:
        return MPI_Reduce(in, out, count, type_, op_, call.root, comm_);
      case Collective::reduce_scatter:
        return MPI_Reduce_scatter(in, out, call.counts.data(), type_, op_, comm_);
      case Collective::reduce_scatter_block:
        return MPI_Reduce_scatter_block(in, out, call.counts[0], type_, op_, comm_);
    }
    return MPI_ERR_OTHER;
  }
  int own(const Call& call, const void* in, void* out) const {
    const int count = static_cast<int>(call.count);
    switch (call.collective) {
      case Collective::allreduce:
        return PMPI_Allreduce(in, out, count, type_, op_, comm_);
      case Collective::reduce:
        return PMPI_Reduce(in, out, count, type_, op_, call.root, comm_);
      case Collective::reduce_scatter:
        return PMPI_Reduce_scatter(in, out, call.counts.data(), type_, op_, comm_);
      case Collective::reduce_scatter_block:
        return PMPI_Reduce_scatter_block(in, out, call.counts[0], type_, op_, comm_);
    }
    return MPI_ERR_OTHER;
  }

  const MPI_Comm comm_;
  const bool is_own_;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  MPI_Op op_ = MPI_OP_NULL;
  const char* (*last_algorithm_)(MPI_Comm) = nullptr;
};

/// The host's buffers are page-locked: what someone who cares for speed would do.
class CopySide : public MpiSide {
 public:
  CopySide(const World& world, std::size_t bytes)
      : MpiSide(world, /*is_own=*/true),
        in_(cuda::Allocation::Kind::pinned, bytes),
        out_(cuda::Allocation::Kind::pinned, bytes) {}

  std::string library() const override { return "mpi+copy"; }
  void run(const Call& call) override {
    const std::size_t width = trib::bytes(call.dtype);
    cuda::copy_to_host(in_.get(), call.in, call.count * width);
    reduce(call, in_.get(), out_.get());
    if (call.mine.count > 0) cuda::copy_to_device(call.out, out_.get(), call.mine.count * width);
  }

 private:
  cuda::Allocation in_, out_;
};

}  // namespace

std::unique_ptr<Side> make_mpi_side(const World& world, bool is_own) {
  return std::make_unique<MpiSide>(world, is_own);
}

std::unique_ptr<Side> make_copy_side(const World& world, std::size_t bytes) {
  return std::make_unique<CopySide>(world, bytes);
}

}  // namespace trib::bench

// SPDX-License-Identifier: BSD-3-Clause
// The side of NCCL: loaded at run time with prototypes of our own, started over the job's MPI.
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "bench_stream.hpp"
#include "bench_world.hpp"

struct ncclComm;

extern char** environ;

namespace trib::bench {
namespace {

using Status = int;  // ncclResult_t: an enum; 0 is success
struct UniqueId {    // ncclUniqueId: goes by value
  std::array<char, 128> internal;
};
constexpr Status kInProgress = 7;  // ncclInProgress

// clang-format off
#define TRIB_NCCL_FUNCTIONS(X)                                                                 \
  X(Status,      ncclGetVersion,        (int* version))                                        \
  X(Status,      ncclGetUniqueId,       (UniqueId* id))                                        \
  X(Status,      ncclCommInitRank,      (ncclComm** comm, int size, UniqueId id, int rank))    \
  X(Status,      ncclCommDestroy,       (ncclComm* comm))                                      \
  X(Status,      ncclCommGetAsyncError, (ncclComm* comm, Status* error))                       \
  X(const char*, ncclGetErrorString,    (Status status))                                       \
  X(Status,      ncclAllReduce,         (const void* in, void* out, std::size_t count, int dtype, int op, ncclComm* comm, CUstream_st* stream)) \
  X(Status,      ncclReduce,            (const void* in, void* out, std::size_t count, int dtype, int op, int root, ncclComm* comm, CUstream_st* stream)) \
  X(Status,      ncclReduceScatter,     (const void* in, void* out, std::size_t count, int dtype, int op, ncclComm* comm, CUstream_st* stream)) \
  X(Status,      ncclAllGather,         (const void* in, void* out, std::size_t count, int dtype, ncclComm* comm, CUstream_st* stream)) \
  X(Status,      ncclBroadcast,         (const void* in, void* out, std::size_t count, int dtype, int root, ncclComm* comm, CUstream_st* stream))
// clang-format on

/// NCCL's number for a type, or a number below 0.
int nccl_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::i8:
      return 0;
    case Dtype::u8:
      return 1;
    case Dtype::i32:
      return 2;
    case Dtype::u32:
      return 3;
    case Dtype::i64:
      return 4;
    case Dtype::u64:
      return 5;
    case Dtype::f16:
      return 6;
    case Dtype::f32:
      return 7;
    case Dtype::f64:
      return 8;
    case Dtype::bf16:
      return 9;
    case Dtype::f8e4m3:  // both since NCCL 2.24
      return 10;
    case Dtype::f8e5m2:
      return 11;
    default:
      return -1;
  }
}

int nccl_op(Op op) {
  switch (op) {
    case Op::sum:
      return 0;
    case Op::prod:
      return 1;
    case Op::max:
      return 2;
    case Op::min:
      return 3;
    default:
      return -1;
  }
}

class Library {
 public:
  /// The first of `files` that can be loaded.
  explicit Library(const std::vector<std::string>& files) {
    void* library = nullptr;
    std::string problems;
    for (const std::string& file : files) {
      library = dlopen(file.c_str(), RTLD_NOW);
      if (library) break;
      problems += (problems.empty() ? "" : "; ") + std::string(dlerror());
    }
    if (!library)
      throw std::runtime_error("--compare nccl: NCCL cannot be loaded: " + problems +
                               "; --nccl or TRIB_NCCL names the file");
#define TRIB_LOAD(result, function, arguments)                                 \
  function = reinterpret_cast<result(*) arguments>(dlsym(library, #function)); \
  if (!function) throw std::runtime_error("--compare nccl: this NCCL has no " #function);
    TRIB_NCCL_FUNCTIONS(TRIB_LOAD)
#undef TRIB_LOAD
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(ncclAllReduce), &info) && info.dli_fname)
      file_ = info.dli_fname;
  }

#define TRIB_MEMBER(result, function, arguments) result(*function) arguments = nullptr;
  TRIB_NCCL_FUNCTIONS(TRIB_MEMBER)
#undef TRIB_MEMBER

  const std::string& file() const { return file_; }
  std::string version() const {
    int code = 0;  // 22809 is 2.28.9; before 2.9, 2804 was 2.8.4
    if (ncclGetVersion(&code) != 0) return "";
    const int hundred = code < 10000 ? 1000 : 10000;
    return std::to_string(code / hundred) + "." + std::to_string(code % hundred / 100) + "." +
           std::to_string(code % 100);
  }
  void check(Status status, const char* what) const {
    if (status != 0 && status != kInProgress)
      throw std::runtime_error(std::string("nccl: ") + what + ": " + ncclGetErrorString(status));
  }

 private:
  std::string file_;
};

class NcclSide : public StreamSide {
 public:
  NcclSide(const World& world, const Options& options)
      : StreamSide(options), nccl_(options.nccl), world_(world) {
    type_ = nccl_type(options.dtype);
    op_ = nccl_op(options.op);
    if (type_ < 0)
      throw std::runtime_error(
          "--compare nccl: NCCL has no type " + std::string(trib::name(options.dtype)) +
          "; it has i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16, f8e4m3, f8e5m2");
    if (op_ < 0)
      throw std::runtime_error("--compare nccl: NCCL has no operator " +
                               std::string(trib::name(options.op)) +
                               "; it has sum, prod, max, min");
  }

  /// Collective, once all ranks have come so far.
  void connect() {
    UniqueId id{};
    world_.together([&] {
      if (world_.rank == 0) nccl_.check(nccl_.ncclGetUniqueId(&id), "ncclGetUniqueId");
    });
    world_.broadcast(&id, sizeof id, 0);
    world_.together([&] {
      nccl_.check(nccl_.ncclCommInitRank(&comm_, world_.size, id, world_.rank),
                  "ncclCommInitRank (NCCL_DEBUG=WARN says more)");
    });
  }

  std::string name() const override { return "nccl"; }
  std::string library() const override { return "nccl"; }
  std::string refusal(const Call& call) const override {
    if (call.collective != Collective::reduce_scatter) return "";
    return std::set<int>(call.counts.begin(), call.counts.end()).size() == 1
               ? ""
               : "NCCL has no reduce_scatter with uneven counts: it is left out where the ranks' "
                 "parts differ";
  }
  void verify() override {
    Status error = 0;
    nccl_.check(nccl_.ncclCommGetAsyncError(comm_, &error), "ncclCommGetAsyncError");
    nccl_.check(error, "after the operations");
  }
  void describe(nlohmann::json& begin) const override {
    begin["nccl"] = nccl_.version();
    begin["nccl_library"] = nccl_.file();
    // Those change what is compared with: NCCL_ALGO, NCCL_NVLS_ENABLE, ...
    begin["nccl_settings"] = nlohmann::json::object();
    for (char** variable = environ; *variable; ++variable) {
      const std::string text = *variable;
      const std::size_t equals = text.find('=');
      if (text.starts_with("NCCL_") && equals != std::string::npos)
        begin["nccl_settings"][text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  void finish() override {
    drop_graph();
    nccl_.check(nccl_.ncclCommDestroy(comm_), "ncclCommDestroy");
  }

 protected:
  void enqueue(const Call& call, CUstream_st* stream) override {
    switch (call.collective) {
      case Collective::allreduce:
        nccl_.check(nccl_.ncclAllReduce(call.in, call.out, call.count, type_, op_, comm_, stream),
                    "ncclAllReduce");
        return;
      case Collective::reduce:
        nccl_.check(
            nccl_.ncclReduce(call.in, call.out, call.count, type_, op_, call.root, comm_, stream),
            "ncclReduce");
        return;
      case Collective::allgather:
        nccl_.check(nccl_.ncclAllGather(call.in, call.out, static_cast<std::size_t>(call.counts[0]),
                                        type_, comm_, stream),
                    "ncclAllGather");
        return;
      case Collective::broadcast:
        nccl_.check(
            nccl_.ncclBroadcast(call.in, call.out, call.count, type_, call.root, comm_, stream),
            "ncclBroadcast");
        return;
      default:
        nccl_.check(
            nccl_.ncclReduceScatter(call.in, call.out, call.mine.count, type_, op_, comm_, stream),
            "ncclReduceScatter");
    }
  }

 private:
  const Library nccl_;
  const World& world_;
  ncclComm* comm_ = nullptr;
  int type_ = -1, op_ = -1;
};

}  // namespace

std::unique_ptr<Side> make_nccl_side(const World& world, const Options& options) {
  std::unique_ptr<NcclSide> side;
  world.together([&] { side = std::make_unique<NcclSide>(world, options); });
  side->connect();
  return side;
}

}  // namespace trib::bench

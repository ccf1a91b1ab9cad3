// SPDX-License-Identifier: BSD-3-Clause
// One of the libraries that are compared. bench_measure.cpp times them; bench_mpi.cpp has those
// that are called through MPI, bench_stream.hpp those whose operations go on a CUDA stream.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench_memory.hpp"
#include "bench_options.hpp"

namespace trib::bench {

class World;

/// One collective call: everything its arguments are made from.
struct Call {
  Collective collective = Collective::allreduce;
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  int root = 0;
  std::size_t count = 0;    ///< elements of the whole vector
  std::vector<int> counts;  ///< of each rank's part of the result, where it is scattered
  Part mine;                ///< what this rank gets of the result; allgather: of all parts
  const void* in = nullptr;
  void* out = nullptr;
};

/// A library that refuses a call by an error code: an MPI that lacks an operator, say.
struct CallFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Side {
 public:
  virtual ~Side() = default;

  /// "tributary", "mpi", "intel", "nccl", "blocking", "registered", "requests", "floor",
  /// "overlapped" or "mpi_overlapped": the key in the lines that the benchmark prints.
  virtual std::string name() const = 0;
  /// What tables call it, where `name` and the MPI's own do not say it all.
  virtual std::string library() const { return ""; }
  /// Who did the last call.
  virtual std::string algorithm() const { return name(); }
  /// False: it leaves no result that could be checked.
  virtual bool computes() const { return true; }
  /// What the caller computes while the operation runs; part of what is timed.
  virtual double compute_seconds() const { return 0; }
  /// Why it cannot do this call, the same on all ranks; "" if it can.
  virtual std::string refusal(const Call&) const { return ""; }

  /// Collective, once before a call is run, and not timed.
  virtual void prepare(const Call&) {}
  /// What is timed: operations() times the reduction, until the results may be used.
  virtual void run(const Call& call) = 0;
  virtual int operations() const { return 1; }
  /// Before and after a side's turn: what only so many sides can have at a time is not held in
  /// between.
  virtual void resume(const Call&) {}
  virtual void pause() {}
  /// After runs, not timed: throws if something went wrong that `run` did not see.
  virtual void verify() {}

  /// Adds what should be known about it to the first line.
  virtual void describe(nlohmann::json&) const {}
  /// Collective, at the end. Not a destructor's work: those also run where a peer has failed.
  virtual void finish() {}
};

/// Throws std::invalid_argument where this MPI has no C type for it.
void check_type(Dtype dtype);

/// Who is called through MPI.
enum class MpiCaller {
  tributary,           ///< MPI_X, as the preload library serves it
  tributary_blocking,  ///< the same, as what another form of it is compared with
  mpi,                 ///< the MPI's own PMPI_X
  intel,               ///< the same of an MPI that knows GPUs, beside one with copies by hand
};
/// Info keys of persistent calls; "": not passed.
struct Keys {
  std::string trib_tune, trib_algorithm;
};
/// On the buffers as they are. `mode`: blocking, nonblocking or persistent. Throws
/// std::invalid_argument where the MPI lacks the latter.
std::unique_ptr<Side> make_mpi_side(const World& world, Mode mode, MpiCaller caller,
                                    const Keys& keys = {});
/// Tributary on a communicator of its own, with another value of a setting: "TRIB_ENGINE=copy".
std::unique_ptr<Side> make_setting_side(const World& world, Mode mode, const std::string& setting);
/// The same, nonblocking or persistent, while its caller computes as long as it takes by itself.
std::unique_ptr<Side> make_overlapped_side(const World& world, Mode mode, MpiCaller caller);
/// No library: the least that memory has to move for the call.
std::unique_ptr<Side> make_floor_side(const World& world);
/// What a user of an MPI without GPU support writes: copy to the host, PMPI_X, copy back.
/// `bytes`: of the largest buffer.
std::unique_ptr<Side> make_copy_side(const World& world, std::size_t bytes);
/// How Tributary's C API is used on a stream.
enum class StreamForm {
  calls,
  registered,  ///< with a registered buffer for results
  requests,    ///< trib_start, of a request that was made before
};
std::unique_ptr<Side> make_tributary_stream_side(const World& world, const Options& options,
                                                 StreamForm form);
std::unique_ptr<Side> make_nccl_side(const World& world, const Options& options);

}  // namespace trib::bench

// SPDX-License-Identifier: BSD-3-Clause
// What the benchmark is asked to measure. Its command line is for machines (`trib bench` writes it,
// and people on machines without Python): every option has exactly one value.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.hpp"

namespace trib::bench {

enum class Collective {
  allreduce,
  reduce,
  reduce_scatter,
  reduce_scatter_block,
  allgather,  ///< this and broadcast: of GPU buffers, blocking and on a stream
  broadcast
};
/// Whether nothing is reduced.
inline bool is_copy(Collective collective) { return collective >= Collective::allgather; }
enum class Memory { host, cuda };

/// How an operation is started and waited for.
enum class Mode {
  blocking,     ///< one call, until its result may be used
  nonblocking,  ///< MPI_I..., then MPI_Wait
  persistent,   ///< MPI_Start, then MPI_Wait, of a request that was made before
  stream,       ///< several operations enqueued on a CUDA stream, then one synchronisation
  graph,        ///< the same, captured into a CUDA graph once and replayed
};
inline bool is_on_stream(Mode mode) { return mode == Mode::stream || mode == Mode::graph; }

/// What ranks wait for before a call that is timed.
enum class Start {
  clock,    ///< a moment on the clock that they share, which lets all of them go at once
  barrier,  ///< the MPI's, which lets them go one after the other
};

std::string_view name(Collective collective);
std::string_view name(Memory memory);
std::string_view name(Mode mode);
std::string_view name(Start start);

struct Options {
  std::vector<Collective> collectives;
  std::vector<std::size_t> sizes{4};
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  int root = 0;
  int repeats = 5;
  double batch_seconds = 0.025;
  long iterations = 0;  ///< per batch; 0: as many as fit into batch_seconds
  bool check = true;
  bool is_fresh = false;     ///< the inputs are written again before each call
  bool is_in_place = false;  ///< results overwrite the inputs: allreduce and reduce
  int offset = 0;            ///< elements by which buffers begin behind a page or an allocation

  Memory memory = Memory::host;
  Mode mode = Mode::blocking;
  Start start = Start::clock;  ///< by the clock: where all ranks are on one node and have cores
  /// Operations that are timed together: back to back on a stream, in a graph, or calls in a row.
  int burst = 1;
  bool compare_mpi = true;          ///< time the MPI's own, too
  bool compare_intel = false;       ///< time the MPI's own on GPU buffers, beside copies by hand
  bool compare_nccl = false;        ///< time NCCL, too
  bool compare_blocking = false;    ///< time Tributary's blocking call, too
  bool compare_registered = false;  ///< on a stream: time Tributary with registered buffers, too
  bool compare_requests = false;    ///< on a stream: time persistent operations that start, too
  /// Also time Tributary with these settings, VARIABLE=VALUE each, on communicators of their own.
  std::vector<std::string> compare_settings;
  /// Nonblocking and persistent: also time each with as much computing between start and wait as it
  /// takes by itself.
  bool overlap = false;
  bool compare_floor = false;     ///< time the least that memory has to move
  bool is_mpi_gpu_aware = false;  ///< the MPI takes device pointers; else its side copies by hand
  std::vector<std::string> nccl;  ///< files to try, in this order

  /// Not empty: nothing is timed, but MPI_Allreduce_init and its like are called with this value of
  /// the info key trib_tune.
  std::string tune;
  /// Persistent: also time Tributary with each of these values of the info key trib_algorithm.
  std::vector<std::string> ways;
};

/// Throws std::invalid_argument, with a text that names the option and what it accepts.
Options read_options(int argc, char** argv);

}  // namespace trib::bench

// SPDX-License-Identifier: BSD-3-Clause
// The GPU, as far as the benchmark needs one: the rank's device, buffers, a stream, a graph. By
// CUDA's driver API, loaded at run time with prototypes of our own, so that the benchmark builds
// without a CUDA toolkit and runs without a driver. bench_cuda.cpp has the prototypes.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

// The driver's own names for its types: what is declared here is what cuda.h declares.
struct CUctx_st;
struct CUstream_st;
struct CUgraph_st;
struct CUgraphExec_st;

namespace trib::bench::cuda {

/// Makes a device the calling thread's for the rest of the program.
class Device {
 public:
  /// Of the devices that the process sees, the one for the node's rank `local_rank`: they take
  /// turns. Throws std::runtime_error, with a reason for people, where there is none.
  explicit Device(int local_rank);

  std::string name;            ///< "NVIDIA H200"
  std::string uuid;            ///< 32 hexadecimal digits; no other GPU (or MIG part) has the same
  std::string driver_version;  ///< of the kernel module, as nvidia-smi says it; "" if unknown
  std::string cuda_version;    ///< up to which the driver goes: "13.0"
};

/// Device memory, or page-locked host memory; page-aligned at least. What an exception unwinds past
/// stays allocated: freeing waits for the device, where a kernel may wait for a dead peer forever,
/// and then nobody would get to MPI_Abort. So do the classes below.
class Allocation {
 public:
  enum class Kind { device, pinned };
  Allocation(Kind kind, std::size_t bytes);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  void* get() const { return memory_; }

 private:
  Kind kind_;
  void* memory_ = nullptr;
};

/// These return when the copy is done.
void copy_to_device(void* device, const void* host, std::size_t bytes);
void copy_to_host(void* host, const void* device, std::size_t bytes);
void fill(void* device, unsigned char value, std::size_t bytes);

/// A stream that does not synchronise with the legacy default stream.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream_st* get() const { return stream_; }
  void synchronize() const;

 private:
  CUstream_st* stream_ = nullptr;
};

/// What `enqueue` puts on a stream, to be replayed.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(const Stream& stream) const;

 private:
  CUgraphExec_st* executable_ = nullptr;
};

}  // namespace trib::bench::cuda

// SPDX-License-Identifier: BSD-3-Clause
// Libraries whose operations are enqueued on a CUDA stream: what their sides share. bench_nccl.cpp
// and bench_tributary.cpp say how one operation is enqueued.
#pragma once

#include <optional>

#include "bench_cuda.hpp"
#include "bench_side.hpp"

namespace trib::bench {

class StreamSide : public Side {
 public:
  /// A run is `options.burst` operations back to back and one synchronisation; with a graph, the
  /// burst is captured once per call and replayed. Beside blocking calls, each is synchronised.
  explicit StreamSide(const Options& options)
      : mode_(options.mode), burst_(is_on_stream(options.mode) ? options.burst : 1) {}

  void prepare(const Call& call) override {
    graph_.reset();
    // Outside of any capture: a first operation may connect and allocate.
    enqueue(call, stream_.get());
    stream_.synchronize();
    verify();
    if (mode_ == Mode::graph) graph_.emplace(stream_, [&] { enqueue_burst(call); });
  }
  void run(const Call& call) override {
    if (graph_)
      graph_->launch(stream_);
    else
      enqueue_burst(call);
    stream_.synchronize();
  }
  int operations() const override { return burst_; }

 protected:
  virtual void enqueue(const Call& call, CUstream_st* stream) = 0;
  /// Before the library's communicator goes: graphs may refer to it.
  void drop_graph() { graph_.reset(); }

 private:
  void enqueue_burst(const Call& call) {
    for (int i = 0; i < burst_; ++i) enqueue(call, stream_.get());
  }

  const Mode mode_;
  const int burst_;
  cuda::Stream stream_;
  std::optional<cuda::Graph> graph_;
};

}  // namespace trib::bench

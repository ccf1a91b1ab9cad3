// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/graphs.hpp"

#include <sched.h>

namespace trib::cuda {

namespace {

using Count = std::shared_ptr<std::atomic<int>>;

/// In a thread of the driver's.
void CUDA_CB end(void* share) {
  const std::unique_ptr<Count> count(static_cast<Count*>(share));
  // Release: pairs with any()'s acquire; kernels of the graph are over before memory is freed.
  (*count)->fetch_sub(1, std::memory_order_release);
}

}  // namespace

void Graphs::add(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t capture = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* nodes = nullptr;  // the last ones; not to be asked without their edges
  const CUgraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  check(driver_.cuStreamGetCaptureInfo_(stream, &status, &capture, &graph, &nodes, &edges, &count),
        "cannot look at the stream");
  if (capture == last_) return;
  last_ = capture;
  // What cannot be watched counts for ever.
  count_->fetch_add(1, std::memory_order_relaxed);
  auto share = std::make_unique<Count>(count_);
  CUuserObject object = nullptr;
  if (driver_.cuUserObjectCreate_(&object, share.get(), end, 1,
                                  CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) != CUDA_SUCCESS)
    return;
  share.release();
  if (driver_.cuGraphRetainUserObject_(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) == CUDA_SUCCESS)
    return;
  count_->fetch_add(1, std::memory_order_relaxed);  // which its end takes back
  driver_.cuUserObjectRelease_(object, 1);
}

bool Graphs::any(std::chrono::microseconds patience) const {
  const auto start = std::chrono::steady_clock::now();
  while (count_->load(std::memory_order_acquire) > 0) {
    if (std::chrono::steady_clock::now() - start >= patience) return true;
    ::sched_yield();
  }
  return false;
}

}  // namespace trib::cuda

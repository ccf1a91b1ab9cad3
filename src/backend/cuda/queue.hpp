// SPDX-License-Identifier: BSD-3-Clause
// A kernel on a stream may take all of a GPU while it waits for its peers, so two of different
// communicators keep each other out if each is the first on one GPU. Ranks enqueue them in one
// order; but streams would begin them in any, according to what else is in each. So a context's
// launches on streams run one after the other, in the order in which they were enqueued, whatever
// communicator they are for: then the first that is not over has room on all GPUs.
//
// What is captured is not among them: a graph's launches have no place in time, and an event of a
// capture means nothing outside of it.
#pragma once

#include <memory>
#include <mutex>

#include "backend/cuda/driver.hpp"

namespace trib::cuda {

class Queue {
 public:
  static std::shared_ptr<Queue> of(const ContextId& context);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// A launch on a stream that is not being captured, from before it until this is gone. In the
  /// queue's context.
  class Place {
   public:
    /// `id` of the stream: handles are used again. Throws Error.
    Place(Queue& queue, CUstream stream, unsigned long long id);
    /// Behind the launch, and nothing else that is to be enqueued with it: records `event`, which
    /// stands for the launch until another one comes or it is forgotten. Throws Error.
    void end(CUevent event);

   private:
    Queue& queue_;
    const std::lock_guard<std::mutex> lock_;
    const CUstream stream_;
    const unsigned long long id_;
  };

  /// What `event` was recorded for is over, and so is all that came before; it may be destroyed
  /// then.
  void forget(CUevent event);

 private:
  Queue() = default;

  const Driver& driver_ = *driver();
  std::mutex mutex_;
  CUevent last_ = nullptr;  // of the last launch, which is a channel's own. Null: there is none
  unsigned long long last_stream_ = 0;
};

}  // namespace trib::cuda

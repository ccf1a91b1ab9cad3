// SPDX-License-Identifier: BSD-3-Clause
// Where ranks share a GPU and each launches kernels that wait for the others', two of a process,
// of different communicators, could take the room that the ones they wait for need. So a process's
// launches on streams run one after the other, whatever communicator they are for. Ranks have to
// make calls of different communicators in the same order then.
#pragma once

#include <memory>
#include <mutex>

#include "backend/cuda/driver.hpp"

namespace trib::cuda {

class Queue {
 public:
  /// The context's. Throws Error.
  static std::shared_ptr<Queue> of(CUcontext context);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// A launch on a stream that is not being captured, from before it until this is gone.
  class Place {
   public:
    /// `id` of the stream.
    Place(Queue& queue, CUstream stream, unsigned long long id);
    /// Behind the launch, and nothing else that is to be enqueued with it.
    void end();

   private:
    Queue& queue_;
    const std::lock_guard<std::mutex> lock_;
    const CUstream stream_;
    const unsigned long long id_;
  };

 private:
  explicit Queue(CUcontext context);

  const CUcontext context_;
  const Driver& driver_;
  std::mutex mutex_;
  CUevent last_ = nullptr;
  unsigned long long last_stream_ = 0;
  bool is_empty_ = true;
};

}  // namespace trib::cuda

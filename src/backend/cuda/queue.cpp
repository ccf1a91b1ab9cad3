// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/queue.hpp"

#include <map>

namespace trib::cuda {

Queue::Queue(CUcontext context) : context_(context), driver_(*driver()) {
  const Current current(context_);
  check(driver_.cuEventCreate_(&last_, CU_EVENT_DISABLE_TIMING), "cannot create an event");
}

Queue::~Queue() {
  try {
    const Current current(context_);
    driver_.cuEventDestroy_(last_);
  } catch (const Error&) {
    // The context is gone, and the event with it.
  }
}

std::shared_ptr<Queue> Queue::of(CUcontext context) {
  static auto& mutex = *new std::mutex;  // never destroyed: programs may end late
  static auto& queues = *new std::map<CUcontext, std::weak_ptr<Queue>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Queue>& known = queues[context];
  std::shared_ptr<Queue> queue = known.lock();
  if (!queue) known = queue = std::shared_ptr<Queue>(new Queue(context));
  return queue;
}

Queue::Place::Place(Queue& queue, CUstream stream, unsigned long long id)
    : queue_(queue), lock_(queue.mutex_), stream_(stream), id_(id) {
  if (!queue_.is_empty_ && queue_.last_stream_ != id_)
    check(queue_.driver_.cuStreamWaitEvent_(stream_, queue_.last_, 0), "cannot order streams");
}

void Queue::Place::end() {
  check(queue_.driver_.cuEventRecord_(queue_.last_, stream_), "cannot record an event");
  queue_.last_stream_ = id_;
  queue_.is_empty_ = false;
}

}  // namespace trib::cuda

// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/queue.hpp"

#include <map>

namespace trib::cuda {

std::shared_ptr<Queue> Queue::of(const ContextId& context) {
  static auto& mutex = *new std::mutex;  // never destroyed: programs may end late
  static auto& queues = *new std::map<ContextId, std::weak_ptr<Queue>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Queue>& known = queues[context];
  std::shared_ptr<Queue> queue = known.lock();
  if (!queue) known = queue = std::shared_ptr<Queue>(new Queue);
  return queue;
}

Queue::Place::Place(Queue& queue, CUstream stream, unsigned long long id)
    : queue_(queue), lock_(queue.mutex_), stream_(stream), id_(id) {
  if (queue_.last_ != nullptr && queue_.last_stream_ != id_)
    check(queue_.driver_.cuStreamWaitEvent_(stream_, queue_.last_, 0), "cannot order streams");
}

void Queue::Place::end(CUevent event) {
  check(queue_.driver_.cuEventRecord_(event, stream_), "cannot record an event");
  queue_.last_ = event;
  queue_.last_stream_ = id_;
}

void Queue::forget(CUevent event) {
  const std::lock_guard lock(mutex_);
  if (last_ == event) last_ = nullptr;
}

}  // namespace trib::cuda

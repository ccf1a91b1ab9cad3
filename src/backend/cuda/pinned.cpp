// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/pinned.hpp"

#include <map>
#include <mutex>

namespace trib::cuda {
namespace {

std::mutex mutex;
std::map<void*, std::weak_ptr<Pinned>>& all() {
  // Never destroyed: a program may end its MPI from a destructor that runs after ours would.
  static auto& map = *new std::map<void*, std::weak_ptr<Pinned>>;
  return map;
}

}  // namespace

std::shared_ptr<Pinned> Pinned::of(void* at, std::size_t bytes, const ContextId& context) {
  const std::lock_guard lock(mutex);
  std::weak_ptr<Pinned>& known = all()[at];
  std::shared_ptr<Pinned> pinned = known.lock();
  if (!pinned) {
    pinned.reset(new Pinned(at, bytes, context));
    known = pinned;
  }
  return pinned;
}

Pinned::Pinned(void* at, std::size_t bytes, const ContextId& context) : at_(at), context_(context) {
  check(driver()->cuMemHostRegister_(at, bytes,
                                     CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "cannot pin shared memory");
}

Pinned::~Pinned() {
  try {
    const Current current(context_);
    driver()->cuMemHostUnregister_(at_);
  } catch (const Error&) {
    // The context is gone, and the registration with it.
  }
}

}  // namespace trib::cuda

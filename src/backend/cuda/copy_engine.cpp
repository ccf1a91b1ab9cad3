// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/copy_engine.hpp"

#include <sched.h>

#include <chrono>
#include <new>
#include <numeric>
#include <vector>

#include "backend/cuda/agree.hpp"
#include "base/process.hpp"

namespace trib::cuda {

CopyEngine::CopyEngine(Bootstrap& bootstrap, const ContextId& context)
    : driver_(*driver()), rank_(bootstrap.rank()), size_(bootstrap.size()), context_(context) {}

/// This rank's part.
void CopyEngine::set_up() {
  const Current current(context_);
  check(driver_.cuMemAlloc_(&counters_, sizeof(Counters)), "cannot allocate");
  fill(counters_, 0, sizeof(Counters));
  void* host = nullptr;
  check(driver_.cuMemHostAlloc_(&host, sizeof(Doorbell),
                                CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cannot pin host memory");
  doorbell_ = new (host) Doorbell{};
  // Ordered behind the default stream, like the channel's own stream.
  int lowest = 0, highest = 0;
  check(driver_.cuCtxGetStreamPriorityRange_(&lowest, &highest), "cannot get priorities");
  for (CUstream* const stream : {&push_stream_, &work_stream_})
    check(driver_.cuStreamCreateWithPriority_(stream, CU_STREAM_DEFAULT, highest),
          "cannot create a stream");
  for (CUevent& event : pushed_)
    check(driver_.cuEventCreate_(&event, CU_EVENT_DISABLE_TIMING), "cannot create an event");
}

std::unique_ptr<CopyEngine> CopyEngine::open(Bootstrap& bootstrap, Config::Segment mode,
                                             const ContextId& context, std::size_t inbox_bytes,
                                             std::string& why) {
  auto segment = Segment::open(bootstrap, sizeof(Words), mode, why);
  if (!segment) return nullptr;
  std::unique_ptr<CopyEngine> engine(new CopyEngine(bootstrap, context));
  engine->segment_ = std::move(segment);
  new (engine->segment_->of(engine->rank_)) Words{};
  std::vector<int> everyone(static_cast<std::size_t>(engine->size_));
  std::iota(everyone.begin(), everyone.end(), 0);
  engine->inboxes_ = PeerMemory::open(bootstrap, mode, context, inbox_bytes, everyone, why);
  if (!engine->inboxes_) return nullptr;
  std::string trouble;
  try {
    engine->set_up();
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  return all_agree(bootstrap, trouble, why) ? std::move(engine) : nullptr;
}

bool CopyEngine::reserve_gemv(Bootstrap& bootstrap, const std::string& path, std::string& why) {
  if (cublas_) return true;
  std::string trouble;
  try {
    const Current current(context_);
    cublas_ = Cublas::open(path, work_stream_, trouble);
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  if (all_agree(bootstrap, trouble, why)) return true;
  const Current current(context_);
  cublas_.reset();
  return false;
}

/// Not collective, as the channel's: see there.
CopyEngine::~CopyEngine() { release(); }

void CopyEngine::release() noexcept {
  try {
    const Current current(context_);
    if (cublas_) driver_.cuStreamSynchronize_(work_stream_);
    cublas_.reset();
    for (const CUstream stream : {push_stream_, work_stream_}) {
      if (stream == nullptr) continue;
      driver_.cuStreamSynchronize_(stream);
      driver_.cuStreamDestroy_(stream);
    }
    for (const CUevent event : pushed_)
      if (event != nullptr) driver_.cuEventDestroy_(event);
    inboxes_.reset();
    if (counters_ != 0) driver_.cuMemFree_(counters_);
    if (doorbell_ != nullptr) driver_.cuMemFreeHost_(doorbell_);
  } catch (const Error&) {
    // The context is gone, and all of this with it. cuBLAS does not know that.
    (void)cublas_.release();
  }
}

void CopyEngine::drain() noexcept {
  try {
    const Current current(context_);
    const auto start = std::chrono::steady_clock::now();
    for (const CUstream stream : {push_stream_, work_stream_})
      while (driver_.cuStreamQuery_(stream) == CUDA_ERROR_NOT_READY &&
             std::chrono::steady_clock::now() - start < std::chrono::seconds(2))
        ::sched_yield();
  } catch (const Error&) {
    // The context is gone: nothing of ours runs any more.
  }
}

}  // namespace trib::cuda

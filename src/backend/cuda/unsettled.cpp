// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/unsettled.hpp"

namespace trib::cuda {
namespace {

class Event final : public Unsettled {
 public:
  explicit Event(const ContextId& context) : context_(context) {
    const Driver& known = *driver();
    if (known.cuEventCreate_(&event_, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) event_ = nullptr;
    is_recorded_ =
        event_ != nullptr && known.cuEventRecord_(event_, CU_STREAM_LEGACY) == CUDA_SUCCESS;
  }
  ~Event() override {
    if (event_ != nullptr && context_.is_there()) driver()->cuEventDestroy_(event_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  bool is_over() override {
    if (!context_.is_there()) return true;
    const Current current(context_.handle);
    if (!is_recorded_) return !is_default_stream_busy();  // the driver has no event to give
    const CUresult result = driver()->cuEventQuery_(event_);
    if (result == CUDA_ERROR_NOT_READY) return false;
    check(result, "the default stream failed");
    return true;
  }

 private:
  const ContextId context_;
  CUevent event_ = nullptr;
  bool is_recorded_ = false;
};

}  // namespace

std::unique_ptr<Unsettled> unsettled(const ContextId& context) {
  if (!context.is_there()) return nullptr;
  const Current current(context.handle);
  if (!is_default_stream_busy()) return nullptr;
  return std::make_unique<Event>(context);
}

}  // namespace trib::cuda

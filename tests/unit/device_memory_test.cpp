// SPDX-License-Identifier: BSD-3-Clause
// Device buffers are left to the MPI. Needs a GPU and its driver; skipped elsewhere.
#include "comm/device_memory.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "comm/communicator.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

TEST(DeviceMemory, HostMemoryIsNone) {
  int here = 0;
  has_device_driver();
  EXPECT_FALSE(is_device_memory(&here));
  EXPECT_FALSE(is_device_memory(nullptr));
}

TEST(DeviceMemory, IsLeftToTheMpi) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) GTEST_SKIP() << "no CUDA driver here";
  const auto call = [&]<class... Arguments>(const char* name, Arguments... arguments) {
    return reinterpret_cast<int (*)(Arguments...)>(dlsym(driver, name))(arguments...);
  };
  if (call("cuInit", 0u) != 0) GTEST_SKIP() << "no GPU here";
  int device = 0;
  void* context = nullptr;
  unsigned long long memory = 0;
  ASSERT_EQ(call("cuDeviceGet", &device, 0), 0);
  ASSERT_EQ(call("cuDevicePrimaryCtxRetain", &context, device), 0);
  ASSERT_EQ(call("cuCtxSetCurrent", context), 0);
  ASSERT_EQ(call("cuMemAlloc_v2", &memory, std::size_t{4096}), 0);
  EXPECT_TRUE(has_device_driver());
  EXPECT_TRUE(is_device_memory(reinterpret_cast<void*>(memory + 100)));
  const auto errors = test::run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    float in = 1, out = 0;
    Request request;
    request.count = 1;
    request.in = &in;
    request.out = &out;
    if (!communicator.run(request) || out != 2) throw std::runtime_error("host memory is not served");
    request.in = reinterpret_cast<void*>(memory + 512 * static_cast<unsigned>(rank));
    if (communicator.run(request)) throw std::runtime_error("a device buffer was taken for host memory");
    communicator.note_declined(Collective::allreduce, Decline::foreign_memory);
    request.in = &in;
    if (!communicator.run(request) || out != 2) throw std::runtime_error("host memory is not served any more");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(call("cuMemFree_v2", memory), 0);
}

}  // namespace
}  // namespace trib

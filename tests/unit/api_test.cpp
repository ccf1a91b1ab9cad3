// SPDX-License-Identifier: BSD-3-Clause
// The C API where there is no GPU: errors say what is wrong. With GPUs: tests/mpi/gpu_stream.cpp.
#include "tributary/tributary.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace {

int exchange(void*, const void* mine, void* all, std::size_t bytes) {
  std::memcpy(all, mine, bytes);
  return 0;
}

TEST(Api, ResultsHaveTexts) {
  for (int result = 0; result <= TRIB_ERROR_INTERNAL; ++result)
    EXPECT_STRNE(trib_result_text(static_cast<trib_result>(result)), "no result of Tributary");
  EXPECT_STREQ(trib_result_text(static_cast<trib_result>(99)), "no result of Tributary");
  EXPECT_STRNE(trib_version(), "");
}

TEST(Api, WrongArgumentsAreNamed) {
  trib_comm* comm = nullptr;
  EXPECT_EQ(trib_comm_create(nullptr, 0, 1, exchange, nullptr), TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "comm is null");
  EXPECT_EQ(trib_comm_create(&comm, 0, 1, nullptr, nullptr), TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "exchange is null");
  EXPECT_EQ(trib_comm_create(&comm, 3, 2, exchange, nullptr), TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "rank 3 of 2");
  EXPECT_EQ(comm, nullptr);
  float value = 0;
  EXPECT_EQ(trib_allreduce(&value, &value, 1, TRIB_FLOAT32, TRIB_SUM, nullptr, nullptr),
            TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "comm is null");
  EXPECT_EQ(trib_comm_query(nullptr, nullptr), TRIB_ERROR_ARGUMENT);
  EXPECT_EQ(trib_comm_abort(nullptr), TRIB_ERROR_ARGUMENT);
  EXPECT_EQ(trib_comm_destroy(nullptr), TRIB_SUCCESS);
  EXPECT_STREQ(trib_last_error(), "");
  EXPECT_EQ(trib_comm_rank(nullptr), -1);
}

TEST(Api, WrongRequestsAreNamed) {
  float value = 0;
  const std::size_t counts[] = {1};
  trib_request* request;
  const auto expect_no_comm = [&](trib_result result) {
    EXPECT_EQ(result, TRIB_ERROR_ARGUMENT);
    EXPECT_STREQ(trib_last_error(), "comm is null");
    EXPECT_EQ(request, nullptr);
    request = reinterpret_cast<trib_request*>(&value);
  };
  request = reinterpret_cast<trib_request*>(&value);
  expect_no_comm(trib_allreduce_init(&value, &value, 1, TRIB_FLOAT32, TRIB_SUM, nullptr, &request));
  expect_no_comm(trib_reduce_init(&value, &value, 1, TRIB_FLOAT32, TRIB_SUM, 0, nullptr, &request));
  expect_no_comm(
      trib_reduce_scatter_init(&value, &value, counts, TRIB_FLOAT32, TRIB_SUM, nullptr, &request));
  expect_no_comm(
      trib_reduce_scatter_block_init(&value, &value, 1, TRIB_FLOAT32, TRIB_SUM, nullptr, &request));
  expect_no_comm(trib_allgather_init(&value, &value, 1, TRIB_FLOAT32, nullptr, &request));
  expect_no_comm(trib_broadcast_init(&value, &value, 1, TRIB_FLOAT32, 0, nullptr, &request));
  EXPECT_EQ(trib_allreduce_init(&value, &value, 1, TRIB_FLOAT32, TRIB_SUM, nullptr, nullptr),
            TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "request is null");
  EXPECT_EQ(trib_start(nullptr, nullptr), TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "request is null");
  EXPECT_EQ(trib_request_free(nullptr), TRIB_SUCCESS);
  EXPECT_STREQ(trib_last_error(), "");
}

/// As in docs/gpu.md. Its compute() takes no GPU to compile.
trib_result sum_in_every_step(float* mine, float* total, size_t count, int steps, trib_comm* comm,
                              trib_stream stream, void (*compute)(float*, trib_stream)) {
  trib_request* sum = nullptr;
  trib_result result = trib_allreduce_init(mine, total, count, TRIB_FLOAT32, TRIB_SUM, comm, &sum);
  for (int step = 0; step < steps && result == TRIB_SUCCESS; ++step) {
    compute(mine, stream);  // launches a kernel that writes `mine`
    result = trib_start(sum, stream);
  }
  trib_request_free(sum);
  return result;
}

TEST(Api, ARequestThatWasNotMadeIsNotStarted) {
  float value = 0;
  const auto compute = [](float*, trib_stream) { FAIL() << "there is nothing to start"; };
  EXPECT_EQ(sum_in_every_step(&value, &value, 1, 3, nullptr, nullptr, compute),
            TRIB_ERROR_ARGUMENT);
}

TEST(Api, NoGpuIsAnErrorNotACrash) {
  trib_comm* comm = nullptr;
  const trib_result result = trib_comm_create(&comm, 0, 1, exchange, nullptr);
  if (result == TRIB_SUCCESS) {
    trib_comm_destroy(comm);
    GTEST_SKIP() << "there is a GPU here";
  }
  EXPECT_EQ(result, TRIB_ERROR_DEVICE);
  EXPECT_NE(std::string(trib_last_error()).find("driver"), std::string::npos) << trib_last_error();
}

}  // namespace

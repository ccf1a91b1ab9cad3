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

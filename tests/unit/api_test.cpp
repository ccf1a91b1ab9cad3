// SPDX-License-Identifier: BSD-3-Clause
// The C API where there is no GPU: errors say what is wrong, and ranks that are threads enqueue
// kernels of a stand-in, which do nothing. With GPUs: tests/mpi/gpu_stream.cpp.
#include "tributary/tributary.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.hpp"

namespace {

/// Of the C library's heap. With a sanitizer's this stays as it is.
std::size_t allocated_bytes() { return ::mallinfo2().uordblks; }

constexpr int kRanks = 2;

/// The last call of each rank that came as far as its kernel.
struct Launched {
  trib::Arguments arguments;
  std::vector<std::size_t> chunk_begin;
};
std::array<Launched, kRanks> launched;
int out_of_memory_on = -1;                ///< a rank
int without_kernels = -1;                 ///< a rank, whose device refuses to load any
int refused_on = -1;                      ///< a rank, whose device refuses to launch any
bool are_kernels_waiting = false;         ///< until somebody ends them
bool is_captured = false;                 ///< every stream
std::atomic<bool> is_driver_busy{false};  ///< until somebody ends the kernels
std::atomic<bool> is_driver_asked{false};
std::atomic<bool> is_launch_stuck{false};  ///< until somebody frees it
std::atomic<bool> is_launching{false};

class StandInProgram final : public trib::Program, trib::Operation {
 public:
  explicit StandInProgram(int rank) : rank_(rank) {}
  std::size_t fit(bool) const override { return 1 << 20; }
  trib::Operation& launch(const trib::Arguments& arguments) override {
    if (out_of_memory_on == rank_) throw std::bad_alloc();
    is_launching = true;
    while (is_launch_stuck) std::this_thread::yield();
    if (refused_on == rank_) throw trib::Error(trib::Code::device, "the kernel was refused");
    launched[static_cast<std::size_t>(rank_)] = {
        arguments, {arguments.chunk_begin, arguments.chunk_begin + arguments.chunks + 1}};
    return *this;
  }

 private:
  bool advance(int) override { return true; }
  int blocked_on() const override { return -1; }
  std::uint64_t position() const override { return 0; }

  const int rank_;
};

class StandInChannel final : public trib::DeviceChannel {
 public:
  explicit StandInChannel(int rank) : rank_(rank) {}
  std::unique_ptr<trib::Program> load(const std::vector<trib::Schedule>&, trib::Engine) override {
    if (without_kernels == rank_) throw trib::Error(trib::Code::device, "no room for kernels");
    return std::make_unique<StandInProgram>(rank_);
  }
  bool reserve(trib::Engine, std::string&) override { return false; }
  bool has(trib::Engine) const override { return false; }
  void poison(const trib::Error&) noexcept override { is_over_ = true; }
  trib::Memory where(const void*) const override { return trib::Memory::device; }
  int max_blocks() const override { return 16; }
  void* allocate(std::size_t) override { return nullptr; }
  void free(void*) noexcept override {}
  bool is_capturing(trib::Stream) const override { return is_captured; }
  void check_result() const override {
    if (is_over_) throw trib::Error(trib::Code::peer, "a peer gave up");
  }
  void check_stream() override {
    is_driver_asked = true;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (is_driver_busy && !is_over_ && std::chrono::steady_clock::now() < limit)
      std::this_thread::yield();
    EXPECT_TRUE(!is_driver_busy || is_over_) << "nobody has ended the kernels";
  }
  void drain() override {
    while (are_kernels_waiting && !is_over_) std::this_thread::yield();
    check_result();
  }

 private:
  const int rank_;
  std::atomic<bool> is_over_{false};
};

class StandIn final : public trib::DeviceBackend {
 public:
  std::string_view name() const override { return "test"; }
  std::string hardware() const override { return "stand-in"; }
  std::string describe() const override { return ""; }
  bool is_in_use(std::span<const void* const>) const override { return true; }
  trib::Memory where(const void*) const override { return trib::Memory::device; }
  bool is_defined(trib::Op, trib::Dtype) const override { return true; }
  std::unique_ptr<trib::DeviceChannel> open(trib::Bootstrap& bootstrap, const trib::Config&,
                                            const void*, std::string&) override {
    return std::make_unique<StandInChannel>(bootstrap.rank());
  }
  bool load() const override { return true; }
  void copy(void*, const void*, std::size_t) const override {}
  void enqueue_copy(void*, const void*, std::size_t, trib::Stream) const override {
    if (refused_on == 0) throw trib::Error(trib::Code::device, "the copy was refused");
  }
  void* allocate_host(std::size_t) const override { return nullptr; }
  void free_host(void*) const noexcept override {}
};

bool has_stand_in = false;

}  // namespace

namespace trib {

/// In place of the library's, which asks for it by name, and finds the program's first.
DeviceBackend* device_backend() {
  static StandIn stand_in;
  if (has_stand_in) return &stand_in;
  static const auto real =
      reinterpret_cast<DeviceBackend* (*)()>(::dlsym(RTLD_NEXT, "_ZN4trib14device_backendEv"));
  return real != nullptr ? real() : nullptr;
}

}  // namespace trib

namespace {

/// Where the ranks exchange. Whoever waits for one that does not come has to give up some time.
class Meeting {
 public:
  /// For trib_comm_create.
  struct Seat {
    Meeting& meeting;
    int rank;
  };
  static int exchange(void* seat, const void* mine, void* all, std::size_t bytes) {
    const auto [meeting, rank] = *static_cast<Seat*>(seat);
    return meeting.exchange(rank, mine, all, bytes) ? 0 : 1;
  }

  bool wait_for_one() {
    std::unique_lock lock(mutex_);
    return change_.wait_for(lock, kPatience, [&] { return present_ > 0; });
  }

 private:
  static constexpr std::chrono::seconds kPatience{20};

  bool exchange(int rank, const void* mine, void* all, std::size_t bytes) {
    std::unique_lock lock(mutex_);
    parts_[static_cast<std::size_t>(rank)].assign(static_cast<const char*>(mine), bytes);
    const int round = round_;
    if (++present_ == kRanks) {
      present_ = 0;
      ++round_;
      result_.clear();
      for (const std::string& part : parts_) result_ += part;
    }
    change_.notify_all();
    if (!change_.wait_for(lock, kPatience, [&] { return round_ != round; })) return false;
    std::memcpy(all, result_.data(), result_.size());
    return true;
  }

  std::mutex mutex_;
  std::condition_variable change_;
  std::array<std::string, kRanks> parts_;
  std::string result_;
  int present_ = 0, round_ = 0;
};

/// A communicator of ranks that have a GPU each. Calls on it wait for no other rank: tests make
/// them for one after the other.
class StreamRanks : public testing::Test {
 protected:
  void SetUp() override {
    has_stand_in = true;
    out_of_memory_on = without_kernels = refused_on = -1;
    are_kernels_waiting = is_captured = is_driver_busy = is_driver_asked = false;
    is_launch_stuck = is_launching = false;
    launched = {};
    as_threads([this](int rank) {
      EXPECT_EQ(trib_comm_create(&comms[rank], rank, kRanks, Meeting::exchange, &seats[rank]),
                TRIB_SUCCESS)
          << trib_last_error();
    });
    ASSERT_NE(comms[0], nullptr);
    ASSERT_NE(comms[1], nullptr);
  }
  void TearDown() override {
    as_threads([this](int rank) {
      trib_result error = TRIB_SUCCESS;
      if (comms[rank] != nullptr) trib_comm_query(comms[rank], &error);
      EXPECT_EQ(trib_comm_destroy(comms[rank]), error) << "once more, or for the first time";
    });
    has_stand_in = false;
  }
  template <class Body>
  static void as_threads(const Body& body) {
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }

  trib_result allreduce(int rank, std::size_t count) {
    return trib_allreduce(memory, memory, count, TRIB_FLOAT32, TRIB_SUM, comms[rank], nullptr);
  }

  Meeting meeting;
  Meeting::Seat seats[kRanks] = {{meeting, 0}, {meeting, 1}};
  trib_comm* comms[kRanks] = {};
  alignas(16) std::byte memory[16] = {};  // nobody touches it, however long vectors are
};

int exchange(void*, const void* mine, void* all, std::size_t bytes) {
  std::memcpy(all, mine, bytes);
  return 0;
}

TEST(Api, ResultsHaveTexts) {
  for (int result = 0; result <= TRIB_ERROR_INTERNAL; ++result)
    EXPECT_STRNE(trib_result_text(static_cast<trib_result>(result)), "no result of Tributary");
  EXPECT_STREQ(trib_result_text(static_cast<trib_result>(99)), "no result of Tributary");
  const std::string of_header = std::to_string(TRIB_VERSION_MAJOR) + "." +
                                std::to_string(TRIB_VERSION_MINOR) + "." +
                                std::to_string(TRIB_VERSION_PATCH);
  EXPECT_EQ(trib_version(), of_header);
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
  // What succeeds does not take its word from what has failed.
  EXPECT_EQ(trib_comm_destroy(nullptr), TRIB_SUCCESS);
  EXPECT_STREQ(trib_last_error(), "comm is null");
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

/// Settings are those of the process: rank 0 has read them when rank 1's are made wrong.
TEST(Api, AWrongSettingOnOneRankIsAnErrorOnAll) {
  Meeting meeting;
  Meeting::Seat seats[kRanks] = {{meeting, 0}, {meeting, 1}};
  trib_comm* comms[kRanks] = {};
  std::string text;
  std::thread other([&] {
    EXPECT_EQ(trib_comm_create(&comms[0], 0, kRanks, Meeting::exchange, &seats[0]),
              TRIB_ERROR_ARGUMENT);
    text = trib_last_error();
  });
  EXPECT_TRUE(meeting.wait_for_one());
  ::setenv("TRIB_PROTOCOL", "bogus", 1);
  EXPECT_EQ(trib_comm_create(&comms[1], 1, kRanks, Meeting::exchange, &seats[1]),
            TRIB_ERROR_ARGUMENT);
  const std::string own_text = trib_last_error();
  other.join();
  ::unsetenv("TRIB_PROTOCOL");
  EXPECT_TRUE(own_text.starts_with("TRIB_PROTOCOL=bogus: not one of")) << own_text;
  EXPECT_EQ(text, "rank 1: " + own_text);
  EXPECT_EQ(comms[0], nullptr);
  EXPECT_EQ(comms[1], nullptr);
}

TEST(Api, WhateverAnExchangeThrowsIsAnError) {
  trib_comm* comm = nullptr;
  const auto throws = [](void*, const void*, void*, std::size_t) -> int { throw 1; };
  EXPECT_EQ(trib_comm_create(&comm, 0, 2, throws, nullptr), TRIB_ERROR_SYSTEM);
  EXPECT_EQ(comm, nullptr);
}

TEST(Api, RanksThatAreMixedUpAreAnError) {
  has_stand_in = true;
  Meeting meeting;
  Meeting::Seat seats[kRanks] = {{meeting, 0}, {meeting, 1}};
  std::array<std::string, kRanks> texts;
  const auto create = [&](int seat) {
    trib_comm* comm = nullptr;
    EXPECT_EQ(trib_comm_create(&comm, 0, kRanks, Meeting::exchange, &seats[seat]),
              TRIB_ERROR_ARGUMENT);
    texts[static_cast<std::size_t>(seat)] = trib_last_error();
  };
  std::thread other([&] { create(1); });
  create(0);
  other.join();
  has_stand_in = false;
  for (const std::string& text : texts) EXPECT_NE(text.find("rank 1's"), std::string::npos) << text;
}

TEST_F(StreamRanks, IgnoredBuffersAreNotJudged) {
  void* const odd = memory + 1;
  ASSERT_EQ(trib_reduce(memory, memory, 5, TRIB_FLOAT32, TRIB_SUM, 0, comms[0], nullptr),
            TRIB_SUCCESS);
  EXPECT_EQ(trib_reduce(memory, odd, 5, TRIB_FLOAT32, TRIB_SUM, 0, comms[1], nullptr), TRIB_SUCCESS)
      << trib_last_error();
  EXPECT_EQ(launched[1].arguments.out, nullptr);
  ASSERT_EQ(trib_broadcast(memory, memory, 6, TRIB_FLOAT32, 0, comms[0], nullptr), TRIB_SUCCESS);
  EXPECT_EQ(trib_broadcast(odd, memory, 6, TRIB_FLOAT32, 0, comms[1], nullptr), TRIB_SUCCESS)
      << trib_last_error();
  EXPECT_EQ(launched[1].arguments.in, nullptr);
  const std::size_t counts[kRanks] = {7, 0};
  ASSERT_EQ(trib_reduce_scatter(memory, memory, counts, TRIB_FLOAT32, TRIB_SUM, comms[0], nullptr),
            TRIB_SUCCESS);
  EXPECT_EQ(trib_reduce_scatter(memory, odd, counts, TRIB_FLOAT32, TRIB_SUM, comms[1], nullptr),
            TRIB_SUCCESS)
      << trib_last_error();
  for (const Launched& its : launched) EXPECT_EQ(its.arguments.signature.count, 7u);
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(trib_allreduce(odd, odd, 0, TRIB_FLOAT32, TRIB_SUM, comms[rank], nullptr),
              TRIB_SUCCESS);

  trib_request* request = nullptr;
  EXPECT_EQ(trib_broadcast_init(odd, memory, 6, TRIB_FLOAT32, 0, comms[1], &request), TRIB_SUCCESS);
  EXPECT_EQ(trib_request_free(request), TRIB_SUCCESS);
  EXPECT_EQ(trib_broadcast(odd, memory, 6, TRIB_FLOAT32, 1, comms[1], nullptr),
            TRIB_ERROR_ARGUMENT);
  EXPECT_EQ(trib_reduce(memory, odd, 5, TRIB_FLOAT32, TRIB_SUM, 1, comms[1], nullptr),
            TRIB_ERROR_ARGUMENT);
}

TEST_F(StreamRanks, ManyLengthsTakeNoMoreMemoryThanSome) {
  constexpr std::size_t kSome = 6000, kMany = 30000;
  trib_request* request = nullptr;
  ASSERT_EQ(
      trib_allreduce_init(memory, memory, kMany + 1, TRIB_FLOAT32, TRIB_SUM, comms[0], &request),
      TRIB_SUCCESS);
  ASSERT_EQ(allreduce(0, kMany), TRIB_SUCCESS);
  ASSERT_EQ(allreduce(1, kMany), TRIB_SUCCESS);
  const std::size_t* const often = launched[0].arguments.chunk_begin;
  std::size_t bytes_of_some = 0;
  for (std::size_t count = 1; count < kMany; ++count) {
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(allreduce(rank, count), TRIB_SUCCESS);
    if (count == kSome) bytes_of_some = allocated_bytes();
    if (count % 1000 != 0) continue;
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(allreduce(rank, kMany), TRIB_SUCCESS);
    EXPECT_EQ(launched[0].arguments.chunk_begin, often) << "what is used was forgotten";
  }
  EXPECT_LT(allocated_bytes(), bytes_of_some + (64 << 10));

  // A request outlives what is known of calls like it.
  ASSERT_EQ(trib_start(request, nullptr), TRIB_SUCCESS);
  const Launched by_request = launched[0];
  ASSERT_EQ(allreduce(1, kMany + 1), TRIB_SUCCESS);
  EXPECT_EQ(by_request.chunk_begin, launched[1].chunk_begin);
  EXPECT_EQ(by_request.chunk_begin.back(), kMany + 1);
  EXPECT_EQ(trib_request_free(request), TRIB_SUCCESS);
}

TEST_F(StreamRanks, AKernelThatIsMissingIsTheEndOfTheCommunicator) {
  ASSERT_EQ(allreduce(0, 5), TRIB_SUCCESS);
  ASSERT_EQ(allreduce(1, 5), TRIB_SUCCESS);
  ASSERT_EQ(allreduce(0, 6), TRIB_SUCCESS);
  out_of_memory_on = 1;
  EXPECT_EQ(allreduce(1, 6), TRIB_ERROR_SYSTEM);
  EXPECT_STREQ(trib_last_error(), "out of memory");
  out_of_memory_on = -1;
  EXPECT_EQ(allreduce(1, 7), TRIB_ERROR_UNUSABLE);
  trib_result error = TRIB_SUCCESS;
  EXPECT_EQ(trib_comm_query(comms[1], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_ERROR_SYSTEM);
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_ERROR_PEER);
  EXPECT_NE(std::string(trib_last_error()).find("out of memory"), std::string::npos)
      << trib_last_error();
}

TEST_F(StreamRanks, CountsThatAreNoneAreAnError) {
  const auto minus_one = static_cast<std::size_t>(-1);
  // Twice as many eights of bytes would be none.
  const std::size_t half = std::size_t{1} << 63;
  EXPECT_EQ(trib_allgather(memory, memory, half, TRIB_COMPLEX128, comms[0], nullptr),
            TRIB_ERROR_ARGUMENT);
  EXPECT_EQ(
      trib_reduce_scatter_block(memory, memory, half, TRIB_FLOAT32, TRIB_SUM, comms[0], nullptr),
      TRIB_ERROR_ARGUMENT);
  const std::size_t counts[kRanks] = {minus_one, 1};
  EXPECT_EQ(trib_reduce_scatter(memory, memory, counts, TRIB_FLOAT32, TRIB_SUM, comms[0], nullptr),
            TRIB_ERROR_ARGUMENT);
  EXPECT_EQ(allreduce(0, minus_one), TRIB_ERROR_ARGUMENT);
  EXPECT_NE(std::string(trib_last_error()).find("18446744073709551615 elements"), std::string::npos)
      << trib_last_error();
  // That was this rank's alone, and the communicator is as usable as before.
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(allreduce(rank, 5), TRIB_SUCCESS);
}

TEST_F(StreamRanks, AKernelThatIsNotLoadedIsTheEndOfTheCommunicator) {
  ASSERT_EQ(allreduce(0, 5), TRIB_SUCCESS);
  without_kernels = 1;
  trib_request* request = nullptr;
  EXPECT_EQ(trib_allreduce_init(memory, memory, 5, TRIB_FLOAT32, TRIB_SUM, comms[1], &request),
            TRIB_ERROR_DEVICE);
  trib_result error = TRIB_SUCCESS;
  EXPECT_EQ(trib_comm_query(comms[1], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_SUCCESS) << "nobody waits for a request that is being made";
  EXPECT_EQ(allreduce(1, 5), TRIB_ERROR_DEVICE);
  EXPECT_STREQ(trib_last_error(), "no room for kernels");
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_ERROR_PEER);
  EXPECT_NE(std::string(trib_last_error()).find("no room for kernels"), std::string::npos)
      << trib_last_error();
}

TEST_F(StreamRanks, ALaunchThatIsRefusedInACaptureIsNotTheEnd) {
  ASSERT_EQ(allreduce(0, 5), TRIB_SUCCESS);
  is_captured = true;
  refused_on = 1;
  EXPECT_EQ(allreduce(1, 5), TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "the kernel was refused");
  out_of_memory_on = 1;
  EXPECT_EQ(allreduce(1, 5), TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "out of memory");
  without_kernels = 1;
  EXPECT_EQ(trib_broadcast(memory, memory, 5, TRIB_FLOAT32, 0, comms[1], nullptr),
            TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(), "no room for kernels");
  out_of_memory_on = without_kernels = -1;
  is_captured = false;
  trib_result error = TRIB_ERROR_INTERNAL;
  for (trib_comm* const comm : comms) {
    EXPECT_EQ(trib_comm_query(comm, &error), TRIB_SUCCESS);
    EXPECT_EQ(error, TRIB_SUCCESS) << trib_last_error();
  }
  EXPECT_EQ(allreduce(1, 5), TRIB_ERROR_DEVICE) << "which peers would wait for";
}

TEST_F(StreamRanks, ACopyThatIsRefusedIsNotTheEndOfWhoIsAlone) {
  trib_comm* alone = nullptr;
  ASSERT_EQ(trib_comm_create(&alone, 0, 1, exchange, nullptr), TRIB_SUCCESS);
  alignas(16) std::byte out[16];
  const auto copy = [&] {
    return trib_allreduce(memory, out, 4, TRIB_FLOAT32, TRIB_SUM, alone, nullptr);
  };
  refused_on = 0;
  EXPECT_EQ(copy(), TRIB_ERROR_DEVICE);
  EXPECT_STREQ(trib_last_error(), "the copy was refused");
  refused_on = -1;
  trib_result error = TRIB_ERROR_INTERNAL;
  EXPECT_EQ(trib_comm_query(alone, &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_SUCCESS);
  EXPECT_EQ(copy(), TRIB_SUCCESS);
  EXPECT_EQ(trib_comm_destroy(alone), TRIB_SUCCESS);
}

TEST_F(StreamRanks, WhoAsksTheDriverHoldsUpNoAbort) {
  is_driver_busy = true;
  std::thread asks([this] {
    trib_result error = TRIB_SUCCESS;
    EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
    EXPECT_EQ(error, TRIB_ERROR_UNUSABLE) << trib_last_error();
  });
  while (!is_driver_asked) std::this_thread::yield();
  EXPECT_EQ(trib_comm_abort(comms[0]), TRIB_SUCCESS);
  asks.join();
}

TEST_F(StreamRanks, WhoAsksTheDriverHasAskedThePeers) {
  EXPECT_EQ(trib_comm_abort(comms[1]), TRIB_SUCCESS);
  is_driver_busy = true;
  trib_result error = TRIB_SUCCESS;
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_ERROR_PEER) << trib_last_error();
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_ERROR_PEER) << "known by now";
  EXPECT_FALSE(is_driver_asked);
}

TEST_F(StreamRanks, WhoAsksWaitsForNoLaunch) {
  is_launch_stuck = true;
  std::thread launches([this] { EXPECT_EQ(allreduce(0, 5), TRIB_SUCCESS); });
  while (!is_launching) std::this_thread::yield();
  is_driver_busy = true;  // with that
  trib_result error = TRIB_ERROR_INTERNAL;
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_SUCCESS) << trib_last_error();
  EXPECT_FALSE(is_driver_asked);
  is_launch_stuck = is_driver_busy = false;
  launches.join();
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_TRUE(is_driver_asked) << "nobody launches any more";
  EXPECT_EQ(allreduce(1, 5), TRIB_SUCCESS);
}

TEST_F(StreamRanks, BroadcastsFromOtherRootsAreNamed) {
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(trib_broadcast(memory, memory, 5, TRIB_FLOAT32, rank, comms[rank], nullptr),
              TRIB_SUCCESS);
  trib_result error = TRIB_SUCCESS;
  EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_EQ(error, TRIB_ERROR_ARGUMENT);
  EXPECT_STREQ(trib_last_error(),
               "ranks disagree: rank 0 calls trib_broadcast of 5 elements of 4 bytes from root 0, "
               "rank 1 calls trib_broadcast of 5 elements of 4 bytes from root 1");
}

/// Which has no GPU, and must leave its parent's communicator alone.
TEST_F(StreamRanks, AChildHasNoCommunicator) {
  ASSERT_EQ(allreduce(0, 5), TRIB_SUCCESS);
  trib_request* request = nullptr;
  ASSERT_EQ(trib_allreduce_init(memory, memory, 5, TRIB_FLOAT32, TRIB_SUM, comms[0], &request),
            TRIB_SUCCESS);
  std::array<trib_registration*, kRanks> registrations{};
  as_threads([&](int rank) {
    EXPECT_EQ(trib_register(comms[rank], memory, sizeof memory, &registrations[rank]),
              TRIB_SUCCESS);
  });
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    trib_registration* another = nullptr;
    trib_result error = TRIB_SUCCESS;
    const trib_result results[] = {allreduce(0, 5),
                                   trib_start(request, nullptr),
                                   trib_register(comms[0], memory, sizeof memory, &another),
                                   trib_deregister(registrations[0]),
                                   trib_comm_query(comms[0], &error),
                                   trib_comm_abort(comms[0]),
                                   trib_comm_destroy(comms[0])};
    for (const trib_result result : results)
      if (result != TRIB_ERROR_ARGUMENT) ::_exit(1);
    ::_exit(std::strcmp(trib_last_error(),
                        "the communicator is that of the process that forked this one") == 0
                ? 0
                : 2);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(allreduce(1, 5), TRIB_SUCCESS);
  for (trib_comm* const comm : comms) {
    trib_result error = TRIB_ERROR_INTERNAL;
    EXPECT_EQ(trib_comm_query(comm, &error), TRIB_SUCCESS);
    EXPECT_EQ(error, TRIB_SUCCESS) << trib_last_error();
  }
  EXPECT_EQ(trib_request_free(request), TRIB_SUCCESS);
  for (trib_registration* const its : registrations) EXPECT_EQ(trib_deregister(its), TRIB_SUCCESS);
}

/// Its peers' kernels would wait for it for half an hour.
TEST_F(StreamRanks, WhoDestroysACallEarlyIsNoticed) {
  are_kernels_waiting = true;
  ASSERT_EQ(allreduce(0, 5), TRIB_SUCCESS);
  ASSERT_EQ(allreduce(1, 5), TRIB_SUCCESS);
  ASSERT_EQ(allreduce(0, 6), TRIB_SUCCESS);
  std::thread leaves([this] {
    are_kernels_waiting = false;
    EXPECT_NE(trib_comm_destroy(comms[1]), TRIB_SUCCESS);
    EXPECT_NE(std::string(trib_last_error()).find("and rank 1 makes no more"), std::string::npos)
        << trib_last_error();
  });
  const auto start = std::chrono::steady_clock::now();
  trib_result error = TRIB_SUCCESS;
  while (error == TRIB_SUCCESS &&
         std::chrono::steady_clock::now() - start < std::chrono::minutes(2))
    EXPECT_EQ(trib_comm_query(comms[0], &error), TRIB_SUCCESS);
  EXPECT_NE(std::string(trib_last_error()).find("and rank 1 makes no more"), std::string::npos)
      << trib_last_error();
  EXPECT_NE(trib_comm_destroy(comms[0]), TRIB_SUCCESS);
  leaves.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  comms[0] = comms[1] = nullptr;
}

TEST_F(StreamRanks, WhoDestroysHearsWhatWasKnown) {
  EXPECT_EQ(trib_comm_abort(comms[0]), TRIB_SUCCESS);
  EXPECT_EQ(trib_comm_destroy(comms[0]), TRIB_ERROR_UNUSABLE);
  comms[0] = nullptr;
}

TEST_F(StreamRanks, WhoDestroysHearsWhy) {
  are_kernels_waiting = true;
  ASSERT_EQ(allreduce(0, 5), TRIB_SUCCESS);
  ASSERT_EQ(allreduce(1, 6), TRIB_SUCCESS);
  as_threads([this](int rank) {
    EXPECT_NE(trib_comm_destroy(comms[rank]), TRIB_SUCCESS);
    EXPECT_NE(std::string(trib_last_error()).find("disagree"), std::string::npos)
        << trib_last_error();
    comms[rank] = nullptr;
  });
}

}  // namespace

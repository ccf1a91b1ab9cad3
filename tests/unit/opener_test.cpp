// SPDX-License-Identifier: BSD-3-Clause
// Programs that make nothing but nonblocking reductions of what is on devices: these get a channel
// of their own meanwhile. The devices are stand-ins, whose memory and kernels are the host's.
#include "comm/opener.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/calls.hpp"
#include "support/stand_in_device.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

using test::Part;
using test::random_call;
using test::run_ranks;

/// The buffers that are on devices, and on which.
class Memories {
 public:
  void set(const void* pointer, std::uint64_t device) {
    const std::lock_guard lock(mutex_);
    if (device == 0)
      device_of_.erase(pointer);
    else if (pointer != nullptr)
      device_of_[pointer] = device;
  }
  std::uint64_t device_of(const void* pointer) const {
    const std::lock_guard lock(mutex_);
    const auto found = device_of_.find(pointer);
    return found == device_of_.end() ? 0 : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void*, std::uint64_t> device_of_;
} memories;

std::atomic<int> launches, openings;
std::atomic<bool> are_in_use{true}, is_memory_short{false};

/// What a rank's opening does before it takes part.
std::function<void(int rank)> before_opening;

class OnHost final : public Program {
 public:
  OnHost(HostChannel& channel, const Schedule& own) : channel_(channel), real_(channel.load(own)) {}
  std::size_t fit(bool) const override { return real_->fit(false); }
  Operation& launch(const Arguments& arguments) override {
    launches.fetch_add(1);
    Arguments its = arguments;
    its.is_large = its.is_contiguous = false;
    its.binding = nullptr;
    channel_.announce(its.signature);
    return real_->launch(its);
  }

 private:
  HostChannel& channel_;
  std::unique_ptr<Program> real_;
};

class StandInChannel final : public DeviceChannel {
 public:
  StandInChannel(std::unique_ptr<HostChannel> channel, int rank)
      : channel_(std::move(channel)), rank_(rank) {}
  std::unique_ptr<Program> load(const std::vector<Schedule>& all, Engine) override {
    return std::make_unique<OnHost>(*channel_, all[static_cast<std::size_t>(rank_)]);
  }
  bool reserve(Engine, std::string&) override { return false; }
  bool has(Engine) const override { return false; }
  void poison(const Error& why) noexcept override { channel_->poison(why); }
  Memory where(const void* pointer) const override;
  int max_blocks() const override { return 1; }
  void* allocate(std::size_t) override { return nullptr; }
  void free(void*) noexcept override {}
  bool is_capturing(Stream) const override { return false; }
  void check_result() const override {}
  void check_stream() override {}
  void drain() override {}

 private:
  std::unique_ptr<HostChannel> channel_;
  const int rank_;
};

class StandIn final : public test::StandInDevice {
 public:
  Memory where(const void* pointer) const override {
    if (pointer == nullptr) return Memory::none;
    return memories.device_of(pointer) != 0 ? Memory::device : Memory::host;
  }
  bool is_in_use(std::span<const void* const>) const override { return are_in_use; }
  std::unique_ptr<DeviceChannel> open(Bootstrap& bootstrap, const Config& config, const void*,
                                      std::string& why) override {
    why = "no memory";
    if (is_memory_short) return nullptr;
    openings.fetch_add(1);
    auto channel = host_backend().open(bootstrap, config, why);
    if (!channel) return nullptr;
    return std::make_unique<StandInChannel>(std::move(channel), bootstrap.rank());
  }
  Opening opening(const void* pointer) override {
    return [this, pointer](Bootstrap& bootstrap, const Config& config, std::string& why) {
      if (before_opening) before_opening(bootstrap.rank());
      return open(bootstrap, config, pointer, why);
    };
  }
  std::uint64_t device_of(const void* pointer) const override {
    return memories.device_of(pointer);
  }
} stand_in;

Memory StandInChannel::where(const void* pointer) const { return stand_in.where(pointer); }

}  // namespace

/// In place of the library's, which asks for it by name, and finds the program's first.
DeviceBackend* device_backend() { return &stand_in; }

/// Likewise: the ranks are threads of one process here, and each has a kernel of a call.
void DeviceCall::begin() { is_first_ = true; }

namespace {

/// Buffers of one call, on a device as long as this lives.
struct Posted {
  Posted(const test::Call& call, int rank, int size, std::uint64_t device)
      : part(call, rank, size) {
    for (const void* const pointer : {part.request.in, const_cast<const void*>(part.request.out)})
      memories.set(pointer, device);
  }
  ~Posted() {
    for (const void* const pointer : {part.request.in, const_cast<const void*>(part.request.out)})
      memories.set(pointer, 0);
  }
  Part part;
  Task task;
};

void expect(const std::string& wrong) {
  if (!wrong.empty()) throw std::runtime_error(wrong);
}

/// Posts `count` random calls, `depth` of them under way at most.
void post_many(Communicator& communicator, std::mt19937_64& random, int count, std::size_t depth,
               const std::function<std::uint64_t(int number)>& device_of) {
  std::deque<std::unique_ptr<Posted>> under_way;
  const auto end_one = [&] {
    communicator.wait(under_way.front()->task);
    expect(under_way.front()->part.check());
    under_way.pop_front();
  };
  const int rank = communicator.rank(), size = communicator.size();
  for (int i = 0; i < count; ++i) {
    test::Call call = random_call(random, size, 3000);
    call.misalign = 0;  // on devices, elements are aligned
    under_way.push_back(std::make_unique<Posted>(call, rank, size, device_of(i)));
    communicator.post(under_way.back()->task, under_way.back()->part.request);
    if (under_way.size() > depth) end_one();
  }
  while (!under_way.empty()) end_one();
}

/// Goes on, on all ranks alike, until kernels have served some.
void post_until_served(Communicator& communicator, Bootstrap& bootstrap, std::mt19937_64& random,
                       const std::function<std::uint64_t(int number)>& device_of) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (;;) {
    post_many(communicator, random, 20, 7, device_of);
    std::vector<int> all(static_cast<std::size_t>(communicator.size()));
    const int mine = launches.load() > 0                               ? 1
                     : Clock::now() - start > std::chrono::seconds(60) ? -1
                                                                       : 0;
    bootstrap.exchange(&mine, all.data(), sizeof mine);
    if (std::find(all.begin(), all.end(), -1) != all.end())
      throw std::runtime_error("no kernel in a minute");
    if (std::find(all.begin(), all.end(), 0) == all.end()) return;
  }
}

class Opener : public testing::Test {
 protected:
  void SetUp() override {
    launches = openings = 0;
    before_opening = nullptr;
    are_in_use = true;
    is_memory_short = false;
  }
};

void expect_none(const std::vector<std::string>& errors) {
  test::expect_no_errors(errors, "posted");
}

TEST_F(Opener, NonblockingOnesAloneGetDevices) {
  for (const int size : {2, 3, 5}) {
    for (const std::size_t depth : {0, 3, 40}) {
      SetUp();
      expect_none(run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
        Bootstrap& between = *bootstrap;
        Communicator communicator(std::make_unique<test::BorrowedBootstrap>(between), Config{});
        if (!communicator.open_background()) throw std::runtime_error("no lanes");
        std::mt19937_64 random(depth + static_cast<unsigned>(size));
        const auto own = [&](int) { return static_cast<std::uint64_t>(rank) + 1; };
        post_many(communicator, random, 60, depth, own);
        post_until_served(communicator, between, random, own);
        post_many(communicator, random, 100, depth, own);
      }));
      EXPECT_EQ(openings, size);
      EXPECT_GT(launches, 0);
    }
  }
}

TEST_F(Opener, ResultsDoNotDependOnWhenItIsOpen) {
  // The first time that takes long, so that most are staged.
  std::vector<std::vector<std::byte>> results[2];
  for (const bool is_slow : {true, false}) {
    SetUp();
    std::atomic<bool> may_open = !is_slow;
    before_opening = [&](int) {
      while (!may_open) std::this_thread::yield();
    };
    auto& kept = results[is_slow];
    expect_none(run_ranks(4, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
      if (!communicator.open_background()) throw std::runtime_error("no lanes");
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<float> in(50000), out(in.size());
      for (float& value : in) value = static_cast<float>(random()) / 3e9f - 0.5f;
      memories.set(in.data(), static_cast<std::uint64_t>(rank) + 1);
      memories.set(out.data(), static_cast<std::uint64_t>(rank) + 1);
      for (int i = 0; i < 200; ++i) {
        Request request;
        request.count = 1 + static_cast<std::size_t>(i) * 249;
        request.in = in.data();
        request.out = out.data();
        Task task;
        communicator.post(task, request);
        communicator.wait(task);
        const auto* const begin = reinterpret_cast<const std::byte*>(out.data());
        if (rank == 0) kept.emplace_back(begin, begin + request.count * sizeof(float));
        if (!is_slow && i == 40) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      }
      may_open = true;
      memories.set(in.data(), 0);
      memories.set(out.data(), 0);
    }));
    EXPECT_EQ(launches > 0, !is_slow);
  }
  ASSERT_EQ(results[0].size(), results[1].size());
  for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_EQ(results[0][i], results[1][i]) << i;
}

TEST_F(Opener, WhatABarrierFindsDoesNotDependOnHowFarTheyAre) {
  for (const bool is_slow : {true, false}) {
    SetUp();
    are_in_use = false;
    expect_none(run_ranks(4, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
      if (!communicator.open_background()) throw std::runtime_error("no lanes");
      char mine = 0, all[4];
      bootstrap->exchange(&mine, all, 1);
      are_in_use = true;
      std::deque<Posted> posted;
      for (int i = 0; i < 16; ++i) {
        test::Call call;
        call.count = i < 12 ? 500000 : 200;  // the last one asks, behind others in its lane
        posted.emplace_back(call, rank, 4, static_cast<std::uint64_t>(rank) + 1);
        communicator.post(posted.back().task, posted.back().part.request);
      }
      if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (communicator.wants_to_settle()) communicator.settle_devices();  // as MPI_Barrier does
      for (Posted& one : posted) {
        communicator.wait(one.task);
        expect(one.part.check());
      }
      bootstrap->exchange(&mine, all, 1);
    }));
    EXPECT_EQ(openings, 4);
  }
}

TEST_F(Opener, NotWhereOneRankHasNoThreadForIt) {
  expect_none(run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Config config;
    config.timeout = 60;
    if (rank == 1) config.progress = Config::Progress::calls;
    Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), config);
    if (!communicator.open_background()) throw std::runtime_error("no lanes");
    std::mt19937_64 random(9);
    post_many(communicator, random, 60, 0,
              [&](int) { return static_cast<std::uint64_t>(rank) + 1; });
  }));
  EXPECT_EQ(openings, 0);
}

TEST_F(Opener, NotWhereSomeBufferIsOnTheHostOrRanksShareADevice) {
  for (const bool is_shared : {false, true}) {
    expect_none(run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
      if (!communicator.open_background()) throw std::runtime_error("no lanes");
      std::mt19937_64 random(3);
      post_many(communicator, random, 600, 9, [&](int) -> std::uint64_t {
        return is_shared ? 1 + static_cast<unsigned>(rank) / 2 : rank == 1 ? 0 : 1;
      });
    }));
    EXPECT_EQ(openings, 0);
  }
}

TEST_F(Opener, LaterOnesAreAskedAgain) {
  expect_none(run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Bootstrap& between = *bootstrap;
    Communicator communicator(std::make_unique<test::BorrowedBootstrap>(between), Config{});
    if (!communicator.open_background()) throw std::runtime_error("no lanes");
    std::mt19937_64 random(4);
    const auto own = [&](int) { return static_cast<std::uint64_t>(rank) + 1; };
    post_many(communicator, random, 100, 9, [](int) { return 0; });
    post_until_served(communicator, between, random, own);
  }));
  EXPECT_EQ(openings, 2);
}

TEST_F(Opener, BlockingOnesHaveTheirs) {
  expect_none(run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Bootstrap& between = *bootstrap;
    Communicator communicator(std::make_unique<test::BorrowedBootstrap>(between), Config{});
    if (!communicator.open_background()) throw std::runtime_error("no lanes");
    std::mt19937_64 random(5);
    const auto own = [&](int) { return static_cast<std::uint64_t>(rank) + 1; };
    const auto run_some = [&] {
      for (int i = 0; i < 20; ++i) {
        test::Call call = random_call(random, 3, 3000);
        call.misalign = 0;
        Posted posted(call, rank, 3, own(0));
        communicator.run(posted.part.request);
        expect(posted.part.check());
      }
    };
    post_many(communicator, random, 17, 9, own);
    run_some();
    post_until_served(communicator, between, random, own);
    run_some();
    post_many(communicator, random, 100, 9, own);
  }));
  EXPECT_EQ(openings, 6);
}

TEST_F(Opener, StaysWhereBlockingOnesGetNone) {
  expect_none(run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Bootstrap& between = *bootstrap;
    Communicator communicator(std::make_unique<test::BorrowedBootstrap>(between), Config{});
    if (!communicator.open_background()) throw std::runtime_error("no lanes");
    std::mt19937_64 random(10);
    const auto own = [&](int) { return static_cast<std::uint64_t>(rank) + 1; };
    post_until_served(communicator, between, random, own);
    is_memory_short = true;
    for (int i = 0; i < 3; ++i) {
      test::Call call;
      call.count = 100;
      Posted posted(call, rank, 2, own(0));
      communicator.run(posted.part.request);
      expect(posted.part.check());
    }
    if (rank == 0) launches = 0;
    post_until_served(communicator, between, random, own);
  }));
}

TEST_F(Opener, OneThatFailsLeavesAllOnTheHost) {
  before_opening = [](int rank) {
    if (rank == 1) throw Error(Code::device, "not here");
  };
  expect_none(run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
    if (!communicator.open_background()) throw std::runtime_error("no lanes");
    std::mt19937_64 random(6);
    for (int i = 0; i < 10; ++i) {
      post_many(communicator, random, 60, 9,
                [&](int) { return static_cast<std::uint64_t>(rank) + 1; });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }));
  EXPECT_EQ(launches, 0);
}

TEST_F(Opener, NobodyWaitsForOneThatDoesNotCome) {
  std::atomic<int> freed = 0;
  before_opening = [&](int rank) {
    while (rank == 0 && freed < 2) std::this_thread::yield();
  };
  expect_none(run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    {
      Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
      if (!communicator.open_background()) throw std::runtime_error("no lanes");
      std::mt19937_64 random(7);
      post_many(communicator, random, 60, 9,
                [&](int) { return static_cast<std::uint64_t>(rank) + 1; });
    }
    ++freed;
  }));
  EXPECT_EQ(launches, 0);
}

TEST_F(Opener, WhatWaitsForTheAnswerFailsWithTheRest) {
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
    if (!communicator.open_background()) throw std::runtime_error("no lanes");
    std::mt19937_64 random(8);
    const auto own = [&](int) { return static_cast<std::uint64_t>(rank) + 1; };
    post_many(communicator, random, 15, 3, own);
    if (rank == 1) {
      communicator.give_up(Error(Code::device, "rank 1 gave up"));
      return;
    }
    std::vector<std::unique_ptr<Posted>> posted;
    for (int i = 0; i < 10; ++i) {
      test::Call call;
      call.count = 100;
      posted.push_back(std::make_unique<Posted>(call, rank, 2, 1));
      communicator.post(posted.back()->task, posted.back()->part.request);
    }
    for (std::size_t i = posted.size(); i-- > 0;) {
      try {
        communicator.wait(posted[i]->task);
        throw std::runtime_error("did not fail");
      } catch (const Error& error) {
        if (std::string(error.what()).find("gave up") == std::string::npos) throw;
      }
    }
  });
  expect_none(errors);
}

}  // namespace
}  // namespace trib

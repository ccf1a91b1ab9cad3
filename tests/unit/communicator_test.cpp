// SPDX-License-Identifier: BSD-3-Clause
// The whole core with ranks as threads: every algorithm x collective x root x size on the host
// backend against a plain left fold, bit by bit; stress with random delays; disagreement,
// time-outs, full memory.
#include "comm/communicator.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

#include "algorithm/registry.hpp"
#include "backend/segment.hpp"
#include "support/calls.hpp"
#include "support/disturb.hpp"
#include "support/many_cores.hpp"
#include "support/sanitizer.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

using test::Call;
using test::expect_no_errors;
using test::find_disturb;
using test::random_call;

using test::run_ranks;

Config with_algorithm(std::string_view algorithm, Config config = {}) {
  std::strncpy(config.algorithm, std::string(algorithm).c_str(), sizeof config.algorithm - 1);
  return config;
}

class EveryAlgorithm : public testing::TestWithParam<int> {};

TEST_P(EveryAlgorithm, RightOnTheHost) {
  const int size = GetParam();
  for (const Algorithm& algorithm : algorithms()) {
    for (const Config::Attach attach : {Config::Attach::automatic, Config::Attach::always}) {
      Config config = with_algorithm(algorithm.name);
      config.attach = attach;
      const auto errors = run_ranks(size, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
        Communicator communicator(std::move(bootstrap), config);
        if (communicator.declined()) throw std::runtime_error(name(*communicator.declined()));
        std::mt19937_64 random(17);
        for (int collective = 0; collective < kCollectives; ++collective)
          for (const std::size_t count : {0, 1, 2, 12, 13, 1000, 5000, 70001})
            for (const bool in_place : {false, true}) {
              Call call = random_call(random, size, 1000);
              call.collective = static_cast<Collective>(collective);
              call.count = count;
              call.in_place = in_place;
              for (std::size_t r = 0; r < call.counts.size(); ++r)
                call.counts[r] = call.collective == Collective::reduce_scatter
                                     ? (r % 3 == 1 ? 0 : count / (r + 1))
                                     : count / static_cast<std::size_t>(size);
              const std::string wrong = call.make(communicator);
              if (!wrong.empty())
                throw std::runtime_error(std::string(name(call.collective)) + " of " +
                                         std::to_string(count) + (in_place ? " in place: " : ": ") +
                                         wrong);
            }
      });
      expect_no_errors(errors, std::string(algorithm.name));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, EveryAlgorithm, testing::Values(2, 3, 4, 5, 7, 8));

/// Pages of its own, which the kernel reads for nobody.
class SecretMemory {
 public:
  explicit SecretMemory(std::size_t bytes) : bytes_(bytes) {
#ifdef SYS_memfd_secret
    const int file = static_cast<int>(::syscall(SYS_memfd_secret, 0));
#else
    const int file = -1;
#endif
    if (file < 0) return;
    if (::ftruncate(file, static_cast<off_t>(bytes)) == 0)
      at_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
  }
  ~SecretMemory() {
    if (is_there()) ::munmap(at_, bytes_);
  }
  SecretMemory(const SecretMemory&) = delete;
  SecretMemory& operator=(const SecretMemory&) = delete;
  bool is_there() const { return at_ != MAP_FAILED; }
  void* data() const { return at_; }

 private:
  const std::size_t bytes_;
  void* at_ = MAP_FAILED;
};

TEST(Communicator, MemoryThatNoSystemCallReads) {
  constexpr std::size_t kCount = 50000;
  const SecretMemory memory(kCount * sizeof(float));
  if (!memory.is_there()) GTEST_SKIP() << "no memory by memfd_secret";
  auto* const secret = static_cast<float*>(memory.data());
  float plain = 0, seen = 0;
  const auto can_read = [&seen](float* from) {
    const iovec local{&seen, sizeof seen}, remote{from, sizeof seen};
    return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) > 0;
  };
  if (!can_read(&plain)) GTEST_SKIP() << "no process_vm_readv";
  ASSERT_FALSE(can_read(secret));
  Config config;
  config.attach = Config::Attach::always;
  for (const bool in_place : {false, true}) {
    const auto errors = run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::move(bootstrap), config);
      std::vector<float> own(kCount), out(kCount);
      float* const in = rank == 1 ? secret : own.data();
      Request request;
      for (const Collective collective : {Collective::allreduce, Collective::reduce_scatter_block})
        for (const float more : {0.0F, 0.5F}) {
          std::fill(in, in + kCount, static_cast<float>(rank + 1) + more);
          request.collective = collective;
          request.count = collective == Collective::allreduce ? kCount : kCount / 3;
          request.in = in;
          request.out = in_place ? in : out.data();
          communicator.run(request);
          for (std::size_t i = 0; i < request.count; ++i)
            if (static_cast<float*>(request.out)[i] != 6 + 3 * more)
              throw std::runtime_error(std::string(name(collective)) + ": element " +
                                       std::to_string(i));
        }
      const std::string algorithm = communicator.last_algorithm();
      if (algorithm.find("attached_") != 0) throw std::runtime_error("by " + algorithm);
    });
    expect_no_errors(errors, in_place ? "in place" : "");
  }
}

TEST(Communicator, MixedCallsInARow) {
  for (const int size : {2, 3, 4, 7}) {
    const auto errors = run_ranks(size, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::move(bootstrap), Config{});
      std::mt19937_64 random(4711);
      for (int i = 0; i < test::less_if_sanitized(3000, 600); ++i) {
        const Call call = random_call(random, size, 40000);
        const std::string wrong = call.make(communicator);
        if (!wrong.empty())
          throw std::runtime_error("call " + std::to_string(i) + ", " +
                                   std::string(name(call.collective)) + ": " + wrong);
      }
    });
    expect_no_errors(errors, std::to_string(size) + " ranks");
  }
}

TEST(Communicator, ScratchWrittenPastTheCachesIsThereWhenPeersAreTold) {
  const test::WritingPast past;
  for (const int size : {2, 5}) {
    const auto errors = run_ranks(size, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
      std::vector<std::unique_ptr<Communicator>> communicators;
      for (const Algorithm& algorithm : algorithms())
        communicators.push_back(std::make_unique<Communicator>(
            std::make_unique<test::BorrowedBootstrap>(*bootstrap), with_algorithm(algorithm.name)));
      std::mt19937_64 random(815);
      for (int i = 0; i < test::less_if_sanitized(3000, 600); ++i) {
        const Call call = random_call(random, size, 40000);
        Communicator& communicator = *communicators[random() % communicators.size()];
        const std::string wrong = call.make(communicator);
        if (!wrong.empty())
          throw std::runtime_error("call " + std::to_string(i) + ", " +
                                   std::string(name(call.collective)) + " by " +
                                   communicator.last_algorithm() + ": " + wrong);
      }
    });
    expect_no_errors(errors, std::to_string(size) + " ranks");
  }
}

TEST(Communicator, ACrowdAroundOneRankIsOneForAll) {
  const test::ManyCores cores;
  for (const int in_crowd : {-1, 0, 2}) {
    const auto errors = run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::move(bootstrap), Config{}, rank == in_crowd);
      if (communicator.is_crowded() != (in_crowd >= 0)) throw std::runtime_error("not alike");
      std::mt19937_64 random(5);
      for (int i = 0; i < 200; ++i)
        if (const std::string wrong = random_call(random, 3, 40000).make(communicator);
            !wrong.empty())
          throw std::runtime_error(wrong);
    });
    expect_no_errors(errors, std::to_string(in_crowd));
  }
}

/// A call of one run is worked out once and for all; lengths that are no multiple of a cache line
/// must not take two.
TEST(Plans, ShortVectorsOfAnyLengthGoInOneRun) {
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    std::string why;
    const auto channel = host_backend().open(*bootstrap, Config{}, why);
    Group group;
    group.rank = rank;
    group.size = 2;
    group.node_of = {0, 0};
    Plans plans(group, *channel, 1, /*has_no_data=*/true);
    for (const Collective collective : {Collective::allreduce, Collective::reduce})
      for (const std::size_t count : {1, 10, 16, 17, 100, 1000, 1001, 1023}) {
        Request request;
        request.collective = collective;
        request.count = count;
        const Path& path = plans.path(plans.find(request), Route::host, group.findings());
        EXPECT_GE(path.arguments.slice, path.arguments.longest);
        EXPECT_TRUE(path.binding) << count;
      }
  });
  expect_no_errors(errors, "2 ranks");
}

/// Random delays at every signal and wait: rarely long, so that others overtake; sometimes none, so
/// that nobody is in step.
void disturb() {
  static std::atomic<unsigned> seeds{1};
  thread_local std::minstd_rand random(seeds.fetch_add(7919));
  const auto dice = random() % 4096;
  if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  if (dice < 256) std::this_thread::yield();
  if (dice < 1024)
    for (unsigned spin = random() % 64; spin > 0; --spin)
      std::atomic_signal_fence(std::memory_order_seq_cst);
}

TEST(Plans, FindingsReachThoseThatAreThere) {
  const auto errors = run_ranks(2, [](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Group group;
    group.rank = rank;
    group.size = 2;
    group.node_of = {0, 0};
    std::string why;
    const auto channel = host_backend().open(*bootstrap, group.config, why);
    ASSERT_NE(channel, nullptr) << why;
    Plans plans(group, *channel, 4, /*has_no_data=*/false);
    Request request;
    request.dtype = Dtype::i32;
    request.count = 1000;
    const auto algorithm = [&] {
      return plans.path(plans.find(request), Route::host, group.findings()).choice.algorithm->name;
    };
    EXPECT_NE(algorithm(), "two_shot");
    Finding finding;
    finding.freedom = Config::Determinism::any;
    finding.bytes = 4000;
    finding.is_default = false;
    std::strcpy(finding.best.algorithm, "two_shot");
    finding.best.slice_bytes = 256 << 10;
    group.set(group.findings().with(finding));
    EXPECT_EQ(algorithm(), "two_shot");
    // But what its caller has chosen stays.
    Choice choice = plans.choose(plans.find(request), Route::host, group.findings());
    choice.algorithm = find_algorithm("ring");
    plans.path(plans.find(request), Route::host, choice);
    group.set(Findings());
    EXPECT_EQ(algorithm(), "ring");
  });
  expect_no_errors(errors, "2 ranks");
}

TEST(Communicator, StressWithRandomDelays) {
  void (*const set)(void (*)()) = find_disturb();
  ASSERT_NE(set, nullptr);
  set(&disturb);
  // 10^5 calls over a few sizes; every algorithm gets its share through a communicator of its own.
  const std::size_t rows = algorithms().size() + 1;
  for (const int size : {2, 3, 5, 8}) {
    const auto errors = run_ranks(size, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
      std::mt19937_64 random(99);
      std::vector<std::unique_ptr<Communicator>> communicators;
      for (std::size_t row = 0; row < rows; ++row) {
        Config config = row == 0 ? Config{} : with_algorithm(algorithms()[row - 1].name);
        // The same on all ranks. Not ring and what returns, which are about scratch.
        if (row % 2 == 1 && std::string_view(config.algorithm).find("ring") == std::string::npos &&
            std::string_view(config.algorithm) != "returning_two_shot")
          config.attach = Config::Attach::always;
        communicators.push_back(std::make_unique<Communicator>(
            std::make_unique<test::BorrowedBootstrap>(*bootstrap), config));
      }
      for (int i = 0; i < test::less_if_sanitized(25000, 5000); ++i) {
        const Call call = random_call(random, size, 3000);
        const std::size_t row = random() % rows;
        const std::string wrong = call.make(*communicators[row]);
        if (!wrong.empty())
          throw std::runtime_error("call " + std::to_string(i) + ", " +
                                   std::string(name(call.collective)) + " by " +
                                   communicators[row]->last_algorithm() + ": " + wrong);
      }
    });
    expect_no_errors(errors, std::to_string(size) + " ranks");
  }
  set(nullptr);
}

/// Calls whose buffers all lie in shared heaps among others, some on the way there: long enough for
/// one pass, and not.
TEST(Communicator, MixesCallsWithMappedBuffers) {
  void (*const set)(void (*)()) = find_disturb();
  ASSERT_NE(set, nullptr);
  for (const bool is_disturbed : {false, true}) {
    set(is_disturbed ? &disturb : nullptr);
    const test::ManyCores cores(is_disturbed);  // which changes what a Reduce goes by
    for (const int size : {2, 3, 5, 8}) {
      std::atomic<int> mapped{0};
      const auto errors = run_ranks(size, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
        Communicator communicator(std::move(bootstrap), Config{});
        std::mt19937_64 random(31);
        for (int i = 0; i < test::less_if_sanitized(2000, 400); ++i) {
          Call call = random_call(random, size, 100000);
          const auto dice = random() % 4;
          call.shared = dice == 0 ? 0 : dice == 1 ? random() : ~std::uint64_t{0};
          const std::string wrong = call.make(communicator);
          if (std::string_view(communicator.last_algorithm()).starts_with("mapped_")) ++mapped;
          if (!wrong.empty())
            throw std::runtime_error("call " + std::to_string(i) + ", " +
                                     std::string(name(call.collective)) + " by " +
                                     communicator.last_algorithm() + ": " + wrong);
        }
      });
      expect_no_errors(errors, std::to_string(size) + " ranks");
      EXPECT_GT(mapped, size * 10);
    }
  }
  set(nullptr);
}

TEST(Communicator, MapsBuffersOfPersistentReductions) {
  for (const int size : {2, 3, 5}) {
    const auto errors = run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::move(bootstrap), Config{});
      std::mt19937_64 random(5);
      int mapped = 0;
      for (int i = 0; i < test::less_if_sanitized(60, 20); ++i) {
        Call call = random_call(random, size, 100000);
        call.shared = i % 5 == 0 ? 1 : ~std::uint64_t{0};
        test::Part part(call, rank, size);
        auto task = communicator.prepare(part.request);
        if (!task) throw std::runtime_error("no memory");
        for (std::uint64_t salt = 1; salt < 4; ++salt) {
          part.fill(salt);
          communicator.start(*task);
          communicator.wait(*task);
          const std::string wrong = part.check();
          if (!wrong.empty())
            throw std::runtime_error("request " + std::to_string(i) + ": " + wrong);
        }
        communicator.dismiss(std::move(task));
      }
      for (const Served& row : communicator.served())
        if (row.algorithm.starts_with("mapped_")) mapped += static_cast<int>(row.calls);
      if (mapped == 0) throw std::runtime_error("no buffers were mapped");
    });
    expect_no_errors(errors, std::to_string(size) + " ranks");
  }
}

/// Set for one thread: what it does at each of its signals and waits.
thread_local std::function<void()> at_step;
void do_at_step() {
  if (at_step) at_step();
}

/// Rank 0 gives up a call with mapped buffers and changes its input, while rank 1 has yet to fold
/// its share and rank 2 to take that.
void expect_no_sums_of_changed_input(int size, bool is_persistent) {
  Config config;
  config.timeout = 1;
  std::atomic<bool> has_changed{false};
  std::atomic<int> held{0};  // ranks that are kept from going on, or have come to an end
  std::barrier end(size);
  const auto wait_for_change = [&] {
    if (!has_changed) ++held;
    while (!has_changed) std::this_thread::yield();
  };
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  const auto stray = run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), config);
    Call call;
    call.count = 30000;
    call.shared = ~std::uint64_t{0};
    test::Part part(call, rank, size);
    auto task = is_persistent ? communicator.prepare(part.request) : nullptr;
    const auto make = [&] {
      if (!task) return communicator.run(part.request);
      communicator.start(*task);
      communicator.wait(*task);
    };
    std::string& error = errors[static_cast<std::size_t>(rank)];
    try {
      for (int i = 0; i < 4; ++i) make();
      part.fill(1);
      int steps = 0;
      const float* const last = static_cast<const float*>(part.request.out) + call.count - 1;
      const float untouched = *last;
      if (rank == 1)  // behind its first signal
        at_step = [&] {
          if (++steps == 2) wait_for_change();
        };
      if (rank == 2)  // behind its share of the work
        at_step = [&] {
          if (std::memcmp(last, &untouched, sizeof untouched) != 0) wait_for_change();
        };
      make();
      error = "none. " + part.check();
    } catch (const Error& failure) {
      error = failure.what();
    }
    at_step = nullptr;
    if (rank == 0) {
      while (held < size - 1) std::this_thread::yield();
      part.fill(2);
      has_changed = true;
    } else {
      ++held;
    }
    end.arrive_and_wait();  // peers may still write to this rank's buffers
    if (task) communicator.dismiss(std::move(task));
    if (!is_persistent && !std::string_view(communicator.last_algorithm()).starts_with("mapped_"))
      throw std::runtime_error("no buffers were mapped");
  });
  expect_no_errors(stray, std::to_string(size) + " ranks");
  EXPECT_NE(errors[0].find("TRIB_TIMEOUT"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 0 failed"), std::string::npos) << errors[1];
  for (std::size_t rank = 2; rank < errors.size(); ++rank)  // maybe a time-out of its own
    EXPECT_FALSE(errors[rank].starts_with("none")) << errors[rank];
}

TEST(Communicator, InputOfARankThatGaveUpIsNotTaken) {
  void (*const set)(void (*)()) = find_disturb();
  ASSERT_NE(set, nullptr);
  set(&do_at_step);
  expect_no_sums_of_changed_input(2, false);
  expect_no_sums_of_changed_input(3, false);
  expect_no_sums_of_changed_input(2, true);
  set(nullptr);
}

/// Rank 0 waits for rank 2, which never comes, nor fails, when rank 1 revokes the communicator;
/// that one's calls had failed for another reason before.
TEST(Communicator, WhoWaitsSeesThatAnotherRankHasRevokedIt) {
  std::promise<void> is_told;
  const std::shared_future<void> told = is_told.get_future().share();
  const auto errors = run_ranks(3, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Config config = with_algorithm("chain");
    config.timeout = 20;  // rather than for ever
    Communicator communicator(std::move(bootstrap), config);
    Call call;
    call.collective = Collective::reduce;
    call.count = 100;
    const std::string wrong = call.make(communicator);
    if (!wrong.empty()) throw std::runtime_error(wrong);
    const auto code_of_next = [&] {
      try {
        call.make(communicator);
      } catch (const Error& error) {
        return error.code();
      }
      return Code::internal;
    };
    if (rank == 0) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(code_of_next(), Code::revoked);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
      is_told.set_value();
    } else if (rank == 2) {
      told.wait();
    } else {
      communicator.give_up(Error(Code::timeout, "nobody came"));
      EXPECT_EQ(code_of_next(), Code::unusable);
      communicator.give_up(Error(Code::revoked, "revoked on rank 1"));
      EXPECT_EQ(code_of_next(), Code::revoked);
      told.wait();
    }
  });
  expect_no_errors(errors, "revoked");
}

TEST(Communicator, LeavesOfAReduceMayRunAhead) {
  const auto errors = run_ranks(3, [](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    for (std::uint64_t i = 0; i < 2000; ++i) {
      if (rank == 0 && i % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      Call call;
      call.collective = Collective::reduce;
      call.count = i % 2 == 0 ? 3 : 3000;
      call.salt = i;
      const std::string wrong = call.make(communicator);
      if (!wrong.empty()) throw std::runtime_error(wrong);
    }
  });
  expect_no_errors(errors, "run ahead");
}

/// `change` makes rank 1's call differ; all ranks must get an error that names both sides.
void expect_disagreement(const std::function<void(Request&)>& change, const std::string& mine,
                         const std::string& theirs) {
  std::vector<float> in(100000, 1), out(100000);
  std::vector<std::int32_t> counts{50, 50};
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    std::vector<float> own_in(in), own_out(out);
    Request request;
    request.count = 100;
    request.counts = {counts.data(), 4};
    request.in = own_in.data();
    request.out = own_out.data();
    for (int i = 0; i < 20; ++i) communicator.run(request);
    if (rank == 1) change(request);
    std::string first;
    try {
      // A rank that needs nothing from the other (the leaf of a reduce) may go on until it has to
      // wait for it. One with nothing to reduce never has to.
      for (int i = 0; i < 20; ++i) communicator.run(request);
      if (request.count == 0) return;
    } catch (const Error& error) {
      first = error.what();
    }
    try {
      communicator.run(request);
      throw std::runtime_error("no error, or one more call after: " + first);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::unusable);
    }
    throw std::runtime_error(first);
  });
  EXPECT_NE(errors[0], "");
  for (const std::string& error : errors) {
    if (error.empty()) continue;
    EXPECT_NE(error.find("disagree"), std::string::npos) << error;
    EXPECT_NE(error.find(mine), std::string::npos) << error;
    EXPECT_NE(error.find(theirs), std::string::npos) << error;
  }
}

TEST(Communicator, DisagreementIsAnError) {
  expect_disagreement([](Request& r) { r.op = Op::max; }, "sum", "max");
  expect_disagreement([](Request& r) { r.count = 99; }, "100 f32", "99 f32");
  expect_disagreement([](Request& r) { r.count = 0; }, "100 f32", "0 f32");
  expect_disagreement([](Request& r) { r.count = 100000; }, "100 f32", "100000 f32");
  expect_disagreement([](Request& r) { r.dtype = Dtype::i32; }, "f32", "i32");
  expect_disagreement([](Request& r) { r.collective = Collective::reduce; }, "MPI_Allreduce",
                      "MPI_Reduce");
  expect_disagreement([](Request& r) { r.collective = Collective::reduce_scatter; },
                      "MPI_Allreduce", "MPI_Reduce_scatter");
}

TEST(Communicator, CallLeftToTheMpiByOneRankIsAnErrorOnTheOthers) {
  // A rank meets the others in its first calls with a user's operator, of many in some.
  for (const auto& [reason, before, is_itself_told] :
       {std::tuple(Decline::user_operator, 20, true),
        std::tuple(Decline::user_operator, 100, false),
        std::tuple(Decline::bad_argument, 100, false)}) {
    const auto errors = run_ranks(
        3, [&, reason = reason, before = before](int rank, std::unique_ptr<Bootstrap> bootstrap) {
          Communicator communicator(std::move(bootstrap), Config{});
          float in = 1, out = 0;
          Request request;
          request.count = 1;
          request.in = &in;
          request.out = &out;
          communicator.run(request);
          const auto leave = [&](Collective collective, int root) {
            communicator.note_declined(collective, root, Form::blocking, reason);
          };
          for (int i = 0; i < before; ++i) {
            leave(Collective::allreduce, 0);
            leave(Collective::reduce, i % 3);
          }
          leave(Collective::reduce, 3);  // that the MPI will refuse
          if (rank == 1)
            leave(Collective::allreduce, 0);
          else
            communicator.run(request);
        });
    for (int rank = 0; rank < 3; ++rank) {
      const bool is_told = rank != 1 || is_itself_told;
      const std::string& error = errors[static_cast<std::size_t>(rank)];
      EXPECT_EQ(error.find("left to the MPI") != std::string::npos, is_told) << error;
    }
  }
}

TEST(Communicator, TimeOut) {
  Config config;
  config.timeout = 0.2;
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), config);
    float in = 1, out = 0;
    Request request;
    request.count = 1;
    request.in = &in;
    request.out = &out;
    if (rank == 0) communicator.run(request);
  });
  EXPECT_NE(errors[0].find("TRIB_TIMEOUT"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("rank 1"), std::string::npos) << errors[0];
}

TEST(Communicator, UnknownAlgorithmNamesTheAcceptedOnes) {
  const auto errors = run_ranks(2, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), with_algorithm("rung"));
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("TRIB_ALGORITHM=rung"), std::string::npos) << error;
    EXPECT_NE(error.find("ring"), std::string::npos) << error;
  }
}

TEST(Communicator, SharedMemoryBudgetEndsInSmallPiecesThenInNothing) {
  const auto errors = run_ranks(2, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
    // Ranks are threads here and share the budget: about 16 communicators with a data segment, then
    // without, then none. (The first call is so long that it asks for one.)
    std::vector<std::unique_ptr<Communicator>> many;
    int declined = 0;
    for (int i = 0; i < 900; ++i) {
      auto& communicator = *many.emplace_back(std::make_unique<Communicator>(
          std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{}));
      if (communicator.declined()) {
        ++declined;
        continue;
      }
      Call call;
      call.count = i < 30 ? 1 << 21 : 30000;
      call.salt = static_cast<std::uint64_t>(i);
      const std::string wrong = call.make(communicator);
      if (!wrong.empty()) throw std::runtime_error(wrong);
    }
    if (declined == 0) throw std::runtime_error("no communicator was refused");
    many.clear();
    Communicator again(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
    if (again.declined()) throw std::runtime_error("the budget did not come back");
  });
  expect_no_errors(errors, "budget");
}

/// Those that fit without it do not take the memory for large messages before there are many.
TEST(Communicator, FewCallsTakeLittleMemory) {
  const auto errors = run_ranks(2, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    Call call;
    call.count = 1024;
    const auto make = [&](int times) {
      for (int i = 0; i < times; ++i)
        if (const std::string wrong = call.make(communicator); !wrong.empty())
          throw std::runtime_error(wrong);
    };
    make(10);
    const std::size_t before = Segment::used();
    make(900);
    EXPECT_EQ(Segment::used(), before);
    make(200);
    EXPECT_GE(Segment::used(), before + (std::size_t{1} << 20));
  });
  expect_no_errors(errors, "few calls");
}

/// Long ones count for more: seven of 1 MiB, or none of 8 MiB.
TEST(Communicator, LongCallsTakeMemorySoon) {
  const auto errors = run_ranks(2, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
    for (const auto& [count, few] :
         {std::pair{std::size_t{1} << 18, 7}, {std::size_t{1} << 21, 0}}) {
      Communicator communicator(std::make_unique<test::BorrowedBootstrap>(*bootstrap), Config{});
      Call call;
      call.count = count;
      const auto make = [&] {
        if (const std::string wrong = call.make(communicator); !wrong.empty())
          throw std::runtime_error(wrong);
      };
      Call none;
      none.count = 1;
      if (const std::string wrong = none.make(communicator); !wrong.empty())
        throw std::runtime_error(wrong);
      const std::size_t before = Segment::used();
      for (int i = 0; i < few; ++i) make();
      if (!communicator.is_crowded()) {
        EXPECT_EQ(Segment::used(), before) << count;
      }
      make();
      EXPECT_GE(Segment::used(), before + (std::size_t{1} << 20)) << count;
    }
  });
  expect_no_errors(errors, "long calls");
}

TEST(Communicator, ManyRanksOnLittleMemory) {
  // Threads share the budget: no data segment for so many, and the small one has no room for a
  // chunk per rank.
  const int size = 132;
  const auto errors = run_ranks(size, [&](int, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    for (const Collective collective : {Collective::allreduce, Collective::reduce_scatter}) {
      Call call;
      call.collective = collective;
      call.count = 600;
      call.counts.assign(static_cast<std::size_t>(size), 30);
      const std::string wrong = call.make(communicator);
      if (!wrong.empty())
        throw std::runtime_error(std::string(name(call.collective)) + ": " + wrong);
    }
  });
  expect_no_errors(errors, "many ranks");
}

/// What a rank adds in the tests of bits: rounding makes the order show.
std::vector<double> awkward_terms(int rank, std::size_t count) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) + 1);
  std::vector<double> terms(count);
  for (double& term : terms) {
    const double mantissa = static_cast<double>(random()) - 9e18;
    term = std::ldexp(mantissa, static_cast<int>(random() % 40) - 80);
  }
  return terms;
}

std::vector<double> folded_in_rank_order(int size, std::size_t count) {
  std::vector<double> sum = awkward_terms(0, count);
  for (int rank = 1; rank < size; ++rank) {
    const auto terms = awkward_terms(rank, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += terms[i];
  }
  return sum;
}

/// Sums whose bits depend on the order, to be compared bit by bit.
std::vector<double> awkward_sum(int size, std::size_t count, const Config& config,
                                Collective collective, int root = 0, bool is_shared = false,
                                const std::string& algorithm = "", bool has_data = false,
                                bool is_blocking = true) {
  std::vector<double> result;
  std::mutex mutex;
  const auto errors = run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), config);
    if (has_data) {  // the scratch for large messages is there before the call
      Call call;
      call.count = 1 << 21;
      if (const std::string wrong = call.make(communicator); !wrong.empty())
        throw std::runtime_error(wrong);
    }
    test::Bytes in, out;
    in.make(count * sizeof(double), is_shared);
    out.make(count * sizeof(double), is_shared);
    std::memcpy(in.begin(), awkward_terms(rank, count).data(), count * sizeof(double));
    Request request;
    request.collective = collective;
    request.dtype = Dtype::f64;
    request.count = count;
    request.root = root;
    request.in = in.begin();
    request.out = out.begin();
    if (!is_blocking) {
      if (!communicator.open_background()) throw std::runtime_error("nothing can be posted");
      request.form = Form::nonblocking;
      Task task;
      communicator.post(task, request);
      communicator.wait(task);
    }
    // That buffers lie in shared heaps is news at first.
    for (int i = 0; is_blocking && i < (is_shared ? 100 : 1); ++i) communicator.run(request);
    if (!algorithm.empty() && communicator.last_algorithm() != algorithm)
      throw std::runtime_error("by " + std::string(communicator.last_algorithm()));
    const std::lock_guard lock(mutex);
    if (collective == Collective::reduce && rank != root) return;
    if (result.empty()) {
      result.resize(count);
      std::memcpy(result.data(), out.begin(), count * sizeof(double));
    }
    if (std::memcmp(result.data(), out.begin(), count * sizeof(double)) != 0)
      throw std::runtime_error("ranks differ");
  });
  expect_no_errors(errors, "awkward sum");
  return result;
}

TEST(Communicator, OrderIsALeftFoldAndAllRanksAgreeBitByBit) {
  for (const int size : {2, 3, 5, 8})
    for (const std::size_t count : {1, 17, 5000, 100000}) {
      if (size == 8 && count == 100000) continue;  // it takes as long as all others
      const std::vector<double> expected = folded_in_rank_order(size, count);
      for (const Algorithm& algorithm : algorithms()) {
        for (const Collective collective : {Collective::allreduce, Collective::reduce}) {
          Config config = with_algorithm(algorithm.name);
          const auto sum = awkward_sum(size, count, config, collective);
          // Two ranks are not crowded here: the first time, long ones go in small pieces.
          const auto again = awkward_sum(size, count, config, collective, 0, false, "",
                                         /*has_data=*/size == 2 && count >= 5000);
          EXPECT_EQ(std::memcmp(sum.data(), again.data(), count * sizeof(double)), 0)
              << "run to run, " << algorithm.name;
          if (algorithm.association == Association::rank_order) {
            EXPECT_EQ(std::memcmp(sum.data(), expected.data(), count * sizeof(double)), 0)
                << algorithm.name << " " << size << " " << count;
          }
          for (const long slice : {256, 4096}) {  // other passes, same bits
            config.slice = slice;
            EXPECT_EQ(std::memcmp(sum.data(), awkward_sum(size, count, config, collective).data(),
                                  count * sizeof(double)),
                      0)
                << "slices of " << slice << ", " << algorithm.name;
          }
        }
      }
      Config config;
      config.determinism = Config::Determinism::order;
      EXPECT_EQ(std::memcmp(awkward_sum(size, count, config, Collective::allreduce).data(),
                            expected.data(), count * sizeof(double)),
                0);
    }
}

/// Vectors of long Reduces travel from rank to rank where each has a core, and are folded in the
/// same order where buffers lie in memory that all have mapped.
/// And whether or not each rank has a core, or waits at once.
TEST(Communicator, LongVectorsHaveTheSameBitsWhereverBuffersLie) {
  static constexpr std::size_t kCount = 150000;
  const auto compare = [](Collective collective, int size, int root) {
    const auto bits = [&](bool has_cores, bool is_shared, const char* algorithm) {
      const test::ManyCores cores(has_cores);
      return awkward_sum(size, kCount, Config{}, collective, root, is_shared, algorithm);
    };
    const auto sum = bits(true, false, "ring");
    ASSERT_EQ(sum.size(), kCount);
    // Three ranks: in rank order to the last one, as two terms may change places.
    if (size > 3) {
      EXPECT_NE(sum, folded_in_rank_order(size, kCount));
    }
    EXPECT_TRUE(sum == bits(true, true, "mapped_two_shot_as_ring"))
        << name(collective) << ", " << size << " ranks, root " << root;
    {
      const test::ManyCores cores;
      EXPECT_TRUE(sum == awkward_sum(size, kCount, Config{}, collective, root, false, "", false,
                                     /*is_blocking=*/false))
          << name(collective) << ", " << size << " ranks, root " << root;
    }
    if (std::thread::hardware_concurrency() >= static_cast<unsigned>(size)) return;
    EXPECT_TRUE(sum == bits(false, false, "two_shot_as_ring"))
        << name(collective) << ", " << size << " ranks, root " << root;
  };
  for (const int size : {3, 5, 8, 9})
    for (const int root : {0, 1, size - 1}) compare(Collective::reduce, size, root);
  compare(Collective::allreduce, 9, 0);
}

}  // namespace
}  // namespace trib

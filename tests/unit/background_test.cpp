// SPDX-License-Identifier: BSD-3-Clause
// Reductions that are posted, started, tested and waited for, in every order that is allowed.
#include "comm/background.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <barrier>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "backend/segment.hpp"
#include "base/rest.hpp"
#include "support/calls.hpp"
#include "support/disturb.hpp"
#include "support/many_cores.hpp"
#include "support/sanitizer.hpp"
#include "support/thread_ranks.hpp"

namespace trib {

/// What a thread does before and after the first diagnosis that it makes.
struct Pause {
  std::function<void()> before, after;
};
thread_local Pause* next_pause = nullptr;

/// Stands before the library's own.
void Background::diagnose(const Task& task, int peer) {
  using Original = void (*)(Background*, const Task&, int);
  static const auto original =
      reinterpret_cast<Original>(dlsym(RTLD_NEXT, "_ZN4trib10Background8diagnoseERKNS_4TaskEi"));
  Pause* const pause = std::exchange(next_pause, nullptr);
  if (pause) pause->before();
  // Whatever comes of it.
  const auto after = std::shared_ptr<void>(nullptr, [&](void*) {
    if (pause) pause->after();
  });
  original(this, task, peer);
}

namespace {

using test::Call;
using test::expect_no_errors;
using test::Part;
using test::random_call;
using test::run_ranks;

void expect(const std::string& wrong) {
  if (!wrong.empty()) throw std::runtime_error(wrong);
}

struct Posted {
  std::unique_ptr<Part> part;
  Task task;
};

/// A random order that differs between the ranks.
std::vector<std::size_t> own_order(std::size_t count, int rank, unsigned salt) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::mt19937 random(salt * 1000 + static_cast<unsigned>(rank));
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

/// No thread can be made meanwhile: there is no room for a stack.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 50);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

/// Of the process, like its helper: the first test, or else there is one.
TEST(Background, DoesWithoutAHelper) {
  std::unique_ptr<NoThreads> no_threads;
  std::barrier ready(2);
  expect_no_errors(run_ranks(2,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), Config{});
                               ASSERT_TRUE(communicator.open_background());
                               if (rank == 0) no_threads = std::make_unique<NoThreads>();
                               ready.arrive_and_wait();
                               EXPECT_THROW(std::thread([] {}).join(), std::system_error);
                               std::mt19937_64 random(7);
                               std::vector<Posted> posted(5);
                               for (Posted& one : posted) {
                                 one.part =
                                     std::make_unique<Part>(random_call(random, 2, 900), rank, 2);
                                 communicator.post(one.task, one.part->request);
                               }
                               sigset_t blocked;
                               pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
                               EXPECT_FALSE(sigismember(&blocked, SIGINT));
                               for (Posted& one : posted) {
                                 communicator.wait(one.task);
                                 expect(one.part->check());
                               }
                             }),
                   "posted");
}

class Sizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Background, Sizes, testing::Values(2, 3, 5, 8));

TEST_P(Sizes, ManyInFlightCompletedInAnyOrder) {
  const int size = GetParam();
  expect_no_errors(run_ranks(size,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), Config{});
                               ASSERT_TRUE(communicator.open_background());
                               std::mt19937_64 random(5);
                               for (unsigned round = 0; round < 20; ++round) {
                                 const std::size_t count = round % 4 == 3 ? 300 : 1 + round;
                                 std::vector<Posted> posted(count);
                                 for (Posted& one : posted) {
                                   one.part = std::make_unique<Part>(
                                       random_call(random, size, 9000), rank, size);
                                   communicator.post(one.task, one.part->request);
                                   if (random() % 8 == 0)  // a blocking one in between
                                     expect(random_call(random, size, 500).make(communicator));
                                 }
                                 for (const std::size_t i : own_order(count, rank, round)) {
                                   if (i % 3 == 0)
                                     while (!communicator.test(posted[i].task)) {
                                     }
                                   else
                                     communicator.wait(posted[i].task);
                                   expect(posted[i].part->check());
                                 }
                               }
                             }),
                   "posted");
}

/// As where yielding the core does not do: in blocking calls, and in waits for those that go on
/// meanwhile, in whose lanes it is the sleeper's turn at times. (That sleepers are woken is in
/// meeting_test: here they would wake by themselves.)
TEST_P(Sizes, RightWhileRanksSleep) {
  const int size = GetParam();
  Communicator::naps_left = 1 << 30;
  const auto errors = run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{}, /*is_amid_crowd=*/true);
    ASSERT_TRUE(communicator.open_background());
    std::mt19937_64 random(11);
    for (int round = 0; round < test::less_if_sanitized(150, 30); ++round) {
      std::vector<Posted> posted(random() % 4);
      for (Posted& one : posted) {
        one.part = std::make_unique<Part>(random_call(random, size, 20000), rank, size);
        communicator.post(one.task, one.part->request);
      }
      for (int i = 0; i < 3; ++i) expect(random_call(random, size, 40000).make(communicator));
      for (const std::size_t i : own_order(posted.size(), rank, static_cast<unsigned>(round))) {
        communicator.wait(posted[i].task);
        expect(posted[i].part->check());
      }
    }
  });
  const int left = Communicator::naps_left.exchange(0);
  expect_no_errors(errors, "asleep");
  EXPECT_LT(left, 1 << 30);
}

/// As where something else computes on the cores of ranks that are not crowded: they sleep in long
/// waits, of which there are many here.
TEST_P(Sizes, RightWhileCoresAreTaken) {
  const int size = GetParam();
  const test::ManyCores many_cores;
  Rest::taken_core = -1;
  Rest::taken_until = std::chrono::steady_clock::duration::max();
  const auto errors = run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    ASSERT_FALSE(communicator.is_crowded());
    ASSERT_TRUE(communicator.open_background());
    std::mt19937_64 random(12), own(static_cast<unsigned>(rank));
    for (int round = 0; round < test::less_if_sanitized(100, 20); ++round) {
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      expect(random_call(random, size, 40000).make(communicator));
      Posted posted;
      posted.part = std::make_unique<Part>(random_call(random, size, 20000), rank, size);
      communicator.post(posted.task, posted.part->request);
      communicator.wait(posted.task);
      expect(posted.part->check());
    }
  });
  Rest::taken_until = std::chrono::steady_clock::duration::zero();
  expect_no_errors(errors, "taken");
}

/// Seconds of this thread's in which it ran, while it lives.
class Ran {
 public:
  explicit Ran(double& seconds) : seconds_(seconds) { seconds_ -= now(); }
  ~Ran() { seconds_ += now(); }
  Ran(const Ran&) = delete;
  Ran& operator=(const Ran&) = delete;

 private:
  static double now() {
    timespec time;
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  double& seconds_;
};

/// Ranks do sleep then, and time limits hold.
TEST(Background, LimitsHoldWhileCoresAreTaken) {
  const test::ManyCores many_cores;
  Rest::taken_core = -1;
  Rest::taken_until = std::chrono::steady_clock::duration::max();
  const auto begin = std::chrono::steady_clock::now();
  double ran = 0;
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Config config;
    config.timeout = 0.4;
    Communicator communicator(std::move(bootstrap), config);
    test::Call call;
    call.count = 1000;
    if (rank == 0) {
      const Ran counted(ran);
      expect(call.make(communicator));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(800));
    }
  });
  Rest::taken_until = std::chrono::steady_clock::duration::zero();
  EXPECT_NE(errors.at(0).find("did not arrive within"), std::string::npos) << errors.at(0);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  EXPECT_LT(ran, 0.2);
}

TEST_P(Sizes, PersistentOnesStartInAnyOrder) {
  const int size = GetParam();
  expect_no_errors(
      run_ranks(
          size,
          [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
            Communicator communicator(std::move(bootstrap), Config{});
            std::mt19937_64 random(6);
            std::vector<std::unique_ptr<Part>> parts;
            std::vector<std::unique_ptr<Task>> tasks;
            for (int i = 0; i < 40; ++i) {
              parts.push_back(std::make_unique<Part>(random_call(random, size, 40000), rank, size));
              tasks.push_back(communicator.prepare(parts.back()->request));
              ASSERT_TRUE(tasks.back());
            }
            for (unsigned round = 0; round < 30; ++round) {
              for (std::size_t i = 0; i < parts.size(); ++i) parts[i]->fill(round * 100 + i);
              for (const std::size_t i : own_order(parts.size(), rank, round))
                communicator.start(*tasks[i]);
              for (const std::size_t i : own_order(parts.size(), rank, round + 99)) {
                communicator.wait(*tasks[i]);
                expect(parts[i]->check());
              }
              if (round % 10 == 9) {  // some go, others come
                for (std::size_t i = 0; i < 5; ++i) {
                  communicator.dismiss(std::move(tasks[i]));
                  parts[i] = std::make_unique<Part>(random_call(random, size, 300), rank, size);
                  tasks[i] = communicator.prepare(parts[i]->request);
                }
              }
            }
            for (auto& task : tasks) communicator.dismiss(std::move(task));
          }),
      "persistent");
}

TEST(Background, HundredsLeaveMemoryForOthers) {
  expect_no_errors(run_ranks(2,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), Config{});
                               std::vector<std::unique_ptr<Part>> parts;
                               std::vector<std::unique_ptr<Task>> tasks;
                               for (int i = 0; i < 500; ++i) {
                                 Call what;
                                 what.count = 16384;
                                 parts.push_back(std::make_unique<Part>(what, rank, 2));
                                 tasks.push_back(communicator.prepare(parts.back()->request));
                                 ASSERT_TRUE(tasks.back());
                               }
                               // Both ranks are threads of this process.
                               EXPECT_LE(Segment::used(), kSegmentBudget * 3 / 4);
                               for (std::size_t i = 0; i < tasks.size(); i += 100) {
                                 parts[i]->fill(i);
                                 communicator.start(*tasks[i]);
                                 communicator.wait(*tasks[i]);
                                 expect(parts[i]->check());
                               }
                               for (auto& task : tasks) communicator.dismiss(std::move(task));
                             }),
                   "hundreds");
}

std::atomic<std::uint64_t> seed{1};

/// Before every signal and wait: lets others run, for different times.
void shake() {
  thread_local std::mt19937_64 random(seed.fetch_add(1));
  switch (random() % 16) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
      break;
    case 1:
    case 2:
      std::this_thread::yield();
      break;
    default:
      break;
  }
}

TEST_P(Sizes, StressWithRandomDelaysAndAHelper) {
  const int size = GetParam();
  void (*const set)(void (*)()) = test::find_disturb();
  ASSERT_NE(set, nullptr);
  set(&shake);
  Config config;
  config.progress = Config::Progress::thread;
  expect_no_errors(
      run_ranks(
          size,
          [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
            Communicator communicator(std::move(bootstrap), config);
            ASSERT_TRUE(communicator.open_background());
            std::mt19937_64 random(7);
            std::vector<std::unique_ptr<Part>> parts;
            std::vector<std::unique_ptr<Task>> tasks;
            for (int i = 0; i < 6; ++i) {
              parts.push_back(std::make_unique<Part>(random_call(random, size, 3000), rank, size));
              tasks.push_back(communicator.prepare(parts.back()->request));
            }
            for (unsigned round = 0; round < test::less_if_sanitized(1500, 150); ++round) {
              for (std::size_t i = 0; i < parts.size(); ++i) parts[i]->fill(round * 100 + i);
              std::vector<Posted> posted(1 + random() % 6);
              for (const std::size_t i : own_order(parts.size(), rank, round))
                communicator.start(*tasks[i]);
              for (Posted& one : posted) {
                one.part = std::make_unique<Part>(random_call(random, size, 3000), rank, size);
                communicator.post(one.task, one.part->request);
              }
              expect(random_call(random, size, 3000).make(communicator));
              for (const std::size_t i : own_order(posted.size(), rank, round)) {
                communicator.wait(posted[i].task);
                expect(posted[i].part->check());
              }
              for (const std::size_t i : own_order(parts.size(), rank, round + 1)) {
                communicator.wait(*tasks[i]);
                expect(parts[i]->check());
              }
            }
            for (auto& task : tasks) communicator.dismiss(std::move(task));
          }),
      "stress");
  set(nullptr);
}

// Rank 0 looks only once its peer, which needs it several times over, is done.
TEST(Background, ALargeOneComesToAnEndAlthoughARankDoesNotLook) {
  std::atomic<bool> is_peer_done{false};
  expect_no_errors(run_ranks(2,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), Config{});
                               ASSERT_TRUE(communicator.open_background());
                               Call call;
                               call.count = 3000000;
                               Posted posted;
                               posted.part = std::make_unique<Part>(call, rank, 2);
                               communicator.post(posted.task, posted.part->request);
                               if (rank == 0) {
                                 while (!is_peer_done) std::this_thread::yield();
                               }
                               communicator.wait(posted.task);
                               expect(posted.part->check());
                               if (rank == 1) is_peer_done = true;
                             }),
                   "helper");
}

TEST(Background, RanksThatDisagreeGetAnError) {
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    ASSERT_TRUE(communicator.open_background());
    Call call;
    call.count = 10 + static_cast<std::size_t>(rank);
    Posted posted;
    posted.part = std::make_unique<Part>(call, rank, 2);
    communicator.post(posted.task, posted.part->request);
    communicator.wait(posted.task);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("MPI_Iallreduce of 10 f32"), std::string::npos) << error;
    EXPECT_NE(error.find("MPI_Iallreduce of 11 f32"), std::string::npos) << error;
  }
}

TEST(Background, OneThatARankHasNothingToDoInIsComparedToo) {
  for (const bool is_declined : {false, true}) {
    const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::move(bootstrap), Config{});
      ASSERT_TRUE(communicator.open_background());
      std::vector<Posted> posted(20);
      for (std::size_t i = 0; i < posted.size(); ++i) {
        Call call;
        // Between others, so that some find their lane busy and some do not; and then on one rank.
        const bool is_one = i % 3 == 1 || (i == 18 && rank == 1);
        call.count = is_one ? 0 : 1000;
        if (is_one && is_declined) {
          communicator.note_declined(Collective::allreduce, 0, Form::nonblocking,
                                     Decline::user_operator);
          continue;
        }
        posted[i].part = std::make_unique<Part>(call, rank, 2);
        communicator.post(posted[i].task, posted[i].part->request);
      }
      for (Posted& one : posted)
        if (one.part) communicator.wait(one.task);
    });
    EXPECT_NE(errors[0].find("disagree"), std::string::npos) << errors[0];
    EXPECT_NE(errors[0].find(is_declined ? "MPI_Iallreduce in a form" : "MPI_Iallreduce of 0 f32"),
              std::string::npos)
        << errors[0];
  }
}

TEST(Background, RanksThatPrepareDifferentThingsGetAnError) {
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    Call call;
    call.count = 10;
    Part part(call, rank, 2);
    if (rank == 0)
      communicator.prepare(part.request);
    else
      communicator.run(part.request);
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("MPI_Allreduce_init of 10 f32"), std::string::npos) << error;
}

TEST(Background, AFailureEndsEverythingThatIsUnderWay) {
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Config config;
    config.timeout = 0.2;
    Communicator communicator(std::move(bootstrap), config);
    ASSERT_TRUE(communicator.open_background());
    Call call;
    call.count = 10;
    Part first(call, rank, 2), second(call, rank, 2);
    const auto persistent = communicator.prepare(first.request);
    if (rank == 0) {  // rank 1 does neither
      Task task;
      communicator.start(*persistent);
      communicator.post(task, second.request);
      try {
        communicator.wait(task);
        ADD_FAILURE() << "no time-out";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::timeout) << error.what();
      }
      EXPECT_TRUE(persistent->is_done());
      EXPECT_THROW(communicator.wait(*persistent), Error);
      EXPECT_THROW(communicator.start(*persistent), Error);
      EXPECT_THROW(communicator.run(first.request), Error);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
    }
  });
  expect_no_errors(errors, "failure");
}

/// The sum of two ranks' `terms`, which both post with arithmetic set by `set`. That of rank
/// `first` is formed by the other's thread, which has put its own back by then.
template <class T>
std::vector<T> sum_by_another_thread(Dtype dtype, const T (&terms)[2], void (*set)(), int first,
                                     bool is_persistent) {
  Config config;
  config.progress = Config::Progress::calls;
  std::atomic<bool> is_posted{false}, is_done{false};
  std::vector<T> sums(2);
  expect_no_errors(run_ranks(2,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), config);
                               ASSERT_TRUE(communicator.open_background());
                               Request request;
                               request.dtype = dtype;
                               request.count = 1;
                               request.in = &terms[rank];
                               request.out = &sums[static_cast<std::size_t>(rank)];
                               Task posted;
                               auto persistent =
                                   is_persistent ? communicator.prepare(request) : nullptr;
                               Task& task = persistent ? *persistent : posted;
                               while (rank != first && !is_posted) std::this_thread::yield();
                               std::fenv_t before;
                               std::fegetenv(&before);
                               set();
                               if (persistent)
                                 communicator.start(task);
                               else
                                 communicator.post(task, request);
                               std::fesetenv(&before);
                               is_posted = true;
                               const Rounding usual = Rounding::of_this_thread();
                               if (rank == first) {
                                 while (!task.is_done()) std::this_thread::yield();
                                 is_done = true;
                               }
                               while (!is_done) Background::progress_all();
                               EXPECT_EQ(Rounding::of_this_thread(), usual);
                               communicator.wait(task);
                               if (persistent) communicator.dismiss(std::move(persistent));
                             }),
                   "another thread");
  return sums;
}

TEST(Background, WhoeverFormsASumRoundsAsItsCallerDoes) {
  const auto round_up = [] { std::fesetround(FE_UPWARD); };
  for (const int first : {0, 1})
    for (const bool is_persistent : {false, true}) {
      const float f32[] = {1, 1e-20f}, f32_above = std::nextafter(1.0f, 2.0f);
      EXPECT_EQ(sum_by_another_thread(Dtype::f32, f32, round_up, first, is_persistent),
                (std::vector{f32_above, f32_above}));
      const double f64[] = {1, 1e-40}, f64_above = std::nextafter(1.0, 2.0);
      EXPECT_EQ(sum_by_another_thread(Dtype::f64, f64, round_up, first, is_persistent),
                (std::vector{f64_above, f64_above}));
      const long double f80[] = {1, 1e-60L}, f80_above = std::nextafter(1.0L, 2.0L);
      EXPECT_EQ(sum_by_another_thread(Dtype::f80, f80, round_up, first, is_persistent),
                (std::vector{f80_above, f80_above}));
#if defined(__x86_64__) || defined(__aarch64__)
    // Denormal numbers are taken, and given, as zero.
#if defined(__x86_64__)
      const auto flush = [] { _mm_setcsr(_mm_getcsr() | 0x8040); };
#else
      const auto flush = [] {
        std::uint64_t control = 0;
        asm volatile("mrs %0, fpcr" : "=r"(control));
        asm volatile("msr fpcr, %0" : : "r"(control | 1u << 24));
      };
#endif
      const double denormal[] = {1e-310, 1e-310};
      EXPECT_EQ(sum_by_another_thread(Dtype::f64, denormal, flush, first, is_persistent),
                (std::vector{0.0, 0.0}));
#endif
    }
}

/// Exchanges as long as it is told to; then nobody comes in time.
class DeafBootstrap final : public Bootstrap {
 public:
  DeafBootstrap(std::unique_ptr<Bootstrap> real, const bool& is_deaf)
      : real_(std::move(real)), is_deaf_(is_deaf) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    if (is_deaf_) throw Error(Code::timeout, "not all ranks arrived");
    real_->exchange(mine, all, bytes);
  }
  void progress() override {}

 private:
  const std::unique_ptr<Bootstrap> real_;
  const bool& is_deaf_;
};

TEST(Background, WhatCannotBeSetUpEndsTheCommunicator) {
  const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    bool is_deaf = false;
    Communicator communicator(std::make_unique<DeafBootstrap>(std::move(bootstrap), is_deaf),
                              Config{});
    Call call;
    call.count = 10;
    Part part(call, rank, 2);
    communicator.run(part.request);
    is_deaf = true;
    if (rank == 0) {
      EXPECT_THROW(communicator.open_background(), Error);
      EXPECT_THROW(communicator.open_background(), Error);
    }
    communicator.run(part.request);
  });
  EXPECT_NE(errors[0].find("unusable since: not all ranks arrived"), std::string::npos)
      << errors[0];
  EXPECT_NE(errors[1].find("rank 0 failed: not all ranks arrived"), std::string::npos) << errors[1];
}

/// Threads that wait come to their first look at the clock together, when time is up.
class GatedBootstrap final : public Bootstrap {
 public:
  GatedBootstrap(std::unique_ptr<Bootstrap> real, std::barrier<>& gate)
      : real_(std::move(real)), gate_(gate) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    real_->exchange(mine, all, bytes);
  }
  void progress() override {
    if (--rounds_left != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    gate_.arrive_and_wait();
  }

  static thread_local int rounds_left;

 private:
  const std::unique_ptr<Bootstrap> real_;
  std::barrier<>& gate_;
};
thread_local int GatedBootstrap::rounds_left = 0;

// The race that this is about shows under ThreadSanitizer.
TEST(Background, ThreadsMayFailAtOnce) {
  Config config;
  config.timeout = 0.002;
  for (int round = 0; round < 20; ++round) {
    std::barrier gate(3);
    const auto errors = run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      Communicator communicator(std::make_unique<GatedBootstrap>(std::move(bootstrap), gate),
                                config);
      ASSERT_TRUE(communicator.open_background());
      if (rank == 1) return;  // it does not take part
      Call call;
      call.count = 10;
      std::vector<Posted> posted(30);
      for (Posted& one : posted) one.part = std::make_unique<Part>(call, rank, 2);
      std::vector<std::thread> waiting;
      for (std::size_t i = 0; i < 2; ++i) {
        communicator.post(posted[i].task, posted[i].part->request);
        waiting.emplace_back([&, i] {
          GatedBootstrap::rounds_left = 64;
          EXPECT_THROW(communicator.wait(posted[i].task), Error);
        });
      }
      gate.arrive_and_wait();
      try {
        for (std::size_t i = 2; i < posted.size(); ++i)
          communicator.post(posted[i].task, posted[i].part->request);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::unusable);
      }
      for (std::thread& thread : waiting) thread.join();
      communicator.run(posted[0].part->request);
    });
    EXPECT_NE(errors[0].find("unusable since: rank 1 did not arrive"), std::string::npos)
        << errors[0];
    EXPECT_EQ(errors[1], "");
  }
}

/// Two threads wait for reductions of one lane, and have both looked in vain when the peer comes.
/// That it is further than they are then proves nothing, though they see it one after the other.
TEST(Background, ThreadsThatLookTogetherDoNotTakeAPeerForGone) {
  Config config;
  config.progress = Config::Progress::calls;
  constexpr std::size_t kPosts = 9;  // the last one has the first one's lane, as has the fifth
  std::counting_semaphore<> looked(0), come(0), diagnosed(0), over(0);
  std::barrier ended(2);
  Pause of_first{[&] {
                   looked.release();
                   come.acquire();
                 },
                 [&] {
                   diagnosed.release();
                   over.acquire();
                 }};
  Pause of_last{[&] {
                  looked.release();
                  diagnosed.acquire();
                },
                [&] { over.release(); }};
  const auto body = [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), config);
    ASSERT_TRUE(communicator.open_background());
    Call call;
    call.count = 10;
    std::vector<Posted> posted(kPosts);
    const auto post = [&](Posted& one) {
      one.part = std::make_unique<Part>(call, rank, 2);
      communicator.post(one.task, one.part->request);
    };
    const auto wait = [&](Posted& one, Pause& pause) {
      next_pause = &pause;
      EXPECT_NO_THROW(communicator.wait(one.task));
      EXPECT_EQ(one.part->check(), "");
    };
    if (rank == 0) {
      for (Posted& one : posted) post(one);
      std::thread first([&] { wait(posted.front(), of_first); });
      wait(posted.back(), of_last);
      first.join();
    } else {
      looked.acquire();
      looked.acquire();
      for (std::size_t i = 0; i + 1 < kPosts; ++i) post(posted[i]);
      come.release();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      post(posted.back());
    }
    for (Posted& one : posted) communicator.wait(one.task);
    ended.arrive_and_wait();
  };
  expect_no_errors(run_ranks(2, body), "together");
}

/// On two ranks, with a short reduction of its own.
void on_two_ranks(const char* what, const std::function<void(Communicator&, Part&)>& body) {
  const auto rank_body = [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    Communicator communicator(std::move(bootstrap), Config{});
    Call call;
    call.count = 3;
    Part part(call, rank, 2);
    body(communicator, part);
  };
  expect_no_errors(run_ranks(2, rank_body), what);
}

long resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) return std::stol(line.substr(6));
  return -1;
}

TEST(Background, AMillionStartsLeaveNothingBehind) {
  on_two_ranks("starts", [](Communicator& communicator, Part& part) {
    auto task = communicator.prepare(part.request);
    const auto start = [&](int times) {
      for (int i = 0; i < times; ++i) {
        communicator.start(*task);
        communicator.wait(*task);
      }
    };
    start(1000);
    const long before = resident_kib();
    start(test::less_if_sanitized(1000000, 5000));
    const long grown = resident_kib() - before;
    expect(part.check());
    // Of both ranks.
    EXPECT_LE(grown, test::less_if_sanitized(1024, 1 << 20));
    EXPECT_GT(before, 0);
    communicator.dismiss(std::move(task));
  });
}

/// Those that come later need no memory of their own, in whatever order each rank lets go of those
/// before. Without file descriptors there is none.
TEST(Background, FreedOnesLeaveTheirScratchToOthers) {
  rlimit most{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &most), 0);
  for (const int size : {2, 3})
    expect_no_errors(run_ranks(size,
                               [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                                 Communicator communicator(std::move(bootstrap), Config{});
                                 for (unsigned round = 0; round < 60; ++round) {
                                   std::vector<std::unique_ptr<Part>> parts;
                                   std::vector<std::unique_ptr<Task>> tasks;
                                   for (const std::size_t count : {3, 20000, 3}) {
                                     Call what;
                                     what.count = count;
                                     parts.push_back(std::make_unique<Part>(what, rank, size));
                                     tasks.push_back(communicator.prepare(parts.back()->request));
                                     ASSERT_TRUE(tasks.back()) << "round " << round;
                                   }
                                   const auto order = own_order(tasks.size(), rank, round);
                                   for (const std::size_t i : order) communicator.start(*tasks[i]);
                                   for (const std::size_t i : order) {
                                     communicator.wait(*tasks[i]);
                                     expect(parts[i]->check());
                                     communicator.dismiss(std::move(tasks[i]));
                                   }
                                   const rlimit none{0, most.rlim_max};
                                   if (round == 0 && rank == 0) setrlimit(RLIMIT_NOFILE, &none);
                                 }
                                 if (rank == 0) setrlimit(RLIMIT_NOFILE, &most);
                               }),
                     "scratch");
  setrlimit(RLIMIT_NOFILE, &most);
}

TEST(Background, WhatFreedOnesServedIsAddedUp) {
  on_two_ranks("freed", [](Communicator& communicator, Part& part) {
    for (int i = 0; i < 50; ++i) {
      auto task = communicator.prepare(part.request);
      communicator.start(*task);
      communicator.wait(*task);
      communicator.dismiss(std::move(task));
    }
    const std::vector<Served> rows = communicator.served();
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].form, Form::persistent);
    EXPECT_EQ(rows[0].calls, 50u);
    EXPECT_EQ(rows[0].bytes, 50 * 3 * sizeof(float));
  });
}

}  // namespace
}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// base/rest.hpp: when a rank sleeps between two looks, and when it does not.
#include "base/rest.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <chrono>

namespace trib {
namespace {

using Clock = Rest::Clock;

/// All cores are taken until then.
class Taken {
 public:
  explicit Taken(Clock::duration until) {
    Rest::taken_core = -1;
    Rest::taken_until = until;
  }
  ~Taken() { Rest::taken_until = Clock::duration::zero(); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
};

/// Of so many rounds.
int sleeps(Rest& rest, int rounds) {
  int count = 0;
  for (int round = 0; round < rounds; ++round) count += rest.take();
  return count;
}

/// As often as a timer may be late, where what is left of a sleep never becomes less.
TEST(Rest, NapsEndWhereSignalsCome) {
  struct sigaction before{}, action{};
  action.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGALRM, &action, &before), 0);
  const itimerval often{{0, 40}, {0, 40}}, never{};
  ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  const auto start = Clock::now();
  for (int i = 0; i < 100 && Clock::now() - start < std::chrono::seconds(10); ++i)
    nap(std::chrono::microseconds(50));
  EXPECT_EQ(setitimer(ITIMER_REAL, &never, nullptr), 0);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(sigaction(SIGALRM, &before, nullptr), 0);
}

TEST(Rest, SleepsOnceItHasSpunForSomeTime) {
  const Taken taken(Clock::duration::max());
  Rest rest(Clock::now(), /*may_sleep=*/true);
  EXPECT_EQ(sleeps(rest, 128), 0);
  EXPECT_EQ(sleeps(rest, 10), 10);
  rest.restart(Clock::now());
  EXPECT_EQ(sleeps(rest, 128), 0);
  EXPECT_EQ(sleeps(rest, 1), 1);
}

TEST(Rest, DoesNotSleepWhereItMayNot) {
  const Taken taken(Clock::duration::max());
  Rest rest(Clock::now(), /*may_sleep=*/false);
  EXPECT_EQ(sleeps(rest, 300), 0);
}

/// It yields there. That one may be found to be taken, too, as it happens, but not before the first
/// round.
TEST(Rest, DoesNotSleepOnAnotherCore) {
  const Taken taken(Clock::duration::max());
  Rest::taken_core = 1 << 20;
  Rest rest(Clock::now(), /*may_sleep=*/true);
  EXPECT_LT(sleeps(rest, 300), 300 - 128);
}

/// Also in a wait that gets on all the time, and so never sleeps. Once it yields again a core may
/// be found to be taken, as it happens, but not before the first round.
TEST(Rest, ForgetsAfterATime) {
  const auto now = Clock::now();
  const Taken taken((now + std::chrono::hours(1)).time_since_epoch());
  Rest rest(now, /*may_sleep=*/true);
  EXPECT_EQ(sleeps(rest, 100), 0);
  rest.restart(now + std::chrono::hours(2));
  EXPECT_LT(sleeps(rest, 300), 300 - 128);
}

TEST(Rest, ForgetsWhenItWakes) {
  const auto now = Clock::now();
  const Taken taken((now + std::chrono::hours(1)).time_since_epoch());
  Rest rest(now, /*may_sleep=*/true);
  EXPECT_EQ(sleeps(rest, 128), 0);
  Rest::taken_until = now.time_since_epoch();
  EXPECT_EQ(sleeps(rest, 1), 1);
  EXPECT_LT(sleeps(rest, 300), 300);
}

}  // namespace
}  // namespace trib

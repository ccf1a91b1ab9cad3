// SPDX-License-Identifier: BSD-3-Clause
// base/rest.hpp: when a rank sleeps between two looks, and when it does not.
#include "base/rest.hpp"

#include <gtest/gtest.h>

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

// SPDX-License-Identifier: BSD-3-Clause
// Ranks meet: everyone sees everyone's card, over many meetings; and all ranks begin to meet before
// the same call, however far they are apart when one of them asks for it.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "algorithm/registry.hpp"
#include "backend/backend.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

TEST(Meeting, EveryoneSeesEveryonesCard) {
  for (const int size : {2, 3, 5}) {
    const auto errors = test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      std::string why;
      const auto channel = host_backend().open(*bootstrap, Config{}, why);
      if (!channel) throw std::runtime_error(why);
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int meeting = 0; meeting < 2000; ++meeting) {
        Signature signature;
        signature.count = static_cast<std::uint64_t>(meeting);
        signature.hash = static_cast<std::uint64_t>(meeting) + 1;
        channel->announce(signature);
        const auto memory_of = [&](int r) { return static_cast<Memory>((r + meeting) % 5); };
        channel->present({memory_of(rank), memory_of(rank + 1), meeting % 3 == rank, true});
        while (channel->absent() >= 0) std::this_thread::yield();
        for (int r = 0; r < size; ++r) {
          const Card card = channel->card(r);
          if (card.in != memory_of(r) || card.out != memory_of(r + 1) ||
              card.is_contended != (meeting % 3 == r))
            throw std::runtime_error("a card of another meeting");
        }
        if (random() % 16 == 0) std::this_thread::yield();
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

TEST(Meeting, DisagreementIsNoticed) {
  const auto errors = test::run_ranks(2, [](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    std::string why;
    const auto channel = host_backend().open(*bootstrap, Config{}, why);
    Signature signature;
    signature.hash = static_cast<std::uint64_t>(rank) + 1;
    channel->announce(signature);
    channel->present({});
    while (channel->absent() >= 0) std::this_thread::yield();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("ranks disagree"), std::string::npos) << error;
}

/// A peer that is further on, for one that looks at it again and again without getting anywhere: it
/// is taken for one that made other calls where it did, or where its record is gone, not where its
/// record says that it made this one.
TEST(Meeting, APeerThatIsAheadIsNoSuspectIfItMadeTheSameCall) {
  constexpr std::uint64_t kCalls = 20;
  for (const std::uint64_t ahead : {1, 5, 12})
    for (const bool is_other : {false, true}) {
      const auto errors = test::run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
        std::string why;
        const auto channel = host_backend().open(*bootstrap, Config{}, why);
        if (!channel) throw std::runtime_error(why);
        const std::uint64_t calls = kCalls + (rank == 1 ? ahead : 0);
        for (std::uint64_t call = 1; call <= calls; ++call) {
          Signature signature;
          signature.hash = call == kCalls && rank == 1 && is_other ? 1000 : call;
          channel->announce(signature);
        }
        char mine = 0, all[2];
        bootstrap->exchange(&mine, all, 1);
        if (rank == 0)
          for (int look = 0; look < 3; ++look) channel->diagnose(1, /*position=*/8);
      });
      const bool is_suspect = is_other || ahead > 8;
      EXPECT_EQ(errors[0].find("ranks disagree") != std::string::npos, is_suspect)
          << ahead << " calls ahead, other " << is_other << ": " << errors[0];
    }
}

using std::chrono::microseconds;
constexpr microseconds kLong{60'000'000};  // longer than the test may take

TEST(Sleep, EndsWhenThePeerSaysSoOrTimeIsUp) {
  const auto errors = test::run_ranks(3, [](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    std::string why;
    const auto channel = host_backend().open(*bootstrap, Config{}, why);
    if (!channel) throw std::runtime_error(why);
    char mine = 0, all[3];
    // Rank 0 shows that it waits for `peer`, then `waker` wakes whom it has to, then rank 0 sleeps.
    const auto is_woken = [&](int peer, int waker, microseconds most) {
      const std::uint32_t ticket = rank == 0 ? channel->show_wait(peer) : 0;
      bootstrap->exchange(&mine, all, 1);
      if (rank == waker) channel->wake_waiting();
      bootstrap->exchange(&mine, all, 1);
      return rank != 0 || channel->sleep(ticket, most);
    };
    constexpr microseconds kShort{1000};
    if (!is_woken(1, 1, kLong)) throw std::runtime_error("slept through");
    if (is_woken(1, 2, kShort) && rank == 0) throw std::runtime_error("woken by another one");
    if (!is_woken(-1, 2, kLong)) throw std::runtime_error("slept through, waiting for any");
    // In its sleep: again and again, as it may not sleep yet.
    std::atomic<bool> is_over = false;
    std::thread waker([&] {
      while (rank == 1 && !is_over) channel->wake_waiting();
    });
    const bool has_been = rank != 0 || channel->sleep(channel->show_wait(1), kLong);
    bootstrap->exchange(&mine, all, 1);
    is_over = true;
    waker.join();
    if (!has_been) throw std::runtime_error("not woken");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Each rank hands a number on to the next one, and nobody polls: whoever is told of it before he
/// sleeps, or as he falls asleep, must not sleep on.
TEST(Sleep, NobodyMissesWhatHeWaitsFor) {
  constexpr int kSize = 3, kRounds = 20000;
  std::array<std::atomic<int>, kSize> given{};
  std::atomic<int> timeouts = 0;
  const auto errors = test::run_ranks(kSize, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    std::string why;
    const auto channel = host_backend().open(*bootstrap, Config{}, why);
    if (!channel) throw std::runtime_error(why);
    const int before = (rank + kSize - 1) % kSize;
    for (int round = 1; round <= kRounds; ++round) {
      const int wanted = rank == 0 ? round - 1 : round;
      const auto has_come = [&] {
        return given[static_cast<std::size_t>(before)].load(std::memory_order_acquire) >= wanted;
      };
      while (!has_come()) {
        const std::uint32_t ticket = channel->show_wait(before);
        if (has_come())
          channel->end_wait();
        else
          timeouts += !channel->sleep(ticket, kLong);
      }
      given[static_cast<std::size_t>(rank)].store(round, std::memory_order_release);
      channel->wake_waiting();
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(timeouts, 0);
}

/// Odd ranks ask in different calls; all find out before which call it is time. It is what the
/// earliest of these calls says, although those who ask later may store first.
void begin_together(const char* name, int size, bool is_joint) {
  constexpr int kFirstCall = 101;  // in which rank 1 asks
  const auto runs_of = [](int call) { return 1 + call % 2; };
  std::vector<int> begun(static_cast<std::size_t>(size), -1);
  const auto errors = test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    std::string why;
    const auto channel = host_backend().open(*bootstrap, Config{}, why);
    Shape shape;
    // In a Reduce, leaves run ahead of the root.
    shape.collective = is_joint ? Collective::allreduce : Collective::reduce;
    shape.size = size;
    const Algorithm& algorithm = *find_algorithm(name);
    const auto program = channel->load(
        lower(all_ranks(algorithm, shape), shape, Reach::scratch)[static_cast<std::size_t>(rank)]);
    const std::vector<std::size_t> begin{0, 1, 2, 3, 4, 5, 6, 7};
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int call = 0; call < 300; ++call) {
      if (call == kFirstCall && rank == 1)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (begun[static_cast<std::size_t>(rank)] < 0 && channel->is_time_to_meet(Occasion::devices))
        begun[static_cast<std::size_t>(rank)] = call;
      if (call == kFirstCall - 1 + rank && rank % 2 == 1)
        channel->ask_for_meetings(Occasion::devices, is_joint);
      // As in a call whose vector goes through in slices.
      float in[8] = {}, out[8] = {};
      Arguments arguments;
      arguments.in = in;
      arguments.out = out;
      arguments.chunk_begin = begin.data();
      arguments.longest = static_cast<std::size_t>(runs_of(call));
      arguments.slice = 1;
      channel->announce(arguments.signature);
      Operation& operation = program->launch(arguments);
      while (!operation.advance(10)) std::this_thread::yield();
      if (random() % 8 == 0) std::this_thread::yield();
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "") << name;
  int expected = kFirstCall;
  for (int ahead = is_joint ? 1 : 4 * size + 15; ahead > 0; ++expected) ahead -= runs_of(expected);
  for (int rank = 0; rank < size; ++rank)
    EXPECT_EQ(begun[static_cast<std::size_t>(rank)], expected) << name << ", rank " << rank;
}

TEST(Meeting, AllRanksBeginBeforeTheSameCall) {
  for (const char* const name : {"one_shot", "ring", "tree4"})
    for (const int size : {2, 3, 6}) begin_together(name, size, /*is_joint=*/false);
}

TEST(Meeting, RightAfterACallThatNeedsAll) {
  for (const char* const name : {"one_shot", "two_shot", "ring", "tree4", "rabenseifner"})
    for (const int size : {2, 3, 6}) begin_together(name, size, /*is_joint=*/true);
}

}  // namespace
}  // namespace trib

// SPDX-License-Identifier: BSD-3-Clause
// Who verifies verify()? Right schedules are broken in one place each, and every break must be
// reported. Then single faults by hand, one of each kind. schedule/verify.hpp has the rules.
#include "schedule/verify.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "algorithm/registry.hpp"
#include "support/layouts.hpp"

namespace trib {
namespace {

enum class Form { direct, in_place, lowered, attached };
constexpr Form kForms[] = {Form::direct, Form::in_place, Form::lowered, Form::attached};

struct Case {
  const Algorithm& algorithm;
  Shape shape;
  Form form;
  VerifiedCall call;

  std::string text() const {
    constexpr const char* forms[] = {"direct", "direct in place", "lowered", "attached"};
    return std::string(algorithm.name) + " " + std::string(name(shape.collective)) + ", " +
           std::to_string(shape.size) + " ranks, root " + std::to_string(shape.root) +
           (shape.levels.empty() ? "" : ", levels " + to_string(shape.levels)) + ", " +
           forms[static_cast<int>(form)];
  }

  /// The call some times over, and others in between: their flags and scratch are what a fault may
  /// hit.
  std::vector<VerifiedCall> calls() const {
    Shape other = shape;
    other.collective = Collective::reduce;
    other.root = shape.size - 1;
    VerifiedCall between{other, all_ranks(*find_algorithm("two_shot"), other)};
    if (call.schedules.front().is_lowered) {
      between.schedules = lower(between.schedules, other, Reach::scratch);
    }
    return {call, call, between, call, call, call};
  }
};

Case make(const Algorithm& algorithm, Shape shape, Form form) {
  shape.in_place = form == Form::in_place;
  VerifiedCall call{shape, all_ranks(algorithm, shape), shape.in_place};
  call.is_rank_order = algorithm.association == Association::rank_order;
  if (form == Form::lowered || form == Form::attached) {
    call.schedules =
        lower(call.schedules, shape, form == Form::lowered ? Reach::scratch : Reach::attach);
    call.runs = 2;
  }
  return {algorithm, shape, form, call};
}

void for_each_case(const std::vector<int>& sizes, const std::function<void(Case)>& f) {
  for (const Algorithm& algorithm : algorithms()) {
    // Made by the code that makes other trees.
    if (algorithm.association > Association::tree8) continue;
    for (int collective = 0; collective < kAllCollectives; ++collective) {
      if (!algorithm.serves(static_cast<Collective>(collective))) continue;
      for (const int size : sizes) {
        Shape shape;
        shape.collective = static_cast<Collective>(collective);
        shape.size = size;
        if (has_root(shape.collective)) shape.root = size / 2;
        for (const Form form : kForms) f(make(algorithm, shape, form));
        if (!is_reduction(shape.collective) || !test::knows_levels(algorithm)) continue;
        // Two domains that take turns, of unequal sizes, and one rank of its own in the first.
        shape.levels =
            make_levels({test::level_of(size, [](int r) { return r % 3 % 2; }),
                         test::level_of(size, [](int r) { return r == 2 ? 2 : r % 3 % 2; })});
        if (shape.levels.empty()) continue;
        for (const Form form : kForms) f(make(algorithm, shape, form));
      }
    }
  }
}

/// Ranks of all kinds: ends, middle, root, extras and corners.
std::vector<int> some_ranks(int size) {
  const std::set<int> ranks{0, 1, 2, size / 2, size - 1};
  return {ranks.begin(), ranks.lower_bound(size)};
}

const std::vector<int> kSizes{2, 3, 4, 5, 7, 8};

/// Every step of some ranks of every case: `mutate` breaks it, or returns false.
void expect_all_reported(const std::function<bool(const Case&, Schedule&, int)>& mutate,
                         int at_least = 1000) {
  int mutants = 0;
  for_each_case(kSizes, [&](const Case& right) {
    for (const int rank : some_ranks(right.shape.size)) {
      const Schedule& schedule = right.call.schedules[rank];
      for (int s = 0; s < static_cast<int>(schedule.steps.size()); ++s) {
        Case wrong = right;
        if (!mutate(wrong, wrong.call.schedules[rank], s)) continue;
        ++mutants;
        EXPECT_NE(verify(wrong.calls()), "") << right.text() << ": rank " << rank << ", step " << s
                                             << " " << to_string(schedule.steps[s]) << "\n"
                                             << to_string(schedule);
      }
    }
  });
  EXPECT_GE(mutants, at_least);
}

TEST(Mutation, NothingToReportWithoutOne) {
  for_each_case(kSizes,
                [](const Case& right) { EXPECT_EQ(verify(right.calls()), "") << right.text(); });
}

TEST(Mutation, MissingStep) {
  expect_all_reported([](const Case&, Schedule& schedule, int s) {
    schedule.steps.erase(schedule.steps.begin() + s);
    return true;
  });
}

TEST(Mutation, MissingPeerOfASignal) {
  expect_all_reported([](const Case&, Schedule& schedule, int s) {
    Step& step = schedule.steps[s];
    if (step.verb != Verb::signal || step.peers.size() < 2) return false;
    step.peers.pop_back();
    return true;
  });
}

TEST(Mutation, RepeatedSource) {
  expect_all_reported([](const Case&, Schedule& schedule, int s) {
    Step& step = schedule.steps[s];
    if (step.verb != Verb::reduce) return false;
    step.from.push_back(step.from.front());
    return true;
  });
}

TEST(Mutation, MissingSource) {
  expect_all_reported([](const Case&, Schedule& schedule, int s) {
    Step& step = schedule.steps[s];
    if (step.verb != Verb::reduce || step.from.size() < 2) return false;
    step.from.pop_back();
    return true;
  });
}

/// Nobody misses what nobody reads: lowering may put a rank's own result into its slot, too.
TEST(Mutation, MissingDestination) {
  const auto is_read = [](const Case& right, const Location& what) {
    for (const Schedule& schedule : right.call.schedules) {
      for (const Step& step : schedule.steps) {
        for (const Location& from : step.from) {
          if (from.rank == what.rank && from.buffer == what.buffer && from.slot == what.slot &&
              from.chunk < what.chunk + what.span && what.chunk < from.chunk + from.span) {
            return true;
          }
        }
      }
    }
    return false;
  };
  expect_all_reported(
      [&](const Case& right, Schedule& schedule, int s) {
        Step& step = schedule.steps[s];
        if (step.to.size() < 2) return false;
        if (step.to.back().buffer == Buffer::scratch && !is_read(right, step.to.back()))
          return false;
        step.to.pop_back();
        return true;
      },
      600);
}

/// Where an order is promised none may change places: a maximum of NaN and a number is the one or
/// the other, and so is one of zeros of either sign.
TEST(Mutation, SwappedOperands) {
  expect_all_reported(
      [](const Case& right, Schedule& schedule, int s) {
        if (right.algorithm.association != Association::rank_order) return false;
        Step& step = schedule.steps[s];
        if (step.verb != Verb::reduce || step.from.size() < 2) return false;
        std::swap(step.from.back(), *(step.from.end() - 2));
        return true;
      },
      700);
}

TEST(Mutation, OtherChunk) {
  expect_all_reported([](const Case&, Schedule& schedule, int s) {
    Step& step = schedule.steps[s];
    if (step.from.empty() || schedule.chunks == 1) return false;
    const int room = schedule.chunks - step.to.front().span;
    if (room == 0) return false;
    for (auto* side : {&step.to, &step.from}) {
      for (Location& at : *side) at.chunk += at.chunk < room ? 1 : -1;
    }
    return true;
  });
}

TEST(Mutation, SourceOfAnotherRank) {
  expect_all_reported([](const Case& right, Schedule& schedule, int s) {
    Step& step = schedule.steps[s];
    if (step.from.empty()) return false;
    step.from.back().rank = wrap(step.from.back().rank + 1, right.shape.size);
    return true;
  });
}

/// A signal earlier than what it announces.
TEST(Mutation, EarlySignal) {
  // grouped_two_shot's copies of results may end with the one chunk that a member of the group has
  // made itself, and does not fetch.
  const auto is_announced = [](const Case& right, const Step& made, const Step& signal) {
    if (right.algorithm.name != "grouped_two_shot" || made.verb != Verb::copy) return true;
    return std::any_of(signal.peers.begin(), signal.peers.end(), [&](int peer) {
      for (const Step& step : right.call.schedules[peer].steps)
        for (const Location& from : step.from)
          if (from.rank == made.to[0].rank && from.buffer == made.to[0].buffer &&
              from.chunk <= made.to[0].chunk && made.to[0].chunk < from.chunk + from.span)
            return true;
      return false;
    });
  };
  expect_all_reported([&](const Case& right, Schedule& schedule, int s) {
    if (s == 0 || schedule.steps[s].verb != Verb::signal) return false;
    if (right.form != Form::lowered &&
        !is_announced(right, schedule.steps[s - 1], schedule.steps[s]))
      return false;
    if (schedule.steps[s - 1].verb == Verb::signal || schedule.steps[s - 1].verb == Verb::wait) {
      return false;
    }
    std::swap(schedule.steps[s], schedule.steps[s - 1]);
    std::swap(schedule.steps[s].stage, schedule.steps[s - 1].stage);
    return true;
  });
}

/// A signal together with the wait that takes it: leaves everything balanced, so that only order
/// can be at fault. (Lowered: waits are bound to slots, and MissingStep has removed each.)
TEST(Mutation, MissingSignalAndItsWait) {
  int mutants = 0, harmless = 0;
  for_each_case(kSizes, [&](const Case& right) {
    if (right.form != Form::direct && right.form != Form::in_place) return;
    for (const int rank : some_ranks(right.shape.size)) {
      std::vector<int> given(right.shape.size, 0);
      const auto& steps = right.call.schedules[rank].steps;
      for (std::size_t s = 0; s < steps.size(); ++s) {
        if (steps[s].verb != Verb::signal) continue;
        for (const int peer : steps[s].peers) {
          Case wrong = right;
          std::erase(wrong.call.schedules[rank].steps[s].peers, peer);
          auto& waits = wrong.call.schedules[peer].steps;
          int left = given[peer]++;
          for (auto step = waits.begin(); step != waits.end(); ++step) {
            if (step->verb == Verb::wait && step->peers[0] == rank && left-- == 0) {
              waits.erase(step);
              break;
            }
          }
          ++mutants;
          if (!verify(wrong.calls()).empty()) continue;
          ++harmless;
          // Rabenseifner's reduce_scatter ends by telling each peer "I am done with your memory,
          // and have written to it". Some of them also hear it through a third rank, which needed
          // the same data before it told them so itself. Which ones depends on who owns what: not
          // worth a rule. The same goes for the end of grouped_two_shot, which all partners tell
          // each other. Any other signal must be needed.
          const bool is_last_signal =
              std::none_of(steps.begin() + static_cast<long>(s) + 1, steps.end(),
                           [&](const Step& step) { return step.verb == Verb::reduce; });
          const bool is_rabenseifner =
              right.algorithm.name == "rabenseifner" && is_scatter(right.shape.collective);
          EXPECT_TRUE(is_last_signal &&
                      (is_rabenseifner || right.algorithm.name == "grouped_two_shot"))
              << right.text() << ": rank " << rank << ", step " << s << " to " << peer;
        }
      }
    }
  });
  EXPECT_GT(mutants, 9000);
  EXPECT_EQ(harmless, 532);
}

/// A credit is implied where the rank receives, in the same run, what the reader computed from its
/// slots: in trees and in recursive halving that is common, and with Reach::attach the end of a
/// call implies all. Where readers do nothing else that the rank could notice, each credit counts.
/// (In a broadcast by shares, no reader of the root ends before the others have read their shares.)
TEST(Mutation, MissingCredit) {
  int mutants = 0, reported = 0;
  for_each_case(kSizes, [&](const Case& right) {
    if (right.form != Form::lowered) return;
    const bool is_reduce = right.shape.collective == Collective::reduce;
    const std::string_view row = right.algorithm.name;
    const bool has_shares = right.shape.collective == Collective::broadcast && row == "two_shot";
    for (const int rank : some_ranks(right.shape.size)) {
      const bool is_each_needed =
          row == "one_shot" || (!is_reduce && (row == "two_shot" || row == "ring") &&
                                !(has_shares && rank == right.shape.root));
      const std::vector<int>& readers = right.call.schedules[rank].readers;
      for (const int reader : readers) {
        Case wrong = right;
        wrong.call.runs = 1;
        std::erase(wrong.call.schedules[rank].readers, reader);
        // Reductions to the reader: the rank goes through them without a look at it, until the
        // window comes round in which the reader may still be at work.
        Shape shape = right.shape;
        shape.collective = Collective::reduce;
        shape.root = reader;
        VerifiedCall after{shape, all_ranks(*find_algorithm("one_shot"), shape)};
        after.schedules = lower(after.schedules, shape, Reach::scratch);
        const bool is_reported = !verify({wrong.call, after, after, after, after}).empty();
        ++mutants;
        reported += is_reported ? 1 : 0;
        EXPECT_TRUE(is_reported || !is_each_needed)
            << right.text() << ": rank " << rank << ", reader " << reader;
      }
    }
  });
  EXPECT_GT(2 * reported, mutants);
}

/// Likewise: where all that a reader does with a rank's `in` is for its own result, the rank must
/// wait for it.
TEST(Mutation, MissingAttachedReaders) {
  int mutants = 0, reported = 0;
  for_each_case(kSizes, [&](const Case& right) {
    const Collective collective = right.shape.collective;
    const bool is_each_needed = right.algorithm.name == "one_shot" ||
                                (right.algorithm.name == "two_shot" &&
                                 (is_scatter(collective) || !is_reduction(collective)));
    for (const int rank : some_ranks(right.shape.size)) {
      Case wrong = right;
      if (right.call.schedules[rank].attached_readers.empty()) continue;
      wrong.call.schedules[rank].attached_readers.clear();
      const bool is_reported = !verify(wrong.calls()).empty();
      ++mutants;
      reported += is_reported ? 1 : 0;
      EXPECT_TRUE(is_reported || !is_each_needed) << right.text() << ": rank " << rank;
    }
  });
  EXPECT_GT(2 * reported, mutants);
}

/// With fewer windows than stages, a run that is under way would have to give up its slots. (Where
/// there is a root, no rank need both have slots and read others' in a later stage.)
TEST(Mutation, TooFewWindows) {
  for_each_case(kSizes, [](const Case& right) {
    if (!right.call.schedules.front().is_lowered) return;
    const int stages = right.call.schedules.front().stages;
    VerifiedCall call = right.call;
    call.runs = 5;
    EXPECT_EQ(verify({call, call}, stages), "") << right.text();
    if (stages == 1 || has_root(right.shape.collective)) return;
    EXPECT_NE(verify({call, call}, stages - 1), "") << right.text();
  });
}

TEST(Mutation, OtherRoot) {
  for_each_case(kSizes, [](const Case& right) {
    if (!has_root(right.shape.collective)) return;
    Case wrong = right;
    wrong.call.shape.root = wrap(right.shape.root + 1, right.shape.size);
    EXPECT_NE(verify(wrong.calls()), "") << right.text();
  });
}

/// Schedules that are right if `out` has memory of its own need not be so in place.
TEST(Mutation, InPlaceWhereNotForeseen) {
  for (const std::string_view row : {"one_shot", "recursive_doubling"}) {
    for (const int size : kSizes) {
      Shape shape;
      shape.size = size;
      const Case right = make(*find_algorithm(row), shape, Form::direct);
      VerifiedCall call = right.call;
      call.in_place = true;
      EXPECT_NE(verify({call}), "") << right.text();
    }
  }
}

// --- One fault of each kind, two ranks, and what is said about it. ---

constexpr int kBoth = 2;

VerifiedCall by_hand(const std::function<void(Builder&, int)>& write,
                     Collective collective = Collective::allreduce) {
  VerifiedCall call;
  call.shape.collective = collective;
  call.shape.size = kBoth;
  for (int rank = 0; rank < kBoth; ++rank) {
    Builder b(has_chunk_per_rank(collective) ? kBoth : 1);
    write(b, rank);
    call.schedules.push_back(b.finish());
  }
  return call;
}

void expect_fault(const VerifiedCall& call, const std::string& text) {
  const std::string fault = verify({call, call});
  EXPECT_NE(fault.find(text), std::string::npos) << fault;
}

/// One-shot, with what a test wants left out.
struct Parts {
  bool entry = true, exit = true, every = true, result = true;
};
VerifiedCall one_shot_with(const Parts& parts) {
  return by_hand([&](Builder& b, int rank) {
    const int peer = 1 - rank;
    if (parts.entry) b.signal(peer);
    if (parts.entry) b.wait(peer);
    std::vector<Location> from{in(0, 0)};
    if (parts.every) from.push_back(in(1, 0));
    b.reduce(parts.result ? out(rank, 0) : scratch(rank, 0, 0), from);
    if (parts.exit) b.signal(peer);
    if (parts.exit) b.wait(peer);
  });
}

TEST(Fault, None) { EXPECT_EQ(verify({one_shot_with({})}), ""); }
TEST(Fault, NoEntry) {
  expect_fault(one_shot_with({.entry = false}),
               "call 0 (allreduce): rank 0, step 0 `reduce out(0, 0) <- in(0, 0) in(1, 0)`: "
               "in(1, 0): its rank may not be in the call yet");
}
TEST(Fault, NoExit) {
  expect_fault(one_shot_with({.exit = false}), "in(1, 0): its rank may have left the call");
  // The same, seen from the other side: rank 1 has read already, but rank 0 cannot know.
  const VerifiedCall call = by_hand([](Builder& b, int rank) {
    const int peer = 1 - rank;
    b.signal(peer);
    b.wait(peer);
    b.signal(peer);
    if (rank == 1) b.reduce({out(0, 0), out(1, 0)}, {in(0, 0), in(1, 0)});
    b.wait(peer);
  });
  expect_fault(call,
               "call 0 (allreduce): rank 0, at the end: leaves, but rank 1 may still read or write "
               "its memory");
}
TEST(Fault, NoResult) {
  expect_fault(one_shot_with({.result = false}), "at the end: out(0, 0): never written");
}
TEST(Fault, NotAllRanks) {
  expect_fault(one_shot_with({.every = false}), "rank 1's contribution is missing: 0");
}

TEST(Fault, Twice) {
  expect_fault(
      by_hand([](Builder& b, int rank) { b.reduce(out(rank, 0), {in(rank, 0), in(rank, 0)}); }),
      "a contribution is in it twice: (0 0)");
}

TEST(Fault, Deadlock) {
  const VerifiedCall call = by_hand([](Builder& b, int rank) {
    b.wait(1 - rank);
    b.signal(1 - rank);
  });
  expect_fault(call, "deadlock:\n  call 0 (allreduce): rank 0, step 0 `wait 1`: waits for ever");
}

TEST(Fault, SignalNobodyTakes) {
  const VerifiedCall call = by_hand([](Builder& b, int rank) {
    b.signal(1 - rank);
    b.wait(1 - rank);
    b.reduce(out(rank, 0), {in(0, 0), in(1, 0)});
    b.signal(1 - rank);
    b.wait(1 - rank);
    if (rank == 1) b.signal(0);
  });
  EXPECT_NE(verify({call}).find("rank 1, step 5 `signal 0`: rank 0 never takes this signal"),
            std::string::npos)
      << verify({call});
  expect_fault(call, "takes the signal of call 0 (allreduce): rank 1, step 5");
}

TEST(Fault, UnwrittenScratch) {
  expect_fault(by_hand([](Builder& b, int rank) { b.copy(out(rank, 0), scratch(rank, 0, 0)); }),
               "scratch(0 slot 0, 0): read before it is written");
}

TEST(Fault, UnorderedWrites) {
  const VerifiedCall call = by_hand([](Builder& b, int rank) {
    b.signal(1 - rank);
    b.wait(1 - rank);
    b.reduce({out(0, 0), out(1, 0)}, {in(0, 0), in(1, 0)});
    b.signal(1 - rank);
    b.wait(1 - rank);
  });
  expect_fault(call, "out(0, 0): rank 1 may not have written it yet");
}

TEST(Fault, OutputOfAnother) {
  expect_fault(
      by_hand([](Builder& b, int rank) { b.copy(out(rank, 0), in(rank, 0)); }, Collective::reduce),
      "rank 1, step 0 `copy out(1, 0) <- in(1, 0)`: out(1, 0): there is no such `out`");
  expect_fault(
      by_hand([](Builder& b, int) { b.copy(out(0, 1), in(0, 1)); }, Collective::reduce_scatter),
      "out(0, 1): there is no such `out`");
}

TEST(Fault, WritingTheInput) {
  expect_fault(by_hand([](Builder& b, int rank) { b.copy(in(rank, 0), in(rank, 0)); }),
               "`in` is the caller's");
}

/// In a reduce_scatter in place, chunk 1 is written over chunk 0, or, with uneven counts, partly
/// over itself.
TEST(Fault, OverlapsItsSource) {
  VerifiedCall call = by_hand(
      [](Builder& b, int rank) {
        b.signal(1 - rank);
        b.wait(1 - rank);
        b.reduce(out(rank, rank), {in(0, rank), in(1, rank)});
        b.signal(1 - rank);
        b.wait(1 - rank);
      },
      Collective::reduce_scatter);
  EXPECT_EQ(verify({call, call}), "");
  call.in_place = true;
  EXPECT_NE(verify({call}), "");
  call.schedules[0].steps.erase(call.schedules[0].steps.begin() + 2);  // nobody reads in(1, 0) now
  expect_fault(call,
               "rank 1, step 2 `reduce out(1, 1) <- in(0, 1) in(1, 1)`: out(1, 1): overlaps a "
               "source of the same step");
}

/// Of allgather: rank 0's chunk, or rank 1's, is what `first` says.
VerifiedCall allgather_with(const std::function<void(Builder&, int)>& hand) {
  return by_hand(
      [&](Builder& b, int rank) {
        b.signal(1 - rank);
        b.wait(1 - rank);
        hand(b, rank);
        b.signal(1 - rank);
        b.wait(1 - rank);
      },
      Collective::allgather);
}

TEST(Fault, AllgatherWithout) {
  VerifiedCall call = allgather_with(
      [](Builder& b, int rank) { b.copy({out(1 - rank, rank), out(rank, rank)}, in(rank, rank)); });
  EXPECT_EQ(verify({call, call}), "");
  call.in_place = true;  // a copy onto itself is none
  EXPECT_EQ(verify({call, call}), "");
  call = allgather_with([](Builder& b, int rank) { b.copy(out(1 - rank, rank), in(rank, rank)); });
  expect_fault(call, "rank 0, at the end: out(0, 0): never written");
  call.in_place = true;  // it is there already
  EXPECT_EQ(verify({call, call}), "");
  call = allgather_with([](Builder& b, int rank) { b.copy(out(rank, rank), in(rank, rank)); });
  expect_fault(call, "rank 0, at the end: out(0, 1): never written");
  call.in_place = true;
  expect_fault(call, "rank 0, at the end: out(0, 1): never written");
  call = allgather_with([](Builder& b, int rank) {
    b.reduce({out(0, rank), out(1, rank)}, {in(rank, rank), in(rank, rank)});
  });
  expect_fault(call, "out(0, 0): not rank 0's contribution: (0 0)");
  for (Schedule& schedule : call.schedules) schedule.chunks = 3;
  expect_fault(call, "number of chunks or form unlike the others'");
}

TEST(Fault, ReadersThatAreNoRanks) {
  for (const int reader : {-1, 2, 1000000}) {
    auto call = one_shot_with({});
    call.schedules[1].readers.push_back(reader);
    expect_fault(call, "rank 1: a reader that is no rank");
    call = one_shot_with({});
    call.schedules[0].attached_readers.push_back(reader);
    expect_fault(call, "rank 0: a reader that is no rank");
  }
}

TEST(Fault, PartsThatNobodyCanCut) {
  auto call = one_shot_with({});
  for (const int parts : {0, -1, 2}) {
    for (Schedule& schedule : call.schedules) schedule.parts = parts;
    expect_fault(call, "chunks / parts is no number, or unlike the others'");
  }
}

TEST(Fault, InputOfAnother) {
  expect_fault(by_hand([](Builder& b, int rank) { b.copy(out(rank, 1), in(rank, 1)); },
                       Collective::allgather),
               "call 0 (allgather): rank 0, step 0 `copy out(0, 1) <- in(0, 1)`: in(0, 1): there "
               "is no such `in`");
  expect_fault(
      by_hand([](Builder& b, int) { b.copy(out(0, 0, 2), in(0, 0, 2)); }, Collective::allgather),
      "in(0, 0..1): there is no such `in`");
  expect_fault(
      by_hand([](Builder& b, int rank) { b.copy(out(rank, 0), in(rank, 0)); },
              Collective::broadcast),
      "call 0 (broadcast, root 0): rank 1, step 0 `copy out(1, 0) <- in(1, 0)`: in(1, 0): there is "
      "no such `in`");
}

TEST(Fault, BroadcastWithout) {
  const auto broadcast_with = [](const std::function<void(Builder&)>& hand) {
    return by_hand(
        [&](Builder& b, int rank) {
          if (rank == 1) b.signal(0);
          b.wait(1 - rank);
          if (rank == 0) hand(b);
          if (rank == 0) b.signal(1);
        },
        Collective::broadcast);
  };
  VerifiedCall call = broadcast_with([](Builder& b) { b.copy({out(0, 0), out(1, 0)}, in(0, 0)); });
  EXPECT_EQ(verify({call, call}), "");
  call.in_place = true;
  EXPECT_EQ(verify({call, call}), "");
  call.shape.root = 1;
  expect_fault(call, "in(0, 0): there is no such `in`");
  call = broadcast_with([](Builder& b) { b.copy(out(1, 0), in(0, 0)); });
  expect_fault(call, "rank 0, at the end: out(0, 0): never written");
  call.in_place = true;
  EXPECT_EQ(verify({call, call}), "");
  call = broadcast_with([](Builder& b) { b.copy(out(0, 0), in(0, 0)); });
  expect_fault(call, "rank 1, at the end: out(1, 0): never written");
  call.in_place = true;
  expect_fault(call, "rank 1, at the end: out(1, 0): never written");
  // In place, nothing but a copy leaves the chunk as it is.
  call = broadcast_with([](Builder& b) {
    b.copy(out(1, 0), in(0, 0));
    b.reduce(out(0, 0), {in(0, 0), in(0, 0)});
  });
  call.in_place = true;
  expect_fault(call, "out(0, 0): not rank 0's contribution: (0 0)");
}

/// In place, a peer may go on reading the root's `in` while the root copies it onto itself, but not
/// while it writes something else there.
TEST(Fault, WritesInPlaceWhatAPeerReads) {
  const auto call_with = [](const std::function<void(Builder&)>& keep) {
    VerifiedCall call = by_hand(
        [&](Builder& b, int rank) {
          b.signal(1 - rank);
          if (rank == 0) keep(b);
          b.wait(1 - rank);
          if (rank == 1) b.copy(out(1, 0), in(0, 0));
          if (rank == 1) b.signal(0);
          if (rank == 0) b.wait(1);
        },
        Collective::broadcast);
    call.in_place = true;
    return call;
  };
  const VerifiedCall copied = call_with([](Builder& b) { b.copy(out(0, 0), in(0, 0)); });
  EXPECT_EQ(verify({copied, copied}), "");
  EXPECT_NE(verify({call_with([](Builder& b) { b.reduce(out(0, 0), {in(0, 0)}); })}), "");
}

TEST(Fault, LoweredReachesOut) {
  VerifiedCall call = one_shot_with({});
  Shape shape = call.shape;
  call.schedules = lower(call.schedules, shape, Reach::scratch);
  EXPECT_EQ(verify({call, call}), "");
  for (Step& step : call.schedules[1].steps) {
    if (!step.to.empty() && step.to[0].buffer == Buffer::out) step.to[0].rank = 0;
  }
  expect_fault(call, "out(0, 0): out of reach");
}

/// Results that return: rank 0 writes chunk 0 of the others' scratch, where it alone has read. Each
/// test takes something away from that, or adds to it.
class Returned : public testing::Test {
 protected:
  Returned() {
    call_.shape.size = 3;
    call_.schedules = lower(all_ranks(*find_algorithm("returning_two_shot"), call_.shape),
                            call_.shape, Reach::scratch);
    EXPECT_EQ(verify({call_, call_}), "");
  }

  std::vector<Step>& steps_of(int rank) {
    return call_.schedules[static_cast<std::size_t>(rank)].steps;
  }
  Step& fold() {
    return *std::find_if(steps_of(0).begin(), steps_of(0).end(),
                         [](const Step& step) { return step.verb == Verb::reduce; });
  }
  /// The slot of `rank` that rank 0 writes to.
  Location returned(int rank) {
    return *std::find_if(fold().to.begin(), fold().to.end(), [&](const Location& to) {
      return to.buffer == Buffer::scratch && to.rank == rank;
    });
  }
  /// Of rank 0, which takes no look at what `rank` has for it.
  void ignore(int rank, bool waits) {
    const Location gone = returned(rank);
    std::erase_if(fold().from, [&](const Location& from) { return from == gone; });
    if (waits) return;
    std::erase_if(steps_of(0), [&](const Step& step) {
      return step.verb == Verb::wait && step.peers[0] == rank && step.slot == gone.slot;
    });
  }
  /// Rank `rank` reads what rank 0 reads of rank `of`: first of all, or last.
  void read(int rank, int of, bool is_first) {
    const Location at = returned(of);
    auto& steps = steps_of(rank);
    const Step wait{Verb::wait, {}, {}, {of}, at.slot, is_first ? 0 : 2};
    const Step copy{Verb::copy, {out(rank, 0)}, {at}, {}, -1, wait.stage};
    steps.insert(is_first ? steps.begin() : steps.end(), {wait, copy});
  }

  VerifiedCall call_;
};

TEST_F(Returned, HasAnotherReaderBefore) {
  read(/*rank=*/2, /*of=*/1, /*is_first=*/true);
  expect_fault(call_, "scratch(1 slot " + std::to_string(returned(1).slot) +
                          ", 0): not read by this rank alone");
}
TEST_F(Returned, HasAnotherReaderAfterwards) {
  read(2, 1, false);  // what rank 2 has too, and knows to be there
  EXPECT_EQ(verify(std::vector(6, call_)), "");
}
TEST_F(Returned, IsReadByItsRankBefore) {
  const Location own = returned(1);
  auto& steps = steps_of(1);
  const auto wait = std::find_if(steps.begin(), steps.end(),
                                 [](const Step& step) { return step.verb == Verb::wait; });
  steps.insert(wait, {Verb::copy, {out(1, 0)}, {own}, {}});
  expect_fault(call_, ": not read by this rank alone");
}
TEST_F(Returned, WithoutWaiting) {
  ignore(1, /*waits=*/false);
  expect_fault(call_, ": written without waiting for its slot");
}
/// Rank 1 reads what is there since the signal, before or after rank 0 has written it again.
TEST_F(Returned, AfterTheSignal) {
  const int stage = fold().stage;
  const auto behind = steps_of(0).begin() + (&fold() - steps_of(0).data()) + 1;
  ASSERT_EQ(behind->verb, Verb::signal);
  steps_of(0).insert(behind + 1, {Verb::copy, {returned(1)}, {out(0, 0)}, {}, -1, stage});
  EXPECT_NE(verify({call_, call_}), "");
}
TEST_F(Returned, WhereNothingWas) {
  ignore(1, /*waits=*/true);
  const Location gone = returned(1);
  std::erase_if(steps_of(1),
                [&](const Step& step) { return step.verb == Verb::copy && step.to[0] == gone; });
  expect_fault(call_, ": not written by its rank");
}
TEST_F(Returned, IsNotAwaited) {
  const Location own = returned(1);
  auto& steps = steps_of(1);
  const auto copy = std::find_if(steps.begin(), steps.end(), [&](const Step& step) {
    return step.verb == Verb::copy && step.from[0] == own;
  });
  ASSERT_EQ((copy - 1)->verb, Verb::wait);
  steps.erase(copy - 1);
  EXPECT_NE(verify({call_, call_}), "");
}
/// Without its credit, rank 1 may turn to its window's next run while rank 0 still writes to it.
TEST_F(Returned, IsNotACredit) {
  std::erase(call_.schedules[1].readers, 0);
  // Rank 0 has nothing to say to rank 1 in these calls.
  VerifiedCall after{call_.shape, {}};
  after.shape.collective = Collective::reduce;
  after.shape.root = 0;
  after.schedules =
      lower(all_ranks(*find_algorithm("one_shot"), after.shape), after.shape, Reach::scratch);
  EXPECT_NE(verify({call_, after, after, after, after}), "");
}

/// Chunks that stay while ranks add to them: each is in the scratch of the rank at which it set
/// out.
class Stays : public testing::Test {
 protected:
  void set(Collective collective, int size) {
    call_.shape.collective = collective;
    call_.shape.size = size;
    call_.schedules =
        lower(all_ranks(*find_algorithm("ring"), call_.shape), call_.shape, Reach::scratch);
    call_.runs = 6;
    ASSERT_EQ(verify({call_, call_}), "");
  }
  Step* find(int rank, const std::function<bool(const Step&)>& is_it) {
    auto& steps = call_.schedules[static_cast<std::size_t>(rank)].steps;
    const auto found = std::find_if(steps.begin(), steps.end(), is_it);
    return found == steps.end() ? nullptr : &*found;
  }
  void remove(int rank, const Step* step) {
    auto& steps = call_.schedules[static_cast<std::size_t>(rank)].steps;
    steps.erase(steps.begin() + (step - steps.data()));
  }

  VerifiedCall call_;
};

TEST_F(Stays, TakeAUnitOfScratchPerRank) {
  for (const Collective collective :
       {Collective::allreduce, Collective::reduce_scatter, Collective::reduce})
    for (const int size : {3, 4, 7}) {
      set(collective, size);
      for (const Schedule& schedule : call_.schedules) {
        EXPECT_TRUE(schedule.stays);
        EXPECT_EQ(schedule.units, 1);
        for (const Step& step : schedule.steps)
          for (const Location& to : step.to)
            EXPECT_TRUE(to.buffer != Buffer::scratch || step.verb == Verb::copy ||
                        to == step.from[0])
                << to_string(step);
      }
    }
}
TEST_F(Stays, WithoutWaiting) {
  set(Collective::allreduce, 4);
  for (const bool is_last : {false, true}) {  // for who set it out; for who added to it
    const auto schedules = call_.schedules;
    int seen = 0;
    remove(2, find(2, [&](const Step& step) {
             return step.verb == Verb::wait && (!is_last || ++seen == 3);
           }));
    EXPECT_NE(verify({call_, call_}), "");
    call_.schedules = schedules;
  }
}
/// In run n + windows, rank 1 writes its slot again: the root has to have read it in run n.
TEST_F(Stays, IsNotACredit) {
  set(Collective::reduce, 4);
  EXPECT_EQ(std::erase(call_.schedules[1].readers, 0), 1U);
  EXPECT_NE(verify({call_, call_}), "");
}
/// A rank looks at a chunk before the next one adds to it.
TEST_F(Stays, HasAnotherReader) {
  set(Collective::reduce, 4);
  const Step* const fold = find(2, [](const Step& step) { return step.verb == Verb::reduce; });
  const Location at = fold->from[0];
  auto& steps = call_.schedules[0].steps;
  steps.insert(steps.begin(), {{Verb::wait, {}, {}, {at.rank}, at.slot, fold->stage},
                               {Verb::copy, {out(0, at.chunk)}, {at}, {}, -1, fold->stage}});
  EXPECT_NE(verify({call_, call_}), "");
}

TEST(Folds, AreToldApart) {
  EXPECT_EQ(folds(one_shot_with({})), std::vector<std::string>{"(0 1)"});
  Shape shape;
  shape.size = 4;
  const auto fold = [&](std::string_view row) {
    return folds({shape, all_ranks(*find_algorithm(row), shape)});
  };
  EXPECT_EQ(fold("one_shot"), std::vector<std::string>{"(((0 1) 2) 3)"});
  EXPECT_EQ(fold("two_shot"), std::vector<std::string>(4, "(((0 1) 2) 3)"));
  EXPECT_EQ(fold("recursive_doubling"), std::vector<std::string>{"((0 1) (2 3))"});
  EXPECT_EQ(fold("ring")[1], "(((2 3) 0) 1)");
  shape.collective = Collective::reduce;
  shape.root = 3;
  EXPECT_EQ(fold("binomial"), std::vector<std::string>{"((3 0) (1 2))"});
  EXPECT_EQ(fold("one_shot"), std::vector<std::string>{"(((0 1) 2) 3)"});
  shape.collective = Collective::broadcast;
  EXPECT_EQ(fold("one_shot"), std::vector<std::string>{"3"});
  EXPECT_EQ(fold("two_shot"), std::vector<std::string>(3, "3"));
  shape.collective = Collective::allgather;
  EXPECT_EQ(fold("one_shot"), (std::vector<std::string>{"0", "1", "2", "3"}));
  EXPECT_EQ(fold("two_shot"), (std::vector<std::string>{"0", "1", "2", "3"}));
  EXPECT_THROW(folds(one_shot_with({.exit = false})), std::runtime_error);
}

}  // namespace
}  // namespace trib

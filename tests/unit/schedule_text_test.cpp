// SPDX-License-Identifier: BSD-3-Clause
// Schedules as text: every algorithm's text reads back as the same schedules, which verify; and
// what is wrong with other texts is said, with the line. fuzz/fuzz_schedule.cpp tries what nobody
// has thought of.
#include <gtest/gtest.h>

#include <algorithm>

#include "algorithm/registry.hpp"
#include "base/error.hpp"
#include "schedule/script.hpp"
#include "support/sanitizer.hpp"

namespace trib {

bool operator==(const Slot& a, const Slot& b) {
  return a.chunk == b.chunk && a.span == b.span && a.offset == b.offset;
}

bool operator==(const Step& a, const Step& b) {
  return a.verb == b.verb && a.to == b.to && a.from == b.from && a.peers == b.peers &&
         a.slot == b.slot && a.stage == b.stage;
}

void PrintTo(const Algorithm& algorithm, std::ostream* out) { *out << algorithm.name; }

namespace {

/// Everything but `steps`, whose differences are worth a message of their own.
bool is_same_otherwise(const Schedule& a, const Schedule& b) {
  return a.chunks == b.chunks && a.is_lowered == b.is_lowered && a.slots == b.slots &&
         a.flags == b.flags && a.units == b.units && a.stages == b.stages &&
         a.readers == b.readers && a.attached_readers == b.attached_readers &&
         a.endangers_input == b.endangers_input;
}

enum class Form { direct, in_place, lowered, attached };

Script make(const Algorithm& algorithm, Shape shape, Form form) {
  shape.in_place = form == Form::in_place;
  Script script{std::string(algorithm.name), shape,
                is_reduction(shape.collective) && algorithm.association == Association::rank_order,
                all_ranks(algorithm, shape)};
  if (form == Form::lowered) script.schedules = lower(script.schedules, shape, Reach::scratch);
  if (form == Form::attached) script.schedules = lower(script.schedules, shape, Reach::attach);
  return script;
}

template <class F>
void for_each_script(const Algorithm& algorithm, int max_size, F&& f) {
  for (int collective = 0; collective < kAllCollectives; ++collective) {
    Shape shape;
    shape.collective = static_cast<Collective>(collective);
    if (!algorithm.serves(shape.collective)) continue;
    for (shape.size = 2; shape.size <= max_size; ++shape.size) {
      shape.root = has_root(shape.collective) ? shape.size / 2 : 0;
      for (const Form form : {Form::direct, Form::in_place, Form::lowered, Form::attached})
        f(make(algorithm, shape, form));
    }
  }
}

class EveryText : public testing::TestWithParam<Algorithm> {};

TEST_P(EveryText, ReadsBackTheSame) {
  for_each_script(GetParam(), 9, [](const Script& script) {
    const std::string text = to_string(script);
    const Script again = parse_script(text);
    EXPECT_EQ(to_string(again), text);
    EXPECT_EQ(again.algorithm, script.algorithm);
    EXPECT_EQ(again.is_rank_order, script.is_rank_order);
    EXPECT_EQ(again.shape.collective, script.shape.collective);
    EXPECT_EQ(again.shape.size, script.shape.size);
    EXPECT_EQ(again.shape.root, script.shape.root);
    EXPECT_EQ(again.shape.in_place, script.shape.in_place);
    ASSERT_EQ(again.schedules.size(), script.schedules.size());
    for (std::size_t rank = 0; rank < script.schedules.size(); ++rank) {
      EXPECT_EQ(again.schedules[rank].steps, script.schedules[rank].steps) << text;
      EXPECT_TRUE(is_same_otherwise(again.schedules[rank], script.schedules[rank])) << text;
    }
  });
}

TEST_P(EveryText, Verifies) {
  for_each_script(GetParam(), test::less_if_sanitized(9, 5), [](const Script& script) {
    const std::string text = to_string(script);
    EXPECT_EQ(verify(parse_script(text)), "") << text;
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryText,
                         testing::ValuesIn(algorithms().begin(), algorithms().end()),
                         [](const auto& row) { return std::string(row.param.name); });

/// What parse_script() says.
std::string message(const std::string& text) {
  try {
    const Script script = parse_script(text);
    return "accepted: " + to_string(script);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::argument);
    return error.what();
  }
}

constexpr const char* kDirect =
    "schedule reduce\n"    // 1
    "algorithm by_hand\n"  // 2
    "ranks 2\n"            // 3
    "root 1\n"             // 4
    "chunks 3\n"           // 5
    "form direct\n"        // 6
    "\n"                   // 7
    "rank 0\n"             // 8
    "  signal 1\n"         // 9
    "  wait 1\n"           // 10
    "\n"                   // 11
    "rank 1\n"             // 12
    "  wait 0\n"           // 13
    "  reduce out(1, 0..2) <- in(0, 0..2) in(1, 0..2)\n"
    "  signal 0\n";

constexpr const char* kLowered =
    "schedule broadcast\n"  // 1
    "ranks 2\n"
    "root 0\n"
    "chunks 2\n"
    "form lowered\n"  // 5
    "stages 2\n"
    "slots 0: flag 0..1\n"
    "\n"
    "rank 0\n"
    "  readers 1\n"  // 10
    "  0: copy out(0, 0..1) scratch(0 slot 1, 0..1) <- in(0, 0..1)\n"
    "  0: signal slot 1\n"
    "\n"
    "rank 1\n"
    "  1: wait 0 slot 1\n"  // 15
    "  1: copy out(1, 0..1) <- scratch(0 slot 1, 0..1)\n";

std::string changed(const std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.substr(0, at) + to + text.substr(at + from.size());
}

/// docs/adding.md shows it.
constexpr const char* kExample = R"(
schedule allreduce
algorithm two_shot
ranks 2
rank_order
chunks 2
form direct

rank 0
  signal 1
  wait 1
  reduce out(0, 0) out(1, 0) <- in(0, 0) in(1, 0)
  signal 1
  wait 1

rank 1
  signal 0
  wait 0
  reduce out(1, 1) out(0, 1) <- in(0, 1) in(1, 1)
  signal 0
  wait 0
)";

TEST(Text, OfTheDocumentation) {
  Shape shape;
  shape.size = 2;
  EXPECT_EQ("\n" + to_string(make(*find_algorithm("two_shot"), shape, Form::direct)), kExample);
  EXPECT_EQ(verify(parse_script(kExample)), "");
  EXPECT_EQ(verify(parse_script(changed(kExample, "  wait 1\n", ""))),
            "call 0 (allreduce): rank 0, step 1 `reduce out(0, 0) out(1, 0) <- in(0, 0) in(1, "
            "0)`: in(1, 0): its rank may not be in the call yet");
}

TEST(Text, WrittenByHand) {
  for (const char* text : {kDirect, kLowered}) {
    EXPECT_EQ(to_string(parse_script(text)), text);
    EXPECT_EQ(verify(parse_script(text)), "");
  }
}

TEST(Text, SpacesAndCommentsDoNotCount) {
  std::string text = std::string("# a Reduce\r\n\n") + kDirect + "\n\n  # the end";
  text = changed(text, "ranks 2", "\tranks   2 # no more\r");
  text = changed(text, "out(1, 0..2) <-", "out ( 1,0 .. 2)<-");
  EXPECT_EQ(to_string(parse_script(text)), kDirect);
}

TEST(Text, WhatIsNotRightIsReported) {
  EXPECT_EQ(verify(parse_script(changed(kDirect, "  wait 0\n", ""))),
            "call 0 (reduce, root 1): rank 1, step 0 `reduce out(1, 0..2) <- in(0, 0..2) in(1, "
            "0..2)`: in(0, 0..2): its rank may not be in the call yet");
  EXPECT_EQ(verify(parse_script(changed(kDirect, "in(0, 0..2) in(1", "in(1, 0..2) in(1"))),
            "call 0 (reduce, root 1): rank 1, at the end: out(1, 0): a contribution is in it "
            "twice: (1 1)");
  EXPECT_EQ(verify(parse_script(changed(kLowered, "  1: wait 0 slot 1\n", ""))),
            "call 0 (broadcast, root 0): rank 1, step 0 `copy out(1, 0..1) <- scratch(0 slot 1, "
            "0..1)`: scratch(0 slot 1, 0..1): read without waiting for its slot");
}

/// Calls that are all alike, and in which all ranks wait for all, hide that.
TEST(Text, ACreditThatIsMissingIsReported) {
  Script script;
  script.shape.size = 3;
  script.is_rank_order = true;
  script.schedules =
      lower(all_ranks(*find_algorithm("one_shot"), script.shape), script.shape, Reach::scratch);
  EXPECT_EQ(verify(script), "");
  script.schedules[1].readers.pop_back();
  EXPECT_EQ(verify(script).find("with Reduces in between: call "), 0u) << verify(script);
}

TEST(Text, SlotsMayLieApart) {
  const std::string text = changed(kLowered, "flag 0..1", "flag @ 3 0..1 @ 7");
  const Script script = parse_script(text);
  EXPECT_EQ(to_string(script), text);
  EXPECT_EQ(script.schedules[1].units, 9);
  EXPECT_EQ(script.schedules[1].flags, 2);
  EXPECT_EQ(verify(script), "");
}

struct Wrong {
  const char* text;
  const char* from;
  const char* to;
  const char* message;
};

TEST(Text, WrongTextsAreErrorsWithTheLine) {
  const Wrong all[] = {
      {kDirect, "schedule reduce", "script reduce", "line 1: `script`; expected: schedule"},
      {kDirect, "schedule reduce", "schedule gather",
       "line 1: `gather` is no collective; accepted: allreduce, reduce, reduce_scatter, "
       "reduce_scatter_block, allgather, broadcast"},
      {kDirect, "by_hand", "by-hand", "line 2: `-` is too much"},
      {kDirect, "by_hand", "",
       "line 2: the end of the line is no name; accepted: up to 64 letters, digits and "
       "underscores"},
      {kDirect, "ranks 2", "nodes 2", "line 3: `nodes`; expected: ranks"},
      {kDirect, "algorithm by_hand\nranks 2", "nodes 2",
       "line 2: `nodes`; accepted here: algorithm, ranks"},
      {kDirect, "ranks 2", "ranks 0", "line 3: `0` is no number of ranks; accepted: 1 to 128"},
      {kDirect, "ranks 2", "ranks 129", "line 3: `129` is no number of ranks; accepted: 1 to 128"},
      {kDirect, "ranks 2", "ranks 99999999999999999999",
       "line 3: `99999999999999999999` is no number of ranks; accepted: 1 to 128"},
      {kDirect, "root 1", "root 2", "line 4: `2` is no rank; accepted: 0 to 1"},
      {kDirect, "root 1\n", "", "line 4: `chunks`; expected: root"},
      {kDirect, "chunks 3", "chunk 3",
       "line 5: `chunk`; accepted here: in_place, rank_order, chunks"},
      {kDirect, "chunks 3", "chunks 4097",
       "line 5: `4097` is no number of chunks; accepted: 1 to 4096"},
      {kDirect, "form direct", "form straight",
       "line 6: `straight` is no form; accepted: direct, lowered"},
      {kDirect, "rank 0", "rank 1", "line 8: `1` is no rank; accepted: 0"},
      {kDirect, "signal 1", "signals 1",
       "line 9: `signals` is no step; accepted: copy, reduce, signal, wait"},
      {kDirect, "signal 1", "signal 1 2", "line 9: `2` is no rank; accepted: 0 to 1"},
      {kDirect, "signal 1", "signal", "line 9: the end of the line is no rank; accepted: 0 to 1"},
      {kDirect, "signal 1", "signal \x80\n", "line 9: `?` is no rank; accepted: 0 to 1"},
      {kDirect, "signal 1", "signal -1", "line 9: `-` is no rank; accepted: 0 to 1"},
      {kDirect, "signal 1", "readers 1",
       "line 9: `readers` is no step; accepted: copy, reduce, signal, wait"},
      {kDirect, "wait 1", "wait 1 0", "line 10: `0` is too much"},
      {kDirect, "rank 1\n", "rank 2\n", "line 12: `2` is no rank; accepted: 1"},
      {kDirect, "out(1, 0..2)", "", "line 14: `<-` is no buffer; accepted: in, out, scratch"},
      {kDirect, "out(1, 0..2) <-", "out(1, 0..2)",
       "line 14: the end of the line is no buffer; accepted: in, out, scratch"},
      {kDirect, "<- in(0, 0..2) in(1, 0..2)", "<-",
       "line 14: the end of the line is no buffer; accepted: in, out, scratch"},
      {kDirect, "in(0, 0..2)", "in(2, 0..2)", "line 14: `2` is no rank; accepted: 0 to 1"},
      {kDirect, "in(0, 0..2)", "in(0, 3)", "line 14: `3` is no chunk; accepted: 0 to 2"},
      {kDirect, "in(0, 0..2)", "in(0, 1..3)", "line 14: `3` is no last chunk; accepted: 1 to 2"},
      {kDirect, "in(0, 0..2)", "in(0, 2..1)", "line 14: `1` is no last chunk; accepted: 2"},
      {kDirect, "in(0, 0..2)", "in(0 0..2)", "line 14: `0`, where `,` is expected"},
      {kDirect, "in(0, 0..2)", "in 0", "line 14: `0`, where `(` is expected"},
      {kDirect, "in(0, 0..2)", "scratch(0, 0..2)", "line 14: `,`, where `slot` is expected"},
      {kDirect, "in(0, 0..2)", "scratch(0 slot 4096, 0..2)",
       "line 14: `4096` is no slot; accepted: 0 to 4095"},
      {kDirect, "reduce out", "copy out", "line 14: `in` is too much"},
      {kDirect, "signal 0\n", "signal 0\nrank 2\n", "line 16: `rank` behind the last rank's steps"},
      {kLowered, "stages 2", "stages 65", "line 6: `65` is no number of stages; accepted: 1 to 64"},
      {kLowered, "slots 0: flag 0..1\n", "", "line 10: `1` is no slot; accepted: none"},
      {kLowered, "slots 0:", "slots 2:", "line 7: `2` is no rank that has slots; accepted: 0 to 1"},
      {kLowered, "slots 0: flag 0..1", "slots 1: 0\nslots 1: 1",
       "line 8: `1` is no rank that has slots; accepted: none"},
      {kLowered, "flag 0..1", "", "line 7: the end of the line is no chunk; accepted: 0 to 1"},
      {kLowered, "flag 0..1", "flog", "line 7: `flog` is no chunk; accepted: 0 to 1"},
      {kLowered, "flag 0..1", "0..1 1 @ 1", "line 7: `1` is no place; accepted: 2 to 1048576"},
      {kLowered, "readers 1", "readers 1 1", "line 10: `1` is no reader; accepted: none"},
      {kLowered, "0: copy", "copy", "line 11: `copy` is no stage; accepted: 0 to 1"},
      {kLowered, "0: copy", "0 copy", "line 11: `copy`, where `:` is expected"},
      {kLowered, "0: copy", "1: copy", "line 12: `0` is no stage; accepted: 1"},
      {kLowered, "signal slot 1", "signal 1", "line 12: `1`, where `slot` is expected"},
      {kLowered, "signal slot 1", "signal slot 2", "line 12: `2` is no slot; accepted: 0 to 1"},
      {kLowered, "wait 0 slot 1", "wait 1 slot 0", "line 15: `0` is no slot; accepted: none"},
  };
  for (const Wrong& wrong : all)
    EXPECT_EQ(message(changed(wrong.text, wrong.from, wrong.to)), wrong.message)
        << "for " << wrong.to;
}

TEST(Text, ShortTextsAreErrors) {
  EXPECT_EQ(message(""), "line 1: the text ends; expected: schedule");
  EXPECT_EQ(message("schedule allreduce"),
            "line 1: the text ends; accepted here: algorithm, ranks");
  EXPECT_EQ(message("schedule allreduce\nranks 2\nchunks 1\nform direct\nrank 0\n"),
            "line 5: the text ends; expected: rank");
}

/// Every beginning, and every text with a part left out or doubled: an error, or a schedule.
TEST(Text, DamagedTextsDoNoHarm) {
  for (const std::string text : {kDirect, kLowered}) {
    for (std::size_t begin = 0; begin < text.size(); ++begin) {
      for (const std::size_t length : {std::size_t{1}, std::size_t{7}, text.size()}) {
        const std::string part = text.substr(begin, length);
        for (const std::string& damaged :
             {changed(text, part, ""), changed(text, part, part + part)}) {
          try {
            const Script script = parse_script(damaged);
            EXPECT_EQ(to_string(parse_script(to_string(script))), to_string(script));
            verify(script);
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::argument) << error.what();
          }
        }
      }
    }
  }
}

TEST(Text, WhatWouldTakeTooMuchMemoryIsRefused) {
  std::string slots = "slots 0:";
  for (int i = 0; i <= kMaxScriptSlots; ++i) slots += " flag";
  EXPECT_EQ(message(changed(kLowered, "slots 0: flag 0..1", slots)),
            "line 7: too many slots; accepted: 4096 of a rank");

  std::string many = "schedule allreduce\nranks 128\nchunks 1\nform lowered\n";
  for (int rank = 0; rank < 128; ++rank) {
    many += "slots " + std::to_string(rank) + ":";
    for (int i = 0; i < 1000; ++i) many += " flag";
    many += "\n";
  }
  EXPECT_EQ(message(many), "line 70: too many slots for so many ranks; accepted: 65536 in all");

  std::string wide = changed(kLowered, "flag 0..1", "flag @ 1048576 0..1");
  EXPECT_EQ(message(wide).substr(0, 8), "accepted");
  wide = changed(kLowered, "flag 0..1", "0..1 @ 1048576 flag");
  EXPECT_EQ(message(wide), "line 7: the slots hold too much");

  std::string large = "schedule allreduce\nranks 128\nchunks 4096\nform direct\n";
  for (int rank = 0; rank < 128; ++rank) large += "rank " + std::to_string(rank) + "\n";
  large += "copy scratch(127 slot 4095, 0) <- in(127, 0)\n";
  EXPECT_EQ(verify(parse_script(large)), "too large to be verified");
}

/// A fold that would be 2^100 letters long.
TEST(Text, MessagesBreakOff) {
  std::string text = "schedule allreduce\nranks 1\nchunks 1\nform direct\nrank 0\n";
  text += "reduce out(0, 0) <- in(0, 0) in(0, 0)\n";
  for (int i = 0; i < 100; ++i) text += "reduce out(0, 0) <- out(0, 0) out(0, 0)\n";
  const std::string fault = verify(parse_script(text));
  EXPECT_NE(fault.find("twice"), std::string::npos);
  EXPECT_LT(fault.size(), 25000U);
}

}  // namespace
}  // namespace trib

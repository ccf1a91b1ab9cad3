// SPDX-License-Identifier: BSD-3-Clause
// What ranks share, on machines that hwloc makes up, for ranks that are bound in all ways.
#include "comm/topology.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

Topology synthetic(const char* machine, Config::Levels wanted = Config::Levels::automatic) {
  ::setenv("HWLOC_SYNTHETIC", machine, 1);
  Topology topology = read_topology(wanted);
  ::unsetenv("HWLOC_SYNTHETIC");
  return topology;
}

cpu_set_t processors(int first, int count = 1) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < count; ++i) CPU_SET(first + i, &set);
  return set;
}

/// Each rank on `count` processors from `first[rank]` on.
std::vector<cpu_set_t> bound(const std::vector<int>& first, int count = 1) {
  std::vector<cpu_set_t> all;
  for (const int one : first) all.push_back(processors(one, count));
  return all;
}

// Sockets of 16 processors, NUMA nodes of 8, L3 caches of 8, cores of 2.
constexpr const char* kMachine = "pack:2 [numa] l3:2 core:4 pu:2";
// NUMA nodes within sockets, L3 caches within NUMA nodes.
constexpr const char* kDeep = "pack:2 group:2 [numa] l3:2 core:2 pu:1";

class Machine : public testing::Test {
 protected:
  void SetUp() override {
    if (!machine_.missing.empty()) GTEST_SKIP() << machine_.missing;
  }
  std::string levels(const std::vector<cpu_set_t>& bindings) const {
    return to_string(levels_of(machine_, bindings));
  }
  const Topology machine_ = synthetic(kMachine);
};

TEST_F(Machine, HasKinds) {
  const Topology all = synthetic(kMachine, Config::Levels::none);
  ASSERT_EQ(all.kinds.size(), 5u);
  const std::pair<std::string_view, std::size_t> expected[] = {
      {"socket", 2}, {"numa", 2}, {"l3", 4}, {"l2", 0}, {"core", 16}};
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(all.kinds[i].kind, expected[i].first);
    EXPECT_EQ(all.kinds[i].processors.size(), expected[i].second) << all.kinds[i].kind;
  }
  const cpu_set_t second = processors(8, 8);
  EXPECT_TRUE(CPU_EQUAL(&all.kinds[2].processors[1], &second));
  EXPECT_EQ(machine_.kinds.size(), 3u);
  EXPECT_EQ(synthetic(kMachine, Config::Levels::core).kinds.size(), 1u);
}

TEST_F(Machine, BoundToCores) {
  EXPECT_EQ(levels(bound({0, 2, 8, 10, 16, 18, 24, 26}, 2)), "0,0,0,0,1,1,1,1/0,0,1,1,2,2,3,3");
}

TEST_F(Machine, BoundToHyperthreads) {
  EXPECT_EQ(levels(bound({0, 1, 16, 17})), "0,0,1,1");
  const Topology cores = synthetic(kMachine, Config::Levels::core);
  EXPECT_EQ(to_string(levels_of(cores, bound({0, 1, 16, 17, 18}))), "0,0,1,1,2");
}

TEST_F(Machine, BoundToSockets) { EXPECT_EQ(levels(bound({0, 16, 0, 16, 0}, 16)), "0,1,0,1,0"); }

TEST_F(Machine, DealtOutInTurn) {
  EXPECT_EQ(levels(bound({16, 0, 24, 8, 17, 1, 25, 9})), "0,1,0,1,0,1,0,1/0,1,2,3,0,1,2,3");
}

TEST_F(Machine, MoreRanksThanProcessors) {
  EXPECT_EQ(levels(bound({0, 0, 0, 16, 16, 16})), "0,0,0,1,1,1");
}

TEST_F(Machine, UnequalDomains) { EXPECT_EQ(levels(bound({0, 1, 2, 3, 4, 16})), "0,0,0,0,0,1"); }

TEST_F(Machine, NothingToTellApart) {
  EXPECT_EQ(levels(bound({0, 0, 0, 0}, 32)), "");      // unbound
  EXPECT_EQ(levels(bound({0, 1, 2, 3})), "");          // one cache
  EXPECT_EQ(levels(bound({0, 16})), "");               // each alone
  EXPECT_EQ(levels(bound({0, 8, 16, 24, 4}, 9)), "");  // across caches and sockets
}

/// One rank that spans domains leaves the level out for all.
TEST_F(Machine, SomeUnbound) {
  std::vector<cpu_set_t> bindings = bound({0, 8, 16, 24, 1});
  bindings.push_back(processors(0, 16));
  EXPECT_EQ(levels(bindings), "0,0,1,1,0,0");
  bindings.back() = processors(0, 32);
  EXPECT_EQ(levels(bindings), "");
}

/// Whose processors cannot be told.
TEST_F(Machine, UnknownBinding) {
  std::vector<cpu_set_t> bindings = bound({0, 1, 16, 17});
  std::memset(&bindings[1], 0xff, sizeof bindings[1]);
  EXPECT_EQ(levels(bindings), "");
}

TEST_F(Machine, NumaNodesWithinSockets) {
  const std::vector<cpu_set_t> bindings = bound({0, 1, 2, 4, 8, 9, 12, 15});
  EXPECT_EQ(to_string(levels_of(synthetic(kDeep), bindings)),
            "0,0,0,0,1,1,1,1/0,0,0,1,2,2,3,3/0,0,1,2,3,3,4,5");
  EXPECT_EQ(to_string(levels_of(synthetic(kDeep, Config::Levels::numa), bindings)),
            "0,0,0,1,2,2,3,3");
}

TEST_F(Machine, SocketsWithinNumaNodes) {
  EXPECT_EQ(to_string(levels_of(synthetic("group:2 [numa] pack:2 core:2 pu:1"),
                                bound({0, 1, 2, 3, 4, 5, 6, 7}))),
            "0,0,0,0,1,1,1,1/0,0,1,1,2,2,3,3");
}

TEST(Levels, WithoutHwloc) {
  Topology none;
  none.missing = "no libhwloc.so.15";
  EXPECT_TRUE(levels_of(none, bound({0, 1, 2})).empty());
}

TEST(Levels, ThisMachine) {
  const Topology topology = read_topology(Config::Levels::none);
  if (!topology.missing.empty()) GTEST_SKIP() << topology.missing;
  ASSERT_EQ(topology.kinds.size(), 5u);
  EXPECT_GE(topology.kinds[0].processors.size() + topology.kinds[1].processors.size(), 1u);
}

TEST(Levels, AreCanonical) {
  EXPECT_EQ(to_string(make_levels({{7, 7, 3, 3}, {9, 8, 9, 8}})), "0,0,1,1");  // the second cuts
  EXPECT_EQ(to_string(make_levels({{1, 2, 3, 4}, {5, 5, 5, 5}})), "");
  EXPECT_EQ(to_string(make_levels({{4, 4, 5, 6, 6}, {1, 1, 1, 0, 0}, {2, 2, 2, 3, 3}})),
            "0,0,0,1,1/0,0,1,2,2");
  EXPECT_EQ(make_levels({}), Levels{});
}

TEST(Levels, AsText) {
  for (const std::string text : {"0,0,1,1", "0,1,0,1,1/0,1,0,1,2"}) {
    const int ranks = static_cast<int>(text.find('/') == text.npos ? 4 : 5);
    EXPECT_EQ(to_string(parse_levels(text, ranks)), text);
  }
  EXPECT_EQ(to_string(parse_levels("5,5,2", 3)), "0,0,1");
  for (const std::string_view wrong :
       {"", "0", "0,0,1", "0,0,1,1,1", "0,0,1,x", "0,0,1,-1", "0,0,1,1/", "0,0,1,1/0", "0 0 1 1"})
    EXPECT_THROW(parse_levels(wrong, 4), Error) << wrong;
}

TEST(Levels, HaveKeys) {
  EXPECT_EQ(layout_of({}), 0u);
  EXPECT_NE(layout_of(parse_levels("0,0,1,1", 4)), layout_of(parse_levels("0,1,0,1", 4)));
  EXPECT_EQ(layout_of(parse_levels("0,0,1,1", 4)), layout_of(parse_levels("3,3,0,0", 4)));
}

TEST(Levels, RanksAgree) {
  ::setenv("HWLOC_SYNTHETIC", kMachine, 1);
  const auto agreed = [](int size, Config::Levels setting, const std::vector<cpu_set_t>& bindings) {
    std::vector<std::string> all(static_cast<std::size_t>(size));
    Config config;
    config.levels = setting;
    test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      all[static_cast<std::size_t>(rank)] =
          to_string(agree_on_levels(*bootstrap, config, bindings));
    });
    for (const std::string& text : all) EXPECT_EQ(text, all[0]);
    return all[0];
  };
  const std::vector<cpu_set_t> nine = bound({0, 16, 1, 17, 2, 18, 3, 19, 4});
  const std::vector<cpu_set_t> eight(nine.begin(), nine.end() - 1);
  const bool is_known = read_topology(Config::Levels::automatic).missing.empty();
  EXPECT_EQ(agreed(9, Config::Levels::automatic, nine), is_known ? "0,1,0,1,0,1,0,1,0" : "");
  EXPECT_EQ(agreed(9, Config::Levels::none, nine), "");
  EXPECT_EQ(agreed(8, Config::Levels::automatic, eight), "");
  EXPECT_EQ(agreed(8, Config::Levels::socket, eight), is_known ? "0,1,0,1,0,1,0,1" : "");
  EXPECT_EQ(agreed(9, Config::Levels::automatic, bound(std::vector<int>(9, 0), 32)), "");
  // Communicators of one process may have settings of their own.
  const std::vector<cpu_set_t> caches = bound({0, 8, 16, 24, 1});
  EXPECT_EQ(agreed(5, Config::Levels::socket, caches), is_known ? "0,0,1,1,0" : "");
  EXPECT_EQ(agreed(5, Config::Levels::l3, caches), is_known ? "0,1,2,3,0" : "");
  ::unsetenv("HWLOC_SYNTHETIC");
}

}  // namespace
}  // namespace trib

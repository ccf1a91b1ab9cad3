// SPDX-License-Identifier: BSD-3-Clause
// The default table answers every key, and the settings are obeyed or refused.
#include "tune/select.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "tune/findings.hpp"

namespace trib {
namespace {

TEST(Select, EveryKeyHasAnAlgorithm) {
  for (int collective = 0; collective < kAllCollectives; ++collective)
    for (int size = 2; size <= 200; ++size)
      for (std::size_t bytes = 1; bytes < (std::size_t{1} << 42); bytes *= 3) {
        Key key;
        key.collective = static_cast<Collective>(collective);
        key.size = size;
        key.bytes = bytes;
        for (const auto place : {Key::Place::host, Key::Place::staged, Key::Place::device}) {
          key.place = place;
          const Algorithm* const algorithm = select(key, Config{}).algorithm;
          ASSERT_NE(algorithm, nullptr);
          EXPECT_TRUE(algorithm->serves(key.collective)) << algorithm->name;
        }
        key.place = Key::Place::host;
        Config ordered;
        ordered.determinism = Config::Determinism::order;
        const Choice choice = select(key, ordered);
        ASSERT_NE(choice.algorithm, nullptr);
        if (!is_scatter(key.collective)) {
          EXPECT_EQ(choice.algorithm->association, Association::rank_order);
        }
      }
}

TEST(Select, OrderHoldsForScattersToo) {
  Config ordered;
  ordered.determinism = Config::Determinism::order;
  Key key;
  key.collective = Collective::reduce_scatter;
  key.size = 64;
  for (key.bytes = 1; key.bytes < (1u << 30); key.bytes *= 2)
    EXPECT_EQ(select(key, ordered).algorithm->association, Association::rank_order) << key.bytes;
}

/// Settings that send calls on devices another way.
std::vector<Config> device_settings() {
  std::vector<Config> all(1);
  const auto with = [&](auto&& change) { change(all.emplace_back()); };
  with([](Config& its) { its.determinism = Config::Determinism::order; });
  for (const auto engine : {Config::Engine::kernel, Config::Engine::copy})
    with([&](Config& its) { its.engine = engine; });
  for (const auto protocol : {Config::Protocol::simple, Config::Protocol::packet})
    with([&](Config& its) { its.protocol = protocol; });
  for (const auto map : {Config::Map::off, Config::Map::results, Config::Map::always})
    with([&](Config& its) { its.map = map; });
  return all;
}

/// Whatever serves buffers on devices, but on a caller's stream, gives the same bits, whether they
/// can be mapped, copied or have to be staged: those of a fold in rank order, but for the longest
/// Reduces.
TEST(Select, StandInsFoldLikeDevices) {
  const std::vector<Config> settings = device_settings();
  for (int collective = 0; collective < kCollectives; ++collective)
    for (int size = 2; size <= 9; ++size)
      for (std::size_t bytes = 8; bytes < (std::size_t{1} << 32); bytes *= 2)
        for (const bool is_widened : {false, true})
          for (const Config& config : settings) {
            Key key;
            key.collective = static_cast<Collective>(collective);
            key.size = size;
            key.bytes = bytes;
            key.is_widened = is_widened;
            key.place = Key::Place::staged;
            const Association staged = association_of(*select(key, config).algorithm, key);
            if (&config == &settings.front()) {
              const bool is_chain = key.collective == Collective::reduce && size > 2 && size <= 4 &&
                                    bytes > (32u << 20) && !is_widened;
              EXPECT_EQ(staged, is_chain ? Association::chain : Association::rank_order)
                  << name(key.collective) << " " << size << " " << bytes;
            }
            key.has_little_room = key.is_crowded = true;
            EXPECT_EQ(association_of(*select(key, config).algorithm, key), staged);
            key.place = Key::Place::device;
            for (const bool can_copy : {false, true})
              for (const bool can_map : {false, true}) {
                key.can_copy = can_copy;
                key.can_map = can_map;
                EXPECT_EQ(association_of(*select(key, config).algorithm, key), staged)
                    << name(key.collective) << " " << size << " " << bytes;
              }
          }
}

/// Where ranks share devices, nothing travels.
TEST(Select, RanksThatShareDevicesHaveNoChain) {
  Key key;
  key.collective = Collective::reduce;
  key.size = 4;
  key.bytes = 64u << 20;
  for (const auto place : {Key::Place::staged, Key::Place::device}) {
    key.place = place;
    key.shares_devices = false;
    EXPECT_EQ(select(key, Config{}).algorithm->name, "chain");
    key.shares_devices = true;
    EXPECT_NE(select(key, Config{}).algorithm->name, "chain");
  }
}

/// What is tuned for staged calls keeps the bits of devices, whatever freedom others have.
TEST(Select, StagedCallsHaveNoFreedom) {
  Key key;
  key.collective = Collective::reduce;
  key.size = 4;
  key.place = Key::Place::staged;
  Config free;
  free.determinism = Config::Determinism::any;
  for (key.bytes = 8; key.bytes < (std::size_t{1} << 30); key.bytes *= 4)
    for (const Choice& choice : candidates(key, free))
      EXPECT_EQ(association_of(*choice.algorithm, key),
                association_of(*select(key, Config{}).algorithm, key));
}

/// On the host, a vector travels from rank to rank only where each has a core, where its sums need
/// no rounding on their way, and in long slices. What stands in for that has the same bits.
TEST(Select, LongVectorsOfRanksWithCoresTravel) {
  Key key;
  for (int collective = 0; collective < kCollectives; ++collective)
    for (key.size = 2; key.size <= 70; ++key.size)
      for (key.bytes = 8; key.bytes <= 256u << 20; key.bytes += key.bytes / 8) {
        key.collective = static_cast<Collective>(collective);
        const Algorithm& usual = *select(key, Config{}).algorithm;
        const bool is_of_few = key.collective == Collective::allreduce && key.size < 9;
        if (key.size > 2 && key.size <= 32 && key.bytes >= 512u << 10) {
          EXPECT_EQ(usual.name == "ring", !is_of_few) << key.size << " " << key.bytes;
        }
        for (bool* const obstacle : {&key.is_crowded, &key.has_little_room}) {
          *obstacle = true;
          const Algorithm& other = *select(key, Config{}).algorithm;
          EXPECT_NE(other.name, "ring");
          EXPECT_EQ(other.association, usual.association) << key.size << " " << key.bytes;
          *obstacle = false;
        }
        for (const bool is_widened : {true, false}) {
          key.is_widened = is_widened;
          const Algorithm& chosen = *select(key, Config{}).algorithm;
          EXPECT_FALSE(is_widened && chosen.association == Association::ring);
          const auto mapped = mapped_choice(key, Config{});
          EXPECT_TRUE(!mapped || mapped->algorithm->association == chosen.association);
        }
      }
}

/// No row for shorter vectors, or for other numbers of ranks, comes in between.
TEST(Select, WhatIsLongerThanWhatTravelsDoesSoToo) {
  for (int collective = 0; collective < kCollectives; ++collective)
    for (int size = 3; size <= 32; ++size) {
      bool travels = false;
      for (std::size_t bytes = 1024; bytes <= 64u << 20;
           bytes += std::max(bytes / 64, std::size_t{1024})) {
        Key key;
        key.collective = static_cast<Collective>(collective);
        key.size = size;
        key.bytes = bytes;
        const bool does = select(key, Config{}).algorithm->name == "ring";
        EXPECT_TRUE(does || !travels) << name(key.collective) << " " << size << " " << bytes;
        travels = travels || does;
      }
      EXPECT_TRUE(travels || (collective == 0 && size < 9)) << collective << " " << size;
    }
}

/// Bits do not tell whose processors they were made on.
TEST(Select, TheProcessorsMakeChoicesOfOneAssociation) {
  int different = 0;
  for (int collective = 0; collective < kAllCollectives; ++collective)
    for (const bool is_crowded : {false, true})
      for (const auto determinism : {Config::Determinism::run, Config::Determinism::order})
        for (int size = 2; size <= 70; ++size)
          for (std::size_t bytes = 8; bytes <= 256u << 20; bytes += bytes / 2) {
            Key key;
            key.collective = static_cast<Collective>(collective);
            key.is_crowded = is_crowded;
            key.size = size;
            key.bytes = bytes;
            Config config;
            config.determinism = determinism;
            const Choice usual = select(key, config);
            key.is_intel = true;
            const Choice choice = select(key, config);
            different += choice == usual ? 0 : 1;
            EXPECT_EQ(association_of(*choice.algorithm, key), association_of(*usual.algorithm, key))
                << name(key.collective) << " " << size << " " << bytes;
            EXPECT_TRUE(determinism == Config::Determinism::run ||
                        association_of(*choice.algorithm, key) == Association::rank_order);
          }
  EXPECT_GT(different, 100);
}

TEST(Select, CallsOnStreamsFlowIntoEachOther) {
  Key key;
  key.collective = Collective::reduce;
  key.size = 4;
  key.bytes = 2u << 20;
  key.place = Key::Place::device;
  EXPECT_EQ(select(key, Config{}).algorithm->name, "two_shot");
  key.is_enqueued = true;
  EXPECT_EQ(select(key, Config{}).algorithm->name, "chain");
  Config ordered;
  ordered.determinism = Config::Determinism::order;
  EXPECT_EQ(select(key, ordered).algorithm->name, "two_shot");
  key.is_widened = true;
  EXPECT_EQ(select(key, Config{}).algorithm->name, "two_shot");
}

TEST(Select, OnStreamsNobodyReadsPeersBuffers) {
  Key key;
  key.place = Key::Place::device;
  key.is_enqueued = key.can_map = true;
  Config always;
  always.map = Config::Map::always;
  for (const int size : {2, 3, 4, 8, 16})
    for (std::size_t bytes = 8; bytes <= std::size_t{1} << 31; bytes *= 2) {
      key.size = size;
      key.bytes = bytes;
      const bool is_delivered = size == 2 ? bytes > (8u << 20) && bytes <= (32u << 20)
                                          : bytes > (512u << 10) && bytes <= (64u << 20);
      EXPECT_EQ(select(key, Config{}).reach, is_delivered ? Reach::push : Reach::scratch)
          << size << " ranks, " << bytes << " bytes";
      EXPECT_EQ(select(key, always).reach, Reach::push);
    }
}

TEST(Select, ShortVectorsGoByPackets) {
  Key key;
  key.place = Key::Place::device;
  key.can_map = true;
  for (const auto collective : {Collective::allreduce, Collective::reduce})
    for (const int size : {3, 4, 5, 8})
      for (const bool is_enqueued : {false, true}) {
        const std::size_t most = (size <= 4 ? 192u : 64u) << 10;
        key.collective = collective;
        key.size = size;
        key.is_enqueued = is_enqueued;
        for (const std::size_t bytes : {std::size_t{8}, most}) {
          key.bytes = bytes;
          const Choice choice = select(key, Config{});
          EXPECT_TRUE(choice.is_packet && choice.reach == Reach::scratch &&
                      choice.algorithm->name == "one_shot")
              << size << " ranks, " << bytes << " bytes, enqueued " << is_enqueued;
        }
        key.bytes = most + 1;
        EXPECT_EQ(select(key, Config{}).reach, is_enqueued ? Reach::scratch : Reach::map);
        EXPECT_EQ(select(key, Config{}).is_packet, is_enqueued && size > 4);
      }
}

TEST(Select, AnAlgorithmIsUsedWhereItServes) {
  for (int collective = 0; collective < kAllCollectives; ++collective)
    for (const Algorithm& named : algorithms())
      for (const auto place : {Key::Place::host, Key::Place::device}) {
        Config config;
        std::strcpy(config.algorithm, std::string(named.name).c_str());
        Key key;
        key.collective = static_cast<Collective>(collective);
        key.place = place;
        const Algorithm* const chosen = select(key, config).algorithm;
        EXPECT_EQ(chosen, named.serves(key.collective) ? &named : select(key, Config{}).algorithm)
            << named.name << " " << name(key.collective);
      }
}

TEST(Select, CopiesOnDevices) {
  constexpr std::size_t KiB = 1024;
  const auto choose = [](Collective collective, std::size_t bytes) {
    Key key;
    key.collective = collective;
    key.size = 8;
    key.bytes = bytes;
    key.place = Key::Place::device;
    return select(key, Config{});
  };
  for (const std::size_t bytes : {1 * KiB, 64 * KiB, 65 * KiB, 256 * KiB, 257 * KiB, 8192 * KiB}) {
    const Choice allgather = choose(Collective::allgather, bytes);
    EXPECT_EQ(allgather.algorithm->name, "one_shot");
    EXPECT_EQ(allgather.is_packet, bytes <= 256 * KiB);
    EXPECT_EQ(allgather.slice_bytes, (bytes <= 256 * KiB ? 1 : bytes <= 4096 * KiB ? 4 : 16) * KiB);
    const Choice broadcast = choose(Collective::broadcast, bytes);
    EXPECT_EQ(broadcast.algorithm->name, bytes <= 64 * KiB ? "one_shot" : "two_shot");
    EXPECT_EQ(broadcast.is_packet, bytes <= 64 * KiB);
    // What a flat kernel takes: a pass for each block.
    EXPECT_TRUE(!broadcast.is_packet ||
                bytes <= static_cast<std::size_t>(broadcast.blocks) * broadcast.slice_bytes);
  }
}

TEST(Select, CopyEnginesWhereTheyCanBeHad) {
  constexpr std::size_t MiB = 1 << 20;
  Key key;
  key.place = Key::Place::device;
  const auto engine = [&](std::size_t bytes, bool can_copy, const Config& config) {
    key.bytes = bytes;
    key.can_copy = can_copy;
    return select(key, config).engine;
  };
  for (int collective = 0; collective < kAllCollectives; ++collective) {
    key.collective = static_cast<Collective>(collective);
    const Engine wanted = is_reduction(key.collective) ? Engine::copy : Engine::kernel;
    Config config;
    key.size = 4;
    EXPECT_EQ(engine(512 * MiB, true, config),
              key.collective == Collective::reduce ? Engine::kernel : wanted);
    EXPECT_EQ(engine(256 * MiB, true, config), Engine::kernel);
    key.size = 8;
    EXPECT_EQ(engine(512 * MiB, true, config), Engine::kernel);
    key.size = 2;
    EXPECT_EQ(engine(512 * MiB, true, config), wanted) << name(key.collective);
    EXPECT_EQ(engine(16 * MiB, true, config), Engine::kernel);
    EXPECT_EQ(engine(512 * MiB, false, config), Engine::kernel);
    config.engine = Config::Engine::kernel;
    EXPECT_EQ(engine(512 * MiB, true, config), Engine::kernel);
    config.engine = Config::Engine::copy;
    EXPECT_EQ(engine(512 * MiB, true, config), wanted) << name(key.collective);
    EXPECT_EQ(engine(512 * MiB, false, config), Engine::kernel);
    EXPECT_EQ(engine(1, true, config), wanted);
    EXPECT_FALSE(select(key, config).is_packet && wanted == Engine::copy);
    EXPECT_EQ(engine(1, false, config), Engine::kernel);
  }
}

TEST(Select, MappedBuffersWhereTheyCanBeHad) {
  constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
  for (int collective = 0; collective < kAllCollectives; ++collective)
    for (const int size : {2, 3, 8})
      for (std::size_t bytes = 1; bytes < 4096 * MiB; bytes *= 2) {
        Key key;
        key.collective = static_cast<Collective>(collective);
        key.size = size;
        key.bytes = bytes;
        key.place = Key::Place::device;
        const Choice otherwise = select(key, Config{});
        EXPECT_EQ(otherwise.reach, Reach::scratch);
        key.can_map = true;
        const bool can = is_reduction(key.collective);
        const auto is_mapped = [&](const Config& config) {
          const Choice choice = select(key, config);
          if (choice.reach != Reach::scratch) {
            EXPECT_EQ(choice.algorithm->association, Association::rank_order);
            EXPECT_EQ(choice.engine, Engine::kernel);
            EXPECT_FALSE(choice.is_packet);
          }
          return choice.reach != Reach::scratch;
        };
        Config config;
        if (bytes == 4 * MiB) {
          EXPECT_EQ(is_mapped(config), can && !is_scatter(key.collective))
              << name(key.collective) << ", " << size;
        }
        if (bytes <= 16 * KiB || bytes > 64 * MiB) {
          EXPECT_FALSE(is_mapped(config));
        }
        if (!is_mapped(config)) {
          EXPECT_EQ(select(key, config), otherwise);
        }
        config.map = Config::Map::off;
        EXPECT_EQ(select(key, config), otherwise);
        // Who asks for another way gets it, unless he asks for this one as well.
        std::vector<Config> others(5);
        std::strcpy(others[0].algorithm, "ring");
        others[1].protocol = Config::Protocol::simple;
        others[2].slice = 4096;
        others[3].engine = Config::Engine::copy;
        others[4].engine = Config::Engine::gemv;
        for (Config& other : others) {
          EXPECT_FALSE(is_mapped(other));
          other.map = Config::Map::always;
          EXPECT_EQ(is_mapped(other), can && bytes <= 2048 * MiB);
          EXPECT_TRUE(!is_mapped(other) || select(key, other).reach == Reach::map);
          // Only kernels deliver results, and only to other ranks.
          other.map = Config::Map::results;
          const bool is_delivered = can && bytes <= 2048 * MiB && !is_scatter(key.collective) &&
                                    !is_driven_by_host(select(key, other).engine);
          EXPECT_EQ(select(key, other).reach, is_delivered ? Reach::push : Reach::scratch);
        }
      }
}

TEST(Select, WhatTuningFoundLeavesMappedBuffersAlone) {
  Key key;
  key.place = Key::Place::device;
  key.size = 4;
  key.bytes = 1 << 20;
  Finding row;
  row.place = key.place;
  row.ranks = key.size;
  row.bytes = key.bytes;
  row.is_default = false;
  row.best =
      Variant::of({find_algorithm("one_shot"), Reach::scratch, 4096, Engine::kernel, false, 64});
  const Findings findings = Findings().with(row);
  EXPECT_EQ(select(key, Config{}, &findings).algorithm->name, "one_shot");
  key.can_map = true;
  EXPECT_EQ(select(key, Config{}, &findings), select(key, Config{}));
  EXPECT_EQ(select(key, Config{}).reach, Reach::map);
}

TEST(Select, GemvWhereTheLibraryKnowsTheSum) {
  Key key;
  key.place = Key::Place::device;
  key.bytes = 1 << 20;
  Config config;
  config.engine = Config::Engine::gemv;
  const auto engine = [&](bool can_copy, bool can_gemv) {
    key.can_copy = can_copy;
    key.can_gemv = can_gemv;
    return select(key, config).engine;
  };
  for (int collective = 0; collective < kAllCollectives; ++collective) {
    key.collective = static_cast<Collective>(collective);
    EXPECT_EQ(engine(true, true), is_reduction(key.collective) ? Engine::gemv : Engine::kernel);
    EXPECT_EQ(engine(true, false), Engine::kernel);
    EXPECT_EQ(engine(false, true), Engine::kernel);
  }
  key.collective = Collective::allreduce;
  EXPECT_EQ(engine(true, true), Engine::gemv);
  EXPECT_FALSE(select(key, config).is_packet);
  config.determinism = Config::Determinism::order;
  EXPECT_THROW(select(key, config), Error);
}

TEST(Select, OrderRefusesAnAlgorithmThatFoldsOtherwise) {
  Config config;
  config.determinism = Config::Determinism::order;
  std::strcpy(config.algorithm, "ring");
  try {
    select(Key{}, config);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("TRIB_DETERMINISM=order"), std::string::npos)
        << error.what();
  }
}

TEST(Select, AttachOnlyWhereItIsPossible) {
  Config config;
  config.attach = Config::Attach::always;
  Key key;
  key.can_attach = true;
  for (const bool can_map : {false, true}) {
    key.place = Key::Place::device;
    key.can_map = can_map;
    for (std::size_t bytes = 4; bytes <= std::size_t{4} << 30; bytes *= 2) {
      key.bytes = bytes;
      EXPECT_NE(select(key, config).reach, Reach::attach) << bytes;
    }
  }
  key = {};
  EXPECT_EQ(select(key, config).reach, Reach::scratch);
  key.can_attach = true;
  EXPECT_EQ(select(key, config).reach, Reach::attach);
}

}  // namespace
}  // namespace trib

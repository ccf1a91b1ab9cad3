// SPDX-License-Identifier: BSD-3-Clause
// The default table answers every key, and the settings are obeyed or refused.
#include "tune/select.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "base/error.hpp"

namespace trib {
namespace {

TEST(Select, EveryKeyHasAnAlgorithm) {
  for (int collective = 0; collective < kCollectives; ++collective)
    for (int size = 2; size <= 200; ++size)
      for (std::size_t bytes = 1; bytes < (std::size_t{1} << 42); bytes *= 3) {
        Key key;
        key.collective = static_cast<Collective>(collective);
        key.size = size;
        key.bytes = bytes;
        EXPECT_NE(select(key, Config{}).algorithm, nullptr);
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
  EXPECT_EQ(select(key, config).reach, Reach::scratch);
  key.can_attach = true;
  EXPECT_EQ(select(key, config).reach, Reach::attach);
}

}  // namespace
}  // namespace trib

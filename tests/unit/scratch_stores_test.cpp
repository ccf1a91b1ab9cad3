// SPDX-License-Identifier: BSD-3-Clause
// The choice between stores into caches and past them, by what copies took: here, what they are
// said to have taken.
#include "backend/host/scratch_stores.hpp"

#include <gtest/gtest.h>

namespace trib::host {
namespace {

constexpr std::size_t kBytes = 8192;
constexpr std::uint64_t kLines = kBytes / 64;

/// Where a line takes so many ticks to write: how many of `copies` went past the caches.
int copies_past(ScratchStores& stores, int copies, std::uint64_t cached, std::uint64_t past) {
  int count = 0;
  for (int i = 0; i < copies; ++i) {
    const bool is_past = stores.is_past();
    count += is_past;
    if (stores.is_timed(kBytes)) stores.learn(is_past, (is_past ? past : cached) * kLines, kBytes);
  }
  return count;
}

TEST(ScratchStores, StayInTheCachesWhereThatIsQuick) {
  ScratchStores stores(2);
  EXPECT_EQ(copies_past(stores, 10000, 23, 5), 0);
}

TEST(ScratchStores, GoPastThemWhileLinesAreFarAway) {
  ScratchStores stores(2);
  EXPECT_GT(copies_past(stores, 10000, 90, 8), 9900);
  EXPECT_LT(copies_past(stores, 10000, 8, 8), 300);  // near again
  EXPECT_GT(copies_past(stores, 10000, 90, 8), 9900);
}

TEST(ScratchStores, OneSlowCopySaysNothing) {
  ScratchStores stores(2);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(copies_past(stores, 50, 10, 5), 0);
    EXPECT_EQ(copies_past(stores, 1, 100000, 5), 0);
  }
}

TEST(ScratchStores, ComeBackIfItIsTheSourceThatIsSlow) {
  ScratchStores stores(2);
  EXPECT_LT(copies_past(stores, 10000, 90, 80), 30);
}

TEST(ScratchStores, StayInTheCachesWithManyRanks) {
  ScratchStores stores(3);
  EXPECT_EQ(copies_past(stores, 1000, 90, 8), 0);
}

TEST(ScratchStores, FewShortCopiesAreTimed) {
  ScratchStores stores(2);
  int timed = 0;
  for (int i = 0; i < 160; ++i) timed += stores.is_timed(ScratchStores::kLeastBytes);
  EXPECT_EQ(timed, 10);
}

}  // namespace
}  // namespace trib::host

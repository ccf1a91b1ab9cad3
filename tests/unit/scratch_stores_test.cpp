// SPDX-License-Identifier: BSD-3-Clause
// The choice between stores into caches and past them, by what copies took: here, what they are
// said to have taken.
#include "backend/host/scratch_stores.hpp"

#include <gtest/gtest.h>

namespace trib::host {
namespace {

/// Where a line takes so many ticks to write: how many of `copies` went past the caches.
int copies_past(ScratchStores& stores, int copies, std::uint64_t cached, std::uint64_t past,
                std::size_t bytes = 8192) {
  int count = 0;
  for (int i = 0; i < copies; ++i) {
    const auto [is_past, is_timed] = stores.next_copy(bytes);
    count += is_past;
    if (is_timed) stores.learn(is_past, (is_past ? past : cached) * bytes / 64, bytes);
  }
  return count;
}

TEST(ScratchStores, StayInTheCachesWhereThatIsQuick) {
  ScratchStores stores(2);
  EXPECT_EQ(copies_past(stores, 10000, 15, 5), 0);
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
  for (int i = 0; i < 160; ++i) timed += stores.next_copy(ScratchStores::kLeastBytes).is_timed;
  EXPECT_EQ(timed, 10);
}

TEST(ScratchStores, ComeBackWithShortCopiesToo) {
  for (int longer = 0; longer < 16; ++longer) {
    ScratchStores stores(2);
    copies_past(stores, 100 + longer, 90, 8);
    EXPECT_TRUE(stores.is_past());
    copies_past(stores, 1000, 8, 8, ScratchStores::kLeastBytes);
    EXPECT_FALSE(stores.is_past());
  }
}

}  // namespace
}  // namespace trib::host

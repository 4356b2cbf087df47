#include "tokroute/random.h"

#include <array>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/chi_square.h"

namespace tokroute {
namespace {

using ::testing::ElementsAre;

std::vector<std::uint64_t> First(Random random, int count) {
  std::vector<std::uint64_t> draws;
  for (int i = 0; i < count; ++i) draws.push_back(random.Next());
  return draws;
}

// Golden values: decisions are promised to be the same bits everywhere, so these may never change.
TEST(RandomTest, IsSplitMix64) {  // The published sequence for this seed.
  EXPECT_THAT(First(Random(1234567), 5), ElementsAre(6457827717110365317U, 3203168211198807973U, 9817491932198370423U,
                                                     4593380528125082431U, 16408922859458223821U));
}

TEST(RandomTest, KeyedStreamsAreGolden) {  // From an independent computation.
  EXPECT_THAT(First(Random::For(7, 1, 63), 2), ElementsAre(13499620361606238984U, 3057529049819866123U));
  EXPECT_THAT(First(Random::For(7, 2, 63), 2), ElementsAre(11365002079116709920U, 6959583748819298746U));
  EXPECT_THAT(First(Random::For(7, 1, 0), 2), ElementsAre(5531519400795769300U, 6840196157732356029U));
}

TEST(RandomTest, BelowAndUnitAreGolden) {
  Random below(1234567), unit(1234567);
  EXPECT_THAT((std::array{below.Below(10), below.Below(10), below.Below(10), below.Below(10)}), ElementsAre(3U, 1U, 5U, 2U));
  EXPECT_EQ(unit.Unit(), 0x1.667b405fec23ep-2);
}

TEST(RandomTest, BelowZeroAndOne) {
  Random random(1);
  EXPECT_EQ(random.Below(0), 0U);
  EXPECT_EQ(random.Below(1), 0U);
}

TEST(RandomTest, StaysInRange) {
  Random random(2);
  for (int i = 0; i < 100'000; ++i) {
    const double unit = random.Unit();
    ASSERT_TRUE(unit >= 0 && unit < 1) << unit;
    ASSERT_LT(random.Below(0xffffffffU), 0xffffffffU);
  }
}

TEST(RandomTest, DrawsAreSpreadEvenlyWithinAndAcrossDecisions) {
  std::array<std::int64_t, 8> within{}, across{}, stages{}, seeds{};
  Random one(3);
  for (std::uint64_t i = 0; i < 8'000; ++i) {
    ++within[one.Below(8)];
    ++across[Random::For(3, i, 63).Below(8)];  // Each decision's first draw: what breaks ties.
    ++stages[Random::For(3, 1, i).Below(8)];
    ++seeds[Random::For(i, 1, 63).Below(8)];
  }
  for (const auto& counts : {within, across, stages, seeds}) {
    EXPECT_LT(testing_support::ChiSquare(counts), testing_support::kFairOver8);
  }
}

TEST(RandomTest, KeysDoNotCollide) {
  std::set<std::uint64_t> first;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (std::uint64_t decision = 0; decision < 20; ++decision) {
      for (std::uint64_t stage = 0; stage < 64; ++stage) first.insert(Random::For(seed, decision, stage).Next());
    }
  }
  EXPECT_EQ(first.size(), 20U * 20 * 64);
}

}  // namespace
}  // namespace tokroute

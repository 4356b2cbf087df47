#include "tokroute/picker/max_score_picker.h"

#include <algorithm>
#include <limits>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "picker/picker_test_util.h"
#include "support/chi_square.h"
#include "support/test_run.h"
#include "tokroute/random.h"

namespace tokroute {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::ColumnOf;
using testing::Picked;
using testing::PickOf;
using testing::Seed;
using testing_support::CountPicks;

TEST(MaxScorePickerTest, BestTotalWins) {
  const Picked picked = PickOf(MaxScorePicker{}, {}, {0.2, 0.9, 0.5});
  EXPECT_THAT(picked.targets, ElementsAre(1));
  EXPECT_EQ(picked.choice.best, 0.9);
  EXPECT_EQ(picked.choice.runner_up, 0.5);
  EXPECT_EQ(picked.choice.tied, 1U);
}

TEST(MaxScorePickerTest, RunnerUpWhereverItStands) {
  for (std::vector<double> totals : {std::vector<double>{3, 2, 1}, {2, 3, 1}, {1, 3, 2}, {1, 2, 3}, {2, 1, 3}, {3, 1, 2}}) {
    const Picked picked = PickOf(MaxScorePicker{}, {}, totals);
    EXPECT_EQ(picked.choice.best, 3);
    EXPECT_EQ(picked.choice.runner_up, 2);
  }
}

TEST(MaxScorePickerTest, RunnerUpEqualsBestOnATieAndAlone) {
  EXPECT_EQ(PickOf(MaxScorePicker{}, {}, {0.5, 0.5, 0.1}).choice.runner_up, 0.5);
  EXPECT_EQ(PickOf(MaxScorePicker{}, {}, {0.5, 0.5, 0.1}).choice.tied, 2U);
  const Picked alone = PickOf(MaxScorePicker{}, {}, {0.25});
  EXPECT_EQ(alone.choice.runner_up, 0.25);
  EXPECT_EQ(alone.choice.tied, 1U);
  EXPECT_THAT(alone.targets, ElementsAre(0));
}

TEST(MaxScorePickerTest, AllZeroIsATieOfAll) {
  const Picked picked = PickOf(MaxScorePicker{}, {}, {0, 0, 0});
  EXPECT_EQ(picked.choice.tied, 3U);
  EXPECT_EQ(picked.choice.best, 0);
  EXPECT_EQ(picked.choice.runner_up, 0);
}

// A policy's totals are never negative, but a picker may be asked directly; it ranks them too.
TEST(MaxScorePickerTest, NegativeTotalsAreRanked) {
  EXPECT_THAT(PickOf(MaxScorePicker{}, {}, {-2, -1}).targets, ElementsAre(1));
  EXPECT_THAT(PickOf(MaxScorePicker({.max_targets = 3}), {}, {-5, -2, -3}).targets, ElementsAre(1, 2, 0));
  EXPECT_EQ(PickOf(MaxScorePicker{}, {}, {-5, -2, -3}).choice.runner_up, -3);
  EXPECT_EQ(PickOf(MaxScorePicker{}, {}, {-1, -1}).choice.tied, 2U);
  EXPECT_EQ(PickOf(MaxScorePicker{}, {}, {-4}).choice.best, -4);
}

TEST(MaxScorePickerTest, NoCandidatesNoTarget) {
  const Picked picked = PickOf(MaxScorePicker{}, {}, {});
  EXPECT_THAT(picked.targets, IsEmpty());
  EXPECT_EQ(picked.choice.tied, 0U);
}

TEST(MaxScorePickerTest, TiesAreUniform) {
  const auto counts = CountPicks(MaxScorePicker{}, 8'000, std::vector<double>(8, 0.5));
  EXPECT_LT(testing_support::ChiSquare(counts), testing_support::kFairOver8);
}

TEST(MaxScorePickerTest, TiesAreUniformWhereverTheyStand) {
  // 4 tied among 9: losers before, between and behind.
  const auto counts = CountPicks(MaxScorePicker{}, 8'000, {0, 1, 0.5, 1, 1, 0, 0.9, 1, 0.1});
  const std::vector<std::int64_t> winners = {counts[1], counts[3], counts[4], counts[7]};
  EXPECT_EQ(winners[0] + winners[1] + winners[2] + winners[3], 8'000);
  EXPECT_LT(testing_support::ChiSquare(winners), 16.27);  // 3 degrees of freedom, once in a thousand.
}

TEST(MaxScorePickerTest, R23FiveIdleEqualEndpoints) {
  for (std::int64_t count : CountPicks(MaxScorePicker{}, 1'000, std::vector<double>(5, 1))) EXPECT_NEAR(static_cast<double>(count), 200, 65);
}

TEST(MaxScorePickerTest, R27FrozenClockDoesNotFreezeTies) {
  for (std::int64_t count : CountPicks(MaxScorePicker{}, 1'000, std::vector<double>(4, 1), testing::Now{})) {
    EXPECT_NEAR(static_cast<double>(count), 250, 70);
  }
}

TEST(MaxScorePickerTest, R29ColdRequestsAreNotAllOneName) {
  std::set<Row> picked;
  for (std::uint64_t seed = 0; seed < 50; ++seed) picked.insert(PickOf(MaxScorePicker{}, {}, {1, 1, 1, 1}, Seed{seed}).targets[0]);
  EXPECT_EQ(picked.size(), 4U);
}

TEST(MaxScorePickerTest, SameSeedSamePick) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_EQ(PickOf(MaxScorePicker{}, {}, std::vector<double>(8, 1), Seed{seed}).targets,
              PickOf(MaxScorePicker{}, {}, std::vector<double>(8, 1), Seed{seed}).targets);
  }
}

TEST(MaxScorePickerTest, TargetsAreRanked) {
  EXPECT_THAT(PickOf(MaxScorePicker({.max_targets = 4}), {}, {20, 25, 30}).targets, ElementsAre(2, 1, 0));
  EXPECT_THAT(PickOf(MaxScorePicker({.max_targets = 2}), {}, {50, 50, 30}).targets,
              AnyOf(ElementsAre(0, 1), ElementsAre(1, 0)));
}

TEST(MaxScorePickerTest, TiesWithinEveryRankAreRandom) {
  // 0.9 alone, then a pair, then a trio of which two get a place.
  std::vector<std::int64_t> second(6), third(6), fourth(6), fifth(6);
  for (std::uint64_t seed = 0; seed < 6'000; ++seed) {
    const auto t = PickOf(MaxScorePicker({.max_targets = 5}), {}, {0.1, 0.5, 0.1, 0.9, 0.5, 0.1}, Seed{seed}).targets;
    ASSERT_EQ(t[0], 3U);
    ++second[t[1]], ++third[t[2]], ++fourth[t[3]], ++fifth[t[4]];
  }
  EXPECT_NEAR(static_cast<double>(second[1]), 3'000, 160);  // 4 standard deviations.
  EXPECT_EQ(second[1] + second[4], 6'000);
  EXPECT_EQ(second[1], third[4]);
  for (Row row : {0U, 2U, 5U}) {
    EXPECT_NEAR(static_cast<double>(fourth[row]), 2'000, 150);
    EXPECT_NEAR(static_cast<double>(fifth[row]), 2'000, 150);
  }
}

TEST(MaxScorePickerTest, TargetsAreDistinctSurvivors) {
  testing_support::ExpectDistinctTargets<MaxScorePicker<>>(std::vector<double>(5, 1));
  testing_support::ExpectDistinctTargets<MaxScorePicker<>>({0, 1, 0, 1, 0.5, 0.5, 0, 0, 0, 0, 1});
  testing_support::ExpectDistinctTargets<MaxScorePicker<TieBreak::kRoundRobin>>(std::vector<double>(12, 1));
  testing_support::ExpectDistinctTargets<MaxScorePicker<TieBreak::kLowestLoad>>(std::vector<double>(12, 1));
}

TEST(MaxScorePickerTest, TargetCountIsChecked) {
  testing_support::ExpectTargetCountsChecked<MaxScorePicker<>>();
  testing_support::ExpectTargetCountsChecked<MaxScorePicker<TieBreak::kRoundRobin>>();
}

TEST(MaxScorePickerTest, RoundRobinTakesTheLongestUnusedOfTheTied) {
  const MaxScorePicker<TieBreak::kRoundRobin> picker;
  EXPECT_THAT(PickOf(picker, {}, {1, 1, 0, 1}, ColumnOf<LastDispatch>{{9, 4, 1, 7}}).targets, ElementsAre(1));
}

TEST(MaxScorePickerTest, RoundRobinDrawsAmongTheNeverUsed) {
  const MaxScorePicker<TieBreak::kRoundRobin> picker;
  const auto counts = CountPicks(picker, 2'000, {1, 1, 1, 1}, ColumnOf<LastDispatch>{{0, 3, 0, 1}});
  EXPECT_THAT(counts[1] + counts[3], 0);
  EXPECT_NEAR(static_cast<double>(counts[0]), 1'000, 90);
}

TEST(MaxScorePickerTest, LowestLoadTakesTokensThenRequestsThenDraws) {
  const MaxScorePicker<TieBreak::kLowestLoad> picker;
  using Tokens = ColumnOf<UncachedTokensInFlight>;
  using Active = ColumnOf<ActiveRequests>;
  EXPECT_THAT(PickOf(picker, {}, {1, 1, 0.5, 1}, Tokens{{50, 20, 0, 30}}).targets, ElementsAre(1));
  EXPECT_THAT(PickOf(picker, {}, {1, 1, 1}, Tokens{{20, 20, 30}}, Active{{5, 4, 0}}).targets, ElementsAre(1));
  const auto counts = CountPicks(picker, 2'000, {1, 1, 1}, Tokens{{20, 20, 30}}, Active{{4, 4, 0}});
  EXPECT_EQ(counts[2], 0);
  EXPECT_NEAR(static_cast<double>(counts[0]), 1'000, 90);
}

TEST(MaxScorePickerTest, LowestLoadRanksTheFallBacksToo) {
  const MaxScorePicker<TieBreak::kLowestLoad> picker({.max_targets = 4});
  EXPECT_THAT(PickOf(picker, {}, {1, 1, 0.5, 0.5}, ColumnOf<UncachedTokensInFlight>{{50, 20, 9, 3}}).targets,
              ElementsAre(1, 0, 3, 2));
}

TEST(MaxScorePickerTest, EqualsASortedVector) {
  Random random(testing_support::TestSeed(61));
  for (int round = 0; round < 5'000; ++round) {
    std::vector<double> totals(1 + random.Below(20));
    for (double& total : totals) total = static_cast<double>(random.Below(6)) / 4;
    const std::uint32_t wanted = 1 + random.Below(kMaxTargets);
    const Picked picked = PickOf(MaxScorePicker({.max_targets = wanted}), {}, totals, Seed{random.Next()});
    std::vector<double> sorted = totals, ranked;
    std::sort(sorted.rbegin(), sorted.rend());
    for (Row row : picked.targets) ranked.push_back(totals[row]);
    sorted.resize(std::min<std::size_t>(wanted, totals.size()));
    ASSERT_EQ(ranked, sorted) << "round " << round;
    ASSERT_EQ(picked.choice.best, sorted[0]) << "round " << round;
    ASSERT_EQ(picked.choice.tied, std::count(totals.begin(), totals.end(), sorted[0])) << "round " << round;
    std::sort(totals.rbegin(), totals.rend());
    ASSERT_EQ(picked.choice.runner_up, totals.size() > 1 ? totals[1] : totals[0]) << "round " << round;
  }
}

}  // namespace
}  // namespace tokroute

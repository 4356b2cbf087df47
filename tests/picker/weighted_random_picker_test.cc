#include "tokroute/picker/weighted_random_picker.h"

#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "picker/picker_test_util.h"
#include "support/chi_square.h"

namespace tokroute {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::PickOf;
using testing::Seed;
using testing_support::CountPicks;
using testing_support::CountTargets;

// Within 4 standard deviations of the shares that the totals state.
void ExpectProportional(const std::vector<double>& totals) {
  const double kRounds = 10'000;
  double sum = 0;
  for (double total : totals) sum += total;
  const auto counts = CountPicks(WeightedRandomPicker{}, static_cast<std::uint64_t>(kRounds), totals);
  for (std::size_t i = 0; i < totals.size(); ++i) {
    const double share = totals[i] / sum;
    EXPECT_NEAR(static_cast<double>(counts[i]), kRounds * share, 4 * std::sqrt(kRounds * share * (1 - share)) + 1e-9) << i;
  }
}

TEST(WeightedRandomPickerTest, ProportionalToTotals) {
  ExpectProportional({10, 90});
  ExpectProportional({100, 100, 100});
  ExpectProportional({0.9, 0.6, 0.5});
  ExpectProportional({0.001, 0.002, 0.003, 0.004});  // Where U^(1/w) underflows and no longer is.
}

TEST(WeightedRandomPickerTest, ProportionalAtAnyScale) {
  ExpectProportional({1e-300, 3e-300, 6e-300});
  ExpectProportional({1e300, 3e300, 6e300});
  ExpectProportional({1e-9, 1});
}

TEST(WeightedRandomPickerTest, ZerosNeverBeforePositives) {
  EXPECT_THAT(CountPicks(WeightedRandomPicker{}, 10'000, {0, 1}), ElementsAre(0, 10'000));  // R60.
  EXPECT_THAT(CountPicks(WeightedRandomPicker{}, 1'000, {30, 0}), ElementsAre(1'000, 0));
  const WeightedRandomPicker two({.max_targets = 2});
  EXPECT_THAT(CountTargets(two, 1'000, {3, 1, 0}), ElementsAre(1'000, 1'000, 0));
}

TEST(WeightedRandomPickerTest, NegativeCountsAsZero) {
  EXPECT_THAT(CountPicks(WeightedRandomPicker{}, 1'000, {-5, 2}), ElementsAre(0, 1'000));
}

TEST(WeightedRandomPickerTest, R60AllZeroIsUniform) {
  for (std::int64_t count : CountPicks(WeightedRandomPicker{}, 300, {0, 0, 0})) EXPECT_NEAR(static_cast<double>(count), 100, 45);
  EXPECT_LT(testing_support::ChiSquare(CountPicks(WeightedRandomPicker{}, 8'000, std::vector<double>(8))),
            testing_support::kFairOver8);
}

TEST(WeightedRandomPickerTest, MoreWantedThanPositivesFillsUpWithZeros) {
  const WeightedRandomPicker three({.max_targets = 3});
  EXPECT_THAT(CountTargets(three, 1'000, {1, 2, 0}), Each(1'000));
  std::vector<std::int64_t> last(5);
  for (std::uint64_t seed = 0; seed < 3'000; ++seed) {
    const auto targets = PickOf(three, {}, {0, 5, 0, 1, 0}, Seed{seed}).targets;
    ASSERT_TRUE((targets[0] == 1 || targets[0] == 3) && (targets[1] == 1 || targets[1] == 3));
    ++last[targets[2]];
  }
  for (Row zero : {0U, 2U, 4U}) EXPECT_NEAR(static_cast<double>(last[zero]), 1'000, 105);
}

TEST(WeightedRandomPickerTest, DrawsWithoutReplacement) {  // 2:1:1, two of three: 5/6, 7/12, 7/12.
  const auto counts = CountTargets(WeightedRandomPicker({.max_targets = 2}), 12'000, {2, 1, 1});
  EXPECT_NEAR(static_cast<double>(counts[0]), 10'000, 165);
  EXPECT_NEAR(static_cast<double>(counts[1]), 7'000, 216);
  EXPECT_NEAR(static_cast<double>(counts[2]), 7'000, 216);
}

TEST(WeightedRandomPickerTest, ChoiceSaysThePicksTotalAndTheBestOther) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const auto picked = PickOf(WeightedRandomPicker{}, {}, {1, 3, 2}, Seed{seed});
    EXPECT_EQ(picked.choice.best, (std::vector<double>{1, 3, 2})[picked.targets[0]]);
    EXPECT_EQ(picked.choice.runner_up, picked.targets[0] == 1 ? 2 : 3);
    EXPECT_EQ(picked.choice.tied, 1U);
  }
  EXPECT_EQ(PickOf(WeightedRandomPicker{}, {}, {0.5}).choice.runner_up, 0.5);
  EXPECT_EQ(PickOf(WeightedRandomPicker{}, {}, {2, 2, 2}).choice.tied, 3U);
}

TEST(WeightedRandomPickerTest, NoCandidatesNoTarget) { EXPECT_THAT(PickOf(WeightedRandomPicker{}, {}, {}).targets, IsEmpty()); }

TEST(WeightedRandomPickerTest, TargetsAreDistinctSurvivors) {
  testing_support::ExpectDistinctTargets<WeightedRandomPicker>({1, 0, 2, 0, 0.5});
  testing_support::ExpectDistinctTargets<WeightedRandomPicker>(std::vector<double>(12));
}

TEST(WeightedRandomPickerTest, TargetCountIsChecked) { testing_support::ExpectTargetCountsChecked<WeightedRandomPicker>(); }

}  // namespace
}  // namespace tokroute

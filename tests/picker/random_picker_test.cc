#include "tokroute/picker/random_picker.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "picker/picker_test_util.h"
#include "support/chi_square.h"

namespace tokroute {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using testing::PickOf;
using testing_support::CountPicks;
using testing_support::CountTargets;

TEST(RandomPickerTest, UniformWhateverTheTotals) {
  const auto counts = CountPicks(RandomPicker{}, 8'000, {10, 20, 30, 0, 0, 1, 1e-300, 5});
  EXPECT_LT(testing_support::ChiSquare(counts), testing_support::kFairOver8);
}

TEST(RandomPickerTest, EveryPlaceIsUniform) {
  const RandomPicker picker({.max_targets = 3});
  std::vector<std::int64_t> last(8);
  for (std::uint64_t seed = 0; seed < 8'000; ++seed) {
    ++last[PickOf(picker, {}, std::vector<double>(8), testing::Seed{seed}).targets.at(2)];
  }
  EXPECT_LT(testing_support::ChiSquare(last), testing_support::kFairOver8);
  for (std::int64_t count : CountTargets(picker, 8'000, std::vector<double>(8))) {
    EXPECT_NEAR(static_cast<double>(count), 3'000, 180);
  }
}

TEST(RandomPickerTest, ChoiceRanksNothing) {
  const auto picked = PickOf(RandomPicker{}, {}, {0.25, 0.75, 0.5});
  EXPECT_EQ(picked.choice.best, (std::vector<double>{0.25, 0.75, 0.5})[picked.targets[0]]);
  EXPECT_EQ(picked.choice.runner_up, picked.choice.best);
  EXPECT_EQ(picked.choice.tied, 3U);
}

TEST(RandomPickerTest, MoreWantedThanThereAre) {
  EXPECT_THAT(CountTargets(RandomPicker({.max_targets = 5}), 100, {1, 2}), Each(100));
}

TEST(RandomPickerTest, NoCandidatesNoTarget) { EXPECT_THAT(PickOf(RandomPicker{}, {}, {}).targets, IsEmpty()); }

TEST(RandomPickerTest, TargetsAreDistinctSurvivors) {
  testing_support::ExpectDistinctTargets<RandomPicker>(std::vector<double>(5));
  testing_support::ExpectDistinctTargets<RandomPicker>(std::vector<double>(12));
}

TEST(RandomPickerTest, TargetCountIsChecked) { testing_support::ExpectTargetCountsChecked<RandomPicker>(); }

}  // namespace
}  // namespace tokroute

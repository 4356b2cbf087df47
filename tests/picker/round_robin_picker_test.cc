#include "tokroute/picker/round_robin_picker.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "picker/picker_test_util.h"
#include "support/test_fleet.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::ColumnOf;
using testing::PickOf;
using testing_support::CountPicks;
using testing_support::Upstream;
using Last = ColumnOf<LastDispatch>;

TEST(RoundRobinPickerTest, LongestUnusedWhateverTheTotals) {
  const auto picked = PickOf(RoundRobinPicker({.max_targets = 3}), {}, {1, 0, 0.5}, Last{{3, 9, 2}});
  EXPECT_THAT(picked.targets, ElementsAre(2, 0, 1));
  EXPECT_EQ(picked.choice.best, 0.5);
  EXPECT_EQ(picked.choice.tied, 1U);
}

TEST(RoundRobinPickerTest, NeverUsedComeFirstAndAreDrawn) {
  const auto counts = CountPicks(RoundRobinPicker{}, 3'000, std::vector<double>(5), Last{{0, 4, 0, 2, 0}});
  EXPECT_EQ(counts[1] + counts[3], 0);
  for (Row never : {0U, 2U, 4U}) EXPECT_NEAR(static_cast<double>(counts[never]), 1'000, 105);
  EXPECT_EQ(PickOf(RoundRobinPicker{}, {}, std::vector<double>(5), Last{{0, 4, 0, 2, 0}}).choice.tied, 3U);
}

TEST(RoundRobinPickerTest, NoCandidatesNoTarget) { EXPECT_THAT(PickOf(RoundRobinPicker{}, {}, {}).targets, IsEmpty()); }

TEST(RoundRobinPickerTest, TargetsAreDistinctSurvivors) {
  testing_support::ExpectDistinctTargets<RoundRobinPicker>(std::vector<double>(12));
  testing_support::ExpectDistinctTargets<RoundRobinPicker>(std::vector<double>(4), Last{{7, 7, 1, 7}});
}

TEST(RoundRobinPickerTest, TargetCountIsChecked) { testing_support::ExpectTargetCountsChecked<RoundRobinPicker>(); }

TEST(RoundRobinPickerTest, StrictlyCyclicAfterTheFirstRound) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Fleet<Upstream> fleet;
    testing_support::AddEndpoints(fleet, 5);
    auto router = RoundRobin(fleet, {.seed = seed});
    ASSERT_TRUE(router.ok());
    std::vector<std::string> first;
    for (int i = 0; i < 50; ++i) {
      auto routed = router->Route({});
      ASSERT_TRUE(routed.ok());
      if (i < 5) {
        EXPECT_EQ(std::count(first.begin(), first.end(), routed->endpoint().called), 0) << "seed " << seed;
        first.push_back(routed->endpoint().called);
      } else {
        EXPECT_EQ(routed->endpoint().called, first[static_cast<std::size_t>(i % 5)]) << "seed " << seed;
      }
      routed->Finish();
    }
  }
}

TEST(RoundRobinPickerTest, FirstRoundsDifferBetweenSeeds) {  // Replicas that start together do not march in step.
  std::map<std::string, int> first;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Fleet<Upstream> fleet;
    testing_support::AddEndpoints(fleet, 4);
    auto router = RoundRobin(fleet, {.seed = seed});
    ++first[router->Route({})->endpoint().called];
  }
  ASSERT_EQ(first.size(), 4U);
  for (const auto& [name, count] : first) EXPECT_NEAR(count, 50, 25) << name;
}

TEST(RoundRobinPickerTest, R125DisjointSetsKeepTheirOwnRotation) {
  Fleet<Upstream> fleet;
  for (const char* name : {"a", "b"}) ASSERT_TRUE(fleet.Add({.called = name, .serves = {"m1"}}).ok());
  for (const char* name : {"c", "d"}) ASSERT_TRUE(fleet.Add({.called = name, .serves = {"m2"}}).ok());
  auto router = RoundRobin(fleet, {.seed = 1});
  std::map<std::string, int> counts;
  for (int i = 0; i < 100; ++i) {
    ++counts[router->Route({.model = "m1"})->endpoint().called];
    ++counts[router->Route({.model = "m2"})->endpoint().called];
  }
  EXPECT_THAT(counts, ElementsAre(std::pair("a", 50), std::pair("b", 50), std::pair("c", 50), std::pair("d", 50)));
}

TEST(RoundRobinPickerTest, FairOverOverlappingSets) {
  // Everybody may serve m1; only c and d may serve m2. Whoever was used for one waits for the other as well, so all four
  // end equal: 100 + 100 requests over four endpoints.
  Fleet<Upstream> fleet;
  for (const char* name : {"a", "b"}) ASSERT_TRUE(fleet.Add({.called = name, .serves = {"m1"}}).ok());
  for (const char* name : {"c", "d"}) ASSERT_TRUE(fleet.Add({.called = name, .serves = {"m1", "m2"}}).ok());
  auto router = RoundRobin(fleet, {.seed = 1});
  std::map<std::string, int> counts;
  for (int i = 0; i < 100; ++i) {
    ++counts[router->Route({.model = "m1"})->endpoint().called];
    ++counts[router->Route({.model = "m2"})->endpoint().called];
  }
  for (const auto& [name, count] : counts) EXPECT_NEAR(count, 50, 2) << name;
}

TEST(RoundRobinPickerTest, SkippingSomeoneDoesNotDisturbTheOthers) {
  Fleet<Upstream> fleet;
  const auto ids = testing_support::AddEndpoints(fleet, 3);
  auto router = RoundRobin(fleet, {.seed = 1});
  std::map<std::string, int> counts;
  for (int i = 0; i < 90; ++i) {
    const std::array exclude = {ids[0]};
    // Every third request must not go to e0, as a retry would say.
    ++counts[router->Route({}, i % 3 == 0 ? RouteOptions{.exclude = exclude} : RouteOptions{})->endpoint().called];
  }
  for (const auto& [name, count] : counts) EXPECT_NEAR(count, 30, 1) << name;
}

}  // namespace
}  // namespace tokroute

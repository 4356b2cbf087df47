#include "tokroute/scorer/active_request_scorer.h"

#include <cmath>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tokroute/testing/scores_of.h"

namespace tokroute {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Rows;
using testing::ScoresOf;
using Active = testing::ColumnOf<ActiveRequests>;

TEST(ActiveRequestScorerTest, LinearFromIdleToTheBusiest) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{0, 1, 4}}), ElementsAre(1, 0.75, 0));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{3, 0, 6}}), ElementsAre(0.5, 1, 0));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{1, 0}}), ElementsAre(0, 1));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{3, 11}}), ElementsAre(8.0F / 11, 0));  // Nobody idle.
}

TEST(ActiveRequestScorerTest, AllEquallyBusyScoreZero) {  // As in the reference: only idle ones score 1 on a tie.
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{5, 5}}), ElementsAre(0, 0));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{5}}), ElementsAre(0));
}

TEST(ActiveRequestScorerTest, IdleThresholdIsInclusive) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer({.idle_threshold = 3}), {}, Active{{2, 3, 4, 8}}), ElementsAre(1, 1, 0.5, 0));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer({.idle_threshold = 3}), {}, Active{{3, 4}}), ElementsAre(1, 0));
}

TEST(ActiveRequestScorerTest, MaxBusyScoreMakesAStep) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer({.max_busy_score = 0.5}), {}, Active{{2, 8, 0}}), ElementsAre(0.375, 0, 1));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer({.max_busy_score = 0}), {}, Active{{1, 0}}), ElementsAre(0, 1));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer({.idle_threshold = 1, .max_busy_score = 0.5}), {}, Active{{1, 2, 0}}),
              ElementsAre(1, 0, 1));
}

TEST(ActiveRequestScorerTest, R53IdleEqualOrAloneIsEqualAndFinite) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Rows{3}), Each(1.0F));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Rows{1}), ElementsAre(1.0F));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{7, 7, 7}}), Each(0.0F));
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Active{{std::numeric_limits<std::int64_t>::max(), 1}}),
              Each(AllOf(::testing::Ge(0.0F), ::testing::Le(1.0F))));
}

TEST(ActiveRequestScorerTest, OptionsOutOfRangeAreRefusedByFieldValueAndRange) {
  const absl::Status idle = ActiveRequestScorer({.idle_threshold = -1}).Check();
  EXPECT_EQ(idle.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(idle.message()),
              AllOf(HasSubstr("ActiveRequestOptions.idle_threshold"), HasSubstr(">= 0"), HasSubstr("got -1")));
  for (double bad : {-0.1, 1.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const absl::Status busy = ActiveRequestScorer({.max_busy_score = bad}).Check();
    EXPECT_EQ(busy.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(busy.message()), AllOf(HasSubstr("ActiveRequestOptions.max_busy_score"), HasSubstr("0 .. 1")));
  }
  for (double good : {0.0, 0.5, 1.0}) EXPECT_TRUE(ActiveRequestScorer({.max_busy_score = good}).Check().ok());
}

}  // namespace
}  // namespace tokroute

#include "tokroute/scorer/token_load_scorer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/test_run.h"
#include "tokroute/random.h"
#include "tokroute/testing/scores_of.h"

namespace tokroute {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ColumnOf;
using testing::Rows;
using testing::ScoresOf;

using InFlight = ColumnOf<UncachedTokensInFlight>;
using Matched = ColumnOf<MatchedTokens>;

TokenLoadScorer Absolute(std::int64_t ceiling = 4'194'304) {
  return TokenLoadScorer({.form = TokenLoadForm::kAbsolute, .ceiling_tokens = ceiling});
}

TEST(TokenLoadScorerTest, RelativeIsLeastLoadOverLoad) {
  EXPECT_THAT(ScoresOf(TokenLoadScorer{}, {}, InFlight{{9, 19, 39}}), ElementsAre(1, 0.5F, 0.25F));
}

TEST(TokenLoadScorerTest, LoadLooksAheadToTheRequestItself) {
  // 250 of 1,000 prompt tokens are uncached on row 0, all of them on row 1.
  EXPECT_THAT(ScoresOf(Absolute(1000), {.prompt_tokens = 1000}, InFlight{{250, 0}}, Matched{{750, 0}}), ElementsAre(0.5F, 0));
}

TEST(TokenLoadScorerTest, MatchBeyondThePromptAddsNothing) {
  EXPECT_THAT(ScoresOf(Absolute(1000), {.prompt_tokens = 100}, InFlight{{500, 500}}, Matched{{100, 112}}),
              ElementsAre(0.5F, 0.5F));
}

TEST(TokenLoadScorerTest, AbsoluteIsLinearToTheCeiling) {
  EXPECT_THAT(ScoresOf(Absolute(1000), {}, InFlight{{0, 500, 999, 1000, 1001, 5000}}),
              ElementsAre(1, 0.5F, 1.0F - 999.0F / 1000.0F, 0, 0, 0));
  EXPECT_THAT(ScoresOf(Absolute(1000), {}, InFlight{{400, 400}}), ElementsAre(0.6F, 0.6F));  // Not 1, though equal.
}

TEST(TokenLoadScorerTest, DefaultCeilingIsTheReferences) {
  EXPECT_THAT(ScoresOf(Absolute(), {}, InFlight{{2'097'152, 4'194'304, 0}}), ElementsAre(0.5F, 0, 1));
}

TEST(TokenLoadScorerTest, AbsoluteTellsSingleTokensApart) {
  EXPECT_THAT(ScoresOf(Absolute(), {}, InFlight{{0, 1}}), ElementsAre(1, 1.0F - 0x1p-22F));
}

TEST(TokenLoadScorerTest, CeilingMustBePositive) {
  for (std::int64_t ceiling : {0, -1}) {
    const absl::Status status = Absolute(ceiling).Check();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("TokenLoadOptions.ceiling_tokens"), HasSubstr("> 0"), HasSubstr(std::to_string(ceiling))));
  }
  EXPECT_TRUE(Absolute(1).Check().ok());
  EXPECT_TRUE(TokenLoadScorer().Check().ok());
}

TEST(TokenLoadScorerTest, R52UncachedCostIsPerEndpoint) {
  // A: 10,000 in flight, 90 % of 20,000 warm: 12,000. B: 5,000, cold: 25,000.
  for (const TokenLoadScorer& scorer : {TokenLoadScorer(), Absolute()}) {
    const auto scores = ScoresOf(scorer, {.prompt_tokens = 20'000}, InFlight{{10'000, 5'000}}, Matched{{18'000, 0}});
    EXPECT_GT(scores[0], scores[1]);
  }
}

TEST(TokenLoadScorerTest, R53IdleEqualOrAloneIsEqualAndFinite) {
  for (const TokenLoadScorer& scorer : {TokenLoadScorer(), Absolute()}) {
    EXPECT_THAT(ScoresOf(scorer, {}, Rows{3}), Each(1.0F));
    EXPECT_THAT(ScoresOf(scorer, {}, Rows{1}), ElementsAre(1.0F));
    const auto seven = ScoresOf(scorer, {}, InFlight{{7, 7, 7}});
    EXPECT_THAT(seven, AllOf(Each(seven[0]), Each(::testing::Ge(0.99F)), Each(::testing::Le(1.0F))));
  }
}

TEST(TokenLoadScorerTest, R55RelativeNeverTiesBeyondTheCeiling) {
  const InFlight overloaded{{4'300'000, 9'000'000}};
  const auto relative = ScoresOf(TokenLoadScorer{}, {.prompt_tokens = 8'000}, overloaded);
  EXPECT_GT(relative[0], relative[1]);
  EXPECT_THAT(ScoresOf(Absolute(), {.prompt_tokens = 8'000}, overloaded), ElementsAre(0, 0));  // The reference's form does.
}

TEST(TokenLoadScorerTest, HugeLoadsAreFinite) {
  const std::int64_t huge = std::int64_t{1} << 61;
  EXPECT_THAT(ScoresOf(TokenLoadScorer{}, {.prompt_tokens = kMaxPromptTokens}, InFlight{{huge, huge, 0}}),
              Each(AllOf(::testing::Ge(0.0F), ::testing::Le(1.0F))));
}

TEST(TokenLoadScorerTest, BothFormsRankAsTheLoadDoes) {
  Random random(testing_support::TestSeed(51));
  for (int round = 0; round < 2'000; ++round) {
    InFlight in_flight;
    Matched matched;
    const std::int64_t prompt = random.Below(100'000);
    std::vector<std::int64_t> load;
    for (int i = 0; i < 8; ++i) {
      in_flight.values.push_back(random.Below(4'000'000));
      matched.values.push_back(prompt == 0 ? 0 : random.Below(static_cast<std::uint32_t>(prompt)));
      load.push_back(in_flight.values.back() + prompt - matched.values.back());
    }
    for (const TokenLoadScorer& scorer : {TokenLoadScorer(), Absolute()}) {
      const auto scores = ScoresOf(scorer, {.prompt_tokens = prompt}, in_flight, matched);
      for (std::size_t a = 0; a < 8; ++a) {
        ASSERT_TRUE(scores[a] >= 0 && scores[a] <= 1) << "round " << round;
        for (std::size_t b = 0; b < 8; ++b) {
          ASSERT_TRUE(load[a] >= load[b] || scores[a] >= scores[b]) << "round " << round;
        }
      }
      // The best score is the least load's: exactly, whatever floats do to the rest.
      const auto best = std::max_element(scores.begin(), scores.end()) - scores.begin();
      ASSERT_LE(load[static_cast<std::size_t>(best)], *std::min_element(load.begin(), load.end()) + 1) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace tokroute

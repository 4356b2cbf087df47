#include "tokroute/testing/scores_of.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tokroute/picker/max_score_picker.h"
#include "tokroute/picker/round_robin_picker.h"
#include "tokroute/scorer/active_request_scorer.h"
#include "tokroute/scorer/token_load_scorer.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ColumnOf;
using testing::KeptBy;
using testing::Now;
using testing::PickOf;
using testing::Rows;
using testing::ScoresOf;
using testing::Seed;

// What the call says is wrong with the test that makes it.
template <class Call>
std::string Complaint(Call call) {
  try {
    (void)call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no complaint";
}

TEST(ScoresOfTest, OneLineTestsAScorer) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, ColumnOf<ActiveRequests>{{0, 1, 4}}), ElementsAre(1, 0.75, 0));
}

TEST(ScoresOfTest, SeveralColumnsInAnyOrder) {
  const TokenLoadScorer scorer({.form = TokenLoadForm::kAbsolute, .ceiling_tokens = 1000});
  const ColumnOf<UncachedTokensInFlight> in_flight{{0, 250, 750}};
  const ColumnOf<MatchedTokens> matched{{0, 100, 400}};
  EXPECT_THAT(ScoresOf(scorer, {.prompt_tokens = 400}, in_flight, matched), ElementsAre(0.6F, 0.45F, 0.25F));
  EXPECT_THAT(ScoresOf(scorer, {.prompt_tokens = 400}, matched, in_flight), ElementsAre(0.6F, 0.45F, 0.25F));
}

TEST(ScoresOfTest, ColumnLeftOutIsZeros) {
  const TokenLoadScorer scorer({.form = TokenLoadForm::kAbsolute, .ceiling_tokens = 1000});
  EXPECT_THAT(ScoresOf(scorer, {.prompt_tokens = 250}, ColumnOf<UncachedTokensInFlight>{{0, 250}}),
              ElementsAre(0.75F, 0.5F));
}

TEST(ScoresOfTest, NoCandidates) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, ColumnOf<ActiveRequests>{}), IsEmpty());
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Rows{0}), IsEmpty());
}

TEST(ScoresOfTest, RowsStandForColumnsLeftOut) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Rows{2}), ElementsAre(1, 1));
}

struct Wild {
  using Consumes = Signals<ActiveRequests>;
  auto Score(const Request&, CandidatesFor<Consumes> c) const {
    const auto active = c.Column<ActiveRequests>();
    return [=](Row row) { return active[row] == 0 ? std::numeric_limits<float>::quiet_NaN() : 5.0F; };
  }
};

TEST(ScoresOfTest, ScoresAreRaw) {
  const auto scores = ScoresOf(Wild{}, {}, ColumnOf<ActiveRequests>{{0, 1}});
  EXPECT_TRUE(scores[0] != scores[0]);
  EXPECT_EQ(scores[1], 5.0F);
}

TEST(ScoresOfTest, ErasedScorerGivesTheSame) {
  EXPECT_THAT(ScoresOf(AnyScorer(ActiveRequestScorer{}), {}, ColumnOf<ActiveRequests>{{0, 1, 4}}),
              ElementsAre(1, 0.75, 0));
}

// A flag column: std::vector<bool> is not an array of bool, and must work all the same.
TOKROUTE_SIGNAL(Healthy, bool, "healthy", "yes or no");
struct HealthyFilter {
  using Consumes = Signals<Healthy>;
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes> c, Stage&) const {
    const auto healthy = c.Column<Healthy>();
    c.Keep(c.Select([&](Row row) { return healthy[row]; }));
    return {};
  }
};

TEST(KeptByTest, VerdictAndRows) {
  const auto kept = KeptBy(HealthyFilter{}, {}, ColumnOf<Healthy>{{true, false, true}});
  EXPECT_THAT(kept.rows, ElementsAre(0, 2));
  EXPECT_EQ(kept.verdict.kept, 2U);
  EXPECT_EQ(kept.verdict.reason, &kKeptAll);
}

struct DrawFilter {  // Keeps everybody; the margin tells the draw, the facts the time.
  using Consumes = Signals<>;
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes>, Stage& stage) const {
    return {.margin = stage.random.Below(1'000'000), .facts = {stage.now.count(), 0}};
  }
};

TEST(KeptByTest, SeedAndNowReachTheStage) {
  const auto one = KeptBy(DrawFilter{}, {}, Rows{1}, Seed{1}, Now{5ns});
  const auto again = KeptBy(DrawFilter{}, {}, Rows{1}, Now{5ns}, Seed{1});
  const auto two = KeptBy(DrawFilter{}, {}, Rows{1}, Seed{2});
  EXPECT_EQ(one.verdict.margin, again.verdict.margin);
  EXPECT_NE(one.verdict.margin, two.verdict.margin);
  EXPECT_EQ(one.verdict.facts[0], 5);
  EXPECT_EQ(two.verdict.facts[0], 0);
}

TEST(PickOfTest, ChoiceAndTargets) {
  const auto picked = PickOf(MaxScorePicker({.max_targets = 2}), {}, {0.25, 1, 0.5});
  EXPECT_THAT(picked.targets, ElementsAre(1, 2));
  EXPECT_EQ(picked.choice.best, 1);
  EXPECT_EQ(picked.choice.runner_up, 0.5);
}

TEST(PickOfTest, PickersReadColumns) {
  EXPECT_THAT(PickOf(RoundRobinPicker{}, {}, {0, 0, 0}, ColumnOf<LastDispatch>{{9, 2, 5}}).targets, ElementsAre(1));
}

TEST(ScoresOfTest, ColumnsOfDifferentLengthNameBoth) {
  const auto complaint = Complaint([] {
    return ScoresOf(TokenLoadScorer{}, {}, ColumnOf<UncachedTokensInFlight>{{1, 2, 3}}, ColumnOf<MatchedTokens>{{1, 2}});
  });
  EXPECT_THAT(complaint, AllOf(HasSubstr("ScoresOf"), HasSubstr("uncached_tokens_in_flight has 3 rows"),
                               HasSubstr("matched_tokens has 2")));
  EXPECT_THAT(Complaint([] { return PickOf(RoundRobinPicker{}, {}, {0, 0}, ColumnOf<LastDispatch>{{1}}); }),
              AllOf(HasSubstr("PickOf"), HasSubstr("last_dispatch has 1")));
}

TEST(ScoresOfTest, ColumnGivenTwice) {
  EXPECT_THAT(Complaint([] {
                return ScoresOf(ActiveRequestScorer{}, {}, ColumnOf<ActiveRequests>{{1}}, ColumnOf<ActiveRequests>{{1}});
              }),
              HasSubstr("ColumnOf<active_requests> is given twice"));
}

TEST(ScoresOfTest, NeitherColumnNorRows) {
  EXPECT_THAT(Complaint([] { return ScoresOf(ActiveRequestScorer{}, {}); }), HasSubstr("give a column, or Rows"));
}

TEST(ScoresOfTest, PluginThatRefusesItsOptions) {
  EXPECT_THAT(Complaint([] { return ScoresOf(ActiveRequestScorer({.idle_threshold = -1}), {}, Rows{1}); }),
              HasSubstr("ActiveRequestOptions.idle_threshold"));
}

TEST(ScoresOfTest, ErasedPluginNamesTheColumnItMisses) {
  EXPECT_THAT(Complaint([] { return ScoresOf(AnyScorer(TokenLoadScorer{}), {}, ColumnOf<MatchedTokens>{{1}}); }),
              AllOf(HasSubstr("token-load-scorer"), HasSubstr("uncached_tokens_in_flight")));
}

TEST(ScoresOfTest, MoreRowsThanAFleetCanHave) {
  EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, Rows{kMaxEndpoints}), ::testing::SizeIs(kMaxEndpoints));
  EXPECT_THAT(Complaint([] { return ScoresOf(ActiveRequestScorer{}, {}, Rows{kMaxEndpoints + 1}); }),
              HasSubstr("more rows"));
}

}  // namespace
}  // namespace tokroute

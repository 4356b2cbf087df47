// A scorer of your own, and how to be sure of it: by itself, inside a policy, and inside a router.
#include <tokroute/testing/scores_of.h>
#include <tokroute/tokroute.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::ElementsAre;
using tokroute::ActiveRequests, tokroute::EndpointWeight, tokroute::UncachedTokensInFlight;
using tokroute::testing::ColumnOf, tokroute::testing::KeptBy, tokroute::testing::PickOf, tokroute::testing::ScoresOf;

// Fewest requests in flight for its size: an endpoint of weight 2 takes twice as many. A plain struct, no base class, no
// registration. It says which columns it reads, works out what is common to all rows once, and returns a function of the
// row: 0..1, higher is better.
struct FairShareScorer {
  using Consumes = tokroute::Signals<ActiveRequests, EndpointWeight>;

  auto Score(const tokroute::Request&, tokroute::CandidatesFor<Consumes> candidates) const {
    const auto active = candidates.Column<ActiveRequests>();
    const auto weight = candidates.Column<EndpointWeight>();
    return [=](tokroute::Row row) {
      // Weight 0 means: nothing, please. One request more than there are, so that an idle fleet is told apart by weight.
      const auto share = static_cast<float>(weight[row]);
      return share / (share + static_cast<float>(active[row] + 1));
    };
  }
};
static_assert(tokroute::Scorer<FairShareScorer>);  // If this fails, the compiler's notes say which part is missing.

// By itself. ColumnOf lists a signal's values, row by row; the scores come back in the same order.
TEST(FairShareScorerTest, FewerRequestsPerWeightScoreHigher) {
  EXPECT_THAT(ScoresOf(FairShareScorer{}, {}, ColumnOf<ActiveRequests>{{0, 1, 3}}, ColumnOf<EndpointWeight>{{1, 1, 1}}),
              ElementsAre(0.5, 1.0F / 3, 0.2F));
}

TEST(FairShareScorerTest, TwiceTheWeightCarriesTwiceTheRequests) {
  const auto scores =
      ScoresOf(FairShareScorer{}, {}, ColumnOf<ActiveRequests>{{3, 7}}, ColumnOf<EndpointWeight>{{1, 2}});
  EXPECT_EQ(scores[0], scores[1]);
}

TEST(FairShareScorerTest, WeightZeroScoresZero) {
  // A column left out is zeros: here, no requests anywhere.
  EXPECT_THAT(ScoresOf(FairShareScorer{}, {}, ColumnOf<EndpointWeight>{{0, 1}}), ElementsAre(0, 0.5));
}

// Filters and pickers are tested the same way.
struct NotFull {
  using Consumes = tokroute::Signals<ActiveRequests>;
  static constexpr tokroute::ReasonTag kDropped{"dropped_full"};

  tokroute::FilterVerdict Narrow(const tokroute::Request&, tokroute::CandidatesFor<Consumes> candidates,
                                 tokroute::Stage&) const {
    const auto active = candidates.Column<ActiveRequests>();
    const auto room = candidates.Select([&](tokroute::Row row) { return active[row] < 8; });  // Select first ...
    if (room.count == 0 || room.count == candidates.size()) return {};
    candidates.Keep(room);  // ... and keep it only if somebody is left.
    return {.reason = &kDropped};
  }
};
static_assert(tokroute::Filter<NotFull>);

TEST(NotFullTest, DropsFullEndpointsUnlessAllAre) {
  const auto kept = KeptBy(NotFull{}, {}, ColumnOf<ActiveRequests>{{8, 7, 9}});
  EXPECT_THAT(kept.rows, ElementsAre(1));
  EXPECT_EQ(*kept.verdict.reason, NotFull::kDropped);
  EXPECT_THAT(KeptBy(NotFull{}, {}, ColumnOf<ActiveRequests>{{8, 9}}).rows, ElementsAre(0, 1));
}

TEST(PickerTest, RanksTwoTargets) {
  EXPECT_THAT(PickOf(tokroute::MaxScorePicker({.max_targets = 2}), {}, {0.1, 0.9, 0.5}).targets, ElementsAre(1, 2));
}

// Inside a router: the parts in a policy, the policy in a router with the producers that fill its columns. Forget the
// ledger (InFlightLoad) and this does not compile; the error names ActiveRequests and FairShareScorer.
struct Upstream {
  std::string host;
  double share = 1;
  std::string_view name() const { return host; }
  double weight() const { return share; }
};

TEST(FairSharePolicyTest, SplitsByWeight) {
  tokroute::Fleet<Upstream> fleet;
  ASSERT_TRUE(fleet.Add({"small", 1}).ok());
  ASSERT_TRUE(fleet.Add({"large", 3}).ok());
  auto router = tokroute::MakeRouter(
      fleet, {.seed = 1}, tokroute::Producers(tokroute::InFlightLoad()),
      tokroute::Named("fair-share", tokroute::Policy(NotFull{}, tokroute::Weighted(FairShareScorer{}, 1),
                                                     tokroute::MaxScorePicker{})));
  ASSERT_TRUE(router.ok()) << router.status();

  std::vector<tokroute::Ticket<Upstream>> running;  // A ticket that is kept is a request that runs.
  for (int i = 0; i < 8; ++i) {
    auto routed = router->Route({});
    ASSERT_TRUE(routed.ok()) << routed.refusal().ToString();
    running.push_back(std::move(routed).Take());
  }
  EXPECT_EQ(std::count_if(running.begin(), running.end(), [](const auto& t) { return t.endpoint().host == "large"; }), 6);
}

}  // namespace

#include "tokroute/policy.h"

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/decide.h"
#include "support/test_fleet.h"
#include "support/test_run.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ColumnOf;
using testing::Rows;
using testing_support::AddEndpoints;
using testing_support::Decide;
using testing_support::Decided;
using testing_support::Upstream;

using Warmth = ColumnOf<WeightedMatchedTokens>;
using Matched = ColumnOf<MatchedTokens>;
using InFlight = ColumnOf<UncachedTokensInFlight>;
using Active = ColumnOf<ActiveRequests>;

PrefixCacheAffinityFilter Affinity(double peak = 20'480, std::chrono::milliseconds penalty = 14s) {
  auto gate = TauGate::Create({.peak_prefill_throughput = peak, .max_ttft_penalty = penalty});
  EXPECT_TRUE(gate.ok()) << gate.status();
  return PrefixCacheAffinityFilter(*gate);
}

// Misbehaves in every way that a scorer can: by its row's active requests, NaN, too much, too little, -0.0 or in range.
struct Unruly {
  static constexpr std::string_view kName = "unruly";
  using Consumes = Signals<ActiveRequests>;
  auto Score(const Request&, CandidatesFor<Consumes> c) const {
    const auto active = c.Column<ActiveRequests>();
    return [=](Row row) {
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      const float wild[] = {std::numeric_limits<float>::quiet_NaN(), 5.0F, -3.0F, -0.0F, kInfinity, -kInfinity, 1.0F, 0.0F};
      const auto n = static_cast<std::size_t>(active[row]);
      return n < std::size(wild) ? wild[n] : 1.0F / static_cast<float>(n);
    };
  }
};

// Keeps rows whose in-flight tokens are below a limit; may keep nobody.
struct Below {
  static constexpr std::string_view kName = "below";
  using Consumes = Signals<UncachedTokensInFlight>;
  std::int64_t limit = 0;
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes> c, Stage&) const {
    const auto in_flight = c.Column<UncachedTokensInFlight>();
    c.Keep(c.Select([&](Row row) { return in_flight[row] < limit; }));
    return {.margin = limit};
  }
};

// Draws `draws` numbers and keeps everybody; its margin is the last of them.
template <char name>
struct Drawing {
  using Consumes = Signals<>;
  int draws = 0;
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes>, Stage& stage) const {
    FilterVerdict verdict;
    for (int i = 0; i < draws; ++i) verdict.margin = stage.random.Below(1'000'000);
    return verdict;
  }
};

// --- One loop, one after the other, and erased: the same bits ---

void ExpectSame(const Decided& a, const Decided& b, int round) {
  ASSERT_EQ(a.refusal, b.refusal) << "round " << round;
  ASSERT_EQ(a.survivors, b.survivors) << "round " << round;
  ASSERT_EQ(a.targets, b.targets) << "round " << round;
  ASSERT_EQ(a.totals.size(), b.totals.size());
  for (std::size_t i = 0; i < a.totals.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint64_t>(a.totals[i]), std::bit_cast<std::uint64_t>(b.totals[i])) << "round " << round;
  }
  ASSERT_EQ(a.scores_clamped, b.scores_clamped) << "round " << round;
  ASSERT_EQ(a.emptied_by, b.emptied_by) << "round " << round;
  ASSERT_EQ(a.emptied_by_name, b.emptied_by_name) << "round " << round;
  ASSERT_EQ(a.considered, b.considered) << "round " << round;
  ASSERT_EQ(a.decision.verdict_count, b.decision.verdict_count) << "round " << round;
  for (std::uint32_t i = 0; i < a.decision.verdict_count; ++i) {
    const FilterVerdict &va = a.decision.verdicts[i], &vb = b.decision.verdicts[i];
    ASSERT_TRUE(*va.reason == *vb.reason && va.margin == vb.margin && va.facts == vb.facts && va.kept == vb.kept)
        << "round " << round;
  }
  if (a.refusal != RefusalReason::kNone) return;
  const Choice &ca = a.decision.choice, &cb = b.decision.choice;
  ASSERT_TRUE(ca.targets == cb.targets && ca.tied == cb.tied && ca.best == cb.best && ca.runner_up == cb.runner_up)
      << "round " << round;
}

// The sequential reading: each scorer over the survivors, cleaned, times its weight, summed in order, in double.
template <class Scored>
void AddTerm(std::vector<double>& totals, std::uint32_t& clamped, const Decided& decided, double weight, const Scored& scores) {
  for (std::size_t i = 0; i < totals.size(); ++i) {
    const float raw = scores[decided.survivors[i]];
    float clean = raw;
    if (std::isnan(raw) || raw < 0) clean = 0;
    if (raw > 1) clean = 1;
    clamped += std::isnan(raw) || raw < 0 || raw > 1;
    const volatile double product = static_cast<double>(static_cast<float>(weight)) * static_cast<double>(clean);
    totals[i] = totals[i] + product;
  }
}

template <class MakePicker>
void FusedEqualsSequentialEqualsErased(MakePicker make_picker, bool unruly, std::uint64_t fallback_seed) {
  Random random(testing_support::TestSeed(fallback_seed));
  for (int round = 0; round < 1'500; ++round) {
    const std::uint32_t count = 1 + random.Below(40);
    Warmth warmth;
    Matched matched;
    InFlight in_flight;
    Active active;
    ColumnOf<PeakPrefillThroughput> rates;
    ColumnOf<LastDispatch> last;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::int64_t tokens = random.Below(3) == 0 ? 900 : random.Below(2) == 0 ? 0 : random.Below(1001);
      matched.values.push_back(tokens);
      warmth.values.push_back(static_cast<double>(tokens));
      in_flight.values.push_back(random.Below(3) == 0 ? 0 : random.Below(4'000));
      active.values.push_back(unruly && random.Below(4) == 0 ? random.Below(8) : 8 + random.Below(8));
      rates.values.push_back(round % 3 == 0 ? 0 : 100 * (1 + random.Below(3)));
      last.values.push_back(random.Below(4));
    }
    const double weights[] = {random.Unit() * 3, random.Below(3) == 0 ? 0 : random.Unit(), random.Unit() * 1e-3, 1};
    const auto affinity = Affinity(1000, 1s);
    const Below below{random.Below(5) == 0 ? 0 : 4'000};
    const TokenLoadScorer relative, absolute({.form = TokenLoadForm::kAbsolute, .ceiling_tokens = 3'000});
    const std::uint64_t seed = random.Next(), number = random.Next();
    const auto decide = [&](auto policy) {
      return Decide(seed, number, std::move(policy), {.prompt_tokens = 1000}, warmth, matched, in_flight, active, rates, last);
    };

    const Decided fused = decide(Policy(affinity, below, Weighted(relative, weights[0]), Weighted(absolute, weights[1]),
                                        Weighted(Unruly{}, weights[2]), ActiveRequestScorer{}, make_picker()));
    ASSERT_TRUE(fused.bound.ok()) << fused.bound;

    FilterChain chain;
    chain.Add(affinity).Add(below);
    WeightedSum sum;
    sum.Add(relative, weights[0]).Add(absolute, weights[1]).Add(Unruly{}, weights[2]).Add(ActiveRequestScorer{});
    ExpectSame(fused, decide(Policy(std::move(chain), std::move(sum), AnyPicker(make_picker()))), round);

    ExpectSame(fused, decide(Policy(AnyFilter(affinity), AnyFilter(below), Weighted(AnyScorer(relative), weights[0]),
                                    Weighted(absolute, weights[1]), Weighted(AnyScorer(Unruly{}), weights[2]),
                                    AnyScorer(ActiveRequestScorer{}), make_picker())), round);

    FilterChain second;
    second.Add(below);
    WeightedSum rest;
    rest.Add(Unruly{}, weights[2]).Add(ActiveRequestScorer{});
    ExpectSame(fused, decide(Policy(affinity, std::move(second), Weighted(relative, weights[0]), Weighted(absolute, weights[1]),
                                    std::move(rest), make_picker())), round);
    if (::testing::Test::HasFatalFailure()) return;
    if (fused.refusal != RefusalReason::kNone) continue;

    std::vector<double> totals(fused.survivors.size());
    std::uint32_t clamped = 0;
    // As the survivors' own columns: a scorer normalises over what the filters left.
    Matched m;
    InFlight f;
    Active a;
    for (Row row : fused.survivors) {
      m.values.push_back(matched.values[row]);
      f.values.push_back(in_flight.values[row]);
      a.values.push_back(active.values[row]);
    }
    Decided compact;
    for (Row i = 0; i < fused.survivors.size(); ++i) compact.survivors.push_back(i);
    const Request request{.prompt_tokens = 1000};
    AddTerm(totals, clamped, compact, weights[0], testing::ScoresOf(relative, request, m, f));
    AddTerm(totals, clamped, compact, weights[1], testing::ScoresOf(absolute, request, m, f));
    AddTerm(totals, clamped, compact, weights[2], testing::ScoresOf(Unruly{}, request, a));
    AddTerm(totals, clamped, compact, 1, testing::ScoresOf(ActiveRequestScorer{}, request, a));
    for (std::size_t i = 0; i < totals.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint64_t>(fused.totals[i]), std::bit_cast<std::uint64_t>(totals[i])) << "round " << round;
    }
    ASSERT_EQ(fused.scores_clamped, clamped) << "round " << round;
  }
}

TEST(PolicyTest, FusedEqualsSequentialEqualsErased) {
  FusedEqualsSequentialEqualsErased([] { return MaxScorePicker<>({.max_targets = 3}); }, false, 71);
}
TEST(PolicyTest, FusedEqualsSequentialEqualsErasedWithUncleanScores) {
  FusedEqualsSequentialEqualsErased([] { return MaxScorePicker<>({.max_targets = 3}); }, true, 72);
}
TEST(PolicyTest, FusedEqualsSequentialEqualsErasedWithOtherPickers) {
  FusedEqualsSequentialEqualsErased([] { return WeightedRandomPicker({.max_targets = 2}); }, true, 73);
  FusedEqualsSequentialEqualsErased([] { return RandomPicker(); }, true, 74);
  FusedEqualsSequentialEqualsErased([] { return RoundRobinPicker({.max_targets = 4}); }, true, 75);
  FusedEqualsSequentialEqualsErased([] { return MaxScorePicker<TieBreak::kRoundRobin>(); }, true, 76);
  FusedEqualsSequentialEqualsErased([] { return MaxScorePicker<TieBreak::kLowestLoad>(); }, true, 77);
}

TEST(PolicyTest, WithoutScorersEveryTotalIsZero) {
  const Decided decided = Decide(1, 1, Policy(MaxScorePicker<>{}), {}, Rows{5});
  EXPECT_EQ(decided.decision.choice.tied, 5U);
  EXPECT_EQ(decided.totals, std::vector<double>(5));
  EXPECT_EQ(Decide(1, 1, Policy(WeightedSum(), MaxScorePicker<>{}), {}, Rows{5}).targets, decided.targets);
}

TEST(PolicyTest, BareScorerWeighsOne) {
  const Active active{{0, 1, 4}};
  EXPECT_EQ(Decide(1, 1, Policy(ActiveRequestScorer{}, MaxScorePicker<>{}), {}, active).totals, (std::vector<double>{1, 0.75, 0}));
  EXPECT_EQ(Decide(1, 1, Policy(Weighted(ActiveRequestScorer{}, 2), MaxScorePicker<>{}), {}, active).totals,
            (std::vector<double>{2, 1.5, 0}));
}

TEST(PolicyTest, WeightZeroLeavesTiesToTheDraw) {
  const Decided decided = Decide(1, 1, Policy(Weighted(ActiveRequestScorer{}, 0), MaxScorePicker<>{}), {}, Active{{0, 1, 4}});
  EXPECT_EQ(decided.decision.choice.tied, 3U);
}

// --- Weights ---

TEST(PolicyTest, WeightsNegativeNanOrInfiniteAreRefusedByTheScorersName) {
  for (double bad : {-1.0, -1e-6, std::nan(""), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    WeightedSum sum;
    sum.Add(TokenLoadScorer{}).Add(ActiveRequestScorer{}, bad);
    for (const absl::Status& status :
         {Decide(1, 1, Policy(TokenLoadScorer{}, Weighted(ActiveRequestScorer{}, bad), MaxScorePicker<>{}), {}, Rows{1}).bound,
          Decide(1, 1, Policy(Weighted(AnyScorer(ActiveRequestScorer{}), bad), MaxScorePicker<>{}), {}, Rows{1}).bound,
          Decide(1, 1, Policy(std::move(sum), MaxScorePicker<>{}), {}, Rows{1}).bound}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("weight of active-request-scorer"), HasSubstr(">= 0 and finite")));
    }
  }
}

TEST(PolicyTest, ScorerWithoutANameIsNamedByItsType) {
  struct Nameless {
    using Consumes = Signals<>;
    auto Score(const Request&, CandidatesFor<Consumes>) const {
      return [](Row) { return 0.5F; };
    }
  };
  const Decided decided = Decide(1, 1, Policy(Weighted(Nameless{}, -1), MaxScorePicker<>{}), {}, Rows{1});
  EXPECT_THAT(std::string(decided.bound.message()), HasSubstr("weight of Nameless"));
}

TEST(PolicyTest, PartsThatRefuseTheirOptionsAreHeard) {
  const auto message = [](auto policy) { return std::string(Decide(1, 1, std::move(policy), {}, Rows{1}).bound.message()); };
  EXPECT_THAT(message(Policy(ActiveRequestScorer({.idle_threshold = -1}), MaxScorePicker<>{})), HasSubstr("idle_threshold"));
  EXPECT_THAT(message(Policy(Weighted(AnyScorer(ActiveRequestScorer({.idle_threshold = -1})), 1), MaxScorePicker<>{})),
              HasSubstr("idle_threshold"));
  EXPECT_THAT(message(Policy(MaxScorePicker<>({.max_targets = 9}))), HasSubstr("max_targets"));
  EXPECT_THAT(message(Policy(AnyPicker(MaxScorePicker<>({.max_targets = 0})))), HasSubstr("max_targets"));
}

// --- Filters ---

TEST(PolicyTest, FiltersRunInOrderOnWhatTheOneBeforeLeft) {
  const Decided decided = Decide(1, 1, Policy(Below{30}, Below{20}, MaxScorePicker<>{}), {}, InFlight{{35, 25, 15}});
  EXPECT_THAT(decided.survivors, ElementsAre(2));
  ASSERT_EQ(decided.decision.verdict_count, 2U);
  EXPECT_EQ(decided.decision.candidates, 3U);
  EXPECT_EQ(decided.decision.verdicts[0].kept, 2U);
  EXPECT_EQ(decided.decision.verdicts[0].margin, 30);
  EXPECT_EQ(decided.decision.verdicts[1].kept, 1U);
  EXPECT_EQ(decided.decision.survivors, 1U);
}

TEST(PolicyTest, FilterThatKeepsNobodyIsNamedAndEndsTheChain) {
  FilterChain chain;
  chain.Add(Below{100}).Add(Below{10}).Add(Below{5});
  for (const Decided& decided : {Decide(1, 1, Policy(Below{100}, Below{10}, Below{5}, MaxScorePicker<>{}), {}, InFlight{{35, 25}}),
                                 Decide(1, 1, Policy(std::move(chain), MaxScorePicker<>{}), {}, InFlight{{35, 25}})}) {
    EXPECT_EQ(decided.refusal, RefusalReason::kAllFiltered);
    EXPECT_EQ(decided.emptied_by, 1);
    EXPECT_EQ(decided.emptied_by_name, "below");
    EXPECT_EQ(decided.considered, 2U);
    EXPECT_EQ(decided.decision.verdict_count, 2U);  // The third never ran.
  }
}

TEST(PolicyTest, MoreFiltersThanDecisionsHaveRoomForAreRefused) {
  const auto chain = [](int count) {
    FilterChain filters;
    for (int i = 0; i < count; ++i) filters.Add(Below{100});
    return filters;
  };
  EXPECT_TRUE(Decide(1, 1, Policy(chain(kMaxFilters), MaxScorePicker<>{}), {}, Rows{1}).bound.ok());
  EXPECT_TRUE(Decide(1, 1, Policy(Below{1}, chain(kMaxFilters - 1), MaxScorePicker<>{}), {}, Rows{1}).bound.ok());
  for (const absl::Status& status : {Decide(1, 1, Policy(chain(kMaxFilters + 1), MaxScorePicker<>{}), {}, Rows{1}).bound,
                                     Decide(1, 1, Policy(chain(3), Below{1}, chain(3), MaxScorePicker<>{}), {}, Rows{1}).bound}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("filters of a policy"), HasSubstr("at most 6"), HasSubstr("got 7")));
  }
}

// --- Draws ---

TEST(PolicyTest, DrawsOfOneFilterDoNotShiftAnothers) {
  for (std::uint64_t number = 1; number <= 50; ++number) {
    const auto decide = [&](int first) {
      return Decide(7, number, Policy(Drawing<'a'>{first}, Drawing<'b'>{1}, MaxScorePicker<>{}), {}, Rows{8});
    };
    const Decided none = decide(0), many = decide(9);
    EXPECT_EQ(none.decision.verdicts[1].margin, many.decision.verdicts[1].margin);
    EXPECT_EQ(none.targets, many.targets);  // Nor the picker's.
  }
}

TEST(PolicyTest, StagesDrawDifferentNumbers) {
  const Decided decided = Decide(7, 1, Policy(Drawing<'a'>{1}, Drawing<'b'>{1}, MaxScorePicker<>{}), {}, Rows{8});
  EXPECT_NE(decided.decision.verdicts[0].margin, decided.decision.verdicts[1].margin);
}

TEST(PolicyTest, DecisionsAreGolden) {  // The same seed, the same decisions: on every machine, in every version.
  std::vector<Row> picks;
  for (std::uint64_t number = 1; number <= 12; ++number) {
    picks.push_back(Decide(7, number, Policy(MaxScorePicker<>{}), {}, Rows{8}).targets[0]);
  }
  EXPECT_THAT(picks, ElementsAre(5, 4, 2, 0, 4, 0, 1, 0, 6, 0, 2, 2));
}

// --- Compositions: the thesis in one decision ---

TEST(PolicyTest, R34NearIdleWarmOneBeatsIdleColdOneOnceTheGateIsOpen) {
  const auto decide = [](double b_warmth) {
    return Decide(1, 1, Policy(Affinity(), TokenLoadScorer{}, MaxScorePicker<>{}), {.prompt_tokens = 20'000},
                  Warmth{{20'000, b_warmth, 0}}, Matched{{20'000, static_cast<std::int64_t>(b_warmth), 0}},
                  InFlight{{300'000, 1'000, 0}});
  };
  const Decided both_warm = decide(18'000);
  EXPECT_THAT(both_warm.survivors, ElementsAre(0, 1));
  EXPECT_THAT(both_warm.targets, ElementsAre(1));
  const Decided open = decide(14'000);  // B at 70 %: cold by the threshold, cheapest by lookahead (7,000 < 20,000).
  EXPECT_EQ(*open.decision.verdicts[0].reason, kGateOpen);
  EXPECT_THAT(open.targets, ElementsAre(1));
}

TEST(PolicyTest, R35LeastLoadedHolderWins100Of100) {
  for (std::uint64_t number = 1; number <= 100; ++number) {
    EXPECT_THAT(Decide(1, number, Policy(Affinity(), TokenLoadScorer{}, MaxScorePicker<>{}), {.prompt_tokens = 1000},
                       Warmth{{1000, 1000}}, Matched{{1000, 1000}}, InFlight{{100'000, 0}}).targets, ElementsAre(1));
  }
}

TEST(PolicyTest, R32R36ColdPicksAreByTokensInFlight) {
  for (const InFlight& load : {InFlight{{300'000, 0}}, InFlight{{2 * 150'000, 60 * 100}}}) {
    EXPECT_THAT(Decide(1, 1, Policy(Affinity(), TokenLoadScorer{}, MaxScorePicker<>{}), {.prompt_tokens = 8'000}, load).targets,
                ElementsAre(1));
  }
}

TEST(PolicyTest, R41AlwaysStickyStaysWhateverTheLoad) {
  auto gate = TauGate::Create({.always_sticky = true});
  const Decided decided = Decide(1, 1, Policy(PrefixCacheAffinityFilter(*gate), TokenLoadScorer{}, MaxScorePicker<>{}),
                                 {.prompt_tokens = 1000}, Warmth{{1000, 0}}, Matched{{1000, 0}}, InFlight{{10'000'000, 0}});
  EXPECT_THAT(decided.targets, ElementsAre(0));
  EXPECT_EQ(*decided.decision.verdicts[0].reason, kGateOff);
}

TEST(PolicyTest, R47OpenGateMovesTheRequest) {
  const Decided decided = Decide(1, 1, Policy(Affinity(), TokenLoadScorer{}, MaxScorePicker<>{}), {.prompt_tokens = 20'000},
                                 Warmth{{20'000, 0}}, Matched{{20'000, 0}}, InFlight{{400'000, 0}});
  EXPECT_EQ(*decided.decision.verdicts[0].reason, kGateOpen);
  EXPECT_THAT(decided.targets, ElementsAre(1));
}

TEST(PolicyTest, OpenGateMayStillPickTheWarmOneWhereMovingCostsMore) {
  // Lead tau + 1, but the prompt is 400,000 tokens long and wholly cached on the warm one.
  const Decided decided = Decide(1, 1, Policy(Affinity(), TokenLoadScorer{}, MaxScorePicker<>{}), {.prompt_tokens = 400'000},
                                 Warmth{{400'000, 0}}, Matched{{400'000, 0}}, InFlight{{286'721, 0}});
  EXPECT_EQ(*decided.decision.verdicts[0].reason, kGateOpen);
  EXPECT_THAT(decided.targets, ElementsAre(0));
}

TEST(PolicyTest, R55OverloadedFleetStillRanksByLoad100Of100) {
  for (std::uint64_t number = 1; number <= 100; ++number) {
    EXPECT_THAT(Decide(1, number, Policy(Affinity(), TokenLoadScorer{}, MaxScorePicker<>{}), {.prompt_tokens = 8'000},
                       InFlight{{4'300'000, 9'000'000}}).targets, ElementsAre(0));
  }
}

// --- In a router ---

absl::StatusOr<Router<Upstream>> UnrulyRouter(const Fleet<Upstream>& fleet) {
  return MakeRouter(fleet, {.seed = 1}, Producers(InFlightLoad()),
                    Named("default", Policy(Unruly{}, ActiveRequestScorer{}, MaxScorePicker<>{})));
}

TEST(PolicyRouterTest, R54NanScoresZeroForThatPickAndIsCounted) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  auto router = UnrulyRouter(fleet);
  ASSERT_TRUE(router.ok()) << router.status();
  // Both idle: Unruly says NaN for both, worth 0; the tie is drawn.
  auto first = router->Route({});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(router->Metrics().scores_clamped, 2U);
  EXPECT_EQ(first->decision().choice.best, 1);  // ActiveRequestScorer's 1, and nothing poisoned.
  EXPECT_EQ(first->decision().choice.tied, 2U);
  // Now one has a request, and is said 5.0: worth 1, against NaN and 1.
  auto second = router->Route({});
  EXPECT_EQ(router->Metrics().scores_clamped, 4U);
  EXPECT_EQ(second->decision().choice.best, 1);
  EXPECT_EQ(second->decision().choice.tied, 2U);
}

TEST(PolicyTest, R61ScoresOutOfRangeAreClampedAndCounted) {
  // 5.0 for A and -3 for B.
  const Decided decided = Decide(1, 1, Policy(Unruly{}, MaxScorePicker<>{}), {}, Active{{1, 2}});
  EXPECT_EQ(decided.totals, (std::vector<double>{1, 0}));
  EXPECT_EQ(decided.scores_clamped, 2U);
  const Decided clean = Decide(1, 1, Policy(Unruly{}, MaxScorePicker<>{}), {}, Active{{6, 7, 3}});  // 1, 0 and -0.
  EXPECT_EQ(clean.scores_clamped, 0U);
}

TEST(PolicyRouterTest, EmptiedSetNamesTheFilter) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 3);
  auto router = MakeRouter(fleet, {}, Producers(InFlightLoad()), Named("default", Policy(Below{0}, MaxScorePicker<>{})));
  ASSERT_TRUE(router.ok()) << router.status();
  auto routed = router->Route({});
  ASSERT_FALSE(routed.ok());
  EXPECT_EQ(routed.refusal().reason, RefusalReason::kAllFiltered);
  EXPECT_EQ(routed.refusal().filter_name(), "below");
  EXPECT_THAT(routed.refusal().ToString(), AllOf(HasSubstr("below"), HasSubstr("3 candidates")));
}

TEST(PolicyRouterTest, R24R31SequentialColdTrafficSpreads) {
  for (const int endpoints : {4, 2}) {
    Fleet<Upstream> fleet;
    AddEndpoints(fleet, endpoints);
    auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s, .seed = 5});
    ASSERT_TRUE(router.ok()) << router.status();
    std::map<std::string, int> counts;
    for (std::uint32_t i = 0; i < 400; ++i) {
      auto routed = router->Route({.tokens = std::vector<TokenId>(64, 1000 + i)});
      ASSERT_TRUE(routed.ok());
      ++counts[routed->endpoint().called];
      routed->FirstToken();
      routed->Finish();
    }
    for (const auto& [name, count] : counts) EXPECT_NEAR(count, 400 / endpoints, 40) << name;
    EXPECT_EQ(counts.size(), static_cast<std::size_t>(endpoints));
  }
}

TEST(PolicyRouterTest, R28FirstPlacementsOfPrefixGroupsAreSpread) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 4);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s, .seed = 5});
  std::map<std::string, int> groups;
  for (std::uint32_t group = 0; group < 20; ++group) {
    std::string home;
    for (std::uint32_t i = 0; i < 10; ++i) {
      std::vector<TokenId> prompt(2'000, group);
      prompt.resize(2'040, 1'000'000 + i);
      auto routed = router->Route({.tokens = prompt});
      ASSERT_TRUE(routed.ok());
      if (i == 0) ++groups[home = routed->endpoint().called];
      EXPECT_EQ(routed->endpoint().called, home);  // And the group stays where it was placed.
      routed->FirstToken();
      routed->Finish();
    }
  }
  for (const auto& [name, count] : groups) EXPECT_TRUE(count >= 2 && count <= 9) << name << " " << count;
  EXPECT_EQ(groups.size(), 4U);
}

// 1,000 common tokens of 1,200, 0.83 of the prompt: warm. How many endpoints do 100 such prompts reach, one at a time?
template <class MakeRouter>
std::size_t EndpointsReached(MakeRouter make_router) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 8);
  auto router = make_router(fleet);
  EXPECT_TRUE(router.ok()) << router.status();
  std::map<std::string, int> counts;
  for (std::uint32_t i = 0; i < 100; ++i) {
    std::vector<TokenId> prompt(1'000, 7);
    prompt.resize(1'200, 1'000'000 + i);
    auto routed = router->Route({.tokens = prompt});
    EXPECT_TRUE(routed.ok());
    ++counts[routed->endpoint().called];
    routed->FirstToken();
    routed->Finish();
  }
  return counts.size();
}

TEST(PolicyRouterTest, R38BelowTauOneCommonPrefixStaysOnOneEndpoint) {
  EXPECT_EQ(EndpointsReached([](const auto& fleet) {
              return PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s, .seed = 3});
            }), 1U);
}

TEST(PolicyRouterTest, R38ExplorationSpreadsOnlyAsFarAsTheScorerLetsIt) {
  // Ranked by active requests, whoever skips the filter is drawn from the idle ones.
  EXPECT_GE(EndpointsReached([](const auto& fleet) {
              return DecodeBound(fleet, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s,
                                         .exploration_probability = 0.3, .seed = 3});
            }), 5U);
  // Ranked by token load with lookahead, the warm endpoint is the cheapest of an idle fleet: it stays the choice.
  EXPECT_EQ(EndpointsReached([](const auto& fleet) {
              return PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s,
                                          .exploration_probability = 0.3, .seed = 3});
            }), 1U);
}

// --- A signal that nobody fills: a Status that names both ---

TOKROUTE_SIGNAL(OtherTypeOfActiveRequests, double, "active_requests", "requests");
struct WantsDouble {
  static constexpr std::string_view kName = "wants-double";
  using Consumes = Signals<OtherTypeOfActiveRequests>;
  auto Score(const Request&, CandidatesFor<Consumes>) const {
    return [](Row) { return 0.5F; };
  }
};

std::vector<AnyLoadProducer> Ledger() {
  std::vector<AnyLoadProducer> load;
  load.emplace_back(InFlightLoad());
  return load;
}

TEST(MissingSignalTest, RouterOfRuntimeProducersNamesPluginAndSignal) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  const auto refused = [&](auto policy) {
    const auto router = MakeRouter(fleet, {}, Ledger(), {}, Named("default", std::move(policy)));
    EXPECT_FALSE(router.ok());
    EXPECT_EQ(router.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(router.status().message());
  };
  const auto both = AllOf(HasSubstr("token-load-scorer"), HasSubstr("matched_tokens"), HasSubstr("no producer"));
  EXPECT_THAT(refused(Policy(TokenLoadScorer{}, MaxScorePicker<>{})), both);
  EXPECT_THAT(refused(Policy(Weighted(TokenLoadScorer{}, 2), MaxScorePicker<>{})), both);
  EXPECT_THAT(refused(Policy(AnyScorer(TokenLoadScorer{}), MaxScorePicker<>{})), both);
  WeightedSum sum;
  sum.Add(ActiveRequestScorer{}).Add(TokenLoadScorer{});
  EXPECT_THAT(refused(Policy(std::move(sum), MaxScorePicker<>{})), both);
  FilterChain chain;
  chain.Add(Affinity());
  EXPECT_THAT(refused(Policy(std::move(chain), MaxScorePicker<>{})),
              AllOf(HasSubstr("prefix-cache-affinity-filter"), HasSubstr("weighted_matched_tokens")));
}

TEST(MissingSignalTest, PickerNamesItToo) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  for (const absl::Status& status : {MakeRouter(fleet, {}, {}, {}, Named("d", Policy(RoundRobinPicker{}))).status(),
                                     MakeRouter(fleet, {}, {}, {}, Named("d", Policy(AnyPicker(RoundRobinPicker{})))).status()}) {
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("round-robin-picker"), HasSubstr("last_dispatch")));
  }
}

TEST(MissingSignalTest, SetPolicyNamesBothAndChangesNothing) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  const absl::Status plain = router->SetPolicy("least-outstanding", Policy(TokenLoadScorer{}, MaxScorePicker<>{}));
  const absl::Status erased = router->SetPolicy("other", Policy(AnyScorer(TokenLoadScorer{}), MaxScorePicker<>{}));
  for (const absl::Status& status : {plain, erased}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("token-load-scorer"), HasSubstr("matched_tokens")));
  }
  EXPECT_TRUE(router->Route({}).ok());
  EXPECT_EQ(router->Route({}, {.policy = "other"}).refusal().reason, RefusalReason::kUnknownPolicy);
}

TEST(MissingSignalTest, AnotherValueTypeIsSaidSo) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  auto router = LeastOutstanding(fleet);
  for (const absl::Status& status : {router->SetPolicy("other", Policy(WantsDouble{}, MaxScorePicker<>{})),
                                     router->SetPolicy("other", Policy(AnyScorer(WantsDouble{}), MaxScorePicker<>{})),
                                     MakeRouter(fleet, {}, Ledger(), {}, Named("d", Policy(WantsDouble{}, MaxScorePicker<>{}))).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("wants-double"), HasSubstr("active_requests"), HasSubstr("another value type")));
  }
}

TEST(MissingSignalTest, ErasedPolicyServesWhenEverythingIsThere) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 3);
  auto index = PrefixIndex::Create({});
  ASSERT_TRUE(index.ok()) << index.status();
  std::vector<AnyRequestProducer> request;
  request.emplace_back(ApproximatePrefix(*index));
  FilterChain filters;
  filters.Add(Affinity());
  WeightedSum scorers;
  scorers.Add(TokenLoadScorer{}, 2);
  auto router = MakeRouter(fleet, {.seed = 5}, Ledger(), std::move(request),
                           Named("erased", Policy(std::move(filters), std::move(scorers), AnyPicker(MaxScorePicker<>{}))));
  ASSERT_TRUE(router.ok()) << router.status();
  const std::vector<TokenId> prompt(1'000, 7);
  auto first = router->Route({.tokens = prompt});
  ASSERT_TRUE(first.ok());
  first->FirstToken();
  auto second = router->Route({.tokens = prompt});
  EXPECT_EQ(second->endpoint_id(), first->endpoint_id());
  EXPECT_THAT(second->decision().ToString(), AllOf(HasSubstr("prefix-cache-affinity-filter kept 1 of 3 (sticky)"),
                                                   HasSubstr("may grow by 286,720")));
}

}  // namespace
}  // namespace tokroute

#include "tokroute/filter/prefix_cache_affinity_filter.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/test_run.h"
#include "tokroute/random.h"
#include "tokroute/testing/scores_of.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using internal::kInt64Max;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ColumnOf;
using testing::Kept;
using testing::KeptBy;
using testing::Rows;
using testing::Seed;

using Warmth = ColumnOf<WeightedMatchedTokens>;
using InFlight = ColumnOf<UncachedTokensInFlight>;
using Rates = ColumnOf<PeakPrefillThroughput>;

constexpr Request kPrompt{.prompt_tokens = 1000};  // So that 800 matched tokens are the default threshold.

PrefixCacheAffinityFilter Make(const PrefixCacheAffinityOptions& options) {
  auto filter = PrefixCacheAffinityFilter::Create(options);
  EXPECT_TRUE(filter.ok()) << filter.status();
  return *filter;
}
// tau = 286,720 tokens.
PrefixCacheAffinityFilter Anchored(PrefixCacheAffinityOptions options = {}) {
  options.gate.peak_prefill_throughput = 20'480;
  options.gate.max_ttft_penalty = 14s;
  return Make(options);
}
// tau = 286,704 tokens.
PrefixCacheAffinityFilter Shipped() { return Make({.gate = {.peak_prefill_throughput = 15'928}}); }

std::string Refused(const PrefixCacheAffinityOptions& options) {
  const auto filter = PrefixCacheAffinityFilter::Create(options);
  EXPECT_FALSE(filter.ok());
  EXPECT_EQ(filter.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(filter.status().message());
}

// --- The table of the design, row by row ---

TEST(PrefixCacheAffinityFilterTest, LeadEqualToTauStaysSticky) {
  for (const auto& [lead, open] : {std::pair(286'719, false), {286'720, false}, {286'721, true}}) {
    const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{1000, 0, 0}}, InFlight{{lead, 0, 50}});
    EXPECT_EQ(*kept.verdict.reason, open ? kGateOpen : kSticky) << lead;
    EXPECT_EQ(kept.verdict.margin, lead - 286'720);
    EXPECT_THAT(kept.verdict.facts, ElementsAre(lead, 0));
    if (open) {
      EXPECT_THAT(kept.rows, ElementsAre(0, 1, 2));  // Every candidate, the warm one included.
    } else {
      EXPECT_THAT(kept.rows, ElementsAre(0));
    }
  }
}

TEST(PrefixCacheAffinityFilterTest, NegativeLeadStaysSticky) {
  const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{1000, 0}}, InFlight{{0, 500'000}});
  EXPECT_THAT(kept.rows, ElementsAre(0));
  EXPECT_EQ(*kept.verdict.reason, kSticky);
  EXPECT_EQ(kept.verdict.margin, -500'000 - 286'720);
  EXPECT_THAT(kept.verdict.facts, ElementsAre(0, 500'000));
}

TEST(PrefixCacheAffinityFilterTest, NobodyWarmKeepsAllAndSaysWhatIsMissing) {
  const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{0, 799, 400}}, InFlight{{0, 900'000, 0}});
  EXPECT_THAT(kept.rows, ElementsAre(0, 1, 2));
  EXPECT_EQ(*kept.verdict.reason, kNobodyWarm);
  EXPECT_EQ(kept.verdict.margin, 1);
  EXPECT_THAT(kept.verdict.facts, ElementsAre(799, 1000));
}

TEST(PrefixCacheAffinityFilterTest, AllWarmKeepsAllWhateverTheLoads) {
  const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{800, 1000}}, InFlight{{900'000, 0}});
  EXPECT_THAT(kept.rows, ElementsAre(0, 1));
  EXPECT_EQ(*kept.verdict.reason, kAllWarm);
}

TEST(PrefixCacheAffinityFilterTest, OneOrNoCandidateHasNothingToBreak) {
  for (double matched : {0.0, 1000.0}) {
    const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{matched}}, InFlight{{900'000}});
    EXPECT_THAT(kept.rows, ElementsAre(0));
    EXPECT_EQ(*kept.verdict.reason, kNotApplicable);
  }
  EXPECT_EQ(*KeptBy(Anchored(), kPrompt, Rows{0}).verdict.reason, kNotApplicable);
}

TEST(PrefixCacheAffinityFilterTest, AffinityExactlyAtTheThresholdIsWarm) {
  const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{800, 799}}, InFlight{{0, 0}});
  EXPECT_THAT(kept.rows, ElementsAre(0));
  EXPECT_EQ(*kept.verdict.reason, kSticky);
  // Weighted tokens need not be whole: the last double below 800 is cold.
  EXPECT_EQ(*KeptBy(Anchored(), kPrompt, Warmth{{std::nextafter(800.0, 0), 0}}).verdict.reason, kNobodyWarm);
}

TEST(PrefixCacheAffinityFilterTest, WarmIsTheIeeeDivisionTestForAnyThresholdAndPrompt) {
  Random random(testing_support::TestSeed(31));
  for (int round = 0; round < 3'000; ++round) {
    const double threshold = round % 2 == 0 ? static_cast<double>(1 + random.Below(100)) / 100 : 1 - random.Unit();
    const std::int64_t prompt = 1 + random.Below(round % 3 == 0 ? 50U : 131'072U);
    const auto filter = Anchored({.affinity_threshold = threshold});
    const auto edge = static_cast<std::int64_t>(threshold * static_cast<double>(prompt));
    for (std::int64_t matched = std::max<std::int64_t>(0, edge - 2); matched <= std::min(prompt, edge + 2); ++matched) {
      const auto tokens = static_cast<double>(matched);
      const bool warm = tokens / static_cast<double>(prompt) >= threshold;
      const Kept kept = KeptBy(filter, {.prompt_tokens = prompt}, Warmth{{tokens, -1}});
      ASSERT_EQ(*kept.verdict.reason, warm ? kSticky : kNobodyWarm)
          << "round " << round << ": " << matched << " of " << prompt << " at " << threshold;
      if (!warm) {
        // The margin is what the best match lacks: with that many tokens more it is warm, with one less it is not.
        const auto reached = static_cast<double>(matched + kept.verdict.margin);
        ASSERT_GE(reached / static_cast<double>(prompt), threshold) << "round " << round;
        ASSERT_LT((reached - 1) / static_cast<double>(prompt), threshold) << "round " << round;
      }
    }
  }
}

TEST(PrefixCacheAffinityFilterTest, ThresholdZeroOrBelowIsOff) {
  for (double off : {0.0, -0.0, -0.5, -std::numeric_limits<double>::infinity()}) {
    const auto filter = Anchored({.affinity_threshold = off});
    const Kept kept = KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{0, 0}});
    EXPECT_THAT(kept.rows, ElementsAre(0, 1));
    EXPECT_EQ(*kept.verdict.reason, kNotApplicable);
    EXPECT_THAT(filter.Explain(kept.verdict), HasSubstr("off"));
  }
}

TEST(PrefixCacheAffinityFilterTest, LeastPositiveThresholdIsAnswerableAtOnce) {
  const auto filter = Anchored({.affinity_threshold = std::numeric_limits<double>::denorm_min()});
  const Kept kept = KeptBy(filter, {.prompt_tokens = kMaxPromptTokens}, Warmth{{1, 0}});
  EXPECT_THAT(kept.rows, ElementsAre(0));
}

TEST(PrefixCacheAffinityFilterTest, ThresholdOneWantsTheWholePrompt) {
  const auto filter = Anchored({.affinity_threshold = 1});
  EXPECT_THAT(KeptBy(filter, kPrompt, Warmth{{1000, 999}}).rows, ElementsAre(0));
  EXPECT_EQ(*KeptBy(filter, kPrompt, Warmth{{999, 999}}).verdict.reason, kNobodyWarm);
}

TEST(PrefixCacheAffinityFilterTest, OptionsOutOfRangeAreRefusedByFieldValueAndRange) {
  const TauGateOptions gate{.peak_prefill_throughput = 20'480};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(Refused({.gate = gate, .affinity_threshold = 1.5}),
              AllOf(HasSubstr("PrefixCacheAffinityOptions.affinity_threshold"), HasSubstr("<= 1"), HasSubstr("got 1.5")));
  EXPECT_THAT(Refused({.gate = gate, .affinity_threshold = nan}), HasSubstr("affinity_threshold"));
  for (double bad : {-0.1, 1.1, nan, std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(Refused({.gate = gate, .exploration_probability = bad}),
                AllOf(HasSubstr("PrefixCacheAffinityOptions.exploration_probability"), HasSubstr("0 .. 1")));
  }
  EXPECT_THAT(Refused({.gate = {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 0ms}}),
              HasSubstr("TauGateOptions.max_ttft_penalty"));
  EXPECT_THAT(Refused({}), HasSubstr("TauGateOptions.peak_prefill_throughput"));
}

TEST(PrefixCacheAffinityFilterTest, PromptWithoutTokensMatchesNobody) {
  const Kept kept = KeptBy(Anchored(), {}, Rows{3});
  EXPECT_THAT(kept.rows, ElementsAre(0, 1, 2));
  EXPECT_EQ(*kept.verdict.reason, kNobodyWarm);
  EXPECT_THAT(Anchored().Explain(kept.verdict), HasSubstr("no tokens"));
}

TEST(PrefixCacheAffinityFilterTest, LeastLoadedWarmAndLeastLoadedColdDecide) {
  // The second warm one is far beyond tau, the first is not; the second cold one is idle.
  const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{900, 850, 0, 0}}, InFlight{{200'000, 900'000, 300'000, 100}});
  EXPECT_THAT(kept.rows, ElementsAre(0, 1));
  EXPECT_THAT(kept.verdict.facts, ElementsAre(200'000, 100));
}

TEST(PrefixCacheAffinityFilterTest, TheRequestItselfIsNotPartOfTheGate) {
  const auto filter = Make({.gate = {.peak_prefill_throughput = 1000, .max_ttft_penalty = 1s}});
  EXPECT_THAT(KeptBy(filter, {.prompt_tokens = 100'000}, Warmth{{90'000, 0}}, InFlight{{999, 0}}).rows, ElementsAre(0));
}

TEST(PrefixCacheAffinityFilterTest, HugeCountersDoNotOverflow) {
  EXPECT_EQ(*KeptBy(Shipped(), kPrompt, Warmth{{900, 0}}, InFlight{{9'000'000'000'000'000, 1}}).verdict.reason, kGateOpen);
  const Kept kept = KeptBy(Shipped(), kPrompt, Warmth{{900, 0}}, InFlight{{0, kInt64Max}});
  EXPECT_EQ(*kept.verdict.reason, kSticky);
  EXPECT_EQ(kept.verdict.margin, -kInt64Max);  // Saturates.
}

// --- Exploration ---

TEST(PrefixCacheAffinityFilterTest, ExplorationProbabilityIsTheShareThatSkips) {
  const int kRounds = 10'000;
  for (const auto& [probability, least, most] : {std::tuple(0.0, 0, 0), {1.0, kRounds, kRounds}, {0.3, 2'850, 3'150}}) {
    const auto filter = Anchored({.exploration_probability = probability});
    int skipped = 0;
    for (std::uint64_t seed = 0; seed < kRounds; ++seed) {
      const Kept kept = KeptBy(filter, kPrompt, Warmth{{1000, 0}}, Seed{seed});
      skipped += *kept.verdict.reason == kExploration;
      ASSERT_EQ(kept.rows.size(), *kept.verdict.reason == kExploration ? 2U : 1U) << "seed " << seed;
    }
    EXPECT_GE(skipped, least) << probability;  // 0.3: 3,000 +/- 3.3 standard deviations; seeds 0 .. 9,999.
    EXPECT_LE(skipped, most) << probability;
  }
}

TEST(PrefixCacheAffinityFilterTest, ExplorationComesAfterNotApplicable) {
  const auto filter = Anchored({.exploration_probability = 1});
  EXPECT_EQ(*KeptBy(filter, kPrompt, Rows{1}).verdict.reason, kNotApplicable);
  EXPECT_EQ(*KeptBy(filter, kPrompt, Rows{2}).verdict.reason, kExploration);
}

// --- Always sticky ---

TEST(PrefixCacheAffinityFilterTest, R41AlwaysStickyIsSaidAndReported) {
  const auto filter = Make({.gate = {.always_sticky = true}});
  const Kept kept = KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{10'000'000, 0}});
  EXPECT_THAT(kept.rows, ElementsAre(0));
  EXPECT_EQ(*kept.verdict.reason, kGateOff);
  EXPECT_THAT(kept.verdict.facts, ElementsAre(10'000'000, 0));
  EXPECT_THAT(filter.Explain(kept.verdict), AllOf(HasSubstr("always sticky"), HasSubstr("10,000,000")));
}

// --- kOnlyColder ---

TEST(PrefixCacheAffinityFilterTest, OnlyColderAddsColdOnesAtLeastTauBelow) {
  auto gate = TauGate::Create({.peak_prefill_throughput = 1000, .max_ttft_penalty = 1s, .rule = GateRule::kOnlyColder});
  const PrefixCacheAffinityFilter filter(*gate);
  // W = 5,000 (row 1). Cold: exactly tau below, one token less far, much farther.
  const Kept kept = KeptBy(filter, kPrompt, Warmth{{900, 900, 0, 0, 0}}, InFlight{{9'000, 5'000, 4'000, 4'001, 0}});
  EXPECT_THAT(kept.rows, ElementsAre(0, 1, 2, 4));
  EXPECT_EQ(*kept.verdict.reason, kGateOpen);
  EXPECT_EQ(kept.verdict.margin, 4'000);
}

TEST(PrefixCacheAffinityFilterTest, OnlyColderIsInclusive) {
  auto gate = TauGate::Create({.peak_prefill_throughput = 1000, .max_ttft_penalty = 1s, .rule = GateRule::kOnlyColder});
  const PrefixCacheAffinityFilter filter(*gate);
  for (const auto& [lead, open] : {std::pair(999, false), {1000, true}, {1001, true}}) {
    const Kept kept = KeptBy(filter, kPrompt, Warmth{{900, 0}}, InFlight{{lead, 0}});
    EXPECT_EQ(kept.rows.size(), open ? 2U : 1U) << lead;
    EXPECT_EQ(*kept.verdict.reason, open ? kGateOpen : kSticky);
    EXPECT_EQ(kept.verdict.margin, lead - 1000);
    EXPECT_EQ(kept.verdict.margin >= 0, open);
  }
}

TEST(PrefixCacheAffinityFilterTest, OnlyColderInTimeIsInclusiveToo) {
  auto gate = TauGate::Create({.peak_prefill_throughput = 1000, .max_ttft_penalty = 1s, .rule = GateRule::kOnlyColder});
  const PrefixCacheAffinityFilter filter(*gate);
  // Warm at 3 tokens/s, cold at 2: 1 s ahead of 1 token there is 4.5 tokens here, so 4 do not reach it and 5 do.
  EXPECT_EQ(KeptBy(filter, kPrompt, Warmth{{900, 0}}, InFlight{{4, 1}}, Rates{{3, 2}}).rows.size(), 1U);
  EXPECT_EQ(KeptBy(filter, kPrompt, Warmth{{900, 0}}, InFlight{{5, 1}}, Rates{{3, 2}}).rows.size(), 2U);
  // And of 2 tokens it is 6 exactly.
  EXPECT_EQ(KeptBy(filter, kPrompt, Warmth{{900, 0}}, InFlight{{5, 2}}, Rates{{3, 2}}).rows.size(), 1U);
  EXPECT_EQ(KeptBy(filter, kPrompt, Warmth{{900, 0}}, InFlight{{6, 2}}, Rates{{3, 2}}).rows.size(), 2U);
}

// --- Endpoints of different throughput ---

TEST(PrefixCacheAffinityFilterTest, DifferentRatesCompareTimes) {
  // The warm one is half as fast: 14 s are 143,360 tokens there. The cold one has the gate's own rate.
  for (const auto& [lead, open] : {std::pair(143'359, false), {143'360, false}, {143'361, true}}) {
    const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{1000, 0}}, InFlight{{lead, 0}}, Rates{{10'240, 0}});
    EXPECT_EQ(*kept.verdict.reason, open ? kGateOpen : kSticky) << lead;
    EXPECT_EQ(kept.verdict.margin, lead - 143'360);
    EXPECT_THAT(kept.verdict.facts, ElementsAre(lead, 0));
  }
}

TEST(PrefixCacheAffinityFilterTest, EachMinimumIsTakenInTime) {
  // Row 1 has more tokens than row 0 and needs less time; row 3 has fewer than row 2 and needs more.
  const Kept kept = KeptBy(Anchored(), kPrompt, Warmth{{1000, 1000, 0, 0}}, InFlight{{200'000, 300'000, 90'000, 50'000}},
                           Rates{{10'000, 40'000, 20'000, 5'000}});
  EXPECT_THAT(kept.verdict.facts, ElementsAre(300'000, 90'000));
  EXPECT_EQ(*kept.verdict.reason, kSticky);  // 7.5 s against 4.5 s.
}

TEST(PrefixCacheAffinityFilterTest, EqualRatesGiveTheTokenRows) {
  Random random(testing_support::TestSeed(32));
  for (int round = 0; round < 3'000; ++round) {
    Warmth warmth;
    InFlight in_flight;
    Rates own, none;
    const double peak = 1 + random.Below(40'000);
    const auto filter = Make({.gate = {.peak_prefill_throughput = peak, .max_ttft_penalty = 10s}});
    const std::uint32_t count = 2 + random.Below(6);
    for (std::uint32_t i = 0; i < count; ++i) {
      warmth.values.push_back(random.Below(2) == 0 ? 0 : 900);
      in_flight.values.push_back(static_cast<std::int64_t>(peak) * 10 * random.Below(3) + random.Below(3));
      own.values.push_back(peak);
      none.values.push_back(0);
    }
    const Kept stated = KeptBy(filter, kPrompt, warmth, in_flight, own), silent = KeptBy(filter, kPrompt, warmth, in_flight, none);
    ASSERT_EQ(stated.rows, silent.rows) << "round " << round;
    ASSERT_EQ(*stated.verdict.reason, *silent.verdict.reason);
    ASSERT_EQ(stated.verdict.margin, silent.verdict.margin);
    ASSERT_EQ(stated.verdict.facts, silent.verdict.facts);
  }
}

// The model works on fractions, compares each pair by cross products, and knows no fixed point: rates are whole numbers.
TEST(PrefixCacheAffinityFilterTest, MixedRatesEqualBruteForce) {
  Random random(testing_support::TestSeed(33));
  int opened = 0, stayed = 0;
  for (int round = 0; round < 20'000; ++round) {
    const std::int64_t own = 1 + random.Below(20'000), ms = 1 + random.Below(20'000);
    const bool only_colder = round % 4 == 3;
    const auto filter = Make({.gate = {.peak_prefill_throughput = static_cast<double>(own),
                                       .max_ttft_penalty = std::chrono::milliseconds(ms),
                                       .rule = only_colder ? GateRule::kOnlyColder : GateRule::kRelease}});
    Warmth warmth;
    InFlight in_flight;
    Rates rates;
    std::vector<std::int64_t> rate;
    const std::uint32_t count = 2 + random.Below(6);
    for (std::uint32_t i = 0; i < count; ++i) {
      warmth.values.push_back(random.Below(2) == 0 ? 799 : 800);
      in_flight.values.push_back(random.Below(4) == 0 ? 0 : random.Below(static_cast<std::uint32_t>(2 * own * ms / 1000 + 2)));
      const std::int64_t stated = random.Below(3) == 0 ? 0 : 1 + random.Below(20'000);
      rates.values.push_back(static_cast<double>(stated));
      rate.push_back(stated == 0 ? own : stated);
    }
    const auto& load = in_flight.values;
    const auto sooner = [&](Row a, Row b) { return load[a] * rate[b] < load[b] * rate[a]; };
    Row w = count, c = count;
    for (Row i = 0; i < count; ++i) {
      Row& least = warmth.values[i] >= 800 ? w : c;
      if (least == count || sooner(i, least)) least = i;
    }
    if (w == count || c == count) continue;
    // Lead in time against T_max, both sides x 1000 R R'; with equal rates the lead in tokens against round(R x T_max).
    const auto compare = [&](Row cold) -> std::int64_t {
      if (rate[w] == rate[cold]) return load[w] - load[cold] - (rate[w] * ms + 500) / 1000;
      return 1000 * (load[w] * rate[cold] - load[cold] * rate[w]) - ms * rate[w] * rate[cold];
    };
    std::vector<Row> expected;
    bool open = only_colder ? false : compare(c) > 0;
    for (Row i = 0; i < count; ++i) {
      const bool joins = only_colder && warmth.values[i] < 800 && compare(i) >= 0;
      open |= joins;
      if (warmth.values[i] >= 800 || joins || (!only_colder && open)) expected.push_back(i);
    }
    const Kept kept = KeptBy(filter, kPrompt, warmth, in_flight, rates);
    ASSERT_EQ(kept.rows, expected) << "round " << round;
    ASSERT_EQ(*kept.verdict.reason, open ? kGateOpen : kSticky) << "round " << round;
    ASSERT_EQ(only_colder ? kept.verdict.margin >= 0 : kept.verdict.margin > 0, open) << "round " << round;
    opened += open;
    stayed += !open;
  }
  EXPECT_GT(opened, 1'000);
  EXPECT_GT(stayed, 1'000);
}

// --- Text ---

TEST(PrefixCacheAffinityFilterTest, ExplainsEveryReason) {
  const auto filter = Anchored();
  const auto text = [&](Warmth warmth, InFlight in_flight) {
    return filter.Explain(KeptBy(filter, kPrompt, warmth, in_flight).verdict);
  };
  EXPECT_EQ(text({{1000, 0}}, {{300'000, 1'000}}),
            "the least loaded warm endpoint has 300,000 uncached tokens in flight, the least loaded cold one 1,000; that lead "
            "exceeds tau (286,720) by 12,280 tokens, so load alone decides");
  EXPECT_EQ(text({{1000, 0}}, {{286'720, 0}}),
            "the least loaded warm endpoint has 286,720 uncached tokens in flight, the least loaded cold one 0; the lead may "
            "grow by 0 tokens before it exceeds tau (286,720)");
  EXPECT_EQ(text({{450, 0}}, {{0, 0}}),
            "no warm endpoint: the best match is 450 of 1,000 prompt tokens, 350 short of the threshold 0.8");
  EXPECT_EQ(text({{1000, 800}}, {{0, 0}}), "every candidate caches at least 0.8 of the prompt");
  EXPECT_EQ(text({{0}}, {{0}}), "one candidate: nothing to narrow");
  const auto explore = Anchored({.exploration_probability = 1});
  EXPECT_EQ(explore.Explain(KeptBy(explore, kPrompt, Rows{2}).verdict), "skipped by the draw");
}

TEST(PrefixCacheAffinityFilterTest, ExplainsTimesWhenThroughputsDiffer) {
  // tau in tokens would be the gate's own, and the lead in tokens has nothing to do with it.
  const auto filter = Anchored();
  EXPECT_EQ(filter.Explain(KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{143'400, 0}}, Rates{{10'240, 0}}).verdict),
            "the least loaded warm endpoint has 143,400 uncached tokens in flight, the least loaded cold one 0; at their peak "
            "throughputs that lead exceeds 14,000 ms by 40 tokens of the warm one, so load alone decides");
  EXPECT_EQ(filter.Explain(KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{143'300, 0}}, Rates{{10'240, 0}}).verdict),
            "the least loaded warm endpoint has 143,300 uncached tokens in flight, the least loaded cold one 0; at their peak "
            "throughputs the lead may grow by 60 tokens of the warm one before it exceeds 14,000 ms");
}

TEST(PrefixCacheAffinityFilterTest, ExplainsOnlyColder) {
  auto gate = TauGate::Create({.peak_prefill_throughput = 1000, .max_ttft_penalty = 1s, .rule = GateRule::kOnlyColder});
  const PrefixCacheAffinityFilter filter(*gate);
  EXPECT_EQ(filter.Explain(KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{1000, 0}}).verdict),
            "the least loaded warm endpoint has 1,000 uncached tokens in flight, the least loaded cold one 0; that lead reaches "
            "tau (1,000) with 0 tokens to spare, so cold endpoints that far below join the warm ones");
  EXPECT_EQ(filter.Explain(KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{990, 0}}).verdict),
            "the least loaded warm endpoint has 990 uncached tokens in flight, the least loaded cold one 0; the lead is 10 "
            "tokens short of tau (1,000)");
}

TEST(PrefixCacheAffinityFilterTest, ExplainsAnUnreachableTau) {
  const auto filter = Make({.gate = {.peak_prefill_throughput = 1e9, .max_ttft_penalty = std::chrono::milliseconds::max()}});
  EXPECT_THAT(filter.Explain(KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{5, 0}}).verdict),
              HasSubstr("tau (unreachable)"));
}

// --- Field reports ---

TEST(PrefixCacheAffinityFilterTest, R35EveryHolderIsInTheWarmSet) {
  EXPECT_THAT(KeptBy(Anchored(), kPrompt, Warmth{{1000, 1000, 0}}, InFlight{{100'000, 0, 0}}).rows, ElementsAre(0, 1));
}

TEST(PrefixCacheAffinityFilterTest, R48ThresholdOutOfReachIsReportedWithTheBestMatch) {
  const Kept cold = KeptBy(Anchored(), kPrompt, Warmth{{700, 0}});
  EXPECT_EQ(*cold.verdict.reason, kNobodyWarm);
  EXPECT_THAT(Anchored().Explain(cold.verdict), HasSubstr("700 of 1,000"));
  EXPECT_THAT(KeptBy(Anchored({.affinity_threshold = 0.6}), kPrompt, Warmth{{700, 0}}).rows, ElementsAre(0));
}

TEST(PrefixCacheAffinityFilterTest, R49DefaultPenaltySuitsThroughput) {
  EXPECT_EQ(*KeptBy(Shipped(), kPrompt, Warmth{{1000, 0}}, InFlight{{80'000, 0}}).verdict.reason, kSticky);
  const auto five = Make({.gate = {.peak_prefill_throughput = 15'928, .max_ttft_penalty = 5s}});
  EXPECT_EQ(*KeptBy(five, kPrompt, Warmth{{1000, 0}}, InFlight{{80'000, 0}}).verdict.reason, kGateOpen);
}

TEST(PrefixCacheAffinityFilterTest, R50ExactTauStaysFromAnyBase) {
  for (std::int64_t base : {0, 1, 5, 12, 19, 23, 175}) {
    for (double rate : {0.0, 15'928.0}) {
      const Kept at = KeptBy(Shipped(), kPrompt, Warmth{{1000, 0}}, InFlight{{base + 286'704, base}}, Rates{{rate, rate}});
      EXPECT_THAT(at.rows, ElementsAre(0)) << base;
      const Kept above = KeptBy(Shipped(), kPrompt, Warmth{{1000, 0}}, InFlight{{base + 286'705, base}}, Rates{{rate, rate}});
      EXPECT_THAT(above.rows, ElementsAre(0, 1)) << base;
    }
  }
}

TEST(PrefixCacheAffinityFilterTest, R64HugeSettingsNeverOpen) {
  const auto filter = Make({.gate = {.peak_prefill_throughput = 1e9,
                                     .max_ttft_penalty = std::chrono::milliseconds(9'300'000'000'000'000)}});
  EXPECT_THAT(KeptBy(filter, kPrompt, Warmth{{1000, 0}}, InFlight{{1'000'000'000'000, 0}}).rows, ElementsAre(0));
}

}  // namespace
}  // namespace tokroute

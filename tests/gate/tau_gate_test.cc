#include "tokroute/gate/tau_gate.h"

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/test_run.h"
#include "tokroute/random.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using internal::Int128;
using internal::kInt64Max;
using ::testing::AllOf;
using ::testing::HasSubstr;

TauGate Gate(double peak, std::chrono::milliseconds penalty, GateRule rule = GateRule::kRelease) {
  auto gate = TauGate::Create({.peak_prefill_throughput = peak, .max_ttft_penalty = penalty, .rule = rule});
  EXPECT_TRUE(gate.ok()) << gate.status();
  return *gate;
}
std::string Refused(const TauGateOptions& options) {
  const auto gate = TauGate::Create(options);
  EXPECT_FALSE(gate.ok());
  EXPECT_EQ(gate.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(gate.status().message());
}

TEST(TauGateTest, TauIsPeakTimesPenalty) {
  const TauGate gate = Gate(20'480, 14s);
  EXPECT_EQ(gate.tau_tokens(), 286'720);
  EXPECT_EQ(gate.peak_prefill_throughput(), 20'480);
  EXPECT_EQ(gate.max_ttft_penalty(), 14s);
  EXPECT_FALSE(gate.always_sticky());
  EXPECT_EQ(gate.rule(), GateRule::kRelease);
}

TEST(TauGateTest, PublishedTauOfEveryPath) {  // "Sticky Until Saturated", at 14 s.
  for (const auto& [peak, tau] : {std::pair(39'065.0, 546'910), {27'336.0, 382'704}, {26'290.0, 368'060},
                                  {24'027.0, 336'378}, {20'480.0, 286'720}, {16'444.0, 230'216}, {15'751.0, 220'514},
                                  {15'360.0, 215'040}, {15'928.0, 222'992}}) {
    EXPECT_EQ(Gate(peak, 14s).tau_tokens(), tau) << peak;
  }
}

TEST(TauGateTest, PublishedPenaltiesAtTheAnchor) {
  EXPECT_EQ(Gate(20'480, 10s).tau_tokens(), 204'800);
  EXPECT_EQ(Gate(20'480, 14s).tau_tokens(), 286'720);
  EXPECT_EQ(Gate(20'480, 18s).tau_tokens(), 368'640);
  EXPECT_EQ(Gate(20'480, 25s).tau_tokens(), 512'000);
}

TEST(TauGateTest, DefaultPenaltyIsEighteenSeconds) {
  EXPECT_EQ(TauGate::Create({.peak_prefill_throughput = 15'928})->tau_tokens(), 286'704);
}

TEST(TauGateTest, TauInChunksDependsOnTimesOnly) {  // K = tau / B = T_max / T(B).
  EXPECT_EQ(Gate(8192 / 0.40, 14s).tau_tokens() / 8192, 35);
  EXPECT_EQ(Gate(8192 / 0.10, 3500ms).tau_tokens() / 8192, 35);
}

TEST(TauGateTest, TransplantedTauIsWrongByTheRatioOfThroughputs) {
  EXPECT_NEAR(static_cast<double>(Gate(39'065, 14s).tau_tokens()) / 286'720, 1.9, 0.05);
  EXPECT_NEAR(286'720.0 / static_cast<double>(Gate(15'751, 14s).tau_tokens()), 1.3, 0.05);
}

TEST(TauGateTest, TauRoundsHalvesUp) {
  EXPECT_EQ(Gate(1, 499ms).tau_tokens(), 0);
  EXPECT_EQ(Gate(1, 500ms).tau_tokens(), 1);
  EXPECT_EQ(Gate(0.001, 1ms).tau_tokens(), 0);  // A gate that opens at the first token of lead.
  EXPECT_TRUE(Gate(0.001, 1ms).Breaks({.warm_tokens = 1, .cold_tokens = 0}));
}

TEST(TauGateTest, LeadEqualToTauStaysSticky) {
  const TauGate gate = Gate(20'480, 14s);
  EXPECT_FALSE(gate.Breaks({.warm_tokens = 286'719, .cold_tokens = 0}));
  EXPECT_FALSE(gate.Breaks({.warm_tokens = 286'720, .cold_tokens = 0}));
  EXPECT_TRUE(gate.Breaks({.warm_tokens = 286'721, .cold_tokens = 0}));
}

TEST(TauGateTest, NegativeAndNoLeadStay) {
  const TauGate gate = Gate(20'480, 14s);
  EXPECT_FALSE(gate.Breaks({.warm_tokens = 5, .cold_tokens = 5}));
  EXPECT_FALSE(gate.Breaks({.warm_tokens = 0, .cold_tokens = 1}));
  EXPECT_FALSE(gate.Breaks({.warm_tokens = 0, .cold_tokens = kInt64Max}));
}

TEST(TauGateTest, R50ExactEqualityDoesNotWobbleWithTheBase) {
  const TauGate shipped = Gate(15'928, 18s), anchored = Gate(20'480, 14s);
  for (std::int64_t base : {0, 1, 5, 12, 19, 23, 175, 1000, 40'963}) {
    EXPECT_FALSE(shipped.Breaks({.warm_tokens = base + 286'704, .cold_tokens = base})) << base;
    EXPECT_TRUE(shipped.Breaks({.warm_tokens = base + 286'705, .cold_tokens = base})) << base;
    EXPECT_FALSE(anchored.Breaks({.warm_tokens = base + 286'720, .cold_tokens = base})) << base;
    EXPECT_TRUE(anchored.Breaks({.warm_tokens = base + 286'721, .cold_tokens = base})) << base;
  }
}

TEST(TauGateTest, R49PenaltyDecidesWhetherTheSameGapBreaks) {  // 80,000 tokens at 15,928/s are 5,023 ms.
  const GateLoads gap{.warm_tokens = 80'000, .cold_tokens = 0};
  EXPECT_FALSE(Gate(15'928, 18s).Breaks(gap));
  EXPECT_TRUE(Gate(15'928, 5s).Breaks(gap));
}

TEST(TauGateTest, R64HugeSettingsSaturateAndNeverOpen) {
  const TauGate gate = Gate(1e9, std::chrono::milliseconds(9'300'000'000'000'000));
  EXPECT_EQ(gate.tau_tokens(), kInt64Max);
  EXPECT_FALSE(gate.Breaks({.warm_tokens = 1'000'000'000'000, .cold_tokens = 0}));
  EXPECT_FALSE(gate.Breaks({.warm_tokens = kInt64Max, .cold_tokens = 0}));
  EXPECT_FALSE(gate.BreaksInTime(1'000'000'000'000, gate.FixedRate(1), 0, gate.FixedRate(2)));
  const TauGate forever = Gate(20'480, std::chrono::milliseconds::max());
  EXPECT_EQ(forever.tau_tokens(), kInt64Max);
  EXPECT_FALSE(forever.BreaksInTime(std::int64_t{1} << 61, forever.own_rate(), 0, forever.own_rate()));
  EXPECT_EQ(Gate(std::numeric_limits<double>::max(), 1ms).tau_tokens(), kInt64Max);
}

TEST(TauGateTest, PenaltyZeroIsRefusedAndSaysWhatToSayInstead) {
  EXPECT_THAT(Refused({.peak_prefill_throughput = 20'480, .max_ttft_penalty = 0ms}),
              AllOf(HasSubstr("TauGateOptions.max_ttft_penalty"), HasSubstr("> 0 ms"), HasSubstr("always_sticky"),
                    HasSubstr("got 0")));
  EXPECT_TRUE(TauGate::Create({.peak_prefill_throughput = 20'480, .max_ttft_penalty = 1ms}).ok());
}

TEST(TauGateTest, NegativePenaltyIsRefused) {
  EXPECT_THAT(Refused({.peak_prefill_throughput = 20'480, .max_ttft_penalty = -3ms}),
              AllOf(HasSubstr("max_ttft_penalty"), HasSubstr("got -3")));
  EXPECT_THAT(Refused({.peak_prefill_throughput = 20'480, .max_ttft_penalty = std::chrono::milliseconds::min()}),
              HasSubstr("max_ttft_penalty"));
}

TEST(TauGateTest, PeakUnsetNegativeNanOrInfiniteIsRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const auto& [peak, text] : {std::pair(0.0, "got 0"), {-1.0, "got -1"}, {nan, "got nan"}, {-nan, "nan"},
                                   {infinity, "got inf"}, {-infinity, "got -inf"}, {-0.0, "got -0"}}) {
    EXPECT_THAT(Refused({.peak_prefill_throughput = peak, .max_ttft_penalty = 14s}),
                AllOf(HasSubstr("TauGateOptions.peak_prefill_throughput"), HasSubstr("> 0 tokens/s"), HasSubstr(text)));
  }
  EXPECT_TRUE(TauGate::Create({.peak_prefill_throughput = std::numeric_limits<double>::denorm_min()}).ok());
  EXPECT_THAT(Refused({}), HasSubstr("peak_prefill_throughput"));
}

TEST(TauGateTest, AlwaysStickyNeedsNothingElseAndNeverOpens) {
  const auto gate = TauGate::Create({.max_ttft_penalty = 0ms, .always_sticky = true});
  ASSERT_TRUE(gate.ok()) << gate.status();
  EXPECT_TRUE(gate->always_sticky());
  EXPECT_EQ(gate->tau_tokens(), kInt64Max);
  EXPECT_FALSE(gate->Breaks({.warm_tokens = kInt64Max, .cold_tokens = 0}));
  EXPECT_FALSE(gate->BreaksInTime(std::int64_t{1} << 61, 1024, 0, 2048));
}

TEST(TauGateTest, FixedRateIsIn1024thsAndFallsBackToTheGatesOwn) {
  const TauGate gate = Gate(20'480, 14s);
  EXPECT_EQ(gate.own_rate(), 20'480 * 1024);
  EXPECT_EQ(gate.FixedRate(0.5), 512);
  EXPECT_EQ(gate.FixedRate(1e-9), 1);  // Never 0: it divides.
  EXPECT_EQ(gate.FixedRate(1e300), std::int64_t{1} << 41);
  for (double none : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(gate.FixedRate(none), gate.own_rate());
  }
}

TEST(TauGateInTimeTest, SlowEndpointOpensSooner) {
  const TauGate gate = Gate(20'480, 14s);
  const std::int64_t fast = gate.FixedRate(20'480), slow = gate.FixedRate(10'240);
  // Warm and slow: 14 s are 143,360 tokens there.
  EXPECT_FALSE(gate.BreaksInTime(143'360, slow, 0, fast));
  EXPECT_TRUE(gate.BreaksInTime(143'361, slow, 0, fast));
  // Cold and slow: its 10,240 tokens are a second.
  EXPECT_FALSE(gate.BreaksInTime(15 * 20'480, fast, 10'240, slow));
  EXPECT_TRUE(gate.BreaksInTime(15 * 20'480 + 1, fast, 10'240, slow));
}

TEST(TauGateInTimeTest, SoonerComparesTimesExactly) {
  EXPECT_TRUE(TauGate::Sooner(99, 10, 100, 10));
  EXPECT_FALSE(TauGate::Sooner(100, 10, 200, 20));
  EXPECT_TRUE(TauGate::Sooner(199, 20, 100, 10));
  // A difference that doubles do not see.
  const std::int64_t huge = (std::int64_t{1} << 61) + 1, rate = (std::int64_t{1} << 41) - 1;
  EXPECT_TRUE(TauGate::Sooner(huge - 1, rate, huge, rate));
  EXPECT_FALSE(TauGate::Sooner(huge, rate, huge, rate));
}

TEST(TauGateInTimeTest, EqualRatesAreTheTokenComparison) {
  Random random(testing_support::TestSeed(11));
  for (int i = 0; i < 20'000; ++i) {
    const double peak = 1 + static_cast<double>(random.Below(50'000'000)) / 1024;
    const TauGate gate = Gate(peak, std::chrono::milliseconds(1 + random.Below(40'000)));
    const std::int64_t cold = random.Below(1'000'000), rate = gate.own_rate();
    const std::int64_t warm = cold + gate.tau_tokens() + std::int64_t{random.Below(5)} - 2;
    if (warm < 0) continue;
    ASSERT_EQ(gate.BreaksInTime(warm, rate, cold, rate), gate.Breaks({.warm_tokens = warm, .cold_tokens = cold}))
        << "round " << i;
    ASSERT_EQ(gate.MarginInTime(warm, rate, cold, rate), warm - cold - gate.tau_tokens()) << "round " << i;
  }
}

// The loads that decide: exactly at W/R_w - C/R_c = T_max, and a token around it, with small and with huge figures.
struct Case {
  std::int64_t warm, warm_rate, cold, cold_rate, ms;
};
Case NearTheBoundary(Random& random, bool huge) {
  Case c{};
  c.ms = 1 + random.Below(huge ? 4'000'000'000U : 40'000U);
  c.warm_rate = huge ? 1 + static_cast<std::int64_t>(random.Next() >> 24) : 1024 * (1 + std::int64_t{random.Below(40'000)});
  do {
    c.cold_rate = huge ? 1 + static_cast<std::int64_t>(random.Next() >> 24) : 1024 * (1 + std::int64_t{random.Below(40'000)});
  } while (c.cold_rate == c.warm_rate);
  c.cold = huge ? static_cast<std::int64_t>(random.Next() >> 14) : random.Below(1'000'000);
  // In long double, off by a token at most for the small ones; the sweep around it straddles the boundary.
  const long double seconds = 1024.0L * static_cast<long double>(c.cold) / static_cast<long double>(c.cold_rate) +
                              static_cast<long double>(c.ms) / 1000.0L;
  const long double warm = seconds * static_cast<long double>(c.warm_rate) / 1024.0L;
  c.warm = warm < 2e18L ? static_cast<std::int64_t>(warm) : 0;
  return c;
}

// The model: 1,024,000 (W c - C w) against ms w c, in as many bits as it takes (three limbs of 62, schoolbook).
int ModelSign(const Case& c) {
  const auto widen = [](std::int64_t a, std::int64_t b, std::int64_t d, long double& rough) {
    rough = static_cast<long double>(a) * static_cast<long double>(b) * static_cast<long double>(d);
    // a x b x d modulo 2^128; the rough figure tells the magnitude, the low bits settle what it cannot.
    return static_cast<internal::Uint128>(a) * static_cast<internal::Uint128>(b) * static_cast<internal::Uint128>(d);
  };
  long double left_warm = 0, left_cold = 0, right = 0;
  const internal::Uint128 difference = widen(1'024'000, c.warm, c.cold_rate, left_warm) -
                                       widen(1'024'000, c.cold, c.warm_rate, left_cold) -
                                       widen(c.ms, c.warm_rate, c.cold_rate, right);
  const long double rough = left_warm - left_cold - right;
  if (rough > 0x1p120L) return 1;
  if (rough < -0x1p120L) return -1;
  const auto exact = static_cast<Int128>(difference);  // |difference| < 2^127, so the residue is the figure.
  return exact > 0 ? 1 : exact < 0 ? -1 : 0;
}

TEST(TauGateInTimeTest, BreaksExactlyBeyondTheBoundary) {
  Random random(testing_support::TestSeed(12));
  int on_boundary = 0, opened = 0;
  for (int i = 0; i < 40'000; ++i) {
    const bool huge = i % 2 == 1;
    Case c = NearTheBoundary(random, huge);
    if (i % 8 == 0) {  // Make it hit the boundary: 2:1, whole seconds.
      c = {.warm = 0, .warm_rate = 1024 * 2000, .cold = 1000 * std::int64_t{random.Below(50)}, .cold_rate = 1024 * 1000,
           .ms = 1000 * (1 + std::int64_t{random.Below(30)})};
      c.warm = 2 * (c.cold + c.ms);
    }
    const TauGate gate = Gate(3, std::chrono::milliseconds(c.ms));
    for (std::int64_t off = -2; off <= 2; ++off) {
      Case at = c;
      at.warm += off;
      if (at.warm < 0 || at.warm >= std::int64_t{1} << 62) continue;
      const int sign = ModelSign(at);
      on_boundary += sign == 0;
      opened += sign > 0;
      ASSERT_EQ(gate.BreaksInTime(at.warm, at.warm_rate, at.cold, at.cold_rate), sign > 0)
          << "round " << i << ": " << at.warm << "/" << at.warm_rate << " " << at.cold << "/" << at.cold_rate
          << " " << at.ms << " ms";
    }
  }
  EXPECT_GT(on_boundary, 1000);
  EXPECT_GT(opened, 10'000);
}

// The margin is what the text of a decision shows: its sign must not contradict the verdict, and by that many tokens less
// the verdict is the other one.
TEST(TauGateInTimeTest, MarginHasTheSignOfTheVerdictAndLeadsToItsEdge) {
  Random random(testing_support::TestSeed(13));
  for (int i = 0; i < 40'000; ++i) {
    const Case c = NearTheBoundary(random, i % 2 == 1);
    const TauGate gate = Gate(3, std::chrono::milliseconds(c.ms));
    for (std::int64_t off = -2; off <= 2; ++off) {
      const std::int64_t warm = c.warm + off;
      if (warm < 0) continue;
      const std::int64_t margin = gate.MarginInTime(warm, c.warm_rate, c.cold, c.cold_rate);
      ASSERT_EQ(margin > 0, gate.BreaksInTime(warm, c.warm_rate, c.cold, c.cold_rate))
          << "round " << i << ": margin " << margin << " of " << warm << "/" << c.warm_rate << " " << c.cold << "/"
          << c.cold_rate << " " << c.ms << " ms";
      if (margin < -(std::int64_t{1} << 61) || margin > (std::int64_t{1} << 61)) continue;
      ASSERT_FALSE(gate.BreaksInTime(warm - margin, c.warm_rate, c.cold, c.cold_rate)) << "round " << i;
      ASSERT_TRUE(gate.BreaksInTime(warm - margin + 1, c.warm_rate, c.cold, c.cold_rate)) << "round " << i;
    }
  }
}

// Under kOnlyColder the boundary is inclusive: a margin of 0 joins, and must do so at exactly T_max, not around it.
TEST(TauGateInTimeTest, MarginOfOnlyColderIsInclusive) {
  Random random(testing_support::TestSeed(14));
  for (int i = 0; i < 40'000; ++i) {
    const Case c = NearTheBoundary(random, i % 2 == 1);
    const TauGate gate = Gate(3, std::chrono::milliseconds(c.ms), GateRule::kOnlyColder);
    for (std::int64_t off = -2; off <= 2; ++off) {
      Case at = c;
      at.warm += off;
      if (at.warm < 0) continue;
      ASSERT_EQ(gate.MarginInTime(at.warm, at.warm_rate, at.cold, at.cold_rate) >= 0, ModelSign(at) >= 0)
          << "round " << i;
    }
  }
}

TEST(TauGateInTimeTest, PenaltiesOfMillenniaAreExactToo) {
  // 2^50 ms at a token per 1,024 s and at one per 512 s: the warm one turns at C x 1/2 and 2^50 / 1,024,000 tokens.
  const TauGate gate = Gate(3, std::chrono::milliseconds(std::int64_t{1} << 50));
  const std::int64_t edge = (std::int64_t{1} << 50) / 1'024'000 + 500;
  EXPECT_FALSE(gate.BreaksInTime(edge, 1, 1000, 2));
  EXPECT_TRUE(gate.BreaksInTime(edge + 1, 1, 1000, 2));
  EXPECT_EQ(gate.MarginInTime(edge, 1, 1000, 2), 0);
}

TEST(TauGateInTimeTest, MarginSaturates) {
  const TauGate forever = Gate(20'480, std::chrono::milliseconds::max());
  EXPECT_EQ(forever.MarginInTime(5, std::int64_t{1} << 41, 0, 2048), -kInt64Max);
  const TauGate gate = Gate(1, 1ms);
  EXPECT_EQ(gate.MarginInTime(0, std::int64_t{1} << 41, std::int64_t{1} << 61, 1), -kInt64Max);
}

}  // namespace
}  // namespace tokroute

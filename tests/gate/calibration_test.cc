#include "tokroute/gate/calibration.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tokroute/gate/tau_gate.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// T(P) = a + b P + c P^2, at P = k x 8192 for k = 1..19, as the source sampled it.
std::vector<TtftSample> Quadratic(double a, double b, double c) {
  std::vector<TtftSample> samples;
  for (std::int64_t k = 1; k <= 19; ++k) {
    const double p = 8192.0 * static_cast<double>(k);
    samples.push_back({k * 8192, a + b * p + c * p * p});
  }
  return samples;
}

TEST(CalibrateFromRecipeTest, ThroughputIsChunkOverMedian) {
  const std::vector<double> ttft = {0.40, 0.39, 0.41, 0.40, 0.42};
  const auto result = CalibrateFromRecipe(ttft);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_DOUBLE_EQ(result->peak_prefill_throughput, 8192 / 0.40);  // The source's anchored 20,480 tokens/s.
  EXPECT_EQ(result->samples, 5);
  EXPECT_EQ(result->TauTokens(14s), 286'720);
}

TEST(CalibrateFromRecipeTest, ShippedDefaultAndAnchoredFitAgreeOnTau) {
  const auto recipe = CalibrateFromRecipe(std::vector<double>(20, 8192 / 15928.0));
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_NEAR(recipe->peak_prefill_throughput, 15928, 1e-6);
  EXPECT_EQ(recipe->TauTokens(18s), 286'704);
}

TEST(CalibrateFromRecipeTest, ChunkOf32kTokens) {
  // GLM-5.2-NVFP4 on B200: about 32k tokens, median 1.369 s. 24,027 tokens/s is 32,893 tokens in that time.
  const auto result = CalibrateFromRecipe(std::vector<double>(10, 1.369), {.chunk_tokens = 32'893});
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->peak_prefill_throughput, 24'027, 1);
}

TEST(CalibrateFromRecipeTest, TauForSeveralPenaltiesAndInChunks) {
  const auto result = CalibrateFromRecipe(std::vector<double>(5, 0.40));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->TauTokens(10s), 204'800);
  EXPECT_EQ(result->TauTokens(14s), 286'720);
  EXPECT_EQ(result->TauTokens(18s), 368'640);
  EXPECT_EQ(result->TauTokens(25s), 512'000);
  EXPECT_NEAR(result->TauChunks(14s), 35, 1e-12);
  // K depends on T_max / T(B) alone: twice as fast with half the penalty is the same number of chunks.
  const auto faster = CalibrateFromRecipe(std::vector<double>(5, 0.20));
  EXPECT_NEAR(faster->TauChunks(7s), 35, 1e-12);
  EXPECT_EQ(result->TauTokens(14s), TauGate::Create({.peak_prefill_throughput = result->peak_prefill_throughput,
                                                     .max_ttft_penalty = 14s})->tau_tokens());
}

TEST(CalibrateFromRecipeTest, FewerThanFiveSamplesAreRefused) {
  const auto result = CalibrateFromRecipe(std::vector<double>(4, 0.4));
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(Message(result.status()), AllOf(HasSubstr("samples"), HasSubstr("at least 5"), HasSubstr("got 4")));
  EXPECT_TRUE(CalibrateFromRecipe(std::vector<double>(4, 0.4), {.min_samples = 4}).ok());
}

TEST(CalibrateFromRecipeTest, ImpossibleTtftsAreRefusedByPosition) {
  for (double bad : {0.0, -0.1, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const auto result = CalibrateFromRecipe(std::vector<double>{0.4, 0.4, bad, 0.4, 0.4});
    ASSERT_FALSE(result.ok()) << bad;
    EXPECT_THAT(Message(result.status()), HasSubstr("ttft_seconds[2]"));
  }
}

TEST(CalibrateFromRecipeTest, WideSpreadIsRefusedAndTheLimitItselfIsNot) {
  // Quartiles of five samples are the second and the fourth: an IQR of exactly 0.25 of the median 1, in binary fractions.
  const std::vector<double> samples = {0.5, 0.875, 1.0, 1.125, 2.0};
  EXPECT_TRUE(CalibrateFromRecipe(samples, {.max_relative_iqr = 0.25}).ok());
  const auto result = CalibrateFromRecipe(samples);
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(Message(result.status()), AllOf(HasSubstr("interquartile"), HasSubstr("cache hits"), HasSubstr("0.25")));
}

TEST(CalibrateFromRecipeTest, OptionsOutOfRangeAreNamed) {
  const std::vector<double> ttft(5, 0.4);
  EXPECT_THAT(Message(CalibrateFromRecipe(ttft, {.chunk_tokens = 0}).status()), HasSubstr("chunk_tokens"));
  EXPECT_THAT(Message(CalibrateFromRecipe(ttft, {.min_samples = 0}).status()), HasSubstr("min_samples"));
  EXPECT_THAT(Message(CalibrateFromRecipe(ttft, {.max_relative_iqr = 0}).status()), HasSubstr("max_relative_iqr"));
  EXPECT_THAT(Message(CalibrateFromRecipe(ttft, {.max_relative_iqr = std::nan("")}).status()), HasSubstr("max_relative_iqr"));
  EXPECT_THAT(Message(CalibrateFromRecipe(ttft, {.min_r_squared = 1.5}).status()), HasSubstr("min_r_squared"));
  EXPECT_THAT(Message(CalibrateFromRecipe(std::vector<double>(5, 1e-310)).status()), HasSubstr("median"));
}

TEST(CalibrateFromFitTest, RecoversAQuadratic) {
  // 41.5 us per token and 0.85 ns per token^2: T(8192) = 0.4 s to within the fixed part.
  const double a = 0.003, b = 41.5e-6, c = 0.845e-9;
  const auto result = CalibrateFromFit(Quadratic(a, b, c));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->fixed_seconds, a, 1e-9);
  EXPECT_NEAR(result->linear_seconds, b, 1e-12);
  EXPECT_NEAR(result->quadratic_seconds, c, 1e-16);
  EXPECT_NEAR(result->r_squared, 1, 1e-12);
  const double chunk = a + b * 8192 + c * 8192 * 8192;
  EXPECT_NEAR(result->chunk_seconds, chunk, 1e-9);
  EXPECT_NEAR(result->peak_prefill_throughput, 8192 / chunk, 1e-3);
  EXPECT_NEAR(result->peak_prefill_throughput, 20'480, 20'480 * 0.02);
}

TEST(CalibrateFromFitTest, LinearTermThatIsNotPositiveIsRefused) {
  const auto result = CalibrateFromFit(Quadratic(1.0, -1e-6, 1e-9));
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(Message(result.status()), HasSubstr("linear term"));
}

TEST(CalibrateFromFitTest, ScatterIsRefusedByRSquared) {
  std::vector<TtftSample> samples = Quadratic(0.1, 40e-6, 0);
  for (std::size_t i = 0; i < samples.size(); ++i) samples[i].ttft_seconds *= i % 2 == 0 ? 1.6 : 0.4;
  const auto result = CalibrateFromFit(samples);
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(Message(result.status()), AllOf(HasSubstr("R^2"), HasSubstr(">= 0.95")));
}

TEST(CalibrateFromFitTest, TooFewSizesAndBadSamplesAreRefused) {
  EXPECT_FALSE(CalibrateFromFit(std::vector<TtftSample>(4, {8192, 0.4})).ok());
  EXPECT_THAT(Message(CalibrateFromFit(std::vector<TtftSample>(9, {8192, 0.4})).status()), HasSubstr("different prompt_tokens"));
  std::vector<TtftSample> samples = Quadratic(0, 40e-6, 0);
  samples[3].prompt_tokens = 0;
  EXPECT_THAT(Message(CalibrateFromFit(samples).status()), HasSubstr("prompt_tokens[3]"));
  samples[3] = {4 * 8192, -1};
  EXPECT_THAT(Message(CalibrateFromFit(samples).status()), HasSubstr("ttft_seconds[3]"));
}

TEST(FirstEstimateTest, Qwen3On2H100IsAbout16kAndSaysItIsAnEstimate) {
  const auto estimate = EstimatePeakPrefillThroughput(
      {.peak_flops = 2 * 989e12, .active_parameters = 32.8e9, .layers = 64, .heads = 64, .head_dim = 128});
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  EXPECT_NEAR(estimate->peak_prefill_throughput, 16'000, 100);  // Measured: 15,928 to 20,480.
  EXPECT_THAT(estimate->ToString(), AllOf(HasSubstr("estimate, not measured"), HasSubstr("measure it")));
}

TEST(FirstEstimateTest, EveryFieldIsChecked) {
  const FirstEstimateOptions good{.peak_flops = 1e15, .active_parameters = 1e9, .layers = 1, .heads = 1, .head_dim = 1};
  ASSERT_TRUE(EstimatePeakPrefillThroughput(good).ok());
  const auto refused = [&](auto change, const char* field) {
    FirstEstimateOptions options = good;
    change(options);
    EXPECT_THAT(Message(EstimatePeakPrefillThroughput(options).status()), HasSubstr(field));
  };
  refused([](auto& o) { o.peak_flops = 0; }, "peak_flops");
  refused([](auto& o) { o.active_parameters = std::nan(""); }, "active_parameters");
  refused([](auto& o) { o.layers = 0; }, "layers");
  refused([](auto& o) { o.heads = -1; }, "heads");
  refused([](auto& o) { o.head_dim = 0; }, "head_dim");
  refused([](auto& o) { o.chunk_tokens = 0; }, "chunk_tokens");
  refused([](auto& o) { o.utilisation = 1.01; }, "utilisation");
}

}  // namespace
}  // namespace tokroute

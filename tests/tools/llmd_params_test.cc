// llm-d's parameters as our options: its defaults, its clamps, and what it refuses.
#include "tools/conformance/llmd_params.h"

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tokroute::llmd {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(LlmdParamsTest, AffinityFilterDefaults) {
  const auto options = PrefixCacheAffinity(Json::object());
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->gate.peak_prefill_throughput, 15'928);
  EXPECT_EQ(options->gate.max_ttft_penalty, std::chrono::milliseconds(18'000));
  EXPECT_FALSE(options->gate.always_sticky);
  EXPECT_EQ(options->affinity_threshold, 0.8);
  EXPECT_EQ(options->exploration_probability, 0);
  const auto filter = PrefixCacheAffinityFilter::Create(*options);
  ASSERT_TRUE(filter.ok()) << filter.status();
  EXPECT_EQ(filter->gate().tau_tokens(), 286'704);
}

TEST(LlmdParamsTest, NullParametersAreDefaults) {
  EXPECT_TRUE(PrefixCacheAffinity(Json()).ok());
  const auto options = PrefixCacheAffinity({{"affinityThreshold", nullptr}});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->affinity_threshold, 0.8);
}

TEST(LlmdParamsTest, AffinityFilterTakesWhatIsGiven) {
  const auto options = PrefixCacheAffinity({{"affinityThreshold", 0.5},
                                            {"explorationProbability", 0.25},
                                            {"maxTTFTPenaltyMs", 14'000.0},
                                            {"peakPrefillThroughput", 20'480},
                                            {"ttftSource", "prefillThroughput"},
                                            {"prefixMatchInfoProducerName", ""}});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->affinity_threshold, 0.5);
  EXPECT_EQ(options->exploration_probability, 0.25);
  EXPECT_EQ(options->gate.max_ttft_penalty, std::chrono::seconds(14));
  EXPECT_EQ(options->gate.peak_prefill_throughput, 20'480);
}

TEST(LlmdParamsTest, ZeroPenaltyIsAlwaysSticky) {
  const auto options = PrefixCacheAffinity({{"maxTTFTPenaltyMs", 0}, {"peakPrefillThroughput", 0}});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_TRUE(options->gate.always_sticky);
  EXPECT_TRUE(PrefixCacheAffinityFilter::Create(*options).ok());
  EXPECT_EQ(Effective(*options)["maxTTFTPenaltyMs"], 0);
  EXPECT_EQ(Effective(*options)["peakPrefillThroughput"], 0);
}

TEST(LlmdParamsTest, PluginsOwnRefusalsNameLlmdsParameter) {
  const auto refusal = [](const Json& params) {
    const auto options = PrefixCacheAffinity(params);
    EXPECT_TRUE(options.ok()) << options.status();
    return MessageOf(InLlmdTerms(PrefixCacheAffinityFilter::Create(*options).status()));
  };
  EXPECT_THAT(refusal({{"affinityThreshold", 1.5}}), StartsWith("affinityThreshold: "));
  EXPECT_THAT(refusal({{"explorationProbability", -0.1}}), StartsWith("explorationProbability: "));
  EXPECT_THAT(refusal({{"maxTTFTPenaltyMs", -1}}), StartsWith("maxTTFTPenaltyMs: "));
  EXPECT_THAT(refusal({{"peakPrefillThroughput", 0}}), StartsWith("peakPrefillThroughput: "));
  EXPECT_TRUE(InLlmdTerms(absl::OkStatus()).ok());
  EXPECT_EQ(InLlmdTerms(absl::InternalError("other")), absl::InternalError("other"));
}

TEST(LlmdParamsTest, AffinityFilterRefusals) {
  const auto refusal = [](const Json& params) { return MessageOf(PrefixCacheAffinity(params).status()); };
  EXPECT_THAT(refusal({{"maxTokensInFlightPenalty", 286'720}}), StartsWith("maxTokensInFlightPenalty: unknown"));
  EXPECT_THAT(refusal({{"affinityThreshold", "0.8"}}), StartsWith("affinityThreshold: want a number"));
  EXPECT_THAT(refusal({{"ttftSource", ""}}), StartsWith("ttftSource: "));
  EXPECT_THAT(refusal({{"maxTTFTPenaltyMs", 0.4}}), StartsWith("maxTTFTPenaltyMs: want whole"));
  EXPECT_THAT(refusal({{"maxTTFTPenaltyMs", 1e300}}), StartsWith("maxTTFTPenaltyMs: "));
  EXPECT_THAT(refusal({{"maxTTFTPenaltyMs", 0}, {"peakPrefillThroughput", -1}}), StartsWith("peakPrefillThroughput: "));
  EXPECT_THAT(refusal(Json::array({1})), HasSubstr("want an object"));
}

TEST(LlmdParamsTest, WhatHasNoCounterpartYetIsUnimplemented) {
  EXPECT_EQ(PrefixCacheAffinity({{"ttftSource", "latencyPredictor"}}).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(InFlight({{"prefixMatchInfoProducerName", "mine"}}).status().code(), absl::StatusCode::kUnimplemented);
  // A mistake is named first: it stays one.
  EXPECT_EQ(PrefixCacheAffinity({{"ttftSource", "latencyPredictor"}, {"bogus", 1}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(LlmdParamsTest, TokenLoadIsAbsoluteAndItsCeilingFallsBack) {
  EXPECT_EQ(TokenLoad(Json::object())->form, TokenLoadForm::kAbsolute);
  EXPECT_EQ(TokenLoad(Json::object())->ceiling_tokens, 4'194'304);
  EXPECT_EQ(TokenLoad({{"queueThresholdTokens", 0}})->ceiling_tokens, 4'194'304);
  EXPECT_EQ(TokenLoad({{"queueThresholdTokens", -5}})->ceiling_tokens, 4'194'304);
  EXPECT_EQ(TokenLoad({{"queueThresholdTokens", 1}})->ceiling_tokens, 1);
  EXPECT_THAT(MessageOf(TokenLoad({{"queueThreshold", 10}}).status()), StartsWith("queueThreshold: unknown"));
  EXPECT_THAT(MessageOf(TokenLoad({{"queueThresholdTokens", 1.5}}).status()), HasSubstr("64-bit integer"));
  EXPECT_THAT(MessageOf(TokenLoad({{"queueThresholdTokens", std::uint64_t{1} << 63}}).status()),
              HasSubstr("64-bit integer"));
}

TEST(LlmdParamsTest, ActiveRequestClamps) {
  EXPECT_EQ(ActiveRequest(Json::object())->idle_threshold, 0);
  EXPECT_EQ(ActiveRequest(Json::object())->max_busy_score, 1.0);
  EXPECT_EQ(ActiveRequest({{"idleThreshold", -4}})->idle_threshold, 0);
  EXPECT_EQ(ActiveRequest({{"maxBusyScore", 1.5}})->max_busy_score, 1.0);
  EXPECT_EQ(ActiveRequest({{"maxBusyScore", -0.1}})->max_busy_score, 1.0);
  EXPECT_EQ(ActiveRequest({{"maxBusyScore", 0}})->max_busy_score, 0.0);
  EXPECT_TRUE(ActiveRequest({{"requestTimeout", "1m"}}).ok());
}

TEST(LlmdParamsTest, PickersRankAtLeastOneAndAtMostWhatThereIsRoomFor) {
  EXPECT_EQ(AnyPickerOptions(Json::object())->max_targets, 1U);
  EXPECT_EQ(AnyPickerOptions({{"maxNumOfEndpoints", 0}})->max_targets, 1U);
  EXPECT_EQ(AnyPickerOptions({{"maxNumOfEndpoints", -3}})->max_targets, 1U);
  EXPECT_EQ(AnyPickerOptions({{"maxNumOfEndpoints", 8}})->max_targets, 8U);
  EXPECT_THAT(MessageOf(AnyPickerOptions({{"maxNumOfEndpoints", 9}}).status()), StartsWith("maxNumOfEndpoints: "));
}

TEST(LlmdParamsTest, InFlightLoad) {
  const auto defaults = InFlight(Json::object());
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  EXPECT_FALSE(defaults->options.count_estimated_output);
  EXPECT_EQ(defaults->options.output.output_ratio, 1.5);
  EXPECT_EQ(defaults->options.output.max_estimated_output_tokens, -1);
  EXPECT_TRUE(defaults->sync_cross_replica_state);
  EXPECT_TRUE(Effective(*defaults)["maxEstimatedOutputTokens"].is_null());

  EXPECT_EQ(InFlight({{"maxEstimatedOutputTokens", 0}})->options.output.max_estimated_output_tokens, 0);
  EXPECT_EQ(InFlight({{"maxEstimatedOutputTokens", nullptr}})->options.output.max_estimated_output_tokens, -1);
  EXPECT_THAT(MessageOf(InFlight({{"maxEstimatedOutputTokens", -1}}).status()),
              StartsWith("maxEstimatedOutputTokens: "));
  EXPECT_EQ(ClientMaxOutputTokens(-10), -1);
  EXPECT_EQ(ClientMaxOutputTokens(0), 0);
}

TEST(LlmdParamsTest, BlocksAreRaisedTo64) {
  const auto params = ApproximatePrefixProducer(Json::object());
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(Effective(*params)["blockSizeTokens"], 16);
  EXPECT_EQ(params->BlockSize(0), 64);
  EXPECT_EQ(params->BlockSize(16), 64);
  EXPECT_EQ(params->BlockSize(128), 128);
  EXPECT_EQ(params->MaxMatchTokens(64), 131'072);
  const PrefixIndexOptions options = params->IndexOptions(64);
  EXPECT_EQ(options.block_size, 64);
  EXPECT_EQ(options.default_capacity_tokens, 31'250 * 64);
}

TEST(LlmdParamsTest, WithoutAutoTuneEndpointsAreNotAsked) {
  const auto params = ApproximatePrefixProducer({{"autoTune", false}, {"blockSizeTokens", 96}});
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->BlockSize(128), 96);
  EXPECT_EQ(params->CapacityTokens(96, 1000), 0);
  EXPECT_EQ(ApproximatePrefixProducer(Json::object())->CapacityTokens(64, 1000), 64'000);
}

TEST(LlmdParamsTest, CapOnThePrefix) {
  EXPECT_EQ(ApproximatePrefixProducer({{"maxPrefixTokensToMatch", 0}})->MaxMatchTokens(64), 2048 * 64);
  EXPECT_EQ(
      ApproximatePrefixProducer({{"maxPrefixTokensToMatch", 0}, {"maxPrefixBlocksToMatch", 0}})->MaxMatchTokens(64),
      -1);
  EXPECT_EQ(ApproximatePrefixProducer({{"maxPrefixTokensToMatch", 100}})->MaxMatchTokens(64), 100);
}

TEST(LlmdParamsTest, ApproximatePrefixRefusals) {
  const auto refusal = [](const Json& params) { return MessageOf(ApproximatePrefixProducer(params).status()); };
  EXPECT_THAT(refusal({{"autoTune", false}, {"blockSizeTokens", 0}}), StartsWith("blockSizeTokens: "));
  EXPECT_THAT(refusal({{"maxPrefixTokensToMatch", -1}}), StartsWith("maxPrefixTokensToMatch: "));
  EXPECT_THAT(refusal({{"unknownField", "value"}}), StartsWith("unknownField: unknown"));
  EXPECT_EQ(ApproximatePrefixProducer({{"autoTune", false}, {"blockSize", 24}})->block_size_tokens, 24);
  EXPECT_EQ(ApproximatePrefixProducer({{"blockSize", 24}, {"blockSizeTokens", 32}})->block_size_tokens, 32);
}

TEST(LlmdParamsTest, PrecisePrefixTierWeights) {
  const auto defaults = PrecisePrefixProducer(Json::object());
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  EXPECT_EQ(defaults->mode, IndexMode::kExact);
  EXPECT_EQ(defaults->block_size, 16);
  EXPECT_EQ(defaults->tier_weights.device, 1.0);
  EXPECT_EQ(defaults->tier_weights.host, 0.8);
  EXPECT_EQ(defaults->tier_weights.disk, 1.0);  // A name that llm-d does not list weighs 1; our own default is less.
  EXPECT_EQ(defaults->tier_weights.unknown, 1.0);

  const auto given = PrecisePrefixProducer({{"tierWeights", {{"gpu", 0.9}, {"disk", 0.5}, {"tape", 1}}}});
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ(given->tier_weights.device, 0.9);
  EXPECT_EQ(given->tier_weights.host, 1.0);  // Not listed.
  EXPECT_EQ(given->tier_weights.disk, 0.5);
  EXPECT_EQ(Effective(*given)["tierWeights"]["gpu"], 0.9);
}

TEST(LlmdParamsTest, PrecisePrefixRefusals) {
  const auto refusal = [](const Json& params) { return MessageOf(PrecisePrefixProducer(params).status()); };
  EXPECT_THAT(refusal({{"tierWeights", 1}}), StartsWith("tierWeights: want an object"));
  EXPECT_THAT(refusal({{"tierWeights", {{"gpu", "1"}}}}), StartsWith("tierWeights: want a number"));
  EXPECT_THAT(refusal({{"unknownField", "value"}}), StartsWith("unknownField: unknown"));
  EXPECT_EQ(PrecisePrefixProducer({{"tierWeights", {{"tape", 0.5}}}}).status().code(),
            absl::StatusCode::kUnimplemented);
  // What the index refuses names llm-d's parameter.
  const auto index = [](const Json& params) {
    return MessageOf(InLlmdTerms(PrefixIndex::Create(*PrecisePrefixProducer(params)).status()));
  };
  EXPECT_THAT(index({{"tierWeights", {{"cpu", 1.5}}}}), StartsWith("tierWeights: "));
  EXPECT_THAT(index({{"blockSizeTokens", 0}}), StartsWith("blockSizeTokens: "));
}

TEST(LlmdParamsTest, TiersByName) {
  EXPECT_EQ(TierOf("gpu"), StorageTier::kDevice);
  EXPECT_EQ(TierOf(""), StorageTier::kDevice);
  EXPECT_EQ(TierOf("CPU"), StorageTier::kHost);
  EXPECT_EQ(TierOf("disk"), StorageTier::kDisk);
  EXPECT_EQ(TierOf("tape"), StorageTier::kUnknown);
}

TEST(LlmdParamsTest, OutcomeLabels) {
  EXPECT_EQ(OutcomeLabel(kSticky), "sticky");
  EXPECT_EQ(OutcomeLabel(kAllWarm), "sticky");
  EXPECT_EQ(OutcomeLabel(kGateOff), "sticky");
  EXPECT_EQ(OutcomeLabel(kGateOpen), "load_override");
  EXPECT_EQ(OutcomeLabel(kNobodyWarm), "no_match");
  EXPECT_EQ(OutcomeLabel(kExploration), "exploration");
  EXPECT_EQ(OutcomeLabel(kNotApplicable), "not_applicable");
}

}  // namespace
}  // namespace tokroute::llmd

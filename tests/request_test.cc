#include "tokroute/request.h"

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "support/test_fleet.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using testing_support::AddEndpoints;
using testing_support::Upstream;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max(), kMin = std::numeric_limits<std::int64_t>::min();

// The message of the refusal that a router makes of it; "" if it is routed.
std::string RefusalOf(const Request& request) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480});
  EXPECT_TRUE(router.ok());
  const auto routed = router->Route(request);
  // Evaluate and the metrics agree with Route; a bad request books nothing.
  const Evaluation evaluation = router->Evaluate(request);
  EXPECT_EQ(evaluation.ok(), routed.ok());
  if (routed.ok()) return "";
  EXPECT_EQ(routed.refusal().reason, RefusalReason::kBadRequest);
  EXPECT_EQ(evaluation.ToString(), routed.refusal().ToString());
  EXPECT_EQ(testing_support::Refusals(router->Metrics(), RefusalReason::kBadRequest), 1U);
  EXPECT_EQ(router->Metrics().decisions, 0U);
  return routed.refusal().ToString();
}

// A span of a given length that must not be read.
template <class T>
std::span<const T> Unread(std::size_t count) {
  static const T one{};
  return {&one, count};
}

TEST(RequestTest, ThePromptsLengthComesFromWhatIsGiven) {
  const std::vector<TokenId> tokens(33);
  const std::vector<BlockKey> keys(5, 1);
  EXPECT_EQ(PromptTokens({}), 0);
  EXPECT_EQ(PromptTokens({.tokens = tokens}), 33);
  EXPECT_EQ(PromptTokens({.tokens = tokens, .prompt_tokens = 40}), 40);
  EXPECT_EQ(PromptTokens({.block_keys = keys, .block_size = 16}), 80);
  EXPECT_EQ(PromptTokens({.block_keys = keys, .prompt_tokens = 95, .block_size = 16}), 95);
  EXPECT_EQ(PromptTokens({.text = "12345"}), 2);
  EXPECT_EQ(PromptTokens({.text = "1234"}), 1);
  EXPECT_EQ(PromptTokens({.prompt_tokens = 7}), 7);
}

TEST(RequestTest, AnythingSensibleIsRouted) {
  const std::vector<TokenId> tokens(33);
  const std::vector<BlockKey> keys(5, 1);
  const MediaSpan media[] = {{.first_token = 0, .token_count = 33}, {.first_token = 32, .token_count = 1}};
  EXPECT_EQ(RefusalOf({}), "");
  EXPECT_EQ(RefusalOf({.tokens = tokens, .prompt_tokens = 33}), "");
  EXPECT_EQ(RefusalOf({.tokens = tokens, .media = media, .max_output_tokens = 0}), "");
  EXPECT_EQ(RefusalOf({.block_keys = keys, .prompt_tokens = 80, .block_size = 16}), "");
  EXPECT_EQ(RefusalOf({.text = "text", .lora = "l", .cache_salt = "s", .session = "x"}), "");
  EXPECT_EQ(RefusalOf({.prompt_tokens = kMaxPromptTokens, .max_output_tokens = kMax}), "");
  EXPECT_EQ(RefusalOf({.tokens = tokens, .block_size = -4}), "");  // Not asked: there are no keys.
}

TEST(RequestTest, PromptTokensOutOfRangeAreRefused) {
  EXPECT_EQ(RefusalOf({.prompt_tokens = -2}), "refused (bad request): Request.prompt_tokens: want -1 .. 4294967296, got -2");
  EXPECT_EQ(RefusalOf({.prompt_tokens = kMaxPromptTokens + 1}),
            "refused (bad request): Request.prompt_tokens: want -1 .. 4294967296, got 4294967297");
  EXPECT_NE(RefusalOf({.prompt_tokens = kMin}), "");
  EXPECT_NE(RefusalOf({.prompt_tokens = kMax}), "");
}

TEST(RequestTest, FewerPromptTokensThanGivenAreRefused) {
  const std::vector<TokenId> tokens(33);
  const std::vector<BlockKey> keys(5, 1);
  EXPECT_EQ(RefusalOf({.tokens = tokens, .prompt_tokens = 32}),
            "refused (bad request): Request.prompt_tokens: want 33 .. 4294967296, got 32");
  EXPECT_EQ(RefusalOf({.block_keys = keys, .prompt_tokens = 79, .block_size = 16}),
            "refused (bad request): Request.prompt_tokens: want 80 .. 4294967296, got 79");
}

TEST(RequestTest, APromptComesInOneFormOnly) {
  const std::vector<TokenId> tokens(33);
  const std::vector<BlockKey> keys(2, 1);
  EXPECT_EQ(RefusalOf({.tokens = tokens, .text = "x"}),
            "refused (bad request): Request (of tokens, block_keys and text at most one): want 0 .. 1, got 2");
  EXPECT_NE(RefusalOf({.tokens = tokens, .block_keys = keys, .block_size = 16}), "");
  EXPECT_NE(RefusalOf({.tokens = tokens, .block_keys = keys, .text = "x", .block_size = 16}), "");
}

TEST(RequestTest, BlockKeysNeedTheirBlockSize) {
  const std::vector<BlockKey> keys(5, 1);
  EXPECT_EQ(RefusalOf({.block_keys = keys}), "refused (bad request): Request.block_size: want 1 .. 4294967296, got 0");
  EXPECT_NE(RefusalOf({.block_keys = keys, .block_size = -16}), "");
  // Another one than the index's: the producer says so.
  EXPECT_EQ(RefusalOf({.block_keys = keys, .block_size = 64}),
            "refused (bad request): Request.block_size: want 16 .. 16, got 64");
}

TEST(RequestTest, PromptsBeyondTheLimitAreRefusedUnread) {
  EXPECT_EQ(RefusalOf({.tokens = Unread<TokenId>(std::size_t{kMaxPromptTokens} + 1)}),
            "refused (bad request): Request.tokens: want 0 .. 4294967296, got 4294967297");
  EXPECT_EQ(RefusalOf({.block_keys = Unread<BlockKey>(std::size_t{kMaxPromptTokens} / 16 + 1), .block_size = 16}),
            "refused (bad request): Request.block_keys: want 0 .. 268435456, got 268435457");
  EXPECT_EQ(RefusalOf({.text = std::string_view("", std::size_t{kMaxPromptTokens} * 4 + 1)}),
            "refused (bad request): Request.text: want 0 .. 17179869184, got 17179869185");
}

TEST(RequestTest, ANegativeOutputCapIsRefused) {
  EXPECT_EQ(RefusalOf({.max_output_tokens = -2}),
            "refused (bad request): Request.max_output_tokens: want -1 .. 9223372036854775807, got -2");
}

TEST(RequestTest, MediaMustLieInThePrompt) {
  const std::vector<TokenId> tokens(33);
  const auto with = [&](MediaSpan span) {
    const MediaSpan media[] = {{.first_token = 0, .token_count = 1}, span};
    return RefusalOf({.tokens = tokens, .media = media});
  };
  EXPECT_EQ(with({.first_token = -1, .token_count = 1}),
            "refused (bad request): Request.media.first_token: want 0 .. 32, got -1");
  EXPECT_EQ(with({.first_token = 33, .token_count = 1}),
            "refused (bad request): Request.media.first_token: want 0 .. 32, got 33");
  EXPECT_EQ(with({.first_token = 30, .token_count = 0}),
            "refused (bad request): Request.media.token_count: want 1 .. 3, got 0");
  EXPECT_EQ(with({.first_token = 30, .token_count = 4}),
            "refused (bad request): Request.media.token_count: want 1 .. 3, got 4");
  EXPECT_NE(with({.first_token = 1, .token_count = kMax}), "");
  EXPECT_NE(with({.first_token = kMax, .token_count = kMax}), "");
  EXPECT_EQ(with({.first_token = 30, .token_count = 3}), "");
}

TEST(RequestTest, EmptyAndTenMillionTokenPromptsAreRouted) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 3);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 1});
  ASSERT_TRUE(router.ok());
  const auto empty = router->Route({});
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->decision().prompt_tokens, 0);
  EXPECT_EQ(*empty->decision().verdicts[0].reason, kNobodyWarm);

  const std::vector<TokenId> huge = testing_support::MakePrompt(1, 10'000'000);
  const auto first = router->Route({.tokens = huge});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(testing_support::LoadOf(*router, first->endpoint_id()).tokens, 10'000'000);
  first->FirstToken();
  EXPECT_EQ(testing_support::LoadOf(*router, first->endpoint_id()).tokens, 0);
  EXPECT_TRUE(router->Audit().ok());
  // The endpoint caches no more than its capacity of it: the default, 300,000 tokens.
  EXPECT_EQ(router->Evaluate({.tokens = std::span(huge).first(300'000)}).decision.matched_tokens, 300'000);
  const auto again = router->Evaluate({.tokens = huge});
  EXPECT_LE(again.decision.matched_tokens, 300'000);
}

TEST(RequestTest, ARoutersViewOfTheRequestIsSettledBeforePluginsSeeIt) {
  // With text the estimate stands in for the length; the decision shows it.
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  const std::string text(401, 'x');
  EXPECT_EQ(router->Route({.text = text})->decision().prompt_tokens, 101);
}

}  // namespace
}  // namespace tokroute

#include "tokroute/prefix/approximate_prefix.h"

#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_fleet.h"
#include "tokroute/prefix/event_driven_prefix.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing_support::AddEndpoints;
using testing_support::Upstream;

std::vector<TokenId> Tokens(std::size_t count) {
  std::vector<TokenId> tokens(count);
  std::iota(tokens.begin(), tokens.end(), TokenId{1000});
  return tokens;
}

// What a ticket remembers of a conversation: a prompt of 100 tokens, blocks of 16.
class RememberTest : public ::testing::Test {
 protected:
  RememberTest() { Start({}); }
  void Start(const PrefixIndexOptions& options) {
    index_ = *PrefixIndex::Create(options);
    auto router =
        PrefillBound(fleet_, {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 1s, .seed = seed_++, .index = index_});
    ASSERT_TRUE(router.ok()) << router.status();
    router_ = std::make_unique<Router<Upstream>>(*router);
  }
  Ticket<Upstream> Send(std::span<const TokenId> prompt) {
    Routed<Upstream> routed = router_->Route({.tokens = prompt});
    EXPECT_TRUE(routed.ok());
    return std::move(routed).Take();
  }
  std::int64_t Held(std::span<const TokenId> prompt, EndpointId id) {
    PromptKeys keys;
    keys.Reset(index_->key_options(), {.tokens = prompt});
    PrefixMatch match;
    index_->Match(keys, match);
    return match.BlocksOf(id);
  }

  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 4);
  std::shared_ptr<PrefixIndex> index_;
  std::unique_ptr<Router<Upstream>> router_;
  std::uint64_t seed_ = 7;
  std::vector<TokenId> conversation_ = Tokens(400);
  std::span<const TokenId> prompt_ = std::span<const TokenId>(conversation_).first(100);
};

TEST_F(RememberTest, TheNextTurnIsFoundWhereTheFirstWasAnswered) {
  const auto ticket = Send(prompt_);
  const EndpointId at = ticket.endpoint_id();
  ticket.FirstToken();
  EXPECT_EQ(Held(conversation_, at), 6);
  ASSERT_TRUE(ticket.Remember({.tokens = std::span(conversation_).first(300)}).ok());
  ticket.Finish({.output_tokens = 200});
  EXPECT_EQ(Held(conversation_, at), 18) << "299 of 300 tokens were computed";
  for (int i = 0; i < 8; ++i) {
    const auto next = Send(conversation_);
    EXPECT_EQ(next.endpoint_id(), at);
    EXPECT_EQ(next.decision().matched_tokens, 18 * 16);
  }
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
}

TEST_F(RememberTest, WithoutItThePromptOnly) {
  const auto ticket = Send(prompt_);
  ticket.FirstToken();
  ticket.Finish({.output_tokens = 200});
  EXPECT_EQ(Held(conversation_, ticket.endpoint_id()), 6);
}

TEST_F(RememberTest, TheLastTokensBlockIsNotComputedYet) {
  for (const auto& [length, blocks] : {std::pair{111, 6}, {112, 6}, {113, 7}, {128, 7}, {129, 8}}) {
    Start({});
    const auto ticket = Send(prompt_);
    const auto whole = std::span<const TokenId>(conversation_).first(static_cast<std::size_t>(length));
    ASSERT_TRUE(ticket.Remember({.tokens = whole}).ok());
    ticket.Finish();
    EXPECT_EQ(Held(conversation_, ticket.endpoint_id()), blocks) << length;
    // The same by keys.
    Start({});
    PromptKeys keys;
    keys.Reset(index_->key_options(), {.tokens = whole});
    const auto other = Send(prompt_);
    ASSERT_TRUE(
        other.Remember({.block_keys = keys.Ensure(100), .prompt_tokens = length, .block_size = 16}).ok());
    EXPECT_EQ(Held(conversation_, other.endpoint_id()), blocks) << length;
  }
}

TEST_F(RememberTest, StaysWhenTheRequestIsDroppedAfterwards) {
  EndpointId at;
  {
    const auto ticket = Send(prompt_);
    at = ticket.endpoint_id();
    ASSERT_TRUE(ticket.Remember({.tokens = std::span(conversation_).first(300)}).ok());
  }
  EXPECT_EQ(Held(conversation_, at), 18) << "it was said to be there";
  EXPECT_EQ(index_->Stats().live_receipts, 0);
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
}

TEST_F(RememberTest, KeepsToTheCapacity) {
  Start({.default_capacity_tokens = 160});
  const auto ticket = Send(prompt_);
  ASSERT_TRUE(ticket.Remember({.tokens = conversation_}).ok());
  EXPECT_EQ(Held(conversation_, ticket.endpoint_id()), 10);
  ticket.Finish();
  EXPECT_LE(index_->HeldBlocks(ticket.endpoint_id()), 10);
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
}

TEST_F(RememberTest, RefusesWhatCannotBe) {
  const auto ticket = Send(prompt_);
  const std::vector<BlockKey> keys = LongChain(1, 20);
  absl::Status status = ticket.Remember({.block_keys = keys, .block_size = 32});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Request.block_size: want 16 .. 16, got 32"));
  status = ticket.Remember({.tokens = prompt_, .prompt_tokens = 50});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Request.prompt_tokens"));
  EXPECT_EQ(index_->Stats().distinct_blocks, 6) << "nothing changed";
  EXPECT_TRUE(ticket.Remember({}).ok()) << "nothing to remember";
  EXPECT_TRUE(ticket.Remember({.text = "hello"}).ok());
  EXPECT_EQ(index_->Stats().distinct_blocks, 6);
  ticket.Finish();
  EXPECT_EQ(ticket.Remember({.tokens = conversation_}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Ticket<Upstream>().Remember({.tokens = conversation_}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(index_->Stats().distinct_blocks, 6);
}

TEST_F(RememberTest, AnEndpointThatIsGoneHoldsNothing) {
  const auto ticket = Send(prompt_);
  ASSERT_TRUE(fleet_.Remove(ticket.endpoint_id()).ok());
  EXPECT_TRUE(ticket.Remember({.tokens = conversation_}).ok());
  EXPECT_EQ(Held(conversation_, ticket.endpoint_id()), 6) << "the router has not looked at the fleet since";
  (void)Send(std::span(conversation_).last(100));
  EXPECT_EQ(Held(conversation_, ticket.endpoint_id()), 0);
}

TEST_F(RememberTest, TheDecodingLegHasTheResponse) {
  const LegPolicy legs[] = {{Leg::kPrefill, "prefill-bound"}, {Leg::kDecode, "prefill-bound"}};
  for (int i = 0; i < 50; ++i) {
    Start({});
    Routed<Upstream> routed = router_->Route({.tokens = prompt_}, {.legs = legs});
    ASSERT_TRUE(routed.ok());
    const EndpointId prefill = routed->endpoint_id(Leg::kPrefill), decode = routed->endpoint_id(Leg::kDecode);
    if (prefill == decode) continue;
    ASSERT_TRUE(routed->Remember({.tokens = conversation_}).ok());
    EXPECT_EQ(Held(conversation_, decode), 24);
    EXPECT_EQ(Held(conversation_, prefill), 6);
    return;
  }
  FAIL() << "both legs always went to one endpoint";
}

TEST_F(RememberTest, AnExactIndexWaitsForTheEvents) {
  index_ = *PrefixIndex::Create({.mode = IndexMode::kExact, .speculative_ttl = 2s});
  auto router = MakeRouter(fleet_, {.seed = 5}, Producers(EventDrivenPrefix(index_), InFlightLoad()),
                           Named("any", Policy(RandomPicker{})));
  ASSERT_TRUE(router.ok()) << router.status();
  const auto routed = router->Route({.tokens = prompt_});
  ASSERT_TRUE(routed.ok());
  ASSERT_TRUE(routed->Remember({.tokens = conversation_}).ok());
  EXPECT_EQ(Held(conversation_, routed->endpoint_id()), 6) << "what the booking expects, no more";
}

}  // namespace
}  // namespace tokroute

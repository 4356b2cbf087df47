#include "tokroute/prefix/event_driven_prefix.h"

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_fleet.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing_support::AddEndpoints;
using testing_support::Upstream;

class EventDrivenPrefixTest : public ::testing::Test {
 protected:
  EventDrivenPrefixTest() {
    index_ = *PrefixIndex::Create({.mode = IndexMode::kExact, .speculative_ttl = 2s, .clock = clock_});
    auto router = MakeRouter(fleet_, {.seed = 5}, Producers(EventDrivenPrefix(index_), InFlightLoad()),
                             Named("sticky", Policy(PrefixCacheAffinityFilter(*TauGate::Create(
                                                        {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 1s})),
                                                    ActiveRequestScorer{}, MaxScorePicker{})));
    EXPECT_TRUE(router.ok()) << router.status();
    router_ = std::make_unique<Router<Upstream>>(*router);
  }
  Routed<Upstream> Route(std::span<const BlockKey> keys) {
    return router_->Route({.block_keys = keys, .block_size = 16});
  }
  std::int64_t Matched(std::span<const BlockKey> keys, EndpointId id) {
    PromptKeys prompt;
    prompt.Reset(index_->key_options(), {.block_keys = keys, .block_size = 16});
    PrefixMatch match;
    index_->Match(prompt, match);
    return match.BlocksOf(id);
  }

  ManualClock clock_;
  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 4);
  std::shared_ptr<PrefixIndex> index_;
  std::unique_ptr<Router<Upstream>> router_;
  std::vector<BlockKey> prompt_ = LongChain(1, 40);
};

TEST_F(EventDrivenPrefixTest, WantsAnExactIndex) {
  EXPECT_THAT(std::string(EventDrivenPrefix(nullptr).Check().message()), HasSubstr("got null"));
  EXPECT_THAT(std::string(EventDrivenPrefix(*PrefixIndex::Create({})).Check().message()), HasSubstr("want an exact"));
  EXPECT_TRUE(EventDrivenPrefix(index_).Check().ok());
}

TEST_F(EventDrivenPrefixTest, RoutesToWhoStoredThePrefix) {
  ASSERT_EQ(index_->Stored({ids_[2]}, std::nullopt, prompt_), KvResult::kApplied);
  for (int i = 0; i < 8; ++i) {
    const auto routed = Route(prompt_);
    ASSERT_TRUE(routed.ok());
    EXPECT_EQ(routed->endpoint_id(), ids_[2]);
    EXPECT_EQ(routed->decision().matched_tokens, 640);
  }
}

TEST_F(EventDrivenPrefixTest, ABurstStaysTogetherBeforeTheFirstEvent) {
  const auto first = Route(prompt_);
  ASSERT_TRUE(first.ok());
  std::vector<Ticket<Upstream>> held;
  for (int i = 0; i < 20; ++i) {
    auto routed = Route(prompt_);
    ASSERT_TRUE(routed.ok());
    EXPECT_EQ(routed->endpoint_id(), first->endpoint_id()) << i;
    held.push_back(std::move(routed).Take());
  }
  EXPECT_EQ(index_->Stats().speculative_blocks, 40);
  EXPECT_EQ(index_->Stats().holder_blocks, 0);
  EXPECT_EQ(index_->HeldBlocks(first->endpoint_id()), 0) << "nothing is stored yet";
  // The events come: what was expected is real, and stays when the deadlines pass.
  ASSERT_EQ(index_->Stored({first->endpoint_id()}, std::nullopt, prompt_), KvResult::kApplied);
  EXPECT_EQ(index_->Stats().speculative_blocks, 0);
  clock_.now = 10s;
  EXPECT_EQ(Matched(prompt_, first->endpoint_id()), 40);
  held.clear();
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
  ASSERT_EQ(index_->Removed({first->endpoint_id()}, prompt_), KvResult::kApplied);
  EXPECT_EQ(Matched(prompt_, first->endpoint_id()), 0);
  EXPECT_EQ(index_->Stats().distinct_blocks, 0);
}

TEST_F(EventDrivenPrefixTest, ASpeculationEndsAtItsDeadline) {
  const auto routed = Route(prompt_);
  ASSERT_TRUE(routed.ok());
  clock_.now = 2s - 1ns;
  EXPECT_EQ(Matched(prompt_, routed->endpoint_id()), 40);
  const auto later = Route(prompt_);
  EXPECT_EQ(later->endpoint_id(), routed->endpoint_id());
  clock_.now = 2s;
  EXPECT_EQ(Matched(prompt_, routed->endpoint_id()), 40) << "the later one's";
  clock_.now = 4s;
  EXPECT_EQ(Matched(prompt_, routed->endpoint_id()), 0);
  EXPECT_EQ(index_->Stats().distinct_blocks, 0);
  EXPECT_EQ(index_->Stats().live_receipts, 0);
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
}

TEST_F(EventDrivenPrefixTest, AnAbortBeforeTheFirstTokenTakesItBack) {
  EndpointId where;
  {
    const auto routed = Route(prompt_);
    where = routed->endpoint_id();
    EXPECT_EQ(Matched(prompt_, where), 40);
  }
  EXPECT_EQ(Matched(prompt_, where), 0);
  {
    const auto routed = Route(prompt_);
    where = routed->endpoint_id();
    routed->FirstToken();
  }
  EXPECT_EQ(Matched(prompt_, where), 40) << "its events are on their way";
  clock_.now = 2s;
  EXPECT_EQ(Matched(prompt_, where), 0);
}

TEST_F(EventDrivenPrefixTest, AMoveTakesTheSpeculationAlong) {
  auto routed = Route(prompt_);
  const EndpointId from = routed->endpoint_id(), to = from == ids_[0] ? ids_[1] : ids_[0];
  ASSERT_TRUE(routed->MoveTo(to));
  EXPECT_EQ(Matched(prompt_, from), 0);
  EXPECT_EQ(Matched(prompt_, to), 40);
  EXPECT_EQ(index_->Stats().live_receipts, 1);
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
}

TEST_F(EventDrivenPrefixTest, AMoveAfterTheFirstTokenLeavesTheOldOneToItsDeadline) {
  auto routed = Route(prompt_);
  const EndpointId from = routed->endpoint_id(), to = from == ids_[0] ? ids_[1] : ids_[0];
  routed->FirstToken();
  ASSERT_TRUE(routed->MoveTo(to));
  EXPECT_EQ(Matched(prompt_, from), 40) << "its events are on their way";
  EXPECT_EQ(Matched(prompt_, to), 40);
  clock_.now = 2s;
  EXPECT_EQ(Matched(prompt_, from), 0);
  EXPECT_EQ(Matched(prompt_, to), 0);
  EXPECT_EQ(index_->Stats().speculative_blocks, 0);
  EXPECT_EQ(index_->Stats().live_receipts, 0);
}

TEST_F(EventDrivenPrefixTest, ASpeculationDiesWithItsEndpoint) {
  const auto routed = Route(prompt_);
  const EndpointId where = routed->endpoint_id();
  index_->ClearEndpoint(where);
  EXPECT_EQ(Matched(prompt_, where), 0);
  ASSERT_EQ(index_->Stored({where}, std::nullopt, prompt_), KvResult::kApplied);
  clock_.now = 3s;
  EXPECT_EQ(Matched(prompt_, where), 40) << "the deadline of another life's speculation takes nothing away";
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
}

TEST_F(EventDrivenPrefixTest, OrphansAreKeptForAWhileAndBoundedInNumber) {
  const auto index =
      *PrefixIndex::Create({.mode = IndexMode::kExact, .clock = clock_, .orphan_ttl = 60s, .max_orphan_blocks = 50});
  const auto matched = [&](const std::vector<BlockKey>& keys) {
    PromptKeys prompt;
    prompt.Reset(index->key_options(), {.block_keys = keys, .block_size = 16});
    PrefixMatch match;
    index->Match(prompt, match);
    return match.BlocksOf(ids_[0]);
  };
  const std::vector<BlockKey> other = LongChain(2, 40);
  const auto tail = [](const std::vector<BlockKey>& keys) { return std::span(keys).subspan(10); };
  EXPECT_EQ(index->Stored({ids_[0]}, prompt_[9], tail(prompt_)), KvResult::kUnknownParent);
  EXPECT_EQ(index->Stats().orphan_blocks, 30);
  EXPECT_FALSE(index->WantsResync(ids_[0]));
  EXPECT_EQ(index->Stored({ids_[0]}, other[9], tail(other)), KvResult::kUnknownParent) << "30 more are too many";
  EXPECT_EQ(index->Stats().dropped_orphans, 30);
  EXPECT_TRUE(index->WantsResync(ids_[0]));
  // The parent of the first comes: they are orphans no more, and there is room for the others.
  EXPECT_EQ(index->Stored({ids_[0]}, std::nullopt, std::span(prompt_).first(10)), KvResult::kApplied);
  EXPECT_EQ(matched(prompt_), 40);
  EXPECT_EQ(index->Stored({ids_[0]}, other[9], tail(other)), KvResult::kUnknownParent);
  EXPECT_EQ(index->Stats().orphan_blocks, 30);
  EXPECT_EQ(index->HeldBlocks(ids_[0]), 70);
  clock_.now = 60s;
  EXPECT_EQ(index->Sweep(0), 0);
  EXPECT_EQ(index->Stats().orphan_blocks, 0);
  EXPECT_EQ(index->HeldBlocks(ids_[0]), 40) << "dropped when their parent did not come";
  EXPECT_EQ(matched(prompt_), 40);
  EXPECT_TRUE(index->Audit().ok()) << index->Audit();
}

TEST_F(EventDrivenPrefixTest, WhatHangsOnAnOrphanIsOneToo) {
  const auto index = *PrefixIndex::Create({.mode = IndexMode::kExact, .clock = clock_, .orphan_ttl = 60s});
  const std::span<const BlockKey> keys(prompt_);
  EXPECT_EQ(index->Stored({ids_[0]}, keys[9], keys.subspan(10, 10)), KvResult::kUnknownParent);
  EXPECT_EQ(index->Stored({ids_[0]}, keys[19], keys.subspan(20, 10)), KvResult::kUnknownParent);
  EXPECT_EQ(index->Stored({ids_[1]}, keys[29], keys.subspan(30, 10)), KvResult::kUnknownParent);
  EXPECT_EQ(index->Stats().orphan_blocks, 30);
  EXPECT_EQ(index->Stored({ids_[1]}, std::nullopt, keys.first(10)), KvResult::kApplied)
      << "another endpoint's parent does";
  EXPECT_EQ(index->Stored({ids_[0]}, keys[19], keys.subspan(20, 10)), KvResult::kApplied);
  clock_.now = 60s;
  EXPECT_EQ(index->Sweep(0), 0);
  EXPECT_EQ(index->Stats().orphan_blocks, 0);
  EXPECT_EQ(index->Stats().dropped_orphans, 0);
  index->ClearEndpoint(ids_[1]);
  EXPECT_EQ(index->Stored({ids_[1]}, keys[39], LongChain(9, 5)), KvResult::kUnknownParent);
  clock_.now = 120s;
  EXPECT_EQ(index->Sweep(1'000), 0);
  EXPECT_EQ(index->Stats().dropped_orphans, 5);
  EXPECT_EQ(index->HeldBlocks(ids_[1]), 0);
  EXPECT_TRUE(index->Audit().ok()) << index->Audit();
}

TEST_F(EventDrivenPrefixTest, TheReadyMadeRoutersTakeAnExactIndexToo) {
  auto router = PrefillBound(fleet_, {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 1s, .index = index_});
  ASSERT_TRUE(router.ok()) << router.status();
  ASSERT_EQ(index_->Stored({ids_[3], StorageTier::kHost}, std::nullopt, prompt_), KvResult::kApplied);
  const auto routed = router->Route({.block_keys = prompt_, .block_size = 16});
  EXPECT_EQ(routed->endpoint_id(), ids_[3]) << "0.8 of the prompt, weighted, is just enough";
  EXPECT_EQ(routed->decision().matched_tokens, 640);
}

TEST_F(EventDrivenPrefixTest, TellsTheTokensHeldInDeviceMemory) {
  ASSERT_EQ(index_->Stored({ids_[0]}, std::nullopt, prompt_), KvResult::kApplied);
  ASSERT_EQ(index_->Stored({ids_[0], StorageTier::kHost}, std::nullopt, prompt_), KvResult::kApplied);
  ASSERT_EQ(index_->Stored({ids_[1]}, std::nullopt, std::span(prompt_).first(10)), KvResult::kApplied);
  EXPECT_EQ(index_->HeldBlocks(ids_[0]), 80);
  EXPECT_EQ(index_->DeviceBlocks(ids_[0]), 40);
  EXPECT_EQ(index_->DeviceBlocks(ids_[1]), 10);
  EXPECT_EQ(index_->DeviceBlocks({ids_[0].slot, 99}), 0);
  struct ByTokensHeld {
    using Consumes = Signals<KvTokensHeld>;
    auto Score(const Request&, CandidatesFor<Consumes> candidates) const noexcept {
      const auto held = candidates.Column<KvTokensHeld>();
      return [=](Row row) noexcept { return static_cast<float>(held[row]) / 640.0F; };
    }
  };
  ASSERT_TRUE(router_->SetPolicy("held", Policy(ByTokensHeld{}, MaxScorePicker{})).ok());
  const auto routed = router_->Route({.prompt_tokens = 10}, {.policy = "held"});
  EXPECT_EQ(routed->endpoint_id(), ids_[0]);
  EXPECT_FLOAT_EQ(static_cast<float>(routed->decision().choice.best), 1.0F);
  EXPECT_FLOAT_EQ(static_cast<float>(routed->decision().choice.runner_up), 0.25F);
}

}  // namespace
}  // namespace tokroute

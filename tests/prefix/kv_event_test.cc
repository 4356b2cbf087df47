// What each KV event means, one rule at a time. Random mixtures of them: run_forest_differential_test.
#include "tokroute/prefix/kv_event.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_run.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
namespace {

using ::testing::HasSubstr;
using testing_support::kSanitized;


class KvEventTest : public ::testing::Test {
 protected:
  ~KvEventTest() override { EXPECT_TRUE(index().Audit().ok()) << index().Audit(); }
  PrefixIndex& index() { return *user_.index; }
  std::int64_t Matched(EndpointId id, std::span<const BlockKey> keys) { return user_.Matched(id, keys); }
  double Weighted(std::span<const BlockKey> keys) {
    const PrefixMatch& match = user_.Match(keys);
    return match.holders().empty() ? 0 : match.holders()[0].weighted_blocks;
  }
  KvResult Store(const KvSource& source, std::span<const BlockKey> keys, std::size_t from = 0) {
    return index().Stored(source, from > 0 ? std::optional(keys[from - 1]) : std::nullopt, keys.subspan(from));
  }
  static std::vector<BlockKey> Fork(std::span<const BlockKey> keys, std::size_t at, std::size_t more,
                                    std::uint64_t content) {
    std::vector<BlockKey> fork(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(at));
    BlockKey parent = fork.empty() ? 0 : fork.back();
    for (std::size_t i = 0; i < more; ++i) fork.push_back(parent = ChainKey(parent, content + i));
    return fork;
  }

  IndexUser user_{PrefixIndexOptions{.mode = IndexMode::kExact}};
  const std::vector<BlockKey> chain_ = LongChain(1, 50);
};

TEST_F(KvEventTest, StoresInOneAndInManyEventsAreTheSame) {
  EXPECT_EQ(Store(kDeviceA, chain_), KvResult::kApplied);
  for (std::size_t i = 0; i < chain_.size(); i += 7) {
    const std::span<const BlockKey> up_to = std::span(chain_).first(std::min(i + 7, chain_.size()));
    EXPECT_EQ(Store(kDeviceB, up_to, i), KvResult::kApplied);
    EXPECT_EQ(Matched(kB, chain_), static_cast<std::int64_t>(up_to.size()));
  }
  EXPECT_EQ(Matched(kA, chain_), 50);
  EXPECT_EQ(Matched(kA, std::span(chain_).first(20)), 20);
  EXPECT_EQ(index().Stats().distinct_blocks, 50);
  EXPECT_EQ(index().Stats().runs, 1);
}

TEST_F(KvEventTest, AForkNeedsNoSplit) {
  const std::vector<BlockKey> fork = Fork(chain_, 20, 30, 100);
  (void)Store(kDeviceA, chain_);
  EXPECT_EQ(Store(kDeviceA, fork, 20), KvResult::kApplied);
  EXPECT_EQ(Store(kDeviceB, fork), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, fork), 50);
  EXPECT_EQ(Matched(kB, fork), 50);
  EXPECT_EQ(Matched(kB, chain_), 20);
  EXPECT_EQ(index().Stats().runs, 2);
  EXPECT_EQ(index().Stats().forks, 1);
}

TEST_F(KvEventTest, ALostBlockHidesWhatLiesBehindItUntilItComesBack) {
  (void)Store(kDeviceA, chain_);
  (void)index().Removed(kDeviceA, std::span(chain_).subspan(10, 1));
  EXPECT_EQ(Matched(kA, chain_), 10);
  EXPECT_EQ(index().HeldBlocks(kA), 49);
  EXPECT_EQ(Store(kDeviceA, std::span(chain_).first(11), 10), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 50);
}

TEST_F(KvEventTest, R96RemovesAreIdempotentAndInAnyOrder) {
  (void)Store(kDeviceA, std::span(chain_).first(5));
  for (std::size_t i : {1U, 2U, 3U, 4U, 1U})
    EXPECT_EQ(index().Removed(kDeviceA, std::span(chain_).subspan(i, 1)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 1);
  EXPECT_EQ(index().Stats().distinct_blocks, 1);
  EXPECT_EQ(index().Stats().unknown_removes, 1);
}

TEST_F(KvEventTest, R89StoredTwiceIsHeldUntilItWasRemovedTwice) {
  (void)Store(kDeviceA, chain_);
  (void)Store(kDeviceA, std::span(chain_).first(10));
  EXPECT_EQ(index().Stats().duplicate_blocks, 10);
  EXPECT_EQ(index().HeldBlocks(kA), 50) << "sizes count distinct blocks";
  (void)index().Removed(kDeviceA, chain_);
  EXPECT_EQ(Matched(kA, chain_), 10);
  (void)index().Removed(kDeviceA, chain_);
  EXPECT_EQ(Matched(kA, chain_), 0);
  EXPECT_EQ(index().Stats().distinct_blocks, 0);
}

TEST_F(KvEventTest, R90AReplayedStoreAddsNothingToTheSize) {
  (void)Store(kDeviceA, std::span(chain_).first(3));
  (void)Store(kDeviceA, std::span(chain_).first(3));
  EXPECT_EQ(index().HeldBlocks(kA), 3);
  EXPECT_EQ(index().Stats().holder_blocks, 3);
}

TEST_F(KvEventTest, AnUnknownParentsBlocksCountWhenItComes) {
  EXPECT_EQ(Store(kDeviceA, chain_, 20), KvResult::kUnknownParent);
  EXPECT_EQ(Matched(kA, chain_), 0);
  EXPECT_FALSE(index().WantsResync(kA));
  EXPECT_EQ(Store(kDeviceA, std::span(chain_).first(20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 50);
}

TEST_F(KvEventTest, AKeyBehindAnotherParentStaysWhereItWas) {
  (void)Store(kDeviceA, chain_);
  std::vector<BlockKey> wrong = Fork(chain_, 5, 3, 500);
  wrong.push_back(chain_[30]);
  EXPECT_EQ(Store(kDeviceB, wrong), KvResult::kConflict);
  EXPECT_EQ(Matched(kB, wrong), 8) << "what came before it stands";
  EXPECT_EQ(Matched(kA, chain_), 50);
  EXPECT_TRUE(index().WantsResync(kB));
  EXPECT_FALSE(index().WantsResync(kA));
  EXPECT_EQ(index().Stats().conflicting_keys, 1);
}

TEST_F(KvEventTest, ZeroIsNoKey) {
  EXPECT_EQ(index().Stored(kDeviceA, std::nullopt, std::vector<BlockKey>{0, 5}), KvResult::kMalformed);
  EXPECT_EQ(index().Stored(kDeviceA, chain_[0], std::vector<BlockKey>{5, 0}), KvResult::kMalformed);
  EXPECT_EQ(index().Stats().distinct_blocks, 0);
  EXPECT_EQ(index().Stored(kDeviceA, BlockKey{0}, std::span(chain_).first(1)), KvResult::kApplied) << "no parent";
}

TEST_F(KvEventTest, AKeyTwiceInOneEventIsAConflict) {
  const BlockKey one = chain_[0], two = chain_[1];
  EXPECT_EQ(index().Stored(kDeviceA, std::nullopt, std::vector<BlockKey>{one, two, one}), KvResult::kConflict);
  EXPECT_EQ(index().Stored(kDeviceA, two, std::vector<BlockKey>{two}), KvResult::kMalformed);
  EXPECT_EQ(Matched(kA, chain_), 2);
}

TEST_F(KvEventTest, R108TiersAreHeldAndLostApart) {
  const std::span<const BlockKey> one = std::span(chain_).first(1);
  (void)Store(kDeviceA, one);
  (void)Store(kHostA, one);
  (void)index().Removed(kDeviceA, one);
  EXPECT_EQ(Matched(kA, chain_), 1);
  EXPECT_NEAR(Weighted(chain_), 0.8, 1e-9);
  (void)index().Removed(kHostA, one);
  EXPECT_EQ(Matched(kA, chain_), 0);
}

TEST_F(KvEventTest, R109R110MixedTiersCountTogetherEachBlockInItsBest) {
  (void)Store(kDeviceA, std::span(chain_).first(4));                     // 0-3
  (void)Store(kHostA, std::span(chain_).first(6), 2);                    // 2-5
  (void)Store({kA, StorageTier::kDisk}, std::span(chain_).first(7), 6);  // 6
  (void)Store(kDeviceA, std::span(chain_).first(9), 7);                  // 7-8
  EXPECT_EQ(Matched(kA, chain_), 9);
  EXPECT_NEAR(Weighted(chain_), 4 + 2 * 0.8 + 0.25 + 2, 1e-8);
  EXPECT_THAT(user_.Match(chain_).holders()[0].tier_blocks, ::testing::ElementsAre(4, 0, 0, 0, 0)) << "each alone";
  EXPECT_EQ(index().DeviceBlocks(kA), 6);
  EXPECT_EQ(index().HeldBlocks(kA), 6 + 4 + 1);
}

TEST_F(KvEventTest, ATierThatIsNoneIsRefused) {
  EXPECT_EQ(Store({kA, static_cast<StorageTier>(4)}, chain_), KvResult::kMalformed);
  EXPECT_EQ(index().Removed({kA, static_cast<StorageTier>(200)}, chain_), KvResult::kMalformed);
  EXPECT_EQ(index().Stats().refused_events, 2);
  EXPECT_EQ(index().Stats().endpoints, 0);
}

TEST_F(KvEventTest, EventsOfTheDeadAreRefused) {
  (void)Store({{0, 2}}, chain_);
  EXPECT_EQ(Store(kDeviceA, chain_), KvResult::kUnknownSource) << "an earlier incarnation";
  index().RemoveEndpoint({0, 2});
  EXPECT_EQ(Store({{0, 2}}, chain_), KvResult::kUnknownSource);
  EXPECT_EQ(index().Removed({{0, 2}}, chain_), KvResult::kUnknownSource);
  EXPECT_EQ(Store({EndpointId{}}, chain_), KvResult::kUnknownSource);
  EXPECT_EQ(Store({{kMaxEndpoints, 1}}, chain_), KvResult::kUnknownSource);
  EXPECT_EQ(Store({{0, 3}}, chain_), KvResult::kApplied);
  EXPECT_TRUE(user_.Match(chain_).holders().size() == 1);
}

TEST_F(KvEventTest, R87ARestartInPlaceClearsTheEndpoint) {
  EXPECT_EQ(index().Sequence(kA, 0), KvSequence::kNext);
  for (std::uint64_t n = 1; n <= 500; ++n) ASSERT_EQ(index().Sequence(kA, n), KvSequence::kNext);
  (void)Store(kDeviceA, chain_);
  EXPECT_EQ(index().Sequence(kA, 0), KvSequence::kRestarted);
  (void)Store(kDeviceA, std::span(chain_).first(2));
  EXPECT_EQ(index().HeldBlocks(kA), 2);
  EXPECT_EQ(Matched(kA, chain_), 2);
  EXPECT_EQ(index().Stats().restarts, 1);
  EXPECT_EQ(index().Sequence(kA, 1), KvSequence::kNext);
}

TEST_F(KvEventTest, R93GapsAndLateBatchesAreTold) {
  for (std::uint64_t n : {0U, 1U, 2U}) EXPECT_EQ(index().Sequence(kA, n), KvSequence::kNext);
  EXPECT_EQ(index().Sequence(kA, 5), KvSequence::kGap);
  EXPECT_TRUE(index().WantsResync(kA));
  for (std::uint64_t n : {3U, 4U, 5U}) EXPECT_EQ(index().Sequence(kA, n), KvSequence::kDuplicate);
  EXPECT_EQ(index().Sequence(kA, 6), KvSequence::kNext);
  EXPECT_EQ(index().Stats().sequence_gaps, 1);
  index().ClearEndpoint(kA);
  EXPECT_FALSE(index().WantsResync(kA));
  EXPECT_EQ(index().Sequence(kB, 7), KvSequence::kGap) << "the first number is not 0";
  EXPECT_EQ(index().Sequence({5, 0}, 0), KvSequence::kDuplicate);
}

TEST_F(KvEventTest, R91ClearingIsVisibleAtOnceAndSweptInSteps) {
  for (std::uint64_t i = 0; i < 1'000; ++i) (void)Store(kDeviceA, LongChain(i + 10, 2));
  index().ClearEndpoint(kA);
  EXPECT_EQ(Matched(kA, LongChain(500, 2)), 0);
  EXPECT_EQ(index().HeldBlocks(kA), 0);
  EXPECT_EQ(index().Stats().pending_sweep, 1'000 - 64);
  (void)Store(kDeviceA, LongChain(500, 2));
  EXPECT_EQ(index().Stats().pending_sweep, 1'000 - 128);
  EXPECT_EQ(Matched(kA, LongChain(500, 2)), 2);
  EXPECT_EQ(index().Sweep(10'000), 0);
  EXPECT_EQ(index().Stats().distinct_blocks, 2);
}

TEST_F(KvEventTest, ALongRunIsSweptABitAtATime) {
  const std::vector<BlockKey> keys = LongChain(3, 4'000);
  (void)Store(kDeviceA, keys);
  index().RemoveEndpoint(kA);
  EXPECT_EQ(Matched(kA, keys), 0);
  const std::int64_t after = index().Stats().distinct_blocks;
  EXPECT_GE(after, 4'000 - 64 * 4);
  EXPECT_EQ(index().Sweep(1'000), 0);
  EXPECT_EQ(index().Stats().distinct_blocks, 0);
}

TEST_F(KvEventTest, R94R88NothingIsLeftOfWhatCameAndWent) {
  const std::int64_t rounds = kSanitized ? 200 : 20'000;
  std::int64_t bytes = 0;
  for (std::int64_t i = 0; i < rounds; ++i) {
    const std::vector<BlockKey> keys = LongChain(static_cast<std::uint64_t>(i) + 100, 140);
    ASSERT_EQ(Store(kDeviceA, keys), KvResult::kApplied);
    if (i % 2 == 0)
      ASSERT_EQ(index().Removed(kDeviceA, std::vector<BlockKey>(keys.rbegin(), keys.rend())), KvResult::kApplied);
    else index().RemoveEndpoint({0, 1}), index().ClearEndpoint(kB);
    if (i == 10) bytes = index().Stats().bytes;
    if (i % 2 == 1) break;
  }
  for (std::int64_t i = 0; i < rounds; ++i) {
    const EndpointId id{1, static_cast<std::uint32_t>(i) + 1};
    ASSERT_EQ(Store({id}, LongChain(static_cast<std::uint64_t>(i) + 100, 140)), KvResult::kApplied);
    index().RemoveEndpoint(id);
    if (i == 10) bytes = index().Stats().bytes;
  }
  (void)index().Sweep(1 << 20);
  EXPECT_EQ(index().Stats().runs, 0);
  EXPECT_EQ(index().Stats().distinct_blocks, 0);
  EXPECT_LE(index().Stats().bytes, bytes);
}

TEST_F(KvEventTest, R106ThousandsOfEndpoints) {
  for (std::uint32_t slot = 0; slot < 5'000; ++slot)
    ASSERT_EQ(Store({{slot, 1}}, std::span(chain_).first(1 + slot % 50)), KvResult::kApplied);
  const PrefixMatch& match = user_.Match(chain_);
  ASSERT_EQ(match.holders().size(), 5'000U);
  for (std::uint32_t slot = 0; slot < 5'000; ++slot) {
    ASSERT_EQ(match.holders()[slot].endpoint, (EndpointId{slot, 1}));
    ASSERT_EQ(match.holders()[slot].blocks, 1 + slot % 50);
  }
}

TEST_F(KvEventTest, PathsOfAnyNumberOfRuns) {
  for (std::size_t turns : {1U, 2U, 3U, 4U, 10U, 100U}) {
    std::vector<BlockKey> keys;
    for (std::size_t turn = 0; turn < turns; ++turn) {  // Each turn forks off before the end of the one before.
      const std::vector<BlockKey> longer = Fork(keys, keys.size() - keys.size() / 20, 30, 1'000 * turns + 50 * turn);
      (void)Store({{static_cast<std::uint32_t>(turn % 2), 1}}, longer);
      keys = longer;
    }
    (void)Store(kDeviceA, keys);
    (void)Store(kDeviceB, keys);
    const auto size = static_cast<std::int64_t>(keys.size());
    EXPECT_EQ(Matched(kA, keys), size) << turns;
    EXPECT_EQ(Matched(kB, std::span(keys).first(keys.size() / 2)), size / 2) << turns;
    // A hole somewhere in the middle is found however the search went.
    for (std::size_t at : {std::size_t{0}, keys.size() / 3, keys.size() / 2, keys.size() - 1}) {
      while (Matched(kA, std::span(keys).subspan(0, at + 1)) == static_cast<std::int64_t>(at) + 1) {
        (void)index().Removed(kDeviceA, std::span(keys).subspan(at, 1));
      }
      EXPECT_EQ(Matched(kA, keys), static_cast<std::int64_t>(at)) << turns;
      EXPECT_EQ(Matched(kB, keys), size) << turns;
      (void)Store(kDeviceA, std::span(keys).first(at + 1), at);
      EXPECT_EQ(Matched(kA, keys), size) << turns;
    }
    index().ClearEndpoint(kA);
    index().ClearEndpoint(kB);
  }
}

TEST_F(KvEventTest, AnApproximateIndexTakesNoEvents) {
  const auto approximate = *PrefixIndex::Create({});
  EXPECT_EQ(approximate->Stored(kDeviceA, std::nullopt, chain_), KvResult::kNotExact);
  EXPECT_EQ(approximate->Removed(kDeviceA, chain_), KvResult::kNotExact);
  EXPECT_EQ(approximate->Sequence(kA, 0), KvSequence::kDuplicate);
  EXPECT_FALSE(approximate->WantsResync(kA));
}

TEST_F(KvEventTest, R98R99TheCapHoldsAtEveryEventAndTheIndexGoesOn) {
  constexpr std::int64_t kCap = 4 << 20;
  IndexUser user({.mode = IndexMode::kExact, .max_bytes = kCap});
  std::uint64_t refused = 0;
  for (std::uint64_t i = 0; i < 2'000; ++i) {
    const KvResult result =
        user.index->Stored({{static_cast<std::uint32_t>(i % 50), 1}}, std::nullopt, LongChain(i + 1, 200));
    refused += result == KvResult::kNoRoom ? 1U : 0U;
    ASSERT_TRUE(result == KvResult::kApplied || result == KvResult::kNoRoom) << ToString(result);
    ASSERT_LE(user.index->Stats().bytes, kCap);
  }
  EXPECT_GT(refused, 500U);
  EXPECT_EQ(user.index->Stats().cap_hits, static_cast<std::int64_t>(refused));
  EXPECT_TRUE(user.index->WantsResync({3, 1}));
  ASSERT_TRUE(user.index->Audit().ok()) << user.index->Audit();
  for (std::uint32_t slot = 0; slot < 50; ++slot) user.index->ClearEndpoint({slot, 1});
  EXPECT_EQ(user.index->Sweep(1 << 20), 0);
  EXPECT_FALSE(user.index->WantsResync({3, 1}));
  EXPECT_EQ(user.index->Stored({{3, 1}}, std::nullopt, LongChain(1, 200)), KvResult::kApplied);
  EXPECT_EQ(user.Matched({3, 1}, LongChain(1, 200)), 200);
}

TEST_F(KvEventTest, OptionsAreCheckedAndNamed) {
  const auto error = [](const PrefixIndexOptions& options) {
    return std::string(PrefixIndex::Create(options).status().message());
  };
  EXPECT_THAT(error({.mode = static_cast<IndexMode>(2)}), HasSubstr("mode: want 0 .. 1, got 2"));
  EXPECT_THAT(error({.tier_weights = {.host = 1.5}}), HasSubstr("tier_weights.host: want 0 .. 1, got 1.5"));
  EXPECT_THAT(error({.tier_weights = {.disk = -1}}), HasSubstr("tier_weights.disk"));
  EXPECT_THAT(error({.speculative_ttl = std::chrono::nanoseconds(-1)}),
              HasSubstr("speculative_ttl: want >= 0 ns, got -1"));
  EXPECT_THAT(error({.orphan_ttl = std::chrono::nanoseconds(-5)}), HasSubstr("orphan_ttl"));
  EXPECT_THAT(error({.max_orphan_blocks = -1}), HasSubstr("max_orphan_blocks"));
}

// ---- Runs and paths ----

TEST_F(KvEventTest, AnyoneExtendsARunAndItsHoldersKeepTheirDepth) {
  (void)Store(kDeviceA, std::span(chain_).first(20));
  EXPECT_EQ(Store(kDeviceB, chain_), KvResult::kApplied);
  EXPECT_EQ(index().Stats().runs, 1);
  EXPECT_EQ(Matched(kA, chain_), 20);
  EXPECT_EQ(Matched(kB, chain_), 50);
  EXPECT_EQ(Store(kDeviceA, chain_, 20), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 50);
  EXPECT_EQ(index().Stats().runs, 1);
  EXPECT_EQ(index().Stats().forks, 0);
}

TEST_F(KvEventTest, R83WhatWasGeneratedCountsForTheNextTurn) {
  const std::vector<BlockKey> turn = LongChain(7, 64 + 32);
  (void)Store(kDeviceA, std::span(turn).first(64));
  (void)Store(kDeviceA, turn, 64);
  EXPECT_EQ(Matched(kA, turn) * 16, 1'536);
}

TEST_F(KvEventTest, R77ScatteredBlocksDoNotCount) {
  const std::span<const BlockKey> prompt = std::span(chain_).first(6);
  (void)Store(kDeviceA, prompt.first(5));
  (void)index().Removed(kDeviceA, prompt.subspan(2, 1));  // It holds 0, 1, 3 and 4.
  EXPECT_EQ(Matched(kA, prompt), 2);
  EXPECT_EQ(Weighted(prompt), 2);
  EXPECT_EQ(index().HeldBlocks(kA), 4);
}

TEST_F(KvEventTest, APromptOfManyRunsAndHolesAtTheirEdges) {
  const std::vector<BlockKey> keys = LongChain(5, 20'000);
  for (std::size_t i = 0; i < keys.size(); i += 777) {
    const std::size_t end = std::min(i + 777, keys.size());
    ASSERT_EQ(Store(kDeviceA, std::span(keys).first(end), i), KvResult::kApplied);
  }
  EXPECT_EQ(Store(kDeviceB, keys), KvResult::kApplied);
  EXPECT_GE(index().Stats().runs, 5) << "a run holds at most 4,095 keys";
  for (std::size_t size : {1U, 4'094U, 4'095U, 4'096U, 8'190U, 8'191U, 12'286U, 19'999U, 20'000U}) {
    EXPECT_EQ(Matched(kA, std::span(keys).first(size)), static_cast<std::int64_t>(size));
  }
  for (std::size_t at : {0U, 1U, 511U, 512U, 4'094U, 4'095U, 4'096U, 8'189U, 8'190U, 8'191U, 12'285U, 19'998U, 19'999U}) {
    (void)index().Removed(kDeviceA, std::span(keys).subspan(at, 1));
    EXPECT_EQ(Matched(kA, keys), static_cast<std::int64_t>(at));
    EXPECT_EQ(Matched(kB, keys), 20'000);
    EXPECT_EQ(Store(kDeviceA, std::span(keys).first(at + 1), at), KvResult::kApplied);
    EXPECT_EQ(Matched(kA, keys), 20'000);
  }
  // What nobody holds in the middle is no longer there at all, and comes back as well.
  for (const KvSource& source : {kDeviceA, kDeviceB}) {
    (void)index().Removed(source, std::span(keys).subspan(5'000, 9'000));
  }
  EXPECT_EQ(Matched(kA, keys), 5'000);
  EXPECT_EQ(Store(kDeviceB, std::span(keys).first(14'000), 5'000), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, keys), 20'000);
  EXPECT_EQ(Matched(kA, keys), 5'000);
}

TEST_F(KvEventTest, AHoleInEachOfAHundredRuns) {
  constexpr std::uint32_t kRuns = 100;
  std::vector<BlockKey> keys;
  for (std::uint32_t turn = 0; turn < kRuns; ++turn) {  // Each turn leaves the one before two blocks before its end.
    const std::vector<BlockKey> longer = Fork(keys, keys.size() - (turn > 0 ? 2 : 0), 8, 1'000 * turn);
    (void)Store({{kRuns, 1}}, longer);
    keys = longer;
  }
  ASSERT_GE(index().Stats().runs, kRuns);
  for (std::uint32_t slot = 0; slot < kRuns; ++slot) {  // Endpoint i lacks a block of run i: an inner one or at an end.
    (void)Store({{slot, 1}}, keys);
    (void)index().Removed({{slot, 1}}, std::span(keys).subspan(6 * slot + slot % 6, 1));
  }
  for (const std::size_t size : {keys.size(), keys.size() / 2, std::size_t{25}, std::size_t{7}}) {
    const auto prompt = std::span(keys).first(size);
    const PrefixMatch& match = user_.Match(prompt);
    for (std::uint32_t slot = 0; slot < kRuns; ++slot) {
      EXPECT_EQ(match.BlocksOf({slot, 1}), std::min<std::int64_t>(6 * slot + slot % 6, std::ssize(prompt))) << slot;
    }
    EXPECT_EQ(match.BlocksOf({kRuns, 1}), std::ssize(prompt));
  }
  // Whole runs of the path that nobody holds: what lies behind them is out of reach.
  for (std::uint32_t slot = 0; slot <= kRuns; ++slot) {
    (void)index().Removed({{slot, 1}}, std::span(keys).subspan(290, 20));
  }
  for (std::uint32_t slot = 0; slot < kRuns; ++slot) {
    EXPECT_EQ(Matched({slot, 1}, keys), std::min<std::int64_t>(6 * slot + slot % 6, 290)) << slot;
  }
  EXPECT_EQ(Store({{kRuns, 1}}, std::span(keys).first(310), 290), KvResult::kApplied);
  EXPECT_EQ(Matched({kRuns, 1}, keys), std::ssize(keys));
}

TEST_F(KvEventTest, ManyHoldersOfOneRun) {
  for (const std::uint32_t holders : {2U, 64U, 1'000U}) {
    const std::vector<BlockKey> keys = LongChain(holders, 40);
    const auto depth = [](std::uint32_t slot) { return std::size_t{1} + slot * 7 % 40; };
    for (std::uint32_t i = 0; i < holders; ++i) {
      const std::uint32_t slot = (i * 389 + 1) % holders;  // Every slot, in no order.
      ASSERT_EQ(Store({{slot, 1}}, std::span(keys).first(depth(slot))), KvResult::kApplied);
    }
    for (std::uint32_t slot = 0; slot < holders; slot += 3) {
      (void)index().Removed({{slot, 1}}, std::span(keys).subspan(depth(slot) / 2, 1));
    }
    const PrefixMatch& match = user_.Match(keys);
    for (std::uint32_t slot = 0; slot < holders; ++slot) {
      const std::size_t expected = slot % 3 == 0 ? depth(slot) / 2 : depth(slot);
      ASSERT_EQ(match.BlocksOf({slot, 1}), static_cast<std::int64_t>(expected)) << slot << " of " << holders;
    }
    EXPECT_EQ(index().Stats().endpoints, holders);
    for (std::uint32_t slot = 1; slot < holders; ++slot) index().ClearEndpoint({slot, 1});
    EXPECT_EQ(user_.Match(keys).holders().size(), depth(0) / 2 > 0 ? 1U : 0U);
    (void)Store({{0, 1}}, keys);
    EXPECT_EQ(Matched({0, 1}, keys), 40);
    ASSERT_TRUE(index().Audit().ok()) << index().Audit();
    index().ClearEndpoint({0, 1});
    EXPECT_EQ(index().Sweep(1 << 20), 0);
  }
}

// ---- Removes ----

TEST_F(KvEventTest, RemovesInWhateverOrderLeaveNothing) {
  const std::vector<BlockKey> fork = Fork(chain_, 25, 25, 300);
  (void)Store(kDeviceA, std::span(chain_).first(1));
  (void)index().Removed(kDeviceA, std::span(chain_).first(1));
  const std::int64_t base = index().Stats().bytes;
  TestRandom random(5);
  for (int order = 0; order < 6; ++order) {
    (void)Store(kDeviceA, chain_);
    (void)Store(kDeviceA, fork, 25);
    std::vector<BlockKey> keys(chain_);
    keys.insert(keys.end(), fork.begin() + 25, fork.end());
    if (order == 0) std::reverse(keys.begin(), keys.end());
    for (std::size_t i = keys.size(); order > 1 && i > 1; --i) std::swap(keys[i - 1], keys[random.Below(i)]);
    const std::size_t step = order % 2 == 0 ? 1 : 9;
    std::vector<BlockKey> gone;
    for (std::size_t i = 0; i < keys.size(); i += step) {
      const std::span<const BlockKey> some = std::span(keys).subspan(i, std::min(step, keys.size() - i));
      ASSERT_EQ(index().Removed(kDeviceA, some), KvResult::kApplied);
      gone.insert(gone.end(), some.begin(), some.end());
      for (const std::vector<BlockKey>& prompt : {chain_, fork}) {
        const auto lost = std::find_first_of(prompt.begin(), prompt.end(), gone.begin(), gone.end());
        ASSERT_EQ(Matched(kA, prompt), lost - prompt.begin()) << "order " << order << ", after " << gone.size();
      }
    }
    EXPECT_EQ(index().Stats().unknown_removes, 0);
    EXPECT_EQ(index().Stats().runs, 0);
    EXPECT_EQ(index().Stats().distinct_blocks, 0);
    EXPECT_EQ(index().Stats().bytes, base) << "one segment stays";
  }
}

TEST_F(KvEventTest, ARemoveOfWhatIsNotHeldDoesNothing) {
  EXPECT_EQ(index().Removed(kDeviceA, chain_), KvResult::kApplied) << "its first event, unless some were lost";
  (void)Store(kDeviceA, chain_);
  EXPECT_EQ(index().Removed(kDeviceA, LongChain(9, 3)), KvResult::kApplied);
  EXPECT_EQ(index().Removed(kHostA, chain_), KvResult::kApplied) << "another tier's";
  (void)Store(kDeviceB, std::span(chain_).first(1));
  EXPECT_EQ(index().Removed(kDeviceB, std::span(chain_).subspan(1)), KvResult::kApplied) << "another endpoint's";
  EXPECT_EQ(index().Stats().unknown_removes, 50 + 3 + 50 + 49);
  EXPECT_EQ(Matched(kA, chain_), 50);
  index().ClearEndpoint(kA);
  EXPECT_EQ(index().Removed(kDeviceA, chain_), KvResult::kApplied) << "late, after a reset";
  EXPECT_FALSE(index().WantsResync(kA));
  EXPECT_EQ(index().Stats().removed_blocks, 0);
}

TEST_F(KvEventTest, R89CopiesAreCountedByBlockAndTier) {
  (void)Store(kDeviceA, chain_);
  (void)Store(kDeviceA, std::span(chain_).first(30), 10);
  (void)Store(kHostA, std::span(chain_).first(20));
  (void)Store(kHostA, std::span(chain_).first(20));
  (void)index().Removed(kDeviceA, std::span(chain_).subspan(5, 20));  // 5-9 are gone; 10-24 have one copy left.
  EXPECT_EQ(Matched(kA, chain_), 50) << "the host has 0-19";
  EXPECT_NEAR(Weighted(chain_), 45 + 5 * 0.8, 1e-8);
  EXPECT_EQ(index().DeviceBlocks(kA), 45);
  (void)index().Removed(kHostA, std::span(chain_).subspan(7, 1));
  EXPECT_EQ(Matched(kA, chain_), 50);
  (void)index().Removed(kHostA, std::span(chain_).subspan(7, 1));
  EXPECT_EQ(Matched(kA, chain_), 7);
  (void)Store(kDeviceA, std::span(chain_).first(8), 7);
  EXPECT_EQ(Matched(kA, chain_), 50);
}

TEST_F(KvEventTest, MoreCopiesThanCanBeCountedWantAResync) {
  const std::span<const BlockKey> block = std::span(chain_).first(1);
  for (int i = 0; i < 256; ++i) (void)Store(kDeviceA, block);
  EXPECT_FALSE(index().WantsResync(kA));
  (void)Store(kDeviceA, block);
  EXPECT_TRUE(index().WantsResync(kA));
  EXPECT_EQ(index().Stats().cap_hits, 1);
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(Matched(kA, block), 1);
    (void)index().Removed(kDeviceA, block);
  }
  EXPECT_EQ(Matched(kA, block), 0) << "one early rather than never";
}

TEST_F(KvEventTest, R95NoLookUpEntryOutlivesItsBlock) {
  // Audit compares the table with the runs entry by entry.
  TestRandom random(95);
  std::vector<std::vector<BlockKey>> live;
  for (int i = 0; i < (kSanitized ? 5'000 : 50'000); ++i) {
    if (live.size() < 200 && !random.OneIn(3)) {
      const std::vector<BlockKey> from = live.empty() ? chain_ : live[random.Below(live.size())];
      live.push_back(Fork(from, random.Below(from.size() + 1) / 2, 1 + random.Below(40), random.Below(50)));
      ASSERT_EQ(Store(kDeviceA, live.back()), KvResult::kApplied);
    } else if (!live.empty()) {
      std::swap(live[random.Below(live.size())], live.back());
      (void)index().Removed(kDeviceA, live.back());
      live.pop_back();
    }
    if (i % 5'000 == 0) {
      ASSERT_TRUE(index().Audit().ok()) << index().Audit();
    }
  }
  ASSERT_TRUE(index().Audit().ok()) << index().Audit();
  EXPECT_EQ(index().Stats().holder_blocks, index().Stats().distinct_blocks);
  EXPECT_EQ(index().HeldBlocks(kA), index().Stats().distinct_blocks);
  EXPECT_GT(index().Stats().forks, 100);
  for (const std::vector<BlockKey>& keys : live) (void)index().Removed(kDeviceA, keys);
  EXPECT_EQ(index().Stats().distinct_blocks, 0);
  EXPECT_EQ(index().Stats().runs, 0);
  EXPECT_EQ(index().Stats().unknown_removes, 0);
}

// ---- Parents ----

TEST_F(KvEventTest, AnotherEndpointsParentIsKnownAndCreditsNothing) {
  (void)Store(kDeviceA, chain_);
  EXPECT_EQ(Store(kDeviceB, chain_, 20), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, chain_), 0);
  EXPECT_EQ(index().HeldBlocks(kB), 30);
  (void)index().Removed(kDeviceA, chain_);
  EXPECT_EQ(Matched(kB, chain_), 0);
  EXPECT_EQ(Store(kDeviceB, std::span(chain_).first(20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, chain_), 50);
}

TEST_F(KvEventTest, PartsOfAChainInReverseOrderCountAsSoonAsTheFirstComes) {
  for (std::size_t from : {40U, 30U, 20U, 10U}) {
    EXPECT_EQ(Store(kDeviceA, std::span(chain_).first(from + 10), from), KvResult::kUnknownParent);
    EXPECT_EQ(Matched(kA, chain_), 0);
  }
  EXPECT_EQ(index().Stats().unknown_parents, 4);
  (void)index().Removed(kDeviceA, std::span(chain_).subspan(30, 1));
  EXPECT_EQ(Store(kDeviceA, std::span(chain_).first(10)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 30);
}

TEST_F(KvEventTest, WhatIsRemovedBeforeItsParentComesLeavesNothing) {
  (void)Store(kDeviceA, std::span(chain_).first(1));
  (void)index().Removed(kDeviceA, std::span(chain_).first(1));
  const std::int64_t base = index().Stats().bytes;
  EXPECT_EQ(Store(kDeviceA, chain_, 20), KvResult::kUnknownParent);
  (void)index().Removed(kDeviceA, std::span(chain_).subspan(20));
  EXPECT_EQ(index().Stats().runs, 0);
  EXPECT_EQ(Store(kDeviceA, std::span(chain_).first(20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 20);
  (void)index().Removed(kDeviceA, std::span(chain_).first(20));
  EXPECT_EQ(index().Sweep(0), 0);
  EXPECT_EQ(index().HeldBlocks(kA), 0);
  EXPECT_LE(index().Stats().bytes, base + 30 * std::int64_t{sizeof(BlockKey)}) << "the note of them, for its time";
}

TEST_F(KvEventTest, AKeyHasOneParentWhetherThatIsABlockOrThePromptsBeginning) {
  (void)Store(kDeviceA, chain_);
  EXPECT_EQ(index().Stored(kDeviceB, std::nullopt, std::span(chain_).subspan(1, 3)), KvResult::kConflict);
  EXPECT_EQ(index().Stored(kDeviceB, chain_[4], std::span(chain_).first(3)), KvResult::kConflict);
  EXPECT_EQ(index().Stored(kDeviceB, chain_[4], std::span(chain_).subspan(6, 3)), KvResult::kConflict);
  EXPECT_TRUE(index().WantsResync(kB));
  EXPECT_EQ(index().HeldBlocks(kB), 0);
  EXPECT_EQ(index().Stats().conflicting_keys, 3);
  EXPECT_EQ(index().Stats().refused_events, 3);
  index().ClearEndpoint(kB);
  EXPECT_FALSE(index().WantsResync(kB));
  (void)index().Removed(kDeviceA, chain_);
  EXPECT_EQ(index().Stored(kDeviceB, std::nullopt, std::span(chain_).subspan(1, 3)), KvResult::kApplied)
      << "free again";
}

TEST_F(KvEventTest, R74EqualKeysAndCyclesCorruptNothing) {
  const std::vector<BlockKey> ones(10, 1), cycle = {5, 6, 5, 6}, zeros(3, 0);
  EXPECT_EQ(index().Stored(kDeviceA, std::nullopt, ones), KvResult::kConflict);
  EXPECT_EQ(index().Stored(kDeviceA, std::nullopt, cycle), KvResult::kConflict);
  EXPECT_EQ(index().Stored(kDeviceA, std::nullopt, zeros), KvResult::kMalformed) << "0 is no key";
  EXPECT_EQ(index().HeldBlocks(kA), 1 + 2);
  EXPECT_EQ(Matched(kA, std::span(cycle).first(2)), 2);
  EXPECT_LE(Matched(kA, ones), 10);
  ASSERT_TRUE(index().Audit().ok()) << index().Audit();
  for (const std::vector<BlockKey>& keys : {ones, cycle, zeros}) (void)index().Removed(kDeviceA, keys);
  index().ClearEndpoint(kA);
  EXPECT_EQ(index().Sweep(100), 0);
  EXPECT_EQ(index().Stats().runs, 0);
}

// Each hangs today: looking for the chain's beginning goes round in circles, under the lock.
TEST_F(KvEventTest, R74AnEventThatNamesItsOwnParentIsAnOrphanLikeOthers) {
  EXPECT_NE(index().Stored(kDeviceA, BlockKey{5}, std::vector<BlockKey>{6, 5}), KvResult::kApplied);
  EXPECT_NE(index().Stored(kDeviceA, BlockKey{5}, std::vector<BlockKey>{7}), KvResult::kApplied);
  EXPECT_EQ(Store(kDeviceB, chain_), KvResult::kApplied);
}
TEST_F(KvEventTest, R74OrphansBehindEachOtherAreOrphansLikeOthers) {
  EXPECT_EQ(index().Stored(kDeviceA, BlockKey{5}, std::vector<BlockKey>{6}), KvResult::kUnknownParent);
  EXPECT_NE(index().Stored(kDeviceA, BlockKey{6}, std::vector<BlockKey>{5}), KvResult::kApplied);
  EXPECT_EQ(Store(kDeviceB, chain_), KvResult::kApplied);
}

TEST_F(KvEventTest, AnOrphanRefusedInPartTakesNothingElseAlongWhenItExpires) {
  ManualClock clock;
  IndexUser user({.mode = IndexMode::kExact, .clock = clock, .orphan_ttl = std::chrono::seconds(60)});
  (void)user.index->Stored(kDeviceA, std::nullopt, chain_);
  EXPECT_EQ(user.index->Stored(kDeviceA, BlockKey{5}, std::vector<BlockKey>{6, chain_[30]}), KvResult::kConflict);
  EXPECT_EQ(user.Matched(kA, chain_), 50);
  clock.now = std::chrono::seconds(61);
  (void)user.index->Sweep(100);
  EXPECT_EQ(user.index->Stats().orphan_blocks, 0);
  EXPECT_EQ(user.Matched(kA, chain_), 50) << "the conflict's key is another chain's";
  EXPECT_TRUE(user.index->Audit().ok()) << user.index->Audit();
}

TEST_F(KvEventTest, AnOrphanThatFoundItsParentStaysWhenThatGoesAgain) {
  ManualClock clock;
  IndexUser user({.mode = IndexMode::kExact, .clock = clock, .orphan_ttl = std::chrono::seconds(60)});
  const std::span<const BlockKey> keys = std::span(chain_).first(20);
  EXPECT_EQ(user.index->Stored(kDeviceB, BlockKey{5}, std::vector<BlockKey>{6}), KvResult::kUnknownParent);
  EXPECT_EQ(user.index->Stored(kDeviceA, keys[9], keys.subspan(10)), KvResult::kUnknownParent);
  EXPECT_EQ(user.index->Stored(kDeviceA, std::nullopt, keys.first(10)), KvResult::kApplied);
  EXPECT_EQ(user.Matched(kA, keys), 20);
  (void)user.index->Removed(kDeviceA, keys.subspan(9, 1));
  clock.now = std::chrono::seconds(61);
  (void)user.index->Sweep(100);
  EXPECT_EQ(user.index->HeldBlocks(kA), 19) << "blocks behind a lost one stay";
  EXPECT_EQ(user.index->Stored(kDeviceA, keys[8], keys.subspan(9, 1)), KvResult::kApplied);
  EXPECT_EQ(user.Matched(kA, keys), 20);
  EXPECT_TRUE(user.index->Audit().ok()) << user.index->Audit();
}

// ---- Endpoints ----

TEST_F(KvEventTest, R107RanksAreEndpointsWithCachesAndNumbersOfTheirOwn) {
  (void)Store(kDeviceA, std::span(chain_).first(10));
  EXPECT_EQ(index().Sequence(kA, 0), KvSequence::kNext);
  EXPECT_EQ(index().Sequence(kB, 0), KvSequence::kNext);
  EXPECT_EQ(index().Sequence(kB, 1), KvSequence::kNext);
  EXPECT_EQ(index().Sequence(kA, 1), KvSequence::kNext);
  EXPECT_EQ(Matched(kA, chain_), 10);
  EXPECT_EQ(Matched(kB, chain_), 0);
  index().RemoveEndpoint(kA);
  index().RemoveEndpoint(kB);
  EXPECT_TRUE(user_.Match(chain_).holders().empty());
  EXPECT_EQ(index().Sequence(kA, 2), KvSequence::kDuplicate) << "nobody's any more";
  EXPECT_EQ(index().Stats().endpoints, 0);
}

TEST_F(KvEventTest, AReplacedEndpointStartsAnew) {
  (void)Store(kDeviceA, chain_);
  EXPECT_EQ(index().Sequence(kA, 7), KvSequence::kGap);
  EXPECT_TRUE(index().WantsResync(kA));
  const EndpointId next{0, 2};
  EXPECT_EQ(Store({next}, std::span(chain_).first(3)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, chain_), 0);
  EXPECT_EQ(Matched(next, chain_), 3);
  EXPECT_EQ(index().HeldBlocks(kA), 0);
  EXPECT_FALSE(index().WantsResync(kA));
  EXPECT_FALSE(index().WantsResync(next));
  EXPECT_EQ(index().Sequence(next, 0), KvSequence::kNext);
  EXPECT_EQ(index().Sequence(kA, 8), KvSequence::kDuplicate);
  EXPECT_EQ(Store(kDeviceA, chain_), KvResult::kUnknownSource);
  EXPECT_EQ(index().Removed(kDeviceA, chain_), KvResult::kUnknownSource);
  EXPECT_EQ(Matched(next, chain_), 3);
  EXPECT_EQ(index().Stats().endpoints, 1);
}

TEST_F(KvEventTest, NumbersSurviveAResyncAndAllTiersEndWithARestart) {
  EXPECT_EQ(index().Sequence(kA, 0), KvSequence::kNext);
  (void)Store(kDeviceA, std::span(chain_).first(10));
  (void)Store(kHostA, chain_);
  index().ClearEndpoint(kA);
  EXPECT_EQ(Matched(kA, chain_), 0);
  EXPECT_EQ(index().Sequence(kA, 1), KvSequence::kNext) << "the engine goes on counting";
  (void)Store(kHostA, chain_);
  EXPECT_EQ(index().Sequence(kA, 9), KvSequence::kGap);
  EXPECT_EQ(Matched(kA, chain_), 50) << "a gap takes nothing away";
  EXPECT_EQ(index().Sequence(kA, 0), KvSequence::kRestarted);
  EXPECT_FALSE(index().WantsResync(kA)) << "empty is the truth";
  EXPECT_EQ(Matched(kA, chain_), 0);
  EXPECT_EQ(index().HeldBlocks(kA), 0);
  EXPECT_EQ(index().Sequence(kA, 0), KvSequence::kRestarted) << "again, before its second batch";
  constexpr std::uint64_t kLast = ~std::uint64_t{0};
  EXPECT_EQ(index().Sequence(kA, kLast - 1), KvSequence::kGap);
  EXPECT_EQ(index().Sequence(kA, kLast), KvSequence::kNext);
  EXPECT_EQ(index().Stats().duplicate_batches, 0);
}

TEST_F(KvEventTest, R85ARemovedEndpointLeavesNothingAndOthersKeepTheirs) {
  (void)Store(kDeviceB, std::span(chain_).first(1));
  (void)index().Removed(kDeviceB, std::span(chain_).first(1));
  const std::int64_t base = index().Stats().bytes;
  const std::vector<BlockKey> keys = LongChain(85, 100'000);
  (void)Store(kDeviceA, keys);
  (void)Store(kHostA, std::span(keys).first(5'000));
  (void)Store(kDeviceB, std::span(keys).first(7'000));
  EXPECT_EQ(index().Stats().distinct_blocks, 100'000);
  index().RemoveEndpoint(kA);
  ASSERT_EQ(user_.Match(keys).holders().size(), 1U);
  EXPECT_EQ(Matched(kB, keys), 7'000);
  EXPECT_EQ(index().Sweep(1 << 20), 0);
  EXPECT_EQ(index().Stats().distinct_blocks, 7'000);
  EXPECT_EQ(Matched(kB, keys), 7'000);
  index().RemoveEndpoint(kB);
  EXPECT_EQ(index().Sweep(1 << 20), 0);
  EXPECT_EQ(index().Stats().memberships, 0);
  EXPECT_LE(index().Stats().bytes, base + 4'096) << "records of endpoints stay";
}

TEST_F(KvEventTest, TheSweepGoesOnWithWhateverCallComesNext) {
  for (std::uint64_t i = 0; i < 500; ++i) (void)Store(kDeviceA, LongChain(i + 10, 1));
  index().RemoveEndpoint(kA);
  std::int64_t pending = 500 - 64;
  const auto swept_at_most_64 = [&] {
    const std::int64_t before = std::exchange(pending, index().Stats().pending_sweep);
    EXPECT_LT(pending, before);
    EXPECT_GE(pending, before - 64);
  };
  EXPECT_EQ(index().Stats().pending_sweep, pending);
  (void)Store(kDeviceB, chain_);
  swept_at_most_64();
  (void)index().Removed(kDeviceB, std::span(chain_).subspan(49));
  swept_at_most_64();
  index().ClearEndpoint(kB);
  swept_at_most_64();
  index().RemoveEndpoint({7, 1});
  swept_at_most_64();
  EXPECT_EQ(index().Sweep(10), pending - 10);
  EXPECT_EQ(index().Sweep(1'000), 0);
  EXPECT_EQ(index().Stats().distinct_blocks, 0);
}

TEST_F(KvEventTest, RetiringForgetsWhoLeftTheFleet) {
  ScriptedFleet fleet;
  const EndpointId a = fleet.Add(0), b = fleet.Add(1);
  (void)Store({a}, chain_);
  (void)Store({b}, std::span(chain_).first(5));
  fleet.Remove(a);
  index().RetireDead(fleet.View());
  ASSERT_EQ(user_.Match(chain_).holders().size(), 1U);
  EXPECT_EQ(Matched(b, chain_), 5);
  EXPECT_EQ(Store({a}, chain_), KvResult::kUnknownSource);
}

// ---- Weights and tiers ----

TEST_F(KvEventTest, R109AHostBlockIsAWholeBlockOfWeightFourFifths) {
  (void)Store(kHostA, std::span(chain_).first(1));
  EXPECT_EQ(Matched(kA, chain_), 1);
  EXPECT_NEAR(Weighted(chain_), 0.8, 1e-9);
  (void)Store(kHostA, chain_, 1);
  EXPECT_EQ(Matched(kA, chain_), 50);
  EXPECT_NEAR(Weighted(chain_), 40, 1e-8);
  (void)Store({kB, StorageTier::kUnknown}, chain_);
  EXPECT_EQ(user_.Match(chain_).holders()[1].weighted_blocks, 50);
  IndexUser own({.mode = IndexMode::kExact, .tier_weights = {.device = 0.5, .host = 0, .disk = 1}});
  (void)own.index->Stored(kDeviceA, std::nullopt, std::span(chain_).first(20));
  (void)own.index->Stored({kA, StorageTier::kDisk}, std::nullopt, std::span(chain_).first(10));
  (void)own.index->Stored(kHostA, chain_[19], std::span(chain_).subspan(20));
  EXPECT_EQ(own.Matched(kA, chain_), 50) << "held, if for nothing";
  EXPECT_EQ(own.match.holders()[0].weighted_blocks, 10 + 10 * 0.5) << "the best tier is the one that weighs most";
}

TEST_F(KvEventTest, R108AnOffloadedChainOutlivesItsDeviceBlocksRunByRun) {
  const std::vector<BlockKey> keys = LongChain(108, 9'000);
  (void)Store(kDeviceA, keys);
  for (std::size_t i = 0; i < keys.size(); i += 2) (void)Store(kHostA, std::span(keys).first(i + 1), i);  // Even ones.
  EXPECT_EQ(Weighted(keys), 9'000);
  std::vector<BlockKey> even, odd;
  for (std::size_t i = 0; i < keys.size(); ++i) (i % 2 == 0 ? even : odd).push_back(keys[i]);
  (void)index().Removed(kDeviceA, even);
  EXPECT_EQ(Matched(kA, keys), 9'000);
  EXPECT_NEAR(Weighted(keys), 4'500 + 4'500 * 0.8, 1e-5);
  EXPECT_EQ(index().DeviceBlocks(kA), 4'500);
  (void)index().Removed(kHostA, std::span(even).subspan(3'000, 1));
  EXPECT_EQ(Matched(kA, keys), 6'000);
  (void)index().Removed(kDeviceA, odd);
  EXPECT_EQ(Matched(kA, keys), 1);
}

// ---- The memory cap ----

TEST_F(KvEventTest, R98RemovesMakeRoomAgain) {
  IndexUser user({.mode = IndexMode::kExact, .max_bytes = 4 << 20});
  std::vector<std::vector<BlockKey>> held;
  for (std::uint64_t i = 1;; ++i) {
    held.push_back(LongChain(i, 300));
    if (user.index->Stored(kDeviceA, std::nullopt, held.back()) == KvResult::kNoRoom) break;
    ASSERT_LT(i, 10'000U);
  }
  EXPECT_GT(held.size(), 100U);
  EXPECT_EQ(user.index->Stats().cap_hits, 1);
  EXPECT_TRUE(user.index->WantsResync(kA));
  EXPECT_EQ(user.Matched(kA, held[0]), 300) << "nothing else is lost";
  EXPECT_EQ(user.Matched(kA, held.back()), user.index->Stats().stored_blocks - 300 * (std::ssize(held) - 1));
  EXPECT_TRUE(user.index->Audit().ok()) << user.index->Audit();
  for (std::size_t i = 0; i < held.size(); i += 2) (void)user.index->Removed(kDeviceA, held[i]);
  for (std::size_t i = 0; i < held.size() / 3; ++i) {
    ASSERT_EQ(user.index->Stored(kDeviceB, std::nullopt, LongChain(100'000 + i, 300)), KvResult::kApplied);
  }
  EXPECT_TRUE(user.index->Audit().ok()) << user.index->Audit();
  for (const EndpointId id : {kA, kB}) user.index->RemoveEndpoint(id);
  EXPECT_EQ(user.index->Sweep(1 << 20), 0);
  EXPECT_EQ(user.index->Stats().runs, 0);
}

TEST_F(KvEventTest, AtTheCapNobodyIsCreditedWithMoreThanItHolds) {
  // What it was told, with which the index must not lag behind in removing: it may only know less.
  constexpr std::uint32_t kEndpoints = 12;
  TestRandom random(testing_support::TestSeed(98));
  IndexUser user({.mode = IndexMode::kExact, .max_orphan_blocks = 1 << 20, .max_bytes = 4 << 20});
  std::array<std::unordered_map<BlockKey, std::array<int, 2>>, kEndpoints> told;
  std::vector<std::vector<BlockKey>> prompts{chain_};
  for (int i = 0; i < (kSanitized ? 4'000 : 8'000); ++i) {
    const auto slot = static_cast<std::uint32_t>(random.Below(kEndpoints));
    const std::size_t tier = random.OneIn(3) ? 1 : 0;
    const KvSource source{{slot, 1}, static_cast<StorageTier>(tier)};
    const std::vector<BlockKey>& old = prompts[random.Below(prompts.size())];
    const std::uint64_t what = random.Below(100);
    if (what < 50) {
      const std::size_t common = random.Below(old.size() + 1), from = random.OneIn(2) ? 0 : common;
      const std::vector<BlockKey> keys =
          Fork(old, common, 1 + random.Below(random.OneIn(15) ? 5'000 : 80), static_cast<std::uint64_t>(i) * 10'000);
      const std::span<const BlockKey> stored = std::span(keys).subspan(from);
      (void)user.index->Stored(source, from > 0 ? std::optional(keys[from - 1]) : std::nullopt, stored);
      for (const BlockKey key : stored) ++told[slot][key][tier];
      prompts.push_back(keys);
      if (prompts.size() > 150) prompts.erase(prompts.begin());
    } else if (what < 75) {
      const std::size_t from = random.Below(old.size());
      const std::size_t most = std::min<std::size_t>(old.size() - from, 50);
      const std::span<const BlockKey> gone = std::span(old).subspan(from, 1 + random.Below(most));
      (void)user.index->Removed(source, gone);
      for (const BlockKey key : gone) {
        const auto it = told[slot].find(key);
        if (it != told[slot].end() && it->second[tier] > 0) --it->second[tier];
      }
    } else if (what == 75 && random.OneIn(3)) {
      user.index->ClearEndpoint({slot, 1});
      told[slot].clear();
    } else {
      for (const PrefixMatch::Holder& holder : user.Match(old).holders()) {
        const auto& held = told[holder.endpoint.slot];
        std::int64_t blocks = 0;
        for (; blocks < std::ssize(old); ++blocks) {
          const auto it = held.find(old[static_cast<std::size_t>(blocks)]);
          if (it == held.end() || it->second == std::array<int, 2>{}) break;
        }
        ASSERT_LE(holder.blocks, blocks) << "operation " << i;
      }
      ASSERT_LE(user.index->Stats().bytes, 4 << 20);
    }
  }
  EXPECT_GT(user.index->Stats().cap_hits, 100);
  ASSERT_TRUE(user.index->Audit().ok()) << user.index->Audit();
  for (std::uint32_t slot = 0; slot < kEndpoints; ++slot) user.index->ClearEndpoint({slot, 1});
  EXPECT_EQ(user.index->Sweep(1 << 20), 0);
  EXPECT_EQ(user.index->Stats().runs, 0);
  EXPECT_EQ(user.index->Stored(kDeviceA, std::nullopt, chain_), KvResult::kApplied);
  EXPECT_EQ(user.Matched(kA, chain_), 50);
  EXPECT_TRUE(user.index->Audit().ok()) << user.index->Audit();
}

// On a small stack, since nothing recurses.
struct LongRun {
  std::int64_t blocks = kSanitized ? 200'000 : 10'000'000;
  bool good = false;
};
void* StoreMatchRemove(void* context) {
  LongRun& run = *static_cast<LongRun*>(context);
  IndexUser user({.mode = IndexMode::kExact});
  const std::vector<BlockKey> keys = LongChain(1, run.blocks);
  constexpr std::size_t kEvent = 4'096;
  for (std::size_t i = 0; i < keys.size(); i += kEvent) {
    const std::size_t count = std::min(kEvent, keys.size() - i);
    const std::optional<BlockKey> parent = i > 0 ? std::optional(keys[i - 1]) : std::nullopt;
    if (user.index->Stored(kDeviceA, parent, std::span(keys).subspan(i, count)) != KvResult::kApplied) return nullptr;
  }
  if (user.Matched(kA, keys) != run.blocks) return nullptr;
  (void)user.index->Removed(kDeviceA, std::span(keys).subspan(keys.size() / 2, 1));
  if (user.Matched(kA, keys) != run.blocks / 2) return nullptr;
  for (std::size_t end = keys.size(); end > keys.size() / 2; end -= kEvent) {  // As engines free: the last ones first.
    const std::size_t begin = std::max(end - std::min(end, kEvent), keys.size() / 2);
    const std::vector<BlockKey> freed(keys.rend() - static_cast<std::ptrdiff_t>(end),
                                      keys.rend() - static_cast<std::ptrdiff_t>(begin));
    if (user.index->Removed(kDeviceA, freed) != KvResult::kApplied) return nullptr;
    if (begin == keys.size() / 2) break;
  }
  if (user.index->HeldBlocks(kA) != run.blocks / 2) return nullptr;
  user.index->ClearEndpoint(kA);
  while (user.index->Sweep(1 << 20) > 0) {
  }
  run.good = user.Matched(kA, keys) == 0 && user.index->Stats().distinct_blocks == 0;
  return nullptr;
}
TEST_F(KvEventTest, TenMillionBlocksInOneChainOnASmallStack) {
  LongRun run;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, (kSanitized ? 2'048 : 256) << 10), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, &StoreMatchRemove, &run), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_TRUE(run.good);
}

}  // namespace
}  // namespace tokroute

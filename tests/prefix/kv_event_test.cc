// What each KV event means, one rule at a time. Random mixtures of them: run_forest_differential_test.
#include "tokroute/prefix/kv_event.h"

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
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

constexpr EndpointId kA{0, 1}, kB{1, 1};
const KvSource kDeviceA{kA}, kHostA{kA, StorageTier::kHost}, kDeviceB{kB};

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
  for (std::size_t i : {1, 2, 3, 4, 1})
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

TEST_F(KvEventTest, AKeyTwiceInOneEventIsAConflict) {
  const BlockKey one = chain_[0], two = chain_[1];
  EXPECT_EQ(index().Stored(kDeviceA, std::nullopt, std::vector<BlockKey>{one, two, one}), KvResult::kConflict);
  EXPECT_EQ(index().Stored(kDeviceA, two, std::vector<BlockKey>{two}), KvResult::kConflict);
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
  for (std::uint64_t n : {0, 1, 2}) EXPECT_EQ(index().Sequence(kA, n), KvSequence::kNext);
  EXPECT_EQ(index().Sequence(kA, 5), KvSequence::kGap);
  EXPECT_TRUE(index().WantsResync(kA));
  for (std::uint64_t n : {3, 4, 5}) EXPECT_EQ(index().Sequence(kA, n), KvSequence::kDuplicate);
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
  for (std::size_t turns : {1, 2, 3, 4, 10, 100}) {
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

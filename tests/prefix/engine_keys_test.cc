// What each rule of EngineKeys means, one at a time. Random mixtures of them: engine_keys_differential_test.
#include "tokroute/prefix/engine_keys.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
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

constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

std::vector<TokenId> Tokens(std::uint64_t seed, std::int64_t count) {
  TestRandom random(seed);
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random.Next());
  return tokens;
}

// A prompt as an engine with a hash of its own tells of it.
struct Prompt {
  Prompt(std::uint64_t seed, std::int64_t blocks, std::int32_t size = 16)
      : block_size(size), tokens(Tokens(seed, blocks * size)) {
    const std::uint64_t first = TestRandom(seed * 1000 + 7).Next();
    for (std::int64_t i = 0; i < blocks; ++i) engine_keys.push_back(first + static_cast<std::uint64_t>(i) * 0x10001u);
  }
  // Blocks [from, to).
  EngineBlocks Event(std::size_t from, std::size_t to) const {
    EngineBlocks blocks{.engine_keys = std::span(engine_keys).subspan(from, to - from), .block_size = block_size};
    const auto size = static_cast<std::size_t>(block_size);
    blocks.tokens = std::span(tokens).subspan(from * size, (to - from) * size);
    if (from > 0) blocks.parent = engine_keys[from - 1];
    return blocks;
  }
  EngineBlocks Event() const { return Event(0, engine_keys.size()); }
  std::span<const EngineKey> Keys(std::size_t from, std::size_t to) const {
    return std::span(engine_keys).subspan(from, to - from);
  }
  Request request() const { return {.tokens = tokens}; }

  std::int32_t block_size;
  std::vector<TokenId> tokens;
  std::vector<EngineKey> engine_keys;
};

class EngineKeysTest : public ::testing::Test {
 protected:
  explicit EngineKeysTest(PrefixIndexOptions options = {}, EngineKeysOptions named = {}) {
    options.mode = IndexMode::kExact;
    options.clock = clock_;
    user_ = std::make_unique<IndexUser>(options);
    absl::StatusOr<std::shared_ptr<EngineKeys>> made = EngineKeys::Create(user_->index, named);
    EXPECT_TRUE(made.ok()) << made.status();
    keys_ = *std::move(made);
    shared_ = *keys_->Domain("shared");
  }
  ~EngineKeysTest() override {
    EXPECT_TRUE(keys_->Audit().ok()) << keys_->Audit();
    EXPECT_TRUE(user_->index->Audit().ok()) << user_->index->Audit();
  }
  std::int64_t Matched(EndpointId id, const Prompt& prompt) { return user_->Matched(id, prompt.request()); }
  EngineKeysStats Stats() { return keys_->Stats(); }

  ManualClock clock_;
  std::unique_ptr<IndexUser> user_;
  std::shared_ptr<EngineKeys> keys_;
  HashDomain shared_;
  const Prompt prompt_{1, 50};
};

TEST_F(EngineKeysTest, R72TokensMakeOurKeysWhateverTheEngineCallsThem) {
  for (std::size_t i = 0; i < 50; i += 7) {
    const std::size_t to = std::min<std::size_t>(i + 7, 50);
    EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(i, to)), KvResult::kApplied);
    EXPECT_EQ(Matched(kA, prompt_), static_cast<std::int64_t>(to));
  }
  // Another seed's engine calls the same blocks otherwise, in a domain of its own.
  Prompt other(1, 50);
  for (EngineKey& key : other.engine_keys) key = ~key;
  EXPECT_EQ(keys_->Stored(kDeviceB, {}, other.Event()), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, prompt_), 50);
  EXPECT_EQ(user_->index->Stats().distinct_blocks, 50);
  EXPECT_EQ(Stats().names, 100);
  EXPECT_EQ(Stats().domains, 2);
  EXPECT_EQ(keys_->Removed(kDeviceB, {}, other.Keys(40, 50)), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, prompt_), 40);
  EXPECT_EQ(Matched(kA, prompt_), 50);
}

TEST_F(EngineKeysTest, R66R69BothSchemesChainAsPromptsDo) {
  for (const KeyScheme scheme : {KeyScheme::kXxh3, KeyScheme::kXxh64Chain}) {
    for (const std::int32_t block_size : {16, 48, 128}) {
      IndexUser user({.mode = IndexMode::kExact,
                      .block_size = block_size,
                      .scheme = scheme,
                      .key_seed = scheme == KeyScheme::kXxh3 ? 99u : 0u});
      const std::shared_ptr<EngineKeys> keys = *EngineKeys::Create(user.index);
      const Prompt prompt(3, 20, block_size);
      // A span before, one over an event's edge, one within a block, and one beyond the end; in no order.
      const std::vector<MediaSpan> media{{.first_token = 12 * block_size + 3, .token_count = 4, .content_hash = 5},
                                         {.first_token = 5, .token_count = block_size * 2, .content_hash = 6},
                                         {.first_token = 9 * block_size - 1, .token_count = 99, .content_hash = 7},
                                         {.first_token = 12 * block_size, .token_count = 5, .content_hash = 8},
                                         {.first_token = 19 * block_size, .token_count = 9999, .content_hash = 9},
                                         {.first_token = 3, .token_count = 0, .content_hash = 10}};
      for (std::size_t from = 0; from < 20; from += 5) {
        EngineBlocks blocks = prompt.Event(from, from + 5);
        std::vector<MediaSpan> here = media;
        for (MediaSpan& span : here) span.first_token -= static_cast<std::int64_t>(from) * block_size;
        blocks.media = here;
        if (from == 0) blocks.model = "m", blocks.lora = "l", blocks.cache_salt = "s";
        ASSERT_EQ(keys->Stored(kDeviceA, {}, blocks), KvResult::kApplied);
      }
      Request request{.tokens = prompt.tokens, .model = "m", .lora = "l", .cache_salt = "s", .media = media};
      EXPECT_EQ(user.Matched(kA, request), 20) << static_cast<int>(scheme) << ", " << block_size;
      std::vector<MediaSpan> moved = media;
      moved[2].content_hash = 70;
      request.media = moved;
      EXPECT_EQ(user.Matched(kA, request), 8) << "the first block that the span touches";
    }
  }
}

TEST_F(EngineKeysTest, R65R67NamespacesStayApart) {
  EngineBlocks salted = prompt_.Event();
  salted.cache_salt = "s1";
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, salted), KvResult::kApplied);
  Request request = prompt_.request();
  EXPECT_EQ(user_->Matched(kA, request), 0);
  request.cache_salt = "s2";
  EXPECT_EQ(user_->Matched(kA, request), 0);
  request.cache_salt = "s1";
  EXPECT_EQ(user_->Matched(kA, request), 50);
  request.lora = "fin";
  EXPECT_EQ(user_->Matched(kA, request), 0);
}

TEST_F(EngineKeysTest, OurKeysMayBeGivenDirectly) {
  const std::vector<BlockKey> chain = LongChain(5, 10);
  EngineBlocks blocks{.engine_keys = prompt_.Keys(0, 6), .keys = std::span(chain).first(6)};
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, blocks), KvResult::kApplied);
  blocks = {.parent = prompt_.engine_keys[5], .engine_keys = prompt_.Keys(6, 10), .keys = std::span(chain).subspan(6)};
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, blocks), KvResult::kApplied);
  EXPECT_EQ(user_->Matched(kA, chain), 10);
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt_.Keys(7, 8)), KvResult::kApplied);
  EXPECT_EQ(user_->Matched(kA, chain), 7);
}

TEST_F(EngineKeysTest, ZeroAndTheGreatestAreLegalEngineKeys) {
  Prompt prompt(2, 3);
  prompt.engine_keys = {std::numeric_limits<EngineKey>::max(), 0, 77};
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt.Event(0, 2)), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt.Event(2, 3)), KvResult::kApplied) << "0 is a parent, not none";
  EXPECT_EQ(Matched(kA, prompt), 3);
  EXPECT_EQ(keys_->Removed(kDeviceA, {}, prompt.Keys(1, 2)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt), 1);
}

TEST_F(EngineKeysTest, R108CopiesWithoutTokensGoWhereTheirBlockIs) {
  const Prompt unknown(9, 2);
  ASSERT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(0, 20)), KvResult::kApplied);
  std::vector<EngineKey> offloaded(prompt_.engine_keys.begin(), prompt_.engine_keys.begin() + 10);
  offloaded.insert(offloaded.begin() + 4, unknown.engine_keys[0]);
  EXPECT_EQ(keys_->Stored(kHostA, {}, {.engine_keys = offloaded}), KvResult::kApplied);
  EXPECT_EQ(Stats().unknown_copies, 1);
  EXPECT_EQ(keys_->Removed(kDeviceA, {}, prompt_.engine_keys), KvResult::kApplied);
  EXPECT_EQ(Stats().unknown_removes, 30);
  EXPECT_EQ(Matched(kA, prompt_), 10) << "the host's stay";
  EXPECT_EQ(Stats().names, 10);
  EXPECT_EQ(keys_->Removed(kHostA, {}, prompt_.Keys(0, 10)), KvResult::kApplied);
  EXPECT_EQ(Stats().names, 0);
  EXPECT_FALSE(user_->index->WantsResync(kA));
}

TEST_F(EngineKeysTest, GroupsThatReportTheSameBlockAreCounted) {
  for (int group = 0; group < 2; ++group) (void)keys_->Stored(kDeviceA, {}, prompt_.Event(0, 1));
  (void)keys_->Removed(kDeviceA, {}, prompt_.Keys(0, 1));
  EXPECT_EQ(Matched(kA, prompt_), 1);
  (void)keys_->Removed(kDeviceA, {}, prompt_.Keys(0, 1));
  EXPECT_EQ(Matched(kA, prompt_), 0);
  EXPECT_EQ(Stats().names, 0);
}

TEST_F(EngineKeysTest, R70LargerEngineBlocksAreSoManyOfOurs) {
  const Prompt prompt(4, 4, 64);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt.Event()), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, prompt.Event(0, 2)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt), 16);
  EXPECT_EQ(Stats().names, 16);
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt.Keys(3, 4)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt), 12) << "192 tokens";
  EXPECT_EQ(Stats().names, 12);
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt.Keys(0, 3)), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, prompt), 8);
  EXPECT_EQ(keys_->Removed(kDeviceB, shared_, prompt.Keys(0, 2)), KvResult::kApplied);
  EXPECT_EQ(Stats().names, 0);
  EXPECT_EQ(user_->index->Stats().distinct_blocks, 0);
  // As many parts as there may be, and several such blocks in one event.
  const Prompt large(5, 3, 16 * 256);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, large.Event()), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, large), 3 * 256);
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, large.engine_keys), KvResult::kApplied);
  EXPECT_EQ(user_->index->Stats().distinct_blocks, 0);
  EXPECT_EQ(Stats().names, 0);
}

TEST_F(EngineKeysTest, R70OtherBlockSizesAreRefused) {
  for (const std::int32_t size : {8, 15, 24, 40, 16 * 257}) {
    EXPECT_EQ(keys_->Stored({{2, 1}}, shared_, Prompt(4, 2, size).Event()), KvResult::kBlockSize) << size;
  }
  EXPECT_EQ(ToString(KvResult::kBlockSize), "block_size");
  EXPECT_TRUE(user_->index->WantsResync({2, 1}));
  EXPECT_EQ(Stats().refused_events, 5);
  EXPECT_EQ(Stats().names, 0);
}

TEST_F(EngineKeysTest, R71CountsThatDoNotFitAreRefused) {
  const Prompt sparse(4, 5, 768);
  EngineBlocks blocks = sparse.Event();
  blocks.engine_keys = sparse.Keys(0, 1);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, blocks), KvResult::kMalformed) << "3,840 tokens, one hash";
  EXPECT_TRUE(user_->index->WantsResync(kA));
  EXPECT_EQ(keys_->Stored(kDeviceB, {}, sparse.Event()), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, sparse), 5 * 48);
  EXPECT_FALSE(user_->index->WantsResync(kB));
}

TEST_F(EngineKeysTest, MalformedEventsChangeNothing) {
  const std::vector<BlockKey> chain = LongChain(5, 3);
  const std::vector<BlockKey> zero{5, 0, 6};
  const std::vector<TokenId> many(static_cast<std::size_t>(16) * 65'537);
  const std::vector<EngineKey> names(65'537);
  EngineBlocks both = prompt_.Event(0, 3), self = prompt_.Event(3, 6), negative = prompt_.Event(0, 3);
  both.keys = chain;
  self.parent = prompt_.engine_keys[4];
  negative.block_size = -16;
  for (const EngineBlocks& blocks :
       {both, self, negative, EngineBlocks{.engine_keys = prompt_.Keys(0, 2), .keys = chain},
        EngineBlocks{.engine_keys = prompt_.Keys(0, 3), .keys = zero}, EngineBlocks{.tokens = prompt_.tokens},
        EngineBlocks{.engine_keys = names, .tokens = many}, EngineBlocks{.engine_keys = names}}) {
    EXPECT_EQ(keys_->Stored(kDeviceA, shared_, blocks), KvResult::kMalformed);
  }
  EXPECT_EQ(keys_->Stored(kDeviceA, {2}, prompt_.Event()), KvResult::kMalformed) << "no such domain";
  EXPECT_EQ(keys_->Removed(kDeviceA, {2}, prompt_.engine_keys), KvResult::kMalformed);
  const KvSource tier{kA, static_cast<StorageTier>(9)};
  EXPECT_EQ(keys_->Stored(tier, shared_, prompt_.Event()), KvResult::kMalformed);
  EXPECT_EQ(keys_->Stored(tier, {}, prompt_.Event(3, 5)), KvResult::kMalformed) << "not kept";
  EXPECT_EQ(keys_->Stored(tier, {}, {.engine_keys = prompt_.engine_keys}), KvResult::kMalformed);
  EXPECT_EQ(keys_->Removed(tier, shared_, prompt_.engine_keys), KvResult::kMalformed);
  EXPECT_EQ(Stats().names, 0);
  EXPECT_EQ(Stats().kept_blocks, 0);
  EXPECT_EQ(user_->index->Stats().distinct_blocks, 0);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, {}), KvResult::kApplied) << "of nothing";
}

TEST_F(EngineKeysTest, EventsOfTheDeadAreRefused) {
  ASSERT_EQ(keys_->Stored({{0, 2}}, {}, prompt_.Event(0, 5)), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(0, 5)), KvResult::kUnknownSource);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(5, 9)), KvResult::kUnknownSource);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(7, 9)), KvResult::kUnknownSource);
  EXPECT_EQ(keys_->Removed(kDeviceA, {}, prompt_.Keys(0, 5)), KvResult::kUnknownSource);
  EXPECT_EQ(Matched({0, 2}, prompt_), 5) << "its namesake's names are its own";
  for (const EndpointId nobody : {EndpointId{}, EndpointId{kMaxEndpoints, 1}, EndpointId{kMaxEndpoints + 7, 1}}) {
    for (const HashDomain domain : {HashDomain{}, shared_}) {
      EXPECT_EQ(keys_->Stored({nobody}, domain, prompt_.Event(0, 5)), KvResult::kUnknownSource);
      EXPECT_EQ(keys_->Stored({nobody}, domain, prompt_.Event(9, 12)), KvResult::kUnknownSource);
      EXPECT_EQ(keys_->Removed({nobody}, domain, prompt_.Keys(0, 5)), KvResult::kUnknownSource);
    }
    keys_->ClearEndpoint(nobody);
    keys_->RemoveEndpoint(nobody);
    EXPECT_EQ(keys_->Sequence(nobody, 0), KvSequence::kDuplicate);
  }
  EXPECT_EQ(Stats().names, 5);
  EXPECT_EQ(Stats().kept_blocks, 0);
}

TEST_F(EngineKeysTest, ASuccessorInASlotInheritsNoNames) {
  ASSERT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(0, 5)), KvResult::kApplied);
  user_->index->RemoveEndpoint(kA);  // Nobody tells EngineKeys.
  const EndpointId next{0, 2};
  EXPECT_EQ(keys_->Stored({next}, {}, prompt_.Event(5, 9)), KvResult::kUnknownParent);
  EXPECT_EQ(keys_->Stored({next}, {}, prompt_.Event(0, 5)), KvResult::kApplied);
  EXPECT_EQ(Matched(next, prompt_), 9);
  EXPECT_EQ(Stats().names, 9);
}

// ---- Unknown parents ----

TEST_F(EngineKeysTest, AnUnknownParentsBlocksCountWhenItComesAndWhatHangsOnThem) {
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(40, 50)), KvResult::kUnknownParent);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(20, 30)), KvResult::kUnknownParent);
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, prompt_.Event(30, 40)), KvResult::kUnknownParent);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(30, 40)), KvResult::kUnknownParent);
  EXPECT_EQ(Stats().kept_blocks, 40);
  EXPECT_EQ(Stats().names, 0);
  EXPECT_EQ(user_->index->Stats().distinct_blocks, 0);
  EXPECT_FALSE(user_->index->WantsResync(kA));
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 50);
  EXPECT_EQ(Stats().kept_blocks, 0);
  EXPECT_EQ(Stats().adopted_blocks, 40);
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, prompt_.Event(0, 30)), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, prompt_), 40) << "its own had been kept too";
}

TEST_F(EngineKeysTest, ParentsOfAnotherDomainAreNone) {
  ASSERT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(20, 30)), KvResult::kUnknownParent);
  EXPECT_EQ(keys_->Stored(kDeviceB, {}, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(Stats().kept_blocks, 10);
  EXPECT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 30);
}

TEST_F(EngineKeysTest, ARemovedKeptBlockIsNotStored) {
  (void)keys_->Stored(kDeviceA, shared_, prompt_.Event(20, 30));
  (void)keys_->Stored(kDeviceB, shared_, prompt_.Event(20, 30));
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt_.Keys(25, 26)), KvResult::kApplied);
  EXPECT_EQ(keys_->Removed(kHostA, shared_, prompt_.Keys(26, 27)), KvResult::kApplied) << "another tier's";
  EXPECT_EQ(Stats().removed_kept_blocks, 1);
  EXPECT_EQ(Stats().unknown_removes, 1);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 25);
  EXPECT_EQ(user_->index->HeldBlocks(kA), 29);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(25, 26)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 30) << "and what lies behind it counts again when it comes back";
  // All of them: nothing is left to be kept.
  (void)keys_->Stored(kDeviceA, shared_, prompt_.Event(40, 45));
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt_.Keys(40, 45)), KvResult::kApplied);
  EXPECT_EQ(Stats().kept_blocks, 0);
}

TEST_F(EngineKeysTest, ACopyThatIsKeptGoesBeforeTheOneThatIsHeld) {
  Prompt late(1, 50);
  late.engine_keys[9] = 12345;  // The parent has another name, so that only the event's own blocks are known.
  ASSERT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, late.Event(10, 20)), KvResult::kUnknownParent);
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt_.Keys(10, 20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 20);
  EXPECT_EQ(keys_->Removed(kDeviceA, shared_, prompt_.Keys(10, 20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 10);
}

class EngineKeysLimitsTest : public EngineKeysTest {
 protected:
  EngineKeysLimitsTest() : EngineKeysTest({.orphan_ttl = std::chrono::seconds(60), .max_orphan_blocks = 20}) {}
};

TEST_F(EngineKeysLimitsTest, NoMoreThanSoManyAreKept) {
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(20, 40)), KvResult::kUnknownParent);
  EXPECT_FALSE(user_->index->WantsResync(kA));
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(40, 41)), KvResult::kUnknownParent);
  EXPECT_TRUE(user_->index->WantsResync(kA));
  EXPECT_EQ(Stats().dropped_blocks, 1);
  EXPECT_EQ(Stats().kept_blocks, 20);
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, prompt_.Event(20, 41)), KvResult::kUnknownParent);
  EXPECT_TRUE(user_->index->WantsResync(kB));
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, prompt_.Event(20, 40)), KvResult::kUnknownParent) << "of each endpoint";
  EXPECT_EQ(Stats().kept_blocks, 40);
}

TEST_F(EngineKeysLimitsTest, KeptBlocksGrowOld) {
  (void)keys_->Stored(kDeviceA, shared_, prompt_.Event(20, 30));
  clock_.now += std::chrono::seconds(59);
  (void)keys_->Stored(kDeviceA, shared_, prompt_.Event(30, 35));
  EXPECT_EQ(Stats().kept_blocks, 15);
  EXPECT_FALSE(user_->index->WantsResync(kA));
  clock_.now += std::chrono::seconds(1);
  (void)keys_->Removed(kDeviceB, shared_, prompt_.Keys(0, 1));
  EXPECT_EQ(Stats().kept_blocks, 5);
  EXPECT_EQ(Stats().dropped_blocks, 10);
  EXPECT_TRUE(user_->index->WantsResync(kA));
  clock_.now += std::chrono::seconds(59);
  (void)keys_->Sweep(0);
  EXPECT_EQ(Stats().kept_blocks, 0);
  keys_->ClearEndpoint(kA);
  EXPECT_FALSE(user_->index->WantsResync(kA));
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(0, 20)), KvResult::kApplied);
  EXPECT_EQ(Matched(kA, prompt_), 20);
}

TEST_F(EngineKeysTest, R87WhatIsKeptGoesWithTheCache) {
  const auto keep = [&] {
    ASSERT_EQ(keys_->Stored(kDeviceA, {}, prompt_.Event(5, 9)), KvResult::kUnknownParent);
    ASSERT_EQ(keys_->Stored(kDeviceB, {}, prompt_.Event(5, 9)), KvResult::kUnknownParent);
    ASSERT_EQ(Stats().kept_blocks, 8);
  };
  keep();
  keys_->ClearEndpoint(kA);
  EXPECT_EQ(Stats().kept_blocks, 4);
  (void)keys_->Stored(kDeviceA, {}, prompt_.Event(0, 5));
  EXPECT_EQ(Matched(kA, prompt_), 5);
  keys_->ClearEndpoint(kA);
  keys_->ClearEndpoint(kB);
  EXPECT_EQ(keys_->Sequence(kA, 0), KvSequence::kNext);
  EXPECT_EQ(keys_->Sequence(kA, 1), KvSequence::kNext);
  keep();
  EXPECT_EQ(keys_->Sequence(kA, 0), KvSequence::kRestarted);
  EXPECT_EQ(Stats().kept_blocks, 4);
  keys_->RemoveEndpoint(kB);
  EXPECT_EQ(Stats().kept_blocks, 0);
  (void)keys_->Stored(kDeviceA, {}, prompt_.Event(5, 9));
  EXPECT_EQ(keys_->Stored({{0, 2}}, {}, prompt_.Event(20, 21)), KvResult::kUnknownParent) << "a successor";
  EXPECT_EQ(Stats().kept_blocks, 1);
}

// ---- Conflicts ----

TEST_F(EngineKeysTest, AKeyOfTwoBlocksStandsForTheFirst) {
  Prompt wrong(2, 10);
  wrong.engine_keys[4] = prompt_.engine_keys[30];
  ASSERT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event()), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, wrong.Event()), KvResult::kConflict);
  EXPECT_EQ(Matched(kB, wrong), 4) << "what came before it stands";
  EXPECT_EQ(Stats().conflicts, 1);
  EXPECT_EQ(Stats().names, 54);
  EXPECT_TRUE(user_->index->WantsResync(kB));
  EXPECT_FALSE(user_->index->WantsResync(kA));
  EXPECT_EQ(Matched(kA, prompt_), 50);
  // At once, so that nothing stands.
  wrong.engine_keys[0] = prompt_.engine_keys[31];
  EXPECT_EQ(keys_->Stored({{2, 1}}, shared_, wrong.Event(0, 4)), KvResult::kConflict);
  EXPECT_EQ(Matched({2, 1}, wrong), 0);
}

TEST_F(EngineKeysTest, AKeyTwiceInOneEventIsAConflict) {
  Prompt wrong(2, 10);
  wrong.engine_keys[6] = wrong.engine_keys[2];
  EXPECT_EQ(keys_->Stored(kDeviceA, shared_, wrong.Event()), KvResult::kConflict);
  EXPECT_EQ(Matched(kA, wrong), 6);
  EXPECT_EQ(Stats().names, 6);
}

TEST_F(EngineKeysTest, AKeyWhoseBlockIsGoneMayStandForAnother) {
  ASSERT_EQ(keys_->Stored(kDeviceA, shared_, prompt_.Event(0, 5)), KvResult::kApplied);
  user_->index->RemoveEndpoint(kA);
  Prompt other(2, 5);
  other.engine_keys = {prompt_.engine_keys.begin(), prompt_.engine_keys.begin() + 5};
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, other.Event()), KvResult::kApplied);
  EXPECT_EQ(Matched(kB, other), 5);
  EXPECT_EQ(Stats().conflicts, 0);
}

TEST_F(EngineKeysTest, ABlockThatTheIndexRefusesHasNoName) {
  // A conflict inside the index: the same key of ours behind two parents, which only given keys can have.
  std::vector<BlockKey> chain = LongChain(5, 6), wrong = LongChain(6, 6);
  wrong[3] = chain[5];
  ASSERT_EQ(keys_->Stored(kDeviceA, shared_, {.engine_keys = prompt_.Keys(0, 6), .keys = chain}), KvResult::kApplied);
  EXPECT_EQ(keys_->Stored(kDeviceB, shared_, {.engine_keys = prompt_.Keys(10, 16), .keys = wrong}),
            KvResult::kConflict);
  EXPECT_TRUE(user_->index->WantsResync(kB));
  (void)keys_->Sweep(kAll);
  EXPECT_EQ(Stats().names, 6 + 3 + 1) << "and the one whose key is known";
}

// ---- No leak ----

TEST_F(EngineKeysTest, R95ANameGoesWithItsLastHolder) {
  (void)keys_->Stored(kDeviceA, shared_, prompt_.Event());
  (void)keys_->Stored(kDeviceB, shared_, prompt_.Event());
  (void)keys_->Removed(kDeviceA, shared_, prompt_.engine_keys);
  EXPECT_EQ(Stats().names, 50);
  std::vector<EngineKey> reversed(prompt_.engine_keys.rbegin(), prompt_.engine_keys.rend());
  (void)keys_->Removed(kDeviceB, shared_, std::span(reversed).first(20));
  EXPECT_EQ(Stats().names, 30);
  (void)keys_->Removed(kDeviceB, shared_, reversed);
  EXPECT_EQ(Stats().names, 0);
  EXPECT_EQ(Stats().unknown_removes, 20);
}

TEST_F(EngineKeysTest, AnOwnDomainsNameGoesWithItsEndpointsBlock) {
  (void)keys_->Stored(kDeviceA, {}, prompt_.Event());
  (void)keys_->Stored(kDeviceB, {}, prompt_.Event());
  (void)keys_->Removed(kDeviceA, {}, prompt_.engine_keys);
  EXPECT_EQ(Stats().names, 50) << "though B holds them";
  (void)keys_->Stored(kDeviceA, {}, prompt_.Event());
  user_->index->RemoveEndpoint(kA);
  EXPECT_EQ(Stats().names, 100);
  EXPECT_EQ(keys_->Sweep(kAll), 50);
  EXPECT_EQ(Stats().names, 50);
}

TEST_F(EngineKeysTest, NamesOfBlocksThatVanishedAreSweptByTheWay) {
  std::vector<Prompt> prompts;
  for (std::uint64_t i = 0; i < 40; ++i) {
    prompts.emplace_back(100 + i, 100);
    ASSERT_EQ(keys_->Stored(i < 30 ? kDeviceA : kDeviceB, shared_, prompts.back().Event()), KvResult::kApplied);
  }
  user_->index->RemoveEndpoint(kA);
  while (user_->index->Sweep(1000) > 0) {
  }
  EXPECT_EQ(Stats().names, 4000);
  // Events about something else: a few blocks each, going round.
  for (int i = 0; i < 400; ++i) (void)keys_->Stored(kDeviceB, shared_, prompts[39].Event(0, 8));
  EXPECT_LT(Stats().names, 1000 + 3000 / 8);
  EXPECT_GT(Stats().swept_names, 2500);
  (void)keys_->Sweep(kAll);
  EXPECT_EQ(Stats().names, 1000);
  EXPECT_EQ(Matched(kB, prompts[35]), 100);
}

TEST_F(EngineKeysTest, ASweepLooksAtNoMoreThanItSays) {
  (void)keys_->Stored(kDeviceA, shared_, Prompt(8, 4000).Event());
  (void)keys_->Stored(kDeviceB, shared_, prompt_.Event());
  user_->index->RemoveEndpoint(kA);
  while (user_->index->Sweep(1000) > 0) {
  }
  EXPECT_EQ(keys_->Sweep(0), 0);
  EXPECT_LE(keys_->Sweep(100), 100);
  std::int64_t rounds = 0;
  for (; Stats().names > 50 && rounds < 1000; ++rounds) (void)keys_->Sweep(100);
  EXPECT_EQ(Stats().names, 50);
  EXPECT_GT(rounds, 30);
}

TEST_F(EngineKeysTest, R88EndpointsThatComeAndGoLeaveNothing) {
  const Prompt common(7, 100);
  (void)keys_->Stored(kDeviceA, {}, common.Event());
  std::int64_t bytes = 0;
  for (std::uint32_t i = 1; i <= (kSanitized ? 100u : 1000u); ++i) {
    const EndpointId id{1 + i % 3, i};
    ASSERT_EQ(keys_->Stored({id}, {}, common.Event()), KvResult::kApplied);
    ASSERT_EQ(keys_->Stored({id}, {}, Prompt(1000 + i, 900).Event()), KvResult::kApplied);
    ASSERT_EQ(keys_->Stored({id}, {}, prompt_.Event(3, 9)), KvResult::kUnknownParent);
    if (i % 2 == 0) keys_->RemoveEndpoint(id);
    else user_->index->RemoveEndpoint(id), (void)keys_->Stored({{id.slot, i + 1}}, {}, prompt_.Event(0, 1));
    if (i == 10) bytes = Stats().bytes;
    ASSERT_LE(Stats().names, 3100);
  }
  EXPECT_LE(Stats().bytes, bytes + (1 << 20));
  keys_->ClearEndpoint(kA);
  for (std::uint32_t slot = 1; slot <= 3; ++slot) keys_->RemoveEndpoint({slot, 2000});
  EXPECT_EQ(Stats().names, 0);
  EXPECT_LE(Stats().kept_blocks, 0);
}

TEST_F(EngineKeysTest, R94MemoryComesBackWhenAllIsRemoved) {
  const std::int64_t before = Stats().bytes;
  const std::int64_t prompts = kSanitized ? 20 : 200;
  std::int64_t most = 0;
  for (const bool one_by_one : {true, false}) {
    for (std::int64_t i = 0; i < prompts; ++i) {
      const HashDomain domain = i % 2 == 0 ? shared_ : HashDomain{};
      ASSERT_EQ(keys_->Stored(kDeviceA, domain, Prompt(100 + static_cast<std::uint64_t>(i), 2000).Event()),
                KvResult::kApplied);
    }
    EXPECT_EQ(Stats().names, prompts * 2000);
    most = Stats().bytes;
    EXPECT_LT(static_cast<double>(most - before) / static_cast<double>(prompts * 2000), kSanitized ? 40 : 26.5);
    if (!one_by_one) {
      keys_->ClearEndpoint(kA);
      while (user_->index->Sweep(1000) > 0) {
      }
      (void)keys_->Sweep(kAll);
    }
    for (std::int64_t i = 0; one_by_one && i < prompts; ++i) {
      const Prompt prompt(100 + static_cast<std::uint64_t>(i), 2000);
      ASSERT_EQ(keys_->Removed(kDeviceA, i % 2 == 0 ? shared_ : HashDomain{}, prompt.engine_keys), KvResult::kApplied);
    }
    EXPECT_EQ(Stats().names, 0);
    EXPECT_LE(Stats().bytes, before + (300 << 10));
  }
}

// ---- The cap ----

class EngineKeysCapTest : public EngineKeysTest {
 protected:
  EngineKeysCapTest() : EngineKeysTest({}, {.max_bytes = std::int64_t{2} << 20}) {}
  std::int64_t Fill(const KvSource& source) {
    for (std::uint64_t i = 0;; ++i) {
      const KvResult result = keys_->Stored(source, shared_, Prompt(100 + i, 500).Event());
      if (result != KvResult::kApplied) {
        EXPECT_EQ(result, KvResult::kNoRoom);
        return static_cast<std::int64_t>(i);
      }
      if (i > 1000) return -1;
    }
  }
};

TEST_F(EngineKeysCapTest, R98R99FullItRefusesAndHoldsItsCap) {
  const std::int64_t prompts = Fill(kDeviceA);
  ASSERT_GT(prompts, 50) << "some 2 MiB of names";
  EXPECT_TRUE(user_->index->WantsResync(kA));
  EXPECT_EQ(Stats().cap_hits, 1);
  EXPECT_LE(Stats().peak_bytes, std::int64_t{2} << 20);
  // Every block in the index has its name, and can be removed.
  EXPECT_EQ(Stats().names, user_->index->Stats().distinct_blocks);
  for (std::int64_t i = 0; i <= prompts; ++i) {
    (void)keys_->Removed(kDeviceA, shared_, Prompt(100 + static_cast<std::uint64_t>(i), 500).engine_keys);
  }
  EXPECT_EQ(user_->index->Stats().distinct_blocks, 0);
  EXPECT_EQ(Stats().names, 0);
  keys_->ClearEndpoint(kA);
  EXPECT_EQ(Fill(kDeviceA), prompts) << "and all of the room is there again";
}

TEST_F(EngineKeysCapTest, NamesOfBlocksThatAreGoneMakeRoom) {
  ASSERT_GT(Fill(kDeviceA), 50);
  user_->index->RemoveEndpoint(kA);
  while (user_->index->Sweep(1000) > 0) {
  }
  (void)keys_->Stored(kDeviceB, shared_, prompt_.Event());  // So that the index is not empty.
  for (std::uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(keys_->Stored(kDeviceB, shared_, Prompt(900 + i, 500).Event()), KvResult::kApplied) << i;
  }
}

TEST_F(EngineKeysCapTest, FullItKeepsNoOrphans) {
  ASSERT_GT(Fill(kDeviceA), 50);
  std::int64_t kept = 0;
  for (std::uint32_t slot = 2; slot < 100 && Stats().dropped_blocks == 0; ++slot, ++kept) {
    for (std::uint64_t i = 0; i < 8; ++i) {
      EXPECT_EQ(keys_->Stored({{slot, 1}}, shared_, Prompt(500 + i, 500).Event(1, 500)), KvResult::kUnknownParent);
    }
  }
  EXPECT_GT(Stats().dropped_blocks, 0);
  EXPECT_LE(Stats().peak_bytes, std::int64_t{2} << 20);
}

TEST(EngineKeysIndexCapTest, WhatTheIndexHasNoRoomForHasNoName) {
  IndexUser user({.mode = IndexMode::kExact, .max_bytes = std::int64_t{4} << 20});
  const std::shared_ptr<EngineKeys> keys = *EngineKeys::Create(user.index);
  KvResult result = KvResult::kApplied;
  for (std::uint64_t i = 0; i < 3000 && result == KvResult::kApplied; ++i) {
    result = keys->Stored(kDeviceA, {}, Prompt(100 + i, 100).Event());
  }
  EXPECT_EQ(result, KvResult::kNoRoom);
  EXPECT_EQ(keys->Stats().cap_hits, 0);
  EXPECT_GE(keys->Stats().names, user.index->HeldBlocks(kA));
  (void)keys->Sweep(kAll);
  EXPECT_EQ(keys->Stats().names, user.index->HeldBlocks(kA));
  EXPECT_TRUE(keys->Audit().ok()) << keys->Audit();
}

// ---- Making one ----

TEST(EngineKeysCreateTest, SaysWhatIsWrong) {
  EXPECT_THAT(EngineKeys::Create(nullptr).status().ToString(), HasSubstr("EngineKeys.index"));
  const std::shared_ptr<PrefixIndex> approximate = *PrefixIndex::Create({});
  EXPECT_THAT(EngineKeys::Create(approximate).status().ToString(), HasSubstr("want an exact prefix index"));
  const std::shared_ptr<PrefixIndex> exact = *PrefixIndex::Create({.mode = IndexMode::kExact});
  for (const std::int64_t bytes : {std::int64_t{0}, (std::int64_t{2} << 20) - 1, (std::int64_t{128} << 30) + 1}) {
    const absl::Status status = EngineKeys::Create(exact, {.max_bytes = bytes}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.ToString(), HasSubstr("EngineKeysOptions.max_bytes: want 2097152 .. 137438953472, got "));
  }
  EXPECT_TRUE(EngineKeys::Create(exact, {.max_bytes = std::int64_t{128} << 30}).ok());
}

TEST_F(EngineKeysTest, DomainsAreByNameAndNoMoreThanSoMany) {
  EXPECT_EQ(*keys_->Domain("shared"), shared_);
  EXPECT_NE(*keys_->Domain("other"), shared_);
  EXPECT_EQ(keys_->Domain("").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(keys_->Domain(std::string(256, 'x')).ok());
  EXPECT_EQ(keys_->Domain(std::string(257, 'x')).status().code(), absl::StatusCode::kInvalidArgument);
  for (std::size_t i = 3; i < kMaxHashDomains; ++i) ASSERT_TRUE(keys_->Domain(std::to_string(i)).ok()) << i;
  EXPECT_EQ(keys_->Domain("one more").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*keys_->Domain("shared"), shared_);
}

// ---- Threads ----

TEST(EngineKeysRaceTest, EndpointsOnThreadsOfTheirOwnEndUpExact) {
  constexpr std::uint32_t kThreads = 4, kPrompts = 24;
  IndexUser user({.mode = IndexMode::kExact});
  const std::shared_ptr<EngineKeys> keys = *EngineKeys::Create(user.index);
  const HashDomain domain = *keys->Domain("shared");
  std::vector<Prompt> prompts;
  for (std::uint64_t i = 0; i < kPrompts; ++i) prompts.emplace_back(i + 1, 40);
  std::vector<std::vector<std::size_t>> held(kThreads, std::vector<std::size_t>(kPrompts));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      TestRandom random(testing_support::TestSeed(77) + t);
      const KvSource source{{t, 1}};
      const HashDomain mine = t == 3 ? HashDomain{} : domain;
      for (int i = 0; i < (kSanitized ? 3'000 : 30'000); ++i) {
        const std::size_t p = random.Below(kPrompts);
        std::size_t& blocks = held[t][p];
        const std::size_t to = random.Below(41);
        if (to > blocks) {
          const KvResult result = keys->Stored(source, mine, prompts[p].Event(blocks, to));
          ASSERT_EQ(result, KvResult::kApplied) << ToString(result);
        } else {
          std::vector<EngineKey> freed(prompts[p].engine_keys.begin() + static_cast<std::ptrdiff_t>(to),
                                       prompts[p].engine_keys.begin() + static_cast<std::ptrdiff_t>(blocks));
          std::reverse(freed.begin(), freed.end());
          ASSERT_EQ(keys->Removed(source, mine, freed), KvResult::kApplied);
        }
        blocks = to;
      }
    });
  }
  std::thread other([&] {
    IndexUser mine(user.index);
    while (!stop.load()) {
      (void)mine.Matched({0, 1}, prompts[0].request());
      (void)keys->Sweep(100);
      (void)keys->Stats();
      (void)user.index->Sweep(10);
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  other.join();
  ASSERT_TRUE(keys->Audit().ok()) << keys->Audit();
  ASSERT_TRUE(user.index->Audit().ok()) << user.index->Audit();
  EXPECT_EQ(keys->Stats().unknown_removes, 0);
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    for (std::size_t p = 0; p < kPrompts; ++p) {
      ASSERT_EQ(user.Matched({t, 1}, prompts[p].request()), static_cast<std::int64_t>(held[t][p]));
    }
  }
}

}  // namespace
}  // namespace tokroute

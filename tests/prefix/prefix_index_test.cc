#include "tokroute/prefix/prefix_index.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_run.h"
#include "tokroute/internal/mutex.h"

namespace tokroute {
namespace {

using ::testing::HasSubstr;

static_assert(std::is_trivially_copyable_v<PrefixReceipt> && sizeof(PrefixReceipt) <= 32);

PrefixIndexOptions Blocks(std::int64_t capacity) { return {.default_capacity_tokens = capacity * 16}; }

std::vector<TokenId> Tokens(std::size_t count, TokenId first = 1) {
  std::vector<TokenId> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// The first `blocks` of a prompt.
std::span<const BlockKey> First(const std::vector<BlockKey>& keys, std::size_t blocks) {
  return std::span(keys).first(blocks);
}

void ExpectSound(const PrefixIndex& index) {
  const absl::Status audit = index.Audit();
  EXPECT_TRUE(audit.ok()) << audit;
}

// ---- Options ----

TEST(PrefixIndexTest, OptionsAreCheckedAndNamed) {
  const auto error = [](const PrefixIndexOptions& options) {
    return std::string(PrefixIndex::Create(options).status().message());
  };
  EXPECT_THAT(error({.block_size = 15}), HasSubstr("block_size: want 16 .. 512, got 15"));
  EXPECT_THAT(error({.block_size = 513}), HasSubstr("block_size"));
  EXPECT_THAT(error({.block_size = 0}), HasSubstr("block_size"));
  EXPECT_THAT(error({.scheme = static_cast<KeyScheme>(7)}), HasSubstr("scheme"));
  EXPECT_THAT(error({.scheme = KeyScheme::kXxh64Chain, .key_seed = 5}), HasSubstr("key_seed"));
  EXPECT_THAT(error({.block_size = 100, .default_capacity_tokens = 99}),
              HasSubstr("default_capacity_tokens: want 100 .. 1099511627776, got 99"));
  EXPECT_THAT(error({.default_capacity_tokens = -1}), HasSubstr("default_capacity_tokens"));
  EXPECT_THAT(error({.default_capacity_tokens = (std::int64_t{1} << 40) + 1}), HasSubstr("default_capacity_tokens"));
  EXPECT_THAT(error({.max_bytes = (4 << 20) - 1}), HasSubstr("max_bytes: want 4194304 .. 137438953472, got 4194303"));
  EXPECT_THAT(error({.max_bytes = (std::int64_t{128} << 30) + 1}), HasSubstr("max_bytes"));
  for (const std::int32_t block_size : {16, 17, 100, 512}) {
    IndexUser user({.block_size = block_size, .default_capacity_tokens = 512, .max_bytes = 4 << 20});
    EXPECT_EQ(user.index->options().block_size, block_size);
    EXPECT_EQ(user.index->key_options().block_size, block_size);
  }
}

// ---- What is credited ----

TEST(PrefixIndexTest, CreditsEachEndpointItsDeepestDepthOnceBySlot) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> one = ChainKeys({1, 2, 3, 4, 5, 6}), other = ChainKeys({1, 2, 3, 9, 9});
  user.Store(kC, one);
  user.Store(kA, First(one, 4));
  user.Store(kB, other);
  const PrefixMatch& match = user.Match(one);
  EXPECT_EQ(match.prompt_blocks(), 6);
  ASSERT_EQ(match.holders().size(), 3u);
  EXPECT_EQ(match.holders()[0].endpoint, kA);
  EXPECT_EQ(match.holders()[0].blocks, 4);
  EXPECT_EQ(match.holders()[1].endpoint, kB);
  EXPECT_EQ(match.holders()[1].blocks, 3);
  EXPECT_EQ(match.holders()[2].endpoint, kC);
  EXPECT_EQ(match.holders()[2].blocks, 6);
  EXPECT_EQ(match.BlocksOf({2, 2}), 0) << "another incarnation";
  EXPECT_EQ(user.Matched(kB, other), 5);
  EXPECT_EQ(user.Matched(kA, First(one, 2)), 2);
  EXPECT_EQ(user.Matched(kA, ChainKeys({7})), 0);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 8);
  EXPECT_EQ(user.index->Stats().holder_blocks, 15);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, R65AnAdapterOrR67ASaltSharesNothing) {
  IndexUser user(Blocks(1000));
  const std::vector<TokenId> tokens = Tokens(160);
  user.Store(kA, {.tokens = tokens, .model = "base"});
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .model = "base"}), 10);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .model = "base", .lora = "fin"}), 0);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .model = "base", .cache_salt = "s1"}), 0);
  user.Store(kB, {.tokens = tokens, .model = "base", .cache_salt = "s1"});
  EXPECT_EQ(user.Matched(kB, {.tokens = tokens, .model = "base", .cache_salt = "s1"}), 10);
  EXPECT_EQ(user.Matched(kB, {.tokens = tokens, .model = "base", .cache_salt = "s2"}), 0);
}

TEST(PrefixIndexTest, R69AnotherPictureMatchesTheTextBeforeIt) {
  IndexUser user(Blocks(1000));
  const std::vector<TokenId> tokens(192, 5);
  const MediaSpan x[] = {{.first_token = 64, .token_count = 64, .content_hash = 0x10000}};
  const MediaSpan y[] = {{.first_token = 64, .token_count = 64, .content_hash = 0x20000}};
  user.Store(kA, {.tokens = tokens, .media = x});
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .media = x}), 12);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .media = y}), 4);
}

TEST(PrefixIndexTest, R75TooShortIsNotAMiss) {
  IndexUser user(Blocks(100));
  const std::vector<TokenId> tokens = Tokens(16);
  user.keys.Reset(user.index->key_options(), {.tokens = std::span(tokens).first(15)});
  user.index->Match(user.keys, user.match);
  EXPECT_EQ(user.match.prompt_blocks(), 0);
  EXPECT_FALSE(user.index->Record(kA, user.keys, nullptr));
  EXPECT_EQ(user.index->Stats().refused_records, 0);
  user.keys.Reset(user.index->key_options(), {.tokens = tokens});
  user.index->Match(user.keys, user.match);
  EXPECT_EQ(user.match.prompt_blocks(), 1);
  EXPECT_TRUE(user.match.holders().empty());
}

TEST(PrefixIndexTest, R76OnlyThePathFromTheRootCounts) {
  IndexUser user(Blocks(100));
  const std::vector<TokenId> a = Tokens(16, 1), b = Tokens(16, 100);
  std::vector<TokenId> ba = b;
  ba.insert(ba.end(), a.begin(), a.end());
  user.Store(kA, {.tokens = a});
  user.Store(kB, {.tokens = b});
  EXPECT_EQ(user.Matched(kB, {.tokens = ba}), 1);
  EXPECT_EQ(user.Matched(kA, {.tokens = ba}), 0);
}

TEST(PrefixIndexTest, R78ADifferentSuffixKeepsThePrefixAndR79ThePartialBlockNeverMatches) {
  IndexUser user(Blocks(1000));
  std::vector<TokenId> tokens = Tokens(1600);
  user.Store(kA, {.tokens = tokens});
  tokens.back() ^= 1;
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens}), 99);
  user.Store(kB, {.tokens = std::span(tokens).first(1007)});
  EXPECT_EQ(user.Matched(kB, {.tokens = std::span(tokens).first(1007)}), 62) << "1007 = 62 * 16 + 15";
}

TEST(PrefixIndexTest, KeysMadeWithOtherOptionsMatchNothing) {
  IndexUser user(Blocks(1000));
  const std::vector<TokenId> tokens = Tokens(1600);
  user.Store(kA, {.tokens = tokens});
  for (const KeyOptions& other :
       {KeyOptions{.block_size = 32}, KeyOptions{.seed = 1}, KeyOptions{.scheme = KeyScheme::kXxh64Chain}}) {
    user.keys.Reset(other, {.tokens = tokens});
    user.index->Match(user.keys, user.match);
    EXPECT_TRUE(user.match.holders().empty());
    EXPECT_EQ(user.match.prompt_blocks(), 0);
    EXPECT_FALSE(user.index->Record(kA, user.keys, nullptr));
  }
  EXPECT_EQ(user.index->Stats().refused_records, 3);
}

TEST(PrefixIndexTest, APromptIsHashedAsFarAsItIsHeld) {
  IndexUser user(Blocks(10'000));
  const std::vector<TokenId> tokens = Tokens(16 * 5000);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens}), 0);
  EXPECT_EQ(user.keys.ready_blocks(), 1);
  user.Store(kA, {.tokens = std::span(tokens).first(16 * 200)});
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens}), 200);
  EXPECT_EQ(user.keys.ready_blocks(), 201);
  user.Store(kA, {.tokens = tokens});
  EXPECT_EQ(user.keys.ready_blocks(), 5000);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens}), 5000);
}

TEST(PrefixIndexTest, TheReferencesKeySchemeWorksToo) {
  IndexUser user({.scheme = KeyScheme::kXxh64Chain});
  const std::vector<TokenId> tokens = Tokens(160);
  user.Store(kA, {.tokens = tokens, .model = "m"});
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .model = "m"}), 10);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens, .model = "n"}), 0);
}

// ---- Tentative and real ----

TEST(PrefixIndexTest, AnAbortBeforeTheFirstTokenTakesBack) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3, 4, 5, 6});
  user.Store(kA, First(keys, 2));
  PrefixReceipt receipt = user.Record(kA, keys);
  EXPECT_EQ(receipt.blocks, 6);
  EXPECT_EQ(user.Matched(kA, keys), 6);
  user.index->OnReleased(receipt, true);
  EXPECT_FALSE(receipt);
  EXPECT_EQ(user.Matched(kA, keys), 2);
  EXPECT_EQ(user.index->Stats().taken_back_blocks, 4);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 2);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, AnAbortAfterTheFirstTokenKeeps) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3});
  PrefixReceipt receipt = user.Record(kA, keys);
  user.index->OnFirstToken(receipt);
  user.index->OnReleased(receipt, true);
  EXPECT_EQ(user.Matched(kA, keys), 3);
  EXPECT_EQ(user.index->Stats().taken_back_blocks, 0);
}

TEST(PrefixIndexTest, AnEndWithoutAFirstTokenConfirms) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3});
  PrefixReceipt receipt = user.Record(kA, keys);
  user.index->OnReleased(receipt, false);
  EXPECT_EQ(user.Matched(kA, keys), 3);
}

TEST(PrefixIndexTest, AnotherLiveRequestKeepsWhatAnAbortLetGo) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3, 4});
  PrefixReceipt longer = user.Record(kA, keys), shorter = user.Record(kA, First(keys, 2));
  user.index->OnReleased(longer, true);
  EXPECT_EQ(user.Matched(kA, keys), 2) << "tentative, the shorter one still relies on it";
  user.index->OnReleased(shorter, true);
  EXPECT_EQ(user.Matched(kA, keys), 0);
  EXPECT_EQ(user.index->Stats().taken_back_blocks, 4);

  PrefixReceipt first = user.Record(kA, keys), second = user.Record(kA, keys), elsewhere = user.Record(kB, keys);
  user.index->OnFirstToken(second);
  user.index->OnReleased(second, true);
  user.index->OnReleased(first, true);
  EXPECT_EQ(user.Matched(kA, keys), 4) << "the second had made them real for both";
  user.index->OnReleased(elsewhere, true);
  EXPECT_EQ(user.Matched(kB, keys), 0) << "another endpoint's confirmation says nothing about this one";
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, AForkBetweenKeepsReceiptsPinsAndConfirmation) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3, 4, 5, 6, 7, 8});
  PrefixReceipt whole = user.Record(kA, keys);
  PrefixReceipt half = user.Record(kB, First(keys, 4));           // Ends inside.
  PrefixReceipt fork = user.Record(kC, ChainKeys({1, 2, 9, 9}));  // Forks inside what was just split.
  EXPECT_EQ(user.index->Stats().runs, 2) << "nothing is split";
  user.index->OnReleased(half, true);
  EXPECT_EQ(user.Matched(kB, keys), 0);
  user.index->OnFirstToken(whole);
  user.index->OnReleased(whole, true);
  EXPECT_EQ(user.Matched(kA, keys), 8);
  user.index->OnReleased(fork, true);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 8);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, DoubledLateAndForeignReceiptsAreHarmless) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3});
  PrefixReceipt receipt = user.Record(kA, keys), copy = receipt, late = receipt;
  user.index->OnReleased(receipt, true);
  user.index->OnFirstToken(copy);  // After the release.
  user.index->OnReleased(copy, false);
  user.index->OnReleased(receipt, false);
  EXPECT_EQ(user.Matched(kA, keys), 0);

  PrefixReceipt next = user.Record(kB, keys);  // Takes the same entry.
  user.index->OnReleased(late, true);
  EXPECT_EQ(user.Matched(kB, keys), 3) << "a stale receipt must not release a later one";
  user.index->OnReleased(next, false);

  PrefixReceipt none, made_up{.serial = 12345, .entry = 77, .blocks = 3}, wild{.serial = 1, .entry = ~0u, .blocks = 3};
  for (PrefixReceipt* odd : {&none, &made_up, &wild}) {
    user.index->OnFirstToken(*odd);
    EXPECT_FALSE(user.index->Move(*odd, kA, nullptr));
    user.index->OnReleased(*odd, true);
  }
  EXPECT_EQ(user.index->Stats().live_receipts, 0);
  EXPECT_EQ(user.Matched(kB, keys), 3);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, MoveRecordsElsewhereAndReleasesHere) {
  IndexUser user(Blocks(100));
  ScriptedFleet fleet;
  const EndpointId a = fleet.Add(0), b = fleet.Add(1);
  const FleetView view = fleet.View();
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3, 4});
  user.Store(a, First(keys, 1));
  PrefixReceipt receipt = user.Record(a, keys, &view);
  PrefixReceipt moved = user.index->Move(receipt, b, &view);
  EXPECT_FALSE(receipt);
  EXPECT_EQ(moved.blocks, 4);
  EXPECT_EQ(user.Matched(a, keys), 1);
  EXPECT_EQ(user.Matched(b, keys), 4);

  // The endpoint dies under the request: the path is still known, so the retry is recorded.
  fleet.Remove(b);
  user.index->RemoveEndpoint(b);
  EXPECT_EQ(user.index->Sweep(1000), 0);
  EXPECT_EQ(user.index->Stats().pending_sweep, 1) << "what the request has pinned waits for its end";
  EXPECT_EQ(user.Match(keys).holders().size(), 1u);
  const EndpointId c = fleet.Add(2);
  moved = user.index->Move(moved, c, &view);
  EXPECT_EQ(moved.blocks, 4);
  EXPECT_EQ(user.Matched(c, keys), 4);

  // To a dead one: nothing there, and the old one is released all the same.
  PrefixReceipt nowhere = user.index->Move(moved, b, &view);
  EXPECT_FALSE(nowhere);
  EXPECT_FALSE(moved);
  EXPECT_EQ(user.Matched(c, keys), 0);
  EXPECT_EQ(user.index->Stats().live_receipts, 0);

  // After the first token what the old endpoint has is real.
  receipt = user.Record(a, keys, &view);
  user.index->OnFirstToken(receipt);
  moved = user.index->Move(receipt, c, &view);
  EXPECT_EQ(user.Matched(a, keys), 4);
  user.index->OnReleased(moved, true);
  EXPECT_EQ(user.Matched(c, keys), 0);

  // To itself: one pin replaces the other.
  receipt = user.Record(c, keys, &view);
  moved = user.index->Move(receipt, c, &view);
  EXPECT_EQ(user.Matched(c, keys), 4);
  user.index->OnReleased(moved, true);
  EXPECT_EQ(user.Matched(c, keys), 0);
  ExpectSound(*user.index);
}

// ---- Capacity and eviction ----

TEST(PrefixIndexTest, TheLeastRecentlyUsedGoesFirstFromItsTail) {
  IndexUser user(Blocks(10));
  const std::vector<BlockKey> old = ChainKeys({1, 2, 3, 4, 5}), young = ChainKeys({6, 7, 8, 9, 10});
  user.Store(kA, old);
  user.Store(kA, young);
  user.Store(kA, First(old, 2));  // Used again: these two are the most recent now.
  user.Store(kA, ChainKeys({11, 12, 13, 14, 15}));
  EXPECT_EQ(user.Matched(kA, old), 2);
  EXPECT_EQ(user.Matched(kA, young), 3) << "three of the old tail, then two of the young one's";
  EXPECT_EQ(user.index->HeldBlocks(kA), 10);
  EXPECT_EQ(user.index->Stats().evicted_blocks, 5);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, PinnedBlocksStayAndWhatDoesNotFitIsLeftOut) {
  IndexUser user(Blocks(10));
  const std::vector<BlockKey> first = ChainKeys({1, 2, 3, 4, 5, 6}), second = ChainKeys({11, 12, 13, 14, 15, 16});
  PrefixReceipt one = user.Record(kA, first), two = user.Record(kA, second);
  EXPECT_EQ(two.blocks, 4);
  EXPECT_EQ(user.Matched(kA, first), 6);
  EXPECT_EQ(user.Matched(kA, second), 4);
  PrefixReceipt three = user.Record(kA, ChainKeys({21}));
  EXPECT_FALSE(three);
  EXPECT_EQ(user.index->Stats().truncated_records, 2);
  EXPECT_EQ(user.index->Stats().refused_records, 0);
  EXPECT_EQ(user.index->HeldBlocks(kA), 10);
  user.index->OnReleased(one, false);
  user.index->OnReleased(two, false);
  user.Store(kA, LongChain(99, 25));
  EXPECT_EQ(user.Matched(kA, LongChain(99, 25)), 10) << "a prompt beyond the capacity: its leading part";
  EXPECT_EQ(user.index->HeldBlocks(kA), 10);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 10);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, ATruncatedRecordMayEndInsideAnothersRun) {
  IndexUser user(Blocks(5));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3, 4, 5, 6, 7, 8});
  ASSERT_TRUE(user.index->SetCapacity(kB, 160).ok());
  user.Store(kB, keys);
  PrefixReceipt pin = user.Record(kA, ChainKeys({21, 22}));
  PrefixReceipt receipt = user.Record(kA, keys);
  EXPECT_EQ(receipt.blocks, 3);
  EXPECT_EQ(user.Matched(kA, keys), 3);
  EXPECT_EQ(user.Matched(kB, keys), 8);
  user.index->OnReleased(receipt, true);
  user.index->OnReleased(pin, true);
  EXPECT_EQ(user.index->HeldBlocks(kA), 0);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 8);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, CapacityMayComeBeforeAndChangeAtAnyTime) {
  IndexUser user(Blocks(10));
  PrefixIndex& index = *user.index;
  const std::vector<BlockKey> keys = LongChain(1, 30);
  ASSERT_TRUE(index.SetCapacity(kA, 20 * 16 + 15).ok());
  user.Store(kA, keys);
  EXPECT_EQ(index.HeldBlocks(kA), 20);
  ASSERT_TRUE(index.SetCapacity(kA, 5 * 16).ok());
  EXPECT_EQ(index.HeldBlocks(kA), 5);
  EXPECT_EQ(index.Stats().distinct_blocks, 5);
  PrefixReceipt receipt = user.Record(kA, First(keys, 5));
  ASSERT_TRUE(index.SetCapacity(kA, 2 * 16).ok());
  EXPECT_EQ(index.HeldBlocks(kA), 5) << "pinned";
  index.OnReleased(receipt, false);
  EXPECT_EQ(index.HeldBlocks(kA), 2);
  ASSERT_TRUE(index.SetCapacity(kA, 0).ok()) << "unknown: the default";
  user.Store(kA, keys);
  EXPECT_EQ(index.HeldBlocks(kA), 10);
  ASSERT_TRUE(index.SetCapacity(kA, 15).ok()) << "less than a block";
  EXPECT_EQ(index.HeldBlocks(kA), 0);
  EXPECT_FALSE(user.Record(kA, keys));
  EXPECT_EQ(index.Stats().distinct_blocks, 0);
  user.Store(kB, keys);
  EXPECT_EQ(index.HeldBlocks(kB), 10) << "nobody else's business";

  EXPECT_EQ(index.SetCapacity(kA, -1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(index.SetCapacity(kA, (std::int64_t{1} << 40) + 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(index.SetCapacity({0, 0}, 100).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(index.SetCapacity({kMaxEndpoints, 1}, 100).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(index.SetCapacity({0, 2}, 32).ok());
  EXPECT_EQ(index.SetCapacity(kA, 100).code(), absl::StatusCode::kNotFound) << "replaced";
  user.Store({0, 2}, keys);
  EXPECT_EQ(index.HeldBlocks({0, 2}), 2);
  ExpectSound(index);
}

TEST(PrefixIndexTest, R100AHotPrefixSurvivesAColdStream) {
  IndexUser user(Blocks(1000));
  const std::vector<BlockKey> hot = LongChain(1, 100);
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    user.Store(kA, hot);
    user.Store(kA, LongChain(1000 + i, 7));
    ASSERT_EQ(user.Matched(kA, hot), 100);
    ASSERT_LE(user.index->HeldBlocks(kA), 1000);
  }
  EXPECT_EQ(user.index->HeldBlocks(kA), 1000);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 1000);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, EvictionNeverCutsUnderALiveChild) {
  // Many questions behind one system prompt: whatever goes, the prompt goes last.
  IndexUser user(Blocks(50));
  std::vector<std::uint64_t> contents(20, 7);
  const std::vector<BlockKey> system = ChainKeys(contents);
  for (std::uint64_t i = 0; i < 500; ++i) {
    contents.resize(20);
    contents.insert(contents.end(), {1000 + i, i, i});
    const std::vector<BlockKey> keys = ChainKeys(contents);
    user.Store(kA, keys);
    ASSERT_EQ(user.Matched(kA, keys), 23);
  }
  EXPECT_EQ(user.Matched(kA, system), 20);
  ExpectSound(*user.index);
}

// ---- Endpoints come and go ----

TEST(PrefixIndexTest, R85ARemovedEndpointLeavesNothing) {
  IndexUser user(Blocks(200'000));
  PrefixIndex& index = *user.index;
  user.Store(kB, LongChain(7, 3));
  index.RemoveEndpoint(kB);
  const std::int64_t base = index.Stats().bytes;
  user.Store(kA, LongChain(1, 100'000));
  EXPECT_EQ(index.Stats().distinct_blocks, 100'000);
  index.RemoveEndpoint(kA);
  EXPECT_TRUE(user.Match(LongChain(1, 100)).holders().empty());
  while (index.Sweep(64) > 0) {
  }
  EXPECT_EQ(index.Stats().distinct_blocks, 0);
  EXPECT_EQ(index.Stats().pending_sweep, 0);
  EXPECT_EQ(index.Stats().endpoints, 0);
  EXPECT_EQ(index.Stats().bytes, base);
  EXPECT_FALSE(user.Record(kA, LongChain(1, 5))) << "its id stays dead";
  EXPECT_EQ(index.Stats().refused_records, 1);
  user.Store({0, 2}, LongChain(1, 5));
  EXPECT_EQ(user.Matched({0, 2}, LongChain(1, 5)), 5);
  ExpectSound(index);
}

TEST(PrefixIndexTest, WhatAnotherThreadReleasedMakesRoom) {
  IndexUser user(Blocks(10));
  PrefixReceipt pinned = user.Record(kA, LongChain(1, 10));
  EXPECT_EQ(user.Record(kA, LongChain(2, 10)).blocks, 0) << "all of the capacity is pinned";
  std::thread([&] { user.index->OnReleased(pinned, false); }).join();
  PrefixReceipt next = user.Record(kA, LongChain(3, 10));
  EXPECT_EQ(next.blocks, 10);
  EXPECT_EQ(user.Matched(kA, LongChain(1, 10)), 0);
  user.index->OnReleased(next, false);
  EXPECT_EQ(user.index->Stats().live_receipts, 0);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, AnAbortOnAnotherThreadIsTakenBackAtOnce) {
  IndexUser user(Blocks(100));
  PrefixReceipt receipt = user.Record(kA, LongChain(1, 10));
  std::thread([&] { user.index->OnReleased(receipt, true); }).join();
  EXPECT_EQ(user.Matched(kA, LongChain(1, 10)), 0);
  receipt = user.Record(kA, LongChain(1, 10));
  user.index->OnFirstToken(receipt);
  std::thread([&] { user.index->OnReleased(receipt, true); }).join();
  EXPECT_EQ(user.Matched(kA, LongChain(1, 10)), 10) << "it had been real";
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, RecordersOfOnePromptWaitForItsKeys) {
  // One thread's new run is forked by the other's record while its keys may still be on their way.
  IndexUser user(Blocks(100'000));
  const int rounds = 2'000;
  std::atomic<int> turn{0}, done{0};
  const auto prompt = [](int round, std::int64_t own) {
    std::vector<BlockKey> keys = LongChain(static_cast<std::uint64_t>(round) + 1, 200);
    BlockKey parent = keys.back();
    for (std::int64_t i = 0; i < 100; ++i)
      keys.push_back(parent = ChainKey(parent, static_cast<std::uint64_t>(own + 1)));
    return keys;
  };
  const auto record = [&](IndexUser& mine, int side, int round) {
    const std::vector<BlockKey> keys = prompt(round, side);
    PrefixReceipt receipt = mine.Record(side == 0 ? kA : kB, keys);
    EXPECT_EQ(receipt.blocks, 300);
    mine.index->OnReleased(receipt, false);
  };
  std::thread other([&] {
    IndexUser mine(user.index);
    for (int round = 0; round < rounds; ++round) {
      while (turn.load() <= round) std::this_thread::yield();
      record(mine, 1, round);
      ++done;
    }
  });
  for (int round = 0; round < rounds; ++round) {
    ++turn;
    record(user, 0, round);
    while (done.load() <= round) std::this_thread::yield();
    ASSERT_EQ(user.Matched(kA, prompt(round, 0)), 300);
    ASSERT_EQ(user.Matched(kB, prompt(round, 0)), 200);
    ASSERT_EQ(user.Matched(kA, prompt(round, 1)), 200);
    ASSERT_EQ(user.Matched(kB, prompt(round, 1)), 300);
    if (round % 16 == 15) user.index->ClearEndpoint(kA), user.index->ClearEndpoint(kB);
  }
  other.join();
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, ALookUpThatRacesNeverCreditsMore) {
  // Eight endpoints hold ever more of one chain, each never beyond its own mark, while runs are evicted, freed and made
  // again all around.
  IndexUser user(Blocks(3'000));
  const std::vector<BlockKey> chain = LongChain(1, 2'000);
  const auto mark = [](std::uint32_t slot) { return 100 + 200 * std::size_t{slot}; };
  std::atomic<bool> stop{false};
  const auto write = [&](std::uint64_t seed) {
    IndexUser mine(user.index);
    TestRandom random(seed);
    for (int i = 0; i < (testing_support::kSanitized ? 2'000 : 20'000); ++i) {
      const EndpointId id{static_cast<std::uint32_t>(random.Below(8)), 1};
      const std::size_t blocks = 1 + random.Below(mark(id.slot));
      std::vector<BlockKey> keys(chain.begin(), chain.begin() + static_cast<std::ptrdiff_t>(blocks));
      // Some go on elsewhere; some are of another chain.
      for (std::uint64_t n = random.Below(300); n > 0; --n) {
        keys.push_back(ChainKey(keys.back(), seed * 1000 + random.Below(3)));
      }
      if (random.OneIn(3)) keys = LongChain(100 + random.Below(20), static_cast<std::int64_t>(blocks));
      PrefixReceipt receipt = mine.Record(id, keys);
      mine.index->OnReleased(receipt, random.OneIn(4));
      if (random.OneIn(500)) mine.index->ClearEndpoint(id);
    }
  };
  std::thread reader([&] {
    IndexUser mine(user.index);
    while (!stop.load()) {
      for (const PrefixMatch::Holder& holder : mine.Match(chain).holders()) {
        ASSERT_LE(holder.blocks, static_cast<std::int64_t>(mark(holder.endpoint.slot)));
      }
    }
  });
  std::thread other([&] { write(2); });
  write(3);
  other.join();
  stop = true;
  reader.join();
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, ALookUpThatRacesMissesNothingThatStays) {
  // One endpoint keeps a chain; others come and go on its runs, and other keys in the table.
  for (const IndexMode mode : {IndexMode::kApproximate, IndexMode::kExact}) {
    IndexUser user({.mode = mode, .default_capacity_tokens = 16 * 3'000});
    const bool exact = mode == IndexMode::kExact;
    const std::vector<BlockKey> chain = LongChain(1, 600);
    std::vector<PrefixReceipt> kept;
    for (std::size_t blocks = 100; blocks <= chain.size(); blocks += 100) {  // Several runs, or one that grows.
      if (!exact) kept.push_back(user.Record(kA, First(chain, blocks)));
    }
    if (exact) {
      ASSERT_EQ(user.index->Stored({kA}, std::nullopt, chain), KvResult::kApplied);
    }
    std::atomic<bool> stop{false};
    const auto write = [&](std::uint64_t seed) {
      IndexUser mine(user.index);
      TestRandom random(seed);
      for (int i = 0; i < (testing_support::kSanitized ? 1'000 : 10'000); ++i) {
        const EndpointId id{1 + static_cast<std::uint32_t>(random.Below(7)), 1};
        std::vector<BlockKey> keys(chain.begin(), chain.begin() + 1 + static_cast<std::ptrdiff_t>(random.Below(600)));
        if (random.OneIn(2)) keys = LongChain(100 + random.Below(50), static_cast<std::int64_t>(keys.size()));
        if (exact) {
          (void)mine.index->Stored({id}, std::nullopt, keys);
          (void)mine.index->Removed({id}, keys);
        } else {
          PrefixReceipt receipt = mine.Record(id, keys);
          mine.index->OnReleased(receipt, random.OneIn(2));
        }
      }
    };
    std::thread reader([&] {
      IndexUser mine(user.index);
      while (!stop.load()) ASSERT_EQ(mine.Matched(kA, chain), 600);
    });
    std::thread other([&] { write(2); });
    write(3);
    other.join();
    stop = true;
    reader.join();
    for (PrefixReceipt& receipt : kept) user.index->OnReleased(receipt, false);
    ExpectSound(*user.index);
  }
}

TEST(PrefixIndexTest, RemovalIsVisibleAtOnceAndSweptInSteps) {
  IndexUser user(Blocks(100'000));
  PrefixIndex& index = *user.index;
  for (std::uint64_t i = 0; i < 1000; ++i) user.Store(kA, LongChain(i, 2));
  user.Store(kB, LongChain(5, 2));
  index.RemoveEndpoint(kA);
  EXPECT_EQ(index.Stats().pending_sweep, 1000 - 64);
  EXPECT_EQ(user.Matched(kA, LongChain(5, 2)), 0);
  EXPECT_EQ(user.Match(LongChain(5, 2)).holders().size(), 1u);
  EXPECT_TRUE(user.Match(LongChain(999, 2)).holders().empty());
  EXPECT_EQ(index.HeldBlocks(kA), 0);
  ExpectSound(index);
  // The successor in its slot meets the remains without touching them.
  const EndpointId successor{0, 2};
  user.Store(successor, LongChain(999, 2));  // Two calls.
  EXPECT_EQ(index.Stats().pending_sweep, 1000 - 3 * 64);
  EXPECT_EQ(user.Matched(successor, LongChain(999, 2)), 2);
  EXPECT_EQ(user.Match(LongChain(999, 2)).holders().size(), 1u);
  ExpectSound(index);
  EXPECT_EQ(index.Sweep(0), 1000 - 3 * 64);
  EXPECT_EQ(index.Sweep(100), 1000 - 3 * 64 - 100);
  EXPECT_EQ(index.Sweep(10'000), 0);
  EXPECT_EQ(index.Stats().distinct_blocks, 4);
  ExpectSound(index);
}

TEST(PrefixIndexTest, R87ARestartInPlaceForgetsTheOldBlocks) {
  IndexUser user(Blocks(1000));
  PrefixIndex& index = *user.index;
  ASSERT_TRUE(index.SetCapacity(kA, 60 * 16).ok());
  user.Store(kA, LongChain(1, 50));
  PrefixReceipt before = user.Record(kA, LongChain(2, 3));
  index.ClearEndpoint(kA);
  EXPECT_EQ(index.HeldBlocks(kA), 0);
  EXPECT_EQ(user.Matched(kA, LongChain(1, 50)), 0);
  user.Store(kA, LongChain(3, 2));
  EXPECT_EQ(index.HeldBlocks(kA), 2);
  index.OnFirstToken(before);  // From the life before: credits nothing.
  index.OnReleased(before, false);
  EXPECT_EQ(user.Matched(kA, LongChain(2, 3)), 0);
  EXPECT_EQ(index.Stats().distinct_blocks, 2);
  EXPECT_EQ(index.Stats().endpoints, 1);
  user.Store(kA, LongChain(4, 100));
  EXPECT_EQ(index.HeldBlocks(kA), 60) << "the capacity is kept";
  index.ClearEndpoint({7, 1});
  index.ClearEndpoint({kMaxEndpoints, 1});
  ExpectSound(index);
}

TEST(PrefixIndexTest, ANewIncarnationReplacesAndAStragglerIsRefused) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3});
  PrefixReceipt old = user.Record({0, 1}, keys);
  user.Store({0, 2}, First(keys, 1));
  EXPECT_EQ(user.Match(keys).holders().size(), 1u);
  EXPECT_EQ(user.match.holders()[0].endpoint, (EndpointId{0, 2}));
  EXPECT_EQ(user.match.holders()[0].blocks, 1);
  EXPECT_FALSE(user.Record({0, 1}, keys));
  user.index->OnReleased(old, false);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 1);
  user.index->RemoveEndpoint({0, 1});
  EXPECT_EQ(user.Matched({0, 2}, keys), 1) << "the removal of a predecessor comes late";
  user.index->RemoveEndpoint({3, 9});  // Never seen, and dead from now on.
  EXPECT_FALSE(user.Record({3, 9}, keys));
  EXPECT_TRUE(user.Record({3, 10}, keys));
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, ADeadEndpointIsRefusedAndTheDeadAreRetired) {
  IndexUser user(Blocks(100));
  ScriptedFleet fleet;
  const FleetView view = fleet.View();
  const EndpointId a = fleet.Add(5), b = fleet.Add(kMaxEndpoints - 1);
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3});
  PrefixReceipt receipt = user.Record(a, keys, &view);
  EXPECT_TRUE(receipt);
  user.index->OnReleased(receipt, false);
  user.Store(b, keys);
  fleet.Remove(a);
  EXPECT_FALSE(user.Record(a, keys, &view));
  EXPECT_FALSE(user.Record({5, 0}, keys, &view));
  user.index->RetireDead(view);
  EXPECT_EQ(user.Match(keys).holders().size(), 1u);
  EXPECT_EQ(user.Matched(b, keys), 3);
  EXPECT_EQ(user.index->Stats().endpoints, 1);
  user.index->RetireDead(FleetView());
  EXPECT_EQ(user.index->Stats().distinct_blocks, 0);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, ImpossibleIdsHaveNoEffect) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = ChainKeys({1, 2, 3});
  user.Store(kA, keys);
  for (const EndpointId id : {EndpointId{0, 0}, EndpointId{kMaxEndpoints, 1}, EndpointId{~0u, ~0u}, EndpointId{5, 0}}) {
    EXPECT_FALSE(user.Record(id, keys));
    PrefixReceipt receipt = user.Record(kB, keys);
    EXPECT_FALSE(user.index->Move(receipt, id, nullptr));
    user.index->RemoveEndpoint(id);
    user.index->ClearEndpoint(id);
    EXPECT_EQ(user.index->HeldBlocks(id), 0);
    EXPECT_EQ(user.Matched(id, keys), 0);
  }
  EXPECT_EQ(user.Matched(kA, keys), 3);
  EXPECT_EQ(user.index->Stats().live_receipts, 0);
  EXPECT_EQ(user.index->Sweep(-5), 0);
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, EveryEndpointOfAFullFleetOnOnePrompt) {
  constexpr std::uint32_t kFleet = testing_support::kSanitized ? kMaxEndpoints / 8 : kMaxEndpoints;
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> keys = LongChain(1, 20);
  for (std::uint32_t slot = 0; slot < kFleet; ++slot) {
    user.Store({(slot * 4099) % kFleet, 1}, First(keys, 1 + slot % 20));
  }
  const PrefixMatch& match = user.Match(keys);
  ASSERT_EQ(match.holders().size(), kFleet);
  for (std::uint32_t i = 0; i < kFleet; ++i) {
    EXPECT_EQ(match.holders()[(i * 4099) % kFleet].blocks, 1 + i % 20);
  }
  ExpectSound(*user.index);
  // A whole fleet is replaced before anything of the old one is swept.
  for (std::uint32_t slot = 0; slot < kFleet; ++slot) user.Store({slot, 2}, First(keys, 3));
  EXPECT_EQ(user.Match(keys).holders().size(), kFleet);
  ExpectSound(*user.index);
  for (std::uint32_t slot = 0; slot < kFleet; ++slot) user.index->RemoveEndpoint({slot, 2});
  while (user.index->Sweep(1000) > 0) {
  }
  EXPECT_EQ(user.index->Stats().runs, 0);
}

TEST(PrefixIndexTest, R106IdsAreRecycledWithoutEnd) {
  IndexUser user(Blocks(100));
  for (std::uint32_t i = 1; i <= 600'000; ++i) {  // More than there can be owners at a time.
    user.Store({3, i}, ChainKeys({i, i}));
    user.index->RemoveEndpoint({3, i});
  }
  EXPECT_EQ(user.index->Stats().refused_records, 0);
  EXPECT_LT(user.index->Stats().bytes, 1 << 20);
}

// ---- Memory ----

TEST(PrefixIndexTest, R82BytesPerBlockAreAsPublished) {
  // Alone: 8 bytes a block and some 100 a run. Shared: 44 bytes for each further holder of a run, whatever its length,
  // and what arrays have to spare.
  IndexUser user(Blocks(1'000'000));
  const std::int64_t base = user.index->Stats().bytes;
  for (std::uint32_t endpoint = 0; endpoint < 10; ++endpoint) {
    for (std::uint64_t i = 0; i < 250; ++i) user.Store({endpoint, 1}, LongChain(endpoint * 1000 + i, 250));
  }
  EXPECT_EQ(user.index->Stats().holder_blocks, 625'000);
  const std::int64_t alone = user.index->Stats().bytes - base;
  EXPECT_LE(alone, 625'000 * 11);
  for (std::uint32_t endpoint = 10; endpoint < 100; ++endpoint) {
    for (std::uint64_t i = 0; i < 250; ++i) user.Store({endpoint, 1}, LongChain(i, 250));
  }
  EXPECT_EQ(user.index->Stats().distinct_blocks, 625'000);
  const std::int64_t further = user.index->Stats().bytes - base - alone;
  EXPECT_LE(further, 90 * 62'500 * 35 / 100) << "at most 0.35 bytes for each further holder of a block";
}

TEST(PrefixIndexTest, R94ManyDistinctChainsLeaveNothingBehind) {
  IndexUser user(Blocks(1000));
  const std::int64_t chains = 20'000 * TestScale();
  for (std::int64_t i = 0; i < chains; ++i) {
    PrefixReceipt receipt = user.Record(kA, LongChain(static_cast<std::uint64_t>(i) + 1, 140));
    user.index->OnReleased(receipt, true);
  }
  EXPECT_EQ(user.index->Stats().runs, 0);
  EXPECT_EQ(user.index->Stats().taken_back_blocks, chains * 140);
  const std::int64_t empty = user.index->Stats().bytes;
  for (std::int64_t i = 0; i < chains; ++i) user.Store(kA, LongChain(static_cast<std::uint64_t>(i) + 1, 140));
  EXPECT_LE(user.index->Stats().runs, 8);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 1000);
  EXPECT_LE(user.index->Stats().peak_bytes, empty + (1 << 19));
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, R88LiveBytesStayFlatOverEndpointLives) {
  IndexUser user(Blocks(10'000));
  std::int64_t after_ten = 0;
  for (std::uint32_t life = 1; life <= 1000; ++life) {
    for (std::uint64_t i = 0; i < 10; ++i) user.Store({0, life}, LongChain(life * 100 + i, 100));
    user.index->RemoveEndpoint({0, life});
    if (life == 10) after_ten = user.index->Stats().bytes;
  }
  EXPECT_EQ(user.index->Stats().bytes, after_ten);
  EXPECT_EQ(user.index->Stats().runs, 0);
}

TEST(PrefixIndexTest, R98OneHardCapForAllEndpointsTogether) {
  constexpr std::int64_t kCap = std::int64_t{8} << 20;
  IndexUser user({.default_capacity_tokens = std::int64_t{1} << 30, .max_bytes = kCap});
  for (std::uint64_t i = 0; i < 100; ++i) {
    for (std::uint32_t endpoint = 0; endpoint < 50; ++endpoint) {
      user.Store({endpoint, 1}, LongChain(i * 100 + endpoint, 1 + static_cast<std::int64_t>(i * 13 % 700)));
      ASSERT_LE(user.index->Stats().bytes, kCap);
    }
  }
  const PrefixIndexStats stats = user.index->Stats();
  EXPECT_LE(stats.peak_bytes, kCap);
  EXPECT_GT(stats.evicted_blocks, 100'000);
  EXPECT_GT(stats.distinct_blocks, 400'000) << "and it is used";
  ExpectSound(*user.index);
  // All of it pinned: records are shortened, nothing is exceeded, and it all comes back.
  std::vector<PrefixReceipt> live;
  for (std::uint64_t i = 0; i < 200; ++i) live.push_back(user.Record(kA, LongChain(1'000'000 + i, 30'000)));
  EXPECT_GT(user.index->Stats().truncated_records, 0);
  EXPECT_LE(user.index->Stats().peak_bytes, kCap);
  ExpectSound(*user.index);
  for (PrefixReceipt& receipt : live) user.index->OnReleased(receipt, true);
  for (std::uint32_t endpoint = 0; endpoint < 50; ++endpoint) user.index->RemoveEndpoint({endpoint, 1});
  while (user.index->Sweep(1000) > 0) {
  }
  EXPECT_EQ(user.index->Stats().runs, 0);
  EXPECT_LT(user.index->Stats().bytes, 1 << 20);
}

TEST(PrefixIndexTest, MemoryShrinksAsItGrew) {
  IndexUser user(Blocks(10'000'000));
  for (std::uint64_t i = 0; i < 30'000; ++i) user.Store({static_cast<std::uint32_t>(i % 3), 1}, LongChain(i, 40));
  const std::int64_t full = user.index->Stats().bytes;
  for (std::uint32_t slot = 0; slot < 3; ++slot) ASSERT_TRUE(user.index->SetCapacity({slot, 1}, 16 * 40'000).ok());
  EXPECT_EQ(user.index->Stats().holder_blocks, 120'000);
  EXPECT_LT(user.index->Stats().bytes, full / 2) << "a tenth is held, in segments half empty at worst";
  ExpectSound(*user.index);
}

struct CountedMemory {
  std::int64_t pieces = 0, bytes = 0;
  static void* Allocate(std::size_t bytes, std::size_t alignment, void* context) noexcept {
    auto& counted = *static_cast<CountedMemory*>(context);
    ++counted.pieces;
    counted.bytes += static_cast<std::int64_t>(bytes);
    return ::operator new(bytes, std::align_val_t{alignment}, std::nothrow);
  }
  static void Release(void* memory, std::size_t bytes, void* context) noexcept {
    auto& counted = *static_cast<CountedMemory*>(context);
    --counted.pieces;
    counted.bytes -= static_cast<std::int64_t>(bytes);
    ::operator delete(memory, std::align_val_t{64});
  }
};

TEST(PrefixIndexTest, MemoryComesFromTheCallersHookAndTheReserveStays) {
  CountedMemory counted;
  PrefixIndexOptions options{.default_capacity_tokens = std::int64_t{1} << 30,
                             .reserve_bytes = std::int64_t{4} << 20,
                             .memory = {&CountedMemory::Allocate, &CountedMemory::Release, &counted}};
  {
    IndexUser user(options);
    const std::int64_t reserve = counted.bytes, pieces = counted.pieces;
    EXPECT_GE(reserve, std::int64_t{4} << 20);
    for (std::uint64_t i = 0; i < 100; ++i) user.Store(kA, LongChain(i, 1000));
    EXPECT_EQ(counted.pieces, pieces) << "100,000 blocks fit the reserve";
    for (std::uint64_t i = 100; i < 2000; ++i) user.Store(kA, LongChain(i, 1000));
    EXPECT_GT(counted.bytes, 2'000 * 1000 * 8) << "the keys alone";
    ExpectSound(*user.index);
    user.index->RemoveEndpoint(kA);
    while (user.index->Sweep(64) > 0) {
    }
    EXPECT_LE(counted.pieces, pieces + 2) << "the reserve, and a segment for data and one for the table";
    EXPECT_GE(counted.pieces, pieces);
  }
  EXPECT_EQ(counted.pieces, 0);
  options.memory.release = nullptr;
  EXPECT_THAT(PrefixIndex::Create(options).status().message(), HasSubstr("PrefixIndexOptions.memory"));
  options.memory = {};
  options.reserve_bytes = options.max_bytes;
  EXPECT_THAT(PrefixIndex::Create(options).status().message(), HasSubstr("PrefixIndexOptions.reserve_bytes"));
  options.reserve_bytes = std::int64_t{4} << 20;
  options.memory = {[](std::size_t, std::size_t, void*) noexcept -> void* { return nullptr; },
                    [](void*, std::size_t, void*) noexcept {}, nullptr};
  EXPECT_EQ(PrefixIndex::Create(options).status().code(), absl::StatusCode::kResourceExhausted);
}

// ---- Odd keys ----

TEST(PrefixIndexTest, R74EqualKeysEverywhere) {
  IndexUser user(Blocks(100));
  const std::vector<BlockKey> ones(10, 1);
  user.Store(kA, ones);
  EXPECT_EQ(user.Matched(kA, ones), 10);
  user.Store(kB, First(ones, 4));
  EXPECT_EQ(user.Matched(kB, ones), 4);
  user.Store(kB, ones);
  EXPECT_EQ(user.Matched(kB, ones), 10);
  const std::vector<BlockKey> more(15, 1);
  user.Store(kA, more);
  EXPECT_LE(user.Matched(kA, more), 15);
  ExpectSound(*user.index);
  user.index->RemoveEndpoint(kA);
  user.index->RemoveEndpoint(kB);
  EXPECT_EQ(user.index->Stats().runs, 0);
}

TEST(PrefixIndexTest, R74CyclesAndTheSameKeyBehindTwoParents) {
  IndexUser user(Blocks(100'000));
  const std::vector<BlockKey> cycle = {5, 6, 5, 6};
  user.Store(kA, cycle);
  std::vector<BlockKey> longer = cycle;
  longer.insert(longer.end(), cycle.begin(), cycle.end());
  user.Store(kA, longer);  // Behind the run comes its own first key.
  EXPECT_EQ(user.Matched(kA, longer), 4);
  EXPECT_EQ(user.index->HeldBlocks(kA), 4);
  user.Store(kB, std::vector<BlockKey>{8, 9});
  user.Store(kB, std::vector<BlockKey>{8, 9, 5});  // 5 starts a run at the root already.
  EXPECT_EQ(user.Matched(kB, std::vector<BlockKey>{8, 9, 5}), 2);
  EXPECT_EQ(user.index->Stats().conflicting_keys, 2);
  std::vector<BlockKey> large(10'000);  // Longer than a run, and repeating in step with it.
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = 100 + i % 4096;
  user.Store(kC, large);
  EXPECT_EQ(user.index->HeldBlocks(kC), 4096);
  EXPECT_EQ(user.Matched(kC, large), 4096);
  user.Store(kC, std::vector<BlockKey>{0, 0, 0});
  EXPECT_EQ(user.Matched(kC, std::vector<BlockKey>{0, 0, 0}), 3);
  ExpectSound(*user.index);
}

// ---- Size ----

TEST(PrefixIndexTest, APromptOfTenMillionTokens) {
  std::vector<TokenId> tokens = Tokens(10'000'000);
  IndexUser user({.default_capacity_tokens = 20'000'000});
  user.Store(kA, {.tokens = tokens});
  EXPECT_EQ(user.index->HeldBlocks(kA), 625'000);
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens}), 625'000);
  tokens[16 * 600'000] ^= 1;
  EXPECT_EQ(user.Matched(kA, {.tokens = tokens}), 600'000);
  PrefixReceipt fork = user.index->Record(kB, user.keys, nullptr);
  EXPECT_EQ(fork.blocks, 625'000);
  EXPECT_EQ(user.index->Stats().distinct_blocks, 650'000);
  user.index->OnReleased(fork, true);
  user.index->RemoveEndpoint(kA);
  while (user.index->Sweep(64) > 0) {
  }
  EXPECT_EQ(user.index->Stats().runs, 0);
}

TEST(PrefixIndexTest, AChainOfTenMillionBlocks) {
  const std::vector<BlockKey> keys = LongChain(1, 10'000'000);
  IndexUser user({.default_capacity_tokens = std::int64_t{1} << 30});
  PrefixReceipt receipt = user.Record(kA, keys);
  EXPECT_EQ(receipt.blocks, 10'000'000);
  EXPECT_EQ(user.Matched(kA, keys), 10'000'000);
  user.index->OnReleased(receipt, true);  // Frees it all, bottom up.
  EXPECT_EQ(user.index->Stats().runs, 0);
  // As many runs it is deep, too: pieces that are long enough to become runs of their own.
  constexpr std::size_t kRuns = testing_support::kSanitized ? 300 : 3000;
  for (std::size_t pieces = 1; pieces <= kRuns; ++pieces) user.Store(kA, First(keys, pieces * 64));
  EXPECT_EQ(user.index->Stats().runs, std::int64_t{kRuns});
  EXPECT_EQ(user.Matched(kA, keys), std::int64_t{kRuns * 64});
  ExpectSound(*user.index);
}

TEST(PrefixIndexTest, NothingBeyondTheCapacityIsHashed) {
  const std::vector<TokenId> tokens = Tokens(16 * 50'000);
  IndexUser user(Blocks(10'000));
  user.keys.Reset(user.index->key_options(), {.tokens = tokens});
  PrefixReceipt receipt = user.index->Record(kA, user.keys, nullptr);
  EXPECT_EQ(receipt.blocks, 10'000);
  EXPECT_EQ(user.keys.ready_blocks(), 10'000);
  EXPECT_EQ(user.index->Stats().truncated_records, 1);
}

TEST(PrefixIndexTest, ALongPromptPinnedBeyondAShrunkenCapacityIsRecordedAsHeld) {
  IndexUser user(Blocks(10'000));
  const std::vector<BlockKey> keys = LongChain(1, 9000);
  PrefixReceipt first = user.Record(kA, First(keys, 8000));
  ASSERT_TRUE(user.index->SetCapacity(kA, 16 * 100).ok());
  PrefixReceipt second = user.Record(kA, keys);
  EXPECT_EQ(second.blocks, 8000) << "not the capacity's 100: the rest is held anyway";
  user.index->OnReleased(first, false);
  EXPECT_EQ(user.index->HeldBlocks(kA), 8000);
  user.index->OnReleased(second, false);
  EXPECT_EQ(user.index->HeldBlocks(kA), 100);
  ExpectSound(*user.index);
}

// ---- Threads ----

TEST(PrefixIndexTest, R111ManyThreadsAtOnce) {
  absl::StatusOr<std::shared_ptr<PrefixIndex>> made = PrefixIndex::Create(Blocks(300));
  ASSERT_TRUE(made.ok());
  const std::shared_ptr<PrefixIndex> index = *std::move(made);
  constexpr std::uint32_t kEndpoints = 6;
  std::vector<std::atomic<std::uint32_t>> incarnations(kMaxEndpoints);
  for (std::uint32_t slot = 0; slot < kEndpoints; ++slot) incarnations[slot] = 1;
  const FleetView view(incarnations.data(), kEndpoints);
  // Receipts that all threads share: first tokens, ends and retries race on them.
  struct Shared {
    internal::Mutex mutex;  // Only for handing the object itself over, as a ticket would.
    PrefixReceipt receipt;
  };
  std::array<Shared, 8> shared;

  const std::int64_t operations = 4000 * TestScale();
  const auto work = [&](std::uint64_t seed) {
    TestRandom random(seed);
    IndexUser user(index);
    std::vector<PrefixReceipt> live;
    for (std::int64_t op = 0; op < operations; ++op) {
      std::vector<std::uint64_t> contents(1 + random.Below(30));
      for (std::uint64_t& content : contents) content = random.Below(2);
      const std::vector<BlockKey> keys = ChainKeys(contents);
      const EndpointId id = view.At(static_cast<Row>(random.Below(kEndpoints)));
      switch (random.Below(8)) {
        case 0:
        case 1: live.push_back(user.Record(id, keys, &view)); break;
        case 2:
        case 3:
          for (const PrefixMatch::Holder& holder : user.Match(keys).holders()) {
            if (holder.blocks < 1 || holder.blocks > std::ssize(keys)) ADD_FAILURE();
          }
          break;
        case 4: {
          Shared& one = shared[random.Below(shared.size())];
          PrefixReceipt copy;
          {
            const internal::MutexLock lock(one.mutex);
            copy = one.receipt;
          }
          index->OnFirstToken(copy);
          if (random.OneIn(2)) index->OnReleased(copy, random.OneIn(2));
          break;
        }
        case 5: {
          const PrefixReceipt fresh = user.Record(id, keys, &view);
          PrefixReceipt old;
          {
            Shared& one = shared[random.Below(shared.size())];
            const internal::MutexLock lock(one.mutex);
            old = std::exchange(one.receipt, fresh);
          }
          index->OnReleased(old, true);
          break;
        }
        case 6:
          if (random.OneIn(40)) {
            const EndpointId dead = id;
            if (incarnations[dead.slot].compare_exchange_strong(const_cast<std::uint32_t&>(dead.incarnation),
                                                                dead.incarnation + 1)) {
              random.OneIn(2) ? index->RetireDead(view) : index->RemoveEndpoint({dead.slot, dead.incarnation});
            }
          } else if (random.OneIn(10)) {
            (void)index->SetCapacity(id, static_cast<std::int64_t>(16 * random.Below(400)));
          } else if (random.OneIn(10)) {
            index->ClearEndpoint(id);
          } else if (!live.empty()) {
            live.back() = index->Move(live.back(), id, &view);
          }
          (void)index->HeldBlocks(id);
          (void)index->Stats();
          break;
        default:
          if (live.empty()) break;
          index->OnReleased(live.back(), random.OneIn(2));
          live.pop_back();
      }
    }
    for (PrefixReceipt& receipt : live) index->OnReleased(receipt, random.OneIn(2));
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 4; ++i) threads.emplace_back(work, TestSeed(1) + i);
  for (std::thread& thread : threads) thread.join();
  for (Shared& one : shared) index->OnReleased(one.receipt, false);
  ExpectSound(*index);
  EXPECT_EQ(index->Stats().live_receipts, 0);
  EXPECT_EQ(index->Stats().conflicting_keys, 0);
  for (std::uint32_t slot = 0; slot < kEndpoints; ++slot) index->RemoveEndpoint(view.At(slot));
  while (index->Sweep(64) > 0) {
  }
  EXPECT_EQ(index->Stats().runs, 0);
  EXPECT_EQ(index->Stats().distinct_blocks, 0);
}

TEST(PrefixIndexTest, SameCallsSameAnswers) {
  const auto run = [] {
    IndexUser user(Blocks(60));
    TestRandom random(3);
    std::vector<std::int64_t> answers;
    for (int op = 0; op < 3000; ++op) {
      std::vector<std::uint64_t> contents(1 + random.Below(12));
      for (std::uint64_t& content : contents) content = random.Below(3);
      user.Store({static_cast<std::uint32_t>(random.Below(20)), 1}, ChainKeys(contents));
      for (const PrefixMatch::Holder& holder : user.Match(ChainKeys(contents)).holders()) {
        answers.push_back(holder.endpoint.slot);
        answers.push_back(holder.blocks);
      }
    }
    const PrefixIndexStats stats = user.index->Stats();
    answers.insert(answers.end(), {stats.distinct_blocks, stats.runs, stats.bytes, stats.evicted_blocks});
    return answers;
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace tokroute

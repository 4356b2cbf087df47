#include "tokroute/prefix/block_key.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tokroute/request.h"

// Inlined, so that the test needs no library besides.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tokroute {
namespace {

std::vector<TokenId> Tokens(std::size_t count, TokenId first = 1) {
  std::vector<TokenId> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<BlockKey> KeysOf(const Request& request, const KeyOptions& options = {}) {
  PromptKeys keys;
  keys.Reset(options, request);
  const std::span<const BlockKey> all = keys.Ensure(keys.block_count());
  return {all.begin(), all.end()};
}

std::size_t Shared(const std::vector<BlockKey>& a, const std::vector<BlockKey>& b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// ---- The scheme once more, written to be read: byte by byte, 32 bits at a time, no span of media skipped. ----

std::uint64_t SlowFold(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t mask = 0xFFFFFFFF;
  const std::uint64_t ll = (a & mask) * (b & mask), lh = (a & mask) * (b >> 32);
  const std::uint64_t hl = (a >> 32) * (b & mask), hh = (a >> 32) * (b >> 32);
  const std::uint64_t middle = (ll >> 32) + (lh & mask) + (hl & mask);
  const std::uint64_t low = (middle << 32) | (ll & mask);
  const std::uint64_t high = hh + (lh >> 32) + (hl >> 32) + (middle >> 32);
  return low ^ high;
}

std::uint64_t SlowLink(std::uint64_t hash, std::uint64_t parent) {
  const std::uint64_t key = SlowFold(hash ^ 0x9E3779B97F4A7C15u, parent ^ 0xD1B54A32D192ED03u);
  return key == 0 ? 1 : key;
}

std::vector<BlockKey> SlowKeys(const Request& request, const KeyOptions& options) {
  std::uint64_t chain = SlowLink(options.seed, 0x746F6B726F757465u);
  for (const std::string_view part : {request.model, request.lora, request.cache_salt}) {
    chain = SlowLink(XXH3_64bits(part.data(), part.size()), chain);
    chain = SlowLink(part.size(), chain);
  }
  std::vector<MediaSpan> media(request.media.begin(), request.media.end());
  std::sort(media.begin(), media.end(), [](const MediaSpan& a, const MediaSpan& b) {
    return std::pair(std::pair(a.first_token, a.token_count), a.content_hash) <
           std::pair(std::pair(b.first_token, b.token_count), b.content_hash);
  });
  std::vector<BlockKey> keys;
  const std::int64_t block = options.block_size, count = static_cast<std::int64_t>(request.tokens.size());
  for (std::int64_t start = 0; start + block <= count; start += block) {
    std::string bytes;
    for (std::int64_t i = start; i < start + block; ++i) {
      for (int shift = 0; shift < 32; shift += 8) {
        bytes.push_back(static_cast<char>((request.tokens[static_cast<std::size_t>(i)] >> shift) & 0xFF));
      }
    }
    std::uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
    for (const MediaSpan& span : media) {
      if (span.first_token >= start + block || span.first_token + span.token_count <= start) continue;
      const auto offset = static_cast<std::uint64_t>(span.first_token - start);
      const std::uint64_t folded = SlowFold(span.content_hash ^ 0x8CB92BA72F3D8DD7u, offset ^ 0xBF58476D1CE4E5B9u);
      hash = SlowFold(hash ^ 0x8CB92BA72F3D8DD7u, folded ^ 0xBF58476D1CE4E5B9u);
    }
    chain = SlowLink(hash, chain);
    keys.push_back(chain);
  }
  return keys;
}

TEST(BlockKeyTest, AgreesWithASlowImplementationAtEveryBlockSize) {
  std::vector<TokenId> tokens = Tokens(2100, 4'294'965'000u);  // Wraps: large and small ids, all four bytes in use.
  const MediaSpan media[] = {
      {.first_token = 700, .token_count = 300, .content_hash = 0xABCD},
      {.first_token = 40, .token_count = 1, .content_hash = 7},
      {.first_token = 41, .token_count = 90, .content_hash = 8},
      {.first_token = 0, .token_count = 3, .content_hash = 9},
      {.first_token = 750, .token_count = 2, .content_hash = 10},
      {.first_token = 2099, .token_count = 50, .content_hash = 11},
  };
  for (std::int32_t block = kMinBlockSize; block <= kMaxBlockSize; ++block) {
    SCOPED_TRACE(block);
    const KeyOptions options{.block_size = block};
    const Request plain{.tokens = tokens, .model = "qwen3-32b", .cache_salt = "s"};
    EXPECT_EQ(KeysOf(plain, options), SlowKeys(plain, options));
    const KeyOptions seeded{.block_size = block, .seed = 0x1234567890ABCDEFu};
    const Request pictures{.tokens = tokens, .model = "m", .lora = "l", .media = media};
    EXPECT_EQ(KeysOf(pictures, seeded), SlowKeys(pictures, seeded));
  }
}

// Fixed values: a change of any of them breaks whoever keeps keys or compares them between processes.
TEST(BlockKeyTest, R72GoldenVectorsAreTheSameInEveryBuild) {
  const std::vector<TokenId> tokens = Tokens(1024);
  struct Golden {
    std::int32_t block_size;
    std::uint64_t seed;
    BlockKey first, last;
  };
  const Golden golden[] = {
      {16, 0, 0x75FCB46DE4086866u, 0x13D1852B2EFC6C5Du},  {17, 0, 0xB80B95DB5E911BB9u, 0xC98AC58BD0A27A6Fu},
      {32, 0, 0xA1A6FA3446CBA84Du, 0x40FABBC500618070u},  {64, 0, 0x9B5A869EA54CEE0Fu, 0x335A88F68A33D667u},
      {100, 0, 0xA3485038F043A18Du, 0xEE438D5E0B448EDDu}, {128, 0, 0x47D182C5CFC1AF98u, 0x1E3ED49DEDF76272u},
      {256, 0, 0x69FB922694B98F32u, 0xDD0EA5E046383194u}, {512, 0, 0x9899106A90D10479u, 0x4F4F18351C6DDC5Fu},
      {16, 1, 0x30677C615A1C314Au, 0x24028B1085B87F38u},
  };
  for (const Golden& want : golden) {
    SCOPED_TRACE(want.block_size);
    const std::vector<BlockKey> keys =
        KeysOf({.tokens = tokens, .model = "qwen3-32b"}, {.block_size = want.block_size, .seed = want.seed});
    ASSERT_EQ(keys.size(), static_cast<std::size_t>(1024 / want.block_size));
    EXPECT_EQ(keys.front(), want.first) << std::hex << keys.front();
    EXPECT_EQ(keys.back(), want.last) << std::hex << keys.back();
  }
}

TEST(BlockKeyTest, R65AnotherAdapterSharesNothing) {
  const std::vector<TokenId> tokens = Tokens(160);
  const std::vector<BlockKey> base = KeysOf({.tokens = tokens, .model = "base"});
  EXPECT_EQ(base.size(), 10u);
  EXPECT_EQ(Shared(base, KeysOf({.tokens = tokens, .model = "base", .lora = "fin"})), 0u);
  EXPECT_EQ(Shared(base, KeysOf({.tokens = tokens, .model = "base"})), 10u);
}

TEST(BlockKeyTest, NamespacePartsAreFramedByTheirLength) {
  const std::vector<TokenId> tokens = Tokens(16);
  const std::string zero("\0", 1);
  const std::pair<std::string, std::pair<std::string, std::string>> spaces[] = {
      {"ab", {"c", ""}}, {"a", {"bc", ""}}, {"abc", {"", ""}}, {"", {"abc", ""}},   {"", {"", "abc"}},
      {"ab", {"", "c"}}, {"a", {"b", "c"}}, {"", {"", ""}},    {zero, {"", ""}},    {"", {zero, ""}},
      {"", {"", zero}},  {"c", {"ab", ""}}, {"a", {"c", "b"}}, {zero, {zero, zero}}};
  std::set<BlockKey> keys;
  for (const auto& [model, rest] : spaces) {
    keys.insert(KeysOf({.tokens = tokens, .model = model, .lora = rest.first, .cache_salt = rest.second}).front());
  }
  EXPECT_EQ(keys.size(), std::size(spaces));
}

TEST(BlockKeyTest, R67AnotherSaltSharesNothing) {
  const std::vector<TokenId> tokens = Tokens(160);
  const std::vector<BlockKey> salted = KeysOf({.tokens = tokens, .model = "m", .cache_salt = "s1"});
  EXPECT_EQ(Shared(salted, KeysOf({.tokens = tokens, .model = "m", .cache_salt = "s2"})), 0u);
  EXPECT_EQ(Shared(salted, KeysOf({.tokens = tokens, .model = "m"})), 0u);
  EXPECT_EQ(Shared(salted, KeysOf({.tokens = tokens, .model = "m", .cache_salt = "s1"})), 10u);
}

TEST(BlockKeyTest, R69OnlyBlocksFromThePictureOnDiffer) {
  const std::vector<TokenId> tokens(192, 5);  // 64 text, 64 placeholders, 64 text.
  const auto with = [&](std::uint64_t content, std::int64_t first, const KeyOptions& options = {}) {
    const MediaSpan media[] = {{.first_token = first, .token_count = 64, .content_hash = content}};
    return KeysOf({.tokens = tokens, .model = "m", .media = media}, options);
  };
  EXPECT_EQ(Shared(with(1, 64), with(2, 64)), 4u);
  EXPECT_EQ(Shared(with(0x1111222233334444u, 64), with(0xAAAA222233334444u, 64)), 4u) << "hashes count in full width";
  EXPECT_EQ(Shared(with(1, 64), with(1, 65)), 4u) << "the same picture one token later";
  EXPECT_EQ(Shared(with(1, 70), with(1, 71)), 4u) << "within a block";
  EXPECT_EQ(Shared(with(1, 64), KeysOf({.tokens = tokens, .model = "m"})), 4u);
  EXPECT_EQ(Shared(with(1, 64), with(1, 64)), 12u);
  const KeyOptions reference{.scheme = KeyScheme::kXxh64Chain};
  EXPECT_EQ(Shared(with(1, 64, reference), with(2, 64, reference)), 4u);
}

TEST(BlockKeyTest, MediaOrderDoesNotMatterAndOddSpansAreHarmless) {
  const std::vector<TokenId> tokens(160, 5);
  std::vector<MediaSpan> media = {{.first_token = 20, .token_count = 4, .content_hash = 1},
                                  {.first_token = 24, .token_count = 4, .content_hash = 2},
                                  {.first_token = 24, .token_count = 4, .content_hash = 3},
                                  {.first_token = 90, .token_count = 40, .content_hash = 4}};
  const std::vector<BlockKey> sorted = KeysOf({.tokens = tokens, .media = media});
  std::reverse(media.begin(), media.end());
  EXPECT_EQ(KeysOf({.tokens = tokens, .media = media}), sorted);
  std::swap(media[0].content_hash, media[3].content_hash);  // The pictures change places: not the same prompt.
  EXPECT_EQ(Shared(KeysOf({.tokens = tokens, .media = media}), sorted), 1u);

  const std::vector<BlockKey> plain = KeysOf({.tokens = tokens});
  const MediaSpan nothing[] = {{.first_token = 3, .token_count = 0, .content_hash = 1},
                               {.first_token = 3, .token_count = -5, .content_hash = 1},
                               {.first_token = -5, .token_count = 5, .content_hash = 1},
                               {.first_token = 160, .token_count = 1, .content_hash = 1},
                               {.first_token = INT64_MAX, .token_count = INT64_MAX, .content_hash = 1}};
  EXPECT_EQ(KeysOf({.tokens = tokens, .media = nothing}), plain);
  const MediaSpan all[] = {{.first_token = -5, .token_count = INT64_MAX, .content_hash = 1},
                           {.first_token = 7, .token_count = INT64_MAX, .content_hash = 1}};
  EXPECT_EQ(Shared(KeysOf({.tokens = tokens, .media = all}), plain), 0u);
}

TEST(BlockKeyTest, ManyPicturesHashedInPiecesAgree) {
  const std::vector<TokenId> tokens = Tokens(4000);
  std::vector<MediaSpan> media;
  for (int i = 0; i < 100; ++i) {
    media.push_back({.first_token = (i * 797) % 4000,
                     .token_count = 1 + (i * 13) % 60,
                     .content_hash = static_cast<std::uint64_t>(i)});
  }
  const Request request{.tokens = tokens, .media = media};
  PromptKeys keys;
  keys.Reset({}, request);
  for (std::int64_t blocks = 1; blocks < keys.block_count(); blocks += blocks / 2 + 1) keys.Ensure(blocks);
  const std::span<const BlockKey> all = keys.Ensure(keys.block_count());
  EXPECT_EQ(std::vector<BlockKey>(all.begin(), all.end()), SlowKeys(request, {}));
}

TEST(BlockKeyTest, R76TheOrderOfBlocksMatters) {
  std::vector<TokenId> ab = Tokens(16, 1), ba = Tokens(16, 100);
  ab.insert(ab.end(), ba.begin(), ba.end());
  for (TokenId t = 1; t <= 16; ++t) ba.push_back(t);
  const std::vector<BlockKey> a = KeysOf({.tokens = ab}), b = KeysOf({.tokens = ba});
  const std::set<BlockKey> distinct = {a[0], a[1], b[0], b[1]};
  EXPECT_EQ(distinct.size(), 4u);
}

TEST(BlockKeyTest, R78ADifferentSuffixKeepsThePrefix) {
  std::vector<TokenId> tokens = Tokens(1600);
  const std::vector<BlockKey> before = KeysOf({.tokens = tokens});
  tokens.back() ^= 1;
  EXPECT_EQ(Shared(before, KeysOf({.tokens = tokens})), 99u);
}

TEST(BlockKeyTest, R75R79OnlyFullBlocksHaveKeys) {
  const std::vector<TokenId> tokens = Tokens(1007);
  EXPECT_EQ(KeysOf({.tokens = std::span(tokens).first(15)}).size(), 0u);
  EXPECT_EQ(KeysOf({.tokens = std::span(tokens).first(16)}).size(), 1u);
  EXPECT_EQ(KeysOf({.tokens = std::span(tokens).first(31)}).size(), 1u);
  EXPECT_EQ(KeysOf({.tokens = tokens}).size(), 62u);
  EXPECT_EQ(KeysOf({.tokens = tokens}, {.block_size = 1000}).size(), 0u) << "block size out of range";
  EXPECT_EQ(KeysOf({.tokens = tokens}, {.block_size = 0}).size(), 0u);
  EXPECT_EQ(KeysOf({.tokens = tokens}, {.block_size = -16}).size(), 0u);
  EXPECT_EQ(KeysOf({.text = "only text matches no token prefix"}).size(), 0u);
  EXPECT_EQ(KeysOf({}).size(), 0u);
}

TEST(BlockKeyTest, HashesOnDemandAndGoesOn) {
  const std::vector<TokenId> tokens = Tokens(16 * 5000);
  const Request request{.tokens = tokens, .model = "m"};
  const std::vector<BlockKey> all = KeysOf(request);
  PromptKeys keys;
  keys.Reset({}, request);
  EXPECT_EQ(keys.block_count(), 5000);
  EXPECT_EQ(keys.ready_blocks(), 0);
  for (const std::int64_t blocks : {1, 64, 3, 64, 65, 256, 4999, 5000, 9000}) {
    const std::span<const BlockKey> some = keys.Ensure(blocks);
    ASSERT_EQ(std::ssize(some), std::min<std::int64_t>(blocks, 5000));
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()));
  }
  EXPECT_EQ(keys.Ensure(0).size(), 0u);
  EXPECT_EQ(keys.Ensure(-1).size(), 0u);
  keys.Reset({}, {.tokens = std::span(tokens).subspan(16, 48), .model = "m"});
  EXPECT_EQ(keys.ready_blocks(), 0);
  EXPECT_EQ(keys.Ensure(99).size(), 3u);
}

TEST(BlockKeyTest, GivenKeysAreUsedAsTheyAre) {
  const std::vector<TokenId> tokens = Tokens(64);
  const BlockKey given[] = {5, 0, 7};
  PromptKeys keys;
  keys.Reset({}, {.tokens = tokens, .block_keys = given, .block_size = 16});
  EXPECT_EQ(keys.block_count(), 3);
  EXPECT_EQ(keys.ready_blocks(), 3);
  EXPECT_EQ(keys.Ensure(2).data(), given);
  keys.Reset({}, {.block_keys = given, .block_size = 32});  // Somebody else's block size: no common depth.
  EXPECT_EQ(keys.block_count(), 0);
  EXPECT_EQ(keys.Ensure(3).size(), 0u);
}

TEST(BlockKeyTest, AGiantPromptsBufferIsGivenBackAndMovingWorks) {
  const std::vector<TokenId> tokens = Tokens(16 * 200'000);
  PromptKeys keys;
  keys.Reset({}, {.tokens = tokens});
  const BlockKey last = keys.Ensure(200'000).back();
  PromptKeys moved = std::move(keys);
  EXPECT_EQ(moved.Ensure(200'000).back(), last);
  moved.Reset({}, {.tokens = std::span(tokens).first(160)});
  const std::vector<BlockKey> want = KeysOf({.tokens = std::span(tokens).first(160)});
  const std::span<const BlockKey> got = moved.Ensure(10);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end()));
  keys = std::move(moved);
  EXPECT_EQ(keys.Ensure(10).back(), want.back());
}

TEST(BlockKeyTest, ASeedChangesEveryKey) {
  const std::vector<TokenId> tokens = Tokens(160);
  std::set<BlockKey> keys;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
    for (const BlockKey key : KeysOf({.tokens = tokens}, {.seed = seed})) keys.insert(key);
  }
  EXPECT_EQ(keys.size(), 30u);
  EXPECT_EQ(keys.count(0), 0u);
}

// ---- The reference's scheme ----

std::vector<nlohmann::json> Vectors() {
  std::ifstream file(std::string(TOKROUTE_TESTS_DIR) + "/conformance/prefix-hash.json");
  return nlohmann::json::parse(file).get<std::vector<nlohmann::json>>();
}

TEST(ReferenceBlockHashesTest, ConformanceVectors) {
  int run = 0;
  for (const nlohmann::json& vector : Vectors()) {
    SCOPED_TRACE(vector["name"]);
    const nlohmann::json& given = vector["request"];
    std::vector<TokenId> tokens;
    if (given["tokens"].is_object()) {
      for (TokenId t = given["tokens"]["range"][0]; t <= given["tokens"]["range"][1].get<TokenId>(); ++t)
        tokens.push_back(t);
    } else {
      tokens = given["tokens"].get<std::vector<TokenId>>();
    }
    std::vector<std::uint64_t> want;
    for (const std::string hash : vector["expect"]["hashes"]) want.push_back(std::stoull(hash, nullptr, 16));
    const std::string model = given["model"], salt = given["cacheSalt"];
    const Request request{.tokens = tokens, .model = model, .cache_salt = salt};
    const std::int32_t block_size = vector["params"]["blockSizeTokens"];
    EXPECT_EQ(ReferenceBlockHashes(request, block_size, vector["params"].value("maxBlocks", std::int64_t{0})), want);
    // What the index uses: the same, without the partial last block.
    const std::vector<BlockKey> keys = KeysOf(request, {.block_size = block_size, .scheme = KeyScheme::kXxh64Chain});
    want.resize(std::min(want.size(), tokens.size() / static_cast<std::size_t>(block_size)));
    EXPECT_EQ(std::vector<std::uint64_t>(keys.begin(), keys.begin() + std::ssize(want)), want);
    ++run;
  }
  EXPECT_EQ(run, 10);
}

TEST(ReferenceBlockHashesTest, LimitsAndNamespace) {
  const std::vector<TokenId> tokens = Tokens(100);
  EXPECT_TRUE(ReferenceBlockHashes({.tokens = tokens}, 0).empty());
  EXPECT_TRUE(ReferenceBlockHashes({.tokens = tokens}, -1).empty());
  EXPECT_EQ(ReferenceBlockHashes({.tokens = tokens}, 16).size(), 7u);
  EXPECT_EQ(ReferenceBlockHashes({.tokens = tokens}, 16, 6).size(), 6u);
  EXPECT_EQ(ReferenceBlockHashes({.tokens = tokens}, 1000).size(), 1u);
  const KeyOptions reference{.scheme = KeyScheme::kXxh64Chain};
  const std::vector<BlockKey> base = KeysOf({.tokens = tokens, .model = "m"}, reference);
  EXPECT_EQ(Shared(base, KeysOf({.tokens = tokens, .model = "m", .lora = "l"}, reference)), 0u);
  EXPECT_EQ(base.size(), 6u);
}

}  // namespace
}  // namespace tokroute

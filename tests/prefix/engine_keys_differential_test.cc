// EngineKeys against an obvious model: per endpoint and tier, how many copies of each block. Engines in five hash
// domains tell of the same blocks under names of their own; random events, the same to both; look-ups by tokens must be
// equal, whoever names the blocks how.
//
//   TOKROUTE_TEST_SEED=7 TOKROUTE_TEST_SCALE=20 engine_keys_differential_test
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_run.h"
#include "tokroute/prefix/engine_keys.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
namespace {

using testing_support::kSanitized;

constexpr std::int64_t kBlockSize = 16;
constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

struct Shape {
  const char* name;
  std::uint32_t endpoints;
  std::uint64_t alphabet;  // Contents that a block may have: few make forks everywhere.
  std::size_t depth;       // Of the longest prompt, in engine blocks.
  std::size_t longest_event;
  std::uint32_t parts;  // Of the index's blocks in a block of every third engine.
};

// A prompt: its contents, what identifies each block and those before it, and its tokens.
struct Prompt {
  std::vector<BlockKey> ids;
  std::vector<TokenId> tokens;
};

class Model {
 public:
  using Copies = std::array<std::int32_t, kStorageTiers>;
  explicit Model(std::uint32_t endpoints) : blocks_(endpoints) {}
  void Add(std::uint32_t slot, std::size_t tier, BlockKey id) { ++blocks_[slot][id][tier]; }
  // False: it is not there.
  bool Take(std::uint32_t slot, std::size_t tier, BlockKey id) {
    const auto it = blocks_[slot].find(id);
    if (it == blocks_[slot].end() || it->second[tier] == 0) return false;
    --it->second[tier];
    if (it->second == Copies{}) blocks_[slot].erase(it);
    return true;
  }
  void Clear(std::uint32_t slot) { blocks_[slot].clear(); }
  std::int64_t Match(std::uint32_t slot, std::span<const BlockKey> ids) const {
    std::int64_t matched = 0;
    for (const BlockKey id : ids) {
      if (!blocks_[slot].contains(id)) break;
      ++matched;
    }
    return matched;
  }
  std::int64_t Distinct(std::uint32_t slot) const { return std::ssize(blocks_[slot]); }
  const auto& Of(std::uint32_t slot) const { return blocks_[slot]; }

 private:
  std::vector<std::unordered_map<BlockKey, Copies>> blocks_;
};

class EngineKeysDifferentialTest : public ::testing::TestWithParam<Shape> {};

TEST_P(EngineKeysDifferentialTest, EveryLookUpIsEqual) {
  const Shape shape = GetParam();
  TestRandom random(testing_support::TestSeed(20261201) + shape.depth * 31 + shape.endpoints);
  IndexUser user({.mode = IndexMode::kExact, .max_orphan_blocks = 1 << 24});
  const std::shared_ptr<EngineKeys> keys = *EngineKeys::Create(user.index);
  const std::array<HashDomain, 3> domains{*keys->Domain("a"), *keys->Domain("b"), HashDomain{}};
  Model model(shape.endpoints);
  std::vector<std::uint32_t> incarnations(shape.endpoints, 1);
  // Blocks that were told of, by endpoint: engine keys and what they are.
  struct Told {
    EngineKey key;
    std::vector<BlockKey> ids;
  };
  std::vector<std::vector<Told>> told(shape.endpoints);
  // Engine blocks of several of the index's may begin alike, so that one that an engine does not hold shares some with
  // one that it holds: there only what is held is removed, as engines do. By endpoint and tier: how many copies.
  std::vector<std::array<std::unordered_map<EngineKey, int>, kStorageTiers>> whole(shape.endpoints);
  const auto id_of = [&](std::uint32_t slot) { return EndpointId{slot, incarnations[slot]}; };
  const auto domain_of = [&](std::uint32_t slot) { return domains[slot % 3]; };
  const auto parts_of = [&](std::uint32_t slot) { return slot % 3 == 1 ? shape.parts : 1u; };
  const auto name_of = [&](std::uint32_t slot, BlockKey id) {
    // Own domains: names that mean something else for each.
    return TestRandom(id + (slot % 3 == 2 ? 100 + slot : slot % 3)).Next();
  };
  const auto prompt_of = [&](std::size_t blocks) {
    Prompt prompt;
    const std::uint64_t habit = random.Below(4);
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::uint64_t content = random.OneIn(8) ? random.Below(shape.alphabet) : habit % shape.alphabet;
      prompt.ids.push_back(ChainKey(i > 0 ? prompt.ids.back() : 0, content));
      prompt.tokens.insert(prompt.tokens.end(), kBlockSize, static_cast<TokenId>(content));
    }
    return prompt;
  };
  std::int64_t kept = 0, copies = 0;
  const std::int64_t operations = (kSanitized ? 10'000 : 100'000) * TestScale();
  for (std::int64_t i = 0; i < operations; ++i) {
    const auto slot = static_cast<std::uint32_t>(random.Below(shape.endpoints));
    const std::size_t tier = random.OneIn(4) ? random.Below(kStorageTiers) : 0;
    const KvSource source{id_of(slot), static_cast<StorageTier>(tier)};
    const std::size_t parts = parts_of(slot);
    const std::uint64_t what = random.Below(1000);
    if (what < 450) {
      const std::size_t blocks = 1 + random.Below(shape.depth);
      const Prompt prompt = prompt_of(blocks * parts);
      const std::size_t from = random.OneIn(2) ? 0 : random.Below(blocks);
      const std::size_t count = std::min(blocks - from, 1 + random.Below(shape.longest_event));
      std::vector<EngineKey> names;
      for (std::size_t b = from; b < from + count; ++b) {
        names.push_back(name_of(slot, prompt.ids[(b + 1) * parts - 1]));
        ++whole[slot][tier][names.back()];
        told[slot].push_back({names.back(),
                              {prompt.ids.begin() + static_cast<std::ptrdiff_t>(b * parts),
                               prompt.ids.begin() + static_cast<std::ptrdiff_t>((b + 1) * parts)}});
      }
      EngineBlocks event{.engine_keys = names, .block_size = static_cast<std::int32_t>(kBlockSize * parts)};
      event.tokens = std::span(prompt.tokens).subspan(from * parts * kBlockSize, count * parts * kBlockSize);
      if (from > 0) event.parent = name_of(slot, prompt.ids[from * parts - 1]);
      const KvResult result = keys->Stored(source, domain_of(slot), event);
      ASSERT_TRUE(result == KvResult::kApplied || (from > 0 && result == KvResult::kUnknownParent))
          << ToString(result) << ", operation " << i;
      for (std::size_t b = from * parts; b < (from + count) * parts; ++b) model.Add(slot, tier, prompt.ids[b]);
    } else if (what < 780) {
      std::vector<Told>& mine = told[slot];
      if (mine.empty()) continue;
      std::vector<EngineKey> names;
      std::vector<BlockKey> ids;
      const bool newest_first = random.OneIn(2);
      for (std::uint64_t n = 1 + random.Below(newest_first ? shape.longest_event : 4); n > 0 && !mine.empty(); --n) {
        const std::size_t at = newest_first ? mine.size() - 1 : random.Below(mine.size());
        if (parts == 1 || whole[slot][tier][mine[at].key]-- > 0) {
          names.push_back(mine[at].key);
          ids.insert(ids.end(), mine[at].ids.begin(), mine[at].ids.end());
        } else {
          whole[slot][tier].erase(mine[at].key);
        }
        if (newest_first) mine.pop_back();
      }
      ASSERT_EQ(keys->Removed(source, domain_of(slot), names), KvResult::kApplied);
      for (const BlockKey id : ids) (void)model.Take(slot, tier, id);
    } else if (what < 800) {  // What it holds from the start goes to another tier too.
      const Prompt prompt = prompt_of((1 + random.Below(shape.depth)) * parts);
      const auto matched = static_cast<std::size_t>(model.Match(slot, prompt.ids)) / parts;
      std::vector<EngineKey> names;
      for (std::size_t b = 0; b < matched; ++b) {
        names.push_back(name_of(slot, prompt.ids[(b + 1) * parts - 1]));
        const bool held = std::any_of(whole[slot].begin(), whole[slot].end(), [&](const auto& copies_of) {
          const auto it = copies_of.find(names.back());
          return it != copies_of.end() && it->second > 0;
        });
        if (parts > 1 && !held) {  // The whole of it, that is.
          names.pop_back();
          break;
        }
        ++whole[slot][tier][names.back()];
      }
      ASSERT_EQ(keys->Stored(source, domain_of(slot), {.engine_keys = names}), KvResult::kApplied);
      for (std::size_t b = 0; b < names.size() * parts; ++b) model.Add(slot, tier, prompt.ids[b]);
      copies += std::ssize(names);
    } else if (what < 802) {
      keys->ClearEndpoint(id_of(slot));
      model.Clear(slot);
      told[slot].clear();
      whole[slot] = {};
    } else if (what < 804) {
      if (random.OneIn(2)) keys->RemoveEndpoint(id_of(slot));
      else user.index->RemoveEndpoint(id_of(slot));
      model.Clear(slot);
      told[slot].clear();
      whole[slot] = {};
      ++incarnations[slot];
    } else {
      const Prompt prompt = prompt_of(1 + random.Below(shape.depth * shape.parts));
      user.keys.Reset(user.index->key_options(), {.tokens = prompt.tokens});
      user.index->Match(user.keys, user.match);
      for (std::uint32_t s = 0; s < shape.endpoints; ++s) {
        ASSERT_EQ(user.match.BlocksOf(id_of(s)), model.Match(s, prompt.ids)) << "operation " << i << ", endpoint " << s;
      }
    }
    kept = std::max(kept, keys->Stats().kept_blocks);
    if (i % 5'000 == 0) {
      ASSERT_TRUE(keys->Audit().ok()) << keys->Audit() << ", operation " << i;
      ASSERT_TRUE(user.index->Audit().ok()) << user.index->Audit();
    }
  }
  const EngineKeysStats stats = keys->Stats();
  EXPECT_GT(kept, 0);
  EXPECT_GT(copies, 0);
  EXPECT_GT(stats.adopted_blocks, 0);
  EXPECT_GT(stats.removed_kept_blocks, 0);
  EXPECT_GT(stats.swept_names, 0);
  EXPECT_EQ(stats.conflicts, 0);
  EXPECT_EQ(stats.refused_events, 0);
  EXPECT_EQ(user.index->Stats().conflicting_keys, 0);

  // What is held has a name in each domain that holds it, and what nobody holds has none.
  while (user.index->Sweep(1'000'000) > 0) {
  }
  (void)keys->Sweep(kAll);
  std::int64_t least = 0, own = 0;
  for (std::uint32_t d = 0; d < 3; ++d) {
    std::set<BlockKey> held;
    for (std::uint32_t s = d; s < shape.endpoints; s += 3) {
      if (d == 2) own += model.Distinct(s);
      else
        for (const auto& [id, how_often] : model.Of(s)) held.insert(id);
    }
    least += std::ssize(held);
  }
  const std::int64_t waiting = keys->Stats().kept_blocks;  // Held by the model, and not stored yet.
  EXPECT_GE(keys->Stats().names, least + own - waiting);
  // Parts of engine blocks that begin alike have names for each.
  EXPECT_LE(keys->Stats().names, (1 + shape.parts) * user.index->Stats().distinct_blocks + own);

  for (std::uint32_t s = 0; s < shape.endpoints; ++s) keys->RemoveEndpoint(id_of(s));
  while (user.index->Sweep(1'000'000) > 0) {
  }
  (void)keys->Sweep(kAll);
  ASSERT_TRUE(keys->Audit().ok()) << keys->Audit();
  EXPECT_EQ(keys->Stats().names, 0);
  EXPECT_EQ(keys->Stats().kept_blocks, 0);
  EXPECT_LT(keys->Stats().bytes, 1 << 20);
}

INSTANTIATE_TEST_SUITE_P(Shapes, EngineKeysDifferentialTest,
                         ::testing::Values(Shape{"deep", 6, 3, 100, 40, 2}, Shape{"wide", 9, 40, 20, 16, 3},
                                           Shape{"tiny", 3, 2, 6, 4, 1}, Shape{"shared", 30, 2, 40, 40, 2},
                                           Shape{"single_blocks", 6, 3, 60, 1, 4}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tokroute

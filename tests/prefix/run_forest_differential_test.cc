// The exact index against an obvious model: per endpoint and tier, how many copies of each key. Random events, the same
// to both; after them every look-up must be equal.
//
//   TOKROUTE_TEST_SEED=7 TOKROUTE_TEST_SCALE=20 run_forest_differential_test
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_run.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
namespace {

using testing_support::kSanitized;
using testing_support::TestSeed;

std::int64_t Scale() {
  const char* text = std::getenv("TOKROUTE_TEST_SCALE");
  return text == nullptr ? 1 : std::max<std::int64_t>(std::atoll(text), 1);
}

struct Shape {
  const char* name;
  std::uint32_t endpoints;
  std::uint64_t alphabet;  // Contents that a block may have: few make forks everywhere.
  std::int64_t depth;      // Of the longest prompt.
  std::int64_t longest_event;
  std::uint64_t tiers;
  std::int64_t slowness = 1;  // Of an operation.
};

class Model {
 public:
  using Copies = std::array<std::uint16_t, kStorageTiers>;
  struct Endpoint {
    std::uint32_t incarnation = 1;
    std::unordered_map<BlockKey, Copies> blocks;
    std::vector<BlockKey> known;  // Keys that were stored at some time: what removes draw from.
    std::int64_t held = 0;        // Pairs of block and tier.
  };

  explicit Model(std::uint32_t endpoints) : endpoints_(endpoints) {}
  Endpoint& operator[](std::uint32_t slot) { return endpoints_[slot]; }
  EndpointId Id(std::uint32_t slot) const { return {slot, endpoints_[slot].incarnation}; }

  void Store(std::uint32_t slot, std::size_t tier, std::span<const BlockKey> keys) {
    Endpoint& endpoint = endpoints_[slot];
    for (BlockKey key : keys) {
      std::uint16_t& copies = endpoint.blocks[key][tier];
      if (copies++ == 0) {
        ++endpoint.held;
        endpoint.known.push_back(key);
      }
    }
  }
  void Remove(std::uint32_t slot, std::size_t tier, std::span<const BlockKey> keys) {
    Endpoint& endpoint = endpoints_[slot];
    for (BlockKey key : keys) {
      const auto it = endpoint.blocks.find(key);
      if (it == endpoint.blocks.end() || it->second[tier] == 0) continue;
      if (--it->second[tier] > 0) continue;
      --endpoint.held;
      if (it->second == Copies{}) endpoint.blocks.erase(it);
    }
  }
  void Clear(std::uint32_t slot) {
    endpoints_[slot].blocks.clear();
    endpoints_[slot].known.clear();
    endpoints_[slot].held = 0;
  }
  std::pair<std::int64_t, double> Match(std::uint32_t slot, std::span<const BlockKey> keys) const {
    constexpr std::array<double, kStorageTiers> kWeights = TierWeights{}.InOrder();
    std::int64_t blocks = 0;
    double weighted = 0;
    for (BlockKey key : keys) {
      const auto it = endpoints_[slot].blocks.find(key);
      if (it == endpoints_[slot].blocks.end()) break;
      double best = 0;
      for (std::size_t tier = 0; tier < kStorageTiers; ++tier) {
        if (it->second[tier] > 0) best = std::max(best, kWeights[tier]);
      }
      ++blocks;
      weighted += best;
    }
    return {blocks, weighted};
  }

 private:
  std::vector<Endpoint> endpoints_;
};

class RunForestDifferentialTest : public ::testing::TestWithParam<Shape> {};

TEST_P(RunForestDifferentialTest, EveryLookUpIsEqual) {
  const Shape shape = GetParam();
  const std::uint64_t seed = TestSeed(20261201);
  TestRandom random(seed + static_cast<std::uint64_t>(shape.depth) * 31 + shape.endpoints);
  IndexUser user({.mode = IndexMode::kExact, .max_orphan_blocks = 1 << 24});
  PrefixIndex& index = *user.index;
  Model model(shape.endpoints);
  std::int64_t forks = 0, holes = 0;
  const std::int64_t operations = (kSanitized ? 40'000 : 400'000) * Scale() / shape.slowness;

  // A prompt: mostly goes on where earlier ones went, now and then somewhere new.
  const auto prompt = [&](std::int64_t depth) {
    std::vector<BlockKey> keys(static_cast<std::size_t>(depth));
    BlockKey parent = random.Below(2);
    const std::uint64_t habit = random.Below(4);
    for (BlockKey& key : keys)
      key = parent = ChainKey(parent, random.OneIn(8) ? random.Below(shape.alphabet) : habit % shape.alphabet);
    return keys;
  };
  for (std::int64_t i = 0; i < operations; ++i) {
    const auto slot = static_cast<std::uint32_t>(random.Below(shape.endpoints));
    const std::size_t tier = random.OneIn(3) ? random.Below(shape.tiers) : 0;
    const KvSource source{model.Id(slot), static_cast<StorageTier>(tier)};
    const std::uint64_t what = random.Below(1000);
    if (what < 450) {
      const std::vector<BlockKey> keys =
          prompt(1 + static_cast<std::int64_t>(random.Below(static_cast<std::uint64_t>(shape.depth))));
      // From the start, or as an event of its own from somewhere in the middle, whose parent may be unknown.
      const std::size_t from = random.OneIn(2) ? 0 : random.Below(keys.size());
      const std::size_t count =
          std::min(keys.size() - from, 1 + random.Below(static_cast<std::uint64_t>(shape.longest_event)));
      const std::span<const BlockKey> stored = std::span(keys).subspan(from, count);
      const KvResult result = index.Stored(source, from > 0 ? std::optional(keys[from - 1]) : std::nullopt, stored);
      ASSERT_TRUE(result == KvResult::kApplied || result == KvResult::kUnknownParent) << ToString(result);
      model.Store(slot, tier, stored);
    } else if (what < 800) {
      std::vector<BlockKey>& known = model[slot].known;
      if (known.empty()) continue;
      std::vector<BlockKey> keys;
      if (random.OneIn(2)) {  // What was stored last, last first, as engines free.
        const std::size_t count =
            std::min<std::size_t>(known.size(), 1 + random.Below(static_cast<std::uint64_t>(shape.longest_event)));
        keys.assign(known.rbegin(), known.rbegin() + static_cast<std::ptrdiff_t>(count));
        known.resize(known.size() - count);
      } else {
        for (std::uint64_t n = 1 + random.Below(4); n > 0; --n) keys.push_back(known[random.Below(known.size())]);
      }
      ASSERT_EQ(index.Removed(source, keys), KvResult::kApplied);
      model.Remove(slot, tier, keys);
    } else if (what < 803) {
      index.ClearEndpoint(model.Id(slot));
      model.Clear(slot);
    } else if (what < 805) {
      index.RemoveEndpoint(model.Id(slot));
      model.Clear(slot);
      ++model[slot].incarnation;
    } else {
      const std::vector<BlockKey> keys =
          prompt(1 + static_cast<std::int64_t>(random.Below(static_cast<std::uint64_t>(shape.depth))));
      const PrefixMatch& match = user.Match(keys);
      std::size_t found = 0;
      for (std::uint32_t s = 0; s < shape.endpoints; ++s) {
        const auto [blocks, weighted] = model.Match(s, keys);
        ASSERT_EQ(match.BlocksOf(model.Id(s)), blocks) << "operation " << i << ", endpoint " << s;
        if (blocks == 0) continue;
        ASSERT_LT(found, match.holders().size());
        ASSERT_EQ(match.holders()[found].endpoint, model.Id(s));
        ASSERT_NEAR(match.holders()[found].weighted_blocks, weighted, 1e-9 * static_cast<double>(blocks));
        ++found;
      }
      ASSERT_EQ(found, match.holders().size());
    }
    if (i % 20'000 == 0) {
      ASSERT_TRUE(index.Audit().ok()) << index.Audit() << ", operation " << i;
      for (std::uint32_t s = 0; s < shape.endpoints; ++s) ASSERT_EQ(index.HeldBlocks(model.Id(s)), model[s].held);
    }
  }
  const PrefixIndexStats stats = index.Stats();
  forks = stats.forks, holes = stats.holed_memberships;
  EXPECT_GT(holes, 0) << "the shape must exercise holes";
  EXPECT_GT(forks, 0);
  EXPECT_EQ(stats.conflicting_keys, 0);
  EXPECT_GT(stats.unknown_parents, 0);
  for (std::uint32_t s = 0; s < shape.endpoints; ++s) index.RemoveEndpoint(model.Id(s));
  while (index.Sweep(1'000'000) > 0) {
  }
  ASSERT_TRUE(index.Audit().ok()) << index.Audit();
  EXPECT_EQ(index.Stats().distinct_blocks, 0);
  EXPECT_EQ(index.Stats().holder_blocks, 0);
  EXPECT_LT(index.Stats().bytes, 1 << 20);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RunForestDifferentialTest,
                         ::testing::Values(Shape{"deep", 4, 3, 300, 64, 1}, Shape{"wide", 8, 40, 30, 16, 1},
                                           Shape{"tiny", 3, 2, 6, 4, 4}, Shape{"shared", 40, 2, 60, 60, 2},
                                           Shape{"single_blocks", 6, 3, 100, 1, 1}, Shape{"many", 300, 2, 20, 20, 3, 5},
                                           Shape{"long", 2, 2, 6000, 6000, 1, 60}),
                         [](const auto& test) { return std::string(test.param.name); });

// One writer and two readers. Each endpoint never stores beyond a limit of its own on a path, so no look-up may say
// more, whatever it races with; and at rest all is exact.
TEST(RunForestRaceTest, ReadersNeverSeeMoreThanWasHeld) {
  constexpr std::uint32_t kPaths = 64, kEndpoints = 12;
  const std::uint64_t seed = TestSeed(20261201);
  IndexUser user({.mode = IndexMode::kExact, .max_orphan_blocks = 1 << 24});
  std::vector<std::vector<BlockKey>> paths;
  for (std::uint64_t p = 0; p < kPaths; ++p) {  // Forked off each other, so that runs are shared and paths have many.
    std::vector<BlockKey> keys = p == 0 ? std::vector<BlockKey>{} : paths[p / 2];
    keys.resize(keys.size() * 3 / 4);
    BlockKey parent = keys.empty() ? 7 : keys.back();
    for (int i = 0; i < 40; ++i) keys.push_back(parent = ChainKey(parent, p * 100 + static_cast<std::uint64_t>(i)));
    paths.push_back(keys);
  }
  // Everybody holds at most its limit of blocks of any path: what another path shares with it is within the limit too.
  const auto limit = [](std::uint32_t e) { return std::size_t{3} + 11 * e; };
  std::atomic<bool> stop{false};
  std::atomic<std::int64_t> looked{0};
  std::vector<std::thread> readers;
  for (std::uint64_t r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      IndexUser mine(user.index);
      TestRandom random(seed + r);
      while (!stop.load(std::memory_order_relaxed)) {
        const std::vector<BlockKey>& path = paths[random.Below(kPaths)];
        std::uint32_t previous = 0;
        for (const PrefixMatch::Holder& holder : mine.Match(path).holders()) {
          ASSERT_LE(static_cast<std::size_t>(holder.blocks), std::min(path.size(), limit(holder.endpoint.slot)));
          ASSERT_GE(holder.blocks, 1);
          ASSERT_NEAR(holder.weighted_blocks, static_cast<double>(holder.blocks), 1e-9);
          ASSERT_TRUE(previous == 0 || holder.endpoint.slot > previous - 1);
          previous = holder.endpoint.slot + 1;
        }
        ++looked;
      }
    });
  }
  TestRandom random(seed + 99);
  Model model(kEndpoints);
  const int events = kSanitized ? 20'000 : 200'000;
  for (int i = 0; i < events || looked.load() < 1'000; ++i) {
    const auto slot = static_cast<std::uint32_t>(random.Below(kEndpoints));
    const std::vector<BlockKey>& path = paths[random.Below(kPaths)];
    const std::size_t most = std::min(path.size(), limit(slot)), from = random.OneIn(3) ? random.Below(most) : 0;
    const std::span<const BlockKey> keys = std::span(path).subspan(from, 1 + random.Below(most - from));
    const KvSource source{model.Id(slot)};
    if (random.OneIn(500)) {
      user.index->ClearEndpoint(model.Id(slot));
      model.Clear(slot);
    } else if (random.OneIn(2)) {
      (void)user.index->Stored(source, from > 0 ? std::optional(path[from - 1]) : std::nullopt, keys);
      model.Store(slot, 0, keys);
    } else {
      std::vector<BlockKey> reversed(keys.rbegin(), keys.rend());
      (void)user.index->Removed(source, reversed);
      model.Remove(slot, 0, reversed);
    }
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  ASSERT_TRUE(user.index->Audit().ok()) << user.index->Audit();
  for (const std::vector<BlockKey>& path : paths) {
    const PrefixMatch& match = user.Match(path);
    for (std::uint32_t s = 0; s < kEndpoints; ++s) ASSERT_EQ(match.BlocksOf(model.Id(s)), model.Match(s, path).first);
  }
}

}  // namespace
}  // namespace tokroute

#include "tools/sim/engine.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "tokroute/random.h"
#include "tools/sim/event_queue.h"

namespace tokroute::tools {
namespace {

constexpr Nanoseconds kMs = 1'000'000;
using Keys = std::vector<BlockKey>;

TEST(EventQueueTest, EqualTimesKeepTheOrderOfScheduling) {
  EventQueue<int> events;
  for (int i = 0; i < 50; ++i) events.Schedule(7, i);
  events.Schedule(3, 100);
  EXPECT_EQ(events.Pop(), 100);
  EXPECT_EQ(events.now(), 3);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(events.Pop(), i);
  EXPECT_EQ(events.now(), 7);
  EXPECT_TRUE(events.empty());
}

// Runs keys through a cache at once: as a request does that is alone.
void Use(LruBlockCache& cache, const Keys& keys) {
  const std::int64_t pinned = cache.PinRest(keys, cache.PinMatched(keys));
  cache.Unpin(std::span(keys).first(static_cast<std::size_t>(pinned)));
}

TEST(LruBlockCacheTest, EvictsTheLeastRecentlyUsedTailFirst) {
  LruBlockCache cache(4);
  Use(cache, {1, 2});
  Use(cache, {3, 4});
  EXPECT_EQ(cache.Match(Keys{1, 2}), 2);
  Use(cache, {5});  // Room for one: 2 goes, its parent stays.
  EXPECT_EQ(cache.Match(Keys{1, 2}), 1);
  EXPECT_EQ(cache.Match(Keys{3, 4}), 2);
  Use(cache, {1});  // Refreshed.
  Use(cache, {6});
  EXPECT_EQ(cache.Match(Keys{3, 4}), 1);
  EXPECT_EQ(cache.Match(Keys{1}), 1);
  EXPECT_EQ(cache.size(), 4);
}

TEST(LruBlockCacheTest, MatchRefreshesNothingAndStopsAtTheFirstGap) {
  LruBlockCache cache(2);
  Use(cache, {1});
  Use(cache, {2});
  EXPECT_EQ(cache.Match(Keys{1}), 1);
  Use(cache, {3});
  EXPECT_EQ(cache.Match(Keys{1}), 0);
  EXPECT_EQ(cache.Match(Keys{9, 2}), 0);
}

TEST(LruBlockCacheTest, PinnedBlocksStayAndTheTailIsLeftOut) {
  LruBlockCache cache(3);
  const Keys first = {1, 2}, second = {3, 4, 5};
  EXPECT_EQ(cache.PinRest(first, cache.PinMatched(first)), 2);
  EXPECT_EQ(cache.PinRest(second, cache.PinMatched(second)), 1);  // Only 3 fits.
  EXPECT_EQ(cache.size(), 3);
  cache.Unpin(std::span(second).first(1));
  EXPECT_EQ(cache.PinMatched(first), 2);  // Pinned twice now.
  cache.Unpin(first);
  Use(cache, {6, 7});
  EXPECT_EQ(cache.Match(first), 2);
  EXPECT_EQ(cache.Match(second), 0);
  cache.Unpin(first);
  Use(cache, {8, 9, 10});
  EXPECT_EQ(cache.Match(first), 0);
}

TEST(LruBlockCacheTest, EqualsAnObviousModel) {
  // Chains over a small alphabet: key = path, so that prefixes are shared.
  constexpr std::int64_t kCapacity = 20;
  LruBlockCache cache(kCapacity);
  struct Held {
    BlockKey key;
    int pins;
  };
  std::vector<Held> model;  // Oldest first; pinned ones have no meaning in the order.
  const auto find = [&](BlockKey key) {
    return std::find_if(model.begin(), model.end(), [&](const Held& held) { return held.key == key; });
  };
  struct Live {
    Keys keys;
    std::size_t pinned;
  };
  std::vector<Live> live;
  Random random(1);
  for (int step = 0; step < 20000; ++step) {
    if (live.size() < 5 && random.Below(2) == 0) {
      Keys keys;
      BlockKey path = 1;
      for (std::uint32_t i = 1 + random.Below(8); i > 0; --i) keys.push_back(path = path * 4 + random.Below(3));
      std::size_t expected_match = 0;
      while (expected_match < keys.size() && find(keys[expected_match]) != model.end()) ++expected_match;
      ASSERT_EQ(cache.Match(keys), static_cast<std::int64_t>(expected_match));
      ASSERT_EQ(cache.PinMatched(keys), static_cast<std::int64_t>(expected_match));
      for (std::size_t i = 0; i < expected_match; ++i) ++find(keys[i])->pins;
      std::size_t pinned = expected_match;
      for (; pinned < keys.size(); ++pinned) {
        if (const auto held = find(keys[pinned]); held != model.end()) {
          ++held->pins;
          continue;
        }
        if (model.size() == static_cast<std::size_t>(kCapacity)) {
          const auto victim = std::find_if(model.begin(), model.end(), [](const Held& h) { return h.pins == 0; });
          if (victim == model.end()) break;
          model.erase(victim);
        }
        model.push_back({keys[pinned], 1});
      }
      ASSERT_EQ(cache.PinRest(keys, static_cast<std::int64_t>(expected_match)), static_cast<std::int64_t>(pinned));
      live.push_back({keys, pinned});
    } else if (!live.empty()) {
      const std::uint32_t which = random.Below(static_cast<std::uint32_t>(live.size()));
      const Live ended = live[which];
      live.erase(live.begin() + which);
      for (std::size_t i = ended.pinned; i-- > 0;) {
        const auto held = find(ended.keys[i]);
        ASSERT_NE(held, model.end());
        if (--held->pins == 0) {
          const Held moved = *held;
          model.erase(held);
          model.push_back(moved);
        }
      }
      cache.Unpin(std::span(ended.keys).first(ended.pinned));
    }
    ASSERT_EQ(cache.size(), static_cast<std::int64_t>(model.size()));
    ASSERT_LE(cache.size(), kCapacity);
  }
}

// 1000 tokens/s prefill (1 ms a token), 10 ms a token decode, blocks of 16 tokens.
EngineOptions SmallEngine(std::int64_t max_running = 0) {
  return {.prefill_tokens_per_s = 1000,
          .decode_ns = 10 * kMs,
          .capacity_blocks = 100,
          .block_size = 16,
          .max_running = max_running};
}

TEST(SerialEngineTest, FollowsAHandComputedSchedule) {
  SerialEngine engine(SmallEngine());
  const Keys shared = {1, 2, 3}, own = {1, 2, 7, 8};
  EXPECT_TRUE(engine.idle());
  EXPECT_FALSE(engine.TryStart(0).has_value());

  // At 0: 50 tokens, 3 full blocks, nothing cached: prefill 0 .. 50 ms.
  engine.Enqueue({.id = 10, .prompt_tokens = 50, .output_tokens = 4, .block_keys = shared});
  const auto first = engine.TryStart(0);
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->id, 10U);
  EXPECT_EQ(first->hit_tokens, 0);
  EXPECT_EQ(first->prefill_end, 50 * kMs);

  // At 20 ms: two more wait. The blocks of the first are not there before its prefill has ended.
  engine.Enqueue({.id = 11, .prompt_tokens = 70, .output_tokens = 1, .block_keys = own});
  engine.Enqueue({.id = 12, .prompt_tokens = 48, .output_tokens = 2, .block_keys = shared});
  EXPECT_FALSE(engine.TryStart(20 * kMs).has_value());
  EXPECT_EQ(engine.MatchTokens(own), 0);

  // At 50 ms: the first token; three more at 10 ms each. The next prefill finds 2 blocks: 70 - 32 = 38 ms.
  EXPECT_EQ(engine.EndPrefill(50 * kMs).finish, 80 * kMs);
  const auto second = engine.TryStart(50 * kMs);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->id, 11U);
  EXPECT_EQ(second->hit_tokens, 32);
  EXPECT_EQ(second->prefill_end, 88 * kMs);

  engine.Finish(10);  // At 80 ms.
  // At 88 ms: one token of output, so it ends with its first. The last is cached in full: its last token is computed.
  EXPECT_EQ(engine.EndPrefill(88 * kMs).finish, 88 * kMs);
  const auto third = engine.TryStart(88 * kMs);
  ASSERT_TRUE(third.has_value());
  EXPECT_EQ(third->hit_tokens, 48);
  EXPECT_EQ(third->prefill_end, 89 * kMs);
  engine.Finish(11);
  EXPECT_EQ(engine.EndPrefill(89 * kMs).finish, 99 * kMs);
  EXPECT_FALSE(engine.idle());
  engine.Finish(12);
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(engine.cache().size(), 5);  // 1, 2, 3, 7, 8.
}

TEST(SerialEngineTest, MaxRunningHoldsPrefillsBack) {
  SerialEngine engine(SmallEngine(/*max_running=*/1));
  engine.Enqueue({.id = 1, .prompt_tokens = 10, .output_tokens = 3});
  engine.Enqueue({.id = 2, .prompt_tokens = 10, .output_tokens = 3});
  ASSERT_TRUE(engine.TryStart(0).has_value());
  EXPECT_EQ(engine.EndPrefill(10 * kMs).finish, 30 * kMs);
  EXPECT_FALSE(engine.TryStart(10 * kMs).has_value());  // The first still decodes.
  engine.Finish(1);
  const auto second = engine.TryStart(30 * kMs);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->prefill_end, 40 * kMs);
}

TEST(SerialEngineTest, PrefillTimeIsRoundedToANanosecond) {
  SerialEngine engine({.prefill_tokens_per_s = 3, .decode_ns = 1, .capacity_blocks = 1, .block_size = 16});
  engine.Enqueue({.id = 1, .prompt_tokens = 2, .output_tokens = 1});
  EXPECT_EQ(engine.TryStart(5)->prefill_end, 5 + 666'666'667);
}

}  // namespace
}  // namespace tokroute::tools

// Once at capacity, a request's way through the index allocates nothing. A program of its own, since it counts every
// operator new.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/replaced_new.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
namespace {

std::atomic<std::int64_t> allocations{0};

TEST(PrefixIndexAllocationTest, NoneOnceAtCapacity) {
  if (!testing_support::kReplacesNew) GTEST_SKIP() << "allocations cannot be counted in this build";
  testing_support::on_allocation = [] { return allocations.fetch_add(1, std::memory_order_relaxed), true; };
  constexpr std::uint32_t kEndpoints = 8;
  IndexUser user({.default_capacity_tokens = 16 * 3000});
  PrefixIndex& index = *user.index;
  TestRandom random(1);
  // Conversations over a few system prompts, of tokens, so that hashing is in it as well.
  std::vector<std::vector<TokenId>> prompts(200);
  for (std::vector<TokenId>& prompt : prompts) {
    prompt.resize(16 * (100 + random.Below(300)) + random.Below(16));
    const std::uint64_t system = random.Below(4);
    for (std::size_t i = 0; i < prompt.size(); ++i) {
      prompt[i] = static_cast<TokenId>(i < 16 * 64 ? system * 100'000 + i : random.Next());
    }
  }
  std::vector<PrefixReceipt> live(16);
  std::vector<TokenId> tokens;
  tokens.reserve(16 * 400);
  std::int64_t allocated = 0;
  const auto request = [&] {
    tokens = prompts[random.Below(prompts.size())];
    if (random.OneIn(2)) tokens.resize(16 * (1 + random.Below(tokens.size() / 16)));
    if (random.OneIn(3)) tokens[tokens.size() / 2] ^= static_cast<TokenId>(random.Next());  // Never seen: forks.
    const EndpointId id{static_cast<std::uint32_t>(random.Below(kEndpoints)), 1};
    PrefixReceipt& receipt = live[random.Below(live.size())];
    const std::int64_t before = allocations.load();
    user.keys.Reset(index.key_options(), {.tokens = tokens, .model = "m"});
    index.Match(user.keys, user.match);
    index.OnReleased(receipt, random.OneIn(4));
    receipt = index.Record(id, user.keys, nullptr);
    if (random.OneIn(2)) index.OnFirstToken(receipt);
    if (random.OneIn(8))
      receipt = index.Move(receipt, {static_cast<std::uint32_t>(random.Below(kEndpoints)), 1}, nullptr);
    allocated += allocations.load() - before;
  };
  for (int i = 0; i < 60'000; ++i) request();
  for (std::uint32_t slot = 0; slot < kEndpoints; ++slot) EXPECT_GT(index.HeldBlocks({slot, 1}), 2500);
  EXPECT_GT(allocated, 0) << "the counter counts";
  allocated = 0;
  for (int i = 0; i < 20'000; ++i) request();
  EXPECT_EQ(allocated, 0);
  EXPECT_TRUE(index.Audit().ok()) << index.Audit();
}

}  // namespace
}  // namespace tokroute

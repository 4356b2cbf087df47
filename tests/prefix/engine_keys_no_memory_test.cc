// EngineKeys when the system has no memory, at every allocation of a series of events in turn. A program of its own,
// since it replaces operator new.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/replaced_new.h"
#include "tokroute/prefix/engine_keys.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
namespace {

using testing_support::kReplacesNew;

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
std::int64_t left = kNever;  // Allocations that succeed; then `failures` fail.
std::int64_t failures = 0, failed = 0;

bool MayAllocate() {
  if (left == kNever) return true;
  if (left > 0) return --left, true;
  if (failures == 0) return true;
  --failures;
  ++failed;
  return false;
}

// What was taken can be removed by its names, and then nothing is left; what was not wants a resync.
TEST(EngineKeysNoMemoryTest, EveryAllocationMayFail) {
  if (!kReplacesNew) GTEST_SKIP() << "allocations cannot fail in this build";
  testing_support::on_allocation = &MayAllocate;
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  constexpr std::size_t kBlocks = 400;
  TestRandom random(1);
  std::vector<TokenId> tokens(kBlocks * 16);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random.Next());
  std::vector<EngineKey> names(kBlocks);
  for (EngineKey& name : names) name = random.Next();
  const std::vector<MediaSpan> media{{.first_token = 3, .token_count = 40, .content_hash = 5}};
  const auto event = [&](std::size_t from, std::size_t to) {
    EngineBlocks blocks{.engine_keys = std::span(names).subspan(from, to - from), .media = media};
    blocks.tokens = std::span(tokens).subspan(from * 16, (to - from) * 16);
    if (from > 0) blocks.parent = names[from - 1];
    return blocks;
  };
  bool any = true;
  std::int64_t runs = 0, refused = 0;
  for (const std::int64_t at_once : {std::int64_t{1}, std::int64_t{3}, std::int64_t{1000}}) {
    any = true;
    for (std::int64_t n = 0; any; ++n, ++runs) {
      IndexUser user({.mode = IndexMode::kExact});
      const std::shared_ptr<EngineKeys> keys = *EngineKeys::Create(user.index);
      const HashDomain shared = *keys->Domain("shared");
      (void)keys->Sequence(kA, 0);
      (void)keys->Sequence(kB, 0);
      left = n, failures = at_once, failed = 0;
      bool whole = true;
      const auto store = [&](EndpointId id, HashDomain domain, std::size_t from, std::size_t to, KvResult expected) {
        whole &= keys->Stored({id}, domain, event(from, to)) == expected;
      };
      store(kA, shared, 220, 250, KvResult::kUnknownParent);
      store(kA, shared, 250, 400, KvResult::kUnknownParent);
      store(kB, {}, 0, 300, KvResult::kApplied);
      store(kB, {}, 350, 360, KvResult::kUnknownParent);
      (void)keys->Removed({kA}, shared, std::span(names).subspan(225, 3));
      store(kA, shared, 0, 220, KvResult::kApplied);
      (void)keys->Removed({kB}, {}, std::span(names).subspan(100, 200));
      any = failed > 0;
      left = kNever;
      ASSERT_TRUE(keys->Audit().ok()) << keys->Audit() << ", allocation " << n;
      ASSERT_TRUE(user.index->Audit().ok()) << user.index->Audit();
      if (!any) {
        EXPECT_EQ(user.index->HeldBlocks(kA), 397);
        EXPECT_EQ(user.index->HeldBlocks(kB), 100);
      }
      if (!whole) {
        ++refused;
        ASSERT_TRUE(user.index->WantsResync(kA) || user.index->WantsResync(kB)) << "allocation " << n;
      }
      (void)keys->Removed({kA}, shared, names);
      (void)keys->Removed({kB}, {}, names);
      ASSERT_EQ(user.index->Stats().distinct_blocks, 0) << "allocation " << n;
      (void)keys->Sweep(kAll);
      ASSERT_EQ(keys->Stats().names, 0) << "allocation " << n;
      ASSERT_EQ(keys->Stats().kept_blocks, 0) << "allocation " << n;
      ASSERT_TRUE(keys->Audit().ok()) << keys->Audit() << ", allocation " << n;
    }
  }
  EXPECT_GT(runs, 300);
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace tokroute

// Save and Load of an exact index: round trips, merging, and bytes that are refused.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
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

using Bytes = std::vector<std::byte>;

Bytes Saved(const PrefixIndex& index) {
  Bytes bytes;
  const absl::Status status = index.Save([&](std::span<const std::byte> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  return bytes;
}
// In pieces of odd sizes, as a stream comes.
absl::Status Loaded(
    PrefixIndex& index, const Bytes& bytes,
    const std::function<EndpointId(EndpointId)>& endpoint_of = [](EndpointId id) { return id; }) {
  std::size_t at = 0;
  return index.Load(
      [&](std::span<std::byte> room) {
        const std::size_t count = std::min({room.size(), bytes.size() - at, std::size_t{777}});
        std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), count, room.begin());
        at += count;
        return count;
      },
      endpoint_of);
}
std::shared_ptr<PrefixIndex> Exact(PrefixIndexOptions options = {}) {
  options.mode = IndexMode::kExact;
  return *PrefixIndex::Create(options);
}

// Ten endpoints with forks, holes, tiers and an orphan each.
struct World {
  std::shared_ptr<PrefixIndex> index = Exact();
  std::vector<std::vector<BlockKey>> prompts;
  World() {
    TestRandom random(testing_support::TestSeed(7));
    for (std::uint64_t p = 0; p < 200; ++p) {
      std::vector<BlockKey> keys = p < 3 ? std::vector<BlockKey>{} : prompts[p / 2];
      keys.resize(keys.size() * 2 / 3);
      BlockKey parent = keys.empty() ? p + 1 : keys.back();
      for (std::uint64_t i = random.Below(60) + 1; i > 0; --i) keys.push_back(parent = ChainKey(parent, p * 100 + i));
      prompts.push_back(keys);
    }
    for (int i = 0; i < 1'500; ++i) {
      const KvSource source{{static_cast<std::uint32_t>(random.Below(10)), 3},
                            static_cast<StorageTier>(random.Below(2))};
      const std::span<const BlockKey> keys(prompts[random.Below(prompts.size())]);
      const std::size_t from = random.OneIn(3) ? random.Below(keys.size()) : 0;
      (void)index->Stored(source, from > 0 ? std::optional(keys[from - 1]) : std::nullopt, keys.subspan(from));
      if (random.OneIn(2)) (void)index->Removed(source, keys.subspan(random.Below(keys.size()), 1));
    }
    for (std::uint32_t slot = 0; slot < 10; ++slot)
      (void)index->Sequence({slot, 3}, 0), (void)index->Sequence({slot, 3}, 1);
  }
};

void ExpectEqual(PrefixIndex& a, PrefixIndex& b, const World& world, std::uint32_t incarnation_in_b) {
  IndexUser user_a{std::shared_ptr<PrefixIndex>(std::shared_ptr<void>(), &a)},
      user_b{std::shared_ptr<PrefixIndex>(std::shared_ptr<void>(), &b)};
  std::int64_t found = 0;
  for (const std::vector<BlockKey>& keys : world.prompts) {
    const PrefixMatch& in_a = user_a.Match(keys);
    const PrefixMatch& in_b = user_b.Match(keys);
    ASSERT_EQ(in_a.holders().size(), in_b.holders().size());
    for (std::size_t i = 0; i < in_a.holders().size(); ++i) {
      ASSERT_EQ(in_a.holders()[i].endpoint.slot, in_b.holders()[i].endpoint.slot);
      ASSERT_EQ(in_b.holders()[i].endpoint.incarnation, incarnation_in_b);
      ASSERT_EQ(in_a.holders()[i].blocks, in_b.holders()[i].blocks);
      ASSERT_DOUBLE_EQ(in_a.holders()[i].weighted_blocks, in_b.holders()[i].weighted_blocks);
      ++found;
    }
  }
  EXPECT_GT(found, 200);
  EXPECT_EQ(a.Stats().holder_blocks, b.Stats().holder_blocks);
  EXPECT_EQ(a.Stats().distinct_blocks, b.Stats().distinct_blocks);
  EXPECT_TRUE(b.Audit().ok()) << b.Audit();
}

TEST(PrefixSnapshotTest, R113EveryLookUpIsEqualAfterALoad) {
  const World world;
  ASSERT_GT(world.index->Stats().holed_memberships, 0);
  ASSERT_GT(world.index->Stats().unknown_parents, 0);
  const auto copy = Exact();
  ASSERT_TRUE(Loaded(*copy, Saved(*world.index)).ok());
  ExpectEqual(*world.index, *copy, world, 3);
  EXPECT_EQ(copy->Sequence({4, 3}, 1), KvSequence::kDuplicate) << "the sequence goes on";
  EXPECT_EQ(copy->Sequence({4, 3}, 2), KvSequence::kNext);
}

TEST(PrefixSnapshotTest, EndpointsMayBeOthersNow) {
  const World world;
  const auto copy = Exact();
  ASSERT_TRUE(Loaded(*copy, Saved(*world.index), [](EndpointId id) { return EndpointId{id.slot, 8}; }).ok());
  ExpectEqual(*world.index, *copy, world, 8);
  const auto some = Exact();
  ASSERT_TRUE(Loaded(*some, Saved(*world.index), [](EndpointId id) { return id.slot == 4 ? id : EndpointId{}; }).ok());
  EXPECT_EQ(some->HeldBlocks({4, 3}), world.index->HeldBlocks({4, 3}));
  EXPECT_EQ(some->Stats().endpoints, 1);
  EXPECT_TRUE(some->Audit().ok()) << some->Audit();
}

TEST(PrefixSnapshotTest, R89LoadingAgainAddsNothing) {
  const World world;
  const Bytes bytes = Saved(*world.index);
  const auto copy = Exact();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Loaded(*copy, bytes).ok());
  ExpectEqual(*world.index, *copy, world, 3);
  EXPECT_EQ(copy->Stats().duplicate_blocks, 0);
  // One remove is enough for each.
  for (std::uint32_t slot = 0; slot < 10; ++slot) {
    for (const StorageTier tier : {StorageTier::kDevice, StorageTier::kHost}) {
      for (const auto& keys : world.prompts) (void)copy->Removed({{slot, 3}, tier}, keys);
    }
  }
  EXPECT_EQ(copy->Stats().distinct_blocks, 0);
}

TEST(PrefixSnapshotTest, APeersSnapshotIsMerged) {
  const auto mine = Exact(), peers = Exact();
  const std::vector<BlockKey> shared = LongChain(1, 60), own = LongChain(2, 20), other = LongChain(3, 20);
  (void)mine->Stored({{0, 1}}, std::nullopt, std::span(shared).first(30));
  (void)mine->Stored({{0, 1}}, std::nullopt, own);
  (void)peers->Stored({{0, 1}}, std::nullopt, shared);
  (void)peers->Stored({{1, 1}}, std::nullopt, other);
  ASSERT_TRUE(Loaded(*mine, Saved(*peers)).ok());
  IndexUser user(mine);
  EXPECT_EQ(user.Matched({0, 1}, shared), 60);
  EXPECT_EQ(user.Matched({0, 1}, own), 20);
  EXPECT_EQ(user.Matched({1, 1}, other), 20);
  EXPECT_EQ(mine->Stats().holder_blocks, 100);
  EXPECT_TRUE(mine->Audit().ok()) << mine->Audit();
}

TEST(PrefixSnapshotTest, AnyTruncationAndAnyChangedByteIsRefusedAndChangesNothing) {
  const auto small = Exact();
  for (std::uint64_t i = 1; i < 6; ++i)
    (void)small->Stored({{static_cast<std::uint32_t>(i), 1}}, std::nullopt, LongChain(i, 9));
  const std::vector<BlockKey> first = LongChain(1, 9);
  (void)small->Removed({{1, 1}}, std::span(first).subspan(4, 1));
  const Bytes bytes = Saved(*small);
  const auto target = Exact();
  const std::vector<BlockKey> held = LongChain(77, 5);
  (void)target->Stored({{0, 1}}, std::nullopt, held);
  const auto expect_untouched = [&](const absl::Status& status, std::size_t at) {
    ASSERT_FALSE(status.ok()) << at;
    ASSERT_EQ(target->Stats().holder_blocks, 5) << at;
    ASSERT_EQ(target->Stats().endpoints, 1) << at;
  };
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    expect_untouched(Loaded(*target, Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size))), size);
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes changed = bytes;
    changed[i] ^= std::byte{0x10};
    expect_untouched(Loaded(*target, changed), i);
  }
  Bytes longer = bytes;
  longer.push_back({});
  expect_untouched(Loaded(*target, longer), bytes.size());
  EXPECT_TRUE(Loaded(*target, bytes).ok());
  EXPECT_EQ(target->Stats().holder_blocks, 5 + 44);
}

TEST(PrefixSnapshotTest, WhatIsForeignIsNamed) {
  const auto index = Exact();
  (void)index->Stored({{1, 1}}, std::nullopt, LongChain(1, 9));
  const Bytes bytes = Saved(*index);
  const auto message = [&](PrefixIndexOptions options) {
    return std::string(Loaded(*Exact(options), bytes).message());
  };
  EXPECT_THAT(message({.block_size = 32}), HasSubstr("block_size: want 32, got 16"));
  EXPECT_THAT(message({.scheme = KeyScheme::kXxh64Chain}), HasSubstr("scheme: want 1, got 0"));
  EXPECT_THAT(message({.key_seed = 9}), HasSubstr("key_seed"));
  Bytes version = bytes;
  version[8] = std::byte{2};
  EXPECT_THAT(std::string(Loaded(*Exact(), version).message()), HasSubstr("version: want 1, got 2"));
  Bytes magic = bytes;
  magic[0] = std::byte{'x'};
  EXPECT_THAT(std::string(Loaded(*Exact(), magic).message()), HasSubstr("not a snapshot"));
  EXPECT_EQ(Loaded(**PrefixIndex::Create({}), bytes).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*PrefixIndex::Create({}))->Save([](auto) { return true; }).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(index->Save([](auto) { return false; }).code(), absl::StatusCode::kUnavailable);
}

TEST(PrefixSnapshotTest, EventsGoOnWhileItIsSaved) {
  const World world;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::uint64_t i = 0; !stop.load(); ++i) {
      const std::vector<BlockKey> keys = LongChain(1'000 + i % 50, 30);
      (void)world.index->Stored({{11, 1}}, std::nullopt, keys);
      (void)world.index->Removed({{11, 1}}, keys);
    }
  });
  for (int i = 0; i < 20; ++i) {
    const auto copy = Exact();
    ASSERT_TRUE(
        Loaded(*copy, Saved(*world.index), [](EndpointId id) { return id.slot < 10 ? id : EndpointId{}; }).ok());
    ExpectEqual(*copy, *copy, world, 3);
    EXPECT_EQ(copy->HeldBlocks({4, 3}), world.index->HeldBlocks({4, 3}));
  }
  stop = true;
  writer.join();
  EXPECT_TRUE(world.index->Audit().ok()) << world.index->Audit();
}

}  // namespace
}  // namespace tokroute

// EngineKeys when the system has no memory, at every allocation of a series of events in turn. A program of its own,
// since it replaces operator new.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "tokroute/prefix/engine_keys.h"
#include "tokroute/prefix/prefix_index.h"

// ThreadSanitizer's runtime brings its own operator new, which cannot be replaced beside it. Nothing here has threads.
#if defined(__SANITIZE_THREAD__)
#define TOKROUTE_TEST_FAILS 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TOKROUTE_TEST_FAILS 0
#endif
#endif
#ifndef TOKROUTE_TEST_FAILS
#define TOKROUTE_TEST_FAILS 1
#endif

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
std::int64_t left = kNever;  // Allocations that succeed; then `failures` fail.
std::int64_t failures = 0, failed = 0;

#if TOKROUTE_TEST_FAILS
// Not inlined: GCC would see a pointer from operator new reach free, and warn.
[[gnu::noinline]] void Free(void* memory) noexcept { std::free(memory); }

[[gnu::noinline]] void* Allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (left != kNever) {
    if (left == 0 && failures > 0) {
      --failures;
      ++failed;
      return nullptr;
    }
    if (left > 0) --left;
  }
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes != 0 ? bytes : 1);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  void* memory = Allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
#endif

}  // namespace

#if TOKROUTE_TEST_FAILS
void* operator new(std::size_t bytes) { return AllocateOrThrow(bytes, 1); }
void* operator new[](std::size_t bytes) { return AllocateOrThrow(bytes, 1); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t at) {
  return AllocateOrThrow(bytes, static_cast<std::size_t>(at));
}
void* operator new(std::size_t bytes, std::align_val_t at, const std::nothrow_t&) noexcept {
  return Allocate(bytes, static_cast<std::size_t>(at));
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete[](void* memory) noexcept { Free(memory); }
void operator delete(void* memory, std::size_t) noexcept { Free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { Free(memory); }
#endif

namespace tokroute {
namespace {

// What was taken can be removed by its names, and then nothing is left; what was not wants a resync.
TEST(EngineKeysNoMemoryTest, EveryAllocationMayFail) {
  if (!TOKROUTE_TEST_FAILS) GTEST_SKIP() << "allocations cannot fail in this build";
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
  constexpr EndpointId kA{0, 1}, kB{1, 1};
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
      // The index has what it needs for some runs more: this is about EngineKeys.
      const std::vector<BlockKey> other = LongChain(9, 3);
      ASSERT_EQ(user.index->Stored({{2, 1}}, std::nullopt, other), KvResult::kApplied);
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
      ASSERT_EQ(user.index->Stats().distinct_blocks, 3) << "allocation " << n;
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

// Once warm, nothing in the life of a request allocates: Route, FirstToken, Finish, drop, refusal, MoveTo, Reroute,
// Evaluate, with a prefix index at its capacity.
//
// Counted at malloc where that can be replaced (glibc), else at operator new. Sanitizers bring their own allocator: there
// the test runs and counts nothing, and says so.

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "support/test_fleet.h"
#include "support/test_run.h"
#include "tokroute/tokroute.h"

namespace {
std::atomic<std::int64_t> allocations{0};
thread_local bool counting = false;
[[maybe_unused]] void Count() noexcept {
  if (counting) allocations.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

#if !defined(TOKROUTE_TEST_SANITIZED)
#if defined(__GLIBC__)
extern "C" {
void* __libc_malloc(std::size_t);                 // NOLINT: glibc's names.
void* __libc_calloc(std::size_t, std::size_t);    // NOLINT
void* __libc_realloc(void*, std::size_t);         // NOLINT
void* __libc_memalign(std::size_t, std::size_t);  // NOLINT
void* malloc(std::size_t bytes) { return Count(), __libc_malloc(bytes); }
void* calloc(std::size_t count, std::size_t bytes) { return Count(), __libc_calloc(count, bytes); }
void* realloc(void* old, std::size_t bytes) { return Count(), __libc_realloc(old, bytes); }
void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return Count(), __libc_memalign(alignment, bytes); }
void* memalign(std::size_t alignment, std::size_t bytes) { return Count(), __libc_memalign(alignment, bytes); }
int posix_memalign(void** out, std::size_t alignment, std::size_t bytes) {
  Count();
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}
}
#else
void* operator new(std::size_t bytes) {
  Count();
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Count(), std::malloc(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
#endif
#endif

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using testing_support::AddEndpoints;
using testing_support::MakePrompt;
using testing_support::Upstream;

// Allocations of this thread while `work` runs.
template <class Work>
std::int64_t CountAllocations(Work&& work) {
  const std::int64_t before = allocations.load();
  counting = true;
  work();
  counting = false;
  return allocations.load() - before;
}

// The same once the very same work has been done a few times: every pool has then been as full as it gets.
template <class Work>
std::int64_t CountOnceWarm(Work&& work) {
  for (int round = 0; round < 8; ++round) work();
  return CountAllocations(work);
}

class AllocationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing_support::kSanitized) GTEST_LOG_(INFO) << "a sanitizer owns the allocator: allocations are not counted";
  }

  AllocationTest() {
    index_ = *PrefixIndex::Create({.block_size = 16, .default_capacity_tokens = 16'384, .max_bytes = 8 << 20});
    ids_ = AddEndpoints(fleet_, 16);
    auto router = PrefillBound(fleet_, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 1s, .seed = 9, .index = index_});
    EXPECT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
    for (std::uint64_t i = 0; i < 2'000; ++i) prompts_.push_back(MakePrompt(i, 500 + i % 1'500));
  }

  // Several times as much as the endpoints can cache.
  void FillIndex() {
    for (const auto& prompt : prompts_) {
      auto routed = router_->Route({.tokens = prompt});
      routed->FirstToken();
      routed->Finish();
    }
    EXPECT_GT(index_->Stats().evicted_blocks, 0);
    EXPECT_GT(index_->Stats().holder_blocks, 9 * 16 * 1'024 / 10);  // Nine tenths of all capacity.
  }

  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_;
  std::shared_ptr<PrefixIndex> index_;
  std::optional<Router<Upstream>> router_;
  std::vector<std::vector<TokenId>> prompts_;
};

TEST_F(AllocationTest, TheCounterCounts) {
  if (testing_support::kSanitized) GTEST_SKIP() << "not counted under a sanitizer";
  std::vector<int>* made = nullptr;
  EXPECT_GE(CountAllocations([&] { made = new std::vector<int>(100); }), 2);
  delete made;
}

TEST_F(AllocationTest, AWarmRouterAllocatesNothingPerRequest) {
  FillIndex();
  EXPECT_EQ(CountOnceWarm([&] {
    for (const auto& prompt : prompts_) {
      auto routed = router_->Route({.tokens = prompt, .model = "any"});
      if (!routed.ok()) std::abort();
      routed->FirstToken();
      routed->Finish({.output_tokens = 10, .cached_tokens = 16});
    }
  }), 0) << "routed, streamed, finished, destroyed";
  EXPECT_EQ(CountOnceWarm([&] {
    for (const auto& prompt : prompts_) (void)router_->Route({.tokens = prompt});
  }), 0) << "dropped before the first token";
  EXPECT_EQ(CountOnceWarm([&] {
    for (const auto& prompt : prompts_) router_->Route({.tokens = prompt})->FirstToken();
  }), 0) << "dropped after the first token";
  EXPECT_EQ(CountOnceWarm([&] {
    for (const auto& prompt : prompts_) (void)router_->Evaluate({.tokens = prompt});
  }), 0) << "evaluated";
  EXPECT_EQ(CountOnceWarm([&] {
    const EndpointId exclude[] = {ids_[2], ids_[5]};
    const LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, ""}};
    for (const auto& prompt : prompts_) {
      auto routed = router_->Route({.tokens = prompt}, {.exclude = exclude, .legs = legs});
      routed->Deadline(5s);
      if (routed->endpoint_id(Leg::kDecode).incarnation == 0) std::abort();
    }
  }), 0) << "two legs, exclusion, deadline";
  EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
}

TEST_F(AllocationTest, RetriesAllocateNothing) {
  FillIndex();
  EXPECT_EQ(CountOnceWarm([&] {
    for (std::size_t i = 0; i < prompts_.size(); ++i) {
      auto routed = router_->Route({.tokens = prompts_[i]});
      if (i % 2 == 0) routed->FirstToken();
      if (!router_->Reroute(*routed, {.tokens = prompts_[i]})) std::abort();
      if (!routed->MoveTo(ids_[i % 16])) std::abort();
      if (routed->MoveTo({})) std::abort();
      Ticket<Upstream> moved = std::move(routed).Take();
      if (i % 3 == 0) moved.Finish();
    }
  }), 0);
}

TEST_F(AllocationTest, RefusalsAllocateNothing) {
  FillIndex();
  const auto storm = [&](int rounds) {
    for (int i = 0; i < rounds; ++i) {
      const auto& prompt = prompts_[static_cast<std::size_t>(i) % prompts_.size()];
      if (router_->Route({.tokens = prompt}, {.policy = "nobody's"}).refusal().reason != RefusalReason::kUnknownPolicy) std::abort();
      if (router_->Route({.tokens = prompt, .text = "both"}).refusal().reason != RefusalReason::kBadRequest) std::abort();
      if (router_->Route({.tokens = prompt}, {.exclude = ids_}).refusal().reason != RefusalReason::kAllExcluded) std::abort();
      Refusal copy = router_->Route({.tokens = prompt}, {.exclude = ids_}).refusal();
      if (copy.considered != 16) std::abort();
    }
  };
  EXPECT_EQ(CountOnceWarm([&] { storm(1'000); }), 0);
  for (EndpointId id : ids_) ASSERT_TRUE(fleet_.Drain(id).ok());
  EXPECT_EQ(CountOnceWarm([&] {
    for (const auto& prompt : prompts_) {
      if (router_->Route({.tokens = prompt}).refusal().reason != RefusalReason::kAllDrained) std::abort();
    }
  }), 0);
}

TEST_F(AllocationTest, ExpiryAllocatesNothing) {
  FillIndex();
  std::vector<Ticket<Upstream>> held(64);
  const auto round = [&] {
    for (std::size_t i = 0; i < held.size(); ++i) {
      held[i] = router_->Route({.tokens = prompts_[i]}).Take();
      held[i].Deadline(1s);
    }
    if (router_->Expire(2s) != held.size()) std::abort();
  };
  EXPECT_EQ(CountOnceWarm(round), 0);
}

// What a pool holds grows with the most that was ever needed at one moment, and which requests of several threads meet is
// chance. So the rounds go on until the pools have seen their worst: then whole rounds, of hundreds of requests each, come
// without a single allocation, which one per request, or per hundred, would never allow.
TEST_F(AllocationTest, SeveralWarmThreadsAllocateNothing) {
  FillIndex();
  constexpr int kThreads = 4, kWarmRounds = 8, kRounds = 24;
  std::atomic<int> arrived{0};
  std::vector<std::int64_t> per_round(kRounds, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto work = [&] {
        for (std::size_t i = t; i < prompts_.size(); ++i) {
          auto routed = router_->Route({.tokens = prompts_[i]});
          routed->FirstToken();
        }
      };
      int meetings = 0;
      const auto meet = [&] {
        ++arrived;
        ++meetings;
        while (arrived.load() < kThreads * meetings) std::this_thread::yield();
      };
      for (int round = 0; round < kWarmRounds; ++round) work();
      std::int64_t before = 0;
      for (int round = 0; round < kRounds; ++round) {
        meet();
        if (t == 0) before = allocations.load();
        meet();
        counting = true;
        work();
        counting = false;
        meet();
        if (t == 0) per_round[static_cast<std::size_t>(round)] = allocations.load() - before;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int quiet = 0;
  for (const std::int64_t count : per_round) {
    quiet += count == 0 ? 1 : 0;
    EXPECT_LE(count, 4);
  }
  EXPECT_GE(quiet, kRounds / 2);
}

TEST(LedgerOnlyAllocationTest, PoliciesWithoutPromptsAllocateNothingFromTheSecondRequestOn) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 8);
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  (void)router->Route({.prompt_tokens = 100});
  EXPECT_EQ(CountAllocations([&] {
    for (int i = 0; i < 1'000; ++i) {
      auto routed = router->Route({.prompt_tokens = 100});
      routed->FirstToken();
      routed->Finish();
    }
  }), 0);
}

}  // namespace
}  // namespace tokroute

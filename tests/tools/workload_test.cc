#include "tools/sim/workload.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tokroute::tools {
namespace {

constexpr Nanoseconds kMs = 1'000'000, kSecond = 1'000 * kMs;

std::vector<BlockKey> Keys(const WorkloadRequest& request) {
  return {request.block_keys.begin(), request.block_keys.end()};
}

Trace SmallTrace() {
  absl::StatusOr<Trace> trace = ReadTraceFile(TOKROUTE_TESTS_DIR "/data/small_trace.jsonl");
  EXPECT_TRUE(trace.ok()) << trace.status();
  return *std::move(trace);
}

TEST(DrawExponentialTest, HasTheMomentsAndTheTail) {
  Random random(3);
  constexpr int kDraws = 200'000;
  double sum = 0, squares = 0;
  int above_one = 0, above_three = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = DrawExponential(random);
    ASSERT_GE(x, 0);
    sum += x;
    squares += x * x;
    above_one += x > 1;
    above_three += x > 3;
  }
  EXPECT_NEAR(sum / kDraws, 1, 0.01);
  EXPECT_NEAR(squares / kDraws, 2, 0.05);
  EXPECT_NEAR(above_one / double{kDraws}, 0.36788, 0.005);
  EXPECT_NEAR(above_three / double{kDraws}, 0.04979, 0.002);
}

TEST(DrawExponentialTest, IsTheSameEverywhere) {
  // Pinned: whatever changes this changes every seeded workload.
  Random random(1);
  EXPECT_EQ(static_cast<std::int64_t>(DrawExponential(random) * 1e12), 566561575172);
  EXPECT_EQ(static_cast<std::int64_t>(DrawExponential(random) * 1e12), 971002753586);
}

TEST(SharedPrefixTest, CyclesOneShuffledOrderOfAllPrompts) {
  const absl::StatusOr<Workload> made = MakeSharedPrefix({.requests = 1600, .qps = 20}, {.block_size = 16, .seed = 5});
  ASSERT_TRUE(made.ok()) << made.status();
  const std::vector<WorkloadRequest>& requests = made->requests;
  ASSERT_EQ(requests.size(), 1600U);
  std::set<std::vector<BlockKey>> prompts;
  std::set<BlockKey> groups;
  for (std::size_t i = 0; i < 750; ++i) {
    EXPECT_EQ(requests[i].prompt_tokens, 7200);
    EXPECT_EQ(requests[i].tokens.size(), 7200U);
    EXPECT_EQ(requests[i].output_tokens, 1000);
    ASSERT_EQ(requests[i].block_keys.size(), 450U);
    prompts.insert(Keys(requests[i]));
    groups.insert(requests[i].block_keys[374]);  // 6000 / 16 = 375 shared blocks.
  }
  EXPECT_EQ(prompts.size(), 750U);
  EXPECT_EQ(groups.size(), 150U);
  std::set<BlockKey> own;
  for (std::size_t i = 0; i < 750; ++i) own.insert(requests[i].block_keys[375]);
  EXPECT_EQ(own.size(), 750U);
  for (std::size_t i = 750; i < 1600; ++i) ASSERT_EQ(Keys(requests[i]), Keys(requests[i - 750]));
  EXPECT_TRUE(std::is_sorted(requests.begin(), requests.end(),
                             [](const auto& a, const auto& b) { return a.arrival < b.arrival; }));
  // 1600 gaps of 50 ms: 80 s, with a standard deviation of 2 s.
  EXPECT_NEAR(static_cast<double>(requests.back().arrival) / 1e9, 80, 8);
}

TEST(SharedPrefixTest, ALongerReplayBeginsLikeAShorterOneAndSeedsDiffer) {
  const auto make = [](std::int64_t requests, std::uint64_t seed) {
    return *MakeSharedPrefix({.requests = requests, .qps = 5}, {.block_size = 512, .seed = seed});
  };
  const Workload shorter = make(10, 1), longer = make(20, 1), other = make(10, 2);
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(shorter.requests[i].arrival, longer.requests[i].arrival);
    EXPECT_EQ(Keys(shorter.requests[i]), Keys(longer.requests[i]));
    EXPECT_NE(Keys(shorter.requests[i]), Keys(other.requests[i]));
  }
}

TEST(SharedPrefixTest, DurationBoundsArrivals) {
  const absl::StatusOr<Workload> made = MakeSharedPrefix({.duration_s = 30, .qps = 10}, {.block_size = 512});
  ASSERT_TRUE(made.ok());
  EXPECT_LT(made->requests.back().arrival, 30 * kSecond);
  EXPECT_NEAR(static_cast<double>(made->requests.size()), 300, 70);
}

TEST(ConversationsTest, EveryTurnBeginsWithAllBeforeIt) {
  const absl::StatusOr<Workload> made = MakeConversations({.requests = 500, .qps = 8}, {.block_size = 16, .seed = 2});
  ASSERT_TRUE(made.ok()) << made.status();
  const std::vector<WorkloadRequest>& requests = made->requests;
  ASSERT_EQ(requests.size(), 500U);
  int follow_ups = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const WorkloadRequest& turn = requests[i];
    ASSERT_EQ(turn.tokens.size(), static_cast<std::size_t>(turn.prompt_tokens));
    ASSERT_EQ(turn.block_keys.size(), static_cast<std::size_t>(turn.prompt_tokens / 16));
    EXPECT_TRUE(std::equal(turn.tokens.begin(), turn.tokens.begin() + 1000, requests[0].tokens.begin()));
    if (turn.after == WorkloadRequest::kNone) continue;
    ++follow_ups;
    ASSERT_LT(turn.after, static_cast<std::int32_t>(i));
    const WorkloadRequest& before = requests[static_cast<std::size_t>(turn.after)];
    const std::int64_t input = turn.prompt_tokens - before.prompt_tokens - before.output_tokens;
    EXPECT_GE(input, 100);
    EXPECT_LE(input, 1000);
    EXPECT_TRUE(std::equal(before.tokens.begin(), before.tokens.end(), turn.tokens.begin()));
    EXPECT_TRUE(std::equal(before.block_keys.begin(), before.block_keys.end(), turn.block_keys.begin()));
  }
  EXPECT_GT(follow_ups, 350);
}

TEST(GeneratorTest, RefusesWhatCannotBe) {
  const auto error = [](const GeneratorOptions& options) {
    return std::string(MakeSharedPrefix(options, {}).status().message());
  };
  EXPECT_EQ(error({.requests = 1, .qps = 0}), "qps: want > 0 .. 1e6 requests/s, got 0");
  EXPECT_EQ(error({.duration_s = 1e6, .qps = 100}), "requests (or duration x qps): want > 0 .. 1000000, got 1e+08");
  EXPECT_EQ(error({.requests = 5, .qps = 1e-200}), "qps: 1e-200 requests/s take over three years for 5 requests");
  EXPECT_EQ(error({.duration_s = 1e-9, .qps = 1}), "duration: no request arrives within 1e-09 s at this seed and qps");
}

TEST(TraceWorkloadTest, FullBlocksOnlyAndEqualIdsEqualKeys) {
  const Workload workload = MakeTraceWorkload(SmallTrace(), 1, false);
  EXPECT_EQ(workload.block_size, 512);
  const std::vector<WorkloadRequest>& requests = workload.requests;
  const std::vector<std::size_t> blocks = {2, 3, 0, 4, 2, 3};
  for (std::size_t i = 0; i < blocks.size(); ++i) EXPECT_EQ(requests[i].block_keys.size(), blocks[i]) << i;
  EXPECT_EQ(requests[0].block_keys[1], requests[3].block_keys[1]);
  EXPECT_EQ(requests[1].block_keys[2], requests[3].block_keys[2]);
  std::set<BlockKey> distinct;
  for (const WorkloadRequest& request : requests) distinct.insert(request.block_keys.begin(), request.block_keys.end());
  EXPECT_EQ(distinct.size(), 7U);  // Ids 0, 1, 3, 5, 7, 8, 9.
  EXPECT_FALSE(distinct.contains(0));
}

TEST(TraceWorkloadTest, SpreadsEqualStampsUpToTheNextButKeepsTheOrder) {
  const Workload kept = MakeTraceWorkload(SmallTrace(), 1, false);
  const Workload spread = MakeTraceWorkload(SmallTrace(), 1, true), again = MakeTraceWorkload(SmallTrace(), 1, true);
  const Workload other = MakeTraceWorkload(SmallTrace(), 2, true);
  const auto arrival = [](const Workload& w, std::size_t i) { return w.requests[i].arrival; };
  EXPECT_EQ(arrival(kept, 2), 0);
  EXPECT_EQ(arrival(kept, 5), 5000 * kMs);
  EXPECT_LT(arrival(spread, 0), arrival(spread, 1));
  EXPECT_LT(arrival(spread, 1), arrival(spread, 2));
  EXPECT_LT(arrival(spread, 2), 2000 * kMs);
  EXPECT_EQ(arrival(spread, 3), 2000 * kMs);  // Alone: it says when it came.
  EXPECT_GE(arrival(spread, 4), 5000 * kMs);
  EXPECT_LT(arrival(spread, 5), 8000 * kMs);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(arrival(spread, i), arrival(again, i));
  EXPECT_NE(arrival(spread, 0), arrival(other, 0));
}

TEST(ScaleArrivalsTest, DividesArrivalsButNotThinkTimes) {
  Workload workload;
  workload.requests = {{.arrival = 3 * kSecond}, {.after = 0, .arrival = kSecond}};
  ASSERT_TRUE(ScaleArrivals(1.5, workload).ok());
  EXPECT_EQ(workload.requests[0].arrival, 2 * kSecond);
  EXPECT_EQ(workload.requests[1].arrival, kSecond);
  EXPECT_FALSE(ScaleArrivals(1e-300, workload).ok());
}

}  // namespace
}  // namespace tokroute::tools

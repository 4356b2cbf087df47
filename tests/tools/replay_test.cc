#include "tools/sim/replay.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/sim/report.h"

namespace tokroute::tools {
namespace {

constexpr Nanoseconds kMs = 1'000'000;

Workload SmallTraceWorkload(std::uint64_t seed) {
  absl::StatusOr<Trace> trace = ReadTraceFile(TOKROUTE_TESTS_DIR "/data/small_trace.jsonl");
  EXPECT_TRUE(trace.ok()) << trace.status();
  return MakeTraceWorkload(*trace, seed, true);
}

Workload Conversations(std::uint64_t seed) {
  return *MakeConversations({.requests = 200, .qps = 20}, {.block_size = 16, .seed = seed});
}

std::string JsonOf(const Workload& workload, const ReplayOptions& options) {
  std::vector<PolicyResult> results;
  for (const std::string& policy : PolicyNames()) {
    absl::StatusOr<PolicyResult> result = ReplayPolicy(workload, options, policy);
    EXPECT_TRUE(result.ok()) << result.status();
    results.push_back(*std::move(result));
  }
  return FormatJson({.workload = workload.name,
                     .requests = static_cast<std::int64_t>(workload.requests.size()),
                     .block_size = workload.block_size,
                     .options = options},
                    results);
}

TEST(SummarizeTest, PercentilesAreNearestRank) {
  std::vector<Nanoseconds> values;
  for (Nanoseconds i = 200; i >= 1; --i) values.push_back(i);
  const Distribution d = Summarize(values);
  EXPECT_EQ(d.count, 200);
  EXPECT_EQ(d.mean, 100.5);
  EXPECT_EQ(d.p50, 100);
  EXPECT_EQ(d.p90, 180);
  EXPECT_EQ(d.p99, 198);
  const Distribution one = Summarize({7});
  EXPECT_EQ(one.p50, 7);
  EXPECT_EQ(one.p99, 7);
  EXPECT_EQ(Summarize({}).count, 0);
}

TEST(ReplayTest, OneEndpointFollowsAHandComputedSchedule) {
  // 1 ms a prompt token, 10 ms an output token. Both prompts have one block of 16 in common.
  Workload workload;
  workload.block_size = 16;
  workload.keys.push_back({11, 12});
  workload.keys.push_back({11, 13});
  workload.requests = {{.arrival = 5 * kMs, .prompt_tokens = 40, .output_tokens = 3, .block_keys = workload.keys[0]},
                       {.arrival = 25 * kMs, .prompt_tokens = 36, .output_tokens = 1, .block_keys = workload.keys[1]}};
  const ReplayOptions options{.endpoints = 1, .peak_prefill_throughput = 1000, .decode_tokens_per_s = 100};
  for (const std::string& policy : PolicyNames()) {
    const absl::StatusOr<PolicyResult> result = ReplayPolicy(workload, options, policy);
    ASSERT_TRUE(result.ok()) << result.status();
    // First: prefill 5 .. 45 ms, end at 65 ms. Second: waits until 45, computes 20 tokens, ends with its only one
    // at 65.
    EXPECT_EQ(result->ttft.p50, 40 * kMs);
    EXPECT_EQ(result->ttft.p99, 40 * kMs);
    EXPECT_EQ(result->e2e.p99, 60 * kMs);
    EXPECT_EQ(result->tpot.count, 1);
    EXPECT_EQ(result->tpot.p50, 10 * kMs);
    EXPECT_EQ(result->makespan, 60 * kMs);
    EXPECT_EQ(result->hit_tokens, 16);
    // At 25 ms the block is on its way: an index credits what it has sent, the cache does not hold it yet.
    EXPECT_EQ(result->matched_tokens, result->keeps_index ? 16 : 0) << policy;
    EXPECT_EQ(result->prompt_tokens, 76);
    EXPECT_EQ(result->output_tokens, 4);
    EXPECT_EQ(result->succeeded, 2);
    EXPECT_EQ(result->least_requests, 2);
    EXPECT_EQ(result->most_requests, 2);
  }
}

TEST(ReplayTest, AFollowUpArrivesThinkTimeAfterTheEndBeforeIt) {
  Workload workload;
  workload.block_size = 16;
  workload.requests = {{.arrival = 0, .prompt_tokens = 10, .output_tokens = 2},
                       {.after = 0, .arrival = 100 * kMs, .prompt_tokens = 10, .output_tokens = 2}};
  const ReplayOptions options{.endpoints = 2, .peak_prefill_throughput = 1000, .decode_tokens_per_s = 100};
  const absl::StatusOr<PolicyResult> result = ReplayPolicy(workload, options, "round-robin");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->makespan, (20 + 100 + 20) * kMs);
  EXPECT_EQ(result->ttft.p99, 10 * kMs);
  EXPECT_EQ(result->least_requests, 1);
}

TEST(ReplayTest, SameSeedSameBytesAndAnotherSeedOthers) {
  for (const auto make : {SmallTraceWorkload, Conversations}) {
    const std::string first = JsonOf(make(1), {.endpoints = 3, .seed = 1});
    EXPECT_EQ(first, JsonOf(make(1), {.endpoints = 3, .seed = 1}));
    EXPECT_NE(first, JsonOf(make(2), {.endpoints = 3, .seed = 2}));
  }
}

TEST(ReplayTest, AffinityWinsOnSharedPrefixes) {
  const Workload workload = *MakeSharedPrefix({.requests = 400, .qps = 20}, {.block_size = 16, .seed = 1});
  const absl::StatusOr<PolicyResult> affine = ReplayPolicy(workload, {.seed = 1}, "prefill-bound");
  const absl::StatusOr<PolicyResult> blind = ReplayPolicy(workload, {.seed = 1}, "round-robin");
  ASSERT_TRUE(affine.ok() && blind.ok());
  EXPECT_GT(affine->hit_tokens, 2 * blind->hit_tokens);
  EXPECT_LT(affine->ttft.mean, blind->ttft.mean);
  EXPECT_GT(affine->sticky_decisions, 0);
  EXPECT_EQ(affine->succeeded, 400);
}

TEST(ReplayTest, AnOverloadedWarmEndpointOpensTheGate) {
  // One group of 200 prompts: all stick to one endpoint, which computes 40 a second and gets 200. tau is 20,480 tokens.
  const SharedPrefixShape shape{.groups = 1, .prompts_per_group = 200, .shared_tokens = 6400, .own_tokens = 512};
  const Workload workload = *MakeSharedPrefix({.requests = 200, .qps = 200}, {.block_size = 16}, shape);
  const absl::StatusOr<PolicyResult> result =
      ReplayPolicy(workload, {.endpoints = 4, .max_ttft_penalty_ms = 1000}, "prefill-bound");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->gate_openings, 0);
  EXPECT_GT(result->sticky_decisions, 0);
  EXPECT_GT(result->least_requests, 0);
}

TEST(ReplayTest, NamesWhatItRefuses) {
  const Workload workload = SmallTraceWorkload(1);
  EXPECT_EQ(ReplayPolicy(workload, {}, "fastest").status().message(), "unknown policy 'fastest'");
  EXPECT_THAT(std::string(ReplayPolicy(workload, {.max_ttft_penalty_ms = 0}, "prefill-bound").status().message()),
              testing::HasSubstr("max_ttft_penalty"));
  const absl::Status slow =
      ReplayPolicy(workload, {.peak_prefill_throughput = 1e-9, .decode_tokens_per_s = 1e-9}, "random").status();
  EXPECT_THAT(std::string(slow.message()), testing::HasSubstr("want less than 4e9 s"));
}

TEST(ReportTest, JsonHasTheKeysOthersRelyOn) {
  PolicyResult result;
  result.policy = "prefill-bound";
  result.requests = 4;
  result.succeeded = 3;
  result.prompt_tokens = 1000;
  result.hit_tokens = 250;
  result.matched_tokens = 500;
  result.ttft = Summarize({1'500'000'000});
  const std::string json = FormatJson({.workload = "trace", .trace = "t\xff.jsonl"}, std::vector{result});
  for (const char* expected :
       {"\"policies\": [", "\"policy\": \"prefill-bound\"", "\"success_rate\": 0.75", "\"hit_rate\": 0.25",
        "\"matched_rate\": 0.5", "\"ttft_p90_s\": 1.5", "\"tpot_p90_s\": null", "\"audit\": \"ok\""}) {
    EXPECT_THAT(json, testing::HasSubstr(expected));
  }
}

TEST(ReportTest, TableFitsIn120ColumnsAndIsAligned) {
  std::vector<PolicyResult> results;
  for (const std::string& name : PolicyNames()) {
    PolicyResult& result = results.emplace_back();
    result.policy = name;
    result.requests = result.succeeded = 1'000'000;
    result.prompt_tokens = result.hit_tokens = result.matched_tokens = 1;
    result.ttft = result.e2e = result.tpot = Summarize({1'000'000'000'000'000});
    result.least_requests = result.most_requests = 1'000'000;
    result.makespan = 1'000'000'000;
  }
  const std::string table = FormatTable({.workload = "trace", .trace = "t.jsonl", .requests = 1'000'000}, results);
  std::size_t start = 0;
  while (start < table.size()) {
    const std::size_t end = table.find('\n', start);
    EXPECT_LE(end - start, 120U) << table.substr(start, end - start);
    start = end + 1;
  }
}

}  // namespace
}  // namespace tokroute::tools

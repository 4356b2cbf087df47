// Faults that users of such routers reported, as far as no other test is about them. The numbers are explained in
// field_reports.md, which also says where the others are.
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

struct Upstream {
  std::string host_name;
  std::string machine = {};
  std::string_view name() const { return host_name; }
  std::string_view host() const { return machine; }
};

std::vector<EndpointId> AddEndpoints(Fleet<Upstream>& fleet, int count) {
  std::vector<EndpointId> ids;
  for (int i = 0; i < count; ++i) ids.push_back(*fleet.Add({std::string(1, static_cast<char>('a' + i))}));
  return ids;
}

Router<Upstream> MakePrefillBound(const Fleet<Upstream>& fleet, std::uint64_t seed = 1,
                                  std::shared_ptr<PrefixIndex> index = nullptr) {
  return *PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s, .seed = seed,
                               .index = std::move(index)});
}

std::vector<TokenId> Prompt(std::uint32_t first, std::size_t tokens) {
  std::vector<TokenId> prompt(tokens);
  for (std::size_t i = 0; i < tokens; ++i) prompt[i] = first + static_cast<TokenId>(i);
  return prompt;
}

TEST(FieldReportsTest, R10_SequentialRequestsNeverFindAStaleCount) {
  Fleet<Upstream> fleet;
  const auto ids = AddEndpoints(fleet, 2);
  auto router = *LeastOutstanding(fleet, {.seed = 5});
  for (int i = 0; i < 1'000; ++i) {
    auto ticket = router.Route({.prompt_tokens = 10});
    ASSERT_TRUE(ticket.ok());
    EXPECT_EQ(*router.Read<ActiveRequests>(ids[0]) + *router.Read<ActiveRequests>(ids[1]), 1);
    ticket->Finish();
  }
}

TEST(FieldReportsTest, R19_CountsLiveAsLongAsTheEndpointWhateverTheTime) {
  Fleet<Upstream> fleet;
  const auto ids = AddEndpoints(fleet, 4);
  auto router = *LeastOutstanding(fleet, {.seed = 5});
  std::map<std::string_view, int> picks;
  std::vector<Ticket<Upstream>> running;
  for (int minute = 0; minute < 40; ++minute) {
    EXPECT_EQ(router.Expire(minute * 600s), 0U);  // Nobody asked for a deadline.
    for (int i = 0; i < 8; ++i) {
      running.push_back(router.Route({.prompt_tokens = 10}).Take());
      ++picks[running.back().endpoint().name()];
    }
    if (minute >= 2) running.erase(running.begin(), running.begin() + 8);
  }
  for (const auto& [name, count] : picks) EXPECT_EQ(count, 80) << name;
  EXPECT_TRUE(router.Audit().ok());
}

TEST(FieldReportsTest, R25_TiesDoNotFollowTheSizeOfAnEndpointsIndex) {
  Fleet<Upstream> fleet;
  const auto ids = AddEndpoints(fleet, 2);
  auto index = *PrefixIndex::Create({.default_capacity_tokens = 1 << 20});
  auto router = MakePrefillBound(fleet, 7, index);
  PromptKeys keys;
  const auto stored = Prompt(1'000'000, 160'000);  // 10,000 blocks on b.
  keys.Reset(index->key_options(), {.tokens = stored});
  auto receipt = index->Record(ids[1], keys, nullptr);
  index->OnReleased(receipt, false);
  ASSERT_EQ(index->HeldBlocks(ids[1]), 10'000);
  int on_a = 0;
  for (std::uint32_t i = 0; i < 1'000; ++i) {
    const std::vector<TokenId> prompt(20, i);
    auto ticket = router.Route({.tokens = prompt});
    on_a += ticket->endpoint_id() == ids[0] ? 1 : 0;  // Dropped: an abort leaves nothing in the index.
  }
  EXPECT_NEAR(on_a, 500, 80);
}

TEST(FieldReportsTest, R31_InstantRequestsOneAfterTheOtherSpread) {
  Fleet<Upstream> fleet;
  const auto ids = AddEndpoints(fleet, 2);
  auto router = *LeastOutstanding(fleet, {.seed = 11});
  int on_a = 0;
  for (int i = 0; i < 100; ++i) on_a += router.Route({.prompt_tokens = 1})->endpoint_id() == ids[0] ? 1 : 0;
  EXPECT_NEAR(on_a, 50, 15);
}

TEST(FieldReportsTest, R36_AFewHugePromptsWeighMoreThanManySmallOnes) {
  Fleet<Upstream> fleet;
  const auto ids = AddEndpoints(fleet, 2);
  auto router = MakePrefillBound(fleet);
  const EndpointId only_a[] = {ids[1]}, only_b[] = {ids[0]};
  std::vector<Ticket<Upstream>> running;
  for (int i = 0; i < 2; ++i) running.push_back(router.Route({.prompt_tokens = 150'000}, {.exclude = only_a}).Take());
  for (int i = 0; i < 60; ++i) running.push_back(router.Route({.prompt_tokens = 100}, {.exclude = only_b}).Take());
  for (int i = 0; i < 10; ++i) EXPECT_EQ(router.Route({.prompt_tokens = 8'000})->endpoint_id(), ids[1]);
}

TEST(FieldReportsTest, R37_WhatWasPlacedColdIsRememberedToo) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 4);
  auto router = MakePrefillBound(fleet);
  std::vector<TokenId> first = Prompt(1, 200);  // 128 shared, 72 of its own: cold everywhere.
  auto ticket = router.Route({.tokens = first});
  std::vector<TokenId> second(first.begin(), first.begin() + 128);
  for (std::uint32_t i = 0; i < 40; ++i) second.push_back(900'000 + i);
  const EndpointId home = ticket->endpoint_id();
  std::vector<EndpointId> others;
  for (EndpointId id : fleet.Ids()) {
    if (id != home) others.push_back(id);
  }
  EXPECT_EQ(router.Route({.tokens = second}, {.exclude = others})->decision().matched_tokens, 128);
}

TEST(FieldReportsTest, R39_NewGroupsSpreadEvenlyWithRoundRobinTies) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 4);
  auto index = *PrefixIndex::Create({});
  auto router = *MakeRouter(
      fleet, {.seed = 3}, Producers(ApproximatePrefix(index), InFlightLoad()),
      Named("spread", Policy(PrefixCacheAffinityFilter(*TauGate::Create({.peak_prefill_throughput = 20'480})),
                             TokenLoadScorer(), MaxScorePicker<TieBreak::kRoundRobin>())));
  std::map<std::string_view, int> groups;
  for (std::uint32_t group = 0; group < 16; ++group) {
    const auto prompt = Prompt(group * 100'000, 1'600);
    auto ticket = router.Route({.tokens = prompt});
    ++groups[ticket->endpoint().name()];
    ticket->FirstToken();
    ticket->Finish();
  }
  for (const auto& [name, count] : groups) EXPECT_EQ(count, 4) << name;
}

TEST(FieldReportsTest, R43_SiblingsStayTogetherBeforeAnythingIsConfirmed) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 4);
  auto router = MakePrefillBound(fleet);
  const auto prompt = Prompt(1, 4'096);
  std::vector<Ticket<Upstream>> siblings;
  for (int i = 0; i < 8; ++i) siblings.push_back(router.Route({.tokens = prompt}).Take());  // No first token yet.
  for (const auto& sibling : siblings) EXPECT_EQ(sibling.endpoint_id(), siblings[0].endpoint_id());
  siblings.clear();  // All aborted: what none of them confirmed is taken back.
  EXPECT_EQ(router.Evaluate({.tokens = prompt}).decision.matched_tokens, 0);
}

TEST(FieldReportsTest, R45_RanksOfOneHostAreTargetsOfTheirOwn) {
  Fleet<Upstream> fleet;
  const EndpointId busy = *fleet.Add({"w/0", "w"}), idle = *fleet.Add({"w/1", "w"});
  auto router = *LeastOutstanding(fleet);
  const EndpointId exclude[] = {idle};
  std::vector<Ticket<Upstream>> running;
  for (int i = 0; i < 20; ++i) running.push_back(router.Route({.prompt_tokens = 1}, {.exclude = exclude}).Take());
  EXPECT_EQ(*router.Read<ActiveRequests>(busy), 20);
  EXPECT_EQ(router.Route({.prompt_tokens = 1})->endpoint_id(), idle);
}

TEST(FieldReportsTest, R51_AnIndexThatIsTooSmallSaysSo) {
  Fleet<Upstream> fleet;
  const auto ids = AddEndpoints(fleet, 1);
  auto index = *PrefixIndex::Create({.default_capacity_tokens = 16'000});  // 1,000 blocks.
  auto router = MakePrefillBound(fleet, 1, index);
  for (std::uint32_t turn = 0; turn < 5; ++turn) {
    const auto prompt = Prompt(turn * 1'000'000, 16'000);
    auto ticket = router.Route({.tokens = prompt});
    ticket->FirstToken();
    ticket->Finish();
  }
  EXPECT_EQ(index->HeldBlocks(ids[0]), 1'000);
  EXPECT_EQ(index->Stats().evicted_blocks, 4'000);
  ASSERT_TRUE(index->SetCapacity(ids[0], 80'000).ok());  // May change at run time.
  const auto prompt = Prompt(9'000'000, 32'000);
  router.Route({.tokens = prompt})->Finish();
  EXPECT_EQ(index->HeldBlocks(ids[0]), 3'000);
}

TEST(FieldReportsTest, R56_EveryZeroHasAMeaning) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  const PrefillBoundOptions good{.peak_prefill_throughput = 1};
  const auto status = [&](auto change) {
    PrefillBoundOptions options = good;
    change(options);
    return PrefillBound(fleet, options).status();
  };
  EXPECT_TRUE(status([](auto&) {}).ok());
  EXPECT_THAT(std::string(status([](auto& o) { o.peak_prefill_throughput = 0; }).message()), HasSubstr("peak_prefill_throughput"));
  EXPECT_THAT(std::string(status([](auto& o) { o.max_ttft_penalty = 0ms; }).message()), HasSubstr("max_ttft_penalty"));
  EXPECT_TRUE(status([](auto& o) { o.affinity_threshold = 0; }).ok());       // The filter is off.
  EXPECT_TRUE(status([](auto& o) { o.exploration_probability = 0; }).ok());  // Never.
  EXPECT_THAT(std::string(status([](auto& o) { o.token_load.ceiling_tokens = 0; }).message()), HasSubstr("ceiling_tokens"));
  EXPECT_THAT(std::string(status([](auto& o) { o.picker.max_targets = 0; }).message()), HasSubstr("max_targets"));
  EXPECT_TRUE(status([](auto& o) { o.in_flight_load.output.output_ratio = 0; }).ok());                 // Estimates 0.
  EXPECT_TRUE(status([](auto& o) { o.in_flight_load.output.max_estimated_output_tokens = 0; }).ok());  // The same.
  EXPECT_THAT(std::string(status([](auto& o) { o.index_options.block_size = 0; }).message()), HasSubstr("block_size"));
  EXPECT_THAT(std::string(status([](auto& o) { o.index_options.default_capacity_tokens = 0; }).message()),
              HasSubstr("default_capacity_tokens"));
  EXPECT_THAT(std::string(status([](auto& o) { o.index_options.max_bytes = 0; }).message()), HasSubstr("max_bytes"));
}

TEST(FieldReportsTest, R57_ImpossibleBoundsAreRefusedByName) {
  Fleet<Upstream> fleet;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  const auto refused = [&](const char* field, auto change) {
    PrefillBoundOptions options{.peak_prefill_throughput = 1};
    change(options);
    const absl::Status status = PrefillBound(fleet, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  };
  refused("affinity_threshold", [](auto& o) { o.affinity_threshold = 1.01; });
  refused("affinity_threshold", [=](auto& o) { o.affinity_threshold = kNan; });
  refused("peak_prefill_throughput", [](auto& o) { o.peak_prefill_throughput = -1; });
  refused("peak_prefill_throughput", [=](auto& o) { o.peak_prefill_throughput = kNan; });
  refused("peak_prefill_throughput", [=](auto& o) { o.peak_prefill_throughput = kInfinity; });
  refused("max_ttft_penalty", [](auto& o) { o.max_ttft_penalty = -1ms; });
  refused("exploration_probability", [](auto& o) { o.exploration_probability = -0.1; });
  refused("exploration_probability", [=](auto& o) { o.exploration_probability = kNan; });
  refused("output_ratio", [=](auto& o) { o.in_flight_load.output.output_ratio = kNan; });
  refused("max_estimated_output_tokens", [](auto& o) { o.in_flight_load.output.max_estimated_output_tokens = -2; });
  refused("block_size", [](auto& o) { o.index_options.block_size = -16; });
  refused("block_size", [](auto& o) { o.index_options.block_size = 513; });
  for (const double weight : {-1.0, kNan, kInfinity}) {
    EXPECT_THAT(std::string(MakeRouter(fleet, {}, Producers(InFlightLoad()),
                                       Named("p", Policy(Weighted(ActiveRequestScorer(), weight), MaxScorePicker())))
                                .status()
                                .message()),
                HasSubstr("weight of active-request-scorer"));
  }
}

TEST(FieldReportsTest, R62_FreshEndpointsAreNotFullAndNoneIsNotSaturation) {
  Fleet<Upstream> fleet;
  auto router = MakePrefillBound(fleet);
  EXPECT_EQ(router.Route({.prompt_tokens = 1}).refusal().reason, RefusalReason::kNoEndpoint);
  AddEndpoints(fleet, 2);
  EXPECT_TRUE(router.Route({.prompt_tokens = 1}).ok());
}

TEST(FieldReportsTest, R135_AbsurdSizesAreRefusedBeforeAnythingIsAllocated) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  auto router = MakePrefillBound(fleet);
  EXPECT_EQ(router.Route({.prompt_tokens = std::int64_t{1} << 40}).refusal().reason, RefusalReason::kBadRequest);
  const BlockKey key = 7;
  // 2^40 blocks, as a length that a decoder might hand on. The span is never read.
  const std::span<const BlockKey> keys(&key, std::size_t{1} << 40);
  const Refusal refusal = router.Route({.block_keys = keys, .block_size = 16}).refusal();
  EXPECT_EQ(refusal.reason, RefusalReason::kBadRequest);
  EXPECT_THAT(refusal.ToString(), HasSubstr("block_keys"));
}

}  // namespace
}  // namespace tokroute

#include "tokroute/decision.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/test_fleet.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using testing_support::AddEndpoints;
using testing_support::MakePrompt;
using testing_support::Upstream;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// tau = 20,480 tokens/s x 14 s = 286,720: the published Qwen3-32B / H100 run.
class DecisionTextTest : public ::testing::Test {
 protected:
  DecisionTextTest() {
    auto router = PrefillBound(fleet_, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s, .seed = 1});
    EXPECT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
  }
  Ticket<Upstream> Occupy(std::size_t i, std::int64_t tokens) {
    std::vector<EndpointId> others = ids_;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    return router_->Route({.prompt_tokens = tokens}, {.exclude = others}).Take();
  }
  // The prompt is on e1, prefilled.
  void Warm() {
    auto routed = router_->Route({.tokens = prompt_}, {.exclude = {{ids_[0], ids_[2]}}});
    ASSERT_TRUE(routed.ok());
    routed->Finish();
  }
  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 3);
  std::optional<Router<Upstream>> router_;
  const std::vector<TokenId> prompt_ = MakePrompt(1, 4'100);
};

TEST_F(DecisionTextTest, NobodyWarm) {
  const auto a = Occupy(0, 10), b = Occupy(1, 20);
  EXPECT_EQ(router_->Route({.tokens = prompt_})->decision().ToString(),
            "decision 3: endpoint e2 (slot 2) of 3 candidates by policy \"prefill-bound\". prefix-cache-affinity-filter kept 3 "
            "of 3 (nobody_warm): no warm endpoint: the best match is 0 of 4,100 prompt tokens, 3,280 short of the threshold "
            "0.8. Its total is 1, the runner-up's 0.997567. Of 4,100 prompt tokens, 0 are cached there and 4,100 are not.");
}

TEST_F(DecisionTextTest, NobodyWarmSaysHowMuchTheBestMatchLacks) {
  Warm();
  const std::vector<TokenId> longer = [&] {
    std::vector<TokenId> tokens = prompt_;
    tokens.resize(8'000);
    return tokens;
  }();
  EXPECT_THAT(router_->Evaluate({.tokens = longer}).ToString(),
              HasSubstr("no warm endpoint: the best match is 4,096 of 8,000 prompt tokens, 2,304 short of the threshold 0.8."));
}

TEST_F(DecisionTextTest, Sticky) {
  Warm();
  const auto busy = Occupy(1, 286'720), least = Occupy(0, 0);
  EXPECT_EQ(router_->Route({.tokens = prompt_})->decision().ToString(),
            "decision 4: endpoint e1 (slot 1) of 3 candidates by policy \"prefill-bound\". prefix-cache-affinity-filter kept 1 "
            "of 3 (sticky): the least loaded warm endpoint has 286,720 uncached tokens in flight, the least loaded "
            "cold one 0; the lead may grow by 0 tokens before it exceeds tau (286,720). It was the only one left. Of 4,100 "
            "prompt tokens, 4,096 are cached there and 4 are not.");
}

TEST_F(DecisionTextTest, GateOpen) {
  Warm();
  const auto busy = Occupy(1, 286'721), least = Occupy(0, 0), cold = Occupy(2, 5);
  const auto routed = router_->Route({.tokens = prompt_});
  EXPECT_EQ(routed->decision().ToString(),
            "decision 5: endpoint e0 (slot 0) of 3 candidates by policy \"prefill-bound\". prefix-cache-affinity-filter kept 3 "
            "of 3 (gate_open): the least loaded warm endpoint has 286,721 uncached tokens in flight, the least "
            "loaded cold one 0; that lead exceeds tau (286,720) by 1 tokens, so load alone decides. Its total is 1, the "
            "runner-up's 0.998782. Of 4,100 prompt tokens, 0 are cached there and 4,100 are not.");
  const FilterVerdict* verdict = routed->decision().verdict("prefix-cache-affinity-filter");
  ASSERT_NE(verdict, nullptr);
  EXPECT_EQ(verdict->margin, 1);
  EXPECT_THAT(verdict->facts, ElementsAre(286'721, 0));
  EXPECT_EQ(verdict->kept, 3U);
  EXPECT_EQ(routed->decision().verdict("another-filter"), nullptr);
}

TEST_F(DecisionTextTest, TiesAndSingularsReadWell) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  auto router = LeastOutstanding(fleet);
  EXPECT_THAT(router->Route({.prompt_tokens = 1})->decision().ToString(),
              HasSubstr("of 2 candidates by policy \"least-outstanding\". Its total is 1, drawn from 2 of equal standing. Of 1 "
                        "prompt token, 0 are cached there and 1 are not."));
  Fleet<Upstream> single;
  AddEndpoints(single, 1);
  auto only = LeastOutstanding(single);
  EXPECT_EQ(only->Route({})->decision().ToString(),
            "decision 1: endpoint e0 (slot 0) of 1 candidate by policy \"least-outstanding\". It was the only one left. Of 0 "
            "prompt tokens, 0 are cached there and 0 are not.");
}

TEST(DecisionTest, TargetsRankTheFallBacks) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 4);
  auto router = LeastOutstanding(fleet, {.picker = {.max_targets = 3}});
  ASSERT_TRUE(router.ok());
  std::vector<Ticket<Upstream>> held;
  for (std::size_t i = 0; i < 4; ++i) {  // i requests on endpoint i.
    std::vector<EndpointId> others = ids;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    for (std::size_t k = 0; k < i; ++k) held.push_back(router->Route({}, {.exclude = others}).Take());
  }
  const auto routed = router->Route({});
  EXPECT_THAT(routed->decision().targets(), ElementsAre(ids[0], ids[1], ids[2]));
  EXPECT_EQ(routed->decision().endpoint(), ids[0]);
  EXPECT_THAT(router->Route({}, {.exclude = {{ids[0], ids[1], ids[2]}}})->decision().targets(), ElementsAre(ids[3]));
}

TEST(DecisionTest, AnEmptyOneCanBePrinted) {
  const Decision decision;
  EXPECT_EQ(decision.endpoint_name(), "");
  EXPECT_EQ(decision.policy_name(), "");
  EXPECT_EQ(decision.filter_name(0), "");
  EXPECT_TRUE(decision.targets().empty());
  EXPECT_TRUE(decision.filter_verdicts().empty());
  EXPECT_THAT(decision.ToString(), HasSubstr("decision 0: endpoint  (slot 0) of 0 candidates"));
}

TEST(DecisionTest, ItIsReadFromSeveralThreads) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 3);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480});
  const auto prompt = MakePrompt(1, 500);
  const auto ticket = router->Route({.tokens = prompt});
  const std::string text = ticket->decision().ToString();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const Decision copy = ticket->decision();
        EXPECT_EQ(copy.ToString(), text);
      }
    });
  }
  for (int i = 0; i < 50; ++i) (void)router->SetPolicy("prefill-bound", Policy(RandomPicker()));
  ticket->FirstToken();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tokroute

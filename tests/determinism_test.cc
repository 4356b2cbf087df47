// Same seed, same events, same decisions, bit for bit: a digest over some thousand decisions equals a constant, whatever
// the compiler and its optimisation. A change that alters decisions on purpose changes the constant, and says so.

#include <bit>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "support/test_fleet.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using testing_support::MakePrompt;
using testing_support::Upstream;

// FNV-1a.
class Digest {
 public:
  void Add(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) state_ = (state_ ^ (value >> (8 * i) & 0xff)) * 0x100000001b3ULL;
  }
  void Add(double value) { Add(std::bit_cast<std::uint64_t>(value)); }
  void Add(std::string_view text) {
    for (char c : text) state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  void Add(const Decision& decision) {
    Add(decision.number);
    Add(std::uint64_t{decision.candidates});
    Add(std::uint64_t{decision.survivors});
    Add(std::uint64_t{decision.choice.tied});
    Add(decision.choice.best);
    Add(decision.choice.runner_up);
    Add(static_cast<std::uint64_t>(decision.matched_tokens));
    for (EndpointId id : decision.targets()) Add(std::uint64_t{id.slot} << 32 | id.incarnation);
    for (const FilterVerdict& verdict : decision.filter_verdicts()) {
      Add(verdict.reason->name);
      Add(static_cast<std::uint64_t>(verdict.margin));
      Add(std::uint64_t{verdict.kept});
    }
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325ULL;
};

// Ten thousand events of every kind over a fleet that changes, all drawn from `events`; ties by `seed`.
std::uint64_t Play(std::uint64_t seed, std::uint64_t events) {
  Random random(events);
  Fleet<Upstream> fleet;
  const auto upstream = [&](std::uint32_t i) {
    Upstream made{.called = absl::StrCat("e", i)};
    if (i % 4 == 3) made.serves = {"m"};
    if (i % 5 == 4) made.rate = 900 + 100 * i;
    if (i % 3 == 2) made.capacity = 8'000;
    return made;
  };
  for (std::uint32_t i = 0; i < 13; ++i) EXPECT_TRUE(fleet.Add(upstream(i)).ok());
  auto index = *PrefixIndex::Create({.default_capacity_tokens = 20'000});
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 4s, .exploration_probability = 0.05, .seed = seed, .picker = {.max_targets = 3}, .index = index});
  EXPECT_TRUE(router.ok()) << router.status();
  const auto gate = *TauGate::Create({.peak_prefill_throughput = 777.7, .max_ttft_penalty = 3'333ms});
  EXPECT_TRUE(router->SetPolicy("blend", Policy(PrefixCacheAffinityFilter(gate), Weighted(TokenLoadScorer(), 0.3),
                                                Weighted(ActiveRequestScorer(), 0.7), MaxScorePicker<TieBreak::kLowestLoad>())).ok());
  EXPECT_TRUE(router->SetPolicy("absolute", Policy(Weighted(TokenLoadScorer({.form = TokenLoadForm::kAbsolute, .ceiling_tokens = 30'011}), 1.7),
                                                   Weighted(ActiveRequestScorer({.max_busy_score = 0.37}), 0.11), MaxScorePicker<>())).ok());
  EXPECT_TRUE(router->SetPolicy("weighted", Policy(TokenLoadScorer(), WeightedRandomPicker(PickerOptions{.max_targets = 2}))).ok());
  EXPECT_TRUE(router->SetPolicy("random", Policy(RandomPicker())).ok());
  EXPECT_TRUE(router->SetPolicy("rotate", Policy(RoundRobinPicker())).ok());
  constexpr std::string_view kPolicies[] = {"", "", "", "blend", "absolute", "weighted", "random", "rotate"};

  std::vector<std::vector<TokenId>> prompts;
  for (std::uint64_t i = 0; i < 40; ++i) prompts.push_back(MakePrompt(i % 25, 64 + 97 * i));  // Some share a prefix.
  std::vector<Ticket<Upstream>> held(60);
  Digest digest;
  std::int64_t now = 0;
  for (int step = 0; step < 10'000; ++step) {
    Ticket<Upstream>& ticket = held[random.Below(60)];
    const std::uint32_t roll = random.Below(100);
    Request request{.tokens = prompts[random.Below(40)]};
    if (random.Below(5) == 0) request.model = "m";
    if (roll < 50) {
      const EndpointId exclude[] = {fleet.Find(absl::StrCat("e", random.Below(13)))};
      const LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, "absolute"}};
      RouteOptions options{.policy = kPolicies[random.Below(std::size(kPolicies))]};
      if (random.Below(4) == 0) options.exclude = exclude;
      if (random.Below(10) == 0) options.legs = legs;
      auto routed = router->Route(request, options);
      digest.Add(static_cast<std::uint64_t>(routed.refusal().reason));
      if (!routed.ok()) continue;
      digest.Add(routed->decision(Leg::kServe));
      digest.Add(routed->decision(Leg::kDecode));
      if (random.Below(4) == 0) routed->Deadline(std::chrono::nanoseconds(now + random.Below(50)));
      ticket = std::move(routed).Take();
    } else if (roll < 65) {
      ticket.FirstToken();
    } else if (roll < 75) {
      ticket.Finish({.aborted = random.Below(4) == 0});
    } else if (roll < 80) {
      ticket = Ticket<Upstream>();
    } else if (roll < 85) {
      const bool done = !ticket.empty() && router->Reroute(ticket, request);
      digest.Add(std::uint64_t{done});
      if (done) digest.Add(ticket.decision());
    } else if (roll < 88) {
      const EndpointId to = fleet.Find(absl::StrCat("e", random.Below(13)));  // Draws one by one: arguments have no order.
      digest.Add(std::uint64_t{ticket.MoveTo(to, random.Below(500))});
    } else if (roll < 92) {
      now += 20;
      digest.Add(router->Expire(std::chrono::nanoseconds(now)));
    } else if (roll < 96) {
      const Evaluation evaluation = router->Evaluate(request, {.policy = kPolicies[random.Below(std::size(kPolicies))]});
      if (evaluation.ok()) digest.Add(evaluation.decision);
    } else {
      const std::uint32_t i = random.Below(13);
      const EndpointId id = fleet.Find(absl::StrCat("e", i));
      switch (random.Below(5)) {
        case 0: (void)fleet.Drain(id); break;
        case 1: (void)fleet.SetEligible(id, random.Below(2) == 0); break;
        case 2: (void)fleet.Resume(id); break;
        default:
          if (id.incarnation != 0) (void)fleet.Remove(id);
          else (void)fleet.Add(upstream(i));
          break;
      }
    }
  }
  EXPECT_GT(router->Metrics().decisions, 4'000U);
  EXPECT_TRUE(router->Audit().ok()) << router->Audit();
  return digest.value();
}

TEST(DeterminismTest, SameSeedAndEventsGiveTheSameDecisionsWithEveryCompiler) {
  EXPECT_EQ(Play(1, 2), 0xaf8bc1ad1283a338ULL);
}

TEST(DeterminismTest, RunsOfOneProcessAgree) { EXPECT_EQ(Play(7, 9), Play(7, 9)); }

TEST(DeterminismTest, AnotherSeedOrOtherEventsDecideOtherwise) {
  EXPECT_NE(Play(1, 2), Play(3, 2));
  EXPECT_NE(Play(1, 2), Play(1, 4));
}

}  // namespace
}  // namespace tokroute

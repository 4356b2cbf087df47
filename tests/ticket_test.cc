#include "tokroute/ticket.h"

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
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
using testing_support::Load;
using testing_support::LoadOf;
using testing_support::MakePrompt;
using testing_support::Refusals;
using testing_support::Upstream;
using ::testing::HasSubstr;

static_assert(!std::is_copy_constructible_v<Ticket<Upstream>> && !std::is_copy_assignable_v<Ticket<Upstream>>);
static_assert(std::is_nothrow_move_constructible_v<Ticket<Upstream>> && std::is_nothrow_move_assignable_v<Ticket<Upstream>>);
static_assert(std::is_nothrow_destructible_v<Ticket<Upstream>>);

class TicketTest : public ::testing::Test {
 protected:
  TicketTest() {
    auto router = PrefillBound(fleet_, {.peak_prefill_throughput = 20'480, .max_ttft_penalty = 14s, .seed = 1});
    EXPECT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
  }
  // A cold prompt of 1,000 tokens (62 full blocks) on e0.
  Ticket<Upstream> OnFirst() { return std::move(RouteTo(0)).Take(); }
  Routed<Upstream> RouteTo(std::size_t i) {
    std::vector<EndpointId> others = ids_;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    auto routed = router_->Route({.tokens = prompt_}, {.exclude = others});
    EXPECT_TRUE(routed.ok()) << routed.refusal().ToString();
    return routed;
  }
  Load Of(std::size_t i) { return LoadOf(*router_, ids_[i]); }
  std::int64_t Matched(std::size_t i) {
    std::vector<EndpointId> others = ids_;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    return router_->Evaluate({.tokens = prompt_}, {.exclude = others}).decision.matched_tokens;
  }

  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 3);
  std::optional<Router<Upstream>> router_;
  const std::vector<TokenId> prompt_ = MakePrompt(1, 1'000);
};

constexpr Load kNone{0, 0, 0}, kBooked{1'000, 1, 1'500}, kStreaming{0, 1, 1'500};

// ---- A value that moves.

TEST_F(TicketTest, MovingHandsTheBookingOver) {
  Ticket<Upstream> first = OnFirst();
  Ticket<Upstream> second = std::move(first);
  EXPECT_TRUE(first.empty());  // NOLINT(bugprone-use-after-move): that is the point.
  EXPECT_FALSE(second.empty());
  first.FirstToken();
  first.Finish();
  first.Deadline(1s);
  EXPECT_FALSE(first.live());
  EXPECT_FALSE(first.MoveTo(ids_[1]));
  EXPECT_FALSE(router_->Reroute(first, {.tokens = prompt_}));
  EXPECT_EQ(Of(0), kBooked);
  EXPECT_TRUE(second.live());
  second.Finish();
  EXPECT_EQ(Of(0), kNone);
}

TEST_F(TicketTest, AssignmentDropsWhatWasThere) {
  Ticket<Upstream> first = OnFirst();
  first = std::move(RouteTo(1)).Take();
  EXPECT_EQ(Of(0), kNone);
  EXPECT_EQ(Of(1), kBooked);
  first = Ticket<Upstream>();
  EXPECT_EQ(Of(1), kNone);
  EXPECT_EQ(router_->Metrics().aborted, 2U);
}

TEST_F(TicketTest, SelfAssignmentAndSelfSwapKeepIt) {
  Ticket<Upstream> ticket = OnFirst();
  Ticket<Upstream>& same = ticket;
  ticket = std::move(same);
  EXPECT_EQ(Of(0), kBooked);
  EXPECT_TRUE(ticket.live());
  std::swap(ticket, same);
  EXPECT_TRUE(ticket.live());
  EXPECT_EQ(ticket.endpoint().called, "e0");
}

TEST_F(TicketTest, TicketsLiveInContainers) {
  std::vector<Ticket<Upstream>> tickets;
  for (int i = 0; i < 100; ++i) tickets.push_back(OnFirst());  // Reallocates on the way.
  EXPECT_EQ(Of(0).requests, 100);
  tickets.erase(tickets.begin() + 10, tickets.begin() + 60);
  EXPECT_EQ(Of(0).requests, 50);
  for (const auto& ticket : tickets) EXPECT_TRUE(ticket.live());
  tickets.clear();
  EXPECT_EQ(Of(0), kNone);
}

TEST_F(TicketTest, ADefaultMadeTicketIsEmpty) {
  Ticket<Upstream> ticket;
  EXPECT_TRUE(ticket.empty());
  EXPECT_FALSE(ticket.live());
  Ticket<Upstream> moved = std::move(ticket);
  EXPECT_TRUE(moved.empty());
}

TEST_F(TicketTest, RoutedIsEitherATicketOrARefusal) {
  auto routed = RouteTo(0);
  EXPECT_TRUE(routed.ok());
  EXPECT_TRUE(static_cast<bool>(routed));
  EXPECT_EQ(routed.refusal().reason, RefusalReason::kNone);
  EXPECT_EQ((*routed).endpoint().called, "e0");
  EXPECT_EQ(std::as_const(routed)->endpoint().called, "e0");
  Ticket<Upstream> taken = *std::move(routed);
  EXPECT_TRUE(taken.live());
  EXPECT_FALSE(routed.ok());  // NOLINT(bugprone-use-after-move)
  auto refused = router_->Route({}, {.exclude = ids_});
  EXPECT_FALSE(refused.ok());
  EXPECT_TRUE(std::move(refused).Take().empty());
}

// ---- What it shows.

TEST_F(TicketTest, TheEndpointIsTheOneThatWasChosenWhateverBecomesOfIt) {
  const Ticket<Upstream> ticket = OnFirst();
  const Upstream* endpoint = &ticket.endpoint();
  ASSERT_TRUE(fleet_.Update(ids_[0], {.called = "e0", .edition = 5}).ok());
  EXPECT_EQ(&ticket.endpoint(), endpoint);
  EXPECT_EQ(endpoint->edition, 0);
  ASSERT_TRUE(fleet_.Remove(ids_[0]).ok());
  ASSERT_TRUE(fleet_.Add({.called = "e0", .edition = 6}).ok());
  (void)router_->Route({.tokens = prompt_});
  EXPECT_EQ(&ticket.endpoint(), endpoint);
  EXPECT_EQ(endpoint->edition, 0);
  EXPECT_EQ(ticket.endpoint_id(), ids_[0]);
  ticket.Finish();
  EXPECT_EQ(ticket.endpoint().called, "e0");  // After the end, too.
}

TEST_F(TicketTest, EachLegHasItsEndpointAndDecision) {
  const LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, "prefill-bound"}};
  const auto routed = router_->Route({.tokens = prompt_}, {.legs = legs});
  ASSERT_TRUE(routed.ok()) << routed.refusal().ToString();
  EXPECT_EQ(routed->decision(Leg::kPrefill).leg, Leg::kPrefill);
  EXPECT_EQ(routed->decision(Leg::kDecode).leg, Leg::kDecode);
  EXPECT_EQ(routed->decision(Leg::kDecode).number, routed->decision(Leg::kPrefill).number);
  EXPECT_EQ(routed->endpoint_id(Leg::kDecode), routed->decision(Leg::kDecode).endpoint());
  // A leg that it does not hold means its first.
  EXPECT_EQ(&routed->decision(), &routed->decision(Leg::kPrefill));
  EXPECT_EQ(&routed->decision(Leg::kEncode), &routed->decision(Leg::kPrefill));
  EXPECT_THAT(routed->decision(Leg::kDecode).ToString(), HasSubstr("decode leg, endpoint "));
}

TEST_F(TicketTest, LegsMustBeDistinctAndFew) {
  const LegPolicy twice[] = {{Leg::kDecode, ""}, {Leg::kDecode, ""}};
  EXPECT_EQ(router_->Route({}, {.legs = twice}).refusal().reason, RefusalReason::kBadRequest);
  const LegPolicy four[] = {{Leg::kServe, ""}, {Leg::kEncode, ""}, {Leg::kPrefill, ""}, {Leg::kDecode, ""}};
  EXPECT_EQ(router_->Route({}, {.legs = four}).refusal().ToString(),
            "refused (bad request): RouteOptions.legs: want 1 .. 3, got 4");
  EXPECT_TRUE(router_->Route({}, {.legs = std::span(four).first(3)}).ok());
  EXPECT_TRUE(router_->Route({}, {.legs = std::span(four).first(1)}).ok());
}

TEST_F(TicketTest, LegsAreBookedTogetherOrNotAtAll) {
  const LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, "nobody's"}};
  const auto refused = router_->Route({.tokens = prompt_}, {.legs = legs});
  EXPECT_EQ(refused.refusal().reason, RefusalReason::kUnknownPolicy);
  EXPECT_EQ(refused.refusal().leg, Leg::kDecode);
  EXPECT_THAT(refused.refusal().ToString(), HasSubstr(", decode leg"));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(Of(i), kNone);
  EXPECT_EQ(router_->Metrics().decisions, 0U);
  EXPECT_EQ(router_->Metrics().live_tickets, 0U);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  EXPECT_EQ(router_->Route({.tokens = prompt_})->decision().number, 1U);  // No number was used up.
}

// ---- MoveTo.

TEST_F(TicketTest, MoveToReleasesTheOldAndBooksTheNewInOneStep) {
  Ticket<Upstream> ticket = OnFirst();
  ASSERT_TRUE(ticket.MoveTo(ids_[1]));
  EXPECT_EQ(Of(0), kNone);
  EXPECT_EQ(Of(1), kBooked);
  EXPECT_EQ(ticket.endpoint().called, "e1");
  EXPECT_EQ(ticket.endpoint_id(), ids_[1]);
  EXPECT_EQ(ticket.decision().number, 1U);  // The old choice, with the new endpoint.
  EXPECT_EQ(router_->Metrics().moved, 1U);
  EXPECT_EQ(router_->Metrics().live_tickets, 1U);
  EXPECT_EQ(router_->Metrics().decisions, 1U);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  ticket.FirstToken();
  ticket.Finish();
  EXPECT_EQ(Of(1), kNone);
}

TEST_F(TicketTest, MoveToTakesThePromptAlong) {
  Ticket<Upstream> ticket = OnFirst();
  EXPECT_EQ(Matched(0), 992);
  ASSERT_TRUE(ticket.MoveTo(ids_[1]));
  EXPECT_EQ(Matched(0), 0);  // Never prefilled there.
  EXPECT_EQ(Matched(1), 992);
  ticket.FirstToken();
  ASSERT_TRUE(ticket.MoveTo(ids_[2]));
  EXPECT_EQ(Matched(1), 992);  // Prefilled there: that stays.
  EXPECT_EQ(Matched(2), 992);
}

TEST_F(TicketTest, MatchedTokensOfMoveToAreTakenAsSaidWithinThePrompt) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kLeast = std::numeric_limits<std::int64_t>::min();
  Ticket<Upstream> ticket = OnFirst();
  const std::pair<std::int64_t, std::int64_t> cases[] = {{0, 1'000}, {1, 999}, {1'000, 0}, {1'001, 0}, {kMost, 0}, {-1, 1'000}, {kLeast, 1'000}};
  for (const auto& [matched, charged] : cases) {
    ASSERT_TRUE(ticket.MoveTo(ids_[1], matched));
    EXPECT_EQ(Of(1), (Load{charged, 1, 1'500})) << matched;
    EXPECT_EQ(ticket.decision().matched_tokens, 1'000 - charged);
    EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  }
}

TEST_F(TicketTest, MovingAfterTheFirstTokenBooksANewPrefill) {
  Ticket<Upstream> ticket = OnFirst();
  ticket.FirstToken();
  EXPECT_EQ(Of(0), kStreaming);
  ASSERT_TRUE(ticket.MoveTo(ids_[1]));
  EXPECT_EQ(Of(0), kNone);
  EXPECT_EQ(Of(1), kBooked);
  ticket.FirstToken();
  EXPECT_EQ(Of(1), kStreaming);
  EXPECT_EQ(router_->Metrics().repeated_events, 0U);
}

TEST_F(TicketTest, MovingToWhereItIsBooksItAnew) {
  Ticket<Upstream> ticket = OnFirst();
  ticket.FirstToken();
  ASSERT_TRUE(ticket.MoveTo(ids_[0], 992));
  EXPECT_EQ(Of(0), (Load{8, 1, 1'500}));
  EXPECT_EQ(Matched(0), 992);
  ticket.Finish();
  EXPECT_EQ(Of(0), kNone);
}

TEST_F(TicketTest, ATargetThatIsGoneDrainedOrEjectedChangesNothing) {
  const EndpointId gone = *fleet_.Add({.called = "gone"});
  ASSERT_TRUE(fleet_.Remove(gone).ok());
  ASSERT_TRUE(fleet_.Drain(ids_[1]).ok());
  ASSERT_TRUE(fleet_.SetEligible(ids_[2], false).ok());
  auto routed = router_->Route({.tokens = prompt_});
  Ticket<Upstream> ticket = std::move(routed).Take();
  ticket.FirstToken();
  constexpr std::uint32_t kMost = std::numeric_limits<std::uint32_t>::max();
  for (const EndpointId to : {gone, ids_[1], ids_[2], EndpointId{}, EndpointId{0, 0}, EndpointId{0, 2}, EndpointId{9, 1},
                              EndpointId{kMaxEndpoints, 1}, EndpointId{kMost, kMost}}) {
    EXPECT_FALSE(ticket.MoveTo(to)) << to.slot << ", " << to.incarnation;
  }
  EXPECT_EQ(ticket.endpoint_id(), ids_[0]);
  EXPECT_EQ(Of(0), kStreaming);
  EXPECT_EQ(Matched(0), 992);
  EXPECT_EQ(router_->Metrics().moved, 0U);
  // A ticket whose own endpoint is drained or gone may still leave it.
  ASSERT_TRUE(fleet_.Drain(ids_[0]).ok());
  ASSERT_TRUE(fleet_.Resume(ids_[1]).ok());
  EXPECT_TRUE(ticket.MoveTo(ids_[1]));
  ASSERT_TRUE(fleet_.Remove(ids_[1]).ok());
  ASSERT_TRUE(fleet_.SetEligible(ids_[2], true).ok());
  EXPECT_TRUE(ticket.MoveTo(ids_[2]));
  EXPECT_EQ(router_->Metrics().orphaned_releases, 1U);
  EXPECT_EQ(Of(2), kBooked);
}

TEST_F(TicketTest, AnEndedTicketDoesNotMove) {
  Ticket<Upstream> finished = OnFirst(), expired = OnFirst();
  finished.Finish();
  expired.Deadline(1s);
  ASSERT_EQ(router_->Expire(1s), 1U);
  EXPECT_FALSE(finished.MoveTo(ids_[1]));
  EXPECT_FALSE(expired.MoveTo(ids_[1]));
  EXPECT_FALSE(router_->Reroute(finished, {.tokens = prompt_}));
  EXPECT_FALSE(router_->Reroute(expired, {.tokens = prompt_}));
  EXPECT_EQ(Of(1), kNone);
  EXPECT_EQ(router_->Metrics().late_events, 2U);  // The expired one's.
  EXPECT_EQ(finished.endpoint_id(), ids_[0]);
}

TEST_F(TicketTest, OneLegMovesAndTheOtherStays) {
  const LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, ""}};
  auto routed = router_->Route({.tokens = prompt_}, {.legs = legs});
  ASSERT_TRUE(routed.ok());
  EXPECT_FALSE(routed->MoveTo(ids_[1]));  // Which one?
  EXPECT_FALSE(routed->MoveTo(ids_[1], 0, Leg::kEncode));
  ASSERT_TRUE(routed->MoveTo(ids_[0], 0, Leg::kPrefill));
  ASSERT_TRUE(routed->MoveTo(ids_[1], 0, Leg::kDecode));
  routed->FirstToken();
  EXPECT_EQ(Of(0), kNone);
  EXPECT_EQ(Of(1), kStreaming);
  ASSERT_TRUE(routed->MoveTo(ids_[2], 0, Leg::kPrefill));  // The prefill is done again, elsewhere.
  EXPECT_EQ(Of(0), kNone);
  EXPECT_EQ(Of(2), kBooked);
  EXPECT_EQ(Of(1), kStreaming);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  routed->FirstToken();
  EXPECT_EQ(Of(2), kNone);
  routed->Finish();
  EXPECT_EQ(Of(1), kNone);
}

TEST_F(TicketTest, KServeStandsForTheOnlyLeg) {
  const LegPolicy legs[] = {{Leg::kDecode, ""}};
  auto routed = router_->Route({.tokens = prompt_}, {.exclude = {{ids_[1]}}, .legs = legs});
  ASSERT_TRUE(routed.ok());
  EXPECT_TRUE(routed->MoveTo(ids_[1]));
  EXPECT_EQ(routed->endpoint_id(), ids_[1]);
  EXPECT_EQ(routed->decision().leg, Leg::kDecode);
  EXPECT_TRUE(router_->Reroute(*routed, {.tokens = prompt_}));
  EXPECT_NE(routed->endpoint_id(), ids_[1]);
  EXPECT_EQ(routed->decision().leg, Leg::kDecode);
}

// ---- Reroute.

TEST_F(TicketTest, R126_RerouteExcludesTheOldEndpointAndSwapsInOneStep) {
  Ticket<Upstream> ticket = OnFirst();
  const Decision kept = ticket.decision();
  ASSERT_TRUE(router_->Reroute(ticket, {.tokens = prompt_}));
  EXPECT_NE(ticket.endpoint_id(), ids_[0]);
  EXPECT_EQ(Of(0), kNone);
  EXPECT_EQ(LoadOf(*router_, ticket.endpoint_id()), kBooked);
  EXPECT_EQ(ticket.decision().number, 2U);
  EXPECT_EQ(ticket.decision().candidates, 2U);
  EXPECT_EQ(Matched(0), 0);
  EXPECT_EQ(Matched(ticket.endpoint_id().slot), 992);
  const RouterMetrics metrics = router_->Metrics();
  EXPECT_EQ(metrics.decisions, 2U);
  EXPECT_EQ(metrics.moved, 1U);
  EXPECT_EQ(metrics.live_tickets, 1U);
  EXPECT_EQ(metrics.aborted, 0U);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  // A decision that was copied out is the caller's.
  EXPECT_EQ(kept.endpoint(), ids_[0]);
  EXPECT_EQ(kept.number, 1U);
  ticket = Ticket<Upstream>();
  EXPECT_THAT(kept.ToString(), HasSubstr("decision 1: endpoint e0 (slot 0)"));
}

TEST_F(TicketTest, AFailedRerouteChangesNothing) {
  Ticket<Upstream> ticket = OnFirst();
  ticket.FirstToken();
  const std::string before = ticket.decision().ToString();
  const EndpointId others[] = {ids_[1], ids_[2]};
  EXPECT_FALSE(router_->Reroute(ticket, {.tokens = prompt_}, {.exclude = others}));
  EXPECT_FALSE(router_->Reroute(ticket, {.tokens = prompt_, .model = "m"}, {.policy = "nobody's"}));
  EXPECT_FALSE(router_->Reroute(ticket, {.prompt_tokens = -5}));
  EXPECT_FALSE(router_->Reroute(ticket, {.tokens = prompt_}, {.leg = Leg::kDecode}));
  ASSERT_TRUE(fleet_.Drain(ids_[0]).ok() && fleet_.Drain(ids_[1]).ok() && fleet_.Drain(ids_[2]).ok());
  EXPECT_FALSE(router_->Reroute(ticket, {.tokens = prompt_}));
  EXPECT_EQ(ticket.decision().ToString(), before);
  EXPECT_EQ(ticket.endpoint_id(), ids_[0]);
  EXPECT_EQ(Of(0), kStreaming);
  const RouterMetrics metrics = router_->Metrics();
  EXPECT_EQ(Refusals(metrics, RefusalReason::kAllExcluded), 1U);
  EXPECT_EQ(Refusals(metrics, RefusalReason::kUnknownPolicy), 1U);
  EXPECT_EQ(Refusals(metrics, RefusalReason::kBadRequest), 2U);
  EXPECT_EQ(Refusals(metrics, RefusalReason::kAllDrained), 1U);
  EXPECT_EQ(metrics.decisions, 1U);
  EXPECT_EQ(metrics.moved, 0U);
  ASSERT_TRUE(fleet_.Resume(ids_[0]).ok());
  EXPECT_EQ(Matched(0), 992);
  ticket.Finish();
  EXPECT_EQ(Of(0), kNone);
}

TEST_F(TicketTest, RerouteUsesThePolicyThatDecidedBefore) {
  ASSERT_TRUE(router_->SetPolicy("rotate", Policy(RoundRobinPicker())).ok());
  auto routed = router_->Route({.tokens = prompt_}, {.policy = "rotate"});
  ASSERT_TRUE(router_->Reroute(*routed, {.tokens = prompt_}));
  EXPECT_EQ(routed->decision().policy_name(), "rotate");
  ASSERT_TRUE(router_->Reroute(*routed, {.tokens = prompt_}, {.policy = "prefill-bound"}));
  EXPECT_EQ(routed->decision().policy_name(), "prefill-bound");
}

TEST_F(TicketTest, RerouteCountsANewPromptFromThereOn) {
  Ticket<Upstream> ticket = OnFirst();
  const std::vector<TokenId> longer = MakePrompt(1, 1'500);
  ASSERT_TRUE(router_->Reroute(ticket, {.tokens = longer, .max_output_tokens = 10}));
  EXPECT_EQ(LoadOf(*router_, ticket.endpoint_id()), (Load{1'500, 1, 10}));
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
}

TEST_F(TicketTest, ATicketOfAnotherRouterIsNotRerouted) {
  auto other = LeastOutstanding(fleet_);
  ASSERT_TRUE(other.ok());
  Ticket<Upstream> ticket = OnFirst();
  EXPECT_FALSE(other->Reroute(ticket, {.tokens = prompt_}));
  EXPECT_EQ(Of(0), kBooked);
  EXPECT_EQ(other->Metrics().decisions, 0U);
  Router<Upstream> copy = *router_;  // A handle on the same router may.
  EXPECT_TRUE(copy.Reroute(ticket, {.tokens = prompt_}));
}

TEST_F(TicketTest, ATicketOfARemovedEndpointIsReroutedToAnyOther) {
  Ticket<Upstream> ticket = OnFirst();
  ASSERT_TRUE(fleet_.Remove(ids_[0]).ok());
  const EndpointId back = *fleet_.Add({.called = "e0"});
  EXPECT_TRUE(router_->Reroute(ticket, {.tokens = prompt_}, {.exclude = {{ids_[1], ids_[2]}}}));
  EXPECT_EQ(ticket.endpoint_id(), back);  // Another incarnation is another endpoint.
  EXPECT_EQ(router_->Metrics().orphaned_releases, 1U);
  EXPECT_EQ(LoadOf(*router_, back), kBooked);
}

TEST_F(TicketTest, ADeadlineOutlivesAMove) {
  Ticket<Upstream> ticket = OnFirst();
  ticket.Deadline(5s);
  ASSERT_TRUE(ticket.MoveTo(ids_[1]));
  ASSERT_TRUE(router_->Reroute(ticket, {.tokens = prompt_}));
  EXPECT_EQ(router_->Expire(5s - 1ns), 0U);
  EXPECT_EQ(router_->Expire(5s), 1U);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(Of(i), kNone);
}

// ---- Outliving everybody.

TEST_F(TicketTest, TicketsMayOutliveRouterAndFleet) {
  Ticket<Upstream> streaming = OnFirst(), finished = OnFirst(), dropped = OnFirst(), moved = OnFirst();
  const Decision kept = streaming.decision();
  router_.reset();
  fleet_ = Fleet<Upstream>();  // The last handle of the first one.
  EXPECT_EQ(streaming.endpoint().called, "e0");
  EXPECT_TRUE(streaming.live());
  streaming.FirstToken();
  streaming.Finish({.output_tokens = 3, .cached_tokens = 5});
  streaming.Finish();
  finished.Deadline(1s);
  finished.Finish();
  EXPECT_TRUE(moved.MoveTo(ids_[1]));  // There is still a fleet behind it.
  EXPECT_EQ(moved.endpoint().called, "e1");
  dropped = Ticket<Upstream>();
  Ticket<Upstream> last = std::move(moved);
  streaming = Ticket<Upstream>();
  EXPECT_EQ(kept.endpoint_name(), "e0");
  EXPECT_THAT(kept.ToString(), HasSubstr("by policy \"prefill-bound\""));
}

TEST_F(TicketTest, TheFleetHandleMayGoBeforeTheRouter) {
  fleet_ = Fleet<Upstream>();
  auto routed = router_->Route({.tokens = prompt_});
  ASSERT_TRUE(routed.ok());
  routed->Finish();
  EXPECT_TRUE(router_->Audit().ok());
}

TEST_F(TicketTest, TheLastTicketMayGoOnAnotherThread) {
  Ticket<Upstream> ticket = OnFirst();
  router_.reset();
  std::thread([moved = std::move(ticket)]() mutable { moved.FirstToken(); moved = Ticket<Upstream>(); }).join();
}

TEST_F(TicketTest, CachedTokensOfFinishedRequestsAreComparedWithThePrediction) {
  { const Ticket<Upstream> t = OnFirst(); t.FirstToken(); t.Finish({.cached_tokens = 0}); }
  { const Ticket<Upstream> t = OnFirst(); t.FirstToken(); t.Finish({.cached_tokens = 960}); }
  { const Ticket<Upstream> t = OnFirst(); t.Finish({.cached_tokens = 500, .aborted = true}); }  // Not complete.
  { const Ticket<Upstream> t = OnFirst(); t.Finish({.output_tokens = 7}); }                     // Not reported.
  EXPECT_EQ(router_->Metrics().predicted_cached_tokens, 992U);
  EXPECT_EQ(router_->Metrics().reported_cached_tokens, 960U);
}

}  // namespace
}  // namespace tokroute

#include "tokroute/load/in_flight_load.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
using testing_support::Upstream;
using ::testing::HasSubstr;

// Says that every endpoint holds `tokens` of every prompt (or all of it, if shorter).
struct FixedMatch {
  using Produces = Signals<MatchedTokens>;
  struct Receipt {};
  struct Workspace {};
  std::int64_t tokens = 0;
  void Fill(const Request& r, const FleetView&, Workspace&, WritableColumns<Produces> own) noexcept {
    for (std::int64_t& m : own.Column<MatchedTokens>()) m = std::min(tokens, PromptTokens(r));
  }
  Receipt Record(const Request&, const FleetView&, Workspace&, const Booking&) noexcept { return {}; }
  void OnFirstToken(Receipt&) noexcept {}
  void OnReleased(Receipt&, const Outcome&) noexcept {}
};

Router<Upstream> MakeLedger(const Fleet<Upstream>& fleet, const InFlightLoadOptions& options = {}, std::int64_t matched = 0) {
  auto router = MakeRouter(fleet, {.seed = 1}, Producers(InFlightLoad(options), FixedMatch{matched}),
                           Named("least", Policy(ActiveRequestScorer(), MaxScorePicker<>())));
  EXPECT_TRUE(router.ok()) << router.status();
  return *router;
}

// A fleet of one and a ledger over it.
class InFlightLoadTest : public ::testing::Test {
 protected:
  Ticket<Upstream> Book(std::int64_t tokens, std::int64_t max_output = -1) {
    auto routed = router_->Route({.prompt_tokens = tokens, .max_output_tokens = max_output});
    EXPECT_TRUE(routed.ok()) << routed.refusal().ToString();
    return std::move(routed).Take();
  }
  void Use(const InFlightLoadOptions& options, std::int64_t matched = 0) {
    router_.emplace(MakeLedger(fleet_, options, matched));
  }
  Load Now() { return LoadOf(*router_, ids_[0]); }

  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 1);
  std::optional<Router<Upstream>> router_ = MakeLedger(fleet_);
};

// ---- The table in the header, row by row.

TEST_F(InFlightLoadTest, StreamingReleasesTheChargeAtTheFirstTokenAndTheRestAtTheEnd) {
  const Ticket<Upstream> ticket = Book(1'000);
  EXPECT_EQ(Now(), (Load{1'000, 1, 1'500}));
  ticket.FirstToken();
  EXPECT_EQ(Now(), (Load{0, 1, 1'500}));
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  ticket.Finish({.output_tokens = 7});
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, NonStreamingReleasesEverythingAtTheEnd) {
  const Ticket<Upstream> ticket = Book(1'000);
  ticket.Finish();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, AbortAndDropReleaseEverythingBeforeAndAfterTheFirstToken) {
  for (const bool streamed : {false, true}) {
    const Ticket<Upstream> aborted = Book(1'000);
    { const Ticket<Upstream> dropped = Book(500); if (streamed) dropped.FirstToken(); }
    if (streamed) aborted.FirstToken();
    EXPECT_EQ(Now(), (Load{streamed ? 0 : 1'000, 1, 1'500}));
    aborted.Finish({.aborted = true});
    EXPECT_EQ(Now(), (Load{0, 0, 0}));
  }
  EXPECT_EQ(router_->Metrics().aborted, 4U);
  EXPECT_EQ(router_->Metrics().finished, 0U);
}

TEST_F(InFlightLoadTest, ChargesTheUncachedPartByDefault) {
  Use({}, 640);
  const Ticket<Upstream> ticket = Book(1'000);
  EXPECT_EQ(Now(), (Load{360, 1, 1'500}));  // The estimate is of the whole prompt.
  EXPECT_EQ(ticket.decision().matched_tokens, 640);
  ticket.FirstToken();
  EXPECT_EQ(Now(), (Load{0, 1, 1'500}));
}

TEST_F(InFlightLoadTest, AFullyCachedPromptChargesNothing) {
  Use({}, 1 << 20);
  const Ticket<Upstream> ticket = Book(1'000);
  EXPECT_EQ(Now(), (Load{0, 1, 1'500}));
}

TEST_F(InFlightLoadTest, FullPromptChargesTheCachedPartToo) {
  Use({.charge = Charge::kFullPrompt}, 640);
  const Ticket<Upstream> ticket = Book(1'000);
  EXPECT_EQ(Now(), (Load{1'000, 1, 1'500}));
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  ticket.FirstToken();
  EXPECT_EQ(Now(), (Load{0, 1, 1'500}));
}

TEST_F(InFlightLoadTest, CountedOutputIsHeldToTheEnd) {
  Use({.count_estimated_output = true});
  const Ticket<Upstream> ticket = Book(1'001);
  EXPECT_EQ(Now(), (Load{1'001 + 1'502, 1, 1'502}));  // 1501.5, halves up.
  ticket.FirstToken();
  EXPECT_EQ(Now(), (Load{1'502, 1, 1'502}));
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  ticket.Finish();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, CountedOutputOfAnAbortedRequestIsReleasedAtOnce) {
  Use({.charge = Charge::kFullPrompt, .count_estimated_output = true}, 100);
  { const Ticket<Upstream> ticket = Book(1'000); EXPECT_EQ(Now(), (Load{2'500, 1, 1'500})); }
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, TheClientsAndTheOperatorsCapBoundTheEstimate) {
  Use({.count_estimated_output = true, .output = {.output_ratio = 2, .max_estimated_output_tokens = 300}});
  { const Ticket<Upstream> t = Book(100); EXPECT_EQ(Now(), (Load{300, 1, 200})); }
  { const Ticket<Upstream> t = Book(1'000); EXPECT_EQ(Now(), (Load{1'300, 1, 300})); }
  { const Ticket<Upstream> t = Book(1'000, 64); EXPECT_EQ(Now(), (Load{1'064, 1, 64})); }
  { const Ticket<Upstream> t = Book(1'000, 0); EXPECT_EQ(Now(), (Load{1'000, 1, 0})); }
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, MoveToKeepsTheClientsCap) {
  const EndpointId other = *fleet_.Add({.called = "other"});
  Use({.count_estimated_output = true});
  auto routed = router_->Route({.prompt_tokens = 1'000, .max_output_tokens = 64}, {.exclude = {{other}}});
  ASSERT_TRUE(routed.ok());
  ASSERT_TRUE(routed->MoveTo(other));
  EXPECT_EQ(LoadOf(*router_, other), (Load{1'064, 1, 64}));
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, AnEmptyPromptCountsAsARequestOnly) {
  const Ticket<Upstream> ticket = Book(0);
  EXPECT_EQ(Now(), (Load{0, 1, 0}));
  ticket.FirstToken();
  ticket.Finish();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, ThousandsOfTheLongestPromptsDoNotOverflow) {
  Use({.charge = Charge::kFullPrompt, .count_estimated_output = true, .output = {.output_ratio = 1e6}});
  std::vector<Ticket<Upstream>> tickets;
  for (int i = 0; i < 2'000; ++i) tickets.push_back(Book(kMaxPromptTokens));
  EXPECT_EQ(Now(), (Load{2'000 * 2 * kMaxPromptTokens, 2'000, 2'000 * kMaxPromptTokens}));
  tickets.clear();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, TextIsEstimatedAtFourBytesAToken) {
  const std::string text(1'001, 'x');
  auto routed = router_->Route({.text = text});
  ASSERT_TRUE(routed.ok());
  EXPECT_EQ(Now(), (Load{251, 1, 377}));  // 376.5.
}

TEST_F(InFlightLoadTest, LastDispatchIsTheNumberOfTheDecision) {
  EXPECT_EQ(router_->Read<LastDispatch>(ids_[0]), 0U);
  const Ticket<Upstream> first = Book(1), second = Book(1);
  EXPECT_EQ(router_->Read<LastDispatch>(ids_[0]), 2U);
}

TEST_F(InFlightLoadTest, MovingAnOldTicketDoesNotMakeAnEndpointLookLongUnused) {
  const EndpointId other = *fleet_.Add({.called = "other"});
  const auto on_first = router_->Route({}, {.exclude = {{other}}});          // Decision 1.
  auto moving = router_->Route({}, {.exclude = {{other}}});                  // Decision 2.
  const auto on_other = router_->Route({}, {.exclude = {{ids_[0]}}});        // Decision 3.
  ASSERT_TRUE(on_first.ok() && moving.ok() && on_other.ok());
  ASSERT_TRUE(moving->MoveTo(other));
  EXPECT_EQ(router_->Read<LastDispatch>(other), 3U);
}

// ---- Legs.

TEST_F(InFlightLoadTest, R14_APrefillLegEndsAtTheFirstTokenAndTheDecodeLegGoesOn) {
  const EndpointId decode_id = *fleet_.Add({.called = "decode"});
  const EndpointId prefill_id = ids_[0];
  const LegPolicy legs[] = {{Leg::kPrefill, "least"}, {Leg::kDecode, "least"}};
  for (const bool counted : {false, true}) {
    Use({.count_estimated_output = counted, .output = {.output_ratio = 0.5}});
    auto routed = router_->Route({.prompt_tokens = 8'000}, {.legs = legs});
    ASSERT_TRUE(routed.ok());
    ASSERT_TRUE(routed->MoveTo(prefill_id, 0, Leg::kPrefill));  // The draw may have put them the other way round.
    ASSERT_TRUE(routed->MoveTo(decode_id, 0, Leg::kDecode));
    const std::int64_t held = counted ? 4'000 : 0;
    EXPECT_EQ(LoadOf(*router_, prefill_id), (Load{8'000 + held, 1, 4'000}));
    EXPECT_EQ(LoadOf(*router_, decode_id), (Load{8'000 + held, 1, 4'000}));
    EXPECT_EQ(router_->Metrics().live_tickets, 1U);
    routed->FirstToken();
    EXPECT_EQ(LoadOf(*router_, prefill_id), (Load{0, 0, 0}));
    EXPECT_EQ(LoadOf(*router_, decode_id), (Load{held, 1, 4'000}));
    EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
    routed->FirstToken();
    routed->Finish();
    routed->Finish();
    EXPECT_EQ(LoadOf(*router_, prefill_id), (Load{0, 0, 0}));
    EXPECT_EQ(LoadOf(*router_, decode_id), (Load{0, 0, 0}));
    EXPECT_EQ(router_->Metrics().repeated_events, 2U);
    EXPECT_EQ(router_->Metrics().finished, 1U);
  }
}

TEST_F(InFlightLoadTest, AllLegsAreReleasedByADropBeforeTheFirstToken) {
  (void)*fleet_.Add({.called = "second"});
  const LegPolicy legs[] = {{Leg::kEncode, ""}, {Leg::kPrefill, ""}, {Leg::kDecode, ""}};
  {
    auto routed = router_->Route({.prompt_tokens = 100}, {.legs = legs});
    ASSERT_TRUE(routed.ok());
    std::int64_t requests = 0;
    for (EndpointId id : fleet_.Ids()) requests += LoadOf(*router_, id).requests;
    EXPECT_EQ(requests, 3);
    EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  }
  for (EndpointId id : fleet_.Ids()) EXPECT_EQ(LoadOf(*router_, id), (Load{0, 0, 0}));
  EXPECT_EQ(router_->Metrics().aborted, 1U);
  EXPECT_EQ(router_->Metrics().decisions, 3U);
}

// ---- Any order, any number.

TEST_F(InFlightLoadTest, EveryOrderOfCallsReleasesOnce) {
  // All sequences of four calls out of these four, with a second request that must stay untouched.
  const Ticket<Upstream> bystander = Book(77);
  for (int sequence = 0; sequence < 4 * 4 * 4 * 4; ++sequence) {
    std::optional<Ticket<Upstream>> ticket = Book(1'000);
    bool ended = false, prefilled = false;
    for (int i = 0, rest = sequence; i < 4; ++i, rest /= 4) {
      if (!ticket.has_value()) break;
      switch (rest % 4) {
        case 0: ticket->FirstToken(); prefilled = true; break;
        case 1: ticket->Finish(); ended = true; break;
        case 2: ticket->Finish({.aborted = true}); ended = true; break;
        case 3: ticket.reset(); ended = true; break;
      }
      const Load want = ended ? Load{77, 1, 116} : prefilled ? Load{77, 2, 1'616} : Load{1'077, 2, 1'616};
      ASSERT_EQ(Now(), want) << "sequence " << sequence << ", call " << i;
    }
    ticket.reset();
    ASSERT_EQ(Now(), (Load{77, 1, 116})) << "sequence " << sequence;
  }
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  EXPECT_EQ(router_->Metrics().live_tickets, 1U);
}

TEST_F(InFlightLoadTest, R3_EachBookingIsReleasedOnceHoweverManyCallsCome) {
  const Ticket<Upstream> q1 = Book(4'000), q2 = Book(4'000);
  q1.FirstToken();
  q1.Finish();
  q1.Finish({.aborted = true});
  q1.Finish();
  q1.FirstToken();
  EXPECT_EQ(Now(), (Load{4'000, 1, 6'000}));
  EXPECT_EQ(router_->Metrics().repeated_events, 2U);
  EXPECT_EQ(router_->Metrics().late_events, 1U);
}

TEST_F(InFlightLoadTest, R4_AReusedEntryIsANewBooking) {
  // The slab gives the entry of a dropped ticket to the next one; nothing of the old one may stick.
  { const Ticket<Upstream> first = Book(1'000); first.FirstToken(); first.Finish(); }
  const Ticket<Upstream> second = Book(2'000);
  EXPECT_EQ(Now(), (Load{2'000, 1, 3'000}));
  EXPECT_TRUE(second.live());
  second.FirstToken();
  EXPECT_EQ(Now(), (Load{0, 1, 3'000}));
  EXPECT_EQ(router_->Metrics().repeated_events + router_->Metrics().late_events, 0U);
}

TEST(InFlightLoadFieldReportTest, R5_DroppedTicketsLeakNothing) {
  Fleet<Upstream> fleet;
  std::vector<EndpointId> ids = AddEndpoints(fleet, 3);
  auto router = MakeLedger(fleet);
  std::vector<Ticket<Upstream>> tickets;
  for (int i = 0; i < 3'000; ++i) tickets.push_back(router.Route({.prompt_tokens = 100}).Take());
  for (EndpointId id : ids) EXPECT_EQ(LoadOf(router, id), (Load{100'000, 1'000, 150'000}));
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    if (i % 5 >= 2) { tickets[i].FirstToken(); tickets[i].Finish(); }  // The others, 40 %, are dropped without a call.
  }
  tickets.clear();
  for (EndpointId id : ids) EXPECT_EQ(LoadOf(router, id), (Load{0, 0, 0}));
  EXPECT_EQ(router.Metrics().aborted, 1'200U);
  EXPECT_EQ(router.Metrics().live_tickets, 0U);

  ASSERT_TRUE(fleet.Remove(ids[1]).ok());
  ids[1] = *fleet.Add({.called = "e1"});
  int picks[3] = {};
  for (int i = 0; i < 90; ++i) ++picks[router.Route({.prompt_tokens = 100})->endpoint_id().slot];
  for (int count : picks) EXPECT_NEAR(count, 30, 15);
}

TEST_F(InFlightLoadTest, R7_ReleasesByThePhaseThatWasReached) {
  for (int i = 0; i < 10'000; ++i) {
    const Ticket<Upstream> ticket = Book(100);
    if (i % 2 == 0) ticket.FirstToken();
    ticket.Finish({.aborted = i % 2 != 0});
  }
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  EXPECT_EQ(router_->Metrics().live_tickets, 0U);
  EXPECT_EQ(router_->Metrics().aborted, 5'000U);
  EXPECT_EQ(router_->Metrics().finished, 5'000U);
}

TEST_F(InFlightLoadTest, R15_CallsOnATicketThatBookedNothingDoNothing) {
  Ticket<Upstream> never;
  never.FirstToken();
  never.Finish();
  never.Deadline(5s);
  EXPECT_FALSE(never.MoveTo(ids_[0]));
  EXPECT_FALSE(router_->Reroute(never, {}));
  EXPECT_FALSE(never.live());
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  const Ticket<Upstream> booked = Book(500);
  EXPECT_EQ(Now(), (Load{500, 1, 750}));
}

// ---- The incarnation that was booked.

TEST_F(InFlightLoadTest, R1_AReleaseHitsTheIncarnationThatWasBooked) {
  const Ticket<Upstream> q1 = Book(5'000);
  ASSERT_TRUE(fleet_.Remove(ids_[0]).ok());
  ids_[0] = *fleet_.Add({.called = "e0"});
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  const Ticket<Upstream> q2 = Book(3'000);
  q1.FirstToken();
  EXPECT_EQ(Now(), (Load{3'000, 1, 4'500}));
  q1.Finish();
  EXPECT_EQ(Now(), (Load{3'000, 1, 4'500}));
  EXPECT_EQ(router_->Metrics().orphaned_releases, 1U);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  q2.Finish();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  EXPECT_EQ(router_->Metrics().orphaned_releases, 1U);
}

TEST_F(InFlightLoadTest, R1_AlsoWhenTheRouterNeverSawTheEndpointGone) {
  // Removed and added between two calls of the router: it sees one change, of the incarnation.
  std::vector<Ticket<Upstream>> tickets;
  for (int i = 0; i < 5; ++i) {
    tickets.push_back(Book(1'000));
    ASSERT_TRUE(fleet_.Remove(ids_[0]).ok());
    ids_[0] = *fleet_.Add({.called = "e0"});
    tickets[static_cast<std::size_t>(i)].Finish();  // Before the router has looked at the fleet again.
  }
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  EXPECT_EQ(router_->Metrics().orphaned_releases, 5U);
}

TEST(InFlightLoadFieldReportTest, R2_AReAddedEndpointDoesNotLookIdlerThanIdle) {
  Fleet<Upstream> fleet;
  std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto router = MakeLedger(fleet);
  std::vector<Ticket<Upstream>> old;
  for (int i = 0; i < 3; ++i) old.push_back(router.Route({.prompt_tokens = 100}, {.exclude = {{ids[1]}}}).Take());
  ASSERT_TRUE(fleet.Remove(ids[0]).ok());
  ids[0] = *fleet.Add({.called = "e0"});
  for (const auto& ticket : old) ticket.Finish();
  int on_first = 0;
  for (std::uint64_t i = 0; i < 100; ++i) on_first += router.Route({.prompt_tokens = 100})->endpoint_id() == ids[0] ? 1 : 0;
  EXPECT_NEAR(on_first, 50, 20);
}

TEST(InFlightLoadFieldReportTest, R20_AnEndpointAddedLateStartsAtZeroAndTakesItsShare) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 3);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 20});
  ASSERT_TRUE(router.ok());
  std::vector<Ticket<Upstream>> running;
  for (std::uint64_t i = 0; i < 12; ++i) {
    const auto prompt = MakePrompt(900 + i, 1'000);
    running.push_back(router->Route({.tokens = prompt}).Take());
  }
  for (int i = 3; i < 5; ++i) {
    const EndpointId id = *fleet.Add({.called = absl::StrCat("e", i)});
    EXPECT_EQ(LoadOf(*router, id), (Load{0, 0, 0}));
  }
  running.clear();
  int picks[5] = {};
  for (std::uint64_t i = 0; i < 512; ++i) {
    const auto prompt = MakePrompt(i, 1'000);
    auto routed = router->Route({.tokens = prompt});
    ASSERT_TRUE(routed.ok());
    ++picks[routed->endpoint_id().slot];
    if (running.size() == 128) running.erase(running.begin());
    running.push_back(std::move(routed).Take());
  }
  for (int count : picks) EXPECT_NEAR(count, 102, 30);
}

TEST(InFlightLoadFieldReportTest, R21_RemovalTakesExactlyTheEndpointsOwnLoad) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto router = MakeLedger(fleet);
  const auto on_a = router.Route({.prompt_tokens = 10'000}, {.exclude = {{ids[1]}}});
  const auto on_b = router.Route({.prompt_tokens = 5'000}, {.exclude = {{ids[0]}}});
  const auto total = [&] {
    std::int64_t tokens = 0;
    for (EndpointId id : fleet.Ids()) tokens += LoadOf(router, id).tokens;
    return tokens;
  };
  EXPECT_EQ(total(), 15'000);
  ASSERT_TRUE(fleet.Remove(ids[0]).ok());
  EXPECT_EQ(total(), 5'000);
  EXPECT_EQ(router.Read<UncachedTokensInFlight>(ids[0]), std::nullopt);
  EXPECT_TRUE(router.Audit().ok()) << router.Audit();
  on_a->Finish();
  EXPECT_EQ(total(), 5'000);
  EXPECT_TRUE(router.Audit().ok()) << router.Audit();
  on_b->Finish();
  EXPECT_EQ(total(), 0);
}

TEST_F(InFlightLoadTest, UpdateDrainAndEligibilityNeverTouchLoad) {
  const Ticket<Upstream> ticket = Book(1'000);
  const Load before = Now();
  ASSERT_TRUE(fleet_.Update(ids_[0], {.called = "e0", .serves = {"m"}, .rate = 5, .capacity = 64, .share = 3}).ok());
  EXPECT_EQ(Now(), before);
  ASSERT_TRUE(fleet_.Drain(ids_[0]).ok());
  EXPECT_EQ(Now(), before);
  ASSERT_TRUE(fleet_.Resume(ids_[0]).ok());
  ASSERT_TRUE(fleet_.SetEligible(ids_[0], false).ok());
  EXPECT_EQ(Now(), before);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  ticket.Finish();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  EXPECT_EQ(router_->Metrics().orphaned_releases, 0U);
}

// ---- Deadlines.

TEST_F(InFlightLoadTest, R12_EventsOfAnExpiredRequestAreCountedAndHarmless) {
  const Ticket<Upstream> ticket = Book(10'000);
  ticket.Deadline(300s);
  EXPECT_EQ(router_->Expire(300s - 1ns), 0U);
  EXPECT_EQ(Now(), (Load{10'000, 1, 15'000}));
  EXPECT_EQ(router_->Expire(301s), 1U);
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  EXPECT_FALSE(ticket.live());
  ticket.FirstToken();
  ticket.Finish();
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
  const RouterMetrics metrics = router_->Metrics();
  EXPECT_EQ(metrics.late_events, 2U);
  EXPECT_EQ(metrics.expired, 1U);
  EXPECT_EQ(metrics.aborted, 1U);
  EXPECT_EQ(metrics.finished, 0U);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
}

TEST_F(InFlightLoadTest, R13_ExtendedDeadlinesHoldAndTheOthersExpire) {
  std::vector<Ticket<Upstream>> tickets;
  for (int i = 0; i < 1'000; ++i) {
    tickets.push_back(Book(100));
    tickets.back().Deadline(60s);
  }
  for (std::size_t i = 0; i < 100; ++i) tickets[i].Deadline(119s);
  EXPECT_EQ(router_->Expire(61s), 900U);
  EXPECT_EQ(Now(), (Load{10'000, 100, 15'000}));
  EXPECT_EQ(router_->Expire(118s), 0U);
  EXPECT_EQ(router_->Expire(119s), 100U);
  EXPECT_EQ(Now(), (Load{0, 0, 0}));
}

TEST_F(InFlightLoadTest, WithoutADeadlineNothingEverExpires) {
  const Ticket<Upstream> ticket = Book(100);
  EXPECT_EQ(router_->Expire(std::chrono::nanoseconds::max()), 0U);
  ticket.Deadline(5s);
  ticket.Deadline(std::chrono::nanoseconds::max());  // Taken away again.
  EXPECT_EQ(router_->Expire(std::chrono::nanoseconds::max()), 0U);
  EXPECT_TRUE(ticket.live());
  ticket.Deadline(std::chrono::nanoseconds::min());
  EXPECT_EQ(router_->Expire(std::chrono::nanoseconds::min()), 1U);
  ticket.Deadline(5s);
  EXPECT_EQ(router_->Metrics().late_events, 1U);
}

TEST_F(InFlightLoadTest, AFinishedTicketDoesNotExpire) {
  const Ticket<Upstream> ticket = Book(100);
  ticket.Deadline(5s);
  ticket.Finish();
  EXPECT_EQ(router_->Expire(10s), 0U);
  EXPECT_EQ(router_->Metrics().aborted, 0U);
}

TEST_F(InFlightLoadTest, AnExpiredTicketOfARemovedEndpointFallsOnNothing) {
  const Ticket<Upstream> ticket = Book(100);
  ticket.Deadline(5s);
  ASSERT_TRUE(fleet_.Remove(ids_[0]).ok());
  EXPECT_EQ(router_->Expire(5s), 1U);
  EXPECT_EQ(router_->Metrics().orphaned_releases, 1U);
}

// ---- Options.

TEST(InFlightLoadOptionsTest, BadOutputOptionsAreNamedWithValueAndRange) {
  const auto error = [](const OutputEstimateOptions& output) { return InFlightLoad({.output = output}).Check(); };
  const double inf = std::numeric_limits<double>::infinity();
  for (const double ratio : {std::nan(""), -0.1, inf, -inf, 1'000'000.5}) {
    const absl::Status status = error({.output_ratio = ratio});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << ratio;
    EXPECT_THAT(std::string(status.message()), HasSubstr("OutputEstimateOptions.output_ratio: want 0 .. 1e6, got "));
  }
  EXPECT_TRUE(error({.output_ratio = 0}).ok());
  EXPECT_TRUE(error({.output_ratio = -0.0}).ok());
  EXPECT_TRUE(error({.output_ratio = 1e6}).ok());
  EXPECT_TRUE(error({.max_estimated_output_tokens = -1}).ok());
  EXPECT_TRUE(error({.max_estimated_output_tokens = 0}).ok());
  EXPECT_TRUE(error({.max_estimated_output_tokens = std::numeric_limits<std::int64_t>::max()}).ok());
  EXPECT_EQ(error({.max_estimated_output_tokens = -2}).message(),
            "OutputEstimateOptions.max_estimated_output_tokens: want >= 0 tokens, or -1 for none, got -2");
}

TEST(InFlightLoadOptionsTest, ANegativeZeroRatioEstimatesNothing) {
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = -0.0}, 1'000, -1), 0);
}

TEST(InFlightLoadOptionsTest, ARouterRefusesThem) {
  Fleet<Upstream> fleet;
  const auto router = LeastOutstanding(fleet, {.in_flight_load = {.output = {.output_ratio = std::nan("")}}});
  EXPECT_EQ(router.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(router.status().message()), HasSubstr("output_ratio"));
}

}  // namespace
}  // namespace tokroute

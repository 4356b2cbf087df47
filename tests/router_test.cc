#include "tokroute/router.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
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
using testing_support::Refusals;
using testing_support::Upstream;
using ::testing::HasSubstr;

auto Least() { return Policy(ActiveRequestScorer(), MaxScorePicker<>()); }

Router<Upstream> MakeLeast(const Fleet<Upstream>& fleet, std::uint64_t seed = 0) {
  auto router = LeastOutstanding(fleet, {.seed = seed});
  EXPECT_TRUE(router.ok()) << router.status();
  return *router;
}

// ---- Parts for these tests.

// A queue length that somebody feeds.
struct QueueReport {
  static constexpr std::string_view kName = "queue-report";
  std::int64_t queued = 0;
};
TOKROUTE_SIGNAL(Queued, std::int64_t, "queued", "requests");
struct QueueFeed {
  static constexpr std::string_view kName = "queue-feed";
  using Produces = Signals<Queued>;
  using Fact = QueueReport;
  using Own = WritableColumns<Produces>;
  void OnBooked(Own own, const Request&, const Booking& b) noexcept { ++own.Column<Queued>()[b.row]; }
  void OnFirstToken(Own, const Booking&) noexcept {}
  void OnReleased(Own own, const Booking& b, const Outcome&) noexcept { --own.Column<Queued>()[b.row]; }
  void OnFact(Own own, Row row, const QueueReport& report) noexcept { own.Column<Queued>()[row] = report.queued; }
};
static_assert(LoadProducer<QueueFeed>);
struct ShortQueueScorer {
  static constexpr std::string_view kName = "short-queue-scorer";
  using Consumes = Signals<Queued>;
  auto Score(const Request&, CandidatesFor<Consumes> candidates) const noexcept {
    const auto queued = candidates.Column<Queued>();
    return [=](Row row) { return 1.0F / static_cast<float>(1 + queued[row]); };
  }
};

// Keeps nobody, or everybody; shows the time that it was given.
constexpr ReasonTag kShut{"shut"};
struct DoorFilter {
  static constexpr std::string_view kName = "door-filter";
  using Consumes = Signals<>;
  bool open = true;
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes> candidates, Stage& stage) const noexcept {
    if (!open) candidates.Keep(candidates.Select([](Row) { return false; }));
    return {.reason = open ? &kKeptAll : &kShut, .margin = stage.now.count()};
  }
};
struct NobodyPicker {
  static constexpr std::string_view kName = "nobody-picker";
  using Consumes = Signals<>;
  Choice Pick(const Request&, CandidatesFor<Consumes>, std::span<const double>, Stage&, std::span<Row>) const noexcept {
    return {};
  }
};

// A request producer that reports the whole prompt as matched everywhere, and lets a test in between match and decision.
struct Interloper {
  static constexpr std::string_view kName = "interloper";
  using Produces = Signals<MatchedTokens>;
  using Own = WritableColumns<Produces>;
  struct Receipt {
    std::uint64_t number = 0;
  };
  struct Workspace {
    std::int64_t fills = 0;
  };
  struct Log {
    std::function<void()> after_match;
    std::vector<std::string> lines;
  };
  Log* log;
  void Fill(const Request& r, const FleetView&, Workspace& w, Own own) noexcept {
    ++w.fills;
    for (std::int64_t& matched : own.Column<MatchedTokens>()) {
      EXPECT_EQ(matched, 0) << "columns are zeroed before Fill";
      matched = PromptTokens(r);
    }
    if (log->after_match) std::exchange(log->after_match, nullptr)();
  }
  Receipt Record(const Request&, const FleetView&, Workspace& w, const Booking& b) noexcept {
    EXPECT_GE(w.fills, 1);
    log->lines.push_back(absl::StrCat("record ", b.decision, " on ", b.endpoint.slot, ", uncached ", b.uncached_tokens));
    return {b.decision};
  }
  void OnFirstToken(Receipt& receipt) noexcept { log->lines.push_back(absl::StrCat("first token ", receipt.number)); }
  void OnReleased(Receipt& receipt, const Outcome& o) noexcept {
    log->lines.push_back(absl::StrCat("released ", receipt.number, o.aborted ? " aborted" : "", " output ", o.output_tokens));
  }
  void OnEndpointAdded(EndpointId id, const EndpointFacts& facts) noexcept {
    log->lines.push_back(absl::StrCat("added ", facts.name, " {", id.slot, ", ", id.incarnation, "}"));
  }
  void OnFleetChanged(const FleetView& view) noexcept { log->lines.push_back(absl::StrCat("fleet of ", view.width())); }
};
static_assert(RequestProducer<Interloper>);

// ---- Making one.

template <class... P>
std::string MakeError(P... parts) {
  Fleet<Upstream> fleet;
  const auto router = MakeRouter(fleet, {}, std::move(parts)...);
  EXPECT_FALSE(router.ok());
  if (router.ok()) return "";
  EXPECT_EQ(router.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(router.status().message());
}

TEST(RouterTest, TwoPoliciesOfOneNameAreRefused) {
  EXPECT_EQ(MakeError(Producers(InFlightLoad()), Named("a", Least()), Named("b", Least()), Named("a", Least())),
            "policies: two are called \"a\"");
}

TEST(RouterTest, BadWeightsAreRefusedByName) {
  for (const double weight : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e300}) {  // The last one overflows a float.
    EXPECT_THAT(MakeError(Producers(InFlightLoad()),
                          Named("a", Policy(Weighted(ActiveRequestScorer(), weight), MaxScorePicker<>()))),
                HasSubstr("weight of active-request-scorer: want >= 0 and finite, got "));
  }
  Fleet<Upstream> fleet;
  EXPECT_TRUE(MakeRouter(fleet, {}, Producers(InFlightLoad()),
                         Named("a", Policy(Weighted(ActiveRequestScorer(), 0), MaxScorePicker<>()))).ok());
}

TEST(RouterTest, BadPartsAreRefusedWithTheirOwnWords) {
  EXPECT_EQ(MakeError(Producers(InFlightLoad()), Named("a", Policy(ActiveRequestScorer({.idle_threshold = -1}), MaxScorePicker<>()))),
            "ActiveRequestOptions.idle_threshold: want >= 0 requests, got -1");
  EXPECT_EQ(MakeError(Producers(InFlightLoad()), Named("a", Policy(MaxScorePicker<>(PickerOptions{.max_targets = 9})))),
            "PickerOptions.max_targets: want 1 .. 8, got 9");
  EXPECT_EQ(MakeError(Producers(ApproximatePrefix(nullptr)), Named("a", Policy(RandomPicker()))),
            "ApproximatePrefix.index: want a prefix index, got null");
}

TEST(RouterTest, ListsOfProducersAreCheckedWhenTheRouterIsMade) {
  const auto load = [](auto... producers) {
    std::vector<AnyLoadProducer> list;
    (list.emplace_back(producers), ...);
    return list;
  };
  EXPECT_EQ(MakeError(load(), std::vector<AnyRequestProducer>(), Named("a", Least())),
            "active-request-scorer consumes active_requests, which no producer of this router fills");
  EXPECT_EQ(MakeError(load(InFlightLoad(), InFlightLoad()), std::vector<AnyRequestProducer>(), Named("a", Least())),
            "signal uncached_tokens_in_flight is filled by two producers: in-flight-load and in-flight-load");
  EXPECT_EQ(MakeError(load(InFlightLoad()), std::vector<AnyRequestProducer>()), "policies: want at least one, got none");
  Fleet<Upstream> fleet;
  EXPECT_TRUE(MakeRouter(fleet, {}, load(InFlightLoad()), std::vector<AnyRequestProducer>(), Named("a", Least())).ok());
}

template <int number>
struct NumberedProducer {
  struct Numbered {
    using value_type = std::int64_t;
    static constexpr char kText[] = {'n', static_cast<char>('a' + number), 0};
    static constexpr std::string_view kName = kText, kUnit = "";
  };
  using Produces = Signals<Numbered>;
  struct Receipt {};
  struct Workspace {};
  void Fill(const Request&, const FleetView&, Workspace&, WritableColumns<Produces>) noexcept {}
  Receipt Record(const Request&, const FleetView&, Workspace&, const Booking&) noexcept { return {}; }
  void OnFirstToken(Receipt&) noexcept {}
  void OnReleased(Receipt&, const Outcome&) noexcept {}
};

TEST(RouterTest, FourRequestProducersAreTheMost) {
  Fleet<Upstream> fleet;
  using A = NumberedProducer<0>;
  using B = NumberedProducer<1>;
  using C = NumberedProducer<2>;
  using D = NumberedProducer<3>;
  using Fifth = NumberedProducer<4>;
  EXPECT_TRUE(MakeRouter(fleet, {}, Producers(A(), B(), C(), D()), Named("a", Policy(RandomPicker()))).ok());
  EXPECT_EQ(MakeError(Producers(A(), B(), C(), D(), Fifth()), Named("a", Policy(RandomPicker()))),
            "producers: want at most 4 request producers, got 5");
}

// ---- Handles.

TEST(RouterTest, CopiesAreHandlesOnOneRouter) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 1);
  std::optional<Router<Upstream>> first = MakeLeast(fleet);
  Router<Upstream> second = *first;
  const auto ticket = first->Route({.prompt_tokens = 100});
  EXPECT_EQ(LoadOf(second, ids[0]), (Load{100, 1, 150}));
  Router<Upstream> third = MakeLeast(fleet);
  third = second;  // Its own router goes.
  EXPECT_EQ(LoadOf(third, ids[0]), (Load{100, 1, 150}));
  Router<Upstream>& same = third;
  third = same;
  first.reset();
  Router<Upstream> fourth = std::move(second);
  EXPECT_TRUE(fourth.Route({}).ok());
  EXPECT_EQ(LoadOf(fourth, ids[0]), (Load{100, 1, 150}));
}

TEST(RouterTest, TwoRoutersDoNotSeeEachOthersLoad) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 1);
  auto first = MakeLeast(fleet), second = MakeLeast(fleet);
  const auto ticket = first.Route({.prompt_tokens = 100});
  EXPECT_EQ(LoadOf(second, ids[0]), (Load{0, 0, 0}));
}

// ---- Several policies.

TEST(RouterTest, NamedPoliciesShareOneLedger) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto router = MakeRouter(fleet, {.seed = 1}, Producers(InFlightLoad()), Named("least", Least()),
                           Named("random", Policy(RandomPicker())));
  ASSERT_TRUE(router.ok());
  std::vector<Ticket<Upstream>> held;
  for (int i = 0; i < 50; ++i) held.push_back(router->Route({.prompt_tokens = 10}, {.policy = "random"}).Take());
  EXPECT_EQ(LoadOf(*router, ids[0]).requests + LoadOf(*router, ids[1]).requests, 50);
  while (LoadOf(*router, ids[0]).requests != LoadOf(*router, ids[1]).requests) {  // The other one evens it out.
    const EndpointId idler = LoadOf(*router, ids[0]).requests < LoadOf(*router, ids[1]).requests ? ids[0] : ids[1];
    held.push_back(router->Route({.prompt_tokens = 10}, {.policy = "least"}).Take());
    ASSERT_EQ(held.back().endpoint_id(), idler);
  }
  EXPECT_EQ(router->Route({})->decision().policy_name(), "least");  // The first is the default.
}

TEST(RouterTest, AnUnknownPolicyIsRefusedAndCounted) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  auto router = MakeLeast(fleet);
  const auto refused = router.Route({}, {.policy = "leest-outstanding"});
  EXPECT_EQ(refused.refusal().reason, RefusalReason::kUnknownPolicy);
  EXPECT_EQ(refused.refusal().ToString(), "refused (unknown policy): the router has no policy of that name");
  EXPECT_EQ(Refusals(router.Metrics(), RefusalReason::kUnknownPolicy), 1U);
  EXPECT_EQ(router.Evaluate({}, {.policy = "x"}).refusal.reason, RefusalReason::kUnknownPolicy);
}

TEST(RouterTest, SetPolicyAddsAndReplacesWhileLedgerAndIndexStay) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 4);
  auto made = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 3});
  ASSERT_TRUE(made.ok());
  Router<Upstream> router = *made;
  const std::vector<TokenId> prompt = MakePrompt(1, 1'600);
  const auto first = router.Route({.tokens = prompt});
  const std::string why = first->decision().ToString();
  // Another gate under the same name: the next decision uses it, with the index as it was.
  const auto sticky = TauGate::Create({.always_sticky = true});
  ASSERT_TRUE(router.SetPolicy("prefill-bound", Policy(PrefixCacheAffinityFilter(*sticky), TokenLoadScorer(), MaxScorePicker<>())).ok());
  const auto second = router.Route({.tokens = prompt});
  EXPECT_EQ(second->endpoint_id(), first->endpoint_id());
  EXPECT_EQ(*second->decision().verdicts[0].reason, kGateOff);
  EXPECT_EQ(second->decision().number, 2U);
  EXPECT_EQ(LoadOf(router, first->endpoint_id()), (Load{1'600, 2, 4'800}));
  EXPECT_EQ(first->decision().ToString(), why);  // A decision keeps the policy that made it.
  // One more.
  EXPECT_FALSE(router.Route({}, {.policy = "least"}).ok());
  ASSERT_TRUE(router.SetPolicy("least", Least()).ok());
  EXPECT_EQ(router.Route({}, {.policy = "least"})->decision().policy_name(), "least");
  EXPECT_EQ(router.Route({})->decision().policy_name(), "prefill-bound");  // The first stays the first.
}

// Calls back when the last copy of it goes.
struct PartingFilter {
  static constexpr std::string_view kName = "parting-filter";
  using Consumes = Signals<>;
  std::shared_ptr<void> parting;
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes>, Stage&) const noexcept { return {}; }
};

TEST(RouterTest, APolicysDestructorMayCallTheRouter) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  auto router = MakeLeast(fleet);
  int parted = 0;
  const auto parting = [&] {
    return PartingFilter{std::shared_ptr<void>(nullptr, [&](void*) {
      ++parted;
      EXPECT_TRUE(router.SetPolicy("from-a-destructor", Least()).ok());
      EXPECT_TRUE(router.Route({}, {.policy = "from-a-destructor"}).ok());
    })};
  };
  ASSERT_TRUE(router.SetPolicy("a", Policy(parting(), RandomPicker())).ok());
  ASSERT_TRUE(router.SetPolicy("a", Policy(parting(), RandomPicker())).ok());
  EXPECT_EQ(parted, 1);
  EXPECT_FALSE(router.SetPolicy("a", Policy(parting(), MaxScorePicker<>(PickerOptions{.max_targets = 0}))).ok());
  EXPECT_EQ(parted, 2);
  auto routed = router.Route({}, {.policy = "a"});  // Now a decision holds it, and then lets it go.
  ASSERT_TRUE(routed.ok());
  ASSERT_TRUE(router.SetPolicy("a", Policy(RandomPicker())).ok());
  EXPECT_EQ(parted, 2);
  routed->Finish();
  routed = router.Route({});
  EXPECT_EQ(parted, 3);
}

TEST(RouterTest, SetPolicyRefusesWhatCannotWorkAndNamesBoth) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  auto router = MakeLeast(fleet);
  const absl::Status missing = router.SetPolicy("warm", Policy(TokenLoadScorer(), MaxScorePicker<>()));
  EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(missing.message(), "token-load-scorer consumes matched_tokens, which no producer of this router fills");
  EXPECT_EQ(router.Route({}, {.policy = "warm"}).refusal().reason, RefusalReason::kUnknownPolicy);
  // A bad replacement leaves the good one.
  EXPECT_EQ(router.SetPolicy("least-outstanding", Policy(ActiveRequestScorer({.max_busy_score = 2}), MaxScorePicker<>())).message(),
            "ActiveRequestOptions.max_busy_score: want 0 .. 1, got 2");
  EXPECT_TRUE(router.Route({}, {.policy = "least-outstanding"}).ok());
}

TOKROUTE_SIGNAL(ActiveRequestsAsDouble, double, "active_requests", "requests");
struct MistypedScorer {
  static constexpr std::string_view kName = "mistyped-scorer";
  using Consumes = Signals<ActiveRequestsAsDouble>;
  auto Score(const Request&, CandidatesFor<Consumes>) const noexcept {
    return [](Row) { return 1.0F; };
  }
};

TEST(RouterTest, ASignalOfAnotherTypeIsNotTheSameSignal) {
  Fleet<Upstream> fleet;
  auto router = MakeLeast(fleet);
  EXPECT_EQ(router.SetPolicy("x", Policy(MistypedScorer(), MaxScorePicker<>())).message(),
            "mistyped-scorer consumes active_requests with another value type than this router's producer fills");
}

// ---- Refusals, each of them.

class RefusalTest : public ::testing::Test {
 protected:
  Refusal Of(const Request& request, const RouteOptions& options = {}) {
    const auto before = router_.Metrics();
    const auto routed = router_.Route(request, options);
    EXPECT_FALSE(routed.ok());
    const auto reason = routed.refusal().reason;
    EXPECT_EQ(Refusals(router_.Metrics(), reason), Refusals(before, reason) + 1);
    EXPECT_EQ(router_.Evaluate(request, options).ToString(), routed.refusal().ToString());
    EXPECT_EQ(Refusals(router_.Metrics(), reason), Refusals(before, reason) + 1);  // Evaluate counts nothing.
    return routed.refusal();
  }
  Fleet<Upstream> fleet_;
  Router<Upstream> router_ = MakeLeast(fleet_);
};

TEST_F(RefusalTest, NoEndpoint) {
  EXPECT_EQ(Of({}).reason, RefusalReason::kNoEndpoint);
  EXPECT_EQ(Of({.model = "m"}).ToString(), "refused (no endpoint): the fleet has no endpoint");
}

TEST_F(RefusalTest, NotServed) {
  (void)*fleet_.Add({.called = "a", .serves = {"m", "n"}});
  (void)*fleet_.Add({.called = "b", .serves = {"n"}});
  const Refusal refusal = Of({.model = "other"});
  EXPECT_EQ(refusal.reason, RefusalReason::kNotServed);
  EXPECT_EQ(refusal.considered, 2U);
  EXPECT_EQ(refusal.ToString(), "refused (model not served): none of 2 endpoints serves the request's model");
}

TEST_F(RefusalTest, AllDrained) {
  const EndpointId a = *fleet_.Add({.called = "a", .serves = {"m"}});
  (void)*fleet_.Add({.called = "b", .serves = {"n"}});
  ASSERT_TRUE(fleet_.Drain(a).ok());
  EXPECT_EQ(Of({.model = "m"}).ToString(),
            "refused (all drained): every endpoint that serves the model is drained, of 2 in the fleet");
  EXPECT_TRUE(router_.Route({}).ok());  // The other one serves a request of no model.
}

TEST_F(RefusalTest, AllIneligible) {
  const std::vector<EndpointId> ids = AddEndpoints(fleet_, 2);
  ASSERT_TRUE(fleet_.SetEligible(ids[0], false).ok());
  ASSERT_TRUE(fleet_.Drain(ids[1]).ok());
  EXPECT_EQ(Of({}).ToString(),
            "refused (all ineligible): every endpoint that serves the model is ejected or drained, of 2 in the fleet");
  ASSERT_TRUE(fleet_.SetEligible(ids[1], false).ok());
  EXPECT_EQ(Of({}).reason, RefusalReason::kAllIneligible);
}

TEST_F(RefusalTest, AllExcluded) {
  const std::vector<EndpointId> ids = AddEndpoints(fleet_, 3);
  EXPECT_EQ(Of({}, {.exclude = ids}).ToString(), "refused (all excluded): the caller excluded all of 3 candidates");
  EXPECT_EQ(Of({}, {.exclude = ids}).considered, 3U);
  ASSERT_TRUE(fleet_.Drain(ids[0]).ok() && fleet_.Drain(ids[2]).ok());
  EXPECT_EQ(Of({}, {.exclude = {{ids[1]}}}).ToString(), "refused (all excluded): the caller excluded all of 1 candidate");
}

TEST_F(RefusalTest, R63_AllFilteredNamesTheFilter) {
  AddEndpoints(fleet_, 3);
  ASSERT_TRUE(router_.SetPolicy("shut", Policy(DoorFilter{true}, DoorFilter{false}, DoorFilter{true}, RandomPicker())).ok());
  const Refusal refusal = Of({}, {.policy = "shut"});
  EXPECT_EQ(refusal.reason, RefusalReason::kAllFiltered);
  EXPECT_EQ(refusal.filter, 1U);
  EXPECT_EQ(refusal.filter_name(), "door-filter");
  EXPECT_EQ(refusal.considered, 3U);
  EXPECT_EQ(refusal.ToString(), "refused (all filtered): filter door-filter kept none of 3 candidates");
  // The text is made on demand, also when the policy has gone.
  ASSERT_TRUE(router_.SetPolicy("shut", Policy(RandomPicker())).ok());
  EXPECT_EQ(refusal.filter_name(), "door-filter");
}

TEST_F(RefusalTest, NobodyPicked) {
  AddEndpoints(fleet_, 3);
  ASSERT_TRUE(router_.SetPolicy("nobody", Policy(NobodyPicker())).ok());
  const Refusal refusal = Of({}, {.policy = "nobody"});
  EXPECT_EQ(refusal.reason, RefusalReason::kNobodyPicked);
  EXPECT_EQ(refusal.ToString(), "refused (nobody picked): the picker ranked none of 3 candidates");
  EXPECT_EQ(refusal.filter_name(), "");
}

TEST_F(RefusalTest, BadRequest) {
  AddEndpoints(fleet_, 1);
  const Refusal refusal = Of({.prompt_tokens = -7});
  EXPECT_EQ(refusal.reason, RefusalReason::kBadRequest);
  EXPECT_EQ(std::string(refusal.fault.field), "Request.prompt_tokens");
  EXPECT_EQ(refusal.fault.value, -7);
}

TEST_F(RefusalTest, UnknownPolicy) {
  AddEndpoints(fleet_, 1);
  EXPECT_EQ(Of({}, {.policy = "x"}).reason, RefusalReason::kUnknownPolicy);
}

TEST(RefusalReasonTest, EveryReasonHasAText) {
  EXPECT_EQ(Refusal().ToString(), "not refused");
  for (int i = 1; i <= static_cast<int>(RefusalReason::kOutOfMemory); ++i) {
    Refusal refusal;
    refusal.reason = static_cast<RefusalReason>(i);
    EXPECT_THAT(refusal.ToString(), HasSubstr(absl::StrCat("refused (", std::string(ToString(refusal.reason)), "): ")));
    EXPECT_NE(ToString(refusal.reason), "unknown");
  }
}

// ---- Models and exclusion.

TEST(RouterTest, EndpointsThatNameModelsServeOnlyThose) {
  Fleet<Upstream> fleet;
  const EndpointId a = *fleet.Add({.called = "a", .serves = {"m"}}), b = *fleet.Add({.called = "b", .serves = {"n", "m"}});
  auto router = MakeLeast(fleet);
  const auto candidates = [&](std::string_view model) {
    const auto routed = router.Route({.model = model});
    return routed.ok() ? routed->decision().candidates : 0;
  };
  EXPECT_EQ(candidates("m"), 2U);
  EXPECT_EQ(candidates("n"), 1U);
  EXPECT_EQ(router.Route({.model = "n"})->endpoint_id(), b);
  EXPECT_EQ(candidates("M"), 0U);
  EXPECT_EQ(candidates(""), 2U);  // No model asked for: anybody.
  const EndpointId any = *fleet.Add({.called = "any"});
  EXPECT_EQ(candidates("m"), 3U);
  EXPECT_EQ(candidates("n"), 2U);
  EXPECT_EQ(candidates("unheard-of"), 1U);
  EXPECT_EQ(router.Route({.model = "unheard-of"})->endpoint_id(), any);
  // An update changes what is served from the next Route on.
  ASSERT_TRUE(fleet.Update(a, {.called = "a", .serves = {"unheard-of"}}).ok());
  EXPECT_EQ(candidates("unheard-of"), 2U);
  EXPECT_EQ(candidates("m"), 2U);
}

TEST(RouterTest, ExclusionGoesByIdAndNotByName) {
  Fleet<Upstream> fleet;
  std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto router = MakeLeast(fleet);
  ASSERT_TRUE(fleet.Remove(ids[0]).ok());
  const EndpointId back = *fleet.Add({.called = "e0"});
  const EndpointId exclude[] = {ids[0], ids[1], EndpointId{}, EndpointId{77, 1}};
  const auto routed = router.Route({}, {.exclude = exclude});
  ASSERT_TRUE(routed.ok());
  EXPECT_EQ(routed->endpoint_id(), back);
  EXPECT_EQ(routed->decision().candidates, 1U);
}

// ---- Evaluate.

TEST(RouterTest, EvaluatePredictsTheNextRouteAndChangesNothing) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 9);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 2s, .exploration_probability = 0.2, .seed = 6});
  ASSERT_TRUE(router.ok());
  ASSERT_TRUE(router->SetPolicy("random", Policy(RandomPicker(PickerOptions{.max_targets = 3}))).ok());
  Random random(1);
  std::vector<Ticket<Upstream>> held(40);
  for (int i = 0; i < 3'000; ++i) {
    const std::vector<TokenId> prompt = MakePrompt(random.Below(20), 100 + random.Below(900));
    const EndpointId exclude[] = {ids[random.Below(9)]};
    const RouteOptions options{.policy = random.Below(4) == 0 ? "random" : "", .exclude = exclude};
    const Evaluation said = router->Evaluate({.tokens = prompt}, options), again = router->Evaluate({.tokens = prompt}, options);
    ASSERT_TRUE(said.ok());
    auto routed = router->Route({.tokens = prompt}, options);
    ASSERT_TRUE(routed.ok());
    ASSERT_EQ(said.ToString(), routed->decision().ToString());
    ASSERT_EQ(again.ToString(), said.ToString());
    ASSERT_TRUE(std::equal(said.decision.targets().begin(), said.decision.targets().end(), routed->decision().targets().begin(),
                           routed->decision().targets().end()));
    if (random.Below(2) == 0) routed->FirstToken();
    held[random.Below(40)] = std::move(routed).Take();
  }
  const RouterMetrics metrics = router->Metrics();
  EXPECT_EQ(metrics.decisions, 3'000U);
  EXPECT_TRUE(router->Audit().ok());
}

TEST(RouterTest, ARefusedRouteUsesNoDrawUp) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 9);
  auto router = MakeLeast(fleet, 4);
  const std::string said = router.Evaluate({}).ToString();
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(router.Route({}, {.exclude = ids}).ok());
  EXPECT_EQ(router.Route({})->decision().ToString(), said);
}

// ---- Determinism.

TEST(RouterTest, TheSeedDecidesTheDraws) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 16);
  const auto picks = [&](std::uint64_t seed) {
    auto router = MakeLeast(fleet, seed);
    std::vector<std::uint32_t> slots;
    for (int i = 0; i < 200; ++i) slots.push_back(router.Route({})->endpoint_id().slot);
    return slots;
  };
  EXPECT_EQ(picks(1), picks(1));
  EXPECT_NE(picks(1), picks(2));
  EXPECT_NE(picks(0), picks(0xffffffffffffffffULL));
}

// ---- Feed, Read, clock.

struct UnknownFact {
  static constexpr std::string_view kName = "unknown-fact";
};

TEST(RouterTest, FactsReachTheProducerThatTakesThem) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto router = MakeRouter(fleet, {}, Producers(QueueFeed(), InFlightLoad()), Named("short", Policy(ShortQueueScorer(), MaxScorePicker<>())));
  ASSERT_TRUE(router.ok()) << router.status();
  ASSERT_TRUE(router->Feed(ids[0], QueueReport{9}).ok());
  ASSERT_TRUE(router->Feed(ids[1], QueueReport{3}).ok());
  EXPECT_EQ(router->Read<Queued>(ids[0]), 9);
  const auto ticket = router->Route({});
  EXPECT_EQ(ticket->endpoint_id(), ids[1]);
  EXPECT_EQ(router->Read<Queued>(ids[1]), 4);  // Booked on top of what was reported.
  EXPECT_TRUE(router->Audit().ok());           // It audits nothing of its own.

  ASSERT_TRUE(fleet.Remove(ids[0]).ok());
  EXPECT_EQ(router->Feed(ids[0], QueueReport{1}).message(), "endpoint id {0, 1}: not in the fleet");
  EXPECT_EQ(router->Feed(EndpointId{}, QueueReport{1}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(router->Feed(EndpointId{kMaxEndpoints, 1}, QueueReport{1}).code(), absl::StatusCode::kNotFound);
  const EndpointId back = *fleet.Add({.called = "e0"});
  EXPECT_EQ(router->Read<Queued>(back), 0);  // A new incarnation starts at zero.

  EXPECT_EQ(router->Feed(ids[1], UnknownFact()).message(), "fact unknown-fact: no load producer of this router takes it");
}

TEST(RouterTest, ReadKnowsTheSignalsThatAreKeptPerEndpoint) {
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a", .rate = 12.5, .share = 2});
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480});
  ASSERT_TRUE(router.ok());
  EXPECT_EQ(router->Read<PeakPrefillThroughput>(id), 12.5);
  EXPECT_EQ(router->Read<EndpointWeight>(id), 2);
  ASSERT_TRUE(fleet.Update(id, {.called = "a", .rate = 99}).ok());
  EXPECT_EQ(router->Read<PeakPrefillThroughput>(id), 99);
  EXPECT_EQ(router->Read<MatchedTokens>(id), std::nullopt);  // Of a request, not of an endpoint.
  EXPECT_EQ(router->Read<Queued>(id), std::nullopt);         // Filled by nobody.
  EXPECT_EQ(router->Read<ActiveRequestsAsDouble>(id), std::nullopt);
  EXPECT_EQ(router->Read<ActiveRequests>({}), std::nullopt);
  EXPECT_EQ(router->Read<ActiveRequests>({0, 2}), std::nullopt);
  EXPECT_EQ(router->Read<ActiveRequests>({kMaxEndpoints, 1}), std::nullopt);
}

struct SteppingClock {
  mutable std::int64_t ticks = 0;
  std::chrono::nanoseconds Now() const noexcept { return std::chrono::nanoseconds(++ticks); }
};

TEST(RouterTest, PluginsSeeTheRoutersClockReadOncePerDecision) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  const SteppingClock clock;
  auto router = MakeRouter(fleet, {.clock = clock}, Producers(InFlightLoad()),
                           Named("door", Policy(DoorFilter{}, DoorFilter{}, RandomPicker())));
  ASSERT_TRUE(router.ok());
  for (std::int64_t i = 1; i <= 3; ++i) {
    const auto routed = router->Route({});
    EXPECT_EQ(routed->decision().verdicts[0].margin, i);
    EXPECT_EQ(routed->decision().verdicts[1].margin, i);
  }
  auto timeless = MakeRouter(fleet, {}, Producers(InFlightLoad()), Named("door", Policy(DoorFilter{}, RandomPicker())));
  EXPECT_EQ(timeless->Route({})->decision().verdicts[0].margin, 0);
}

// ---- Request producers, and a fleet that changes between match and decision.

class InterloperTest : public ::testing::Test {
 protected:
  void Make() {
    auto router = MakeRouter(fleet_, {.seed = 1}, Producers(Interloper{&log_}, InFlightLoad()), Named("least", Least()));
    ASSERT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
  }
  Fleet<Upstream> fleet_;
  Interloper::Log log_;
  std::optional<Router<Upstream>> router_;
};

TEST_F(InterloperTest, AProducerFollowsTheDispatchThroughItsReceipt) {
  AddEndpoints(fleet_, 1);
  Make();
  {
    auto ticket = router_->Route({.prompt_tokens = 10}).Take();
    ticket.FirstToken();
    ticket.FirstToken();
    ticket.Finish({.output_tokens = 4});
    ticket.Finish();
  }
  { const auto ticket = router_->Route({.prompt_tokens = 10}); }
  {
    auto ticket = router_->Route({.prompt_tokens = 10}).Take();
    ASSERT_TRUE(ticket.MoveTo({0, 1}));  // Without a Move of its own: released as aborted, and nothing recorded.
  }
  EXPECT_THAT(log_.lines,
              ::testing::ElementsAre("added e0 {0, 1}", "fleet of 1", "record 1 on 0, uncached 0", "first token 1",
                                     "released 1 output 4", "record 2 on 0, uncached 0", "released 2 aborted output 0",
                                     "record 3 on 0, uncached 0", "released 3 aborted output 0", "released 0 aborted output 0"));
}

TEST_F(InterloperTest, ProducersHearOfTheFleet) {
  const std::vector<EndpointId> ids = AddEndpoints(fleet_, 2);
  Make();
  (void)router_->Evaluate({});
  ASSERT_TRUE(fleet_.Update(ids[1], {.called = "e1"}).ok());
  (void)router_->Evaluate({});
  ASSERT_TRUE(fleet_.Drain(ids[1]).ok());
  (void)router_->Evaluate({});
  ASSERT_TRUE(fleet_.Remove(ids[0]).ok());
  (void)router_->Evaluate({});
  (void)*fleet_.Add({.called = "new"});
  (void)router_->Evaluate({});
  (void)router_->Evaluate({});
  EXPECT_THAT(log_.lines, ::testing::ElementsAre("added e0 {0, 1}", "added e1 {1, 1}", "fleet of 2", "added e1 {1, 1}", "fleet of 2",
                                                 "fleet of 2", "fleet of 2", "added new {0, 2}", "fleet of 2"));
}

TEST_F(InterloperTest, ARowBornAfterTheMatchHoldsNothing) {
  const EndpointId old_id = *fleet_.Add({.called = "a"});
  Make();
  EXPECT_EQ(router_->Route({.prompt_tokens = 100})->decision().matched_tokens, 100);
  EndpointId new_id;
  log_.after_match = [&] {  // The slot changes hands, and the router gets to know before it decides.
    ASSERT_TRUE(fleet_.Remove(old_id).ok());
    new_id = *fleet_.Add({.called = "a"});
    (void)router_->Read<ActiveRequests>(new_id);
  };
  const auto routed = router_->Route({.prompt_tokens = 100});
  ASSERT_TRUE(routed.ok());
  EXPECT_EQ(routed->endpoint_id(), new_id);
  EXPECT_EQ(routed->decision().matched_tokens, 0);
  EXPECT_EQ(LoadOf(*router_, new_id), (Load{100, 1, 150}));
}

TEST_F(InterloperTest, ARowBeyondTheMatchedWidthHoldsNothing) {
  const std::vector<EndpointId> ids = AddEndpoints(fleet_, 3);
  Make();
  (void)router_->Route({.prompt_tokens = 100});
  std::vector<EndpointId> fresh;
  log_.after_match = [&] {  // The fleet grows, and those that were matched leave.
    for (const char* name : {"x", "y"}) fresh.push_back(*fleet_.Add({.called = name}));
    for (EndpointId id : ids) ASSERT_TRUE(fleet_.Remove(id).ok());
    (void)router_->Read<ActiveRequests>(fresh[0]);
  };
  const auto routed = router_->Route({.prompt_tokens = 100});
  ASSERT_TRUE(routed.ok());
  EXPECT_GE(routed->endpoint_id().slot, 3U);
  EXPECT_EQ(routed->decision().matched_tokens, 0);
  EXPECT_EQ(routed->decision().candidates, 2U);
}

TEST_F(InterloperTest, AnEndpointThatDiesBetweenMatchAndDecisionTakesItsBookingAlong) {
  const std::vector<EndpointId> ids = AddEndpoints(fleet_, 1);
  Make();
  (void)router_->Route({.prompt_tokens = 100});
  ASSERT_EQ(router_->Metrics().aborted, 1U);
  log_.after_match = [&] { ASSERT_TRUE(fleet_.Remove(ids[0]).ok()); };  // The router does not know yet.
  const auto routed = router_->Route({.prompt_tokens = 100});
  ASSERT_TRUE(routed.ok());
  EXPECT_EQ(routed->endpoint_id(), ids[0]);
  EXPECT_TRUE(router_->Audit().ok()) << router_->Audit();
  const EndpointId back = *fleet_.Add({.called = "e0"});
  EXPECT_EQ(LoadOf(*router_, back), (Load{0, 0, 0}));
  routed->FirstToken();
  routed->Finish();
  EXPECT_EQ(LoadOf(*router_, back), (Load{0, 0, 0}));
  EXPECT_EQ(router_->Metrics().orphaned_releases, 1U);
}

TEST(RouterTest, ARebornSlotIsColdForThePrefixIndexToo) {
  Fleet<Upstream> fleet;
  const EndpointId old_id = *fleet.Add({.called = "a"});
  Interloper::Log log;
  auto index = *PrefixIndex::Create({});
  // Uncached tokens come from the index: a row born after the match must show the whole prompt, not zero.
  auto router = MakeRouter(fleet, {}, Producers(ApproximatePrefix(index), InFlightLoad(), NumberedProducer<0>()),
                           Named("least", Least()));
  ASSERT_TRUE(router.ok());
  const std::vector<TokenId> prompt = MakePrompt(1, 160);
  router->Route({.tokens = prompt})->Finish();
  EXPECT_EQ(index->HeldBlocks(old_id), 10);
  ASSERT_TRUE(fleet.Remove(old_id).ok());
  const EndpointId new_id = *fleet.Add({.called = "a"});
  const auto routed = router->Route({.tokens = prompt});
  EXPECT_EQ(routed->endpoint_id(), new_id);
  EXPECT_EQ(routed->decision().matched_tokens, 0);
  EXPECT_EQ(index->HeldBlocks(old_id), 0);
  EXPECT_EQ(index->HeldBlocks(new_id), 10);
}

TEST(RouterTest, TheEndpointsCapacityBoundsWhatTheIndexHoldsForIt) {
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a", .capacity = 320});
  auto index = *PrefixIndex::Create({});
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .index = index});
  ASSERT_TRUE(router.ok());
  const std::vector<TokenId> prompt = MakePrompt(1, 1'600);
  router->Route({.tokens = prompt})->Finish();
  EXPECT_EQ(index->HeldBlocks(id), 20);
  ASSERT_TRUE(fleet.Update(id, {.called = "a", .capacity = 160}).ok());
  EXPECT_EQ(router->Route({.tokens = prompt})->decision().matched_tokens, 160);
  EXPECT_EQ(index->HeldBlocks(id), 10);
}

TEST(RouterTest, TwoRoutersMayShareOneIndex) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 6);
  auto index = *PrefixIndex::Create({});
  auto first = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 1, .index = index});
  auto second = DecodeBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 2, .index = index});
  ASSERT_TRUE(first.ok() && second.ok());
  const std::vector<TokenId> prompt = MakePrompt(1, 1'600);
  const auto ticket = first->Route({.tokens = prompt});
  EXPECT_EQ(second->Route({.tokens = prompt})->endpoint_id(), ticket->endpoint_id());
}

// Remembers which receipts came back, and lets a test in when one does.
struct ReceiptKeeper {
  using Produces = Signals<>;
  struct Receipt {
    std::uint64_t number = 0;
  };
  struct Workspace {};
  std::vector<std::uint64_t>* released;
  std::function<void()>* hook;
  void Fill(const Request&, const FleetView&, Workspace&, WritableColumns<Produces>) noexcept {}
  Receipt Record(const Request&, const FleetView&, Workspace&, const Booking& b) noexcept { return {b.decision}; }
  void OnFirstToken(Receipt&) noexcept {}
  void OnReleased(Receipt& receipt, const Outcome&) noexcept {
    released->push_back(receipt.number);
    if (*hook) std::exchange(*hook, nullptr)();
  }
};

TEST(RouterTest, ATicketDroppedWhileItExpiresKeepsItsEntryUntilEveryProducerWasTold) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 1);
  std::vector<std::uint64_t> first, second;
  std::function<void()> hook, none;
  auto router = MakeRouter(fleet, {}, Producers(InFlightLoad(), ReceiptKeeper{&first, &hook}, ReceiptKeeper{&second, &none}),
                           Named("least", Least()));
  ASSERT_TRUE(router.ok()) << router.status();
  std::optional<Ticket<Upstream>> ticket = router->Route({.prompt_tokens = 10}).Take(), next;
  ticket->Deadline(1s);
  hook = [&] {  // The first producer has been told, the second one not yet: the ticket goes, and a new one comes.
    ticket.reset();
    next = router->Route({.prompt_tokens = 20}).Take();
  };
  EXPECT_EQ(router->Expire(2s), 1U);
  EXPECT_THAT(first, ::testing::ElementsAre(1));
  EXPECT_THAT(second, ::testing::ElementsAre(1));  // Not the receipt of the new ticket.
  EXPECT_TRUE(next->live());
  EXPECT_TRUE(router->Audit().ok()) << router->Audit();
  next.reset();
  EXPECT_THAT(first, ::testing::ElementsAre(1, 2));
  EXPECT_THAT(second, ::testing::ElementsAre(1, 2));
  EXPECT_EQ(router->Metrics().live_tickets, 0U);
}

// ---- Trace.

TEST(RouterTest, ATraceShowsEveryStageOfTheDecision) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 3);
  auto made = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 1});
  ASSERT_TRUE(made.ok());
  Router<Upstream> router = *made;
  ASSERT_TRUE(router.SetPolicy("two", Policy(DoorFilter{}, Weighted(TokenLoadScorer(), 2), Weighted(ActiveRequestScorer(), 0.5),
                                             MaxScorePicker<>())).ok());
  const auto busy = router.Route({.prompt_tokens = 99}, {.exclude = {{ids[1], ids[2]}}});
  Trace trace;
  const auto routed = router.Route({.prompt_tokens = 99}, {.policy = "two", .exclude = {{ids[1]}}, .trace = &trace});
  ASSERT_TRUE(routed.ok());
  EXPECT_EQ(routed->endpoint_id(), ids[2]);
  ASSERT_EQ(trace.filters.size(), 1U);
  EXPECT_EQ(trace.filters[0].filter, "door-filter");
  EXPECT_EQ(trace.filters[0].reason, "kept_all");
  EXPECT_THAT(trace.filters[0].kept, ::testing::ElementsAre(ids[0], ids[2]));
  EXPECT_THAT(trace.scorers, ::testing::ElementsAre("token-load-scorer", "active-request-scorer"));
  EXPECT_THAT(trace.weights, ::testing::ElementsAre(2, 0.5));
  ASSERT_EQ(trace.scores.size(), 2U);
  EXPECT_EQ(trace.scores[0].endpoint, ids[0]);
  EXPECT_EQ(trace.scores[0].name, "e0");
  EXPECT_EQ(trace.scores[1].name, "e2");
  EXPECT_THAT(trace.scores[0].raw, ::testing::ElementsAre(100.0F / 199.0F, 0));  // (99 + 1) / (198 + 1).
  EXPECT_THAT(trace.scores[1].raw, ::testing::ElementsAre(1, 1));
  EXPECT_EQ(trace.scores[1].total, 2.5);
  EXPECT_EQ(routed->decision().choice.best, 2.5);
  EXPECT_EQ(routed->decision().choice.runner_up, trace.scores[0].total);
  EXPECT_EQ(trace.scores[0].weighted[0], 2.0 * static_cast<double>(100.0F / 199.0F));
  EXPECT_EQ(trace.ToString(),
            "door-filter (kept_all) kept slots 0 2\n"
            "e0: token-load-scorer 0.502513 x 2 = 1.00503, active-request-scorer 0 x 0.5 = 0, total 1.00503\n"
            "e2: token-load-scorer 1 x 2 = 2, active-request-scorer 1 x 0.5 = 0.5, total 2.5\n");
}

TEST(RouterTest, ATraceIsAppendedToAndChangesNoDecision) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 5);
  const auto run = [&](bool traced) {
    auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 8});
    Trace trace;
    std::vector<std::string> texts;
    for (std::uint64_t i = 0; i < 50; ++i) {
      const auto prompt = MakePrompt(i % 7, 400);
      texts.push_back(router->Route({.tokens = prompt}, {.trace = traced ? &trace : nullptr})->decision().ToString());
    }
    EXPECT_EQ(trace.filters.size(), traced ? 50U : 0U);
    return texts;
  };
  EXPECT_EQ(run(true), run(false));
  // Evaluate, legs, Reroute and refusals fill it, too.
  auto router = MakeLeast(fleet);
  Trace trace;
  (void)router.Evaluate({}, {.trace = &trace});
  EXPECT_EQ(trace.scores.size(), 5U);
  const LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, ""}};
  auto routed = router.Route({}, {.legs = legs, .trace = &trace});
  EXPECT_EQ(trace.scores.size(), 15U);
  ASSERT_TRUE(router.Reroute(*routed, {}, {.leg = Leg::kDecode, .trace = &trace}));
  EXPECT_EQ(trace.scores.size(), 19U);
  ASSERT_TRUE(router.SetPolicy("shut", Policy(DoorFilter{false}, RandomPicker())).ok());
  EXPECT_FALSE(router.Route({}, {.policy = "shut", .trace = &trace}).ok());
  ASSERT_EQ(trace.filters.size(), 1U);
  EXPECT_EQ(trace.filters[0].reason, "shut");
  EXPECT_TRUE(trace.filters[0].kept.empty());
}

// ---- Scores out of range.

struct WildScorer {
  static constexpr std::string_view kName = "wild-scorer";
  using Consumes = Signals<>;
  float first, others;
  auto Score(const Request&, CandidatesFor<Consumes>) const noexcept {
    return [f = first, o = others](Row row) { return row == 0 ? f : o; };
  }
};

TEST(RouterTest, R61_ScoresOutOfRangeAreClampedAndCounted) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto made = MakeRouter(fleet, {}, Producers(InFlightLoad()), Named("wild", Policy(WildScorer{5, -3}, MaxScorePicker<>())));
  ASSERT_TRUE(made.ok());
  const auto routed = made->Route({});
  EXPECT_EQ(routed->endpoint_id(), ids[0]);
  EXPECT_EQ(routed->decision().choice.best, 1);
  EXPECT_EQ(routed->decision().choice.runner_up, 0);
  EXPECT_EQ(made->Metrics().scores_clamped, 2U);
  (void)made->Evaluate({});
  EXPECT_EQ(made->Metrics().scores_clamped, 2U);
}

TEST(RouterTest, R54_ANaNScoreIsTheWorstAndCounted) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 2);
  auto made = MakeRouter(fleet, {}, Producers(InFlightLoad()),
                         Named("wild", Policy(WildScorer{std::numeric_limits<float>::quiet_NaN(), 0.25F}, MaxScorePicker<>())));
  ASSERT_TRUE(made.ok());
  for (int i = 0; i < 20; ++i) EXPECT_EQ(made->Route({})->endpoint_id(), ids[1]);
  EXPECT_EQ(made->Metrics().scores_clamped, 20U);
}

}  // namespace
}  // namespace tokroute

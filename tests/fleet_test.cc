#include "tokroute/fleet.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/test_fleet.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using testing_support::AddEndpoints;
using testing_support::Upstream;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FleetTest, IdsAreDenseSlotsAndIncarnationsFromOne) {
  Fleet<Upstream> fleet;
  EXPECT_EQ(fleet.size(), 0U);
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 3);
  EXPECT_THAT(ids, ElementsAre(EndpointId{0, 1}, EndpointId{1, 1}, EndpointId{2, 1}));
  EXPECT_THAT(fleet.Ids(), ElementsAre(EndpointId{0, 1}, EndpointId{1, 1}, EndpointId{2, 1}));
  EXPECT_EQ(fleet.size(), 3U);
}

TEST(FleetTest, TheLowestFreeSlotIsReusedUnderANewIncarnation) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 4);
  ASSERT_TRUE(fleet.Remove(ids[2]).ok());
  ASSERT_TRUE(fleet.Remove(ids[0]).ok());
  EXPECT_EQ(*fleet.Add({.called = "x"}), (EndpointId{0, 2}));
  EXPECT_EQ(*fleet.Add({.called = "e2"}), (EndpointId{2, 2}));
  EXPECT_EQ(*fleet.Add({.called = "y"}), (EndpointId{4, 1}));
  EXPECT_EQ(fleet.size(), 5U);
}

TEST(FleetTest, ANameIsFoundWhileItIsThere) {
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a", .edition = 7});
  EXPECT_EQ(fleet.Find("a"), id);
  EXPECT_EQ(fleet.Find("b"), EndpointId{});
  EXPECT_EQ(fleet.Find(""), EndpointId{});
  EXPECT_EQ(fleet.Get(id)->edition, 7);
  const std::shared_ptr<const Upstream> held = fleet.Get(id);
  ASSERT_TRUE(fleet.Remove(id).ok());
  EXPECT_EQ(fleet.Find("a"), EndpointId{});
  EXPECT_EQ(fleet.Get(id), nullptr);
  EXPECT_EQ(held->edition, 7);
}

TEST(FleetTest, ADuplicateNameIsRefusedAndChangesNothing) {
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a", .edition = 1});
  const auto again = fleet.Add({.called = "a", .edition = 2});
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(again.status().message(), "endpoint name \"a\": already in the fleet");
  EXPECT_EQ(fleet.size(), 1U);
  EXPECT_EQ(fleet.Get(id)->edition, 1);
}

TEST(FleetTest, UnknownIdsAreNotFoundByEveryCall) {
  Fleet<Upstream> fleet;
  AddEndpoints(fleet, 2);
  const EndpointId gone = *fleet.Add({.called = "gone"});
  ASSERT_TRUE(fleet.Remove(gone).ok());
  constexpr std::uint32_t kMost = std::numeric_limits<std::uint32_t>::max();
  // Nobody; an empty slot; other incarnations of a taken one; beyond the fleet; beyond everything.
  for (const EndpointId id : {EndpointId{}, EndpointId{0, 0}, gone, EndpointId{0, 2}, EndpointId{0, kMost}, EndpointId{3, 1},
                              EndpointId{kMaxEndpoints, 1}, EndpointId{kMost, kMost}}) {
    for (const absl::Status& status : {fleet.Update(id, {.called = "e0"}), fleet.Drain(id), fleet.Resume(id),
                                       fleet.SetEligible(id, false), fleet.Remove(id)}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
      EXPECT_EQ(status.message(), absl::StrCat("endpoint id {", id.slot, ", ", id.incarnation, "}: not in the fleet"));
    }
    EXPECT_EQ(fleet.Get(id), nullptr);
  }
  EXPECT_EQ(fleet.size(), 2U);
}

TEST(FleetTest, ARemovedIdIsNotItsSuccessor) {
  Fleet<Upstream> fleet;
  const EndpointId old_id = *fleet.Add({.called = "a"});
  ASSERT_TRUE(fleet.Remove(old_id).ok());
  const EndpointId new_id = *fleet.Add({.called = "a"});
  EXPECT_EQ(fleet.Remove(old_id).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(fleet.Find("a"), new_id);
}

TEST(FleetTest, BadAttributesAreNamedWithValueAndRange) {
  Fleet<Upstream> fleet;
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const auto message = [&](Upstream upstream) {
    const auto id = fleet.Add(std::move(upstream));
    EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(id.status().message());
  };
  EXPECT_EQ(message({.called = ""}), "Endpoint name: want a non-empty string, got \"\"");
  for (const double rate : {-1.0, nan, inf, -inf}) {
    EXPECT_THAT(message({.called = "a", .rate = rate}),
                HasSubstr("Endpoint a, PeakPrefillThroughput: want >= 0 tokens/s and finite, got "));
  }
  for (const double weight : {-0.5, nan, inf}) {
    EXPECT_THAT(message({.called = "a", .share = weight}), HasSubstr("Endpoint a, Weight: want >= 0 and finite, got "));
  }
  EXPECT_EQ(message({.called = "a", .capacity = -1}), "Endpoint a, CapacityTokens: want 0 .. 2^40 tokens, got -1");
  EXPECT_THAT(message({.called = "a", .capacity = (std::int64_t{1} << 40) + 1}), HasSubstr("0 .. 2^40 tokens"));
  EXPECT_EQ(fleet.size(), 0U);
  EXPECT_TRUE(fleet.Add({.called = "a", .rate = 0, .capacity = std::int64_t{1} << 40, .share = 0}).ok());
}

TEST(FleetTest, ABadUpdateChangesNothing) {
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a", .rate = 5});
  EXPECT_EQ(fleet.Update(id, {.called = "a", .rate = -1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(fleet.Update(id, {.called = "b"}).message(), "endpoint name: want \"a\" (an update keeps it), got \"b\"");
  EXPECT_EQ(fleet.Get(id)->rate, 5);
  EXPECT_EQ(fleet.Find("b"), EndpointId{});
}

struct Blocky {
  std::string_view name() const { return "blocky"; }
  std::int32_t block_size() const { return -16; }
};

TEST(FleetTest, ANegativeBlockSizeIsRefused) {
  Fleet<Blocky> fleet;
  EXPECT_EQ(fleet.Add({}).status().message(), "Endpoint blocky, BlockSize: want >= 0 tokens, got -16");
}

TEST(FleetTest, The8193rdEndpointIsRefusedAndAFreedSlotIsNot) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, static_cast<int>(kMaxEndpoints));
  EXPECT_EQ(fleet.size(), 8'192U);
  const auto refused = fleet.Add({.called = "one-too-many"});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(),
            "endpoint \"one-too-many\": the fleet is full, want at most 8192 endpoints, got one more");
  EXPECT_EQ(fleet.Find("one-too-many"), EndpointId{});

  // A full fleet routes like any other.
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480});
  ASSERT_TRUE(router.ok());
  const std::vector<TokenId> prompt = testing_support::MakePrompt(1, 1'000);
  const auto first = router->Route({.tokens = prompt});
  ASSERT_TRUE(first.ok()) << first.refusal().ToString();
  EXPECT_EQ(first->decision().candidates, 8'192U);
  EXPECT_EQ(router->Route({.tokens = prompt})->endpoint_id(), first->endpoint_id());
  EXPECT_EQ(router->Route({.tokens = prompt}, {.exclude = std::span(ids).first(8'191)})->endpoint_id(), ids.back());
  EXPECT_EQ(router->Route({.tokens = prompt}, {.exclude = ids}).refusal().reason, RefusalReason::kAllExcluded);
  EXPECT_TRUE(router->Audit().ok());

  ASSERT_TRUE(fleet.Remove(ids[4'321]).ok());
  EXPECT_EQ(*fleet.Add({.called = "one-too-many"}), (EndpointId{4'321, 2}));
  EXPECT_EQ(fleet.Add({.called = "another"}).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(FleetTest, HandlesShareOneFleet) {
  Fleet<Upstream> fleet;
  Fleet<Upstream> copy = fleet;
  const EndpointId id = *copy.Add({.called = "a"});
  EXPECT_EQ(fleet.Find("a"), id);
  EXPECT_EQ(fleet.size(), 1U);
}

// ---- Endpoint types.

struct MoveOnly {
  explicit MoveOnly(std::string n) : called(std::make_unique<std::string>(std::move(n))) {}
  std::unique_ptr<std::string> called;
  std::string_view name() const { return *called; }
};

TEST(FleetTest, AnEndpointMayBeMoveOnly) {
  Fleet<MoveOnly> fleet;
  const EndpointId id = *fleet.Add(MoveOnly("m"));
  ASSERT_TRUE(fleet.Update(id, MoveOnly("m")).ok());
  EXPECT_EQ(*fleet.Get(id)->called, "m");
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  auto routed = router->Route({});
  ASSERT_TRUE(routed.ok());
  ASSERT_TRUE(fleet.Remove(id).ok());
  EXPECT_EQ(*routed->endpoint().called, "m");
}

struct Foreign {  // A type that cannot change, and has members of other meanings.
  int number = 0;
};

}  // namespace

template <>
struct EndpointTraits<Foreign> {
  static std::string Name(const Foreign& e) { return absl::StrCat("foreign-", e.number); }
  static std::vector<std::string> Models(const Foreign& e) { return {"z", absl::StrCat("m", e.number), "a", "z"}; }
};

namespace {

TEST(FleetTest, TraitsAdaptATypeThatCannotChange) {
  Fleet<Foreign> fleet;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(fleet.Add({i}).ok());
  EXPECT_EQ(fleet.Find("foreign-2").slot, 2U);
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  EXPECT_EQ(router->Route({.model = "m1"})->endpoint().number, 1);
}

TEST(FleetTest, ModelsNeedNoOrder) {
  // What Models returns is sorted and freed of duplicates by the fleet: the lookup relies on it.
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a", .serves = {"z", "m", "a", "m", "b"}});
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  for (const char* model : {"z", "m", "a", "b", ""}) {
    const auto routed = router->Route({.model = model});
    ASSERT_TRUE(routed.ok()) << model << ": " << routed.refusal().ToString();
    EXPECT_EQ(routed->decision().candidates, 1U);
  }
  EXPECT_THAT(fleet.core()->Get(id)->facts.models, ElementsAre("a", "b", "m", "z"));
  EXPECT_EQ(router->Route({.model = "c"}).refusal().reason, RefusalReason::kNotServed);
}

// ---- Destructors are the user's code: they run outside every lock.

struct Probe {
  Probe(std::string n, std::atomic<int>* g, std::function<void()>* hook) : called(std::move(n)), gone(g), on_gone(hook) {}
  Probe(Probe&& other) noexcept
      : called(std::move(other.called)), gone(std::exchange(other.gone, nullptr)), on_gone(other.on_gone) {}
  ~Probe() {
    if (gone == nullptr) return;
    ++*gone;
    (*on_gone)();
  }
  std::string called;
  std::atomic<int>* gone;
  std::function<void()>* on_gone;
  std::string_view name() const { return called; }
};

TEST(FleetTest, AnEndpointsDestructorMayCallFleetAndRouter) {
  std::atomic<int> gone{0};
  std::function<void()> hook = [] {};
  Fleet<Probe> fleet;
  auto made = PrefillBound(fleet, {.peak_prefill_throughput = 20'480});
  ASSERT_TRUE(made.ok());
  std::optional<Router<Probe>> router = *std::move(made);
  const auto probe = [&](const char* name) { return Probe(name, &gone, &hook); };
  const EndpointId a = *fleet.Add(probe("a")), b = *fleet.Add(probe("b"));
  int calls = 0;
  hook = [&] {  // Everything that takes a lock of fleet or router.
    ++calls;
    (void)fleet.Find("a");
    (void)fleet.Drain(b);
    (void)fleet.Resume(b);
    (void)fleet.size();
    if (!router.has_value()) return;
    (void)router->Route({});
    (void)router->Metrics();
    (void)router->Audit();
    (void)router->Expire({});
    (void)router->Read<ActiveRequests>(b);
  };
  // Added in vain; replaced by an update (a router holds the old one until it looks again); refused as an update.
  EXPECT_FALSE(fleet.Add(probe("a")).ok());
  EXPECT_EQ(gone.load(), 1);
  (void)router->Route({});
  ASSERT_TRUE(fleet.Update(a, probe("a")).ok());
  (void)router->Route({});
  EXPECT_EQ(gone.load(), 2);
  EXPECT_FALSE(fleet.Update(a, probe("another")).ok());
  EXPECT_EQ(gone.load(), 3);
  // Removed with a ticket on it: the ticket is its last owner.
  {
    auto routed = router->Route({}, {.exclude = {{b}}});
    ASSERT_TRUE(routed.ok());
    ASSERT_TRUE(fleet.Remove(a).ok());
    (void)router->Route({});
    EXPECT_EQ(gone.load(), 3);
    ASSERT_TRUE(routed->MoveTo(b));  // Lets go of it.
    EXPECT_EQ(gone.load(), 4);
    const EndpointId c = *fleet.Add(probe("c"));
    ASSERT_TRUE(routed->MoveTo(c));
    ASSERT_TRUE(fleet.Remove(c).ok());
    (void)router->Route({});
    EXPECT_EQ(gone.load(), 4);
    ASSERT_TRUE(router->Reroute(*routed, {}));
    EXPECT_EQ(gone.load(), 5);
    const EndpointId e = *fleet.Add(probe("e"));
    ASSERT_TRUE(routed->MoveTo(e));
    ASSERT_TRUE(fleet.Remove(e).ok());
    (void)router->Route({});
    EXPECT_EQ(gone.load(), 5);
  }
  EXPECT_EQ(gone.load(), 6);  // Dropped.
  // Removed with nobody on it.
  ASSERT_TRUE(fleet.Remove(b).ok());
  EXPECT_FALSE(router->Route({}).ok());
  EXPECT_EQ(gone.load(), 7);
  // The router goes with an endpoint that only it still knows of.
  const EndpointId d = *fleet.Add(probe("d"));
  (void)router->Route({});
  ASSERT_TRUE(fleet.Remove(d).ok());
  EXPECT_EQ(gone.load(), 7);
  router.reset();
  EXPECT_EQ(gone.load(), 8);
  EXPECT_EQ(calls, 8);
}

// ---- Candidates follow the fleet.

TEST(FleetTest, DrainAndEligibilityShapeTheCandidatesAndComeBack) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 3);
  auto router = LeastOutstanding(fleet);
  ASSERT_TRUE(router.ok());
  const auto candidates = [&] {
    auto routed = router->Route({});
    return routed.ok() ? routed->decision().candidates : 0;
  };
  EXPECT_EQ(candidates(), 3U);
  ASSERT_TRUE(fleet.Drain(ids[0]).ok());
  ASSERT_TRUE(fleet.Drain(ids[0]).ok());  // Idempotent.
  EXPECT_EQ(candidates(), 2U);
  ASSERT_TRUE(fleet.SetEligible(ids[1], false).ok());
  EXPECT_EQ(candidates(), 1U);
  ASSERT_TRUE(fleet.SetEligible(ids[0], false).ok());
  ASSERT_TRUE(fleet.Resume(ids[0]).ok());  // Still ejected.
  EXPECT_EQ(candidates(), 1U);
  ASSERT_TRUE(fleet.Update(ids[1], {.called = "e1"}).ok());  // An update does not bring it back.
  EXPECT_EQ(candidates(), 1U);
  ASSERT_TRUE(fleet.SetEligible(ids[0], true).ok());
  ASSERT_TRUE(fleet.SetEligible(ids[1], true).ok());
  EXPECT_EQ(candidates(), 3U);
  ASSERT_TRUE(fleet.Drain(ids[2]).ok());
  ASSERT_TRUE(fleet.Remove(ids[2]).ok());
  ASSERT_TRUE(fleet.Add({.called = "e2"}).ok());  // The successor of a drained one is not drained.
  EXPECT_EQ(candidates(), 3U);
}

TEST(FleetTest, AReturningEndpointBringsItsCacheBack) {
  Fleet<Upstream> fleet;
  const std::vector<EndpointId> ids = AddEndpoints(fleet, 4);
  auto router = PrefillBound(fleet, {.peak_prefill_throughput = 20'480, .seed = 2});
  ASSERT_TRUE(router.ok());
  const std::vector<TokenId> prompt = testing_support::MakePrompt(1, 1'600);
  EndpointId home;
  {
    auto routed = router->Route({.tokens = prompt});
    home = routed->endpoint_id();
    routed->Finish();
  }
  ASSERT_TRUE(fleet.SetEligible(home, false).ok());
  EXPECT_NE(router->Route({.tokens = prompt})->endpoint_id(), home);  // Dropped: taken back.
  ASSERT_TRUE(fleet.SetEligible(home, true).ok());
  ASSERT_TRUE(fleet.Update(home, {.called = absl::StrCat("e", home.slot), .edition = 2}).ok());
  const auto back = router->Route({.tokens = prompt});
  EXPECT_EQ(back->endpoint_id(), home);
  EXPECT_EQ(back->decision().matched_tokens, 1'600);
  // One that is removed and added again under its name is another: it holds nothing.
  ASSERT_TRUE(fleet.Remove(home).ok());
  ASSERT_TRUE(fleet.Add({.called = absl::StrCat("e", home.slot)}).ok());
  for (int i = 0; i < 20; ++i) EXPECT_EQ(router->Evaluate({.tokens = prompt}).decision.matched_tokens, 0);
}

TEST(FleetTest, AChangeIsSeenByTheNextRouteOfEveryRouter) {
  Fleet<Upstream> fleet;
  auto first = LeastOutstanding(fleet), second = RoundRobin(fleet);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->Route({}).refusal().reason, RefusalReason::kNoEndpoint);
  const EndpointId id = *fleet.Add({.called = "a"});
  EXPECT_TRUE(first->Route({}).ok());
  EXPECT_TRUE(second->Route({}).ok());
  ASSERT_TRUE(fleet.Remove(id).ok());
  EXPECT_FALSE(second->Route({}).ok());
  EXPECT_FALSE(first->Route({}).ok());
}

TEST(FleetTest, FourThreadsMayChangeOneFleet) {
  Fleet<Upstream> fleet;
  std::vector<std::thread> threads;
  std::atomic<int> added{0}, removed{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t));
      for (int i = 0; i < 2'000; ++i) {
        const std::string name = absl::StrCat("n", random.Below(8));
        const auto id = fleet.Add({.called = name});
        if (id.ok()) ++added;
        const EndpointId found = fleet.Find(name);
        (void)fleet.Drain(found);
        if (const auto endpoint = fleet.Get(found); endpoint != nullptr) {
          EXPECT_EQ(endpoint->called, name);
        }
        if (fleet.Remove(found).ok()) ++removed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(static_cast<int>(fleet.size()), added - removed);
  EXPECT_EQ(fleet.Ids().size(), fleet.size());
}

TEST(FleetViewTest, AnEmptyViewKnowsNobody) {
  const FleetView view;
  EXPECT_FALSE(view.Alive({0, 1}));
  EXPECT_EQ(view.At(0), EndpointId{});
  EXPECT_EQ(view.width(), 0U);
}

TEST(FleetViewTest, AZeroedIdIsNobodyAlsoOnAnEmptySlot) {
  Fleet<Upstream> fleet;
  const EndpointId id = *fleet.Add({.called = "a"});
  const FleetView view = fleet.core()->View(1);
  EXPECT_TRUE(view.Alive(id));
  EXPECT_EQ(view.At(0), id);
  ASSERT_TRUE(fleet.Remove(id).ok());
  EXPECT_FALSE(view.Alive(id));
  EXPECT_FALSE(view.Alive({}));
  EXPECT_FALSE(view.Alive({0, 0}));
  EXPECT_FALSE(view.Alive({kMaxEndpoints, 1}));
  EXPECT_EQ(view.At(kMaxEndpoints), EndpointId{});
}

}  // namespace
}  // namespace tokroute

// Random lifecycles from four threads: whatever happens to a ticket, its endpoint, its fleet and its policy, the books
// balance at every moment and are empty at the end. Run under the sanitizers this is also the library's race test.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "support/test_fleet.h"
#include "support/test_run.h"
#include "tokroute/tokroute.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using testing_support::kSanitized;
using testing_support::MakePrompt;
using testing_support::TestSeed;
using testing_support::Upstream;

// TOKROUTE_STORM_STEPS overrides: the heavy run takes ten million.
std::uint64_t Steps() {
  if (const char* text = std::getenv("TOKROUTE_STORM_STEPS")) return std::strtoull(text, nullptr, 10);
#if defined(NDEBUG)
  return kSanitized ? 200'000 : 1'000'000;
#else
  return 200'000;
#endif
}
constexpr std::uint32_t kThreads = 4, kNames = 12;
constexpr std::size_t kOwnTickets = 48, kSharedTickets = 8;
constexpr std::string_view kPolicies[] = {"", "prefill-bound", "least", "rotate", "warm"};
constexpr std::string_view kModels[] = {"", "", "", "m0", "m1", "nobody's"};

std::string NameOf(std::uint32_t i) { return absl::StrCat("pod-", i); }

Upstream RandomUpstream(Random& random, std::uint32_t name) {
  Upstream upstream{.called = NameOf(name)};
  if (random.Below(3) == 0) upstream.serves = {"m1", "m0"};
  if (random.Below(4) == 0) upstream.serves.push_back("m2");
  if (random.Below(4) == 0) upstream.rate = 1'000 + random.Below(40'000);
  if (random.Below(2) == 0) upstream.capacity = 512 + random.Below(20'000);
  upstream.share = random.Below(3);
  upstream.edition = static_cast<int>(random.Below(100));
  return upstream;
}

// Families of prompts that share prefixes of different lengths, from nothing to a few thousand tokens.
std::vector<std::vector<TokenId>> MakePrompts() {
  std::vector<std::vector<TokenId>> prompts;
  for (std::uint64_t family = 0; family < 12; ++family) {
    const std::vector<TokenId> trunk = MakePrompt(family, 200 * family);
    for (std::uint64_t branch = 0; branch < 6; ++branch) {
      std::vector<TokenId> prompt = trunk;
      const std::vector<TokenId> tail = MakePrompt(1'000 + family * 6 + branch, 90 * branch);
      prompt.insert(prompt.end(), tail.begin(), tail.end());
      prompts.push_back(std::move(prompt));
    }
  }
  return prompts;
}

class Storm {
 public:
  explicit Storm(std::uint64_t seed) : seed_(seed) {
    auto index = PrefixIndex::Create({.block_size = 16, .default_capacity_tokens = 6'000, .max_bytes = 4 << 20});
    EXPECT_TRUE(index.ok()) << index.status();
    index_ = *index;
    Random random(seed);
    for (std::uint32_t i = 0; i < kNames; ++i) (void)*fleet_.Add(RandomUpstream(random, i));
    auto router = PrefillBound(fleet_, {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 3s, .seed = seed, .index = index_});
    EXPECT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
    SetPolicies(random);
    // A second router with books of its own over the same fleet and index.
    auto second = DecodeBound(fleet_, {.peak_prefill_throughput = 1'000, .seed = seed + 1, .index = index_});
    EXPECT_TRUE(second.ok()) << second.status();
    second_.emplace(*second);
    for (auto& slot : shared_) slot.ticket = std::make_shared<Ticket<Upstream>>();
  }

  void Run() {
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < kThreads; ++t) threads.emplace_back([this, t] { RunThread(t); });
    for (std::thread& thread : threads) thread.join();
  }

  // Everything is dropped: every counter 0, the audits clean, the index empty-handed.
  void ExpectQuiet() {
    for (auto& slot : shared_) slot.ticket.reset();
    for (Router<Upstream>* router : {&*router_, &*second_}) {
      EXPECT_TRUE(router->Audit().ok()) << router->Audit();
      for (EndpointId id : fleet_.Ids()) {
        EXPECT_EQ(router->Read<UncachedTokensInFlight>(id), 0) << id.slot;
        EXPECT_EQ(router->Read<ActiveRequests>(id), 0) << id.slot;
        EXPECT_EQ(router->Read<OutputTokensInFlight>(id), 0) << id.slot;
      }
      const RouterMetrics metrics = router->Metrics();
      EXPECT_EQ(metrics.live_tickets, 0U);
      EXPECT_EQ(metrics.scores_clamped, 0U);
      EXPECT_EQ(testing_support::Refusals(metrics, RefusalReason::kOutOfMemory), 0U);
    }
    const RouterMetrics first = router_->Metrics(), second = second_->Metrics();
    std::printf("%llu routed, %llu refused, %llu moved, %llu expired, %llu orphaned, %llu gates open\n",
                static_cast<unsigned long long>(routed_), static_cast<unsigned long long>(refused_),
                static_cast<unsigned long long>(moved_), static_cast<unsigned long long>(expired_),
                static_cast<unsigned long long>(first.orphaned_releases + second.orphaned_releases),
                static_cast<unsigned long long>(open_));
    EXPECT_EQ(first.finished + first.aborted + second.finished + second.aborted, routed_.load());
    EXPECT_EQ(first.moved + second.moved, moved_.load());
    EXPECT_EQ(first.expired + second.expired, expired_.load());
    EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
    EXPECT_EQ(index_->Stats().live_receipts, 0);
    // The storm has been where it should.
    EXPECT_GT(first.finished, 0U);
    EXPECT_GT(first.expired, 0U);
    EXPECT_GT(first.moved, 0U);
    EXPECT_GT(first.orphaned_releases, 0U);
    EXPECT_GT(first.repeated_events, 0U);
    EXPECT_GT(first.late_events, 0U);
    EXPECT_GT(index_->Stats().evicted_blocks, 0);
    EXPECT_GT(sticky_.load(), 0U);
    EXPECT_GT(open_.load(), 0U);

    for (EndpointId id : fleet_.Ids()) EXPECT_TRUE(fleet_.Remove(id).ok());
    EXPECT_EQ(router_->Route({}).refusal().reason, RefusalReason::kNoEndpoint);
    while (index_->Sweep(1'000) > 0) {
    }
    EXPECT_EQ(index_->Stats().endpoints, 0);
    EXPECT_EQ(index_->Stats().distinct_blocks, 0);
    EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
  }

  // Routers and fleet go first; what the tickets release then falls on nothing.
  void DropHandlesThenTickets() {
    std::vector<Ticket<Upstream>> last;
    for (std::uint32_t i = 0; i < 8; ++i) {
      (void)fleet_.Add({.called = NameOf(i)});
      auto routed = router_->Route({.tokens = prompts_[30]});
      ASSERT_TRUE(routed.ok()) << routed.refusal().ToString();
      last.push_back(std::move(routed).Take());
    }
    router_.reset();
    second_.reset();
    fleet_ = Fleet<Upstream>();
    last[0].FirstToken();
    last[1].Finish();
    for (const auto& ticket : last) EXPECT_EQ(ticket.endpoint().called.substr(0, 4), "pod-");
    last.clear();
    EXPECT_EQ(index_->Stats().live_receipts, 0);
    EXPECT_TRUE(index_->Audit().ok()) << index_->Audit();
  }

 private:
  struct SharedTicket {
    std::mutex mutex;
    std::shared_ptr<Ticket<Upstream>> ticket;
  };

  void SetPolicies(Random& random) {
    EXPECT_TRUE(router_->SetPolicy("least", Policy(Weighted(ActiveRequestScorer(), 1 + random.Below(3)), MaxScorePicker<>())).ok());
    EXPECT_TRUE(router_->SetPolicy("rotate", Policy(RoundRobinPicker())).ok());
    const auto gate = TauGate::Create({.peak_prefill_throughput = 1'000.0 + random.Below(10'000), .max_ttft_penalty = 1s});
    EXPECT_TRUE(router_
                    ->SetPolicy("warm", Policy(PrefixCacheAffinityFilter(*gate), TokenLoadScorer(), ActiveRequestScorer(),
                                               MaxScorePicker<TieBreak::kLowestLoad>(PickerOptions{.max_targets = 3})))
                    .ok());
  }

  // An id under a random name; mostly alive, at times of nobody or of one that has gone meanwhile.
  EndpointId SomeId(Random& random) { return fleet_.Find(NameOf(random.Below(kNames + 1))); }

  Request SomeRequest(Random& random) {
    Request request{.tokens = prompts_[random.Below(static_cast<std::uint32_t>(prompts_.size()))],
                    .model = kModels[random.Below(std::size(kModels))]};
    if (random.Below(8) == 0) request.max_output_tokens = random.Below(500);
    if (random.Below(16) == 0) request.lora = "adapter";
    if (random.Below(64) == 0) request.prompt_tokens = 1;  // Refused, if it holds more.
    return request;
  }

  std::optional<Ticket<Upstream>> Route(Random& random) {
    Router<Upstream>& router = random.Below(4) == 0 ? *second_ : *router_;
    const EndpointId exclude[] = {SomeId(random), SomeId(random)};
    LegPolicy legs[] = {{Leg::kPrefill, ""}, {Leg::kDecode, ""}, {Leg::kEncode, ""}};
    if (&router == &*router_) {
      for (LegPolicy& leg : legs) leg.policy = kPolicies[random.Below(std::size(kPolicies))];
    }
    RouteOptions options;
    if (&router == &*router_) options.policy = kPolicies[random.Below(std::size(kPolicies))];
    if (random.Below(4) == 0) options.exclude = exclude;
    if (random.Below(8) == 0) options.legs = std::span(legs).first(1 + random.Below(3));
    Trace trace;
    if (random.Below(64) == 0) options.trace = &trace;
    auto routed = router.Route(SomeRequest(random), options);
    if (!routed.ok()) {
      EXPECT_NE(routed.refusal().reason, RefusalReason::kNone);
      refused_.fetch_add(1, std::memory_order_relaxed);
      if (random.Below(64) == 0) {
        EXPECT_FALSE(routed.refusal().ToString().empty());
      }
      return std::nullopt;
    }
    routed_.fetch_add(1);
    const Decision& decision = routed->decision(options.legs.empty() ? Leg::kServe : options.legs[0].leg);
    EXPECT_NE(decision.endpoint().incarnation, 0U);
    EXPECT_EQ(routed->endpoint(decision.leg).called, decision.endpoint_name());
    for (const FilterVerdict& verdict : decision.filter_verdicts()) {
      if (*verdict.reason == kSticky) sticky_.fetch_add(1, std::memory_order_relaxed);
      if (*verdict.reason == kGateOpen) open_.fetch_add(1, std::memory_order_relaxed);
    }
    if (random.Below(64) == 0) {
      EXPECT_FALSE(decision.ToString().empty());
    }
    if (random.Below(3) == 0) routed->Deadline(std::chrono::nanoseconds(clock_.load() + random.Below(2'000)));
    return std::move(routed).Take();
  }

  static void Poke(const Ticket<Upstream>& ticket, Random& random) {
    switch (random.Below(6)) {
      case 0:
      case 1: ticket.FirstToken(); break;
      case 2: ticket.Finish({.output_tokens = 5, .cached_tokens = 16}); break;
      case 3: ticket.Finish({.aborted = true}); break;
      case 4: (void)ticket.live(); break;
      case 5: ticket.Deadline(std::chrono::nanoseconds::max()); break;
    }
  }

  void ChangeFleet(Random& random) {
    const std::uint32_t name = random.Below(kNames);
    const EndpointId id = fleet_.Find(NameOf(name));
    switch (random.Below(8)) {
      case 0:
      case 1:
        (void)fleet_.Remove(id);  // Perhaps another thread was first.
        if (random.Below(2) == 0) (void)fleet_.Add(RandomUpstream(random, name));
        break;
      case 2:
      case 3: (void)fleet_.Add(RandomUpstream(random, name)); break;
      case 4: (void)(random.Below(4) == 0 ? fleet_.Drain(id) : fleet_.Resume(id)); break;
      case 5: (void)fleet_.SetEligible(id, random.Below(4) != 0); break;
      case 6: (void)fleet_.Update(id, RandomUpstream(random, name)); break;
      case 7:
        if (const auto endpoint = fleet_.Get(id); endpoint != nullptr) {
          EXPECT_EQ(endpoint->called, NameOf(name));
        }
        break;
    }
  }

  void Look(Random& random) {
    Router<Upstream> router = random.Below(2) == 0 ? *router_ : *second_;  // A handle of its own.
    const EndpointId id = SomeId(random);
    switch (random.Below(6)) {
      case 0: {
        const absl::Status audit = router.Audit();
        EXPECT_TRUE(audit.ok()) << audit;
        break;
      }
      case 1:
        EXPECT_GE(router.Read<UncachedTokensInFlight>(id).value_or(0), 0);
        EXPECT_GE(router.Read<ActiveRequests>(id).value_or(0), 0);
        EXPECT_GE(router.Read<OutputTokensInFlight>(id).value_or(0), 0);
        break;
      case 2: {
        const Evaluation evaluation = router.Evaluate(SomeRequest(random));
        if (evaluation.ok()) {
          EXPECT_FALSE(evaluation.decision.endpoint_name().empty());
        }
        break;
      }
      case 3: (void)router.Metrics(); break;
      case 4: {
        const PrefixIndexStats stats = index_->Stats();
        EXPECT_LE(stats.bytes, index_->options().max_bytes);
        EXPECT_GE(stats.live_receipts, 0);
        break;
      }
      case 5: EXPECT_GE(index_->HeldBlocks(id), 0); break;
    }
  }

  void RunThread(std::uint32_t thread) {
    Random random = Random::For(seed_, thread, 0);
    std::vector<Ticket<Upstream>> own(kOwnTickets);
    for (std::uint64_t step = 0; step < steps_ / kThreads && !::testing::Test::HasFailure(); ++step) {
      Ticket<Upstream>& ticket = own[random.Below(kOwnTickets)];
      const std::uint32_t roll = random.Below(1'000);
      if (roll % 64 == 0) std::this_thread::yield();  // So that threads interleave even on one core.
      if (roll < 330) {
        if (auto routed = Route(random)) ticket = *std::move(routed);  // What was there is dropped.
      } else if (roll < 580) {
        Poke(ticket, random);
        if (random.Below(4) == 0) Poke(ticket, random);
      } else if (roll < 640) {
        ticket = Ticket<Upstream>();
      } else if (roll < 700) {
        constexpr Leg kLegs[] = {Leg::kServe, Leg::kServe, Leg::kPrefill, Leg::kDecode, Leg::kEncode};
        if (ticket.MoveTo(SomeId(random), random.Below(400), kLegs[random.Below(5)])) moved_.fetch_add(1);
      } else if (roll < 760) {
        Router<Upstream>& router = random.Below(4) == 0 ? *second_ : *router_;
        RerouteOptions options;
        if (random.Below(4) == 0) options.leg = random.Below(2) == 0 ? Leg::kDecode : Leg::kPrefill;
        if (!ticket.empty() && router.Reroute(ticket, SomeRequest(random), options)) moved_.fetch_add(1);
      } else if (roll < 800) {
        std::swap(ticket, own[random.Below(kOwnTickets)]);
      } else if (roll < 900) {  // One ticket in several threads' hands: all calls but the exclusive ones race.
        SharedTicket& slot = shared_[random.Below(kSharedTickets)];
        std::shared_ptr<Ticket<Upstream>> held;
        if (random.Below(3) == 0) {
          auto routed = Route(random);
          auto fresh = std::make_shared<Ticket<Upstream>>(routed ? *std::move(routed) : Ticket<Upstream>());
          const std::lock_guard lock(slot.mutex);
          held = std::exchange(slot.ticket, std::move(fresh));
        } else {
          const std::lock_guard lock(slot.mutex);
          held = slot.ticket;
        }
        Poke(*held, random);
        Poke(*held, random);
        if (!held->empty()) {
          EXPECT_FALSE(held->decision().endpoint_name().empty());
        }
      } else if (roll < 940) {
        ChangeFleet(random);
      } else if (roll < 960) {
        std::int64_t now = clock_.fetch_add(50) + 50;
        if (random.Below(40) == 0) now += random.Below(2) == 0 ? 1'000'000 : -1'000'000;  // The clock jumps, either way.
        expired_.fetch_add(router_->Expire(std::chrono::nanoseconds(now)));
        if (random.Below(4) == 0) expired_.fetch_add(second_->Expire(std::chrono::nanoseconds(now)));
      } else if (roll < 965) {
        SetPolicies(random);
      } else if (roll < 999) {
        Look(random);
      } else if (random.Below(16) == 0) {
        const absl::Status audit = index_->Audit();
        EXPECT_TRUE(audit.ok()) << audit;
      }
    }
  }

  const std::uint64_t seed_, steps_ = Steps();
  const std::vector<std::vector<TokenId>> prompts_ = MakePrompts();
  Fleet<Upstream> fleet_;
  std::shared_ptr<PrefixIndex> index_;
  std::optional<Router<Upstream>> router_, second_;
  SharedTicket shared_[kSharedTickets];
  std::atomic<std::int64_t> clock_{0};
  std::atomic<std::uint64_t> routed_{0}, refused_{0}, moved_{0}, expired_{0}, sticky_{0}, open_{0};
};

TEST(LifecycleStormTest, EveryBookingIsReleasedOnceWhateverFourThreadsDo) {
  const std::uint64_t seed = TestSeed(20'260'731);
  std::printf("%llu steps, %u threads\n", static_cast<unsigned long long>(Steps()), kThreads);
  Storm storm(seed);
  storm.Run();
  if (HasFailure()) return;
  storm.ExpectQuiet();
  storm.DropHandlesThenTickets();
}

}  // namespace
}  // namespace tokroute

// Pairs of calls that race with each other, thousands of times each. The storm mixes everything; here each pair meets on
// purpose, so that a failure says which. Most of what they can break shows under ThreadSanitizer; the books must balance
// in every build.

#include "tokroute/state.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
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
using testing_support::AddEndpoints;
using testing_support::kSanitized;
using testing_support::Load;
using testing_support::LoadOf;
using testing_support::MakePrompt;
using testing_support::Upstream;

constexpr int kRounds = kSanitized ? 3'000 : 15'000;

// Two threads that meet before every round: `both` runs on either with 0 and 1; `prepare` and `check` run alone, in between.
class Meeting {
 public:
  void Run(int rounds, const std::function<void(int)>& prepare, const std::function<void(int, int)>& both,
           const std::function<void(int)>& check) {
    std::thread other([&] {
      for (int round = 0; round < rounds; ++round) {
        Wait(2 * round + 1);
        both(1, round);
        done_.store(round + 1);
      }
    });
    for (int round = 0; round < rounds; ++round) {
      prepare(round);
      turn_.store(2 * round + 1);
      both(0, round);
      while (done_.load() < round + 1) std::this_thread::yield();
      check(round);
    }
    other.join();
  }

 private:
  void Wait(int turn) {
    while (turn_.load() < turn) std::this_thread::yield();
  }
  std::atomic<int> turn_{0}, done_{0};
};

class RaceTest : public ::testing::Test {
 protected:
  RaceTest() {
    index_ = *PrefixIndex::Create({.default_capacity_tokens = 4'096});
    auto router = PrefillBound(fleet_, {.peak_prefill_throughput = 1'000, .max_ttft_penalty = 5s, .seed = 3, .index = index_});
    EXPECT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
    for (std::uint64_t i = 0; i < 32; ++i) prompts_.push_back(MakePrompt(i, 40 + 20 * i));
  }
  std::span<const TokenId> Prompt(int round) { return prompts_[static_cast<std::size_t>(round) % prompts_.size()]; }
  Ticket<Upstream> Route(int round) { return router_->Route({.tokens = Prompt(round)}).Take(); }
  void ExpectQuiet(std::uint64_t tickets) {
    for (EndpointId id : fleet_.Ids()) ASSERT_EQ(LoadOf(*router_, id), (Load{0, 0, 0}));
    const RouterMetrics metrics = router_->Metrics();
    ASSERT_EQ(metrics.live_tickets, 0U);
    ASSERT_EQ(metrics.finished + metrics.aborted, tickets);
    ASSERT_EQ(index_->Stats().live_receipts, 0);
    ASSERT_TRUE(router_->Audit().ok()) << router_->Audit();
    ASSERT_TRUE(index_->Audit().ok()) << index_->Audit();
  }

  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 4);
  std::shared_ptr<PrefixIndex> index_;
  std::optional<Router<Upstream>> router_;
  std::vector<std::vector<TokenId>> prompts_;
};

TEST_F(RaceTest, FirstTokenAgainstFinish) {
  Ticket<Upstream> ticket;
  Meeting().Run(
      kRounds, [&](int round) { ticket = Route(round); },
      [&](int side, int round) {
        if (side == 0) ticket.FirstToken();
        else ticket.Finish({.aborted = round % 2 == 0});
      },
      [&](int) { ASSERT_FALSE(ticket.live()); });
  ticket = Ticket<Upstream>();
  ExpectQuiet(kRounds);
  const RouterMetrics metrics = router_->Metrics();
  EXPECT_EQ(metrics.repeated_events, 0U);
  EXPECT_LE(metrics.late_events, static_cast<std::uint64_t>(kRounds));
}

TEST_F(RaceTest, FinishAgainstFinish) {
  Ticket<Upstream> ticket;
  Meeting().Run(
      kRounds, [&](int round) { ticket = Route(round); }, [&](int side, int) { ticket.Finish({.aborted = side == 0}); },
      [&](int) {});
  ticket = Ticket<Upstream>();
  ExpectQuiet(kRounds);
  EXPECT_EQ(router_->Metrics().repeated_events, static_cast<std::uint64_t>(kRounds));  // One of the two, each time.
}

TEST_F(RaceTest, ExpireAgainstFirstTokenAndFinish) {
  Ticket<Upstream> ticket;
  Meeting().Run(
      kRounds,
      [&](int round) {
        ticket = Route(round);
        ticket.Deadline(1s);
      },
      [&](int side, int round) {
        if (side == 0) (void)router_->Expire(2s);
        else if (round % 2 == 0) ticket.FirstToken();
        else ticket.Finish();
      },
      [&](int) { ASSERT_FALSE(ticket.live()); });
  ticket = Ticket<Upstream>();
  ExpectQuiet(kRounds);
}

TEST_F(RaceTest, ExpireAgainstDrop) {
  std::optional<Ticket<Upstream>> ticket;
  Meeting().Run(
      kRounds,
      [&](int round) {
        ticket = Route(round);
        ticket->Deadline(1s);
      },
      [&](int side, int) {
        if (side == 0) (void)router_->Expire(2s);
        else ticket.reset();
      },
      [&](int) {});
  ExpectQuiet(kRounds);
}

TEST_F(RaceTest, ExpireAgainstMoveTo) {
  Ticket<Upstream> ticket;
  std::uint64_t moved = 0;
  Meeting().Run(
      kRounds,
      [&](int round) {
        ticket = Route(round);
        ticket.Deadline(1s);
      },
      [&](int side, int round) {
        if (side == 0) (void)router_->Expire(2s);
        else moved += ticket.MoveTo(ids_[static_cast<std::size_t>(round) % 4]) ? 1U : 0U;
      },
      [&](int) {
        (void)router_->Expire(2s);  // A ticket that was being moved is found by the next call.
        ASSERT_FALSE(ticket.live());
      });
  ticket = Ticket<Upstream>();
  ExpectQuiet(kRounds);
  EXPECT_EQ(router_->Metrics().moved, moved);
  EXPECT_EQ(router_->Metrics().expired, static_cast<std::uint64_t>(kRounds));
}

TEST_F(RaceTest, ExpireAgainstReroute) {
  Ticket<Upstream> ticket;
  std::uint64_t moved = 0;
  Meeting().Run(
      kRounds,
      [&](int round) {
        ticket = Route(round);
        ticket.Deadline(1s);
        if (round % 2 == 0) ticket.FirstToken();
      },
      [&](int side, int round) {
        if (side == 0) (void)router_->Expire(2s);
        else moved += router_->Reroute(ticket, {.tokens = Prompt(round)}) ? 1U : 0U;
      },
      [&](int) {
        (void)router_->Expire(2s);
        ASSERT_FALSE(ticket.live());
      });
  ticket = Ticket<Upstream>();
  ExpectQuiet(kRounds);
  EXPECT_EQ(router_->Metrics().moved, moved);
}

TEST_F(RaceTest, ExpireAgainstMoveToAndThenDrop) {
  // The ticket goes while Expire may still be telling the producers about it.
  std::optional<Ticket<Upstream>> ticket;
  Meeting().Run(
      kRounds,
      [&](int round) {
        ticket = Route(round);
        ticket->Deadline(1s);
      },
      [&](int side, int round) {
        if (side == 0) {
          (void)router_->Expire(2s);
        } else {
          (void)ticket->MoveTo(ids_[static_cast<std::size_t>(round) % 4]);
          ticket.reset();
        }
      },
      [&](int) {});
  ExpectQuiet(kRounds);
}

TEST_F(RaceTest, ExpireAgainstExpire) {
  std::vector<Ticket<Upstream>> tickets(64);
  std::atomic<std::uint64_t> expired{0};
  const int rounds = kRounds / 30;
  Meeting().Run(
      rounds,
      [&](int round) {
        for (auto& ticket : tickets) {
          ticket = Route(round);
          ticket.Deadline(1s);
        }
      },
      [&](int, int) { expired += router_->Expire(1s); }, [&](int) {});
  EXPECT_EQ(expired.load(), static_cast<std::uint64_t>(rounds) * 64);
  tickets.clear();
  ExpectQuiet(expired.load());
}

TEST_F(RaceTest, SetPolicyAgainstRoute) {
  std::uint64_t routed = 0;
  Meeting().Run(
      kRounds, [](int) {},
      [&](int side, int round) {
        if (side == 0) {
          if (round % 2 == 0) {
            ASSERT_TRUE(router_->SetPolicy("prefill-bound", Policy(RandomPicker())).ok());
          } else {
            ASSERT_TRUE(router_->SetPolicy("prefill-bound", Policy(ActiveRequestScorer(), MaxScorePicker<>())).ok());
          }
        } else {
          const Ticket<Upstream> ticket = Route(round);
          ASSERT_FALSE(ticket.empty());
          ASSERT_EQ(ticket.decision().policy_name(), "prefill-bound");
          ++routed;
        }
      },
      [](int) {});
  ExpectQuiet(routed);
}

TEST_F(RaceTest, RemoveAgainstRouteAndFinish) {
  Ticket<Upstream> ticket;
  std::uint64_t routed = 0;
  Meeting().Run(
      kRounds,
      [&](int round) {
        ticket = Route(round);
        ASSERT_FALSE(ticket.empty());
        ++routed;
      },
      [&](int side, int round) {
        if (side == 0) {
          const EndpointId id = ticket.endpoint_id();
          ASSERT_TRUE(fleet_.Remove(id).ok());
          ASSERT_TRUE(fleet_.Add({.called = absl::StrCat("e", id.slot)}).ok());
        } else {
          if (round % 3 == 0) ticket.FirstToken();
          if (round % 3 == 1) ticket.Finish();
          const Ticket<Upstream> another = Route(round + 1);
          routed += another.empty() ? 0U : 1U;
        }
      },
      [&](int) {
        for (EndpointId id : fleet_.Ids()) ASSERT_EQ(LoadOf(*router_, id), (Load{0, 0, 0}));
      });
  ticket = Ticket<Upstream>();
  ExpectQuiet(routed);
}

TEST_F(RaceTest, RemoveAgainstMoveTo) {
  Ticket<Upstream> ticket;
  Meeting().Run(
      kRounds, [&](int round) { ticket = Route(round); },
      [&](int side, int round) {
        const std::size_t slot = static_cast<std::size_t>(round) % 4;
        if (side == 0) {
          ASSERT_TRUE(fleet_.Remove(fleet_.Find(absl::StrCat("e", slot))).ok());
          ids_[slot] = *fleet_.Add({.called = absl::StrCat("e", slot)});
        } else {
          (void)ticket.MoveTo(fleet_.Find(absl::StrCat("e", slot)));
        }
      },
      [&](int) { ASSERT_TRUE(router_->Audit().ok()) << router_->Audit(); });
  ticket = Ticket<Upstream>();
  ExpectQuiet(kRounds);
}

TEST_F(RaceTest, TheLastTicketAgainstTheLastRouter) {
  // Whoever is last deletes the state.
  Ticket<Upstream> ticket;
  Meeting().Run(
      kRounds / 10,
      [&](int round) {
        auto router = LeastOutstanding(fleet_);
        router_.emplace(*router);
        ticket = Route(round);
      },
      [&](int side, int) {
        if (side == 0) router_.reset();
        else ticket = Ticket<Upstream>();
      },
      [](int) {});
}

TEST_F(RaceTest, GrowingTheSlabFromFourThreads) {
  // Many more live tickets than the first chunk holds, taken and given back at once.
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int wave = 0; wave < 3; ++wave) {
        std::vector<Ticket<Upstream>> held;
        for (int i = 0; i < 1'500; ++i) held.push_back(Route(t + i));
        for (const auto& ticket : held) ASSERT_TRUE(ticket.live());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectQuiet(4 * 3 * 1'500);
}

TEST_F(RaceTest, MoreThreadsThanScratchSlots) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 80; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) ASSERT_FALSE(Route(t + i).empty());
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectQuiet(80 * 20);
}

// ---- Settling: what tickets were told is in the books before anybody looks.

// Counts what reaches it, for as long as somebody holds the counts.
struct EventCounts {
  std::atomic<int> booked{0}, first_tokens{0}, released{0}, aborted{0};
};
class CountingLoad {
 public:
  static constexpr std::string_view kName = "counting-load";
  using Produces = Signals<ActiveRequests>;
  using Own = WritableColumns<Produces>;
  explicit CountingLoad(std::shared_ptr<EventCounts> counts) : counts_(std::move(counts)) {}
  void OnBooked(Own own, const Request&, const Booking& b) noexcept {
    ++counts_->booked;
    ++own.Column<ActiveRequests>()[b.row];
  }
  void OnFirstToken(Own, const Booking&) noexcept { ++counts_->first_tokens; }
  void OnReleased(Own own, const Booking& b, const Outcome& outcome) noexcept {
    ++(outcome.aborted ? counts_->aborted : counts_->released);
    --own.Column<ActiveRequests>()[b.row];
  }

 private:
  std::shared_ptr<EventCounts> counts_;
};

class SettleTest : public ::testing::Test {
 protected:
  SettleTest() {
    auto router = MakeRouter(fleet_, {}, Producers(CountingLoad(counts_)),
                             Named("least", Policy(ActiveRequestScorer{}, MaxScorePicker{})));
    EXPECT_TRUE(router.ok()) << router.status();
    router_.emplace(*router);
  }
  std::shared_ptr<EventCounts> counts_ = std::make_shared<EventCounts>();
  Fleet<Upstream> fleet_;
  std::vector<EndpointId> ids_ = AddEndpoints(fleet_, 2);
  std::optional<Router<Upstream>> router_;
};

TEST_F(SettleTest, EveryEventReachesAProducerOnceAndInOrder) {
  auto ticket = router_->Route({.prompt_tokens = 10}).Take();
  ticket.FirstToken();
  ticket.FirstToken();
  ticket.Finish();
  ticket.Finish();
  ticket.FirstToken();
  EXPECT_EQ(*router_->Read<ActiveRequests>(ids_[0]) + *router_->Read<ActiveRequests>(ids_[1]), 0);
  EXPECT_EQ(counts_->first_tokens, 1);
  EXPECT_EQ(counts_->released, 1);
  EXPECT_EQ(counts_->aborted, 0);
  EXPECT_EQ(router_->Metrics().repeated_events, 2U);
  EXPECT_EQ(router_->Metrics().late_events, 1U);
}

TEST_F(SettleTest, WhatOneThreadEndedTheNextDecisionOfAnotherSees) {
  for (int round = 0; round < 200; ++round) {
    auto busy = router_->Route({.prompt_tokens = 10}).Take();
    auto idle = router_->Route({.prompt_tokens = 10}).Take();
    ASSERT_NE(busy.endpoint_id(), idle.endpoint_id());
    std::thread([&] { idle.Finish(); }).join();
    auto next = router_->Route({.prompt_tokens = 10});
    ASSERT_TRUE(next.ok());
    EXPECT_EQ(next->endpoint_id(), idle.endpoint_id()) << round;
  }
}

TEST_F(SettleTest, TicketsThatOutliveEveryHandleSettleByThemselves) {
  auto first = router_->Route({.prompt_tokens = 10}).Take(), second = router_->Route({.prompt_tokens = 10}).Take();
  { auto dropped = router_->Route({.prompt_tokens = 10}); }
  router_.reset();
  EXPECT_EQ(counts_->aborted, 1) << "what was queued when the last handle went";
  first.FirstToken();
  EXPECT_EQ(counts_->first_tokens, 1);
  first.Finish();
  EXPECT_EQ(counts_->released, 1);
  EXPECT_TRUE(second.live());
  EXPECT_TRUE(second.MoveTo(second.endpoint_id() == ids_[0] ? ids_[1] : ids_[0]));
  EXPECT_EQ(counts_->aborted, 2) << "a move releases and books";
  EXPECT_EQ(counts_.use_count(), 2);
  first = Ticket<Upstream>();
  second = Ticket<Upstream>();
  EXPECT_EQ(counts_->aborted, 3);
  EXPECT_EQ(counts_->booked, counts_->released + counts_->aborted);
  EXPECT_EQ(counts_.use_count(), 1) << "the last ticket took the state along";
}

TEST_F(SettleTest, TheLastHandleAgainstTheLastTickets) {
  for (int round = 0; round < kRounds / 10; ++round) {
    Fleet<Upstream> fleet;
    AddEndpoints(fleet, 2);
    auto counts = std::make_shared<EventCounts>();
    auto router = std::make_unique<Router<Upstream>>(*MakeRouter(
        fleet, {}, Producers(CountingLoad(counts)), Named("least", Policy(ActiveRequestScorer{}, MaxScorePicker{}))));
    Ticket<Upstream> a = router->Route({.prompt_tokens = 10}).Take(), b = router->Route({.prompt_tokens = 10}).Take();
    std::atomic<int> ready{0};
    const auto meet = [&] {
      ++ready;
      while (ready.load() < 3) std::this_thread::yield();
    };
    std::thread one([&] {
      meet();
      a.FirstToken();
      a = Ticket<Upstream>();
    });
    std::thread two([&] {
      meet();
      b.Finish();
      b = Ticket<Upstream>();
    });
    meet();
    router.reset();
    one.join();
    two.join();
    ASSERT_EQ(counts->first_tokens, 1);
    ASSERT_EQ(counts->released, 1);
    ASSERT_EQ(counts->aborted, 1);
    ASSERT_EQ(counts.use_count(), 1);
  }
}

}  // namespace
}  // namespace tokroute

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

}  // namespace
}  // namespace tokroute

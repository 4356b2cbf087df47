// What a whole decision costs, and how long the router's critical section is held.
//
//   route_benchmark             # verifies results, prints times and ratios
//   route_benchmark --check     # and fails if the section takes more than 2 us at 128 endpoints
//
// The section cannot be timed from outside, so the prefix producer is wrapped: the clock is read when Fill is done and
// when Record begins. What lies between is the lock, the decision and the booking.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "check_main.h"
#include "tokroute/tokroute.h"

namespace {

using Nanoseconds = std::chrono::nanoseconds;
using SteadyNow = std::chrono::steady_clock;

struct Upstream {
  std::string host;
  std::string_view name() const { return host; }
};

struct Times {
  std::vector<double> section_ns;
};

class TimedPrefix {
 public:
  using Produces = tokroute::ApproximatePrefix::Produces;
  using Own = tokroute::ApproximatePrefix::Own;
  using Receipt = tokroute::ApproximatePrefix::Receipt;
  using Workspace = tokroute::ApproximatePrefix::Workspace;
  TimedPrefix(std::shared_ptr<tokroute::PrefixIndex> index, Times* times) : inner_(std::move(index)), times_(times) {}
  void Fill(const tokroute::Request& r, const tokroute::FleetView& f, Workspace& w, Own own) noexcept {
    inner_.Fill(r, f, w, own);
    filled_ = SteadyNow::now();
  }
  Receipt Record(const tokroute::Request& r, const tokroute::FleetView& f, Workspace& w,
                 const tokroute::Booking& b) noexcept {
    times_->section_ns.push_back(static_cast<double>(Nanoseconds(SteadyNow::now() - filled_).count()));
    return inner_.Record(r, f, w, b);
  }
  void OnFirstToken(Receipt& receipt) noexcept { inner_.OnFirstToken(receipt); }
  void OnReleased(Receipt& receipt, const tokroute::Outcome& o) noexcept { inner_.OnReleased(receipt, o); }

 private:
  tokroute::ApproximatePrefix inner_;
  Times* times_;
  SteadyNow::time_point filled_;
};

std::vector<tokroute::TokenId> Prompt(std::uint64_t conversation, std::size_t tokens) {
  tokroute::Random random(conversation * 7919 + 1);
  std::vector<tokroute::TokenId> prompt(tokens);
  for (auto& token : prompt) token = random.Below(150'000);
  return prompt;
}

// A fleet whose index holds `blocks` blocks: 70k-token conversations, dealt out in turn, with a little load everywhere.
struct World {
  tokroute::Fleet<Upstream> fleet;
  std::vector<tokroute::EndpointId> ids;
  std::shared_ptr<tokroute::PrefixIndex> index;
  Times times;
  std::unique_ptr<tokroute::Router<Upstream>> router;
  std::vector<tokroute::Ticket<Upstream>> load;
  std::size_t conversations = 0;
  static constexpr std::size_t kConversationTokens = 70'016;

  World(std::uint32_t endpoints, std::int64_t blocks) {
    for (std::uint32_t i = 0; i < endpoints; ++i) ids.push_back(*fleet.Add({"endpoint-" + std::to_string(i)}));
    index = *tokroute::PrefixIndex::Create({.default_capacity_tokens = 1 << 30, .max_bytes = std::int64_t{8} << 30});
    tokroute::PromptKeys keys;
    while (index->Stats().distinct_blocks < blocks) {
      const auto prompt = Prompt(conversations, kConversationTokens);
      keys.Reset(index->key_options(), {.tokens = prompt});
      auto receipt = index->Record(ids[conversations % endpoints], keys, nullptr);
      index->OnReleased(receipt, false);
      ++conversations;
    }
    auto gate = tokroute::TauGate::Create({.peak_prefill_throughput = 20480, .max_ttft_penalty = std::chrono::seconds(14)});
    auto made = tokroute::MakeRouter(
        fleet, {.seed = 1}, tokroute::Producers(TimedPrefix(index, &times), tokroute::InFlightLoad()),
        tokroute::Named("prefill-bound", tokroute::Policy(tokroute::PrefixCacheAffinityFilter(*gate),
                                                          tokroute::TokenLoadScorer(), tokroute::MaxScorePicker<>())));
    router = std::make_unique<tokroute::Router<Upstream>>(*std::move(made));
    for (std::uint32_t i = 0; i < 2 * endpoints; ++i) {
      load.push_back(router->Route({.prompt_tokens = 100 + 37 * (i % 101)}).Take());
    }
  }
};

World& WorldOf(std::uint32_t endpoints) {
  static std::vector<std::pair<std::uint32_t, std::unique_ptr<World>>> worlds;
  for (auto& [n, world] : worlds) {
    if (n == endpoints) return *world;
  }
  worlds.clear();  // One at a time: each is hundreds of megabytes.
  worlds.emplace_back(endpoints, std::make_unique<World>(endpoints, 2'500'000));
  return *worlds.back().second;
}

// range(0): endpoints. range(1): prompt tokens. range(2): 1 warm (a stored conversation's beginning), 0 cold.
void BM_Route(benchmark::State& state) {
  World& world = WorldOf(static_cast<std::uint32_t>(state.range(0)));
  const auto tokens = static_cast<std::size_t>(state.range(1));
  const bool warm = state.range(2) == 1;
  std::vector<std::vector<tokroute::TokenId>> prompts;
  for (std::size_t i = 0; i < 64; ++i) {
    auto prompt = Prompt(warm ? i * 7 % world.conversations : world.conversations + 1000 + i, World::kConversationTokens);
    prompt.resize(tokens);
    prompts.push_back(std::move(prompt));
  }
  world.times.section_ns.clear();
  world.times.section_ns.reserve(1 << 20);
  std::size_t i = 0;
  for (auto _ : state) {
    if (world.times.section_ns.size() == world.times.section_ns.capacity()) world.times.section_ns.clear();
    auto ticket = world.router->Route({.tokens = prompts[i++ % prompts.size()]});
    if (!ticket.ok()) return state.SkipWithError("refused");
    const auto& decision = ticket->decision();
    const bool sticky = *decision.verdicts[0].reason == tokroute::kSticky;
    if (warm && (!sticky || decision.matched_tokens < static_cast<std::int64_t>(tokens) - 16)) {
      return state.SkipWithError("a warm prompt was not kept where it is cached");
    }
    if (!warm && decision.matched_tokens != 0) return state.SkipWithError("a cold prompt matched");
  }
  if (!world.router->Audit().ok()) return state.SkipWithError("audit");
  auto& section = world.times.section_ns;
  std::nth_element(section.begin(), section.begin() + static_cast<std::ptrdiff_t>(section.size() / 2), section.end());
  const double median = section[section.size() / 2];
  state.counters["section_ns_p50"] = median;
  state.counters["decisions/s"] = benchmark::Counter(static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  // The first, short trial runs are cold and say nothing.
  const bool trial = section.size() < 1000;
  tokroute::benchmarks::TheLimits().Require(trial || state.range(0) != 128 || median <= 2000,
                                            "the section takes more than 2 us at 128 endpoints", state);
}
BENCHMARK(BM_Route)
    ->ArgNames({"endpoints", "tokens", "warm"})
    ->ArgsProduct({{8}, {8192, 70'016}, {1, 0}})
    ->ArgsProduct({{128}, {8192, 70'016}, {1, 0}})
    ->ArgsProduct({{1024}, {32'768}, {1, 0}});

}  // namespace

int main(int argc, char** argv) { return tokroute::benchmarks::Main(argc, argv); }

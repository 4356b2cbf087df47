// Do threads get in each other's way? Two threads on one router (one lock, one prefix index) against two threads on two
// separate routers that share nothing, 128 endpoints, 8k-token prompts, half of them warm.
//
//   threads_benchmark            # verifies every decision, prints both rates and their ratio
//   threads_benchmark --check    # and fails below 0.75x
//
// Both are run in turn, in rounds, and the ratio is the median of the rounds': quiet machines only, it needs both cores.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"
#include "check_main.h"
#include "tokroute/tokroute.h"

namespace {

struct Upstream {
  std::string host;
  std::string_view name() const { return host; }
};
using Router = tokroute::Router<Upstream>;

constexpr std::uint32_t kEndpoints = 128;
constexpr std::size_t kPromptTokens = 8192, kPromptsPerThread = 256;
constexpr int kDecisionsPerRound = 20'000, kThreads = 2;

struct Side {
  tokroute::Fleet<Upstream> fleet;
  std::unique_ptr<Router> router;
  Side() {
    for (std::uint32_t i = 0; i < kEndpoints; ++i) (void)fleet.Add({"endpoint-" + std::to_string(i)});
    router = std::make_unique<Router>(
        *tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = std::chrono::seconds(14)}));
  }
};

std::vector<std::vector<tokroute::TokenId>> Prompts(std::uint64_t thread) {
  tokroute::Random random(thread + 1);
  std::vector<std::vector<tokroute::TokenId>> prompts(kPromptsPerThread);
  for (auto& prompt : prompts) {
    prompt.resize(kPromptTokens);
    for (auto& token : prompt) token = random.Below(150'000);
  }
  return prompts;
}

// Half of the decisions repeat a prompt as it is (warm), half with another first token (cold).
bool Work(Router& router, std::vector<std::vector<tokroute::TokenId>>& prompts, std::uint64_t salt) {
  for (int i = 0; i < kDecisionsPerRound; ++i) {
    auto& prompt = prompts[static_cast<std::size_t>(i) % prompts.size()];
    const tokroute::TokenId first = prompt[0];
    if (i % 2 == 1) prompt[0] = static_cast<tokroute::TokenId>(1'000'000 + salt * 1'000'003 + static_cast<std::uint64_t>(i));
    auto ticket = router.Route({.tokens = prompt});
    prompt[0] = first;
    if (!ticket.ok()) return false;
    ticket->FirstToken();
    ticket->Finish({.output_tokens = 1});
  }
  return true;
}

using tokroute::benchmarks::Median;

void BM_TwoThreads(benchmark::State& state) {
  Side shared, own[kThreads];
  std::vector<std::vector<tokroute::TokenId>> prompts[kThreads] = {Prompts(0), Prompts(1)};
  std::uint64_t salt = 0;
  std::atomic<bool> good{true};
  const auto run = [&](bool one_router) {
    std::vector<std::thread> threads;
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t, mine = salt++] {
        Router& router = one_router ? *shared.router : *own[t].router;
        ++ready;
        while (!go.load(std::memory_order_acquire)) tokroute::internal::PauseBriefly();
        if (!Work(router, prompts[t], mine)) good = false;
      });
    }
    while (ready.load() < kThreads) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    go.store(true, std::memory_order_release);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    return kThreads * kDecisionsPerRound / elapsed.count();
  };
  run(true), run(false);  // Warm up.
  std::vector<double> together, apart, ratios;
  for (auto _ : state) {
    together.push_back(run(true));
    apart.push_back(run(false));
    ratios.push_back(together.back() / apart.back());
  }
  if (!good || !shared.router->Audit().ok()) return state.SkipWithError("a decision was refused, or the audit failed");
  state.counters["one_router_per_s"] = Median(together);
  state.counters["two_routers_per_s"] = Median(apart);
  state.counters["ratio"] = Median(ratios);
  tokroute::benchmarks::TheLimits().Require(Median(ratios) >= 0.75, "one router is slower on two threads than it may be",
                                            state);
}
BENCHMARK(BM_TwoThreads)->Iterations(9)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace

int main(int argc, char** argv) { return tokroute::benchmarks::Main(argc, argv); }

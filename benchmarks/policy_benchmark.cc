// Does composing cost anything? A policy of the library's parts against the same decision written by hand: one function,
// the scoring and the arg-max fused into one loop, with equal outputs (row, reason, loads, margin, best, runner-up, ties).
//
//   policy_benchmark            # verifies that both decide alike, then prints each pair's times and their ratio
//   policy_benchmark --check    # and fails above 1.15x (at 8 endpoints: or + 25 ns), for erased parts above 1.5x
//
// Both are timed in turn, in many short rounds, and the ratio is the median of the rounds' ratios: the machine's speed
// drifts by more than what is measured here.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "check_main.h"
#include "tokroute/tokroute.h"

namespace {

using tokroute::Row;
using tokroute::internal::DecideInput;

struct Result {
  Row row = 0;
  const tokroute::ReasonTag* reason = nullptr;
  std::int64_t margin = 0, warm = 0, cold = 0;
  double best = 0, runner_up = 0;
  std::uint32_t tied = 0, kept = 0;
};

struct World {
  std::uint32_t endpoints;
  std::vector<Row> rows;
  std::vector<std::int64_t> in_flight, active, matched;
  std::vector<double> weighted, rate;
  tokroute::internal::ColumnLayout layout;
  tokroute::internal::ColumnTable table;
  tokroute::internal::Survivors survivors;
  std::vector<Row> buffers;
  std::vector<double> totals;

  explicit World(std::uint32_t n)
      : endpoints(n),
        in_flight(tokroute::kMaxEndpoints),
        active(tokroute::kMaxEndpoints),
        matched(tokroute::kMaxEndpoints),
        weighted(tokroute::kMaxEndpoints),
        rate(tokroute::kMaxEndpoints),
        buffers(3 * tokroute::kMaxEndpoints),
        totals(tokroute::kMaxEndpoints) {
    for (Row row = 0; row < n; ++row) rows.push_back(row);
    Add<tokroute::UncachedTokensInFlight>(in_flight.data());
    Add<tokroute::ActiveRequests>(active.data());
    Add<tokroute::MatchedTokens>(matched.data());
    Add<tokroute::WeightedMatchedTokens>(weighted.data());
    Add<tokroute::PeakPrefillThroughput>(rate.data());
    table.width = n;
    for (std::uint32_t i = 0; i < 3; ++i) survivors.buffers[i] = &buffers[std::size_t{i} * tokroute::kMaxEndpoints];
  }
  template <class S>
  void Add(void* column) {
    layout.columns[layout.count] = tokroute::internal::InfoOf<S>();
    table.columns[layout.count++] = column;
  }

  // 0: warm and sticky; 1: warm, gate open; 2: nobody warm.
  void Situation(int kind, std::int64_t prompt) {
    tokroute::Random random(endpoints * 31 + static_cast<std::uint32_t>(kind));
    for (Row row : rows) {
      in_flight[row] = random.Below(50'000);
      active[row] = 1 + random.Below(40);
      matched[row] = kind != 2 && row % 8 == 3 ? prompt - prompt / 10 : (row % 4 == 0 ? prompt / 4 : 0);
      weighted[row] = static_cast<double>(matched[row]);
      if (kind == 1 && row % 8 == 3) in_flight[row] += 400'000;
    }
  }
};

constexpr std::int64_t kTau = 286'720;

float Clean(float raw) {
  const float score = raw > 0.0F ? raw : 0.0F;
  return score < 1.0F ? score : 1.0F;
}

// The same decision, written out. kTwo: token load x 2 plus active requests x 1.
template <bool kTwo>
[[gnu::noinline]] Result ByHand(World& w, std::int64_t prompt, double threshold, std::uint64_t seed, std::uint64_t decision) {
  Result out;
  const Row* rows = w.rows.data();
  auto count = static_cast<std::uint32_t>(w.rows.size());
  const std::int64_t* in_flight = w.in_flight.data();
  const std::int64_t* matched = w.matched.data();
  const std::int64_t* active = w.active.data();
  const double* weighted = w.weighted.data();
  const double* rate = w.rate.data();
  const double least_warm = tokroute::internal::LeastReaching(threshold, static_cast<double>(prompt));
  constexpr std::int64_t kMost = tokroute::internal::kInt64Max;
  std::int64_t least_in_cold = kMost, least_in_warm = kMost;
  double best_match = 0;
  bool mixed = false;
  Row* warm = w.buffers.data();
  std::uint32_t warm_count = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Row row = rows[i];
    const bool is_warm = weighted[row] >= least_warm;
    warm[warm_count] = row;
    warm_count += is_warm ? 1U : 0U;
    least_in_cold = std::min(least_in_cold, is_warm ? kMost : in_flight[row]);
    least_in_warm = std::min(least_in_warm, is_warm ? in_flight[row] : kMost);
    best_match = weighted[row] > best_match ? weighted[row] : best_match;
    mixed |= rate[row] != rate[rows[0]];
  }
  if (mixed) std::abort();
  if (warm_count == 0) {
    out.reason = &tokroute::kNobodyWarm;
    out.warm = static_cast<std::int64_t>(best_match);
    out.cold = prompt;
    out.margin = static_cast<std::int64_t>(least_warm) - out.warm + (static_cast<double>(static_cast<std::int64_t>(least_warm)) < least_warm ? 1 : 0);
  } else if (warm_count == count) {
    out.reason = &tokroute::kAllWarm;
  } else {
    out.warm = least_in_warm, out.cold = least_in_cold;
    out.margin = least_in_warm - least_in_cold - kTau;
    out.reason = out.margin > 0 ? &tokroute::kGateOpen : &tokroute::kSticky;
    if (out.margin <= 0) rows = warm, count = warm_count;
  }
  out.kept = count;
  std::int64_t least_load = tokroute::internal::kInt64Max, most = 1;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Row row = rows[i];
    least_load = std::min(least_load, in_flight[row] + std::max<std::int64_t>(prompt - matched[row], 0));
    if constexpr (kTwo) most = std::max(most, active[row]);
  }
  double best = 0, runner_up = 0;
  std::uint32_t at = 0, tied = 0;
  bool have_runner_up = false;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Row row = rows[i];
    const std::int64_t load = in_flight[row] + std::max<std::int64_t>(prompt - matched[row], 0);
    double total = (kTwo ? 2.0 : 1.0) * static_cast<double>(Clean(static_cast<float>(least_load + 1) / static_cast<float>(load + 1)));
    if constexpr (kTwo) {
      total += static_cast<double>(active[row] <= 0 ? 1.0F : Clean(static_cast<float>(most - active[row]) / static_cast<float>(most)));
    }
    w.totals[i] = total;
    if (tied == 0) {
      best = runner_up = total, tied = 1;
    } else if (total > best) {
      runner_up = best, have_runner_up = true, best = total, at = i, tied = 1;
    } else if (total == best) {
      ++tied;
    } else if (!have_runner_up || total > runner_up) {
      runner_up = total, have_runner_up = true;
    }
  }
  out.best = best, out.tied = tied;
  out.runner_up = tied > 1 || !have_runner_up ? best : runner_up;
  if (tied > 1) {
    auto random = tokroute::Random::For(seed, decision, tokroute::internal::kPickerStage);
    std::uint32_t skip = random.Below(tied);
    for (at = 0;; ++at) {
      if (w.totals[at] == best && skip-- == 0) break;
    }
  }
  out.row = rows[at];
  return out;
}

// What a router does with a policy: one virtual call that fills a Decision.
[[gnu::noinline]] Row Composed(World& w, const tokroute::internal::PolicyBase& policy, const tokroute::Request& request,
                               std::uint64_t seed, std::uint64_t number, tokroute::Decision& decision) {
  w.survivors.rows = w.rows.data();
  w.survivors.count = static_cast<std::uint32_t>(w.rows.size());
  DecideInput input(request, w.table, w.survivors, w.totals.data());
  input.seed = seed;
  input.decision = number;
  policy.Decide(input, decision);
  return input.targets[0];
}

Result ResultOf(Row row, const tokroute::Decision& decision) {
  const tokroute::FilterVerdict& v = decision.verdicts[0];
  return {row, v.reason, v.margin, v.facts[0], v.facts[1],
          decision.choice.best, decision.choice.runner_up, decision.choice.tied, v.kept};
}

bool Same(const Result& a, const Result& b) {
  return a.row == b.row && *a.reason == *b.reason && a.margin == b.margin && a.warm == b.warm && a.cold == b.cold &&
         a.best == b.best && a.runner_up == b.runner_up && a.tied == b.tied && a.kept == b.kept;
}

enum class Kind { kComposed, kErased };

std::shared_ptr<tokroute::internal::PolicyBase> MakeBound(Kind kind, bool two, const World& world) {
  const auto gate = *tokroute::TauGate::Create({.peak_prefill_throughput = 20480, .max_ttft_penalty = std::chrono::seconds(14)});
  const tokroute::PrefixCacheAffinityFilter filter(gate);
  std::shared_ptr<tokroute::internal::PolicyBase> policy;
  if (kind == Kind::kErased) {
    tokroute::FilterChain filters;
    filters.Add(filter);
    tokroute::WeightedSum scorers;
    scorers.Add(tokroute::TokenLoadScorer(), two ? 2 : 1);
    if (two) scorers.Add(tokroute::ActiveRequestScorer(), 1);
    policy = tokroute::internal::MakePolicy(
        "erased", tokroute::Policy(std::move(filters), std::move(scorers), tokroute::AnyPicker(tokroute::MaxScorePicker<>())));
  } else if (two) {
    policy = tokroute::internal::MakePolicy(
        "two", tokroute::Policy(filter, tokroute::Weighted(tokroute::TokenLoadScorer(), 2),
                                tokroute::ActiveRequestScorer(), tokroute::MaxScorePicker<>()));
  } else {
    policy = tokroute::internal::MakePolicy(
        "one", tokroute::Policy(filter, tokroute::TokenLoadScorer(), tokroute::MaxScorePicker<>()));
  }
  if (!policy->Bind(world.layout).ok()) return nullptr;
  return policy;
}

using tokroute::benchmarks::Median;

// Args: endpoints, situation, scorers, erased.
void BM_Policy(benchmark::State& state) {
  const auto endpoints = static_cast<std::uint32_t>(state.range(0));
  const auto situation = static_cast<int>(state.range(1));
  const bool two = state.range(2) == 2;
  const Kind kind = state.range(3) == 1 ? Kind::kErased : Kind::kComposed;
  World world(endpoints);
  constexpr std::int64_t kPrompt = 8'000;
  world.Situation(situation, kPrompt);
  const auto policy = MakeBound(kind, two, world);
  if (policy == nullptr) return state.SkipWithError("bind");
  tokroute::Decision decision;
  tokroute::Request request;
  request.prompt_tokens = kPrompt;
  const auto by_hand = two ? &ByHand<true> : &ByHand<false>;
  for (std::uint64_t number = 1; number <= 64; ++number) {
    world.in_flight[number % endpoints] += static_cast<std::int64_t>(number % 3);
    const Row row = Composed(world, *policy, request, 1, number, decision);
    const Result by_parts = ResultOf(row, decision);
    if (!Same(by_hand(world, kPrompt, 0.8, 1, number), by_parts)) {
      return state.SkipWithError("composed and hand-written decisions differ");
    }
  }
  const int inner = std::max(8, static_cast<int>(20'000 / (endpoints + 20)));
  std::vector<double> hand_ns, composed_ns, ratios;
  std::uint64_t number = 0;
  const auto time = [&](auto&& call) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < inner; ++i) benchmark::DoNotOptimize(call(++number));
    return static_cast<double>((std::chrono::steady_clock::now() - start).count()) / inner;
  };
  for (auto _ : state) {
    const double hand = time([&](std::uint64_t n) { return by_hand(world, kPrompt, 0.8, 1, n); });
    const double composed = time([&](std::uint64_t n) { return Composed(world, *policy, request, 1, n, decision); });
    hand_ns.push_back(hand), composed_ns.push_back(composed), ratios.push_back(composed / hand);
  }
  const double hand = Median(hand_ns), composed = Median(composed_ns), ratio = Median(ratios);
  state.counters["hand_ns"] = hand;
  state.counters["composed_ns"] = composed;
  state.counters["ratio"] = ratio;
  const bool held = kind == Kind::kErased ? ratio <= 1.5 : ratio <= 1.15 || (endpoints == 8 && composed - hand <= 25);
  tokroute::benchmarks::TheLimits().Require(held, "composed parts are slower than they may be", state);
}
BENCHMARK(BM_Policy)
    ->ArgNames({"endpoints", "situation", "scorers", "erased"})
    ->ArgsProduct({{8, 128, 1024}, {0, 1, 2}, {1, 2}, {0}})
    ->ArgsProduct({{128}, {0, 1, 2}, {1, 2}, {1}})
    ->Iterations(400);

}  // namespace

int main(int argc, char** argv) { return tokroute::benchmarks::Main(argc, argv); }

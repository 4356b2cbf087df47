// Prints every bit of some thousands of decisions: each kind of policy, ties, weights, weighted random, exploration,
// gates with fractional rates, retries and aborts. tests/packaging/determinism.sh compares what differently compiled
// builds of it print. Not a golden file: what is printed may change with the library, only not with the compiler.
#include <bit>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokroute/tokroute.h"

namespace {

struct Upstream {
  std::string host;
  double rate = 0, share = 1;
  std::string_view name() const { return host; }
  double peak_prefill_throughput() const { return rate; }
  double weight() const { return share; }
};

// Shares of the endpoints' own, by which the library has no scorer.
struct ShareScorer {
  static constexpr std::string_view kName = "share-scorer";
  using Consumes = tokroute::Signals<tokroute::EndpointWeight>;
  auto Score(const tokroute::Request&, tokroute::CandidatesFor<Consumes> candidates) const noexcept {
    const auto weight = candidates.Column<tokroute::EndpointWeight>();
    double most = 0;
    for (tokroute::Row row : candidates) most = weight[row] > most ? weight[row] : most;
    return [=](tokroute::Row row) { return static_cast<float>(weight[row] / most); };
  }
};

std::uint64_t Bits(double x) { return std::bit_cast<std::uint64_t>(x); }

void Print(const char* what, std::uint32_t i, const tokroute::Decision& d) {
  std::printf("%s %" PRIu32 " #%" PRIu64 " ->", what, i, d.number);
  for (const tokroute::EndpointId id : d.targets()) std::printf(" %" PRIu32 ".%" PRIu32, id.slot, id.incarnation);
  std::printf(" of %" PRIu32 "/%" PRIu32 " best %016" PRIx64 " next %016" PRIx64 " tied %" PRIu32 " matched %" PRId64,
              d.survivors, d.candidates, Bits(d.choice.best), Bits(d.choice.runner_up), d.choice.tied,
              d.matched_tokens);
  for (const tokroute::FilterVerdict& v : d.filter_verdicts()) {
    std::printf(" %s %" PRId64 " (%" PRId64 ", %" PRId64 ") %" PRIu32, std::string(v.reason->name).c_str(), v.margin,
                v.facts[0], v.facts[1], v.kept);
  }
  std::printf("\n");
}

void Serve(const char* what, tokroute::Fleet<Upstream>& fleet, absl::StatusOr<tokroute::Router<Upstream>> router) {
  if (!router.ok()) {
    std::printf("%s: %s\n", what, router.status().ToString().c_str());
    return;
  }
  tokroute::Random random(99);
  std::vector<tokroute::TokenId> prompt(4096);
  std::vector<tokroute::Ticket<Upstream>> open(24);
  for (std::uint32_t i = 0; i < 1000; ++i) {
    const std::uint32_t conversation = random.Below(40), length = 1 + random.Below(3000);
    for (std::uint32_t t = 0; t < length; ++t) prompt[t] = conversation * 5000 + t;
    const tokroute::Request request{.tokens = std::span(prompt).first(length),
                                    .model = "m",
                                    .max_output_tokens = random.Below(4) == 0 ? -1 : random.Below(900)};
    tokroute::Trace trace;
    auto routed = router->Route(request, {.trace = i % 8 == 0 ? &trace : nullptr});
    if (!routed.ok()) {
      std::printf("%s %" PRIu32 " refused: %s\n", what, i, routed.refusal().ToString().c_str());
      continue;
    }
    Print(what, i, routed->decision());
    for (const tokroute::Trace::Score& score : trace.scores) {
      std::printf("  %" PRIu32 " total %016" PRIx64, score.endpoint.slot, Bits(score.total));
      for (const float raw : score.raw) std::printf(" %08" PRIx32, std::bit_cast<std::uint32_t>(raw));
      std::printf("\n");
    }
    if (i % 50 == 0) std::printf("  %s\n", routed->decision().ToString().c_str());
    tokroute::Ticket<Upstream>& ticket = open[random.Below(24)];
    const std::uint32_t end = random.Below(8);
    if (end == 0 && !ticket.empty() && router->Reroute(ticket, request)) Print("  rerouted", i, ticket.decision());
    if (end != 1) ticket.Finish({.output_tokens = random.Below(500), .aborted = end == 2});
    ticket = std::move(routed).Take();
    if (random.Below(3) != 0) ticket.FirstToken();
    if (i == 400) (void)fleet.Drain(fleet.Find("e3"));
    if (i == 600) (void)fleet.Resume(fleet.Find("e3"));
  }
  for (const tokroute::EndpointId id : fleet.Ids()) {
    std::printf("%s ends %" PRIu32 ": %" PRId64 " tokens, %" PRId64 " requests, %" PRId64 " output\n", what, id.slot,
                router->Read<tokroute::UncachedTokensInFlight>(id).value_or(-1),
                router->Read<tokroute::ActiveRequests>(id).value_or(-1),
                router->Read<tokroute::OutputTokensInFlight>(id).value_or(-1));
  }
  if (const absl::Status audit = router->Audit(); !audit.ok()) std::printf("%s\n", audit.ToString().c_str());
}

}  // namespace

int main() {
  using namespace std::chrono_literals;
  using namespace tokroute;
  Fleet<Upstream> like, mixed;
  for (int i = 0; i < 9; ++i) {
    const std::string name = "e" + std::to_string(i);
    if (!like.Add({name, 0, 1.0 / (1 + i)}).ok()) return 2;
    if (!mixed.Add({name, 1000.0 / 3 + i * 177.7, 0.1 * (1 + i % 4)}).ok()) return 2;
  }
  const auto producers = [](InFlightLoadOptions load = {}) {
    return Producers(ApproximatePrefix(*PrefixIndex::Create({.default_capacity_tokens = 40'000})), InFlightLoad(load));
  };
  const PrefixCacheAffinityFilter filter = *PrefixCacheAffinityFilter::Create(
      {.gate = {.peak_prefill_throughput = 1234.56789, .max_ttft_penalty = 777ms}, .affinity_threshold = 0.6});

  for (const bool same : {true, false}) {
    Fleet<Upstream>& fleet = same ? like : mixed;
    Serve("prefill-bound", fleet,
          PrefillBound(fleet, {.peak_prefill_throughput = 2047.99, .max_ttft_penalty = 1001ms, .seed = 1}));
    Serve("prefill-bound-absolute", fleet,
          PrefillBound(fleet, {.peak_prefill_throughput = 1e4 / 7,
                               .gate_rule = GateRule::kOnlyColder,
                               .affinity_threshold = 0.3,
                               .seed = 2,
                               .token_load = {.form = TokenLoadForm::kAbsolute, .ceiling_tokens = 9'999},
                               .in_flight_load = {.count_estimated_output = true, .output = {.output_ratio = 0.7}},
                               .picker = {.max_targets = 4}}));
    Serve("decode-bound", fleet,
          DecodeBound(fleet, {.peak_prefill_throughput = 333.3,
                              .max_ttft_penalty = 1500ms,
                              .exploration_probability = 0.15,
                              .seed = 3,
                              .active_request = {.idle_threshold = 1, .max_busy_score = 0.7}}));
    Serve("least-outstanding", fleet, LeastOutstanding(fleet, {.seed = 4}));
    Serve("round-robin", fleet, RoundRobin(fleet, {.seed = 5, .picker = {.max_targets = 3}}));
    Serve("random", fleet, UniformRandom(fleet, {.seed = 6, .picker = {.max_targets = 3}}));
    Serve("weighted-random", fleet,
          MakeRouter(fleet, {.seed = 7}, producers(),
                     Named("w", Policy(filter, Weighted(TokenLoadScorer(), 0.3), Weighted(ActiveRequestScorer(), 1.7),
                                       Weighted(ShareScorer(), 1.0 / 3), WeightedRandomPicker({.max_targets = 3})))));
    Serve(
        "ties-lowest-load", fleet,
        MakeRouter(fleet, {.seed = 8}, producers(),
                   Named("t", Policy(Weighted(ActiveRequestScorer(), 0.1), MaxScorePicker<TieBreak::kLowestLoad>()))));
    Serve("ties-round-robin", fleet,
          MakeRouter(fleet, {.seed = 9}, producers(),
                     Named("t", Policy(Weighted(ShareScorer(), 0.7), MaxScorePicker<TieBreak::kRoundRobin>()))));
    FilterChain chain;
    chain.Add(filter);
    WeightedSum sum;
    sum.Add(TokenLoadScorer(), 0.3).Add(ActiveRequestScorer(), 1.7).Add(ShareScorer(), 1.0 / 3);
    Serve("erased", fleet,
          MakeRouter(fleet, {.seed = 7}, producers({.charge = Charge::kUncached}),
                     Named("e", Policy(std::move(chain), std::move(sum), AnyPicker(WeightedRandomPicker())))));
  }
  return 0;
}

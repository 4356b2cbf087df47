// PrefixCacheAffinityFilter: stay where the prefix is cached, until that endpoint's lead in uncached tokens in flight is
// no longer worth it. The first half of every bottleneck-matched policy.
//
//   auto gate = tokroute::TauGate::Create({.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s});
//   tokroute::Policy policy(tokroute::PrefixCacheAffinityFilter(*gate), tokroute::TokenLoadScorer{},
//                           tokroute::MaxScorePicker{});
//
// Do not follow it with a prefix scorer: an open gate must be able to move the request, so what comes after ranks by
// load alone.
#ifndef TOKROUTE_FILTER_PREFIX_CACHE_AFFINITY_FILTER_H_
#define TOKROUTE_FILTER_PREFIX_CACHE_AFFINITY_FILTER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tokroute/concepts.h"
#include "tokroute/gate/tau_gate.h"
#include "tokroute/internal/exact.h"

namespace tokroute {
inline namespace v0 {

struct PrefixCacheAffinityOptions {
  TauGateOptions gate = {};
  // Warm is affinity >= this, inclusive. At most 1, not NaN; 0 or below turns the filter off. Default: llm-d's. Prompts
  // with pictures rarely cache more than 0.7: use 0.6 there.
  double affinity_threshold = 0.8;
  // Share of requests that skip the filter, to seed other caches. 0..1. Where they go is the scorer's to say: one that counts
  // the request's own uncached tokens (token load) leaves them on an idle warm endpoint.
  double exploration_probability = 0;
};

// Per request, over the candidates only, on integer tokens. W and C: least uncached tokens in flight among the warm and
// among the cold; affinity: weighted matched tokens / prompt tokens.
//
//   situation                                            reason           kept       margin (tokens)
//   threshold <= 0, or at most one candidate             not_applicable   all        0
//   the exploration draw hit                             exploration      all        0
//   nobody warm                                          nobody_warm      all        tokens the best match lacks; facts:
//                                                                                    best match, prompt
//   all warm                                             all_warm         all        0
//   always sticky                                        gate_off         the warm   0; facts: W, C
//   W - C <= tau                                         sticky           the warm   W - C - tau, <= 0; facts: W, C
//   W - C > tau                                          gate_open        all        W - C - tau, > 0; facts: W, C
//   GateRule::kOnlyColder: W - C >= tau                  gate_open        the warm and the cold ones at least tau below W;
//                                                                         margin W - C - tau, >= 0; facts: W, C
//
// Endpoints of different peak_prefill_throughput (their traits say) are compared in time: each minimum is the least
// tokens / rate, and the gate opens at W/R_w - C/R_c > T_max, in exact integers; the margin is then in tokens of the
// warm one's rate. An endpoint that never got a request has 0 in flight.
class PrefixCacheAffinityFilter {
 public:
  static constexpr std::string_view kName = "prefix-cache-affinity-filter";
  using Consumes = Signals<WeightedMatchedTokens, UncachedTokensInFlight, PeakPrefillThroughput>;

  // kInvalidArgument naming field, value and range.
  static absl::StatusOr<PrefixCacheAffinityFilter> Create(const PrefixCacheAffinityOptions& options);
  // With the default threshold and no exploration.
  explicit PrefixCacheAffinityFilter(const TauGate& gate) : gate_(gate) {}

  FilterVerdict Narrow(const Request& request, CandidatesFor<Consumes> candidates, Stage& stage) const noexcept;
  std::string Explain(const FilterVerdict& verdict) const;

  const TauGate& gate() const noexcept { return gate_; }
  double affinity_threshold() const noexcept { return threshold_; }

 private:
  FilterVerdict NarrowInTime(CandidatesFor<Consumes> candidates, double least_warm, Selection warm) const noexcept;
  FilterVerdict OnlyColder(CandidatesFor<Consumes> candidates, double least_warm, FilterVerdict verdict,
                           std::int64_t warm_rate) const noexcept;
  bool InTime(const FilterVerdict& verdict) const noexcept;

  TauGate gate_;
  double threshold_ = 0.8;
  double exploration_ = 0;
};

inline FilterVerdict PrefixCacheAffinityFilter::Narrow(const Request& request, CandidatesFor<Consumes> candidates,
                                                       Stage& stage) const noexcept {
  if (threshold_ <= 0 || candidates.size() <= 1) return {.reason = &kNotApplicable};
  if (exploration_ > 0 && stage.random.Unit() < exploration_) return {.reason = &kExploration};
  const std::int64_t prompt = PromptTokens(request);
  if (prompt <= 0) return {.reason = &kNobodyWarm};

  const double* matched = candidates.Column<WeightedMatchedTokens>().data();
  const std::int64_t* in_flight = candidates.Column<UncachedTokensInFlight>().data();
  const double* rate = candidates.Column<PeakPrefillThroughput>().data();
  const double least_warm = internal::LeastReaching(threshold_, static_cast<double>(prompt));
  const double first_rate = rate[*candidates.begin()];
  // One pass: the warm rows, both minima, the best match, and whether all rates are alike.
  std::int64_t least_in_cold = internal::kInt64Max, least_in_warm = internal::kInt64Max;
  double best = 0;
  bool mixed = false;
  const Selection warm = candidates.Select([&](Row row) {
    const bool is_warm = matched[row] >= least_warm;
    // Two minima in registers; one chosen by index would go through memory, five cycles a row.
    const std::int64_t load = in_flight[row];
    const std::int64_t as_cold = is_warm ? internal::kInt64Max : load, as_warm = is_warm ? load : internal::kInt64Max;
    least_in_cold = as_cold < least_in_cold ? as_cold : least_in_cold;
    least_in_warm = as_warm < least_in_warm ? as_warm : least_in_warm;
    best = matched[row] > best ? matched[row] : best;
    mixed |= rate[row] != first_rate;
    return is_warm;
  });
  if (warm.count == 0) {
    const auto best_tokens = static_cast<std::int64_t>(best);
    return {.reason = &kNobodyWarm,
            .margin = static_cast<std::int64_t>(least_warm) + (static_cast<double>(static_cast<std::int64_t>(least_warm)) < least_warm ? 1 : 0) - best_tokens,
            .facts = {best_tokens, prompt}};
  }
  if (warm.count == candidates.size()) return {.reason = &kAllWarm};
  if (gate_.always_sticky()) {
    candidates.Keep(warm);
    return {.reason = &kGateOff, .facts = {least_in_warm, least_in_cold}};
  }
  if (mixed || first_rate > 0) return NarrowInTime(candidates, least_warm, warm);
  const GateLoads loads{.warm_tokens = least_in_warm, .cold_tokens = least_in_cold};
  const std::int64_t lead = loads.warm_tokens - loads.cold_tokens;
  // lead >= -2^63 + 1 and tau >= 0: saturate rather than overflow in the margin.
  const std::int64_t tau = gate_.tau_tokens();
  FilterVerdict verdict{.margin = lead >= 0 || tau <= internal::kInt64Max + lead ? lead - tau : -internal::kInt64Max,
                        .facts = {loads.warm_tokens, loads.cold_tokens}};
  if (gate_.rule() == GateRule::kOnlyColder) return OnlyColder(candidates, least_warm, verdict, 0);
  if (gate_.Breaks(loads)) {
    verdict.reason = &kGateOpen;
    return verdict;
  }
  candidates.Keep(warm);
  verdict.reason = &kSticky;
  return verdict;
}

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_FILTER_PREFIX_CACHE_AFFINITY_FILTER_H_

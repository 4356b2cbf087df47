#include "tokroute/filter/prefix_cache_affinity_filter.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "tokroute/internal/option_error.h"
#include "internal/text.h"

namespace tokroute {
inline namespace v0 {

using internal::kInt64Max;

absl::StatusOr<PrefixCacheAffinityFilter> PrefixCacheAffinityFilter::Create(const PrefixCacheAffinityOptions& options) {
  absl::StatusOr<TauGate> gate = TauGate::Create(options.gate);
  if (!gate.ok()) return gate.status();
  if (!(options.affinity_threshold <= 1)) {  // Also catches NaN.
    return internal::OptionError("PrefixCacheAffinityOptions.affinity_threshold", "<= 1 (0 or below: filter off)",
                                 options.affinity_threshold);
  }
  if (!(options.exploration_probability >= 0 && options.exploration_probability <= 1)) {
    return internal::OptionError("PrefixCacheAffinityOptions.exploration_probability", "0 .. 1",
                                 options.exploration_probability);
  }
  PrefixCacheAffinityFilter filter(*gate);
  filter.threshold_ = options.affinity_threshold;
  filter.exploration_ = options.exploration_probability;
  return filter;
}

FilterVerdict PrefixCacheAffinityFilter::NarrowInTime(CandidatesFor<Consumes> candidates, double least_warm,
                                                      Selection warm) const noexcept {
  const auto matched = candidates.Column<WeightedMatchedTokens>();
  const auto in_flight = candidates.Column<UncachedTokensInFlight>();
  const auto rates = candidates.Column<PeakPrefillThroughput>();
  struct Least {
    std::int64_t tokens = 0, rate = 0;  // Rate 0: none yet.
  } side[2];                            // Cold, warm: each minimum taken in time.
  for (Row row : candidates) {
    Least& least = side[matched[row] >= least_warm ? 1 : 0];
    const std::int64_t rate = gate_.FixedRate(rates[row]);
    if (least.rate == 0 || TauGate::Sooner(in_flight[row], rate, least.tokens, least.rate)) {
      least = {in_flight[row], rate};
    }
  }
  const Least& w = side[1];
  const Least& c = side[0];
  FilterVerdict verdict{.margin = gate_.MarginInTime(w.tokens, w.rate, c.tokens, c.rate), .facts = {w.tokens, c.tokens}};
  if (gate_.rule() == GateRule::kOnlyColder) return OnlyColder(candidates, least_warm, verdict, w.rate);
  if (gate_.BreaksInTime(w.tokens, w.rate, c.tokens, c.rate)) {
    verdict.reason = &kGateOpen;
    return verdict;
  }
  candidates.Keep(warm);
  verdict.reason = &kSticky;
  return verdict;
}

// Cold endpoints at least tau (inclusive) below W join the warm ones. warm_rate 0: all rates are the gate's own.
FilterVerdict PrefixCacheAffinityFilter::OnlyColder(CandidatesFor<Consumes> candidates, double least_warm,
                                                    FilterVerdict verdict, std::int64_t warm_rate) const noexcept {
  const auto matched = candidates.Column<WeightedMatchedTokens>();
  const auto in_flight = candidates.Column<UncachedTokensInFlight>();
  const auto rates = candidates.Column<PeakPrefillThroughput>();
  const std::int64_t warm_tokens = verdict.facts[0];
  bool joined = false;
  const Selection kept = candidates.Select([&](Row row) {
    if (matched[row] >= least_warm) return true;
    const bool colder =
        warm_rate == 0 ? warm_tokens - in_flight[row] >= gate_.tau_tokens()
                       : gate_.MarginInTime(warm_tokens, warm_rate, in_flight[row], gate_.FixedRate(rates[row])) >= 0;
    joined |= colder;
    return colder;
  });
  candidates.Keep(kept);
  verdict.reason = joined ? &kGateOpen : &kSticky;
  return verdict;
}

// A verdict over endpoints of different rates: its margin is not the lead less the gate's tau.
bool PrefixCacheAffinityFilter::InTime(const FilterVerdict& verdict) const noexcept {
  const internal::Int128 lead = static_cast<internal::Int128>(verdict.facts[0]) - verdict.facts[1];
  return verdict.margin != -kInt64Max && lead - verdict.margin != gate_.tau_tokens();
}

std::string PrefixCacheAffinityFilter::Explain(const FilterVerdict& verdict) const {
  const ReasonTag& reason = *verdict.reason;
  if (reason == kNobodyWarm) {
    if (verdict.facts[1] == 0) return "the prompt has no tokens to match";
    return absl::StrCat("no warm endpoint: the best match is ", internal::Thousands(verdict.facts[0]), " of ",
                        internal::Thousands(verdict.facts[1]), " prompt tokens, ", internal::Thousands(verdict.margin),
                        " short of the threshold ", threshold_);
  }
  if (reason == kAllWarm) return absl::StrCat("every candidate caches at least ", threshold_, " of the prompt");
  if (reason == kExploration) return "skipped by the draw";
  if (reason == kNotApplicable) {
    return threshold_ <= 0 ? "the filter is off (threshold 0 or below)" : "one candidate: nothing to narrow";
  }
  const std::string loads = absl::StrCat("the least loaded warm endpoint has ", internal::Thousands(verdict.facts[0]),
                                         " uncached tokens in flight, the least loaded cold one ",
                                         internal::Thousands(verdict.facts[1]));
  if (reason == kGateOff) return absl::StrCat("always sticky: ", loads);
  const std::string margin = internal::Thousands(verdict.margin < 0 ? -verdict.margin : verdict.margin);
  if (gate_.rule() == GateRule::kRelease && InTime(verdict)) {
    const std::string penalty = absl::StrCat(internal::Thousands(gate_.max_ttft_penalty().count()), " ms");
    if (reason == kGateOpen) {
      return absl::StrCat(loads, "; at their peak throughputs that lead exceeds ", penalty, " by ", margin,
                          " tokens of the warm one, so load alone decides");
    }
    return absl::StrCat(loads, "; at their peak throughputs the lead may grow by ", margin,
                        " tokens of the warm one before it exceeds ", penalty);
  }
  // Under kOnlyColder `tau` is the gate's figure even where rates differ: the rule is for comparing with an old report.
  const std::string tau =
      gate_.tau_tokens() == kInt64Max ? "tau (unreachable)" : absl::StrCat("tau (", internal::Thousands(gate_.tau_tokens()), ")");
  if (gate_.rule() == GateRule::kOnlyColder) {
    if (reason == kGateOpen) {
      return absl::StrCat(loads, "; that lead reaches ", tau, " with ", margin,
                          " tokens to spare, so cold endpoints that far below join the warm ones");
    }
    return absl::StrCat(loads, "; the lead is ", margin, " tokens short of ", tau);
  }
  if (reason == kGateOpen) {
    return absl::StrCat(loads, "; that lead exceeds ", tau, " by ", margin, " tokens, so load alone decides");
  }
  return absl::StrCat(loads, "; the lead may grow by ", margin, " tokens before it exceeds ", tau);
}

}  // namespace v0
}  // namespace tokroute

// Ready-made routers. Two match a bottleneck, three know nothing of prompts.
//
//   auto router = tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s});
//   if (!router.ok()) return Fail(router.status());   // Names the field, its value and its range.
//
//   PrefillBound      long prompts: stay where the prefix is, release by uncached tokens in flight, rank by them
//   DecodeBound       long outputs: the same filter, rank by active requests
//   LeastOutstanding  fewest active requests; for interchangeable requests of like size
//   RoundRobin        the longest unused
//   UniformRandom     uniform; needs no state, for many routers that know nothing of each other
//
// Every one keeps the ledger, so its tickets, audit and metrics are the same, and another policy can join later
// (Router::SetPolicy).
#ifndef TOKROUTE_POLICIES_H_
#define TOKROUTE_POLICIES_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "tokroute/filter/prefix_cache_affinity_filter.h"
#include "tokroute/gate/tau_gate.h"
#include "tokroute/load/in_flight_load.h"
#include "tokroute/picker/max_score_picker.h"
#include "tokroute/picker/random_picker.h"
#include "tokroute/picker/round_robin_picker.h"
#include "tokroute/prefix/approximate_prefix.h"
#include "tokroute/prefix/prefix_index.h"
#include "tokroute/router.h"
#include "tokroute/scorer/active_request_scorer.h"
#include "tokroute/scorer/token_load_scorer.h"

namespace tokroute {
inline namespace v0 {

// Two numbers to set: peak_prefill_throughput and max_ttft_penalty. See TauGateOptions for both; the same checks apply,
// and an error names them.
struct PrefillBoundOptions {
  double peak_prefill_throughput = 0;                   // Tokens/s, measured. No default: 0 (forgotten) is refused.
  std::chrono::milliseconds max_ttft_penalty{18'000};   // llm-d's default. 0 is refused ...
  bool always_sticky = false;                           // ... never breaking is said like this.
  GateRule gate_rule = GateRule::kRelease;
  Deployment deployment = {};                           // See TauGateOptions: for the error message only.
  double affinity_threshold = 0.8;                      // <= 1; 0 or below: filter off. 0.6 with pictures.
  double exploration_probability = 0;                   // 0..1.
  std::uint64_t seed = 0;                               // Give each replica its own.
  ClockRef clock = {};
  TokenLoadOptions token_load = {};                     // Relative by default: it cannot tie when all are overloaded.
  InFlightLoadOptions in_flight_load = {};
  PickerOptions picker = {};
  // Where prefixes are remembered. Null: one of its own, made of index_options.
  std::shared_ptr<PrefixIndex> index = nullptr;
  PrefixIndexOptions index_options = {};
};

// As PrefillBoundOptions; ranks by active requests.
struct DecodeBoundOptions {
  double peak_prefill_throughput = 0;
  std::chrono::milliseconds max_ttft_penalty{18'000};
  bool always_sticky = false;
  GateRule gate_rule = GateRule::kRelease;
  Deployment deployment = {};
  double affinity_threshold = 0.8;
  double exploration_probability = 0;
  std::uint64_t seed = 0;
  ClockRef clock = {};
  ActiveRequestOptions active_request = {};
  InFlightLoadOptions in_flight_load = {};
  PickerOptions picker = {};
  std::shared_ptr<PrefixIndex> index = nullptr;
  PrefixIndexOptions index_options = {};
};

// For the policies that look at no prompt. They hash nothing.
struct LoadOnlyOptions {
  std::uint64_t seed = 0;
  ClockRef clock = {};
  InFlightLoadOptions in_flight_load = {};
  PickerOptions picker = {};
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

// The parts that both bottleneck-matched routers share.
struct AffinityParts {
  PrefixCacheAffinityFilter filter;
  std::shared_ptr<PrefixIndex> index;
};
template <class Options>
absl::StatusOr<AffinityParts> MakeAffinityParts(const Options& options) {
  absl::StatusOr<PrefixCacheAffinityFilter> filter =
      PrefixCacheAffinityFilter::Create({.gate = {.peak_prefill_throughput = options.peak_prefill_throughput,
                                                  .max_ttft_penalty = options.max_ttft_penalty,
                                                  .always_sticky = options.always_sticky,
                                                  .rule = options.gate_rule,
                                                  .deployment = options.deployment},
                                         .affinity_threshold = options.affinity_threshold,
                                         .exploration_probability = options.exploration_probability});
  if (!filter.ok()) return filter.status();
  if (options.index != nullptr) return AffinityParts{*filter, options.index};
  absl::StatusOr<std::shared_ptr<PrefixIndex>> index = PrefixIndex::Create(options.index_options);
  if (!index.ok()) return index.status();
  return AffinityParts{*filter, *std::move(index)};
}

}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {

// Affinity filter, token load with lookahead, max score. Policy name: "prefill-bound".
template <class E>
absl::StatusOr<Router<E>> PrefillBound(const Fleet<E>& fleet, const PrefillBoundOptions& options) {
  absl::StatusOr<internal::AffinityParts> parts = internal::MakeAffinityParts(options);
  if (!parts.ok()) return parts.status();
  return MakeRouter(
      fleet, {.seed = options.seed, .clock = options.clock},
      Producers(ApproximatePrefix(parts->index), InFlightLoad(options.in_flight_load)),
      Named("prefill-bound", Policy(parts->filter, TokenLoadScorer(options.token_load), MaxScorePicker<>(options.picker))));
}

// Affinity filter, active requests, max score. Policy name: "decode-bound".
template <class E>
absl::StatusOr<Router<E>> DecodeBound(const Fleet<E>& fleet, const DecodeBoundOptions& options) {
  absl::StatusOr<internal::AffinityParts> parts = internal::MakeAffinityParts(options);
  if (!parts.ok()) return parts.status();
  return MakeRouter(fleet, {.seed = options.seed, .clock = options.clock},
                    Producers(ApproximatePrefix(parts->index), InFlightLoad(options.in_flight_load)),
                    Named("decode-bound", Policy(parts->filter, ActiveRequestScorer(options.active_request),
                                                 MaxScorePicker<>(options.picker))));
}

// Active requests, max score. Policy name: "least-outstanding".
template <class E>
absl::StatusOr<Router<E>> LeastOutstanding(const Fleet<E>& fleet, const LoadOnlyOptions& options = {}) {
  return MakeRouter(fleet, {.seed = options.seed, .clock = options.clock}, Producers(InFlightLoad(options.in_flight_load)),
                    Named("least-outstanding", Policy(ActiveRequestScorer(), MaxScorePicker<>(options.picker))));
}

// Policy name: "round-robin".
template <class E>
absl::StatusOr<Router<E>> RoundRobin(const Fleet<E>& fleet, const LoadOnlyOptions& options = {}) {
  return MakeRouter(fleet, {.seed = options.seed, .clock = options.clock}, Producers(InFlightLoad(options.in_flight_load)),
                    Named("round-robin", Policy(RoundRobinPicker(options.picker))));
}

// Policy name: "random". (tokroute::Random is the generator.)
template <class E>
absl::StatusOr<Router<E>> UniformRandom(const Fleet<E>& fleet, const LoadOnlyOptions& options = {}) {
  return MakeRouter(fleet, {.seed = options.seed, .clock = options.clock}, Producers(InFlightLoad(options.in_flight_load)),
                    Named("random", Policy(RandomPicker(options.picker))));
}

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_POLICIES_H_

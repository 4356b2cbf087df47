// Policy: filters, then weighted scorers, then a picker, composed at compile time and fused into one pass.
//
//   auto policy = tokroute::Policy(tokroute::PrefixCacheAffinityFilter(gate),
//                                  tokroute::Weighted(tokroute::TokenLoadScorer{}, 2), tokroute::MaxScorePicker{});
//   auto router = tokroute::MakeRouter(fleet, {.seed = 7}, std::move(producers), tokroute::Named("default", policy));
#ifndef TOKROUTE_POLICY_H_
#define TOKROUTE_POLICY_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/decision.h"
#include "tokroute/erased.h"
#include "tokroute/internal/policy_base.h"

namespace tokroute {
inline namespace v0 {

// A scorer and its weight: finite, >= 0 (a router refuses others). Weights are not normalised. A scorer that stands in a
// policy without Weighted weighs 1.
template <Scorer S>
struct Weighted {
  Weighted(S s, double w) : scorer(std::move(s)), weight(static_cast<float>(w)) {}
  S scorer;
  float weight;
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

template <class P>
inline constexpr bool kIsWeighted = false;
template <class S>
inline constexpr bool kIsWeighted<Weighted<S>> = true;
template <class P>
concept FilterPart = Filter<P> || std::same_as<P, FilterChain>;
template <class P>
concept ScorerPart = kIsWeighted<P> || std::same_as<P, WeightedSum> || Scorer<P>;
template <class P>
concept PickerPart = Picker<P>;

// 0 filters, 1 scorers, 2 picker; 9: no part of a policy.
template <class P>
inline constexpr int kKind = FilterPart<P> ? 0 : ScorerPart<P> ? 1 : PickerPart<P> ? 2 : 9;

template <class... P>
constexpr bool InOrder() {
  constexpr int kinds[] = {kKind<P>..., 9};
  for (std::size_t i = 0; i + 1 < sizeof...(P); ++i) {
    if (kinds[i] > kinds[i + 1]) return false;
  }
  return sizeof...(P) > 0 && kinds[sizeof...(P) - 1] == 2 && (sizeof...(P) < 2 || kinds[sizeof...(P) - 2] != 2);
}

// kInvalidArgument naming the scorer whose weight is negative, NaN or infinite.
absl::Status CheckWeight(std::string_view scorer, float weight);
absl::Status TooManyFilters(std::uint32_t count);

// A bound part, whatever kind it is. Plain parts bind their own columns; chains and sums bind their members.
template <class P>
struct BoundAny : BoundPart<P> {
  using BoundPart<P>::BoundPart;
};
template <class S>
struct BoundAny<Weighted<S>> {
  explicit BoundAny(Weighted<S> w) : scorer(std::move(w.scorer)), weight(w.weight) {}
  absl::Status Bind(const ColumnLayout& layout) {
    if (absl::Status status = CheckWeight(PartName(scorer.part), weight); !status.ok()) return status;
    return scorer.Bind(layout);
  }
  BoundPart<S> scorer;
  float weight;
};
template <>
struct BoundAny<FilterChain> {
  FilterChain part;
  absl::Status Bind(const ColumnLayout& layout);
};
template <>
struct BoundAny<WeightedSum> {
  WeightedSum part;
  absl::Status Bind(const ColumnLayout& layout);
};

template <class P>
auto BindPart(P&& part) {
  if constexpr (kIsWeighted<std::remove_cvref_t<P>>) {
    return BoundAny<std::remove_cvref_t<P>>(std::forward<P>(part));
  } else if constexpr (kKind<std::remove_cvref_t<P>> == 1 && !std::same_as<std::remove_cvref_t<P>, WeightedSum>) {
    return BoundAny<Weighted<std::remove_cvref_t<P>>>(Weighted(std::forward<P>(part), 1));
  } else if constexpr (std::same_as<std::remove_cvref_t<P>, FilterChain> ||
                       std::same_as<std::remove_cvref_t<P>, WeightedSum>) {
    return BoundAny<std::remove_cvref_t<P>>{std::forward<P>(part)};
  } else {
    return BoundAny<std::remove_cvref_t<P>>(std::forward<P>(part));
  }
}

}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {

// Filters (or a FilterChain) first, then scorers (bare, Weighted, or a WeightedSum), then one picker. A filter sees the
// survivors of the one before; one that keeps nobody refuses the request. Totals are sums, in order, of weight x score
// accumulated in double: the products are exact, so a contracted multiply-add cannot change a decision.
//
// A value; give it to MakeRouter or Router::SetPolicy. Parts are checked and bound to their columns there.
template <class... Parts>
struct Policy {
  static_assert(((internal::kKind<Parts> != 9) && ...),
                "every part of a Policy is a Filter, a Scorer (or Weighted), or a Picker; see tokroute/concepts.h");
  static_assert(internal::InOrder<Parts...>(), "a Policy is filters, then scorers, then exactly one picker");
  explicit Policy(Parts... p) : parts(std::move(p)...) {}
  std::tuple<Parts...> parts;
};
template <class... Parts>
Policy(Parts...) -> Policy<Parts...>;

// A policy and the name that RouteOptions::policy finds it by.
template <class P>
struct Named {
  Named(std::string_view n, P p) : name(n), policy(std::move(p)) {}
  std::string name;
  P policy;
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

template <class... Parts>
class BoundPolicy final : public PolicyBase {
 public:
  BoundPolicy(std::string name, Policy<Parts...> policy)
      : PolicyBase(std::move(name)), parts_(std::apply([](auto&&... p) { return std::make_tuple(BindPart(std::move(p))...); },
                                                       std::move(policy.parts))) {}

  absl::Status Bind(const ColumnLayout& layout) override {
    absl::Status status = absl::OkStatus();
    std::apply([&](auto&... part) { (void)((status = part.Bind(layout), status.ok()) && ...); }, parts_);
    if (!status.ok()) return status;
    std::uint32_t filters = 0;
    ForEachFilter([&](const auto&) { ++filters; });
    return filters <= kMaxFilters ? absl::OkStatus() : TooManyFilters(filters);
  }

  RefusalReason Decide(DecideInput& input, Decision& decision) const noexcept override {
    decision.candidates = input.survivors.count;
    decision.verdict_count = 0;
    const std::uint64_t leg_stage = static_cast<std::uint64_t>(decision.leg) * kStagesPerLeg;
    bool alive = true;
    ForEachFilter([&](const auto& filter) {
      if (!alive) return;
      const std::uint32_t before = input.survivors.count, index = decision.verdict_count;
      Random random = Random::For(input.seed, input.decision, leg_stage + index);
      Stage stage{random, input.now};
      FilterVerdict& verdict = decision.verdicts[index];
      verdict = filter.part.Narrow(input.request, filter.View(&input.survivors, input.table), stage);
      verdict.kept = input.survivors.count;
      ++decision.verdict_count;
      if (verdict.kept == 0) {
        input.emptied_by = static_cast<std::uint8_t>(index);
        input.considered = before;
        alive = false;
      }
      if (input.trace != nullptr) TraceFilter(filter, verdict, input);
    });
    if (!alive) return RefusalReason::kAllFiltered;
    decision.survivors = input.survivors.count;
    Random random = Random::For(input.seed, input.decision, leg_stage + kPickerStage);
    Stage stage{random, input.now};
    const auto& picker = std::get<sizeof...(Parts) - 1>(parts_);
    if constexpr (requires { typename PickerType::Scan; }) {
      ScanTotals<typename PickerType::Scan> scan;
      Total(input, scan);
      if (input.trace != nullptr) TraceScores(input);
      decision.choice = picker.part.PickScanned(input.request, picker.View(&input.survivors, input.table),
                                                {input.totals, input.survivors.count}, scan.scan, stage,
                                                {input.targets, kMaxTargets});
    } else {
      NoScan scan;
      Total(input, scan);
      if (input.trace != nullptr) TraceScores(input);
      decision.choice = picker.part.Pick(input.request, picker.View(&input.survivors, input.table),
                                         {input.totals, input.survivors.count}, stage, {input.targets, kMaxTargets});
    }
    input.considered = decision.survivors;
    return decision.choice.targets == 0 ? RefusalReason::kNobodyPicked : RefusalReason::kNone;
  }

  std::string_view FilterName(std::uint32_t i) const noexcept override {
    std::string_view name;
    std::uint32_t at = 0;
    ForEachFilter([&](const auto& filter) {
      if (at++ == i) name = PartName(filter.part);
    });
    return name;
  }

  std::string ExplainFilter(std::uint32_t i, const FilterVerdict& verdict) const override {
    std::string text;
    std::uint32_t at = 0;
    ForEachFilter([&](const auto& filter) {
      if (at++ != i) return;
      if constexpr (requires { { filter.part.Explain(verdict) } -> std::same_as<std::string>; }) {
        text = filter.part.Explain(verdict);
      }
    });
    return text;
  }

 private:
  // What the scoring loop tells of each total: the picker's own scan, or nobody.
  template <class S>
  struct ScanTotals {
    S scan;
    void operator()(std::uint32_t i, double total) noexcept { scan.Add(i, total); }
    void Restart() noexcept { scan = S(); }
  };
  struct NoScan {
    void operator()(std::uint32_t, double) noexcept {}
    void Restart() noexcept {}
  };
  using PickerType = std::tuple_element_t<sizeof...(Parts) - 1, std::tuple<Parts...>>;

  // A member of a chain, in the shape of a bound filter.
  struct ChainMember {
    const AnyFilter& part;
    ErasedCandidates View(Survivors* s, const ColumnTable& t) const noexcept { return {s, &t}; }
  };

  template <class F>
  void ForEachFilter(F&& call) const {
    std::apply([&](const auto&... bound) { (VisitFilter(bound, call), ...); }, parts_);
  }
  template <class B, class F>
  static void VisitFilter(const B& bound, F& call) {
    if constexpr (std::same_as<B, BoundAny<FilterChain>>) {
      for (const AnyFilter& filter : bound.part.filters()) call(ChainMember{filter});
    } else if constexpr (requires { bound.part; }) {
      if constexpr (FilterPart<std::remove_cvref_t<decltype(bound.part)>>) call(bound);
    }
  }

  template <class B>
  static constexpr bool kScores = requires(const B& b) { b.weight; };
  static constexpr bool kHasSum = (std::same_as<Parts, WeightedSum> || ...);

  // `scan(i, total)` is told each total, in order.
  template <class Scan>
  void Total(DecideInput& input, Scan& scan) const noexcept {
    if constexpr (kHasSum) {
      TotalOneByOne(input);
      for (std::uint32_t i = 0; i < input.survivors.count; ++i) scan(i, input.totals[i]);
    } else {
      std::apply([&](const auto&... bound) { Fuse(input, scan, std::tuple_cat(Select(bound)...)); }, parts_);
    }
  }
  template <class B>
  static auto Select(const B& bound) noexcept {
    if constexpr (kScores<B>) return std::tuple<const B*>(&bound);
    else return std::tuple<>();
  }
  // All scorers in one loop: the per-request work first, then one call per row and scorer, inlined.
  template <class Scan, class... B>
  static void Fuse(DecideInput& input, Scan& scan, std::tuple<const B*...> scorers) noexcept {
    if constexpr (sizeof...(B) == 0) {
      for (std::uint32_t i = 0; i < input.survivors.count; ++i) {
        input.totals[i] = 0;
        scan(i, 0.0);
      }
    } else {
      std::apply(
          [&](const auto*... bound) {
            FuseTerms(input, scan,
                      std::pair(bound->scorer.part.Score(input.request, bound->scorer.View(&input.survivors, input.table)),
                                static_cast<double>(bound->weight))...);
          },
          scorers);
    }
  }
  // Terms are (function of the row, weight). First as if every score were clean, noting the worst; only if one was not
  // (a defect of a plugin), again with cleaning and counting, which would cost a third of the loop.
  template <class Scan, class... Term>
  static void FuseTerms(DecideInput& input, Scan& scan, const Term&... terms) noexcept {
    const Row* const rows = input.survivors.rows;
    const std::uint32_t count = input.survivors.count;
    double* const totals = input.totals;
    // As unsigned bits 0.0 .. 1.0 are the least floats: negative ones, -0.0, NaN and all above 1 come after them.
    constexpr std::uint32_t kOne = 0x3f800000;
    std::uint32_t most = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const Row row = rows[i];
      double total = 0;
      const auto add = [&](const auto& term) {
        const float raw = term.first(row);
        const auto bits = std::bit_cast<std::uint32_t>(raw);
        most = bits > most ? bits : most;
        total += term.second * static_cast<double>(raw);
      };
      (add(terms), ...);
      totals[i] = total;
      scan(i, total);
    }
    if (most <= kOne) return;
    scan.Restart();
    for (std::uint32_t i = 0; i < count; ++i) {
      double total = 0;
      ((total += terms.second * static_cast<double>(CleanScore(terms.first(rows[i]), input.scores_clamped))), ...);
      totals[i] = total;
      scan(i, total);
    }
  }
  // The same sums, term by term: with a WeightedSum the number of terms is known only at run time.
  void TotalOneByOne(DecideInput& input) const noexcept {
    for (std::uint32_t i = 0; i < input.survivors.count; ++i) input.totals[i] = 0;
    ForEachScorer([&](const auto& scorer, const auto& view, float weight) {
      const auto score = scorer.Score(input.request, view(input));
      for (std::uint32_t i = 0; i < input.survivors.count; ++i) {
        input.totals[i] += static_cast<double>(weight) *
                           static_cast<double>(CleanScore(score(input.survivors.rows[i]), input.scores_clamped));
      }
    });
  }
  template <class F>
  void ForEachScorer(F&& call) const {
    std::apply([&](const auto&... bound) { (VisitScorer(bound, call), ...); }, parts_);
  }
  template <class B, class F>
  static void VisitScorer(const B& bound, F& call) {
    if constexpr (std::same_as<B, BoundAny<WeightedSum>>) {
      for (const auto& term : bound.part.terms()) {
        call(term.scorer, [](DecideInput& in) { return ErasedCandidates{&in.survivors, &in.table}; }, term.weight);
      }
    } else if constexpr (kScores<B>) {
      call(bound.scorer.part, [&](DecideInput& in) { return bound.scorer.View(&in.survivors, in.table); }, bound.weight);
    }
  }

  template <class B>
  static void TraceFilter(const B& filter, const FilterVerdict& verdict, DecideInput& input) {
    Trace::FilterStep& step = input.trace->filters.emplace_back();
    step.filter = std::string(PartName(filter.part));
    step.reason = verdict.reason->name;
    for (std::uint32_t i = 0; i < input.survivors.count; ++i) step.kept.push_back({input.survivors.rows[i], 0});
  }
  void TraceScores(DecideInput& input) const {
    Trace& trace = *input.trace;
    for (std::uint32_t i = 0; i < input.survivors.count; ++i) {
      Trace::Score& score = trace.scores.emplace_back();
      score.endpoint.slot = input.survivors.rows[i];
      score.total = input.totals[i];
    }
    ForEachScorer([&](const auto& scorer, const auto& view, float weight) {
      trace.scorers.emplace_back(PartName(scorer));
      trace.weights.push_back(weight);
      const auto raw = scorer.Score(input.request, view(input));
      std::uint32_t ignored = 0;
      for (Trace::Score& score : trace.scores) {
        score.raw.push_back(CleanScore(raw(score.endpoint.slot), ignored));
        score.weighted.push_back(static_cast<double>(weight) * static_cast<double>(score.raw.back()));
      }
    });
  }

  std::tuple<decltype(BindPart(std::declval<Parts>()))...> parts_;
};

template <class... Parts>
std::shared_ptr<PolicyBase> MakePolicy(std::string name, Policy<Parts...> policy) {
  return std::make_shared<BoundPolicy<Parts...>>(std::move(name), std::move(policy));
}

// Compile-time check of one policy against the signals that producers fill. Produced: a Signals<> list, or
// RuntimeSignals when some producer's list is known only at run time (then Bind checks).
template <class Plugin, class Consumes, class Produced>
inline constexpr bool kAllProduced = true;
template <class Plugin, Signal... C, Signal... P>
inline constexpr bool kAllProduced<Plugin, Signals<C...>, Signals<P...>> =
    (kRequireProducer<kListed<C, Signals<P...>>, C, Plugin> && ...);
template <class Part, class Produced>
constexpr bool RequireProducersOf() {
  if constexpr (kIsWeighted<Part>) {
    return RequireProducersOf<decltype(Part::scorer), Produced>();
  } else if constexpr (requires { typename Part::Consumes; }) {
    return kAllProduced<Part, typename Part::Consumes, Produced>;
  } else {
    return true;
  }
}
template <class Produced, class... Parts>
constexpr bool RequireProducersFor(const Policy<Parts...>*) {
  return (RequireProducersOf<Parts, Produced>() && ...);
}

}  // namespace tokroute::internal

#endif  // TOKROUTE_POLICY_H_

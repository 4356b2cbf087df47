// Whole policies: filters, weighted scorers and a picker in a router, over columns that a case states.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/router.h"
#include "tools/conformance/case_runners.h"
#include "tools/conformance/feeders.h"
#include "tools/conformance/plugins.h"

namespace tokroute::conformance {
namespace {

using Flags = std::vector<std::shared_ptr<bool>>;

std::int64_t CountCalled(const Flags& flags) {
  return std::count_if(flags.begin(), flags.end(), [](const std::shared_ptr<bool>& called) { return *called; });
}

struct Parts {
  FilterChain filters;
  WeightedSum scorers;
  Flags filters_called, scorers_called;
};

std::vector<bool> RowsNamed(const StageInputs& inputs, const Json& names) {
  std::vector<bool> rows;
  for (const EndpointInputs& row : inputs.endpoints) {
    rows.push_back(std::find(names.begin(), names.end(), Json(row.name)) != names.end());
  }
  return rows;
}

std::vector<float> ScoresListed(const StageInputs& inputs, const Json& scores) {
  std::vector<float> rows;
  for (const EndpointInputs& row : inputs.endpoints) {
    rows.push_back(scores.contains(row.name) ? scores[row.name].get<float>() : 0.0F);
  }
  return rows;
}

// An entry with a `type` is a plugin; without, it lists what it keeps or gives.
absl::StatusOr<Parts> MakeParts(const Json& params, const StageInputs& inputs) {
  Parts parts;
  for (const Json& given : ChildOr(params, "filters")) {
    if (given.contains("type")) {
      absl::StatusOr<AnyFilter> filter = MakeFilter(given["type"].get<std::string>(), ChildOr(given, "params"));
      if (!filter.ok()) return filter.status();
      parts.filters.Add(*std::move(filter));
    } else {
      parts.filters_called.push_back(std::make_shared<bool>(false));
      parts.filters.Add(ListedFilter(RowsNamed(inputs, given.at("keep")), parts.filters_called.back()));
    }
  }
  for (const Json& given : ChildOr(params, "scorers")) {
    const double weight = given.value("weight", 1.0);
    if (given.contains("type")) {
      absl::StatusOr<AnyScorer> scorer = MakeScorer(given["type"].get<std::string>(), ChildOr(given, "params"));
      if (!scorer.ok()) return scorer.status();
      parts.scorers.Add(*std::move(scorer), weight);
    } else {
      parts.scorers_called.push_back(std::make_shared<bool>(false));
      parts.scorers.Add(ListedScorer(ScoresListed(inputs, given.at("scores")), parts.scorers_called.back()), weight);
    }
  }
  return parts;
}

// llm-d's code for a refusal: it knows one for "nobody left", whatever the reason.
std::string CodeOf(RefusalReason reason) {
  switch (reason) {
    case RefusalReason::kNoEndpoint:
    case RefusalReason::kAllFiltered: return "resource-exhausted";
    default: return std::string(ToString(reason));
  }
}

}  // namespace

Result RunProfileCase(const Json& one_case) {
  const Json& expect = one_case.at("expect");
  const Json& params = one_case.at("params");
  const StageInputs inputs = ReadStageInputs(one_case);
  Json compared = expect;
  compared.erase("pickedAnyOf");
  compared.erase("error");  // A label: that it failed is what counts.

  // Any draw must do, so several seeds are tried.
  constexpr std::uint64_t kSeeds = 16;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    absl::StatusOr<Parts> parts = MakeParts(params, inputs);
    if (!parts.ok()) return Result::Of(parts.status());
    absl::StatusOr<AnyPicker> picker = MakePicker(params.at("picker").get<std::string>(), Json::object());
    if (!picker.ok()) return Result::Of(picker.status());

    Fleet<NamedEndpoint> fleet;
    auto router =
        MakeRouter(fleet, {.seed = seed},
                   Producers(LoadFeeder(), PrefixFeeder(std::make_shared<PrefixFeeder::Table>(inputs.endpoints))),
                   Named("profile", Policy(std::move(parts->filters), std::move(parts->scorers), *std::move(picker))));
    if (!router.ok()) return Result::Of(router.status());
    for (const EndpointInputs& row : inputs.endpoints) {
      const absl::StatusOr<EndpointId> id = fleet.Add({.endpoint_name = row.name});
      if (!id.ok()) return Result::Of(id.status());
      const absl::Status fed = router->Feed(*id, LoadFact{row.in_flight_tokens, row.active_requests});
      if (!fed.ok()) return Result::Of(fed);
    }

    Trace trace;
    const Evaluation evaluation = router->Evaluate({.prompt_tokens = inputs.prompt_tokens}, {.trace = &trace});
    Json actual = {{"scorersRun", CountCalled(parts->scorers_called)},
                   {"filtersRun", CountCalled(parts->filters_called)}};
    if (evaluation.ok() == expect.contains("error")) {
      return Result::Failed(
          absl::StrCat(evaluation.ok() ? "want a refusal, got: " : "refused: ", evaluation.ToString()));
    }
    if (evaluation.ok()) {
      Json survivors = Json::array(), totals = Json::object();
      for (const Trace::Score& score : trace.scores) {
        survivors.push_back(score.name);
        totals[score.name] = score.total;
      }
      actual["survivors"] = survivors;
      actual["totals"] = totals;
      const FilterVerdict* verdict = evaluation.decision.verdict(PrefixCacheAffinityFilter::kName);
      if (verdict != nullptr) actual["outcome"] = llmd::OutcomeLabel(*verdict->reason);
      const std::string picked(evaluation.decision.endpoint_name());
      const Json any_of = expect.value("pickedAnyOf", Json::array({picked}));
      if (std::find(any_of.begin(), any_of.end(), Json(picked)) == any_of.end()) {
        return Result::Failed(
            absl::StrCat("picked: want one of ", any_of.dump(), ", got ", picked, " (seed ", seed, ")"));
      }
    } else {
      actual["code"] = CodeOf(evaluation.refusal.reason);
    }
    std::string found = Disagreement(compared, actual);
    if (!found.empty()) return Result::Failed(std::move(found));
  }
  return {};
}

}  // namespace tokroute::conformance

// Filters, scorers, pickers, configurations and hashes: one plugin at a time.
#include <cctype>
#include <cmath>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/router.h"
#include "tokroute/testing/scores_of.h"
#include "tools/conformance/case_runners.h"
#include "tools/conformance/feeders.h"
#include "tools/conformance/plugins.h"

namespace tokroute::conformance {
namespace {

using testing::ColumnOf;

// All columns that a plugin may read, as a case states them.
struct Columns {
  explicit Columns(const StageInputs& inputs) {
    request.prompt_tokens = inputs.prompt_tokens;
    for (const EndpointInputs& row : inputs.endpoints) {
      matched.values.push_back(row.matched_tokens);
      weighted.values.push_back(row.weighted_matched_tokens);
      uncached.values.push_back(row.uncached_tokens);
      in_flight.values.push_back(row.in_flight_tokens);
      active.values.push_back(row.active_requests);
      peak.values.push_back(0);  // Vectors know one rate, the gate's own.
    }
  }
  Request request;
  ColumnOf<MatchedTokens> matched;
  ColumnOf<WeightedMatchedTokens> weighted;
  ColumnOf<UncachedTokens> uncached;
  ColumnOf<UncachedTokensInFlight> in_flight;
  ColumnOf<ActiveRequests> active;
  ColumnOf<PeakPrefillThroughput> peak;
};

std::string Squeezed(const std::string& text) {
  std::string kept;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0) kept.push_back(static_cast<char>(std::tolower(byte)));
  }
  return kept;
}

std::vector<double> Totals(const StageInputs& inputs) {
  std::vector<double> totals;
  for (const EndpointInputs& row : inputs.endpoints) totals.push_back(row.total);
  return totals;
}

// A picker is never asked about nobody: the router refuses before. So that is what such a case asks.
Result PickOfNobody(AnyPicker picker, const Json& expect) {
  const Fleet<NamedEndpoint> fleet;
  auto router = MakeRouter(fleet, {}, std::vector<AnyLoadProducer>(), std::vector<AnyRequestProducer>(),
                           Named("pick", Policy(std::move(picker))));
  if (!router.ok()) return Result::Of(router.status());
  const Evaluation evaluation = router->Evaluate({});
  if (evaluation.ok() || evaluation.refusal.reason != RefusalReason::kNoEndpoint) {
    return Result::Failed(absl::StrCat("want a refusal for want of endpoints, got: ", evaluation.ToString()));
  }
  const Json actual = {
      {"tiers", Json::array()}, {"count", 0}, {"inclusion", Json::object()}, {"probabilities", Json::object()}};
  Json compared = expect;
  compared.erase("toleranceAbs");
  compared.erase("trials");
  return Result::Of(Disagreement(compared, actual));
}

// Whether targets fill the tiers in order.
std::string TiersDisagree(const Json& tiers, const std::vector<std::string>& targets) {
  std::size_t at = 0;
  for (const Json& tier : tiers) {
    std::vector<std::string> left = tier.at("anyOf").get<std::vector<std::string>>();
    for (std::int64_t i = 0; i < IntegerOr(tier, "take", 0); ++i, ++at) {
      if (at == targets.size()) return absl::StrCat("targets: want more than ", targets.size());
      const auto found = std::find(left.begin(), left.end(), targets[at]);
      if (found == left.end())
        return absl::StrCat("target ", at, ": want one of ", Json(left).dump(), ", got ", targets[at]);
      left.erase(found);
    }
  }
  return at == targets.size() ? "" : absl::StrCat("targets: want ", at, ", got ", targets.size());
}

std::string SharesDisagree(const char* key, const Json& expected, const std::map<std::string, std::int64_t>& counts,
                           std::int64_t trials, double tolerance) {
  if (expected.size() != counts.size())
    return absl::StrCat(key, ": want ", expected.size(), " endpoints, got ", counts.size());
  for (const auto& [name, count] : counts) {
    if (!expected.contains(name)) return absl::StrCat(key, ".", name, ": not in the case");
    const double share = static_cast<double>(count) / static_cast<double>(trials);
    if (std::fabs(share - expected[name].get<double>()) > tolerance) {
      return absl::StrCat(key, ".", name, ": want ", expected[name].dump(), ", got ", share);
    }
  }
  return "";
}

}  // namespace

Result RunFilterCase(const std::string& plugin, const Json& one_case) {
  absl::StatusOr<AnyFilter> filter = MakeFilter(plugin, ChildOr(one_case, "params"));
  if (!filter.ok()) return Result::Of(filter.status());
  const StageInputs inputs = ReadStageInputs(one_case);
  const Columns columns(inputs);
  const testing::Kept kept = testing::KeptBy(*std::move(filter), columns.request, columns.matched, columns.weighted,
                                             columns.uncached, columns.in_flight, columns.active, columns.peak);
  Json survivors = Json::array();
  for (const Row row : kept.rows) survivors.push_back(inputs.endpoints[row].name);
  const Json actual = {{"survivors", survivors}, {"outcome", llmd::OutcomeLabel(*kept.verdict.reason)}};
  return Result::Of(Disagreement(one_case.at("expect"), actual));
}

Result RunScoreCase(const std::string& plugin, const Json& one_case) {
  absl::StatusOr<AnyScorer> scorer = MakeScorer(plugin, ChildOr(one_case, "params"));
  if (!scorer.ok()) return Result::Of(scorer.status());
  const StageInputs inputs = ReadStageInputs(one_case);
  const Columns columns(inputs);
  const std::vector<float> raw =
      testing::ScoresOf(*std::move(scorer), columns.request, columns.matched, columns.weighted, columns.uncached,
                        columns.in_flight, columns.active, columns.peak);
  Json scores = Json::object();
  std::uint32_t clamped = 0;
  for (std::size_t row = 0; row < raw.size(); ++row) {
    scores[inputs.endpoints[row].name] = internal::CleanScore(raw[row], clamped);  // As every policy takes it.
  }
  return Result::Of(Disagreement(one_case.at("expect"), {{"scores", scores}}));
}

Result RunPickCase(const std::string& plugin, const Json& one_case) {
  const Json& expect = one_case.at("expect");
  const StageInputs inputs = ReadStageInputs(one_case);
  // Any draw must do, so several are tried.
  constexpr std::uint64_t kDraws = 64;
  for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
    absl::StatusOr<AnyPicker> picker = MakePicker(plugin, ChildOr(one_case, "params"));
    if (!picker.ok()) return Result::Of(picker.status());
    if (inputs.endpoints.empty()) return PickOfNobody(*std::move(picker), expect);
    const testing::Picked picked = testing::PickOf(*std::move(picker), {}, Totals(inputs), testing::Seed{draw});
    std::vector<std::string> targets;
    for (const Row row : picked.targets) targets.push_back(inputs.endpoints[row].name);
    for (const auto& item : expect.items()) {
      if (item.key() != "tiers" && item.key() != "tieBreak" && item.key() != "note") {
        return Result::Failed(item.key() + ": this runner has nothing to compare it with");
      }
    }
    std::string found = TiersDisagree(expect.at("tiers"), targets);
    if (!found.empty()) return Result::Failed(absl::StrCat(found, " (draw ", draw, ")"));
  }
  return {};
}

Result RunDistributionCase(const std::string& plugin, const Json& one_case) {
  const Json& expect = one_case.at("expect");
  const StageInputs inputs = ReadStageInputs(one_case);
  const std::int64_t trials = IntegerOr(expect, "trials", 10'000);
  const double tolerance = expect.value("toleranceAbs", 1e-9);
  std::map<std::string, std::int64_t> first, included;
  for (const EndpointInputs& row : inputs.endpoints) first[row.name] = included[row.name] = 0;
  std::size_t count = 0;
  for (std::int64_t trial = 0; trial < trials; ++trial) {
    absl::StatusOr<AnyPicker> picker = MakePicker(plugin, ChildOr(one_case, "params"));
    if (!picker.ok()) return Result::Of(picker.status());
    if (inputs.endpoints.empty()) return PickOfNobody(*std::move(picker), expect);
    const testing::Picked picked =
        testing::PickOf(*std::move(picker), {}, Totals(inputs), testing::Seed{static_cast<std::uint64_t>(trial)});
    if (trial > 0 && picked.targets.size() != count) return Result::Failed("count: differs from draw to draw");
    count = picked.targets.size();
    for (const Row row : picked.targets) ++included[inputs.endpoints[row].name];
    if (count > 0) ++first[inputs.endpoints[picked.targets[0]].name];
  }
  for (const auto& item : expect.items()) {
    const std::string& key = item.key();
    std::string found;
    if (key == "count") {
      if (item.value() != count) found = absl::StrCat("count: want ", item.value().dump(), ", got ", count);
    } else if (key == "probabilities") {
      found = SharesDisagree("probabilities", item.value(), first, trials, tolerance);
    } else if (key == "inclusion") {
      found = SharesDisagree("inclusion", item.value(), included, trials, tolerance);
    } else if (key != "trials" && key != "toleranceAbs" && key != "note" && key != "tieBreak") {
      found = key + ": this runner has nothing to compare it with";
    }
    if (!found.empty()) return Result::Failed(found);
  }
  return {};
}

Result RunConfigCase(const std::string& plugin, const Json& one_case) {
  const Json& expect = one_case.at("expect");
  const absl::StatusOr<Json> effective = EffectiveParams(plugin, ChildOr(one_case, "params"));
  if (!effective.ok() && effective.status().code() != absl::StatusCode::kInvalidArgument) {
    return Result::Of(effective.status());
  }
  const std::string message(effective.status().message());
  if (effective.ok() != expect.at("valid").get<bool>()) {
    return Result::Failed(effective.ok() ? "valid: want a refusal, got none"
                                         : "valid: want none, got a refusal: " + message);
  }
  Json actual = {{"valid", effective.ok()}};
  if (effective.ok()) {
    actual["effective"] = *effective;
  } else {
    const std::string wanted = TextOr(expect, "mentions", "");
    const bool mentioned = Squeezed(message).find(Squeezed(wanted)) != std::string::npos;
    if (!mentioned) return Result::Failed("mentions: want " + wanted + " in: " + message);
    actual["mentions"] = wanted;
  }
  return Result::Of(Disagreement(expect, actual));
}

Result RunHashCase(const Json& one_case) {
  const absl::StatusOr<llmd::PrefixHashParams> params = llmd::PrefixHash(ChildOr(one_case, "params"));
  if (!params.ok()) return Result::Of(params.status());
  const Json& given = one_case.at("request");
  const std::vector<TokenId> tokens = ReadTokens(given.at("tokens"));
  const std::string model = TextOr(given, "model", ""), salt = TextOr(given, "cacheSalt", "");
  Json hashes = Json::array();
  for (const std::uint64_t hash : ReferenceBlockHashes({.tokens = tokens, .model = model, .cache_salt = salt},
                                                       params->block_size, params->max_blocks)) {
    char text[2 + 16 + 1];
    std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(hash));
    hashes.push_back(text);
  }
  return Result::Of(Disagreement(one_case.at("expect"), {{"hashes", hashes}}));
}

}  // namespace tokroute::conformance

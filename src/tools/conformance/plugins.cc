#include "tools/conformance/plugins.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/picker/max_score_picker.h"
#include "tokroute/picker/random_picker.h"
#include "tokroute/picker/weighted_random_picker.h"

namespace tokroute::conformance {
namespace {

absl::Status NoPlugin(const std::string& type) {
  return absl::UnimplementedError(absl::StrCat("no plugin ", type, " yet"));
}

// A plugin of options that were mapped, if both the mapping and the plugin's own Check accept them.
template <class Plugin, class Options>
absl::StatusOr<Plugin> Checked(const absl::StatusOr<Options>& options) {
  if (!options.ok()) return options.status();
  Plugin plugin(*options);
  if (absl::Status status = plugin.Check(); !status.ok()) return llmd::InLlmdTerms(status);
  return plugin;
}

absl::StatusOr<PrefixCacheAffinityFilter> MakeAffinityFilter(
    const absl::StatusOr<PrefixCacheAffinityOptions>& options) {
  if (!options.ok()) return options.status();
  absl::StatusOr<PrefixCacheAffinityFilter> filter = PrefixCacheAffinityFilter::Create(*options);
  if (!filter.ok()) return llmd::InLlmdTerms(filter.status());
  return filter;
}

// What is in force once `plugin` could be made.
template <class Made, class Options>
absl::StatusOr<Json> EffectiveOnce(const absl::StatusOr<Made>& plugin, const absl::StatusOr<Options>& options) {
  if (!plugin.ok()) return plugin.status();
  return llmd::Effective(*options);
}

}  // namespace

absl::StatusOr<AnyFilter> MakeFilter(const std::string& type, const Json& params) {
  if (type != PrefixCacheAffinityFilter::kName) return NoPlugin(type);
  absl::StatusOr<PrefixCacheAffinityFilter> filter = MakeAffinityFilter(llmd::PrefixCacheAffinity(params));
  if (!filter.ok()) return filter.status();
  return AnyFilter(*std::move(filter));
}

absl::StatusOr<AnyScorer> MakeScorer(const std::string& type, const Json& params) {
  if (type == TokenLoadScorer::kName) {
    absl::StatusOr<TokenLoadScorer> scorer = Checked<TokenLoadScorer>(llmd::TokenLoad(params));
    if (!scorer.ok()) return scorer.status();
    return AnyScorer(*std::move(scorer));
  }
  if (type == ActiveRequestScorer::kName) {
    absl::StatusOr<ActiveRequestScorer> scorer = Checked<ActiveRequestScorer>(llmd::ActiveRequest(params));
    if (!scorer.ok()) return scorer.status();
    return AnyScorer(*std::move(scorer));
  }
  return NoPlugin(type);
}

absl::StatusOr<AnyPicker> MakePicker(const std::string& type, const Json& params) {
  const auto make = [&]<class Plugin>(const Plugin*) -> absl::StatusOr<AnyPicker> {
    absl::StatusOr<Plugin> picker = Checked<Plugin>(llmd::AnyPickerOptions(params));
    if (!picker.ok()) return picker.status();
    return AnyPicker(*std::move(picker));
  };
  if (type == MaxScorePicker<>::kName) return make(static_cast<const MaxScorePicker<>*>(nullptr));
  if (type == RandomPicker::kName) return make(static_cast<const RandomPicker*>(nullptr));
  if (type == WeightedRandomPicker::kName) return make(static_cast<const WeightedRandomPicker*>(nullptr));
  return NoPlugin(type);
}

absl::StatusOr<Json> EffectiveParams(const std::string& type, const Json& params) {
  if (type == PrefixCacheAffinityFilter::kName) {
    const auto options = llmd::PrefixCacheAffinity(params);
    return EffectiveOnce(MakeAffinityFilter(options), options);
  }
  if (type == TokenLoadScorer::kName) {
    const auto options = llmd::TokenLoad(params);
    return EffectiveOnce(Checked<TokenLoadScorer>(options), options);
  }
  if (type == ActiveRequestScorer::kName) {
    const auto options = llmd::ActiveRequest(params);
    return EffectiveOnce(Checked<ActiveRequestScorer>(options), options);
  }
  if (type == "inflight-load-producer") {
    const auto mapped = llmd::InFlight(params);
    if (!mapped.ok()) return mapped.status();
    const absl::StatusOr<InFlightLoadOptions> options = mapped->options;
    return EffectiveOnce(Checked<InFlightLoad>(options), mapped);
  }
  if (type == "approx-prefix-cache-producer") {
    const auto mapped = llmd::ApproximatePrefixProducer(params);
    if (!mapped.ok()) return mapped.status();
    const auto index = PrefixIndex::Create(mapped->IndexOptions(mapped->BlockSize(0)));
    if (!index.ok()) return llmd::InLlmdTerms(index.status());
    return llmd::Effective(*mapped);
  }
  if (type == "precise-prefix-cache-producer") {
    const auto options = llmd::PrecisePrefixProducer(params);
    if (!options.ok()) return options.status();
    const auto index = PrefixIndex::Create(*options);
    if (!index.ok()) return llmd::InLlmdTerms(index.status());
    return llmd::Effective(*options);
  }
  const absl::StatusOr<AnyPicker> picker = MakePicker(type, params);
  if (!picker.ok()) return picker.status();
  return llmd::Effective(*llmd::AnyPickerOptions(params));
}

}  // namespace tokroute::conformance

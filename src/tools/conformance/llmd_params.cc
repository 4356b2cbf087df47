#include "tools/conformance/llmd_params.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace tokroute::llmd {
namespace {

// Reads parameters one by one, remembers the first mistake, and knows in the end which keys nobody asked for.
class Reader {
 public:
  explicit Reader(const Json& params) : params_(params) {
    if (!params_.is_object() && !params_.is_null()) {
      status_ = absl::InvalidArgumentError(absl::StrCat("parameters: want an object, got ", params_.dump()));
    }
  }

  double Number(const char* name, double unless_given) {
    const Json* value = Find(name);
    if (value == nullptr) return unless_given;
    if (value->is_number()) return value->get<double>();
    Fail(name, "a number", *value);
    return unless_given;
  }
  std::int64_t Integer(const char* name, std::int64_t unless_given) {
    const Json* value = Find(name);
    if (value == nullptr) return unless_given;
    const bool fits = value->is_number_unsigned() ? value->get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX)
                                                  : value->is_number_integer();
    if (fits) return value->get<std::int64_t>();
    Fail(name, "a 64-bit integer", *value);
    return unless_given;
  }
  bool Bool(const char* name, bool unless_given) {
    const Json* value = Find(name);
    if (value == nullptr) return unless_given;
    if (value->is_boolean()) return value->get<bool>();
    Fail(name, "true or false", *value);
    return unless_given;
  }
  std::string Text(const char* name, std::string unless_given) {
    const Json* value = Find(name);
    if (value == nullptr) return unless_given;
    if (value->is_string()) return value->get<std::string>();
    Fail(name, "a string", *value);
    return unless_given;
  }
  // Null: not given.
  const Json* Object(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr || value->is_object()) return value;
    Fail(name, "an object", *value);
    return nullptr;
  }
  bool Given(const char* name) { return Find(name) != nullptr; }

  // llm-d lets several producers fill one attribute and a plugin name the one it means. With us one producer fills a
  // signal, so there is nothing to choose from.
  void ProducerName(const char* name) {
    const std::string given = Text(name, "");
    if (given.empty() || !status_.ok()) return;
    status_ = absl::UnimplementedError(
        absl::StrCat(name, ": a router has one producer of each signal, so none can be chosen, got \"", given, "\""));
  }
  // Accepted, as llm-d does, and without effect there and here.
  void Ignore(const char* name) { known_.insert(name); }

  void Fail(const char* name, const std::string& want, const Json& got) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(name, ": want ", want, ", got ", got.dump()));
  }

  // The first mistake; else the first unknown key.
  absl::Status Done() const {
    if (!status_.ok() || !params_.is_object()) return status_;
    for (const auto& item : params_.items()) {
      if (known_.count(item.key()) == 0) {
        return absl::InvalidArgumentError(absl::StrCat(item.key(), ": unknown parameter"));
      }
    }
    return absl::OkStatus();
  }

 private:
  const Json* Find(const char* name) {
    known_.insert(name);
    if (!params_.is_object()) return nullptr;
    const auto found = params_.find(name);
    return found == params_.end() || found->is_null() ? nullptr : &*found;  // null: as if it were not there.
  }

  const Json& params_;
  std::set<std::string> known_;
  absl::Status status_;
};

// llm-d's tiers that are tiers of ours; it lower-cases what engines say.
constexpr char kGpu[] = "gpu", kCpu[] = "cpu", kDisk[] = "disk";

// Factors come from outside, so a product may be anything.
std::int64_t SaturatedProduct(std::int64_t a, std::int64_t b) {
  if (a <= 0 || b <= 0) return 0;
  return a > std::numeric_limits<std::int64_t>::max() / b ? std::numeric_limits<std::int64_t>::max() : a * b;
}

}  // namespace

absl::StatusOr<PrefixCacheAffinityOptions> PrefixCacheAffinity(const Json& params) {
  Reader reader(params);
  PrefixCacheAffinityOptions options;
  options.affinity_threshold = reader.Number("affinityThreshold", 0.8);
  options.exploration_probability = reader.Number("explorationProbability", 0);
  const double penalty_ms = reader.Number("maxTTFTPenaltyMs", 18'000);
  const double peak = reader.Number("peakPrefillThroughput", 15'928);
  const std::string source = reader.Text("ttftSource", "prefillThroughput");
  reader.ProducerName("prefixMatchInfoProducerName");
  reader.ProducerName("latencyPredictionInfoProducerName");
  reader.ProducerName("inFlightLoadProducerName");

  if (source != "prefillThroughput" && source != "latencyPredictor") {
    reader.Fail("ttftSource", "prefillThroughput or latencyPredictor", source);
  }
  // Milliseconds are whole with us. Rounding would be a quiet change of the limit, and below 0.5 of its meaning.
  constexpr double kMostMs = 9.0e15;  // Whole numbers up to here are exact in a double.
  if (penalty_ms != std::floor(penalty_ms) || penalty_ms > kMostMs || penalty_ms < -kMostMs) {
    reader.Fail("maxTTFTPenaltyMs", "whole milliseconds, at most 9e15", penalty_ms);
  }
  // Our gate does not read the rate when it is always sticky; llm-d refuses a negative one all the same.
  if (peak < 0) reader.Fail("peakPrefillThroughput", ">= 0 tokens/s", peak);
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  if (source == "latencyPredictor") {
    return absl::UnimplementedError("ttftSource latencyPredictor: no signal of predicted latency yet");
  }
  options.gate.peak_prefill_throughput = peak;
  options.gate.max_ttft_penalty = std::chrono::milliseconds(static_cast<std::int64_t>(penalty_ms));
  options.gate.always_sticky = penalty_ms == 0;
  return options;
}

absl::StatusOr<TokenLoadOptions> TokenLoad(const Json& params) {
  constexpr std::int64_t kDefault = 4'194'304;  // 128 requests of 32,768 tokens.
  Reader reader(params);
  const std::int64_t ceiling = reader.Integer("queueThresholdTokens", kDefault);
  reader.ProducerName("inFlightLoadProducerName");
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  return TokenLoadOptions{.form = TokenLoadForm::kAbsolute, .ceiling_tokens = ceiling > 0 ? ceiling : kDefault};
}

absl::StatusOr<ActiveRequestOptions> ActiveRequest(const Json& params) {
  Reader reader(params);
  const std::int64_t idle = reader.Integer("idleThreshold", 0);
  const double busy = reader.Number("maxBusyScore", 1.0);
  reader.Ignore("requestTimeout");
  reader.ProducerName("inFlightLoadProducerName");
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  return ActiveRequestOptions{.idle_threshold = std::max<std::int64_t>(idle, 0),
                              .max_busy_score = busy >= 0 && busy <= 1 ? busy : 1.0};
}

absl::StatusOr<PickerOptions> AnyPickerOptions(const Json& params) {
  Reader reader(params);
  const std::int64_t count = reader.Integer("maxNumOfEndpoints", 1);
  if (count > std::int64_t{kMaxTargets}) {
    reader.Fail("maxNumOfEndpoints", absl::StrCat("at most ", kMaxTargets), count);
  }
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  return PickerOptions{.max_targets = count > 0 ? static_cast<std::uint32_t>(count) : 1};
}

absl::StatusOr<InFlightLoadParams> InFlight(const Json& params) {
  Reader reader(params);
  InFlightLoadParams result;
  result.options.count_estimated_output = reader.Bool("addEstimatedOutputTokens", false);
  result.options.output.output_ratio = reader.Number("outputRatio", 1.5);
  result.sync_cross_replica_state = reader.Bool("syncCrossReplicaState", true);
  reader.ProducerName("prefixMatchInfoProducerName");
  // Absent is "none", which we spell -1; so a -1 that was written down must not pass as one.
  const std::int64_t most = reader.Integer("maxEstimatedOutputTokens", 0);
  const bool capped = reader.Given("maxEstimatedOutputTokens");
  if (capped && most < 0) reader.Fail("maxEstimatedOutputTokens", ">= 0 tokens", most);
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  result.options.output.max_estimated_output_tokens = capped ? most : -1;
  return result;
}

std::int64_t ClientMaxOutputTokens(std::int64_t given) { return given < 0 ? -1 : given; }

absl::StatusOr<ApproximatePrefixParams> ApproximatePrefixProducer(const Json& params) {
  Reader reader(params);
  ApproximatePrefixParams result;
  const ApproximatePrefixParams defaults;
  result.auto_tune = reader.Bool("autoTune", defaults.auto_tune);
  // The old name of the block size still works; the new one wins.
  const std::int64_t old_block_size = reader.Integer("blockSize", defaults.block_size_tokens);
  result.block_size_tokens = reader.Integer("blockSizeTokens", old_block_size);
  result.max_prefix_tokens = reader.Integer("maxPrefixTokensToMatch", defaults.max_prefix_tokens);
  result.max_prefix_blocks = reader.Integer("maxPrefixBlocksToMatch", defaults.max_prefix_blocks);
  result.lru_capacity_blocks = reader.Integer("lruCapacityPerServer", defaults.lru_capacity_blocks);
  if (!result.auto_tune && result.block_size_tokens <= 0) {
    reader.Fail("blockSizeTokens", "> 0 tokens without autoTune", result.block_size_tokens);
  }
  if (result.max_prefix_tokens < 0) reader.Fail("maxPrefixTokensToMatch", ">= 0 tokens", result.max_prefix_tokens);
  if (result.max_prefix_blocks < 0) reader.Fail("maxPrefixBlocksToMatch", ">= 0 blocks", result.max_prefix_blocks);
  if (result.lru_capacity_blocks <= 0) reader.Fail("lruCapacityPerServer", "> 0 blocks", result.lru_capacity_blocks);
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  return result;
}

std::int64_t ApproximatePrefixParams::BlockSize(std::int64_t reported_block_size) const {
  const std::int64_t asked = auto_tune && reported_block_size > 0 ? reported_block_size : block_size_tokens;
  return std::max(asked, min_block_size_tokens);
}

std::int64_t ApproximatePrefixParams::CapacityTokens(std::int64_t block_size, std::int64_t reported_blocks) const {
  return auto_tune ? SaturatedProduct(reported_blocks, block_size) : 0;
}

std::int64_t ApproximatePrefixParams::MaxMatchTokens(std::int64_t block_size) const {
  if (max_prefix_tokens > 0) return max_prefix_tokens;
  return max_prefix_blocks > 0 ? SaturatedProduct(max_prefix_blocks, block_size) : -1;
}

PrefixIndexOptions ApproximatePrefixParams::IndexOptions(std::int64_t block_size) const {
  PrefixIndexOptions options;
  // The index says what is wrong with a block size that it does not take.
  options.block_size = static_cast<std::int32_t>(std::min<std::int64_t>(block_size, INT32_MAX));
  options.default_capacity_tokens = SaturatedProduct(lru_capacity_blocks, block_size);
  return options;
}

absl::StatusOr<PrefixIndexOptions> PrecisePrefixProducer(const Json& params) {
  Reader reader(params);
  PrefixIndexOptions options{.mode = IndexMode::kExact};
  const std::int64_t block_size = reader.Integer("blockSizeTokens", kDefaultBlockSize);
  const Json* given = reader.Object("tierWeights");
  const Json listed = given == nullptr ? Json{{kGpu, 1.0}, {kCpu, 0.8}} : *given;
  TierWeights& weights = options.tier_weights;
  weights = {.device = 1, .host = 1, .disk = 1, .unknown = 1};
  std::string other;
  for (const auto& item : listed.items()) {
    if (!item.value().is_number()) {
      reader.Fail("tierWeights", "a number for each tier", item.value());
      continue;
    }
    const double weight = item.value().get<double>();
    if (item.key() == kGpu) {
      weights.device = weight;
    } else if (item.key() == kCpu) {
      weights.host = weight;
    } else if (item.key() == kDisk) {
      weights.disk = weight;
    } else if (weight != 1) {
      other = item.key();
    }
  }
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  if (!other.empty()) {
    return absl::UnimplementedError(
        absl::StrCat("tierWeights: all tiers but gpu, cpu and disk are one, got a weight for ", other));
  }
  // The index says what is wrong with a size or a weight that it does not take.
  options.block_size = static_cast<std::int32_t>(std::clamp<std::int64_t>(block_size, INT32_MIN, INT32_MAX));
  return options;
}

StorageTier TierOf(std::string_view name) {
  const std::string lower = absl::AsciiStrToLower(absl::string_view(name.data(), name.size()));
  if (lower.empty() || lower == kGpu) return StorageTier::kDevice;
  if (lower == kCpu) return StorageTier::kHost;
  return lower == kDisk ? StorageTier::kDisk : StorageTier::kUnknown;
}

absl::StatusOr<PrefixHashParams> PrefixHash(const Json& params) {
  Reader reader(params);
  const std::int64_t block_size = reader.Integer("blockSizeTokens", 0);
  const std::int64_t max_blocks = reader.Integer("maxBlocks", 0);
  if (block_size < 1 || block_size > INT32_MAX) reader.Fail("blockSizeTokens", ">= 1 token", block_size);
  if (max_blocks < 0) reader.Fail("maxBlocks", ">= 0 blocks", max_blocks);
  if (absl::Status status = reader.Done(); !status.ok()) return status;
  return PrefixHashParams{.block_size = static_cast<std::int32_t>(block_size), .max_blocks = max_blocks};
}

Json Effective(const PrefixCacheAffinityOptions& options) {
  const std::int64_t penalty_ms = options.gate.always_sticky ? 0 : options.gate.max_ttft_penalty.count();
  return {{"affinityThreshold", options.affinity_threshold},
          {"explorationProbability", options.exploration_probability},
          {"maxTTFTPenaltyMs", penalty_ms},
          {"ttftSource", "prefillThroughput"},
          {"peakPrefillThroughput", options.gate.peak_prefill_throughput}};
}
Json Effective(const TokenLoadOptions& options) { return {{"queueThresholdTokens", options.ceiling_tokens}}; }
Json Effective(const ActiveRequestOptions& options) {
  return {{"idleThreshold", options.idle_threshold}, {"maxBusyScore", options.max_busy_score}};
}
Json Effective(const PickerOptions& options) { return {{"maxNumOfEndpoints", options.max_targets}}; }
Json Effective(const InFlightLoadParams& params) {
  const OutputEstimateOptions& output = params.options.output;
  const bool capped = output.max_estimated_output_tokens >= 0;
  return {{"addEstimatedOutputTokens", params.options.count_estimated_output},
          {"outputRatio", output.output_ratio},
          {"maxEstimatedOutputTokens", capped ? Json(output.max_estimated_output_tokens) : Json()},
          {"syncCrossReplicaState", params.sync_cross_replica_state}};
}
Json Effective(const ApproximatePrefixParams& params) {
  return {{"autoTune", params.auto_tune},
          {"blockSizeTokens", params.block_size_tokens},
          {"maxPrefixTokensToMatch", params.max_prefix_tokens},
          {"maxPrefixBlocksToMatch", params.max_prefix_blocks},
          {"lruCapacityPerServer", params.lru_capacity_blocks}};
}
Json Effective(const PrefixIndexOptions& options) {
  const TierWeights& weights = options.tier_weights;
  return {{"blockSizeTokens", options.block_size},
          {"tierWeights", {{kGpu, weights.device}, {kCpu, weights.host}, {kDisk, weights.disk}}}};
}

std::string OutcomeLabel(const ReasonTag& reason) {
  if (reason == kSticky || reason == kAllWarm || reason == kGateOff) return "sticky";
  if (reason == kGateOpen) return "load_override";
  if (reason == kNobodyWarm) return "no_match";
  return std::string(reason.name);  // exploration, not_applicable.
}

absl::Status InLlmdTerms(const absl::Status& status) {
  static constexpr std::pair<const char*, const char*> kNames[] = {
      {"TauGateOptions.peak_prefill_throughput", "peakPrefillThroughput"},
      {"TauGateOptions.max_ttft_penalty", "maxTTFTPenaltyMs"},
      {"PrefixCacheAffinityOptions.affinity_threshold", "affinityThreshold"},
      {"PrefixCacheAffinityOptions.exploration_probability", "explorationProbability"},
      {"TokenLoadOptions.ceiling_tokens", "queueThresholdTokens"},
      {"ActiveRequestOptions.idle_threshold", "idleThreshold"},
      {"ActiveRequestOptions.max_busy_score", "maxBusyScore"},
      {"PickerOptions.max_targets", "maxNumOfEndpoints"},
      {"OutputEstimateOptions.output_ratio", "outputRatio"},
      {"OutputEstimateOptions.max_estimated_output_tokens", "maxEstimatedOutputTokens"},
      {"PrefixIndexOptions.block_size", "blockSizeTokens"},
      {"PrefixIndexOptions.tier_weights", "tierWeights"},
      {"PrefixIndexOptions.default_capacity_tokens", "lruCapacityPerServer"},
  };
  const std::string message(status.message());
  for (const auto& [ours, theirs] : kNames) {
    if (message.find(ours) != std::string::npos)
      return absl::Status(status.code(), absl::StrCat(theirs, ": ", message));
  }
  return status;
}

}  // namespace tokroute::llmd

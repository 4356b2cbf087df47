// llm-d's plugin parameters, in llm-d's spelling and with llm-d's defaults and clamps, as options of ours.
//
//   auto options = llmd::PrefixCacheAffinity(params);            // 15,928 tokens/s and 18 s unless they say otherwise.
//   auto filter = PrefixCacheAffinityFilter::Create(*options);   // The plugin checks what remains to be checked.
//   if (!filter.ok()) return llmd::InLlmdTerms(filter.status()); // "peakPrefillThroughput: ..."
//
// This is the only place that knows llm-d's names and numbers: the conformance runner uses it, and so does whoever
// reads llm-d's configuration. It translates and decides nothing: no rule of a plugin is computed here. A parameter
// that llm-d does not know is kInvalidArgument naming it; one that llm-d knows and we have no counterpart for is
// kUnimplemented.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_LLMD_PARAMS_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_LLMD_PARAMS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "tokroute/concepts.h"
#include "tokroute/filter/prefix_cache_affinity_filter.h"
#include "tokroute/load/in_flight_load.h"
#include "tokroute/picker/picker_options.h"
#include "tokroute/prefix/kv_event.h"
#include "tokroute/prefix/prefix_index.h"
#include "tokroute/scorer/active_request_scorer.h"
#include "tokroute/scorer/token_load_scorer.h"

namespace tokroute::llmd {

using Json = nlohmann::json;

// prefix-cache-affinity-filter. maxTTFTPenaltyMs 0 is llm-d's way to say always_sticky. ttftSource latencyPredictor:
// kUnimplemented.
absl::StatusOr<PrefixCacheAffinityOptions> PrefixCacheAffinity(const Json& params);
// token-load-scorer. Always the absolute form, which is llm-d's.
absl::StatusOr<TokenLoadOptions> TokenLoad(const Json& params);
// active-request-scorer.
absl::StatusOr<ActiveRequestOptions> ActiveRequest(const Json& params);
// max-score-picker, random-picker, weighted-random-picker.
absl::StatusOr<PickerOptions> AnyPickerOptions(const Json& params);

// inflight-load-producer.
struct InFlightLoadParams {
  InFlightLoadOptions options;
  bool sync_cross_replica_state = true;  // Nothing to switch yet: a router's counters are its own.
};
absl::StatusOr<InFlightLoadParams> InFlight(const Json& params);
// The client's own limit on output tokens: llm-d ignores a negative one.
std::int64_t ClientMaxOutputTokens(std::int64_t given);

// approx-prefix-cache-producer.
struct ApproximatePrefixParams {
  bool auto_tune = true;                     // Block size and capacity from what endpoints report, where they do.
  std::int64_t block_size_tokens = 16;       // As configured; see BlockSize.
  std::int64_t max_prefix_tokens = 131'072;  // 0: max_prefix_blocks says it.
  std::int64_t max_prefix_blocks = 2048;     // 0 as well: no cap.
  std::int64_t lru_capacity_blocks = 31'250;
  std::int64_t min_block_size_tokens = 64;  // llm-d raises every block size to this. Not a parameter of it.

  // What an index is to be made with. reported_block_size: what the endpoint at hand says, 0 if nothing.
  std::int64_t BlockSize(std::int64_t reported_block_size) const;
  // An endpoint's capacity, 0 for the configured one. Unit: tokens. reported_blocks: 0 if it says nothing.
  std::int64_t CapacityTokens(std::int64_t block_size, std::int64_t reported_blocks) const;
  // The longest part of a prompt that llm-d looks at. Unit: tokens. -1: all of it.
  std::int64_t MaxMatchTokens(std::int64_t block_size) const;
  PrefixIndexOptions IndexOptions(std::int64_t block_size) const;
};
absl::StatusOr<ApproximatePrefixParams> ApproximatePrefixProducer(const Json& params);

// precise-prefix-cache-producer: an index in exact mode. `tierWeights` (the vectors' own) maps llm-d's tier names; a
// tier that is not listed weighs 1, and absent means llm-d's defaults (gpu 1, cpu 0.8). kUnimplemented: a name but gpu,
// cpu and disk with a weight that is not 1, because all such names are one tier with us.
absl::StatusOr<PrefixIndexOptions> PrecisePrefixProducer(const Json& params);
// llm-d's name of a tier, in any case; empty: gpu.
StorageTier TierOf(std::string_view name);

// prefix-hash (of the vectors, not of llm-d): what ReferenceBlockHashes takes.
struct PrefixHashParams {
  std::int32_t block_size = 0;
  std::int64_t max_blocks = 0;
};
absl::StatusOr<PrefixHashParams> PrefixHash(const Json& params);

// The way back: what is in force, in llm-d's spelling.
Json Effective(const PrefixCacheAffinityOptions& options);
Json Effective(const TokenLoadOptions& options);
Json Effective(const ActiveRequestOptions& options);
Json Effective(const PickerOptions& options);
Json Effective(const InFlightLoadParams& params);
Json Effective(const ApproximatePrefixParams& params);
Json Effective(const PrefixIndexOptions& options);  // Of the precise producer.

// llm-d's label for what the affinity filter did; our own name where llm-d has none.
std::string OutcomeLabel(const ReasonTag& reason);

// Puts llm-d's name in front of a message that names a field of ours. OK stays OK.
absl::Status InLlmdTerms(const absl::Status& status);

}  // namespace tokroute::llmd

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_LLMD_PARAMS_H_

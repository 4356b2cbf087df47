#include "tools/conformance/feeders.h"

#include <stdexcept>

#include "absl/strings/str_cat.h"

namespace tokroute::conformance {

StageInputs ReadStageInputs(const Json& one_case) {
  const Json& endpoints = ChildOr(one_case, "endpoints");
  std::int64_t blocks_tokens = 0, most_uncached = 0;
  for (const Json& endpoint : endpoints) {
    most_uncached = std::max(most_uncached, IntegerOr(endpoint, "uncachedRequestTokens", 0));
    const Json& prefix = ChildOr(endpoint, "prefix");
    const std::int64_t total = IntegerOr(prefix, "totalBlocks", 0) * IntegerOr(prefix, "blockSizeTokens", 0);
    if (total == 0) continue;
    if (blocks_tokens != 0 && total != blocks_tokens) {
      throw std::invalid_argument(
          absl::StrCat("endpoints: prompts of ", blocks_tokens, " and of ", total, " tokens in one case"));
    }
    blocks_tokens = total;
  }

  StageInputs inputs;
  const std::int64_t stated = IntegerOr(ChildOr(one_case, "request"), "promptTokens", 0);
  const std::int64_t longest = std::max({stated, most_uncached, std::int64_t{1}});
  const std::int64_t enlarged = blocks_tokens == 0 ? 1 : (longest + blocks_tokens - 1) / blocks_tokens;
  inputs.prompt_tokens = blocks_tokens == 0 ? longest : blocks_tokens * enlarged;
  for (const Json& endpoint : endpoints) {
    EndpointInputs& row = inputs.endpoints.emplace_back();
    row.name = endpoint.at("name").get<std::string>();
    row.uncached_tokens = IntegerOr(endpoint, "uncachedRequestTokens", 0);
    row.matched_tokens = inputs.prompt_tokens - row.uncached_tokens;
    const Json& prefix = ChildOr(endpoint, "prefix");
    row.weighted_matched_tokens =
        static_cast<double>(IntegerOr(prefix, "matchBlocks", 0) * IntegerOr(prefix, "blockSizeTokens", 0) * enlarged);
    const Json& load = ChildOr(endpoint, "inflight");
    row.in_flight_tokens = IntegerOr(load, "tokens", 0);
    row.active_requests = IntegerOr(load, "requests", 0);
    if (endpoint.contains("score")) row.total = endpoint["score"].get<double>();
  }
  return inputs;
}

}  // namespace tokroute::conformance

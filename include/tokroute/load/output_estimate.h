// How many tokens a response will take, before anybody knows.
#ifndef TOKROUTE_LOAD_OUTPUT_ESTIMATE_H_
#define TOKROUTE_LOAD_OUTPUT_ESTIMATE_H_

#include <algorithm>
#include <cstdint>

#include "tokroute/internal/exact.h"
#include "tokroute/request.h"

namespace tokroute {
inline namespace v0 {

struct OutputEstimateOptions {
  // Output tokens per prompt token. >= 0, finite, at most 1e6. Default: llm-d's outputRatio.
  double output_ratio = 1.5;
  // The operator's cap. >= 0, or -1: none. Unit: tokens.
  std::int64_t max_estimated_output_tokens = -1;
};

// min(round(prompt x ratio), halves up; the client's cap; the operator's cap), 0 for an empty prompt; at most
// kMaxPromptTokens. Of the whole prompt, cached or not. Source: llm-d's inflight-load-producer.
inline std::int64_t EstimateOutputTokens(const OutputEstimateOptions& options, std::int64_t prompt_tokens,
                                         std::int64_t max_output_tokens) noexcept {
  if (prompt_tokens <= 0) return 0;
  std::int64_t estimate = internal::RoundedRatio(options.output_ratio, prompt_tokens, 1);
  if (max_output_tokens >= 0) estimate = std::min(estimate, max_output_tokens);
  if (options.max_estimated_output_tokens >= 0) estimate = std::min(estimate, options.max_estimated_output_tokens);
  return std::min(estimate, kMaxPromptTokens);
}

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_LOAD_OUTPUT_ESTIMATE_H_

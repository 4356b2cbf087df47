#include "tokroute/request.h"

namespace tokroute {
inline namespace v0 {

RequestFault CheckRequest(const Request& request) noexcept {
  constexpr std::int64_t kMost = kMaxPromptTokens;
  if (request.prompt_tokens < -1 || request.prompt_tokens > kMost) {
    return {"Request.prompt_tokens", request.prompt_tokens, -1, kMost};
  }
  const int forms = (request.tokens.empty() ? 0 : 1) + (request.block_keys.empty() ? 0 : 1) + (request.text.empty() ? 0 : 1);
  if (forms > 1) return {"Request (of tokens, block_keys and text at most one)", forms, 0, 1};
  std::int64_t held = static_cast<std::int64_t>(request.tokens.size());
  if (held > kMost) return {"Request.tokens", held, 0, kMost};
  if (!request.block_keys.empty()) {
    if (request.block_size < 1) return {"Request.block_size", request.block_size, 1, kMost};
    const auto blocks = static_cast<std::int64_t>(request.block_keys.size());
    if (blocks > kMost / request.block_size) return {"Request.block_keys", blocks, 0, kMost / request.block_size};
    held = blocks * request.block_size;
  }
  if (request.prompt_tokens >= 0 && request.prompt_tokens < held) {
    return {"Request.prompt_tokens", request.prompt_tokens, held, kMost};
  }
  if (request.max_output_tokens < -1) {
    return {"Request.max_output_tokens", request.max_output_tokens, -1, INT64_MAX};
  }
  const std::int64_t prompt = PromptTokens(request);
  if (prompt > kMost) return {"Request.text", static_cast<std::int64_t>(request.text.size()), 0, kMost * 4};
  for (const MediaSpan& span : request.media) {
    if (span.first_token < 0 || span.first_token >= prompt) {
      return {"Request.media.first_token", span.first_token, 0, prompt - 1};
    }
    if (span.token_count < 1 || span.token_count > prompt - span.first_token) {
      return {"Request.media.token_count", span.token_count, 1, prompt - span.first_token};
    }
  }
  return {};
}

}  // namespace v0
}  // namespace tokroute

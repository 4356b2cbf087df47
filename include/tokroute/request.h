// A request, as the gateway describes it to a router: views only, they need to live just for the call.
//
//   auto ticket = router.Route({.tokens = prompt, .model = "qwen3-32b"});
#ifndef TOKROUTE_REQUEST_H_
#define TOKROUTE_REQUEST_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// The longest prompt a router accepts; sums of in-flight tokens then cannot overflow. Unit: tokens.
inline constexpr std::int64_t kMaxPromptTokens = std::int64_t{1} << 32;

// A picture, clip or recording inside the prompt: its placeholder tokens and a hash of its content.
struct MediaSpan {
  std::int64_t first_token = 0;    // Position of the first placeholder. 0 .. prompt tokens - 1.
  std::int64_t token_count = 0;    // Placeholders, consecutive. >= 1.
  std::uint64_t content_hash = 0;  // Any 64-bit hash that equal content shares.
};

// Headers and the like, read only by plugins that ask. `get` null: there are none.
struct AttributeLookup {
  std::string_view (*get)(const void* context, std::string_view name) = nullptr;
  const void* context = nullptr;
};

struct Request {
  // The prompt, as exactly one of these three (or none: then only load decides).
  std::span<const TokenId> tokens = {};       // Token ids, rendered and tokenized as the engine does; or
  std::span<const BlockKey> block_keys = {};  // final chained keys of the full blocks, `block_size` tokens each; or
  std::string_view text = {};                 // text, for text-keyed policies. It matches no token prefix.

  // Prompt length in tokens. -1: tokens.size(); or block_keys.size() * block_size; or, for text, bytes / 4 rounded up
  // (the reference's estimate for prompts without token ids). Never less than what `tokens` or `block_keys` hold, since
  // a partial last block has no key. At most kMaxPromptTokens.
  std::int64_t prompt_tokens = -1;
  std::int32_t block_size = 0;  // Of block_keys, in tokens. Must equal the index's, else the request is refused.

  // The namespace of the prompt: equal tokens under another model, adapter or salt share nothing. A non-empty model also
  // restricts the candidates to endpoints that serve it.
  std::string_view model = {}, lora = {}, cache_salt = {};
  std::span<const MediaSpan> media = {};

  std::int64_t max_output_tokens = -1;  // The client's cap. Unit: tokens. -1: none given.
  std::string_view session = {};
  AttributeLookup attributes = {};
};

// The prompt's length by the rule at Request::prompt_tokens; >= 0 for a valid request. Unit: tokens. O(1).
inline std::int64_t PromptTokens(const Request& request) noexcept {
  if (request.prompt_tokens >= 0) return request.prompt_tokens;
  if (!request.tokens.empty()) return static_cast<std::int64_t>(request.tokens.size());
  if (!request.block_keys.empty()) return static_cast<std::int64_t>(request.block_keys.size()) * request.block_size;
  return static_cast<std::int64_t>((request.text.size() + 3) / 4);
}

// What is wrong with a request: a field, its value, and the range it should have been in. A field of nullptr: nothing.
struct RequestFault {
  const char* field = nullptr;
  std::int64_t value = 0, least = 0, most = 0;
  explicit operator bool() const noexcept { return field != nullptr; }
};

// Checks every field that does not depend on a router. O(media spans). Allocates nothing.
RequestFault CheckRequest(const Request& request) noexcept;

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_REQUEST_H_

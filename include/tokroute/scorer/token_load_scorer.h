// TokenLoadScorer: lookahead token load. The load signal when prefill binds.
//
//   load(endpoint) = uncached tokens in flight there + the uncached tokens that this request would add there
#ifndef TOKROUTE_SCORER_TOKEN_LOAD_SCORER_H_
#define TOKROUTE_SCORER_TOKEN_LOAD_SCORER_H_

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/internal/exact.h"
#include "tokroute/internal/option_error.h"

namespace tokroute {
inline namespace v0 {

// How a load becomes a score.
enum class TokenLoadForm : std::uint8_t {
  // (least load + 1) / (load + 1). Never ties when all are overloaded, and knows no scale: the default.
  kRelative,
  // llm-d's: 1 - min(load, ceiling) / ceiling. Everything at or beyond the ceiling scores 0, so above it the pick is
  // random just when load matters most; for comparing with llm-d, and for blends that need an absolute scale.
  kAbsolute,
};

struct TokenLoadOptions {
  TokenLoadForm form = TokenLoadForm::kRelative;
  // kAbsolute: the load that scores 0. > 0. Unit: tokens. Default: llm-d's queueThresholdTokens, 128 x 32,768.
  std::int64_t ceiling_tokens = 4'194'304;
};

// Ranks as the load does, the least first; both forms agree on the order as long as nobody is beyond the ceiling. Scores
// are floats: loads closer than 6e-8 of each other (kRelative) may tie.
class TokenLoadScorer {
 public:
  static constexpr std::string_view kName = "token-load-scorer";
  using Consumes = Signals<UncachedTokensInFlight, MatchedTokens>;

  TokenLoadScorer() = default;
  explicit TokenLoadScorer(const TokenLoadOptions& options) : options_(options) {}

  absl::Status Check() const {
    if (options_.ceiling_tokens > 0) return absl::OkStatus();
    return internal::OptionError("TokenLoadOptions.ceiling_tokens", "> 0 tokens", options_.ceiling_tokens);
  }

  auto Score(const Request& request, CandidatesFor<Consumes> candidates) const noexcept {
    const std::int64_t* in_flight = candidates.Column<UncachedTokensInFlight>().data();
    const std::int64_t* matched = candidates.Column<MatchedTokens>().data();
    const std::int64_t prompt = PromptTokens(request);
    const bool absolute = options_.form == TokenLoadForm::kAbsolute;
    const std::int64_t ceiling = options_.ceiling_tokens;
    std::int64_t least = internal::kInt64Max;
    if (!absolute) {
      for (Row row : candidates) least = std::min(least, in_flight[row] + std::max<std::int64_t>(prompt - matched[row], 0));
    }
    return [=](Row row) noexcept {
      const std::int64_t load = in_flight[row] + std::max<std::int64_t>(prompt - matched[row], 0);
      // Divisions, not products with a reciprocal: a fused multiply-add must not change a decision.
      if (absolute) return 1.0F - static_cast<float>(std::min(load, ceiling)) / static_cast<float>(ceiling);
      return static_cast<float>(least + 1) / static_cast<float>(load + 1);
    };
  }

 private:
  TokenLoadOptions options_;
};
static_assert(Scorer<TokenLoadScorer>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_SCORER_TOKEN_LOAD_SCORER_H_

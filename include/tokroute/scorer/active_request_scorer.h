// ActiveRequestScorer: fewest requests in flight. The load signal when decode binds.
#ifndef TOKROUTE_SCORER_ACTIVE_REQUEST_SCORER_H_
#define TOKROUTE_SCORER_ACTIVE_REQUEST_SCORER_H_

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/internal/option_error.h"

namespace tokroute {
inline namespace v0 {

struct ActiveRequestOptions {
  // Up to this many active requests an endpoint counts as idle and scores 1. >= 0. Unit: requests. Default: llm-d's.
  std::int64_t idle_threshold = 0;
  // The most a busy endpoint can score, which makes a step between idle and busy. 0..1. Default: llm-d's.
  double max_busy_score = 1.0;
};

// n <= idle_threshold: 1. Else (most - n) / most x max_busy_score, with `most` the maximum over the candidates: all
// equally busy score 0, as in llm-d's active-request-scorer.
class ActiveRequestScorer {
 public:
  static constexpr std::string_view kName = "active-request-scorer";
  using Consumes = Signals<ActiveRequests>;

  ActiveRequestScorer() = default;
  explicit ActiveRequestScorer(const ActiveRequestOptions& options) : options_(options) {}

  absl::Status Check() const {
    if (options_.idle_threshold < 0) {
      return internal::OptionError("ActiveRequestOptions.idle_threshold", ">= 0 requests", options_.idle_threshold);
    }
    if (!(options_.max_busy_score >= 0 && options_.max_busy_score <= 1)) {
      return internal::OptionError("ActiveRequestOptions.max_busy_score", "0 .. 1", options_.max_busy_score);
    }
    return absl::OkStatus();
  }

  auto Score(const Request&, CandidatesFor<Consumes> candidates) const noexcept {
    const std::int64_t* active = candidates.Column<ActiveRequests>().data();
    std::int64_t most = 1;
    for (Row row : candidates) most = std::max(most, active[row]);
    const std::int64_t idle = options_.idle_threshold;
    const auto busy = static_cast<float>(options_.max_busy_score);
    return [=](Row row) noexcept {
      const float score = static_cast<float>(most - active[row]) / static_cast<float>(most) * busy;
      return active[row] <= idle ? 1.0F : score;
    };
  }

 private:
  ActiveRequestOptions options_;
};
static_assert(Scorer<ActiveRequestScorer>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_SCORER_ACTIVE_REQUEST_SCORER_H_

#include "tokroute/gate/tau_gate.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "internal/text.h"
#include "tokroute/gate/calibration_matrix.h"
#include "tokroute/internal/option_error.h"

namespace tokroute {
inline namespace v0 {

using internal::Int128;
using internal::kInt64Max;

namespace {

// Where to start, for somebody who has no figure yet.
std::string Nearest(const Deployment& deployment) {
  constexpr char kMeasure[] = ". Measure it: tokens of one prefill chunk / median TTFT of that many uncached tokens";
  if (deployment.model.empty()) return absl::StrCat(kMeasure, "; name the deployment to see the nearest published row");
  const std::vector<CalibrationMatch> rows = CalibrationMatrix::Published().Find(deployment, 1);
  if (rows.empty()) {
    return absl::StrCat(kMeasure, "; no published row is for ", internal::ToAbsl(deployment.model));
  }
  return absl::StrCat(kMeasure, "; the nearest published row: ", rows[0].ToString());
}

}  // namespace

absl::StatusOr<TauGate> TauGate::Create(const TauGateOptions& options) {
  TauGate gate;
  gate.rule_ = options.rule;
  if (options.always_sticky) {
    gate.always_sticky_ = true;
    gate.tau_tokens_ = kInt64Max;
    gate.penalty_ms_ = kInt64Max;
    return gate;
  }
  const double peak = options.peak_prefill_throughput;
  if (!(peak > 0) || !internal::IsFinite(peak)) {  // Also catches NaN.
    const absl::Status error = internal::OptionError(
        "TauGateOptions.peak_prefill_throughput",
        "> 0 tokens/s and finite, measured on this deployment (there is no default)", peak);
    return absl::InvalidArgumentError(absl::StrCat(error.message(), Nearest(options.deployment)));
  }
  const std::int64_t penalty_ms = options.max_ttft_penalty.count();
  if (penalty_ms <= 0) {
    return internal::OptionError("TauGateOptions.max_ttft_penalty",
                                 "> 0 ms (to never break stickiness, set always_sticky)", penalty_ms);
  }
  gate.peak_ = peak;
  gate.penalty_ms_ = penalty_ms;
  gate.own_rate_ = ToFixed(peak);
  gate.tau_tokens_ = internal::RoundedRatio(peak, penalty_ms, 1000);
  return gate;
}

std::int64_t TauGate::TauAt(std::int64_t rate) const noexcept {
  if (always_sticky_) return kInt64Max;
  if (rate == own_rate_) return tau_tokens_;
  // round(rate / 1024 x ms / 1000), halves up. rate <= 2^41 and ms < 2^63: below 2^104.
  const Int128 product = static_cast<Int128>(rate) * penalty_ms_;
  const Int128 rounded = (product + 512'000) / 1'024'000;
  return rounded > kInt64Max ? kInt64Max : static_cast<std::int64_t>(rounded);
}

bool TauGate::BreaksInTime(std::int64_t warm_tokens, std::int64_t warm_rate, std::int64_t cold_tokens,
                           std::int64_t cold_rate) const noexcept {
  if (always_sticky_) return false;
  if (warm_rate == cold_rate) return warm_tokens - cold_tokens > TauAt(warm_rate);
  // W/(w/1024) - C/(c/1024) > ms/1000  <=>  1,024,000 (W c - C w) > ms w c. Loads < 2^62, rates <= 2^41: the left side
  // is below 2^124, and the right one below 2^126 for ms < 2^44 (five centuries). Beyond that, divide: exact as well.
  const Int128 lead =
      (static_cast<Int128>(warm_tokens) * cold_rate - static_cast<Int128>(cold_tokens) * warm_rate) * 1'024'000;
  const Int128 rates = static_cast<Int128>(warm_rate) * cold_rate;
  if (penalty_ms_ < std::int64_t{1} << 44) return lead > rates * penalty_ms_;
  return lead > 0 && rates <= (lead - 1) / penalty_ms_;
}

std::int64_t TauGate::MarginInTime(std::int64_t warm_tokens, std::int64_t warm_rate, std::int64_t cold_tokens,
                                   std::int64_t cold_rate) const noexcept {
  if (always_sticky_) return -kInt64Max;
  Int128 edge;  // The warm load at which the verdict turns.
  if (warm_rate == cold_rate) {
    edge = static_cast<Int128>(cold_tokens) + TauAt(warm_rate);
  } else {
    // C w/c + ms w/1,024,000. Whole parts and remainders apart: 2^104 at most, and the fractions' sum is below 2^62.
    const Int128 from_cold = static_cast<Int128>(cold_tokens) * warm_rate;
    const Int128 from_penalty = static_cast<Int128>(penalty_ms_) * warm_rate;
    const Int128 fraction = from_cold % cold_rate * 1'024'000 + from_penalty % 1'024'000 * cold_rate;
    const Int128 one = static_cast<Int128>(1'024'000) * cold_rate;
    // Down for a strict boundary, up for an inclusive one: a margin above 0, or of at least 0, then means open.
    edge = from_cold / cold_rate + from_penalty / 1'024'000 +
           (rule_ == GateRule::kOnlyColder ? fraction + one - 1 : fraction) / one;
  }
  const Int128 margin = static_cast<Int128>(warm_tokens) - edge;
  if (margin > kInt64Max) return kInt64Max;
  if (margin < -static_cast<Int128>(kInt64Max)) return -kInt64Max;
  return static_cast<std::int64_t>(margin);
}

}  // namespace v0
}  // namespace tokroute

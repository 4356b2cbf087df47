// TauGate: when is staying on a warm endpoint no longer worth it? One calibration, one SLO, one comparison of integers.
//
//   auto gate = tokroute::TauGate::Create({.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s});
//   gate->tau_tokens();                                              // 286720
//   gate->Breaks({.warm_tokens = 286721, .cold_tokens = 0});         // true; a lead of exactly tau stays.
//
// Knows nothing of routers. See also: filter/prefix_cache_affinity_filter.h, which asks it per request.
#ifndef TOKROUTE_GATE_TAU_GATE_H_
#define TOKROUTE_GATE_TAU_GATE_H_

#include <chrono>
#include <cstdint>

#include "absl/status/statusor.h"
#include "tokroute/gate/calibration_matrix.h"
#include "tokroute/internal/exact.h"

namespace tokroute {
inline namespace v0 {

// What an open gate lets in.
enum class GateRule : std::uint8_t {
  kRelease,     // Lead > tau: every candidate, the warm ones included. The shipped rule.
  kOnlyColder,  // The earlier published rule: cold endpoints at least tau (inclusive) below the least loaded warm one
                // join the warm ones.
};

// Calibration of the gate. tau = peak_prefill_throughput x max_ttft_penalty is derived, never set by hand.
// Source: "Sticky Until Saturated: Token-Aware Routing in llm-d", section "Deriving tau from the hardware".
struct TauGateOptions {
  // Peak prefill throughput of one endpoint for this (model, accelerator, engine, chunk size). Unit: tokens/s. > 0,
  // finite. No default: a value from another deployment is wrong by up to 2.5x (same source, its table).
  double peak_prefill_throughput = 0;
  // Longest extra TTFT worth paying to stay on a warm endpoint. > 0. 0 is refused, since elsewhere it means "never break
  // stickiness" and nobody should get that by forgetting a field: say always_sticky. Default: llm-d's.
  std::chrono::milliseconds max_ttft_penalty{18'000};
  // Never open. The two fields above are then not needed and not read.
  bool always_sticky = false;
  GateRule rule = GateRule::kRelease;
  // What this is for. Read only to say, when peak_prefill_throughput is missing, which published row is nearest.
  Deployment deployment = {};
};

// The least uncached tokens in flight on either side. Unit: tokens. >= 0.
struct GateLoads {
  std::int64_t warm_tokens = 0;
  std::int64_t cold_tokens = 0;
};

// Immutable; any thread.
class TauGate {
 public:
  // A gate, or kInvalidArgument naming the field, its value and the range.
  static absl::StatusOr<TauGate> Create(const TauGateOptions& options);

  // round(peak x penalty), halves up, exact; INT64_MAX when always sticky or beyond int64: nothing exceeds that.
  std::int64_t tau_tokens() const noexcept { return tau_tokens_; }
  bool always_sticky() const noexcept { return always_sticky_; }
  GateRule rule() const noexcept { return rule_; }
  double peak_prefill_throughput() const noexcept { return peak_; }
  std::chrono::milliseconds max_ttft_penalty() const noexcept { return std::chrono::milliseconds(penalty_ms_); }

  // True when the lead of the least loaded warm endpoint over the least loaded cold one is worth abandoning. Strict: a
  // lead of exactly tau stays. Integers on purpose: the reference subtracts two quotients in floating point and opens at
  // exactly tau for about one base load in six.
  bool Breaks(const GateLoads& loads) const noexcept { return loads.warm_tokens - loads.cold_tokens > tau_tokens_; }

  // A peak prefill throughput in units of 1/1024 token/s, for the exact comparisons below. 0 (and anything not positive
  // and finite): the gate's own. At most 2^41 (2^31 tokens/s).
  std::int64_t FixedRate(double tokens_per_second) const noexcept {
    if (!(tokens_per_second > 0) || !internal::IsFinite(tokens_per_second)) return own_rate_;
    return ToFixed(tokens_per_second);
  }
  std::int64_t own_rate() const noexcept { return own_rate_; }

  // For endpoints of different rates: loads in time. a/rate_a < b/rate_b, exactly. Rates > 0; loads below 2^62.
  static bool Sooner(std::int64_t a, std::int64_t rate_a, std::int64_t b, std::int64_t rate_b) noexcept {
    return static_cast<internal::Int128>(a) * rate_b < static_cast<internal::Int128>(b) * rate_a;
  }
  // W/R_w - C/R_c > T_max, in 128-bit cross products. With equal rates: W - C > round(rate x T_max), so that it agrees
  // with Breaks.
  bool BreaksInTime(std::int64_t warm_tokens, std::int64_t warm_rate, std::int64_t cold_tokens,
                    std::int64_t cold_rate) const noexcept;
  // How far the warm load is beyond the one at which the verdict turns, in tokens of the warm endpoint's rate. Exact up to
  // a token: the gate opens above 0 (kRelease: strict, agrees with BreaksInTime) or from 0 on (kOnlyColder: inclusive).
  // Saturates.
  std::int64_t MarginInTime(std::int64_t warm_tokens, std::int64_t warm_rate, std::int64_t cold_tokens,
                            std::int64_t cold_rate) const noexcept;

 private:
  TauGate() = default;
  static std::int64_t ToFixed(double tokens_per_second) noexcept {
    constexpr double kMost = 2147483648.0;  // 2^31 tokens/s.
    const double clamped = tokens_per_second < kMost ? tokens_per_second : kMost;
    const std::int64_t fixed = internal::RoundedRatio(clamped, 1024, 1);
    return fixed > 0 ? fixed : 1;
  }
  std::int64_t TauAt(std::int64_t rate) const noexcept;

  std::int64_t tau_tokens_ = 0;
  std::int64_t penalty_ms_ = 0;
  std::int64_t own_rate_ = 1;  // Fixed point, 1/1024 token/s.
  double peak_ = 0;
  GateRule rule_ = GateRule::kRelease;
  bool always_sticky_ = false;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_GATE_TAU_GATE_H_

// Calibration: peak prefill throughput from measured TTFTs, with the refusals that a wrong measurement deserves.
//
//   R_peak = B / T(B)       B: tokens of one prefill chunk (the engine's max_num_batched_tokens)
//                           T(B): time to prefill B tokens, unloaded, nothing cached
//
//   auto peak = tokroute::CalibrateFromRecipe(samples, {.chunk_tokens = 8192});  // TTFTs of 20 random prompts of B tokens
//   if (!peak.ok()) return Fail(peak.status());                                  // "loaded engine, or cache hits", say
//   options.peak_prefill_throughput = peak->peak_prefill_throughput;
//
// Sources: "Sticky Until Saturated: Token-Aware Routing in llm-d" (the definition, the fit over k x B) and llm-d's
// calibration recipe (the median). The limits for refusals are ours.
#ifndef TOKROUTE_GATE_CALIBRATION_H_
#define TOKROUTE_GATE_CALIBRATION_H_

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace tokroute {
inline namespace v0 {

// The recipe's numbers of requests. Warm-ups are sent first and are not samples.
inline constexpr int kRecipeWarmUpRequests = 5, kRecipeMeasuredRequests = 20;

struct CalibrationOptions {
  // B. 1 .. 2^24. Unit: tokens. A result holds for this chunk size only.
  std::int64_t chunk_tokens = 8192;
  std::int64_t min_samples = 5;          // >= 1.
  // Interquartile range / median, above which the samples are refused: a loaded engine, or cache hits. > 0.
  double max_relative_iqr = 0.20;
  double min_r_squared = 0.95;           // Of the fit. 0..1.
};

struct Calibration {
  double peak_prefill_throughput = 0;    // B / T(B). Unit: tokens/s.
  double chunk_seconds = 0;              // T(B). Unit: s.
  std::int64_t chunk_tokens = 0;         // B.
  std::int64_t samples = 0;
  double relative_iqr = 0;               // Recipe: of the samples. Fit: 0.
  // Fit only: T(P) = fixed + linear P + quadratic P^2, P in tokens, T in seconds; and its R^2. Recipe: 0, R^2 = 1.
  double fixed_seconds = 0, linear_seconds = 0, quadratic_seconds = 0, r_squared = 1;

  // tau = round(R_peak x T_max), as TauGate computes it. Saturates. t_max > 0.
  std::int64_t TauTokens(std::chrono::milliseconds t_max) const noexcept;
  // The same in chunks: K = tau / B = T_max / T(B). Equal on any hardware for the same T_max / T(B).
  double TauChunks(std::chrono::milliseconds t_max) const noexcept;
  std::string ToString() const;
};

// The recipe: `ttft_seconds` of requests of exactly B random tokens each (random: prompts that repeat hit the cache), sent
// one after the other to an idle stack through the full request path. R_peak = B / median.
// kInvalidArgument, naming the field, its value and the range: bad options; fewer than min_samples; a TTFT that is not
// positive and finite (with its position); a relative IQR above the limit. Quartiles interpolate linearly between order
// statistics. O(n log n); allocates.
absl::StatusOr<Calibration> CalibrateFromRecipe(std::span<const double> ttft_seconds, const CalibrationOptions& options = {});

struct TtftSample {
  std::int64_t prompt_tokens = 0;  // P, uncached. >= 1.
  double ttft_seconds = 0;         // > 0.
};

// The fit: single requests at P = k x B, k = 1, 2, ...; least squares of a quadratic, evaluated at B. Refused besides: fewer
// than three different P, a linear term that is not positive, R^2 below the limit, a T(B) that is not positive.
absl::StatusOr<Calibration> CalibrateFromFit(std::span<const TtftSample> samples, const CalibrationOptions& options = {});

// Hardware that nobody has measured: a value to start with, from floating-point operations.
struct FirstEstimateOptions {
  double peak_flops = 0;            // Dense, of the whole endpoint (all its accelerators). Unit: FLOP/s. > 0.
  double active_parameters = 0;     // Per token (mixtures of experts: those active). > 0.
  std::int64_t layers = 0, heads = 0, head_dim = 0;  // Attention: query heads. > 0.
  std::int64_t chunk_tokens = 8192;                  // B. > 0.
  double utilisation = 0.6;         // Share of peak_flops reached. 0 < u <= 1.
};

// Not a measurement: its text says so wherever it appears.
struct FirstEstimate {
  double peak_prefill_throughput = 0;  // Unit: tokens/s.
  std::string ToString() const;        // "estimate, not measured: about 15,996 tokens/s; ..."
};

// utilisation x peak FLOP/s / (2 x active parameters + 4 x layers x heads x head_dim x B/2): a token passes every active
// weight once and attends to half the chunk on average. Within about 30 % of the measured rows for dense models.
absl::StatusOr<FirstEstimate> EstimatePeakPrefillThroughput(const FirstEstimateOptions& options);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_GATE_CALIBRATION_H_

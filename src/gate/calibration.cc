#include "tokroute/gate/calibration.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "internal/text.h"
#include "tokroute/internal/exact.h"
#include "tokroute/internal/option_error.h"

namespace tokroute {
inline namespace v0 {
namespace {

using internal::IsFinite;
using internal::OptionError;

constexpr std::int64_t kMaxChunk = std::int64_t{1} << 24;

absl::Status CheckOptions(const CalibrationOptions& options) {
  if (options.chunk_tokens < 1 || options.chunk_tokens > kMaxChunk) {
    return OptionError("CalibrationOptions.chunk_tokens", "1 .. 16777216 tokens", options.chunk_tokens);
  }
  if (options.min_samples < 1) {
    return OptionError("CalibrationOptions.min_samples", ">= 1", options.min_samples);
  }
  if (!(options.max_relative_iqr > 0) || !IsFinite(options.max_relative_iqr)) {
    return OptionError("CalibrationOptions.max_relative_iqr", "> 0 and finite", options.max_relative_iqr);
  }
  if (!(options.min_r_squared >= 0 && options.min_r_squared <= 1)) {
    return OptionError("CalibrationOptions.min_r_squared", "0 .. 1", options.min_r_squared);
  }
  return absl::OkStatus();
}

absl::Status CheckTtft(double ttft, std::size_t position) {
  if (ttft > 0 && IsFinite(ttft)) return absl::OkStatus();
  return OptionError(absl::StrCat("ttft_seconds[", position, "]"), "> 0 s and finite", ttft);
}

absl::Status CheckCount(std::size_t count, const CalibrationOptions& options) {
  if (static_cast<std::int64_t>(count) >= options.min_samples) return absl::OkStatus();
  return OptionError("samples", absl::StrCat("at least ", options.min_samples), static_cast<std::int64_t>(count));
}

// Between order statistics, linearly. `sorted` is not empty.
double Quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (position - static_cast<double>(below));
}

}  // namespace

std::int64_t Calibration::TauTokens(std::chrono::milliseconds t_max) const noexcept {
  return t_max.count() <= 0 ? 0 : internal::RoundedRatio(peak_prefill_throughput, t_max.count(), 1000);
}

double Calibration::TauChunks(std::chrono::milliseconds t_max) const noexcept {
  return static_cast<double>(t_max.count()) / 1000.0 / chunk_seconds;
}

std::string Calibration::ToString() const {
  std::string text = absl::StrFormat("R_peak %.0f tokens/s: a chunk of %d tokens in %.4f s, from %d samples",
                                     peak_prefill_throughput, chunk_tokens, chunk_seconds, samples);
  if (linear_seconds > 0) {
    absl::StrAppend(&text, absl::StrFormat(" (fit: %.4g s + %.4g s/token, R^2 %.4f)", fixed_seconds, linear_seconds, r_squared));
  } else {
    absl::StrAppend(&text, absl::StrFormat(" (median; interquartile range %.1f %% of it)", 100 * relative_iqr));
  }
  return text;
}

absl::StatusOr<Calibration> CalibrateFromRecipe(std::span<const double> ttft_seconds, const CalibrationOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (absl::Status status = CheckCount(ttft_seconds.size(), options); !status.ok()) return status;
  for (std::size_t i = 0; i < ttft_seconds.size(); ++i) {
    if (absl::Status status = CheckTtft(ttft_seconds[i], i); !status.ok()) return status;
  }
  std::vector<double> sorted(ttft_seconds.begin(), ttft_seconds.end());
  std::sort(sorted.begin(), sorted.end());
  const double median = Quantile(sorted, 0.5);
  const double iqr = (Quantile(sorted, 0.75) - Quantile(sorted, 0.25)) / median;
  if (iqr > options.max_relative_iqr) {
    return OptionError("interquartile range / median of ttft_seconds",
                       absl::StrCat("<= ", options.max_relative_iqr,
                                    " (more means a loaded engine, or cache hits: random prompts must not repeat)"),
                       iqr);
  }
  Calibration result;
  result.chunk_tokens = options.chunk_tokens;
  result.chunk_seconds = median;
  result.peak_prefill_throughput = static_cast<double>(options.chunk_tokens) / median;
  result.samples = static_cast<std::int64_t>(sorted.size());
  result.relative_iqr = iqr;
  if (!IsFinite(result.peak_prefill_throughput)) {
    return OptionError("median of ttft_seconds", "large enough that tokens / s stays finite", median);
  }
  return result;
}

absl::StatusOr<Calibration> CalibrateFromFit(std::span<const TtftSample> samples, const CalibrationOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (absl::Status status = CheckCount(samples.size(), options); !status.ok()) return status;
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (absl::Status status = CheckTtft(samples[i].ttft_seconds, i); !status.ok()) return status;
    if (samples[i].prompt_tokens < 1) {
      return OptionError(absl::StrCat("prompt_tokens[", i, "]"), ">= 1 token", samples[i].prompt_tokens);
    }
    sizes.push_back(samples[i].prompt_tokens);
  }
  std::sort(sizes.begin(), sizes.end());
  const auto distinct = std::unique(sizes.begin(), sizes.end()) - sizes.begin();
  if (distinct < 3) return OptionError("different prompt_tokens", "at least 3 for a quadratic", std::int64_t{distinct});

  // Least squares in x = P / B - mean, which keeps the normal equations well conditioned.
  const auto chunk = static_cast<double>(options.chunk_tokens);
  double mean = 0;
  for (const TtftSample& s : samples) mean += static_cast<double>(s.prompt_tokens) / chunk;
  mean /= static_cast<double>(samples.size());
  double m[3][4] = {};
  double t_mean = 0;
  for (const TtftSample& s : samples) {
    const double x = static_cast<double>(s.prompt_tokens) / chunk - mean;
    const double power[3] = {1, x, x * x};
    for (int row = 0; row < 3; ++row) {
      for (int column = 0; column < 3; ++column) m[row][column] += power[row] * power[column];
      m[row][3] += power[row] * s.ttft_seconds;
    }
    t_mean += s.ttft_seconds;
  }
  t_mean /= static_cast<double>(samples.size());
  for (int pivot = 0; pivot < 3; ++pivot) {  // Gauss-Jordan with row exchange.
    int best = pivot;
    for (int row = pivot + 1; row < 3; ++row) {
      if (std::abs(m[row][pivot]) > std::abs(m[best][pivot])) best = row;
    }
    std::swap(m[pivot], m[best]);
    if (m[pivot][pivot] == 0) return absl::InvalidArgumentError("fit: the prompt sizes do not determine a quadratic");
    for (int row = 0; row < 3; ++row) {
      if (row == pivot) continue;
      const double factor = m[row][pivot] / m[pivot][pivot];
      for (int column = pivot; column < 4; ++column) m[row][column] -= factor * m[pivot][column];
    }
  }
  const double c0 = m[0][3] / m[0][0], c1 = m[1][3] / m[1][1], c2 = m[2][3] / m[2][2];
  double residual = 0, total = 0;
  for (const TtftSample& s : samples) {
    const double x = static_cast<double>(s.prompt_tokens) / chunk - mean;
    const double miss = s.ttft_seconds - (c0 + c1 * x + c2 * x * x);
    residual += miss * miss;
    total += (s.ttft_seconds - t_mean) * (s.ttft_seconds - t_mean);
  }
  Calibration result;
  result.samples = static_cast<std::int64_t>(samples.size());
  result.chunk_tokens = options.chunk_tokens;
  // Back from x to P: (P/B - mean)^2 and its mixed term.
  result.quadratic_seconds = c2 / (chunk * chunk);
  result.linear_seconds = (c1 - 2 * c2 * mean) / chunk;
  result.fixed_seconds = c0 - c1 * mean + c2 * mean * mean;
  result.r_squared = total > 0 ? 1 - residual / total : 0;
  const double x_chunk = 1 - mean;
  result.chunk_seconds = c0 + c1 * x_chunk + c2 * x_chunk * x_chunk;
  if (!(result.linear_seconds > 0)) {
    return OptionError("linear term of the fit", "> 0 s/token (a prompt costs time per token)", result.linear_seconds);
  }
  if (!(result.r_squared >= options.min_r_squared)) {
    return OptionError("R^2 of the fit", absl::StrCat(">= ", options.min_r_squared, " (a quadratic explains the samples)"),
                       result.r_squared);
  }
  if (!(result.chunk_seconds > 0)) return OptionError("T(B) of the fit", "> 0 s", result.chunk_seconds);
  result.peak_prefill_throughput = chunk / result.chunk_seconds;
  return result;
}

absl::StatusOr<FirstEstimate> EstimatePeakPrefillThroughput(const FirstEstimateOptions& options) {
  const auto positive = [](std::string_view field, double value) {
    return value > 0 && IsFinite(value) ? absl::OkStatus() : OptionError(field, "> 0 and finite", value);
  };
  const struct {
    std::string_view field;
    double value;
  } fields[] = {{"FirstEstimateOptions.peak_flops", options.peak_flops},
                {"FirstEstimateOptions.active_parameters", options.active_parameters},
                {"FirstEstimateOptions.layers", static_cast<double>(options.layers)},
                {"FirstEstimateOptions.heads", static_cast<double>(options.heads)},
                {"FirstEstimateOptions.head_dim", static_cast<double>(options.head_dim)},
                {"FirstEstimateOptions.chunk_tokens", static_cast<double>(options.chunk_tokens)}};
  for (const auto& [field, value] : fields) {
    if (absl::Status status = positive(field, value); !status.ok()) return status;
  }
  if (!(options.utilisation > 0 && options.utilisation <= 1)) {
    return OptionError("FirstEstimateOptions.utilisation", "> 0 and <= 1", options.utilisation);
  }
  const double attention = 4.0 * static_cast<double>(options.layers) * static_cast<double>(options.heads) *
                           static_cast<double>(options.head_dim) * static_cast<double>(options.chunk_tokens) / 2.0;
  return FirstEstimate{options.utilisation * options.peak_flops / (2.0 * options.active_parameters + attention)};
}

std::string FirstEstimate::ToString() const {
  return absl::StrFormat("estimate, not measured: about %s tokens/s; measure it before you rely on it",
                         internal::Thousands(internal::RoundedRatio(peak_prefill_throughput, 1, 1)));
}

}  // namespace v0
}  // namespace tokroute

#include "tokroute/gate/calibration_matrix.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "internal/text.h"
#include "tokroute/internal/exact.h"
#include "tokroute/internal/option_error.h"

namespace tokroute {
inline namespace v0 {
namespace {

using internal::ToAbsl;

constexpr char kBlog[] = "\"Sticky Until Saturated: Token-Aware Routing in llm-d\", portability table";

bool Same(std::string_view a, std::string_view b) { return absl::EqualsIgnoreCase(ToAbsl(a), ToAbsl(b)); }

// One more caveat if the field was asked for and differs (worth 2) or is not known (worth 1).
int Compare(std::string_view field, std::string_view asked, std::string_view row, std::vector<std::string>& caveats) {
  if (asked.empty() || Same(asked, row)) return 0;
  caveats.push_back(row.empty() ? absl::StrCat(ToAbsl(field), " not stated")
                                : absl::StrCat(ToAbsl(field), " ", ToAbsl(row), ", not ", ToAbsl(asked)));
  return row.empty() ? 1 : 2;
}

int Compare(std::string_view field, std::int64_t asked, std::int64_t row, std::vector<std::string>& caveats) {
  if (asked == 0 || asked == row) return 0;
  return Compare(field, absl::StrCat(asked), row == 0 ? std::string() : absl::StrCat(row), caveats);
}

}  // namespace

CalibrationMatrix CalibrationMatrix::Published() {
  CalibrationMatrix matrix;
  matrix.rows_ = {
      {"gpt-oss-120B", "H100", "vLLM", "MXFP4", 1, 8192, 39'065, kBlog},
      {"Qwen3-32B", "TPU v7x", "vLLM", "", 8, 8192, 27'336, kBlog},
      {"Qwen3-32B", "TPU v6e", "vLLM", "", 8, 8192, 26'290, kBlog},
      {"GLM-5.2-NVFP4", "B200", "SGLang", "NVFP4", 8, 32'768, 24'027,
       absl::StrCat(kBlog, "; ten ~32k-token cache-miss prefills, median 1.369 s, with EAGLE")},
      {"Qwen3-32B", "H100", "vLLM", "", 2, 8192, 20'480, absl::StrCat(kBlog, "; quadratic fit, k = 1..19 chunks")},
      {"Qwen3-Coder-480B-FP8", "TPU v7x", "vLLM", "FP8", 8, 8192, 16'444, kBlog},
      {"Qwen3-VL-32B", "H200", "vLLM", "", 2, 8192, 15'751, kBlog},
      {"Qwen3-32B", "H100", "SGLang", "", 2, 8192, 15'360,
       absl::StrCat(kBlog, "; llm-d's own matrix published 30,720, twice too high")},
      {"Qwen3-32B", "H100", "vLLM", "", 2, 8192, 15'928, "llm-d's calibration recipe (its shipped default): median over the full request path"},
  };
  return matrix;
}

absl::Status CalibrationMatrix::Add(CalibrationRow row) {
  const std::pair<const char*, const std::string*> names[] = {
      {"model", &row.model}, {"accelerator", &row.accelerator}, {"engine", &row.engine}};
  for (const auto& [field, value] : names) {
    if (value->empty()) {
      return absl::InvalidArgumentError(absl::StrCat("CalibrationRow.", field, ": want a non-empty string, got \"\""));
    }
  }
  if (!(row.peak_prefill_throughput > 0) || !internal::IsFinite(row.peak_prefill_throughput)) {
    return internal::OptionError("CalibrationRow.peak_prefill_throughput", "> 0 tokens/s and finite",
                                 row.peak_prefill_throughput);
  }
  if (row.tensor_parallel < 0) {
    return internal::OptionError("CalibrationRow.tensor_parallel", ">= 0", row.tensor_parallel);
  }
  if (row.chunk_tokens < 0) return internal::OptionError("CalibrationRow.chunk_tokens", ">= 0 tokens", row.chunk_tokens);
  if (row.source.empty()) row.source = "operator";
  rows_.insert(rows_.begin() + static_cast<std::ptrdiff_t>(own_), std::move(row));
  ++own_;
  return absl::OkStatus();
}

std::vector<CalibrationMatch> CalibrationMatrix::Find(const Deployment& deployment, std::size_t limit) const {
  struct Scored {
    int distance;
    std::size_t position;  // Equal distances keep the rows' order. (stable_sort needs a buffer that libstdc++ 12 deprecates.)
    CalibrationMatch match;
  };
  std::vector<Scored> scored;
  for (const CalibrationRow& row : rows_) {
    if (deployment.model.empty() || !Same(row.model, deployment.model)) continue;
    CalibrationMatch match;
    match.row = row;
    int distance = 2 * Compare("accelerator", deployment.accelerator, row.accelerator, match.caveats);
    distance += 2 * Compare("engine", deployment.engine, row.engine, match.caveats);
    distance += Compare("TP", deployment.tensor_parallel, row.tensor_parallel, match.caveats);
    distance += Compare("chunk", deployment.chunk_tokens, row.chunk_tokens, match.caveats);
    distance += Compare("quantisation", deployment.quantisation, row.quantisation, match.caveats);
    match.exact = distance == 0;
    scored.push_back({distance, scored.size(), std::move(match)});
  }
  std::sort(scored.begin(), scored.end(), [](const Scored& a, const Scored& b) {
    return a.distance != b.distance ? a.distance < b.distance : a.position < b.position;
  });
  std::vector<CalibrationMatch> matches;
  for (Scored& found : scored) {
    if (matches.size() == limit) break;
    matches.push_back(std::move(found.match));
  }
  return matches;
}

std::string CalibrationMatch::ToString() const {
  std::string text = absl::StrCat(row.model, " / ", row.accelerator, " / ", row.engine);
  if (row.tensor_parallel != 0) absl::StrAppend(&text, " / TP ", row.tensor_parallel);
  if (row.chunk_tokens != 0) absl::StrAppend(&text, " / chunk ", row.chunk_tokens);
  if (!row.quantisation.empty()) absl::StrAppend(&text, " / ", row.quantisation);
  absl::StrAppend(&text, ": ", internal::Thousands(internal::RoundedRatio(row.peak_prefill_throughput, 1, 1)),
                  " tokens/s (", row.source, ")");
  if (!caveats.empty()) absl::StrAppend(&text, "; differs: ", absl::StrJoin(caveats, ", "));
  return absl::StrCat(text, "; measure it on your deployment");
}

}  // namespace v0
}  // namespace tokroute

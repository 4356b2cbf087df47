// CalibrationMatrix: peak prefill throughputs that somebody measured, each with its source, and an operator's own.
//
//   CalibrationMatrix matrix = CalibrationMatrix::Published();
//   auto found = matrix.Find({.model = "Qwen3-32B", .accelerator = "H100", .engine = "vLLM", .tensor_parallel = 2});
//   for (const auto& match : found) puts(match.ToString().c_str());
//
// A row holds for its model, accelerator, engine, tensor parallelism, chunk size and quantisation only. What a look-up
// returns is where to start; measure (gate/calibration.h) before you rely on it.
#ifndef TOKROUTE_GATE_CALIBRATION_MATRIX_H_
#define TOKROUTE_GATE_CALIBRATION_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tokroute {
inline namespace v0 {

// A serving path. Empty strings and zeros: not said. Names compare without regard to case.
struct Deployment {
  std::string_view model = {}, accelerator = {}, engine = {}, quantisation = {};
  std::int64_t tensor_parallel = 0, chunk_tokens = 0;
};

struct CalibrationRow {
  std::string model = {}, accelerator = {}, engine = {}, quantisation = {};  // Quantisation "": not stated.
  std::int64_t tensor_parallel = 0, chunk_tokens = 0;    // 0: the source does not say.
  double peak_prefill_throughput = 0;                    // Unit: tokens/s.
  std::string source = {};                               // Who measured it, and how.
};

struct CalibrationMatch {
  CalibrationRow row;
  bool exact = false;               // Nothing that was asked for differs or is unknown.
  std::vector<std::string> caveats; // What differs or is not known, field by field.
  std::string ToString() const;     // One line; says that it must be measured.
};

class CalibrationMatrix {
 public:
  CalibrationMatrix() = default;
  // The published rows: those of the source and its recipe's default.
  static CalibrationMatrix Published();

  // An operator's own row; it is found before the published ones. kInvalidArgument: no model, accelerator or engine, a
  // throughput that is not positive and finite, a negative number.
  absl::Status Add(CalibrationRow row);

  // Rows of that model (which must be given), those that differ least first, an operator's own before published ones. At
  // most `limit`. An accelerator, engine, TP, chunk or quantisation that is asked for and differs is a caveat, not an
  // exclusion. Empty: nobody measured that model.
  std::vector<CalibrationMatch> Find(const Deployment& deployment, std::size_t limit = 5) const;

  const std::vector<CalibrationRow>& rows() const noexcept { return rows_; }

 private:
  std::vector<CalibrationRow> rows_;  // Own first, then published.
  std::size_t own_ = 0;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_GATE_CALIBRATION_MATRIX_H_

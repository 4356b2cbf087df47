// One case in, one result out. Which functions there are follows from the cases' kinds.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_CASE_RUNNERS_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_CASE_RUNNERS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "tools/conformance/vectors.h"

namespace tokroute::conformance {

enum class Verdict : std::uint8_t { kPassed, kFailed, kSkipped };

struct Result {
  Verdict verdict = Verdict::kPassed;
  std::string why;  // Failed: what disagrees. Skipped: what does not exist yet.

  static Result Failed(std::string what) { return {Verdict::kFailed, std::move(what)}; }
  static Result Skipped(std::string what) { return {Verdict::kSkipped, std::move(what)}; }
  // Passed if `disagreement` is empty.
  static Result Of(std::string disagreement) {
    return disagreement.empty() ? Result{} : Failed(std::move(disagreement));
  }
  // Of a status that kept a case from running: what does not exist yet is skipped, the rest are failures.
  static Result Of(const absl::Status& status);
};

// Runs one case of the file `plugin`. Never throws: a case that cannot be read has failed.
Result RunCase(const std::string& plugin, const Json& one_case);

// By kind; they may throw for a case that cannot be read.
Result RunFilterCase(const std::string& plugin, const Json& one_case);
Result RunScoreCase(const std::string& plugin, const Json& one_case);
Result RunPickCase(const std::string& plugin, const Json& one_case);
Result RunDistributionCase(const std::string& plugin, const Json& one_case);
Result RunConfigCase(const std::string& plugin, const Json& one_case);
Result RunHashCase(const Json& one_case);
Result RunProfileCase(const Json& one_case);                // scheduler-profile and seed-compositions.
Result RunInFlightLoadSequence(const Json& one_case);       // inflight-load-producer.
Result RunApproximatePrefixSequence(const Json& one_case);  // approx-prefix-cache-producer.
Result RunPrecisePrefixMatch(const Json& one_case);         // precise-prefix-cache-producer.

}  // namespace tokroute::conformance

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_CASE_RUNNERS_H_

// The differences on purpose: where tokroute does not do what llm-d does, what it does instead, and why.
//
// The list is differences.json beside this file: an array of
//   {"file": "inflight-load-producer", "case": NAME, "kind": KIND, "design": SENTENCE, "ours": JSON PATCH}
// `ours` (RFC 6902) changes what the case expects into what tokroute promises instead, and nothing else: the case is
// then run all the same, so that a difference hides no second one. `kind` is one of
//   tag                    the case is tagged quirk, version-drift, float-boundary, doc-mismatch or deprecated
//   full-blocks            only full blocks count
//   tail-first-eviction    eviction is tail first
//   impossible-parameters  refused where llm-d accepts them silently
//   request-without-id     tracked all the same
//   counted-output         with counted output the prompt part is released at the first token
// Any other difference is a defect.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_DIFFERENCES_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_DIFFERENCES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/conformance/vectors.h"

namespace tokroute::conformance {

struct Difference {
  std::string file, case_name, kind, design;
  Json ours;
};

// The list that belongs to this version of the library.
absl::StatusOr<std::vector<Difference>> BuiltInDifferences();
absl::StatusOr<std::vector<Difference>> ReadDifferences(const std::string& path);

// Why a case may not differ in that way; empty if it may.
std::string WhyNotAllowed(const Difference& difference, const Json& one_case);

// The case with `ours` in the place of what llm-d does. kInvalidArgument if the patch does not fit, or touches anything
// but what is expected.
absl::StatusOr<Json> WithOurs(const Difference& difference, const Json& one_case);

}  // namespace tokroute::conformance

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_DIFFERENCES_H_

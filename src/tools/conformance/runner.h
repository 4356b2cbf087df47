// Runs folders of vectors against the list of differences and says what came out.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_RUNNER_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_RUNNER_H_

#include <cstdint>
#include <ostream>
#include <vector>

#include "tools/conformance/differences.h"
#include "tools/conformance/vectors.h"

namespace tokroute::conformance {

struct RunOptions {
  bool every_case = false;  // A line for each case, not only for those that did not pass.
  // Every difference must meet its case in these folders; without, those of cases that are not there are not looked at.
  bool complete = false;
};

struct Tally {
  std::int64_t passed = 0, failed = 0, skipped = 0;
  std::int64_t differing = 0;  // On purpose, as listed; none of the above.
};

// Failures: a case that disagrees; one that is listed as a difference and is not allowed to, does not differ after all,
// or does not do what the list says instead; with `complete`, a difference that no case meets. The last line written is
// "N passed, N failed, N skipped".
Tally RunFiles(const std::vector<VectorFile>& files, const std::vector<Difference>& differences,
               const RunOptions& options, std::ostream& out);

}  // namespace tokroute::conformance

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_RUNNER_H_

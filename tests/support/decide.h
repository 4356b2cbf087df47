// One decision of a policy over columns that a test writes down, without fleet, router or ledger.
#ifndef TOKROUTE_TESTS_SUPPORT_DECIDE_H_
#define TOKROUTE_TESTS_SUPPORT_DECIDE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tokroute/policy.h"
#include "tokroute/testing/scores_of.h"

namespace tokroute::testing_support {

struct Decided {
  absl::Status bound;
  RefusalReason refusal = RefusalReason::kNone;
  Decision decision;
  std::vector<Row> survivors, targets;
  std::vector<double> totals;
  std::uint32_t scores_clamped = 0, considered = 0;
  std::uint8_t emptied_by = 0;
  std::string emptied_by_name;
};

// Every signal of the library, so that erased parts find theirs.
using AllSignals = Signals<MatchedTokens, WeightedMatchedTokens, UncachedTokens, UncachedTokensInFlight, ActiveRequests,
                           OutputTokensInFlight, LastDispatch, PeakPrefillThroughput, EndpointWeight>;

template <class... Parts, class... Given>
Decided Decide(std::uint64_t seed, std::uint64_t number, Policy<Parts...> policy, const Request& request,
               const Given&... given) {
  internal::TestTable table("Decide");
  (table.Give(given), ...);
  table.Complete<AllSignals>();
  const auto bound = internal::MakePolicy("test", std::move(policy));
  Decided result;
  result.bound = bound->Bind(table.layout());
  if (!result.bound.ok()) return result;
  std::vector<double> totals(table.table().width + 1);
  internal::DecideInput input(request, table.table(), table.survivors(), totals.data());
  input.seed = seed;
  input.decision = number;
  result.refusal = bound->Decide(input, result.decision);
  result.survivors.assign(input.survivors.rows, input.survivors.rows + input.survivors.count);
  if (result.refusal == RefusalReason::kNone) {
    result.targets.assign(input.targets, input.targets + result.decision.choice.targets);
    result.totals.assign(totals.begin(), totals.begin() + input.survivors.count);
  }
  result.scores_clamped = input.scores_clamped;
  result.considered = input.considered;
  result.emptied_by = input.emptied_by;
  if (result.refusal == RefusalReason::kAllFiltered) result.emptied_by_name = bound->FilterName(input.emptied_by);
  return result;
}

}  // namespace tokroute::testing_support

#endif  // TOKROUTE_TESTS_SUPPORT_DECIDE_H_

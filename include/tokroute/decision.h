// Decision and Refusal: what was chosen, why and by what margin; or why nothing was. Values; text is made on demand.
#ifndef TOKROUTE_DECISION_H_
#define TOKROUTE_DECISION_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokroute/concepts.h"
#include "tokroute/endpoint.h"
#include "tokroute/fwd.h"
#include "tokroute/request.h"

namespace tokroute::internal {
class PolicyBase;
}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {

// The most filters of one policy, those inside chains counted.
inline constexpr std::uint32_t kMaxFilters = 6;

// Why an endpoint was chosen. Valid as long as it is held, whatever becomes of router and fleet. Copying it allocates
// nothing; reading it from several threads is safe.
struct Decision {
  std::uint64_t number = 0;          // From 1, per router. Evaluate shows the number that the next Route would take.
  Leg leg = Leg::kServe;
  std::uint32_t candidates = 0;      // Endpoints that entered the first filter.
  std::uint32_t survivors = 0;       // Those that were scored.
  Choice choice;                     // Totals, tie and runner-up.
  std::int64_t prompt_tokens = 0;    // Of the request.
  std::int64_t matched_tokens = 0;   // Of these, held by the chosen endpoint; 0 without a prefix producer.
  std::uint32_t verdict_count = 0;
  std::array<FilterVerdict, kMaxFilters> verdicts;  // In filter order; only the first verdict_count mean anything.
  std::array<EndpointId, kMaxTargets> target_ids;   // choice.targets of them; [0] is the pick.

  // The pick, and the fall-backs that the picker ranked behind it (its option max_targets says how many).
  EndpointId endpoint() const noexcept { return target_ids[0]; }
  std::span<const EndpointId> targets() const noexcept { return {target_ids.data(), choice.targets}; }
  std::string_view endpoint_name() const noexcept;
  std::string_view policy_name() const noexcept;
  std::string_view filter_name(std::uint32_t i) const noexcept;  // i < verdict_count.
  std::span<const FilterVerdict> filter_verdicts() const noexcept { return {verdicts.data(), verdict_count}; }

  // The verdict of the first filter of that name; null if the policy has none.
  const FilterVerdict* verdict(std::string_view filter) const noexcept;

  // One paragraph for an operator. Allocates.
  std::string ToString() const;

  std::shared_ptr<const EndpointRecord> record;          // Of the pick.
  std::shared_ptr<const internal::PolicyBase> policy;    // Keeps names and explanations alive.
};

enum class RefusalReason : std::uint8_t {
  kNone,            // Not refused.
  kNoEndpoint,      // The fleet is empty.
  kNotServed,       // Nobody serves the request's model.
  kAllDrained,      // Those who do are drained ...
  kAllIneligible,   // ... or ejected (or some of each).
  kAllExcluded,     // The caller excluded everybody left.
  kAllFiltered,     // A filter kept nobody.
  kNobodyPicked,    // The picker ranked nobody.
  kBadRequest,      // `fault` names field, value and range.
  kUnknownPolicy,   // No policy of the name that RouteOptions asked for.
  kOutOfMemory,     // No memory for one more ticket.
};

std::string_view ToString(RefusalReason reason) noexcept;

// Why no endpoint was chosen. Making, copying and dropping one allocates nothing.
struct Refusal {
  RefusalReason reason = RefusalReason::kNone;
  std::uint8_t filter = 0;         // kAllFiltered: which.
  Leg leg = Leg::kServe;           // Of which leg.
  std::uint32_t considered = 0;    // Endpoints in the fleet, or candidates before the filter.
  RequestFault fault;              // kBadRequest.
  std::shared_ptr<const internal::PolicyBase> policy;  // kAllFiltered, kNobodyPicked: knows the filter's name.

  std::string_view filter_name() const noexcept;  // kAllFiltered, else "".
  std::string ToString() const;                   // A sentence for an operator. Allocates.
};

// Everything a policy computed for one decision. Asked for by RouteOptions::trace; filling it allocates, under the
// router's lock, so it is for tests, samples and incidents, not for every request.
struct Trace {
  struct FilterStep {
    std::string filter;
    std::string_view reason;
    std::vector<EndpointId> kept;
  };
  struct Score {
    EndpointId endpoint;
    std::string name;
    std::vector<float> raw;        // Per scorer, clamped to 0..1.
    std::vector<double> weighted;  // Per scorer: weight x raw.
    double total = 0;
  };
  std::vector<FilterStep> filters;
  std::vector<std::string> scorers;
  std::vector<float> weights;
  std::vector<Score> scores;  // Of every survivor, in row order.

  std::string ToString() const;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_DECISION_H_

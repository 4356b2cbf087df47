// The policy boundary: one virtual call from the router to the composed template.
#ifndef TOKROUTE_INTERNAL_POLICY_BASE_H_
#define TOKROUTE_INTERNAL_POLICY_BASE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "tokroute/decision.h"
#include "tokroute/internal/column_table.h"
#include "tokroute/request.h"

namespace tokroute::internal {

// What one decision works on. Lives inside the critical section.
struct DecideInput {
  DecideInput(const Request& r, const ColumnTable& t, Survivors& s, double* room) noexcept
      : request(r), table(t), survivors(s), totals(room) {}
  const Request& request;
  const ColumnTable& table;
  Survivors& survivors;
  double* totals;  // Room for kMaxEndpoints.
  std::uint64_t seed = 0;
  std::uint64_t decision = 0;
  std::chrono::nanoseconds now{};
  Trace* trace = nullptr;
  // Results besides the Decision.
  Row targets[kMaxTargets];  // The choice says how many of them mean anything.
  std::uint32_t scores_clamped = 0;
  std::uint32_t considered = 0;  // On a refusal: candidates before the filter that kept nobody.
  std::uint8_t emptied_by = 0;
};

// The stage numbers that key random draws: filters count from 0, the picker stands apart, legs lie 64 apart.
inline constexpr std::uint64_t kPickerStage = 63, kStagesPerLeg = 64;

class PolicyBase {
 public:
  explicit PolicyBase(std::string name) : name_(std::move(name)) {}
  virtual ~PolicyBase() = default;
  PolicyBase(const PolicyBase&) = delete;
  PolicyBase& operator=(const PolicyBase&) = delete;

  // Checks the parts and resolves their columns. Once, before the first Decide.
  virtual absl::Status Bind(const ColumnLayout& layout) = 0;
  // Fills verdicts, choice and input.targets. kNone, kAllFiltered or kNobodyPicked.
  virtual RefusalReason Decide(DecideInput& input, Decision& decision) const noexcept = 0;
  virtual std::string_view FilterName(std::uint32_t i) const noexcept = 0;
  virtual std::string ExplainFilter(std::uint32_t i, const FilterVerdict& verdict) const = 0;
  std::string_view name() const noexcept { return name_; }

 private:
  const std::string name_;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_POLICY_BASE_H_

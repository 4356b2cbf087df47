// RoundRobinPicker: the survivor whose last dispatch is longest ago.
//
// A position counter skips or repeats endpoints as soon as candidate sets differ from request to request. This one reads
// the ledger's LastDispatch instead, so it is fair over any mix of sets and policies of one router.
#ifndef TOKROUTE_PICKER_ROUND_ROBIN_PICKER_H_
#define TOKROUTE_PICKER_ROUND_ROBIN_PICKER_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "tokroute/picker/picker_options.h"

namespace tokroute {
inline namespace v0 {

// Totals are ignored. Endpoints never used come first, drawn uniformly among themselves; after one round the order is
// fixed and strictly cyclic.
class RoundRobinPicker {
 public:
  static constexpr std::string_view kName = "round-robin-picker";
  using Consumes = Signals<LastDispatch>;

  RoundRobinPicker() = default;
  explicit RoundRobinPicker(const PickerOptions& options) : options_(options) {}
  absl::Status Check() const { return internal::CheckPicker(options_); }

  Choice Pick(const Request&, CandidatesFor<Consumes> candidates, std::span<const double> totals, Stage& stage,
              std::span<Row> targets) const noexcept {
    Choice choice;
    const std::uint64_t* last = candidates.Column<LastDispatch>().data();
    const std::uint32_t count = candidates.size();
    const std::uint32_t wanted = internal::TargetCount(options_, count, targets.size());
    while (choice.targets < wanted) {
      std::uint32_t equal = 0, first = count;
      for (std::uint32_t i = 0; i < count; ++i) {
        const Row row = candidates.begin()[i];
        if (internal::Contains(targets.data(), choice.targets, row)) continue;
        if (first == count || last[row] < last[candidates.begin()[first]]) {
          first = i, equal = 1;
        } else if (last[row] == last[candidates.begin()[first]]) {
          ++equal;
        }
      }
      std::uint32_t skip = equal > 1 ? stage.random.Below(equal) : 0, at = first;
      for (;; ++at) {
        const Row row = candidates.begin()[at];
        if (last[row] != last[candidates.begin()[first]]) continue;
        if (!internal::Contains(targets.data(), choice.targets, row) && skip-- == 0) break;
      }
      if (choice.targets == 0) {
        choice.tied = equal;
        choice.best = choice.runner_up = totals[at];
      }
      targets[choice.targets++] = candidates.begin()[at];
    }
    return choice;
  }

 private:
  PickerOptions options_;
};
static_assert(Picker<RoundRobinPicker>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PICKER_ROUND_ROBIN_PICKER_H_

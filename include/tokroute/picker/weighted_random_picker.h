// WeightedRandomPicker: drawn with probability total / sum of totals; further targets likewise, without replacement.
#ifndef TOKROUTE_PICKER_WEIGHTED_RANDOM_PICKER_H_
#define TOKROUTE_PICKER_WEIGHTED_RANDOM_PICKER_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "tokroute/picker/picker_options.h"

namespace tokroute {
inline namespace v0 {

// By cumulative sums: exact in proportion at any scale of the totals, without the logarithms or powers of the usual
// reservoir (whose keys U^(1/w) underflow for small weights). A total of 0 is never drawn while a positive one is left;
// when only zeros are left they are drawn uniformly, to fill the places.
class WeightedRandomPicker {
 public:
  static constexpr std::string_view kName = "weighted-random-picker";
  using Consumes = Signals<>;

  WeightedRandomPicker() = default;
  explicit WeightedRandomPicker(const PickerOptions& options) : options_(options) {}
  absl::Status Check() const { return internal::CheckPicker(options_); }

  // choice.best is the pick's total, runner_up the best total among the others. One draw per target.
  Choice Pick(const Request&, CandidatesFor<Consumes> candidates, std::span<const double> totals, Stage& stage,
              std::span<Row> targets) const noexcept {
    Choice choice;
    const Row* rows = candidates.begin();
    const std::uint32_t count = candidates.size();
    const std::uint32_t wanted = internal::TargetCount(options_, count, targets.size());
    while (choice.targets < wanted) {
      const auto open = [&](std::uint32_t i) {
        return !internal::Contains(targets.data(), choice.targets, rows[i]);
      };
      double sum = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        if (totals[i] > 0 && open(i)) sum += totals[i];
      }
      std::uint32_t chosen = count;
      if (sum > 0) {
        const double mark = stage.random.Unit() * sum;
        double reached = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
          if (!(totals[i] > 0) || !open(i)) continue;
          chosen = i;  // The last positive one, should rounding leave the mark unreached.
          reached += totals[i];
          if (mark < reached) break;
        }
      } else {
        std::uint32_t skip = stage.random.Below(count - choice.targets);
        for (std::uint32_t i = 0; i < count && chosen == count; ++i) {
          if (open(i) && skip-- == 0) chosen = i;
        }
      }
      if (choice.targets == 0) choice.best = totals[chosen];
      targets[choice.targets++] = rows[chosen];
    }
    choice.runner_up = choice.best;
    bool any = false;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (totals[i] == choice.best) ++choice.tied;
      if (wanted == 0 || rows[i] == targets[0]) continue;
      if (!any || totals[i] > choice.runner_up) choice.runner_up = totals[i], any = true;
    }
    return choice;
  }

 private:
  PickerOptions options_;
};
static_assert(Picker<WeightedRandomPicker>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PICKER_WEIGHTED_RANDOM_PICKER_H_

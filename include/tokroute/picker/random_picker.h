// RandomPicker: uniform over the survivors, whatever they scored.
#ifndef TOKROUTE_PICKER_RANDOM_PICKER_H_
#define TOKROUTE_PICKER_RANDOM_PICKER_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "tokroute/picker/picker_options.h"

namespace tokroute {
inline namespace v0 {

class RandomPicker {
 public:
  static constexpr std::string_view kName = "random-picker";
  using Consumes = Signals<>;

  RandomPicker() = default;
  explicit RandomPicker(const PickerOptions& options) : options_(options) {}
  absl::Status Check() const { return internal::CheckPicker(options_); }

  // choice.best is the pick's total and runner_up the same: nothing is ranked. One draw per target.
  Choice Pick(const Request&, CandidatesFor<Consumes> candidates, std::span<const double> totals, Stage& stage,
              std::span<Row> targets) const noexcept {
    Choice choice;
    const std::uint32_t count = candidates.size();
    const std::uint32_t wanted = internal::TargetCount(options_, count, targets.size());
    while (choice.targets < wanted) {
      std::uint32_t skip = stage.random.Below(count - choice.targets);
      for (std::uint32_t i = 0; i < count; ++i) {
        const Row row = candidates.begin()[i];
        if (internal::Contains(targets.data(), choice.targets, row) || skip-- != 0) continue;
        if (choice.targets == 0) choice.best = choice.runner_up = totals[i];
        targets[choice.targets++] = row;
        break;
      }
    }
    choice.tied = wanted == 0 ? 0 : count;
    return choice;
  }

 private:
  PickerOptions options_;
};
static_assert(Picker<RandomPicker>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PICKER_RANDOM_PICKER_H_

// What all pickers share: how many targets they rank.
#ifndef TOKROUTE_PICKER_PICKER_OPTIONS_H_
#define TOKROUTE_PICKER_PICKER_OPTIONS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/internal/option_error.h"

namespace tokroute {
inline namespace v0 {

struct PickerOptions {
  // Targets to rank: the pick and its fall-backs (Decision::targets). 1 .. kMaxTargets.
  std::uint32_t max_targets = 1;
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

inline absl::Status CheckPicker(const PickerOptions& options) {
  if (options.max_targets >= 1 && options.max_targets <= kMaxTargets) return absl::OkStatus();
  return OptionError("PickerOptions.max_targets", "1 .. 8", std::int64_t{options.max_targets});
}

// How many a picker fills.
inline std::uint32_t TargetCount(const PickerOptions& options, std::size_t survivors, std::size_t room) noexcept {
  std::size_t count = options.max_targets;
  if (survivors < count) count = survivors;
  if (room < count) count = room;
  return static_cast<std::uint32_t>(count);
}

inline bool Contains(const Row* targets, std::uint32_t count, Row row) noexcept {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (targets[i] == row) return true;
  }
  return false;
}

}  // namespace tokroute::internal

#endif  // TOKROUTE_PICKER_PICKER_OPTIONS_H_

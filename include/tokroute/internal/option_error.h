// One way to refuse an option: "TauGateOptions.max_ttft_penalty: want > 0 ms, got -3".
#ifndef TOKROUTE_INTERNAL_OPTION_ERROR_H_
#define TOKROUTE_INTERNAL_OPTION_ERROR_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace tokroute::internal {

absl::Status OptionError(std::string_view field, std::string_view want, double got);
absl::Status OptionError(std::string_view field, std::string_view want, std::int64_t got);

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_OPTION_ERROR_H_

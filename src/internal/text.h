// Text for people: numbers with thousands separators.
#ifndef TOKROUTE_SRC_INTERNAL_TEXT_H_
#define TOKROUTE_SRC_INTERNAL_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/strings/string_view.h"

namespace tokroute::internal {

std::string Thousands(std::int64_t value);  // -1234567 -> "-1,234,567".

// Some packaged abseils have a string_view of their own; this is right with both kinds.
inline absl::string_view ToAbsl(std::string_view s) { return absl::string_view(s.data(), s.size()); }

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_INTERNAL_TEXT_H_

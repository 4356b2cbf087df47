#include "internal/text.h"

#include "absl/strings/str_cat.h"
#include "tokroute/internal/option_error.h"

namespace tokroute::internal {

std::string Thousands(std::int64_t value) {
  const bool negative = value < 0;
  std::string digits = std::to_string(negative ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value));
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return negative ? "-" + digits : digits;
}

absl::Status OptionError(std::string_view field, std::string_view want, double got) {
  return absl::InvalidArgumentError(absl::StrCat(ToAbsl(field), ": want ", ToAbsl(want), ", got ", got));
}

absl::Status OptionError(std::string_view field, std::string_view want, std::int64_t got) {
  return absl::InvalidArgumentError(absl::StrCat(ToAbsl(field), ": want ", ToAbsl(want), ", got ", got));
}

}  // namespace tokroute::internal

// Command-line numbers with a range: "--endpoints: want 1 .. 8192, got '0'".
#ifndef TOKROUTE_SRC_TOOLS_NUMBER_OPTION_H_
#define TOKROUTE_SRC_TOOLS_NUMBER_OPTION_H_

#include <charconv>
#include <string>
#include <system_error>
#include <type_traits>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace tokroute::tools {

template <class T>
struct NumberRange {
  T least{}, most{};
  bool above_least = false;  // Without `least` itself.
};

// The whole text as a number in the range; false otherwise. NaN and infinity are in no range. Locales have no say.
template <class T>
bool ParseNumber(const std::string& text, const NumberRange<T>& range, T& out) {
  T value{};
  if constexpr (std::is_floating_point_v<T>) {
    if (!absl::SimpleAtod(text, &value)) return false;  // Clang's libc++ has no from_chars for double yet.
  } else {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return false;
  }
  const bool inside = (range.above_least ? value > range.least : value >= range.least) && value <= range.most;
  if (inside) out = value;
  return inside;
}

// An option of one number, `value` being its default. CLI11's own conversion and its Range say neither the option's
// range nor, for some inputs, the option.
template <class T>
CLI::Option* AddNumber(CLI::App& app, const std::string& name, T& value, const NumberRange<T>& range,
                       const std::string& unit, const std::string& help) {
  const std::string want = absl::StrCat(range.above_least ? "more than " : "", range.least, " .. ", range.most,
                                        unit.empty() ? "" : " ", unit);
  return app
      .add_option_function<std::string>(
          name,
          [=, &value](const std::string& text) {
            if (ParseNumber(text, range, value)) return;
            throw CLI::ValidationError(
                name, absl::StrCat("want ", std::is_integral_v<T> ? "an integer " : "", want, ", got '", text, "'"));
          },
          absl::StrCat(help, " (", want, ")"))
      ->type_name("N")
      ->default_str(absl::StrCat(value));
}

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_NUMBER_OPTION_H_

#include "tokroute/policy.h"

#include "absl/strings/str_cat.h"
#include "tokroute/internal/exact.h"
#include "tokroute/internal/option_error.h"
#include "internal/text.h"

namespace tokroute::internal {

absl::Status MissingSignal(std::string_view plugin, const SignalInfo& signal, const ColumnLayout& layout) {
  if (layout.Find(signal) == -2) {
    return absl::InvalidArgumentError(absl::StrCat(ToAbsl(plugin), " consumes ", ToAbsl(signal.name),
                                                   " with another value type than this router's producer fills"));
  }
  return absl::InvalidArgumentError(absl::StrCat(ToAbsl(plugin), " consumes ", ToAbsl(signal.name),
                                                 ", which no producer of this router fills"));
}

absl::Status CheckWeight(std::string_view scorer, float weight) {
  if (weight >= 0 && IsFinite(static_cast<double>(weight))) return absl::OkStatus();
  return OptionError(absl::StrCat("weight of ", ToAbsl(scorer)), ">= 0 and finite", static_cast<double>(weight));
}

absl::Status TooManyFilters(std::uint32_t count) {
  return OptionError("filters of a policy", absl::StrCat("at most ", kMaxFilters), std::int64_t{count});
}

absl::Status BoundAny<FilterChain>::Bind(const ColumnLayout& layout) {
  for (AnyFilter& filter : part.filters()) {
    if (absl::Status status = filter.Bind(layout); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status BoundAny<WeightedSum>::Bind(const ColumnLayout& layout) {
  for (WeightedSum::Term& term : part.terms()) {
    if (absl::Status status = CheckWeight(term.scorer.name(), term.weight); !status.ok()) return status;
    if (absl::Status status = term.scorer.Bind(layout); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace tokroute::internal

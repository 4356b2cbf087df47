// The plugins that users link, by llm-d's type name and with llm-d's parameters.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_PLUGINS_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_PLUGINS_H_

#include <string>

#include "absl/status/statusor.h"
#include "tokroute/erased.h"
#include "tools/conformance/llmd_params.h"

namespace tokroute::conformance {

using llmd::Json;

// kUnimplemented: no plugin of that name, or not with these parameters, yet; kInvalidArgument: refused, in llm-d's
// terms.
absl::StatusOr<AnyFilter> MakeFilter(const std::string& type, const Json& params);
absl::StatusOr<AnyScorer> MakeScorer(const std::string& type, const Json& params);
absl::StatusOr<AnyPicker> MakePicker(const std::string& type, const Json& params);

// Constructs any plugin, producers included, and says what is then in force.
absl::StatusOr<Json> EffectiveParams(const std::string& type, const Json& params);

}  // namespace tokroute::conformance

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_PLUGINS_H_

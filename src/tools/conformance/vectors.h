// The vector files: one per plugin, named after it, each an array of cases; and what a case may say.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_VECTORS_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_VECTORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "tokroute/fwd.h"

namespace tokroute::conformance {

using Json = nlohmann::json;

struct VectorFile {
  std::string plugin;       // The file's name without ".json".
  std::vector<Json> cases;  // Each an object with a name that is unique in the file.
};

// The vector files of a folder, by name. Errors name the folder, the file and what is wrong with it: no such folder, no
// vector file in it, not JSON, not an array of named cases.
absl::StatusOr<std::vector<VectorFile>> ReadFolder(const std::string& folder);

// Reads fields, with a default where they are absent or null. A field of another type throws nlohmann's exception,
// which names the types; whoever runs a case turns that into its failure.
std::int64_t IntegerOr(const Json& object, const char* key, std::int64_t unless_given);
std::string TextOr(const Json& object, const char* key, const std::string& unless_given);
// The object or array under a key; an empty one where it is absent or null.
const Json& ChildOr(const Json& object, const char* key);

// Token ids: a list, or {"range": [first, last]} for consecutive ids, both ends included.
std::vector<TokenId> ReadTokens(const Json& tokens);

// What `expected` says and `actual` does not, in one line; empty if they agree. By key of `expected`:
//   scores, totals       maps with exactly these keys, to 1e-6 x max(1, |expected|)
//   inflight, lruEntries maps with exactly these keys, but for zero entries; exact
//   match                exactly these endpoints, and of each the fields listed; integers exact, other numbers to 1e-9
//   effective            the fields listed
//   note, tieBreak, perStep  not compared
// Anything else: equal, numbers to 1e-9. A key that `actual` lacks is a disagreement, so nothing goes unread.
std::string Disagreement(const Json& expected, const Json& actual);

}  // namespace tokroute::conformance

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_VECTORS_H_

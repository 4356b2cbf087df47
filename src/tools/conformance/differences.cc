#include "tools/conformance/differences.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/conformance/differences_json.h"  // Generated: kDifferencesJson.

namespace tokroute::conformance {
namespace {

bool HasTag(const Json& one_case, const char* tag) {
  const Json& tags = ChildOr(one_case, "tags");
  return std::find(tags.begin(), tags.end(), Json(tag)) != tags.end();
}

bool AnyStep(const Json& one_case, bool (*holds)(const Json&)) {
  const Json& steps = ChildOr(one_case, "steps");
  return std::any_of(steps.begin(), steps.end(), holds);
}

absl::StatusOr<std::vector<Difference>> Parse(const std::string& text, const std::string& from) {
  std::vector<Difference> all;
  std::set<std::pair<std::string, std::string>> seen;
  try {
    const Json list = Json::parse(text);
    if (!list.is_array()) return absl::InvalidArgumentError(absl::StrCat(from, ": want an array of differences"));
    for (const Json& one : list) {
      for (const auto& item : one.items()) {
        if (item.key() != "file" && item.key() != "case" && item.key() != "kind" && item.key() != "design" &&
            item.key() != "ours") {
          return absl::InvalidArgumentError(absl::StrCat(from, ": unknown field ", item.key()));
        }
      }
      Difference difference{.file = one.at("file").get<std::string>(),
                            .case_name = one.at("case").get<std::string>(),
                            .kind = one.at("kind").get<std::string>(),
                            .design = one.at("design").get<std::string>(),
                            .ours = one.at("ours")};
      const std::string where = absl::StrCat(from, ": ", difference.file, ": ", difference.case_name);
      if (difference.design.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": no sentence of the design asks for it"));
      }
      if (!seen.emplace(difference.file, difference.case_name).second) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": listed twice"));
      }
      all.push_back(std::move(difference));
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(from, ": ", error.what()));
  }
  return all;
}

}  // namespace

absl::StatusOr<std::vector<Difference>> BuiltInDifferences() { return Parse(kDifferencesJson, "differences.json"); }

absl::StatusOr<std::vector<Difference>> ReadDifferences(const std::string& path) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  return Parse(std::string(std::istreambuf_iterator<char>(in), {}), path);
}

std::string WhyNotAllowed(const Difference& difference, const Json& one_case) {
  const Json& params = ChildOr(one_case, "params");
  const std::string& kind = difference.kind;
  if (kind == "tag") {
    for (const char* tag : {"quirk", "version-drift", "float-boundary", "doc-mismatch", "deprecated"}) {
      if (HasTag(one_case, tag)) return "";
    }
    return "a difference by tag, but the case has none of the tags that allow one";
  }
  // The kinds apply only where a case can be about them at all.
  if (kind == "full-blocks") {
    const bool blocks = params.contains("blockSizeTokens") || params.contains("blockSize");
    return blocks ? "" : "a difference of kind full-blocks, but the case says no block size";
  }
  if (kind == "tail-first-eviction") {
    return params.contains("lruCapacityPerServer") ? ""
                                                   : "a difference of kind tail-first-eviction, but no capacity is set";
  }
  if (kind == "impossible-parameters") {
    return !params.empty() ? "" : "a difference of kind impossible-parameters, but the case has no parameters";
  }
  if (kind == "request-without-id") {
    const bool without = AnyStep(one_case, [](const Json& step) {
      return step.contains("dispatch") && TextOr(step["dispatch"], "requestId", "").empty();
    });
    return without ? "" : "a difference of kind request-without-id, but every request has one";
  }
  if (kind == "counted-output") {
    const bool counted = params.contains("addEstimatedOutputTokens") && params["addEstimatedOutputTokens"] == true;
    return counted ? "" : "a difference of kind counted-output, but output is not counted";
  }
  return absl::StrCat("no difference may be of kind \"", kind, "\"");
}

absl::StatusOr<Json> WithOurs(const Difference& difference, const Json& one_case) {
  try {
    if (difference.ours.empty()) return absl::InvalidArgumentError("ours: says nothing of what we do instead");
    for (const Json& change : difference.ours) {
      const std::string path = change.at("path").get<std::string>();
      const bool on_expectation = path.rfind("/expect/", 0) == 0 ||
                                  (path.rfind("/steps/", 0) == 0 && path.find("/expect/") == path.find('/', 7));
      if (!on_expectation) return absl::InvalidArgumentError("ours: changes more than what is expected: " + path);
      if (change.contains("from")) return absl::InvalidArgumentError("ours: only add, remove and replace");
    }
    return one_case.patch(difference.ours);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("ours: ", error.what()));
  }
}

}  // namespace tokroute::conformance

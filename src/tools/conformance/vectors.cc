#include "tools/conformance/vectors.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tokroute::conformance {
namespace {

absl::StatusOr<VectorFile> ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be read"));
  VectorFile file;
  file.plugin = path.stem().string();
  Json content;
  try {
    content = Json::parse(in);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": not JSON: ", error.what()));
  }
  if (!content.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), ": want an array of cases, got ", content.type_name()));
  }
  std::set<std::string> names;
  for (std::size_t i = 0; i < content.size(); ++i) {
    Json& one = content[i];
    if (!one.is_object() || !one.contains("name") || !one["name"].is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(path.string(), ": case ", i, " has no name"));
    }
    if (!names.insert(one["name"].get<std::string>()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(path.string(), ": two cases are named \"", one["name"].get<std::string>(), "\""));
    }
    file.cases.push_back(std::move(one));
  }
  return file;
}

bool IsZero(const Json& value) {
  if (value.is_number()) return value == 0;
  if (!value.is_object()) return false;
  return std::all_of(value.begin(), value.end(), [](const Json& field) { return field == 0; });
}

Json WithoutZeros(const Json& map) {
  Json kept = Json::object();
  for (const auto& item : map.items()) {
    if (!IsZero(item.value())) kept[item.key()] = item.value();
  }
  return kept;
}

// How far two objects may differ in their keys.
enum class Keys { kSame, kListedOnly };

std::string Compare(const std::string& path, const Json& expected, const Json& actual, double tolerance, Keys keys) {
  const auto differs = [&] { return absl::StrCat(path, ": want ", expected.dump(), ", got ", actual.dump()); };
  if (expected.is_number() && actual.is_number()) {
    const double want = expected.get<double>(), got = actual.get<double>();
    if (expected.is_number_integer() && actual.is_number_integer()) return expected == actual ? "" : differs();
    return std::fabs(want - got) <= tolerance * std::max(1.0, std::fabs(want)) ? "" : differs();
  }
  if (expected.is_object() && actual.is_object()) {
    for (const auto& item : expected.items()) {
      if (!actual.contains(item.key()))
        return absl::StrCat(path, ".", item.key(), ": want ", item.value().dump(), ", got none");
      const std::string found = Compare(path + "." + item.key(), item.value(), actual[item.key()], tolerance, keys);
      if (!found.empty()) return found;
    }
    if (keys == Keys::kSame && expected.size() != actual.size()) return differs();
    return "";
  }
  if (expected.is_array() && actual.is_array() && expected.size() == actual.size()) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::string found = Compare(absl::StrCat(path, "[", i, "]"), expected[i], actual[i], tolerance, keys);
      if (!found.empty()) return found;
    }
    return "";
  }
  return expected == actual ? "" : differs();
}

std::string CompareMatch(const Json& expected, const Json& actual) {
  if (!expected.is_object() || expected.size() != actual.size()) {
    return absl::StrCat("match: want ", expected.dump(), ", got ", actual.dump());
  }
  for (const auto& endpoint : expected.items()) {
    const std::string where = "match." + endpoint.key();
    if (!actual.contains(endpoint.key())) return where + ": got none";
    const Json& got = actual[endpoint.key()];
    for (const auto& field : endpoint.value().items()) {
      const std::string path = absl::StrCat(where, ".", field.key());
      if (!got.contains(field.key())) return absl::StrCat(path, ": want ", field.value().dump(), ", got none");
      const std::string found = Compare(path, field.value(), got[field.key()], 1e-9, Keys::kSame);
      if (!found.empty()) return found;
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<std::vector<VectorFile>> ReadFolder(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    return absl::NotFoundError(absl::StrCat(folder, ": no such folder"));
  std::vector<std::filesystem::path> paths;
  std::filesystem::directory_iterator entries(folder, error);
  if (error) return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  for (const auto& entry : entries) {
    if (entry.path().extension() == ".json") paths.push_back(entry.path());
  }
  if (paths.empty()) return absl::NotFoundError(absl::StrCat(folder, ": no vector file (*.json) in it"));
  std::sort(paths.begin(), paths.end());  // A folder's own order is no order.
  std::vector<VectorFile> files;
  for (const std::filesystem::path& path : paths) {
    absl::StatusOr<VectorFile> file = ReadFile(path);
    if (!file.ok()) return file.status();
    files.push_back(*std::move(file));
  }
  return files;
}

std::int64_t IntegerOr(const Json& object, const char* key, std::int64_t unless_given) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return unless_given;
  // nlohmann would cut a fraction off.
  if (!found->is_number_integer())
    throw std::invalid_argument(absl::StrCat(key, ": want an integer, got ", found->dump()));
  return found->get<std::int64_t>();
}

std::string TextOr(const Json& object, const char* key, const std::string& unless_given) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? unless_given : found->get<std::string>();
}

const Json& ChildOr(const Json& object, const char* key) {
  static const Json kEmpty = Json::object();
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? kEmpty : *found;
}

std::vector<TokenId> ReadTokens(const Json& tokens) {
  if (!tokens.is_object()) return tokens.get<std::vector<TokenId>>();
  const Json& range = tokens.at("range");
  std::vector<TokenId> all;
  for (auto id = range.at(0).get<std::int64_t>(); id <= range.at(1).get<std::int64_t>(); ++id) {
    all.push_back(static_cast<TokenId>(id));
  }
  return all;
}

std::string Disagreement(const Json& expected, const Json& actual) {
  for (const auto& item : expected.items()) {
    const std::string& key = item.key();
    if (key == "note" || key == "tieBreak" || key == "perStep") continue;
    if (!actual.contains(key)) return absl::StrCat(key, ": this runner has nothing to compare it with");
    std::string found;
    if (key == "scores" || key == "totals") {
      found = Compare(key, item.value(), actual[key], 1e-6, Keys::kSame);
    } else if (key == "inflight" || key == "lruEntries") {
      found = Compare(key, WithoutZeros(item.value()), WithoutZeros(actual[key]), 0, Keys::kSame);
    } else if (key == "match") {
      found = CompareMatch(item.value(), actual[key]);
    } else {
      found = Compare(key, item.value(), actual[key], 1e-9, key == "effective" ? Keys::kListedOnly : Keys::kSame);
    }
    if (!found.empty()) return found;
  }
  return "";
}

}  // namespace tokroute::conformance

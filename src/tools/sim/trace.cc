#include "tools/sim/trace.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "internal/text.h"
#include "nlohmann/json.hpp"

namespace tokroute::tools {
namespace {

using internal::ToAbsl;
using Json = nlohmann::json;

constexpr std::size_t kSkippedShown = 5;

// A value as a message shows it: short, whatever the line holds. Arrays and objects are only named: dump() recurses,
// and a line of a million brackets must not end in a stack overflow.
std::string Shown(const Json& value) {
  if (value.is_structured()) return absl::StrCat("an ", value.type_name());
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 40) text = text.substr(0, 37) + "...";
  return text;
}

// Reads an integer field; what is wrong, or "".
std::string ReadField(const Json& object, const char* field, std::int64_t least, std::int64_t most, std::int64_t& out) {
  const auto found = object.find(field);
  if (found == object.end()) return absl::StrCat("no field \"", field, "\"");
  const std::string want = absl::StrCat("\"", field, "\": want an integer ", least, " .. ", most, ", got ");
  if (!found->is_number_integer()) return want + Shown(*found);
  // An unsigned value beyond int64 would turn negative in get<int64_t>().
  const bool huge = found->is_number_unsigned() && found->get<std::uint64_t>() > static_cast<std::uint64_t>(most);
  const auto value = huge ? std::int64_t{0} : found->get<std::int64_t>();
  if (huge || value < least || value > most) return want + Shown(*found);
  out = value;
  return "";
}

std::string ReadHashIds(const Json& object, TraceRequest& out) {
  const auto found = object.find("hash_ids");
  if (found == object.end()) return "no field \"hash_ids\"";
  if (!found->is_array()) return absl::StrCat("\"hash_ids\": want an array of integers, got ", Shown(*found));
  const std::int64_t blocks = (out.input_tokens + kTraceBlockTokens - 1) / kTraceBlockTokens;
  if (static_cast<std::int64_t>(found->size()) != blocks) {
    return absl::StrCat("\"hash_ids\": want ", blocks, " ids (one per ", kTraceBlockTokens, " of ", out.input_tokens,
                        " input tokens), got ", found->size());
  }
  out.hash_ids.reserve(found->size());
  for (const Json& id : *found) {
    if (!id.is_number_unsigned()) {
      return absl::StrCat("\"hash_ids\"[", out.hash_ids.size(), "]: want an integer 0 .. 2^64 - 1, got ", Shown(id));
    }
    out.hash_ids.push_back(id.get<std::uint64_t>());
  }
  return "";
}

// What is wrong with a line, or "".
std::string ReadLine(const std::string& line, std::int64_t last_timestamp_ms, TraceRequest& out) {
  const Json object = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return "not JSON";
  if (!object.is_object()) return absl::StrCat("want a JSON object, got ", Shown(object));
  std::string wrong = ReadField(object, "timestamp", 0, kMaxTraceMs, out.timestamp_ms);
  if (wrong.empty()) wrong = ReadField(object, "input_length", 1, kMaxTraceTokens, out.input_tokens);
  if (wrong.empty()) wrong = ReadField(object, "output_length", 1, kMaxTraceTokens, out.output_tokens);
  if (wrong.empty()) wrong = ReadHashIds(object, out);
  if (wrong.empty() && out.timestamp_ms < last_timestamp_ms) {
    wrong = absl::StrCat("\"timestamp\": want no less than the ", last_timestamp_ms, " ms before it, got ",
                         out.timestamp_ms);
  }
  return wrong;
}

}  // namespace

absl::StatusOr<Trace> ReadTrace(std::istream& in, std::string_view name, const TraceOptions& options) {
  Trace trace;
  trace.name = std::filesystem::path(name).filename().string();
  std::string line;
  std::int64_t line_number = 0, last_timestamp_ms = 0;
  while ((options.limit == 0 || static_cast<std::int64_t>(trace.requests.size()) < options.limit) &&
         std::getline(in, line)) {
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    TraceRequest request;
    const std::string wrong = ReadLine(line, last_timestamp_ms, request);
    if (wrong.empty()) {
      last_timestamp_ms = request.timestamp_ms;
      trace.requests.push_back(std::move(request));
      continue;
    }
    const std::string message = absl::StrCat(ToAbsl(name), ":", line_number, ": ", wrong);
    if (!options.skip_bad_lines) return absl::InvalidArgumentError(message);
    ++trace.skipped_lines;
    if (trace.skipped.size() < kSkippedShown) trace.skipped.push_back(message);
  }
  if (in.bad()) return absl::DataLossError(absl::StrCat(ToAbsl(name), ": reading failed after line ", line_number));
  if (trace.requests.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToAbsl(name), ": no request in ", line_number, " lines",
        trace.skipped.empty() ? std::string() : absl::StrCat("; the first bad one: ", trace.skipped.front())));
  }
  return trace;
}

absl::StatusOr<Trace> ReadTraceFile(const std::string& path, const TraceOptions& options) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return absl::NotFoundError(absl::StrCat(path, ": is a directory"));
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": ", errno != 0 ? std::strerror(errno) : "cannot be opened"));
  return ReadTrace(in, path, options);
}

}  // namespace tokroute::tools

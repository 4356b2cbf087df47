#include "tools/sim/report.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "internal/text.h"
#include "nlohmann/json.hpp"

namespace tokroute::tools {
namespace {

using internal::Thousands;

constexpr double kNsPerSecond = 1e9;

// 0 of 0 is 0: a replay in which every request was refused.
double Ratio(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}
double PerSecond(std::int64_t tokens, Nanoseconds time) {
  return time == 0 ? 0 : static_cast<double>(tokens) / (static_cast<double>(time) / kNsPerSecond);
}
double Seconds(Nanoseconds time) { return static_cast<double>(time) / kNsPerSecond; }

std::string Percent(double ratio) { return absl::StrFormat("%.2f", ratio * 100); }

struct Row {
  std::string label;
  std::function<std::string(const PolicyResult&)> cell;
};

void AddDistribution(const std::string& name, const char* unit, double ns_per_unit, int decimals,
                     Distribution PolicyResult::* member, std::vector<Row>& rows) {
  const auto add = [&](const char* which, auto value) {
    rows.push_back({absl::StrCat(name, " ", which, ", ", unit), [=](const PolicyResult& result) -> std::string {
                      const Distribution& d = result.*member;
                      if (d.count == 0) return "-";
                      return absl::StrFormat("%.*f", decimals, static_cast<double>(value(d)) / ns_per_unit);
                    }});
  };
  add("mean", [](const Distribution& d) { return d.mean; });
  add("p50", [](const Distribution& d) { return d.p50; });
  add("p90", [](const Distribution& d) { return d.p90; });
  add("p99", [](const Distribution& d) { return d.p99; });
}

std::vector<Row> TableRows() {
  using Result = PolicyResult;
  std::vector<Row> rows;
  rows.push_back({"requests", [](const Result& r) { return Thousands(r.requests); }});
  rows.push_back({"success rate, %", [](const Result& r) { return Percent(Ratio(r.succeeded, r.requests)); }});
  rows.push_back(
      {"hit at admission, % tokens", [](const Result& r) { return Percent(Ratio(r.hit_tokens, r.prompt_tokens)); }});
  rows.push_back({"matched at routing, % tokens", [](const Result& r) {
                    return absl::StrCat(Percent(Ratio(r.matched_tokens, r.prompt_tokens)), r.keeps_index ? "" : " *");
                  }});
  AddDistribution("TTFT", "s", kNsPerSecond, 3, &Result::ttft, rows);
  AddDistribution("TPOT", "ms", 1e6, 2, &Result::tpot, rows);
  AddDistribution("end-to-end", "s", kNsPerSecond, 3, &Result::e2e, rows);
  rows.push_back({"input tokens/s",
                  [](const Result& r) { return absl::StrFormat("%.0f", PerSecond(r.prompt_tokens, r.makespan)); }});
  rows.push_back({"output tokens/s",
                  [](const Result& r) { return absl::StrFormat("%.0f", PerSecond(r.output_tokens, r.makespan)); }});
  rows.push_back({"requests per endpoint, %", [](const Result& r) {
                    return absl::StrFormat("%.2f..%.2f", 100 * Ratio(r.least_requests, r.requests),
                                           100 * Ratio(r.most_requests, r.requests));
                  }});
  rows.push_back({"gate openings", [](const Result& r) { return r.keeps_index ? Thousands(r.gate_openings) : "-"; }});
  return rows;
}

using Json = nlohmann::ordered_json;

void AddJson(const char* name, const Distribution& d, Json& object) {
  const auto add = [&](const char* which, double ns) {
    // Not 0 for "none": a policy that serves nobody must not look fast.
    object[absl::StrCat(name, "_", which, "_s")] = d.count == 0 ? Json(nullptr) : Json(ns / kNsPerSecond);
  };
  add("mean", d.mean);
  add("p50", static_cast<double>(d.p50));
  add("p90", static_cast<double>(d.p90));
  add("p99", static_cast<double>(d.p99));
}

bool IsSpecial(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
}

// Where the bytes end up: behind symbolic links, which a rename would replace by a file.
std::string Target(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

std::string TemporaryName(const std::string& target) { return absl::StrCat(target, ".tmp", ::getpid()); }

absl::Status Failed(const std::string& path) {
  return absl::PermissionDeniedError(
      absl::StrCat("cannot write '", path, "': ", errno != 0 ? std::strerror(errno) : "unknown error"));
}

}  // namespace

std::string_view TableLegend() {
  return R"(Rows of the table (JSON keys in brackets):
  requests, success rate [requests, success_rate]
      A request that the router refused is a failure; everything below is over those that succeeded.
  hit at admission [hit_rate]
      Share of all prompt tokens that the endpoint's own cache held when the prefill started.
  matched at routing [matched_rate]
      The same share as the router saw it when it decided: what its index said of the endpoint it chose. Policies
      without an index (marked *) know nothing of prefixes; for them, what that endpoint's cache held at that moment.
      It differs from the hit rate by what was admitted, or evicted, between decision and prefill.
  TTFT [ttft_mean_s, ttft_p50_s, ...]
      Time to first token, arrival to the end of the prefill, waiting included. Percentiles by nearest rank.
  TPOT [tpot_...]
      Time per output token after the first. Constant in this model, which decodes at a fixed rate.
  end-to-end [e2e_...]
      Arrival to the last token.
  input and output tokens/s [input_tokens_per_s, output_tokens_per_s]
      Tokens of all requests / (first arrival to last token), so the drain at the end counts.
  requests per endpoint [share_min, share_max]
      Least and most requests of an endpoint, as a share of all.
  gate openings [gate_openings]
      Decisions that gave up a warm endpoint because its load led a colder one's by more than
      peak prefill throughput x max TTFT penalty.
)";
}

std::string FormatTable(const ReplayInputs& inputs, std::span<const PolicyResult> results) {
  std::string out;
  if (inputs.trace.empty()) {
    absl::StrAppend(&out, inputs.workload, ": ", Thousands(inputs.requests), " requests at ", inputs.qps, "/s");
  } else {
    absl::StrAppend(&out, inputs.trace, ": ", Thousands(inputs.requests), " requests");
    if (inputs.skipped_lines > 0) absl::StrAppend(&out, " (bad lines skipped: ", Thousands(inputs.skipped_lines), ")");
  }
  if (inputs.rate_scale != 1) absl::StrAppend(&out, ", arrivals x ", inputs.rate_scale);
  absl::StrAppend(&out, ", ", Thousands(inputs.options.endpoints),
                  inputs.options.endpoints == 1 ? " endpoint, seed " : " endpoints, seed ", inputs.options.seed, "\n");
  absl::StrAppend(&out, "An endpoint: ", inputs.options.peak_prefill_throughput, " tokens/s prefill, ",
                  inputs.options.decode_tokens_per_s, " tokens/s decode per response, cache of ",
                  Thousands(inputs.options.capacity_tokens), " tokens in blocks of ", inputs.block_size, "\n\n");

  const std::vector<Row> rows = TableRows();
  std::size_t label_width = 0;
  for (const Row& row : rows) label_width = std::max(label_width, row.label.size());
  std::vector<std::vector<std::string>> columns;
  std::vector<std::size_t> widths;
  bool has_starred = false;
  for (const PolicyResult& result : results) {
    std::vector<std::string>& column = columns.emplace_back();
    column.push_back(result.policy);
    for (const Row& row : rows) column.push_back(row.cell(result));
    // A star hangs out to the right, so that the numbers stay aligned.
    for (std::string& cell : column) {
      if (!cell.ends_with(" *")) cell += "  ";
    }
    std::size_t width = 0;
    for (const std::string& cell : column) width = std::max(width, cell.size());
    widths.push_back(width);
    has_starred |= !result.keeps_index;
  }
  for (std::size_t line = 0; line <= rows.size(); ++line) {
    std::string text = absl::StrFormat("%-*s", static_cast<int>(label_width), line == 0 ? "" : rows[line - 1].label);
    for (std::size_t i = 0; i < columns.size(); ++i) {
      absl::StrAppendFormat(&text, "%*s", static_cast<int>(widths[i]) + 1, columns[i][line]);
    }
    while (text.ends_with(' ')) text.pop_back();
    absl::StrAppend(&out, text, "\n");
  }
  if (has_starred) absl::StrAppend(&out, "* By the endpoint's cache: this policy keeps no index. See --help.\n");
  return out;
}

std::string FormatJson(const ReplayInputs& inputs, std::span<const PolicyResult> results) {
  Json root;
  Json& workload = root["workload"];
  workload["name"] = inputs.workload;
  if (inputs.trace.empty()) {
    workload["qps"] = inputs.qps;
  } else {
    workload["trace"] = inputs.trace;
    workload["skipped_lines"] = inputs.skipped_lines;
    workload["keep_stamps"] = inputs.keep_stamps;
  }
  workload["requests"] = inputs.requests;
  workload["rate_scale"] = inputs.rate_scale;
  workload["block_size"] = inputs.block_size;
  Json& options = root["options"];
  options["endpoints"] = inputs.options.endpoints;
  options["seed"] = inputs.options.seed;
  options["peak_prefill_throughput"] = inputs.options.peak_prefill_throughput;
  options["max_ttft_penalty_ms"] = inputs.options.max_ttft_penalty_ms;
  options["decode_tokens_per_s"] = inputs.options.decode_tokens_per_s;
  options["max_running"] = inputs.options.max_running;
  options["capacity_tokens"] = inputs.options.capacity_tokens;
  root["policies"] = Json::array();
  for (const PolicyResult& result : results) {
    Json policy;
    policy["policy"] = result.policy;
    policy["requests"] = result.requests;
    policy["success_rate"] = Ratio(result.succeeded, result.requests);
    policy["hit_rate"] = Ratio(result.hit_tokens, result.prompt_tokens);
    policy["matched_rate"] = Ratio(result.matched_tokens, result.prompt_tokens);
    policy["matched_by"] = result.keeps_index ? "index" : "endpoint_cache";
    AddJson("ttft", result.ttft, policy);
    AddJson("tpot", result.tpot, policy);
    AddJson("e2e", result.e2e, policy);
    policy["duration_s"] = Seconds(result.makespan);
    policy["prompt_tokens"] = result.prompt_tokens;
    policy["matched_tokens"] = result.matched_tokens;
    policy["hit_tokens"] = result.hit_tokens;
    policy["output_tokens"] = result.output_tokens;
    policy["input_tokens_per_s"] = PerSecond(result.prompt_tokens, result.makespan);
    policy["output_tokens_per_s"] = PerSecond(result.output_tokens, result.makespan);
    policy["share_min"] = Ratio(result.least_requests, result.requests);
    policy["share_max"] = Ratio(result.most_requests, result.requests);
    policy["gate_openings"] = result.gate_openings;
    policy["sticky_decisions"] = result.sticky_decisions;
    policy["moved"] = result.moved;
    policy["audit"] = "ok";  // Else there is no report.
    root["policies"].push_back(std::move(policy));
  }
  // A file name need not be UTF-8.
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::Status CheckWritable(const std::string& path) {
  std::error_code error;
  if (path.empty()) return absl::PermissionDeniedError("cannot write '': want a file name");
  if (std::filesystem::is_directory(path, error)) {
    return absl::PermissionDeniedError(absl::StrCat("cannot write '", path, "': is a directory"));
  }
  const bool special = IsSpecial(path);
  const std::string probe = special ? path : TemporaryName(Target(path));
  errno = 0;
  // Special files are opened without truncation or creation, and a pipe is not opened at all: that could wait for ever.
  if (special) return ::access(path.c_str(), W_OK) == 0 ? absl::OkStatus() : Failed(path);
  if (!std::ofstream(probe, std::ios::binary)) return Failed(path);
  std::filesystem::remove(probe, error);
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, std::string_view content) {
  const bool special = IsSpecial(path);
  const std::string target = special ? path : Target(path);
  const std::string written = special ? path : TemporaryName(target);
  std::error_code error;
  errno = 0;
  {
    std::ofstream out(written, std::ios::binary);
    if (!out) return Failed(path);
    out.write(content.data(), static_cast<std::streamsize>(content.size()));
    out.close();
    if (!out) {
      const absl::Status status = Failed(path);
      if (!special) std::filesystem::remove(written, error);
      return status;
    }
  }
  if (special) return absl::OkStatus();
  std::filesystem::rename(written, target, error);
  if (!error) return absl::OkStatus();
  const std::string why = error.message();
  std::filesystem::remove(written, error);
  return absl::PermissionDeniedError(absl::StrCat("cannot write '", path, "': ", why));
}

}  // namespace tokroute::tools

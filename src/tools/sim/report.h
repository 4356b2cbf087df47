// What a replay shows: a table for people, a JSON object for programs.
#ifndef TOKROUTE_SRC_TOOLS_SIM_REPORT_H_
#define TOKROUTE_SRC_TOOLS_SIM_REPORT_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "tools/sim/replay.h"

namespace tokroute::tools {

// Everything that determined the results. Options that had no part in them are left out of the JSON.
struct ReplayInputs {
  std::string workload = {};  // "trace", "shared-prefix", "conversations".
  std::string trace = {};     // The trace's file name, without folders. Empty: generated.
  std::int64_t requests = 0;
  std::int64_t skipped_lines = 0;  // Of the trace.
  bool keep_stamps = false;        // Of the trace.
  double qps = 0;                  // Of a generator.
  double rate_scale = 1;
  std::int64_t block_size = 0;
  ReplayOptions options = {};
};

// What the rows mean. Shown by --help.
std::string_view TableLegend();

// Metrics down, policies across; at most 119 columns with five policies.
std::string FormatTable(const ReplayInputs& inputs, std::span<const PolicyResult> results);

// Equal inputs and results give equal bytes: fixed key order, shortest numbers, nothing of the wall clock or the
// machine.
std::string FormatJson(const ReplayInputs& inputs, std::span<const PolicyResult> results);

// Whether WriteFile could succeed; leaves nothing behind. So that hours of replay are not lost to a typing error.
absl::Status CheckWritable(const std::string& path);
// All or nothing: writes a temporary file next to `path`, then renames it. What exists and is no regular file
// (/dev/stdout, a pipe) is written to as it is.
absl::Status WriteFile(const std::string& path, std::string_view content);

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_SIM_REPORT_H_

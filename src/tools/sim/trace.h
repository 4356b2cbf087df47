// Request traces in the Mooncake JSONL format: one object a line,
//   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, ...]}
// timestamp: ms since the start, not decreasing. hash_ids: one id per 512 tokens of the prompt, chained (equal ids:
// equal prompts up to the end of that block), the last possibly for a part of a block. Other fields are ignored.
#ifndef TOKROUTE_SRC_TOOLS_SIM_TRACE_H_
#define TOKROUTE_SRC_TOOLS_SIM_TRACE_H_

#include <cstdint>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tokroute::tools {

inline constexpr std::int64_t kTraceBlockTokens = 512;
// What one line may say. Far more than any trace has, and so little that no sum over a trace can overflow.
inline constexpr std::int64_t kMaxTraceMs = std::int64_t{100'000'000'000};  // Three years.
inline constexpr std::int64_t kMaxTraceTokens = std::int64_t{1} << 31;

struct TraceRequest {
  std::int64_t timestamp_ms = 0;        // 0 .. kMaxTraceMs.
  std::int64_t input_tokens = 0;        // 1 .. kMaxTraceTokens.
  std::int64_t output_tokens = 0;       // 1 .. kMaxTraceTokens.
  std::vector<std::uint64_t> hash_ids;  // ceil(input_tokens / 512) of them.
};

struct Trace {
  std::string name;  // The file's name without its folders.
  std::vector<TraceRequest> requests;
  std::int64_t skipped_lines = 0;
  std::vector<std::string> skipped;  // What was wrong with the first few of them: "FILE:LINE: what".
};

struct TraceOptions {
  bool skip_bad_lines = false;
  std::int64_t limit = 0;  // Read no more requests than that; 0: all.
};

// Reads until the limit or the end. kInvalidArgument "NAME:LINE: what" for the first bad line (unless they are
// skipped), or if there is no request at all. Empty lines and carriage returns at line ends are no mistakes. `name` is
// for messages.
absl::StatusOr<Trace> ReadTrace(std::istream& in, std::string_view name, const TraceOptions& options = {});
// The same from a file; kNotFound if it cannot be opened.
absl::StatusOr<Trace> ReadTraceFile(const std::string& path, const TraceOptions& options = {});

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_SIM_TRACE_H_

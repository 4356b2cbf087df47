// Routes a workload over simulated endpoints, on virtual time, with the library's own policies.
//
//   absl::StatusOr<PolicyResult> result = ReplayPolicy(workload, {.endpoints = 8}, "prefill-bound");
#ifndef TOKROUTE_SRC_TOOLS_SIM_REPLAY_H_
#define TOKROUTE_SRC_TOOLS_SIM_REPLAY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/sim/workload.h"

namespace tokroute::tools {

struct ReplayOptions {
  std::int64_t endpoints = 8;  // 1 .. kMaxEndpoints.
  double peak_prefill_throughput =
      20480;  // Of an endpoint, and what the gate is told. Unit: tokens/s. Qwen3-32B / H100.
  std::int64_t max_ttft_penalty_ms = 14'000;
  double decode_tokens_per_s = 40;         // Per response. 25 ms a token.
  std::int64_t max_running = 0;            // Per endpoint; 0: no limit.
  std::int64_t capacity_tokens = 300'000;  // Prefix cache of an endpoint.
  std::uint64_t seed = 0;                  // Of the router's ties and draws.
};

// Over the requests that succeeded. Percentiles by nearest rank: a value that occurred. Unit: nanoseconds.
struct Distribution {
  std::int64_t count = 0;  // 0: the rest means nothing.
  double mean = 0;
  Nanoseconds p50 = 0, p90 = 0, p99 = 0;
};
Distribution Summarize(std::vector<Nanoseconds> values);

struct PolicyResult {
  std::string policy;
  bool keeps_index = false;
  std::int64_t requests = 0, succeeded = 0;
  std::string first_refusal;  // Why the first of the others was refused.
  // Over the requests that succeeded. Unit: tokens.
  std::int64_t prompt_tokens = 0;
  std::int64_t matched_tokens = 0;  // At routing: Decision::matched_tokens. A policy without an index knows nothing of
                                    // the kind: what the chosen endpoint's cache holds at that moment.
  std::int64_t hit_tokens = 0;      // At admission: what the endpoint's cache holds when the prefill starts.
  std::int64_t output_tokens = 0;
  Distribution ttft;         // First token - arrival.
  Distribution tpot;         // (end - first token) / (output tokens - 1); responses of one token have none.
  Distribution e2e;          // End - arrival.
  Nanoseconds makespan = 0;  // First arrival to last end: throughputs include the drain.
  std::int64_t least_requests = 0, most_requests = 0;  // Of an endpoint.
  // Decisions whose gate gave up affinity, and those whose filter kept the warm ones only.
  std::int64_t gate_openings = 0, sticky_decisions = 0;
  std::int64_t moved = 0;                      // Tickets moved to another endpoint. This tool retries nothing: 0.
  double decide_seconds = 0, run_seconds = 0;  // Wall clock: for people, never part of a report.
};

// In the order in which they are run and shown by default.
std::vector<std::string> PolicyNames();

// Called now and then with the requests done so far.
using Progress = std::function<void(std::int64_t)>;

// One policy on a fleet of its own. kInvalidArgument: an unknown policy, an option that a part of the library refuses
// (named, with value and range), or a stream that would run longer than a simulation can. kInternal: the library broke
// a promise (the audit fails, a ticket or a block stays behind); never expected.
absl::StatusOr<PolicyResult> ReplayPolicy(const Workload& workload, const ReplayOptions& options,
                                          std::string_view policy, const Progress& progress = {});

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_SIM_REPLAY_H_

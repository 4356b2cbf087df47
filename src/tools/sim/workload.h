// Request streams to replay: from a trace, or made up by a seeded generator.
//
//   absl::StatusOr<Workload> workload = MakeSharedPrefix({.requests = 1500, .qps = 20}, {.block_size = 16, .seed = 1});
//
// Everything here is integer arithmetic or single, correctly rounded double operations on tokroute::Random, so a seed
// gives the same stream with every compiler and C library: no libm, no std::*_distribution.
#ifndef TOKROUTE_SRC_TOOLS_SIM_WORKLOAD_H_
#define TOKROUTE_SRC_TOOLS_SIM_WORKLOAD_H_

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/fwd.h"
#include "tokroute/random.h"
#include "tools/sim/event_queue.h"
#include "tools/sim/trace.h"

namespace tokroute::tools {

// The model that every request asks for: the namespace of all block keys of a replay.
inline constexpr std::string_view kSimulatedModel = "simulated";

struct WorkloadRequest {
  static constexpr std::int32_t kNone = -1;
  // The request of the same conversation that must have ended before this one, by index and smaller than this one's
  // own.
  std::int32_t after = kNone;
  // Without `after`: when it arrives. With it: how long after that request's end (a user's think time).
  Nanoseconds arrival = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // >= 1.
  // What the router is given: token ids, which it hashes as in production; or keys, for traces, which have no tokens.
  std::span<const TokenId> tokens = {};
  // The prompt's full blocks: what the simulated engine looks up. Always there.
  std::span<const BlockKey> block_keys = {};
};

// Requests without `after` come in order of arrival. Move-only: requests hold views of the storage.
struct Workload {
  Workload() = default;
  Workload(Workload&&) = default;
  Workload& operator=(Workload&&) = default;
  Workload(const Workload&) = delete;

  std::string name;
  std::int32_t block_size = 0;  // Of block_keys, and so of the index. Unit: tokens.
  std::vector<WorkloadRequest> requests;
  std::deque<std::vector<TokenId>> tokens;  // Deques: growing one moves no vector.
  std::deque<std::vector<BlockKey>> keys;
};

struct WorkloadOptions {
  std::int32_t block_size = 16;  // Unit: tokens. kMinBlockSize .. kMaxBlockSize.
  std::uint64_t seed = 0;
};

// How many requests a generator makes, and how fast.
struct GeneratorOptions {
  std::int64_t requests = 0;  // Exactly these many; or 0: as many as `duration_s` brings.
  double duration_s = 0;
  double qps = 0;  // > 0. Mean arrivals per second; of a workload with conversations, roughly.
};
inline constexpr std::int64_t kMaxGeneratedRequests = 1'000'000;

// inference-perf's shared_prefix, as llm-d benchmarks it: 150 groups of 5 prompts, each the group's 6,000 tokens and
// 1,200 of its own, 1,000 tokens out. All 750 prompts are shuffled once and then issued in that order again and again,
// which is the worst case of an LRU cache; drawing them at random would be kinder. Poisson arrivals.
struct SharedPrefixShape {
  std::int32_t groups = 150, prompts_per_group = 5;
  std::int32_t shared_tokens = 6000, own_tokens = 1200, output_tokens = 1000;
};
absl::StatusOr<Workload> MakeSharedPrefix(const GeneratorOptions& generator, const WorkloadOptions& options,
                                          const SharedPrefixShape& shape = {});

// Multi-turn conversations: a system prompt that all share, a context of the conversation's own, then turns. Each
// prompt is the one before, its output, and new input; it is sent `think time` after the turn before has ended, so
// slower serving means later arrivals (as with real users). Conversations start in a Poisson stream at qps / mean
// turns. Lengths are uniform in [min, max], think times exponential.
struct ConversationShape {
  struct Range {
    std::int32_t min, max;
  };
  std::int32_t system_tokens = 1000;
  Range context_tokens{2000, 16000}, turns{2, 10}, input_tokens{100, 1000}, output_tokens{100, 600};
  double mean_think_s = 10;
};
absl::StatusOr<Workload> MakeConversations(const GeneratorOptions& generator, const WorkloadOptions& options,
                                           const ConversationShape& shape = {});

// From a Mooncake trace. Block size 512: ids stand for 512 tokens each. `spread_stamps`: the trace's arrivals are
// stamped in buckets of about 3 s, which would replay as a train of bursts; requests of one stamp are spread uniformly
// up to the next stamp, but at most 3 s. Keeps the order of lines.
Workload MakeTraceWorkload(const Trace& trace, std::uint64_t seed, bool spread_stamps);

// Divides all arrival times by `scale` (> 0, finite); think times stay. kInvalidArgument if that is longer than a
// simulation can last.
absl::Status ScaleArrivals(double scale, Workload& workload);

// An exponentially distributed number of mean 1, exactly, by von Neumann's method: comparisons of uniform draws only.
// The usual -log(u) is one draw instead of about six, and its last bits depend on the C library.
double DrawExponential(Random& random);

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_SIM_WORKLOAD_H_

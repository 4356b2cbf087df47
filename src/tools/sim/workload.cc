#include "tools/sim/workload.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/request.h"

namespace tokroute::tools {
namespace {

// Each kind of draw has a stream of its own, so that a longer replay begins like a shorter one.
enum Stream : std::uint64_t { kArrivals = 1, kTokens, kOrder, kShapes, kStamps };

constexpr double kNanosecondsPerSecond = 1e9;
constexpr std::int64_t kMaxHorizonNs = 1'000'000'000'000'000'000;  // 31 years.

std::vector<TokenId> RandomTokens(std::int64_t count, Random& random) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (TokenId& token : tokens) token = random.Below(150'000);  // About the size of today's vocabularies.
  return tokens;
}

std::vector<BlockKey> KeysOf(std::span<const TokenId> tokens, std::int32_t block_size) {
  PromptKeys keys;
  keys.Reset({.block_size = block_size}, {.tokens = tokens, .model = kSimulatedModel});
  const std::span<const BlockKey> all = keys.Ensure(keys.block_count());
  return {all.begin(), all.end()};
}

// Poisson arrivals.
class Arrivals {
 public:
  Arrivals(double per_second, std::uint64_t seed)
      : mean_gap_ns_(kNanosecondsPerSecond / per_second), random_(Random::For(seed, 0, kArrivals)) {}
  Nanoseconds Next() { return now_ += std::llround(DrawExponential(random_) * mean_gap_ns_); }

 private:
  double mean_gap_ns_;
  Random random_;
  Nanoseconds now_ = 0;
};

absl::Status Check(const GeneratorOptions& generator) {
  if (!(generator.qps > 0 && generator.qps <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("qps: want > 0 .. 1e6 requests/s, got ", generator.qps));
  }
  const double expected =
      generator.requests > 0 ? static_cast<double>(generator.requests) : generator.duration_s * generator.qps;
  if (!(expected > 0 && expected <= static_cast<double>(kMaxGeneratedRequests))) {
    return absl::InvalidArgumentError(
        absl::StrCat("requests (or duration x qps): want > 0 .. ", kMaxGeneratedRequests, ", got ", expected));
  }
  // The last arrival is around requests / qps; ten times as far leaves room for chance.
  if (expected / generator.qps > static_cast<double>(kMaxHorizonNs) / kNanosecondsPerSecond / 10) {
    return absl::InvalidArgumentError(
        absl::StrCat("qps: ", generator.qps, " requests/s take over three years for ", expected, " requests"));
  }
  return absl::OkStatus();
}

bool Enough(const GeneratorOptions& generator, std::size_t made, Nanoseconds next_arrival) {
  if (generator.requests > 0) return static_cast<std::int64_t>(made) >= generator.requests;
  return static_cast<double>(next_arrival) >= generator.duration_s * kNanosecondsPerSecond;
}

std::int32_t Draw(const ConversationShape::Range& range, Random& random) {
  return range.min + static_cast<std::int32_t>(random.Below(static_cast<std::uint32_t>(range.max - range.min) + 1));
}

absl::Status NoRequests(const GeneratorOptions& generator) {
  return absl::InvalidArgumentError(
      absl::StrCat("duration: no request arrives within ", generator.duration_s, " s at this seed and qps"));
}

// A key for a block of a trace. The ids are chained already (equal id: equal prompt up to there), so an id alone names
// a prefix, and hashing it with its namespace is enough. Both steps are splitmix64's bijective mix: within a namespace
// two ids never share a key, but for the one that would be 0, which is reserved, and becomes 1. Rejected: 512 made-up
// tokens per id, hashed as in production; 12,000 tokens a request, to find out what the id says.
BlockKey KeyOfId(std::uint64_t root, std::uint64_t id) {
  const std::uint64_t key = Random(root ^ Random(id).Next()).Next();
  return key == 0 ? 1 : key;
}

std::uint64_t RootOf(std::string_view model) {
  std::uint64_t root = model.size();
  for (const char c : model) root = Random(root ^ static_cast<unsigned char>(c)).Next();
  return root;
}

}  // namespace

double DrawExponential(Random& random) {
  // Draw until a number exceeds the one before. An odd length of the falling run, first number x: the result is x plus
  // the number of tries before. Each try fails with probability exp(-1), and P(odd | x) = exp(-x).
  for (double whole = 0;; ++whole) {
    const double first = random.Unit();
    double last = first;
    bool odd = true;
    for (double next = random.Unit(); next < last; next = random.Unit()) {
      last = next;
      odd = !odd;
    }
    if (odd) return whole + first;
  }
}

absl::StatusOr<Workload> MakeSharedPrefix(const GeneratorOptions& generator, const WorkloadOptions& options,
                                          const SharedPrefixShape& shape) {
  if (absl::Status status = Check(generator); !status.ok()) return status;
  Workload workload;
  workload.name = "shared-prefix";
  workload.block_size = options.block_size;
  const std::int32_t prompts = shape.groups * shape.prompts_per_group;
  Random text = Random::For(options.seed, 0, kTokens);
  for (std::int32_t group = 0; group < shape.groups; ++group) {
    const std::vector<TokenId> shared = RandomTokens(shape.shared_tokens, text);
    for (std::int32_t i = 0; i < shape.prompts_per_group; ++i) {
      std::vector<TokenId>& prompt = workload.tokens.emplace_back(shared);
      const std::vector<TokenId> own = RandomTokens(shape.own_tokens, text);
      prompt.insert(prompt.end(), own.begin(), own.end());
      workload.keys.push_back(KeysOf(prompt, options.block_size));
    }
  }
  // Fisher and Yates, since std::shuffle draws differently from library to library.
  std::vector<std::uint32_t> order(static_cast<std::size_t>(prompts));
  std::iota(order.begin(), order.end(), 0U);
  Random shuffle = Random::For(options.seed, 0, kOrder);
  for (std::uint32_t i = static_cast<std::uint32_t>(prompts); i > 1; --i) {
    std::swap(order[i - 1], order[shuffle.Below(i)]);
  }
  Arrivals arrivals(generator.qps, options.seed);
  for (Nanoseconds at = arrivals.Next(); !Enough(generator, workload.requests.size(), at); at = arrivals.Next()) {
    const std::uint32_t prompt = order[workload.requests.size() % order.size()];
    workload.requests.push_back({.arrival = at,
                                 .prompt_tokens = shape.shared_tokens + shape.own_tokens,
                                 .output_tokens = shape.output_tokens,
                                 .tokens = workload.tokens[prompt],
                                 .block_keys = workload.keys[prompt]});
  }
  if (workload.requests.empty()) return NoRequests(generator);
  return workload;
}

absl::StatusOr<Workload> MakeConversations(const GeneratorOptions& generator, const WorkloadOptions& options,
                                           const ConversationShape& shape) {
  if (absl::Status status = Check(generator); !status.ok()) return status;
  Workload workload;
  workload.name = "conversations";
  workload.block_size = options.block_size;
  Random system = Random::For(options.seed, 0, kTokens);
  const std::vector<TokenId> system_prompt = RandomTokens(shape.system_tokens, system);
  const double mean_turns = (shape.turns.min + shape.turns.max) / 2.0;
  const double mean_think_ns = shape.mean_think_s * kNanosecondsPerSecond;
  Arrivals starts(generator.qps / mean_turns, options.seed);
  std::uint64_t conversation = 0;
  for (Nanoseconds at = starts.Next(); !Enough(generator, workload.requests.size(), at); at = starts.Next()) {
    // Keyed by the conversation: what one draws does not shift the next.
    Random draws = Random::For(options.seed, ++conversation, kShapes);
    Random text = Random::For(options.seed, conversation, kTokens);
    struct Turn {
      std::int64_t prompt_tokens, output_tokens;
      Nanoseconds think;
    };
    std::vector<Turn> turns(static_cast<std::size_t>(Draw(shape.turns, draws)));
    std::int64_t length = shape.system_tokens + Draw(shape.context_tokens, draws);
    for (Turn& turn : turns) {
      length += Draw(shape.input_tokens, draws);
      turn.prompt_tokens = length;
      turn.output_tokens = Draw(shape.output_tokens, draws);
      turn.think = std::llround(DrawExponential(draws) * mean_think_ns);
      length += turn.output_tokens;
    }
    // The conversation's whole text: every prompt is a beginning of it.
    std::vector<TokenId>& tokens = workload.tokens.emplace_back(system_prompt);
    const std::vector<TokenId> own = RandomTokens(turns.back().prompt_tokens - shape.system_tokens, text);
    tokens.insert(tokens.end(), own.begin(), own.end());
    const std::vector<BlockKey>& keys = workload.keys.emplace_back(KeysOf(tokens, options.block_size));
    std::int32_t before = WorkloadRequest::kNone;
    for (const Turn& turn : turns) {
      if (generator.requests > 0 && static_cast<std::int64_t>(workload.requests.size()) >= generator.requests) break;
      const auto prompt = static_cast<std::size_t>(turn.prompt_tokens);
      workload.requests.push_back(
          {.after = before,
           .arrival = before == WorkloadRequest::kNone ? at : turn.think,
           .prompt_tokens = turn.prompt_tokens,
           .output_tokens = turn.output_tokens,
           .tokens = std::span(tokens).first(prompt),
           .block_keys = std::span(keys).first(prompt / static_cast<std::size_t>(options.block_size))});
      before = static_cast<std::int32_t>(workload.requests.size()) - 1;
    }
  }
  if (workload.requests.empty()) return NoRequests(generator);
  return workload;
}

Workload MakeTraceWorkload(const Trace& trace, std::uint64_t seed, bool spread_stamps) {
  constexpr std::int64_t kNsPerMs = 1'000'000;
  constexpr std::int64_t kBucketMs = 3'000;
  Workload workload;
  workload.name = "trace";
  workload.block_size = static_cast<std::int32_t>(kTraceBlockTokens);
  const std::uint64_t root = RootOf(kSimulatedModel);
  for (const TraceRequest& line : trace.requests) {
    std::vector<BlockKey>& keys = workload.keys.emplace_back();
    // Only full blocks can be shared: a last id for a part of a block (nearly every line has one) is dropped.
    const auto blocks = static_cast<std::size_t>(line.input_tokens / kTraceBlockTokens);
    keys.reserve(blocks);
    for (std::size_t i = 0; i < blocks; ++i) keys.push_back(KeyOfId(root, line.hash_ids[i]));
    workload.requests.push_back({.arrival = line.timestamp_ms * kNsPerMs,
                                 .prompt_tokens = line.input_tokens,
                                 .output_tokens = line.output_tokens,
                                 .block_keys = keys});
  }
  if (!spread_stamps) return workload;
  Random random = Random::For(seed, 0, kStamps);
  const std::size_t count = trace.requests.size();
  for (std::size_t first = 0; first < count;) {
    const std::int64_t stamp = trace.requests[first].timestamp_ms;
    std::size_t end = first + 1;
    while (end < count && trace.requests[end].timestamp_ms == stamp) ++end;
    // A stamp of one request says when it came.
    if (end - first > 1) {
      const std::int64_t width_ms =
          end < count ? std::min(trace.requests[end].timestamp_ms - stamp, kBucketMs) : kBucketMs;
      std::vector<Nanoseconds> offsets;
      for (std::size_t i = first; i < end; ++i) {
        offsets.push_back(static_cast<Nanoseconds>(random.Unit() * static_cast<double>(width_ms * kNsPerMs)));
      }
      std::sort(offsets.begin(), offsets.end());  // The file's order stays.
      for (std::size_t i = first; i < end; ++i) workload.requests[i].arrival += offsets[i - first];
    }
    first = end;
  }
  return workload;
}

absl::Status ScaleArrivals(double scale, Workload& workload) {
  if (scale == 1) return absl::OkStatus();
  for (WorkloadRequest& request : workload.requests) {
    if (request.after != WorkloadRequest::kNone) continue;
    const double scaled = static_cast<double>(request.arrival) / scale;
    if (!(scaled <= static_cast<double>(kMaxHorizonNs))) {
      return absl::InvalidArgumentError(
          absl::StrCat("a scale of ", scale, " stretches the stream beyond ", kMaxHorizonNs / 1'000'000'000, " s"));
    }
    request.arrival = std::llround(scaled);
  }
  return absl::OkStatus();
}

}  // namespace tokroute::tools

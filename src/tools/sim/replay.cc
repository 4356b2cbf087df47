#include "tools/sim/replay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "internal/text.h"
#include "tokroute/tokroute.h"
#include "tools/sim/engine.h"

namespace tokroute::tools {
namespace {

using internal::ToAbsl;

struct SimEndpoint {
  std::string id;
  std::int64_t capacity = 0;
  std::string_view name() const { return id; }
  std::int64_t capacity_tokens() const { return capacity; }  // The index then forgets when the cache does.
};

PrefixIndexOptions IndexOptions(const Workload& workload, const ReplayOptions& options) {
  return {.block_size = workload.block_size, .default_capacity_tokens = options.capacity_tokens};
}

// The policies by name, each made by the library's own factory.
struct PolicyEntry {
  std::string_view name;
  bool keeps_index;
  absl::StatusOr<Router<SimEndpoint>> (*make)(const Fleet<SimEndpoint>&, const Workload&, const ReplayOptions&);
};
constexpr PolicyEntry kPolicies[] = {
    {"prefill-bound", true,
     [](const Fleet<SimEndpoint>& fleet, const Workload& workload, const ReplayOptions& options) {
       return PrefillBound(fleet, {.peak_prefill_throughput = options.peak_prefill_throughput,
                                   .max_ttft_penalty = std::chrono::milliseconds(options.max_ttft_penalty_ms),
                                   .seed = options.seed,
                                   .index_options = IndexOptions(workload, options)});
     }},
    {"decode-bound", true,
     [](const Fleet<SimEndpoint>& fleet, const Workload& workload, const ReplayOptions& options) {
       return DecodeBound(fleet, {.peak_prefill_throughput = options.peak_prefill_throughput,
                                  .max_ttft_penalty = std::chrono::milliseconds(options.max_ttft_penalty_ms),
                                  .seed = options.seed,
                                  .index_options = IndexOptions(workload, options)});
     }},
    {"round-robin", false,
     [](const Fleet<SimEndpoint>& fleet, const Workload&, const ReplayOptions& options) {
       return RoundRobin(fleet, {.seed = options.seed});
     }},
    {"random", false,
     [](const Fleet<SimEndpoint>& fleet, const Workload&, const ReplayOptions& options) {
       return UniformRandom(fleet, {.seed = options.seed});
     }},
    {"least-outstanding", false,
     [](const Fleet<SimEndpoint>& fleet, const Workload&, const ReplayOptions& options) {
       return LeastOutstanding(fleet, {.seed = options.seed});
     }},
};

// Whatever the policy, no event is later than the last arrival, plus all thinking, plus all work one after the other.
absl::Status CheckHorizon(const Workload& workload, const ReplayOptions& options, Nanoseconds decode_ns) {
  double arrivals = 0, work = 0;
  for (const WorkloadRequest& request : workload.requests) {
    if (request.after == WorkloadRequest::kNone) {
      arrivals = std::max(arrivals, static_cast<double>(request.arrival));
    } else {
      work += static_cast<double>(request.arrival);
    }
    work += static_cast<double>(request.prompt_tokens) / options.peak_prefill_throughput * 1e9 +
            static_cast<double>(request.output_tokens) * static_cast<double>(decode_ns);
  }
  if (arrivals + work < 4e18) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the replay could take ", (arrivals + work) / 1e9,
                   " s of virtual time, want less than 4e9 s: raise the prefill or decode rate"));
}

class Simulation {
 public:
  Simulation(const Workload& workload, const ReplayOptions& options, const PolicyEntry& policy,
             Router<SimEndpoint> router, Nanoseconds decode_ns)
      : workload_(workload),
        policy_(policy),
        router_(std::move(router)),
        engines_(static_cast<std::size_t>(options.endpoints),
                 SerialEngine({.prefill_tokens_per_s = options.peak_prefill_throughput,
                               .decode_ns = decode_ns,
                               .capacity_blocks = options.capacity_tokens / workload.block_size,
                               .block_size = workload.block_size,
                               .max_running = options.max_running})),
        live_(workload.requests.size()),
        next_turn_(workload.requests.size(), WorkloadRequest::kNone),
        served_(engines_.size(), 0) {
    result_.policy = std::string(policy.name);
    result_.keeps_index = policy.keeps_index;
  }

  absl::StatusOr<PolicyResult> Run(const Progress& progress) {
    const auto started = std::chrono::steady_clock::now();
    const std::size_t count = workload_.requests.size();
    for (std::size_t i = 0; i < count; ++i) {
      const WorkloadRequest& request = workload_.requests[i];
      if (request.after == WorkloadRequest::kNone) {
        events_.Schedule(request.arrival, {.kind = Event::kArrival, .request = static_cast<std::uint32_t>(i)});
      } else {
        next_turn_[static_cast<std::size_t>(request.after)] = static_cast<std::int32_t>(i);
      }
    }
    while (!events_.empty()) {
      const Event event = events_.Pop();
      switch (event.kind) {
        case Event::kArrival: Arrive(event.request); break;
        case Event::kPrefillEnd: EndPrefill(event.request, event.endpoint); break;
        case Event::kFinish: Finish(event.request, event.endpoint); break;
      }
      if (event.kind != Event::kPrefillEnd && progress) progress(done_);
    }
    result_.ttft = Summarize(std::move(ttft_));
    result_.tpot = Summarize(std::move(tpot_));
    result_.e2e = Summarize(std::move(e2e_));
    result_.makespan = std::max<Nanoseconds>(last_end_ - first_arrival_, 0);
    result_.least_requests = *std::min_element(served_.begin(), served_.end());
    result_.most_requests = *std::max_element(served_.begin(), served_.end());
    if (absl::Status status = CheckPromises(); !status.ok()) return status;
    result_.run_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    return std::move(result_);
  }

 private:
  struct Event {
    enum Kind : std::uint8_t { kArrival, kPrefillEnd, kFinish };
    Kind kind;
    std::uint32_t request = 0;
    std::uint32_t endpoint = 0;
  };
  struct Live {
    Ticket<SimEndpoint> ticket;
    Nanoseconds arrival = 0, first_token = 0;
    std::int64_t hit_tokens = 0;
  };

  void Arrive(std::uint32_t index) {
    const WorkloadRequest& request = workload_.requests[index];
    if (result_.requests++ == 0) first_arrival_ = events_.now();
    Request asked{.tokens = request.tokens, .prompt_tokens = request.prompt_tokens, .model = kSimulatedModel};
    if (request.tokens.empty()) {
      asked.block_keys = request.block_keys;
      asked.block_size = workload_.block_size;
    }
    const auto before = std::chrono::steady_clock::now();
    Routed<SimEndpoint> routed = router_.Route(asked);
    result_.decide_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    if (!routed.ok()) {
      if (result_.first_refusal.empty()) result_.first_refusal = routed.refusal().ToString();
      End(index);
      return;
    }
    const Decision& decision = routed->decision();
    const std::uint32_t endpoint =
        decision.endpoint().slot;  // Added first to last to an empty fleet: the slot is the index.
    SerialEngine& engine = engines_[endpoint];
    if (const FilterVerdict* verdict = decision.verdict(PrefixCacheAffinityFilter::kName); verdict != nullptr) {
      if (*verdict->reason == kGateOpen) ++result_.gate_openings;
      if (*verdict->reason == kSticky) ++result_.sticky_decisions;
    }
    result_.matched_tokens += policy_.keeps_index ? decision.matched_tokens : engine.MatchTokens(request.block_keys);
    ++served_[endpoint];
    live_[index] = std::make_unique<Live>(Live{.ticket = std::move(routed).Take(), .arrival = events_.now()});
    engine.Enqueue({.id = index,
                    .prompt_tokens = request.prompt_tokens,
                    .output_tokens = request.output_tokens,
                    .block_keys = request.block_keys});
    Start(endpoint);
  }

  void Start(std::uint32_t endpoint) {
    const std::optional<SerialEngine::Admission> admission = engines_[endpoint].TryStart(events_.now());
    if (!admission) return;
    live_[admission->id]->hit_tokens = admission->hit_tokens;
    events_.Schedule(admission->prefill_end,
                     {.kind = Event::kPrefillEnd, .request = admission->id, .endpoint = endpoint});
  }

  void EndPrefill(std::uint32_t index, std::uint32_t endpoint) {
    Live& live = *live_[index];
    live.first_token = events_.now();
    live.ticket.FirstToken();
    const SerialEngine::FirstToken first = engines_[endpoint].EndPrefill(events_.now());
    events_.Schedule(first.finish, {.kind = Event::kFinish, .request = index, .endpoint = endpoint});
    Start(endpoint);
  }

  void Finish(std::uint32_t index, std::uint32_t endpoint) {
    const WorkloadRequest& request = workload_.requests[index];
    Live& live = *live_[index];
    live.ticket.Finish({.output_tokens = request.output_tokens, .cached_tokens = live.hit_tokens});
    ++result_.succeeded;
    result_.prompt_tokens += request.prompt_tokens;
    result_.hit_tokens += live.hit_tokens;
    result_.output_tokens += request.output_tokens;
    ttft_.push_back(live.first_token - live.arrival);
    e2e_.push_back(events_.now() - live.arrival);
    if (request.output_tokens > 1) tpot_.push_back((events_.now() - live.first_token) / (request.output_tokens - 1));
    last_end_ = events_.now();
    live_[index].reset();
    engines_[endpoint].Finish(index);
    Start(endpoint);
    End(index);
  }

  // A refused turn does not end a conversation: what it would have said is counted as a failure, and the user goes on.
  void End(std::uint32_t index) {
    ++done_;
    const std::int32_t next = next_turn_[index];
    if (next == WorkloadRequest::kNone) return;
    const WorkloadRequest& turn = workload_.requests[static_cast<std::size_t>(next)];
    events_.Schedule(events_.now() + turn.arrival,
                     {.kind = Event::kArrival, .request = static_cast<std::uint32_t>(next)});
  }

  absl::Status CheckPromises() {
    const std::string who = absl::StrCat("policy ", ToAbsl(policy_.name), ": ");
    if (absl::Status audit = router_.Audit(); !audit.ok()) {
      return absl::InternalError(absl::StrCat(who, "the audit failed: ", audit.message()));
    }
    const RouterMetrics metrics = router_.Metrics();
    if (metrics.live_tickets != 0 || metrics.finished != static_cast<std::uint64_t>(result_.succeeded)) {
      return absl::InternalError(absl::StrCat(who, "want no live ticket and ", result_.succeeded, " finished, got ",
                                              metrics.live_tickets, " and ", metrics.finished));
    }
    for (const SerialEngine& engine : engines_) {
      if (!engine.idle()) return absl::InternalError(absl::StrCat(who, "a simulated endpoint still has work"));
    }
    result_.moved = static_cast<std::int64_t>(metrics.moved);
    return absl::OkStatus();
  }

  const Workload& workload_;
  const PolicyEntry& policy_;
  Router<SimEndpoint> router_;
  std::vector<SerialEngine> engines_;
  std::vector<std::unique_ptr<Live>> live_;  // By request; null before arrival and after the end.
  std::vector<std::int32_t> next_turn_;
  std::vector<std::int64_t> served_;
  EventQueue<Event> events_;
  PolicyResult result_;
  std::vector<Nanoseconds> ttft_, tpot_, e2e_;
  Nanoseconds first_arrival_ = 0, last_end_ = 0;
  std::int64_t done_ = 0;
};

}  // namespace

Distribution Summarize(std::vector<Nanoseconds> values) {
  Distribution result;
  result.count = static_cast<std::int64_t>(values.size());
  if (values.empty()) return result;
  std::sort(values.begin(), values.end());
  // Summed in order of size, so that equal values give equal means whatever order they came in.
  double sum = 0;
  for (const Nanoseconds value : values) sum += static_cast<double>(value);
  result.mean = sum / static_cast<double>(values.size());
  const auto rank = [&](std::size_t percent) { return values[(values.size() * percent + 99) / 100 - 1]; };
  result.p50 = rank(50);
  result.p90 = rank(90);
  result.p99 = rank(99);
  return result;
}

std::vector<std::string> PolicyNames() {
  std::vector<std::string> names;
  for (const PolicyEntry& entry : kPolicies) names.emplace_back(entry.name);
  return names;
}

absl::StatusOr<PolicyResult> ReplayPolicy(const Workload& workload, const ReplayOptions& options,
                                          std::string_view policy, const Progress& progress) {
  const auto* const entry = std::find_if(std::begin(kPolicies), std::end(kPolicies),
                                         [&](const PolicyEntry& candidate) { return candidate.name == policy; });
  if (entry == std::end(kPolicies)) {
    return absl::InvalidArgumentError(absl::StrCat("unknown policy '", ToAbsl(policy), "'"));
  }
  const Nanoseconds decode_ns = std::max<Nanoseconds>(std::llround(1e9 / options.decode_tokens_per_s), 1);
  if (absl::Status status = CheckHorizon(workload, options, decode_ns); !status.ok()) return status;
  Fleet<SimEndpoint> fleet;
  for (std::int64_t i = 0; i < options.endpoints; ++i) {
    absl::StatusOr<EndpointId> added =
        fleet.Add({.id = absl::StrCat("endpoint-", i), .capacity = options.capacity_tokens});
    if (!added.ok()) return added.status();
  }
  absl::StatusOr<Router<SimEndpoint>> router = entry->make(fleet, workload, options);
  if (!router.ok()) return router.status();
  return Simulation(workload, options, *entry, *std::move(router), decode_ns).Run(progress);
}

}  // namespace tokroute::tools

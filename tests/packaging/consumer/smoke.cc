// What an outside program does with tokroute, in small: each kind of policy routes, streams, finishes and is audited.
// Returns 0 only if the books are right. Needs neither exceptions nor RTTI.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokroute/tokroute.h"

int first_unit();
int second_unit();

namespace {

struct Upstream {
  std::string host;
  std::string_view name() const { return host; }
};

int failures = 0;
void Expect(bool ok, const char* what) {
  if (ok) return;
  std::printf("not so: %s\n", what);
  ++failures;
}

// 1,000 requests over 20 conversations: decided, prefilled, finished or dropped.
void Serve(absl::StatusOr<tokroute::Router<Upstream>> router, const char* what) {
  if (!router.ok()) {
    std::printf("%s: %s\n", what, router.status().ToString().c_str());
    ++failures;
    return;
  }
  std::vector<tokroute::Ticket<Upstream>> open;
  std::vector<tokroute::TokenId> prompt(400);
  for (std::uint32_t i = 0; i < 1000; ++i) {
    for (std::uint32_t t = 0; t < prompt.size(); ++t) prompt[t] = (i % 20) * 1000 + t;
    auto routed = router->Route({.tokens = prompt, .model = "m", .max_output_tokens = 50});
    Expect(routed.ok(), "routed");
    if (!routed.ok()) return;
    if (i % 3 != 0) routed->FirstToken();
    if (i % 2 == 0) routed->Finish({.output_tokens = 10});
    open.push_back(std::move(routed).Take());
    if (open.size() > 8) open.erase(open.begin());
  }
  const absl::Status audit = router->Audit();
  if (!audit.ok()) std::printf("%s\n", audit.ToString().c_str());
  Expect(audit.ok(), "audit");
  Expect(!open.back().decision().ToString().empty(), "a decision explains itself");
  open.clear();
  const tokroute::RouterMetrics metrics = router->Metrics();
  Expect(metrics.decisions == 1000 && metrics.live_tickets == 0, "every ticket is accounted for");
}

}  // namespace

int main() {
  using namespace std::chrono_literals;
  Expect(first_unit() + second_unit() == 2, "two units with every header");

  tokroute::Fleet<Upstream> fleet;
  for (const char* host : {"a", "b", "c", "d"}) Expect(fleet.Add({host}).ok(), "added");
  Expect(!fleet.Add({"a"}).ok(), "a name is taken once");

  Serve(tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s}), "prefill-bound");
  Serve(tokroute::DecodeBound(fleet, {.peak_prefill_throughput = 20480, .exploration_probability = 0.1}),
        "decode-bound");
  Serve(tokroute::LeastOutstanding(fleet), "least-outstanding");
  Serve(tokroute::RoundRobin(fleet), "round-robin");
  Serve(tokroute::UniformRandom(fleet), "random");
  {
    tokroute::WeightedSum scorers;
    scorers.Add(tokroute::ActiveRequestScorer(), 2);
    tokroute::FilterChain filters;
    filters.Add(tokroute::PrefixCacheAffinityFilter(*tokroute::TauGate::Create({.peak_prefill_throughput = 1000})));
    Serve(tokroute::MakeRouter(
              fleet, {.seed = 7},
              tokroute::Producers(tokroute::ApproximatePrefix(*tokroute::PrefixIndex::Create({})),
                                  tokroute::InFlightLoad()),
              tokroute::Named("erased", tokroute::Policy(std::move(filters), std::move(scorers),
                                                         tokroute::AnyPicker(tokroute::WeightedRandomPicker())))),
          "erased");
  }

  const auto refused = tokroute::PrefillBound(fleet, {});
  Expect(!refused.ok() && absl::IsInvalidArgument(refused.status()), "a forgotten number is refused");
  if (failures == 0) std::puts("smoke: ok");
  return failures == 0 ? 0 : 1;
}

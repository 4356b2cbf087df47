// A gateway has had its own upstream type for years, and it cannot grow a `name()` now. EndpointTraits reads it as it is.
#include <tokroute/tokroute.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace legacy {  // Somebody else's header.

struct Backend {
  std::string host;
  int port = 0;
  std::string uuid;
  std::vector<std::string> served_models;
  std::map<std::string, std::string> annotations;
  std::string hardware;      // "h100", "b200": what we know of its speed.
  long kv_cache_blocks = 0;  // Of 16 tokens each.
};

}  // namespace legacy

// Only Name is required; leave out whatever your type does not know. Values are read when an endpoint is added or
// updated, and copied: never in the hot path, so a look-up or a conversion here costs nothing per request.
template <>
struct tokroute::EndpointTraits<legacy::Backend> {
  static std::string_view Name(const legacy::Backend& b) { return b.uuid; }
  // It becomes a candidate only for requests that name one of these. Empty: for all.
  static const std::vector<std::string>& Models(const legacy::Backend& b) { return b.served_models; }
  // Tokens/s. With different figures in one fleet the gate compares times, not tokens: a B200 with 100,000 tokens in
  // flight is ahead of an H100 with 80,000. 0 means: as fast as the policy's own figure.
  static double PeakPrefillThroughput(const legacy::Backend& b) { return b.hardware == "b200" ? 48000 : 0; }
  // What fits into its KV cache: beyond it, the router forgets the prefixes that were used longest ago, as the engine does.
  static std::int64_t CapacityTokens(const legacy::Backend& b) { return b.kv_cache_blocks * 16; }
  static std::string_view Host(const legacy::Backend& b) { return b.host; }
  static std::string_view Label(const legacy::Backend& b, std::string_view key) {
    const auto found = b.annotations.find(std::string(key));
    return found == b.annotations.end() ? std::string_view() : std::string_view(found->second);
  }
};
static_assert(tokroute::Endpoint<legacy::Backend>);

int main() {
  using namespace std::chrono_literals;
  tokroute::Fleet<legacy::Backend> fleet;
  for (const legacy::Backend& backend :
       {legacy::Backend{"10.0.0.1", 8000, "a", {"qwen3-32b"}, {}, "h100", 40'000},
        legacy::Backend{"10.0.0.2", 8000, "b", {"qwen3-32b", "llama-70b"}, {}, "b200", 90'000},
        legacy::Backend{"10.0.0.3", 8000, "c", {"llama-70b"}, {}, "h100", 40'000}}) {
    if (auto id = fleet.Add(backend); !id.ok()) return std::puts(id.status().ToString().c_str()), 1;
  }

  // 20,480 tokens/s is what an endpoint has whose traits say 0: the H100s.
  auto router = tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s});
  if (!router.ok()) return std::puts(router.status().ToString().c_str()), 1;

  const std::vector<tokroute::TokenId> prompt(2000, 42);
  for (const char* model : {"qwen3-32b", "llama-70b", "gpt-oss-120b"}) {
    auto ticket = router->Route({.tokens = prompt, .model = model});
    if (!ticket.ok()) {
      std::printf("%s: %s\n", model, ticket.refusal().ToString().c_str());
      continue;
    }
    const legacy::Backend& backend = ticket->endpoint();  // Your own type comes back, with all that it knows.
    std::printf("%s: %s:%d (%s), one of %u candidates\n", model, backend.host.c_str(), backend.port,
                backend.hardware.c_str(), ticket->decision().candidates);
    ticket->FirstToken();
    ticket->Finish();
  }
  return 0;
}

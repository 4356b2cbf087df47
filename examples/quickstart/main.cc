// Which model server gets a request? Three servers, one conversation, and what becomes of every ticket.
#include <tokroute/tokroute.h>

#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

// Your own type. All that the library wants of it is a unique name.
struct Upstream {
  std::string address;
  std::string_view name() const { return address; }
};

int main() {
  using namespace std::chrono_literals;

  tokroute::Fleet<Upstream> fleet;  // May change at any time, from any thread, while routers route over it.
  for (const char* address : {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}) {
    if (auto id = fleet.Add({address}); !id.ok()) return std::puts(id.status().ToString().c_str()), 1;
  }

  // Two numbers: how fast one server prefills (measure it), and how long a user may wait to stay where the cache is.
  auto router = tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s, .seed = 1});
  if (!router.ok()) return std::puts(router.status().ToString().c_str()), 1;  // Names the field, its value and its range.

  std::vector<tokroute::TokenId> prompt(4000);  // Token ids, as your tokenizer makes them.
  std::iota(prompt.begin(), prompt.end(), 1);

  {
    auto ticket = router->Route({.tokens = prompt, .model = "qwen3-32b"});
    if (!ticket.ok()) return std::puts(ticket.refusal().ToString().c_str()), 1;  // In a gateway: a 503 with that reason.
    std::printf("First turn. %s\n\n", ticket->decision().ToString().c_str());
    // Here a gateway sends the request to ticket->endpoint(). As the response comes back:
    ticket->FirstToken();                      // The prompt is prefilled, so its tokens are no longer in flight.
    ticket->Finish({.output_tokens = 120});    // Complete: the server holds this prefix now.
  }

  prompt.resize(4300, 7);  // The next turn of the conversation begins with the same tokens ...
  auto second = router->Route({.tokens = prompt, .model = "qwen3-32b"});
  if (!second.ok()) return 1;
  std::printf("Second turn. %s\n\n", second->decision().ToString().c_str());  // ... and goes where they are cached.

  {
    auto lost = router->Route({.tokens = prompt});
    if (!lost.ok()) return 1;
    std::printf("In flight while two requests run: %llu\n", static_cast<unsigned long long>(router->Metrics().live_tickets));
  }  // The client hangs up, an exception passes, a return was forgotten: the ticket is dropped, which is an abort ...
  second->Finish();

  const tokroute::RouterMetrics metrics = router->Metrics();
  std::printf("At the end: %llu in flight, %llu finished, %llu aborted\n",
              static_cast<unsigned long long>(metrics.live_tickets), static_cast<unsigned long long>(metrics.finished),
              static_cast<unsigned long long>(metrics.aborted));
  return router->Audit().ok() ? 0 : 1;  // ... and the books balance: every booking was released exactly once.
}

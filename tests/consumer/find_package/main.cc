#include <tokroute/testing/scores_of.h>
#include <tokroute/tokroute.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

int SecondUnit();

struct Upstream {
  std::string host;
  std::string_view name() const { return host; }
};

// Routes a request and sees it through, so that the library is linked and used, not only included.
int main() {
  using namespace std::chrono_literals;
  std::printf("tokroute %s, %d\n", TOKROUTE_CONSUMER_VERSION, SecondUnit());
  tokroute::Fleet<Upstream> fleet;
  if (!fleet.Add({"a"}).ok() || !fleet.Add({"b"}).ok()) return 1;
  auto router = tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s});
  if (!router.ok()) return std::puts(router.status().ToString().c_str()), 2;
  const std::vector<tokroute::TokenId> prompt(1000, 7);
  std::string warm;
  for (int turn = 0; turn < 2; ++turn) {
    auto ticket = router->Route({.tokens = prompt});
    if (!ticket.ok()) return 3;
    std::puts(ticket->decision().ToString().c_str());
    if (turn == 1 && ticket->endpoint().host != warm) return 4;
    warm = ticket->endpoint().host;
    ticket->FirstToken();
    ticket->Finish({.output_tokens = 10});
  }
  using Column = tokroute::testing::ColumnOf<tokroute::ActiveRequests>;
  if (tokroute::testing::ScoresOf(tokroute::ActiveRequestScorer{}, {}, Column{{0, 4}})[0] != 1.0F) return 5;
  return router->Audit().ok() ? 0 : 6;
}

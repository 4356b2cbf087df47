// Endpoints, fleets and prompts for tests.
#ifndef TOKROUTE_TESTS_SUPPORT_TEST_FLEET_H_
#define TOKROUTE_TESTS_SUPPORT_TEST_FLEET_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tokroute/tokroute.h"

namespace tokroute::testing_support {

// An endpoint with every attribute that a test may want to set.
struct Upstream {
  std::string called;
  std::vector<std::string> serves = {};
  double rate = 0;
  std::int64_t capacity = 0;
  double share = 1;
  int edition = 0;  // Means nothing to the library.

  std::string_view name() const { return called; }
  const std::vector<std::string>& models() const { return serves; }
  double peak_prefill_throughput() const { return rate; }
  std::int64_t capacity_tokens() const { return capacity; }
  double weight() const { return share; }
};

// Adds e0, e1, ... and returns their ids.
inline std::vector<EndpointId> AddEndpoints(Fleet<Upstream>& fleet, int count) {
  std::vector<EndpointId> ids;
  for (int i = 0; i < count; ++i) {
    const auto id = fleet.Add({.called = absl::StrCat("e", i)});
    EXPECT_TRUE(id.ok()) << id.status();
    ids.push_back(*id);
  }
  return ids;
}

// A prompt that shares no block with the prompt of another seed.
inline std::vector<TokenId> MakePrompt(std::uint64_t seed, std::size_t tokens) {
  Random random(seed * 0x9e3779b97f4a7c15ULL + 1);
  std::vector<TokenId> prompt(tokens);
  for (TokenId& token : prompt) token = static_cast<TokenId>(random.Next());
  return prompt;
}

// The ledger's view of one endpoint.
struct Load {
  std::int64_t tokens = 0, requests = 0, output = 0;
  friend bool operator==(const Load&, const Load&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Load& load) {
    return out << load.tokens << " tokens, " << load.requests << " requests, " << load.output << " output tokens";
  }
};

template <class E>
Load LoadOf(const Router<E>& router, EndpointId id) {
  const auto tokens = router.template Read<UncachedTokensInFlight>(id);
  const auto requests = router.template Read<ActiveRequests>(id);
  const auto output = router.template Read<OutputTokensInFlight>(id);
  EXPECT_TRUE(tokens.has_value() && requests.has_value() && output.has_value()) << "endpoint gone, or no ledger";
  return {tokens.value_or(-1), requests.value_or(-1), output.value_or(-1)};
}

inline std::uint64_t Refusals(const RouterMetrics& metrics, RefusalReason reason) {
  return metrics.refusals[static_cast<std::size_t>(reason)];
}

}  // namespace tokroute::testing_support

#endif  // TOKROUTE_TESTS_SUPPORT_TEST_FLEET_H_

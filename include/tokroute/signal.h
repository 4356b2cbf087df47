// Signals: one typed value per endpoint for the request at hand (a column). A signal is a type.
//
// Names and units travel into messages. Two signals are the same when their names are, so that libraries loaded apart
// agree; a name with two value types is refused when a router is made.
#ifndef TOKROUTE_SIGNAL_H_
#define TOKROUTE_SIGNAL_H_

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// Signal<S>: a value type (trivially copyable, at most 64 bytes; all bits zero is what a new endpoint starts with), a
// name and a unit. Declare one with TOKROUTE_SIGNAL.
template <class S>
concept Signal = requires {
  typename S::value_type;
  { S::kName } -> std::convertible_to<std::string_view>;
  { S::kUnit } -> std::convertible_to<std::string_view>;
} && std::is_trivially_copyable_v<typename S::value_type> && sizeof(typename S::value_type) <= 64;

#define TOKROUTE_SIGNAL(Name, Type, name, unit)                      \
  struct Name {                                                      \
    using value_type = Type;                                         \
    static constexpr std::string_view kName = name, kUnit = unit;    \
  }

// Prompt tokens whose blocks the endpoint already holds, from the first block on, without a gap, on any tier.
// 0 .. prompt tokens. Filled by prefix producers.
TOKROUTE_SIGNAL(MatchedTokens, std::int64_t, "matched_tokens", "tokens");
// By storage tier (device, host, disk, unknown), each from the first block on without a gap in that tier. Filled by the
// event-driven prefix producer.
using TokensByTier = std::array<std::int64_t, 4>;
TOKROUTE_SIGNAL(MatchedTokensByTier, TokensByTier, "matched_tokens_by_tier", "tokens per tier");
// MatchedTokens, each weighted by its storage tier (device 1.0). Affinity is this / prompt tokens. Filled by prefix producers.
TOKROUTE_SIGNAL(WeightedMatchedTokens, double, "weighted_matched_tokens", "tokens");
// Prompt tokens - MatchedTokens, at least 0. Filled by prefix producers.
TOKROUTE_SIGNAL(UncachedTokens, std::int64_t, "uncached_tokens", "tokens");
// Tokens in the endpoint's device memory, as its engine's events tell: what decoding has to read, warm and in use alike.
// >= 0. Filled by the event-driven prefix producer; the ledger knows what is on its way there.
TOKROUTE_SIGNAL(KvTokensHeld, std::int64_t, "kv_tokens_held", "tokens");
// Dispatched and not yet prefilled. Never negative. Filled by the ledger (load/in_flight_load.h).
TOKROUTE_SIGNAL(UncachedTokensInFlight, std::int64_t, "uncached_tokens_in_flight", "tokens");
// Dispatched and not yet finished. Never negative. Filled by the ledger.
TOKROUTE_SIGNAL(ActiveRequests, std::int64_t, "active_requests", "requests");
// Estimated output of what is dispatched and not yet finished. Never negative. Filled by the ledger.
TOKROUTE_SIGNAL(OutputTokensInFlight, std::int64_t, "output_tokens_in_flight", "tokens");
// The decision that last booked this endpoint; 0: none yet. Lower is longer ago. Filled by the ledger.
TOKROUTE_SIGNAL(LastDispatch, std::uint64_t, "last_dispatch", "decision number");
// What the endpoint's traits say; 0: not known. Filled from the fleet, in every router.
TOKROUTE_SIGNAL(PeakPrefillThroughput, double, "peak_prefill_throughput", "tokens/s");
TOKROUTE_SIGNAL(EndpointWeight, double, "endpoint_weight", "share");

// A list of signals: what a plugin consumes or a producer fills.
template <Signal... S>
struct Signals {
  static constexpr std::size_t kCount = sizeof...(S);
};

// What a plugin whose list is known only at run time declares.
struct RuntimeSignals {};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

// A signal without its type: how columns are found at run time.
struct SignalInfo {
  std::string_view name, unit;
  std::uint32_t size = 0;  // Of one value. Unit: bytes.
  char kind = 'o';         // 'i' signed, 'u' unsigned, 'f' floating, 'o' other.
  bool SameType(const SignalInfo& other) const noexcept { return size == other.size && kind == other.kind; }
};

template <Signal S>
constexpr SignalInfo InfoOf() {
  using T = typename S::value_type;
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_integral_v<T> ? (std::is_signed_v<T> ? 'i' : 'u') : 'o';
  return {S::kName, S::kUnit, sizeof(T), kind};
}

template <class S, class List>
inline constexpr bool kListed = false;
template <class S, class... T>
inline constexpr bool kListed<S, Signals<T...>> = (std::same_as<S, T> || ...);

}  // namespace tokroute::internal

#endif  // TOKROUTE_SIGNAL_H_

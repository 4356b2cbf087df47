// What may be said to a router: when it is made, per request, and what it counts.
#ifndef TOKROUTE_ROUTE_OPTIONS_H_
#define TOKROUTE_ROUTE_OPTIONS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "tokroute/booking.h"
#include "tokroute/concepts.h"
#include "tokroute/decision.h"
#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// The most legs of one ticket, and the most request producers of one router.
inline constexpr std::uint32_t kMaxLegs = 3, kMaxRequestProducers = 4;

struct RouterOptions {
  // Keys every random draw. The same seed and events give the same decisions, bit for bit. Give each replica its own, so
  // that replicas do not break ties alike.
  std::uint64_t seed = 0;
  ClockRef clock = {};  // For plugins that ask for the time. Empty: time stays 0.
};

// A leg and the policy that decides it.
struct LegPolicy {
  Leg leg = Leg::kServe;
  std::string_view policy = {};  // Empty: the router's first.
};

struct RouteOptions {
  std::string_view policy = {};              // Empty: the router's first.
  std::span<const EndpointId> exclude = {};  // Not these (a handful: each is compared with each candidate).
  // Several roles of one dispatch, each with its policy, decided on the same loads and booked together or not at all. At
  // most kMaxLegs, distinct. Empty: one Leg::kServe by `policy`.
  std::span<const LegPolicy> legs = {};
  Trace* trace = nullptr;  // Filled (appended to) with everything the policies computed. Costs allocations under the lock.
};

struct RerouteOptions {
  std::string_view policy = {};              // Empty: the policy that decided before.
  std::span<const EndpointId> exclude = {};  // Besides the endpoint it is on.
  std::optional<Leg> leg = {};               // Which leg; needed only when a ticket has several.
  Trace* trace = nullptr;
};

// Counted since the router was made, but for live_tickets. Each decision is counted once.
struct RouterMetrics {
  std::uint64_t decisions = 0;  // Routed or rerouted, per leg.
  std::uint64_t live_tickets = 0;  // Now: not finished, expired or dropped.
  std::uint64_t finished = 0;      // Ended complete.
  std::uint64_t aborted = 0;       // Ended otherwise: Finish with Outcome::aborted, dropped, expired.
  std::uint64_t expired = 0;       // Of these, by Expire.
  std::uint64_t moved = 0;         // By MoveTo or Reroute.
  std::uint64_t repeated_events = 0;    // A second FirstToken or Finish. No effect.
  std::uint64_t late_events = 0;        // FirstToken after the end, or anything after Expire. No effect.
  std::uint64_t orphaned_releases = 0;  // Settled when the endpoint had been removed. They fell on nothing.
  std::uint64_t scores_clamped = 0;     // Scores that were NaN or outside 0..1.
  // Prompt tokens that a prefix producer took for cached, and what the engine reported, over the tickets whose Finish
  // brought cached_tokens. Far apart: the router's tokens or block size are not the engine's.
  std::uint64_t predicted_cached_tokens = 0, reported_cached_tokens = 0;
  std::array<std::uint64_t, 11> refusals{};  // By RefusalReason.
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_ROUTE_OPTIONS_H_

// Booking and Outcome: what producers are told about a dispatch.
#ifndef TOKROUTE_BOOKING_H_
#define TOKROUTE_BOOKING_H_

#include <cstdint>
#include <string_view>

#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// One role of a dispatch. A ticket holds one to three; most hold kServe.
enum class Leg : std::uint8_t { kServe, kEncode, kPrefill, kDecode };

constexpr std::string_view ToString(Leg leg) noexcept {
  switch (leg) {
    case Leg::kServe: return "serve";
    case Leg::kEncode: return "encode";
    case Leg::kPrefill: return "prefill";
    case Leg::kDecode: return "decode";
  }
  return "unknown";
}

struct Booking {
  EndpointId endpoint = {};
  Row row = 0;
  Leg leg = Leg::kServe;
  bool prefilled = false;                    // The first token was seen.
  std::uint64_t decision = 0;                // Number of the decision that made it, from 1.
  std::int64_t prompt_tokens = 0;            // Whole prompt.
  std::int64_t uncached_tokens = 0;          // Prompt - matched on this endpoint, 0 .. prompt_tokens.
  std::int64_t charged_tokens = 0;           // What the ledger holds for the prompt until the first token.
  std::int64_t estimated_output_tokens = 0;  // What the ledger expects the response to take.
};

// How a dispatch ended.
struct Outcome {
  std::int64_t output_tokens = 0;   // As generated. Unit: tokens.
  std::int64_t cached_tokens = -1;  // Prompt tokens that the engine reports as cache hits; -1: not reported.
  bool aborted = false;             // Ended before it was complete: client gone, error, deadline, dropped ticket.
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_BOOKING_H_

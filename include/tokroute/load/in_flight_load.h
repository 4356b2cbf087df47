// InFlightLoad: the ledger. Uncached tokens, active requests and expected output in flight, per endpoint.
//
// The router calls it under its lock; a booking is charged once and released once, whatever order its ticket's calls
// come in, and on the very incarnation that was booked. There is no reaper: a long request is not a leak.
#ifndef TOKROUTE_LOAD_IN_FLIGHT_LOAD_H_
#define TOKROUTE_LOAD_IN_FLIGHT_LOAD_H_

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/internal/option_error.h"
#include "tokroute/load/output_estimate.h"

namespace tokroute {
inline namespace v0 {

// What a prompt weighs until its first token.
enum class Charge : std::uint8_t {
  kUncached,    // Prompt tokens that the endpoint does not hold. The default.
  kFullPrompt,  // All of them.
};

struct InFlightLoadOptions {
  Charge charge = Charge::kUncached;
  // Also hold the estimated output, in the same counter, until the response ends: an approximation of tokens held in KV
  // cache. Off: tokens in flight are only those yet to be prefilled.
  bool count_estimated_output = false;
  OutputEstimateOptions output = {};
};

//   event                 UncachedTokensInFlight             ActiveRequests   OutputTokensInFlight
//   booked                + charge (+ estimate, if counted)  + 1              + estimate
//   first token           - charge                           .                .
//   released              - what is still held               - 1              - estimate
//
// A prefill leg (Leg::kPrefill) ends at the first token: it then releases everything. OutputTokensInFlight is kept whether
// or not the estimate is counted. LastDispatch is the number of the decision that last booked the endpoint.
class InFlightLoad {
 public:
  static constexpr std::string_view kName = "in-flight-load";
  using Produces = Signals<UncachedTokensInFlight, ActiveRequests, OutputTokensInFlight, LastDispatch>;
  using Audited = Signals<UncachedTokensInFlight, ActiveRequests, OutputTokensInFlight>;
  using Own = WritableColumns<Produces>;

  InFlightLoad() = default;
  explicit InFlightLoad(const InFlightLoadOptions& options) : options_(options) {}

  absl::Status Check() const {
    const OutputEstimateOptions& output = options_.output;
    if (!(output.output_ratio >= 0 && output.output_ratio <= 1e6)) {  // Also catches NaN and infinity.
      return internal::OptionError("OutputEstimateOptions.output_ratio", "0 .. 1e6", output.output_ratio);
    }
    if (output.max_estimated_output_tokens < -1) {
      return internal::OptionError("OutputEstimateOptions.max_estimated_output_tokens", ">= 0 tokens, or -1 for none",
                                   output.max_estimated_output_tokens);
    }
    return absl::OkStatus();
  }

  void Price(const Request& request, Booking& booking) const noexcept {
    booking.charged_tokens = options_.charge == Charge::kFullPrompt ? booking.prompt_tokens : booking.uncached_tokens;
    booking.estimated_output_tokens =
        EstimateOutputTokens(options_.output, booking.prompt_tokens, request.max_output_tokens);
  }
  void OnBooked(Own own, const Request&, const Booking& b) noexcept {
    own.Column<UncachedTokensInFlight>()[b.row] += b.charged_tokens + CountedOutput(b);
    own.Column<OutputTokensInFlight>()[b.row] += b.estimated_output_tokens;
    ++own.Column<ActiveRequests>()[b.row];
    // The later one: a ticket that moves here brings an old number along.
    std::uint64_t& last = own.Column<LastDispatch>()[b.row];
    last = std::max(last, b.decision);
  }
  void OnFirstToken(Own own, const Booking& b) noexcept {
    own.Column<UncachedTokensInFlight>()[b.row] -= b.charged_tokens;
    if (b.leg == Leg::kPrefill) ReleaseRest(own, b);
  }
  void OnReleased(Own own, const Booking& b, const Outcome&) noexcept {
    if (!b.prefilled) own.Column<UncachedTokensInFlight>()[b.row] -= b.charged_tokens;
    if (b.leg != Leg::kPrefill || !b.prefilled) ReleaseRest(own, b);
  }

  const InFlightLoadOptions& options() const noexcept { return options_; }

 private:
  std::int64_t CountedOutput(const Booking& b) const noexcept {
    return options_.count_estimated_output ? b.estimated_output_tokens : 0;
  }
  void ReleaseRest(Own own, const Booking& b) const noexcept {
    own.Column<UncachedTokensInFlight>()[b.row] -= CountedOutput(b);
    own.Column<OutputTokensInFlight>()[b.row] -= b.estimated_output_tokens;
    --own.Column<ActiveRequests>()[b.row];
  }

  InFlightLoadOptions options_;
};
static_assert(LoadProducer<InFlightLoad>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_LOAD_IN_FLIGHT_LOAD_H_

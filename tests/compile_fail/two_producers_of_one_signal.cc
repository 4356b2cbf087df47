// Two producers that fill the same column.
#include "tokroute/tokroute.h"

struct Upstream {
  std::string_view name() const { return "a"; }
};

struct RequestCounter {
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
  TOKROUTE_SIGNAL(Total, std::int64_t, "total_requests", "requests");
  using Produces = tokroute::Signals<Total>;
#else
  using Produces = tokroute::Signals<tokroute::ActiveRequests>;
#endif
  using Own = tokroute::WritableColumns<Produces>;
  void OnBooked(Own, const tokroute::Request&, const tokroute::Booking&) noexcept {}
  void OnFirstToken(Own, const tokroute::Booking&) noexcept {}
  void OnReleased(Own, const tokroute::Booking&, const tokroute::Outcome&) noexcept {}
};

void Make(const tokroute::Fleet<Upstream>& fleet) {
  (void)tokroute::MakeRouter(fleet, {}, tokroute::Producers(tokroute::InFlightLoad(), RequestCounter()),
                             tokroute::Named("default", tokroute::Policy(tokroute::RandomPicker{})));
}

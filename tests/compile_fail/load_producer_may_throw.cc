// A load producer whose hook is not noexcept: it runs under the router's lock, and a release must never throw.
#include "tokroute/tokroute.h"

struct Upstream {
  std::string_view name() const { return "a"; }
};

TOKROUTE_SIGNAL(Total, std::int64_t, "total_requests", "requests");

struct RequestCounter {
  using Produces = tokroute::Signals<Total>;
  using Own = tokroute::WritableColumns<Produces>;
  void OnBooked(Own own, const tokroute::Request&, const tokroute::Booking& b) noexcept { ++own.Column<Total>()[b.row]; }
  void OnFirstToken(Own, const tokroute::Booking&) noexcept {}
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
  void OnReleased(Own, const tokroute::Booking&, const tokroute::Outcome&) noexcept {}
#else
  void OnReleased(Own, const tokroute::Booking&, const tokroute::Outcome&) {}
#endif
};

void Make(const tokroute::Fleet<Upstream>& fleet) {
  (void)tokroute::MakeRouter(fleet, {}, tokroute::Producers(RequestCounter()),
                             tokroute::Named("default", tokroute::Policy(tokroute::RandomPicker{})));
}

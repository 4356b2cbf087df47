// The same mistake in a plugin of the user's own: a filter. Its signal is one that nobody has heard of.
#include "tokroute/tokroute.h"

struct Upstream {
  std::string_view name() const { return "a"; }
};

TOKROUTE_SIGNAL(KvUsage, double, "kv_usage", "share");

struct KvFilter {
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
  using Consumes = tokroute::Signals<tokroute::ActiveRequests>;
#else
  using Consumes = tokroute::Signals<tokroute::ActiveRequests, KvUsage>;
#endif
  tokroute::FilterVerdict Narrow(const tokroute::Request&, tokroute::CandidatesFor<Consumes>, tokroute::Stage&) const {
    return {};
  }
};

void Make(const tokroute::Fleet<Upstream>& fleet) {
  (void)tokroute::MakeRouter(fleet, {}, tokroute::Producers(tokroute::InFlightLoad()),
                             tokroute::Named("default", tokroute::Policy(KvFilter{}, tokroute::MaxScorePicker<>{})));
}

// A policy that consumes a signal which no producer of its router fills.
#include "tokroute/tokroute.h"

struct Upstream {
  std::string_view name() const { return "a"; }
};

void Make(const tokroute::Fleet<Upstream>& fleet, std::shared_ptr<tokroute::PrefixIndex> index) {
  (void)index;
  (void)tokroute::MakeRouter(fleet, {},
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
                             tokroute::Producers(tokroute::ApproximatePrefix(index), tokroute::InFlightLoad()),
#else
                             tokroute::Producers(tokroute::InFlightLoad()),
#endif
                             tokroute::Named("default", tokroute::Policy(tokroute::Weighted(tokroute::TokenLoadScorer{}, 2),
                                                                         tokroute::MaxScorePicker<>{})));
}

// The same mistake in a picker: round robin reads the ledger, and there is none.
#include "tokroute/tokroute.h"

struct Upstream {
  std::string_view name() const { return "a"; }
};

void Make(const tokroute::Fleet<Upstream>& fleet, std::shared_ptr<tokroute::PrefixIndex> index) {
  (void)tokroute::MakeRouter(fleet, {},
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
                             tokroute::Producers(tokroute::ApproximatePrefix(index), tokroute::InFlightLoad()),
#else
                             tokroute::Producers(tokroute::ApproximatePrefix(index)),
#endif
                             tokroute::Named("default", tokroute::Policy(tokroute::RoundRobinPicker{})));
}

// A scorer whose function returns double: totals would no longer be sums of exact products.
#include "tokroute/tokroute.h"

struct Half {
  using Consumes = tokroute::Signals<>;
  auto Score(const tokroute::Request&, tokroute::CandidatesFor<Consumes>) const {
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
    return [](tokroute::Row) { return 0.5F; };
#else
    return [](tokroute::Row) { return 0.5; };
#endif
  }
};

tokroute::Policy policy(Half{}, tokroute::MaxScorePicker<>{});

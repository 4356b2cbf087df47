// A plugin that reads a column which it does not declare.
#include "tokroute/tokroute.h"

struct Idle {
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
  using Consumes = tokroute::Signals<tokroute::ActiveRequests>;
#else
  using Consumes = tokroute::Signals<tokroute::UncachedTokensInFlight>;
#endif
  auto Score(const tokroute::Request&, tokroute::CandidatesFor<Consumes> candidates) const {
    const auto active = candidates.Column<tokroute::ActiveRequests>();
    return [=](tokroute::Row row) { return active[row] == 0 ? 1.0F : 0.0F; };
  }
};

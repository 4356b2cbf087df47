// A filter behind a scorer.
#include "tokroute/tokroute.h"

#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
auto Make(const tokroute::PrefixCacheAffinityFilter& filter) {
  return tokroute::Policy(filter, tokroute::TokenLoadScorer{}, tokroute::MaxScorePicker<>{});
}
#else
auto Make(const tokroute::PrefixCacheAffinityFilter& filter) {
  return tokroute::Policy(tokroute::TokenLoadScorer{}, filter, tokroute::MaxScorePicker<>{});
}
#endif

// A policy that ranks and then picks nobody.
#include "tokroute/tokroute.h"

#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
tokroute::Policy policy(tokroute::ActiveRequestScorer{}, tokroute::MaxScorePicker<>{});
#else
tokroute::Policy policy(tokroute::ActiveRequestScorer{}, tokroute::TokenLoadScorer{});
#endif

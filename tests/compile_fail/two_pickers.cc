// Two pickers in one policy.
#include "tokroute/tokroute.h"

#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
tokroute::Policy policy(tokroute::ActiveRequestScorer{}, tokroute::MaxScorePicker<>{});
#else
tokroute::Policy policy(tokroute::ActiveRequestScorer{}, tokroute::RandomPicker{}, tokroute::MaxScorePicker<>{});
#endif

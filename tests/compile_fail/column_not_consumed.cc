// A unit test that gives a scorer a column which it does not read.
#include "tokroute/scorer/active_request_scorer.h"
#include "tokroute/testing/scores_of.h"

using namespace tokroute;

void Test() {
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
  (void)testing::ScoresOf(ActiveRequestScorer{}, {}, testing::ColumnOf<ActiveRequests>{{1, 2}});
#else
  (void)testing::ScoresOf(ActiveRequestScorer{}, {}, testing::ColumnOf<MatchedTokens>{{1, 2}});
#endif
}

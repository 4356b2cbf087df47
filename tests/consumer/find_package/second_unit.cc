// A second unit with the same headers: a function that is not inline would now be defined twice.
#include <tokroute/tokroute.h>

int SecondUnit();
int SecondUnit() { return 2; }

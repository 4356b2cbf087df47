#include <tokroute/tokroute.h>

#include <cstdio>

int SecondUnit();

int main() {
  std::printf("tokroute %s, %d\n", TOKROUTE_CONSUMER_VERSION, SecondUnit());
  return 0;
}

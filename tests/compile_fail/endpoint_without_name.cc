// An endpoint type that has no name, and no traits that give it one.
#include "tokroute/tokroute.h"

struct Upstream {
#ifdef TOKROUTE_COMPILE_FAIL_CONTROL
  std::string_view name() const { return host; }
#endif
  std::string_view host;
};

tokroute::Fleet<Upstream> fleet;

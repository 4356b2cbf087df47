// try and catch for want of memory, in sources that are also compiled without exceptions (where it ends the program).
#ifndef TOKROUTE_SRC_INTERNAL_NO_MEMORY_H_
#define TOKROUTE_SRC_INTERNAL_NO_MEMORY_H_

#include <new>

#if defined(__cpp_exceptions)
#define TOKROUTE_TRY try
#define TOKROUTE_NO_MEMORY catch (const std::bad_alloc&)
#else
#define TOKROUTE_TRY if (true)
#define TOKROUTE_NO_MEMORY else
#endif

#endif  // TOKROUTE_SRC_INTERNAL_NO_MEMORY_H_

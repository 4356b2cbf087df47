// Counts what the index under test has allocated: the tool replaces the global operator new and delete.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEMORY_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEMORY_H_

#include <cstdint>

namespace tokroute::index_bench {

// While one lives, this thread's allocations count as the index's, and so do its deallocations.
class CountedAllocations {
 public:
  CountedAllocations() noexcept;
  ~CountedAllocations();
  CountedAllocations(const CountedAllocations&) = delete;
  CountedAllocations& operator=(const CountedAllocations&) = delete;
};

std::int64_t CountedBytes() noexcept;       // Live now, as asked for. All threads.
std::int64_t ThreadAllocations() noexcept;  // Calls of operator new by this thread so far, counted or not.

// Makes the process keep memory that is freed, so that a second run does not pay for page faults again.
void KeepFreedMemory() noexcept;

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEMORY_H_

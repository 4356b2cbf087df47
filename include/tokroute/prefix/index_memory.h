// Where an index's large pieces of memory come from.
#ifndef TOKROUTE_PREFIX_INDEX_MEMORY_H_
#define TOKROUTE_PREFIX_INDEX_MEMORY_H_

#include <cstddef>

namespace tokroute {
inline namespace v0 {

// A hook for huge pages, a NUMA node, or a region of the gateway's own. The index asks for pieces of equal size (260
// KiB), in which nearly all lies that it keeps. Both functions or none; none: operator new. Whichever thread calls the
// index calls them, one at a time, under its lock; they and the context must outlive the index.
//
//   // From one region that was mapped with huge pages and is carved up from its start:
//   IndexMemory memory{.allocate = &CarveOff, .release = &Keep, .context = &region};
struct IndexMemory {
  // `bytes` bytes at a multiple of `alignment` (64), or null: no memory. The content may be anything.
  void* (*allocate)(std::size_t bytes, std::size_t alignment, void* context) noexcept = nullptr;
  void (*release)(void* memory, std::size_t bytes, void* context) noexcept = nullptr;
  void* context = nullptr;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_INDEX_MEMORY_H_

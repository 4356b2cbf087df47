// What the benchmark drives the index with: streams of operations, the same for the same scale and seed.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_WORKLOADS_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_WORKLOADS_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/index_bench/operations.h"
#include "tools/sim/trace.h"

namespace tokroute::index_bench {

struct WorkloadOptions {
  double scale = 1;  // Of what the workload is long or large in. More than 0, at most 1.
  std::uint64_t seed = 42;
};

// A request trace times length 4 (blocks of 128 tokens) times 20 copies with blocks of their own, spread uniformly over
// 128 endpoints with an LRU cache of 16,384 blocks each. Requests run one after the other in no time: a prompt evicts
// what it needs room for, tail first, stores the blocks it lacks in one event, then each block of output in one of its
// own. Scale: requests, and endpoints with them (at least 2), so that caches stay as full.
OperationStream MakeMooncake(const tools::Trace& trace, const WorkloadOptions& options);

// 10 M held blocks on 256 endpoints: chains of 8 .. 512 blocks, each doubling equally likely, on 1, 8 or 64 endpoints
// (50, 35, 15 %), each with a tail of its own of 4 .. 64 blocks, stored 8 blocks an event, 5 % of the events twice; one
// in five then loses a block in the middle. Lookups. Then every block is lost with a probability of 2 %; lookups again.
OperationStream MakePinned(const WorkloadOptions& options);

// One size of fleet and caches.
struct GridCell {
  std::string_view name;
  std::uint32_t endpoints = 0;
  std::uint64_t blocks = 0;  // Per endpoint.
  bool shared = false;       // Half of the held blocks are of conversations that 8 endpoints hold.
  bool big = false;          // Only on request.
};
inline constexpr std::array<GridCell, 6> kGridCells = {{
    {"8x20k", 8, 20'000, false, false},
    {"128x20k", 128, 20'000, false, false},
    {"128x20k-shared", 128, 20'000, true, false},
    {"1024x60k", 1024, 60'000, false, true},
    {"1024x60k-shared", 1024, 60'000, true, true},
    {"8x20k-shared", 8, 20'000, true, false},
}};

// What a grid's timed lookup is about.
struct GridClass {
  std::uint32_t prompt_blocks = 0, warm_endpoints = 0, runs = 0, hit_percent = 0;
  friend auto operator<=>(const GridClass&, const GridClass&) = default;
};
inline constexpr std::array<std::uint32_t, 4> kGridPrompts = {100, 1000, 4400, 6000};
inline constexpr std::array<std::uint32_t, 4> kGridRuns = {1, 3, 10, 100};
// A tag of a grid's match; not 0.
std::uint32_t TagOf(const GridClass& c) noexcept;
GridClass ClassOf(std::uint32_t tag) noexcept;

// Fills the caches with conversations of 64 .. 6000 blocks, 64 blocks an event, many at a time. Then prompts to look up
// are stored: of 100, 1,000, 4,400 and 6,000 blocks, in 1, 3, 10 and 100 turns with a fork after each, on 1, 8 or all
// endpoints; they are looked up as they are, half and not at all known. At last a quarter of the conversations is
// removed, tail first, 64 blocks an event, and stored again. Scale: the caches, and with a scale below 0.1 no prompt is
// longer than 1,000 blocks.
OperationStream MakeGrid(const GridCell& cell, const WorkloadOptions& options);

// 64 endpoints of 60,000 blocks: 200,000 turns of conversations that grow, fork and are continued elsewhere, 64 blocks
// an event. 1 % of events come before their parents', 1 % twice; blocks are evicted tail first, but one turn in fifty
// loses one in the middle, a third of which come back. Twenty times an endpoint goes and another takes its slot, six
// times one is cleared. Each turn looks its prompt up. Scale: blocks and turns.
OperationStream MakeChurn(const WorkloadOptions& options);

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_WORKLOADS_H_

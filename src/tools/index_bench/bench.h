// The benchmark's workloads, run and judged.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_BENCH_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_BENCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "tools/index_bench/operations.h"
#include "tools/index_bench/report.h"
#include "tools/index_bench/workloads.h"

namespace tokroute::index_bench {

struct BenchOptions {
  WorkloadOptions workload;
  int repetitions = 3;
  bool engine_keys = false;  // Of pinned: events name blocks otherwise than look-ups do.
  double window_ms = 750, slow_window_ms = 12'000;  // Of mooncake's replays by deadlines.
};

// Each takes a stream of its workload, generated or read.
absl::StatusOr<Report> BenchMooncake(const OperationStream& stream, const BenchOptions& options);
absl::StatusOr<Report> BenchPinned(const OperationStream& stream, const BenchOptions& options);
absl::StatusOr<Report> BenchChurn(const OperationStream& stream, const BenchOptions& options);
// One cell. `match_ns`: its lookups' times are added.
absl::StatusOr<Report> BenchGrid(const GridCell& cell, const OperationStream& stream, const BenchOptions& options,
                                 std::vector<float>& match_ns);

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_BENCH_H_

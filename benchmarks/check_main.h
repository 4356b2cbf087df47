// The benchmarks' common main: --check turns a benchmark's limits into an exit status. Without it results are verified and
// ratios printed, since timings of a shared machine are no ground to fail on.
#ifndef TOKROUTE_BENCHMARKS_CHECK_MAIN_H_
#define TOKROUTE_BENCHMARKS_CHECK_MAIN_H_

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "benchmark/benchmark.h"

namespace tokroute::benchmarks {

struct Limits {
  bool check = false, missed = false;

  // Notes and prints a missed limit. Only under --check.
  void Require(bool held, const char* what, benchmark::State& state) {
    if (!check || held) return;
    missed = true;
    state.SkipWithError(what);
  }
};
inline Limits& TheLimits() {
  static Limits limits;
  return limits;
}

inline double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

inline int Main(int argc, char** argv) {
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--check") == 0) TheLimits().check = true;
    else argv[kept++] = argv[i];
  }
  argc = kept;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (TheLimits().missed) std::fprintf(stderr, "check failed: a limit was missed\n");
  return TheLimits().missed ? 1 : 0;
}

}  // namespace tokroute::benchmarks

#endif  // TOKROUTE_BENCHMARKS_CHECK_MAIN_H_

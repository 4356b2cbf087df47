// Quantiles of measured times.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_STATISTICS_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_STATISTICS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tokroute::index_bench {

// The smallest value that at least `q` of all are not above. 0 of none. 0 <= q <= 1.
inline double Quantile(std::vector<float> values, double q) {
  if (values.empty()) return 0;
  const double rank = std::ceil(q * static_cast<double>(values.size()));
  const std::size_t index = std::min(values.size() - 1, static_cast<std::size_t>(std::max(rank, 1.0)) - 1);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index), values.end());
  return static_cast<double>(values[index]);
}

inline double Median(const std::vector<float>& values) { return Quantile(values, 0.5); }

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_STATISTICS_H_

// Is this spread even? Pearson's statistic against equal shares.
#ifndef TOKROUTE_TESTS_SUPPORT_CHI_SQUARE_H_
#define TOKROUTE_TESTS_SUPPORT_CHI_SQUARE_H_

#include <cstdint>
#include <span>

namespace tokroute::testing_support {

inline double ChiSquare(std::span<const std::int64_t> counts) {
  double total = 0, statistic = 0;
  for (std::int64_t count : counts) total += static_cast<double>(count);
  const double expected = total / static_cast<double>(counts.size());
  for (std::int64_t count : counts) {
    const double off = static_cast<double>(count) - expected;
    statistic += off * off / expected;
  }
  return statistic;
}

// What a fair spread over 8 endpoints (7 degrees of freedom) exceeds once in a thousand. Seeds are fixed, so a test that
// passes keeps passing.
inline constexpr double kFairOver8 = 24.32;

}  // namespace tokroute::testing_support

#endif  // TOKROUTE_TESTS_SUPPORT_CHI_SQUARE_H_

// What memory costs here and now, in the units that figures are compared in.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_FLOORS_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_FLOORS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokroute::index_bench {

// Nanoseconds since some moment.
std::int64_t Now() noexcept;

// What Now() adds to an interval measured with it: the median of many empty ones. Unit: ns.
double TimerNs();

class Floors {
 public:
  // As much memory as the table under test: `bytes`, at least 1 MiB.
  Floors(std::int64_t bytes, std::uint64_t seed);

  // Both take a short burst and note it. To be called in between what is measured.
  void MeasureMiss() noexcept;  // Dependent random reads.
  void MeasureLine() noexcept;  // Independent random reads of a line, prefetched 16 ahead.

  double miss_ns() const;  // Medians of the bursts so far; 0 before the first.
  double line_ns() const;
  std::int64_t bytes() const noexcept { return static_cast<std::int64_t>(lines_.size() * sizeof(Line)); }

 private:
  struct alignas(64) Line {
    std::uint32_t next;
  };
  static constexpr std::size_t kDependent = 32, kIndependent = 512, kAhead = 16;

  std::vector<Line> lines_;
  std::vector<std::uint32_t> order_;  // Random lines, for the independent reads.
  std::vector<float> misses_, reads_;
  std::uint32_t at_ = 0, sum_ = 0;
  std::size_t position_ = 0;
  double timer_ns_ = 0;
};

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_FLOORS_H_

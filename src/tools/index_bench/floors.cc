#include "tools/index_bench/floors.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tools/index_bench/random.h"
#include "tools/index_bench/statistics.h"

namespace tokroute::index_bench {
namespace {

// The compiler must have this value.
volatile std::uint32_t sink = 0;
void Use(std::uint32_t value) noexcept { sink = value; }

void Prefetch(const void* address) noexcept {
#if defined(__GNUC__)
  __builtin_prefetch(address);
#else
  static_cast<void>(address);
#endif
}

}  // namespace

std::int64_t Now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double TimerNs() {
  std::vector<float> empty(2001);
  for (float& ns : empty) {
    const std::int64_t start = Now();
    ns = static_cast<float>(Now() - start);
  }
  return Quantile(empty, 0.5);
}

Floors::Floors(std::int64_t bytes, std::uint64_t seed)
    : lines_(static_cast<std::size_t>(std::max<std::int64_t>(bytes, std::int64_t{1} << 20)) / sizeof(Line)),
      order_(std::size_t{1} << 16),
      timer_ns_(TimerNs()) {
  // One cycle through all lines in random order (Sattolo's shuffle).
  for (std::size_t i = 0; i < lines_.size(); ++i) lines_[i].next = static_cast<std::uint32_t>(i);
  Random random(seed);
  for (std::size_t i = lines_.size() - 1; i > 0; --i) std::swap(lines_[i].next, lines_[random.Below(i)].next);
  for (std::uint32_t& line : order_) line = static_cast<std::uint32_t>(random.Below(lines_.size()));
}

void Floors::MeasureMiss() noexcept {
  std::uint32_t at = at_;
  const std::int64_t start = Now();
  for (std::size_t i = 0; i < kDependent; ++i) at = lines_[at].next;
  Use(at);
  const auto ns = static_cast<double>(Now() - start);
  at_ = at;
  misses_.push_back(static_cast<float>(std::max(0.0, ns - timer_ns_) / kDependent));
}

void Floors::MeasureLine() noexcept {
  if (position_ + kIndependent + kAhead > order_.size()) {
    // Other lines than last time round.
    for (std::uint32_t& line : order_) line = static_cast<std::uint32_t>(Mix(line + sum_ + 1) % lines_.size());
    position_ = 0;
  }
  const std::uint32_t* const order = &order_[position_];
  for (std::size_t i = 0; i < kAhead; ++i) Prefetch(&lines_[order[i]]);
  std::uint32_t sum = sum_;
  const std::int64_t start = Now();
  for (std::size_t i = 0; i < kIndependent; ++i) {
    Prefetch(&lines_[order[i + kAhead]]);
    sum += lines_[order[i]].next;
  }
  Use(sum);
  const auto ns = static_cast<double>(Now() - start);
  sum_ = sum;
  position_ += kIndependent;
  reads_.push_back(static_cast<float>(std::max(0.0, ns - timer_ns_) / kIndependent));
}

double Floors::miss_ns() const { return Quantile(misses_, 0.5); }
double Floors::line_ns() const { return Quantile(reads_, 0.5); }

}  // namespace tokroute::index_bench

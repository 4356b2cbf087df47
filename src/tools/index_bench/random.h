// Seeded random numbers that are the same everywhere.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_RANDOM_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_RANDOM_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tokroute/fwd.h"

namespace tokroute::index_bench {

// SplitMix64's finalizer: a bijection.
constexpr std::uint64_t Mix(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(Mix(seed ^ 0x6A09E667F3BCC909u)) {}
  std::uint64_t Next() noexcept { return Mix(state_ += 0x9E3779B97F4A7C15u); }
  std::uint64_t Below(std::uint64_t n) noexcept { return Next() % n; }  // n >= 1.
  std::uint64_t Between(std::uint64_t least, std::uint64_t most) noexcept { return least + Below(most - least + 1); }
  double Unit() noexcept { return static_cast<double>(Next() >> 11) * 0x1p-53; }  // 0 .. 1, without 1.
  bool Chance(double p) noexcept { return Unit() < p; }
  // least .. most, each doubling equally likely.
  std::uint64_t LogUniform(std::uint64_t least, std::uint64_t most) noexcept {
    const double low = std::log(static_cast<double>(least)), high = std::log(static_cast<double>(most) + 1);
    const auto value = static_cast<std::uint64_t>(std::exp(low + (high - low) * Unit()));
    return value < least ? least : value > most ? most : value;
  }
  template <class T>
  void Shuffle(std::vector<T>& values) noexcept {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[Below(i)]);
  }

 private:
  std::uint64_t state_;
};

// Block keys that never come twice. A chained key says all about the blocks before it, so any distinct values will do.
class FreshKeys {
 public:
  explicit FreshKeys(std::uint64_t seed) noexcept : seed_(Mix(seed)) {}
  BlockKey Next() noexcept {
    BlockKey key = 0;
    while (key == 0) key = Mix(seed_ + ++count_ * 0x9E3779B97F4A7C15u);
    return key;
  }

 private:
  std::uint64_t seed_, count_ = 0;
};

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_RANDOM_H_

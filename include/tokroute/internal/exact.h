// Exact arithmetic for figures that decide: no libm, nothing that a fused multiply-add could change.
#ifndef TOKROUTE_INTERNAL_EXACT_H_
#define TOKROUTE_INTERNAL_EXACT_H_

#include <bit>
#include <cstdint>
#include <limits>

namespace tokroute::internal {

__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;

inline constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();

// True for finite doubles; NaN and infinities have all exponent bits set. (std::isfinite may be folded under -ffast-math.)
inline bool IsFinite(double x) noexcept { return (std::bit_cast<std::uint64_t>(x) >> 52 & 0x7ff) != 0x7ff; }

// round(factor x count / divisor), halves up, computed exactly; saturates at int64. factor: finite, >= 0; count >= 0;
// divisor 1 .. 2^20.
inline std::int64_t RoundedRatio(double factor, std::int64_t count, std::int64_t divisor) noexcept {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(factor);
  const int exponent_bits = static_cast<int>(bits >> 52 & 0x7ff);
  std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52) - 1);
  if (exponent_bits != 0) mantissa |= std::uint64_t{1} << 52;
  const int exponent = (exponent_bits == 0 ? 1 : exponent_bits) - 1075;  // factor = mantissa x 2^exponent.
  const Uint128 product = static_cast<Uint128>(mantissa) * static_cast<std::uint64_t>(count);  // Below 2^116.
  if (product == 0) return 0;
  const Uint128 limit = static_cast<Uint128>(kInt64Max);
  const Uint128 by = static_cast<Uint128>(divisor);
  if (exponent >= 0) {
    if (exponent >= 100 || product > (~static_cast<Uint128>(0) >> exponent)) return kInt64Max;
    const Uint128 scaled = product << exponent;
    Uint128 quotient = scaled / by;
    if (scaled % by * 2 >= by) ++quotient;
    return quotient > limit ? kInt64Max : static_cast<std::int64_t>(quotient);
  }
  if (exponent <= -120) return 0;  // Below 2^116 / 2^120: less than a half.
  const Uint128 whole = product >> -exponent;
  const Uint128 rest = product & ((static_cast<Uint128>(1) << -exponent) - 1);
  Uint128 quotient = whole / by;
  // Halves up: the fraction is (whole % by + rest / 2^-exponent) / by.
  const Uint128 twice = whole % by * 2;
  if (twice >= by || (twice + 1 == by && rest >= (static_cast<Uint128>(1) << (-exponent - 1)))) ++quotient;
  return quotient > limit ? kInt64Max : static_cast<std::int64_t>(quotient);
}

// The smallest double x with x / whole >= share, where the division is IEEE's: `x >= LeastReaching(share, whole)` is then
// the same test as `x / whole >= share`, without a division per row. whole > 0; 0 < share <= 1.
inline double LeastReaching(double share, double whole) noexcept {
  const auto bits = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  const auto from = [](std::uint64_t b) { return std::bit_cast<double>(b); };
  double x = share * whole;
  if (share < 0x1p-1000) {  // Down there a quotient has few bits, and up to 2^32 neighbours of x share one: bisect them.
    std::uint64_t below = 0, reaching = bits(x) + 1;
    while (from(reaching) / whole < share) ++reaching;
    while (reaching - below > 1) {
      const std::uint64_t middle = below + (reaching - below) / 2;
      (from(middle) / whole < share ? below : reaching) = middle;
    }
    return from(reaching);
  }
  // Within an ulp or two of the answer; the two loops below settle it.
  while (x / whole < share) x = from(bits(x) + 1);
  while (x > 0) {
    const double below = from(bits(x) - 1);
    if (below / whole < share) break;
    x = below;
  }
  return x;
}

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_EXACT_H_

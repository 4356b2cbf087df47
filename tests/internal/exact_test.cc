#include "tokroute/internal/exact.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "support/test_run.h"
#include "tokroute/random.h"

namespace tokroute::internal {
namespace {

// The model: schoolbook integers of any length, as little-endian 32-bit limbs. Slow and obvious.
class BigInteger {
 public:
  explicit BigInteger(std::uint64_t value) : limbs_{static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(value >> 32)} {}
  BigInteger Times(std::uint64_t factor) const {
    return TimesSmall(static_cast<std::uint32_t>(factor)).Plus(TimesSmall(static_cast<std::uint32_t>(factor >> 32)).Shifted(32));
  }
  BigInteger Shifted(int bits) const {  // Left.
    BigInteger result = TimesSmall(std::uint32_t{1} << (bits % 32));
    result.limbs_.insert(result.limbs_.begin(), static_cast<std::size_t>(bits / 32), 0);
    return result;
  }
  BigInteger Plus(const BigInteger& other) const {
    BigInteger result(0);
    result.limbs_.assign(std::max(limbs_.size(), other.limbs_.size()) + 1, 0);
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < result.limbs_.size(); ++i) {
      carry += std::uint64_t{At(i)} + other.At(i);
      result.limbs_[i] = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
    return result;
  }
  bool AtMost(const BigInteger& other) const {
    for (std::size_t i = std::max(limbs_.size(), other.limbs_.size()); i-- > 0;) {
      if (At(i) != other.At(i)) return At(i) < other.At(i);
    }
    return true;
  }

 private:
  BigInteger TimesSmall(std::uint32_t factor) const {
    BigInteger result(0);
    result.limbs_.clear();
    std::uint64_t carry = 0;
    for (std::uint32_t limb : limbs_) {
      carry += std::uint64_t{limb} * factor;
      result.limbs_.push_back(static_cast<std::uint32_t>(carry));
      carry >>= 32;
    }
    result.limbs_.push_back(static_cast<std::uint32_t>(carry));
    return result;
  }
  std::uint32_t At(std::size_t i) const { return i < limbs_.size() ? limbs_[i] : 0; }
  std::vector<std::uint32_t> limbs_;
};

// round(factor x count / divisor), halves up: the largest r with 2 r divisor <= 2 factor count + divisor, by bisection.
std::int64_t ModelRoundedRatio(double factor, std::int64_t count, std::int64_t divisor) {
  int exponent = 0;
  const double fraction = std::frexp(factor, &exponent);  // factor = fraction x 2^exponent, fraction has 53 bits.
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, 53));
  exponent -= 53;
  const int up = exponent > 0 ? exponent : 0, down = exponent < 0 ? -exponent : 0;
  const BigInteger denominator = BigInteger(static_cast<std::uint64_t>(divisor)).Shifted(down);
  const BigInteger twice =
      BigInteger(mantissa).Times(static_cast<std::uint64_t>(count)).Shifted(up + 1).Plus(denominator);
  std::uint64_t low = 0, high = static_cast<std::uint64_t>(kInt64Max);
  while (low < high) {
    const std::uint64_t middle = low + (high - low + 1) / 2;
    if (denominator.Times(middle).Shifted(1).AtMost(twice)) low = middle;
    else high = middle - 1;
  }
  return static_cast<std::int64_t>(low);
}

TEST(RoundedRatioTest, WholeProducts) {
  EXPECT_EQ(RoundedRatio(20480, 14'000, 1000), 286'720);
  EXPECT_EQ(RoundedRatio(15928, 18'000, 1000), 286'704);
  EXPECT_EQ(RoundedRatio(0, 14'000, 1000), 0);
  EXPECT_EQ(RoundedRatio(20480, 0, 1000), 0);
}

TEST(RoundedRatioTest, HalvesGoUp) {
  EXPECT_EQ(RoundedRatio(0.5, 1, 1), 1);
  EXPECT_EQ(RoundedRatio(1.5, 1, 1), 2);
  EXPECT_EQ(RoundedRatio(2.5, 1, 1), 3);
  EXPECT_EQ(RoundedRatio(1, 500, 1000), 1);
  EXPECT_EQ(RoundedRatio(1, 499, 1000), 0);
  EXPECT_EQ(RoundedRatio(0.5, 3, 3), 1);          // 1/2 with an odd divisor: the half lies in the binary fraction.
  EXPECT_EQ(RoundedRatio(std::nextafter(0.5, 0), 3, 3), 0);
  EXPECT_EQ(RoundedRatio(std::nextafter(0.5, 0), 1, 1), 0);
  // Where std::llround(double) would round up: the product 0.5 - 2^-54 is not a double near large figures.
  EXPECT_EQ(RoundedRatio(std::nextafter(4503599627370496.5, 0), 1, 1), 4503599627370496);
}

TEST(RoundedRatioTest, Denormals) {
  const double least = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(RoundedRatio(least, kInt64Max, 1), 0);
  EXPECT_EQ(RoundedRatio(std::numeric_limits<double>::min(), kInt64Max, 1), 0);
}

TEST(RoundedRatioTest, BoundaryOfTheNegligible) {
  for (int exponent = -70; exponent <= -58; ++exponent) {
    for (double mantissa : {1.0, 1.0 + 0x1p-52, 2.0 - 0x1p-52}) {
      const double factor = std::ldexp(mantissa, exponent);
      EXPECT_EQ(RoundedRatio(factor, kInt64Max, 1), ModelRoundedRatio(factor, kInt64Max, 1)) << factor;
    }
  }
}

TEST(RoundedRatioTest, Saturates) {
  EXPECT_EQ(RoundedRatio(std::numeric_limits<double>::max(), 1, 1), kInt64Max);
  EXPECT_EQ(RoundedRatio(std::numeric_limits<double>::max(), kInt64Max, 1 << 20), kInt64Max);
  EXPECT_EQ(RoundedRatio(1e9, 9'300'000'000'000'000, 1000), kInt64Max);  // R64: about 9.3e21 tokens.
  EXPECT_EQ(RoundedRatio(0x1p63, 1, 1), kInt64Max);
  EXPECT_EQ(RoundedRatio(0x1p62, 1, 1), std::int64_t{1} << 62);
  EXPECT_EQ(RoundedRatio(1, kInt64Max, 1), kInt64Max);
  EXPECT_EQ(RoundedRatio(1, kInt64Max - 1, 1), kInt64Max - 1);
}

TEST(RoundedRatioTest, EqualsBigIntegerModel) {
  Random random(testing_support::TestSeed(20260822));
  for (int i = 0; i < 20'000; ++i) {
    // Factors of every exponent, most where results are neither 0 nor saturated; counts and divisors of every length.
    const int exponent = i % 4 == 0 ? static_cast<int>(random.Below(2100)) - 1075 : static_cast<int>(random.Below(130)) - 70;
    const double factor = std::ldexp(1.0 + random.Unit(), exponent);
    if (!IsFinite(factor)) continue;
    const auto count = static_cast<std::int64_t>(random.Next() >> (1 + random.Below(63)));
    const std::int64_t divisor = i % 3 == 0 ? 1000 : 1 + random.Below(1U << 20);
    ASSERT_EQ(RoundedRatio(factor, count, divisor), ModelRoundedRatio(factor, count, divisor))
        << "round " << i << ": " << factor << " x " << count << " / " << divisor;
  }
}

TEST(RoundedRatioTest, ExactHalvesEqualBigIntegerModel) {
  Random random(testing_support::TestSeed(77));
  for (int i = 0; i < 5'000; ++i) {
    // (2 r + 1) x divisor / (2 divisor): always a half; and one step of the factor to each side.
    const double factor = static_cast<double>(2 * std::int64_t{random.Below(1U << 30)} + 1) / 2;
    const std::int64_t divisor = 1 + random.Below(1U << 20);
    for (double near : {std::nextafter(factor, 0), factor, std::nextafter(factor, 1e300)}) {
      ASSERT_EQ(RoundedRatio(near, divisor, divisor), ModelRoundedRatio(near, divisor, divisor)) << "round " << i;
    }
    ASSERT_EQ(RoundedRatio(factor, divisor, divisor), static_cast<std::int64_t>(factor + 0.5));
  }
}

TEST(IsFiniteTest, TellsApart) {
  EXPECT_TRUE(IsFinite(0) && IsFinite(-1.5) && IsFinite(std::numeric_limits<double>::max()) &&
              IsFinite(std::numeric_limits<double>::denorm_min()));
  EXPECT_FALSE(IsFinite(std::numeric_limits<double>::infinity()));
  EXPECT_FALSE(IsFinite(-std::numeric_limits<double>::infinity()));
  EXPECT_FALSE(IsFinite(std::numeric_limits<double>::quiet_NaN()));
}

// LeastReaching(share, whole) is the smallest x with x / whole >= share; x below it must fail the division test.
void ExpectLeast(double share, double whole) {
  const double x = LeastReaching(share, whole);
  ASSERT_GE(x / whole, share) << share << " of " << whole;
  if (x > 0) {
    ASSERT_LT(std::nextafter(x, -1.0) / whole, share) << share << " of " << whole;
  }
}

TEST(LeastReachingTest, IsTheIeeeDivisionTest) {
  Random random(testing_support::TestSeed(8));
  for (int i = 0; i < 2'000; ++i) {
    // Thresholds as people write them (0.01 steps), and any; prompts from one token to the longest a router takes.
    const double share = i % 2 == 0 ? static_cast<double>(1 + random.Below(100)) / 100 : 1 - random.Unit();
    const double whole = static_cast<double>(1 + (random.Next() >> (32 + random.Below(31))));
    ExpectLeast(share, whole);
  }
}

TEST(LeastReachingTest, EveryTokenCountOfManyPrompts) {
  for (double share : {0.8, 0.6, 0.7, 0.1, 0.3, 1.0 / 3, 0.95, 1.0}) {
    for (int prompt = 1; prompt <= 600; ++prompt) {
      const double least = LeastReaching(share, prompt);
      for (int matched = 0; matched <= prompt; ++matched) {
        ASSERT_EQ(matched >= least, static_cast<double>(matched) / prompt >= share) << share << " " << matched << "/" << prompt;
      }
    }
  }
}

TEST(LeastReachingTest, TinyShares) {
  // Below the normal range a quotient has few bits left, and very many x share one: the search must not walk them.
  const double least = std::numeric_limits<double>::denorm_min();
  for (double share : {least, 3 * least, 1000 * least, std::numeric_limits<double>::min(), 1e-300, 1e-310, 1e-320}) {
    for (double whole : {1.0, 3.0, 70'000.0, 4294967296.0}) ExpectLeast(share, whole);
  }
}

}  // namespace
}  // namespace tokroute::internal

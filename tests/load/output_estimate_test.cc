#include "tokroute/load/output_estimate.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace tokroute {
namespace {

TEST(OutputEstimateTest, DefaultRatioIsOneAndAHalfHalvesUp) {
  EXPECT_EQ(EstimateOutputTokens({}, 0, -1), 0);
  EXPECT_EQ(EstimateOutputTokens({}, 1, -1), 2);  // 1.5.
  EXPECT_EQ(EstimateOutputTokens({}, 2, -1), 3);
  EXPECT_EQ(EstimateOutputTokens({}, 3, -1), 5);  // 4.5.
  EXPECT_EQ(EstimateOutputTokens({}, 70'001, -1), 105'002);
}

TEST(OutputEstimateTest, AnEmptyPromptExpectsNothing) {
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 1e6}, 0, 100), 0);
  EXPECT_EQ(EstimateOutputTokens({}, -1, 100), 0);
}

TEST(OutputEstimateTest, RatiosThatADoubleCannotHoldRoundByTheirTrueValue) {
  // 0.1 as a double lies just above a tenth: 0.1 x 5 rounds up. 0.7 lies just below: 0.7 x 5 = 3.4999... rounds down.
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 0.1}, 5, -1), 1);
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 0.7}, 5, -1), 3);
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 0.5}, 1, -1), 1);
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 0.25}, 1, -1), 0);
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 0.25}, 2, -1), 1);
}

TEST(OutputEstimateTest, BothCapsApplyAndTheLowerOneWins) {
  EXPECT_EQ(EstimateOutputTokens({}, 1'000, 1'499), 1'499);
  EXPECT_EQ(EstimateOutputTokens({}, 1'000, 1'500), 1'500);
  EXPECT_EQ(EstimateOutputTokens({}, 1'000, 1'501), 1'500);
  EXPECT_EQ(EstimateOutputTokens({.max_estimated_output_tokens = 100}, 1'000, -1), 100);
  EXPECT_EQ(EstimateOutputTokens({.max_estimated_output_tokens = 100}, 1'000, 99), 99);
  EXPECT_EQ(EstimateOutputTokens({.max_estimated_output_tokens = 100}, 1'000, 101), 100);
}

TEST(OutputEstimateTest, ZeroIsACapAndARatio) {
  EXPECT_EQ(EstimateOutputTokens({}, 1'000, 0), 0);
  EXPECT_EQ(EstimateOutputTokens({.max_estimated_output_tokens = 0}, 1'000, -1), 0);
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 0}, 1'000, 50), 0);
}

TEST(OutputEstimateTest, TheLongestPromptAtTheLargestRatioIsHeldAtTheLimit) {
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 1e6}, kMaxPromptTokens, -1), kMaxPromptTokens);
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = 1e6}, kMaxPromptTokens, std::numeric_limits<std::int64_t>::max()),
            kMaxPromptTokens);
}

TEST(OutputEstimateTest, SubnormalRatiosEstimateNothing) {
  EXPECT_EQ(EstimateOutputTokens({.output_ratio = std::numeric_limits<double>::denorm_min()}, kMaxPromptTokens, -1), 0);
}

}  // namespace
}  // namespace tokroute

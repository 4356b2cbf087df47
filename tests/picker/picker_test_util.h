// What the pickers' tests share: counting picks over seeds.
#ifndef TOKROUTE_TESTS_PICKER_PICKER_TEST_UTIL_H_
#define TOKROUTE_TESTS_PICKER_PICKER_TEST_UTIL_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tokroute/picker/picker_options.h"
#include "tokroute/testing/scores_of.h"

namespace tokroute::testing_support {

// How often each row was the pick, with seeds 0 .. rounds - 1.
template <class P, class... Given>
std::vector<std::int64_t> CountPicks(const P& picker, std::uint64_t rounds, const std::vector<double>& totals,
                                     const Given&... given) {
  std::vector<std::int64_t> counts(totals.size());
  for (std::uint64_t seed = 0; seed < rounds; ++seed) {
    ++counts[testing::PickOf(picker, {}, totals, given..., testing::Seed{seed}).targets.at(0)];
  }
  return counts;
}

// How often each row was among the targets.
template <class P, class... Given>
std::vector<std::int64_t> CountTargets(const P& picker, std::uint64_t rounds, const std::vector<double>& totals,
                                       const Given&... given) {
  std::vector<std::int64_t> counts(totals.size());
  for (std::uint64_t seed = 0; seed < rounds; ++seed) {
    for (Row row : testing::PickOf(picker, {}, totals, given..., testing::Seed{seed}).targets) ++counts[row];
  }
  return counts;
}

// What every picker promises of its targets: as many as asked for or there are, all distinct, all survivors.
template <class P, class... Given>
void ExpectDistinctTargets(const std::vector<double>& totals, const Given&... given) {
  for (std::uint32_t wanted = 1; wanted <= kMaxTargets; ++wanted) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      auto targets = testing::PickOf(P(PickerOptions{.max_targets = wanted}), {}, totals, given..., testing::Seed{seed}).targets;
      ASSERT_EQ(targets.size(), std::min<std::size_t>(wanted, totals.size()));
      std::sort(targets.begin(), targets.end());
      ASSERT_EQ(std::unique(targets.begin(), targets.end()), targets.end());
      ASSERT_TRUE(targets.empty() || targets.back() < totals.size());
    }
  }
}

template <class P>
void ExpectTargetCountsChecked() {
  for (std::uint32_t bad : {0U, kMaxTargets + 1, 0xffffffffU}) {
    const absl::Status status = P(PickerOptions{.max_targets = bad}).Check();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(::testing::HasSubstr("PickerOptions.max_targets"), ::testing::HasSubstr("1 .. 8"),
                                 ::testing::HasSubstr(std::to_string(bad))));
  }
  for (std::uint32_t good : {1U, kMaxTargets}) EXPECT_TRUE(P(PickerOptions{.max_targets = good}).Check().ok());
}

}  // namespace tokroute::testing_support

#endif  // TOKROUTE_TESTS_PICKER_PICKER_TEST_UTIL_H_

#include "tokroute/candidates.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/test_run.h"
#include "tokroute/random.h"
#include "tokroute/signal.h"

namespace tokroute {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;

// Rows 0 .. width - 1, the odd ones in use; ActiveRequests of row r is 10 r.
class CandidatesTest : public ::testing::Test {
 protected:
  CandidatesTest() {
    for (std::size_t i = 0; i < 3; ++i) survivors_.buffers[i] = buffers_[i];
    survivors_.rows = fleet_;
    survivors_.count = 4;
  }
  Candidates<MatchedTokens, ActiveRequests> View() { return {&survivors_, {matched_, active_}, 8}; }
  static std::vector<Row> Rows(const Selection& s) { return {s.rows, s.rows + s.count}; }
  static std::vector<Row> Rows(const Candidates<MatchedTokens, ActiveRequests>& c) { return {c.begin(), c.end()}; }

  const Row fleet_[4] = {1, 3, 5, 7};
  std::int64_t matched_[8] = {}, active_[8] = {0, 10, 20, 30, 40, 50, 60, 70};
  Row buffers_[3][8] = {};
  internal::Survivors survivors_;
};

TEST_F(CandidatesTest, ColumnsAreIndexedByRow) {
  const auto c = View();
  EXPECT_EQ(c.Column<ActiveRequests>().data(), active_);
  EXPECT_EQ(c.Column<MatchedTokens>().data(), matched_);
  EXPECT_EQ(c.Column<ActiveRequests>().size(), 8U);
  EXPECT_EQ(c.Column<ActiveRequests>()[5], 50);
}

TEST_F(CandidatesTest, SelectChangesNothingUntilKept) {
  const auto c = View();
  const Selection high = c.Select([&](Row row) { return active_[row] >= 50; });
  EXPECT_THAT(Rows(high), ElementsAre(5, 7));
  EXPECT_THAT(Rows(c), ElementsAre(1, 3, 5, 7));
  c.Keep(high);
  EXPECT_THAT(Rows(c), ElementsAre(5, 7));
  EXPECT_EQ(c.size(), 2U);
  EXPECT_THAT(fleet_, ElementsAre(1, 3, 5, 7));  // The fleet's own list is only looked at.
}

TEST_F(CandidatesTest, LastTwoSelectionsStayValid) {
  const auto c = View();
  for (int round = 0; round < 5; ++round) {
    const Selection low = c.Select([](Row row) { return row < 4; });
    const Selection high = c.Select([](Row row) { return row > 4; });
    EXPECT_THAT(Rows(low), ElementsAre(1, 3));
    EXPECT_THAT(Rows(high), ElementsAre(5, 7));
  }
}

TEST_F(CandidatesTest, LastTwoSelectionsStayValidAfterKeepToo) {
  const auto c = View();
  c.Keep(c.Select([](Row row) { return row != 1; }));
  for (int round = 0; round < 5; ++round) {
    const Selection one = c.Select([](Row row) { return row == 5; });
    const Selection others = c.Select([](Row row) { return row != 5; });
    EXPECT_THAT(Rows(one), ElementsAre(5));
    EXPECT_THAT(Rows(others), ElementsAre(3, 7));
    EXPECT_THAT(Rows(c), ElementsAre(3, 5, 7));
  }
}

TEST_F(CandidatesTest, EitherOfTwoSelectionsMayBeKept) {
  const auto c = View();
  const Selection low = c.Select([](Row row) { return row < 4; });
  const Selection high = c.Select([](Row row) { return row > 4; });
  c.Keep(low);
  EXPECT_THAT(Rows(c), ElementsAre(1, 3));
  c.Keep(high);  // It was selected from what was there before, and is still valid.
  EXPECT_THAT(Rows(c), ElementsAre(5, 7));
}

TEST_F(CandidatesTest, EmptySelections) {
  const auto c = View();
  const Selection none = c.Select([](Row) { return false; });
  EXPECT_EQ(none.count, 0U);
  c.Keep(none);
  EXPECT_THAT(Rows(c), IsEmpty());
  EXPECT_EQ(c.Select([](Row) { return true; }).count, 0U);
  c.Keep(Selection{});
  EXPECT_EQ(c.size(), 0U);
}

TEST_F(CandidatesTest, AllSelected) {
  const auto c = View();
  c.Keep(c.Select([](Row) { return true; }));
  EXPECT_THAT(Rows(c), ElementsAre(1, 3, 5, 7));
}

TEST_F(CandidatesTest, CopiesShareTheSurvivors) {  // By value to each plugin; what a filter keeps, the next one sees.
  const auto a = View(), b = a;
  a.Keep(a.Select([](Row row) { return row == 3; }));
  EXPECT_THAT(Rows(b), ElementsAre(3));
}

TEST_F(CandidatesTest, AnySequenceOfSelectAndKeepEqualsAVector) {
  Random random(testing_support::TestSeed(41));
  for (int round = 0; round < 2'000; ++round) {
    survivors_.rows = fleet_;
    survivors_.count = 4;
    const auto c = View();
    std::vector<Row> model(fleet_, fleet_ + 4), models[2];
    Selection last[2] = {};
    for (int step = 0; step < 6; ++step) {
      const std::uint32_t mask = random.Below(256);
      last[0] = last[1], models[0] = models[1];
      last[1] = c.Select([&](Row row) { return (mask >> row & 1) != 0; });
      models[1].clear();
      for (Row row : model) {
        if ((mask >> row & 1) != 0) models[1].push_back(row);
      }
      for (int i = step == 0 ? 1 : 0; i < 2; ++i) ASSERT_THAT(Rows(last[i]), ElementsAreArray(models[i])) << "round " << round;
      if (random.Below(3) == 0) c.Keep(last[1]), model = models[1];
      ASSERT_THAT(Rows(c), ElementsAreArray(model)) << "round " << round;
    }
  }
}

TEST(WritableColumnsTest, WritesThrough) {
  std::int64_t matched[2] = {}, active[2] = {};
  WritableColumns<Signals<MatchedTokens, ActiveRequests>> own({matched, active}, 2);
  own.Column<ActiveRequests>()[1] = 5;
  EXPECT_EQ(active[1], 5);
  EXPECT_EQ(own.width(), 2U);
  EXPECT_EQ(own.Column<MatchedTokens>().size(), 2U);
}

// --- Signals and layouts: columns are found by name and checked by type ---

TOKROUTE_SIGNAL(SameNameOtherType, double, "matched_tokens", "tokens");
TOKROUTE_SIGNAL(SameNameUnsigned, std::uint64_t, "matched_tokens", "tokens");
TOKROUTE_SIGNAL(SameNameSameType, std::int64_t, "matched_tokens", "tokens");
struct Big {
  char bytes[65];
};
struct TooBig {
  using value_type = Big;
  static constexpr std::string_view kName = "too_big", kUnit = "";
};
struct NotTrivial {
  using value_type = std::string;
  static constexpr std::string_view kName = "text", kUnit = "";
};
struct NoUnit {
  using value_type = int;
  static constexpr std::string_view kName = "no_unit";
};
static_assert(Signal<MatchedTokens> && Signal<SameNameOtherType>);
static_assert(!Signal<TooBig> && !Signal<NotTrivial> && !Signal<NoUnit> && !Signal<int>);
static_assert(Signals<MatchedTokens, ActiveRequests>::kCount == 2 && Signals<>::kCount == 0);

TEST(ColumnLayoutTest, FindsByNameAndChecksTheType) {
  internal::ColumnLayout layout;
  EXPECT_EQ(layout.Find(internal::InfoOf<MatchedTokens>()), -1);
  layout.columns[layout.count++] = internal::InfoOf<ActiveRequests>();
  layout.columns[layout.count++] = internal::InfoOf<MatchedTokens>();
  EXPECT_EQ(layout.Find(internal::InfoOf<MatchedTokens>()), 1);
  EXPECT_EQ(layout.Find(internal::InfoOf<SameNameSameType>()), 1);
  EXPECT_EQ(layout.Find(internal::InfoOf<SameNameOtherType>()), -2);
  EXPECT_EQ(layout.Find(internal::InfoOf<SameNameUnsigned>()), -2);
}

TEST(PositionsTest, ResolveNamesTheFirstMissingSignal) {
  internal::ColumnLayout layout;
  layout.columns[layout.count++] = internal::InfoOf<MatchedTokens>();
  internal::Positions<Signals<MatchedTokens, ActiveRequests>> positions;
  const internal::SignalInfo* missing = positions.Resolve(layout);
  ASSERT_NE(missing, nullptr);
  EXPECT_EQ(missing->name, "active_requests");
  layout.columns[layout.count++] = internal::InfoOf<ActiveRequests>();
  EXPECT_EQ(positions.Resolve(layout), nullptr);
}

}  // namespace
}  // namespace tokroute

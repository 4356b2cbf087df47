// ScoresOf, KeptBy, PickOf: what a plugin says about columns that a test writes down. A unit test of a policy's part is
// then one line, in whatever test framework; this header needs none.
//
//   using tokroute::testing::ColumnOf, tokroute::testing::ScoresOf;
//   EXPECT_THAT(ScoresOf(ActiveRequestScorer{}, {}, ColumnOf<ActiveRequests>{{0, 1, 4}}), ElementsAre(1, 0.75, 0));
//
// After the request come, in any order: columns (row 0 first), and where they matter Rows, Seed and Now. The number of
// candidates is the columns' common length. A column that the plugin consumes and the test leaves out is all zeros, as a
// new endpoint's is in a router (but an AnyFilter, AnyScorer or AnyPicker needs every column given: what it consumes is not
// known here). Not for what a router does around a plugin (weights, clamping, bookings): make a router.
//
// A mistake in the test itself throws std::invalid_argument that says what is wrong, which every framework reports as
// that test's failure (without exceptions: it is printed, and the program aborts): columns of different length, a column
// given twice, a plugin whose own Check() refuses, more rows than kMaxEndpoints, neither a column nor Rows. A column that the
// plugin does not consume does not compile.
#ifndef TOKROUTE_TESTING_SCORES_OF_H_
#define TOKROUTE_TESTING_SCORES_OF_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tokroute/candidates.h"
#include "tokroute/concepts.h"
#include "tokroute/erased.h"
#include "tokroute/fwd.h"
#include "tokroute/internal/column_table.h"
#include "tokroute/random.h"
#include "tokroute/request.h"
#include "tokroute/signal.h"

namespace tokroute {
inline namespace v0 {
namespace testing {

// One signal's values, row by row.
template <Signal S>
struct ColumnOf {
  std::vector<typename S::value_type> values;
};

// How many candidates there are; needed only when no column is given.
struct Rows {
  std::uint32_t count = 0;
};

// Keys the draws of a filter or picker. Without it the seed is 0; equal seeds draw alike.
struct Seed {
  std::uint64_t value = 0;
};

// What Stage::now shows. Without it: 0.
struct Now {
  std::chrono::nanoseconds value{};
};

}  // namespace testing
}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

[[noreturn]] inline void FailTest(const std::string& what) {
#if defined(__cpp_exceptions)
  throw std::invalid_argument(what);
#else
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
#endif
}

// The table that a plugin is bound to: the columns it consumes, and those a test gives.
class TestTable {
 public:
  explicit TestTable(std::string_view caller) : caller_(caller) {}

  template <Signal S>
  void Give(const testing::ColumnOf<S>& column) {
    using T = typename S::value_type;
    const SignalInfo info = InfoOf<S>();
    if (layout_.Find(info) != -1) Fail(std::string("ColumnOf<").append(S::kName).append("> is given twice"));
    SetRows(column.values.size(), S::kName);
    auto values = std::make_unique<T[]>(column.values.size());
    for (std::size_t i = 0; i < column.values.size(); ++i) values[i] = column.values[i];
    Add(info, values.get());
    Own(std::move(values));
  }
  void Give(testing::Rows rows) { SetRows(rows.count, "Rows"); }
  void Give(testing::Seed seed) { seed_ = seed.value; }
  void Give(testing::Now now) { now_ = now.value; }

  // Once everything is given: zeros for what is consumed besides, and all rows as candidates.
  template <class Consumes>
  void Complete() {
    if (rows_given_by_.empty()) Fail("give a column, or Rows");
    if constexpr (!std::same_as<Consumes, RuntimeSignals>) AddZeros(static_cast<Consumes*>(nullptr));
    rows_ = std::make_unique<Row[]>(4 * std::size_t{table_.width} + 1);
    for (Row row = 0; row < table_.width; ++row) rows_[row] = row;
    survivors_.rows = rows_.get();
    survivors_.count = table_.width;
    for (std::size_t i = 0; i < 3; ++i) survivors_.buffers[i] = rows_.get() + (i + 1) * table_.width;
  }

  template <class P>
  BoundPart<P> Bind(P part) {
    BoundPart<P> bound(std::move(part));
    if (const absl::Status status = bound.Bind(layout_); !status.ok()) Fail(std::string(status.message()));
    return bound;
  }
  [[noreturn]] void Fail(const std::string& what) const { FailTest(std::string(caller_).append(": ").append(what)); }

  const ColumnTable& table() const noexcept { return table_; }
  const ColumnLayout& layout() const noexcept { return layout_; }
  Survivors& survivors() noexcept { return survivors_; }
  std::uint64_t seed() const noexcept { return seed_; }
  std::chrono::nanoseconds now() const noexcept { return now_; }

 private:
  void SetRows(std::size_t count, std::string_view by) {
    if (count > kMaxEndpoints) Fail(std::string(by).append(" has more rows than a fleet can have"));
    if (!rows_given_by_.empty() && count != table_.width) {
      Fail(std::string(rows_given_by_).append(" has ").append(std::to_string(table_.width)).append(" rows, ").append(by)
               .append(" has ").append(std::to_string(count)));
    }
    table_.width = static_cast<std::uint32_t>(count);
    rows_given_by_ = by;
  }
  template <Signal... S>
  void AddZeros(const Signals<S...>*) {
    [[maybe_unused]] const auto add = [&]<Signal T>(const T*) {
      if (layout_.Find(InfoOf<T>()) != -1) return;
      auto values = std::make_unique<typename T::value_type[]>(table_.width);
      Add(InfoOf<T>(), values.get());
      Own(std::move(values));
    };
    (add(static_cast<const S*>(nullptr)), ...);
  }
  void Add(const SignalInfo& info, void* values) {
    if (layout_.count == kMaxColumns) Fail("more columns than a router can have");
    table_.columns[layout_.count] = values;
    layout_.columns[layout_.count++] = info;
  }
  template <class T>
  void Own(std::unique_ptr<T[]> values) {
    owned_.push_back(std::shared_ptr<T[]>(std::move(values)));
  }

  std::string_view caller_, rows_given_by_;
  ColumnLayout layout_;
  ColumnTable table_;
  Survivors survivors_;
  std::vector<std::shared_ptr<void>> owned_;
  std::unique_ptr<Row[]> rows_;
  std::uint64_t seed_ = 0;
  std::chrono::nanoseconds now_{};
};

// True for Rows, Seed, Now and for columns of signals that the plugin consumes.
template <class Given, class Consumes>
inline constexpr bool kConsumedColumn = true;
template <class S, class... C>
inline constexpr bool kConsumedColumn<testing::ColumnOf<S>, Signals<C...>> = (std::same_as<S, C> || ...);

template <class Plugin, class... Given>
void FillTestTable(TestTable& table, const Given&... given) {
  static_assert((kConsumedColumn<Given, typename Plugin::Consumes> && ...),
                "a column is given that the plugin does not list in Consumes");
  (table.Give(given), ...);
  table.template Complete<typename Plugin::Consumes>();
}

}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {
namespace testing {

// The scores of rows 0, 1, ... as the scorer returns them: neither weighted nor clamped.
template <Scorer S, class... Given>
std::vector<float> ScoresOf(S scorer, const Request& request, const Given&... given) {
  internal::TestTable table("ScoresOf");
  internal::FillTestTable<S>(table, given...);
  const auto bound = table.Bind(std::move(scorer));
  const auto score = bound.part.Score(request, bound.View(&table.survivors(), table.table()));
  std::vector<float> scores;
  for (Row row = 0; row < table.table().width; ++row) scores.push_back(score(row));
  return scores;
}

// What a filter kept, and its verdict with `kept` set, as a policy sets it.
struct Kept {
  FilterVerdict verdict;
  std::vector<Row> rows;
};
template <Filter F, class... Given>
Kept KeptBy(F filter, const Request& request, const Given&... given) {
  internal::TestTable table("KeptBy");
  internal::FillTestTable<F>(table, given...);
  const auto bound = table.Bind(std::move(filter));
  Random random(table.seed());
  Stage stage{random, table.now()};
  Kept result{bound.part.Narrow(request, bound.View(&table.survivors(), table.table()), stage), {}};
  result.verdict.kept = table.survivors().count;
  result.rows.assign(table.survivors().rows, table.survivors().rows + table.survivors().count);
  return result;
}

// What a picker chose among rows 0, 1, ... of these totals, best first.
struct Picked {
  Choice choice;
  std::vector<Row> targets;
};
template <Picker P, class... Given>
Picked PickOf(P picker, const Request& request, const std::vector<double>& totals, const Given&... given) {
  internal::TestTable table("PickOf");
  internal::FillTestTable<P>(table, Rows{static_cast<std::uint32_t>(totals.size())}, given...);
  const auto bound = table.Bind(std::move(picker));
  Random random(table.seed());
  Stage stage{random, table.now()};
  Row targets[kMaxTargets] = {};
  Picked result{bound.part.Pick(request, bound.View(&table.survivors(), table.table()), totals, stage, targets), {}};
  result.targets.assign(targets, targets + result.choice.targets);
  return result;
}

}  // namespace testing
}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_TESTING_SCORES_OF_H_

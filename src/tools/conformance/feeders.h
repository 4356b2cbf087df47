// What a case states instead of a producer having found it: columns to fill, rows to keep, scores to give.
//
// A feeder writes a case's numbers into the columns that plugins read and computes nothing from them. What turns them
// into survivors, scores and picks is the library's.
#ifndef TOKROUTE_SRC_TOOLS_CONFORMANCE_FEEDERS_H_
#define TOKROUTE_SRC_TOOLS_CONFORMANCE_FEEDERS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokroute/concepts.h"
#include "tokroute/signal.h"
#include "tools/conformance/vectors.h"

namespace tokroute::conformance {

// The endpoint type of the runner's fleets.
struct NamedEndpoint {
  std::string endpoint_name;
  std::int64_t capacity = 0;  // Unit: tokens; 0: not known.
  std::string_view name() const { return endpoint_name; }
  std::int64_t capacity_tokens() const { return capacity; }
};

// What a case says about one endpoint, in tokens and requests.
struct EndpointInputs {
  std::string name;
  std::int64_t matched_tokens = 0;
  double weighted_matched_tokens = 0;
  std::int64_t uncached_tokens = 0;
  std::int64_t in_flight_tokens = 0;
  std::int64_t active_requests = 0;
  double total = 0;  // For pickers.
};
struct StageInputs {
  std::int64_t prompt_tokens = 0;
  std::vector<EndpointInputs> endpoints;  // In the case's order, which is also the order of rows.
};

// Reads `endpoints` (and request.promptTokens) of a case for one stage. A case gives match info in blocks and the
// request's own tokens as a number per endpoint; the columns want tokens of one prompt:
//   * the prompt is what the case says, else totalBlocks x blockSizeTokens (the endpoints must agree), else the largest
//   of
//     the uncachedRequestTokens, and at least 1 token. Where it would be shorter than one of these, the blocks are
//     taken to be a whole number of times as large, which leaves matchBlocks / totalBlocks as it is;
//   * MatchedTokens is the prompt less uncachedRequestTokens (never published: 0, nothing to add);
//   * WeightedMatchedTokens is matchBlocks x blockSizeTokens (never published: 0).
// Throws std::invalid_argument for endpoints that cannot be fed.
StageInputs ReadStageInputs(const Json& one_case);

// In flight tokens and requests, as told by Router::Feed.
struct LoadFact {
  static constexpr std::string_view kName = "conformance-load";
  std::int64_t tokens = 0, requests = 0;
};
class LoadFeeder {
 public:
  static constexpr std::string_view kName = "conformance-load-feeder";
  using Produces = Signals<UncachedTokensInFlight, ActiveRequests>;
  using Fact = LoadFact;
  using Own = WritableColumns<Produces>;
  void OnFact(Own own, Row row, const LoadFact& fact) noexcept {
    own.Column<UncachedTokensInFlight>()[row] = fact.tokens;
    own.Column<ActiveRequests>()[row] = fact.requests;
  }
  void OnBooked(Own, const Request&, const Booking&) noexcept {}
  void OnFirstToken(Own, const Booking&) noexcept {}
  void OnReleased(Own, const Booking&, const Outcome&) noexcept {}
};
static_assert(LoadProducer<LoadFeeder>);

// What each row holds of the prompt. The runner writes the table, the feeder copies it.
class PrefixFeeder {
 public:
  static constexpr std::string_view kName = "conformance-prefix-feeder";
  using Produces = Signals<MatchedTokens, WeightedMatchedTokens, UncachedTokens>;
  using Own = WritableColumns<Produces>;
  using Table = std::vector<EndpointInputs>;
  struct Receipt {};
  struct Workspace {};

  explicit PrefixFeeder(std::shared_ptr<const Table> table) : table_(std::move(table)) {}
  void Fill(const Request&, const FleetView&, Workspace&, Own own) noexcept {
    const std::size_t rows = std::min<std::size_t>(own.width(), table_->size());
    for (std::size_t row = 0; row < rows; ++row) {
      own.Column<MatchedTokens>()[row] = (*table_)[row].matched_tokens;
      own.Column<WeightedMatchedTokens>()[row] = (*table_)[row].weighted_matched_tokens;
      own.Column<UncachedTokens>()[row] = (*table_)[row].uncached_tokens;
    }
  }
  Receipt Record(const Request&, const FleetView&, Workspace&, const Booking&) noexcept { return {}; }
  void OnFirstToken(Receipt&) noexcept {}
  void OnReleased(Receipt&, const Outcome&) noexcept {}

 private:
  std::shared_ptr<const Table> table_;
};
static_assert(RequestProducer<PrefixFeeder>);

// Keeps the rows that a case lists, and counts that it was asked.
class ListedFilter {
 public:
  static constexpr std::string_view kName = "listed";
  using Consumes = Signals<>;
  ListedFilter(std::vector<bool> keep, std::shared_ptr<bool> called)
      : keep_(std::move(keep)), called_(std::move(called)) {}
  FilterVerdict Narrow(const Request&, CandidatesFor<Consumes> candidates, Stage&) const noexcept {
    *called_ = true;
    candidates.Keep(candidates.Select([&](Row row) { return row < keep_.size() && keep_[row]; }));
    return {};
  }

 private:
  std::vector<bool> keep_;
  std::shared_ptr<bool> called_;
};
static_assert(Filter<ListedFilter>);

// Gives the scores that a case lists, 0 to a row that it does not mention, and counts that it was asked.
class ListedScorer {
 public:
  static constexpr std::string_view kName = "listed";
  using Consumes = Signals<>;
  ListedScorer(std::vector<float> scores, std::shared_ptr<bool> called)
      : scores_(std::move(scores)), called_(std::move(called)) {}
  auto Score(const Request&, CandidatesFor<Consumes>) const noexcept {
    *called_ = true;
    return [scores = std::span(scores_)](Row row) noexcept { return row < scores.size() ? scores[row] : 0.0F; };
  }

 private:
  std::vector<float> scores_;
  std::shared_ptr<bool> called_;
};
static_assert(Scorer<ListedScorer>);

// Picks the row that the runner set: a vector says where a request went, not what should be chosen.
class ToldPicker {
 public:
  static constexpr std::string_view kName = "told";
  using Consumes = Signals<>;
  explicit ToldPicker(std::shared_ptr<const Row> wanted) : wanted_(std::move(wanted)) {}
  Choice Pick(const Request&, CandidatesFor<Consumes> candidates, std::span<const double>, Stage&,
              std::span<Row> targets) const noexcept {
    for (Row row : candidates) {
      if (row != *wanted_) continue;
      targets[0] = row;
      return {.targets = 1, .tied = 1};
    }
    return {};
  }

 private:
  std::shared_ptr<const Row> wanted_;
};
static_assert(Picker<ToldPicker>);

// Notes what the candidates' MatchedTokens are, and picks the first.
class MatchReader {
 public:
  static constexpr std::string_view kName = "match-reader";
  using Consumes = Signals<MatchedTokens>;
  struct Found {
    Row row = 0;
    std::int64_t matched_tokens = 0;
  };
  explicit MatchReader(std::shared_ptr<std::vector<Found>> found) : found_(std::move(found)) {}
  Choice Pick(const Request&, CandidatesFor<Consumes> candidates, std::span<const double>, Stage&,
              std::span<Row> targets) const noexcept {
    found_->clear();
    for (Row row : candidates) found_->push_back({row, candidates.Column<MatchedTokens>()[row]});
    targets[0] = *candidates.begin();
    return {.targets = 1, .tied = 1};
  }

 private:
  std::shared_ptr<std::vector<Found>> found_;
};
static_assert(Picker<MatchReader>);

}  // namespace tokroute::conformance

#endif  // TOKROUTE_SRC_TOOLS_CONFORMANCE_FEEDERS_H_

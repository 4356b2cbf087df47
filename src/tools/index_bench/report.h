// What a run found: as text for people, as JSON for programs, and whether it is good enough.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_REPORT_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_REPORT_H_

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace tokroute::index_bench {

struct Check {
  std::string what;
  double value = 0, limit = 0;
  bool at_least = false;  // Else at most.
  bool held() const noexcept { return at_least ? value >= limit : value <= limit; }
};

class Report {
 public:
  // `key` names the figure in the JSON.
  void Figure(const std::string& key, double value, const std::string& unit);
  void Count(const std::string& key, std::int64_t value);
  void Text(const std::string& key, const std::string& value);
  void Flag(const std::string& key, bool value);
  // A figure in the JSON only.
  nlohmann::ordered_json& json() noexcept { return json_; }
  // A line that only people read.
  void Line(const std::string& line) { lines_.push_back(line); }

  void Limit(const Check& check) { checks_.push_back(check); }
  // What must not be zero, or the run did not try what it is for.
  void MustExercise(const std::string& what, std::int64_t times);
  void Fail(const std::string& why) { failures_.push_back(why); }

  // `as`: before every line, in the JSON a member. Failures and checks are joined.
  void Add(const std::string& as, const Report& part);

  // Wrong results; limits count with `check` only.
  bool Failed(bool check) const noexcept;
  void Print(std::ostream& out) const;
  std::string Json() const;

 private:
  nlohmann::ordered_json json_ = nlohmann::ordered_json::object();
  std::vector<std::string> lines_, failures_;
  std::vector<Check> checks_;
};

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_REPORT_H_

#include "tools/index_bench/report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tokroute::index_bench {
namespace {

std::string Readable(double value) {
  const double size = value < 0 ? -value : value;
  if (size >= 1e9) return absl::StrFormat("%.2f G", value / 1e9);
  if (size >= 1e6) return absl::StrFormat("%.2f M", value / 1e6);
  if (size >= 1e5) return absl::StrFormat("%.1f k", value / 1e3);
  return absl::StrFormat("%.*f", size >= 100 ? 0 : 2, value);
}

}  // namespace

void Report::Figure(const std::string& key, double value, const std::string& unit) {
  json_[key] = value;
  lines_.push_back(absl::StrFormat("%-34s %s%s%s", key, Readable(value), unit.empty() ? "" : " ", unit));
}

void Report::Count(const std::string& key, std::int64_t value) {
  json_[key] = value;
  lines_.push_back(absl::StrFormat("%-34s %d", key, value));
}

void Report::Text(const std::string& key, const std::string& value) {
  json_[key] = value;
  lines_.push_back(absl::StrFormat("%-34s %s", key, value));
}

void Report::Flag(const std::string& key, bool value) {
  json_[key] = value;
  lines_.push_back(absl::StrFormat("%-34s %s", key, value ? "yes" : "no"));
}

void Report::MustExercise(const std::string& what, std::int64_t times) {
  json_["exercised"][what] = times;
  lines_.push_back(absl::StrFormat("exercised: %-23s %d", what, times));
  if (times == 0) Fail(absl::StrCat("the run exercised no ", what));
}

void Report::Add(const std::string& as, const Report& part) {
  json_[as] = part.json_;
  for (const std::string& line : part.lines_) lines_.push_back(absl::StrCat(as, ": ", line));
  for (const std::string& failure : part.failures_) failures_.push_back(absl::StrCat(as, ": ", failure));
  for (Check check : part.checks_) {
    check.what = absl::StrCat(as, ": ", check.what);
    checks_.push_back(std::move(check));
  }
}

bool Report::Failed(bool check) const noexcept {
  return !failures_.empty() ||
         (check && std::any_of(checks_.begin(), checks_.end(), [](const Check& c) { return !c.held(); }));
}

void Report::Print(std::ostream& out) const {
  for (const std::string& line : lines_) out << line << '\n';
  for (const Check& check : checks_) {
    out << absl::StrFormat("%s  %s: %s, want %s %s\n", check.held() ? "held  " : "MISSED", check.what,
                           Readable(check.value), check.at_least ? "at least" : "at most", Readable(check.limit));
  }
  for (const std::string& failure : failures_) out << "FAILED  " << failure << '\n';
}

std::string Report::Json() const {
  nlohmann::ordered_json json = json_;
  json["checks"] = nlohmann::ordered_json::array();
  for (const Check& check : checks_) {
    json["checks"].push_back({{"what", check.what},
                              {"value", check.value},
                              {check.at_least ? "at_least" : "at_most", check.limit},
                              {"held", check.held()}});
  }
  json["failures"] = failures_;
  return json.dump(2) + "\n";
}

}  // namespace tokroute::index_bench

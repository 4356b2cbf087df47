#include "tools/conformance/runner.h"

#include <cstddef>
#include <exception>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/conformance/case_runners.h"

namespace tokroute::conformance {
namespace {

// Names that no case has would be inputs or expectations that nobody reads.
void CheckKeys(const Json& object, const std::set<std::string>& known) {
  for (const auto& item : object.items()) {
    if (known.count(item.key()) == 0) throw std::invalid_argument("unknown field " + item.key());
  }
}

Result Dispatch(const std::string& plugin, const Json& one_case) {
  static const std::set<std::string> kCaseKeys = {"name",          "kind",      "source", "tags",  "params",
                                                  "request",       "endpoints", "steps",  "index", "profileOutcomes",
                                                  "testOverrides", "expect"};
  static const std::set<std::string> kEndpointKeys = {"name",
                                                      "prefix",
                                                      "inflight",
                                                      "uncachedRequestTokens",
                                                      "latency",
                                                      "metrics",
                                                      "labels",
                                                      "scalars",
                                                      "encoderCache",
                                                      "topology",
                                                      "score",
                                                      "prediction",
                                                      "minRunningTpotSloMs",
                                                      "role"};
  CheckKeys(one_case, kCaseKeys);
  for (const Json& endpoint : ChildOr(one_case, "endpoints")) CheckKeys(endpoint, kEndpointKeys);
  if (one_case.at("expect").empty()) throw std::invalid_argument("expects nothing");
  const std::string kind = one_case.at("kind").get<std::string>();
  if (kind == "config") return RunConfigCase(plugin, one_case);
  if (plugin == "prefix-hash" && kind == "hash") return RunHashCase(one_case);
  if (plugin == "scheduler-profile" || plugin == "seed-compositions") {
    if (kind == "profile") return RunProfileCase(one_case);
  } else if (plugin == "inflight-load-producer") {
    if (kind == "sequence") return RunInFlightLoadSequence(one_case);
  } else if (plugin == "approx-prefix-cache-producer") {
    if (kind == "sequence") return RunApproximatePrefixSequence(one_case);
  } else if (plugin == "precise-prefix-cache-producer") {
    if (kind == "match") return RunPrecisePrefixMatch(one_case);
  } else if (kind == "filter") {
    return RunFilterCase(plugin, one_case);
  } else if (kind == "score") {
    return RunScoreCase(plugin, one_case);
  } else if (kind == "pick") {
    return RunPickCase(plugin, one_case);
  } else if (kind == "distribution") {
    return RunDistributionCase(plugin, one_case);
  }
  return Result::Failed("cannot run cases of kind " + kind);
}

// The files whose plugins exist. Every other file is skipped whatever its cases' kinds.
bool Exists(const std::string& plugin) {
  static const std::set<std::string> kPlugins = {"active-request-scorer",
                                                 "approx-prefix-cache-producer",
                                                 "inflight-load-producer",
                                                 "max-score-picker",
                                                 "precise-prefix-cache-producer",
                                                 "prefix-cache-affinity-filter",
                                                 "prefix-hash",
                                                 "random-picker",
                                                 "scheduler-profile",
                                                 "seed-compositions",
                                                 "token-load-scorer",
                                                 "weighted-random-picker"};
  return kPlugins.count(plugin) != 0;
}

// The case with what we do instead: allowed, really different, and as the list says.
Result RunDifference(const std::string& plugin, const Json& one_case, const Difference& difference,
                     const Result& as_is) {
  if (std::string why = WhyNotAllowed(difference, one_case); !why.empty())
    return Result::Failed("difference not allowed: " + why);
  if (as_is.verdict == Verdict::kPassed) return Result::Failed("listed as a difference, but does what llm-d does");
  const absl::StatusOr<Json> ours = WithOurs(difference, one_case);
  if (!ours.ok()) return Result::Failed(std::string(ours.status().message()));
  Result result = RunCase(plugin, *ours);
  if (result.verdict != Verdict::kPassed)
    result = Result::Failed("not what the list of differences says either: " + result.why);
  return result;
}

}  // namespace

Result Result::Of(const absl::Status& status) {
  const std::string message(status.message());
  if (status.ok()) return {};
  return status.code() == absl::StatusCode::kUnimplemented ? Skipped(message) : Failed(message);
}

Result RunCase(const std::string& plugin, const Json& one_case) {
  if (!Exists(plugin)) return Result::Skipped("no such plugin yet");
  try {
    return Dispatch(plugin, one_case);
  } catch (const std::exception& error) {
    return Result::Failed(error.what());
  }
}

Tally RunFiles(const std::vector<VectorFile>& files, const std::vector<Difference>& differences,
               const RunOptions& options, std::ostream& out) {
  Tally tally;
  std::map<std::pair<std::string, std::string>, const Difference*> listed;
  for (const Difference& difference : differences) listed[{difference.file, difference.case_name}] = &difference;
  std::set<const Difference*> met;

  for (const VectorFile& file : files) {
    Tally here;
    std::map<std::string, std::vector<std::string>> skipped, differing;  // Names, by reason.
    for (const Json& one_case : file.cases) {
      const std::string name = one_case.at("name").get<std::string>();
      Result result = RunCase(file.plugin, one_case);
      const auto entry = listed.find({file.plugin, name});
      const bool differs = entry != listed.end() && result.verdict != Verdict::kSkipped;
      if (entry != listed.end()) met.insert(entry->second);
      if (differs) result = RunDifference(file.plugin, one_case, *entry->second, result);

      const char* word = "ok    ";
      if (result.verdict == Verdict::kSkipped) {
        ++here.skipped;
        skipped[result.why].push_back(name);
        continue;
      }
      if (result.verdict == Verdict::kFailed) {
        ++here.failed;
        word = "FAILED";
      } else if (differs) {
        ++here.differing;
        differing[entry->second->design].push_back(name);
        continue;
      } else {
        ++here.passed;
      }
      if (options.every_case || result.verdict == Verdict::kFailed)
        out << word << ' ' << file.plugin << ": " << name << '\n';
      if (result.verdict == Verdict::kFailed) out << "         " << result.why << '\n';
    }
    const auto print = [&](const char* word, const std::map<std::string, std::vector<std::string>>& groups) {
      for (const auto& [why, names] : groups) {
        out << word << ' ' << file.plugin << ": " << why << " (" << names.size() << ")\n";
        const char* separator = "         ";
        for (const std::string& name : names) out << std::exchange(separator, "; ") << name;
        out << '\n';
      }
    };
    print("differ", differing);
    print("skip  ", skipped);
    if (here.skipped < static_cast<std::int64_t>(file.cases.size())) {
      out << "       " << file.plugin << ": " << here.passed << " passed, " << here.failed << " failed, "
          << here.skipped << " skipped, " << here.differing << " differ on purpose\n";
    }
    tally.passed += here.passed;
    tally.failed += here.failed;
    tally.skipped += here.skipped;
    tally.differing += here.differing;
  }

  for (const Difference& difference : differences) {
    if (!options.complete || met.count(&difference) != 0) continue;
    ++tally.failed;
    out << "FAILED " << difference.file << ": " << difference.case_name
        << "\n         a difference that no case meets\n";
  }
  if (tally.differing > 0) out << tally.differing << " more differ on purpose, as listed\n";
  out << tally.passed << " passed, " << tally.failed << " failed, " << tally.skipped << " skipped\n";
  return tally;
}

}  // namespace tokroute::conformance

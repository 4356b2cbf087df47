// Runs the program itself: what passes, what must not, and with which exit status.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/program.h"

namespace {

using tokroute::testing_support::FolderTest;
using tokroute::testing_support::Ran;
using testing::EndsWith;
using testing::HasSubstr;

class TokrouteConformanceTest : public FolderTest {
 protected:
  Ran Run(const std::string& arguments) const { return RunProgram(TOKROUTE_CONFORMANCE_PROGRAM, arguments); }
  Ran RunVectors(const std::string& arguments = "") const { return Run(Folder() + " " + arguments); }
  std::string Folder() const { return folder_.string(); }
  void WriteVectors(const std::string& plugin, const std::string& cases) const {
    std::ofstream(folder_ / (plugin + ".json"), std::ios::binary) << cases;
  }
  // Runs the vectors with this list of differences.
  Ran RunAgainst(const std::string& differences, const std::string& arguments = "") const {
    std::ofstream(base_ / "differences.json", std::ios::binary) << differences;
    return RunVectors("--differences " + (base_ / "differences.json").string() + " " + arguments);
  }
};

// A load of 500 in 1000 scores 0.5.
constexpr char kRight[] = R"({"name": "half", "kind": "score", "params": {"queueThresholdTokens": 1000},
    "endpoints": [{"name": "a", "inflight": {"tokens": 500, "requests": 0}}], "expect": {"scores": {"a": 0.5}}})";
constexpr char kWrong[] = R"({"name": "wrong", "kind": "score", "params": {"queueThresholdTokens": 1000},
    "endpoints": [{"name": "a", "inflight": {"tokens": 500, "requests": 0}}], "expect": {"scores": {"a": 0.50001}}})";
constexpr char kQuirk[] =
    R"({"name": "wrong", "kind": "score", "tags": ["quirk"], "params": {"queueThresholdTokens": 1000},
    "endpoints": [{"name": "a", "inflight": {"tokens": 500, "requests": 0}}], "expect": {"scores": {"a": 0.7}}})";

std::string Array(const std::string& a) { return "[" + a + "]"; }
std::string Array(const std::string& a, const std::string& b) { return "[" + a + ", " + b + "]"; }
std::string Difference(const std::string& name, const std::string& kind, const std::string& ours) {
  return R"([{"file": "token-load-scorer", "case": ")" + name + R"(", "kind": ")" + kind +
         R"(", "design": "A sentence.", "ours": [)" + ours + "]}]";
}
constexpr char kHalf[] = R"({"op": "replace", "path": "/expect/scores/a", "value": 0.5})";

TEST_F(TokrouteConformanceTest, TheVectorsPassAndEveryDifferenceIsMet) {
  const Ran ran = Run("--complete " TOKROUTE_TESTS_DIR "/conformance");
  EXPECT_EQ(ran.status, 0) << ran.out << ran.err;
  EXPECT_THAT(ran.out, HasSubstr(" passed, 0 failed, "));
  EXPECT_THAT(ran.out, EndsWith(" skipped\n"));
}

TEST_F(TokrouteConformanceTest, OneWrongExpectationFails) {
  WriteVectors("token-load-scorer", Array(kRight, kWrong));
  const Ran ran = RunVectors();
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.out, HasSubstr("FAILED token-load-scorer: wrong\n         scores.a: want 0.50001, got 0.5\n"));
  EXPECT_THAT(ran.out, EndsWith("\n1 passed, 1 failed, 0 skipped\n"));
}

TEST_F(TokrouteConformanceTest, WrongExpectationsOfEveryKindFail) {
  const auto fails = [&](const std::string& plugin, const std::string& one_case, const std::string& why) {
    WriteVectors(plugin, Array(one_case));
    const Ran ran = RunVectors();
    EXPECT_EQ(ran.status, 1) << one_case;
    EXPECT_THAT(ran.out, HasSubstr(why));
    EXPECT_THAT(ran.out, EndsWith("0 passed, 1 failed, 0 skipped\n"));
    std::filesystem::remove(folder_ / (plugin + ".json"));
  };
  const std::string two =
      R"("endpoints": [{"name": "a", "prefix": {"matchBlocks": 9, "totalBlocks": 10, "blockSizeTokens": 16}},
      {"name": "b"}])";
  fails("prefix-cache-affinity-filter",
        R"({"name": "n", "kind": "filter", )" + two + R"(, "expect": {"survivors": ["b"]}})",
        "survivors[0]: want \"b\", got \"a\"");
  fails("prefix-cache-affinity-filter",
        R"({"name": "n", "kind": "filter", )" + two + R"(, "expect": {"survivors": ["a"], "outcome": "no_match"}})",
        "outcome");
  fails("prefix-cache-affinity-filter",
        R"({"name": "n", "kind": "config",
              "params": {"affinityThreshold": 1}, "expect": {"valid": false, "mentions": "x"}})",
        "valid");
  fails("prefix-cache-affinity-filter",
        R"({"name": "n", "kind": "config", "params": {"bogus": 1}, "expect": {"valid": false, "mentions": "other"}})",
        "mentions");
  fails("prefix-cache-affinity-filter",
        R"({"name": "n", "kind": "config", "expect": {"valid": true, "effective": {"peakPrefillThroughput": 20480}}})",
        "want 20480, got 15928");
  fails("max-score-picker",
        R"({"name": "n", "kind": "pick", "endpoints": [{"name": "a", "score": 1}, {"name": "b", "score": 2}],
            "expect": {"tiers": [{"anyOf": ["a"], "take": 1}]}})",
        "target 0");
  fails("random-picker",
        R"({"name": "n", "kind": "distribution", "endpoints": [{"name": "a", "score": 1}, {"name": "b", "score": 2}],
            "expect": {"inclusion": {"a": 0.6, "b": 0.4}, "toleranceAbs": 0.02, "trials": 10000}})",
        "inclusion.a");
  fails("prefix-hash",
        R"({"name": "n", "kind": "hash", "params": {"blockSizeTokens": 2}, "request": {"model": "m", "tokens": [1, 2]},
            "expect": {"hashes": ["0xbdeada2071943584"]}})",
        "hashes[0]");
  fails("scheduler-profile",
        R"({"name": "n", "kind": "profile", "params": {"scorers": [{"weight": 2, "scores": {"a": 0.5}}],
            "picker": "max-score-picker"}, "endpoints": [{"name": "a"}], "expect": {"totals": {"a": 0.5}}})",
        "totals.a: want 0.5, got 1.0");
  fails("inflight-load-producer",
        R"({"name": "n", "kind": "sequence", "steps": [{"dispatch": {"requestId": "r", "promptTokens": 4,
            "targets": {"default": [{"name": "a"}]}}, "expect": {"inflight": {"a": {"requests": 1, "tokens": 5}}}}],
            "expect": {"perStep": true}})",
        "step 1 (dispatch): inflight.a.tokens: want 5, got 4");
  fails("approx-prefix-cache-producer",
        R"({"name": "n", "kind": "sequence", "steps": [{"produce": {"requestId": "1", "prompts": [{"range": [1, 128]}],
            "endpoints": [{"name": "a"}]},
              "expect": {"match": {"a": {"matchBlocks": 1}}}}], "expect": {"perStep": true}})",
        "step 1 (produce): match.a.matchBlocks: want 1, got 0");
  const std::string precise = R"({"name": "n", "kind": "match", "params": {"tierWeights": {"cpu": 0.8}},
      "request": {"promptBlocks": 2}, "index": [[{"endpoint": "a", "tier": "cpu"}]], "expect": {"match": )";
  fails("precise-prefix-cache-producer", precise + R"({"a": {"matchBlocks": 0}}}})",
        "stored parents first: match.a.matchBlocks: want 0, got 0.8");
  fails("precise-prefix-cache-producer", precise + R"({"a": {"cachedBlocks": 2}}}})", "cachedBlocks: want 2, got 1");
  fails("precise-prefix-cache-producer", precise + R"({"a": {"cachedBlocksByTier": {}}}}})",
        R"(cachedBlocksByTier: want {}, got {"cpu":1})");
  fails("precise-prefix-cache-producer", precise + R"({}}})", "match: want {}, got {\"a\"");
}

// Skipped is only what is compared in everything else.
TEST_F(TokrouteConformanceTest, UntruncatedMatchesAreSkippedOnceTheRestAgrees) {
  const auto run = [&](const std::string& cached) {
    WriteVectors("precise-prefix-cache-producer",
                 Array(R"({"name": "slower tier weighs less and the sum is truncated", "kind": "match",
                     "params": {"tierWeights": {"cpu": 0.5}}, "request": {"promptBlocks": 6},
                     "index": [[{"endpoint": "a", "tier": "gpu"}], [{"endpoint": "a", "tier": "gpu"}],
                               [{"endpoint": "a", "tier": "cpu"}]],
                     "expect": {"match": {"a": {"matchBlocks": 2, "cachedBlocks": )" +
                       cached + "}}}}"));
    return RunVectors().out;
  };
  EXPECT_THAT(run("3"), EndsWith("0 passed, 0 failed, 1 skipped\n"));
  EXPECT_THAT(run("2"), EndsWith("0 passed, 1 failed, 0 skipped\n"));
}

TEST_F(TokrouteConformanceTest, WhatNobodyReadsIsAFailure) {
  WriteVectors("token-load-scorer",
               R"([{"name": "expectation", "kind": "score", "endpoints": [], "expect": {"scores": {}, "mood": 1}},
                   {"name": "field", "kind": "score", "endpoint": [], "expect": {"scores": {}}},
                   {"name": "endpoint", "kind": "score", "endpoints": [{"name": "a", "load": 1}],
              "expect": {"scores": {"a": 1}}},
                   {"name": "nothing", "kind": "score", "endpoints": [], "expect": {}},
                   {"name": "kind", "kind": "smell", "expect": {"scores": {}}},
                   {"name": "type", "kind": "score", "endpoints": [{"name": 7}], "expect": {"scores": {}}}])");
  const Ran ran = RunVectors();
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.out, EndsWith("0 passed, 6 failed, 0 skipped\n"));
}

TEST_F(TokrouteConformanceTest, WhatDoesNotExistYetIsSkippedByName) {
  WriteVectors("telepathy-scorer", R"([{"name": "reads minds"}])");
  WriteVectors(
      "prefix-cache-affinity-filter",
      R"([{"name": "predicted", "kind": "filter", "params": {"ttftSource": "latencyPredictor"}, "endpoints": [],
                    "expect": {"survivors": []}}])");
  const Ran ran = RunVectors();
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.out, HasSubstr("skip   telepathy-scorer: no such plugin yet (1)\n         reads minds\n"));
  EXPECT_THAT(ran.out, HasSubstr("predicted"));
  EXPECT_THAT(ran.out, EndsWith("0 passed, 0 failed, 2 skipped\n"));
}

TEST_F(TokrouteConformanceTest, AllowedDifference) {
  WriteVectors("token-load-scorer", Array(kRight, kQuirk));
  const Ran ran = RunAgainst(Difference("wrong", "tag", kHalf), "--complete");
  EXPECT_EQ(ran.status, 0) << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("differ token-load-scorer: A sentence. (1)\n         wrong\n"));
  EXPECT_THAT(ran.out, EndsWith("1 passed, 0 failed, 0 skipped\n"));
}

TEST_F(TokrouteConformanceTest, DifferencesThatAreNotAllowed) {
  const auto fails = [&](const std::string& cases, const std::string& differences, const std::string& why) {
    WriteVectors("token-load-scorer", cases);
    const Ran ran = RunAgainst(differences, "--complete");
    EXPECT_EQ(ran.status, 1) << differences;
    EXPECT_THAT(ran.out, HasSubstr(why));
    EXPECT_THAT(ran.out, HasSubstr(" 1 failed, "));
  };
  fails(Array(kWrong), Difference("wrong", "tag", kHalf), "none of the tags");
  fails(Array(kWrong), Difference("wrong", "because", kHalf), "no difference may be of kind");
  fails(Array(kWrong), Difference("wrong", "counted-output", kHalf), "output is not counted");
  fails(Array(kWrong), Difference("wrong", "request-without-id", kHalf), "every request has one");
  fails(Array(kWrong), Difference("wrong", "full-blocks", kHalf), "says no block size");
  // Nothing but the expectation may change, and we must do what the list says.
  fails(Array(kQuirk), Difference("wrong", "tag", R"({"op": "remove", "path": "/endpoints/0/inflight"})"),
        "changes more than what is expected");
  fails(Array(kQuirk), Difference("wrong", "tag", R"({"op": "replace", "path": "/expect/scores/a", "value": 0.6})"),
        "not what the list of differences says either");
  fails(Array(kQuirk), Difference("wrong", "tag", ""), "says nothing");
  // Stale entries.
  fails(Array(kRight), Difference("gone", "tag", kHalf), "a difference that no case meets");
  WriteVectors("token-load-scorer", Array(R"({"name": "half", "kind": "score", "tags": ["quirk"], "endpoints": [],
      "expect": {"scores": {}}})"));
  EXPECT_THAT(RunAgainst(Difference("half", "tag", kHalf)).out, HasSubstr("but does what llm-d does"));
}

TEST_F(TokrouteConformanceTest, WithoutCompleteOthersDifferencesDoNotMatter) {
  WriteVectors("inflight-load-producer", R"([{"name": "defaults", "kind": "config", "expect": {"valid": true}}])");
  const Ran ran = RunVectors("-v");  // The built-in list is about other cases.
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.out, HasSubstr("ok     inflight-load-producer: defaults\n"));
  EXPECT_EQ(RunVectors("--complete").status, 1);
}

TEST_F(TokrouteConformanceTest, NothingToRun) {
  const auto says = [](const Ran& ran, const std::string& what) {
    EXPECT_EQ(ran.status, 2) << ran.out;
    EXPECT_THAT(ran.err, HasSubstr(what));
  };
  says(Run(""), "DIR");
  says(Run(Folder() + "/missing"), "no such folder");
  says(RunVectors(), "no vector file");
  WriteVectors("token-load-scorer", "[{]");
  says(RunVectors(), "token-load-scorer.json: not JSON");
  WriteVectors("token-load-scorer", "{}");
  says(RunVectors(), "want an array of cases");
  WriteVectors("token-load-scorer", R"([{"kind": "score"}])");
  says(RunVectors(), "case 0 has no name");
  WriteVectors("token-load-scorer", R"([{"name": "a"}, {"name": "a"}])");
  says(RunVectors(), "two cases are named \"a\"");
  WriteVectors("token-load-scorer", Array(kRight));
  says(RunAgainst("[{}]"), "differences.json");
  says(RunAgainst(R"([{"file": "f", "case": "c", "kind": "tag", "design": "", "ours": []}])"), "no sentence");
  says(RunVectors("--differences /missing.json"), "cannot be read");
}

}  // namespace

// Runs the program itself: exit statuses, messages, and what is left behind in files.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/program.h"

namespace {

using tokroute::testing_support::Contents;
using tokroute::testing_support::FolderTest;
using tokroute::testing_support::Ran;
using testing::AllOf;
using testing::HasSubstr;

constexpr char kTrace[] = TOKROUTE_TESTS_DIR "/data/small_trace.jsonl";

class TokrouteSimTest : public FolderTest {
 protected:
  Ran Run(const std::string& arguments) const { return RunProgram(TOKROUTE_SIM_PROGRAM, arguments); }
};

TEST_F(TokrouteSimTest, VersionAndHelp) {
  const Ran version = Run("--version");
  EXPECT_EQ(version.status, 0);
  EXPECT_THAT(version.out, HasSubstr("tokroute-sim "));
  const Ran help = Run("replay --help");
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("--rate-scale"), HasSubstr("hit at admission"), HasSubstr("Exit status")));
  EXPECT_EQ(Run("").status, 2);
  EXPECT_EQ(Run("nonsense").status, 2);
}

TEST_F(TokrouteSimTest, DefaultsComeToATableOfAllPolicies) {
  const Ran ran = Run("replay");
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("prefill-bound"), HasSubstr("decode-bound"), HasSubstr("round-robin"),
                             HasSubstr("random"), HasSubstr("least-outstanding"), HasSubstr("TTFT p90, s")));
  EXPECT_THAT(ran.err, Not(HasSubstr("\r")));  // No progress bar into files.
}

TEST_F(TokrouteSimTest, SameSeedSameBytes) {
  for (const std::string& input :
       {std::string("--trace ") + kTrace, std::string("--workload conversations --requests 100")}) {
    const Ran first = Run("replay --seed 3 --endpoints 4 " + input + " --json " + File("a"));
    const Ran second = Run("replay --seed 3 --endpoints 4 " + input + " --json " + File("b"));
    ASSERT_EQ(first.status, 0) << first.err;
    ASSERT_EQ(second.status, 0) << second.err;
    EXPECT_EQ(first.out, second.out);
    EXPECT_EQ(Contents(File("a")), Contents(File("b")));
    EXPECT_THAT(Contents(File("a")), AllOf(HasSubstr("\"seed\": 3"), HasSubstr("ttft_p90_s")));
    EXPECT_THAT(Contents(File("a")), Not(HasSubstr(TOKROUTE_TESTS_DIR)));
  }
}

TEST_F(TokrouteSimTest, OptionsOutOfRangeAreNamedAndLeaveNoFile) {
  const std::pair<const char*, const char*> kCases[] = {
      {"--endpoints 0", "--endpoints: want an integer 1 .. 8192 endpoints, got '0'"},
      {"--endpoints 8193", "--endpoints: want an integer 1 .. 8192 endpoints, got '8193'"},
      {"--endpoints -1", "--endpoints: want an integer 1 .. 8192 endpoints, got '-1'"},
      {"--endpoints 8.0", "--endpoints: want an integer 1 .. 8192 endpoints, got '8.0'"},
      {"--rate-scale 0", "--rate-scale: want more than 0 .. 1e+09, got '0'"},
      {"--rate-scale nan", "--rate-scale: want more than 0 .. 1e+09, got 'nan'"},
      {"--rate-scale inf", "--rate-scale: want more than 0 .. 1e+09, got 'inf'"},
      {"--rate-scale 1e-300", "--rate-scale: a scale of 1e-300 stretches the stream"},
      {"--peak-prefill-throughput nan", "--peak-prefill-throughput: want 1 .. 1e+09 tokens/s, got 'nan'"},
      {"--max-ttft-penalty-ms 0", "--max-ttft-penalty-ms: want an integer 1 .. 1000000000 ms, got '0'"},
      {"--max-ttft-penalty-ms 14s", "got '14s'"},
      {"--decode-tokens-per-s 0", "--decode-tokens-per-s: want 0.001 .. 1e+06 tokens/s, got '0'"},
      {"--capacity-tokens 15", "--capacity-tokens: want an integer 16 .. 1099511627776 tokens, got '15'"},
      {"--capacity-tokens 100 --block-size 128", "--capacity-tokens: want at least a block of 128 tokens, got 100"},
      {"--block-size 15", "--block-size: want an integer 16 .. 512 tokens, got '15'"},
      {"--seed -1", "--seed: want an integer 0 .. 18446744073709551615, got '-1'"},
      {"--seed 18446744073709551616", "got '18446744073709551616'"},
      {"--requests 1000001", "--requests: want an integer 1 .. 1000000, got '1000001'"},
      {"--duration 1e8", "want > 0 .. 1000000, got 2e+09"},
      {"--qps 0", "--qps: want more than 0 .. 1e+06 requests/s, got '0'"},
      {"--workload x", "--workload: want shared-prefix or conversations, got 'x'"},
      {"--policies prefill-bound,foo",
       "--policies: want names out of prefill-bound, decode-bound, round-robin, random, least-outstanding, got 'foo'"},
      {"--policies random,random", "--policies: want each name once, got 'random' twice"},
      {"--policies random,", "got ''"},
      {"--limit 3", "--limit requires --trace"},
      {"--trace x --qps 3", "--trace excludes --qps"},
      {"--trace /no/such/file", "--trace: /no/such/file: No such file or directory"},
      {"--trace ''", "--trace: want a file name, got ''"},
      {"--no-such-option", "--no-such-option"},
  };
  for (const auto& [arguments, message] : kCases) {
    const Ran ran = Run(std::string("replay ") + arguments + " --json " + File("out.json"));
    EXPECT_EQ(ran.status, 2) << arguments;
    EXPECT_THAT(ran.err, HasSubstr(message)) << arguments;
    EXPECT_EQ(ran.out, "") << arguments;
    EXPECT_TRUE(NoFiles()) << arguments;
  }
  EXPECT_THAT(Run(std::string("replay --block-size 16 --trace ") + kTrace).err, HasSubstr("--block-size: want 512"));
}

TEST_F(TokrouteSimTest, JsonThatCannotBeWrittenIsFoundBeforeTheReplay) {
  for (const std::string& path : {File("missing/out.json"), folder_.string(), std::string("''")}) {
    const Ran ran = Run("replay --json " + path);
    EXPECT_EQ(ran.status, 2) << path;
    EXPECT_THAT(ran.err, HasSubstr("--json: "));
    EXPECT_EQ(ran.out, "");
  }
  // The trace itself would be overwritten.
  const std::string trace = Write("t.jsonl", Contents(kTrace));
  EXPECT_EQ(Run("replay --trace " + trace + " --json " + trace).status, 2);
  EXPECT_EQ(Contents(trace), Contents(kTrace));
}

TEST_F(TokrouteSimTest, JsonReplacesAFileWholeAndFollowsLinks) {
  Write("real.json", std::string(100'000, 'x'));
  std::filesystem::create_symlink(File("real.json"), File("link.json"));
  EXPECT_EQ(Run(std::string("replay --trace ") + kTrace + " --json " + File("link.json")).status, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(File("link.json")));
  const std::string json = Contents(File("real.json"));
  EXPECT_EQ(json.front(), '{');
  EXPECT_EQ(json.substr(json.size() - 3), "\n}\n");
}

TEST_F(TokrouteSimTest, MalformedTraceLines) {
  const std::string good = R"({"timestamp": 1, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]})";
  const std::string trace = Write("bad.jsonl", good + "\r\n{\"timestamp\": 1}\r\n" + good + "\r\n");
  const Ran stopped = Run("replay --trace " + trace);
  EXPECT_EQ(stopped.status, 2);
  EXPECT_EQ(stopped.err, trace + ":2: no field \"input_length\"\n");
  const Ran skipped = Run("replay --skip-bad-lines --trace " + trace);
  EXPECT_EQ(skipped.status, 0);
  EXPECT_THAT(skipped.err, AllOf(HasSubstr("Bad lines skipped: 1"), HasSubstr(":2: no field")));
  EXPECT_THAT(skipped.out, HasSubstr("bad.jsonl: 2 requests (bad lines skipped: 1)"));
  const Ran empty = Run("replay --trace " + Write("empty.jsonl", ""));
  EXPECT_EQ(empty.status, 2);
  EXPECT_THAT(empty.err, HasSubstr("empty.jsonl: no request in 0 lines"));
  EXPECT_THAT(Run(std::string("replay --limit 2 --trace ") + kTrace).out, HasSubstr("small_trace.jsonl: 2 requests"));
}

TEST_F(TokrouteSimTest, CalibrateTurnsSamplesIntoTau) {
  const std::string samples = Write("samples", "# warm-up\n9.0\n0.41\n0.40\n\n0.39\n0.40\n0.40\n");
  const Ran ran = Run("calibrate --warm-up 1 --t-max-ms 14000 --samples " + samples);
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("R_peak 20480 tokens/s"), HasSubstr("286720"), HasSubstr("35.00")));
}

TEST_F(TokrouteSimTest, CalibrateFitsPromptSizes) {
  std::string lines;
  for (int k = 1; k <= 19; ++k) {
    const double p = 8192.0 * k;
    lines += std::to_string(8192 * k) + "," + std::to_string(0.003 + 41.5e-6 * p + 0.845e-9 * p * p) + "\n";
  }
  const Ran ran = Run("calibrate --samples " + Write("fit", lines));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("fit:"), HasSubstr("R^2 1.0000")));
}

TEST_F(TokrouteSimTest, CalibrateRefusesWhatCannotBeRight) {
  const auto refused = [&](const std::string& arguments, const std::string& why) {
    const Ran ran = Run("calibrate " + arguments);
    EXPECT_EQ(ran.status, 2) << arguments;
    EXPECT_THAT(ran.err, HasSubstr(why)) << arguments;
    EXPECT_EQ(ran.out, "") << arguments;
  };
  refused("", "--samples, --model or --flops");
  refused("--samples " + File("none"), "cannot open");
  refused("--samples " + Write("few", "0.4\n0.4\n"), "at least 5");
  refused("--samples " + Write("word", "0.4\nfast\n"), ":2: want a TTFT");
  refused("--samples " + Write("mixed", "0.4\n8192,0.4\n"), ":2: want as many columns");
  refused("--samples " + Write("wide", "0.1\n0.2\n0.4\n0.8\n1.6\n"), "interquartile range");
  refused("--samples " + Write("zero", "0.4\n0.4\n0\n0.4\n0.4\n"), "ttft_seconds[2]");
  refused("--model m --t-max-ms 0", "--t-max-ms");
  refused("--model m --row a,b,c", "--row");
  refused("--model m --chunk 0", "--chunk");
  refused("--flops 1e15", "active_parameters");
}

TEST_F(TokrouteSimTest, CalibrateLooksUpPublishedAndOwnRows) {
  const Ran ran = Run("calibrate --model qwen3-32b --accelerator H100 --engine SGLang --row Qwen3-32B,H100,SGLang,2,8192,FP8,17000");
  EXPECT_EQ(ran.status, 0) << ran.err;
  const auto own = ran.out.find("17,000"), published = ran.out.find("15,360");
  EXPECT_TRUE(own < published && published != std::string::npos) << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("measure it on your deployment"));
  EXPECT_THAT(Run("calibrate --model mine").out, HasSubstr("no row for model mine"));
}

}  // namespace

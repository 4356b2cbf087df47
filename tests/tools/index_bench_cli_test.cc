// Runs the program itself: exit statuses, messages, and what is left behind in files.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "support/program.h"

namespace {

using tokroute::testing_support::Contents;
using tokroute::testing_support::FolderTest;
using tokroute::testing_support::Ran;
using testing::AllOf;
using testing::HasSubstr;

class TokrouteIndexBenchTest : public FolderTest {
 protected:
  Ran Run(const std::string& arguments) const { return RunProgram(TOKROUTE_INDEX_BENCH_PROGRAM, arguments); }
  // Runs and returns the JSON.
  nlohmann::json Json(const std::string& arguments) const {
    const Ran ran = Run(arguments + " --repetitions 1 --json " + File("json"));
    EXPECT_EQ(ran.status, 0) << ran.out << ran.err;
    return nlohmann::json::parse(Contents(File("json")), nullptr, false);
  }
};

void ExpectTheUsualKeys(const nlohmann::json& json) {
  for (const char* key :
       {"block_ops_per_s", "lookup_p50_ns", "lookup_p99_ns", "bytes_per_holder_block", "bytes_per_distinct_block"}) {
    ASSERT_TRUE(json.contains(key)) << key << json;
    EXPECT_GT(json[key].get<double>(), 0) << key;
  }
  EXPECT_TRUE(json["exact"].get<bool>());
}

TEST_F(TokrouteIndexBenchTest, EveryWorkloadRunsAndIsExact) {
  std::ofstream trace(File("trace.jsonl"));
  for (int i = 0; i < 40; ++i) {
    trace << R"({"timestamp": )" << i / 4 * 3000 << R"(, "input_length": 1536, "output_length": 300, "hash_ids": [0, )"
          << i % 5 + 1 << ", " << i + 10 << "]}\n";
  }
  trace.close();
  ExpectTheUsualKeys(Json("mooncake --window-ms 20 --slow-window-ms 50 --trace " + File("trace.jsonl")));
  ExpectTheUsualKeys(Json("pinned --scale 0.002"));
  const nlohmann::json named = Json("pinned --scale 0.002 --engine-keys");
  ExpectTheUsualKeys(named);
  EXPECT_GT(named["index"]["names"].get<int>(), 0);
  EXPECT_EQ(named["index"]["names_unknown_parents"].get<int>(), 0);
  ExpectTheUsualKeys(Json("grid --cell 8x20k --scale 0.01"));
  const nlohmann::json churn = Json("churn --scale 0.01");
  ExpectTheUsualKeys(churn);
  for (const char* what :
       {"forks", "holes", "evicted_middles", "late_parents", "duplicates", "removed_endpoints", "cap_hits"}) {
    EXPECT_GT(churn["exercised"][what].get<int>(), 0) << what;
  }
}

TEST_F(TokrouteIndexBenchTest, ATraceIsTheWorkload) {
  const nlohmann::json made = Json("pinned --scale 0.002 --seed 7 --write-trace " + File("a"));
  const nlohmann::json read = Json("pinned --read-trace " + File("a") + " --write-trace " + File("b"));
  EXPECT_EQ(Contents(File("a")), Contents(File("b")));
  for (const char* key : {"distinct_blocks", "holder_blocks", "compared", "exercised"}) {
    EXPECT_EQ(made[key], read[key]) << key;
  }
  // The same for the same seed, another for another.
  EXPECT_EQ(Run("pinned --scale 0.002 --seed 7 --repetitions 1 --write-trace " + File("c")).status, 0);
  EXPECT_EQ(Contents(File("a")), Contents(File("c")));
  EXPECT_EQ(Run("pinned --scale 0.002 --seed 8 --repetitions 1 --write-trace " + File("c")).status, 0);
  EXPECT_NE(Contents(File("a")), Contents(File("c")));
}

TEST_F(TokrouteIndexBenchTest, ARunThatExercisesNothingFails) {
  // Of the pinned workload's file only a header that tells of no more than the first few events.
  ASSERT_EQ(Run("pinned --scale 0.002 --repetitions 1 --write-trace " + File("a")).status, 0);
  std::string bytes = Contents(File("a"));
  bytes.resize(24 + 18 + 8 * 16);  // Eight blocks of one store.
  bytes.replace(16, 8, std::string("\x02\0\0\0\0\0\0\0", 8));
  bytes += std::string("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x08\0\0\0", 18) + bytes.substr(24 + 18);  // And a match of them.
  std::ofstream(File("b"), std::ios::binary) << bytes;
  const Ran ran = Run("pinned --repetitions 1 --read-trace " + File("b"));
  EXPECT_EQ(ran.status, 1) << ran.out << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("the run exercised no forks"), HasSubstr("the run exercised no holes")));
}

TEST_F(TokrouteIndexBenchTest, BadInputIsNamedAndLeavesNothing) {
  const auto says = [&](const std::string& arguments, const std::string& what) {
    const Ran ran = Run(arguments + " --json " + File("json"));
    EXPECT_EQ(ran.status, 2) << arguments << ran.out;
    EXPECT_THAT(ran.err, HasSubstr(what)) << arguments;
    EXPECT_TRUE(NoFiles()) << arguments;
  };
  says("mooncake", "want --trace FILE or --read-trace FILE");
  says("mooncake --trace " + File("missing"), "--trace: ");
  says("pinned --scale 0", "--scale: want more than 0 .. 1, got '0'");
  says("pinned --scale 2", "--scale: want more than 0 .. 1, got '2'");
  says("churn --repetitions 0", "--repetitions: want an integer 1 .. 100, got '0'");
  says("pinned --read-trace " + File("missing"), "--read-trace: ");
  says("pinned --write-trace " + File("no/such"), "--write-trace: ");
  says("grid --cell 9x9", "--cell: want one of 8x20k, 128x20k");
  says("grid --cell 1024x60k", "--full");
  says("grid --write-trace " + File("a"), "a trace is of one cell");
  says("pinned --read-trace ''", "want a file name, got ''");
  const Ran ran = Run("pinned --json /no/such/folder/json");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("--json: "));
  EXPECT_EQ(Run("").status, 2);
  EXPECT_EQ(Run("--help").status, 0);
}

TEST_F(TokrouteIndexBenchTest, ForeignAndTruncatedTracesAreRefused) {
  std::ofstream(File("foreign"), std::ios::binary) << std::string(64, 'x');
  const Ran foreign = Run("pinned --read-trace " + File("foreign"));
  EXPECT_EQ(foreign.status, 2);
  EXPECT_THAT(foreign.err, AllOf(HasSubstr(File("foreign")), HasSubstr("not an index trace")));
  ASSERT_EQ(Run("pinned --scale 0.002 --repetitions 1 --write-trace " + File("a")).status, 0);
  std::filesystem::resize_file(File("a"), std::filesystem::file_size(File("a")) - 1);
  const Ran truncated = Run("pinned --read-trace " + File("a"));
  EXPECT_EQ(truncated.status, 2);
  EXPECT_THAT(truncated.err, HasSubstr("truncated"));
}

TEST_F(TokrouteIndexBenchTest, AnInputIsNotOverwritten) {
  ASSERT_EQ(Run("pinned --scale 0.002 --repetitions 1 --write-trace " + File("a")).status, 0);
  const std::string before = Contents(File("a"));
  const Ran ran = Run("pinned --read-trace " + File("a") + " --json " + File("a"));
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("--json: want another file than --read-trace"));
  EXPECT_EQ(Contents(File("a")), before);
}

}  // namespace

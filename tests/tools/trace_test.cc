#include "tools/sim/trace.h"

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tokroute::tools {
namespace {

constexpr char kGood[] = R"({"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]})";

absl::StatusOr<Trace> Read(const std::string& text, const TraceOptions& options = {}) {
  std::istringstream in(text);
  return ReadTrace(in, "some/folder/t.jsonl", options);
}

std::string ErrorOf(const std::string& text) {
  const absl::StatusOr<Trace> trace = Read(text);
  EXPECT_FALSE(trace.ok()) << text;
  return trace.ok() ? "" : std::string(trace.status().message());
}

TEST(TraceTest, ReadsTheSmallTrace) {
  const absl::StatusOr<Trace> trace = ReadTraceFile(TOKROUTE_TESTS_DIR "/data/small_trace.jsonl");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->name, "small_trace.jsonl");
  ASSERT_EQ(trace->requests.size(), 6U);
  EXPECT_EQ(trace->requests[3].timestamp_ms, 2000);
  EXPECT_EQ(trace->requests[3].input_tokens, 2100);
  EXPECT_EQ(trace->requests[3].output_tokens, 64);
  EXPECT_EQ(trace->requests[3].hash_ids, (std::vector<std::uint64_t>{0, 1, 3, 5, 6}));
  EXPECT_EQ(trace->skipped_lines, 0);
}

TEST(TraceTest, CarriageReturnsEmptyLinesAndOtherFieldsAreNoMistakes) {
  const absl::StatusOr<Trace> trace = Read(
      std::string(kGood) + "\r\n\r\n   \n" +
      R"({"chat": "x", "hash_ids": [18446744073709551615], "output_length": 1, "input_length": 512, "timestamp": 5})");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->requests[1].hash_ids[0], 18446744073709551615U);
}

TEST(TraceTest, LimitCountsRequestsAndDoesNotLookFurther) {
  const absl::StatusOr<Trace> trace = Read(std::string(kGood) + "\n\n" + kGood + "\nnonsense\n", {.limit = 2});
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->requests.size(), 2U);
}

TEST(TraceTest, EveryMalformedLineIsNamedByFileLineAndFault) {
  const std::pair<const char*, const char*> kCases[] = {
      {"{", "not JSON"},
      {"nonsense", "not JSON"},
      {R"({"timestamp": NaN})", "not JSON"},
      {"{} {}", "not JSON"},
      {"[1, 2]", "want a JSON object, got an array"},
      {"17", "want a JSON object, got 17"},
      {"{}", R"(no field "timestamp")"},
      {R"({"timestamp": 1})", R"(no field "input_length")"},
      {R"({"timestamp": 1, "input_length": 1})", R"(no field "output_length")"},
      {R"({"timestamp": 1, "input_length": 1, "output_length": 1})", R"(no field "hash_ids")"},
      {R"({"timestamp": "1", "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       R"("timestamp": want an integer 0 .. 100000000000, got "1")"},
      {R"({"timestamp": 1.5, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       R"("timestamp": want an integer 0 .. 100000000000, got 1.5)"},
      {R"({"timestamp": null, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       R"("timestamp": want an integer 0 .. 100000000000, got null)"},
      {R"({"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       R"("timestamp": want an integer 0 .. 100000000000, got -1)"},
      {R"({"timestamp": 100000000001, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       R"("timestamp": want an integer 0 .. 100000000000, got 100000000001)"},
      {R"({"timestamp": 18446744073709551615, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       R"("timestamp": want an integer 0 .. 100000000000, got 18446744073709551615)"},
      {R"({"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []})",
       R"("input_length": want an integer 1 .. 2147483648, got 0)"},
      {R"({"timestamp": 1, "input_length": 2147483649, "output_length": 1, "hash_ids": []})",
       R"("input_length": want an integer 1 .. 2147483648, got 2147483649)"},
      {R"({"timestamp": 1, "input_length": [], "output_length": 1, "hash_ids": []})",
       R"("input_length": want an integer 1 .. 2147483648, got an array)"},
      {R"({"timestamp": 1, "input_length": 1, "output_length": -4, "hash_ids": [1]})",
       R"("output_length": want an integer 1 .. 2147483648, got -4)"},
      {R"({"timestamp": 1, "input_length": 1, "output_length": 1e300, "hash_ids": [1]})",
       R"("output_length": want an integer 1 .. 2147483648, got 1e+300)"},
      {R"({"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 1})",
       R"("hash_ids": want an array of integers, got 1)"},
      {R"({"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]})",
       R"("hash_ids": want 2 ids (one per 512 of 513 input tokens), got 1)"},
      {R"({"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]})",
       R"("hash_ids": want 1 ids (one per 512 of 512 input tokens), got 2)"},
      {R"({"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, -2]})",
       R"("hash_ids"[1]: want an integer 0 .. 2^64 - 1, got -2)"},
      {R"({"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 18446744073709551616]})",
       R"("hash_ids"[1]: want an integer 0 .. 2^64 - 1, got 1.8446744073709552e+19)"},
      {R"({"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": ["1", 2]})",
       R"("hash_ids"[0]: want an integer 0 .. 2^64 - 1, got "1")"},
      {R"({"timestamp": "a text that is far longer than a message should be", "input_length": 1})",
       R"("timestamp": want an integer 0 .. 100000000000, got "a text that is far longer than a mes...)"},
  };
  for (const auto& [line, fault] : kCases) {
    EXPECT_EQ(ErrorOf(std::string("\n") + line + "\n" + kGood), std::string("some/folder/t.jsonl:2: ") + fault);
  }
}

TEST(TraceTest, EarlierTimestampIsAFault) {
  const std::string earlier = R"({"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": [1]})";
  EXPECT_EQ(ErrorOf(std::string(kGood) + "\n" + earlier),
            "some/folder/t.jsonl:2: \"timestamp\": want no less than the 5 ms before it, got 4");
}

TEST(TraceTest, DeepNestingIsAFaultAndNoStackOverflow) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_EQ(ErrorOf(deep), "some/folder/t.jsonl:1: want a JSON object, got an array");
}

TEST(TraceTest, SkippedLinesAreCountedAndNamed) {
  std::string text = kGood;
  for (int i = 0; i < 7; ++i) text += "\nbad";
  text += std::string("\n") + kGood;
  const absl::StatusOr<Trace> trace = Read(text, {.skip_bad_lines = true});
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->skipped_lines, 7);
  ASSERT_EQ(trace->skipped.size(), 5U);
  EXPECT_EQ(trace->skipped[0], "some/folder/t.jsonl:2: not JSON");
}

TEST(TraceTest, NothingToReplayIsAFault) {
  EXPECT_EQ(ErrorOf(""), "some/folder/t.jsonl: no request in 0 lines");
  EXPECT_EQ(ErrorOf("\r\n\n"), "some/folder/t.jsonl: no request in 2 lines");
  const absl::StatusOr<Trace> trace = Read("bad\nworse", {.skip_bad_lines = true});
  EXPECT_EQ(trace.status().message(),
            "some/folder/t.jsonl: no request in 2 lines; the first bad one: some/folder/t.jsonl:1: not JSON");
}

TEST(TraceTest, FilesThatCannotBeRead) {
  EXPECT_EQ(ReadTraceFile("/no/such/file").status().message(), "/no/such/file: No such file or directory");
  EXPECT_EQ(ReadTraceFile(TOKROUTE_TESTS_DIR).status().message(), TOKROUTE_TESTS_DIR ": is a directory");
}

}  // namespace
}  // namespace tokroute::tools

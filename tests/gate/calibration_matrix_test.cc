#include "tokroute/gate/calibration_matrix.h"

#include <chrono>
#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tokroute/gate/tau_gate.h"

namespace tokroute {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::int64_t TauAt14s(double peak) {
  return TauGate::Create({.peak_prefill_throughput = peak, .max_ttft_penalty = 14s})->tau_tokens();
}

TEST(CalibrationMatrixTest, PublishedRowsGiveThePublishedTaus) {
  const struct {
    const char *model, *accelerator, *engine;
    std::int64_t tau;
  } rows[] = {{"gpt-oss-120B", "H100", "vLLM", 546'910},     {"Qwen3-32B", "TPU v7x", "vLLM", 382'704},
              {"Qwen3-32B", "TPU v6e", "vLLM", 368'060},     {"GLM-5.2-NVFP4", "B200", "SGLang", 336'378},
              {"Qwen3-32B", "H100", "vLLM", 286'720},        {"Qwen3-Coder-480B-FP8", "TPU v7x", "vLLM", 230'216},
              {"Qwen3-VL-32B", "H200", "vLLM", 220'514},     {"Qwen3-32B", "H100", "SGLang", 215'040}};
  const CalibrationMatrix matrix = CalibrationMatrix::Published();
  for (const auto& row : rows) {
    const auto found = matrix.Find({.model = row.model, .accelerator = row.accelerator, .engine = row.engine});
    ASSERT_FALSE(found.empty()) << row.model;
    EXPECT_TRUE(found[0].exact);
    EXPECT_EQ(TauAt14s(found[0].row.peak_prefill_throughput), row.tau) << row.model;
  }
  EXPECT_EQ(TauAt14s(15'928), 222'992);
}

TEST(CalibrationMatrixTest, TauDoesNotTransplant) {
  EXPECT_NEAR(static_cast<double>(TauAt14s(39'065)) / 286'720, 1.9, 0.05);
  EXPECT_NEAR(286'720 / static_cast<double>(TauAt14s(15'751)), 1.3, 0.05);
}

TEST(CalibrationMatrixTest, NearMissesSayWhatDiffersAndThatItMustBeMeasured) {
  const auto found = CalibrationMatrix::Published().Find({.model = "qwen3-32b",
                                                          .accelerator = "H100",
                                                          .engine = "vllm",
                                                          .quantisation = "FP8",
                                                          .tensor_parallel = 4,
                                                          .chunk_tokens = 16'384});
  ASSERT_FALSE(found.empty());
  EXPECT_FALSE(found[0].exact);
  EXPECT_EQ(found[0].row.engine, "vLLM");
  EXPECT_THAT(found[0].ToString(), AllOf(HasSubstr("TP 2, not 4"), HasSubstr("chunk 8192, not 16384"),
                                         HasSubstr("quantisation not stated"), HasSubstr("measure it")));
}

TEST(CalibrationMatrixTest, UnknownModelFindsNothing) {
  EXPECT_TRUE(CalibrationMatrix::Published().Find({.model = "nobody-measured-this"}).empty());
  EXPECT_TRUE(CalibrationMatrix::Published().Find({.accelerator = "H100"}).empty());
}

TEST(CalibrationMatrixTest, OperatorsOwnRowComesFirst) {
  CalibrationMatrix matrix = CalibrationMatrix::Published();
  ASSERT_TRUE(matrix.Add({.model = "Qwen3-32B", .accelerator = "H100", .engine = "vLLM", .quantisation = "", .tensor_parallel = 2,
                          .chunk_tokens = 8192, .peak_prefill_throughput = 18'000, .source = ""}).ok());
  const auto found = matrix.Find({.model = "Qwen3-32B", .accelerator = "H100", .engine = "vLLM", .tensor_parallel = 2});
  EXPECT_EQ(found[0].row.peak_prefill_throughput, 18'000);
  EXPECT_EQ(found[0].row.source, "operator");
  EXPECT_EQ(matrix.Find({.model = "Qwen3-32B"}, 2).size(), 2U);
}

TEST(CalibrationMatrixTest, ImpossibleRowsAreRefusedAndChangeNothing) {
  CalibrationMatrix matrix;
  const CalibrationRow good{"m", "a", "e", "", 0, 0, 1, ""};
  const auto refused = [&](auto change, const char* field) {
    CalibrationRow row = good;
    change(row);
    EXPECT_THAT(std::string(matrix.Add(row).message()), HasSubstr(field));
  };
  refused([](auto& r) { r.model = ""; }, "model");
  refused([](auto& r) { r.accelerator = ""; }, "accelerator");
  refused([](auto& r) { r.engine = ""; }, "engine");
  refused([](auto& r) { r.peak_prefill_throughput = 0; }, "peak_prefill_throughput");
  refused([](auto& r) { r.peak_prefill_throughput = std::nan(""); }, "peak_prefill_throughput");
  refused([](auto& r) { r.tensor_parallel = -1; }, "tensor_parallel");
  refused([](auto& r) { r.chunk_tokens = -1; }, "chunk_tokens");
  EXPECT_TRUE(matrix.rows().empty());
}

TEST(CalibrationMatrixTest, MissingThroughputNamesTheNearestRowAndAsksToMeasure) {
  const auto message = [](const TauGateOptions& options) { return std::string(TauGate::Create(options).status().message()); };
  EXPECT_THAT(message({.deployment = {.model = "Qwen3-32B", .accelerator = "H100", .engine = "SGLang"}}),
              AllOf(HasSubstr("peak_prefill_throughput"), HasSubstr("15,360"), HasSubstr("measure it on your deployment")));
  EXPECT_THAT(message({.deployment = {.model = "mine"}}), HasSubstr("no published row is for mine"));
  EXPECT_THAT(message({}), HasSubstr("name the deployment"));
}

}  // namespace
}  // namespace tokroute

// `tokroute-sim calibrate`: from TTFT samples to R_peak and tau; from a deployment to the nearest published rows; from
// floating-point operations to a first estimate.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "command.h"
#include "number_option.h"
#include "tokroute/gate/calibration.h"
#include "tokroute/gate/calibration_matrix.h"

namespace tokroute::tools {
namespace {

constexpr int kOk = 0, kBadInput = 2;

constexpr const char* kFooter = R"(
The samples file has a line per request: its TTFT in seconds (the recipe: all prompts of --chunk random tokens, one at a
time, on an idle stack), or prompt tokens and TTFT, separated by a comma or blanks (the fit: prompts of 1, 2, 3 ... chunks).
Empty lines and those that begin with # are skipped. - reads standard input.

Exit status: 0; 2 if an option or the samples are wrong, or the samples are refused.)";

struct CalibrateCommand {
  std::string samples, model, accelerator, engine, quantisation, t_max = "10000,14000,18000,25000";
  std::vector<std::string> rows;
  std::int64_t chunk = 8192, tensor_parallel = 0, warm_up = 0;
  bool chunk_given = false;
  FirstEstimateOptions estimate;

  int Run();
  absl::Status Measure(std::istream& in, std::string_view name);
  absl::Status LookUp();
};

int BadInput(std::string_view message) {
  std::cerr << message << "\n";
  return kBadInput;
}

absl::StatusOr<std::vector<std::chrono::milliseconds>> ParseTaus(const std::string& list) {
  std::vector<std::chrono::milliseconds> taus;
  for (const std::string& text : std::vector<std::string>(absl::StrSplit(list, ','))) {
    std::int64_t ms = 0;
    if (!ParseNumber<std::int64_t>(text, {1, std::int64_t{1} << 40}, ms)) {
      return absl::InvalidArgumentError(absl::StrCat("--t-max-ms: want integers of 1 .. 2^40 ms, got '", text, "'"));
    }
    taus.emplace_back(ms);
  }
  return taus;
}

void PrintTaus(double peak, std::int64_t chunk, const std::vector<std::chrono::milliseconds>& taus) {
  Calibration calibration;
  calibration.peak_prefill_throughput = peak;
  calibration.chunk_tokens = chunk;
  calibration.chunk_seconds = static_cast<double>(chunk) / peak;
  std::cout << "    T_max, s    tau, tokens    tau, chunks\n";
  for (const std::chrono::milliseconds t_max : taus) {
    std::cout << absl::StrFormat("%12.3f%15d%15.2f\n", static_cast<double>(t_max.count()) / 1000,
                                 calibration.TauTokens(t_max), calibration.TauChunks(t_max));
  }
}

absl::Status CalibrateCommand::Measure(std::istream& in, std::string_view name) {
  std::vector<double> ttfts;
  std::vector<TtftSample> fit;
  std::string line;
  std::int64_t number = 0, skipped = 0;
  while (std::getline(in, line)) {
    ++number;
    const std::string text(absl::StripAsciiWhitespace(line));
    if (text.empty() || text[0] == '#') continue;
    const std::vector<std::string> fields = absl::StrSplit(text, absl::ByAnyChar(", \t"), absl::SkipEmpty());
    const auto bad = [&](std::string_view what) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(name), ":", number, ": ", std::string(what), ", got '", text, "'"));
    };
    TtftSample sample;
    double ttft = 0;
    if (fields.empty() || fields.size() > 2) return bad("want a TTFT in seconds, or prompt tokens and a TTFT");
    if (!absl::SimpleAtod(fields.back(), &ttft)) return bad("want a TTFT in seconds");
    if (fields.size() == 2 && !ParseNumber<std::int64_t>(fields[0], {1, std::int64_t{1} << 32}, sample.prompt_tokens)) {
      return bad("want prompt tokens of 1 .. 2^32");
    }
    if ((fields.size() == 2 && !ttfts.empty()) || (fields.size() == 1 && !fit.empty())) {
      return bad("want as many columns as in the lines before");
    }
    if (skipped < warm_up) {
      ++skipped;
      continue;
    }
    sample.ttft_seconds = ttft;
    if (fields.size() == 2) fit.push_back(sample);
    else ttfts.push_back(ttft);
  }
  if (in.bad()) return absl::InvalidArgumentError(absl::StrCat(std::string(name), ": cannot be read"));
  const CalibrationOptions options{.chunk_tokens = chunk};
  const absl::StatusOr<Calibration> result =
      fit.empty() ? CalibrateFromRecipe(ttfts, options) : CalibrateFromFit(fit, options);
  if (!result.ok()) return absl::InvalidArgumentError(absl::StrCat(std::string(name), ": ", result.status().message()));
  const auto taus = ParseTaus(t_max);  // Checked before.
  std::cout << "measured: " << result->ToString() << "\n";
  PrintTaus(result->peak_prefill_throughput, chunk, *taus);
  return absl::OkStatus();
}

absl::Status CalibrateCommand::LookUp() {
  CalibrationMatrix matrix = CalibrationMatrix::Published();
  for (const std::string& text : rows) {
    const std::vector<std::string> fields = absl::StrSplit(text, ',');
    CalibrationRow row;
    if (fields.size() != 7 || !ParseNumber<std::int64_t>(fields[3], {0, 1 << 20}, row.tensor_parallel) ||
        !ParseNumber<std::int64_t>(fields[4], {0, 1 << 24}, row.chunk_tokens) ||
        !absl::SimpleAtod(fields[6], &row.peak_prefill_throughput)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--row: want model,accelerator,engine,TP,chunk,quantisation,tokens/s (0 or nothing: not known), got '", text, "'"));
    }
    row.model = fields[0], row.accelerator = fields[1], row.engine = fields[2], row.quantisation = fields[5];
    if (absl::Status status = matrix.Add(std::move(row)); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--row: ", status.message()));
    }
  }
  const auto found = matrix.Find({.model = model,
                                  .accelerator = accelerator,
                                  .engine = engine,
                                  .quantisation = quantisation,
                                  .tensor_parallel = tensor_parallel,
                                  .chunk_tokens = chunk_given ? chunk : 0});
  const auto parsed = ParseTaus(t_max);
  if (found.empty()) {
    std::cout << "no row for model " << model << ": measure it\n";
  }
  for (const CalibrationMatch& match : found) {
    std::cout << (match.exact ? "row: " : "near: ") << match.ToString() << "\n";
    PrintTaus(match.row.peak_prefill_throughput, match.row.chunk_tokens > 0 ? match.row.chunk_tokens : chunk, *parsed);
  }
  return absl::OkStatus();
}

int CalibrateCommand::Run() {
  const bool estimates = estimate.peak_flops != 0;
  if (samples.empty() && model.empty() && !estimates) {
    return BadInput("calibrate: want --samples, --model or --flops; see --help");
  }
  const auto parsed = ParseTaus(t_max);
  if (!parsed.ok()) return BadInput(std::string(parsed.status().message()));
  if (!samples.empty()) {
    absl::Status status;
    if (samples == "-") {
      status = Measure(std::cin, "standard input");
    } else {
      std::ifstream file(samples);
      if (!file) return BadInput(absl::StrCat("--samples: cannot open '", samples, "'"));
      status = Measure(file, samples);
    }
    if (!status.ok()) return BadInput(std::string(status.message()));
  }
  if (!model.empty()) {
    if (absl::Status status = LookUp(); !status.ok()) return BadInput(std::string(status.message()));
  }
  if (estimates) {
    estimate.chunk_tokens = chunk;
    const auto result = EstimatePeakPrefillThroughput(estimate);
    if (!result.ok()) return BadInput(std::string(result.status().message()));
    std::cout << result->ToString() << "\n";
    PrintTaus(result->peak_prefill_throughput, chunk, *parsed);
  }
  return kOk;
}

}  // namespace

Command AddCalibrateCommand(CLI::App& tool) {
  auto command = std::make_shared<CalibrateCommand>();
  CLI::App& app = *tool.add_subcommand("calibrate", "TTFT samples in; peak prefill throughput and tau out");
  app.footer(kFooter);
  app.add_option("--samples", command->samples, "File of TTFT samples")->type_name("FILE");
  AddNumber<std::int64_t>(app, "--chunk", command->chunk, {1, 1 << 24}, "tokens",
                          "Tokens of one prefill chunk: the engine's max_num_batched_tokens")
      ->each([command](const std::string&) { command->chunk_given = true; });
  AddNumber<std::int64_t>(app, "--warm-up", command->warm_up, {0, 1 << 20}, "samples", "Leading samples to leave out");
  app.add_option("--t-max-ms", command->t_max, "TTFT penalties to print tau for, ms")->type_name("MS,MS,...")->capture_default_str();
  app.add_option("--model", command->model, "Look this model up in the matrix of published measurements");
  app.add_option("--accelerator", command->accelerator, "For the look-up, as in H100");
  app.add_option("--engine", command->engine, "For the look-up, as in vLLM");
  app.add_option("--quantisation", command->quantisation, "For the look-up, as in FP8");
  AddNumber<std::int64_t>(app, "--tp", command->tensor_parallel, {0, 1 << 20}, "", "For the look-up: tensor parallelism; 0: any");
  app.add_option("--row", command->rows, "A row of your own for the look-up: model,accelerator,engine,TP,chunk,quantisation,tokens/s")
      ->type_name("ROW");
  FirstEstimateOptions& e = command->estimate;
  constexpr double kMost = 1e30;
  AddNumber<double>(app, "--flops", e.peak_flops, {0, kMost, true}, "FLOP/s", "First estimate: dense peak of the whole endpoint");
  AddNumber<double>(app, "--parameters", e.active_parameters, {0, kMost, true}, "", "First estimate: parameters active per token");
  AddNumber<std::int64_t>(app, "--layers", e.layers, {1, 1 << 20}, "", "First estimate: layers");
  AddNumber<std::int64_t>(app, "--heads", e.heads, {1, 1 << 20}, "", "First estimate: query heads");
  AddNumber<std::int64_t>(app, "--head-dim", e.head_dim, {1, 1 << 20}, "", "First estimate: head dimension");
  AddNumber<double>(app, "--utilisation", e.utilisation, {0, 1, true}, "", "First estimate: share of the peak reached");
  return {&app, [command] { return command->Run(); }};
}

}  // namespace tokroute::tools

// tokroute-index-bench: the prefix index in exact mode on the workloads that others publish figures for.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <limits>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "number_option.h"
#include "tools/index_bench/bench.h"
#include "tools/index_bench/memory.h"
#include "tools/index_bench/operations.h"
#include "tools/index_bench/report.h"
#include "tools/index_bench/statistics.h"
#include "tools/index_bench/workloads.h"
#include "tools/sim/report.h"
#include "tools/sim/trace.h"

namespace {

using namespace tokroute::index_bench;  // NOLINT: a program, not a header.
using tokroute::tools::AddNumber;

constexpr int kOk = 0, kFailed = 1, kBadInput = 2;

constexpr char kExitStatus[] = R"(
Exit status: 0; 1 if a result was wrong, something that the workload is for was not exercised, or with --check a limit
was missed; 2 if an option or a file is wrong.)";

struct Options {
  std::string trace, json, write_trace, read_trace;
  std::vector<std::string> cells;
  bool full = false, check = false;
  BenchOptions bench;
};

int Complain(const absl::Status& status) {
  std::cerr << "tokroute-index-bench: " << status.message() << '\n';
  return kBadInput;
}

// For Option::check: an empty name must not pass for an option that was not given.
std::string RefuseEmpty(const std::string& value) { return value.empty() ? "want a file name, got ''" : ""; }

absl::StatusOr<std::vector<GridCell>> Cells(const Options& options) {
  std::vector<GridCell> cells;
  for (const std::string& name : options.cells) {
    const auto* const found =
        std::find_if(kGridCells.begin(), kGridCells.end(), [&](const GridCell& cell) { return cell.name == name; });
    if (found == kGridCells.end()) {
      const auto add_name = [](std::string* out, const GridCell& cell) { out->append(cell.name); };
      return absl::InvalidArgumentError(
          absl::StrCat("--cell: want one of ", absl::StrJoin(kGridCells, ", ", add_name), ", got '", name, "'"));
    }
    if (found->big && !options.full) {
      return absl::InvalidArgumentError(
          absl::StrCat("--cell: '", name, "' takes 9 GB of memory in all, say --full as well"));
    }
    cells.push_back(*found);
  }
  if (cells.empty()) {
    for (const GridCell& cell : kGridCells) {
      if (!cell.big || options.full) cells.push_back(cell);
    }
  }
  if (cells.size() != 1 && !(options.read_trace.empty() && options.write_trace.empty())) {
    return absl::InvalidArgumentError("--read-trace, --write-trace: a trace is of one cell, say which by --cell");
  }
  return cells;
}

// The stream that `make` generates, or the one in the file.
template <class Make>
absl::StatusOr<OperationStream> StreamOf(const Options& options, Make&& make) {
  absl::StatusOr<OperationStream> stream =
      options.read_trace.empty() ? absl::StatusOr<OperationStream>(make()) : ReadStream(options.read_trace);
  if (!stream.ok()) {
    return absl::Status(stream.status().code(), absl::StrCat("--read-trace: ", stream.status().message()));
  }
  if (stream->records.empty()) return absl::InvalidArgumentError("--read-trace: no records");
  if (!options.write_trace.empty()) {
    if (absl::Status status = WriteStream(options.write_trace, *stream); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("--write-trace: ", status.message()));
    }
  }
  return stream;
}

absl::StatusOr<Report> RunGrid(const Options& options) {
  absl::StatusOr<std::vector<GridCell>> cells = Cells(options);
  if (!cells.ok()) return cells.status();
  Report report;
  std::vector<float> match_ns;
  double rate = std::numeric_limits<double>::infinity(), per_holder = 0, per_distinct = 0;
  bool exact = true;
  for (const GridCell& cell : *cells) {
    absl::StatusOr<OperationStream> stream = StreamOf(options, [&] { return MakeGrid(cell, options.bench.workload); });
    if (!stream.ok()) return stream.status();
    absl::StatusOr<Report> part = BenchGrid(cell, *stream, options.bench, match_ns);
    if (!part.ok()) return part.status();
    const auto& json = part->json();
    rate = std::min(rate, json["block_ops_per_s"].get<double>());
    per_holder = std::max(per_holder, json["bytes_per_holder_block"].get<double>());
    per_distinct = std::max(per_distinct, json["bytes_per_distinct_block"].get<double>());
    exact = exact && json["exact"].get<bool>();
    report.Add(std::string(cell.name), *part);
  }
  report.Figure("block_ops_per_s", rate, "/s, stored and removed, the slowest cell");
  report.Figure("lookup_p50_ns", Quantile(match_ns, 0.5), "ns, all cells");
  report.Figure("lookup_p99_ns", Quantile(match_ns, 0.99), "ns, all cells");
  report.Figure("bytes_per_holder_block", per_holder, "B, the largest cell's");
  report.Figure("bytes_per_distinct_block", per_distinct, "B, the largest cell's");
  report.Flag("exact", exact);
  return report;
}

absl::StatusOr<Report> RunWorkload(const std::string& name, const Options& options) {
  if (name == "grid") return RunGrid(options);
  if (name == "mooncake") {
    absl::StatusOr<OperationStream> stream = absl::UnknownError("");
    if (options.read_trace.empty()) {
      if (options.trace.empty()) return absl::InvalidArgumentError("mooncake: want --trace FILE or --read-trace FILE");
      const absl::StatusOr<tokroute::tools::Trace> trace = tokroute::tools::ReadTraceFile(options.trace);
      if (!trace.ok()) return absl::Status(trace.status().code(), absl::StrCat("--trace: ", trace.status().message()));
      stream = StreamOf(options, [&] { return MakeMooncake(*trace, options.bench.workload); });
    } else {
      stream = StreamOf(options, [] { return OperationStream(); });
    }
    if (!stream.ok()) return stream.status();
    return BenchMooncake(*stream, options.bench);
  }
  const bool pinned = name == "pinned";
  absl::StatusOr<OperationStream> stream = StreamOf(
      options, [&] { return pinned ? MakePinned(options.bench.workload) : MakeChurn(options.bench.workload); });
  if (!stream.ok()) return stream.status();
  return pinned ? BenchPinned(*stream, options.bench) : BenchChurn(*stream, options.bench);
}

int Run(const std::string& name, const Options& options) {
  for (const auto& [option, path] : {std::pair("--json", options.json), {"--write-trace", options.write_trace}}) {
    if (path.empty()) continue;
    for (const auto& [other, input] : {std::pair("--trace", options.trace), {"--read-trace", options.read_trace}}) {
      std::error_code error;
      if (input.empty() || !std::filesystem::equivalent(path, input, error)) continue;
      return Complain(absl::InvalidArgumentError(absl::StrCat(option, ": want another file than ", other)));
    }
    if (const absl::Status status = tokroute::tools::CheckWritable(path); !status.ok()) {
      return Complain(absl::InvalidArgumentError(absl::StrCat(option, ": ", status.message())));
    }
  }
  KeepFreedMemory();
  absl::StatusOr<Report> result = RunWorkload(name, options);
  if (!result.ok()) return Complain(result.status());
  Report& report = *result;
  report.Text("workload", name);
  report.Figure("scale", options.bench.workload.scale, "");
  report.json()["seed"] = options.bench.workload.seed;
  report.Line(absl::StrCat("seed                               ", options.bench.workload.seed));
  if (!options.json.empty()) {
    if (const absl::Status status = tokroute::tools::WriteFile(options.json, report.Json()); !status.ok()) {
      std::cerr << "tokroute-index-bench: --json: " << status.message() << '\n';
      return kFailed;
    }
  }
  report.Print(std::cout);
  std::cout << std::flush;
  if (!std::cout) {
    std::cerr << "tokroute-index-bench: cannot write to standard output\n";
    return kFailed;
  }
  return report.Failed(options.check) ? kFailed : kOk;
}

CLI::App* AddWorkload(CLI::App& tool, const std::string& name, const std::string& help, Options& options) {
  CLI::App* const app = tool.add_subcommand(name, help);
  app->footer(kExitStatus);
  AddNumber<double>(*app, "--scale", options.bench.workload.scale, {0, 1, true}, "", "How much of the whole workload");
  AddNumber<std::uint64_t>(*app, "--seed", options.bench.workload.seed, {0, std::numeric_limits<std::uint64_t>::max()},
                           "", "Of the generator");
  AddNumber<int>(*app, "--repetitions", options.bench.repetitions, {1, 100}, "", "Of what is timed");
  app->add_flag("--check", options.check, "Fail if a limit is missed");
  const auto add_file = [&](const std::string& option, std::string& path, const std::string& what) {
    return app->add_option(option, path, what)->type_name("FILE")->check(RefuseEmpty);
  };
  add_file("--json", options.json, "Also write everything to FILE, which appears complete or not at all");
  add_file("--write-trace", options.write_trace, "Write the operations to FILE, for other indexes");
  add_file("--read-trace", options.read_trace, "Take the operations from such a FILE instead of generating them");
  return app;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App tool("Measures the prefix index in exact mode and compares its answers with a set of keys per endpoint.",
                  "tokroute-index-bench");
    tool.set_version_flag("--version", "tokroute-index-bench " TOKROUTE_VERSION);
    tool.require_subcommand(1);
    Options options;
    CLI::App* const mooncake = AddWorkload(
        tool, "mooncake", "A request trace on 128 endpoints with LRU caches; a writer and a reader", options);
    mooncake->add_option("--trace", options.trace, "Request trace in the Mooncake JSONL format")
        ->type_name("FILE")
        ->check(RefuseEmpty);
    AddNumber<double>(*mooncake, "--window-ms", options.bench.window_ms, {1, 1e7}, "ms",
                      "Of the replay by deadlines that nobody keeps up with");
    AddNumber<double>(*mooncake, "--slow-window-ms", options.bench.slow_window_ms, {1, 1e7}, "ms",
                      "Of the one that should be kept up with");
    CLI::App* const pinned =
        AddWorkload(tool, "pinned", "10 M held blocks on 256 endpoints, then 2 % of them lost", options);
    pinned->add_flag("--engine-keys", options.bench.engine_keys,
                     "Events call blocks by names of the engines', look-ups by keys of ours");
    CLI::App* const grid =
        AddWorkload(tool, "grid", "Sizes of fleet and cache, prompts, runs on their paths, warm endpoints", options);
    grid->add_option("--cell", options.cells, "Only this cell (may be repeated), such as 128x20k")->type_name("NAME");
    grid->add_flag("--full", options.full, "Also 1024 endpoints of 60,000 blocks");
    AddWorkload(tool, "churn", "Endpoints come and go under load; late parents, duplicates, holes, the cap", options);
    try {
      tool.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return tool.exit(error);  // --help and --version.
      std::cerr << error.what() << "\nRun with --help for more.\n";
      return kBadInput;
    }
    return Run(tool.get_subcommands().front()->get_name(), options);
  } catch (const std::bad_alloc&) {
    std::cerr << "tokroute-index-bench: out of memory\n";
  } catch (const std::exception& error) {
    std::cerr << "tokroute-index-bench: " << error.what() << '\n';
  }
  return kFailed;
}

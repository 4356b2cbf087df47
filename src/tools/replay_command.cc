#include "command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "number_option.h"
#include "tokroute/fwd.h"
#include "tokroute/prefix/block_key.h"
#include "tools/sim/replay.h"
#include "tools/sim/report.h"
#include "tools/sim/trace.h"
#include "tools/sim/workload.h"

namespace tokroute::tools {
namespace {

constexpr int kOk = 0, kFailed = 1, kBadInput = 2;
constexpr std::string_view kSharedPrefix = "shared-prefix", kConversations = "conversations";

constexpr std::string_view kModel =
    R"(An endpoint prefills one prompt at a time, first come first served, at a fixed rate, then decodes at a fixed rate
however many responses run, and keeps an LRU prefix cache. There is no other overhead: a prompt that is cached in
full has a TTFT of almost 0. The policies are the library's own. Time is virtual: the same options and seed give the
same table and JSON, byte for byte; wall-clock figures go to standard error.

)";
constexpr std::string_view kExitStatus = R"(
Exit status: 0; 1 if the replay or writing its results failed; 2 if an option or the trace is wrong.)";

struct ReplayCommand {
  // What the options fill in. 0: not given, where the comment says so.
  std::string trace, workload{kSharedPrefix}, policies, json;
  std::int64_t limit = 0;     // 0: all lines.
  std::int64_t requests = 0;  // 0 and no duration: kDefaultRequests.
  double duration_s = 0;
  double qps = 0;               // 0: the workload's default.
  std::int32_t block_size = 0;  // 0: 16, or a trace's 512.
  double rate_scale = 1;
  bool skip_bad_lines = false, keep_stamps = false;
  ReplayOptions options;

  static constexpr std::int64_t kDefaultRequests = 1500;  // Two rounds of the shared-prefix workload's 750 prompts.
  // Eight endpoints of the default speed are then busy enough for policies to differ, and none drowns for ever.
  static constexpr double kSharedPrefixQps = 20, kConversationsQps = 30;

  absl::StatusOr<Workload> MakeWorkload(ReplayInputs& inputs);
  int Run();
};

int BadInput(std::string_view message) {
  std::cerr << message << "\n";
  return kBadInput;
}
int BadInput(const absl::Status& status) { return BadInput(std::string(status.message())); }

// For Option::check: an empty name must not pass for an option that was not given.
std::string RefuseEmpty(const std::string& value) { return value.empty() ? "want a file name, got ''" : ""; }

// The names to run, or what is wrong with the list.
absl::StatusOr<std::vector<std::string>> ParsePolicies(const std::string& list) {
  const std::vector<std::string> known = PolicyNames();
  std::vector<std::string> names;
  for (const std::string& name : std::vector<std::string>(absl::StrSplit(list, ','))) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--policies: want names out of ", absl::StrJoin(known, ", "), ", got '", name, "'"));
    }
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return absl::InvalidArgumentError(absl::StrCat("--policies: want each name once, got '", name, "' twice"));
    }
    names.push_back(name);
  }
  return names;
}

// "prefill-bound  42 %", on terminals only.
class ProgressBar {
 public:
  ProgressBar(std::string_view policy, std::int64_t requests)
      : policy_(policy), requests_(requests), shown_(::isatty(STDERR_FILENO) != 0) {}
  ~ProgressBar() {
    if (shown_) std::cerr << "\r\x1b[K" << std::flush;
  }
  void Update(std::int64_t done) {
    const std::int64_t percent = done * 100 / requests_;
    if (!shown_ || percent == percent_) return;
    percent_ = percent;
    constexpr std::int64_t kWidth = 40;
    const auto filled = static_cast<std::size_t>(percent * kWidth / 100);
    std::cerr << "\r\x1b[K" << absl::StrFormat("%-18s [%-40s] %3d %%", policy_, std::string(filled, '#'), percent)
              << std::flush;
  }

 private:
  std::string policy_;
  std::int64_t requests_;
  bool shown_;
  std::int64_t percent_ = -1;
};

absl::StatusOr<Workload> ReplayCommand::MakeWorkload(ReplayInputs& inputs) {
  if (!trace.empty()) {
    if (block_size != 0 && block_size != kTraceBlockTokens) {
      return absl::InvalidArgumentError(absl::StrCat("--block-size: want ", kTraceBlockTokens,
                                                     " with --trace, whose ids stand for so many tokens, got ",
                                                     block_size));
    }
    absl::StatusOr<Trace> read = ReadTraceFile(trace, {.skip_bad_lines = skip_bad_lines, .limit = limit});
    if (!read.ok()) {
      // A bad line is found by the file's name and the line's number, which editors understand; the rest by the
      // option's.
      if (absl::IsInvalidArgument(read.status())) return read.status();
      return absl::NotFoundError(absl::StrCat("--trace: ", read.status().message()));
    }
    if (read->skipped_lines > 0) {
      std::cerr << "Bad lines skipped: " << read->skipped_lines << "\n";
      for (const std::string& line : read->skipped) std::cerr << "  " << line << "\n";
      if (static_cast<std::size_t>(read->skipped_lines) > read->skipped.size()) std::cerr << "  ...\n";
    }
    inputs.trace = read->name;
    inputs.skipped_lines = read->skipped_lines;
    return MakeTraceWorkload(*read, options.seed, !keep_stamps);
  }
  const bool conversations = workload == kConversations;
  inputs.qps = qps != 0 ? qps : conversations ? kConversationsQps : kSharedPrefixQps;
  GeneratorOptions generator{.requests = requests, .duration_s = duration_s, .qps = inputs.qps};
  if (requests == 0 && duration_s == 0) generator.requests = kDefaultRequests;
  const WorkloadOptions made{.block_size = block_size != 0 ? block_size : kDefaultBlockSize, .seed = options.seed};
  absl::StatusOr<Workload> result =
      conversations ? MakeConversations(generator, made) : MakeSharedPrefix(generator, made);
  if (!result.ok()) return absl::InvalidArgumentError(absl::StrCat("--", result.status().message()));
  return result;
}

int ReplayCommand::Run() {
  absl::StatusOr<std::vector<std::string>> names = ParsePolicies(policies);
  if (!names.ok()) return BadInput(names.status());
  if (workload != kSharedPrefix && workload != kConversations) {
    return BadInput(absl::StrCat("--workload: want ", std::string(kSharedPrefix), " or ", std::string(kConversations),
                                 ", got '", workload, "'"));
  }
  if (!json.empty()) {
    std::error_code error;
    if (!trace.empty() && std::filesystem::equivalent(json, trace, error)) {
      return BadInput(absl::StrCat("--json: want another file than the trace, got '", json, "'"));
    }
    if (absl::Status status = CheckWritable(json); !status.ok())
      return BadInput(absl::StrCat("--json: ", status.message()));
  }
  ReplayInputs inputs{.keep_stamps = keep_stamps, .rate_scale = rate_scale, .options = options};
  absl::StatusOr<Workload> made = MakeWorkload(inputs);
  if (!made.ok()) return BadInput(made.status());
  if (absl::Status status = ScaleArrivals(rate_scale, *made); !status.ok()) {
    return BadInput(absl::StrCat("--rate-scale: ", status.message()));
  }
  if (options.capacity_tokens < made->block_size) {
    return BadInput(absl::StrCat("--capacity-tokens: want at least a block of ", made->block_size, " tokens, got ",
                                 options.capacity_tokens));
  }
  inputs.workload = made->name;
  inputs.requests = static_cast<std::int64_t>(made->requests.size());
  inputs.block_size = made->block_size;

  std::vector<PolicyResult> results;
  for (const std::string& name : *names) {
    absl::StatusOr<PolicyResult> result = [&] {
      ProgressBar bar(name, inputs.requests);
      return ReplayPolicy(*made, options, name, [&](std::int64_t done) { bar.Update(done); });
    }();
    if (!result.ok()) {
      std::cerr << result.status().message() << "\n";
      return absl::IsInvalidArgument(result.status()) ? kBadInput : kFailed;
    }
    std::cerr << absl::StrFormat("%-18s %.2f s, %.0f decisions/s\n", name, result->run_seconds,
                                 static_cast<double>(result->requests) / std::max(result->decide_seconds, 1e-9));
    if (!result->first_refusal.empty()) {
      std::cerr << "  " << result->requests - result->succeeded << " refused, the first: " << result->first_refusal
                << "\n";
    }
    results.push_back(*std::move(result));
  }
  if (!json.empty()) {
    if (absl::Status status = WriteFile(json, FormatJson(inputs, results)); !status.ok()) {
      std::cerr << "--json: " << status.message() << "\n";
      return kFailed;
    }
  }
  std::cout << FormatTable(inputs, results) << std::flush;
  if (!std::cout) {
    std::cerr << "cannot write the table to standard output\n";
    return kFailed;
  }
  return kOk;
}

}  // namespace

Command AddReplayCommand(CLI::App& tool) {
  auto command = std::make_shared<ReplayCommand>();
  ReplayCommand& c = *command;
  c.policies = absl::StrJoin(PolicyNames(), ",");
  CLI::App& app =
      *tool.add_subcommand("replay",
                           "Route a request stream over simulated endpoints and compare policies. Without options: a\n"
                           "generated workload, all policies, 8 endpoints");
  app.footer(std::string(kModel) + std::string(TableLegend()) + std::string(kExitStatus));
  constexpr std::int64_t kTrillion = 1'000'000'000'000;

  auto* trace = app.add_option("--trace", c.trace, "Request trace in the Mooncake JSONL format, instead of a generator")
                    ->type_name("FILE")
                    ->check(RefuseEmpty)
                    ->group("Requests from a trace");
  const auto of_trace = [&](CLI::Option* option) { option->needs(trace)->group("Requests from a trace"); };
  of_trace(AddNumber<std::int64_t>(app, "--limit", c.limit, {1, kTrillion}, "requests", "Only the first N requests")
               ->default_str("all"));
  of_trace(
      app.add_flag("--skip-bad-lines", c.skip_bad_lines, "Leave malformed lines out and say so, instead of stopping"));
  of_trace(
      app.add_flag("--keep-stamps", c.keep_stamps,
                   "Replay equal time stamps as one burst; else they are spread up to the next stamp,\nat most 3 s"));

  const std::string generated = "Generated requests";
  const auto of_generator = [&](CLI::Option* option) { return option->excludes(trace)->group(generated); };
  of_generator(app.add_option("--workload", c.workload,
                              "shared-prefix: 150 groups x 5 prompts of 6000 shared + 1200 own tokens, 1000 out,\n"
                              "in one shuffled order again and again; conversations: multi-turn, each prompt with\n"
                              "everything before it")
                   ->type_name("NAME")
                   ->capture_default_str());
  auto* requests = of_generator(AddNumber<std::int64_t>(app, "--requests", c.requests, {1, kMaxGeneratedRequests}, "",
                                                        "Stop after N requests; conversations need 11 kB for each")
                                    ->default_str(absl::StrCat(ReplayCommand::kDefaultRequests)));
  of_generator(AddNumber<double>(app, "--duration", c.duration_s, {0, 1e8, true}, "s",
                                 "Stop after that much virtual time, instead of --requests")
                   ->default_str(""))
      ->excludes(requests);
  of_generator(AddNumber<double>(app, "--qps", c.qps, {0, 1e6, true}, "requests/s", "Mean rate of arrivals")
                   ->default_str(absl::StrCat(ReplayCommand::kSharedPrefixQps,
                                              "; conversations: ", ReplayCommand::kConversationsQps)));

  const std::string fleet = "Fleet and policies";
  app.add_option("--policies", c.policies, "Names, separated by commas")
      ->type_name("A,B")
      ->capture_default_str()
      ->group(fleet);
  const auto of_fleet = [&](CLI::Option* option) { option->group(fleet); };
  of_fleet(AddNumber<std::int64_t>(app, "--endpoints", c.options.endpoints, {1, kMaxEndpoints}, "endpoints",
                                   "Simulated endpoints"));
  of_fleet(AddNumber<double>(app, "--peak-prefill-throughput", c.options.peak_prefill_throughput, {1, 1e9}, "tokens/s",
                             "Of an endpoint, and what the gate is told"));
  of_fleet(AddNumber<std::int64_t>(app, "--max-ttft-penalty-ms", c.options.max_ttft_penalty_ms, {1, 1'000'000'000},
                                   "ms", "Longest extra TTFT worth paying for a warm endpoint"));
  of_fleet(AddNumber<double>(app, "--decode-tokens-per-s", c.options.decode_tokens_per_s, {0.001, 1e6}, "tokens/s",
                             "Of one response"));
  of_fleet(AddNumber<std::int64_t>(app, "--max-running", c.options.max_running, {0, 1'000'000}, "requests",
                                   "Most requests in prefill and decode per endpoint; 0: no limit"));
  of_fleet(AddNumber<std::int64_t>(app, "--capacity-tokens", c.options.capacity_tokens, {16, std::int64_t{1} << 40},
                                   "tokens", "Prefix cache of an endpoint"));
  of_fleet(AddNumber<std::int32_t>(app, "--block-size", c.block_size, {kMinBlockSize, kMaxBlockSize}, "tokens",
                                   "Of cache and index; with --trace always 512")
               ->default_str("16"));

  AddNumber<double>(app, "--rate-scale", c.rate_scale, {0, 1e9, true}, "", "Arrivals come that many times as fast");
  AddNumber<std::uint64_t>(app, "--seed", c.options.seed, {0, std::numeric_limits<std::uint64_t>::max()}, "",
                           "Of the generators and the routers");
  app.add_option("--json", c.json, "Also write everything to FILE, which appears complete or not at all")
      ->type_name("FILE")
      ->check(RefuseEmpty);
  return {.app = &app, .run = [command] { return command->Run(); }};
}

}  // namespace tokroute::tools

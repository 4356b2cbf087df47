#include "tools/index_bench/bench.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/index_bench/measure.h"
#include "tools/index_bench/random.h"
#include "tools/index_bench/statistics.h"

namespace tokroute::index_bench {
namespace {

constexpr std::int64_t kMostCompared = 30'000;

std::vector<float> TimesOf(const std::vector<MatchTime>& matches) {
  std::vector<float> ns;
  ns.reserve(matches.size());
  for (const MatchTime& match : matches) ns.push_back(match.ns);
  return ns;
}

double Ratio(double value, double floor) { return floor > 0 ? value / floor : 0; }

void AddVerified(const Verified& verified, Report& report) {
  report.Flag("exact", verified.mismatched == 0 && verified.compared > 0);
  report.Count("compared", verified.compared);
  report.Count("mismatched", verified.mismatched);
  if (verified.mismatched > 0) report.Fail(absl::StrCat("not exact: ", verified.first_mismatch));
  if (verified.compared == 0) report.Fail("no lookup was compared");
  for (const auto& [name, value] : verified.stats.counters) report.json()["index"][name] = value;
  report.Figure("bytes_after_removal", static_cast<double>(verified.bytes_after_removal), "B");
  report.Figure("peak_bytes", static_cast<double>(verified.peak_bytes), "B");
}

void AddFloors(const Timed& timed, Report& report) {
  report.Figure("miss_ns", timed.miss_ns, "ns");
  report.Figure("line_ns", timed.line_ns, "ns");
  report.Figure("floor_bytes", static_cast<double>(timed.floor_bytes), "B");
  report.Figure("timer_ns", timed.timer_ns, "ns, taken off every time");
}

void AddLookups(const std::vector<float>& ns, double miss_ns, Report& report) {
  const double p50 = Quantile(ns, 0.5), p99 = Quantile(ns, 0.99);
  report.Count("lookups_timed", static_cast<std::int64_t>(ns.size()));
  report.Figure("lookup_p50_ns", p50, "ns");
  report.Figure("lookup_p99_ns", p99, "ns");
  if (miss_ns > 0) {
    report.Figure("lookup_p50_misses", p50 / miss_ns, "misses");
    report.Figure("lookup_p99_misses", p99 / miss_ns, "misses");
  }
}

void AddWrites(const OperationStream& stream, const Timed& timed, Report& report) {
  // Stores of the first phase, which fills the index; removals of the first that has any.
  const double store_ns = timed.phases.front().StoreNsPerBlock();
  report.Figure("store_ns_per_block", store_ns, "ns");
  report.Figure("store_lines_per_block", Ratio(store_ns, timed.line_ns), "lines");
  for (const WritePhase& phase : timed.phases) {
    if (phase.removed_blocks == 0) continue;
    report.Figure("remove_ns_per_block", phase.RemoveNsPerBlock(), "ns");
    report.Figure("remove_lines_per_block", Ratio(phase.RemoveNsPerBlock(), timed.line_ns), "lines");
    break;
  }
  report.Figure("quiet_write_block_ops_per_s", timed.WriteRate(stream, 0, stream.records.size()), "/s");
}

void AddSize(const Checkpoint& checkpoint, Report& report) {
  report.Count("distinct_blocks", checkpoint.distinct_blocks);
  report.Count("holder_blocks", checkpoint.holder_blocks);
  report.Figure("counted_bytes", static_cast<double>(checkpoint.counted_bytes), "B");
  report.Figure("stats_bytes", static_cast<double>(checkpoint.stats_bytes), "B");
  report.Figure("bytes_per_holder_block", checkpoint.BytesPerHolderBlock(), "B");
  report.Figure("bytes_per_distinct_block", checkpoint.BytesPerDistinctBlock(), "B");
}

void AddAllocations(const Timed& timed, Report& report) {
  report.Count("lookup_allocations", timed.match_allocations);
  report.Limit({"allocations by all lookups", static_cast<double>(timed.match_allocations), 0});
}

// The slowest event of a kind against the median, among those of the commonest number of blocks. Once the memory is
// faulted in: each event's least time over the repetitions, so that what remains is the index's own.
struct Longest {
  double median_ns = 0, most_ns = 0;
  std::size_t record = 0;
};
Longest LongestOf(const OperationStream& stream, const Timed& timed, std::span<const WritePhase> phases,
                  OperationKind kind) {
  std::map<std::uint32_t, std::size_t> sizes;
  const auto each = [&](const auto& visit) {
    for (const WritePhase& phase : phases) {
      for (std::size_t i = phase.begin; i < phase.end; ++i) {
        if (stream.records[i].kind == kind) visit(i);
      }
    }
  };
  each([&](std::size_t i) { ++sizes[stream.records[i].key_count]; });
  if (sizes.empty()) return {};
  const std::uint32_t size = std::max_element(sizes.begin(), sizes.end(), [](const auto& a, const auto& b) {
                               return a.second < b.second;
                             })->first;
  Longest longest;
  std::vector<float> ns;
  each([&](std::size_t i) {
    if (stream.records[i].key_count != size || timed.write_ns[i] == 0) return;
    ns.push_back(timed.write_ns[i]);
    if (static_cast<double>(ns.back()) <= longest.most_ns) return;
    longest.most_ns = static_cast<double>(ns.back());
    longest.record = i;
  });
  longest.median_ns = Median(ns);
  return longest;
}

void AddLongest(const OperationStream& stream, const Timed& timed, std::span<const WritePhase> phases, int repetitions,
                Report& report) {
  for (const auto& [kind, name] : {std::pair(OperationKind::kStore, "store"), {OperationKind::kRemove, "remove"}}) {
    const Longest longest = LongestOf(stream, timed, phases, kind);
    if (longest.median_ns == 0) continue;
    report.Figure(absl::StrCat(name, "_event_p50_ns"), longest.median_ns, "ns");
    report.Figure(absl::StrCat(name, "_event_max_ns"), longest.most_ns, absl::StrCat("ns, record ", longest.record));
    // A single repetition's would be page faults and preemption.
    if (repetitions == 1) continue;
    report.Limit({absl::StrCat("longest ", name, " event, in medians"), longest.most_ns / longest.median_ns, 20});
  }
  report.Count("samples_left_out", timed.preempted);
}

void AddConcurrent(const std::string& name, const Concurrent& run, double window_s, Report& report) {
  Report part;
  part.Figure("block_ops_per_s", run.Rate(), "/s");
  part.Figure("seconds", run.seconds, "s");
  if (window_s > 0) {
    part.Figure("window_s", window_s, "s");
    // The usual limits: everything begun within 1.01 windows, and done within 1.10.
    part.Figure("worst_lag", run.issue_lag, "windows");
    part.Flag("kept_up", run.seconds <= 1.10 * window_s);
  }
  AddLookups(run.match_ns, 0, part);
  report.Add(name, part);
}

// Full beyond its cap the index may refuse, but must neither credit what it was not told of nor take more than its cap.
absl::StatusOr<std::int64_t> MeetCap(std::uint64_t seed, Report& report) {
  constexpr std::int64_t kCap = 4 << 20;
  constexpr std::uint32_t kEndpoints = 8, kBlocks = 256, kBatch = 64;
  constexpr int kChains = 20'000;
  absl::StatusOr<Subject> subject = Subject::Create(16, kCap);
  if (!subject.ok()) return subject.status();
  OperationStream stream;
  stream.endpoints = kEndpoints;
  Random random(seed);
  FreshKeys fresh(seed ^ 0x3C6EF372FE94F82Bu);
  std::vector<KeyRange> chains;
  std::int64_t refused = 0, over_credited = 0, most_bytes = 0;
  int after = 64;  // Chains that follow the first refusal.
  for (int i = 0; i < kChains && after > 0; ++i) {
    std::vector<BlockKey> keys(kBlocks);
    for (BlockKey& key : keys) key = fresh.Next();
    chains.push_back(stream.AddKeys(keys));
    stream.StoreChain({static_cast<std::uint32_t>(random.Below(kEndpoints)), 1}, chains.back(), 0, kBlocks, kBatch);
    for (std::size_t r = stream.records.size() - kBlocks / kBatch; r < stream.records.size(); ++r) {
      if (!subject->Apply(stream.records[r], stream.KeysOf(stream.records[r]))) ++refused;
    }
    if (refused > 0) --after;
    most_bytes = std::max(most_bytes, subject->Stats().bytes);
  }
  Reference reference(kEndpoints);
  for (const Operation& operation : stream.records) reference.Apply(operation, stream.KeysOf(operation));
  Subject::Lookup lookup(*subject);
  std::vector<Holder> told;
  for (const KeyRange chain : chains) {
    lookup.Load(stream.KeysOf(chain));
    lookup.Match();
    reference.Match(stream.KeysOf(chain), told);
    for (const Holder& holder : lookup.holders()) {
      const auto same = std::find_if(told.begin(), told.end(),
                                     [&](const Holder& other) { return other.endpoint == holder.endpoint; });
      if (same == told.end() || holder.blocks > same->blocks) ++over_credited;
    }
  }
  if (over_credited > 0) report.Fail(absl::StrCat("at the cap, credited too much: ", over_credited));
  if (most_bytes > kCap) report.Fail(absl::StrCat("took ", most_bytes, " bytes of ", kCap));
  return std::max(refused, subject->Stats().cap_hits);
}

// What every workload begins with.
struct Runs {
  Verified verified;
  Timed timed;
};
absl::StatusOr<Runs> Run(const OperationStream& stream, const BenchOptions& options, TimedOptions timed_options) {
  absl::StatusOr<Verified> verified = Verify(stream, kMostCompared, options.engine_keys);
  if (!verified.ok()) return verified.status();
  timed_options.repetitions = options.repetitions;
  timed_options.engine_keys = options.engine_keys;
  timed_options.floor_bytes = verified->peak_bytes;
  timed_options.seed = options.workload.seed;
  absl::StatusOr<Timed> timed = Time(stream, timed_options);
  if (!timed.ok()) return timed.status();
  return Runs{*std::move(verified), *std::move(timed)};
}

// The best of several, as fast as possible.
absl::StatusOr<Concurrent> Fastest(const OperationStream& stream, int repetitions) {
  absl::StatusOr<Concurrent> fastest = RunConcurrently(stream, 0);
  for (int i = 1; i < repetitions && fastest.ok(); ++i) {
    absl::StatusOr<Concurrent> run = RunConcurrently(stream, 0);
    if (!run.ok() || run->seconds < fastest->seconds) fastest = std::move(run);
  }
  return fastest;
}

// What remains of the index's memory when all endpoints are gone, against the most it had.
void AddBackToBase(const Verified& verified, Report& report) {
  const std::int64_t grown = verified.bytes_after_removal - verified.bytes_at_start;
  report.Limit({"memory left after removing everything, MiB", static_cast<double>(grown) / (1 << 20), 4});
}

}  // namespace

absl::StatusOr<Report> BenchMooncake(const OperationStream& stream, const BenchOptions& options) {
  absl::StatusOr<Runs> runs = Run(stream, options, {});
  if (!runs.ok()) return runs.status();
  const auto& [verified, timed] = *runs;
  const absl::StatusOr<Concurrent> fastest = Fastest(stream, options.repetitions);
  if (!fastest.ok()) return fastest.status();
  Report report;
  report.Figure("block_ops_per_s", fastest->Rate(), "/s, as fast as possible");
  report.Count("block_ops", fastest->block_ops);
  AddLookups(fastest->match_ns, timed.miss_ns, report);
  AddSize(timed.checkpoints.back(), report);
  AddVerified(verified, report);
  AddFloors(timed, report);
  AddWrites(stream, timed, report);
  report.Figure("lines_per_block_op", Ratio(1e9 / fastest->Rate(), timed.line_ns), "lines");
  const std::vector<float> quiet = TimesOf(timed.matches);
  report.Figure("quiet_lookup_p50_ns", Quantile(quiet, 0.5), "ns");
  report.Figure("quiet_lookup_p99_ns", Quantile(quiet, 0.99), "ns");
  for (const auto& [name, ms] : {std::pair("by_deadline", options.window_ms), {"keep_up", options.slow_window_ms}}) {
    absl::StatusOr<Concurrent> run = RunConcurrently(stream, ms / 1e3);
    if (!run.ok()) return run.status();
    AddConcurrent(name, *run, ms / 1e3, report);
  }
  report.MustExercise("forks", verified.exercised.forks);
  report.json()["exercised"]["holes"] = verified.exercised.holes;
  report.json()["exercised"]["evicted_middles"] = verified.exercised.evicted_middles;
  report.json()["exercised"]["late_parents"] = verified.exercised.late_parents;
  report.json()["exercised"]["cap_hits"] = verified.stats.cap_hits;
  report.Limit({"drained block operations/s", fastest->Rate(), 15e6, true});
  AddAllocations(timed, report);
  return report;
}

absl::StatusOr<Report> BenchPinned(const OperationStream& stream, const BenchOptions& options) {
  absl::StatusOr<Runs> runs = Run(stream, options, {});
  if (!runs.ok()) return runs.status();
  const auto& [verified, timed] = *runs;
  // Before and after the fragmentation; a foreign file may have one part only.
  const std::size_t second = timed.checkpoints.size() > 1 ? timed.checkpoints[1].record : stream.records.size();
  std::vector<float> whole, fragmented;
  std::map<std::string, std::vector<float>> by_holders;
  for (const MatchTime& match : timed.matches) {
    (match.record < second ? whole : fragmented).push_back(match.ns);
    const std::uint32_t holders = timed.holders[match.record];
    by_holders[absl::StrCat(match.record < second ? "" : "fragmented_", holders <= 1   ? "single_holder"
                                                                        : holders <= 8 ? "up_to_8_holders"
                                                                                       : "many_holders")]
        .push_back(match.ns);
  }
  Report report;
  report.Figure("block_ops_per_s", timed.WriteRate(stream, 0, timed.phases.front().end), "/s, stored and removed");
  AddLookups(whole, timed.miss_ns, report);
  AddSize(timed.checkpoints.front(), report);
  AddVerified(verified, report);
  AddFloors(timed, report);
  AddWrites(stream, timed, report);
  for (const auto& [name, ns] : by_holders) {
    report.Figure(absl::StrCat(name, "_p50_ns"), Quantile(ns, 0.5), "ns");
    report.Figure(absl::StrCat(name, "_p99_ns"), Quantile(ns, 0.99), "ns");
  }
  if (timed.checkpoints.size() > 1) {
    Report part;
    AddLookups(fragmented, timed.miss_ns, part);
    AddSize(timed.checkpoints[1], part);
    report.Add("fragmented", part);
  }
  report.MustExercise("forks", verified.exercised.forks);
  report.MustExercise("holes", verified.exercised.holes);
  report.MustExercise("evicted_middles", verified.exercised.evicted_middles);
  report.MustExercise("duplicates", verified.exercised.duplicates);
  report.Limit({"bytes per holder-block", timed.checkpoints.front().BytesPerHolderBlock(),
                options.engine_keys ? 24.0 : 18.0});
  AddAllocations(timed, report);
  AddBackToBase(verified, report);
  return report;
}

absl::StatusOr<Report> BenchGrid(const GridCell& cell, const OperationStream& stream, const BenchOptions& options,
                                 std::vector<float>& match_ns) {
  TimedOptions timed_options{.match_rounds = options.workload.scale < 0.1 ? 5 : 100, .scrub_matches = 8};
  absl::StatusOr<Runs> runs = Run(stream, options, timed_options);
  if (!runs.ok()) return runs.status();
  const auto& [verified, timed] = *runs;
  std::map<GridClass, std::vector<float>> classes;
  std::vector<float> all, longest_prompts, longest_prompts_few;  // Few: up to 8 endpoints warm.
  for (const MatchTime& match : timed.matches) {
    const Operation& operation = stream.records[match.record];
    if (operation.tag != 0) classes[ClassOf(operation.tag)].push_back(match.ns);
    if (operation.key_count == kGridPrompts.back()) {
      longest_prompts.push_back(match.ns);
      if (timed.holders[match.record] <= 8) longest_prompts_few.push_back(match.ns);
    }
    all.push_back(match.ns);
  }
  match_ns.insert(match_ns.end(), all.begin(), all.end());
  Report report;
  // What is stored to be looked up is not in it: most of that is known already.
  std::vector<WritePhase> phases = timed.phases;
  if (phases.size() > 1) phases.erase(phases.begin() + 1);
  double seconds = 0, blocks = 0;
  for (const WritePhase& phase : phases) {
    for (std::size_t i = phase.begin; i < phase.end; ++i) {
      seconds += static_cast<double>(timed.write_ns[i]) / 1e9;
      if (!stream.records[i].is_match()) blocks += stream.records[i].key_count;
    }
  }
  report.Figure("block_ops_per_s", Ratio(blocks, seconds), "/s, stored and removed");
  AddLookups(all, timed.miss_ns, report);
  AddSize(timed.checkpoints.front(), report);
  AddVerified(verified, report);
  AddFloors(timed, report);
  AddWrites(stream, timed, report);
  AddLongest(stream, timed, phases, options.repetitions, report);
  double few_runs = 0, few_runs_all = 0, many_runs = 0, growth = 0;
  std::string few_name, few_name_all, many_name, growth_name;
  report.json()["classes"] = nlohmann::ordered_json::array();
  report.Line("prompt blocks, warm endpoints, runs, hit %: lookup p50 / p99 ns, p50 in misses");
  for (const auto& [c, ns] : classes) {
    const double p50 = Quantile(ns, 0.5), p99 = Quantile(ns, 0.99), misses = Ratio(p50, timed.miss_ns);
    const std::string warm = c.warm_endpoints == 0 ? "all" : absl::StrCat(c.warm_endpoints);
    const std::string name = absl::StrFormat("%5d %4s %4d %4d", c.prompt_blocks, warm, c.runs, c.hit_percent);
    report.Line(absl::StrFormat("%s: %.0f / %.0f, %.1f", name, p50, p99, misses));
    report.json()["classes"].push_back({{"prompt_blocks", c.prompt_blocks},
                                        {"warm", warm},
                                        {"runs", c.runs},
                                        {"hit_percent", c.hit_percent},
                                        {"p50_ns", p50},
                                        {"p99_ns", p99},
                                        {"p50_misses", misses}});
    const auto worse = [&](double value, double& most, std::string& where) {
      if (value > most) most = value, where = name;
    };
    // A lookup that lists every endpoint is judged by itself.
    if (c.runs <= 3 && c.warm_endpoints != 0) worse(misses, few_runs, few_name);
    if (c.runs <= 3 && c.warm_endpoints == 0) worse(misses, few_runs_all, few_name_all);
    if (c.runs == 100) worse(misses, many_runs, many_name);
    GridClass longer = c;
    longer.prompt_blocks = 4400;
    if (c.prompt_blocks == 1000 && c.hit_percent == 100 && classes.contains(longer)) {
      worse(Ratio(Median(classes.at(longer)), p50), growth, growth_name);
    }
  }
  report.MustExercise("forks", verified.exercised.forks);
  if (!classes.empty()) {
    report.Limit({absl::StrCat("match with up to 3 runs, misses (", few_name, ")"), few_runs, 12});
    if (few_runs_all > 0) {
      report.Limit({absl::StrCat("the same, all endpoints warm (", few_name_all, ")"), few_runs_all, 12});
    }
    report.Limit({absl::StrCat("match with 100 runs, misses (", many_name, ")"), many_runs, 20});
  }
  if (growth > 0) report.Limit({absl::StrCat("match, 4400 against 1000 blocks (", growth_name, ")"), growth, 2});
  report.Limit({"store, lines per block", Ratio(timed.phases.front().StoreNsPerBlock(), timed.line_ns), 6});
  for (const WritePhase& phase : timed.phases) {
    if (phase.removed_blocks == 0) continue;
    report.Limit({"remove, lines per block", Ratio(phase.RemoveNsPerBlock(), timed.line_ns), 12});
  }
  if (!cell.shared) report.Limit({"bytes per distinct block", timed.checkpoints.front().BytesPerDistinctBlock(), 32});
  if (cell.big && options.workload.scale == 1) {
    const double gigabytes = static_cast<double>(timed.checkpoints.front().Bytes()) / 1e9;
    report.Limit({"size, GB", gigabytes, cell.shared ? 1.2 : 2.0});
    const auto p99_misses = [&](const std::vector<float>& ns) { return Ratio(Quantile(ns, 0.99), timed.miss_ns); };
    report.Limit({"6000-block lookup p99, misses", p99_misses(longest_prompts), 25});
    report.Limit({"the same, up to 8 endpoints warm", p99_misses(longest_prompts_few), 25});
  }
  AddAllocations(timed, report);
  AddBackToBase(verified, report);
  return report;
}

absl::StatusOr<Report> BenchChurn(const OperationStream& stream, const BenchOptions& options) {
  absl::StatusOr<Runs> runs = Run(stream, options, {});
  if (!runs.ok()) return runs.status();
  const auto& [verified, timed] = *runs;
  const absl::StatusOr<Concurrent> fastest = Fastest(stream, options.repetitions);
  if (!fastest.ok()) return fastest.status();
  Report report;
  report.Figure("block_ops_per_s", fastest->Rate(), "/s, as fast as possible");
  report.Count("block_ops", fastest->block_ops);
  AddLookups(fastest->match_ns, timed.miss_ns, report);
  report.Figure("lookup_max_ns", Quantile(fastest->match_ns, 1), "ns, whatever happened");
  AddSize(timed.checkpoints.back(), report);
  AddVerified(verified, report);
  AddFloors(timed, report);
  AddWrites(stream, timed, report);
  AddLongest(stream, timed, timed.phases, options.repetitions, report);
  const auto blocks = static_cast<std::uint64_t>(std::ceil(60'000 * options.workload.scale));
  // More than once, because most samples of a busy machine are left out.
  Removals removals;
  for (std::uint64_t i = 0; i < 5 && removals.call_ns.size() < 16; ++i) {
    absl::StatusOr<Removals> more = MeasureRemovals(32, blocks, options.workload.seed + i);
    if (!more.ok()) return more.status();
    removals.call_ns.insert(removals.call_ns.end(), more->call_ns.begin(), more->call_ns.end());
    removals.visible_ns.insert(removals.visible_ns.end(), more->visible_ns.begin(), more->visible_ns.end());
  }
  report.Count("endpoint_removals", static_cast<std::int64_t>(removals.call_ns.size()));
  report.Figure("endpoint_gone_p50_ns", Median(removals.visible_ns), "ns, as a reader sees it");
  report.Figure("endpoint_gone_max_ns", Quantile(removals.visible_ns, 1), "ns");
  report.Figure("endpoint_removal_p50_ns", Median(removals.call_ns), "ns, the call");
  report.Figure("endpoint_removal_max_ns", Quantile(removals.call_ns, 1), "ns");
  absl::StatusOr<std::int64_t> cap_hits = MeetCap(options.workload.seed, report);
  if (!cap_hits.ok()) return cap_hits.status();
  report.MustExercise("forks", verified.exercised.forks);
  report.MustExercise("holes", verified.exercised.holes);
  report.MustExercise("evicted_middles", verified.exercised.evicted_middles);
  report.MustExercise("late_parents", verified.exercised.late_parents);
  report.MustExercise("duplicates", verified.exercised.duplicates);
  report.MustExercise("removed_endpoints", verified.exercised.removed_endpoints);
  report.MustExercise("cap_hits", *cap_hits);
  if (verified.stats.unknown_parents == 0) report.Fail("the index noticed no unknown parent");
  if (removals.visible_ns.empty()) {
    report.Line("endpoint removal: every sample had a context switch, nothing is known");
  } else {
    report.Limit({"removed endpoint gone, us", Quantile(removals.visible_ns, 1) / 1e3, 10});
  }
  AddAllocations(timed, report);
  AddBackToBase(verified, report);
  return report;
}

}  // namespace tokroute::index_bench

// The index benchmark's parts: the reference, the workloads, what is measured.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/index_bench/floors.h"
#include "tools/index_bench/measure.h"
#include "tools/index_bench/memory.h"
#include "tools/index_bench/random.h"
#include "tools/index_bench/reference.h"
#include "tools/index_bench/report.h"
#include "tools/index_bench/statistics.h"
#include "tools/index_bench/workloads.h"

namespace tokroute::index_bench {
namespace {

using testing::IsEmpty;

std::vector<std::pair<std::uint32_t, std::int64_t>> Found(Reference& reference, std::vector<BlockKey> prompt) {
  std::vector<Holder> holders;
  reference.Match(prompt, holders);
  std::vector<std::pair<std::uint32_t, std::int64_t>> found;
  for (const Holder& holder : holders) found.emplace_back(holder.endpoint.slot, holder.blocks);
  return found;
}

using Pairs = std::vector<std::pair<std::uint32_t, std::int64_t>>;

Operation Store(EndpointId endpoint, std::optional<BlockKey> parent = std::nullopt) {
  return {.kind = OperationKind::kStore, .endpoint = endpoint, .parent = parent};
}
Operation Of(OperationKind kind, EndpointId endpoint) { return {.kind = kind, .endpoint = endpoint}; }
void Apply(Reference& reference, const Operation& operation, std::vector<BlockKey> keys) {
  reference.Apply(operation, keys);
}

TEST(IndexBenchReferenceTest, HoldsTheLeadingBlocksOnly) {
  Reference reference(3);
  Apply(reference, Store({0, 1}), {1, 2, 3});
  Apply(reference, Store({2, 1}), {1, 2});
  EXPECT_EQ(Found(reference, {1, 2, 3, 4}), (Pairs{{0, 3}, {2, 2}}));
  Apply(reference, Of(OperationKind::kRemove, {0, 1}), {2});
  EXPECT_EQ(Found(reference, {1, 2, 3, 4}), (Pairs{{0, 1}, {2, 2}}));
  EXPECT_EQ(reference.exercised().evicted_middles, 1);
  EXPECT_EQ(reference.exercised().holes, 1);
  EXPECT_EQ(reference.distinct_blocks(), 3);
  EXPECT_EQ(reference.holder_blocks(), 4);
  EXPECT_THAT(Found(reference, {}), IsEmpty());
}

TEST(IndexBenchReferenceTest, StoredTwiceIsRemovedTwice) {
  Reference reference(1);
  Apply(reference, Store({0, 1}), {1, 2});
  Apply(reference, Store({0, 1}, 1), {2});
  EXPECT_EQ(reference.exercised().duplicates, 1);
  Apply(reference, Of(OperationKind::kRemove, {0, 1}), {2});
  EXPECT_EQ(Found(reference, {1, 2}), (Pairs{{0, 2}}));
  Apply(reference, Of(OperationKind::kRemove, {0, 1}), {2, 2});
  EXPECT_EQ(Found(reference, {1, 2}), (Pairs{{0, 1}}));
}

TEST(IndexBenchReferenceTest, CountsForksAndLateParentsOnce) {
  Reference reference(2);
  Apply(reference, Store({0, 1}), {1, 2});
  Apply(reference, Store({1, 1}), {1, 3});
  Apply(reference, Store({0, 1}, 1), {3});  // Another endpoint takes the same fork.
  EXPECT_EQ(reference.exercised().forks, 1);
  Apply(reference, Store({0, 1}, 9), {10});
  Apply(reference, Store({0, 1}), {9});
  EXPECT_EQ(reference.exercised().late_parents, 1);
  EXPECT_EQ(Found(reference, {9, 10}), (Pairs{{0, 2}}));
}

TEST(IndexBenchReferenceTest, EndpointsGoAndOthersCome) {
  Reference reference(1);
  Apply(reference, Store({0, 1}), {1});
  Apply(reference, Of(OperationKind::kRemoveEndpoint, {0, 1}), {});
  Apply(reference, Store({0, 1}), {1});  // Late news of one that is gone.
  EXPECT_THAT(Found(reference, {1}), IsEmpty());
  Apply(reference, Store({0, 2}), {1});
  EXPECT_EQ(Found(reference, {1}), (Pairs{{0, 1}}));
  Apply(reference, Of(OperationKind::kClear, {0, 2}), {});
  EXPECT_THAT(Found(reference, {1}), IsEmpty());
  EXPECT_EQ(reference.distinct_blocks(), 0);
  EXPECT_EQ(reference.exercised().removed_endpoints, 1);
}

Exercised Replay(const OperationStream& stream, std::size_t match_every = 10) {
  Reference reference(stream.endpoints);
  std::vector<Holder> holders;
  for (std::size_t i = 0; i < stream.records.size(); ++i) {
    const Operation& operation = stream.records[i];
    reference.Apply(operation, stream.KeysOf(operation));
    if (operation.is_match() && i % match_every == 0) reference.Match(stream.KeysOf(operation), holders);
  }
  return reference.exercised();
}

// Enough prompts that caches overflow, with shared beginnings.
tools::Trace MakeTrace() {
  tools::Trace trace;
  for (std::uint64_t i = 0; i < 600; ++i) {
    tools::TraceRequest request;
    request.timestamp_ms = static_cast<std::int64_t>(i / 3 * 1000);
    request.output_tokens = 300;
    for (std::uint64_t id = 0; id < 60; ++id) {
      request.hash_ids.push_back(id < 2 ? id : id < 10 ? 100 + i % 7 * 10 + id : 1000 + i * 60 + id);
    }
    request.input_tokens = static_cast<std::int64_t>(request.hash_ids.size()) * tools::kTraceBlockTokens;
    trace.requests.push_back(request);
  }
  return trace;
}

TEST(IndexBenchWorkloadTest, MooncakeIsWhatAnLruCacheDoes) {
  const OperationStream stream = MakeMooncake(MakeTrace(), {.scale = 0.1, .seed = 1});
  EXPECT_EQ(stream.endpoints, 13u);
  EXPECT_EQ(stream.block_size, 128);
  std::vector<std::set<BlockKey>> held(stream.endpoints);
  std::size_t most = 0, removed = 0;
  double at = 0;
  for (const Operation& operation : stream.records) {
    EXPECT_GE(operation.at, at);
    at = operation.at;
    if (operation.is_match()) {
      EXPECT_EQ(operation.key_count, 240u);
      continue;
    }
    std::set<BlockKey>& here = held[operation.endpoint.slot];
    for (const BlockKey key : stream.KeysOf(operation)) {
      if (operation.kind == OperationKind::kStore) {
        ASSERT_TRUE(here.insert(key).second);
      } else {
        ASSERT_EQ(here.erase(key), 1u);
        ++removed;
      }
    }
    most = std::max(most, here.size());
  }
  EXPECT_EQ(most, 16'384u);
  EXPECT_GT(removed, 0u);
  EXPECT_LE(at, 1.0);
  const Exercised exercised = Replay(stream);
  EXPECT_GT(exercised.forks, 0);
  EXPECT_EQ(exercised.evicted_middles, 0);  // Tail first.
  EXPECT_EQ(exercised.late_parents, 0);
}

TEST(IndexBenchWorkloadTest, EachExercisesWhatItIsFor) {
  const Exercised pinned = Replay(MakePinned({.scale = 0.005, .seed = 3}));
  EXPECT_GT(pinned.forks, 0);
  EXPECT_GT(pinned.holes, 0);
  EXPECT_GT(pinned.evicted_middles, 0);
  EXPECT_GT(pinned.duplicates, 0);
  EXPECT_EQ(pinned.late_parents, 0);
  const Exercised churn = Replay(MakeChurn({.scale = 0.01, .seed = 3}), 1);
  EXPECT_GT(churn.forks, 0);
  EXPECT_GT(churn.holes, 0);
  EXPECT_GT(churn.evicted_middles, 0);
  EXPECT_GT(churn.late_parents, 0);
  EXPECT_GT(churn.duplicates, 0);
  EXPECT_EQ(churn.removed_endpoints, 20);
  const Exercised grid = Replay(MakeGrid(kGridCells[0], {.scale = 0.01, .seed = 3}));
  EXPECT_GT(grid.forks, 0);
  EXPECT_EQ(grid.duplicates, 0);
  EXPECT_EQ(grid.late_parents, 0);
}

TEST(IndexBenchWorkloadTest, SameSeedSameStream) {
  const auto same = [](const OperationStream& a, const OperationStream& b) {
    return a.keys == b.keys && std::equal(a.records.begin(), a.records.end(), b.records.begin(), b.records.end(),
                                          [](const Operation& x, const Operation& y) {
                                            return x.kind == y.kind && x.endpoint == y.endpoint &&
                                                   x.parent == y.parent && x.first_key == y.first_key &&
                                                   x.key_count == y.key_count && x.tag == y.tag;
                                          });
  };
  const WorkloadOptions one{.scale = 0.002, .seed = 1}, two{.scale = 0.002, .seed = 2};
  EXPECT_TRUE(same(MakePinned(one), MakePinned(one)));
  EXPECT_FALSE(same(MakePinned(one), MakePinned(two)));
  EXPECT_TRUE(same(MakeChurn(one), MakeChurn(one)));
  EXPECT_TRUE(same(MakeGrid(kGridCells[0], one), MakeGrid(kGridCells[0], one)));
  EXPECT_TRUE(same(MakeMooncake(MakeTrace(), one), MakeMooncake(MakeTrace(), one)));
}

TEST(IndexBenchWorkloadTest, GridClassesSurviveTheirTags) {
  for (const std::uint32_t blocks : kGridPrompts) {
    for (const std::uint32_t warm : {1u, 8u, 1024u}) {
      for (const std::uint32_t runs : kGridRuns) {
        for (const std::uint32_t hit : {0u, 50u, 100u}) {
          const GridClass made{blocks, warm, runs, hit};
          const GridClass back = ClassOf(TagOf(made));
          EXPECT_NE(TagOf(made), 0u);
          EXPECT_EQ(back, (GridClass{blocks, warm == 1024 ? 0 : warm, runs, hit}));
        }
      }
    }
  }
}

TEST(IndexBenchMeasureTest, TheIndexIsExactAndItsMemoryCounted) {
  const OperationStream stream = MakeChurn({.scale = 0.005, .seed = 5});
  const absl::StatusOr<Verified> verified = Verify(stream, 1'000'000);
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->mismatched, 0) << verified->first_mismatch;
  EXPECT_EQ(verified->compared, std::count_if(stream.records.begin(), stream.records.end(),
                                              [](const Operation& operation) { return operation.is_match(); }));
  EXPECT_GT(verified->peak_bytes, verified->bytes_after_removal);
  EXPECT_GT(verified->stats.unknown_parents, 0);
}

TEST(IndexBenchMeasureTest, EveryOperationIsTimed) {
  const OperationStream stream = MakePinned({.scale = 0.002, .seed = 5});
  const absl::StatusOr<Timed> timed = Time(stream, {.repetitions = 2, .floor_bytes = std::int64_t{1} << 20, .seed = 1});
  ASSERT_TRUE(timed.ok()) << timed.status();
  const auto matches = static_cast<std::size_t>(std::count_if(
      stream.records.begin(), stream.records.end(), [](const Operation& operation) { return operation.is_match(); }));
  EXPECT_EQ(timed->matches.size(), matches);
  EXPECT_EQ(timed->checkpoints.size(), 3u);  // Whole, fragmented, at the end.
  EXPECT_GT(timed->checkpoints[0].holder_blocks, timed->checkpoints[1].holder_blocks);
  EXPECT_GT(timed->checkpoints[0].Bytes(), 0);
  EXPECT_EQ(timed->phases.size(), 2u);
  EXPECT_GT(timed->phases[0].StoreNsPerBlock(), 0);
  EXPECT_GT(timed->phases[1].RemoveNsPerBlock(), 0);
  EXPECT_GT(timed->WriteRate(stream, 0, stream.records.size()), 0);
  EXPECT_EQ(timed->match_allocations, 0);
}

TEST(IndexBenchMeasureTest, AWriterAndAReaderDoAllOfIt) {
  const OperationStream stream = MakeChurn({.scale = 0.002, .seed = 5});
  std::int64_t blocks = 0;
  for (const Operation& operation : stream.records) blocks += operation.key_count;
  for (const double window_s : {0.0, 0.05}) {
    const absl::StatusOr<Concurrent> run = RunConcurrently(stream, window_s);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->block_ops, blocks);
    EXPECT_GT(run->seconds, window_s * 0.9);
    EXPECT_GT(run->match_ns.size(), 0u);
  }
  const absl::StatusOr<Removals> removals = MeasureRemovals(4, 500, 1);
  ASSERT_TRUE(removals.ok()) << removals.status();
  EXPECT_EQ(removals->call_ns.size(), removals->visible_ns.size());
}

TEST(IndexBenchMeasureTest, OnlyWhatIsAllocatedInScopeCounts) {
  // Not by new-expressions, which compilers may leave out.
  constexpr std::align_val_t kWide{128};
  const std::int64_t before = CountedBytes(), calls = ThreadAllocations();
  void* const ours = ::operator new(1000);
  void *counted = nullptr, *wide = nullptr;
  {
    const CountedAllocations scope;
    counted = ::operator new(500);
    wide = ::operator new(256, kWide);
  }
  const std::int64_t bytes = CountedBytes() - before, made = ThreadAllocations() - calls;
  EXPECT_EQ(bytes, 756);
  EXPECT_EQ(made, 3);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(wide) % 128, 0u);
  ::operator delete(ours);
  EXPECT_EQ(CountedBytes() - before, 756);
  ::operator delete(counted);
  ::operator delete(wide, kWide);
  EXPECT_EQ(CountedBytes(), before);
}

TEST(IndexBenchMeasureTest, FloorsAreMeasured) {
  Floors floors(1, 1);
  EXPECT_EQ(floors.bytes(), 1 << 20);
  EXPECT_EQ(floors.miss_ns(), 0);
  for (int i = 0; i < 1000; ++i) {
    floors.MeasureMiss();
    floors.MeasureLine();
  }
  EXPECT_GT(floors.miss_ns(), 0);
  EXPECT_GT(floors.line_ns(), 0);
}

TEST(IndexBenchMeasureTest, Quantiles) {
  EXPECT_EQ(Quantile({}, 0.5), 0);
  EXPECT_EQ(Quantile({3}, 0.99), 3);
  EXPECT_EQ(Quantile({4, 1, 3, 2}, 0.5), 2);
  EXPECT_EQ(Quantile({4, 1, 3, 2}, 0), 1);
  EXPECT_EQ(Quantile({4, 1, 3, 2}, 1), 4);
}

TEST(IndexBenchRandomTest, LogUniformStaysInRange) {
  Random random(1);
  std::map<std::uint64_t, int> seen;
  for (int i = 0; i < 20'000; ++i) ++seen[random.LogUniform(8, 64)];
  EXPECT_EQ(seen.begin()->first, 8u);
  EXPECT_EQ(seen.rbegin()->first, 64u);
  EXPECT_GT(seen[8], 3 * seen[60]);
}

TEST(IndexBenchReportTest, LimitsCountOnlyWhenChecked) {
  Report report;
  report.Limit({"size", 3, 2});
  EXPECT_FALSE(report.Failed(false));
  EXPECT_TRUE(report.Failed(true));
  Report whole;
  whole.Add("part", report);
  EXPECT_TRUE(whole.Failed(true));
  Report fine;
  fine.Limit({"rate", 3, 2, true});
  fine.MustExercise("forks", 1);
  EXPECT_FALSE(fine.Failed(true));
  fine.MustExercise("holes", 0);
  EXPECT_TRUE(fine.Failed(false));
}

}  // namespace
}  // namespace tokroute::index_bench

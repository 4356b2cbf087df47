// Drives the index with a stream: once beside the reference, several times timed, and with a writer and a reader at once.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEASURE_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEASURE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/index_bench/operations.h"
#include "tools/index_bench/reference.h"
#include "tools/index_bench/subject.h"

namespace tokroute::index_bench {

inline constexpr std::int64_t kMaxIndexBytes = std::int64_t{16} << 30;

// The index's size where a run of writes ends, that is before the first match after one.
struct Checkpoint {
  std::size_t record = 0;
  std::int64_t distinct_blocks = 0, holder_blocks = 0;
  std::int64_t counted_bytes = 0, stats_bytes = 0;
  double BytesPerHolderBlock() const noexcept;
  double BytesPerDistinctBlock() const noexcept;
  // The larger of what was counted and what the index says.
  std::int64_t Bytes() const noexcept;
};

struct Verified {
  std::int64_t compared = 0, mismatched = 0;
  std::string first_mismatch;
  Exercised exercised;
  std::vector<std::int64_t> distinct_blocks;  // By the reference, at each checkpoint.
  std::int64_t peak_bytes = 0;
  SubjectStats stats;                   // At the end.
  std::int64_t bytes_after_removal = 0; // With every endpoint removed and swept.
  std::int64_t bytes_at_start = 0;
};

// One thread, index and reference in step; about `most_compared` of the matches are compared, evenly spread.
absl::StatusOr<Verified> Verify(const OperationStream& stream, std::int64_t most_compared);

struct TimedOptions {
  int repetitions = 3;        // Each on a new index.
  int match_rounds = 1;       // Each phase's matches are timed that many times, in random order if more than once.
  int scrub_matches = 0;      // Untimed lookups of other prompts before each timed one, so that caches do not help.
  std::int64_t floor_bytes = 0;
  std::uint64_t seed = 0;
};

struct MatchTime {
  std::uint32_t record = 0;
  float ns = 0;
};

// Times are without what the timer itself takes.
struct Timed {
  std::vector<float> write_ns;            // By record: the least over the repetitions. Of matches: 0.
  std::vector<double> stored_s, removed_s;  // By repetition: stores and removals from the middle of each phase on.
  std::vector<double> all_s;              // By repetition: every write.
  std::int64_t stored_blocks = 0, removed_blocks = 0;  // What stored_s and removed_s are for.
  std::int64_t all_blocks = 0;            // Written.
  std::vector<MatchTime> matches;
  std::vector<std::int64_t> matched;      // By record: the deepest holder; of matches only.
  std::vector<std::uint32_t> holders;     // By record: how many; of matches only.
  std::vector<Checkpoint> checkpoints;
  std::int64_t match_allocations = 0;     // By all timed lookups.
  double miss_ns = 0, line_ns = 0, timer_ns = 0;
  std::int64_t floor_bytes = 0;
  std::int64_t preempted = 0;             // Samples left out of write_ns, because the thread was switched out.

  double StoreNsPerBlock() const;  // Medians over the repetitions.
  double RemoveNsPerBlock() const;
};

absl::StatusOr<Timed> Time(const OperationStream& stream, const TimedOptions& options);

struct Concurrent {
  double seconds = 0;         // Until the last operation had been done.
  double issue_lag = 0;       // How far behind its deadline the worst operation began, as a share of the window.
  std::int64_t block_ops = 0; // Blocks of matches, stores and removals.
  std::vector<float> match_ns;
  double Rate() const noexcept { return static_cast<double>(block_ops) / seconds; }
};

// A writer and a reader. `window_s` > 0: each operation waits for its deadline. 0: as fast as possible, the reader being
// held back until the writer has come within 256 records of it, lest it look things up in an index still empty.
absl::StatusOr<Concurrent> RunConcurrently(const OperationStream& stream, double window_s);

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEASURE_H_

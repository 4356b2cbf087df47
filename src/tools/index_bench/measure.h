// Drives the index with a stream: once beside the reference, several times timed, and with a writer and a reader at
// once.
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
  SubjectStats stats;                    // At the end.
  std::int64_t bytes_after_removal = 0;  // With every endpoint removed and swept.
  std::int64_t bytes_at_start = 0;
};

// One thread, index and reference in step; about `most_compared` of the matches are compared, evenly spread.
absl::StatusOr<Verified> Verify(const OperationStream& stream, std::int64_t most_compared, bool engine_keys = false);

struct TimedOptions {
  int repetitions = 3;  // Each on a new index.
  // How many times a phase's matches are timed; more than once: in random order, and if the stream has tags only those
  // with one.
  int match_rounds = 1;
  int scrub_matches = 0;  // Then: untimed lookups of other prompts before each, so that caches do not help.
  std::int64_t floor_bytes = 0;
  std::uint64_t seed = 0;
  bool engine_keys = false;  // See Subject::Create.
};

struct MatchTime {
  std::uint32_t record = 0;
  float ns = 0;
};

// The writes between two phases of lookups. Small ones are counted to the one before: where writes and lookups
// alternate there is one phase. Times are of the second half, by blocks, of the stores and of the removals: by then the
// index has about the size that the floors are measured at.
struct WritePhase {
  std::size_t begin = 0, end = 0;                     // Records.
  std::vector<double> stored_s = {}, removed_s = {};  // By repetition.
  std::int64_t stored_blocks = 0, removed_blocks = 0;
  double StoreNsPerBlock() const;  // Medians over the repetitions; 0 if there is nothing to tell of.
  double RemoveNsPerBlock() const;
};

// Times are without what the timer itself takes.
struct Timed {
  std::vector<float> write_ns;  // By record: the least over the repetitions. Of matches: 0.
  std::vector<WritePhase> phases;
  std::vector<MatchTime> matches;
  std::vector<std::uint32_t> holders;  // By record: how many; of matches only.
  std::vector<Checkpoint> checkpoints;
  std::int64_t match_allocations = 0;  // By lookups that were repeated at once, so that all buffers have their size.
  double miss_ns = 0, line_ns = 0, timer_ns = 0;
  std::int64_t floor_bytes = 0;
  std::int64_t preempted = 0;  // Samples left out of write_ns, because the thread was switched out.

  // Blocks written by records [begin, end), and the time that took (write_ns). Unit: /s.
  double WriteRate(const OperationStream& stream, std::size_t begin, std::size_t end) const;
};

absl::StatusOr<Timed> Time(const OperationStream& stream, const TimedOptions& options);

struct Concurrent {
  double seconds = 0;          // Until the last operation had been done.
  double issue_lag = 0;        // How far behind its deadline the worst operation began, as a share of the window.
  std::int64_t block_ops = 0;  // Blocks of matches, stores and removals.
  std::vector<float> match_ns;
  double Rate() const noexcept { return static_cast<double>(block_ops) / seconds; }
};

// A writer and a reader. `window_s` > 0: each operation waits for its deadline. 0: as fast as possible, the reader
// being held back until the writer has come within 256 records of it, lest it look things up in an index still empty.
absl::StatusOr<Concurrent> RunConcurrently(const OperationStream& stream, double window_s);

// How long it takes until an endpoint that was removed is gone from another thread's lookups, the lookup included, and
// until the call returns. Samples with an involuntary context switch of either thread are left out. `blocks` per
// endpoint, in conversations of a few hundred.
struct Removals {
  std::vector<float> visible_ns, call_ns;
};
absl::StatusOr<Removals> MeasureRemovals(std::uint32_t endpoints, std::uint64_t blocks, std::uint64_t seed);

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_MEASURE_H_

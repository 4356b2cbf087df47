// The index under test. Everything the benchmark asks of it goes through here.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_SUBJECT_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_SUBJECT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/prefix/prefix_index.h"
#include "tools/index_bench/operations.h"
#include "tools/index_bench/reference.h"

namespace tokroute::index_bench {

struct SubjectStats {
  std::int64_t distinct_blocks = 0, holder_blocks = 0, bytes = 0, pending_sweep = 0, unknown_parents = 0, cap_hits = 0;
  std::vector<std::pair<std::string, std::int64_t>> counters;  // All that it tells, by name; for the report.
};

// Any thread may look up, one at a time may apply.
class Subject {
 public:
  // `engine_keys`: its events come through EngineKeys, under names that differ from the keys looked up.
  static absl::StatusOr<Subject> Create(std::int32_t block_size, std::int64_t max_bytes, bool engine_keys = false);
  ~Subject();
  Subject(Subject&&) noexcept;
  Subject& operator=(Subject&&) noexcept;

  // Anything but a match. False: refused for want of room, at least in part.
  bool Apply(const Operation& operation, std::span<const BlockKey> keys) noexcept;
  void SweepAll() noexcept;
  SubjectStats Stats() const;

  // One thread's lookups.
  class Lookup {
   public:
    explicit Lookup(const Subject& subject);
    // The prompt is loaded first, so that Match is nothing but the index's own work.
    void Load(std::span<const BlockKey> keys) noexcept;
    void Match() noexcept;
    std::span<const Holder> holders() const noexcept;

   private:
    const PrefixIndex& index_;
    PromptKeys keys_;
    PrefixMatch match_;
  };

 private:
  struct State;
  explicit Subject(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_SUBJECT_H_

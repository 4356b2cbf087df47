// The obvious slow index: a set of keys, with counts, per endpoint. The index under test is compared with it.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_REFERENCE_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "tokroute/prefix/prefix_index.h"
#include "tools/index_bench/operations.h"

namespace tokroute::index_bench {

using Holder = PrefixMatch::Holder;

// Keys are random already.
struct KeyHash {
  std::size_t operator()(BlockKey key) const noexcept { return key * 0x9E3779B97F4A7C15u; }
};

// What of the hard cases a stream contained, whatever the index made of it.
struct Exercised {
  std::int64_t forks = 0;              // Blocks stored behind a block that somebody already follows otherwise.
  std::int64_t holes = 0;              // Endpoints met by a compared lookup that lack one block and hold the next.
  std::int64_t evicted_middles = 0;    // Blocks removed while their endpoint held one that follows.
  std::int64_t late_parents = 0;       // Stores behind a block that nobody holds.
  std::int64_t duplicates = 0;         // Blocks stored where they were held already.
  std::int64_t removed_endpoints = 0;  // Such as held something.
  std::int64_t cap_hits = 0;           // Filled in by whoever makes the index meet its cap.
};

class Reference {
 public:
  explicit Reference(std::uint32_t endpoints) : held_(endpoints), incarnations_(endpoints, 1) {}

  // A match has no effect.
  void Apply(const Operation& operation, std::span<const BlockKey> keys);
  // By ascending slot. O(endpoints + blocks held).
  void Match(std::span<const BlockKey> keys, std::vector<Holder>& out);
  const Exercised& exercised() const noexcept { return exercised_; }
  std::int64_t distinct_blocks() const noexcept { return static_cast<std::int64_t>(known_.size()); }
  std::int64_t holder_blocks() const noexcept { return holder_blocks_; }

 private:
  struct Known {
    BlockKey child = 0;  // The first that followed it; 0: none.
    std::uint32_t holders = 0;
  };
  using Set = absl::flat_hash_map<BlockKey, std::uint32_t, KeyHash>;  // Copies held: stored twice, removed twice.

  void Store(const Operation& operation, std::span<const BlockKey> keys);
  void Remove(Set& set, std::span<const BlockKey> keys);
  void Drop(BlockKey key);
  void Forget(Set& set);

  std::vector<Set> held_;
  std::vector<std::uint32_t> incarnations_;
  absl::flat_hash_map<BlockKey, Known, KeyHash> known_;  // Held by somebody.
  std::int64_t holder_blocks_ = 0;
  Exercised exercised_;
};

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_REFERENCE_H_

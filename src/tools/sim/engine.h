// A simulated endpoint, the serial model: one prefill at a time, first come first served, at a fixed rate; then decode
// at a fixed time per token, however many requests decode; and an LRU prefix cache of blocks. Enough to tell policies
// apart by what they send where. Batching, chunked prefill, attention cost and memory pressure of outputs are not in
// it.
//
// It knows no clock: calls come in order of virtual time and say when the next thing happens.
#ifndef TOKROUTE_SRC_TOOLS_SIM_ENGINE_H_
#define TOKROUTE_SRC_TOOLS_SIM_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "tokroute/fwd.h"
#include "tools/sim/event_queue.h"

namespace tokroute::tools {

// Blocks by key, least recently used first out. Pinned blocks (somebody runs on them) stay. A released path rejoins
// with its deepest block first, so that a parent always outlives its children and what is held is a prefix without
// gaps. All of it O(blocks) expected, exact, and the same every time: hash order is never looked at.
class LruBlockCache {
 public:
  explicit LruBlockCache(std::int64_t capacity_blocks) : capacity_(capacity_blocks) {}

  std::int64_t size() const { return static_cast<std::int64_t>(index_.size()); }  // Blocks, pinned ones included.
  // Leading keys that are held. Refreshes nothing: a question is no use.
  std::int64_t Match(std::span<const BlockKey> keys) const;
  // Pins the leading keys that are held; returns how many.
  std::int64_t PinMatched(std::span<const BlockKey> keys);
  // Adds and pins the keys from `pinned` on (what PinMatched returned), evicting as needed. Stops when everything left
  // is pinned. Returns how many leading keys are pinned now.
  std::int64_t PinRest(std::span<const BlockKey> keys, std::int64_t pinned);
  // Undoes one pin of each key.
  void Unpin(std::span<const BlockKey> keys);

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  struct Block {
    BlockKey key = 0;
    std::uint32_t pins = 0;
    std::uint32_t older = kNone, newer = kNone;  // Neighbours in the order of use; only while unpinned.
  };
  void Pin(std::uint32_t block);
  void Unlink(std::uint32_t block);
  bool EvictOldest();

  std::int64_t capacity_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<BlockKey, std::uint32_t> index_;
  std::uint32_t oldest_ = kNone, newest_ = kNone;
};

struct EngineOptions {
  double prefill_tokens_per_s = 0;   // > 0.
  Nanoseconds decode_ns = 0;         // Per token after the first. >= 1.
  std::int64_t capacity_blocks = 0;  // >= 1.
  std::int64_t block_size = 0;       // Unit: tokens.
  std::int64_t max_running = 0;      // Prefilling and decoding; further requests wait. 0: no limit.
};

struct EngineJob {
  std::uint32_t id = 0;  // The caller's; unique among those not finished.
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;             // >= 1.
  std::span<const BlockKey> block_keys = {};  // Must outlive the job.
};

class SerialEngine {
 public:
  struct Admission {
    std::uint32_t id = 0;
    std::int64_t hit_tokens = 0;  // What the cache held when the prefill started.
    Nanoseconds prefill_end = 0;
  };
  struct FirstToken {
    std::uint32_t id = 0;
    Nanoseconds finish = 0;
  };

  explicit SerialEngine(const EngineOptions& options) : options_(options), cache_(options.capacity_blocks) {}

  void Enqueue(const EngineJob& job) { waiting_.push_back(job); }
  // Starts the next prefill if none is running and somebody waits who may. Call it after every other call.
  std::optional<Admission> TryStart(Nanoseconds now);
  // The running prefill has ended, at the time that TryStart said: its blocks are held from now on.
  FirstToken EndPrefill(Nanoseconds now);
  // The response has ended, at the time that EndPrefill said: its blocks may be evicted.
  void Finish(std::uint32_t id);

  // Prompt tokens that the cache holds now, for a request not yet admitted.
  std::int64_t MatchTokens(std::span<const BlockKey> keys) const { return cache_.Match(keys) * options_.block_size; }
  bool idle() const { return waiting_.empty() && running_.empty(); }
  const LruBlockCache& cache() const { return cache_; }

 private:
  struct Running {
    EngineJob job;
    std::int64_t pinned = 0;  // Leading blocks of the job.
  };
  EngineOptions options_;
  LruBlockCache cache_;
  std::deque<EngineJob> waiting_;
  std::optional<std::uint32_t> prefilling_;
  std::unordered_map<std::uint32_t, Running> running_;
};

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_SIM_ENGINE_H_

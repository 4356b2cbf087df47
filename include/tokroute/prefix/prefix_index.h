// Which endpoint holds how much of a prompt: a radix forest of runs of chained block keys.
//
// Approximate mode: the router's own history. What was sent somewhere is taken to be there, least recently used first
// out, until the endpoint's cache capacity is reached. For requests whose prompts share prefixes; where an engine
// reports its own cache by events, those know better.
//
//   absl::StatusOr<std::shared_ptr<PrefixIndex>> index = PrefixIndex::Create({.block_size = 16});
//   keys.Reset((*index)->key_options(), request);
//   (*index)->Match(keys, match);                               // match.holders(): endpoints and blocks held.
//   PrefixReceipt receipt = (*index)->Record(chosen, keys, &fleet_view);  // Tentative until ...
//   (*index)->OnFirstToken(receipt);                            // ... the engine has shown that the prefill is done.
//   (*index)->OnReleased(receipt, /*aborted=*/false);           // Always, exactly as the request ends.
//
// It is an object of its own, safe by itself: any number of threads, and of routers over one fleet, share one.
#ifndef TOKROUTE_PREFIX_PREFIX_INDEX_H_
#define TOKROUTE_PREFIX_PREFIX_INDEX_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/concepts.h"
#include "tokroute/fleet_view.h"
#include "tokroute/fwd.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/prefix/index_memory.h"
#include "tokroute/prefix/kv_event.h"

namespace tokroute::internal {
class PrefixEngine;
}

namespace tokroute {
inline namespace v0 {

// Where an index knows from what endpoints hold.
enum class IndexMode : std::uint8_t {
  kApproximate,  // From what was sent there (Record), least recently used first. The default.
  kExact,        // From the engines' own KV events (Stored, Removed, ...).
};

struct PrefixIndexOptions {
  IndexMode mode = IndexMode::kApproximate;
  // One index has one block size; it is used as given, never rounded. Unit: tokens. kMinBlockSize .. kMaxBlockSize.
  std::int32_t block_size = kDefaultBlockSize;
  KeyScheme scheme = KeyScheme::kXxh3;
  std::uint64_t key_seed = 0;  // See KeyOptions::seed. Must be 0 with kXxh64Chain.
  // Cache capacity of an endpoint that told none. Unit: tokens. block_size .. 2^40. What an 80 GB accelerator holds of
  // a 30B model beside its weights is a few hundred thousand tokens.
  std::int64_t default_capacity_tokens = 300'000;
  // Exact mode: what a block counts for affinity, by where it lies. Each 0 .. 1.
  TierWeights tier_weights = {};
  // Exact mode: what a booked request will store (Record) counts as held until its events arrive, or for so long; a
  // burst of equal prompts then stays together before the first event. 0: off. Needs a clock, or it never ends but by
  // events and aborts. 2 s is llm-d's (speculativeIndexing).
  std::chrono::nanoseconds speculative_ttl = std::chrono::seconds(2);
  ClockRef clock = {};  // Must outlive the index.
  // Exact mode: what is stored behind a parent that the index does not have is kept so long, and so much of it per
  // endpoint; then it is dropped, and the endpoint wants a resync. Unit: blocks, 0 .. 2^24.
  std::chrono::nanoseconds orphan_ttl = std::chrono::seconds(60);
  std::int64_t max_orphan_blocks = 4096;
  // The most memory the index ever asks for, its tables included. Unit: bytes. 4 MiB .. 128 GiB. A record that does not
  // fit evicts its own endpoint's oldest blocks, then is shortened; an event that does not fit is refused and counted.
  std::int64_t max_bytes = std::int64_t{4} << 30;
  // Memory that is taken and touched at the start and kept, so that no later call meets a page for the first time.
  // Unit: bytes. 0 .. 15/16 of max_bytes, less 1 MiB.
  std::int64_t reserve_bytes = 0;
  IndexMemory memory = {};  // See there.
};

// Returned by Record, given back to OnReleased once. A small handle: the state is in the index, so copies, doubled,
// late or raced calls and receipts of endpoints long gone do no harm. (Calls that race need a copy each: they empty
// theirs.)
struct PrefixReceipt {
  std::uint64_t serial = 0;  // Never reused in the life of an index. 0: nothing was recorded.
  std::uint32_t entry = 0;
  // The leading blocks recorded: fewer than the prompt's when capacity or memory allowed no more.
  std::int64_t blocks = 0;
  explicit operator bool() const noexcept { return serial != 0; }
};

// What Match found. Owned by the caller and reused: nothing is allocated once warm. One thread at a time.
class PrefixMatch {
 public:
  struct Holder {
    EndpointId endpoint = {};
    std::int64_t blocks = 0;     // Held from the prompt's first block on, without a gap, in whatever tier. >= 1.
    double weighted_blocks = 0;  // The same, each times the weight of the best tier it lies in; not rounded.
    // Exact mode: by each tier alone, from the first block on, without a gap in it; then by speculations.
    std::array<std::int32_t, kStorageTiers + 1> tier_blocks = {};
  };

  // Every endpoint that holds at least the first block, once, by ascending slot.
  std::span<const Holder> holders() const noexcept { return holders_; }
  // Full blocks of the prompt: the most that could match. 0: shorter than a block (or no tokens), which is not a miss.
  std::int64_t prompt_blocks() const noexcept { return prompt_blocks_; }
  // What `endpoint` holds; 0 if nothing. O(log holders).
  std::int64_t BlocksOf(EndpointId endpoint) const noexcept;

 private:
  friend class PrefixIndex;
  std::int64_t prompt_blocks_ = 0;
  std::vector<Holder> holders_;
  std::vector<std::uint32_t> path_;  // Scratch: the runs on the prompt's path.
};

// Counts since creation, except those marked "now". All exact at the moment of the call.
struct PrefixIndexStats {
  std::int64_t distinct_blocks = 0;  // Now: blocks held by somebody. Removed endpoints count until they are swept.
  std::int64_t holder_blocks = 0;    // Now: (endpoint, block) pairs.
  std::int64_t runs = 0;             // Now: runs of consecutive keys.
  std::int64_t memberships = 0;      // Now: (endpoint, run) pairs.
  std::int64_t endpoints = 0;        // Now: known and not removed.
  // Now: memberships of removed or cleared endpoints, not yet swept. Approximate mode: parts of memberships; what live
  // receipts have pinned stays among them until those end.
  std::int64_t pending_sweep = 0;
  std::int64_t live_receipts = 0;  // Now: recorded and not released.
  std::int64_t bytes = 0;          // Now: memory asked of the system. <= max_bytes.
  std::int64_t peak_bytes = 0;
  std::int64_t evicted_blocks = 0;     // For capacity or memory.
  std::int64_t taken_back_blocks = 0;  // Aborted before the first token.
  std::int64_t truncated_records = 0;  // Shortened because capacity or memory allowed no more.
  std::int64_t refused_records = 0;    // Dead or invalid endpoint, foreign keys, or no memory at all.
  std::int64_t conflicting_keys = 0;   // Keys that came again in another place; the first stays. 0 with honest keys.
  // Exact mode.
  std::int64_t speculative_blocks = 0;  // Now: (endpoint, block) pairs that booked requests are expected to store.
  std::int64_t stored_blocks = 0, removed_blocks = 0;  // That events told of, and that were so.
  std::int64_t duplicate_blocks = 0;   // Stored where they were held already: the endpoint then has one copy more.
  std::int64_t unknown_removes = 0;    // Removed where they were not held. No effect.
  std::int64_t unknown_parents = 0;    // Events stored behind a block that the index does not have.
  std::int64_t orphan_blocks = 0;      // Now: kept of these, and not known to have found their parent.
  std::int64_t dropped_orphans = 0;    // Blocks of these that were too many or too old.
  std::int64_t forks = 0;              // Events that left a run before its end.
  std::int64_t holed_memberships = 0;  // Times that an endpoint's part of a run got a gap.
  std::int64_t refused_events = 0;     // Wholly or in part, for whatever reason (see KvResult).
  std::int64_t cap_hits = 0;           // Of these, and of removes that lost more than they named, for want of memory.
  std::int64_t sequence_gaps = 0, duplicate_batches = 0, restarts = 0;
};

// Who holds which prompt prefixes. A run of consecutive keys is kept as one; since keys are chained, one compare with a
// run's last key verifies the run. Callers see endpoints and depths only: the inside may change.
//
// What it promises in either mode:
//   * An endpoint is credited with a depth only if it holds every block up to it.
//   * A block that nobody holds is dropped at once, and after everything is removed the memory is back.
//   * A look-up that races with records or events may miss what is just coming, and never credits what was not held
//     at one moment during the call.
//   * Same calls, same answers. No recursion, nothing throws; allocation only while growing, none once at capacity (but
//     for the keys of a speculation), none in a look-up.
// In exact mode:
//   * What an endpoint holds is what its events said, each tier and each copy counted; a lost block in the middle hides
//     what lies behind it until it comes back.
//   * Events that cannot be what they say (an unknown source, a key behind two parents, too many orphans, no
//     memory) are refused one by one, counted, and mark the endpoint as wanting a resync.
// In approximate mode:
//   * Recording is tentative. The first token, or an end that is not an abort, makes it real; an abort before that
//     takes back what no other live request on that endpoint relies on and what had not been real before.
//   * Each endpoint's blocks are kept in one order, least recently used first. A live request pins its path: pinned
//     blocks leave the order. When the last request on a block ends, its path's unpinned blocks rejoin at the recent
//     end, deepest first, so a parent is always more recent than its children and eviction never leaves a gap. Matching
//     alone does not refresh: what was merely considered was not used.
//   * An endpoint never holds more than its capacity, save where the capacity shrank below what live requests pin. A
//     record evicts to make room; what still does not fit is left out from its tail end.
//
// Threads: any call from any thread. Match takes no lock, unless what it reads keeps changing under it eight times
// over; records, events and the rest take one, and hashing and copying keys happen outside it. In approximate mode
// OnFirstToken and an ordinary OnReleased take none: they leave word, which is settled at the latest before anything
// that depends on it. Costs below are in runs on the prompt's path (a handful) and holders of a run, not in blocks.
class PrefixIndex {
 public:
  // Returns an index, or kInvalidArgument naming the field, its value and the accepted range.
  static absl::StatusOr<std::shared_ptr<PrefixIndex>> Create(const PrefixIndexOptions& options);
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  const PrefixIndexOptions& options() const noexcept { return options_; }
  // What to Reset a PromptKeys with. Keys made otherwise match nothing and are not recorded.
  KeyOptions key_options() const noexcept {
    return {.block_size = options_.block_size, .scheme = options_.scheme, .seed = options_.key_seed};
  }

  // Who holds how much of the prompt. Hashes as far as somebody holds it, run by run; all of it behind the third run.
  // O(runs * log(run) + holders found).
  void Match(PromptKeys& keys, PrefixMatch& out) const noexcept;

  // At booking: `endpoint` is about to hold the prompt's full blocks; in exact mode, a speculation (see the options),
  // for which "tentative" and "pinned" mean nothing. Hashes the whole prompt (no further than the endpoint's capacity).
  // Refused, with an empty receipt: a prompt without full blocks, an invalid id, one that was removed, an incarnation
  // older than one seen in its slot, and one that `alive` (asked under the index's lock; null: not asked) does not
  // know. O(runs + blocks newly recorded + evicted runs).
  PrefixReceipt Record(EndpointId endpoint, PromptKeys& keys, const FleetView* alive) noexcept;

  // The engine has produced a token: the blocks recorded are real. No effect on an empty or finished receipt. O(1).
  void OnFirstToken(PrefixReceipt& receipt) noexcept;

  // The request has ended; unpins and empties the receipt. Aborted before the first token: taken back. Else real. No
  // effect on an empty or finished receipt. O(1), and O(runs) for whoever settles it.
  void OnReleased(PrefixReceipt& receipt, bool aborted) noexcept;

  // A retry elsewhere: the blocks of `from` are recorded for `to`, tentatively, then `from` is released as aborted
  // (what its endpoint confirmed stays) and emptied. Works also when `from`'s endpoint has been removed meanwhile. If
  // `to` is refused (see Record) the result is empty and `from` is released all the same. O(runs + evicted runs).
  PrefixReceipt Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept;

  // The endpoint's cache capacity, from its traits or its metrics; may come before the first record and change at any
  // time. Unit: tokens; rounded down to blocks. 0: unknown, the default. Shrinking evicts at once, pinned blocks as
  // they are released. kInvalidArgument: tokens outside 0 .. 2^40, or an id that nobody can have. kNotFound: a removed
  // or replaced incarnation. kResourceExhausted: max_bytes leaves no room to note it.
  absl::Status SetCapacity(EndpointId endpoint, std::int64_t tokens);

  // ---- KV events: exact mode. One source's events in the order in which its engine sent them; any thread. ----
  //
  // Every endpoint may be told of without introduction, like in Record. Blocks are counted per endpoint and tier:
  // stored twice, they are held until they were removed twice.

  // `source` has stored the blocks of these keys, each behind the one before, the first behind `parent` (nullopt: the
  // prompt's first block). See KvResult for what can go wrong; what was told before a refusal's reason stands. O(keys).
  KvResult Stored(const KvSource& source, std::optional<BlockKey> parent, std::span<const BlockKey> keys) noexcept;
  // `source` has let go of these blocks, in whatever order. Blocks behind them stay, and count again if these come
  // back. O(keys).
  KvResult Removed(const KvSource& source, std::span<const BlockKey> keys) noexcept;
  // The number of the batch that comes next from this endpoint; says whether to apply it. O(1).
  KvSequence Sequence(EndpointId endpoint, std::uint64_t number) noexcept;
  // The index may differ from the engine: a gap, or an event that could not be taken. Clear the endpoint, which ends
  // this, and have everything stored again.
  bool WantsResync(EndpointId endpoint) const noexcept;

  // Forgets an endpoint. Visible at once; its memberships are swept then and by later mutating calls, at most 64 each
  // and a few thousand blocks. Its id stays dead for ever. No effect on an id that nobody can have. O(1) besides the
  // sweep.
  void RemoveEndpoint(EndpointId endpoint) noexcept;

  // The endpoint's cache was emptied (a restart in place, a reset): it holds nothing from now on and lives on, capacity
  // kept. Receipts from before no longer credit it. As RemoveEndpoint otherwise.
  void ClearEndpoint(EndpointId endpoint) noexcept;

  // Removes every endpoint that the view does not know any more; to be called when a fleet changed. O(endpoints).
  void RetireDead(const FleetView& alive) noexcept;

  // Sweeps up to `memberships` of removed endpoints now, and what has expired, for a gateway that has a quiet moment;
  // returns what remains to be swept (see pending_sweep), 0 if that is nothing but what live receipts keep.
  std::int64_t Sweep(std::int64_t memberships) noexcept;

  PrefixIndexStats Stats() const noexcept;  // O(1).

  // Blocks held by the endpoint, tentative ones included; 0 for an unknown or dead one. O(1).
  std::int64_t HeldBlocks(EndpointId endpoint) const noexcept;

  // Of these, what lies in device memory, without speculations: the endpoint's part of KvTokensHeld. Exact mode never
  // waits for it. O(1).
  std::int64_t DeviceBlocks(EndpointId endpoint) const noexcept;

  // ---- Snapshots: exact mode. For a restart, or to warm up from a peer. ----

  // Writes what living endpoints hold (one copy of each block, no speculations) and their sequence numbers, through
  // `write`, which says whether it could. Versioned, little-endian, with a checksum; the secret of key_seed is not in
  // it. Events go on meanwhile: each run is as it was at one moment, in no order. kUnavailable: write said no.
  // kFailedPrecondition: an approximate index.
  absl::Status Save(const std::function<bool(std::span<const std::byte>)>& write) const;
  // Adds a snapshot to what is there. `read` fills what it can of its span and returns how much; 0 is the end.
  // `endpoint_of` says which endpoint a saved one is now; incarnation 0: leave it out. Blocks that are held already
  // stay as they are. An endpoint that has had events of its own keeps its sequence number. kDataLoss: truncated or
  // corrupted bytes; kInvalidArgument: another format, version, block size, scheme or seed; kResourceExhausted: no
  // memory for the bytes. Then nothing was changed. What does not fit under max_bytes is left out and counted
  // (cap_hits). Events go on meanwhile.
  absl::Status Load(const std::function<std::size_t(std::span<std::byte>)>& read,
                    const std::function<EndpointId(EndpointId)>& endpoint_of);

  // Walks the whole structure and compares it with its own counters and invariants. For tests and debugging: O(size),
  // under the lock, allocates. Internal error naming what is wrong, else OK.
  absl::Status Audit() const;

 private:
  friend class EngineKeys;  // Feeds the engine below by the names that engines give.
  PrefixIndex(const PrefixIndexOptions& options, std::unique_ptr<internal::PrefixEngine> engine) noexcept;

  PrefixIndexOptions options_;
  std::unique_ptr<internal::PrefixEngine> engine_;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_PREFIX_INDEX_H_

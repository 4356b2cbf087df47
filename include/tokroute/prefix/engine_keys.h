// EngineKeys: feeds an exact PrefixIndex with KV events in which engines call blocks by names of their own.
//
// An engine names a block by its own hash (of whatever algorithm, seed and width, cut to 64 bits by the decoder). This
// keeps which of our chained keys each such name stands for: from the tokens of the event that stored the block, so
// that nobody has to compute an engine's hash. Not needed where events carry our keys: PrefixIndex takes those itself.
//
//   auto keys = EngineKeys::Create(index);                          // An index of IndexMode::kExact.
//   auto domain = (*keys)->Domain("qwen3-32b/sha256/seed 0");       // Or HashDomain{}: this endpoint's alone.
//   (*keys)->Stored({endpoint}, *domain, {.parent = parent_hash, .engine_keys = hashes, .block_size = 16,
//                                         .tokens = token_ids});
//   (*keys)->Removed({endpoint}, *domain, hashes);
//
// Look-ups, and the producer in front of the index, stay as they are.
#ifndef TOKROUTE_PREFIX_ENGINE_KEYS_H_
#define TOKROUTE_PREFIX_ENGINE_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/fwd.h"
#include "tokroute/prefix/kv_event.h"
#include "tokroute/prefix/prefix_index.h"
#include "tokroute/request.h"

namespace tokroute {
inline namespace v0 {

// An engine's name for a block. Any value is legal, 0 and 2^64 - 1 included: that there is no parent is said by an
// empty optional. Signed names are taken by their 64 bits; of longer ones it is the decoder's to take 64 bits, always
// the same (of SHA-256, engines publish the last or the first eight bytes, big-endian).
using EngineKey = std::uint64_t;

// Engines that would give the same block the same name: same algorithm, same seed, same model. They share a table, so
// a block that many hold is named once. Number 0: the domain of the event's endpoint alone, right for any engine.
struct HashDomain {
  std::uint32_t number = 0;
  friend bool operator==(HashDomain, HashDomain) = default;
};
inline constexpr std::size_t kMaxHashDomains = 256;  // With a name.

// The blocks of one store event, in prefix order. Views: they need to live just for the call.
struct EngineBlocks {
  std::optional<EngineKey> parent = {};         // Of the first block; none: it begins a prompt.
  std::span<const EngineKey> engine_keys = {};  // All different, and the parent not among them.
  // Of an engine's block. Unit: tokens. 0: the index's. Two to 256 of the index's in one: each engine block then stands
  // for so many blocks, which come and go together and have a name (of the 20 to 25 bytes) each. Anything else is
  // refused (kBlockSize), smaller blocks too, whose parts nobody would put together: let the index's block size divide
  // every engine's.
  std::int32_t block_size = 0;

  // What the blocks are, as one of:
  std::span<const TokenId> tokens = {};  // engine_keys.size() * block_size of them; or
  std::span<const BlockKey> keys = {};   // our keys, one for each of the index's blocks; or neither: then blocks that
                                         // are known already lie in this source too (a copy to the host's memory), and
                                         // those that are not are left out. `parent` and `block_size` mean nothing.

  // With tokens and without a parent: the namespace, as in Request. With a parent, the parent has it.
  std::string_view model = {}, lora = {}, cache_salt = {};
  // With tokens: as in Request, but positions are counted from this event's first token; a span that began in an
  // earlier event has a first_token below 0.
  std::span<const MediaSpan> media = {};
};

struct EngineKeysOptions {
  // The most memory this ever asks for, besides a large event's scratch while it is taken. Unit: bytes. 2 MiB .. 128
  // GiB. 20 to 25 bytes a name. Full, it first looks at 1,024 slots for names of blocks that are gone; if there are
  // none, the rest of the event is refused (kNoRoom) and the endpoint wants a resync. Names of blocks that are held are
  // never evicted: their removal could not be understood.
  std::int64_t max_bytes = std::int64_t{1} << 30;
};

// Counts since creation, except those marked "now".
struct EngineKeysStats {
  std::int64_t names = 0;    // Now: engine keys known, of blocks that are gone and not swept yet too.
  std::int64_t domains = 0;  // Now: that have any, endpoints' own included.
  std::int64_t bytes = 0;    // Now: <= max_bytes.
  std::int64_t peak_bytes = 0;
  std::int64_t kept_blocks = 0;      // Now: of the index's size, waiting for their parent.
  std::int64_t unknown_parents = 0;  // Events whose parent was not known.
  std::int64_t adopted_blocks = 0;   // Kept, and their parent came.
  std::int64_t dropped_blocks = 0;   // Not kept: too many or too old.
  std::int64_t removed_kept_blocks = 0;
  std::int64_t unknown_removes = 0;  // Engine keys removed that nothing is known of. No effect.
  std::int64_t unknown_copies = 0;   // Engine keys stored without tokens that nothing is known of. Left out.
  std::int64_t conflicts = 0;        // Events with a key that stands for another block. The first stays.
  std::int64_t swept_names = 0;      // Found by the way that their block was gone.
  std::int64_t refused_events = 0;   // Wholly or in part, by this; those that the index refuses it counts itself.
  std::int64_t cap_hits = 0;         // Of these, for want of memory.
};

// What it promises:
//   * Results mean what they mean for PrefixIndex (KvResult): anything but kApplied and kUnknownParent marks the
//     endpoint as wanting a resync, and the index's WantsResync says so.
//   * What was told before a refusal's reason stands; kMalformed, kBlockSize and kUnknownSource change nothing.
//   * A block behind an unknown parent is kept and applied when the parent comes, and so is what hangs on it: per
//     endpoint at most the index's max_orphan_blocks, at most for its orphan_ttl. (The index keeps as many itself
//     behind parents that are known by name and held by nobody.) Beyond that it is dropped, counted, and the endpoint
//     wants a resync.
//   * A key that already stands for another block is a conflict: the first stays, the event's rest is left out. Not
//     when nobody holds the first any more.
//   * No name outlives its block for long: it goes when the last holder, of whatever domain, removes the block. Where
//     blocks vanish otherwise (an endpoint removed, an orphan expired), each event also looks at some names: one for
//     every four of its blocks, up to sixteen for each when it finds many that are gone, never more than 256 an event
//     (and 1,024 at the cap). Sweep does it at once. An endpoint's own domain goes as a whole when it holds nothing.
//     Once the index is empty the memory is back.
//
// Threads: any call from any thread. Events of one endpoint must come one after the other, as engines send them. One
// lock of its own, taken before the index's and held over the index's part of an event, so that a name and its block
// come and go together; tokens are hashed outside it. Look-ups of the index never wait for it.
//
// Everybody who feeds an index under engine keys goes through one EngineKeys; beside it events with our own keys may go
// to the index directly. RemoveEndpoint and RetireDead may be called on either. Clearing and sequence numbers must go
// through here: what is kept for an endpoint would else outlive its cache.
class EngineKeys {
 public:
  // kInvalidArgument: no index, not an exact one, or max_bytes out of range. kResourceExhausted: no memory.
  static absl::StatusOr<std::shared_ptr<EngineKeys>> Create(std::shared_ptr<PrefixIndex> index,
                                                            const EngineKeysOptions& options = {});
  ~EngineKeys();
  EngineKeys(const EngineKeys&) = delete;
  EngineKeys& operator=(const EngineKeys&) = delete;

  const std::shared_ptr<PrefixIndex>& index() const noexcept { return index_; }

  // The domain of this name, made when it is new; it stays. kInvalidArgument: an empty name, or one of more than 256
  // bytes. kResourceExhausted: there are kMaxHashDomains, or no memory. O(domains).
  absl::StatusOr<HashDomain> Domain(std::string_view name);

  // `source` has stored these blocks. kMalformed: an unknown domain or tier, spans of the wrong lengths, both tokens
  // and keys, a parent among its own keys, a key of ours that is 0, more than 65,536 of the index's blocks. O(tokens +
  // keys), and what was kept for them.
  KvResult Stored(const KvSource& source, HashDomain domain, const EngineBlocks& blocks) noexcept;

  // `source` has let go of these blocks, in whatever order. Blocks kept for want of their parent are among those that
  // can be removed; of two copies of a block the kept one goes first. An engine's block of several of the index's that
  // the source did not hold takes from it what it begins alike with one that it does (under-credit; engines remove what
  // they hold). kMalformed: an unknown domain or tier. O(keys).
  KvResult Removed(const KvSource& source, HashDomain domain, std::span<const EngineKey> engine_keys) noexcept;

  // As PrefixIndex's, which they call; and what is kept of the endpoint goes with its cache.
  KvSequence Sequence(EndpointId endpoint, std::uint64_t number) noexcept;
  void ClearEndpoint(EndpointId endpoint) noexcept;
  void RemoveEndpoint(EndpointId endpoint) noexcept;

  // Looks at the next `slots` places for a name (a quarter of them are empty) for those whose block is gone, and at
  // what is kept for what is too old. As many as there are, or more: at all, until none is left. Returns how many names
  // went. Does not sweep the index.
  std::int64_t Sweep(std::int64_t slots) noexcept;

  EngineKeysStats Stats() const noexcept;  // O(domains, endpoints' own included).

  // Compares everything with its own counters. For tests and debugging: O(size), under the lock, allocates.
  absl::Status Audit() const;

 private:
  class State;
  EngineKeys(std::shared_ptr<PrefixIndex> index, std::unique_ptr<State> state) noexcept;

  std::shared_ptr<PrefixIndex> index_;
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_ENGINE_KEYS_H_

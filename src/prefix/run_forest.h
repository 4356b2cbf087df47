// The run forest: which endpoints hold which blocks, block by block, as their engines tell. One writer at a time and
// any number of readers, who never wait.
//
// Private to src/prefix. A key lies in exactly one place: at some offset of one run, an array of consecutive keys of a
// chain. Keys are chained, so the block that follows one is found in the table by its own key; a fork is just a run
// that begins there, and nothing is ever split. Each run lists its holders: an endpoint's tier, how many blocks it
// holds from the run's first one on without a gap (the cut-off), and a bitmap if it holds others beyond.
//
// A run whose parent nobody has told of is stored all the same: it becomes reachable when the parent comes, since links
// are implied by keys. What a run notes of its parent is a hint for walking up.
//
// Readers: a run's record changes between two steps of its version (even: at rest). Whoever reads it looks at the
// version before and after and starts again if it moved; after some tries it gives up and sees nothing of the run, so a
// race may under-credit but never over-credit: each run's cut-offs were true together at one moment during the call.
#ifndef TOKROUTE_SRC_PREFIX_RUN_FOREST_H_
#define TOKROUTE_SRC_PREFIX_RUN_FOREST_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "prefix/arena.h"
#include "prefix/place_table.h"
#include "prefix/prefix_engine.h"
#include "prefix/shared_word.h"
#include "tokroute/concepts.h"
#include "tokroute/internal/mutex.h"
#include "tokroute/prefix/kv_event.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute::internal {

class RunForest final : public PrefixEngine {
 public:
  explicit RunForest(const PrefixIndexOptions& options) noexcept;
  void Match(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out,
             std::vector<std::uint32_t>& path) noexcept override;
  KvResult Stored(const KvSource& source, std::optional<BlockKey> parent,
                  std::span<const BlockKey> keys) noexcept override;
  KvResult Removed(const KvSource& source, std::span<const BlockKey> keys) noexcept override;
  void ClearEndpoint(EndpointId id) noexcept override;
  KvSequence Sequence(EndpointId id, std::uint64_t number) noexcept override;
  bool WantsResync(EndpointId id) noexcept override;
  void MarkResync(EndpointId id) noexcept override;
  void LookAt(std::span<const BlockKey> keys, EndpointId by, std::span<SeenBlock> out) noexcept override;
  absl::Status SaveTo(const std::function<bool(std::span<const std::byte>)>& write) override;
  absl::Status LoadFrom(const std::function<std::size_t(std::span<std::byte>)>& read,
                        const std::function<EndpointId(EndpointId)>& endpoint_of) override;
  void RemoveEndpoint(EndpointId id) noexcept override;
  void RetireDead(const FleetView& alive) noexcept override;
  std::int64_t Sweep(std::int64_t memberships) noexcept override;
  std::int64_t HeldBlocks(EndpointId id) noexcept override;
  std::int64_t DeviceBlocks(EndpointId id) const noexcept override;
  std::int64_t RecordableBlocks(EndpointId id, std::int64_t blocks) noexcept override;
  PrefixReceipt Record(EndpointId id, std::span<const BlockKey> keys, bool shortened,
                       const FleetView* alive) noexcept override;
  void OnFirstToken(const PrefixReceipt& receipt) noexcept override;
  void OnReleased(PrefixReceipt& receipt, bool aborted) noexcept override;
  PrefixReceipt Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept override;
  void CountRefusal() noexcept override;
  PrefixIndexStats Stats() noexcept override;
  absl::Status Audit() override;

 private:
  static constexpr std::uint32_t kMostKeys = 4095;  // Of a run: offsets and counts fit 12 bits.
  static constexpr std::uint32_t kOwnerBits = 19, kMostOwners = 1u << kOwnerBits;
  static constexpr std::int64_t kSweepStep = 64;
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  // Storage tiers, and behind them what booked requests will store: blocks that count as held until then.
  static constexpr std::uint32_t kSpeculative = kStorageTiers, kTiers = kStorageTiers + 1;

  // What one tier of one endpoint holds of a run. Sorted by tag, then tier.
  struct Holder {
    std::uint32_t tag = 0;     // Slot, then owner.
    std::uint16_t cutoff = 0;  // Blocks held from the run's first on.
    std::uint16_t packed = 0;  // Blocks held in all, x 16; 8 if copies are counted; the tier.
    // A bitmap of what is held, one bit a block, and if copies are counted, how many beyond the first, one byte a
    // block. kNone: the first `cutoff` blocks, once.
    std::uint32_t bits = kNone;
    std::uint32_t older = kNone,
                  newer = kNone;  // Neighbours, as run ids, in the list of what this tier of the owner holds.
    std::uint32_t held() const noexcept { return packed >> 4; }
    bool counted() const noexcept { return (packed & 8u) != 0; }
    std::uint32_t tier() const noexcept { return packed & 7u; }
    std::uint64_t order() const noexcept { return std::uint64_t{tag} << 3 | tier(); }
  };
  static_assert(sizeof(Holder) == 20);

  struct Run {
    std::uint32_t version = 0;       // Even: at rest. Goes on counting when the record is another run's.
    std::uint32_t shape = 0;         // Counts what makes hints of children wrong: being cut, being freed.
    std::uint32_t parent = kNone;    // The run that the first key continues, or did; kNone: none, or not known.
    std::uint32_t parent_shape = 0;  // Its shape then.
    std::uint64_t parent_key = 0;    // The key before the first one; 0: the run begins prompts.
    std::uint32_t keys = kNone;      // Handle of the key array.
    std::uint32_t holders = kNone;   // Handle of the holder array; kNone: there is at most one, and it is inline.
    std::uint16_t parent_offset = 0, length = 0, key_units = 0, holder_count = 0;
    Holder inline_holder;
    std::uint16_t holder_units = 0;
    std::uint16_t orphan = 0;  // 1: it hung in the air when it was last looked at (see Reaches).
  };
  static_assert(sizeof(Run) == Arena::kUnitBytes);
  static constexpr std::uint32_t kRunsPerSlab = 64;

  struct List {
    std::uint32_t oldest = kNone, newest = kNone;
  };
  // An endpoint, or one life of it: clearing starts another. Dead owners stay until their memberships are swept.
  struct Owner {
    std::uint32_t slot = 0, incarnation = 0;  // Read by readers, like `alive`.
    std::uint32_t alive = 0;
    std::uint32_t next = kNone;  // In the queue of the dead, or the free list.
    std::array<List, kTiers> lists;
    std::array<std::int64_t, kTiers> held = {};  // Read by readers.
    std::int64_t memberships = 0, orphans = 0;
    std::uint64_t life = 0;  // Tells this owner from others that had the record before.
    Place last = {};         // Of the block it stored last: the next event goes on there, mostly.
  };
  struct Slot {
    std::uint32_t incarnation = 0, dead_through = 0;
    std::uint32_t owner_or_0 = 0;  // Owner + 1, so that zeroed memory means nobody.
    bool resync = false;
    bool sequenced = false;
    std::uint64_t next_sequence = 0;
  };

  // What a booked request will store.
  struct Speculation {
    std::uint64_t serial = 0;  // Of its receipt; 0: over.
    std::uint64_t life = 0;    // Of the owner.
    std::uint32_t owner = kNone;
    bool confirmed = false;  // The first token was seen.
    std::chrono::nanoseconds deadline{};
    std::vector<BlockKey> keys;
  };

  // Blocks stored behind one that the index does not have: unreachable, and let go of if it does not come.
  struct Orphans {
    std::uint64_t life = 0;  // Of the owner.
    std::uint32_t owner = kNone, tier = 0;
    BlockKey parent = 0;
    std::chrono::nanoseconds deadline{};
    std::vector<BlockKey> keys;
  };

  // A part of a prompt's path: `matched` keys of a run, the first of them the prompt's block `start`, as the run was at
  // some version. A path is a list of steps' words.
  struct Step {
    std::uint32_t run = kNone, start = 0, matched = 0, version = 0;
  };
  static constexpr std::size_t kStepWords = 4;
  // Changes a run's record so that readers notice.
  class Writing {
   public:
    explicit Writing(Run& run) noexcept : run_(run) { internal::Store(run_.version, run_.version + 1); }
    ~Writing() { internal::Store(run_.version, run_.version + 1); }
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    Run& run_;
  };

  Run& At(std::uint32_t run) const noexcept { return *arena_.At<Run>(run); }
  BlockKey* KeysOf(const Run& run) const noexcept { return arena_.At<BlockKey>(run.keys); }
  std::span<Holder> HoldersOf(Run& run) const noexcept;

  // ---- Readers: without the lock, within a visit of the gate.
  template <class Look>
  bool Steadily(std::uint32_t run, Look&& look, std::uint32_t* seen) const noexcept;
  const BlockKey* TryKeys(const Run& run, std::uint32_t length) const noexcept;
  bool StepDown(PromptKeys& keys, std::uint32_t depth, Step& step) const noexcept;
  void SearchDeep(std::span<const BlockKey> keys, std::uint32_t depth, std::vector<std::uint32_t>& path) const noexcept;
  bool Emit(std::span<const std::uint32_t> path, std::vector<PrefixMatch::Holder>& out) const noexcept;
  std::pair<std::uint32_t, double> Combine(std::span<const Holder> shared, std::uint32_t matched) const noexcept;
  bool Holds(const Holder& holder, std::uint32_t offset) const noexcept;

  // ---- The writer.
  Place PlaceOf(BlockKey key) const noexcept TOKROUTE_REQUIRES(mutex_);
  std::uint32_t NewRun(BlockKey parent_key, Place parent) noexcept TOKROUTE_REQUIRES(mutex_);
  void FreeRun(std::uint32_t run) noexcept TOKROUTE_REQUIRES(mutex_);
  std::uint32_t Append(std::uint32_t run, std::span<const BlockKey> keys) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Grow(std::uint32_t run, std::uint32_t keys) noexcept TOKROUTE_REQUIRES(mutex_);
  void Trim(std::uint32_t run) noexcept TOKROUTE_REQUIRES(mutex_);
  static std::uint32_t SideUnits(const Run& run, bool counted) noexcept {
    return (run.key_units + 63u) / 64u + (counted ? (run.key_units + 7u) / 8u : 0);
  }
  std::byte* CountsOf(const Run& run, const Holder& holder) const noexcept {
    return arena_.Address(holder.bits + SideUnits(run, false));
  }

  Holder* FindHolder(std::uint32_t run, std::uint32_t tag, std::uint32_t tier) noexcept TOKROUTE_REQUIRES(mutex_);
  bool AddHolder(std::uint32_t run, std::uint32_t owner, std::uint32_t tier) noexcept TOKROUTE_REQUIRES(mutex_);
  void DropHolder(std::uint32_t run, std::uint32_t tag, std::uint32_t tier) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Mark(std::uint32_t run, std::uint32_t owner, std::uint32_t tier, std::uint32_t from, std::uint32_t to) noexcept
      TOKROUTE_REQUIRES(mutex_);
  bool Unmark(std::uint32_t run, std::uint32_t owner, std::uint32_t tier, std::uint32_t offset) noexcept
      TOKROUTE_REQUIRES(mutex_);
  bool HasSides(Run& run) const noexcept TOKROUTE_REQUIRES(mutex_);
  bool GiveSide(Run& run, Holder& holder, bool counted) noexcept TOKROUTE_REQUIRES(mutex_);
  void SetHolder(Holder& holder, std::uint32_t cutoff, std::uint32_t held) noexcept TOKROUTE_REQUIRES(mutex_);
  void SetSide(Holder& holder, std::uint32_t bits, bool counted) noexcept TOKROUTE_REQUIRES(mutex_);
  void Tidy(Run& run, Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_);
  bool TakeCopy(Run& run, Holder& holder, std::uint32_t offset) noexcept TOKROUTE_REQUIRES(mutex_);
  void AddCopies(Run& run, Holder& holder, std::uint32_t from, std::uint32_t to) noexcept TOKROUTE_REQUIRES(mutex_);
  KvResult StoreKeys(std::uint32_t owner, std::uint32_t tier, BlockKey parent, std::span<const BlockKey> keys,
                     std::size_t& stored) noexcept TOKROUTE_REQUIRES(mutex_);
  void Forget(std::uint32_t run, std::uint32_t owner, std::uint32_t from, std::uint32_t to) noexcept
      TOKROUTE_REQUIRES(mutex_);
  Speculation* Find(const PrefixReceipt& receipt) noexcept TOKROUTE_REQUIRES(mutex_);
  PrefixReceipt Speculate(EndpointId id, std::span<const BlockKey> keys, const FleetView* alive) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void Unspeculate(std::uint32_t owner, BlockKey key) noexcept TOKROUTE_REQUIRES(mutex_);
  void Withdraw(Speculation& speculation) noexcept TOKROUTE_REQUIRES(mutex_);
  void ExpireSpeculations(std::chrono::nanoseconds now) noexcept TOKROUTE_REQUIRES(mutex_);
  struct SavedRun;
  void Restore(std::uint32_t owner, BlockKey parent_key, std::span<const BlockKey> keys, std::uint32_t tier,
               std::uint32_t cutoff, std::span<const std::uint64_t> bits) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Reaches(Place place) noexcept TOKROUTE_REQUIRES(mutex_);
  bool KeepOrphans(std::uint32_t owner, std::uint32_t tier, BlockKey parent, std::span<const BlockKey> keys) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void CutOrphans(std::size_t stored) noexcept TOKROUTE_REQUIRES(mutex_);
  void Unawait(BlockKey parent) noexcept TOKROUTE_REQUIRES(mutex_);
  void Settle(Orphans& orphans, bool adopted) noexcept TOKROUTE_REQUIRES(mutex_);
  void Adopt(std::span<const BlockKey> keys) noexcept TOKROUTE_REQUIRES(mutex_);
  void ExpireOrphans() noexcept TOKROUTE_REQUIRES(mutex_);
  bool Knows(EndpointId id) const noexcept TOKROUTE_REQUIRES(mutex_);
  KvResult Refuse(KvResult result, std::uint32_t slot) noexcept TOKROUTE_REQUIRES(mutex_);

  std::uint32_t TagOf(std::uint32_t owner) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return owners_.get()[owner].slot << kOwnerBits | owner;
  }
  std::uint32_t Admit(EndpointId id, bool make_owner) noexcept TOKROUTE_REQUIRES(mutex_);
  void Retire(std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_);
  void Remove(EndpointId id) noexcept TOKROUTE_REQUIRES(mutex_);
  void SweepSome(std::int64_t memberships) noexcept TOKROUTE_REQUIRES(mutex_);
  void GiveBack() noexcept TOKROUTE_REQUIRES(mutex_);

  const PrefixIndexOptions options_;
  const std::array<double, kTiers> weights_;
  mutable Mutex mutex_;
  mutable ReaderGate gate_;
  MemoryBudget budget_ TOKROUTE_GUARDED_BY(mutex_);
  Arena arena_;  // Written under the lock, read by anybody as shared_word.h says; so are the next two.
  PlaceTable table_;
  const std::unique_ptr<Owner, void (*)(void*)> owners_;  // kMostOwners of them.
  std::uint32_t owner_count_ TOKROUTE_GUARDED_BY(mutex_) = 0, width_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  const std::unique_ptr<Slot, void (*)(void*)>
      slots_memory_;  // kMaxEndpoints of them, readers see owner and incarnation.
  Slot* const slots_;
  std::deque<Speculation> speculations_ TOKROUTE_GUARDED_BY(mutex_);  // By deadline, which is also by serial.
  std::deque<Orphans> orphans_ TOKROUTE_GUARDED_BY(mutex_);           // By deadline.
  std::unordered_map<BlockKey, std::uint32_t> awaited_ TOKROUTE_GUARDED_BY(mutex_);  // By how many of them.
  std::uint64_t last_serial_ TOKROUTE_GUARDED_BY(mutex_) = 0, last_life_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  std::atomic<std::int64_t> next_deadline_;  // Of the speculations.
  std::atomic<bool> any_dead_{false};        // Some holders may be dead owners, not swept yet.
  std::vector<std::uint32_t> slabs_ TOKROUTE_GUARDED_BY(mutex_);
  std::uint32_t free_run_ TOKROUTE_GUARDED_BY(mutex_) = kNone, free_owner_ TOKROUTE_GUARDED_BY(mutex_) = kNone;
  std::uint32_t first_dead_ TOKROUTE_GUARDED_BY(mutex_) = kNone, last_dead_ TOKROUTE_GUARDED_BY(mutex_) = kNone;
  PrefixIndexStats stats_ TOKROUTE_GUARDED_BY(mutex_);
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_RUN_FOREST_H_

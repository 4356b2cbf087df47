// The run forest: which endpoints hold which blocks. One writer at a time and any number of readers, who never wait.
//
// Private to src/prefix. What both of the index's modes stand on: event_index.h (what engines tell) and
// history_index.h (what was sent where) decide who holds what.
//
// A key lies in exactly one place: at some offset of one run, an array of consecutive keys of a chain. Keys are
// chained, so the block that follows one is found in the table by its own key; a fork is just a run that begins there,
// and nothing is ever split. Each run lists its holders: an endpoint's tier, how many blocks it holds from the run's
// first one on without a gap (the cut-off), and a bitmap if it holds others beyond.
//
// The table knows of each run's first key, and of the keys at every stride-th block of a prompt: of all (stride 1)
// where keys may be removed one by one and parents may be missing, else of few, which makes recording cheap.
//
// Readers: a run's record changes between two steps of its version (even: at rest). Whoever reads it looks at the
// version before and after and starts again if it moved; likewise whoever misses a key in a table that changes. After
// some tries it takes the lock and looks again. So a race never over-credits, each run's cut-offs having been true
// together at one moment during the call, and under-credits only what was recorded meanwhile.
#ifndef TOKROUTE_SRC_PREFIX_RUN_FOREST_H_
#define TOKROUTE_SRC_PREFIX_RUN_FOREST_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "prefix/arena.h"
#include "prefix/place_table.h"
#include "prefix/prefix_engine.h"
#include "prefix/shared_word.h"
#include "prefix/slab_set.h"
#include "tokroute/internal/mutex.h"
#include "tokroute/prefix/kv_event.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute::internal {

class RunForest : public PrefixEngine {
 public:
  void Match(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out,
             std::vector<std::uint32_t>& path) noexcept override;
  void RemoveEndpoint(EndpointId id) noexcept override;
  void ClearEndpoint(EndpointId id) noexcept override;
  void RetireDead(const FleetView& alive) noexcept override;
  std::int64_t Sweep(std::int64_t memberships) noexcept override;
  std::int64_t HeldBlocks(EndpointId id) noexcept override;
  std::int64_t DeviceBlocks(EndpointId id) const noexcept override;
  void CountRefusal() noexcept override;
  bool Reserve(std::int64_t bytes) noexcept override;
  PrefixIndexStats Stats() noexcept override;
  absl::Status Audit() override;

 protected:
  static constexpr std::uint32_t kMostKeys = 4095;  // Of a run: offsets and counts fit 12 bits.
  static constexpr std::uint32_t kOwnerBits = 19, kMostOwners = 1u << kOwnerBits;
  // Of the dead, that one call ends.
  static constexpr std::int64_t kSweepStep = 64;
  static constexpr std::uint32_t kAhead = 12;  // Keys whose table lines are fetched ahead.
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  // Storage tiers, and behind them what booked requests will store: blocks that count as held until then.
  static constexpr std::uint32_t kSpeculative = kStorageTiers, kTiers = kStorageTiers + 1;
  using Weights = std::array<double, kTiers>;  // What a block counts for affinity, by tier.

  // What one tier of one endpoint holds of a run: what a look-up reads, eight to a line. Sorted by tag, then tier.
  struct Holder {
    std::uint32_t tag = 0;     // Slot, then owner.
    std::uint16_t cutoff = 0;  // Blocks held from the run's first on.
    std::uint16_t packed = 0;  // Blocks held in all, x 16; 8 if copies are counted; the tier.
    std::uint32_t held() const noexcept { return packed >> 4; }
    bool counted() const noexcept { return (packed & 8u) != 0; }
    std::uint32_t tier() const noexcept { return packed & 7u; }
    bool plain() const noexcept { return held() == cutoff && !counted(); }  // Without a bitmap.
    std::uint32_t owner() const noexcept { return tag & (kMostOwners - 1); }
    std::uint64_t order() const noexcept { return std::uint64_t{tag} << 3 | tier(); }
  };
  // The rest of it, which lies apart.
  struct Extra {
    // A bitmap of what is held, one bit a block, and if copies are counted, how many beyond the first, one byte a
    // block. kNone: the first `cutoff` blocks, once.
    std::uint32_t bits = kNone;
    // Exact mode: neighbours, as run ids, in the list of what this tier of the owner holds. Approximate mode: `newer`
    // is the deepest of its stretches.
    std::uint32_t older = kNone, newer = kNone;
  };
  static constexpr std::uint32_t kHolderBytes = sizeof(Holder) + sizeof(Extra);
  static_assert(kHolderBytes == 20);

  struct Run {
    std::uint32_t version = 0;      // Even: at rest. Goes on counting when the record is another run's.
    std::uint32_t shape = 0;        // Exact mode: counts what makes hints of children wrong: being cut, being freed.
    std::uint32_t parent = kNone;   // The run that the first key continues, or did; kNone: none, or not known.
    std::uint32_t noted = 0;        // Exact mode: the parent's shape then. Else: blocks of the prompt before this run.
    std::uint64_t parent_key = 0;   // The key before the first one; 0: the run begins prompts.
    std::uint32_t keys = kNone;     // Handle of the key array.
    std::uint32_t holders = kNone;  // Handle of the holder arrays; kNone: there is at most one, and it is inline.
    std::uint16_t parent_offset = 0, length = 0, key_units = 0, holder_count = 0;
    Holder inline_holder;
    Extra inline_extra;
    std::uint16_t holder_units = 0;
    std::uint16_t state = 0;
    static constexpr std::uint16_t kOrphan = 1;    // It hung in the air when it was last looked at (exact mode).
    static constexpr std::uint16_t kUnfilled = 2;  // Its keys are still being copied (approximate mode).
  };
  static_assert(sizeof(Run) == Arena::kUnitBytes);
  // Runs lie in slabs, aligned to their size, whose first unit says the slab's number.
  static constexpr std::uint32_t kSlabUnits = 64;

  struct List {
    std::uint32_t oldest = kNone, newest = kNone;
  };
  // An endpoint, or one life of it: clearing starts another. Dead owners stay until their memberships are swept.
  struct Owner {
    std::uint32_t slot = 0, incarnation = 0;  // Read by readers, like `alive`.
    std::uint32_t alive = 0;
    std::uint32_t next = kNone;                  // In the queue of the dead, or the free list.
    std::array<List, kTiers> lists;              // Approximate mode: the first is the order of use.
    std::array<std::int64_t, kTiers> held = {};  // Read by readers.
    std::int64_t memberships = 0;
    std::int64_t orphans = 0;    // Exact mode: blocks.
    std::int64_t stretches = 0;  // Approximate mode.
    std::uint64_t life = 0;      // Tells this owner from others that had the record before.
    Place last = {};             // Of the block it stored last: the next event goes on there, mostly.
    bool queued = false;         // Among the dead to be swept.
  };
  struct Slot {
    std::uint32_t incarnation = 0, dead_through = 0;
    std::uint32_t owner_or_0 = 0;  // Owner + 1, so that zeroed memory means nobody.
    // Exact mode.
    bool resync = false;
    bool sequenced = false;
    std::uint64_t next_sequence = 0;
    // Approximate mode.
    std::int64_t capacity_blocks = 0;
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
  // The lock, with everything settled that was told without it before.
  class TOKROUTE_SCOPED_CAPABILITY Section {
   public:
    explicit Section(RunForest& forest) noexcept TOKROUTE_ACQUIRE(forest.mutex_) : forest_(forest) {
      forest.mutex_.lock();
      forest.SettleAll();
    }
    ~Section() TOKROUTE_RELEASE() { forest_.mutex_.unlock(); }
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;

   private:
    RunForest& forest_;
  };

  RunForest(const PrefixIndexOptions& options, const Weights& weights, std::uint32_t stride) noexcept;

  // ---- What the modes say.
  virtual void SettleAll() noexcept TOKROUTE_REQUIRES(mutex_) {}
  virtual void OnEntered(Slot&) noexcept TOKROUTE_REQUIRES(mutex_) {}  // A new endpoint has its slot.
  virtual void OnCleared(Slot&) noexcept TOKROUTE_REQUIRES(mutex_) {}
  // What counts as pending_sweep of an owner that has just died.
  virtual std::int64_t SweepableOf(const Owner& owner) const noexcept TOKROUTE_REQUIRES(mutex_) = 0;
  // Ends some of what a dead owner holds, and takes it off the budgets; false: they ran out.
  virtual bool SweepOwner(std::uint32_t owner, std::int64_t& memberships, std::int64_t& blocks) noexcept
      TOKROUTE_REQUIRES(mutex_) = 0;
  virtual std::int64_t BlocksPerSweptMembership() const noexcept = 0;
  // For audits: whether a mode's own records are sound; and adds the arena units that they take.
  virtual absl::Status AuditMode(std::int64_t& units) TOKROUTE_REQUIRES(mutex_) = 0;

  Run& At(std::uint32_t run) const noexcept { return *arena_.At<Run>(run); }
  BlockKey* KeysOf(const Run& run) const noexcept { return arena_.At<BlockKey>(run.keys); }
  static std::uint32_t RoomOf(std::uint32_t holder_units) noexcept {
    return holder_units * Arena::kUnitBytes / kHolderBytes;
  }
  std::span<Holder> HoldersOf(Run& run) const noexcept {
    return {run.holders == kNone ? &run.inline_holder : arena_.At<Holder>(run.holders), run.holder_count};
  }
  // They follow the room for holders.
  Extra* ExtrasOf(Run& run) const noexcept {
    if (run.holders == kNone) return &run.inline_extra;
    return reinterpret_cast<Extra*>(arena_.Address(run.holders) + RoomOf(run.holder_units) * sizeof(Holder));
  }
  Extra& ExtraOf(Run& run, const Holder& holder) const noexcept {
    return ExtrasOf(run)[&holder - HoldersOf(run).data()];
  }

  // ---- Readers: without the lock, within a visit of the gate.
  // How it goes. Who was unsure and has the lock now waits for what keys are still on their way.
  struct Reading {
    bool unsure = false, locked = false;
  };
  bool MatchOnce(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out, std::vector<std::uint32_t>& path,
                 Reading& reading) const noexcept;
  template <class Look>
  bool Steadily(std::uint32_t run, Look&& look, std::uint32_t* seen, Reading& reading) const noexcept;
  const BlockKey* TryKeys(const Run& run, std::uint32_t length, Reading& reading) const noexcept;
  std::uint32_t Agreeing(const BlockKey* own, std::span<const BlockKey> mine) const noexcept;
  bool StepDown(PromptKeys& keys, std::uint32_t depth, Place last, Step& step, Reading& reading) const noexcept;
  std::uint32_t SearchDeep(std::span<const BlockKey> keys, std::uint32_t depth, std::vector<std::uint32_t>& path,
                           Reading& reading) const noexcept;
  bool WalkUp(std::span<const BlockKey> keys, std::uint32_t depth, std::uint32_t& end, Place at, std::uint32_t version,
              std::vector<std::uint32_t>& path, Reading& reading) const noexcept;
  Place FindByReader(BlockKey key, std::uint32_t& version, Reading& reading) const noexcept;
  bool Emit(std::span<const std::uint32_t> path, std::vector<PrefixMatch::Holder>& out) const noexcept;
  std::pair<std::uint32_t, double> Combine(std::span<const Holder> shared, const Extra* extras,
                                           std::uint32_t matched) const noexcept;
  bool Holds(const Holder& holder, std::uint32_t bits, std::uint32_t offset) const noexcept;

  // ---- The writer: runs.
  bool IsIndexed(const Run& run, std::uint32_t offset) const noexcept {
    return stride_ == 1 || offset == 0 || (run.noted + offset) % stride_ == 0;
  }
  std::uint32_t NewRun(BlockKey parent_key, Place parent) noexcept TOKROUTE_REQUIRES(mutex_);
  void FreeRun(std::uint32_t run) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Grow(std::uint32_t run, std::uint32_t keys) noexcept TOKROUTE_REQUIRES(mutex_);
  void Trim(std::uint32_t run) noexcept TOKROUTE_REQUIRES(mutex_);
  bool HasSides(Run& run) const noexcept TOKROUTE_REQUIRES(mutex_);
  static constexpr std::uint32_t UnitsOf(std::uint32_t keys) noexcept {
    return Arena::UnitsFor(keys * sizeof(BlockKey));
  }

  // ---- The writer: holders.
  Holder* FindHolder(std::uint32_t run, std::uint32_t tag, std::uint32_t tier) noexcept TOKROUTE_REQUIRES(mutex_);
  bool AddHolder(std::uint32_t run, std::uint32_t owner, std::uint32_t tier, const Extra& extra) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void DropHolder(std::uint32_t run, const Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_);
  void SetHolder(Holder& holder, std::uint32_t cutoff, std::uint32_t held) noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- The writer: endpoints.
  std::uint32_t TagOf(std::uint32_t owner) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return OwnerAt(owner).slot << kOwnerBits | owner;
  }
  Owner& OwnerAt(std::uint32_t owner) const noexcept { return owners_.get()[owner]; }
  std::uint32_t Admit(EndpointId id, bool make_owner) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Knows(EndpointId id) const noexcept TOKROUTE_REQUIRES(mutex_);
  void Retire(std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_);
  void Remove(EndpointId id) noexcept TOKROUTE_REQUIRES(mutex_);
  void QueueDead(std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_);
  void SweepSome(std::int64_t memberships) noexcept TOKROUTE_REQUIRES(mutex_);
  void GiveBack() noexcept TOKROUTE_REQUIRES(mutex_);
  // Nobody is reading: empty slabs may go back to the arena.
  virtual bool HasEmptySlabs() const noexcept TOKROUTE_REQUIRES(mutex_) { return false; }
  virtual void ReleaseEmptySlabs() noexcept TOKROUTE_REQUIRES(mutex_) {}

  const PrefixIndexOptions options_;
  const Weights weights_;
  const std::uint32_t stride_;
  mutable Mutex mutex_;
  mutable ReaderGate gate_;
  MemoryBudget budget_ TOKROUTE_GUARDED_BY(mutex_);
  SegmentPool segments_ TOKROUTE_GUARDED_BY(mutex_);
  // Written under the lock, read by anybody as shared_word.h says; so are the next two. The table has an arena of its
  // own, since its pieces outlive what they name and would keep segments from becoming free.
  Arena arena_, table_arena_;
  PlaceTable table_;
  const std::unique_ptr<Owner, void (*)(void*)> owners_;  // kMostOwners of them.
  std::uint64_t last_life_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  std::uint32_t owner_count_ TOKROUTE_GUARDED_BY(mutex_) = 0, width_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  // kMaxEndpoints of them, readers see owner and incarnation.
  const std::unique_ptr<Slot, void (*)(void*)> slots_memory_;
  Slot* const slots_;
  std::atomic<bool> any_dead_{false};  // Some holders may be dead owners, not swept yet.
  std::uint32_t dead_owners_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  SlabSet run_slabs_ TOKROUTE_GUARDED_BY(mutex_){kSlabUnits, kSlabUnits - 1};
  std::uint32_t free_owner_ TOKROUTE_GUARDED_BY(mutex_) = kNone;
  std::uint32_t first_dead_ TOKROUTE_GUARDED_BY(mutex_) = kNone, last_dead_ TOKROUTE_GUARDED_BY(mutex_) = kNone;
  PrefixIndexStats stats_ TOKROUTE_GUARDED_BY(mutex_);
};

// What is wrong with an index.
template <class... Parts>
absl::Status Unsound(const Parts&... parts) {
  return absl::InternalError(absl::StrCat("PrefixIndex: ", parts...));
}

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_RUN_FOREST_H_

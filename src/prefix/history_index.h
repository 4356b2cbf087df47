// The approximate index: a run forest that holds what the router itself sent where, least recently used first out.
//
// Private to src/prefix. What an endpoint holds of a run is a leading part; it is cut into stretches, the units of its
// order of use: where a live request ends, a stretch does.
//
// Invariants (Audit checks them):
//   * Who holds a block of a run holds all of the run's parent up to there. So a run's parent outlives it, and
//     stays where it is.
//   * A pinned stretch is on some live receipt's path, and so is all above it. An unpinned one of a living
//     endpoint is real (confirmed).
//   * In an endpoint's order of use a stretch comes before (is older than) what lies above it, so trimming the oldest
//     one's tail never leaves a gap.
//   * Of the dead, what live receipts have pinned stays until they are released, since a retry elsewhere needs
//     its keys.
#ifndef TOKROUTE_SRC_PREFIX_HISTORY_INDEX_H_
#define TOKROUTE_SRC_PREFIX_HISTORY_INDEX_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "internal/thread_number.h"
#include "prefix/receipt_table.h"
#include "prefix/run_forest.h"
#include "tokroute/fleet_view.h"

namespace tokroute::internal {

class HistoryIndex final : public RunForest {
 public:
  explicit HistoryIndex(const PrefixIndexOptions& options) noexcept;
  std::int64_t RecordableBlocks(EndpointId id, std::int64_t blocks) noexcept override;
  PrefixReceipt Record(EndpointId id, std::span<const BlockKey> keys, bool shortened,
                       const FleetView* alive) noexcept override;
  void OnFirstToken(const PrefixReceipt& receipt) noexcept override;
  void OnReleased(PrefixReceipt& receipt, bool aborted) noexcept override;
  PrefixReceipt Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept override;
  absl::Status SetCapacity(EndpointId id, std::int64_t tokens) override;

 private:
  struct Stretch {
    std::uint32_t run = kNone;                   // kNone: free.
    std::uint32_t older = kNone, newer = kNone;  // Neighbours in the owner's order of use. Pinned ones are in none.
    std::uint32_t above = kNone;                 // The owner's stretch of this run that ends where this one begins.
    std::uint32_t pins = 0;                      // Live receipts whose path runs through here.
    std::uint16_t end = 0;                       // After so many blocks of the run.
    std::uint16_t confirmed = 0;                 // 1: known to be real.
  };
  static_assert(sizeof(Stretch) == 24);
  static constexpr std::uint32_t kUnitsPerSlab = 48, kPerSlab = kUnitsPerSlab * Arena::kUnitBytes / sizeof(Stretch);

  // A new run's keys, still to be copied.
  struct Fill {
    std::uint32_t run = kNone;
    BlockKey* to = nullptr;
    const BlockKey* from = nullptr;
    std::uint32_t count = 0;
  };
  struct Fills {
    std::array<Fill, 4> all;
    std::uint32_t count = 0;
  };
  // A prompt on its way into the index: what the owner has of it is pinned.
  struct Path {
    std::uint32_t owner = kNone;
    std::span<const BlockKey> keys;
    bool shortened = false;  // Capacity or memory allowed no more.
    std::int64_t depth = 0;  // Blocks so far ...
    Place last = {};         // ... and where the last of them is.
    Fills* fills = nullptr;  // Null: keys are copied on the spot.

    BlockKey last_key() const noexcept { return depth > 0 ? keys[static_cast<std::size_t>(depth - 1)] : 0; }
    std::span<const BlockKey> rest(std::int64_t wanted) const noexcept {
      return keys.subspan(static_cast<std::size_t>(depth), static_cast<std::size_t>(wanted - depth));
    }
  };
  // The lock, with what this thread released settled: enough for who neither counts nor runs out of room.
  class TOKROUTE_SCOPED_CAPABILITY OwnSection {
   public:
    explicit OwnSection(HistoryIndex& index) noexcept TOKROUTE_ACQUIRE(index.mutex_) : index_(index) {
      index.mutex_.lock();
      (void)index.Settle(index.released_[ThreadNumber() % kReleasedLists].last);
    }
    ~OwnSection() TOKROUTE_RELEASE() { index_.mutex_.unlock(); }
    OwnSection(const OwnSection&) = delete;
    OwnSection& operator=(const OwnSection&) = delete;

   private:
    HistoryIndex& index_;
  };

  // ---- What the forest asks.
  void SettleAll() noexcept override TOKROUTE_REQUIRES(mutex_);
  void OnEntered(Slot& slot) noexcept override TOKROUTE_REQUIRES(mutex_);
  std::int64_t SweepableOf(const Owner& owner) const noexcept override TOKROUTE_REQUIRES(mutex_);
  bool SweepOwner(std::uint32_t owner, std::int64_t& memberships, std::int64_t& blocks) noexcept override
      TOKROUTE_REQUIRES(mutex_);
  std::int64_t BlocksPerSweptMembership() const noexcept override;
  bool HasEmptySlabs() const noexcept override TOKROUTE_REQUIRES(mutex_);
  void ReleaseEmptySlabs() noexcept override TOKROUTE_REQUIRES(mutex_);
  absl::Status AuditMode(std::int64_t& units) override TOKROUTE_REQUIRES(mutex_);

  // ---- Keys and runs.
  const BlockKey* ReadyKeysOf(std::uint32_t run, const Fills* pending) const noexcept;
  const BlockKey* ReadyKeysOf(std::uint32_t run) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return ReadyKeysOf(run, pending_);
  }
  Place PlaceOf(BlockKey key) const noexcept TOKROUTE_REQUIRES(mutex_);
  Place Next(const Path& path) const noexcept TOKROUTE_REQUIRES(mutex_);
  bool Follows(Place last, Place next) const noexcept TOKROUTE_REQUIRES(mutex_);
  bool Index(std::uint32_t run, std::uint32_t offset, BlockKey key) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Pending(std::uint32_t run) const noexcept TOKROUTE_REQUIRES(mutex_);
  bool Lengthen(Path& path, std::span<const BlockKey> keys) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Start(Path& path, std::span<const BlockKey> keys) noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- Stretches.
  Stretch& StretchAt(std::uint32_t stretch) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return arena_.At<Stretch>(stretch_slabs_.Handle(stretch / kPerSlab))[stretch % kPerSlab];
  }
  std::uint32_t NewStretch(std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_);
  void FreeStretch(std::uint32_t owner, std::uint32_t stretch) noexcept TOKROUTE_REQUIRES(mutex_);
  std::uint32_t BeginOf(const Stretch& stretch) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return stretch.above != kNone ? StretchAt(stretch.above).end : 0;
  }
  Holder* Held(std::uint32_t run, std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_) {
    return FindHolder(run, TagOf(owner), 0);
  }
  std::uint32_t& DeepestIn(std::uint32_t run, const Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_) {
    return ExtraOf(At(run), holder).newer;
  }
  void Unlist(std::uint32_t owner, const Stretch& stretch) noexcept TOKROUTE_REQUIRES(mutex_);
  void Enlist(std::uint32_t owner, std::uint32_t stretch) noexcept TOKROUTE_REQUIRES(mutex_);
  bool CutAt(std::uint32_t run, std::uint32_t owner, std::uint32_t offset) noexcept TOKROUTE_REQUIRES(mutex_);
  void Pin(std::uint32_t run, std::uint32_t owner, std::uint32_t to) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Take(std::uint32_t run, std::uint32_t owner, std::uint32_t from, std::uint32_t to) noexcept
      TOKROUTE_REQUIRES(mutex_);
  std::int64_t CutTail(std::uint32_t owner, std::uint32_t stretch, std::int64_t most) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void Merge(std::uint32_t run, std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_);
  template <class F>
  void UpThePath(std::uint32_t owner, std::uint32_t run, std::uint32_t blocks, F&& f) noexcept
      TOKROUTE_REQUIRES(mutex_);

  // ---- Room.
  bool Relieve(std::uint32_t evictor) noexcept TOKROUTE_REQUIRES(mutex_);
  std::int64_t Evict(std::uint32_t owner, std::int64_t blocks) noexcept TOKROUTE_REQUIRES(mutex_);
  void EvictOverflow(std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_);
  std::int64_t CapacityOf(EndpointId id) const noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- Receipts.
  std::uint32_t AdmitAlive(EndpointId id, const FleetView* alive) noexcept TOKROUTE_REQUIRES(mutex_);
  bool CopyPath(const LiveReceipt& live, std::int64_t blocks) noexcept TOKROUTE_REQUIRES(mutex_);
  PrefixReceipt RecordPath(EndpointId id, Path& path, const FleetView* alive) noexcept TOKROUTE_REQUIRES(mutex_);
  void PinHeld(Path& path) noexcept TOKROUTE_REQUIRES(mutex_);
  void Book(Path& path) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Settle(std::atomic<std::uint32_t>& released) noexcept TOKROUTE_REQUIRES(mutex_);
  bool SettleEach() noexcept TOKROUTE_REQUIRES(mutex_);
  void Release(std::uint32_t entry) noexcept TOKROUTE_REQUIRES(mutex_);
  void Confirm(const LiveReceipt& live) noexcept TOKROUTE_REQUIRES(mutex_);

  const std::int64_t default_blocks_;
  ReceiptTable live_;  // Guards itself, as it says.
  struct alignas(64) ReleasedList {
    std::atomic<std::uint32_t> last{kNone};  // The others follow by `next`.
  };
  static constexpr std::uint32_t kReleasedLists = 16;
  std::array<ReleasedList, kReleasedLists> released_;  // By thread.
  bool settling_ TOKROUTE_GUARDED_BY(mutex_) = false;
  SlabSet stretch_slabs_ TOKROUTE_GUARDED_BY(mutex_){kUnitsPerSlab, kPerSlab};
  const Fills* pending_ TOKROUTE_GUARDED_BY(mutex_) = nullptr;  // Of the record that is going on.
  std::vector<BlockKey> moved_ TOKROUTE_GUARDED_BY(mutex_);     // Scratch of Move, in the budget.
  std::uint64_t last_serial_ TOKROUTE_GUARDED_BY(mutex_) = 0;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_HISTORY_INDEX_H_

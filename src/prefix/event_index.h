// The exact index: a run forest that holds what engines tell by their events, block by block, tier by tier, copy by
// copy.
//
// Private to src/prefix. A run whose parent nobody has told of is stored all the same: it becomes reachable when the
// parent comes, since links are implied by keys. What a run notes of its parent is a hint for walking up.
#ifndef TOKROUTE_SRC_PREFIX_EVENT_INDEX_H_
#define TOKROUTE_SRC_PREFIX_EVENT_INDEX_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "prefix/run_forest.h"
#include "tokroute/concepts.h"

namespace tokroute::internal {

class EventIndex final : public RunForest {
 public:
  explicit EventIndex(const PrefixIndexOptions& options) noexcept;
  void Match(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out,
             std::vector<std::uint32_t>& path) noexcept override;
  std::int64_t Sweep(std::int64_t memberships) noexcept override;

  KvResult Stored(const KvSource& source, std::optional<BlockKey> parent,
                  std::span<const BlockKey> keys) noexcept override;
  KvResult Removed(const KvSource& source, std::span<const BlockKey> keys) noexcept override;
  KvSequence Sequence(EndpointId id, std::uint64_t number) noexcept override;
  bool WantsResync(EndpointId id) noexcept override;
  void MarkResync(EndpointId id) noexcept override;
  void LookAt(std::span<const BlockKey> keys, EndpointId by, std::span<SeenBlock> out) noexcept override;
  absl::Status SaveTo(const std::function<bool(std::span<const std::byte>)>& write) override;
  absl::Status LoadFrom(const std::function<std::size_t(std::span<std::byte>)>& read,
                        const std::function<EndpointId(EndpointId)>& endpoint_of) override;

  // Speculations.
  std::int64_t RecordableBlocks(EndpointId id, std::int64_t blocks) noexcept override;
  PrefixReceipt Record(EndpointId id, std::span<const BlockKey> keys, bool shortened,
                       const FleetView* alive) noexcept override;
  void OnFirstToken(const PrefixReceipt& receipt) noexcept override;
  void OnReleased(PrefixReceipt& receipt, bool aborted) noexcept override;
  PrefixReceipt Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept override;

 private:
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
  struct SavedRun;

  // ---- What the forest asks.
  void OnEntered(Slot& slot) noexcept override TOKROUTE_REQUIRES(mutex_);
  void OnCleared(Slot& slot) noexcept override TOKROUTE_REQUIRES(mutex_);
  std::int64_t SweepableOf(const Owner& owner) const noexcept override TOKROUTE_REQUIRES(mutex_);
  bool SweepOwner(std::uint32_t owner, std::int64_t& memberships, std::int64_t& blocks) noexcept override
      TOKROUTE_REQUIRES(mutex_);
  std::int64_t BlocksPerSweptMembership() const noexcept override;
  absl::Status AuditMode(std::int64_t& units) override TOKROUTE_REQUIRES(mutex_);

  // ---- Runs and who holds what of them.
  Place PlaceOf(BlockKey key) const noexcept TOKROUTE_REQUIRES(mutex_);
  std::uint32_t StartRun(BlockKey parent_key, Place parent) noexcept TOKROUTE_REQUIRES(mutex_);
  std::uint32_t Append(std::uint32_t run, std::span<const BlockKey> keys) noexcept TOKROUTE_REQUIRES(mutex_);
  static std::uint32_t SideUnits(const Run& run, bool counted) noexcept {
    return (run.key_units + 63u) / 64u + (counted ? (run.key_units + 7u) / 8u : 0);
  }
  std::uint8_t* CountsOf(const Run& run, std::uint32_t bits) const noexcept {
    return reinterpret_cast<std::uint8_t*>(arena_.Address(bits + SideUnits(run, false)));
  }
  bool AddMember(std::uint32_t run, std::uint32_t owner, std::uint32_t tier) noexcept TOKROUTE_REQUIRES(mutex_);
  void DropMember(std::uint32_t run, const Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_);
  Extra& ExtraIn(std::uint32_t run, std::uint32_t tag, std::uint32_t tier) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Mark(std::uint32_t run, std::uint32_t owner, std::uint32_t tier, std::uint32_t from, std::uint32_t to) noexcept
      TOKROUTE_REQUIRES(mutex_);
  bool Unmark(std::uint32_t run, std::uint32_t owner, std::uint32_t tier, std::uint32_t offset) noexcept
      TOKROUTE_REQUIRES(mutex_);
  bool GiveSide(Run& run, Holder& holder, bool counted) noexcept TOKROUTE_REQUIRES(mutex_);
  void SetSide(Run& run, Holder& holder, std::uint32_t bits, bool counted) noexcept TOKROUTE_REQUIRES(mutex_);
  void Tidy(Run& run, Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_);
  bool TakeCopy(Run& run, Holder& holder, std::uint32_t offset) noexcept TOKROUTE_REQUIRES(mutex_);
  void AddCopies(Run& run, Holder& holder, std::uint32_t from, std::uint32_t to) noexcept TOKROUTE_REQUIRES(mutex_);
  KvResult StoreKeys(std::uint32_t owner, std::uint32_t tier, BlockKey parent, std::span<const BlockKey> keys,
                     std::size_t& stored) noexcept TOKROUTE_REQUIRES(mutex_);
  KvResult Refuse(KvResult result, std::uint32_t slot) noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- Speculations.
  void Forget(std::uint32_t run, std::uint32_t owner, std::uint32_t from, std::uint32_t to) noexcept
      TOKROUTE_REQUIRES(mutex_);
  Speculation* Find(const PrefixReceipt& receipt) noexcept TOKROUTE_REQUIRES(mutex_);
  PrefixReceipt Speculate(EndpointId id, std::span<const BlockKey> keys, const FleetView* alive) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void Unspeculate(std::uint32_t owner, BlockKey key) noexcept TOKROUTE_REQUIRES(mutex_);
  void Withdraw(Speculation& speculation) noexcept TOKROUTE_REQUIRES(mutex_);
  void ExpireSpeculations(std::chrono::nanoseconds now) noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- Orphans.
  bool Reaches(Place place) noexcept TOKROUTE_REQUIRES(mutex_);
  bool KeepOrphans(std::uint32_t owner, std::uint32_t tier, BlockKey parent, std::span<const BlockKey> keys) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void CutOrphans(std::size_t stored) noexcept TOKROUTE_REQUIRES(mutex_);
  void Unawait(BlockKey parent) noexcept TOKROUTE_REQUIRES(mutex_);
  void Settle(Orphans& orphans, bool adopted) noexcept TOKROUTE_REQUIRES(mutex_);
  void Adopt(std::span<const BlockKey> keys) noexcept TOKROUTE_REQUIRES(mutex_);
  void ExpireOrphans() noexcept TOKROUTE_REQUIRES(mutex_);

  void Restore(std::uint32_t owner, BlockKey parent_key, std::span<const BlockKey> keys, std::uint32_t tier,
               std::uint32_t cutoff, std::span<const std::uint64_t> bits) noexcept TOKROUTE_REQUIRES(mutex_);

  std::deque<Speculation> speculations_ TOKROUTE_GUARDED_BY(mutex_);  // By deadline, which is also by serial.
  std::deque<Orphans> orphans_ TOKROUTE_GUARDED_BY(mutex_);           // By deadline.
  std::unordered_map<BlockKey, std::uint32_t> awaited_ TOKROUTE_GUARDED_BY(mutex_);  // By how many of them.
  std::uint64_t last_serial_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  std::atomic<std::int64_t> next_deadline_{kNever};  // Of the speculations.
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_EVENT_INDEX_H_

// What a PrefixIndex works with: one of two structures, by its mode.
#ifndef TOKROUTE_SRC_PREFIX_PREFIX_ENGINE_H_
#define TOKROUTE_SRC_PREFIX_PREFIX_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "tokroute/fleet_view.h"
#include "tokroute/prefix/kv_event.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute::internal {

// Of an index's memory, what goes into segments; the rest is for owners, receipts and the table's shards, which must be
// able to grow when those are full.
constexpr std::int64_t SegmentLimit(std::int64_t max_bytes) noexcept {
  return max_bytes - (max_bytes / 16 > 1 << 20 ? max_bytes / 16 : 1 << 20);
}

inline constexpr std::int64_t kMostCapacityTokens = std::int64_t{1} << 40;

// What an index knows of a block.
struct SeenBlock {
  bool here = false;
  BlockKey parent = 0;  // 0: it begins prompts, or the index does not have it.
};

// As PrefixIndex says of each. Bad options and keys made with other options do not get here. What only one mode has,
// the other answers by the defaults.
class PrefixEngine {
 public:
  PrefixEngine() = default;
  virtual ~PrefixEngine() = default;
  PrefixEngine(const PrefixEngine&) = delete;
  PrefixEngine& operator=(const PrefixEngine&) = delete;

  virtual void Match(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out,
                     std::vector<std::uint32_t>& path) noexcept = 0;
  virtual void RemoveEndpoint(EndpointId id) noexcept = 0;
  virtual void ClearEndpoint(EndpointId id) noexcept = 0;
  virtual void RetireDead(const FleetView& alive) noexcept = 0;
  virtual std::int64_t Sweep(std::int64_t memberships) noexcept = 0;
  virtual PrefixIndexStats Stats() noexcept = 0;
  virtual std::int64_t HeldBlocks(EndpointId id) noexcept = 0;
  virtual absl::Status Audit() = 0;
  // Of HeldBlocks, what lies in device memory. Never waits.
  virtual std::int64_t DeviceBlocks(EndpointId id) const noexcept = 0;

  // Requests. `shortened`: the keys are not all of the prompt's.
  virtual std::int64_t RecordableBlocks(EndpointId id, std::int64_t blocks) noexcept = 0;
  virtual PrefixReceipt Record(EndpointId id, std::span<const BlockKey> keys, bool shortened,
                               const FleetView* alive) noexcept = 0;
  virtual void OnFirstToken(const PrefixReceipt& receipt) noexcept = 0;
  virtual void OnReleased(PrefixReceipt& receipt, bool aborted) noexcept = 0;
  virtual PrefixReceipt Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept = 0;
  virtual void CountRefusal() noexcept = 0;
  // Once, at the start. False: no memory.
  virtual bool Reserve(std::int64_t bytes) noexcept = 0;
  // Approximate mode only: in exact mode the engine keeps to its own capacity.
  virtual absl::Status SetCapacity(EndpointId, std::int64_t) { return absl::OkStatus(); }

  // Exact mode only: events ...
  virtual KvResult Stored(const KvSource&, std::optional<BlockKey>, std::span<const BlockKey>) noexcept {
    return KvResult::kNotExact;
  }
  virtual KvResult Removed(const KvSource&, std::span<const BlockKey>) noexcept { return KvResult::kNotExact; }
  virtual KvSequence Sequence(EndpointId, std::uint64_t) noexcept { return KvSequence::kDuplicate; }
  virtual bool WantsResync(EndpointId) noexcept { return false; }
  virtual void MarkResync(EndpointId) noexcept {}
  // Of each key, whether `by` holds its block in some tier (nobody, that is incarnation 0: whether anyone does). What
  // is only speculated on is not held.
  virtual void LookAt(std::span<const BlockKey>, EndpointId, std::span<SeenBlock>) noexcept {}

  // ... and snapshots.
  virtual absl::Status SaveTo(const std::function<bool(std::span<const std::byte>)>&) {
    return absl::FailedPreconditionError("PrefixIndex::Save: want an exact index");
  }
  virtual absl::Status LoadFrom(const std::function<std::size_t(std::span<std::byte>)>&,
                                const std::function<EndpointId(EndpointId)>&) {
    return absl::FailedPreconditionError("PrefixIndex::Load: want an exact index");
  }
};

std::unique_ptr<PrefixEngine> MakeHistoryIndex(const PrefixIndexOptions& options);
std::unique_ptr<PrefixEngine> MakeEventIndex(const PrefixIndexOptions& options);

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_PREFIX_ENGINE_H_

// EventDrivenPrefix: the request producer in front of an exact PrefixIndex, which engines' KV events keep.
//
//   auto index = tokroute::PrefixIndex::Create({.mode = tokroute::IndexMode::kExact, .clock = clock});
//   auto router = MakeRouter(fleet, {}, Producers(EventDrivenPrefix(*index), InFlightLoad()), ...);
//   (*index)->Stored({endpoint_id}, parent, keys);  // From the engine's event stream, on any thread.
#ifndef TOKROUTE_PREFIX_EVENT_DRIVEN_PREFIX_H_
#define TOKROUTE_PREFIX_EVENT_DRIVEN_PREFIX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/prefix/approximate_prefix.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
inline namespace v0 {

// As ApproximatePrefix, but what endpoints hold is what their events said, in which tier, and besides what booked
// requests are about to store (PrefixIndexOptions::speculative_ttl). Fill never waits for events that are being taken.
class EventDrivenPrefix {
 public:
  static constexpr std::string_view kName = "event-driven-prefix";
  using Produces = Signals<MatchedTokens, WeightedMatchedTokens, UncachedTokens, MatchedTokensByTier, KvTokensHeld>;
  using Own = WritableColumns<Produces>;
  using Receipt = PrefixReceipt;
  using Workspace = ApproximatePrefix::Workspace;

  explicit EventDrivenPrefix(std::shared_ptr<PrefixIndex> index) : prefix_(std::move(index)) {}

  absl::Status Check() const {
    if (absl::Status status = prefix_.Check(); !status.ok()) return status;
    if (index()->options().mode == IndexMode::kExact) return absl::OkStatus();
    return absl::InvalidArgumentError("EventDrivenPrefix.index: want an exact prefix index, got an approximate one");
  }
  RequestFault Check(const Request& request) const noexcept { return prefix_.Check(request); }

  // O(prompt + rows).
  void Fill(const Request& request, const FleetView& fleet, Workspace& workspace, Own own) noexcept {
    prefix_.Fill(request, fleet, workspace, own.Part<ApproximatePrefix::Produces>());
    const std::int64_t block_size = index()->options().block_size;
    const auto by_tier = own.Column<MatchedTokensByTier>();
    for (const PrefixMatch::Holder& holder : workspace.match.holders()) {
      if (holder.endpoint.slot >= own.width() || !fleet.Alive(holder.endpoint)) continue;
      TokensByTier& tokens = by_tier[holder.endpoint.slot];
      for (std::size_t tier = 0; tier < tokens.size(); ++tier) tokens[tier] = holder.tier_blocks[tier] * block_size;
    }
    const auto held = own.Column<KvTokensHeld>();
    for (Row row = 0; row < own.width(); ++row) held[row] = index()->DeviceBlocks(fleet.At(row)) * block_size;
  }
  void FillNew(const Request& request, Own own, Row row) noexcept {
    prefix_.FillNew(request, own.Part<ApproximatePrefix::Produces>(), row);
  }
  Receipt Record(const Request& request, const FleetView& fleet, Workspace& workspace,
                 const Booking& booking) noexcept {
    return prefix_.Record(request, fleet, workspace, booking);
  }
  void OnFirstToken(Receipt& receipt) noexcept { prefix_.OnFirstToken(receipt); }
  void OnReleased(Receipt& receipt, const Outcome& outcome) noexcept { prefix_.OnReleased(receipt, outcome); }
  Receipt Move(Receipt& receipt, const FleetView& fleet, const Booking& to) noexcept {
    return prefix_.Move(receipt, fleet, to);
  }
  void OnFleetChanged(const FleetView& fleet) noexcept { prefix_.OnFleetChanged(fleet); }

  const std::shared_ptr<PrefixIndex>& index() const noexcept { return prefix_.index(); }

 private:
  ApproximatePrefix prefix_;
};
static_assert(RequestProducer<EventDrivenPrefix>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_EVENT_DRIVEN_PREFIX_H_

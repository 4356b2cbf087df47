// ApproximatePrefix: the request producer in front of a PrefixIndex. Hash and match before the decision, record after.
//
//   auto index = tokroute::PrefixIndex::Create({.block_size = 16});
//   auto router = MakeRouter(fleet, {}, Producers(ApproximatePrefix(*index), InFlightLoad()), ...);
#ifndef TOKROUTE_PREFIX_APPROXIMATE_PREFIX_H_
#define TOKROUTE_PREFIX_APPROXIMATE_PREFIX_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/endpoint.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
inline namespace v0 {

// One index may serve several routers over one fleet. A request with text only, or shorter than a block, matches nothing
// and records nothing. Endpoints' CapacityTokens (traits) become the index's capacities; 0 leaves
// what the index was told before. A request with block keys of
// another block size is refused.
class ApproximatePrefix {
 public:
  static constexpr std::string_view kName = "approximate-prefix";
  using Produces = Signals<MatchedTokens, WeightedMatchedTokens, UncachedTokens>;
  using Own = WritableColumns<Produces>;
  using Receipt = PrefixReceipt;
  struct Workspace {
    PromptKeys keys;
    PrefixMatch match;
  };

  explicit ApproximatePrefix(std::shared_ptr<PrefixIndex> index) : index_(std::move(index)) {}

  absl::Status Check() const {
    if (index_ != nullptr) return absl::OkStatus();
    return absl::InvalidArgumentError("ApproximatePrefix.index: want a prefix index, got null");
  }
  RequestFault Check(const Request& request) const noexcept {
    const std::int32_t ours = index_->options().block_size;
    if (request.block_keys.empty() || request.block_size == ours) return {};
    return {"Request.block_size", request.block_size, ours, ours};
  }

  void Fill(const Request& request, const FleetView& fleet, Workspace& workspace, Own own) noexcept {
    const std::int64_t prompt = PromptTokens(request);
    const std::int64_t block_size = index_->options().block_size;
    const auto matched = own.Column<MatchedTokens>();
    const auto weighted = own.Column<WeightedMatchedTokens>();
    const auto uncached = own.Column<UncachedTokens>();
    for (std::int64_t& tokens : uncached) tokens = prompt;
    workspace.keys.Reset(index_->key_options(), request);
    index_->Match(workspace.keys, workspace.match);
    for (const PrefixMatch::Holder& holder : workspace.match.holders()) {
      const Row row = holder.endpoint.slot;
      if (row >= own.width() || !fleet.Alive(holder.endpoint)) continue;
      const std::int64_t tokens = holder.blocks * block_size;
      matched[row] = tokens;
      weighted[row] = holder.weighted_blocks * static_cast<double>(block_size);
      uncached[row] = tokens < prompt ? prompt - tokens : 0;
    }
  }
  void FillNew(const Request& request, Own own, Row row) noexcept {
    own.Column<UncachedTokens>()[row] = PromptTokens(request);
  }
  Receipt Record(const Request&, const FleetView& fleet, Workspace& workspace, const Booking& booking) noexcept {
    return index_->Record(booking.endpoint, workspace.keys, &fleet);
  }
  void OnFirstToken(Receipt& receipt) noexcept { index_->OnFirstToken(receipt); }
  // Works on a copy: the ticket's first token may be reading the receipt at this moment.
  void OnReleased(Receipt& receipt, const Outcome& outcome) noexcept {
    Receipt copy = receipt;
    index_->OnReleased(copy, outcome.aborted);
  }
  Receipt Move(Receipt& receipt, const FleetView& fleet, const Booking& to) noexcept {
    return index_->Move(receipt, to.endpoint, &fleet);
  }
  // As if a request for all of it had come and gone. The response's last token was sampled and never computed, so the
  // block that it would fill is not held yet.
  void Remember(const Request& conversation, const FleetView& fleet, Workspace& workspace, EndpointId at) noexcept {
    Request computed = conversation;
    const std::int64_t tokens = PromptTokens(conversation);
    const std::int64_t blocks = (tokens - 1) / index_->options().block_size;  // 0 also for none at all.
    if (!computed.tokens.empty()) computed.tokens = computed.tokens.first(computed.tokens.size() - 1);
    computed.prompt_tokens = -1;
    if (static_cast<std::int64_t>(computed.block_keys.size()) > blocks) {
      computed.block_keys = computed.block_keys.first(static_cast<std::size_t>(blocks));
    }
    workspace.keys.Reset(index_->key_options(), computed);
    PrefixReceipt receipt = index_->Record(at, workspace.keys, &fleet);
    index_->OnFirstToken(receipt);
    index_->OnReleased(receipt, /*aborted=*/false);
  }
  void OnEndpointAdded(EndpointId id, const EndpointFacts& facts) noexcept {
    if (facts.capacity_tokens > 0) (void)index_->SetCapacity(id, facts.capacity_tokens);
  }
  void OnFleetChanged(const FleetView& fleet) noexcept { index_->RetireDead(fleet); }

  const std::shared_ptr<PrefixIndex>& index() const noexcept { return index_; }

 private:
  std::shared_ptr<PrefixIndex> index_;
};
static_assert(RequestProducer<ApproximatePrefix>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_APPROXIMATE_PREFIX_H_

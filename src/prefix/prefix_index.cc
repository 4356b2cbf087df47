#include "tokroute/prefix/prefix_index.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "prefix/prefix_engine.h"

namespace tokroute {
inline namespace v0 {
namespace {

constexpr std::int64_t kLeastBytes = std::int64_t{4} << 20, kMostBytes = std::int64_t{128} << 30;

absl::Status OutOfRange(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  return absl::InvalidArgumentError(
      absl::StrCat("PrefixIndexOptions.", field, ": want ", least, " .. ", most, ", got ", value));
}

}  // namespace

std::int64_t PrefixMatch::BlocksOf(EndpointId endpoint) const noexcept {
  const auto it =
      std::lower_bound(holders_.begin(), holders_.end(), endpoint.slot,
                       [](const Holder& holder, std::uint32_t slot) { return holder.endpoint.slot < slot; });
  return it != holders_.end() && it->endpoint == endpoint ? it->blocks : 0;
}

absl::StatusOr<std::shared_ptr<PrefixIndex>> PrefixIndex::Create(const PrefixIndexOptions& options) {
  if (options.block_size < kMinBlockSize || options.block_size > kMaxBlockSize) {
    return OutOfRange("block_size", options.block_size, kMinBlockSize, kMaxBlockSize);
  }
  if (options.scheme != KeyScheme::kXxh3 && options.scheme != KeyScheme::kXxh64Chain) {
    return OutOfRange("scheme", static_cast<std::int64_t>(options.scheme), 0, 1);
  }
  if (options.scheme == KeyScheme::kXxh64Chain && options.key_seed != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "PrefixIndexOptions.key_seed: want 0 with kXxh64Chain, which has no seed, got ", options.key_seed));
  }
  if (options.default_capacity_tokens < options.block_size ||
      options.default_capacity_tokens > internal::kMostCapacityTokens) {
    return OutOfRange("default_capacity_tokens", options.default_capacity_tokens, options.block_size,
                      internal::kMostCapacityTokens);
  }
  if (options.mode != IndexMode::kApproximate && options.mode != IndexMode::kExact) {
    return OutOfRange("mode", static_cast<std::int64_t>(options.mode), 0, 1);
  }
  const std::array<std::pair<const char*, double>, kStorageTiers> weights{
      {{"tier_weights.device", options.tier_weights.device},
       {"tier_weights.host", options.tier_weights.host},
       {"tier_weights.disk", options.tier_weights.disk},
       {"tier_weights.unknown", options.tier_weights.unknown}}};
  for (const auto& [field, weight] : weights) {
    if (!(weight >= 0 && weight <= 1)) {  // Also catches NaN.
      return absl::InvalidArgumentError(absl::StrCat("PrefixIndexOptions.", field, ": want 0 .. 1, got ", weight));
    }
  }
  if (options.orphan_ttl.count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("PrefixIndexOptions.orphan_ttl: want >= 0 ns, got ", options.orphan_ttl.count()));
  }
  if (options.max_orphan_blocks < 0 || options.max_orphan_blocks > std::int64_t{1} << 24) {
    return OutOfRange("max_orphan_blocks", options.max_orphan_blocks, 0, std::int64_t{1} << 24);
  }
  if (options.speculative_ttl.count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("PrefixIndexOptions.speculative_ttl: want >= 0 ns, got ", options.speculative_ttl.count()));
  }
  if (options.max_bytes < kLeastBytes || options.max_bytes > kMostBytes) {
    return OutOfRange("max_bytes", options.max_bytes, kLeastBytes, kMostBytes);
  }
  const std::int64_t most_reserve = internal::SegmentLimit(options.max_bytes);
  if (options.reserve_bytes < 0 || options.reserve_bytes > most_reserve) {
    return OutOfRange("reserve_bytes", options.reserve_bytes, 0, most_reserve);
  }
  if ((options.memory.allocate == nullptr) != (options.memory.release == nullptr)) {
    return absl::InvalidArgumentError("PrefixIndexOptions.memory: want both allocate and release, or neither");
  }
  auto engine =
      options.mode == IndexMode::kExact ? internal::MakeEventIndex(options) : internal::MakeHistoryIndex(options);
  if (!engine->Reserve(options.reserve_bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("PrefixIndexOptions.reserve_bytes: no memory for ", options.reserve_bytes, " bytes"));
  }
  return std::shared_ptr<PrefixIndex>(new PrefixIndex(options, std::move(engine)));
}

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options, std::unique_ptr<internal::PrefixEngine> engine) noexcept
    : options_(options), engine_(std::move(engine)) {}
PrefixIndex::~PrefixIndex() = default;

void PrefixIndex::Match(PromptKeys& keys, PrefixMatch& out) const noexcept {
  out.holders_.clear();
  out.prompt_blocks_ = 0;
  if (keys.options() != key_options()) return;
  out.prompt_blocks_ = keys.block_count();
  engine_->Match(keys, out.holders_, out.path_);
}

PrefixReceipt PrefixIndex::Record(EndpointId endpoint, PromptKeys& keys, const FleetView* alive) noexcept {
  if (keys.options() != key_options() || keys.block_count() == 0) {
    // Nothing to record in a short prompt, which is nobody's fault; foreign keys are somebody's.
    if (keys.options() != key_options()) engine_->CountRefusal();
    return {};
  }
  const std::int64_t blocks = engine_->RecordableBlocks(endpoint, keys.block_count());
  return engine_->Record(endpoint, keys.Ensure(blocks), blocks < keys.block_count(), alive);
}

void PrefixIndex::OnFirstToken(PrefixReceipt& receipt) noexcept { engine_->OnFirstToken(receipt); }
void PrefixIndex::OnReleased(PrefixReceipt& receipt, bool aborted) noexcept { engine_->OnReleased(receipt, aborted); }
PrefixReceipt PrefixIndex::Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept {
  return engine_->Move(from, to, alive);
}
absl::Status PrefixIndex::SetCapacity(EndpointId endpoint, std::int64_t tokens) {
  if (endpoint.incarnation == 0 || endpoint.slot >= kMaxEndpoints) {
    return absl::InvalidArgumentError(absl::StrCat("PrefixIndex::SetCapacity: endpoint: want a slot below ",
                                                   kMaxEndpoints, " and an incarnation > 0, got slot ", endpoint.slot,
                                                   ", incarnation ", endpoint.incarnation));
  }
  if (tokens < 0 || tokens > internal::kMostCapacityTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("PrefixIndex::SetCapacity: tokens: want 0 .. ", internal::kMostCapacityTokens, ", got ", tokens));
  }
  return engine_->SetCapacity(endpoint, tokens);
}
void PrefixIndex::RemoveEndpoint(EndpointId endpoint) noexcept { engine_->RemoveEndpoint(endpoint); }
void PrefixIndex::ClearEndpoint(EndpointId endpoint) noexcept { engine_->ClearEndpoint(endpoint); }
void PrefixIndex::RetireDead(const FleetView& alive) noexcept { engine_->RetireDead(alive); }
std::int64_t PrefixIndex::Sweep(std::int64_t memberships) noexcept { return engine_->Sweep(memberships); }
PrefixIndexStats PrefixIndex::Stats() const noexcept { return engine_->Stats(); }
std::int64_t PrefixIndex::HeldBlocks(EndpointId endpoint) const noexcept { return engine_->HeldBlocks(endpoint); }
std::int64_t PrefixIndex::DeviceBlocks(EndpointId endpoint) const noexcept { return engine_->DeviceBlocks(endpoint); }
absl::Status PrefixIndex::Audit() const { return engine_->Audit(); }

KvResult PrefixIndex::Stored(const KvSource& source, std::optional<BlockKey> parent,
                             std::span<const BlockKey> keys) noexcept {
  return engine_->Stored(source, parent, keys);
}
KvResult PrefixIndex::Removed(const KvSource& source, std::span<const BlockKey> keys) noexcept {
  return engine_->Removed(source, keys);
}
KvSequence PrefixIndex::Sequence(EndpointId endpoint, std::uint64_t number) noexcept {
  return engine_->Sequence(endpoint, number);
}
absl::Status PrefixIndex::Save(const std::function<bool(std::span<const std::byte>)>& write) const {
  return engine_->SaveTo(write);
}
absl::Status PrefixIndex::Load(const std::function<std::size_t(std::span<std::byte>)>& read,
                               const std::function<EndpointId(EndpointId)>& endpoint_of) {
  return engine_->LoadFrom(read, endpoint_of);
}
bool PrefixIndex::WantsResync(EndpointId endpoint) const noexcept { return engine_->WantsResync(endpoint); }

}  // namespace v0
}  // namespace tokroute

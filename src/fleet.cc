#include "tokroute/fleet.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/internal/exact.h"
#include "tokroute/internal/option_error.h"
#include "internal/text.h"

namespace tokroute::internal {
namespace {

absl::Status CheckFacts(const EndpointFacts& facts) {
  if (facts.name.empty()) return absl::InvalidArgumentError("Endpoint name: want a non-empty string, got \"\"");
  const double rate = facts.peak_prefill_throughput;
  if (!(rate >= 0) || !IsFinite(rate)) {
    return OptionError(absl::StrCat("Endpoint ", facts.name, ", PeakPrefillThroughput"), ">= 0 tokens/s and finite", rate);
  }
  if (facts.capacity_tokens < 0 || facts.capacity_tokens > std::int64_t{1} << 40) {
    return OptionError(absl::StrCat("Endpoint ", facts.name, ", CapacityTokens"), "0 .. 2^40 tokens", facts.capacity_tokens);
  }
  if (facts.block_size < 0) {
    return OptionError(absl::StrCat("Endpoint ", facts.name, ", BlockSize"), ">= 0 tokens", std::int64_t{facts.block_size});
  }
  if (!(facts.weight >= 0) || !IsFinite(facts.weight)) {
    return OptionError(absl::StrCat("Endpoint ", facts.name, ", Weight"), ">= 0 and finite", facts.weight);
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<Row>& FleetSnapshot::RowsFor(std::string_view model) const noexcept {
  if (model.empty() || !names_models) return routable;
  const auto at = std::lower_bound(by_model.begin(), by_model.end(), model,
                                   [](const ModelRows& m, std::string_view name) { return m.model < name; });
  return at != by_model.end() && at->model == model ? at->rows : any_model;
}

FleetCore::FleetCore() = default;

absl::Status FleetCore::Check(EndpointId id) const {
  if (id.incarnation == 0 || id.slot >= slots_.size() || slots_[id.slot].record == nullptr ||
      slots_[id.slot].incarnation != id.incarnation) {
    return absl::NotFoundError(absl::StrCat("endpoint id {", id.slot, ", ", id.incarnation, "}: not in the fleet"));
  }
  return absl::OkStatus();
}

absl::StatusOr<EndpointId> FleetCore::Add(std::shared_ptr<const EndpointRecord> record) {
  if (absl::Status status = CheckFacts(record->facts); !status.ok()) return status;
  MutexLock lock(mutex_);
  if (rows_.contains(record->facts.name)) {
    return absl::AlreadyExistsError(absl::StrCat("endpoint name \"", record->facts.name, "\": already in the fleet"));
  }
  Row row = static_cast<Row>(slots_.size());
  if (!free_.empty()) {
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    row = free_.back();
    free_.pop_back();
  } else if (row == kMaxEndpoints) {
    return absl::ResourceExhaustedError(absl::StrCat("endpoint \"", record->facts.name, "\": the fleet is full, want at most ",
                                                     kMaxEndpoints, " endpoints, got one more"));
  } else {
    slots_.emplace_back();
    born_.push_back(0);
    last_incarnation_.push_back(0);
  }
  rows_.emplace(record->facts.name, row);
  FleetSnapshot::Slot& slot = slots_[row];
  slot = {std::move(record), ++last_incarnation_[row], false, true};
  born_[row] = version_.load(std::memory_order_relaxed) + 1;
  incarnations_[row].store(slot.incarnation, std::memory_order_release);
  Changed();
  return EndpointId{row, slot.incarnation};
}

absl::Status FleetCore::Update(EndpointId id, std::shared_ptr<const EndpointRecord> record) {
  if (absl::Status status = CheckFacts(record->facts); !status.ok()) return status;
  // Swapped: the old record goes with the argument, after the lock; its destructor is the user's code.
  MutexLock lock(mutex_);
  if (absl::Status status = Check(id); !status.ok()) return status;
  FleetSnapshot::Slot& slot = slots_[id.slot];
  if (slot.record->facts.name != record->facts.name) {
    return absl::InvalidArgumentError(absl::StrCat("endpoint name: want \"", slot.record->facts.name,
                                                   "\" (an update keeps it), got \"", record->facts.name, "\""));
  }
  slot.record.swap(record);
  Changed();
  return absl::OkStatus();
}

absl::Status FleetCore::SetDrained(EndpointId id, bool drained) {
  MutexLock lock(mutex_);
  if (absl::Status status = Check(id); !status.ok()) return status;
  if (std::exchange(slots_[id.slot].drained, drained) != drained) Changed();
  return absl::OkStatus();
}

absl::Status FleetCore::SetEligible(EndpointId id, bool eligible) {
  MutexLock lock(mutex_);
  if (absl::Status status = Check(id); !status.ok()) return status;
  if (std::exchange(slots_[id.slot].eligible, eligible) != eligible) Changed();
  return absl::OkStatus();
}

absl::Status FleetCore::Remove(EndpointId id) {
  std::shared_ptr<const EndpointRecord> gone;
  std::shared_ptr<const FleetSnapshot> stale;  // Holds the record too.
  MutexLock lock(mutex_);
  if (absl::Status status = Check(id); !status.ok()) return status;
  FleetSnapshot::Slot& slot = slots_[id.slot];
  rows_.erase(slot.record->facts.name);
  gone = std::exchange(slot, {}).record;
  stale = std::move(snapshot_);
  incarnations_[id.slot].store(0, std::memory_order_release);
  if (last_incarnation_[id.slot] != std::numeric_limits<std::uint32_t>::max()) {  // Else the slot is used up.
    free_.push_back(id.slot);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }
  Changed();
  return absl::OkStatus();
}

EndpointId FleetCore::Find(std::string_view name) const {
  MutexLock lock(mutex_);
  const auto at = rows_.find(name);
  return at == rows_.end() ? EndpointId{} : EndpointId{at->second, slots_[at->second].incarnation};
}

std::shared_ptr<const EndpointRecord> FleetCore::Get(EndpointId id) const {
  MutexLock lock(mutex_);
  return Check(id).ok() ? slots_[id.slot].record : nullptr;
}

std::vector<EndpointId> FleetCore::Ids() const {
  MutexLock lock(mutex_);
  std::vector<EndpointId> ids;
  for (Row row = 0; row < slots_.size(); ++row) {
    if (slots_[row].record != nullptr) ids.push_back({row, slots_[row].incarnation});
  }
  return ids;
}

std::uint32_t FleetCore::size() const {
  MutexLock lock(mutex_);
  return static_cast<std::uint32_t>(rows_.size());
}

std::shared_ptr<const FleetSnapshot> FleetCore::Snapshot() const {
  std::shared_ptr<const FleetSnapshot> stale;
  MutexLock lock(mutex_);
  const std::uint64_t version = version_.load(std::memory_order_relaxed);
  if (snapshot_ != nullptr && snapshot_->version == version) return snapshot_;
  auto fresh = std::make_shared<FleetSnapshot>();
  fresh->version = version;
  fresh->slots = slots_;
  fresh->born = born_;
  for (Row row = 0; row < slots_.size(); ++row) {
    const FleetSnapshot::Slot& slot = slots_[row];
    if (slot.record == nullptr) continue;
    fresh->names_models |= !slot.record->facts.models.empty();
    for (const std::string& model : slot.record->facts.models) fresh->by_model.push_back({model, {}});
    if (!slot.Routable()) continue;
    fresh->routable.push_back(row);
    if (slot.record->facts.models.empty()) fresh->any_model.push_back(row);
  }
  auto& models = fresh->by_model;
  std::sort(models.begin(), models.end(), [](const auto& a, const auto& b) { return a.model < b.model; });
  models.erase(std::unique(models.begin(), models.end(), [](const auto& a, const auto& b) { return a.model == b.model; }),
               models.end());
  for (FleetSnapshot::ModelRows& rows : models) {
    for (Row row : fresh->routable) {
      const std::vector<std::string>& serves = slots_[row].record->facts.models;
      if (serves.empty() || std::binary_search(serves.begin(), serves.end(), rows.model)) rows.rows.push_back(row);
    }
  }
  stale = std::exchange(snapshot_, fresh);
  return fresh;
}

}  // namespace tokroute::internal

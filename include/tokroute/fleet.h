// Fleet: the endpoints known now. Any thread may change it while routers route over it.
//
//   tokroute::Fleet<Upstream> fleet;
//   absl::StatusOr<tokroute::EndpointId> id = fleet.Add({.host = "10.0.0.7:8000"});
//   fleet.Drain(*id);    // No new requests; what runs goes on.
//   fleet.Remove(*id);   // Tickets on it stay valid; their releases fall on nothing live.
#ifndef TOKROUTE_FLEET_H_
#define TOKROUTE_FLEET_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/endpoint.h"
#include "tokroute/fleet_view.h"
#include "tokroute/fwd.h"
#include "tokroute/internal/mutex.h"

namespace tokroute::internal {

// Everything about a fleet at one version. Immutable; made on demand, outside every router's lock.
struct FleetSnapshot {
  struct Slot {
    std::shared_ptr<const EndpointRecord> record;  // Null: nobody here.
    std::uint32_t incarnation = 0;
    bool drained = false, eligible = true;
    bool Routable() const noexcept { return record != nullptr && !drained && eligible; }
  };
  struct ModelRows {
    std::string model;
    std::vector<Row> rows;  // Routable rows that serve it, those that serve any model included. Ascending.
  };
  std::uint64_t version = 0;
  std::vector<Slot> slots;          // Indexed by row; its size is the width of every column in use.
  std::vector<std::uint64_t> born;  // Indexed by row: the version at which its incarnation was added.
  std::vector<Row> routable;        // Alive, not drained, eligible. Ascending.
  std::vector<ModelRows> by_model;  // Sorted by model; one for each model that any endpoint names.
  std::vector<Row> any_model;       // Routable rows that name no model.
  bool names_models = false;        // Whether any endpoint, routable or not, names one.

  // Candidates for a model; empty model: all that are routable.
  const std::vector<Row>& RowsFor(std::string_view model) const noexcept;
};

class FleetCore {
 public:
  FleetCore();
  absl::StatusOr<EndpointId> Add(std::shared_ptr<const EndpointRecord> record) TOKROUTE_EXCLUDES(mutex_);
  absl::Status Update(EndpointId id, std::shared_ptr<const EndpointRecord> record) TOKROUTE_EXCLUDES(mutex_);
  absl::Status SetDrained(EndpointId id, bool drained) TOKROUTE_EXCLUDES(mutex_);
  absl::Status SetEligible(EndpointId id, bool eligible) TOKROUTE_EXCLUDES(mutex_);
  absl::Status Remove(EndpointId id) TOKROUTE_EXCLUDES(mutex_);
  EndpointId Find(std::string_view name) const TOKROUTE_EXCLUDES(mutex_);
  std::shared_ptr<const EndpointRecord> Get(EndpointId id) const TOKROUTE_EXCLUDES(mutex_);
  std::vector<EndpointId> Ids() const TOKROUTE_EXCLUDES(mutex_);
  std::uint32_t size() const TOKROUTE_EXCLUDES(mutex_);

  // Moves on with every change, after the change is in place. Lock-free.
  std::uint64_t version() const noexcept { return version_.load(std::memory_order_acquire); }
  // The fleet as it is now. Builds one if anything changed since the last call: O(endpoints x models).
  std::shared_ptr<const FleetSnapshot> Snapshot() const TOKROUTE_EXCLUDES(mutex_);
  FleetView View(std::uint32_t width) const noexcept { return {incarnations_.data(), width}; }

 private:
  struct NameHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view s) const noexcept { return std::hash<std::string_view>()(s); }
  };
  absl::Status Check(EndpointId id) const TOKROUTE_REQUIRES(mutex_);
  void Changed() TOKROUTE_REQUIRES(mutex_) { version_.fetch_add(1, std::memory_order_acq_rel); }

  mutable Mutex mutex_;
  std::atomic<std::uint64_t> version_{1};
  std::array<std::atomic<std::uint32_t>, kMaxEndpoints> incarnations_{};  // Of who is there now; 0: nobody.
  std::vector<FleetSnapshot::Slot> slots_ TOKROUTE_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> born_ TOKROUTE_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> last_incarnation_ TOKROUTE_GUARDED_BY(mutex_);  // Per slot, also of empty ones.
  std::vector<Row> free_ TOKROUTE_GUARDED_BY(mutex_);                        // A min-heap: the lowest is used first.
  std::unordered_map<std::string, Row, NameHash, std::equal_to<>> rows_ TOKROUTE_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const FleetSnapshot> snapshot_ TOKROUTE_GUARDED_BY(mutex_);
};

}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {

// A handle: copies share one fleet. Every method may be called from any thread; none throws. Updates are copy on write:
// they never touch load, prefix index or running tickets, and a change is visible to the next Route that starts after
// it returns. At most kMaxEndpoints at a time. Slots are reused (the lowest first) under a new incarnation, so an id is
// never reissued.
//
// One prefix index or set of routers belongs to one fleet: ids of different fleets look alike.
template <class E>
class Fleet {
  static_assert(Endpoint<E>, "a Fleet's type needs `std::string_view name() const`, or EndpointTraits<E>::Name");

 public:
  Fleet() : core_(std::make_shared<internal::FleetCore>()) {}

  // kAlreadyExists for a name that is in the fleet, kInvalidArgument for an empty name or an attribute out of range
  // (named, with value and range), kResourceExhausted for the endpoint after kMaxEndpoints. O(log endpoints).
  absl::StatusOr<EndpointId> Add(E endpoint) { return core_->Add(Record(std::move(endpoint))); }

  // Replaces attributes; the name must stay. Load, index and tickets do not notice. kNotFound for an id that is gone.
  absl::Status Update(EndpointId id, E endpoint) { return core_->Update(id, Record(std::move(endpoint))); }

  // No new requests; what runs goes on. Resume takes it back. Both are idempotent; kNotFound for an id that is gone.
  absl::Status Drain(EndpointId id) { return core_->SetDrained(id, true); }
  absl::Status Resume(EndpointId id) { return core_->SetDrained(id, false); }

  // Outlier ejection: false takes it out of the candidates, true brings it back as it was, cache and load included.
  absl::Status SetEligible(EndpointId id, bool eligible) { return core_->SetEligible(id, eligible); }

  // Forgets it. Live tickets keep their E; what they release falls on nothing. The same name may be added again at once.
  absl::Status Remove(EndpointId id) { return core_->Remove(id); }

  // The id under a name; incarnation 0 if there is none. O(1).
  EndpointId Find(std::string_view name) const { return core_->Find(name); }
  // The endpoint as it is now; null if the id is gone. It stays valid for as long as the pointer is held.
  std::shared_ptr<const E> Get(EndpointId id) const {
    auto record = core_->Get(id);
    if (record == nullptr) return nullptr;
    const E* endpoint = &static_cast<const internal::TypedRecord<E>&>(*record).endpoint;
    return std::shared_ptr<const E>(std::move(record), endpoint);
  }
  std::vector<EndpointId> Ids() const { return core_->Ids(); }  // In slot order.
  std::uint32_t size() const { return core_->size(); }          // Drained and ejected ones included.

  const std::shared_ptr<internal::FleetCore>& core() const noexcept { return core_; }  // For routers.

 private:
  static std::shared_ptr<const EndpointRecord> Record(E&& endpoint) {
    EndpointFacts facts = internal::FactsOf(endpoint);
    return std::make_shared<const internal::TypedRecord<E>>(std::move(facts), std::move(endpoint));
  }
  std::shared_ptr<internal::FleetCore> core_;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_FLEET_H_

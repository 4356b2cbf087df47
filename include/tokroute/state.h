// State: what a router is made of besides its policies. The fleet as it is seen, the producers, all columns, the booking
// slab, and the one lock. Users hold it through Router and Ticket.
//
// The way of a request: Match (outside the lock: hash, match, fill the request columns), then one short section that
// reads the load columns, filters, scores, picks and books; then Record (outside again). So two requests that arrive
// together never both see the same idle endpoint, and nothing under the lock allocates or grows with the prompt.
//
// A ticket's first token and end take no lock: they set flags on its entry and queue it. Every section begins by settling
// the queues, so the books are up to date whenever somebody looks at them.
#ifndef TOKROUTE_STATE_H_
#define TOKROUTE_STATE_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/decision.h"
#include "tokroute/erased.h"
#include "tokroute/fleet.h"
#include "tokroute/internal/booking_slab.h"
#include "tokroute/internal/column_table.h"
#include "tokroute/internal/mutex.h"
#include "tokroute/internal/policy_base.h"
#include "tokroute/route_options.h"

namespace tokroute::internal {

class State {
 public:
  // Refuses what cannot work: bad options of producers or policies, a consumed signal that nobody fills, two producers of
  // one signal, no policy, two of one name. The caller owns one reference.
  static absl::StatusOr<State*> Create(std::shared_ptr<FleetCore> fleet, const RouterOptions& options,
                                       std::vector<AnyLoadProducer> load, std::vector<AnyRequestProducer> request,
                                       std::vector<std::shared_ptr<PolicyBase>> policies);

  // Router handles and tickets share it; the last one deletes it. Handles are counted here, tickets under the lock.
  void AddReference() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  void DropReference() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) Orphan();
  }

  // A ticket's first entry; or null and a refusal.
  BookingEntry* Route(const Request& request, const RouteOptions& options, Refusal& refusal) noexcept;
  bool Evaluate(const Request& request, const RouteOptions& options, Decision& decision, Refusal& refusal) noexcept;
  bool Reroute(BookingEntry* ticket, const Request& request, const RerouteOptions& options) noexcept;
  bool MoveTo(BookingEntry* ticket, EndpointId to, std::int64_t matched_tokens, Leg leg) noexcept;
  void FirstToken(BookingEntry* ticket) noexcept;
  void Finish(BookingEntry* ticket, const Outcome& outcome) noexcept;
  absl::Status Remember(const BookingEntry* ticket, EndpointId at, const Request& conversation) noexcept;
  void Drop(BookingEntry* ticket) noexcept;
  void SetDeadline(BookingEntry* ticket, std::chrono::nanoseconds deadline) noexcept;
  static bool Live(const BookingEntry* ticket) noexcept {
    return (ticket->events.load(std::memory_order_acquire) & BookingEntry::kClosing) == 0;
  }
  std::uint64_t Expire(std::chrono::nanoseconds now) noexcept;

  absl::Status SetPolicy(std::shared_ptr<PolicyBase> policy);
  absl::Status Feed(EndpointId id, std::string_view fact, const void* value);
  bool Read(EndpointId id, const SignalInfo& signal, void* value);
  absl::Status Audit();
  RouterMetrics Metrics();

 private:
  // What one routing thread works with. Pooled, so a warm router allocates nothing.
  struct Scratch {
    ColumnTable table;  // The state's columns and this scratch's own request columns.
    std::vector<std::unique_ptr<std::byte[], void (*)(void*)>> own;
    std::array<AnyRequestProducer::Workspace, kMaxRequestProducers> workspaces;
    // What a decision writes lies here and not in the state: two routing threads would pass these lines to and fro.
    Survivors survivors;
    std::unique_ptr<Row[]> survivor_rows;
    std::unique_ptr<double[]> totals;
    std::uint64_t version = 0;  // Of the fleet, when the request columns were filled ...
    std::uint32_t width = 0;    // ... and how many rows that was.
  };
  class ScratchLease;
  class Section;
  struct alignas(64) ScratchSlot {
    std::atomic<Scratch*> scratch{nullptr};
  };
  struct alignas(64) QueueSlot {
    BookingQueue queue;
  };
  struct OwnColumn {
    std::unique_ptr<std::byte[], void (*)(void*)> values;
    std::uint32_t position = 0, size = 0;
  };

  State(std::shared_ptr<FleetCore> fleet, const RouterOptions& options) noexcept;
  ~State();

  absl::Status Init(std::vector<std::shared_ptr<PolicyBase>> policies);
  absl::Status AddColumns(std::span<const SignalInfo> signals, std::string_view producer, bool per_request);
  std::unique_ptr<Scratch> NewScratch() const noexcept;

  std::vector<std::shared_ptr<PolicyBase>> CopyPolicies() TOKROUTE_REQUIRES(admin_mutex_) TOKROUTE_EXCLUDES(mutex_);
  bool Prepare(Request& request, RequestFault& fault) const noexcept;
  void SyncFleet() noexcept TOKROUTE_EXCLUDES(mutex_);
  void Match(const Request& request, Scratch& scratch) noexcept;
  // The rest is called inside the section.
  bool EnsureEntries(std::uint32_t count) noexcept TOKROUTE_REQUIRES(mutex_);
  void ResetNewRows(const Request& request, Scratch& scratch) noexcept TOKROUTE_REQUIRES(mutex_);
  const PolicyBase* FindPolicy(std::string_view name, std::shared_ptr<const PolicyBase>* found) noexcept
      TOKROUTE_REQUIRES(mutex_);
  bool Decide(const Request& request, Scratch& scratch, const LegPolicy& leg, std::span<const EndpointId> exclude,
              const EndpointId* also_exclude, std::uint64_t number, std::chrono::nanoseconds now, Trace* trace,
              Decision& decision, Refusal& refusal) noexcept TOKROUTE_REQUIRES(mutex_);
  RefusalReason WhyNobody(std::string_view model, std::uint32_t& considered) const noexcept TOKROUTE_REQUIRES(mutex_);
  void Book(BookingEntry& entry, const Request& request, EndpointId to, Leg leg, std::int64_t matched_tokens,
            std::uint64_t number) noexcept TOKROUTE_REQUIRES(mutex_);
  bool Current(const Booking& booking) const noexcept TOKROUTE_REQUIRES(mutex_);
  void ReleaseLeg(BookingEntry& entry, const Outcome& outcome) noexcept TOKROUTE_REQUIRES(mutex_);
  void Prefilled(BookingEntry* ticket) noexcept TOKROUTE_REQUIRES(mutex_);
  void End(BookingEntry* ticket, const Outcome& outcome) noexcept TOKROUTE_REQUIRES(mutex_);
  void Give(BookingEntry* ticket) noexcept TOKROUTE_REQUIRES(mutex_);
  void Settle(BookingEntry* first) noexcept TOKROUTE_REQUIRES(mutex_);
  void SettleAll() noexcept TOKROUTE_REQUIRES(mutex_);
  std::int64_t MatchedOn(const Scratch& scratch, Row row) const noexcept;
  // Outside again.
  void TellReleased(BookingEntry* ticket, const Outcome& outcome) noexcept;
  static void LetGo(BookingEntry* ticket) noexcept;
  void Add(BookingEntry* ticket, std::uint32_t events) noexcept TOKROUTE_EXCLUDES(mutex_);
  void Queue(BookingEntry* ticket) noexcept TOKROUTE_EXCLUDES(mutex_);
  void Orphan() noexcept TOKROUTE_EXCLUDES(mutex_);
  void CountIgnored(std::uint32_t events, bool ended) noexcept TOKROUTE_EXCLUDES(mutex_);
  static BookingEntry* FindLeg(BookingEntry* ticket, Leg leg) noexcept;

  // Fixed once made.
  const std::shared_ptr<FleetCore> fleet_;
  const RouterOptions options_;
  std::vector<AnyLoadProducer> load_;
  std::vector<AnyRequestProducer> request_;
  ColumnLayout layout_;
  std::vector<OwnColumn> columns_;  // Kept per endpoint. Written inside the section only.
  int matched_position_ = -1, rate_position_ = -1, weight_position_ = -1;

  std::atomic<std::uint64_t> references_{1};
  static constexpr std::uint32_t kScratchSlots = 64;
  std::array<ScratchSlot, kScratchSlots> scratch_slots_;

  Mutex admin_mutex_;  // Serialises SetPolicy; taken before mutex_.
  Mutex sync_mutex_;   // Serialises what producers are told of the fleet; taken before mutex_.
  std::shared_ptr<const FleetSnapshot> told_ TOKROUTE_GUARDED_BY(sync_mutex_);

  // Lines of their own for what changes with the fleet or the policies, ...
  alignas(64) std::atomic<std::uint64_t> synced_version_{0};
  std::atomic<std::uint32_t> synced_width_{0};
  std::shared_ptr<const FleetSnapshot> snapshot_ TOKROUTE_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> incarnations_ TOKROUTE_GUARDED_BY(mutex_);  // Whose load the columns hold, by row.
  std::vector<std::shared_ptr<PolicyBase>> policies_ TOKROUTE_GUARDED_BY(mutex_);
  ColumnTable table_ TOKROUTE_GUARDED_BY(mutex_);
  // ... for what any thread may touch at any time, ...
  alignas(64) Mutex mutex_;
  static constexpr std::uint32_t kQueues = 16;
  std::array<QueueSlot, kQueues> queues_;  // By thread.
  // ... and for what every section writes.
  alignas(64) std::uint64_t decisions_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  std::uint64_t tickets_ TOKROUTE_GUARDED_BY(mutex_) = 0;    // That are not gone.
  std::uint64_t deadlines_ TOKROUTE_GUARDED_BY(mutex_) = 0;  // Live tickets that have one.
  RouterMetrics metrics_ TOKROUTE_GUARDED_BY(mutex_);
  alignas(64) BookingSlab slab_ TOKROUTE_GUARDED_BY(mutex_);
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_STATE_H_

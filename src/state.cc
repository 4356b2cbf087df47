#include "tokroute/state.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "internal/text.h"
#include "internal/thread_number.h"

namespace tokroute::internal {
namespace {

constexpr std::int64_t kNoDeadline = std::numeric_limits<std::int64_t>::max();

// A column is zeroed address space until a row is used: calloc of this size maps pages that nobody has touched.
std::unique_ptr<std::byte[], void (*)(void*)> NewColumn(std::uint32_t value_size) noexcept {
  return {static_cast<std::byte*>(std::calloc(kMaxEndpoints, value_size)), &std::free};
}

Refusal RefuseFault(const RequestFault& fault) noexcept {
  Refusal refusal;
  refusal.reason = RefusalReason::kBadRequest;
  refusal.fault = fault;
  return refusal;
}

bool Excluded(EndpointId id, std::span<const EndpointId> exclude) noexcept {
  return std::find(exclude.begin(), exclude.end(), id) != exclude.end();
}

}  // namespace

// ---- The critical section: the lock, with everything settled that happened before.

class TOKROUTE_SCOPED_CAPABILITY State::Section {
 public:
  explicit Section(State& state) noexcept TOKROUTE_ACQUIRE(state.mutex_) : state_(state) {
    state.mutex_.lock();
    state.SettleAll();
  }
  ~Section() TOKROUTE_RELEASE() { state_.mutex_.unlock(); }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

 private:
  State& state_;
};

// ---- Scratch: one per routing thread, from a pool.

class State::ScratchLease {
 public:
  explicit ScratchLease(State& state) noexcept : state_(state) {
    // A slot of its own for each of the first 64 threads, so that a thread is warm after its first request, whatever the
    // others do. Threads that share one make do with the next.
    home_ = ThreadNumber() % kScratchSlots;
    scratch_ = state_.scratch_slots_[home_].scratch.exchange(nullptr, std::memory_order_acquire);
    if (scratch_ == nullptr) scratch_ = state_.NewScratch().release();
  }
  ~ScratchLease() {
    if (scratch_ == nullptr) return;
    for (std::uint32_t i = 0; i < kScratchSlots; ++i) {
      std::atomic<Scratch*>& slot = state_.scratch_slots_[(home_ + i) % kScratchSlots].scratch;
      Scratch* empty = nullptr;
      if (slot.compare_exchange_strong(empty, scratch_, std::memory_order_release, std::memory_order_relaxed)) return;
    }
    delete scratch_;  // More threads at once than slots.
  }
  ScratchLease(const ScratchLease&) = delete;
  ScratchLease& operator=(const ScratchLease&) = delete;
  Scratch* get() const noexcept { return scratch_; }

 private:
  State& state_;
  Scratch* scratch_ = nullptr;
  std::uint32_t home_ = 0;
};

std::unique_ptr<State::Scratch> State::NewScratch() const noexcept {
  std::unique_ptr<Scratch> scratch(new (std::nothrow) Scratch);
  if (scratch == nullptr) return nullptr;
  scratch->survivor_rows.reset(new (std::nothrow) Row[3 * kMaxEndpoints]);
  scratch->totals.reset(new (std::nothrow) double[kMaxEndpoints]);
  if (scratch->survivor_rows == nullptr || scratch->totals == nullptr) return nullptr;
  for (std::uint32_t i = 0; i < 3; ++i) {
    scratch->survivors.buffers[i] = &scratch->survivor_rows[std::size_t{i} * kMaxEndpoints];
  }
  for (const OwnColumn& column : columns_) scratch->table.columns[column.position] = column.values.get();
  for (std::uint32_t i = 0; i < layout_.count; ++i) {
    if (!layout_.per_request[i]) continue;
    auto column = NewColumn(layout_.columns[i].size);
    if (column == nullptr) return nullptr;
    scratch->table.columns[i] = column.get();
    scratch->own.push_back(std::move(column));
  }
  return scratch;
}

// ---- Making one.

State::State(std::shared_ptr<FleetCore> fleet, const RouterOptions& options) noexcept
    : fleet_(std::move(fleet)), options_(options) {}

State::~State() {
  for (ScratchSlot& slot : scratch_slots_) delete slot.scratch.load(std::memory_order_relaxed);
}

absl::StatusOr<State*> State::Create(std::shared_ptr<FleetCore> fleet, const RouterOptions& options,
                                     std::vector<AnyLoadProducer> load, std::vector<AnyRequestProducer> request,
                                     std::vector<std::shared_ptr<PolicyBase>> policies) {
  auto* state = new State(std::move(fleet), options);
  state->load_ = std::move(load);
  state->request_ = std::move(request);
  if (absl::Status status = state->Init(std::move(policies)); !status.ok()) {
    state->DropReference();
    return status;
  }
  return state;
}

absl::Status State::AddColumns(std::span<const SignalInfo> signals, std::string_view producer, bool per_request) {
  for (const SignalInfo& signal : signals) {
    for (std::uint32_t i = 0; i < layout_.count; ++i) {
      if (layout_.columns[i].name != signal.name) continue;
      return absl::InvalidArgumentError(absl::StrCat("signal ", ToAbsl(signal.name), " is filled by two producers: ",
                                                     ToAbsl(layout_.producer[i]), " and ", ToAbsl(producer)));
    }
    if (layout_.count == kMaxColumns) {
      return absl::InvalidArgumentError(absl::StrCat("producers: want at most ", kMaxColumns, " signals, got more"));
    }
    const std::uint32_t position = layout_.count++;
    layout_.columns[position] = signal;
    layout_.per_request[position] = per_request;
    layout_.producer[position] = producer;
    if (!per_request) columns_.push_back({NewColumn(signal.size), position, signal.size});
  }
  return absl::OkStatus();
}

absl::Status State::Init(std::vector<std::shared_ptr<PolicyBase>> policies) {
  if (request_.size() > kMaxRequestProducers) {
    return absl::InvalidArgumentError(absl::StrCat("producers: want at most ", kMaxRequestProducers,
                                                   " request producers, got ", request_.size()));
  }
  static constexpr std::array<SignalInfo, 2> kFromFleet{InfoOf<PeakPrefillThroughput>(), InfoOf<EndpointWeight>()};
  if (absl::Status status = AddColumns(kFromFleet, "fleet", false); !status.ok()) return status;
  for (AnyLoadProducer& producer : load_) {
    if (absl::Status status = producer.Check(); !status.ok()) return status;
    if (absl::Status status = AddColumns(producer.produces(), producer.name(), false); !status.ok()) return status;
  }
  for (AnyRequestProducer& producer : request_) {
    if (absl::Status status = producer.Check(); !status.ok()) return status;
    if (absl::Status status = AddColumns(producer.produces(), producer.name(), true); !status.ok()) return status;
  }
  for (AnyLoadProducer& producer : load_) producer.Bind(layout_);
  for (AnyRequestProducer& producer : request_) producer.Bind(layout_);
  matched_position_ = layout_.Find(InfoOf<MatchedTokens>());
  rate_position_ = layout_.Find(InfoOf<PeakPrefillThroughput>());
  weight_position_ = layout_.Find(InfoOf<EndpointWeight>());

  if (policies.empty()) return absl::InvalidArgumentError("policies: want at least one, got none");
  for (std::size_t i = 0; i < policies.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (policies[i]->name() == policies[j]->name()) {
        return absl::InvalidArgumentError(absl::StrCat("policies: two are called \"", ToAbsl(policies[i]->name()), "\""));
      }
    }
    if (absl::Status status = policies[i]->Bind(layout_); !status.ok()) return status;
  }

  MutexLock lock(mutex_);
  policies_ = std::move(policies);
  for (const OwnColumn& column : columns_) table_.columns[column.position] = column.values.get();
  incarnations_.assign(kMaxEndpoints, 0);
  snapshot_ = std::make_shared<const FleetSnapshot>();
  slab_.Attach(BookingSlab::NewChunk(slab_.NextChunkSize()));
  return absl::OkStatus();
}

std::vector<std::shared_ptr<PolicyBase>> State::CopyPolicies() {
  std::size_t count = 0;
  {
    MutexLock lock(mutex_);
    count = policies_.size();
  }
  std::vector<std::shared_ptr<PolicyBase>> policies;
  policies.reserve(count + 1);
  MutexLock lock(mutex_);
  policies.assign(policies_.begin(), policies_.end());
  return policies;
}

absl::Status State::SetPolicy(std::shared_ptr<PolicyBase> policy) {
  // What is replaced goes last, outside every lock: a policy's destructor is the user's code.
  std::vector<std::shared_ptr<PolicyBase>> policies;
  MutexLock admin(admin_mutex_);
  if (absl::Status status = policy->Bind(layout_); !status.ok()) return status;
  // Only this method changes the list, and admin_mutex_ keeps it alone: the copy and its growth need no section.
  policies = CopyPolicies();
  const auto same = std::find_if(policies.begin(), policies.end(), [&](const auto& p) { return p->name() == policy->name(); });
  if (same != policies.end()) *same = std::move(policy);
  else policies.push_back(std::move(policy));
  MutexLock lock(mutex_);
  policies_.swap(policies);
  return absl::OkStatus();
}

// ---- The fleet.

void State::SyncFleet() noexcept {
  if (fleet_->version() == synced_version_.load(std::memory_order_acquire)) return;
  // What is replaced goes last, outside every lock: it may run an endpoint's destructor, which is the user's code.
  std::shared_ptr<const FleetSnapshot> fresh = fleet_->Snapshot(), old = fresh, old_told;
  MutexLock sync(sync_mutex_);  // One at a time, so that producers hear of changes in order.
  if (told_ != nullptr && fresh->version <= told_->version) return;
  const auto width = static_cast<std::uint32_t>(fresh->slots.size());
  {
    const Section section(*this);
    for (Row row = 0; row < kMaxEndpoints; ++row) {
      if (row >= width && row >= table_.width) break;
      const std::uint32_t incarnation = row < width ? fresh->slots[row].incarnation : 0;
      if (incarnation != incarnations_[row]) {  // Another occupant, or nobody: its columns start at zero.
        incarnations_[row] = incarnation;
        for (const OwnColumn& column : columns_) {
          std::memset(column.values.get() + std::size_t{row} * column.size, 0, column.size);
        }
      }
      if (row >= width || fresh->slots[row].record == nullptr) continue;
      const EndpointFacts& facts = fresh->slots[row].record->facts;
      static_cast<double*>(table_.columns[static_cast<std::size_t>(rate_position_)])[row] = facts.peak_prefill_throughput;
      static_cast<double*>(table_.columns[static_cast<std::size_t>(weight_position_)])[row] = facts.weight;
    }
    table_.width = width;
    snapshot_.swap(old);
  }
  FleetView view = fleet_->View(width);
  if (!request_.empty()) {
    for (Row row = 0; row < width; ++row) {
      const FleetSnapshot::Slot& slot = fresh->slots[row];
      if (slot.record == nullptr) continue;
      if (told_ != nullptr && row < told_->slots.size() && told_->slots[row].record == slot.record) continue;
      for (AnyRequestProducer& producer : request_) {
        producer.OnEndpointAdded({row, slot.incarnation}, slot.record->facts);
      }
    }
    for (AnyRequestProducer& producer : request_) producer.OnFleetChanged(view);
  }
  old_told = std::exchange(told_, fresh);
  synced_width_.store(width, std::memory_order_release);
  synced_version_.store(told_->version, std::memory_order_release);
}

bool State::Current(const Booking& booking) const noexcept {
  return booking.row < incarnations_.size() && incarnations_[booking.row] == booking.endpoint.incarnation &&
         fleet_->View(table_.width).Alive(booking.endpoint);
}

// ---- Before the section.

bool State::Prepare(Request& request, RequestFault& fault) const noexcept {
  fault = CheckRequest(request);
  for (const AnyRequestProducer& producer : request_) {
    if (!fault) fault = producer.Check(request);
  }
  if (fault) return false;
  request.prompt_tokens = PromptTokens(request);  // From here on every plugin sees it settled.
  return true;
}

void State::Match(const Request& request, Scratch& scratch) noexcept {
  // Version before width: a row that came between is counted as new, which costs a reset and no more.
  scratch.version = synced_version_.load(std::memory_order_acquire);
  scratch.width = synced_width_.load(std::memory_order_acquire);
  scratch.table.width = scratch.width;
  for (std::uint32_t i = 0; i < layout_.count; ++i) {
    if (!layout_.per_request[i]) continue;
    std::memset(scratch.table.columns[i], 0, std::size_t{scratch.width} * layout_.columns[i].size);
  }
  const FleetView view = fleet_->View(scratch.width);
  const WritableColumns<RuntimeSignals> own(scratch.table);
  for (std::size_t i = 0; i < request_.size(); ++i) request_[i].Fill(request, view, scratch.workspaces[i], own);
}

// ---- Inside the section.

bool State::EnsureEntries(std::uint32_t count) noexcept {
  while (slab_.free_count() < count) {
    if (slab_.Full()) return false;
    const std::uint32_t size = slab_.NextChunkSize();
    mutex_.unlock();  // Allocate outside. Another thread may do the same meanwhile; then there is one chunk more.
    BookingSlab::Chunk chunk = BookingSlab::NewChunk(size);
    mutex_.lock();
    if (chunk.entries == nullptr) return slab_.free_count() >= count;
    slab_.Attach(std::move(chunk));
  }
  return true;
}

void State::ResetNewRows(const Request& request, Scratch& scratch) noexcept {
  scratch.table.width = table_.width;
  if (snapshot_->version == scratch.version || request_.empty()) return;
  const WritableColumns<RuntimeSignals> own(scratch.table);
  for (Row row = 0; row < table_.width; ++row) {
    if (snapshot_->born[row] <= scratch.version && row < scratch.width) continue;
    for (std::uint32_t i = 0; i < layout_.count; ++i) {
      if (!layout_.per_request[i]) continue;
      const std::size_t size = layout_.columns[i].size;
      std::memset(static_cast<std::byte*>(scratch.table.columns[i]) + row * size, 0, size);
    }
    for (AnyRequestProducer& producer : request_) producer.FillNew(request, own, row);
  }
}

const PolicyBase* State::FindPolicy(std::string_view name, std::shared_ptr<const PolicyBase>* found) noexcept {
  for (const std::shared_ptr<PolicyBase>& policy : policies_) {
    if (name.empty() || policy->name() == name) {
      *found = policy;
      return policy.get();
    }
  }
  return nullptr;
}

RefusalReason State::WhyNobody(std::string_view model, std::uint32_t& considered) const noexcept {
  std::uint32_t alive = 0, serving = 0, drained = 0;
  for (const FleetSnapshot::Slot& slot : snapshot_->slots) {
    if (slot.record == nullptr) continue;
    ++alive;
    const std::vector<std::string>& models = slot.record->facts.models;
    if (!model.empty() && !models.empty() &&
        std::find_if(models.begin(), models.end(), [&](const std::string& m) { return m == model; }) == models.end()) {
      continue;
    }
    ++serving;
    drained += slot.drained ? 1U : 0U;
  }
  considered = alive;
  if (alive == 0) return RefusalReason::kNoEndpoint;
  if (serving == 0) return RefusalReason::kNotServed;
  return drained == serving ? RefusalReason::kAllDrained : RefusalReason::kAllIneligible;
}

bool State::Decide(const Request& request, Scratch& scratch, const LegPolicy& leg, std::span<const EndpointId> exclude,
                   const EndpointId* also_exclude, std::uint64_t number, std::chrono::nanoseconds now, Trace* trace,
                   Decision& decision, Refusal& refusal) noexcept {
  const auto refuse = [&](RefusalReason reason) {
    refusal.reason = reason;
    refusal.leg = leg.leg;
    return false;
  };
  const PolicyBase* policy = FindPolicy(leg.policy, &decision.policy);
  if (policy == nullptr) return refuse(RefusalReason::kUnknownPolicy);

  const std::vector<Row>& rows = snapshot_->RowsFor(request.model);
  if (rows.empty()) return refuse(WhyNobody(request.model, refusal.considered));
  scratch.survivors.rows = rows.data();
  scratch.survivors.count = static_cast<std::uint32_t>(rows.size());
  if (!exclude.empty() || also_exclude != nullptr) {
    Row* kept = scratch.survivors.SpareBuffer();
    std::uint32_t count = 0;
    for (Row row : rows) {
      const EndpointId id{row, incarnations_[row]};
      if (!Excluded(id, exclude) && (also_exclude == nullptr || id != *also_exclude)) kept[count++] = row;
    }
    refusal.considered = scratch.survivors.count;
    if (count == 0) return refuse(RefusalReason::kAllExcluded);
    scratch.survivors.rows = kept;
    scratch.survivors.count = count;
  }

  DecideInput input(request, scratch.table, scratch.survivors, scratch.totals.get());
  input.seed = options_.seed;
  input.decision = number;
  input.now = now;
  input.trace = trace;
  const std::size_t traced_filters = trace == nullptr ? 0 : trace->filters.size();
  const std::size_t traced_scores = trace == nullptr ? 0 : trace->scores.size();
  decision.number = number;
  decision.leg = leg.leg;
  const RefusalReason reason = policy->Decide(input, decision);
  metrics_.scores_clamped += input.scores_clamped;
  if (trace != nullptr) {  // The policy knows rows; ids and names are known here.
    for (std::size_t i = traced_filters; i < trace->filters.size(); ++i) {
      for (EndpointId& id : trace->filters[i].kept) id.incarnation = incarnations_[id.slot];
    }
    for (std::size_t i = traced_scores; i < trace->scores.size(); ++i) {
      EndpointId& id = trace->scores[i].endpoint;
      id.incarnation = incarnations_[id.slot];
      trace->scores[i].name = snapshot_->slots[id.slot].record->facts.name;
    }
  }
  if (reason != RefusalReason::kNone) {
    refusal.filter = input.emptied_by;
    refusal.considered = input.considered;
    refusal.policy = decision.policy;
    return refuse(reason);
  }
  const Row pick = input.targets[0];
  for (std::uint32_t i = 0; i < decision.choice.targets; ++i) {
    decision.target_ids[i] = {input.targets[i], incarnations_[input.targets[i]]};
  }
  decision.record = snapshot_->slots[pick].record;
  decision.prompt_tokens = request.prompt_tokens;
  decision.matched_tokens = MatchedOn(scratch, pick);
  return true;
}

std::int64_t State::MatchedOn(const Scratch& scratch, Row row) const noexcept {
  if (matched_position_ < 0) return 0;
  return static_cast<const std::int64_t*>(scratch.table.columns[static_cast<std::size_t>(matched_position_)])[row];
}

void State::Book(BookingEntry& entry, const Request& request, EndpointId to, Leg leg, std::int64_t matched_tokens,
                 std::uint64_t number) noexcept {
  Booking& booking = entry.booking;
  booking = Booking{};
  booking.endpoint = to;
  booking.row = to.slot;
  booking.leg = leg;
  booking.decision = number;
  booking.prompt_tokens = request.prompt_tokens;
  booking.uncached_tokens = std::clamp<std::int64_t>(request.prompt_tokens - matched_tokens, 0, request.prompt_tokens);
  booking.charged_tokens = booking.uncached_tokens;
  entry.max_output_tokens = request.max_output_tokens;
  for (const AnyLoadProducer& producer : load_) producer.Price(request, booking);
  const WritableColumns<RuntimeSignals> own(table_);
  for (AnyLoadProducer& producer : load_) producer.OnBooked(own, request, booking);
}

void State::ReleaseLeg(BookingEntry& entry, const Outcome& outcome) noexcept {
  if (!Current(entry.booking)) {
    ++metrics_.orphaned_releases;
    return;
  }
  const WritableColumns<RuntimeSignals> own(table_);
  for (AnyLoadProducer& producer : load_) producer.OnReleased(own, entry.booking, outcome);
}

void State::Prefilled(BookingEntry* ticket) noexcept {
  for (BookingEntry* leg = ticket; leg != nullptr; leg = leg->next_leg) {
    if (leg->booking.prefilled) continue;
    if (Current(leg->booking)) {
      const WritableColumns<RuntimeSignals> own(table_);
      for (AnyLoadProducer& producer : load_) producer.OnFirstToken(own, leg->booking);
    }
    leg->booking.prefilled = true;
  }
}

void State::End(BookingEntry* ticket, const Outcome& outcome) noexcept {
  ticket->live = false;
  if (ticket->deadline_ns != kNoDeadline) --deadlines_;
  ticket->deadline_ns = kNoDeadline;
  for (BookingEntry* leg = ticket; leg != nullptr; leg = leg->next_leg) ReleaseLeg(*leg, outcome);
  --metrics_.live_tickets;
  ++(outcome.aborted ? metrics_.aborted : metrics_.finished);
  if (outcome.cached_tokens >= 0 && !outcome.aborted) {
    metrics_.predicted_cached_tokens +=
        static_cast<std::uint64_t>(ticket->booking.prompt_tokens - ticket->booking.uncached_tokens);
    metrics_.reported_cached_tokens += static_cast<std::uint64_t>(outcome.cached_tokens);
  }
}

void State::Give(BookingEntry* ticket) noexcept {
  while (ticket != nullptr) {
    BookingEntry* next = ticket->next_leg;
    slab_.Give(ticket);
    ticket = next;
  }
}

// Brings the books up to date with what the chained tickets were told.
void State::Settle(BookingEntry* ticket) noexcept {
  while (ticket != nullptr) {
    BookingEntry* next = ticket->next;
    std::uint32_t events = ticket->events.load(std::memory_order_acquire);
    do {  // Until nothing was added meanwhile.
      if (ticket->live && (events & BookingEntry::kFirstToken) != 0) Prefilled(ticket);
      if (ticket->live && (events & BookingEntry::kEnded) != 0) End(ticket, ticket->outcome);
      if ((events & (BookingEntry::kDropped | BookingEntry::kBusy)) == BookingEntry::kDropped) {
        Give(ticket);
        --tickets_;
        break;
      }
    } while (!ticket->events.compare_exchange_weak(events, events & ~std::uint32_t{BookingEntry::kQueued},
                                                   std::memory_order_acq_rel, std::memory_order_acquire));
    ticket = next;
  }
}

// ---- Outside again.

BookingEntry* State::FindLeg(BookingEntry* ticket, Leg leg) noexcept {
  for (BookingEntry* e = ticket; e != nullptr; e = e->next_leg) {
    if (e->booking.leg == leg) return e;
  }
  return leg == Leg::kServe && ticket->next_leg == nullptr ? ticket : nullptr;
}

void State::TellReleased(BookingEntry* ticket, const Outcome& outcome) noexcept {
  for (BookingEntry* leg = ticket; leg != nullptr; leg = leg->next_leg) {
    for (std::size_t i = 0; i < request_.size(); ++i) request_[i].OnReleased(leg->receipts[i], outcome);
  }
}

// May run an endpoint's destructor, which is the user's code.
void State::LetGo(BookingEntry* ticket) noexcept {
  for (BookingEntry* leg = ticket; leg != nullptr; leg = leg->next_leg) {
    leg->decision.record.reset();
    leg->decision.policy.reset();
  }
}

void State::SettleAll() noexcept {
  for (QueueSlot& slot : queues_) Settle(slot.queue.TakeAll());
}

// Its books are settled by whoever takes the lock next: a decision, mostly. Without any router handle there will be none,
// so then the caller does it. With kDropped among the events, ticket and state may be gone on return.
void State::Queue(BookingEntry* ticket) noexcept {
  if (queues_[ThreadNumber() % kQueues].queue.Add(ticket)) return;
  bool last = false;
  {
    MutexLock lock(mutex_);
    ticket->next = nullptr;
    Settle(ticket);
    last = tickets_ == 0;
  }
  if (last) delete this;
}

// The last handle is gone. Whatever tickets were told until now is settled here, and what comes later by them.
void State::Orphan() noexcept {
  bool last = false;
  {
    MutexLock lock(mutex_);
    for (QueueSlot& slot : queues_) Settle(slot.queue.Close());
    last = tickets_ == 0;
  }
  if (last) delete this;
}

void State::CountIgnored(std::uint32_t events, bool ended) noexcept {
  const Section section(*this);
  ++(ended && (events & BookingEntry::kExpired) == 0 ? metrics_.repeated_events : metrics_.late_events);
}

// ---- What handles call.

BookingEntry* State::Route(const Request& given, const RouteOptions& options, Refusal& refusal) noexcept {
  const LegPolicy single{Leg::kServe, options.policy};
  const std::span<const LegPolicy> legs = options.legs.empty() ? std::span(&single, 1) : options.legs;
  const auto leg_count = static_cast<std::uint32_t>(std::min<std::size_t>(legs.size(), kMaxLegs));
  Request request = given;
  RequestFault fault;
  if (legs.size() > kMaxLegs) {
    fault = {"RouteOptions.legs", static_cast<std::int64_t>(legs.size()), 1, kMaxLegs};
  }
  for (std::uint32_t i = 0; i < leg_count; ++i) {
    for (std::uint32_t j = 0; j < i; ++j) {
      if (legs[i].leg == legs[j].leg) fault = {"RouteOptions.legs (one of each kind)", 2, 1, 1};
    }
  }
  if (fault || !Prepare(request, fault)) {
    refusal = RefuseFault(fault);
    const Section section(*this);
    ++metrics_.refusals[static_cast<std::size_t>(RefusalReason::kBadRequest)];
    return nullptr;
  }
  SyncFleet();
  const ScratchLease lease(*this);
  if (lease.get() == nullptr) {
    refusal.reason = RefusalReason::kOutOfMemory;
    const Section section(*this);
    ++metrics_.refusals[static_cast<std::size_t>(RefusalReason::kOutOfMemory)];
    return nullptr;
  }
  Scratch& scratch = *lease.get();
  const std::chrono::nanoseconds now = options_.clock.Now();
  Match(request, scratch);

  BookingEntry* entries[kMaxLegs] = {};
  bool refused = false;
  {
    const Section section(*this);
    bool decided = EnsureEntries(leg_count);
    if (!decided) {
      refusal.reason = RefusalReason::kOutOfMemory;
    } else {
      ResetNewRows(request, scratch);
      const std::uint64_t number = decisions_ + 1;
      for (std::uint32_t i = 0; i < leg_count && decided; ++i) {
        entries[i] = slab_.Take(ThreadNumber());
        decided = Decide(request, scratch, legs[i], options.exclude, nullptr, number, now, options.trace,
                         entries[i]->decision, refusal);
      }
    }
    if (decided) {
      const std::uint64_t number = ++decisions_;
      for (std::uint32_t i = 0; i < leg_count; ++i) {
        BookingEntry& entry = *entries[i];
        Book(entry, request, entry.decision.endpoint(), legs[i].leg, entry.decision.matched_tokens, number);
        entry.live = i == 0;
        if (i > 0) entries[i - 1]->next_leg = &entry;
      }
      metrics_.decisions += leg_count;
      ++metrics_.live_tickets;
      ++tickets_;
    } else {
      ++metrics_.refusals[static_cast<std::size_t>(refusal.reason)];
    }
    refused = !decided;
  }
  if (refused) {  // Chained like a ticket, so that what the decisions hold is let go outside the lock.
    for (std::uint32_t i = 1; i < leg_count && entries[i] != nullptr; ++i) entries[i - 1]->next_leg = entries[i];
    if (entries[0] != nullptr) {
      LetGo(entries[0]);
      const Section section(*this);
      Give(entries[0]);
    }
    return nullptr;
  }
  const FleetView view = fleet_->View(scratch.width);
  for (std::uint32_t i = 0; i < leg_count; ++i) {
    for (std::size_t p = 0; p < request_.size(); ++p) {
      request_[p].RecordTo(entries[i]->receipts[p], request, view, scratch.workspaces[p], entries[i]->booking);
    }
  }
  return entries[0];
}

bool State::Evaluate(const Request& given, const RouteOptions& options, Decision& decision, Refusal& refusal) noexcept {
  Request request = given;
  RequestFault fault;
  if (!Prepare(request, fault)) {
    refusal = RefuseFault(fault);
    return false;
  }
  SyncFleet();
  const ScratchLease lease(*this);
  if (lease.get() == nullptr) {
    refusal.reason = RefusalReason::kOutOfMemory;
    return false;
  }
  const std::chrono::nanoseconds now = options_.clock.Now();
  Match(request, *lease.get());
  const Section section(*this);
  ResetNewRows(request, *lease.get());
  const std::uint64_t clamped = metrics_.scores_clamped;
  const bool decided = Decide(request, *lease.get(), {Leg::kServe, options.policy}, options.exclude, nullptr,
                              decisions_ + 1, now, options.trace, decision, refusal);
  metrics_.scores_clamped = clamped;
  return decided;
}

bool State::Reroute(BookingEntry* ticket, const Request& given, const RerouteOptions& options) noexcept {
  if (ticket == nullptr) return false;
  BookingEntry* entry = FindLeg(ticket, options.leg.value_or(Leg::kServe));
  Request request = given;
  RequestFault fault;
  if (entry == nullptr || !Prepare(request, fault)) {
    const Section section(*this);
    ++metrics_.refusals[static_cast<std::size_t>(RefusalReason::kBadRequest)];
    return false;
  }
  SyncFleet();
  const ScratchLease lease(*this);
  if (lease.get() == nullptr) return false;
  Scratch& scratch = *lease.get();
  const std::chrono::nanoseconds now = options_.clock.Now();
  Match(request, scratch);

  Decision decision;  // Swapped in when all is well; what it replaces is destroyed after the lock.
  Booking booked;
  const EndpointId from = entry->decision.endpoint();
  const LegPolicy leg{entry->decision.leg,
                      options.policy.empty() ? entry->decision.policy_name() : options.policy};
  {
    const Section section(*this);
    if (!Live(ticket)) {
      if ((ticket->events.load(std::memory_order_relaxed) & BookingEntry::kExpired) != 0) ++metrics_.late_events;
      return false;
    }
    ResetNewRows(request, scratch);
    Refusal refusal;
    if (!Decide(request, scratch, leg, options.exclude, &from, decisions_ + 1, now, options.trace, decision, refusal)) {
      ++metrics_.refusals[static_cast<std::size_t>(refusal.reason)];
      return false;
    }
    const std::uint64_t number = ++decisions_;
    ReleaseLeg(*entry, Outcome{.aborted = true});
    Book(*entry, request, decision.endpoint(), leg.leg, decision.matched_tokens, number);
    booked = entry->booking;
    ++metrics_.decisions;
    ++metrics_.moved;
    std::swap(entry->decision, decision);
    ticket->events.store(BookingEntry::kBusy, std::memory_order_relaxed);  // A first token to come is news.
  }
  const FleetView view = fleet_->View(scratch.width);
  for (std::size_t p = 0; p < request_.size(); ++p) {
    request_[p].OnReleased(entry->receipts[p], Outcome{.aborted = true});
    request_[p].RecordTo(entry->receipts[p], request, view, scratch.workspaces[p], booked);
  }
  ticket->events.fetch_and(~std::uint32_t{BookingEntry::kBusy}, std::memory_order_release);
  return true;
}

bool State::MoveTo(BookingEntry* ticket, EndpointId to, std::int64_t matched_tokens, Leg leg) noexcept {
  BookingEntry* entry = FindLeg(ticket, leg);
  if (entry == nullptr) return false;
  SyncFleet();
  std::shared_ptr<const EndpointRecord> record;
  Booking booked;
  {
    const Section section(*this);
    if (!Live(ticket)) {
      if ((ticket->events.load(std::memory_order_relaxed) & BookingEntry::kExpired) != 0) ++metrics_.late_events;
      return false;
    }
    if (to.incarnation == 0 || to.slot >= snapshot_->slots.size() || incarnations_[to.slot] != to.incarnation ||
        !snapshot_->slots[to.slot].Routable()) {
      return false;
    }
    Request request;  // What pricing may ask of it.
    request.prompt_tokens = entry->booking.prompt_tokens;
    request.max_output_tokens = entry->max_output_tokens;
    const std::int64_t matched = std::clamp<std::int64_t>(matched_tokens, 0, request.prompt_tokens);
    const std::uint64_t number = entry->booking.decision;
    ReleaseLeg(*entry, Outcome{.aborted = true});
    Book(*entry, request, to, entry->booking.leg, matched, number);
    booked = entry->booking;
    ++metrics_.moved;
    record = snapshot_->slots[to.slot].record;
    entry->decision.target_ids[0] = to;
    entry->decision.matched_tokens = matched;
    std::swap(entry->decision.record, record);
    ticket->events.store(BookingEntry::kBusy, std::memory_order_relaxed);  // A first token to come is news.
  }
  const FleetView view = fleet_->View(to.slot + 1);
  for (std::size_t p = 0; p < request_.size(); ++p) {
    entry->receipts[p] = request_[p].Move(entry->receipts[p], view, booked);
  }
  ticket->events.fetch_and(~std::uint32_t{BookingEntry::kBusy}, std::memory_order_release);
  return true;
}

void State::FirstToken(BookingEntry* ticket) noexcept {
  std::uint32_t events = ticket->events.load(std::memory_order_relaxed);
  do {
    if ((events & BookingEntry::kClosing) != 0) return CountIgnored(events, false);
    if ((events & BookingEntry::kFirstToken) != 0) return CountIgnored(events, true);
  } while (!ticket->events.compare_exchange_weak(events, events | BookingEntry::kFirstToken | BookingEntry::kQueued,
                                                 std::memory_order_acq_rel, std::memory_order_relaxed));
  if ((events & BookingEntry::kQueued) == 0) Queue(ticket);
  for (BookingEntry* leg = ticket; leg != nullptr; leg = leg->next_leg) {
    for (std::size_t i = 0; i < request_.size(); ++i) request_[i].OnFirstToken(leg->receipts[i]);
  }
}

void State::Add(BookingEntry* ticket, std::uint32_t events) noexcept {
  const std::uint32_t before = ticket->events.fetch_or(events | BookingEntry::kQueued, std::memory_order_acq_rel);
  if ((before & BookingEntry::kQueued) == 0) Queue(ticket);
}

void State::Finish(BookingEntry* ticket, const Outcome& outcome) noexcept {
  const std::uint32_t events = ticket->events.fetch_or(BookingEntry::kClosing, std::memory_order_acquire);
  if ((events & BookingEntry::kClosing) != 0) return CountIgnored(events, true);
  ticket->outcome = outcome;
  Add(ticket, BookingEntry::kEnded);
  TellReleased(ticket, outcome);
}

absl::Status State::Remember(const BookingEntry* ticket, EndpointId at, const Request& given) noexcept {
  if (!Live(ticket)) return absl::FailedPreconditionError("Ticket::Remember: the ticket has ended");
  Request conversation = given;
  RequestFault fault;
  if (!Prepare(conversation, fault)) return absl::InvalidArgumentError(RefuseFault(fault).ToString());
  const ScratchLease lease(*this);
  if (lease.get() == nullptr) return absl::ResourceExhaustedError("Ticket::Remember: no memory for a workspace");
  const FleetView view = fleet_->View(synced_width_.load(std::memory_order_acquire));
  for (std::size_t i = 0; i < request_.size(); ++i) {
    request_[i].Remember(conversation, view, lease.get()->workspaces[i], at);
  }
  return absl::OkStatus();
}

void State::Drop(BookingEntry* ticket) noexcept {
  const std::uint32_t events = ticket->events.fetch_or(BookingEntry::kClosing, std::memory_order_acquire);
  if ((events & BookingEntry::kClosing) == 0) {
    ticket->outcome = Outcome{.aborted = true};
    TellReleased(ticket, ticket->outcome);
  }
  LetGo(ticket);
  Add(ticket, BookingEntry::kEnded | BookingEntry::kDropped);
}

void State::SetDeadline(BookingEntry* ticket, std::chrono::nanoseconds deadline) noexcept {
  const Section section(*this);
  if (!ticket->live) {
    ++metrics_.late_events;
    return;
  }
  if (ticket->deadline_ns != kNoDeadline) --deadlines_;
  ticket->deadline_ns = deadline.count();
  if (ticket->deadline_ns != kNoDeadline) ++deadlines_;
}

std::uint64_t State::Expire(std::chrono::nanoseconds now) noexcept {
  constexpr std::uint32_t kSlice = 256;
  std::uint64_t total = 0;
  for (std::uint32_t c = 0;; ++c) {
    for (std::uint32_t from = 0;; from += kSlice) {
      BookingEntry* expired[kSlice];
      std::uint32_t count = 0;
      {
        const Section section(*this);
        if (deadlines_ == 0 || c >= slab_.chunk_count()) {
          if (deadlines_ == 0 || from == 0) return total;
          break;
        }
        const BookingSlab::Chunk& chunk = slab_.chunk(c);
        if (from >= chunk.count) break;
        for (std::uint32_t i = from; i < std::min(chunk.count, from + kSlice); ++i) {
          BookingEntry& entry = chunk.entries[i];
          if (!entry.live || entry.deadline_ns > now.count() || entry.deadline_ns == kNoDeadline) continue;
          // Ended or moved this moment: not ours. Acquire: its receipts are then as a move left them.
          std::uint32_t events = entry.events.load(std::memory_order_relaxed);
          bool ours = false;
          while (!ours && (events & (BookingEntry::kClosing | BookingEntry::kBusy)) == 0) {
            constexpr std::uint32_t kEnd =
                BookingEntry::kClosing | BookingEntry::kEnded | BookingEntry::kExpired | BookingEntry::kBusy;
            ours = entry.events.compare_exchange_weak(events, events | kEnd, std::memory_order_acq_rel,
                                                      std::memory_order_relaxed);
          }
          if (!ours) continue;
          if ((events & BookingEntry::kFirstToken) != 0) Prefilled(&entry);
          End(&entry, Outcome{.aborted = true});
          expired[count++] = &entry;
          ++metrics_.expired;
        }
      }
      for (std::uint32_t i = 0; i < count; ++i) {
        TellReleased(expired[i], Outcome{.aborted = true});
        // Dropped meanwhile and not in the queue: whoever settled left it to us to have it freed. One step, since an entry
        // that is not busy may be freed at any moment.
        std::uint32_t events = expired[i]->events.load(std::memory_order_relaxed), after = 0;
        do {
          after = events & ~std::uint32_t{BookingEntry::kBusy};
          if ((events & BookingEntry::kDropped) != 0) after |= BookingEntry::kQueued;
        } while (!expired[i]->events.compare_exchange_weak(events, after, std::memory_order_acq_rel,
                                                           std::memory_order_relaxed));
        if ((after & ~events & BookingEntry::kQueued) != 0) Queue(expired[i]);
      }
      total += count;
    }
  }
}

absl::Status State::Feed(EndpointId id, std::string_view fact, const void* value) {
  SyncFleet();
  const Section section(*this);
  bool taken = false;
  for (const AnyLoadProducer& producer : load_) taken |= producer.Takes(fact);
  if (!taken) {
    return absl::InvalidArgumentError(absl::StrCat("fact ", ToAbsl(fact), ": no load producer of this router takes it"));
  }
  if (id.incarnation == 0 || id.slot >= kMaxEndpoints || incarnations_[id.slot] != id.incarnation) {
    return absl::NotFoundError(absl::StrCat("endpoint id {", id.slot, ", ", id.incarnation, "}: not in the fleet"));
  }
  const WritableColumns<RuntimeSignals> own(table_);
  for (AnyLoadProducer& producer : load_) {
    if (producer.Takes(fact)) producer.OnFact(own, id.slot, value);
  }
  return absl::OkStatus();
}

bool State::Read(EndpointId id, const SignalInfo& signal, void* value) {
  SyncFleet();
  const int position = layout_.Find(signal);
  if (position < 0 || layout_.per_request[static_cast<std::size_t>(position)]) return false;
  const Section section(*this);
  if (id.incarnation == 0 || id.slot >= kMaxEndpoints || incarnations_[id.slot] != id.incarnation) return false;
  std::memcpy(value, static_cast<std::byte*>(table_.columns[static_cast<std::size_t>(position)]) + std::size_t{id.slot} * signal.size,
              signal.size);
  return true;
}

RouterMetrics State::Metrics() {
  const Section section(*this);
  return metrics_;
}

// Replays every live booking into columns of its own and compares.
absl::Status State::Audit() {
  SyncFleet();
  std::vector<std::unique_ptr<std::byte[], void (*)(void*)>> shadows;
  for (const OwnColumn& column : columns_) {
    shadows.push_back(NewColumn(column.size));
    if (shadows.back() == nullptr) return absl::ResourceExhaustedError("no memory for the audit's columns");
  }
  const Section section(*this);
  ColumnTable shadow = table_;
  for (std::size_t i = 0; i < columns_.size(); ++i) shadow.columns[columns_[i].position] = shadows[i].get();
  const WritableColumns<RuntimeSignals> own(shadow);
  std::uint64_t live = 0;
  for (std::uint32_t c = 0; c < slab_.chunk_count(); ++c) {
    const BookingSlab::Chunk& chunk = slab_.chunk(c);
    for (std::uint32_t i = 0; i < chunk.count; ++i) {
      BookingEntry& entry = chunk.entries[i];
      if (!entry.live) continue;
      ++live;
      for (BookingEntry* leg = &entry; leg != nullptr; leg = leg->next_leg) {
        if (!Current(leg->booking)) continue;
        Booking booking = leg->booking;
        booking.prefilled = false;
        Request request;
        request.prompt_tokens = booking.prompt_tokens;
        request.max_output_tokens = leg->max_output_tokens;
        for (AnyLoadProducer& producer : load_) {
          if (producer.audited().empty()) continue;  // Its hooks may have a state of their own.
          producer.OnBooked(own, request, booking);
          if (leg->booking.prefilled) producer.OnFirstToken(own, booking);
        }
      }
    }
  }
  if (live != metrics_.live_tickets) {
    return absl::InternalError(absl::StrCat("audit: ", live, " live tickets in the slab, ", metrics_.live_tickets, " counted"));
  }
  for (const AnyLoadProducer& producer : load_) {
    for (const SignalInfo& signal : producer.audited()) {
      const auto position = static_cast<std::size_t>(layout_.Find(signal));
      const auto* is = static_cast<const std::byte*>(table_.columns[position]);
      const auto* want = static_cast<const std::byte*>(shadow.columns[position]);
      for (Row row = 0; row < table_.width; ++row) {
        const std::size_t at = std::size_t{row} * signal.size;
        if (!fleet_->View(0).Alive({row, incarnations_[row]}) || std::memcmp(is + at, want + at, signal.size) == 0) continue;
        std::string figures;
        if (signal.kind == 'i' && signal.size == 8) {
          std::int64_t a = 0, b = 0;
          std::memcpy(&a, is + at, 8);
          std::memcpy(&b, want + at, 8);
          figures = absl::StrCat(": column ", a, ", live tickets ", b);
        }
        const EndpointRecord* record = snapshot_->slots[row].record.get();
        return absl::InternalError(absl::StrCat("audit: endpoint ", record == nullptr ? "?" : record->facts.name, ", ",
                                                ToAbsl(signal.name), figures));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tokroute::internal

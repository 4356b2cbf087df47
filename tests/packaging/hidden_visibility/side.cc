// One side: compiled once for each shared object, as TOKROUTE_SIDE. Each has its own hidden copy of the library, its
// own types of the same names in an unnamed namespace, and its own static objects.
#include "side.h"

#include <bit>
#include <chrono>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokroute/tokroute.h"

namespace {

struct Upstream {
  std::string host;
  std::string_view name() const { return host; }
};
using Router = tokroute::Router<Upstream>;
using Ticket = tokroute::Ticket<Upstream>;

TOKROUTE_SIGNAL(CustomLoad, std::int64_t, "custom_load", "units");
TOKROUTE_SIGNAL(Unfilled, std::int64_t, "filled_by_nobody", "units");

struct AddCustomLoad {
  static constexpr std::string_view kName = "add_custom_load";
  std::int64_t amount = 0;
};

struct CustomProducer {
  static constexpr std::string_view kName = "custom-producer";
  using Produces = tokroute::Signals<CustomLoad>;
  using Own = tokroute::WritableColumns<Produces>;
  using Fact = AddCustomLoad;
  void OnBooked(Own own, const tokroute::Request&, const tokroute::Booking& b) noexcept {
    own.Column<CustomLoad>()[b.row] += 10;
  }
  void OnFirstToken(Own, const tokroute::Booking&) noexcept {}
  void OnReleased(Own own, const tokroute::Booking& b, const tokroute::Outcome&) noexcept {
    own.Column<CustomLoad>()[b.row] -= 10;
  }
  void OnFact(Own own, tokroute::Row row, const AddCustomLoad& fact) noexcept {
    own.Column<CustomLoad>()[row] += fact.amount;
  }
};

template <class S>
struct LeastScorer {
  static constexpr std::string_view kName = "least-scorer";
  using Consumes = tokroute::Signals<S>;
  auto Score(const tokroute::Request&, tokroute::CandidatesFor<Consumes> candidates) const {
    const auto column = candidates.template Column<S>();
    return [=](tokroute::Row row) { return 1.0F / static_cast<float>(1 + column[row]); };
  }
};

tokroute::Policy<LeastScorer<CustomLoad>, tokroute::MaxScorePicker<>> ByCustomLoad() {
  return tokroute::Policy(LeastScorer<CustomLoad>(), tokroute::MaxScorePicker<>());
}

Router& At(void* router) { return *static_cast<Router*>(router); }
Ticket& TicketAt(void* ticket) { return *static_cast<Ticket*>(ticket); }
tokroute::EndpointId IdOf(std::uint64_t slot) { return {static_cast<std::uint32_t>(slot), 1}; }

void* Make() {
  tokroute::Fleet<Upstream> fleet;
  for (const char* host : {"a", "b", "c", "d"}) {
    if (!fleet.Add({host}).ok()) return nullptr;
  }
  auto gate = tokroute::TauGate::Create({.peak_prefill_throughput = 1000, .max_ttft_penalty = std::chrono::seconds(1)});
  auto index = tokroute::PrefixIndex::Create({});
  auto router = tokroute::MakeRouter(
      fleet, {.seed = 11},
      tokroute::Producers(tokroute::ApproximatePrefix(*index), tokroute::InFlightLoad(), CustomProducer()),
      tokroute::Named("affinity", tokroute::Policy(tokroute::PrefixCacheAffinityFilter(*gate),
                                                   tokroute::TokenLoadScorer(), tokroute::MaxScorePicker<>())),
      tokroute::Named("round-robin", tokroute::Policy(tokroute::RoundRobinPicker())),
      tokroute::Named("random", tokroute::Policy(tokroute::RandomPicker())), tokroute::Named("custom", ByCustomLoad()));
  return router.ok() ? new Router(*router) : nullptr;
}

void* Route(void* router, const char* policy, std::uint32_t prompt, SideDecision* out) {
  std::vector<tokroute::TokenId> tokens(320);
  for (std::uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = prompt * 1000 + i;
  auto routed = At(router).Route({.tokens = tokens, .model = "m"}, {.policy = policy});
  if (!routed.ok()) return nullptr;
  const tokroute::Decision& decision = routed->decision();
  *out = {};
  out->number = decision.number;
  out->slot = decision.endpoint().slot;
  out->best_bits = std::bit_cast<std::uint64_t>(decision.choice.best);
  out->matched_tokens = decision.matched_tokens;
  out->survivors = decision.survivors;
  out->tied = decision.choice.tied;
  if (decision.verdict_count > 0) {
    out->margin = decision.verdicts[0].margin;
    const std::string_view reason = decision.verdicts[0].reason->name;
    std::memcpy(out->reason, reason.data(),
                reason.size() < sizeof(out->reason) ? reason.size() : sizeof(out->reason) - 1);
  }
  return new Ticket(std::move(routed).Take());
}

void Read(void* router, SideBooks* books) {
  const tokroute::RouterMetrics metrics = At(router).Metrics();
  *books = {};
  books->decisions = metrics.decisions;
  books->finished = metrics.finished;
  books->live_tickets = metrics.live_tickets;
  books->repeated_events = metrics.repeated_events;
  for (std::uint64_t slot = 0; slot < 4; ++slot) {
    // -1: not found, which no count is.
    books->uncached_tokens[slot] = At(router).Read<tokroute::UncachedTokensInFlight>(IdOf(slot)).value_or(-1);
    books->active_requests[slot] = At(router).Read<tokroute::ActiveRequests>(IdOf(slot)).value_or(-1);
    books->custom[slot] = At(router).Read<CustomLoad>(IdOf(slot)).value_or(-1);
  }
}

const char* ReasonHere(void* ticket) {
  const tokroute::FilterVerdict* verdict = TicketAt(ticket).decision().verdict("prefix-cache-affinity-filter");
  if (verdict == nullptr) return "no such filter";
  for (const tokroute::ReasonTag* tag : {&tokroute::kKeptAll, &tokroute::kNobodyWarm, &tokroute::kAllWarm,
                                         &tokroute::kSticky, &tokroute::kGateOpen, &tokroute::kGateOff}) {
    if (*verdict->reason == *tag) return tag->name.data();
  }
  return "unknown here";
}

const SideApi kApi{
    .make = Make,
    .destroy = [](void* router) { delete &At(router); },
    .route = Route,
    .first_token = [](void* ticket) { TicketAt(ticket).FirstToken(); },
    .finish =
        [](void* ticket) {
          TicketAt(ticket).Finish({.output_tokens = 5});
          delete &TicketAt(ticket);
        },
    .read = Read,
    .reason_here = ReasonHere,
    .add_policy = [](void* router) { return At(router).SetPolicy("theirs", ByCustomLoad()).ok(); },
    .add_bad_policy =
        [](void* router) {
          return At(router)
              .SetPolicy("bad", tokroute::Policy(LeastScorer<Unfilled>(), tokroute::MaxScorePicker<>()))
              .ok();
        },
    .feed = [](void* router, std::uint64_t slot,
               std::int64_t amount) { return At(router).Feed(IdOf(slot), AddCustomLoad{amount}).ok(); },
    .audit = [](void* router) { return At(router).Audit().ok(); },
    .identity = []() -> const void* { return &tokroute::kSticky; },
};

}  // namespace

const SideApi* TOKROUTE_SIDE() { return &kApi; }

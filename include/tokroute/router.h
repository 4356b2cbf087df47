// Router: a state and its named policies. The handle that a gateway keeps.
//
//   auto routed = router.Route({.tokens = prompt, .model = "qwen3-32b"});
//   if (!routed.ok()) return Respond(503, routed.refusal());
//   Send(routed->endpoint(), ...);
//
// Ready-made ones: policies.h. Your own parts: MakeRouter, below.
#ifndef TOKROUTE_ROUTER_H_
#define TOKROUTE_ROUTER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/decision.h"
#include "tokroute/fleet.h"
#include "tokroute/policy.h"
#include "tokroute/request.h"
#include "tokroute/route_options.h"
#include "tokroute/state.h"
#include "tokroute/ticket.h"

namespace tokroute {
inline namespace v0 {

// What Evaluate returns: the decision that Route would take now, or the refusal.
struct [[nodiscard]] Evaluation {
  bool ok() const noexcept { return refusal.reason == RefusalReason::kNone; }
  Decision decision;
  Refusal refusal;
  std::string ToString() const { return ok() ? decision.ToString() : refusal.ToString(); }
};

// Copies are handles on one router. Every method may be called from any thread; none throws. Two routers on one fleet do
// not see each other's load: put several policies into one router instead (MakeRouter, SetPolicy), they share ledger and
// prefix index. A moved-from handle may only be destroyed or assigned to.
template <class E>
class Router {
 public:
  Router(const Router& other) noexcept : state_(other.state_) {
    if (state_ != nullptr) state_->AddReference();
  }
  Router(Router&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Router& operator=(Router other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Router() {
    if (state_ != nullptr) state_->DropReference();
  }

  // Decides and books, in one step. A ticket, or a typed refusal. Candidates are the endpoints that are neither drained
  // nor ejected nor excluded and serve the request's model. O(prompt) outside the lock, O(candidates) inside; no heap
  // allocation once warm.
  Routed<E> Route(const Request& request, const RouteOptions& options = {}) noexcept {
    Refusal refusal;
    internal::BookingEntry* entry = state_->Route(request, options, refusal);
    if (entry == nullptr) return Routed<E>(std::move(refusal));
    return Routed<E>(Ticket<E>(state_, entry));
  }

  // A retry: excludes the endpoint that the ticket is on (and `exclude`), decides again, releases the old and books the
  // new in one section. False, and nothing changed, if nobody else is left or the ticket is not this router's and live.
  // The decision numbers on; RouterMetrics counts the reason of a failure.
  bool Reroute(Ticket<E>& ticket, const Request& request, const RerouteOptions& options = {}) noexcept {
    return ticket.home_ == state_ && state_ != nullptr && state_->Reroute(ticket.entry_, request, options);
  }

  // What Route would decide now, with the very draws it would use; books nothing and uses nothing up. Looks at
  // options.policy; legs are ignored. For shadow mode and dry runs; costs as much as Route.
  Evaluation Evaluate(const Request& request, const RouteOptions& options = {}) const noexcept {
    Evaluation result;
    state_->Evaluate(request, options, result.decision, result.refusal);
    return result;
  }

  // Adds a policy, or replaces the one of that name while serving: ledger and index stay as they are, the next decision
  // uses it. kInvalidArgument: a part's options are out of range, or a signal that it consumes is filled by no producer
  // of this router (both named); nothing changed then.
  template <class... Parts>
  absl::Status SetPolicy(std::string_view name, Policy<Parts...> policy) {
    return state_->SetPolicy(internal::MakePolicy(std::string(name), std::move(policy)));
  }

  // Aborts the live tickets whose deadline is <= now. Call it when you like; without deadlines it costs a lock. Returns
  // how many. O(tickets), in slices, so that routing goes on meanwhile.
  std::uint64_t Expire(std::chrono::nanoseconds now) noexcept { return state_->Expire(now); }

  // Proves the books: the audited columns equal the sum over live tickets, endpoint by endpoint. OK, or kInternal naming
  // endpoint, signal and both figures. O(tickets + endpoints) under the lock.
  absl::Status Audit() const { return state_->Audit(); }

  RouterMetrics Metrics() const { return state_->Metrics(); }

  // An endpoint's value of a per-endpoint signal (the ledger's, say); nullopt if the endpoint is gone or no producer of
  // this router fills the signal per endpoint.
  template <Signal S>
  std::optional<typename S::value_type> Read(EndpointId id) const {
    typename S::value_type value{};
    if (!state_->Read(id, internal::InfoOf<S>(), &value)) return std::nullopt;
    return value;
  }

  // Hands a small fact about an endpoint to the load producers that take it (`using Fact = F`, F::kName names it), under
  // the lock. kNotFound: the endpoint is gone. kInvalidArgument: no producer takes F.
  template <class F>
  absl::Status Feed(EndpointId id, const F& fact) {
    return state_->Feed(id, F::kName, &fact);
  }

  // Takes over the caller's reference. For MakeRouter.
  explicit Router(internal::State* state) noexcept : state_(state) {}

 private:
  internal::State* state_;
};

// The producers of a router, load producers and request producers in any order.
template <class... P>
struct Producers {
  static_assert(((LoadProducer<P> || RequestProducer<P>) && ...),
                "every producer is a LoadProducer or a RequestProducer; see tokroute/concepts.h");
  explicit Producers(P... p) : parts(std::move(p)...) {}
  std::tuple<P...> parts;
};
template <class... P>
Producers(P...) -> Producers<P...>;

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

// What every router fills from the fleet.
using FleetSignals = Signals<PeakPrefillThroughput, EndpointWeight>;

template <class... Lists>
struct Joined;
template <class... A>
struct Joined<Signals<A...>> {
  using type = Signals<A...>;
};
template <class... A, class... B, class... Rest>
struct Joined<Signals<A...>, Signals<B...>, Rest...> : Joined<Signals<A..., B...>, Rest...> {};
template <class... A, class... Rest>
struct Joined<Signals<A...>, RuntimeSignals, Rest...> {
  using type = RuntimeSignals;
};

// Two producers of one signal: both names on the first error line, like a signal without one.
template <class SignalT, class First, class Second>
struct TwoProducersFill;
template <class First, class Second, class List = typename First::Produces>
inline constexpr bool kApart = true;
template <class First, class Second, class... S>
inline constexpr bool kApart<First, Second, Signals<S...>> = ([] {
  if constexpr (kListed<S, typename Second::Produces>) return sizeof(TwoProducersFill<S, First, Second>) != 0;
  return true;
}() && ...);
template <class... P>
inline constexpr bool kAllApart = true;
template <class First, class... Rest>
inline constexpr bool kAllApart<First, Rest...> = (kApart<First, Rest> && ...) && kAllApart<Rest...>;

}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {

// A router of your own parts. The first policy is the one that RouteOptions finds without a name.
//
//   auto router = MakeRouter(fleet, {.seed = 7}, Producers(InFlightLoad()),
//                            Named("default", Policy(ActiveRequestScorer{}, MaxScorePicker{})));
//
// A policy that consumes a signal which none of the producers fills does not compile; both names stand on the first error
// line. Errors: kInvalidArgument naming the option, value and range, or the part.
template <class E, class... P, class... Policies>
absl::StatusOr<Router<E>> MakeRouter(const Fleet<E>& fleet, const RouterOptions& options, Producers<P...> producers,
                                     Named<Policies>... policies) {
  static_assert(sizeof...(Policies) > 0, "a router needs at least one policy");
  static_assert(internal::kAllApart<P...>);
  using Produced = typename internal::Joined<internal::FleetSignals, typename P::Produces...>::type;
  static_assert((internal::RequireProducersFor<Produced>(static_cast<const Policies*>(nullptr)) && ...));
  std::vector<AnyLoadProducer> load;
  std::vector<AnyRequestProducer> request;
  const auto add = [&]<class Producer>(Producer&& producer) {
    if constexpr (LoadProducer<Producer>) load.emplace_back(std::move(producer));
    else request.emplace_back(std::move(producer));
  };
  std::apply([&](auto&&... producer) { (add(std::move(producer)), ...); }, std::move(producers.parts));
  std::vector<std::shared_ptr<internal::PolicyBase>> bound;
  (bound.push_back(internal::MakePolicy(std::move(policies.name), std::move(policies.policy))), ...);
  absl::StatusOr<internal::State*> state =
      internal::State::Create(fleet.core(), options, std::move(load), std::move(request), std::move(bound));
  if (!state.ok()) return state.status();
  return Router<E>(*state);
}

// The same with lists that are known only at run time; signals are then checked here instead of by the compiler.
template <class E, class... Policies>
absl::StatusOr<Router<E>> MakeRouter(const Fleet<E>& fleet, const RouterOptions& options,
                                     std::vector<AnyLoadProducer> load, std::vector<AnyRequestProducer> request,
                                     Named<Policies>... policies) {
  std::vector<std::shared_ptr<internal::PolicyBase>> bound;
  (bound.push_back(internal::MakePolicy(std::move(policies.name), std::move(policies.policy))), ...);
  absl::StatusOr<internal::State*> state =
      internal::State::Create(fleet.core(), options, std::move(load), std::move(request), std::move(bound));
  if (!state.ok()) return state.status();
  return Router<E>(*state);
}

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_ROUTER_H_

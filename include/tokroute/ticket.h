// Ticket: the move-only receipt of one dispatch. It releases what it booked exactly once, whatever happens.
//
//   Send(ticket->endpoint(), ...);
//   ticket->FirstToken();                                            // The prefill is paid.
//   ticket->Remember({.tokens = prompt_and_response});                // Several turns: the next one finds it there.
//   ticket->Finish({.output_tokens = n, .cached_tokens = reported}); // Or drop it: that is an abort.
#ifndef TOKROUTE_TICKET_H_
#define TOKROUTE_TICKET_H_

#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "tokroute/booking.h"
#include "tokroute/decision.h"
#include "tokroute/fleet.h"
#include "tokroute/request.h"
#include "tokroute/state.h"

namespace tokroute {
inline namespace v0 {

// May outlive router, fleet and endpoint. All calls may race with each other, from any thread, in any order and number,
// except move, destruction, MoveTo and Router::Reroute, which need the ticket to themselves. A moved-from or
// default-made ticket is empty: its calls do nothing, and it has no endpoint.
template <class E>
class [[nodiscard]] Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&& other) noexcept
      : home_(std::exchange(other.home_, nullptr)), entry_(std::exchange(other.entry_, nullptr)) {}
  Ticket& operator=(Ticket&& other) noexcept {
    Ticket taken(std::move(other));
    std::swap(home_, taken.home_);
    std::swap(entry_, taken.entry_);
    return *this;
  }
  // Not finished: an abort. Everything is released. O(1) besides the producers' own work.
  ~Ticket() {
    if (home_ != nullptr) home_->Drop(entry_);
  }

  bool empty() const noexcept { return entry_ == nullptr; }

  // The endpoint of a leg, as it was when it was chosen. Valid as long as the ticket, or until MoveTo or Reroute. The
  // ticket must not be empty; a leg that it does not hold means its first.
  const E& endpoint(Leg leg = Leg::kServe) const noexcept {
    return static_cast<const internal::TypedRecord<E>&>(*decision(leg).record).endpoint;
  }
  EndpointId endpoint_id(Leg leg = Leg::kServe) const noexcept { return decision(leg).endpoint(); }
  // Why. The same validity.
  const Decision& decision(Leg leg = Leg::kServe) const noexcept {
    const internal::BookingEntry* found = entry_;
    for (const internal::BookingEntry* e = entry_; e != nullptr; e = e->next_leg) {
      if (e->decision.leg == leg) found = e;
    }
    return found->decision;
  }

  // Streaming: the first token has arrived, so the prompt is prefilled. Releases the prompt's charge; a prefill leg ends
  // here. Without it, everything is released at Finish. A second call, or one after the end, does nothing and is counted.
  void FirstToken() const noexcept {
    if (home_ != nullptr) home_->FirstToken(entry_);
  }
  // Several turns: the prompt and its response, as the next turn's prompt will begin, so that it is found where it is
  // (an approximate index; engines' events tell an exact one). Before Finish; the endpoint that answered, if there are
  // legs, is the decoding one. kInvalidArgument naming field, value and range, kFailedPrecondition (not live) or
  // kResourceExhausted: nothing was remembered. O(tokens), outside the router's lock.
  absl::Status Remember(const Request& conversation) const noexcept {
    if (home_ == nullptr) return absl::FailedPreconditionError("Ticket::Remember: the ticket is empty");
    return home_->Remember(entry_, decision(Leg::kDecode).endpoint(), conversation);
  }
  // The response has ended; with Outcome::aborted, not as it should. Releases what is still held. A second call does
  // nothing and is counted.
  void Finish(const Outcome& outcome = {}) const noexcept {
    if (home_ != nullptr) home_->Finish(entry_, outcome);
  }
  // Not finished, expired or empty.
  bool live() const noexcept { return home_ != nullptr && home_->Live(entry_); }

  // A retry on an endpoint of the caller's choice: the old one is released as by an abort and the new one booked, in one
  // step. matched_tokens: what the caller knows to be cached there. Moving after the first token books a new prefill.
  // False, and nothing changed, if the target is gone, drained or ejected, the ticket is not live, or it has no such leg
  // (kServe stands for the only leg). decision() then shows the old choice with the new endpoint.
  bool MoveTo(EndpointId to, std::int64_t matched_tokens = 0, Leg leg = Leg::kServe) noexcept {
    return home_ != nullptr && home_->MoveTo(entry_, to, matched_tokens, leg);
  }

  // Lets Router::Expire(now) abort it when now >= deadline, in whatever time the gateway counts. Set it again to extend;
  // nanoseconds::max() takes it away. There is no thread behind it and no default: a long request is not a leak.
  void Deadline(std::chrono::nanoseconds deadline) const noexcept {
    if (home_ != nullptr) home_->SetDeadline(entry_, deadline);
  }

 private:
  template <class>
  friend class Router;
  Ticket(internal::State* home, internal::BookingEntry* entry) noexcept : home_(home), entry_(entry) {}

  internal::State* home_ = nullptr;
  internal::BookingEntry* entry_ = nullptr;
};

// What Route returns: a ticket, or a typed refusal. "Nobody to pick" is an ordinary outcome, and making one allocates
// nothing.
template <class E>
class [[nodiscard]] Routed {
 public:
  explicit Routed(Ticket<E> ticket) noexcept : ticket_(std::move(ticket)) {}
  explicit Routed(Refusal refusal) noexcept : refusal_(std::move(refusal)) {}

  bool ok() const noexcept { return !ticket_.empty(); }
  explicit operator bool() const noexcept { return ok(); }
  // Reason kNone when ok.
  const Refusal& refusal() const noexcept { return refusal_; }
  // Only when ok.
  Ticket<E>* operator->() noexcept { return &ticket_; }
  const Ticket<E>* operator->() const noexcept { return &ticket_; }
  Ticket<E>& operator*() & noexcept { return ticket_; }
  const Ticket<E>& operator*() const& noexcept { return ticket_; }
  Ticket<E>&& operator*() && noexcept { return std::move(ticket_); }
  // The ticket, to keep with the connection.
  Ticket<E> Take() && noexcept { return std::move(ticket_); }

 private:
  Ticket<E> ticket_;
  Refusal refusal_;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_TICKET_H_

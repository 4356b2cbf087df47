// The concepts a plugin models: Filter, Scorer, Picker, LoadProducer, RequestProducer, Clock; and the small values that
// they return. A plugin is a plain struct; nothing is inherited and nothing registered.
//
//   struct ShortQueueScorer {
//     using Consumes = tokroute::Signals<tokroute::ActiveRequests>;
//     auto Score(const tokroute::Request&, tokroute::CandidatesFor<Consumes> candidates) const {
//       const auto active = candidates.Column<tokroute::ActiveRequests>();
//       return [=](tokroute::Row row) { return 1.0F / static_cast<float>(1 + active[row]); };
//     }
//   };
//   static_assert(tokroute::Scorer<ShortQueueScorer>);
//
// Optional in every plugin: `static constexpr std::string_view kName` (else messages use the type's name), and
// `absl::Status Check() const` (asked once, when a router takes the plugin).
#ifndef TOKROUTE_CONCEPTS_H_
#define TOKROUTE_CONCEPTS_H_

#include <array>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "tokroute/booking.h"
#include "tokroute/candidates.h"
#include "tokroute/fleet_view.h"
#include "tokroute/fwd.h"
#include "tokroute/random.h"
#include "tokroute/request.h"
#include "tokroute/signal.h"

namespace tokroute {
inline namespace v0 {

// What a plugin may know besides its columns.
struct Stage {
  Random& random;                  // Keyed by (seed, decision, stage).
  std::chrono::nanoseconds now{};  // From the router's clock; 0 without one.
};

// Why a filter kept what it kept. Reasons are open: a filter of yours states its own, as a constant with static life.
// Two reasons are the same when their names are.
struct ReasonTag {
  std::string_view name;
  friend bool operator==(const ReasonTag& a, const ReasonTag& b) noexcept { return a.name == b.name; }
};
inline constexpr ReasonTag kKeptAll{"kept_all"}, kNobodyWarm{"nobody_warm"}, kAllWarm{"all_warm"}, kSticky{"sticky"},
    kGateOpen{"gate_open"}, kGateOff{"gate_off"}, kExploration{"exploration"}, kNotApplicable{"not_applicable"};

struct FilterVerdict {
  const ReasonTag* reason = &kKeptAll;      // Never null.
  std::int64_t margin = 0;                  // How far from the other verdict; the filter's docstring names the unit.
  std::array<std::int64_t, 2> facts{0, 0};  // Two numbers the filter's docstring explains (a gate: its two loads).
  std::uint32_t kept = 0;                   // Survivors. Set by the policy.
};

struct Choice {
  std::uint32_t targets = 0;  // How many rows were ranked; targets[0] is the pick, the rest are fall-backs. 0: nobody.
  std::uint32_t tied = 0;     // Survivors that shared the best total, the pick included.
  double best = 0;            // The pick's total.
  double runner_up = 0;       // The best total among the others; equals `best` on a tie, and with one survivor.
};

// The most targets a picker is given room for.
inline constexpr std::uint32_t kMaxTargets = 8;

// Filter<F>: narrows the candidates and says why.
//
// Semantics beyond the syntax: reads the columns, selects, then keeps a selection or does not. Keeping nothing refuses
// the request and names the filter. Deterministic for equal inputs and draws; O(candidates); neither allocates, locks
// nor throws. See also: Scorer, when a preference will do.
template <class F>
concept Filter = requires(const F& f, const Request& r, CandidatesFor<typename F::Consumes> c, Stage& stage) {
  { f.Narrow(r, c, stage) } -> std::same_as<FilterVerdict>;
};

// Scorer<S>: does its per-request work once, then returns a function of the row: 0..1, higher is better.
//
// Semantics beyond the syntax: `Score` may look at all candidates (a maximum, say); the returned function is called per
// surviving row, once, or again for a trace or after an unclean score, so it answers alike each time. Finite; what lies
// outside 0..1 is clamped, NaN counts as 0, and both are counted in
// RouterMetrics::scores_clamped. Divide rather than multiply by a reciprocal: a fused multiply-add must not change a
// decision. Deterministic; O(candidates) and O(1); neither allocates, locks nor throws.
template <class S>
concept Scorer = requires(const S& s, const Request& r, CandidatesFor<typename S::Consumes> c, Row row) {
  { s.Score(r, c)(row) } -> std::same_as<float>;
};

// Picker<P>: ranks up to targets.size() rows. totals[i] belongs to the i-th survivor; there is at least one survivor.
//
// Semantics beyond the syntax: targets are distinct survivors; equal totals are never told apart by position.
// Deterministic for equal inputs and draws; O(candidates x targets); neither allocates, locks nor throws.
template <class P>
concept Picker = requires(const P& p, const Request& r, CandidatesFor<typename P::Consumes> c,
                          std::span<const double> totals, Stage& stage, std::span<Row> targets) {
  { p.Pick(r, c, totals, stage, targets) } -> std::same_as<Choice>;
};

// LoadProducer<L>: keeps per-endpoint columns up to date with what is dispatched. Works inside the router's critical
// section: O(1), noexcept, no locks. The router owns the columns, grows them and zeroes a slot's when its occupant
// changes; a release of a removed endpoint never reaches a producer. OnFirstToken and OnReleased may come later than the
// ticket was told, and on another thread, but before the next decision and before anything reads a column.
//
// Optional: `void Price(const Request&, Booking&) const noexcept`, called before OnBooked, sets the booking's charge;
// `using Audited = Signals<...>`: columns that a replay of OnBooked and OnFirstToken over the live bookings must
// reproduce exactly, which Router::Audit then proves; `using Fact = T` (T::kName names it) with
// `void OnFact(Own, Row, const T&) noexcept`: takes Router::Feed.
template <class L>
concept LoadProducer = requires(L& l, WritableColumns<typename L::Produces> own, const Request& r, const Booking& b,
                                const Outcome& o) {
  { l.OnBooked(own, r, b) } noexcept;
  { l.OnFirstToken(own, b) } noexcept;
  { l.OnReleased(own, b, o) } noexcept;  // b.prefilled says what is still held.
};

// RequestProducer<L>: fills per-request columns from the prompt. Works outside the section, on the caller's thread, so
// it may cost O(prompt); guards itself. Its columns are zeroed before Fill, one value per row of `f.width()`.
//
// Record runs once per booking after the section and must refuse an id that died meanwhile; its receipt lives with the
// ticket and comes back to OnFirstToken and OnReleased, which may race with each other, so they take their own lock. They
// run within the ticket's own call.
//
// Optional: `RequestFault Check(const Request&) const noexcept` refuses a request it cannot read;
// `void FillNew(const Request&, Own, Row) noexcept` completes the zeroed columns of a row whose occupant came after Fill
// (inside the section: O(1), no locks); `Receipt Move(Receipt&, const FleetView&, const Booking& to) noexcept` follows
// Ticket::MoveTo (without it the old receipt is released as aborted and the ticket goes on with a default-made one);
// `void Remember(const Request& conversation, const FleetView&, Workspace&, EndpointId) noexcept` is told by
// Ticket::Remember that the endpoint holds a prompt with its response;
// `void OnEndpointAdded(EndpointId, const EndpointFacts&) noexcept` is told of each endpoint version (also after
// Fleet::Update), and `void OnFleetChanged(const FleetView&) noexcept` that endpoints may be gone; both outside the
// section, on the thread that noticed.
template <class L>
concept RequestProducer =
    std::is_trivially_copyable_v<typename L::Receipt> && std::default_initializable<typename L::Receipt> &&
    std::default_initializable<typename L::Workspace> &&
    requires(L& l, const Request& r, const FleetView& f, typename L::Workspace& w,
             WritableColumns<typename L::Produces> own, const Booking& b, typename L::Receipt& receipt,
             const Outcome& o) {
      { l.Fill(r, f, w, own) } noexcept;
      { l.Record(r, f, w, b) } noexcept -> std::same_as<typename L::Receipt>;
      { l.OnFirstToken(receipt) } noexcept;
      { l.OnReleased(receipt, o) } noexcept;  // Aborted before the first token: take it back. Else unpin.
    };

// Clock<C>: monotonic time since any fixed point. Lock-free or cheap; called once per decision, outside the section.
template <class C>
concept Clock = requires(const C& c) {
  { c.Now() } noexcept -> std::convertible_to<std::chrono::nanoseconds>;
};

// A ready clock. The library reads no clock unless it is given one.
struct SteadyClock {
  std::chrono::nanoseconds Now() const noexcept { return std::chrono::steady_clock::now().time_since_epoch(); }
};

// A reference to any Clock, which must outlive every router that has it. Empty: time stays 0.
class ClockRef {
 public:
  ClockRef() = default;
  template <Clock C>
  ClockRef(const C& clock) noexcept  // NOLINT: implicit, so that `.clock = my_clock` works.
      : context_(&clock),
        now_([](const void* c) noexcept -> std::chrono::nanoseconds { return static_cast<const C*>(c)->Now(); }) {}
  std::chrono::nanoseconds Now() const noexcept { return now_ == nullptr ? std::chrono::nanoseconds{} : now_(context_); }

 private:
  const void* context_ = nullptr;
  std::chrono::nanoseconds (*now_)(const void*) noexcept = nullptr;
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

// A name for messages: the plugin's own, or its type's (compilers spell those differently: never compare them).
template <class T>
constexpr std::string_view NameOf() {
  if constexpr (requires { { T::kName } -> std::convertible_to<std::string_view>; }) {
    return T::kName;
  } else {
    std::string_view text = __PRETTY_FUNCTION__;  // "... [with T = ns::Type; ...]" or "... [T = ns::Type]"
    text.remove_prefix(text.find("T = ") + 4);
    text = text.substr(0, text.find_first_of(";]"));
    const auto colon = text.substr(0, text.find('<')).rfind("::");
    return colon == std::string_view::npos ? text : text.substr(colon + 2);
  }
}

// The compile-time check that a consumed signal is produced: an incomplete type puts both names on the first error line
// of gcc and clang (a static_assert cannot name types, a constraint splits them over three lines with gcc).
template <class Plugin>
struct ConsumedBy;
template <class SignalT, class By>
struct NoProducerFills;
template <bool produced, class SignalT, class Plugin>
inline constexpr bool kRequireProducer = true;
template <class SignalT, class Plugin>
inline constexpr bool kRequireProducer<false, SignalT, Plugin> =
    sizeof(NoProducerFills<SignalT, ConsumedBy<Plugin>>) != 0;

}  // namespace tokroute::internal

#endif  // TOKROUTE_CONCEPTS_H_

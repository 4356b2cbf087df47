// Ids and forward declarations: cheap to include from a gateway's own headers.
#ifndef TOKROUTE_FWD_H_
#define TOKROUTE_FWD_H_

#include <compare>
#include <cstdint>

namespace tokroute {
inline namespace v0 {  // Before 1.0 nothing is promised about the ABI.

using Row = std::uint32_t;       // A fleet slot; every column is indexed by it.
using TokenId = std::uint32_t;   // As the engine's tokenizer numbers them.
using BlockKey = std::uint64_t;  // Chained over all blocks before it; 0 is reserved for "none" and never occurs.

// The most endpoints one fleet can hold. A column of 64-bit values is then 64 KiB, so columns never move.
inline constexpr std::uint32_t kMaxEndpoints = 8192;

// Given out by Fleet::Add: a slot, and which of its occupants. Incarnation 0 is nobody, so a zeroed id names no one.
struct EndpointId {
  std::uint32_t slot = 0, incarnation = 0;
  friend auto operator<=>(const EndpointId&, const EndpointId&) = default;
};

struct Request;
struct Decision;
struct Refusal;
template <class E>
class Fleet;
template <class E>
class Router;
template <class E>
class Ticket;
template <class E>
class Routed;

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_FWD_H_

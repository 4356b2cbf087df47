// Endpoint: one model server, in the gateway's own type. Traits adapt a type that cannot change.
//
//   struct Upstream {                       // This is enough: a unique name.
//     std::string host;
//     std::string_view name() const { return host; }
//   };
//
// See also: Fleet, which holds endpoints; examples/custom_endpoint for a type adapted from outside.
#ifndef TOKROUTE_ENDPOINT_H_
#define TOKROUTE_ENDPOINT_H_

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// How the library reads an endpoint type. The primary template forwards to members of the same meaning where the type
// has them; specialise it for a type you cannot change. Only Name is required. Values are read once per Fleet::Add and
// Fleet::Update, never in the hot path.
//
//   Name(e)                   unique in its fleet, not empty
//   Models(e)                 range of strings: what it serves. Empty (or absent): any model
//   PeakPrefillThroughput(e)  tokens/s, measured. 0 (or absent): use the gate's own
//   CapacityTokens(e)         tokens its KV cache holds. 0 (or absent): the prefix index's default
//   BlockSize(e)              tokens per KV block. 0 (or absent): not known
//   Weight(e)                 relative share for policies that use weights, >= 0. Absent: 1
//   Host(e), Rank(e)          data-parallel ranks are endpoints of one host. Absent: "", 0
//   Label(e, key)             string for a key. Absent: ""
template <class E>
struct EndpointTraits {
  static std::string_view Name(const E& e)
    requires requires { { e.name() } -> std::convertible_to<std::string_view>; }
  {
    return e.name();
  }
  static decltype(auto) Models(const E& e)
    requires requires { e.models(); }
  {
    return e.models();
  }
  static double PeakPrefillThroughput(const E& e)
    requires requires { { e.peak_prefill_throughput() } -> std::convertible_to<double>; }
  {
    return e.peak_prefill_throughput();
  }
  static std::int64_t CapacityTokens(const E& e)
    requires requires { { e.capacity_tokens() } -> std::convertible_to<std::int64_t>; }
  {
    return e.capacity_tokens();
  }
  static std::int32_t BlockSize(const E& e)
    requires requires { { e.block_size() } -> std::convertible_to<std::int32_t>; }
  {
    return e.block_size();
  }
  static double Weight(const E& e)
    requires requires { { e.weight() } -> std::convertible_to<double>; }
  {
    return e.weight();
  }
  static std::string_view Host(const E& e)
    requires requires { { e.host() } -> std::convertible_to<std::string_view>; }
  {
    return e.host();
  }
  static std::int32_t Rank(const E& e)
    requires requires { { e.rank() } -> std::convertible_to<std::int32_t>; }
  {
    return e.rank();
  }
  static std::string_view Label(const E& e, std::string_view key)
    requires requires { { e.label(key) } -> std::convertible_to<std::string_view>; }
  {
    return e.label(key);
  }
};

// Endpoint<E>: E has a name (a member `name()`, or traits), and can be moved into a fleet.
//
// Semantics beyond the syntax: the name is unique in the fleet and does not change over the endpoint's life. Reading a
// const E from several threads must be safe, since tickets hand out const references.
template <class E>
concept Endpoint = std::move_constructible<E> && requires(const E& e) {
  { EndpointTraits<E>::Name(e) } -> std::convertible_to<std::string_view>;
};

// What the library keeps of an endpoint, whatever its type. Text is copied, so it outlives the endpoint's own.
struct EndpointFacts {
  std::string name;
  std::vector<std::string> models;     // Sorted, without duplicates. Empty: serves any.
  double peak_prefill_throughput = 0;  // Tokens/s; 0: not known.
  std::int64_t capacity_tokens = 0;    // Tokens; 0: not known.
  std::int32_t block_size = 0;         // Tokens; 0: not known.
  double weight = 1;
  std::string host;
  std::int32_t rank = 0;
};

// One version of one endpoint. Immutable; Fleet::Update makes a new one. Derived: what knows the gateway's type.
struct EndpointRecord {
  explicit EndpointRecord(EndpointFacts f) : facts(std::move(f)) {}
  virtual ~EndpointRecord() = default;
  virtual std::string_view Label(std::string_view key) const = 0;  // "" when the endpoint has none.
  EndpointRecord(const EndpointRecord&) = delete;
  EndpointRecord& operator=(const EndpointRecord&) = delete;
  const EndpointFacts facts;
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

template <class E>
struct TypedRecord final : EndpointRecord {
  TypedRecord(EndpointFacts f, E&& e) : EndpointRecord(std::move(f)), endpoint(std::move(e)) {}
  std::string_view Label(std::string_view key) const override {
    if constexpr (requires { EndpointTraits<E>::Label(endpoint, key); }) return EndpointTraits<E>::Label(endpoint, key);
    return {};
  }
  const E endpoint;
};

template <class E>
EndpointFacts FactsOf(const E& e) {
  using Traits = EndpointTraits<E>;
  EndpointFacts facts;
  facts.name = std::string(std::string_view(Traits::Name(e)));
  if constexpr (requires { Traits::Models(e); }) {
    for (const auto& model : Traits::Models(e)) facts.models.emplace_back(std::string_view(model));
    std::sort(facts.models.begin(), facts.models.end());
    facts.models.erase(std::unique(facts.models.begin(), facts.models.end()), facts.models.end());
  }
  if constexpr (requires { Traits::PeakPrefillThroughput(e); }) {
    facts.peak_prefill_throughput = Traits::PeakPrefillThroughput(e);
  }
  if constexpr (requires { Traits::CapacityTokens(e); }) facts.capacity_tokens = Traits::CapacityTokens(e);
  if constexpr (requires { Traits::BlockSize(e); }) facts.block_size = Traits::BlockSize(e);
  if constexpr (requires { Traits::Weight(e); }) facts.weight = Traits::Weight(e);
  if constexpr (requires { Traits::Host(e); }) facts.host = std::string(std::string_view(Traits::Host(e)));
  if constexpr (requires { Traits::Rank(e); }) facts.rank = Traits::Rank(e);
  return facts;
}

}  // namespace tokroute::internal

#endif  // TOKROUTE_ENDPOINT_H_

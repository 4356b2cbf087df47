// What each of the two shared objects offers. Everything else in them is hidden. The router is passed as a pointer, as
// a host that hands it to a plugin does; plain structs besides.
#ifndef TOKROUTE_TESTS_PACKAGING_HIDDEN_VISIBILITY_SIDE_H_
#define TOKROUTE_TESTS_PACKAGING_HIDDEN_VISIBILITY_SIDE_H_

#include <cstdint>

struct SideDecision {
  std::uint64_t number, slot, best_bits;
  std::int64_t matched_tokens, margin;
  std::uint32_t survivors, tied;
  char reason[24];  // Of the first filter; "" without one.
};

struct SideBooks {
  std::uint64_t decisions, finished, live_tickets, repeated_events;
  std::int64_t uncached_tokens[4], active_requests[4], custom[4];
};

struct SideApi {
  void* (*make)();  // A router over four endpoints.
  void (*destroy)(void* router);
  // Routes a prompt by a policy; "" is the first. The ticket stays with the caller.
  void* (*route)(void* router, const char* policy, std::uint32_t prompt, SideDecision* decision);
  void (*first_token)(void* ticket);
  void (*finish)(void* ticket);  // And drops it.
  void (*read)(void* router, SideBooks* books);
  // Of the ticket's first verdict, compared with the constants of this side: "sticky" and the like, by operator==.
  const char* (*reason_here)(void* ticket);
  bool (*add_policy)(void* router);      // "theirs": consumes the custom signal, which only the maker's producer fills.
  bool (*add_bad_policy)(void* router);  // Consumes what nobody fills: must be refused.
  bool (*feed)(void* router, std::uint64_t slot, std::int64_t amount);  // Into the custom signal.
  bool (*audit)(void* router);
  const void* (*identity)();  // Some address of this side's copy of tokroute's constants.
};

extern "C" __attribute__((visibility("default"))) const SideApi* SideA();
extern "C" __attribute__((visibility("default"))) const SideApi* SideB();

#endif  // TOKROUTE_TESTS_PACKAGING_HIDDEN_VISIBILITY_SIDE_H_

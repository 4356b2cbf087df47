// tokroute: which model server gets a request. Everything a gateway needs, in one include.
//
//   tokroute::Fleet<Upstream> fleet;                                    // Upstream: your type, with a name().
//   auto router = tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480, .max_ttft_penalty = 14s});
//   auto ticket = router->Route({.tokens = prompt, .model = "qwen3-32b"});
//   if (!ticket.ok()) return Respond(503, ticket.refusal());
//   Send(ticket->endpoint());  ticket->FirstToken();  ticket->Finish({.output_tokens = n});
//
// The map of the library: include/tokroute/README.md.
#ifndef TOKROUTE_TOKROUTE_H_
#define TOKROUTE_TOKROUTE_H_

#include "tokroute/concepts.h"
#include "tokroute/decision.h"
#include "tokroute/endpoint.h"
#include "tokroute/erased.h"
#include "tokroute/fleet.h"
#include "tokroute/policies.h"
#include "tokroute/policy.h"
#include "tokroute/picker/weighted_random_picker.h"
#include "tokroute/prefix/engine_keys.h"
#include "tokroute/prefix/event_driven_prefix.h"
#include "tokroute/request.h"
#include "tokroute/router.h"
#include "tokroute/ticket.h"

#endif  // TOKROUTE_TOKROUTE_H_

// One router, two shared objects with hidden copies of tokroute: everything they see of it must agree, and decisions
// must be those that one object alone would have made. Inline statics are one per object then, so anything
// that hung on the address of one, or on a registry, would fall apart here.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "side.h"

namespace {

int failures = 0;
void Expect(bool ok, const char* what, std::uint64_t where = 0) {
  if (ok) return;
  std::printf("not so: %s (%llu)\n", what, static_cast<unsigned long long>(where));
  ++failures;
}

bool Same(const SideDecision& a, const SideDecision& b) {
  return a.number == b.number && a.slot == b.slot && a.best_bits == b.best_bits &&
         a.matched_tokens == b.matched_tokens && a.margin == b.margin && a.survivors == b.survivors &&
         a.tied == b.tied && std::strcmp(a.reason, b.reason) == 0;
}

constexpr const char* kPolicies[] = {"", "affinity", "round-robin", "random", "custom"};

// 400 requests, four open at a time: `one` and `other` take turns in routing, and each ends the other's tickets.
std::vector<SideDecision> Serve(void* router, const SideApi& one, const SideApi& other) {
  struct Open {
    void* ticket;
    const SideApi* ends_it;
  };
  std::vector<SideDecision> decisions;
  std::vector<Open> open;
  for (std::uint32_t i = 0; i < 400; ++i) {
    const SideApi& routes = i % 2 == 0 ? one : other;
    const SideApi& ends = i % 2 == 0 ? other : one;
    SideDecision decision;
    void* ticket = routes.route(router, kPolicies[i % 5], i % 7, &decision);
    Expect(ticket != nullptr, "routed", i);
    if (ticket == nullptr) return decisions;
    decisions.push_back(decision);
    if (decision.reason[0] != '\0') {
      Expect(std::string_view(one.reason_here(ticket)) == decision.reason, "one side knows the reason", i);
      Expect(std::string_view(other.reason_here(ticket)) == decision.reason, "the other side knows the reason", i);
    }
    if (i % 3 != 0) ends.first_token(ticket);
    open.push_back({ticket, &ends});
    if (open.size() > 4) {
      open.front().ends_it->finish(open.front().ticket);
      open.erase(open.begin());
    }
    SideBooks a, b;
    one.read(router, &a);
    other.read(router, &b);
    Expect(std::memcmp(&a, &b, sizeof(a)) == 0, "both sides read the same counters and signals", i);
    Expect(a.decisions == i + 1 && a.live_tickets == open.size(), "counted", i);
    std::int64_t active = 0, custom = 0;
    for (int slot = 0; slot < 4; ++slot) active += a.active_requests[slot], custom += a.custom[slot];
    Expect(active == static_cast<std::int64_t>(open.size()) && custom == 10 * active, "signals found by name", i);
    if (i % 50 == 0) Expect(one.audit(router) && other.audit(router), "audit", i);
  }
  for (const Open& o : open) o.ends_it->finish(o.ticket);
  Expect(one.audit(router) && other.audit(router), "audit at the end");
  return decisions;
}

}  // namespace

int main() {
  const SideApi& a = *SideA();
  const SideApi& b = *SideB();
  // Else this test shows nothing.
  Expect(a.identity() != b.identity(), "each object has its own constants");

  void* alone = a.make();
  void* shared = a.make();
  void* other_way = b.make();
  Expect(alone != nullptr && shared != nullptr && other_way != nullptr, "made");
  if (failures > 0) return 1;
  const std::vector<SideDecision> expected = Serve(alone, a, a);
  const std::vector<SideDecision> together = Serve(shared, a, b);
  const std::vector<SideDecision> reversed = Serve(other_way, a, b);
  Expect(expected.size() == 400 && together.size() == 400 && reversed.size() == 400, "all decided");
  bool sticky = false, open = false;
  for (std::size_t i = 0; i < expected.size() && i < together.size() && i < reversed.size(); ++i) {
    Expect(Same(expected[i], together[i]), "the decision is what one object alone decides", i);
    Expect(Same(expected[i], reversed[i]), "and does not depend on who made the router", i);
    sticky |= std::strcmp(expected[i].reason, "sticky") == 0;
    open |= std::strcmp(expected[i].reason, "nobody_warm") == 0;
  }
  Expect(sticky && open, "the traffic shows more than one reason");

  // B's policy on A's router: B's own signal type finds the column of A's producer by name; a Fact finds it likewise.
  Expect(b.add_policy(shared), "the other side's policy is bound by signal names");
  Expect(!b.add_bad_policy(shared), "a signal that nobody fills is still refused");
  for (std::uint64_t slot = 0; slot < 4; ++slot) Expect(b.feed(shared, slot, slot == 2 ? 1 : 100), "fed", slot);
  SideDecision decision;
  void* ticket = a.route(shared, "theirs", 1, &decision);
  Expect(ticket != nullptr && decision.slot == 2, "the maker routes by the other side's policy");
  if (ticket != nullptr) b.finish(ticket);
  SideBooks books;
  a.read(shared, &books);
  Expect(books.custom[2] == 1 && books.custom[3] == 100 && books.live_tickets == 0, "both fed and released");

  a.destroy(alone);
  b.destroy(shared);  // By the side that did not make it.
  a.destroy(other_way);
  if (failures == 0) std::puts("hidden visibility: both sides agree");
  return failures == 0 ? 0 : 1;
}

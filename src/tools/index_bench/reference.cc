#include "tools/index_bench/reference.h"

#include <optional>

namespace tokroute::index_bench {

void Reference::Apply(const Operation& operation, std::span<const BlockKey> keys) {
  if (operation.is_match()) return;
  const EndpointId id = operation.endpoint;
  if (id.incarnation < incarnations_[id.slot]) return;  // Of an endpoint that is gone.
  incarnations_[id.slot] = id.incarnation;
  Set& set = held_[id.slot];
  switch (operation.kind) {
    case OperationKind::kMatch: break;
    case OperationKind::kStore: Store(operation, keys); break;
    case OperationKind::kRemove: Remove(set, keys); break;
    case OperationKind::kClear: Forget(set); break;
    case OperationKind::kRemoveEndpoint:
      if (!set.empty()) ++exercised_.removed_endpoints;
      Forget(set);
      ++incarnations_[id.slot];
      break;
  }
}

void Reference::Store(const Operation& operation, std::span<const BlockKey> keys) {
  Set& set = held_[operation.endpoint.slot];
  std::optional<BlockKey> parent = operation.parent;
  if (parent && !known_.contains(*parent)) ++exercised_.late_parents;
  for (const BlockKey key : keys) {
    if (++set[key] == 1) {
      ++known_[key].holders;
      ++holder_blocks_;
    } else {
      ++exercised_.duplicates;
    }
    if (parent) {
      if (const auto found = known_.find(*parent); found != known_.end()) {
        if (found->second.child == 0) {
          found->second.child = key;
        } else if (found->second.child != key && known_[key].holders == 1) {
          ++exercised_.forks;
        }
      }
    }
    parent = key;
  }
}

void Reference::Remove(Set& set, std::span<const BlockKey> keys) {
  for (const BlockKey key : keys) {
    const auto copies = set.find(key);
    if (copies == set.end() || --copies->second > 0) continue;
    set.erase(copies);
    const BlockKey child = known_.find(key)->second.child;
    if (child != 0 && set.contains(child)) ++exercised_.evicted_middles;
    Drop(key);
  }
}

void Reference::Drop(BlockKey key) {
  --holder_blocks_;
  const auto found = known_.find(key);
  if (--found->second.holders == 0) known_.erase(found);
}

void Reference::Forget(Set& set) {
  for (const auto& [key, copies] : set) Drop(key);
  Set().swap(set);
}

void Reference::Match(std::span<const BlockKey> keys, std::vector<Holder>& out) {
  out.clear();
  if (keys.empty() || !known_.contains(keys[0])) return;
  for (std::uint32_t slot = 0; slot < held_.size(); ++slot) {
    const Set& set = held_[slot];
    std::size_t depth = 0;
    while (depth < keys.size() && set.contains(keys[depth])) ++depth;
    if (depth + 1 < keys.size() && !set.empty() && set.contains(keys[depth + 1])) ++exercised_.holes;
    if (depth > 0) out.push_back({{slot, incarnations_[slot]}, static_cast<std::int64_t>(depth)});
  }
}

}  // namespace tokroute::index_bench

// What the exact index tells those who feed it under other names (engine_keys.h).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "prefix/event_index.h"

namespace tokroute::internal {

void EventIndex::MarkResync(EndpointId id) noexcept {
  const MutexLock lock(mutex_);
  (void)Admit(id, false);
  if (Knows(id)) slots_[id.slot].resync = true;
}

void EventIndex::LookAt(std::span<const BlockKey> keys, EndpointId by, std::span<SeenBlock> out) noexcept {
  const MutexLock lock(mutex_);
  const bool anybody = by.incarnation == 0;
  const std::uint32_t owner = !anybody && Knows(by) ? slots_[by.slot].owner_or_0 - 1 : kNone;  // kNone for 0.
  for (std::size_t i = 0; i < std::min<std::size_t>(keys.size(), kAhead); ++i) table_.Prefetch(keys[i]);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) table_.Prefetch(keys[i + kAhead]);
    const Place place = PlaceOf(keys[i]);
    out[i] = {};
    if (place.run == kNone) continue;
    Run& run = At(place.run);
    out[i].parent = place.offset > 0 ? KeysOf(run)[place.offset - 1] : run.parent_key;
    // Mostly the first holder that is asked has it.
    const auto has = [&](const Holder& holder) TOKROUTE_REQUIRES(mutex_) {
      return holder.tier() < kStorageTiers && Holds(holder, ExtraOf(run, holder).bits, place.offset) &&
             OwnerAt(holder.owner()).alive != 0;
    };
    if (anybody) {
      const std::span<const Holder> holders = HoldersOf(run);
      out[i].here = std::any_of(holders.begin(), holders.end(), has);
    }
    for (std::uint32_t tier = 0; tier < kStorageTiers && owner != kNone && !out[i].here; ++tier) {
      const Holder* holder = FindHolder(place.run, TagOf(owner), tier);
      out[i].here = holder != nullptr && has(*holder);
    }
  }
}

}  // namespace tokroute::internal

// What the exact index holds for a while only: orphans, which wait for their parent, and speculations, which wait for
// the engine's events.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "internal/no_memory.h"
#include "prefix/event_index.h"

namespace tokroute::internal {
namespace {

constexpr std::uint32_t kMostHanging = 256;  // Runs in a row that hang in the air and are looked through.

}  // namespace

// ---- Orphans: what was stored behind an unknown parent ----

// The place's chain goes up to a prompt's first block. Only runs that once hung in the air are asked again, and no more
// of them in a row than kMostHanging: keys that are no chain may go round in a circle.
bool EventIndex::Reaches(Place place) noexcept {
  if (place.run == kNone) return false;
  const std::uint32_t first = place.run;
  for (std::uint32_t steps = 0; (At(place.run).state & Run::kOrphan) != 0; ++steps) {
    place = PlaceOf(At(place.run).parent_key);
    if (place.run == kNone || steps == kMostHanging) return false;
  }
  for (std::uint32_t at = first; (At(at).state & Run::kOrphan) != 0; at = PlaceOf(At(at).parent_key).run) {
    Store(At(at).state, 0);
  }
  return true;
}

// Notes that these blocks, stored behind an unknown parent, may have to go. False: the endpoint has too many already,
// or there is no memory.
bool EventIndex::KeepOrphans(std::uint32_t owner, std::uint32_t tier, BlockKey parent,
                             std::span<const BlockKey> keys) noexcept {
  Owner& whose = OwnerAt(owner);
  const auto count = static_cast<std::int64_t>(keys.size());
  if (whose.orphans + count > options_.max_orphan_blocks || !budget_.Take(count * std::int64_t{sizeof(BlockKey)}))
    return false;
  TOKROUTE_TRY {
    orphans_.push_back(
        {whose.life, owner, tier, parent, options_.clock.Now() + options_.orphan_ttl, {keys.begin(), keys.end()}});
    ++awaited_[parent];
  }
  TOKROUTE_NO_MEMORY {
    if (!orphans_.empty() && orphans_.back().parent == parent && awaited_.count(parent) == 0) orphans_.pop_back();
    budget_.Give(count * std::int64_t{sizeof(BlockKey)});
    return false;
  }
  whose.orphans += count;
  stats_.orphan_blocks += count;
  return true;
}

// The event that was noted last was taken in part only.
void EventIndex::CutOrphans(std::size_t stored) noexcept {
  Orphans& orphans = orphans_.back();
  const auto fewer = static_cast<std::int64_t>(orphans.keys.size() - stored);
  orphans.keys.resize(stored);
  OwnerAt(orphans.owner).orphans -= fewer;
  stats_.orphan_blocks -= fewer;
  budget_.Give(fewer * std::int64_t{sizeof(BlockKey)});
  if (stored == 0) Unawait(orphans.parent);
}

void EventIndex::Unawait(BlockKey parent) noexcept {
  const auto it = awaited_.find(parent);
  if (it != awaited_.end() && --it->second == 0) awaited_.erase(it);
}

// Those whose endpoint is gone are none any more; else they have found their parent (`adopted`), or are let go of.
void EventIndex::Settle(Orphans& orphans, bool adopted) noexcept {
  if (orphans.keys.empty()) return;
  Owner& whose = OwnerAt(orphans.owner);
  const bool alive = whose.alive != 0 && whose.life == orphans.life;
  const auto count = static_cast<std::int64_t>(orphans.keys.size());
  if (alive && !adopted) {
    for (std::size_t i = orphans.keys.size(); i-- > 0;) {
      const Place place = PlaceOf(orphans.keys[i]);
      if (place.run != kNone && Unmark(place.run, orphans.owner, orphans.tier, place.offset)) Trim(place.run);
    }
    stats_.dropped_orphans += count;
    slots_[whose.slot].resync = true;
  }
  if (alive) whose.orphans -= count;
  stats_.orphan_blocks -= count;
  budget_.Give(count * std::int64_t{sizeof(BlockKey)});
  Unawait(orphans.parent);
  orphans.keys = {};
}

// These blocks are reachable: so are the orphans that wait for one of them, and those that wait for those.
void EventIndex::Adopt(std::span<const BlockKey> keys) noexcept {
  TOKROUTE_TRY {
    std::vector<BlockKey> found;
    for (std::size_t next = 0; !awaited_.empty(); ++next) {
      if (next >= keys.size() + found.size()) return;
      const BlockKey key = next < keys.size() ? keys[next] : found[next - keys.size()];
      if (awaited_.count(key) == 0) continue;
      for (Orphans& orphans : orphans_) {
        if (orphans.keys.empty() || orphans.parent != key) continue;
        found.insert(found.end(), orphans.keys.begin(), orphans.keys.end());
        Settle(orphans, true);
      }
    }
  }
  TOKROUTE_NO_MEMORY {
    return;  // Those that are left go when their time is up, which under-credits.
  }
}

void EventIndex::ExpireOrphans() noexcept {
  const std::chrono::nanoseconds now = options_.clock.Now();
  while (!orphans_.empty()) {
    Orphans& oldest = orphans_.front();
    if (!oldest.keys.empty()) {
      const Owner& whose = OwnerAt(oldest.owner);
      const bool gone = whose.alive == 0 || whose.life != oldest.life;
      if (!gone && oldest.deadline > now) return;
      Settle(oldest, false);
    }
    orphans_.pop_front();
  }
}

// ---- Speculations: what booked requests will store ----

// The owner's tiers hold these blocks for real: speculating on them is over.
void EventIndex::Forget(std::uint32_t at, std::uint32_t owner, std::uint32_t from, std::uint32_t to) noexcept {
  if (stats_.speculative_blocks == 0) return;
  for (std::uint32_t i = from; i < to; ++i) {
    while (Unmark(at, owner, kSpeculative, i)) {
    }
  }
}

EventIndex::Speculation* EventIndex::Find(const PrefixReceipt& receipt) noexcept {
  if (receipt.serial == 0 || receipt.serial > last_serial_) return nullptr;
  const std::uint64_t back = last_serial_ - receipt.serial;  // They are numbered without a gap.
  if (back >= speculations_.size()) return nullptr;
  Speculation& found = speculations_[speculations_.size() - 1 - back];
  return found.serial == receipt.serial ? &found : nullptr;
}

PrefixReceipt EventIndex::Speculate(EndpointId id, std::span<const BlockKey> keys, const FleetView* alive) noexcept {
  const std::uint32_t owner = keys.empty() || (alive != nullptr && !alive->Alive(id)) ? kNone : Admit(id, true);
  const auto bytes = static_cast<std::int64_t>(keys.size_bytes());
  if (owner == kNone || !budget_.Take(bytes)) {
    ++stats_.refused_records;
    return {};
  }
  Owner& whose = OwnerAt(owner);
  const Place last = whose.last;  // A hint for events; requests are none.
  std::size_t stored = 0;
  if (StoreKeys(owner, kSpeculative, 0, keys, stored) != KvResult::kApplied) ++stats_.truncated_records;
  whose.last = last;
  Speculation speculation;
  speculation.serial = ++last_serial_;
  speculation.life = whose.life;
  speculation.owner = owner;
  speculation.deadline = options_.clock.Now() + options_.speculative_ttl;
  ++stats_.live_receipts;
  TOKROUTE_TRY {
    speculation.keys.assign(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(stored));
    speculations_.push_back(std::move(speculation));
  }
  TOKROUTE_NO_MEMORY {
    speculation.keys = {};
    for (std::size_t i = stored; i-- > 0;) Unspeculate(owner, keys[i]);
    budget_.Give(bytes);
    --stats_.live_receipts;
    return {};
  }
  budget_.Give(bytes - static_cast<std::int64_t>(stored * sizeof(BlockKey)));
  if (speculations_.size() == 1)
    next_deadline_.store(speculations_.front().deadline.count(), std::memory_order_release);
  return {.serial = last_serial_, .entry = 0, .blocks = static_cast<std::int64_t>(stored)};
}

// One speculation less on a block. None, if it became real meanwhile.
void EventIndex::Unspeculate(std::uint32_t owner, BlockKey key) noexcept {
  const Place place = PlaceOf(key);
  if (place.run != kNone && Unmark(place.run, owner, kSpeculative, place.offset)) Trim(place.run);
}

void EventIndex::Withdraw(Speculation& speculation) noexcept {
  const Owner& whose = OwnerAt(speculation.owner);
  if (whose.alive != 0 && whose.life == speculation.life) {
    for (std::size_t i = speculation.keys.size(); i-- > 0;) Unspeculate(speculation.owner, speculation.keys[i]);
  }
  budget_.Give(static_cast<std::int64_t>(speculation.keys.size() * sizeof(BlockKey)));
  speculation.serial = 0;
  speculation.keys = {};
  --stats_.live_receipts;
}

void EventIndex::ExpireSpeculations(std::chrono::nanoseconds now) noexcept {
  while (!speculations_.empty() && (speculations_.front().serial == 0 || speculations_.front().deadline <= now)) {
    if (speculations_.front().serial != 0) Withdraw(speculations_.front());
    speculations_.pop_front();
  }
  next_deadline_.store(speculations_.empty() ? kNever : speculations_.front().deadline.count(),
                       std::memory_order_release);
  GiveBack();
}

std::int64_t EventIndex::RecordableBlocks(EndpointId, std::int64_t blocks) noexcept {
  return options_.speculative_ttl.count() > 0 ? blocks : 0;
}

PrefixReceipt EventIndex::Record(EndpointId id, std::span<const BlockKey> keys, bool, const FleetView* alive) noexcept {
  if (options_.speculative_ttl.count() <= 0) return {};
  const MutexLock lock(mutex_);
  ExpireSpeculations(options_.clock.Now());
  SweepSome(kSweepStep);
  return Speculate(id, keys, alive);
}

void EventIndex::OnFirstToken(const PrefixReceipt& receipt) noexcept {
  const MutexLock lock(mutex_);
  Speculation* speculation = Find(receipt);
  if (speculation != nullptr) speculation->confirmed = true;
}

// Aborted before the first token, nothing will be stored. Otherwise the events may be on their way: the deadline
// stands.
void EventIndex::OnReleased(PrefixReceipt& receipt, bool aborted) noexcept {
  const PrefixReceipt was = std::exchange(receipt, {});
  if (was.serial == 0) return;
  const MutexLock lock(mutex_);
  Speculation* speculation = Find(was);
  if (speculation != nullptr && aborted && !speculation->confirmed) Withdraw(*speculation);
  ExpireSpeculations(options_.clock.Now());
}

PrefixReceipt EventIndex::Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept {
  const PrefixReceipt was = std::exchange(from, {});
  const MutexLock lock(mutex_);
  Speculation* speculation = Find(was);
  if (speculation == nullptr) return {};
  PrefixReceipt moved;
  TOKROUTE_TRY {
    const std::vector<BlockKey> keys = speculation->keys;
    // Booked there before the old one goes, so that blocks which only this request speculates on stay in place.
    moved = Speculate(to, keys, alive);
  }
  TOKROUTE_NO_MEMORY { ++stats_.refused_records; }
  speculation = Find(was);  // The record may have moved them.
  // After the first token its events may be on their way: the deadline stands.
  if (!speculation->confirmed) Withdraw(*speculation);
  return moved;
}

}  // namespace tokroute::internal

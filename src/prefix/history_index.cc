#include "prefix/history_index.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "internal/no_memory.h"

namespace tokroute::internal {
namespace {

constexpr std::uint32_t kStride =
    128;  // Of the blocks that the table knows: a record inserts few, a search probes few.
// Below this no shorter run is tried when memory is tight; evicting comes first.
constexpr std::uint32_t kLeastSqueezed = 64;
// Fewer keys are copied on the spot, and behind those of the run that they continue.
constexpr std::uint32_t kLeastFill = 64;
constexpr std::int64_t kEvictionStep = 64;         // Blocks evicted at a time when memory is short.
constexpr std::size_t kMostScratch = 131'072;      // Keys of a moved path whose memory is kept for the next.
constexpr std::int64_t kBlocksPerMembership = 64;  // That a sweep takes at a time.

}  // namespace

HistoryIndex::HistoryIndex(const PrefixIndexOptions& options) noexcept
    : RunForest(options, {1, 1, 1, 1, 1}, kStride),
      default_blocks_(options.default_capacity_tokens / options.block_size),
      live_(budget_) {}

// ---- Keys and runs ----

bool HistoryIndex::Pending(std::uint32_t run) const noexcept {
  if (pending_ == nullptr) return false;
  const std::span<const Fill> fills = std::span(pending_->all).first(pending_->count);
  return std::any_of(fills.begin(), fills.end(), [run](const Fill& fill) { return fill.run == run; });
}

// A run's keys, wherever they are: somebody else's copying is waited for, and one's own has not begun.
const BlockKey* HistoryIndex::ReadyKeysOf(std::uint32_t at, const Fills* pending) const noexcept {
  const Run& run = At(at);
  if ((Load(run.state) & Run::kUnfilled) == 0) return KeysOf(run);
  for (std::uint32_t i = 0; pending != nullptr && i < pending->count; ++i) {
    if (pending->all[i].run == at) return pending->all[i].from;
  }
  while ((Load(run.state) & Run::kUnfilled) != 0) PauseBriefly();
  return KeysOf(run);
}

Place HistoryIndex::PlaceOf(BlockKey key) const noexcept {
  return table_.Find(key, [this, key, pending = pending_](Place place) {
    return place.offset < At(place.run).length && ReadyKeysOf(place.run, pending)[place.offset] == key;
  });
}

// False: the key is somewhere else already, or there is no memory.
bool HistoryIndex::Index(std::uint32_t run, std::uint32_t offset, BlockKey key) noexcept {
  return table_.Insert(key, {run, offset}, [this, key, pending = pending_](Place place) {
    return place.offset < At(place.run).length && ReadyKeysOf(place.run, pending)[place.offset] == key;
  });
}

// Where the path's next key is: behind the last one, or where the table says.
Place HistoryIndex::Next(const Path& path) const noexcept {
  const BlockKey key = path.keys[static_cast<std::size_t>(path.depth)];
  const Place last = path.last;
  if (last.run != kNone && last.offset + 1 < At(last.run).length && ReadyKeysOf(last.run)[last.offset + 1] == key) {
    return {last.run, last.offset + 1};
  }
  return PlaceOf(key);
}

// Adds keys behind the last one in its run, and gives them to the owner. False: they cannot go there, or there is no
// memory.
bool HistoryIndex::Lengthen(Path& path, std::span<const BlockKey> keys) noexcept {
  const std::uint32_t at = path.last.run;
  if (at == kNone || keys.size() >= kLeastFill || Pending(at)) return false;
  Run& run = At(at);
  const std::uint32_t from = run.length;
  if (path.last.offset + 1 != from || from == kMostKeys) return false;
  auto count = static_cast<std::uint32_t>(std::min<std::size_t>(keys.size(), kMostKeys - from));
  (void)ReadyKeysOf(at);
  if (!Grow(at, from + count)) {
    count = std::min(count, run.key_units * Arena::kUnitBytes / std::uint32_t{sizeof(BlockKey)} - from);
  }
  BlockKey* const own = count > 0 ? KeysOf(run) : nullptr;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t offset = run.length;
    if (IsIndexed(run, offset) && !Index(at, offset, keys[i])) break;
    Store(own[offset], keys[i]);
    Store(run.length, static_cast<std::uint16_t>(offset + 1));
    ++stats_.distinct_blocks;
  }
  if (run.length == from) return false;
  if (!Take(at, path.owner, from, run.length)) {
    Trim(at);
    return false;
  }
  path.depth += run.length - from;
  path.last.offset = run.length - 1u;
  return true;
}

// A new run behind the last key, the owner's, pinned. Takes as many keys as memory allows. False: none.
bool HistoryIndex::Start(Path& path, std::span<const BlockKey> keys) noexcept {
  auto length = static_cast<std::uint32_t>(std::min<std::size_t>(keys.size(), kMostKeys));
  const std::uint32_t made = NewStretch(path.owner);
  if (made == kNone) return false;
  const std::uint32_t at = NewRun(path.last_key(), path.last);
  std::uint32_t chunk = at != kNone ? arena_.Allocate(UnitsOf(length)) : kNone;
  while (at != kNone && chunk == kNone && length > kLeastSqueezed) {
    length /= 2;
    chunk = arena_.Allocate(UnitsOf(length));
  }
  if (chunk == kNone) {
    if (at != kNone) FreeRun(at);
    FreeStretch(path.owner, made);
    return false;
  }
  Run& run = At(at);
  Fill* const fill = length >= kLeastFill && path.fills != nullptr && path.fills->count < path.fills->all.size()
                         ? &path.fills->all[path.fills->count]
                         : nullptr;
  {
    const Writing writing(run);
    Store(run.noted, static_cast<std::uint32_t>(path.depth));
    Store(run.keys, chunk);
    Store(run.key_units, static_cast<std::uint16_t>(UnitsOf(length)));
    Store(run.length, static_cast<std::uint16_t>(length));
    if (fill != nullptr) {
      *fill = {at, KeysOf(run), keys.data(), length};
      ++path.fills->count;
      Store(run.state, Run::kUnfilled);
    } else {
      for (std::uint32_t i = 0; i < length; ++i) Store(KeysOf(run)[i], keys[i]);
    }
  }
  // Up to a key that cannot be indexed: it is somewhere already, or there is no memory.
  std::uint32_t indexed = 0;
  while (indexed < length && Index(at, indexed, keys[indexed])) {
    do {
      ++indexed;
    } while (indexed < length && !IsIndexed(run, indexed));
  }
  if (indexed < length) {
    length = indexed;
    Store(run.length, static_cast<std::uint16_t>(length));
    if (fill != nullptr) fill->count = length;
    if (length == 0) {
      if (fill != nullptr) --path.fills->count;
      FreeRun(at);
      FreeStretch(path.owner, made);
      return false;
    }
  }
  stats_.distinct_blocks += length;
  StoreRecord(StretchAt(made), Stretch{.run = at, .pins = 1, .end = static_cast<std::uint16_t>(length)});
  (void)AddHolder(at, path.owner, 0, {.bits = kNone, .older = kNone, .newer = made});  // The first has its room.
  {
    const Writing writing(run);
    SetHolder(*Held(at, path.owner), length, length);
  }
  path.depth += length;
  path.last = {at, length - 1};
  return true;
}

// ---- Stretches ----

// kNone: no memory.
std::uint32_t HistoryIndex::NewStretch(std::uint32_t owner) noexcept {
  const SlabSet::Spot spot = stretch_slabs_.New(arena_);
  if (spot.slab == kNone) return kNone;
  const std::uint32_t made = spot.slab * kPerSlab + spot.item;
  if (spot.first) {
    for (std::uint32_t i = 0; i < kPerSlab; ++i) StoreRecord(StretchAt(spot.slab * kPerSlab + i), Stretch{});
  }
  ++OwnerAt(owner).stretches;
  return made;
}
void HistoryIndex::FreeStretch(std::uint32_t owner, std::uint32_t at) noexcept {
  StoreRecord(StretchAt(at), Stretch{});
  stretch_slabs_.Free({at / kPerSlab, at % kPerSlab});
  --OwnerAt(owner).stretches;
  if (OwnerAt(owner).alive == 0) --stats_.pending_sweep;
}

bool HistoryIndex::HasEmptySlabs() const noexcept { return stretch_slabs_.HasSurplus(); }
void HistoryIndex::ReleaseEmptySlabs() noexcept { stretch_slabs_.ReleaseEmpty(arena_); }

// Out of the order of use.
void HistoryIndex::Unlist(std::uint32_t owner, const Stretch& stretch) noexcept {
  Owner& whose = OwnerAt(owner);
  RunForest::List& order = whose.lists[0];
  Store(stretch.older != kNone ? StretchAt(stretch.older).newer : order.oldest, stretch.newer);
  Store(stretch.newer != kNone ? StretchAt(stretch.newer).older : order.newest, stretch.older);
}
// As the most recently used one.
void HistoryIndex::Enlist(std::uint32_t owner, std::uint32_t at) noexcept {
  Owner& whose = OwnerAt(owner);
  RunForest::List& order = whose.lists[0];
  Stretch& stretch = StretchAt(at);
  Store(stretch.older, order.newest);
  Store(stretch.newer, kNone);
  Store(order.newest != kNone ? StretchAt(order.newest).newer : order.oldest, at);
  order.newest = at;
}

// Lets a stretch end at `offset`, which the owner holds. False: no memory.
bool HistoryIndex::CutAt(std::uint32_t run, std::uint32_t owner, std::uint32_t offset) noexcept {
  std::uint32_t at = DeepestIn(run, *Held(run, owner));
  while (BeginOf(StretchAt(at)) >= offset) at = StretchAt(at).above;
  if (StretchAt(at).end == offset) return true;
  const std::uint32_t made = NewStretch(owner);
  if (made == kNone) return false;
  Stretch& lower = StretchAt(at);
  Stretch upper = lower;
  upper.end = static_cast<std::uint16_t>(offset);
  if (lower.pins == 0) {  // What lies above is the more recent one.
    Owner& whose = OwnerAt(owner);
    upper.older = at;
    Store(lower.newer != kNone ? StretchAt(lower.newer).older : whose.lists[0].newest, made);
    Store(lower.newer, made);
  }
  StoreRecord(StretchAt(made), upper);
  Store(lower.above, made);
  return true;
}

// Pins what the owner holds of the run's first `to` blocks; a stretch ends there.
void HistoryIndex::Pin(std::uint32_t run, std::uint32_t owner, std::uint32_t to) noexcept {
  for (std::uint32_t at = DeepestIn(run, *Held(run, owner)); at != kNone; at = StretchAt(at).above) {
    Stretch& stretch = StretchAt(at);
    if (stretch.end > to) continue;
    if (stretch.pins == 0) {
      Unlist(owner, stretch);
      Store(stretch.older, kNone);
      Store(stretch.newer, kNone);
    }
    Store(stretch.pins, stretch.pins + 1);
  }
}

// Gives the owner the run's blocks [from, to), tentatively, pinned; it holds what lies before them. False: no memory.
bool HistoryIndex::Take(std::uint32_t at, std::uint32_t owner, std::uint32_t from, std::uint32_t to) noexcept {
  const std::uint32_t made = NewStretch(owner);
  if (made == kNone) return false;
  Stretch stretch{.run = at, .pins = 1, .end = static_cast<std::uint16_t>(to)};
  if (from > 0) {
    std::uint32_t& deepest = DeepestIn(at, *Held(at, owner));
    stretch.above = deepest;
    Store(deepest, made);
  } else if (!AddHolder(at, owner, 0, {.bits = kNone, .older = kNone, .newer = made})) {
    FreeStretch(owner, made);
    return false;
  }
  StoreRecord(StretchAt(made), stretch);
  const Writing writing(At(at));
  SetHolder(*Held(at, owner), to, to);
  return true;
}

// Takes up to `most` blocks from the end of a stretch that is the owner's deepest in its run; returns how many. The run
// may cease to exist.
std::int64_t HistoryIndex::CutTail(std::uint32_t owner, std::uint32_t at, std::int64_t most) noexcept {
  Stretch& stretch = StretchAt(at);
  const std::uint32_t run = stretch.run, begin = BeginOf(stretch);
  const auto count = static_cast<std::uint32_t>(std::min<std::int64_t>(stretch.end - begin, most));
  const std::uint32_t end = stretch.end - count;
  Holder& holder = *Held(run, owner);
  if (end > begin) {
    Store(stretch.end, static_cast<std::uint16_t>(end));
  } else {
    if (stretch.pins == 0) Unlist(owner, stretch);
    Store(DeepestIn(run, holder), stretch.above);
    FreeStretch(owner, at);
  }
  if (end == 0) {
    DropHolder(run, holder);
  } else {
    const Writing writing(At(run));
    SetHolder(holder, end, end);
  }
  Trim(run);
  return count;
}

// Makes one of neighbours in the run that follow each other in the order of use.
void HistoryIndex::Merge(std::uint32_t run, std::uint32_t owner) noexcept {
  const Holder* holder = Held(run, owner);
  if (holder == nullptr) return;
  std::uint32_t* link = &DeepestIn(run, *holder);
  while (StretchAt(*link).above != kNone) {
    const std::uint32_t at = *link;
    Stretch& lower = StretchAt(at);
    Stretch& upper = StretchAt(lower.above);
    if (lower.pins > 0 || upper.pins > 0 || lower.newer != lower.above) {
      link = &lower.above;
      continue;
    }
    Unlist(owner, lower);
    Store(upper.end, lower.end);
    Store(*link, lower.above);
    FreeStretch(owner, at);
  }
}

// Calls f(run, stretch) for the owner's stretches on a path that ends after `blocks` of `run`, deepest first, until it
// returns false.
template <class F>
void HistoryIndex::UpThePath(std::uint32_t owner, std::uint32_t run, std::uint32_t blocks, F&& f) noexcept {
  while (run != kNone) {
    for (std::uint32_t at = DeepestIn(run, *Held(run, owner)); at != kNone; at = StretchAt(at).above) {
      if (StretchAt(at).end <= blocks && !f(run, at)) return;
    }
    blocks = At(run).parent_offset + 1u;
    run = At(run).parent;
  }
}

// ---- Room ----

// Makes some memory free: the dead first, then `evictor`'s oldest blocks. False: there is nothing to take.
bool HistoryIndex::Relieve(std::uint32_t evictor) noexcept {
  if (first_dead_ != kNone) {
    SweepSome(kSweepStep);
    return true;
  }
  return Evict(evictor, kEvictionStep) > 0;
}

// Trims the oldest stretches from their tails; returns the blocks evicted.
std::int64_t HistoryIndex::Evict(std::uint32_t owner, std::int64_t blocks) noexcept {
  std::int64_t evicted = 0;
  while (evicted < blocks) {
    const std::uint32_t oldest = OwnerAt(owner).lists[0].oldest;
    if (oldest != kNone) {
      evicted += CutTail(owner, oldest, blocks - evicted);
    } else if (!SettleEach()) {  // Else other threads had released some of it.
      break;
    }
  }
  stats_.evicted_blocks += evicted;
  return evicted;
}

void HistoryIndex::EvictOverflow(std::uint32_t owner) noexcept {
  (void)Evict(owner, OwnerAt(owner).held[0] - slots_[OwnerAt(owner).slot].capacity_blocks);
}

// Blocks the endpoint may hold; 0 when it is known to be dead.
std::int64_t HistoryIndex::CapacityOf(EndpointId id) const noexcept {
  const Slot& slot = slots_[id.slot];
  if (id.incarnation < slot.incarnation || id.incarnation <= slot.dead_through) return 0;
  return id.incarnation == slot.incarnation ? slot.capacity_blocks : default_blocks_;
}

absl::Status HistoryIndex::SetCapacity(EndpointId id, std::int64_t tokens) {
  const Section section(*this);
  SweepSome(kSweepStep);
  if (slots_ == nullptr) return absl::ResourceExhaustedError("PrefixIndex::SetCapacity: no memory for endpoints");
  const std::uint32_t owner = Admit(id, false);
  if (!Knows(id)) {
    return absl::NotFoundError(absl::StrCat("PrefixIndex::SetCapacity: endpoint: slot ", id.slot, ", incarnation ",
                                            id.incarnation, " was removed or replaced"));
  }
  slots_[id.slot].capacity_blocks = tokens == 0 ? default_blocks_ : tokens / options_.block_size;
  if (owner != kNone) EvictOverflow(owner);
  GiveBack();
  return absl::OkStatus();
}

// ---- What the forest asks ----

void HistoryIndex::OnEntered(Slot& slot) noexcept { slot.capacity_blocks = default_blocks_; }
std::int64_t HistoryIndex::SweepableOf(const Owner& owner) const noexcept { return owner.stretches; }
std::int64_t HistoryIndex::BlocksPerSweptMembership() const noexcept { return kBlocksPerMembership; }

bool HistoryIndex::SweepOwner(std::uint32_t at, std::int64_t& memberships, std::int64_t& blocks) noexcept {
  while (OwnerAt(at).lists[0].oldest != kNone) {
    if (memberships <= 0 || blocks <= 0) return false;
    blocks -= CutTail(at, OwnerAt(at).lists[0].oldest, blocks);
    --memberships;
  }
  return true;
}

// ---- Receipts ----

// No record of the endpoint can be longer, so nothing beyond is hashed for it. 0 for one that is known to be dead.
std::int64_t HistoryIndex::RecordableBlocks(EndpointId id, std::int64_t blocks) noexcept {
  if (id.incarnation == 0 || id.slot >= kMaxEndpoints) return 0;
  // What a prompt of ordinary length could save is less than a lock costs.
  if (blocks <= kMostKeys || slots_ == nullptr) return blocks;
  const Section section(*this);
  // It holds more than its capacity if that shrank below what is pinned; all of it may be on this prompt's path.
  const std::uint32_t owner = Knows(id) ? slots_[id.slot].owner_or_0 : 0;
  return std::min(blocks, std::max(CapacityOf(id), owner != 0 ? OwnerAt(owner - 1).held[0] : 0));
}

std::uint32_t HistoryIndex::AdmitAlive(EndpointId id, const FleetView* alive) noexcept {
  return alive != nullptr && !alive->Alive(id) ? kNone : Admit(id, true);
}

PrefixReceipt HistoryIndex::Record(EndpointId id, std::span<const BlockKey> keys, bool shortened,
                                   const FleetView* alive) noexcept {
  Fills fills;
  Path path{.keys = keys, .shortened = shortened, .fills = &fills};
  PrefixReceipt receipt;
  {
    const OwnSection section(*this);
    pending_ = &fills;
    receipt = RecordPath(id, path, alive);
    pending_ = nullptr;
  }
  // The new runs' keys: kilobytes into cold memory, which nobody else should wait for. The receipt keeps the runs.
  for (const Fill& fill : std::span(fills.all).first(fills.count)) {
    for (std::uint32_t i = 0; i < fill.count; ++i) Store(fill.to[i], fill.from[i]);
    Store(At(fill.run).state, 0);
  }
  return receipt;
}

PrefixReceipt HistoryIndex::RecordPath(EndpointId id, Path& path, const FleetView* alive) noexcept {
  SweepSome(kSweepStep);
  path.owner = AdmitAlive(id, alive);
  const std::uint32_t entry = path.owner != kNone && !path.keys.empty() ? live_.New() : kNone;
  if (entry == kNone) {
    // Admitted, but without a single block of capacity: that is shortening, not a refusal.
    const bool no_capacity = path.owner != kNone && path.keys.empty() && path.shortened;
    ++(no_capacity ? stats_.truncated_records : stats_.refused_records);
    GiveBack();
    return {};
  }
  Book(path);
  if (path.shortened) ++stats_.truncated_records;
  LiveReceipt& live = live_[entry];
  if (path.depth == 0) {
    live_.Free(entry);
    GiveBack();
    return {};
  }
  live.owner = path.owner;
  live.run = path.last.run;
  live.blocks = path.last.offset + 1;
  live.state.store(++last_serial_ << LiveReceipt::kSerialShift, std::memory_order_release);
  ++stats_.live_receipts;
  GiveBack();
  return {.serial = last_serial_, .entry = entry, .blocks = path.depth};
}

// Pins what the owner holds of the path, a leading part, so that making room does not take it away.
void HistoryIndex::PinHeld(Path& path) noexcept {
  while (path.depth < std::ssize(path.keys)) {
    const Place next = Next(path);
    const Holder* holder = next.run != kNone && next.offset == 0 ? Held(next.run, path.owner) : nullptr;
    if (holder == nullptr || !Follows(path.last, next)) return;
    const std::span<const BlockKey> rest = path.rest(std::ssize(path.keys));
    const std::uint32_t matched =
        Agreeing(ReadyKeysOf(next.run), rest.first(std::min<std::size_t>(rest.size(), At(next.run).length)));
    const std::uint32_t owned = std::min<std::uint32_t>(matched, holder->cutoff);
    if (!CutAt(next.run, path.owner, owned)) {
      if (Relieve(path.owner)) continue;  // Which may have taken from what comes next.
      path.shortened = true;
      path.keys = path.keys.first(static_cast<std::size_t>(path.depth));
      return;
    }
    Pin(next.run, path.owner, owned);
    path.depth += owned;
    path.last = {next.run, owned - 1};
    if (owned < matched) return;
  }
}

// Whether a place is the next one behind `last` (kNone: at the prompt's start). If not, the key is no chained one, or
// collides with another: the first one stays.
bool HistoryIndex::Follows(Place last, Place next) const noexcept {
  if (next.offset > 0) return next.run == last.run && next.offset == last.offset + 1;
  const Run& run = At(next.run);
  return run.parent == last.run && (last.run == kNone || run.parent_offset == last.offset);
}

// Makes the path the owner's, pinned: what it holds, then what others have, then what is new. Ends earlier, and says
// so, where capacity or memory end.
void HistoryIndex::Book(Path& path) noexcept {
  const std::uint32_t owner = path.owner;
  PinHeld(path);
  const std::int64_t capacity = slots_[OwnerAt(owner).slot].capacity_blocks;
  std::int64_t wanted = std::ssize(path.keys);
  if (wanted > path.depth) (void)Evict(owner, OwnerAt(owner).held[0] + (wanted - path.depth) - capacity);
  const std::int64_t room = std::clamp(capacity - OwnerAt(owner).held[0], std::int64_t{0}, wanted - path.depth);
  if (path.depth + room < wanted) path.shortened = true;
  wanted = path.depth + room;
  while (path.depth < wanted) {
    const std::span<const BlockKey> rest = path.rest(wanted);
    const Place next = Next(path);
    if (next.run != kNone) {
      const Holder* holder = Held(next.run, owner);
      if (!Follows(path.last, next) || (holder != nullptr ? holder->cutoff : 0u) != next.offset) {
        ++stats_.conflicting_keys;
        return;
      }
      const std::size_t most = std::min<std::size_t>(rest.size(), At(next.run).length - next.offset);
      const std::uint32_t end = next.offset + Agreeing(ReadyKeysOf(next.run) + next.offset, rest.first(most));
      if (Take(next.run, owner, next.offset, end)) {
        path.depth += end - next.offset;
        path.last = {next.run, end - 1};
        continue;
      }
    } else if (Lengthen(path, rest) || Start(path, rest)) {
      continue;
    }
    if (!Relieve(owner)) {
      path.shortened = true;
      return;
    }
  }
}

// Takes effect when the receipt is released: until then its own pins keep what it confirms.
void HistoryIndex::OnFirstToken(const PrefixReceipt& receipt) noexcept {
  LiveReceipt* live = receipt.serial != 0 ? live_.Find(receipt.entry) : nullptr;
  if (live != nullptr) live->Mark(receipt.serial, LiveReceipt::kFirstToken);
}

// An end that takes blocks back is done at once. Any other changes nothing that a match sees: it waits for its thread's
// next record, or for whoever needs everything settled.
void HistoryIndex::OnReleased(PrefixReceipt& receipt, bool aborted) noexcept {
  const PrefixReceipt was = std::exchange(receipt, {});
  LiveReceipt* live = was.serial != 0 ? live_.Find(was.entry) : nullptr;
  if (live == nullptr) return;
  const std::uint64_t flags = live->Mark(was.serial, LiveReceipt::kReleased | (aborted ? LiveReceipt::kAborted : 0));
  if (flags == 0) return;
  if (aborted && (flags & LiveReceipt::kFirstToken) == 0) {
    const Section section(*this);
    Release(was.entry);
    SweepSome(kSweepStep);
    GiveBack();
    return;
  }
  std::atomic<std::uint32_t>& list = released_[ThreadNumber() % kReleasedLists].last;
  std::uint32_t last = list.load(std::memory_order_relaxed);
  do {
    live->next = last;
  } while (!list.compare_exchange_weak(last, was.entry, std::memory_order_release, std::memory_order_relaxed));
}

PrefixReceipt HistoryIndex::Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept {
  const Section section(*this);
  SweepSome(kSweepStep);
  const PrefixReceipt was = std::exchange(from, {});
  LiveReceipt* live = was.serial != 0 ? live_.Find(was.entry) : nullptr;
  if (live == nullptr || live->Mark(was.serial, LiveReceipt::kReleased | LiveReceipt::kAborted) == 0) return {};
  PrefixReceipt receipt;
  if (CopyPath(*live, was.blocks)) {
    Path path{.keys = moved_};
    receipt = RecordPath(to, path, alive);
  } else {
    ++stats_.refused_records;
  }
  if (moved_.capacity() > kMostScratch) {
    budget_.Give(static_cast<std::int64_t>(moved_.capacity() * sizeof(BlockKey)));
    moved_ = {};
  }
  Release(was.entry);
  GiveBack();
  return receipt;
}

// The path's keys, from its end up, into moved_; the receipt keeps them in place. False: no memory.
bool HistoryIndex::CopyPath(const LiveReceipt& live, std::int64_t blocks) noexcept {
  std::size_t left = static_cast<std::size_t>(blocks);
  if (left > moved_.capacity()) {
    const auto more = static_cast<std::int64_t>((left - moved_.capacity()) * sizeof(BlockKey));
    if (!budget_.Take(more)) return false;
    TOKROUTE_TRY { moved_.reserve(left); }
    TOKROUTE_NO_MEMORY {
      budget_.Give(more);
      return false;
    }
  }
  moved_.resize(left);
  std::uint32_t here = live.blocks;
  for (std::uint32_t run = live.run; run != kNone; run = At(run).parent) {
    left -= here;
    std::copy_n(ReadyKeysOf(run), here, moved_.data() + left);
    here = At(run).parent_offset + 1u;
  }
  return true;
}

// Ends what was released, in the order of the calls of each thread. False: nothing was, or we are at it.
bool HistoryIndex::Settle(std::atomic<std::uint32_t>& released) noexcept {
  if (settling_ || released.load(std::memory_order_relaxed) == kNone) return false;
  settling_ = true;
  std::uint32_t entry = released.exchange(kNone, std::memory_order_acquire), first = kNone;
  while (entry != kNone) entry = std::exchange(live_[entry].next, std::exchange(first, entry));
  while (first != kNone) {
    const std::uint32_t next = live_[first].next;
    Release(first);
    first = next;
  }
  settling_ = false;
  GiveBack();
  return true;
}
bool HistoryIndex::SettleEach() noexcept {
  bool any = false;
  for (ReleasedList& list : released_) any |= Settle(list.last);
  return any;
}
void HistoryIndex::SettleAll() noexcept {
  if (SettleEach()) SweepSome(kSweepStep);
}

void HistoryIndex::Confirm(const LiveReceipt& live) noexcept {
  UpThePath(live.owner, live.run, live.blocks, [&](std::uint32_t, std::uint32_t at) TOKROUTE_REQUIRES(mutex_) {
    Stretch& stretch = StretchAt(at);
    if (stretch.confirmed != 0) return false;  // Then everything above is as well.
    Store(stretch.confirmed, 1);
    return true;
  });
}

void HistoryIndex::Release(std::uint32_t entry) noexcept {
  const LiveReceipt& live = live_[entry];
  const std::uint64_t flags = live.state.load(std::memory_order_relaxed);
  const bool real = (flags & LiveReceipt::kFirstToken) != 0 || (flags & LiveReceipt::kAborted) == 0;
  const std::uint32_t owner = live.owner;
  const bool alive = OwnerAt(owner).alive != 0;
  if (real && alive) Confirm(live);
  // Deepest first, so that what lies above comes out more recent.
  std::uint32_t run = live.run, blocks = live.blocks;
  live_.Free(entry);
  --stats_.live_receipts;
  while (run != kNone) {
    const std::uint32_t parent = At(run).parent, parent_blocks = At(run).parent_offset + 1u;
    for (std::uint32_t at = DeepestIn(run, *Held(run, owner)); at != kNone;) {
      Stretch& stretch = StretchAt(at);
      const std::uint32_t above = stretch.above;
      if (stretch.end <= blocks) {
        Store(stretch.pins, stretch.pins - 1);
        if (stretch.pins == 0 && alive && stretch.confirmed == 0) {
          Enlist(owner, at);
          stats_.taken_back_blocks += CutTail(owner, at, kNever);
        } else if (stretch.pins == 0) {
          Enlist(owner, at);
        }
      }
      at = above;
    }
    Merge(run, owner);
    run = parent;
    blocks = parent_blocks;
  }
  if (alive) {
    EvictOverflow(owner);
  } else if (!OwnerAt(owner).queued) {
    QueueDead(owner);
  }
}

absl::Status HistoryIndex::AuditMode(std::int64_t& units) {
  units += stretch_slabs_.units();
  std::int64_t live_receipts = 0, in_use = 0, dead = 0, memberships = 0;
  std::unordered_map<std::uint32_t, std::uint32_t> pins;                             // By stretch.
  std::unordered_map<std::uint32_t, std::unordered_set<std::uint32_t>> pinned_runs;  // By owner.
  for (std::uint32_t i = 0; i < live_.size(); ++i) {
    const LiveReceipt& live = live_[i];
    if (live.state.load(std::memory_order_relaxed) == 0) continue;
    ++live_receipts;
    for (std::uint32_t run = live.run, blocks = live.blocks; run != kNone; run = At(run).parent) {
      const Holder* holder = Held(run, live.owner);
      if (holder == nullptr || holder->cutoff < blocks) return Unsound("receipt ", i, " ends in a run that is gone");
      pinned_runs[live.owner].insert(run);
      bool ends = false;
      for (std::uint32_t at = DeepestIn(run, *holder); at != kNone; at = StretchAt(at).above) {
        ends |= StretchAt(at).end == blocks;
        if (StretchAt(at).end <= blocks) ++pins[at];
      }
      if (!ends) return Unsound("receipt ", i, " ends within a stretch");
      blocks = At(run).parent_offset + 1u;
    }
  }
  if (live_receipts != stats_.live_receipts) return Unsound("live receipts: ", live_receipts);
  for (std::uint32_t slab = 0; slab < stretch_slabs_.size(); ++slab) {
    for (std::uint32_t i = 0; stretch_slabs_.Handle(slab) != kNone && i < kPerSlab; ++i) {
      in_use += StretchAt(slab * kPerSlab + i).run != kNone ? 1 : 0;
    }
  }
  for (std::uint32_t i = 0; i < owner_count_; ++i) {
    const Owner& owner = OwnerAt(i);
    std::int64_t held = 0, stretches = 0;
    std::unordered_set<std::uint32_t> older, runs;
    std::uint32_t previous = kNone;
    for (std::uint32_t at = owner.lists[0].oldest; at != kNone; at = StretchAt(at).newer) {
      const Stretch& stretch = StretchAt(at);
      if (stretch.older != previous || stretch.pins != 0) return Unsound("list of owner ", i);
      if (owner.alive != 0 && stretch.confirmed == 0) return Unsound("stretch ", at, " is tentative without a pin");
      if (stretch.above != kNone && older.count(stretch.above) > 0) {
        return Unsound("stretch ", at, " is younger than the one above");
      }
      older.insert(at);
      runs.insert(stretch.run);
      previous = at;
    }
    if (owner.lists[0].newest != previous) return Unsound("list of owner ", i, " ends elsewhere");
    if (owner.alive == 0) dead += owner.stretches;
    if (const auto pinned = pinned_runs.find(i); pinned != pinned_runs.end()) {
      runs.insert(pinned->second.begin(), pinned->second.end());
    }
    for (std::uint32_t run : runs) {
      const Holder* holder = Held(run, i);
      if (holder == nullptr || !holder->plain()) return Unsound("run ", run, " has a holder with a gap");
      ++memberships;
      held += holder->cutoff;
      std::uint32_t end = holder->cutoff;
      bool deeper_pinned = false, deeper_real = false;
      for (std::uint32_t at = DeepestIn(run, *holder); at != kNone; at = StretchAt(at).above) {
        const Stretch& stretch = StretchAt(at);
        if (stretch.run != run || stretch.end != end || BeginOf(stretch) >= end) return Unsound("stretch ", at);
        end = BeginOf(stretch);
        const auto pinned = pins.find(at);
        if (stretch.pins != (pinned != pins.end() ? pinned->second : 0)) {
          return Unsound("stretch ", at, " counts ", stretch.pins, " pins");
        }
        if ((deeper_pinned && stretch.pins == 0) || (deeper_real && stretch.confirmed == 0)) {
          return Unsound("stretch ", at, " is less than what lies behind it");
        }
        deeper_pinned = stretch.pins > 0;
        deeper_real = stretch.confirmed != 0;
        --in_use;
        ++stretches;
      }
      if (end != 0) return Unsound("run ", run, " is not held from its start");
      const Run& record = At(run);
      if (record.parent == kNone) continue;
      const Holder* above = Held(record.parent, i);
      if (above == nullptr || above->cutoff <= record.parent_offset) {
        return Unsound("run ", run, " is held without its parent");
      }
    }
    if (held != owner.held[0] || stretches != owner.stretches) {
      return Unsound("owner ", i, " holds ", held, " in ", stretches, " stretches");
    }
  }
  if (in_use != 0) return Unsound("stretches in no run: ", in_use);
  if (memberships != stats_.memberships || dead != stats_.pending_sweep) {
    return Unsound("counted ", memberships, " memberships, ", dead, " dead stretches");
  }
  return absl::OkStatus();
}

std::unique_ptr<PrefixEngine> MakeHistoryIndex(const PrefixIndexOptions& options) {
  return std::make_unique<HistoryIndex>(options);
}

}  // namespace tokroute::internal

#include "prefix/run_forest.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <unordered_map>

#include "internal/no_memory.h"

namespace tokroute::internal {
namespace {

constexpr int kFewShardBits = 8;  // Of a table that knows of few keys.

}  // namespace

RunForest::RunForest(const PrefixIndexOptions& options, const Weights& weights, std::uint32_t stride) noexcept
    : options_(options),
      weights_(weights),
      stride_(stride),
      budget_(options.max_bytes),
      segments_(budget_, SegmentLimit(options.max_bytes), options.memory),
      arena_(segments_, Arena::Use::kShared),
      table_arena_(segments_, Arena::Use::kShared),
      table_(table_arena_, options.key_seed, stride == 1 ? PlaceTable::kMostShardBits : kFewShardBits),
      // Address space only, until it is used.
      owners_(static_cast<Owner*>(std::calloc(kMostOwners, sizeof(Owner))), &std::free),
      slots_memory_(static_cast<Slot*>(std::calloc(kMaxEndpoints, sizeof(Slot))), &std::free),
      slots_(slots_memory_.get()) {}

// ---- Runs ----

// An empty run; kNone: no memory. As long as somebody may be reading, its memory is used for runs only, so that
// versions mean something.
std::uint32_t RunForest::NewRun(BlockKey parent_key, Place parent) noexcept {
  const SlabSet::Spot spot = run_slabs_.New(arena_);
  if (spot.slab == kNone) return kNone;
  const std::uint32_t slab = run_slabs_.Handle(spot.slab);
  if (spot.first) {
    Store(*arena_.At<std::uint32_t>(slab), spot.slab);
    for (std::uint32_t i = 1; i < kSlabUnits; ++i) StoreRecord(At(slab + i), Run{});
  }
  const std::uint32_t at = slab + 1 + spot.item;
  Run& run = At(at);
  const Writing writing(run);
  Store(run.parent_key, parent_key);
  Store(run.parent, parent.run);
  Store(run.parent_offset, static_cast<std::uint16_t>(parent.offset));
  Store(run.noted, 0);
  Store(run.state, 0);
  ++stats_.runs;
  return at;
}

// Of a run without keys and holders.
void RunForest::FreeRun(std::uint32_t at) noexcept {
  Run& run = At(at);
  const Writing writing(run);
  if (run.key_units > 0) arena_.Free(run.keys, run.key_units);
  Store(run.keys, kNone);
  Store(run.key_units, 0);
  Store(run.shape, run.shape + 1);
  const std::uint32_t slab = at / kSlabUnits * kSlabUnits;
  run_slabs_.Free({*arena_.At<std::uint32_t>(slab), at - slab - 1});
  --stats_.runs;
}

// Bitmaps and counts are as long as the key array, which therefore stays as it is while somebody has any.
bool RunForest::HasSides(Run& run) const noexcept {
  const std::span<Holder> holders = HoldersOf(run);
  return std::any_of(holders.begin(), holders.end(), [](const Holder& holder) { return !holder.plain(); });
}

// Room for so many keys in all: the array moves to a place twice as large, so that a key moves once or twice.
bool RunForest::Grow(std::uint32_t at, std::uint32_t keys) noexcept {
  Run& run = At(at);
  const std::uint32_t needed = UnitsOf(keys);
  if (needed <= run.key_units) return true;
  if (keys > kMostKeys || HasSides(run)) return false;
  // A first array is as large as asked for; one that grows goes by powers of two, which the arena packs well.
  const std::uint32_t units = run.key_units == 0 ? needed : std::min(std::bit_ceil(needed), UnitsOf(kMostKeys));
  const std::uint32_t chunk = arena_.Allocate(units);
  if (chunk == kNone) return false;
  const BlockKey* old = run.length > 0 ? KeysOf(run) : nullptr;
  auto* fresh = arena_.At<BlockKey>(chunk);
  for (std::uint32_t i = 0; i < run.length; ++i) Store(fresh[i], old[i]);
  const Writing writing(run);
  if (run.key_units > 0) arena_.Free(run.keys, run.key_units);
  Store(run.keys, chunk);
  Store(run.key_units, static_cast<std::uint16_t>(units));
  return true;
}

// Lets go of the blocks at the run's end that nobody holds; of the run, if that is all.
void RunForest::Trim(std::uint32_t at) noexcept {
  Run& run = At(at);
  std::uint32_t length = run.length;
  const std::span<Holder> holders = HoldersOf(run);
  const auto held = [&](std::uint32_t offset) {
    return std::any_of(holders.begin(), holders.end(), [&](const Holder& holder) {
      return holder.plain() ? offset < holder.cutoff : Holds(holder, ExtraOf(run, holder).bits, offset);
    });
  };
  if (length > 0 && held(length - 1)) return;
  if (holders.empty()) {
    length = 0;
  } else {
    while (length > 0 && !held(length - 1)) --length;
  }
  const BlockKey* keys = run.length > 0 ? KeysOf(run) : nullptr;
  for (std::uint32_t i = run.length; i-- > length;) {
    if (IsIndexed(run, i)) table_.Erase(keys[i], {at, i});
  }
  stats_.distinct_blocks -= run.length - length;
  {
    const Writing writing(run);
    Store(run.length, static_cast<std::uint16_t>(length));
    Store(run.shape, run.shape + 1);
    const auto units = static_cast<std::uint16_t>(UnitsOf(length));
    if (units > 0 && units * 2 < run.key_units && !HasSides(run)) {
      arena_.Free(run.keys + units, run.key_units - units);
      Store(run.key_units, units);
    }
  }
  if (length == 0) FreeRun(at);
}

// ---- Holders ----

RunForest::Holder* RunForest::FindHolder(std::uint32_t at, std::uint32_t tag, std::uint32_t tier) noexcept {
  const std::span<Holder> holders = HoldersOf(At(at));
  const std::uint64_t wanted = std::uint64_t{tag} << 3 | tier;
  const auto it = std::lower_bound(holders.begin(), holders.end(), wanted,
                                   [](const Holder& holder, std::uint64_t order) { return holder.order() < order; });
  return it != holders.end() && it->order() == wanted ? &*it : nullptr;
}

// One that holds nothing yet. False: no memory.
bool RunForest::AddHolder(std::uint32_t at, std::uint32_t owner, std::uint32_t tier, const Extra& extra) noexcept {
  Run& run = At(at);
  const std::uint32_t count = run.holder_count;
  const Holder added{.tag = TagOf(owner), .cutoff = 0, .packed = static_cast<std::uint16_t>(tier)};
  if (count == (run.holders == kNone ? 1 : RoomOf(run.holder_units))) {
    const std::uint32_t units = Arena::UnitsFor((count + count / 2 + 1) * std::size_t{kHolderBytes});
    const std::uint32_t chunk = units <= Arena::kSegmentUnits ? arena_.Allocate(units) : kNone;
    if (chunk == kNone) return false;
    auto* holders = arena_.At<Holder>(chunk);
    auto* extras = reinterpret_cast<Extra*>(arena_.Address(chunk) + RoomOf(units) * sizeof(Holder));
    const std::span<Holder> old = HoldersOf(run);
    const Extra* old_extras = ExtrasOf(run);
    for (std::uint32_t i = 0; i < count; ++i) {
      StoreRecord(holders[i], old[i]);
      StoreRecord(extras[i], old_extras[i]);
    }
    const Writing writing(run);
    if (run.holders != kNone) arena_.Free(run.holders, run.holder_units);
    Store(run.holders, chunk);
    Store(run.holder_units, static_cast<std::uint16_t>(units));
  }
  ++OwnerAt(owner).memberships;
  ++stats_.memberships;
  const Writing writing(run);
  Store(run.holder_count, static_cast<std::uint16_t>(count + 1));
  Holder* const holders = HoldersOf(run).data();
  Extra* const extras = ExtrasOf(run);
  std::uint32_t i = count;
  for (; i > 0 && holders[i - 1].order() > added.order(); --i) {
    StoreRecord(holders[i], holders[i - 1]);
    StoreRecord(extras[i], extras[i - 1]);
  }
  StoreRecord(holders[i], added);
  StoreRecord(extras[i], extra);
  return true;
}

// Ends a membership of the run. Its bitmap was given back; the caller trims the run.
void RunForest::DropHolder(std::uint32_t at, const Holder& holder) noexcept {
  Run& run = At(at);
  Owner& whose = OwnerAt(holder.owner());
  const std::uint32_t tier = holder.tier();
  Store(whose.held[tier], whose.held[tier] - holder.held());
  (tier == kSpeculative ? stats_.speculative_blocks : stats_.holder_blocks) -= holder.held();
  --whose.memberships;
  --stats_.memberships;
  const Writing writing(run);
  Holder* const holders = HoldersOf(run).data();
  Extra* const extras = ExtrasOf(run);
  const auto left = static_cast<std::uint32_t>(run.holder_count - 1);
  for (auto i = static_cast<std::uint32_t>(&holder - holders); i < left; ++i) {
    StoreRecord(holders[i], holders[i + 1]);
    StoreRecord(extras[i], extras[i + 1]);
  }
  Store(run.holder_count, static_cast<std::uint16_t>(left));
  if (run.holders == kNone) return;
  if (left <= 1) {
    if (left == 1) {
      StoreRecord(run.inline_holder, holders[0]);
      StoreRecord(run.inline_extra, extras[0]);
    }
    arena_.Free(run.holders, run.holder_units);
    Store(run.holders, kNone);
    Store(run.holder_units, 0);
    return;
  }
  // Not before half is unused, and not to the last byte, so that one endpoint coming and going moves nothing.
  const std::uint32_t units = Arena::UnitsFor((left + left / 4) * std::size_t{kHolderBytes});
  if (units * 2 > run.holder_units) return;
  auto* const nearer = reinterpret_cast<Extra*>(arena_.Address(run.holders) + RoomOf(units) * sizeof(Holder));
  for (std::uint32_t i = 0; i < left; ++i) {
    const Extra moved = extras[i];  // The two places may overlap.
    StoreRecord(nearer[i], moved);
  }
  arena_.Free(run.holders + units, run.holder_units - units);
  Store(run.holder_units, static_cast<std::uint16_t>(units));
}

// The caller is Writing the run.
void RunForest::SetHolder(Holder& holder, std::uint32_t cutoff, std::uint32_t held) noexcept {
  const std::int64_t more = std::int64_t{held} - holder.held();
  std::int64_t& owners = OwnerAt(holder.owner()).held[holder.tier()];
  Store(owners, owners + more);
  (holder.tier() == kSpeculative ? stats_.speculative_blocks : stats_.holder_blocks) += more;
  Store(holder.cutoff, static_cast<std::uint16_t>(cutoff));
  Store(holder.packed, static_cast<std::uint16_t>(held << 4 | (holder.packed & 15u)));
}

// ---- Endpoints ----

// The living owner of the endpoint; kNone: none, or none to be had.
std::uint32_t RunForest::Admit(EndpointId id, bool make_owner) noexcept {
  if (id.incarnation == 0 || id.slot >= kMaxEndpoints) return kNone;
  if (slots_ == nullptr || owners_ == nullptr) return kNone;
  Slot& slot = slots_[id.slot];
  // Incarnations of a slot only grow, so an older one is a straggler.
  if (id.incarnation < slot.incarnation || id.incarnation <= slot.dead_through) return kNone;
  if (id.incarnation > slot.incarnation) {
    if (slot.incarnation > slot.dead_through) Remove({id.slot, slot.incarnation});
    Store(slot.incarnation, id.incarnation);
    OnEntered(slot);
    width_ = std::max(width_, id.slot + 1);
    ++stats_.endpoints;
  }
  if (slot.owner_or_0 != 0 || !make_owner) return slot.owner_or_0 - 1;  // kNone for 0.
  std::uint32_t owner = free_owner_;
  if (owner != kNone) {
    free_owner_ = OwnerAt(owner).next;
  } else if (owner_count_ < kMostOwners && budget_.Take(sizeof(Owner))) {
    owner = owner_count_++;
  } else {
    return kNone;
  }
  Owner& made = OwnerAt(owner);
  Store(made.slot, id.slot);
  Store(made.incarnation, id.incarnation);
  made.next = kNone;
  made.queued = false;
  made.lists = {};
  for (std::int64_t& held : made.held) Store(held, 0);
  made.memberships = made.orphans = made.stretches = 0;
  made.life = ++last_life_;
  made.last = {};
  Store(made.alive, 1);
  Store(slot.owner_or_0, owner + 1);
  return owner;
}

// From now on nobody sees what the owner holds.
void RunForest::Retire(std::uint32_t at) noexcept {
  Owner& owner = OwnerAt(at);
  Store(owner.alive, 0);
  Store(slots_[owner.slot].owner_or_0, 0);
  any_dead_.store(true, std::memory_order_release);
  ++dead_owners_;
  stats_.pending_sweep += SweepableOf(owner);
  QueueDead(at);
}

void RunForest::QueueDead(std::uint32_t at) noexcept {
  Owner& owner = OwnerAt(at);
  owner.next = kNone;
  owner.queued = true;
  (last_dead_ != kNone ? OwnerAt(last_dead_).next : first_dead_) = at;
  last_dead_ = at;
}

void RunForest::Remove(EndpointId id) noexcept {
  // An id never seen must stay dead too, in case its events come late.
  if (slots_ == nullptr) return;
  Slot& slot = slots_[id.slot];
  if (id.incarnation <= slot.dead_through) return;
  const bool was_alive = slot.incarnation > slot.dead_through;
  slot.dead_through = id.incarnation;
  if (!was_alive || slot.incarnation > slot.dead_through) return;
  --stats_.endpoints;
  if (slot.owner_or_0 != 0) Retire(slot.owner_or_0 - 1);
}

// Ends up to `memberships` of the dead, and then their owners; and no more than a number of blocks, since a long run
// that nobody else holds goes block by block.
void RunForest::SweepSome(std::int64_t memberships) noexcept {
  const std::int64_t each = BlocksPerSweptMembership();
  std::int64_t blocks = memberships < kNever / each ? memberships * each : kNever;
  while (first_dead_ != kNone) {
    const std::uint32_t at = first_dead_;
    if (!SweepOwner(at, memberships, blocks)) return;
    Owner& owner = OwnerAt(at);
    first_dead_ = owner.next;
    if (first_dead_ == kNone) last_dead_ = kNone;
    owner.queued = false;
    if (owner.memberships > 0) continue;  // Kept by live receipts, which will queue it again.
    owner.next = free_owner_;
    free_owner_ = at;
    --dead_owners_;
  }
  if (dead_owners_ == 0) any_dead_.store(false, std::memory_order_release);
}

// Memory that is not needed any more goes back to the system, unless somebody might be reading it.
void RunForest::GiveBack() noexcept {
  // One segment of each arena stays anyway, so that a lone event does not go to the system each time.
  const bool empty = stats_.runs == 0 && (arena_.segments() > 1 || table_arena_.segments() > 1);
  const bool slabs = run_slabs_.HasSurplus() || HasEmptySlabs();
  if ((!empty && !slabs && !arena_.HasSurplus() && !table_arena_.HasSurplus()) || !gate_.Quiet()) return;
  if (empty) table_.Reset();
  if (empty || slabs) {
    run_slabs_.ReleaseEmpty(arena_);
    ReleaseEmptySlabs();
  }
  if (!empty) {
    arena_.ReleaseSurplus();
    table_arena_.ReleaseSurplus();
    return;
  }
  for (std::uint32_t i = 0; i < owner_count_; ++i) OwnerAt(i).last = {};
  table_arena_.ReleaseFree(1);
  arena_.ReleaseFree(1);
}

// The endpoint is the living occupant of its slot, as far as the index was told.
bool RunForest::Knows(EndpointId id) const noexcept {
  return id.incarnation != 0 && id.slot < width_ && slots_[id.slot].incarnation == id.incarnation &&
         slots_[id.slot].dead_through < id.incarnation;
}

// ---- The index's calls ----

void RunForest::CountRefusal() noexcept {
  const Section section(*this);
  ++stats_.refused_records;
}

bool RunForest::Reserve(std::int64_t bytes) noexcept {
  const Section section(*this);
  return segments_.Reserve(bytes);
}

void RunForest::ClearEndpoint(EndpointId id) noexcept {
  const Section section(*this);
  if (Knows(id)) {
    Slot& slot = slots_[id.slot];
    if (slot.owner_or_0 != 0) Retire(slot.owner_or_0 - 1);
    OnCleared(slot);
  }
  SweepSome(kSweepStep);
  GiveBack();
}

void RunForest::RemoveEndpoint(EndpointId id) noexcept {
  if (id.incarnation == 0 || id.slot >= kMaxEndpoints) return;
  const Section section(*this);
  Remove(id);
  SweepSome(kSweepStep);
  GiveBack();
}

void RunForest::RetireDead(const FleetView& alive) noexcept {
  const Section section(*this);
  for (std::uint32_t row = 0; row < width_; ++row) {
    const EndpointId id{row, slots_[row].incarnation};
    if (id.incarnation > slots_[row].dead_through && !alive.Alive(id)) Remove(id);
  }
  SweepSome(kSweepStep);
  GiveBack();
}

std::int64_t RunForest::Sweep(std::int64_t memberships) noexcept {
  const Section section(*this);
  SweepSome(memberships);
  GiveBack();
  return first_dead_ != kNone ? stats_.pending_sweep : 0;
}

std::int64_t RunForest::HeldBlocks(EndpointId id) noexcept {
  const Section section(*this);
  if (!Knows(id) || slots_[id.slot].owner_or_0 == 0) return 0;
  const auto& held = OwnerAt(slots_[id.slot].owner_or_0 - 1).held;
  return std::accumulate(held.begin(), held.begin() + kSpeculative, std::int64_t{0});
}

std::int64_t RunForest::DeviceBlocks(EndpointId id) const noexcept {
  if (slots_ == nullptr || id.slot >= kMaxEndpoints || Load(slots_[id.slot].incarnation) != id.incarnation) return 0;
  const std::uint32_t owner = Load(slots_[id.slot].owner_or_0);
  return owner != 0 ? Load(OwnerAt(owner - 1).held[static_cast<std::size_t>(StorageTier::kDevice)]) : 0;
}

PrefixIndexStats RunForest::Stats() noexcept {
  const Section section(*this);
  PrefixIndexStats stats = stats_;
  stats.bytes = budget_.used();
  stats.peak_bytes = budget_.peak();
  return stats;
}

absl::Status RunForest::Audit() {
  const Section section(*this);
  // By run: of its indexed keys, how many the table has.
  std::unordered_map<std::uint32_t, std::uint32_t> runs;
  std::int64_t entries = 0, keys = 0;
  std::vector<Place> places;
  table_.ForEach([&](Place place) { places.push_back(place); });
  for (const Place place : places) {
    ++runs[place.run];
    ++entries;
    const Run& run = At(place.run);
    while ((Load(run.state) & Run::kUnfilled) != 0) PauseBriefly();
    if (place.offset >= run.length || !IsIndexed(run, place.offset)) return Unsound("a place that is none");
    const BlockKey key = KeysOf(run)[place.offset];
    const Place found = table_.Find(key, [&](Place p) { return p.run == place.run && p.offset == place.offset; });
    if (found.run != place.run) return Unsound("a key is not where the table says");
  }
  if (entries != table_.size() || std::ssize(runs) != stats_.runs) {
    return Unsound("table has ", entries, " keys of ", runs.size(), " runs, counted ", stats_.runs);
  }
  std::int64_t units = run_slabs_.units(), pairs = 0, memberships = 0;
  for (const auto& [at, found] : runs) {
    Run& run = At(at);
    std::uint32_t indexed = 0;
    for (std::uint32_t i = 0; i < run.length; ++i) indexed += IsIndexed(run, i) ? 1 : 0;
    if (indexed != found || (run.version & 1) != 0) {
      return Unsound("run ", at, " has ", indexed, " keys for the table, which has ", found);
    }
    keys += run.length;
    units += run.key_units + (run.holders != kNone ? run.holder_units : 0);
    if (run.holder_count > (run.holders != kNone ? RoomOf(run.holder_units) : 1)) {
      return Unsound("run ", at, " has more holders than room");
    }
    std::uint64_t previous = 0;
    bool tail = false;
    for (const Holder& holder : HoldersOf(run)) {
      if (&holder != HoldersOf(run).data() && holder.order() <= previous) {
        return Unsound("run ", at, ": holders unordered");
      }
      previous = holder.order();
      if (holder.tag != TagOf(holder.owner())) return Unsound("run ", at, " has a holder of another slot");
      if (holder.held() == 0) return Unsound("run ", at, ": a holder of nothing");
      tail |= Holds(holder, ExtraOf(run, holder).bits, run.length - 1u);
      pairs += holder.held();
      ++memberships;
    }
    if (!tail) return Unsound("run ", at, ": nobody holds its end");
  }
  if (keys != stats_.distinct_blocks || pairs != stats_.holder_blocks + stats_.speculative_blocks ||
      memberships != stats_.memberships) {
    return Unsound("counted ", keys, " blocks, ", pairs, " pairs, ", memberships, " memberships");
  }
  std::int64_t living = 0;
  for (std::uint32_t row = 0; row < width_; ++row) {
    const Slot& slot = slots_[row];
    if (slot.incarnation > slot.dead_through) ++living;
    if (slot.owner_or_0 == 0) continue;
    const Owner& owner = OwnerAt(slot.owner_or_0 - 1);
    if (slot.incarnation <= slot.dead_through || owner.alive == 0 || owner.slot != row ||
        owner.incarnation != slot.incarnation) {
      return Unsound("slot ", row, " has a foreign owner");
    }
  }
  if (living != stats_.endpoints) return Unsound("counted ", living, " endpoints");
  if (const absl::Status mode = AuditMode(units); !mode.ok()) return mode;
  if (arena_.used_units() != units) return Unsound("arena has ", arena_.used_units(), " units in use, found ", units);
  if (table_arena_.used_units() != table_.units()) return Unsound("table has ", table_.units(), " units");
  if (arena_.CountFreeUnits() + units != std::int64_t{arena_.segments()} * Arena::kSegmentUnits) {
    return Unsound("arena's free lists are short");
  }
  return budget_.peak() <= budget_.limit() ? absl::OkStatus() : Unsound("over the memory limit");
}

}  // namespace tokroute::internal

#include "prefix/run_forest.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "absl/strings/str_cat.h"

namespace tokroute::internal {
namespace {

constexpr std::int64_t kBlocksPerMembership = 4;  // That a sweep takes at a time.
constexpr std::uint32_t kLeastStep = 64;          // Keys that an array makes room for at first.
constexpr std::uint32_t kAhead = 12;              // Keys whose table lines are fetched ahead.
constexpr std::uint32_t kKeysPerUnit = Arena::kUnitBytes / sizeof(BlockKey);

constexpr std::uint32_t UnitsOf(std::uint32_t keys) noexcept { return (keys + kKeysPerUnit - 1) / kKeysPerUnit; }

// To a multiple of 2^-32: products with up to two million blocks, and their sums, are then exact, so neither the order
// nor a contracted multiply-add can change a decision.
double Rounded(double weight) noexcept {
  return static_cast<double>(static_cast<std::int64_t>(weight * 0x1p32 + 0.5)) * 0x1p-32;
}

std::int64_t ArenaLimit(std::int64_t max_bytes) noexcept {
  // The rest is for owners, slots and the table's shards.
  return max_bytes - std::max(max_bytes / 16, std::int64_t{1} << 20);
}

}  // namespace

// ---- The writer: runs ----

RunForest::RunForest(const PrefixIndexOptions& options) noexcept
    : options_(options),
      weights_{Rounded(options.tier_weights.device), Rounded(options.tier_weights.host),
               Rounded(options.tier_weights.disk), Rounded(options.tier_weights.unknown),
               Rounded(options.tier_weights.device)},
      budget_(options.max_bytes),
      arena_(budget_, ArenaLimit(options.max_bytes), Arena::Use::kShared),
      table_(arena_, options.key_seed),
      // Address space only, until it is used.
      owners_(static_cast<Owner*>(std::calloc(kMostOwners, sizeof(Owner))), &std::free),
      slots_memory_(static_cast<Slot*>(std::calloc(kMaxEndpoints, sizeof(Slot))), &std::free),
      slots_(slots_memory_.get()),
      next_deadline_(kNever) {}

std::span<RunForest::Holder> RunForest::HoldersOf(Run& run) const noexcept {
  return {run.holders == kNone ? &run.inline_holder : arena_.At<Holder>(run.holders), run.holder_count};
}

Place RunForest::PlaceOf(BlockKey key) const noexcept {
  return table_.Find(key, [&](Place candidate) {
    const Run& run = At(candidate.run);
    return candidate.offset < run.length && KeysOf(run)[candidate.offset] == key;
  });
}

// An empty run; kNone: no memory. Records are never used for anything but runs, so that versions mean something.
std::uint32_t RunForest::NewRun(BlockKey parent_key, Place parent) noexcept {
  if (free_run_ == kNone) {
    const std::uint32_t slab = arena_.Allocate(kRunsPerSlab);
    if (slab == kNone) return kNone;
    for (std::uint32_t i = kRunsPerSlab; i-- > 0;) {
      Run empty;
      empty.parent = free_run_;
      StoreRecord(At(slab + i), empty);
      free_run_ = slab + i;
    }
    slabs_.push_back(slab);
  }
  const std::uint32_t at = free_run_;
  Run& run = At(at);
  free_run_ = run.parent;
  const Writing writing(run);
  Store(run.parent_key, parent_key);
  Store(run.parent, parent.run);
  Store(run.parent_offset, static_cast<std::uint16_t>(parent.offset));
  Store(run.parent_shape, parent.run != kNone ? At(parent.run).shape : 0);
  Store(run.orphan, parent_key != 0 && (parent.run == kNone || At(parent.run).orphan != 0) ? 1 : 0);
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
  Store(run.parent, free_run_);
  free_run_ = at;
  --stats_.runs;
}

// Bitmaps and counts are as long as the key array, which therefore stays as it is while somebody has any.
bool RunForest::HasSides(Run& run) const noexcept {
  const std::span<Holder> holders = HoldersOf(run);
  return std::any_of(holders.begin(), holders.end(), [](const Holder& holder) { return holder.bits != kNone; });
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

// Takes the keys up to the first that is known already, as far as there is room; returns how many.
std::uint32_t RunForest::Append(std::uint32_t at, std::span<const BlockKey> keys) noexcept {
  Run& run = At(at);
  std::uint32_t done = 0;
  // In growing steps, since what follows may be known.
  for (std::uint32_t step = kLeastStep; done < keys.size(); step *= 2) {
    const auto left = static_cast<std::uint32_t>(std::min<std::size_t>(keys.size() - done, kMostKeys - run.length));
    std::uint32_t count = std::min(step, left);
    if (!Grow(at, run.length + count))
      count = std::min<std::uint32_t>(count, run.key_units * kKeysPerUnit - run.length);
    if (count == 0) break;
    BlockKey* const own = KeysOf(run);
    for (std::uint32_t i = 0; i < count; ++i, ++done) {
      if (done + kAhead < keys.size()) table_.Prefetch(keys[done + kAhead]);
      const BlockKey key = keys[done];
      const auto is_it = [&](Place place) {
        return place.offset < At(place.run).length && KeysOf(At(place.run))[place.offset] == key;
      };
      if (!table_.Insert(key, {at, run.length}, is_it)) return done;
      Store(own[run.length], key);
      Store(run.length, static_cast<std::uint16_t>(run.length + 1));
      ++stats_.distinct_blocks;
    }
  }
  return done;
}

// Lets go of the blocks at the run's end that nobody holds; of the run, if that is all.
void RunForest::Trim(std::uint32_t at) noexcept {
  Run& run = At(at);
  std::uint32_t length = run.length;
  const std::span<Holder> holders = HoldersOf(run);
  const auto held = [&](std::uint32_t offset) {
    return std::any_of(holders.begin(), holders.end(), [&](const Holder& holder) { return Holds(holder, offset); });
  };
  if (length > 0 && held(length - 1)) return;
  if (holders.empty()) {
    length = 0;
  } else {
    while (length > 0 && !held(length - 1)) --length;
  }
  const BlockKey* keys = run.length > 0 ? KeysOf(run) : nullptr;
  for (std::uint32_t i = run.length; i-- > length;) table_.Erase(keys[i], {at, i});
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

// ---- The writer: holders ----

RunForest::Holder* RunForest::FindHolder(std::uint32_t at, std::uint32_t tag, std::uint32_t tier) noexcept {
  const std::span<Holder> holders = HoldersOf(At(at));
  const std::uint64_t wanted = std::uint64_t{tag} << 3 | tier;
  const auto it = std::lower_bound(holders.begin(), holders.end(), wanted,
                                   [](const Holder& holder, std::uint64_t order) { return holder.order() < order; });
  return it != holders.end() && it->order() == wanted ? &*it : nullptr;
}

// One that holds nothing yet. False: no memory.
bool RunForest::AddHolder(std::uint32_t at, std::uint32_t owner, std::uint32_t tier) noexcept {
  Run& run = At(at);
  const std::uint32_t room =
      run.holders == kNone ? 1 : run.holder_units * Arena::kUnitBytes / std::uint32_t{sizeof(Holder)};
  const std::uint32_t count = run.holder_count;
  if (count == room) {
    const std::uint32_t units = Arena::UnitsFor((count + count / 2 + 1) * sizeof(Holder));
    const std::uint32_t chunk = units <= Arena::kSegmentUnits ? arena_.Allocate(units) : kNone;
    if (chunk == kNone) return false;
    const std::span<Holder> old = HoldersOf(run);
    for (std::uint32_t i = 0; i < count; ++i) StoreRecord(arena_.At<Holder>(chunk)[i], old[i]);
    const Writing writing(run);
    if (run.holders != kNone) arena_.Free(run.holders, run.holder_units);
    Store(run.holders, chunk);
    Store(run.holder_units, static_cast<std::uint16_t>(units));
  }
  Owner& whose = owners_.get()[owner];
  List& list = whose.lists[tier];
  const Holder added{.tag = TagOf(owner),
                     .cutoff = 0,
                     .packed = static_cast<std::uint16_t>(tier),
                     .bits = kNone,
                     .older = list.newest,
                     .newer = kNone};
  if (list.newest != kNone) {
    Store(FindHolder(list.newest, added.tag, tier)->newer, at);
  } else {
    list.oldest = at;
  }
  list.newest = at;
  ++whose.memberships;
  ++stats_.memberships;
  const Writing writing(run);
  Holder* const first = run.holders == kNone ? &run.inline_holder : arena_.At<Holder>(run.holders);
  std::uint32_t i = count;
  for (; i > 0 && first[i - 1].order() > added.order(); --i) StoreRecord(first[i], first[i - 1]);
  StoreRecord(first[i], added);
  Store(run.holder_count, static_cast<std::uint16_t>(count + 1));
  return true;
}

// Ends a membership. The caller trims the run.
void RunForest::DropHolder(std::uint32_t at, std::uint32_t tag, std::uint32_t tier) noexcept {
  Run& run = At(at);
  Holder* const holder = FindHolder(at, tag, tier);
  Owner& whose = owners_.get()[tag & (kMostOwners - 1)];
  List& list = whose.lists[tier];
  if (holder->older != kNone) Store(FindHolder(holder->older, tag, tier)->newer, holder->newer);
  else list.oldest = holder->newer;
  if (holder->newer != kNone) Store(FindHolder(holder->newer, tag, tier)->older, holder->older);
  else list.newest = holder->older;
  Store(whose.held[tier], whose.held[tier] - holder->held());
  (tier == kSpeculative ? stats_.speculative_blocks : stats_.holder_blocks) -= holder->held();
  --whose.memberships;
  --stats_.memberships;
  if (whose.alive == 0) --stats_.pending_sweep;
  const Writing writing(run);
  if (holder->bits != kNone) arena_.Free(holder->bits, SideUnits(run, holder->counted()));
  const std::span<Holder> holders = HoldersOf(run);
  for (Holder* h = holder; h + 1 < holders.data() + holders.size(); ++h) StoreRecord(*h, h[1]);
  Store(run.holder_count, static_cast<std::uint16_t>(run.holder_count - 1));
  if (run.holders == kNone) return;
  if (run.holder_count <= 1) {
    if (run.holder_count == 1) StoreRecord(run.inline_holder, arena_.At<Holder>(run.holders)[0]);
    arena_.Free(run.holders, run.holder_units);
    Store(run.holders, kNone);
    Store(run.holder_units, 0);
    return;
  }
  // Not before half is unused, and not to the last byte, so that one endpoint coming and going moves nothing.
  const std::uint32_t needed = Arena::UnitsFor((run.holder_count + run.holder_count / 4u) * sizeof(Holder));
  if (needed * 2 > run.holder_units) return;
  arena_.Free(run.holders + needed, run.holder_units - needed);
  Store(run.holder_units, static_cast<std::uint16_t>(needed));
}

// The caller is Writing the run.
void RunForest::SetHolder(Holder& holder, std::uint32_t cutoff, std::uint32_t held) noexcept {
  const std::int64_t more = std::int64_t{held} - holder.held();
  std::int64_t& owners = owners_.get()[holder.tag & (kMostOwners - 1)].held[holder.tier()];
  Store(owners, owners + more);
  (holder.tier() == kSpeculative ? stats_.speculative_blocks : stats_.holder_blocks) += more;
  Store(holder.cutoff, static_cast<std::uint16_t>(cutoff));
  Store(holder.packed, static_cast<std::uint16_t>(held << 4 | (holder.packed & 15u)));
}
void RunForest::SetSide(Holder& holder, std::uint32_t bits, bool counted) noexcept {
  Store(holder.bits, bits);
  Store(holder.packed, static_cast<std::uint16_t>((holder.packed & ~8u) | (counted ? 8u : 0u)));
}

// A bitmap, with counts if asked for; what is there already stays. False: no memory.
bool RunForest::GiveSide(Run& run, Holder& holder, bool counted) noexcept {
  if (holder.bits != kNone && (holder.counted() || !counted)) return true;
  const std::uint32_t units = SideUnits(run, counted), chunk = arena_.Allocate(units);
  if (chunk == kNone) return false;
  auto* words = arena_.At<std::uint64_t>(chunk);
  const std::uint32_t old_words = holder.bits != kNone ? SideUnits(run, false) * Arena::kUnitBytes / 8 : 0;
  for (std::uint32_t i = 0; i < units * Arena::kUnitBytes / 8; ++i) {
    const std::uint32_t first = i * 64;
    std::uint64_t word = 0;
    if (i < old_words) {
      word = arena_.At<std::uint64_t>(holder.bits)[i];
    } else if (old_words == 0 && holder.cutoff > first) {
      word = holder.cutoff >= first + 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << (holder.cutoff - first)) - 1;
    }
    Store(words[i], word);
  }
  const Writing writing(run);
  if (holder.bits != kNone) arena_.Free(holder.bits, SideUnits(run, false));
  SetSide(holder, chunk, counted);
  return true;
}

// Moves the cut-off to the first gap, and lets the bitmap go if it says nothing more. The caller is Writing the run.
void RunForest::Tidy(Run& run, Holder& holder) noexcept {
  std::uint32_t cutoff = holder.cutoff;
  while (cutoff < run.length && Holds(holder, cutoff)) {
    const std::uint64_t rest = ~(arena_.At<std::uint64_t>(holder.bits)[cutoff / 64] >> (cutoff % 64));
    cutoff += static_cast<std::uint32_t>(std::countr_zero(rest));  // Zeros were shifted in, so there is a one.
    if (cutoff % 64 != 0) break;
  }
  SetHolder(holder, cutoff, holder.held());
  if (holder.held() != cutoff || holder.counted()) return;
  arena_.Free(holder.bits, SideUnits(run, false));
  SetSide(holder, kNone, false);
}

// Blocks [from, to) were stored once more where they were held already.
void RunForest::AddCopies(Run& run, Holder& holder, std::uint32_t from, std::uint32_t to) noexcept {
  if (from >= to) return;
  if (holder.tier() != kSpeculative) stats_.duplicate_blocks += to - from;
  bool lost = !GiveSide(run, holder, true);
  for (std::uint32_t i = from; i < to && !lost; ++i) {
    auto& count = reinterpret_cast<std::uint8_t*>(CountsOf(run, holder))[i];
    if (count == 255) lost = true;
    else Store(count, static_cast<std::uint8_t>(count + 1));
  }
  if (!lost || holder.tier() == kSpeculative) return;  // Of speculations some then end early, which under-credits.
  ++stats_.cap_hits;
  slots_[holder.tag >> kOwnerBits].resync = true;
}

bool RunForest::TakeCopy(Run& run, Holder& holder, std::uint32_t offset) noexcept {
  if (!holder.counted()) return false;
  auto* counts = reinterpret_cast<std::uint8_t*>(CountsOf(run, holder));
  if (counts[offset] == 0) return false;
  Store(counts[offset], static_cast<std::uint8_t>(counts[offset] - 1));
  const auto* words = reinterpret_cast<const std::uint64_t*>(counts);  // Whole units, zero behind the run's end.
  if (counts[offset] > 0 ||
      std::any_of(words, words + (run.length + 7) / 8, [](std::uint64_t word) { return word != 0; })) {
    return true;
  }
  const Writing writing(run);
  arena_.Free(holder.bits + SideUnits(run, false), SideUnits(run, true) - SideUnits(run, false));
  SetSide(holder, holder.bits, false);
  Tidy(run, holder);
  return true;
}

// The owner's tier holds the run's blocks [from, to) from now on. False: no memory.
bool RunForest::Mark(std::uint32_t at, std::uint32_t owner, std::uint32_t tier, std::uint32_t from,
                     std::uint32_t to) noexcept {
  Run& run = At(at);
  const std::uint32_t tag = TagOf(owner);
  if (FindHolder(at, tag, tier) == nullptr && !AddHolder(at, owner, tier)) return false;
  Holder& holder = *FindHolder(at, tag, tier);
  if (holder.bits == kNone && from <= holder.cutoff) {
    const std::uint32_t before = holder.cutoff;
    if (to > before) {
      const Writing writing(run);
      SetHolder(holder, to, to);
    }
    AddCopies(run, holder, from, std::min(before, to));
    return true;
  }
  if (holder.bits == kNone) {
    if (!GiveSide(run, holder, false)) {
      if (holder.held() == 0) DropHolder(at, tag, tier);
      return false;
    }
    ++stats_.holed_memberships;
  }
  for (std::uint32_t i = from; i < to; ++i) {  // Before a copy is counted where there is none yet.
    if (Holds(holder, i)) AddCopies(run, holder, i, i + 1);
  }
  const Writing writing(run);
  auto* words = arena_.At<std::uint64_t>(holder.bits);
  std::uint32_t held = holder.held();
  for (std::uint32_t i = from; i < to; ++i) {
    const std::uint64_t bit = std::uint64_t{1} << (i % 64);
    held += (words[i / 64] & bit) == 0 ? 1 : 0;
    Store(words[i / 64], words[i / 64] | bit);
  }
  SetHolder(holder, holder.cutoff, held);
  Tidy(run, holder);
  return true;
}

// The owner's tier holds one copy less of a block. False: it held none. The caller trims the run.
bool RunForest::Unmark(std::uint32_t at, std::uint32_t owner, std::uint32_t tier, std::uint32_t offset) noexcept {
  Run& run = At(at);
  const std::uint32_t tag = TagOf(owner);
  Holder* const found = FindHolder(at, tag, tier);
  if (found == nullptr || !Holds(*found, offset)) return false;
  Holder& holder = *found;
  if (TakeCopy(run, holder, offset)) return true;
  if (holder.held() == 1) {
    DropHolder(at, tag, tier);
    return true;
  }
  if (holder.bits == kNone) {
    const bool last = offset + 1 == holder.cutoff;
    if (last || !GiveSide(run, holder, false)) {
      if (!last) {  // No memory for a hole: what lies behind it is given up, which under-credits.
        ++stats_.cap_hits;
        slots_[owners_.get()[owner].slot].resync = true;
      }
      if (offset == 0) {
        DropHolder(at, tag, tier);
        return true;
      }
      const Writing writing(run);
      SetHolder(holder, offset, offset);
      return true;
    }
    ++stats_.holed_memberships;
  }
  const Writing writing(run);
  std::uint64_t& word = arena_.At<std::uint64_t>(holder.bits)[offset / 64];
  Store(word, word & ~(std::uint64_t{1} << (offset % 64)));
  SetHolder(holder, std::min<std::uint32_t>(holder.cutoff, offset), holder.held() - 1);
  if (holder.held() == holder.cutoff) Tidy(run, holder);
  return true;
}

// ---- The writer: endpoints ----

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
    slot.resync = slot.sequenced = false;
    slot.next_sequence = 0;
    width_ = std::max(width_, id.slot + 1);
    ++stats_.endpoints;
  }
  if (slot.owner_or_0 != 0 || !make_owner) return slot.owner_or_0 - 1;  // kNone for 0.
  std::uint32_t owner = free_owner_;
  if (owner != kNone) {
    free_owner_ = owners_.get()[owner].next;
  } else if (owner_count_ < kMostOwners && budget_.Take(sizeof(Owner))) {
    owner = owner_count_++;
  } else {
    return kNone;
  }
  Owner& made = owners_.get()[owner];
  Store(made.slot, id.slot);
  Store(made.incarnation, id.incarnation);
  made.next = kNone;
  made.lists = {};
  for (std::int64_t& held : made.held) Store(held, 0);
  made.memberships = made.orphans = 0;
  made.life = ++last_life_;
  made.last = {};
  Store(made.alive, 1);
  Store(slot.owner_or_0, owner + 1);
  return owner;
}

// From now on nobody sees what the owner holds.
void RunForest::Retire(std::uint32_t at) noexcept {
  Owner& owner = owners_.get()[at];
  Store(owner.alive, 0);
  owner.next = kNone;
  Store(slots_[owner.slot].owner_or_0, 0);
  any_dead_.store(true, std::memory_order_release);
  stats_.pending_sweep += owner.memberships;
  (last_dead_ != kNone ? owners_.get()[last_dead_].next : first_dead_) = at;
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

// Ends up to `memberships` of the dead, and then their owners; no more than 4 times as many blocks, since a long run
// that nobody else holds goes block by block.
void RunForest::SweepSome(std::int64_t memberships) noexcept {
  std::int64_t blocks = memberships < kNever / kBlocksPerMembership ? memberships * kBlocksPerMembership : kNever;
  while (first_dead_ != kNone) {
    const std::uint32_t at = first_dead_;
    Owner& owner = owners_.get()[at];
    for (std::uint32_t tier = 0; tier < kTiers; ++tier) {
      for (; owner.lists[tier].oldest != kNone; --memberships) {
        if (memberships <= 0 || blocks <= 0) return;
        const std::uint32_t run = owner.lists[tier].oldest;
        Holder& holder = *FindHolder(run, TagOf(at), tier);
        if (holder.bits == kNone && holder.cutoff > blocks) {
          const Writing writing(At(run));
          SetHolder(holder, holder.cutoff - static_cast<std::uint32_t>(blocks),
                    holder.cutoff - static_cast<std::uint32_t>(blocks));
          blocks = 0;
        } else {
          blocks -= holder.held();
          DropHolder(run, TagOf(at), tier);
        }
        Trim(run);
      }
    }
    first_dead_ = owner.next;
    if (first_dead_ == kNone) last_dead_ = kNone;
    owner.next = free_owner_;
    free_owner_ = at;
  }
  any_dead_.store(false, std::memory_order_release);
}

// Memory that is not needed any more goes back to the system, unless somebody might be reading it.
void RunForest::GiveBack() noexcept {
  const bool empty = stats_.runs == 0 && (!slabs_.empty() || arena_.used_units() > 0);
  if ((!empty && !arena_.HasSurplus()) || !gate_.Quiet()) return;
  if (empty) {
    table_.Reset();
    for (std::uint32_t slab : slabs_) arena_.Free(slab, kRunsPerSlab);
    slabs_.clear();
    free_run_ = kNone;
    for (std::uint32_t i = 0; i < owner_count_; ++i) owners_.get()[i].last = {};
    arena_.ReleaseFree(1);  // One stays, so that a lone event does not go to the system each time.
  } else {
    arena_.ReleaseSurplus();
  }
}

// ---- Events ----

KvResult RunForest::Refuse(KvResult result, std::uint32_t slot) noexcept {
  ++stats_.refused_events;
  if (slot < kMaxEndpoints) slots_[slot].resync = true;
  return result;
}

KvResult RunForest::Stored(const KvSource& source, std::optional<BlockKey> parent,
                           std::span<const BlockKey> keys) noexcept {
  const MutexLock lock(mutex_);
  SweepSome(kSweepStep);
  const auto tier = static_cast<std::uint32_t>(source.tier);
  if (tier >= kStorageTiers) return Refuse(KvResult::kMalformed, kMaxEndpoints);
  const std::uint32_t owner = Admit(source.endpoint, true);
  if (owner == kNone) return Refuse(KvResult::kUnknownSource, kMaxEndpoints);
  if (!orphans_.empty()) ExpireOrphans();
  Owner& whose = owners_.get()[owner];
  const BlockKey parent_key = parent.value_or(0);
  if (std::find(keys.begin(), keys.end(), BlockKey{0}) != keys.end()) {  // 0 is no key, and stands for "no parent".
    return Refuse(KvResult::kMalformed, source.endpoint.slot);
  }
  bool orphan = false;
  if (parent_key != 0) {
    if (std::find(keys.begin(), keys.end(), parent_key) != keys.end()) {
      return Refuse(KvResult::kMalformed, source.endpoint.slot);
    }
    const Place hint = whose.last;
    const bool hinted =
        hint.run != kNone && hint.offset < At(hint.run).length && KeysOf(At(hint.run))[hint.offset] == parent_key;
    whose.last = hinted ? hint : PlaceOf(parent_key);
    orphan = !Reaches(whose.last);
  }
  if (orphan && !keys.empty()) {
    ++stats_.unknown_parents;
    if (!KeepOrphans(owner, tier, parent_key, keys)) {
      stats_.dropped_orphans += static_cast<std::int64_t>(keys.size());
      return Refuse(KvResult::kUnknownParent, source.endpoint.slot);
    }
  }
  std::size_t stored = 0;
  const KvResult result = StoreKeys(owner, tier, parent_key, keys, stored);
  stats_.stored_blocks += static_cast<std::int64_t>(stored);
  if (!orphan) Adopt(keys.first(stored));
  else if (stored < keys.size()) CutOrphans(stored);
  if (result != KvResult::kApplied) return Refuse(result, source.endpoint.slot);
  return orphan ? KvResult::kUnknownParent : KvResult::kApplied;
}

// The owner's tier holds these keys, each behind the one before, from now on; the first `stored` of them, if not all.
KvResult RunForest::StoreKeys(std::uint32_t owner, std::uint32_t tier, BlockKey parent, std::span<const BlockKey> keys,
                              std::size_t& stored) noexcept {
  Owner& whose = owners_.get()[owner];
  for (std::size_t i = 0; i < std::min<std::size_t>(keys.size(), kAhead); ++i) table_.Prefetch(keys[i]);

  Place previous;  // Of the block before the next key.
  BlockKey previous_key = parent;
  if (previous_key != 0) {
    const Place hint = whose.last;
    const bool hinted =
        hint.run != kNone && hint.offset < At(hint.run).length && KeysOf(At(hint.run))[hint.offset] == previous_key;
    previous = hinted ? hint : PlaceOf(previous_key);
  }
  const auto place_of = [&](std::size_t i) TOKROUTE_REQUIRES(mutex_) -> Place {
    // It mostly lies right behind the one before.
    if (previous.run != kNone) {
      const Run& run = At(previous.run);
      if (previous.offset + 1 < run.length && KeysOf(run)[previous.offset + 1] == keys[i]) {
        return {previous.run, previous.offset + 1};
      }
    }
    return PlaceOf(keys[i]);
  };
  std::size_t& i = stored;
  while (i < keys.size()) {
    const Place place = place_of(i);
    std::uint32_t count = 0;
    if (place.run != kNone) {
      const Run& run = At(place.run);
      const BlockKey* own = KeysOf(run);
      if ((place.offset > 0 ? own[place.offset - 1] : run.parent_key) != previous_key) {
        ++stats_.conflicting_keys;
        return KvResult::kConflict;
      }
      while (i + count < keys.size() && place.offset + count < run.length &&
             own[place.offset + count] == keys[i + count])
        ++count;
      if (!Mark(place.run, owner, tier, place.offset, place.offset + count)) {
        ++stats_.cap_hits;
        return KvResult::kNoRoom;
      }
      if (tier != kSpeculative) Forget(place.run, owner, place.offset, place.offset + count);
      previous = {place.run, place.offset + count - 1};
    } else {
      // What is new goes behind the one before, if that is the last of its run, else into a run of its own.
      std::uint32_t run = previous.run;
      std::uint32_t from = 0;
      if (run != kNone && previous.offset + 1u == At(run).length) {
        from = At(run).length;
        count = Append(run, keys.subspan(i));
      } else if (run != kNone) {
        ++stats_.forks;
      }
      if (count == 0) {
        run = NewRun(previous_key, previous);
        from = 0;
        count = run != kNone ? Append(run, keys.subspan(i)) : 0;
      }
      if (count == 0 || !Mark(run, owner, tier, from, from + count)) {
        if (run != kNone) Trim(run);
        ++stats_.cap_hits;
        return KvResult::kNoRoom;
      }
      previous = {run, from + count - 1};
    }
    i += count;
    previous_key = keys[i - 1];
  }
  whose.last = previous;
  return KvResult::kApplied;
}

KvResult RunForest::Removed(const KvSource& source, std::span<const BlockKey> keys) noexcept {
  const MutexLock lock(mutex_);
  SweepSome(kSweepStep);
  const auto tier = static_cast<std::uint32_t>(source.tier);
  if (tier >= kStorageTiers) return Refuse(KvResult::kMalformed, kMaxEndpoints);
  const std::uint32_t owner = Admit(source.endpoint, false);
  if (owner == kNone) {
    if (!Knows(source.endpoint)) return Refuse(KvResult::kUnknownSource, kMaxEndpoints);
    stats_.unknown_removes += static_cast<std::int64_t>(keys.size());
    return KvResult::kApplied;
  }
  for (std::size_t i = 0; i < std::min<std::size_t>(keys.size(), kAhead); ++i) table_.Prefetch(keys[i]);
  Place last;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) table_.Prefetch(keys[i + kAhead]);
    // Engines free from the tail, so the next one mostly lies right before.
    Place place;
    if (last.run != kNone && last.offset > 0 && KeysOf(At(last.run))[last.offset - 1] == keys[i]) {
      place = {last.run, last.offset - 1};
    } else {
      if (last.run != kNone) Trim(last.run);
      place = PlaceOf(keys[i]);
    }
    last = place;
    const bool held = place.run != kNone && Unmark(place.run, owner, tier, place.offset);
    ++(held ? stats_.removed_blocks : stats_.unknown_removes);
  }
  if (last.run != kNone) Trim(last.run);
  GiveBack();
  return KvResult::kApplied;
}

void RunForest::ClearEndpoint(EndpointId id) noexcept {
  const MutexLock lock(mutex_);
  const std::uint32_t owner = Admit(id, false);
  if (owner != kNone) Retire(owner);
  if (Knows(id)) slots_[id.slot].resync = false;  // It holds nothing, and that is the truth.
  SweepSome(kSweepStep);
  GiveBack();
}

// The endpoint is the living occupant of its slot, as far as the index was told.
bool RunForest::Knows(EndpointId id) const noexcept {
  return id.incarnation != 0 && id.slot < width_ && slots_[id.slot].incarnation == id.incarnation &&
         slots_[id.slot].dead_through < id.incarnation;
}

KvSequence RunForest::Sequence(EndpointId id, std::uint64_t number) noexcept {
  const MutexLock lock(mutex_);
  (void)Admit(id, false);
  if (!Knows(id)) return KvSequence::kDuplicate;
  Slot& slot = slots_[id.slot];
  if (slot.sequenced && number == 0 && slot.next_sequence != 0) {
    ++stats_.restarts;
    if (slot.owner_or_0 != 0) Retire(slot.owner_or_0 - 1);
    slot.resync = false;
    slot.next_sequence = 1;
    return KvSequence::kRestarted;
  }
  if (slot.sequenced && number < slot.next_sequence) {
    ++stats_.duplicate_batches;
    return KvSequence::kDuplicate;
  }
  const bool gap = number != (slot.sequenced ? slot.next_sequence : 0);
  slot.sequenced = true;
  slot.next_sequence = number + 1;
  if (!gap) return KvSequence::kNext;
  ++stats_.sequence_gaps;
  slot.resync = true;
  return KvSequence::kGap;
}

// ---- The rest ----

bool RunForest::WantsResync(EndpointId id) noexcept {
  const MutexLock lock(mutex_);
  return Knows(id) && slots_[id.slot].resync;
}

void RunForest::RemoveEndpoint(EndpointId id) noexcept {
  if (id.incarnation == 0 || id.slot >= kMaxEndpoints) return;
  const MutexLock lock(mutex_);
  Remove(id);
  SweepSome(kSweepStep);
  GiveBack();
}

void RunForest::RetireDead(const FleetView& alive) noexcept {
  const MutexLock lock(mutex_);
  for (std::uint32_t row = 0; row < width_; ++row) {
    const EndpointId id{row, slots_[row].incarnation};
    if (id.incarnation > slots_[row].dead_through && !alive.Alive(id)) Remove(id);
  }
  SweepSome(kSweepStep);
  GiveBack();
}

std::int64_t RunForest::Sweep(std::int64_t memberships) noexcept {
  const MutexLock lock(mutex_);
  ExpireOrphans();
  ExpireSpeculations(options_.clock.Now());
  SweepSome(memberships);
  GiveBack();
  return stats_.pending_sweep;
}

std::int64_t RunForest::HeldBlocks(EndpointId id) noexcept {
  const MutexLock lock(mutex_);
  if (!Knows(id) || slots_[id.slot].owner_or_0 == 0) return 0;
  const auto& held = owners_.get()[slots_[id.slot].owner_or_0 - 1].held;
  return std::accumulate(held.begin(), held.begin() + kSpeculative, std::int64_t{0});
}

std::int64_t RunForest::DeviceBlocks(EndpointId id) const noexcept {
  if (slots_ == nullptr || id.slot >= kMaxEndpoints || Load(slots_[id.slot].incarnation) != id.incarnation) return 0;
  const std::uint32_t owner = Load(slots_[id.slot].owner_or_0);
  return owner != 0 ? Load(owners_.get()[owner - 1].held[static_cast<std::size_t>(StorageTier::kDevice)]) : 0;
}

PrefixIndexStats RunForest::Stats() noexcept {
  const MutexLock lock(mutex_);
  PrefixIndexStats stats = stats_;
  stats.bytes = budget_.used();
  stats.peak_bytes = budget_.peak();
  return stats;
}

absl::Status RunForest::Audit() {
  const MutexLock lock(mutex_);
  const auto fail = [](const auto&... parts) { return absl::InternalError(absl::StrCat("PrefixIndex: ", parts...)); };
  std::unordered_map<std::uint32_t, std::uint32_t> runs;  // Keys found in the table, by run.
  std::int64_t keys = 0;
  bool good = true;
  std::vector<Place> places;
  table_.ForEach([&](Place place) { places.push_back(place); });
  for (const Place place : places) {
    ++runs[place.run];
    ++keys;
    const Run& run = At(place.run);
    good &= place.offset < run.length && PlaceOf(KeysOf(run)[place.offset]).offset == place.offset;
  }
  if (!good) return fail("a key is not where the table says");
  if (keys != stats_.distinct_blocks || keys != table_.size() || std::ssize(runs) != stats_.runs) {
    return fail("table has ", keys, " keys of ", runs.size(), " runs, counted ", stats_.distinct_blocks, " of ",
                stats_.runs);
  }
  std::int64_t units = table_.units() + std::int64_t{kRunsPerSlab} * std::ssize(slabs_), pairs = 0, memberships = 0,
               dead = 0;
  for (const auto& [at, found] : runs) {
    Run& run = At(at);
    if (run.length != found || (run.version & 1) != 0)
      return fail("run ", at, " has ", run.length, " keys, in the table ", found);
    units += run.key_units + (run.holders != kNone ? run.holder_units : 0);
    std::uint64_t previous = 0;
    bool tail = false;
    for (const Holder& holder : HoldersOf(run)) {
      if (memberships > 0 && &holder != HoldersOf(run).data() && holder.order() <= previous)
        return fail("run ", at, ": holders unordered");
      previous = holder.order();
      std::uint32_t held = 0, cutoff = run.length;
      for (std::uint32_t i = 0; i < run.length; ++i) {
        if (Holds(holder, i)) ++held;
        else cutoff = std::min(cutoff, i);
      }
      if (held == 0 || held != holder.held() || cutoff != holder.cutoff) {
        return fail("run ", at, ": holder says ", holder.held(), " with cut-off ", holder.cutoff, ", holds ", held,
                    ", ", cutoff);
      }
      if ((holder.bits != kNone) != (held != cutoff || holder.counted())) {
        return fail("run ", at, ": a bitmap without need, or none");
      }
      if (holder.bits != kNone) units += SideUnits(run, holder.counted());
      tail |= Holds(holder, run.length - 1u);
      pairs += held;
      ++memberships;
      if (owners_.get()[holder.tag & (kMostOwners - 1)].alive == 0) ++dead;
    }
    if (!tail) return fail("run ", at, ": nobody holds its end");
  }
  if (pairs != stats_.holder_blocks + stats_.speculative_blocks || memberships != stats_.memberships ||
      dead != stats_.pending_sweep) {
    return fail("counted ", pairs, " pairs, ", memberships, " memberships, ", dead, " dead");
  }
  std::int64_t listed = 0;
  for (std::uint32_t i = 0; i < owner_count_; ++i) {
    std::int64_t count = 0;
    for (std::uint32_t tier = 0; tier < kTiers; ++tier) {
      std::int64_t held = 0;
      std::uint32_t previous = kNone;
      for (std::uint32_t at = owners_.get()[i].lists[tier].oldest; at != kNone;) {
        const Holder* holder = FindHolder(at, TagOf(i), tier);
        if (holder == nullptr || holder->older != previous) return fail("list of owner ", i);
        held += holder->held();
        ++count;
        previous = at;
        at = holder->newer;
      }
      if (owners_.get()[i].lists[tier].newest != previous) return fail("list of owner ", i, " ends elsewhere");
      if (held != owners_.get()[i].held[tier]) return fail("owner ", i, " holds ", held, " in tier ", tier);
    }
    if (count != owners_.get()[i].memberships) return fail("owner ", i, " is in ", count, " runs");
    listed += count;
  }
  if (listed != memberships) return fail("lists name ", listed, " memberships");
  if (arena_.used_units() != units) return fail("arena has ", arena_.used_units(), " units in use, found ", units);
  return budget_.peak() <= budget_.limit() ? absl::OkStatus() : fail("over the memory limit");
}

std::unique_ptr<PrefixEngine> MakeRunForest(const PrefixIndexOptions& options) {
  return std::make_unique<RunForest>(options);
}

}  // namespace tokroute::internal

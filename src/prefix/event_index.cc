#include "prefix/event_index.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace tokroute::internal {
namespace {

constexpr std::int64_t kBlocksPerMembership = 4;  // That a sweep takes at a time.
constexpr std::uint32_t kLeastStep = 64;          // Keys that an array makes room for at first.
constexpr std::uint32_t kKeysPerUnit = Arena::kUnitBytes / sizeof(BlockKey);

// To a multiple of 2^-32: products with up to two million blocks, and their sums, are then exact, so neither the order
// nor a contracted multiply-add can change a decision.
double Rounded(double weight) noexcept {
  return static_cast<double>(static_cast<std::int64_t>(weight * 0x1p32 + 0.5)) * 0x1p-32;
}

}  // namespace

EventIndex::EventIndex(const PrefixIndexOptions& options) noexcept
    : RunForest(
          options,
          {Rounded(options.tier_weights.device), Rounded(options.tier_weights.host), Rounded(options.tier_weights.disk),
           Rounded(options.tier_weights.unknown), Rounded(options.tier_weights.device)},
          /*stride=*/1) {}

void EventIndex::Match(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out,
                       std::vector<std::uint32_t>& path) noexcept {
  if (next_deadline_.load(std::memory_order_acquire) != kNever) {
    const std::chrono::nanoseconds now = options_.clock.Now();
    if (now.count() >= next_deadline_.load(std::memory_order_acquire)) {
      const MutexLock lock(mutex_);
      ExpireSpeculations(now);
    }
  }
  RunForest::Match(keys, out, path);
}

// ---- Runs ----

Place EventIndex::PlaceOf(BlockKey key) const noexcept {
  return table_.Find(key, [&](Place candidate) {
    const Run& run = At(candidate.run);
    return candidate.offset < run.length && KeysOf(run)[candidate.offset] == key;
  });
}

// An empty run; kNone: no memory.
std::uint32_t EventIndex::StartRun(BlockKey parent_key, Place parent) noexcept {
  const std::uint32_t at = NewRun(parent_key, parent);
  if (at == kNone || parent_key == 0) return at;
  const bool orphan = parent.run == kNone || (At(parent.run).state & Run::kOrphan) != 0;
  Store(At(at).noted, parent.run != kNone ? At(parent.run).shape : 0);
  Store(At(at).state, orphan ? Run::kOrphan : std::uint16_t{0});
  return at;
}

// Takes the keys up to the first that is known already, as far as there is room; returns how many.
std::uint32_t EventIndex::Append(std::uint32_t at, std::span<const BlockKey> keys) noexcept {
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

// ---- What a tier of an endpoint holds of a run ----

RunForest::Extra& EventIndex::ExtraIn(std::uint32_t at, std::uint32_t tag, std::uint32_t tier) noexcept {
  return ExtraOf(At(at), *FindHolder(at, tag, tier));
}

// One that holds nothing yet. False: no memory.
bool EventIndex::AddMember(std::uint32_t at, std::uint32_t owner, std::uint32_t tier) noexcept {
  List& list = OwnerAt(owner).lists[tier];
  if (!AddHolder(at, owner, tier, {.bits = kNone, .older = list.newest, .newer = kNone})) return false;
  if (list.newest != kNone) {
    Store(ExtraIn(list.newest, TagOf(owner), tier).newer, at);
  } else {
    list.oldest = at;
  }
  list.newest = at;
  return true;
}

// Ends a membership. The caller trims the run.
void EventIndex::DropMember(std::uint32_t at, const Holder& holder) noexcept {
  Run& run = At(at);
  const std::uint32_t tag = holder.tag, tier = holder.tier();
  const Extra extra = ExtraOf(run, holder);
  Owner& whose = OwnerAt(holder.owner());
  List& list = whose.lists[tier];
  Store(extra.older != kNone ? ExtraIn(extra.older, tag, tier).newer : list.oldest, extra.newer);
  Store(extra.newer != kNone ? ExtraIn(extra.newer, tag, tier).older : list.newest, extra.older);
  if (whose.alive == 0) --stats_.pending_sweep;
  if (extra.bits != kNone) arena_.Free(extra.bits, SideUnits(run, holder.counted()));
  DropHolder(at, holder);
}

// The caller is Writing the run.
void EventIndex::SetSide(Run& run, Holder& holder, std::uint32_t bits, bool counted) noexcept {
  Store(ExtraOf(run, holder).bits, bits);
  Store(holder.packed, static_cast<std::uint16_t>((holder.packed & ~8u) | (counted ? 8u : 0u)));
}

// A bitmap, with counts if asked for; what is there already stays. False: no memory.
bool EventIndex::GiveSide(Run& run, Holder& holder, bool counted) noexcept {
  const std::uint32_t old = ExtraOf(run, holder).bits;
  if (old != kNone && (holder.counted() || !counted)) return true;
  const std::uint32_t units = SideUnits(run, counted), chunk = arena_.Allocate(units);
  if (chunk == kNone) return false;
  auto* words = arena_.At<std::uint64_t>(chunk);
  const std::uint32_t old_words = old != kNone ? SideUnits(run, false) * Arena::kUnitBytes / 8 : 0;
  for (std::uint32_t i = 0; i < units * Arena::kUnitBytes / 8; ++i) {
    const std::uint32_t first = i * 64;
    std::uint64_t word = 0;
    if (i < old_words) {
      word = arena_.At<std::uint64_t>(old)[i];
    } else if (old_words == 0 && holder.cutoff > first) {
      word = holder.cutoff >= first + 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << (holder.cutoff - first)) - 1;
    }
    Store(words[i], word);
  }
  const Writing writing(run);
  if (old != kNone) arena_.Free(old, SideUnits(run, false));
  SetSide(run, holder, chunk, counted);
  return true;
}

// Moves the cut-off to the first gap, and lets the bitmap go if it says nothing more. The caller is Writing the run.
void EventIndex::Tidy(Run& run, Holder& holder) noexcept {
  const std::uint32_t bits = ExtraOf(run, holder).bits;
  std::uint32_t cutoff = holder.cutoff;
  while (cutoff < run.length && Holds(holder, bits, cutoff)) {
    const std::uint64_t rest = ~(arena_.At<std::uint64_t>(bits)[cutoff / 64] >> (cutoff % 64));
    cutoff += static_cast<std::uint32_t>(std::countr_zero(rest));  // Zeros were shifted in, so there is a one.
    if (cutoff % 64 != 0) break;
  }
  SetHolder(holder, cutoff, holder.held());
  if (holder.held() != cutoff || holder.counted()) return;
  arena_.Free(bits, SideUnits(run, false));
  SetSide(run, holder, kNone, false);
}

// Blocks [from, to) were stored once more where they were held already.
void EventIndex::AddCopies(Run& run, Holder& holder, std::uint32_t from, std::uint32_t to) noexcept {
  if (from >= to) return;
  if (holder.tier() != kSpeculative) stats_.duplicate_blocks += to - from;
  bool lost = !GiveSide(run, holder, true);
  for (std::uint32_t i = from; i < to && !lost; ++i) {
    std::uint8_t& count = CountsOf(run, ExtraOf(run, holder).bits)[i];
    if (count == 255) lost = true;
    else Store(count, static_cast<std::uint8_t>(count + 1));
  }
  if (!lost || holder.tier() == kSpeculative) return;  // Of speculations some then end early, which under-credits.
  ++stats_.cap_hits;
  slots_[holder.tag >> kOwnerBits].resync = true;
}

bool EventIndex::TakeCopy(Run& run, Holder& holder, std::uint32_t offset) noexcept {
  if (!holder.counted()) return false;
  const std::uint32_t bits = ExtraOf(run, holder).bits;
  std::uint8_t* const counts = CountsOf(run, bits);
  if (counts[offset] == 0) return false;
  Store(counts[offset], static_cast<std::uint8_t>(counts[offset] - 1));
  const auto* words = reinterpret_cast<const std::uint64_t*>(counts);  // Whole units, zero behind the run's end.
  if (counts[offset] > 0 ||
      std::any_of(words, words + (run.length + 7) / 8, [](std::uint64_t word) { return word != 0; })) {
    return true;
  }
  const Writing writing(run);
  arena_.Free(bits + SideUnits(run, false), SideUnits(run, true) - SideUnits(run, false));
  SetSide(run, holder, bits, false);
  Tidy(run, holder);
  return true;
}

// The owner's tier holds the run's blocks [from, to) from now on. False: no memory.
bool EventIndex::Mark(std::uint32_t at, std::uint32_t owner, std::uint32_t tier, std::uint32_t from,
                      std::uint32_t to) noexcept {
  Run& run = At(at);
  const std::uint32_t tag = TagOf(owner);
  Holder* found = FindHolder(at, tag, tier);
  if (found == nullptr) {
    if (!AddMember(at, owner, tier)) return false;
    found = FindHolder(at, tag, tier);
  }
  Holder& holder = *found;
  const bool plain = holder.plain();
  if (plain && from <= holder.cutoff) {
    const std::uint32_t before = holder.cutoff;
    if (to > before) {
      const Writing writing(run);
      SetHolder(holder, to, to);
    }
    AddCopies(run, holder, from, std::min(before, to));
    return true;
  }
  if (plain) {
    if (!GiveSide(run, holder, false)) {
      if (holder.held() == 0) DropMember(at, holder);
      return false;
    }
    ++stats_.holed_memberships;
  }
  for (std::uint32_t i = from; i < to; ++i) {  // Before a copy is counted where there is none yet.
    if (Holds(holder, ExtraOf(run, holder).bits, i)) AddCopies(run, holder, i, i + 1);
  }
  const Writing writing(run);
  auto* words = arena_.At<std::uint64_t>(ExtraOf(run, holder).bits);
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
bool EventIndex::Unmark(std::uint32_t at, std::uint32_t owner, std::uint32_t tier, std::uint32_t offset) noexcept {
  Run& run = At(at);
  Holder* const found = FindHolder(at, TagOf(owner), tier);
  if (found == nullptr) return false;
  Holder& holder = *found;
  // What lies apart is asked for only where it can matter: a tail goes without.
  const bool plain = holder.plain();
  if (plain ? offset >= holder.cutoff : !Holds(holder, ExtraOf(run, holder).bits, offset)) return false;
  if (TakeCopy(run, holder, offset)) return true;
  if (holder.held() == 1) {
    DropMember(at, holder);
    return true;
  }
  if (plain) {
    const bool last = offset + 1 == holder.cutoff;
    if (last || !GiveSide(run, holder, false)) {
      if (!last) {  // No memory for a hole: what lies behind it is given up, which under-credits.
        ++stats_.cap_hits;
        slots_[OwnerAt(owner).slot].resync = true;
      }
      if (offset == 0) {
        DropMember(at, holder);
        return true;
      }
      const Writing writing(run);
      SetHolder(holder, offset, offset);
      return true;
    }
    ++stats_.holed_memberships;
  }
  const Writing writing(run);
  std::uint64_t& word = arena_.At<std::uint64_t>(ExtraOf(run, holder).bits)[offset / 64];
  Store(word, word & ~(std::uint64_t{1} << (offset % 64)));
  SetHolder(holder, std::min<std::uint32_t>(holder.cutoff, offset), holder.held() - 1);
  if (holder.held() == holder.cutoff) Tidy(run, holder);
  return true;
}

// ---- Endpoints ----

void EventIndex::OnEntered(Slot& slot) noexcept {
  slot.resync = slot.sequenced = false;
  slot.next_sequence = 0;
}
// It holds nothing, and that is the truth.
void EventIndex::OnCleared(Slot& slot) noexcept { slot.resync = false; }

std::int64_t EventIndex::SweepableOf(const Owner& owner) const noexcept { return owner.memberships; }
std::int64_t EventIndex::BlocksPerSweptMembership() const noexcept { return kBlocksPerMembership; }

bool EventIndex::SweepOwner(std::uint32_t at, std::int64_t& memberships, std::int64_t& blocks) noexcept {
  Owner& owner = OwnerAt(at);
  for (std::uint32_t tier = 0; tier < kTiers; ++tier) {
    for (; owner.lists[tier].oldest != kNone; --memberships) {
      if (memberships <= 0 || blocks <= 0) return false;
      const std::uint32_t run = owner.lists[tier].oldest;
      Holder& holder = *FindHolder(run, TagOf(at), tier);
      if (holder.plain() && holder.cutoff > blocks) {
        const Writing writing(At(run));
        SetHolder(holder, holder.cutoff - static_cast<std::uint32_t>(blocks),
                  holder.cutoff - static_cast<std::uint32_t>(blocks));
        blocks = 0;
      } else {
        blocks -= holder.held();
        DropMember(run, holder);
      }
      Trim(run);
    }
  }
  return true;
}

// ---- Events ----

KvResult EventIndex::Refuse(KvResult result, std::uint32_t slot) noexcept {
  ++stats_.refused_events;
  if (slot < kMaxEndpoints) slots_[slot].resync = true;
  return result;
}

KvResult EventIndex::Stored(const KvSource& source, std::optional<BlockKey> parent,
                            std::span<const BlockKey> keys) noexcept {
  const MutexLock lock(mutex_);
  SweepSome(kSweepStep);
  const auto tier = static_cast<std::uint32_t>(source.tier);
  if (tier >= kStorageTiers) return Refuse(KvResult::kMalformed, kMaxEndpoints);
  const std::uint32_t owner = Admit(source.endpoint, true);
  if (owner == kNone) return Refuse(KvResult::kUnknownSource, kMaxEndpoints);
  if (!orphans_.empty()) ExpireOrphans();
  Owner& whose = OwnerAt(owner);
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
KvResult EventIndex::StoreKeys(std::uint32_t owner, std::uint32_t tier, BlockKey parent, std::span<const BlockKey> keys,
                               std::size_t& stored) noexcept {
  Owner& whose = OwnerAt(owner);
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
        run = StartRun(previous_key, previous);
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

KvResult EventIndex::Removed(const KvSource& source, std::span<const BlockKey> keys) noexcept {
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

KvSequence EventIndex::Sequence(EndpointId id, std::uint64_t number) noexcept {
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

bool EventIndex::WantsResync(EndpointId id) noexcept {
  const MutexLock lock(mutex_);
  return Knows(id) && slots_[id.slot].resync;
}

std::int64_t EventIndex::Sweep(std::int64_t memberships) noexcept {
  {
    const MutexLock lock(mutex_);
    ExpireOrphans();
    ExpireSpeculations(options_.clock.Now());
  }
  return RunForest::Sweep(memberships);
}

absl::Status EventIndex::AuditMode(std::int64_t& units) {
  std::int64_t dead = 0;
  for (std::uint32_t i = 0; i < owner_count_; ++i) {
    const Owner& owner = OwnerAt(i);
    std::int64_t count = 0;
    for (std::uint32_t tier = 0; tier < kTiers; ++tier) {
      std::int64_t held = 0;
      std::uint32_t previous = kNone;
      for (std::uint32_t at = owner.lists[tier].oldest; at != kNone;) {
        Run& run = At(at);
        const Holder* holder = FindHolder(at, TagOf(i), tier);
        if (holder == nullptr || ExtraOf(run, *holder).older != previous) return Unsound("list of owner ", i);
        const Extra& extra = ExtraOf(run, *holder);
        std::uint32_t blocks = 0, cutoff = run.length;
        for (std::uint32_t b = 0; b < run.length; ++b) {
          if (Holds(*holder, extra.bits, b)) ++blocks;
          else cutoff = std::min(cutoff, b);
        }
        if (blocks != holder->held() || cutoff != holder->cutoff) {
          return Unsound("run ", at, ": holder says ", holder->held(), " with cut-off ", holder->cutoff, ", holds ",
                         blocks, ", ", cutoff);
        }
        if ((extra.bits != kNone) != (blocks != cutoff || holder->counted())) {
          return Unsound("run ", at, ": a bitmap without need, or none");
        }
        if (extra.bits != kNone) units += SideUnits(run, holder->counted());
        held += blocks;
        ++count;
        previous = at;
        at = extra.newer;
      }
      if (owner.lists[tier].newest != previous) return Unsound("list of owner ", i, " ends elsewhere");
      if (held != owner.held[tier]) return Unsound("owner ", i, " holds ", held, " in tier ", tier);
    }
    if (count != owner.memberships) return Unsound("owner ", i, " is in ", count, " runs");
    if (owner.alive == 0) dead += count;
  }
  return dead == stats_.pending_sweep ? absl::OkStatus() : Unsound("counted ", dead, " dead memberships");
}

std::unique_ptr<PrefixEngine> MakeEventIndex(const PrefixIndexOptions& options) {
  return std::make_unique<EventIndex>(options);
}

}  // namespace tokroute::internal

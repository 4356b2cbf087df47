#include "prefix/run_forest.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "internal/no_memory.h"

namespace tokroute::internal {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kBlocksPerMembership = 4;  // That a sweep takes at a time.
constexpr std::uint32_t kMostHanging = 256;       // Runs in a row that hang in the air and are looked through.
constexpr int kTries = 8;                         // Looks at a run that keeps changing.
constexpr std::uint32_t kWalkedRuns = 3;          // Walked down one by one; beyond, the prompt is searched.
constexpr std::uint32_t kRunsAhead = 4;           // Records fetched ahead on the way down.
constexpr std::uint32_t kProbes = 8;              // Of one round of that search.
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

// ---- Readers ----

// Changes a run's record so that readers notice.
class RunForest::Writing {
 public:
  explicit Writing(Run& run) noexcept : run_(run) { Store(run_.version, run_.version + 1); }
  ~Writing() { Store(run_.version, run_.version + 1); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

 private:
  Run& run_;
};

// Calls look(run) until the run did not change meanwhile; false if look said no, or it kept changing. What look reads,
// it must Load; what a run names may be read as well, since it is checked afterwards that it was still the run's.
template <class Look>
bool RunForest::Steadily(std::uint32_t at, Look&& look, std::uint32_t* seen) const noexcept {
  const auto* run = reinterpret_cast<const Run*>(arena_.TryAddress(at));
  if (run == nullptr) return false;
  for (int i = 0; i < kTries; ++i) {
    const std::uint32_t version = Load(run->version);
    if ((version & 1) != 0) {
      PauseBriefly();
      continue;
    }
    const bool yes = look(*run);
    if (seen != nullptr) *seen = version;
    if (Load(run->version) == version) return yes;
  }
  return false;
}

// A run's keys, if there are `length` of them to be read; else null. Within a look.
const BlockKey* RunForest::TryKeys(const Run& run, std::uint32_t length) const noexcept {
  const std::uint32_t handle = Load(run.keys);
  const auto* keys = reinterpret_cast<const BlockKey*>(arena_.TryAddress(handle));
  return keys != nullptr && length * sizeof(BlockKey) <= Arena::BytesBehind(handle) ? keys : nullptr;
}

// The run that goes on at `depth`, and how much of it the prompt has. Hashes as far as that run goes.
bool RunForest::StepDown(PromptKeys& prompt, std::uint32_t depth, Step& step) const noexcept {
  const auto count = static_cast<std::uint32_t>(prompt.block_count());
  const BlockKey first = prompt.Ensure(depth + 1)[depth];
  std::uint32_t version = 0;
  const Place place = table_.Find(first, [&](Place candidate) {
    // Only a run's first key goes on where another run was left.
    if (candidate.offset != 0) return false;
    return Steadily(
        candidate.run,
        [&](const Run& run) {
          const std::uint32_t length = Load(run.length), whole = std::min(length, count - depth);
          const BlockKey* keys = TryKeys(run, length);
          if (length == 0 || keys == nullptr) return false;
          const std::span<const BlockKey> mine = prompt.Ensure(depth + whole).subspan(depth);
          step = {candidate.run, depth, whole, 0};
          // Chained keys: where one agrees, all before it do, so it is one compare or a binary search.
          if (Load(keys[whole - 1]) == mine[whole - 1]) return true;
          std::uint32_t agrees = 0, differs = whole;
          while (differs - agrees > 1) {
            const std::uint32_t middle = agrees + (differs - agrees) / 2;
            (Load(keys[middle - 1]) == mine[middle - 1] ? agrees : differs) = middle;
          }
          step.matched = agrees;
          return agrees > 0;
        },
        &version);
  });
  step.version = version;
  return place.run != kNone;
}

void RunForest::Match(PromptKeys& prompt, std::vector<PrefixMatch::Holder>& out,
                      std::vector<std::uint32_t>& path) noexcept {
  out.clear();
  path.clear();
  const std::int64_t count = std::min<std::int64_t>(prompt.block_count(), 0x7FFFFFFF);
  if (next_deadline_.load(std::memory_order_acquire) != kNever) {
    const std::chrono::nanoseconds now = clock_.Now();
    if (now.count() >= next_deadline_.load(std::memory_order_acquire)) {
      const MutexLock lock(mutex_);
      ExpireSpeculations(now);
    }
  }
  const ReaderGate::Visit visit(gate_);
  for (int tries = 0; tries < kTries; ++tries) {
    path.clear();
    std::uint32_t depth = 0;
    for (std::uint32_t i = 0; depth < count; ++i) {
      if (i == kWalkedRuns) {
        SearchDeep(prompt.Ensure(count), depth, path);
        break;
      }
      Step step;
      if (!StepDown(prompt, depth, step)) break;
      path.insert(path.end(), {step.run, step.start, step.matched, step.version});
      depth += step.matched;
    }
    if (Emit(path, out)) return;
  }
  out.clear();  // All kept changing under us: nothing is certain.
}

// Finds the prompt's deepest block that is anywhere, by probing, and walks up from there to `depth`. Exact with holes:
// no endpoint can hold more than up to a block that nobody has, and what it holds above is looked at run by run.
void RunForest::SearchDeep(std::span<const BlockKey> keys, std::uint32_t depth,
                           std::vector<std::uint32_t>& path) const noexcept {
  std::uint32_t version = 0;  // Of the run found last.
  const auto find = [&](std::uint32_t at) {
    return table_.Find(keys[at], [&](Place candidate) {
      return Steadily(
          candidate.run,
          [&](const Run& run) {
            const BlockKey* own = candidate.offset < Load(run.length) ? TryKeys(run, candidate.offset + 1) : nullptr;
            return own != nullptr && Load(own[candidate.offset]) == keys[at];
          },
          &version);
    });
  };
  const std::size_t known = path.size();
  auto limit = static_cast<std::uint32_t>(keys.size());
  while (true) {
    // Blocks before `low` are there, `high` is not (or is the end).
    std::uint32_t low = depth, high = limit;
    Place deepest;
    std::uint32_t deepest_version = 0;
    while (low < high) {
      std::uint32_t probes[kProbes];
      const std::uint32_t wanted = std::min(kProbes, high - low);
      for (std::uint32_t i = 0; i < wanted; ++i) {
        probes[i] = low + static_cast<std::uint32_t>((std::uint64_t{high - low} * (i + 1) - 1) / wanted);
        table_.Prefetch(keys[probes[i]]);
      }
      for (std::uint32_t i = 0; i < wanted; ++i) {
        const Place place = find(probes[i]);
        if (place.run == kNone) {
          high = probes[i];
          break;
        }
        low = probes[i] + 1;
        deepest = place;
        deepest_version = version;
      }
    }
    if (deepest.run == kNone) return;
    // Up the hints of parents, by the table where a hint is out of date. Steps come out deepest first.
    std::uint32_t end = low;
    while (deepest.run != kNone && deepest.offset + 1 <= end - depth) {
      const std::uint32_t matched = deepest.offset + 1;
      path.insert(path.end(), {deepest.run, end - matched, matched, deepest_version});
      end -= matched;
      if (end == depth) {
        for (std::size_t a = known, b = path.size() - kStepWords; a < b; a += kStepWords, b -= kStepWords) {
          std::swap_ranges(path.data() + a, path.data() + a + kStepWords, path.data() + b);
        }
        return;
      }
      Place parent;
      std::uint32_t shape = 0;
      const auto child = [&](const Run& run) {
        parent = {Load(run.parent), Load(run.parent_offset)};
        shape = Load(run.parent_shape);
        return parent.run != kNone && Load(run.parent_key) == keys[end - 1];
      };
      const auto as_noted = [&](const Run& run) {
        return Load(run.shape) == shape && parent.offset < Load(run.length);
      };
      const bool hinted = Steadily(deepest.run, child, nullptr) && Steadily(parent.run, as_noted, &version);
      deepest = hinted ? parent : find(end - 1);
      deepest_version = version;
    }
    // A block in between is nowhere: what lies below it is out of reach.
    path.resize(known);
    limit = end - 1;
    if (limit <= depth) return;
  }
}

bool RunForest::Holds(const Holder& holder, std::uint32_t offset) const noexcept {
  if (offset < holder.cutoff) return true;
  if (holder.bits == kNone) return false;
  const auto* words = reinterpret_cast<const std::uint64_t*>(arena_.TryAddress(holder.bits));
  if (words == nullptr || offset / 8 >= Arena::BytesBehind(holder.bits)) return false;
  return (Load(words[offset / 64]) >> (offset % 64) & 1) != 0;
}

// Every living holder on the path with its depth. An endpoint that holds all of a run so far goes on to the next.
// False: a run changed meanwhile, and what `out` says may be no moment's truth.
bool RunForest::Emit(std::span<const std::uint32_t> path, std::vector<PrefixMatch::Holder>& out) const noexcept {
  out.clear();
  const bool any_dead = any_dead_.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < path.size(); i += kStepWords) {
    const Step step{path[i], path[i + 1], path[i + 2], path[i + 3]};
    // Ahead of time: a record, and then the holders that it names.
    if (i + 2 * kRunsAhead * kStepWords < path.size()) {
      const std::byte* ahead = arena_.TryAddress(path[i + 2 * kRunsAhead * kStepWords]);
      if (ahead != nullptr) __builtin_prefetch(ahead);
    }
    if (i + kRunsAhead * kStepWords < path.size()) {
      const auto* near = reinterpret_cast<const Run*>(arena_.TryAddress(path[i + kRunsAhead * kStepWords]));
      const std::byte* named = near != nullptr ? arena_.TryAddress(Load(near->holders)) : nullptr;
      if (named != nullptr) {
        __builtin_prefetch(named);
        __builtin_prefetch(named + Arena::kUnitBytes);
      }
    }
    const auto* record = reinterpret_cast<const Run*>(arena_.TryAddress(step.run));
    if (record == nullptr) return false;
    const Run& run = *record;
    // Still as the walk saw it?
    if (Load(run.version) != step.version) return false;
    const std::uint32_t handle = Load(run.holders), count = Load(run.holder_count);
    const Holder* holders = &run.inline_holder;
    if (handle != kNone) {
      holders = reinterpret_cast<const Holder*>(arena_.TryAddress(handle));
      if (holders == nullptr || count * sizeof(Holder) > Arena::BytesBehind(handle)) return false;
    } else if (count > 1) {
      return false;
    }
    std::size_t known = 0;
    bool any = false;
    for (std::uint32_t h = 0; h < count;) {
      const std::uint32_t tag = Load(holders[h].tag), row = tag >> kOwnerBits;
      std::uint32_t tiers = 1;
      while (h + tiers < count && tiers < kTiers && Load(holders[h + tiers].tag) == tag) ++tiers;
      const Holder* const held = &holders[h];
      h += tiers;
      if (step.start > 0) {
        while (known < out.size() && out[known].endpoint.slot < row) ++known;
        if (known == out.size()) break;
        if (out[known].endpoint.slot != row || out[known].blocks != step.start) continue;
      }
      // The owner's record is its as long as it is among a run's holders: it is used again only when swept from all.
      const Owner& owner = owners_.get()[tag & (kMostOwners - 1)];
      if (any_dead && Load(owner.alive) == 0) continue;
      std::uint32_t blocks = std::min<std::uint32_t>(Load(held->cutoff), step.matched);
      double weighted = weights_[std::min(Load(held->packed) & 7u, kSpeculative)] * blocks;
      if (tiers > 1) std::tie(blocks, weighted) = Combine({held, tiers}, step.matched);
      if (blocks == 0) continue;
      any = true;
      if (step.start == 0) {
        known = out.size();
        out.push_back({.endpoint = {row, Load(owner.incarnation)}, .blocks = 0, .weighted_blocks = 0});
      }
      PrefixMatch::Holder& found = out[known];
      found.blocks += blocks;
      found.weighted_blocks += weighted;
      for (std::uint32_t t = 0; t < tiers; ++t) {
        std::int32_t& of_tier = found.tier_blocks[std::min(Load(held[t].packed) & 7u, kSpeculative)];
        if (of_tier != static_cast<std::int32_t>(step.start)) continue;
        of_tier += static_cast<std::int32_t>(std::min<std::uint32_t>(Load(held[t].cutoff), step.matched));
      }
    }
    if (Load(run.version) != step.version) return false;
    if (!any) break;
  }
  return true;
}

// What several tiers of one endpoint hold together, from the first block on, each block in its best tier.
std::pair<std::uint32_t, double> RunForest::Combine(std::span<const Holder> shared,
                                                    std::uint32_t matched) const noexcept {
  std::array<Holder, kTiers> copies;
  const std::span<Holder> tiers = std::span(copies).first(shared.size());
  for (std::size_t i = 0; i < shared.size(); ++i) tiers[i] = LoadRecord(shared[i]);
  std::uint32_t blocks = 0;
  double weighted = 0;
  for (; blocks < matched; ++blocks) {
    double best = -1;
    for (const Holder& holder : tiers) {
      if (Holds(holder, blocks)) best = std::max(best, weights_[std::min(holder.tier(), kSpeculative)]);
    }
    if (best < 0) break;
    weighted += best;
  }
  return {blocks, weighted};
}

// ---- The writer: runs ----

RunForest::RunForest(const PrefixIndexOptions& options) noexcept
    : options_(options),
      weights_{Rounded(options.tier_weights.device), Rounded(options.tier_weights.host),
               Rounded(options.tier_weights.disk), Rounded(options.tier_weights.unknown),
               Rounded(options.tier_weights.device)},
      clock_(options.clock),
      speculative_ttl_(options.speculative_ttl),
      orphan_ttl_(options.orphan_ttl),
      most_orphans_(options.max_orphan_blocks),
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

// ---- Orphans: what was stored behind an unknown parent ----

// The place's chain goes up to a prompt's first block. Only runs that once hung in the air are asked again, and no more
// of them in a row than kMostHanging: keys that are no chain may go round in a circle.
bool RunForest::Reaches(Place place) noexcept {
  if (place.run == kNone) return false;
  const std::uint32_t first = place.run;
  for (std::uint32_t steps = 0; At(place.run).orphan != 0; ++steps) {
    place = PlaceOf(At(place.run).parent_key);
    if (place.run == kNone || steps == kMostHanging) return false;
  }
  for (std::uint32_t at = first; At(at).orphan != 0; at = PlaceOf(At(at).parent_key).run) Store(At(at).orphan, 0);
  return true;
}

// Notes that these blocks, stored behind an unknown parent, may have to go. False: the endpoint has too many already,
// or there is no memory.
bool RunForest::KeepOrphans(std::uint32_t owner, std::uint32_t tier, BlockKey parent,
                            std::span<const BlockKey> keys) noexcept {
  Owner& whose = owners_.get()[owner];
  const auto count = static_cast<std::int64_t>(keys.size());
  if (whose.orphans + count > most_orphans_ || !budget_.Take(count * std::int64_t{sizeof(BlockKey)})) return false;
  TOKROUTE_TRY {
    orphans_.push_back({whose.life, owner, tier, parent, clock_.Now() + orphan_ttl_, {keys.begin(), keys.end()}});
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
void RunForest::CutOrphans(std::size_t stored) noexcept {
  Orphans& orphans = orphans_.back();
  const auto fewer = static_cast<std::int64_t>(orphans.keys.size() - stored);
  orphans.keys.resize(stored);
  owners_.get()[orphans.owner].orphans -= fewer;
  stats_.orphan_blocks -= fewer;
  budget_.Give(fewer * std::int64_t{sizeof(BlockKey)});
  if (stored == 0) Unawait(orphans.parent);
}

void RunForest::Unawait(BlockKey parent) noexcept {
  const auto it = awaited_.find(parent);
  if (it != awaited_.end() && --it->second == 0) awaited_.erase(it);
}

// Those whose endpoint is gone are none any more; else they have found their parent (`adopted`), or are let go of.
void RunForest::Settle(Orphans& orphans, bool adopted) noexcept {
  if (orphans.keys.empty()) return;
  Owner& whose = owners_.get()[orphans.owner];
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
void RunForest::Adopt(std::span<const BlockKey> keys) noexcept {
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

void RunForest::ExpireOrphans() noexcept {
  const std::chrono::nanoseconds now = clock_.Now();
  while (!orphans_.empty()) {
    Orphans& oldest = orphans_.front();
    if (!oldest.keys.empty()) {
      const Owner& whose = owners_.get()[oldest.owner];
      const bool gone = whose.alive == 0 || whose.life != oldest.life;
      if (!gone && oldest.deadline > now) return;
      Settle(oldest, false);
    }
    orphans_.pop_front();
  }
}

// ---- Speculations: what booked requests will store ----

// The owner's tiers hold these blocks for real: speculating on them is over.
void RunForest::Forget(std::uint32_t at, std::uint32_t owner, std::uint32_t from, std::uint32_t to) noexcept {
  if (stats_.speculative_blocks == 0) return;
  for (std::uint32_t i = from; i < to; ++i) {
    while (Unmark(at, owner, kSpeculative, i)) {
    }
  }
}

RunForest::Speculation* RunForest::Find(const PrefixReceipt& receipt) noexcept {
  if (receipt.serial == 0 || receipt.serial > last_serial_) return nullptr;
  const std::uint64_t back = last_serial_ - receipt.serial;  // They are numbered without a gap.
  if (back >= speculations_.size()) return nullptr;
  Speculation& found = speculations_[speculations_.size() - 1 - back];
  return found.serial == receipt.serial ? &found : nullptr;
}

PrefixReceipt RunForest::Speculate(EndpointId id, std::span<const BlockKey> keys, const FleetView* alive) noexcept {
  const std::uint32_t owner = keys.empty() || (alive != nullptr && !alive->Alive(id)) ? kNone : Admit(id, true);
  const auto bytes = static_cast<std::int64_t>(keys.size_bytes());
  if (owner == kNone || !budget_.Take(bytes)) {
    ++stats_.refused_records;
    return {};
  }
  Owner& whose = owners_.get()[owner];
  const Place last = whose.last;  // A hint for events; requests are none.
  std::size_t stored = 0;
  if (StoreKeys(owner, kSpeculative, 0, keys, stored) != KvResult::kApplied) ++stats_.truncated_records;
  whose.last = last;
  Speculation speculation;
  speculation.serial = ++last_serial_;
  speculation.life = whose.life;
  speculation.owner = owner;
  speculation.deadline = clock_.Now() + speculative_ttl_;
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
void RunForest::Unspeculate(std::uint32_t owner, BlockKey key) noexcept {
  const Place place = PlaceOf(key);
  if (place.run != kNone && Unmark(place.run, owner, kSpeculative, place.offset)) Trim(place.run);
}

void RunForest::Withdraw(Speculation& speculation) noexcept {
  const Owner& whose = owners_.get()[speculation.owner];
  if (whose.alive != 0 && whose.life == speculation.life) {
    for (std::size_t i = speculation.keys.size(); i-- > 0;) Unspeculate(speculation.owner, speculation.keys[i]);
  }
  budget_.Give(static_cast<std::int64_t>(speculation.keys.size() * sizeof(BlockKey)));
  speculation.serial = 0;
  speculation.keys = {};
  --stats_.live_receipts;
}

void RunForest::ExpireSpeculations(std::chrono::nanoseconds now) noexcept {
  while (!speculations_.empty() && (speculations_.front().serial == 0 || speculations_.front().deadline <= now)) {
    if (speculations_.front().serial != 0) Withdraw(speculations_.front());
    speculations_.pop_front();
  }
  next_deadline_.store(speculations_.empty() ? kNever : speculations_.front().deadline.count(),
                       std::memory_order_release);
  GiveBack();
}

std::int64_t RunForest::RecordableBlocks(EndpointId, std::int64_t blocks) noexcept {
  return speculative_ttl_.count() > 0 ? blocks : 0;
}

PrefixReceipt RunForest::Record(EndpointId id, std::span<const BlockKey> keys, bool, const FleetView* alive) noexcept {
  if (speculative_ttl_.count() <= 0) return {};
  const MutexLock lock(mutex_);
  ExpireSpeculations(clock_.Now());
  SweepSome(kSweepStep);
  return Speculate(id, keys, alive);
}

void RunForest::OnFirstToken(const PrefixReceipt& receipt) noexcept {
  const MutexLock lock(mutex_);
  Speculation* speculation = Find(receipt);
  if (speculation != nullptr) speculation->confirmed = true;
}

// Aborted before the first token, nothing will be stored. Otherwise the events may be on their way: the deadline
// stands.
void RunForest::OnReleased(PrefixReceipt& receipt, bool aborted) noexcept {
  const PrefixReceipt was = std::exchange(receipt, {});
  if (was.serial == 0) return;
  const MutexLock lock(mutex_);
  Speculation* speculation = Find(was);
  if (speculation != nullptr && aborted && !speculation->confirmed) Withdraw(*speculation);
  ExpireSpeculations(clock_.Now());
}

PrefixReceipt RunForest::Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept {
  const PrefixReceipt was = std::exchange(from, {});
  const MutexLock lock(mutex_);
  Speculation* speculation = Find(was);
  if (speculation == nullptr) return {};
  const std::vector<BlockKey> keys = std::move(speculation->keys);
  budget_.Give(static_cast<std::int64_t>(keys.size() * sizeof(BlockKey)));
  speculation->keys = {};
  // Booked there before the old one goes, so that blocks which only this request speculates on stay in place.
  const PrefixReceipt moved = Speculate(to, keys, alive);
  speculation = Find(was);  // The record may have moved them.
  const Owner& whose = owners_.get()[speculation->owner];
  if (!speculation->confirmed && whose.alive != 0 && whose.life == speculation->life) {
    for (std::size_t i = keys.size(); i-- > 0;) Unspeculate(speculation->owner, keys[i]);
  }
  Withdraw(*speculation);
  return moved;
}

void RunForest::CountRefusal() noexcept {
  const MutexLock lock(mutex_);
  ++stats_.refused_records;
}

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
  ExpireSpeculations(clock_.Now());
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

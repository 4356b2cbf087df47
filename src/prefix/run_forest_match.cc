// The run forest's readers: without the lock, within a visit of the gate.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "prefix/run_forest.h"

namespace tokroute::internal {
namespace {

constexpr int kTries = 8;                 // Looks at a run that keeps changing.
constexpr int kPauses = 64;               // For keys that somebody is copying.
constexpr std::uint32_t kWalkedRuns = 3;  // Walked down one by one; beyond, the prompt is searched.
constexpr std::uint32_t kRunsAhead = 4;   // Records fetched ahead on the way down.
constexpr std::uint32_t kProbes = 8;      // Of one round of that search.

}  // namespace

// Calls look(run) until the run did not change meanwhile; false if look said no, or it kept changing. What look reads,
// it must Load; what a run names may be read as well, since it is checked afterwards that it was still the run's.
template <class Look>
bool RunForest::Steadily(std::uint32_t at, Look&& look, std::uint32_t* seen, Reading& reading) const noexcept {
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
  reading.unsure = true;
  return false;
}

// A run's keys, if there are `length` of them to be read; else null. Within a look.
const BlockKey* RunForest::TryKeys(const Run& run, std::uint32_t length, Reading& reading) const noexcept {
  for (int i = 0; (Load(run.state) & Run::kUnfilled) != 0; ++i) {
    if (i >= kPauses && !reading.locked) {
      reading.unsure = true;
      return nullptr;
    }
    PauseBriefly();
  }
  const std::uint32_t handle = Load(run.keys);
  const auto* keys = reinterpret_cast<const BlockKey*>(arena_.TryAddress(handle));
  return keys != nullptr && length * sizeof(BlockKey) <= Arena::BytesBehind(handle) ? keys : nullptr;
}

// How many of these keys agree with as many of a run's, of which the first does or none: chained keys, so where one
// agrees, all before it do, and it is one compare or a binary search. Keys that are no chain give some depth.
std::uint32_t RunForest::Agreeing(const BlockKey* own, std::span<const BlockKey> mine) const noexcept {
  const auto whole = static_cast<std::uint32_t>(mine.size());
  if (whole == 0 || Load(own[whole - 1]) == mine[whole - 1]) return whole;
  std::uint32_t agrees = 0, differs = whole;
  while (differs - agrees > 1) {
    const std::uint32_t middle = agrees + (differs - agrees) / 2;
    (Load(own[middle - 1]) == mine[middle - 1] ? agrees : differs) = middle;
  }
  return agrees;
}

// The run that goes on at `depth`, behind the prompt's `last` block so far, and how much of it the prompt has. Hashes
// as far as that run goes.
bool RunForest::StepDown(PromptKeys& prompt, std::uint32_t depth, Place last, Step& step,
                         Reading& reading) const noexcept {
  const auto count = static_cast<std::uint32_t>(prompt.block_count());
  const BlockKey first = prompt.Ensure(depth + 1)[depth];
  std::uint32_t version = 0;
  const auto goes_on = [&](Place candidate) {
    // Only a run's first key goes on where another run was left.
    if (candidate.offset != 0) return false;
    return Steadily(
        candidate.run,
        [&](const Run& run) {
          const std::uint32_t length = Load(run.length), whole = std::min(length, count - depth);
          const BlockKey* keys = TryKeys(run, length, reading);
          if (length == 0 || keys == nullptr) return false;
          // Parents are sure where they outlive their children: keys that are no chain then lead nowhere twice.
          if (stride_ > 1 && (Load(run.parent) != last.run || Load(run.parent_offset) != last.offset)) return false;
          step = {candidate.run, depth, Agreeing(keys, prompt.Ensure(depth + whole).subspan(depth)), 0};
          return step.matched > 0;
        },
        &version, reading);
  };
  const Place place = table_.Find(first, goes_on, &reading.unsure);
  step.version = version;
  return place.run != kNone;
}

void RunForest::Match(PromptKeys& prompt, std::vector<PrefixMatch::Holder>& out,
                      std::vector<std::uint32_t>& path) noexcept {
  const ReaderGate::Visit visit(gate_);
  Reading reading;
  for (int tries = 0; tries < kTries; ++tries) {
    reading.unsure = false;
    if (MatchOnce(prompt, out, path, reading)) return;
  }
  const MutexLock lock(mutex_);  // It keeps changing under us.
  reading.locked = true;
  (void)MatchOnce(prompt, out, path, reading);
}

// False: something changed meanwhile, and what `out` says may be no moment's truth, or less than that.
bool RunForest::MatchOnce(PromptKeys& prompt, std::vector<PrefixMatch::Holder>& out, std::vector<std::uint32_t>& path,
                          Reading& reading) const noexcept {
  path.clear();
  const auto count = static_cast<std::uint32_t>(std::min<std::int64_t>(prompt.block_count(), 0x7FFFFFFF));
  std::uint32_t depth = 0;
  for (std::uint32_t i = 0; depth < count; ++i) {
    if (i == kWalkedRuns) {
      depth = SearchDeep(prompt.Ensure(count), depth, path, reading);
      if (stride_ == 1) break;  // The block behind is nowhere.
      if (depth >= count) break;
    }
    Place last;
    if (!path.empty()) last = {path[path.size() - kStepWords], path[path.size() - kStepWords + 2] - 1};
    Step step;
    if (!StepDown(prompt, depth, last, step, reading)) break;
    path.insert(path.end(), {step.run, step.start, step.matched, step.version});
    depth += step.matched;
  }
  return Emit(path, out) && !reading.unsure;
}

Place RunForest::FindByReader(BlockKey key, std::uint32_t& version, Reading& reading) const noexcept {
  const auto is_it = [&](Place candidate) {
    return Steadily(
        candidate.run,
        [&](const Run& run) {
          const BlockKey* own =
              candidate.offset < Load(run.length) ? TryKeys(run, candidate.offset + 1, reading) : nullptr;
          return own != nullptr && Load(own[candidate.offset]) == key;
        },
        &version, reading);
  };
  return table_.Find(key, is_it, &reading.unsure);
}

// Finds the prompt's deepest block in the table that is anywhere, by probing, and walks up from there to `depth`;
// returns the depth that was reached. Exact with holes: no endpoint can hold more than up to a block that nobody has,
// and what it holds above is looked at run by run.
std::uint32_t RunForest::SearchDeep(std::span<const BlockKey> keys, std::uint32_t depth,
                                    std::vector<std::uint32_t>& path, Reading& reading) const noexcept {
  const std::size_t known = path.size();
  const auto count = static_cast<std::uint32_t>(keys.size());
  // Every stride-th block, by number; those in [first, last) are looked for.
  const std::uint32_t first = (depth + stride_ - 1) / stride_;
  for (std::uint32_t last = (count + stride_ - 1) / stride_;;) {
    // Those before `low` are there, `high` is not (or is the end).
    std::uint32_t low = first, high = last, version = 0, deepest_version = 0;
    Place deepest;
    while (low < high) {
      std::uint32_t probes[kProbes];
      const std::uint32_t wanted = std::min(kProbes, high - low);
      for (std::uint32_t i = 0; i < wanted; ++i) {
        probes[i] = low + static_cast<std::uint32_t>((std::uint64_t{high - low} * (i + 1) - 1) / wanted);
        table_.Prefetch(keys[probes[i] * stride_]);
      }
      for (std::uint32_t i = 0; i < wanted; ++i) {
        const Place place = FindByReader(keys[probes[i] * stride_], version, reading);
        if (place.run == kNone) {
          high = probes[i];
          break;
        }
        low = probes[i] + 1;
        deepest = place;
        deepest_version = version;
      }
    }
    if (deepest.run == kNone) return depth;
    std::uint32_t end = (low - 1) * stride_ + 1;
    const std::uint32_t bottom = end;
    if (WalkUp(keys, depth, end, deepest, deepest_version, path, reading)) {
      std::uint32_t more = 0;
      if (stride_ > 1) {  // What follows it in its run is not in the table.
        (void)Steadily(
            deepest.run,
            [&](const Run& run) {
              const std::uint32_t length = Load(run.length);
              const BlockKey* own = deepest.offset < length ? TryKeys(run, length, reading) : nullptr;
              if (own == nullptr) return false;
              const std::uint32_t whole = std::min(length - deepest.offset - 1, count - bottom);
              more = Agreeing(own + deepest.offset + 1, keys.subspan(bottom, whole));
              return true;
            },
            nullptr, reading);
      }
      path[known + 2] += more;
      // Steps came out deepest first.
      for (std::size_t a = known, b = path.size() - kStepWords; a < b; a += kStepWords, b -= kStepWords) {
        std::swap_ranges(path.data() + a, path.data() + a + kStepWords, path.data() + b);
      }
      return bottom + more;
    }
    path.resize(known);
    if (stride_ > 1) {  // Changed under us, or keys that are no chain.
      reading.unsure = !reading.locked;
      return depth;
    }
    // A block in between is nowhere: what lies below it is out of reach.
    last = end - 1;
    if (last <= depth) return depth;
  }
}

// Up from `at`, the prompt's block before `end`, to `depth`: by the runs' hints of their parents, by the table where a
// hint is out of date. False: there is no block before `end`, which is as far as it came.
bool RunForest::WalkUp(std::span<const BlockKey> keys, std::uint32_t depth, std::uint32_t& end, Place at,
                       std::uint32_t version, std::vector<std::uint32_t>& path, Reading& reading) const noexcept {
  while (at.run != kNone && at.offset + 1 <= end - depth) {
    const std::uint32_t matched = at.offset + 1;
    path.insert(path.end(), {at.run, end - matched, matched, version});
    end -= matched;
    if (end == depth) return true;
    Place parent;
    std::uint32_t shape = 0;
    const auto child = [&](const Run& run) {
      parent = {Load(run.parent), Load(run.parent_offset)};
      shape = Load(run.noted);
      return parent.run != kNone && Load(run.parent_key) == keys[end - 1];
    };
    // Where the table does not know of all, parents outlive their children, so the hint is right if the child stays.
    const auto as_noted = [&](const Run& run) {
      return (stride_ > 1 || Load(run.shape) == shape) && parent.offset < Load(run.length);
    };
    const bool hinted = Steadily(at.run, child, nullptr, reading) && Steadily(parent.run, as_noted, &version, reading);
    at = hinted ? parent : FindByReader(keys[end - 1], version, reading);
  }
  return false;
}

bool RunForest::Holds(const Holder& holder, std::uint32_t bits, std::uint32_t offset) const noexcept {
  if (offset < Load(holder.cutoff)) return true;
  if (bits == kNone) return false;
  const auto* words = reinterpret_cast<const std::uint64_t*>(arena_.TryAddress(bits));
  if (words == nullptr || offset / 8 >= Arena::BytesBehind(bits)) return false;
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
      const Owner& owner = OwnerAt(tag & (kMostOwners - 1));
      if (any_dead && Load(owner.alive) == 0) continue;
      std::uint32_t blocks = std::min<std::uint32_t>(Load(held->cutoff), step.matched);
      double weighted = weights_[std::min(Load(held->packed) & 7u, kSpeculative)] * blocks;
      if (tiers > 1) {
        const Extra* extras = &run.inline_extra;
        if (handle != kNone) {
          const std::size_t behind = RoomOf(Load(run.holder_units)) * sizeof(Holder);
          if (behind + count * sizeof(Extra) > Arena::BytesBehind(handle)) return false;
          extras = reinterpret_cast<const Extra*>(reinterpret_cast<const std::byte*>(holders) + behind);
        }
        std::tie(blocks, weighted) = Combine({held, tiers}, extras + (held - holders), step.matched);
      }
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
std::pair<std::uint32_t, double> RunForest::Combine(std::span<const Holder> shared, const Extra* extras,
                                                    std::uint32_t matched) const noexcept {
  std::array<Holder, kTiers> tiers;
  std::array<std::uint32_t, kTiers> bits;
  for (std::size_t i = 0; i < shared.size(); ++i) {
    tiers[i] = LoadRecord(shared[i]);
    bits[i] = Load(extras[i].bits);
  }
  std::uint32_t blocks = 0;
  double weighted = 0;
  for (; blocks < matched; ++blocks) {
    double best = -1;
    for (std::size_t i = 0; i < shared.size(); ++i) {
      if (Holds(tiers[i], bits[i], blocks)) best = std::max(best, weights_[std::min(tiers[i].tier(), kSpeculative)]);
    }
    if (best < 0) break;
    weighted += best;
  }
  return {blocks, weighted};
}

}  // namespace tokroute::internal

// Events that wait for their parent (engine_keys.h).
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

#include "internal/no_memory.h"
#include "prefix/block_hash.h"
#include "prefix/engine_keys_state.h"

namespace tokroute {
inline namespace v0 {
namespace {

// What a kept event's lists and entries in two hash tables take, more or less.
constexpr std::int64_t kKeptBytes = 256, kKeptBlockBytes = 72;

}  // namespace

KvResult EngineKeys::State::Keep(const KvSource& source, std::uint32_t domain, const EngineBlocks& blocks,
                                 std::uint32_t parts, std::span<const std::uint64_t> contents) noexcept {
  if (const KvResult source_is = engine_.Removed(source, {}); source_is != KvResult::kApplied) return source_is;
  ++stats_.unknown_parents;
  Note& note = notes_[source.endpoint.slot];
  if (note.incarnation != source.endpoint.incarnation) {
    DropKeptOf(source.endpoint.slot);
    note.incarnation = source.endpoint.incarnation;
  }
  const auto count = static_cast<std::int64_t>(contents.size());
  const std::int64_t bytes = kKeptBytes + std::ssize(blocks.engine_keys) * kKeptBlockBytes + count * 8;
  const bool room = note.kept + count <= index_options_.max_orphan_blocks;
  if (!room || !budget_.Take(bytes)) {
    if (room) ++stats_.cap_hits;
    stats_.dropped_blocks += count;
    return Refuse(KvResult::kUnknownParent, source.endpoint);
  }
  const std::size_t before = kept_.size();
  TOKROUTE_TRY {
    Kept& kept = kept_.emplace_back();
    kept.source = source;
    kept.domain = domain;
    kept.parent = *blocks.parent;
    kept.parts = parts;
    kept.keyed = !blocks.keys.empty();
    kept.deadline = index_options_.clock.Now() + index_options_.orphan_ttl;
    kept.contents.assign(contents.begin(), contents.end());
    kept.gone.assign(blocks.engine_keys.size(), false);
    kept.engine_keys.assign(blocks.engine_keys.begin(), blocks.engine_keys.end());
    kept.left = kept.engine_keys.size();
    const auto event = std::prev(kept_.end());
    waiting_.emplace(WaitsFor(domain, kept.parent), event);
    for (std::uint32_t i = 0; i < kept.engine_keys.size(); ++i) {
      kept_blocks_.emplace(KeptAs(source, domain, kept.engine_keys[i]), KeptBlock{event, i});
    }
  }
  TOKROUTE_NO_MEMORY {
    if (kept_.size() > before) {
      Unlist(std::prev(kept_.end()));
      kept_.pop_back();
    }
    budget_.Give(bytes);
    ++stats_.cap_hits;
    stats_.dropped_blocks += count;
    return Refuse(KvResult::kUnknownParent, source.endpoint);
  }
  note.kept += count;
  stats_.kept_blocks += count;
  return KvResult::kUnknownParent;
}

// Takes an event out of the two hash tables.
void EngineKeys::State::Unlist(KeptEvents::iterator event) noexcept {
  const auto erase = [](auto& table, std::uint64_t hash, auto&& is_it) {
    for (auto [it, end] = table.equal_range(hash); it != end; ++it) {
      if (!is_it(it->second)) continue;
      table.erase(it);
      return;
    }
  };
  erase(waiting_, WaitsFor(event->domain, event->parent), [&](const auto& other) { return other == event; });
  for (std::uint32_t i = 0; i < event->engine_keys.size(); ++i) {
    if (event->gone[i]) continue;
    erase(kept_blocks_, KeptAs(event->source, event->domain, event->engine_keys[i]),
          [&](const KeptBlock& block) { return block.event == event && block.at == i; });
  }
  if (waiting_.empty()) {  // Their buckets are not worth keeping.
    waiting_ = {};
    kept_blocks_ = {};
  }
}

// The event, no longer listed, is over.
void EngineKeys::State::DropKept(KeptEvents::iterator event) noexcept {
  const auto left = static_cast<std::int64_t>(event->left * event->parts);
  stats_.kept_blocks -= left;
  notes_[event->source.endpoint.slot].kept -= left;
  budget_.Give(kKeptBytes + std::ssize(event->engine_keys) * kKeptBlockBytes + std::ssize(event->contents) * 8);
}

// One copy of that block is not kept any more. False: there was none.
bool EngineKeys::State::TakeKept(const KvSource& source, std::uint32_t domain, EngineKey key) noexcept {
  for (auto [it, end] = kept_blocks_.equal_range(KeptAs(source, domain, key)); it != end; ++it) {
    const auto [event, at] = it->second;
    if (event->source.endpoint != source.endpoint || event->source.tier != source.tier || event->domain != domain ||
        event->engine_keys[at] != key) {
      continue;
    }
    kept_blocks_.erase(it);
    event->gone[at] = true;
    --event->left;
    stats_.kept_blocks -= event->parts;
    stats_.removed_kept_blocks += event->parts;
    notes_[source.endpoint.slot].kept -= event->parts;
    if (event->left == 0) {
      Unlist(event);
      DropKept(event);
      kept_.erase(event);
    }
    return true;
  }
  return false;
}

// Moves the events that wait for one of these keys, if it has a name now, to the end of `awake`. They are listed no
// more.
void EngineKeys::State::Awaken(std::uint32_t domain, std::span<const EngineKey> engine_keys,
                               KeptEvents& awake) noexcept {
  const Table* const table = TableOf(domain);
  if (table == nullptr) return;
  for (const EngineKey key : engine_keys) {
    if (waiting_.empty()) return;
    if (table->map.Find(key) == 0) continue;
    for (bool again = true; again;) {
      again = false;
      for (auto [it, end] = waiting_.equal_range(WaitsFor(domain, key)); it != end; ++it) {
        const KeptEvents::iterator event = it->second;
        if (event->domain != domain || event->parent != key) continue;
        Unlist(event);
        awake.splice(awake.end(), kept_, event);
        again = true;
        break;
      }
    }
  }
}

// These keys may have got names: what waited for them is applied, and what waits for that.
void EngineKeys::State::Adopt(std::uint32_t domain, std::span<const EngineKey> engine_keys) noexcept {
  KeptEvents awake;
  for (Awaken(domain, engine_keys, awake); !awake.empty(); awake.pop_front()) {
    Kept& event = awake.front();
    DropKept(awake.begin());
    const auto blocks = static_cast<std::int64_t>(event.left * event.parts);
    const Table* const table = TableOf(domain);
    const BlockKey parent = table != nullptr ? table->map.Find(event.parent) : 0;
    if (parent == 0) {  // For want of room for others, its name has gone with its block.
      stats_.dropped_blocks += blocks;
      engine_.MarkResync(event.source.endpoint);
      continue;
    }
    stats_.adopted_blocks += blocks;
    Apply(event, parent);
    Awaken(domain, event.engine_keys, awake);
  }
}

// What was removed in the middle cuts the event in two: the second part hangs behind a block that nobody may hold.
void EngineKeys::State::Apply(Kept& event, BlockKey parent) noexcept {
  if (!event.keyed) {
    std::uint64_t chain = parent;
    for (std::uint64_t& word : event.contents) word = chain = internal::LinkBlock(key_options_.scheme, word, chain);
  }
  const std::span<const BlockKey> keys = event.contents;
  for (std::size_t i = 0, next = 0; i < event.engine_keys.size(); i = next) {
    next = i + 1;
    if (event.gone[i]) continue;
    while (next < event.engine_keys.size() && !event.gone[next]) ++next;
    const BlockKey before = i > 0 ? keys[i * event.parts - 1] : parent;
    const KvResult result =
        Place(event.source, event.domain, before, std::span<const EngineKey>(event.engine_keys).subspan(i, next - i),
              event.parts, keys.subspan(i * event.parts, (next - i) * event.parts));
    if (result != KvResult::kApplied && result != KvResult::kUnknownParent) return;
  }
}

void EngineKeys::State::DropKeptOf(std::uint32_t slot) noexcept {
  if (notes_[slot].kept == 0) return;
  for (auto event = kept_.begin(); event != kept_.end();) {
    const auto at = event++;
    if (at->source.endpoint.slot != slot) continue;
    Unlist(at);
    DropKept(at);
    kept_.erase(at);
  }
}

void EngineKeys::State::ExpireKept() noexcept {
  if (kept_.empty()) return;
  const std::chrono::nanoseconds now = index_options_.clock.Now();
  while (!kept_.empty() && kept_.front().deadline <= now) {
    const auto event = kept_.begin();
    stats_.dropped_blocks += static_cast<std::int64_t>(event->left * event->parts);
    engine_.MarkResync(event->source.endpoint);
    Unlist(event);
    DropKept(event);
    kept_.erase(event);
  }
}

}  // namespace v0
}  // namespace tokroute

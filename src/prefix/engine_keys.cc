#include "tokroute/prefix/engine_keys.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "internal/no_memory.h"
#include "prefix/block_hash.h"
#include "prefix/engine_keys_state.h"

namespace tokroute {
inline namespace v0 {
namespace {

using internal::MutexLock;
using internal::SeenBlock;

constexpr std::int64_t kLeastBytes = std::int64_t{2} << 20, kMostBytes = std::int64_t{128} << 30;
constexpr std::size_t kMostEventBlocks = 1u << 16, kMostParts = 256, kLongestName = 256;
constexpr std::size_t kChunk = 64;  // Of what is asked of the index at a time.
constexpr std::size_t kAhead = 12;  // Names fetched ahead.

// How many slots the hand looks at: quarters of a slot for each block of an event.
constexpr std::uint32_t kMostPace = 64, kHandStep = 16, kMostHandStep = 256;
constexpr std::int64_t kFullStep = 1024;  // Slots, when there is no room.
// Where at least one in so many names is found to be gone, the hand goes faster.
constexpr std::int64_t kMany = 8;

// 64-bit words for the length of a call; most events are short.
class Words {
 public:
  // False: no memory.
  bool Resize(std::size_t count) noexcept {
    if (count > local_.size()) {
      heap_.reset(new (std::nothrow) std::uint64_t[count]);
      if (heap_ == nullptr) return false;
    }
    words_ = {heap_ != nullptr ? heap_.get() : local_.data(), count};
    return true;
  }
  std::span<std::uint64_t> words() const noexcept { return words_; }

 private:
  std::array<std::uint64_t, 128> local_;
  std::unique_ptr<std::uint64_t[]> heap_;
  std::span<std::uint64_t> words_;
};

}  // namespace

// ---- Domains ----

std::unique_ptr<EngineKeys::State::Table> EngineKeys::State::NewTable(std::string_view name) noexcept {
  const auto bytes = static_cast<std::int64_t>(sizeof(Table) + name.size());
  if (!budget_.Take(bytes)) return nullptr;
  TOKROUTE_TRY {
    auto table = std::make_unique<Table>(budget_, arena_, key_options_.seed);
    table->name = name;
    table->at = static_cast<std::uint32_t>(tables_.size());
    tables_.push_back(table.get());  // There is room.
    return table;
  }
  TOKROUTE_NO_MEMORY { budget_.Give(bytes); }
  return nullptr;
}

absl::StatusOr<HashDomain> EngineKeys::State::Domain(std::string_view name) {
  if (name.empty() || name.size() > kLongestName) {
    return absl::InvalidArgumentError(
        absl::StrCat("EngineKeys::Domain: name: want 1 .. ", kLongestName, " bytes, got ", name.size()));
  }
  const MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < named_.size(); ++i) {
    if (named_[i]->name == name) return HashDomain{i + 1};
  }
  if (named_.size() == kMaxHashDomains) {
    return absl::ResourceExhaustedError(
        absl::StrCat("EngineKeys::Domain: want at most ", kMaxHashDomains, " names, got one more"));
  }
  std::unique_ptr<Table> table = NewTable(name);
  if (table == nullptr) return absl::ResourceExhaustedError("EngineKeys::Domain: no memory for another domain");
  named_.push_back(std::move(table));
  return HashDomain{static_cast<std::uint32_t>(named_.size())};
}

// None: there is no such domain, or no such endpoint.
std::optional<std::uint32_t> EngineKeys::State::DomainOf(const KvSource& source, HashDomain domain) noexcept {
  if (domain.number > named_.size()) return std::nullopt;
  return domain.number != 0 ? domain.number : kOwn | (source.endpoint.slot & (kMaxEndpoints - 1));
}

// Null: an endpoint's own that has no names.
EngineKeys::State::Table* EngineKeys::State::TableOf(std::uint32_t domain) noexcept {
  return (domain & kOwn) != 0 ? own_[domain & ~kOwn].get() : named_[domain - 1].get();
}

// Null: no memory.
EngineKeys::State::Table* EngineKeys::State::MakeOwn(EndpointId endpoint) noexcept {
  std::unique_ptr<Table>& own = own_[endpoint.slot];
  if (own == nullptr) {
    own = NewTable({});
    if (own != nullptr) own->owner = endpoint;
  }
  return own.get();
}

void EngineKeys::State::DropOwn(std::uint32_t slot) noexcept {
  if (own_[slot] == nullptr) return;
  const std::unique_ptr<Table> table = std::move(own_[slot]);
  Empty(*table);
  tables_[table->at] = tables_.back();
  tables_[table->at]->at = table->at;
  tables_.pop_back();
  budget_.Give(static_cast<std::int64_t>(sizeof(Table)));
}

void EngineKeys::State::Empty(Table& table) noexcept {
  stats_.names -= table.map.size();
  table.map.Reset();
  table.cursor = {};
  table.has_parts = false;
}

// What has no names needs no memory, and names of an empty index are of nothing.
void EngineKeys::State::GiveBack() noexcept {
  if (stats_.names > 0 && engine_.Stats().distinct_blocks == 0) {
    stats_.swept_names += stats_.names;
    for (Table* table : tables_) Empty(*table);
  }
  if (stats_.names == 0) arena_.ReleaseFree(1);  // One stays, so that a lone event does not go to the system each time.
}

// ---- Names ----

KvResult EngineKeys::State::Refuse(KvResult result, EndpointId endpoint) noexcept {
  ++stats_.refused_events;
  engine_.MarkResync(endpoint);
  return result;
}

// F(name, our key) for each of the index's blocks that make the engine's, in order. False: nothing is known of it.
template <class F>
bool EngineKeys::State::ForParts(const Table& table, EngineKey engine_key, F&& f) const noexcept {
  const BlockKey last = table.map.Find(engine_key);
  if (last == 0) return false;
  for (std::uint32_t part = 0; table.has_parts && part + 1 < kMostParts; ++part) {
    const EngineKey name = Mix(engine_key, part + 1);
    const BlockKey key = table.map.Find(name);
    if (key == 0) break;
    f(name, key);
  }
  f(engine_key, last);
  return true;
}

// Erases the names of blocks that nobody (of an endpoint's own domain: that it not) holds any more. Names that are not
// there, or stand for another key, are left alone. Returns how many went.
std::int64_t EngineKeys::State::DropGone(Table& table, std::span<const EngineKey> names,
                                         std::span<const BlockKey> keys) noexcept {
  std::array<SeenBlock, kChunk> seen;
  std::int64_t gone = 0;
  while (!names.empty()) {
    const std::size_t count = std::min(names.size(), kChunk);
    engine_.LookAt(keys.first(count), table.owner, seen);
    for (std::size_t i = 0; i < count; ++i) {
      if (seen[i].here || table.map.Find(names[i]) != keys[i]) continue;
      table.map.Erase(names[i]);
      --stats_.names;
      ++gone;
    }
    names = names.subspan(count);
    keys = keys.subspan(count);
  }
  if (table.map.size() == 0) Empty(table);
  return gone;
}

// `event`: our keys that are about to be stored with it. `fresh`: it had no name before.
KvResult EngineKeys::State::Name(Table& table, EngineKey name, BlockKey key, std::span<const BlockKey> event,
                                 bool& fresh) noexcept {
  fresh = false;
  const BlockKey known = table.map.Find(name);
  if (known == key) return KvResult::kApplied;
  if (known != 0) {
    std::array<SeenBlock, 1> seen;
    engine_.LookAt({&known, 1}, table.owner, seen);
    if (seen[0].here || std::find(event.begin(), event.end(), known) != event.end()) {
      ++stats_.conflicts;
      return KvResult::kConflict;
    }
    table.map.Replace(name, key);  // Nobody holds what it stood for.
    return KvResult::kApplied;
  }
  if (!table.map.Insert(name, key)) return KvResult::kNoRoom;
  ++stats_.names;
  fresh = true;
  return KvResult::kApplied;
}

// `source` has stored these blocks, `parts` keys of ours for each. Without room for their names, names of blocks that
// are gone make some.
KvResult EngineKeys::State::Place(const KvSource& source, std::uint32_t domain, std::optional<BlockKey> parent,
                                  std::span<const EngineKey> engine_keys, std::uint32_t parts,
                                  std::span<const BlockKey> keys) noexcept {
  for (;;) {
    std::size_t count = 0;
    bool refused = false;
    const KvResult result = PlaceSome(source, domain, parent, engine_keys, parts, keys, count, refused);
    if (!refused) return result;
    if (result == KvResult::kNoRoom && TurnHand(kFullStep) > 0) {
      if (count > 0) parent = keys[count * parts - 1];
      engine_keys = engine_keys.subspan(count);
      keys = keys.subspan(count * parts);
      continue;
    }
    if (result == KvResult::kNoRoom) ++stats_.cap_hits;
    return Refuse(result, source.endpoint);
  }
}

// The first `count` of them. `refused`: the rest could not be given names. Names are given before the index is told: a
// block in it that has no name could never be removed.
KvResult EngineKeys::State::PlaceSome(const KvSource& source, std::uint32_t domain, std::optional<BlockKey> parent,
                                      std::span<const EngineKey> engine_keys, std::uint32_t parts,
                                      std::span<const BlockKey> keys, std::size_t& count, bool& refused) noexcept {
  count = 0;
  Table* const table = (domain & kOwn) != 0 ? MakeOwn(source.endpoint) : TableOf(domain);
  refused = table == nullptr;
  if (refused) return KvResult::kNoRoom;
  if (parts > 1) table->has_parts = true;
  KvResult named = KvResult::kApplied;
  Words given;  // A bit for each fresh name.
  if (!given.Resize(keys.size() / 64 + 1)) {
    refused = true;
    return KvResult::kNoRoom;
  }
  std::fill(given.words().begin(), given.words().end(), 0);
  for (std::size_t i = 0; i < std::min(engine_keys.size(), kAhead); ++i) table->map.Prefetch(engine_keys[i]);
  for (; count < engine_keys.size() && named == KvResult::kApplied; ++count) {
    if (count + kAhead < engine_keys.size()) table->map.Prefetch(engine_keys[count + kAhead]);
    for (std::uint32_t part = 0; part < parts && named == KvResult::kApplied; ++part) {
      const std::size_t at = count * parts + part;
      bool fresh = false;
      named = Name(*table, NameOfPart(engine_keys[count], part, parts), keys[at], keys.first(at), fresh);
      if (fresh) given.words()[at / 64] |= std::uint64_t{1} << (at % 64);
    }
  }
  if (named != KvResult::kApplied) --count;  // The last one was not, or not wholly.
  const KvResult stored = count > 0 ? engine_.Stored(source, parent, keys.first(count * parts))
                                    : engine_.Removed(source, {});  // Says whether there is such a source.
  if (stored != KvResult::kApplied || named != KvResult::kApplied) {
    // What the index did not take gets no name: of a source that is none, nothing; else what nobody holds.
    const bool nothing = stored != KvResult::kApplied && stored != KvResult::kUnknownParent &&
                         stored != KvResult::kConflict && stored != KvResult::kNoRoom;
    for (std::size_t at = 0; at < keys.size(); ++at) {
      if ((given.words()[at / 64] >> (at % 64) & 1) == 0) continue;
      const EngineKey name = NameOfPart(engine_keys[at / parts], static_cast<std::uint32_t>(at % parts), parts);
      if (!nothing) {
        (void)DropGone(*table, {&name, 1}, keys.subspan(at, 1));
      } else {
        table->map.Erase(name);
        --stats_.names;
      }
    }
    if (table->map.size() == 0) Empty(*table);
  }
  refused = named != KvResult::kApplied && (stored == KvResult::kApplied || stored == KvResult::kUnknownParent);
  return refused ? named : stored;
}

// Blocks that are known lie in this source too. What follows another goes in one event with it.
KvResult EngineKeys::State::PlaceCopies(const KvSource& source, std::uint32_t domain,
                                        std::span<const EngineKey> engine_keys) noexcept {
  std::array<BlockKey, kChunk> keys;
  std::array<SeenBlock, kChunk> seen;
  std::size_t found = 0;
  KvResult result = engine_.Removed(source, {});  // Says whether there is such a source.
  const auto flush = [&]() TOKROUTE_REQUIRES(mutex_) {
    engine_.LookAt(std::span(keys).first(found), EndpointId{}, seen);
    for (std::size_t i = 0, next = 0; i < found && result == KvResult::kApplied; i = next) {
      next = i + 1;
      if (!seen[i].here) {
        ++stats_.unknown_copies;
        continue;
      }
      while (next < found && seen[next].here && seen[next].parent == keys[next - 1]) ++next;
      const KvResult stored = engine_.Stored(source, seen[i].parent, std::span(keys).subspan(i, next - i));
      if (stored != KvResult::kUnknownParent) result = stored;
    }
    found = 0;
  };
  const Table* const table = TableOf(domain);
  for (std::size_t i = 0; i < engine_keys.size() && result == KvResult::kApplied; ++i) {
    const auto add = [&](EngineKey, BlockKey key) TOKROUTE_REQUIRES(mutex_) {
      keys[found++] = key;
      if (found == kChunk) flush();
    };
    if (table == nullptr || !ForParts(*table, engine_keys[i], add)) ++stats_.unknown_copies;
  }
  if (result == KvResult::kApplied) flush();
  return result;
}

KvResult EngineKeys::State::Check(const EngineBlocks& blocks, std::uint32_t& parts) const noexcept {
  parts = 1;
  const std::size_t count = blocks.engine_keys.size();
  if (count > kMostEventBlocks) return KvResult::kMalformed;
  if (blocks.tokens.empty() && blocks.keys.empty()) return KvResult::kApplied;
  const std::int32_t block_size = blocks.block_size != 0 ? blocks.block_size : key_options_.block_size;
  if (block_size < 0 || count == 0 || (!blocks.tokens.empty() && !blocks.keys.empty())) return KvResult::kMalformed;
  if (block_size < key_options_.block_size || block_size % key_options_.block_size != 0 ||
      block_size / key_options_.block_size > static_cast<std::int32_t>(kMostParts)) {
    return KvResult::kBlockSize;
  }
  parts = static_cast<std::uint32_t>(block_size / key_options_.block_size);
  if (count * parts > kMostEventBlocks) return KvResult::kMalformed;
  const std::size_t tokens = count * static_cast<std::size_t>(block_size);
  if (blocks.keys.empty() ? blocks.tokens.size() != tokens : blocks.keys.size() != count * parts) {
    return KvResult::kMalformed;
  }
  if (std::find(blocks.keys.begin(), blocks.keys.end(), BlockKey{0}) != blocks.keys.end()) return KvResult::kMalformed;
  if (blocks.parent.has_value() &&
      std::find(blocks.engine_keys.begin(), blocks.engine_keys.end(), *blocks.parent) != blocks.engine_keys.end()) {
    return KvResult::kMalformed;
  }
  return KvResult::kApplied;
}

KvResult EngineKeys::State::Stored(const KvSource& source, HashDomain domain, const EngineBlocks& blocks) noexcept {
  std::uint32_t parts = 1;
  KvResult result = Check(blocks, parts);
  // What does not depend on what is known: before the lock.
  Words contents;
  std::uint64_t root = 0;
  const std::size_t count = blocks.engine_keys.size() * parts;
  const bool known = blocks.tokens.empty() && blocks.keys.empty(), keyed = !blocks.keys.empty();
  if (result == KvResult::kApplied && !known) {
    std::vector<MediaSpan> media;
    if (!contents.Resize(count)) result = KvResult::kNoRoom;
    TOKROUTE_TRY { media.assign(blocks.media.begin(), blocks.media.end()); }
    TOKROUTE_NO_MEMORY { result = KvResult::kNoRoom; }
    if (result == KvResult::kApplied && keyed) {
      std::copy(blocks.keys.begin(), blocks.keys.end(), contents.words().begin());
    } else if (result == KvResult::kApplied) {
      internal::SortMedia(media);
      internal::HashContents(key_options_, blocks.tokens, media, contents.words());
      root =
          internal::RootOf(key_options_, {.model = blocks.model, .lora = blocks.lora, .cache_salt = blocks.cache_salt});
    }
  }

  const MutexLock lock(mutex_);
  Tend(count);
  const std::optional<std::uint32_t> at = DomainOf(source, domain);
  if (!at.has_value()) result = KvResult::kMalformed;
  if (result == KvResult::kNoRoom) ++stats_.cap_hits;
  if (result != KvResult::kApplied) return Refuse(result, source.endpoint);
  if (source.endpoint.slot >= kMaxEndpoints) return engine_.Removed(source, {});
  if (const Table* const own = own_[source.endpoint.slot].get();
      domain.number == 0 && own != nullptr && own->owner != source.endpoint) {
    // One of the two is no more. If it is the owner, so is what its names stood for.
    if (const KvResult source_is = engine_.Removed(source, {}); source_is != KvResult::kApplied) return source_is;
    DropOwn(source.endpoint.slot);
  }
  if (known) return PlaceCopies(source, *at, blocks.engine_keys);

  std::optional<BlockKey> parent;
  if (blocks.parent.has_value()) {
    const Table* const table = TableOf(*at);
    const BlockKey key = table != nullptr ? table->map.Find(*blocks.parent) : 0;
    if (key == 0) return Keep(source, *at, blocks, parts, contents.words());
    parent = key;
  }
  if (!keyed) {
    std::uint64_t chain = parent.value_or(root);
    for (std::uint64_t& word : contents.words()) word = chain = internal::LinkBlock(key_options_.scheme, word, chain);
  }
  result = Place(source, *at, parent, blocks.engine_keys, parts, contents.words());
  if (!waiting_.empty()) Adopt(*at, blocks.engine_keys);
  return result;
}

KvResult EngineKeys::State::Removed(const KvSource& source, HashDomain domain,
                                    std::span<const EngineKey> engine_keys) noexcept {
  const MutexLock lock(mutex_);
  Tend(engine_keys.size());
  const std::optional<std::uint32_t> at = DomainOf(source, domain);
  if (!at.has_value()) return Refuse(KvResult::kMalformed, source.endpoint);
  if (source.endpoint.slot >= kMaxEndpoints) return engine_.Removed(source, {});
  Table* table = TableOf(*at);
  if (table != nullptr && table->owner.incarnation != 0 && table->owner != source.endpoint) table = nullptr;
  // Room for the parts of one block more. They are all looked up before any of them goes.
  std::array<EngineKey, kChunk + kMostParts> names;
  std::array<BlockKey, kChunk + kMostParts> keys;
  std::size_t found = 0;
  const auto flush = [&]() TOKROUTE_REQUIRES(mutex_) -> KvResult {
    const KvResult result = engine_.Removed(source, std::span(keys).first(found));
    if (found > 0) (void)DropGone(*table, std::span(names).first(found), std::span(keys).first(found));
    found = 0;
    return result;
  };
  const Note& note = notes_[source.endpoint.slot];
  for (std::size_t i = 0; table != nullptr && i < std::min(engine_keys.size(), kAhead); ++i) {
    table->map.Prefetch(engine_keys[i]);
  }
  for (std::size_t i = 0; i < engine_keys.size(); ++i) {
    if (table != nullptr && i + kAhead < engine_keys.size()) table->map.Prefetch(engine_keys[i + kAhead]);
    if (note.kept > 0 && TakeKept(source, *at, engine_keys[i])) continue;
    const auto add = [&](EngineKey name, BlockKey key) {
      names[found] = name;
      keys[found++] = key;
    };
    if (table == nullptr || !ForParts(*table, engine_keys[i], add)) ++stats_.unknown_removes;
    if (found < kChunk) continue;
    if (const KvResult result = flush(); result != KvResult::kApplied) return result;
  }
  const KvResult result = flush();  // Also of nothing: it says whether there is such a source.
  if (stats_.names == 0) GiveBack();
  return result;
}

// ---- Names of blocks that are gone ----

// Looks at that many slots, at most one round; returns how many names went.
std::int64_t EngineKeys::State::TurnHand(std::int64_t slots) noexcept {
  std::array<EngineKey, kChunk> names;
  std::array<BlockKey, kChunk> keys;
  std::int64_t gone = 0, looked = 0;
  for (std::size_t left = tables_.size(); slots > 0 && left > 0;) {
    if (hand_ >= tables_.size()) hand_ = 0;
    Table& table = *tables_[hand_];
    if (table.owner.incarnation != 0 && engine_.HeldBlocks(table.owner) == 0) {
      gone += table.map.size();
      looked += table.map.size();
      DropOwn(table.owner.slot);  // Another table stands here now.
      --left;
      continue;
    }
    std::size_t found = 0;
    const auto step = static_cast<std::uint32_t>(std::min<std::int64_t>(slots, kChunk));
    const bool more = table.map.Walk(table.cursor, step, [&](EngineKey name, BlockKey key) {
      names[found] = name;
      keys[found++] = key;
    });
    gone += DropGone(table, std::span(names).first(found), std::span(keys).first(found));
    looked += static_cast<std::int64_t>(found);
    slots -= step;
    if (more) continue;
    ++hand_;
    --left;
  }
  stats_.swept_names += gone;
  if (looked > 0) pace_ = gone * kMany >= looked ? std::min(pace_ * 2, kMostPace) : std::max(pace_ / 2, kLeastPace);
  return gone;
}

// What every event does besides its own.
void EngineKeys::State::Tend(std::size_t blocks) noexcept {
  if (!kept_.empty()) ExpireKept();
  if (tables_.empty()) return;
  due_ += blocks * pace_;
  if (due_ < kHandStep * 4) return;
  (void)TurnHand(static_cast<std::int64_t>(std::min<std::uint64_t>(due_ / 4, kMostHandStep)));
  due_ = 0;
}

std::int64_t EngineKeys::State::Sweep(std::int64_t slots) noexcept {
  const MutexLock lock(mutex_);
  ExpireKept();
  const std::int64_t before = stats_.names;
  GiveBack();
  std::int64_t all = 0;
  for (const Table* table : tables_) all += table->map.slots() + 1;
  if (slots < all) {
    (void)TurnHand(slots);
  } else {
    // Rounds until nothing goes: what goes moves others about.
    do {
      hand_ = 0;
      for (Table* table : tables_) table->cursor = {};
    } while (TurnHand(std::numeric_limits<std::int64_t>::max()) > 0);
  }
  GiveBack();
  return before - stats_.names;
}

// ---- The rest ----

KvSequence EngineKeys::State::Sequence(EndpointId endpoint, std::uint64_t number) noexcept {
  const MutexLock lock(mutex_);
  const KvSequence result = engine_.Sequence(endpoint, number);
  if (result != KvSequence::kRestarted) return result;
  DropKeptOf(endpoint.slot);
  if (own_[endpoint.slot] != nullptr && own_[endpoint.slot]->owner == endpoint) DropOwn(endpoint.slot);
  return result;
}

void EngineKeys::State::Forget(EndpointId endpoint, bool for_ever) noexcept {
  const MutexLock lock(mutex_);
  if (for_ever) {
    engine_.RemoveEndpoint(endpoint);
  } else {
    engine_.ClearEndpoint(endpoint);
  }
  if (endpoint.slot >= kMaxEndpoints || endpoint.incarnation == 0) return;
  if (notes_[endpoint.slot].incarnation <= endpoint.incarnation) DropKeptOf(endpoint.slot);
  const Table* const own = own_[endpoint.slot].get();
  if (own != nullptr && own->owner.incarnation <= endpoint.incarnation) DropOwn(endpoint.slot);
  GiveBack();
}

EngineKeysStats EngineKeys::State::Stats() noexcept {
  const MutexLock lock(mutex_);
  EngineKeysStats stats = stats_;
  stats.domains = std::count_if(tables_.begin(), tables_.end(), [](const Table* t) { return t->map.size() > 0; });
  stats.bytes = budget_.used();
  stats.peak_bytes = budget_.peak();
  return stats;
}

absl::Status EngineKeys::State::Audit() {
  const MutexLock lock(mutex_);
  const auto fail = [](const auto&... parts) { return absl::InternalError(absl::StrCat("EngineKeys: ", parts...)); };
  std::int64_t names = 0, units = 0, tables = 0;
  for (std::uint32_t i = 0; i < tables_.size(); ++i) {
    const Table& table = *tables_[i];
    std::int64_t size = 0;
    bool good = table.at == i;
    table.map.ForEach([&](EngineKey name, BlockKey key) {
      good &= table.map.Find(name) == key;
      ++size;
    });
    if (!good || size != table.map.size()) {
      return fail("table ", i, " has ", size, " names, counted ", table.map.size());
    }
    names += size;
    units += table.map.units();
  }
  for (const auto* all : {&named_, &own_}) {
    tables += std::count_if(all->begin(), all->end(), [](const auto& table) { return table != nullptr; });
  }
  if (tables != std::ssize(tables_)) return fail(tables, " tables, ", tables_.size(), " listed");
  if (names != stats_.names) return fail(names, " names, counted ", stats_.names);
  if (units != arena_.used_units()) return fail("arena has ", arena_.used_units(), " units in use, found ", units);
  std::vector<std::int64_t> kept(kMaxEndpoints);
  std::size_t blocks = 0;
  std::int64_t all = 0;
  for (const Kept& event : kept_) {
    const auto left = static_cast<std::size_t>(std::count(event.gone.begin(), event.gone.end(), false));
    if (left != event.left || left == 0) return fail("an event keeps ", left, " blocks, counted ", event.left);
    kept[event.source.endpoint.slot] += static_cast<std::int64_t>(left * event.parts);
    all += static_cast<std::int64_t>(left * event.parts);
    blocks += left;
  }
  if (all != stats_.kept_blocks || blocks != kept_blocks_.size() || kept_.size() != waiting_.size()) {
    return fail("keeps ", all, " blocks, counted ", stats_.kept_blocks);
  }
  for (std::uint32_t slot = 0; slot < kMaxEndpoints; ++slot) {
    if (kept[slot] != notes_[slot].kept) return fail("keeps ", kept[slot], " blocks of slot ", slot);
  }
  return budget_.peak() <= budget_.limit() ? absl::OkStatus() : fail("over the memory limit");
}

absl::StatusOr<std::shared_ptr<EngineKeys>> EngineKeys::Create(std::shared_ptr<PrefixIndex> index,
                                                               const EngineKeysOptions& options) {
  if (index == nullptr) return absl::InvalidArgumentError("EngineKeys.index: want an exact prefix index, got null");
  if (index->options().mode != IndexMode::kExact) {
    return absl::InvalidArgumentError("EngineKeys.index: want an exact prefix index, got an approximate one");
  }
  if (options.max_bytes < kLeastBytes || options.max_bytes > kMostBytes) {
    return absl::InvalidArgumentError(absl::StrCat("EngineKeysOptions.max_bytes: want ", kLeastBytes, " .. ",
                                                   kMostBytes, ", got ", options.max_bytes));
  }
  TOKROUTE_TRY {
    auto state = std::make_unique<State>(*index->engine_, *index, options.max_bytes);
    return std::shared_ptr<EngineKeys>(new EngineKeys(std::move(index), std::move(state)));
  }
  TOKROUTE_NO_MEMORY { return absl::ResourceExhaustedError("EngineKeys: no memory"); }
}

EngineKeys::EngineKeys(std::shared_ptr<PrefixIndex> index, std::unique_ptr<State> state) noexcept
    : index_(std::move(index)), state_(std::move(state)) {}
EngineKeys::~EngineKeys() = default;

absl::StatusOr<HashDomain> EngineKeys::Domain(std::string_view name) { return state_->Domain(name); }
KvResult EngineKeys::Stored(const KvSource& source, HashDomain domain, const EngineBlocks& blocks) noexcept {
  return state_->Stored(source, domain, blocks);
}
KvResult EngineKeys::Removed(const KvSource& source, HashDomain domain,
                             std::span<const EngineKey> engine_keys) noexcept {
  return state_->Removed(source, domain, engine_keys);
}
KvSequence EngineKeys::Sequence(EndpointId endpoint, std::uint64_t number) noexcept {
  return state_->Sequence(endpoint, number);
}
void EngineKeys::ClearEndpoint(EndpointId endpoint) noexcept { state_->Forget(endpoint, false); }
void EngineKeys::RemoveEndpoint(EndpointId endpoint) noexcept { state_->Forget(endpoint, true); }
std::int64_t EngineKeys::Sweep(std::int64_t slots) noexcept { return state_->Sweep(slots); }
EngineKeysStats EngineKeys::Stats() const noexcept { return state_->Stats(); }
absl::Status EngineKeys::Audit() const { return state_->Audit(); }

}  // namespace v0
}  // namespace tokroute

// Where each key is: from 64-bit keys to places (a run and an offset in it), for one writer and any number of readers.
//
// Private to src/prefix. A slot has 32 bits of run, 12 of offset and 20 of the key's hash; the key itself lies in its
// run, and whoever looks up says whether a place is the right one, so a foreign run is looked at once in some hundred
// probes. Sharded extendible hashing: each of up to 4,096 shards is a table of 8 to 256 slots or a directory of such
// tables, which grow by a half or a third, split and shrink one at a time, from what their slots say: the longest pause
// is the split of 256 slots, whatever the size. Tables live in the arena, so the memory cap covers them.
//
// A reader that races with the writer may be shown a place where its key is no more. That it misses a key that is
// there, it finds out: a table counts what moves its slots, and whoever misses looks at the count before and after.
#ifndef TOKROUTE_SRC_PREFIX_PLACE_TABLE_H_
#define TOKROUTE_SRC_PREFIX_PLACE_TABLE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "prefix/arena.h"
#include "prefix/shared_word.h"

namespace tokroute::internal {

struct Place {
  std::uint32_t run = kNone, offset = 0;
};

class PlaceTable {
 public:
  static constexpr std::uint32_t kMostOffset = (1u << 12) - 1;
  static constexpr int kMostShardBits = 12;

  // `secret` keeps strangers from choosing keys that collide here.
  // 2^shard_bits shards, 1 .. 12: each that is ever used keeps 64 bytes.
  PlaceTable(Arena& arena, std::uint64_t secret, int shard_bits = kMostShardBits) noexcept
      : arena_(arena),
        secret_(secret ^ 0xA0761D6478BD642Fu),
        shard_bits_(shard_bits),
        shards_(static_cast<std::uint64_t*>(std::calloc(std::size_t{1} << shard_bits, sizeof(std::uint64_t))),
                &std::free) {}
  PlaceTable(const PlaceTable&) = delete;
  PlaceTable& operator=(const PlaceTable&) = delete;

  std::int64_t size() const noexcept { return size_; }

  // What a look-up begins with, to be fetched ahead of it.
  void Prefetch(std::uint64_t key) const noexcept {
    const std::uint64_t hash = Hash(key);
    const Table table = TableOf(hash);
    const std::byte* slots = table.size != 0 ? arena_.TryAddress(table.chunk) : nullptr;
    if (slots != nullptr) __builtin_prefetch(slots + HomeOf(hash, table.slots()) * sizeof(std::uint64_t));
  }

  // The place that `is_it(place)` accepts, among those that may be the key's; or run kNone. Any thread. `unsure` is
  // set, and else left alone, if there was none and the table kept changing.
  template <class IsIt>
  Place Find(std::uint64_t key, IsIt&& is_it, bool* unsure = nullptr) const noexcept {
    const std::uint64_t hash = Hash(key);
    for (int i = 0; i < kTries; ++i) {
      const Table table = TableOf(hash);
      const Place place = FindIn(table, hash, is_it);
      if (place.run != kNone) return place;
      const Table after = TableOf(hash);
      if (table.moves % 2 == 0 && after.chunk == table.chunk && after.size == table.size &&
          after.depth == table.depth && after.moves == table.moves) {
        return {};
      }
    }
    if (unsure != nullptr) *unsure = true;
    return {};
  }

  // offset <= kMostOffset. False, and nothing changed, when the key is there already (which `is_it` says of a place, as
  // for Find) or there is no memory.
  template <class IsIt>
  bool Insert(std::uint64_t key, Place place, IsIt&& is_it) noexcept {
    if (shards_ == nullptr || Find(key, is_it).run != kNone) return false;
    const std::uint64_t hash = Hash(key);
    for (bool may_grow = true;;) {
      const Table table = TableOf(hash);
      if (table.size == 0) {
        if (!Start(hash)) return false;
        continue;
      }
      const std::uint32_t slots = table.slots();
      // Full, a table is slow and still right; the last slot stays empty, where probing ends.
      if ((table.count + 1) * 16 <= slots * 13 || (!may_grow && table.count + 1 < slots)) {
        Put(table, Slot(hash, place));
        SetCount(hash, table, table.count + 1);
        ++size_;
        return true;
      }
      if (!may_grow) return false;
      may_grow = table.size < kMostSize ? Resize(hash, table, table.size + 1) : Split(hash, table);
    }
  }

  // The key must be there, at that place. Moves later entries back over the gap, so no tombstones gather.
  void Erase(std::uint64_t key, Place place) noexcept {
    const std::uint64_t hash = Hash(key);
    Table table = TableOf(hash);
    ++table.moves;
    SetTable(hash, table);
    std::uint64_t* slots = SlotsOf(table);
    const std::uint32_t count = table.slots();
    const std::uint64_t slot = Slot(hash, place);
    const auto after = [count](std::uint32_t i) { return i + 1 == count ? 0 : i + 1; };
    const auto from = [count](std::uint32_t a, std::uint32_t b) { return b >= a ? b - a : b + count - a; };
    std::uint32_t gap = HomeOf(hash, count);
    while (slots[gap] != slot) gap = after(gap);
    for (std::uint32_t i = after(gap); slots[i] != kEmpty; i = after(i)) {
      if (from(HomeOf(slots[i], count), i) >= from(gap, i)) {
        Store(slots[gap], slots[i]);
        gap = i;
      }
    }
    Store(slots[gap], kEmpty);
    ++table.moves;
    --table.count;
    SetTable(hash, table);
    --size_;
    if (table.size > kLeastSize && table.count * 8 < count) {
      Resize(hash, table, table.size - 1);  // No memory for a smaller one: it stays.
    }
  }

  // Gives everything back to the arena.
  void Reset() noexcept {
    for (std::uint32_t shard = 0; shard < ShardCount(); ++shard) {
      const std::uint64_t word = shards_.get()[shard];
      if (word == 0) continue;
      ForEachTable(word, [&](const Table& table) { arena_.Free(table.chunk, UnitsOf(table)); });
      if ((word & kIsDirectory) != 0) arena_.Free(DirectoryOf(word).chunk, UnitsOf(DirectoryOf(word)));
      Store(shards_.get()[shard], 0);
    }
    size_ = 0;
  }

  // F(place); no order that may reach a result.
  template <class F>
  void ForEach(F&& f) const {
    for (std::uint32_t shard = 0; shard < ShardCount(); ++shard) {
      ForEachTable(shards_.get()[shard], [&](const Table& table) {
        const std::uint64_t* slots = SlotsOf(table);
        for (std::uint32_t i = 0; i < table.slots(); ++i) {
          if (slots[i] != kEmpty) f(PlaceIn(slots[i]));
        }
      });
    }
  }
  // Arena units in use. O(shards); for audits.
  std::int64_t units() const noexcept {
    std::int64_t units = 0;
    for (std::uint32_t shard = 0; shard < ShardCount(); ++shard) {
      const std::uint64_t word = shards_.get()[shard];
      ForEachTable(word, [&](const Table& table) { units += UnitsOf(table); });
      if ((word & kIsDirectory) != 0) units += UnitsOf(DirectoryOf(word));
    }
    return units;
  }

 private:
  static constexpr std::uint32_t kPrintBits = 20, kOffsetBits = 12;
  static constexpr std::uint32_t kCountBits = 9, kMoves = 1u << (16 - kCountBits);
  static constexpr int kTries = 8;  // Of a reader that misses in a table that changes.
  // A table's size by its number: close enough to each other that no more than half of a table is empty after growth.
  static constexpr std::array<std::uint16_t, 11> kSlots{0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};
  static constexpr std::uint32_t kLeastSize = 1, kMostSize = kSlots.size() - 1,
                                 kHalfSize = 9;  // kHalfSize: after a split.
  static constexpr std::uint32_t kHomeBits = 8, kMostDepth = kPrintBits - kHomeBits;
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0}, kIsDirectory = 0x80;
  static constexpr std::uint64_t kPrintMask = (std::uint64_t{1} << kPrintBits) - 1;

  // One word says all of a table: chunk, how often slots have moved (odd: they are moving), count, number of its size
  // (0: there is none), and how many of the print's bits above the home's all its keys share.
  struct Table {
    std::uint32_t chunk = 0, count = 0, size = 0, depth = 0, moves = 0;
    std::uint32_t slots() const noexcept { return kSlots[size]; }
  };
  static std::uint64_t Pack(const Table& t) noexcept {
    return std::uint64_t{t.chunk} << 32 | std::uint64_t{t.moves % kMoves} << (16 + kCountBits) |
           std::uint64_t{t.count} << 16 | std::uint64_t{t.size} << 8 | t.depth;
  }
  static Table Unpack(std::uint64_t word) noexcept {
    const auto size = static_cast<std::uint32_t>(word >> 8 & 0xFF);
    return {static_cast<std::uint32_t>(word >> 32), static_cast<std::uint32_t>(word >> 16) & ((1u << kCountBits) - 1),
            size <= kMostSize ? size : 0, static_cast<std::uint32_t>(word & 0x7F),
            static_cast<std::uint32_t>(word >> (16 + kCountBits)) % kMoves};
  }
  // A shard of several tables: its word names an array of their words, 2^depth of them.
  struct Directory {
    std::uint32_t chunk = 0, depth = 0;
  };
  static Directory DirectoryOf(std::uint64_t word) noexcept {
    return {static_cast<std::uint32_t>(word >> 32), std::min(static_cast<std::uint32_t>(word & 0x7F), kMostDepth)};
  }
  static std::uint64_t Pack(const Directory& d) noexcept {
    return std::uint64_t{d.chunk} << 32 | kIsDirectory | d.depth;
  }
  static std::uint32_t UnitsOf(const Table& table) noexcept {
    return Arena::UnitsFor(table.slots() * sizeof(std::uint64_t));
  }
  static std::uint32_t UnitsOf(const Directory& directory) noexcept {
    return Arena::UnitsFor(sizeof(std::uint64_t) << directory.depth);
  }
  // Where a hash, or the slot with its print, is at home.
  static std::uint32_t HomeOf(std::uint64_t print, std::uint32_t slots) noexcept {
    return (static_cast<std::uint32_t>(print) & ((1u << kHomeBits) - 1)) * slots >> kHomeBits;
  }

  std::uint64_t Hash(std::uint64_t key) const noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(key ^ secret_) * 0xE7037ED1A0B428DBu;
    return static_cast<std::uint64_t>(product >> 64) ^ static_cast<std::uint64_t>(product);
  }
  static std::uint64_t Slot(std::uint64_t hash, Place place) noexcept {
    return std::uint64_t{place.run} << 32 | std::uint64_t{place.offset} << kPrintBits | (hash & kPrintMask);
  }
  static Place PlaceIn(std::uint64_t slot) noexcept {
    return {static_cast<std::uint32_t>(slot >> 32),
            static_cast<std::uint32_t>(slot >> kPrintBits) & ((1u << kOffsetBits) - 1)};
  }
  std::uint32_t ShardOf(std::uint64_t hash) const noexcept {
    return static_cast<std::uint32_t>(hash >> (64 - shard_bits_));
  }
  std::uint32_t ShardCount() const noexcept { return shards_ != nullptr ? 1u << shard_bits_ : 0; }
  static std::uint32_t EntryOf(std::uint64_t hash, std::uint32_t depth) noexcept {
    return static_cast<std::uint32_t>(hash) >> kHomeBits & ((1u << depth) - 1);
  }

  Table TableOf(std::uint64_t hash) const noexcept {
    if (shards_ == nullptr) return {};
    const std::uint64_t word = Load(shards_.get()[ShardOf(hash)]);
    if ((word & kIsDirectory) == 0) return Unpack(word);
    const Directory directory = DirectoryOf(word);
    const auto* entries = reinterpret_cast<const std::uint64_t*>(arena_.TryAddress(directory.chunk));
    if (entries == nullptr || (sizeof(std::uint64_t) << directory.depth) > Arena::BytesBehind(directory.chunk))
      return {};
    return Unpack(Load(entries[EntryOf(hash, directory.depth)]));
  }
  // Writes a table's word wherever it stands: for all hashes that share the table's bits.
  void SetTable(std::uint64_t hash, const Table& table) noexcept {
    std::uint64_t& shard = shards_.get()[ShardOf(hash)];
    if ((shard & kIsDirectory) == 0) return Store(shard, Pack(table));
    const Directory directory = DirectoryOf(shard);
    auto* entries = arena_.At<std::uint64_t>(directory.chunk);
    for (std::uint32_t i = EntryOf(hash, table.depth); i < (1u << directory.depth); i += 1u << table.depth) {
      Store(entries[i], Pack(table));
    }
  }
  void SetCount(std::uint64_t hash, Table table, std::uint32_t count) noexcept {
    table.count = count;
    SetTable(hash, table);
  }

  template <class IsIt>
  Place FindIn(const Table& table, std::uint64_t hash, IsIt&& is_it) const noexcept {
    if (table.size == 0) return {};
    const auto* slots = reinterpret_cast<const std::uint64_t*>(arena_.TryAddress(table.chunk));
    const std::uint32_t count = table.slots();
    if (slots == nullptr || count * sizeof(std::uint64_t) > Arena::BytesBehind(table.chunk)) return {};
    const std::uint64_t print = hash & kPrintMask;
    for (std::uint32_t i = HomeOf(hash, count), left = count; left > 0; --left) {
      const std::uint64_t slot = Load(slots[i]);
      if (slot == kEmpty) return {};
      if ((slot & kPrintMask) == print) {
        const Place place = PlaceIn(slot);
        if (is_it(place)) return place;
      }
      if (++i == count) i = 0;
    }
    return {};
  }

  std::uint64_t* SlotsOf(const Table& table) const noexcept { return arena_.At<std::uint64_t>(table.chunk); }
  void Put(const Table& table, std::uint64_t slot) noexcept {
    std::uint64_t* slots = SlotsOf(table);
    std::uint32_t i = HomeOf(slot, table.slots());
    while (slots[i] != kEmpty) i = i + 1 == table.slots() ? 0 : i + 1;
    Store(slots[i], slot);
  }
  // An empty table, of size 0 when there is no memory.
  Table NewTable(std::uint32_t size, std::uint32_t depth) noexcept {
    Table table{0, 0, size, depth};
    table.chunk = arena_.Allocate(UnitsOf(table));
    if (table.chunk == kNone) return {};
    for (std::uint32_t i = 0; i < table.slots(); ++i) Store(SlotsOf(table)[i], kEmpty);
    return table;
  }
  bool Start(std::uint64_t hash) noexcept {
    const Table table = NewTable(kLeastSize, 0);
    if (table.size != 0) SetTable(hash, table);
    return table.size != 0;
  }
  bool Resize(std::uint64_t hash, const Table& table, std::uint32_t size) noexcept {
    Table resized = NewTable(size, table.depth);
    if (resized.size == 0) return false;
    resized.moves = table.moves + 2;
    const std::uint64_t* old = SlotsOf(table);
    for (std::uint32_t i = 0; i < table.slots(); ++i) {
      if (old[i] != kEmpty) Put(resized, old[i]);
    }
    resized.count = table.count;
    SetTable(hash, resized);
    arena_.Free(table.chunk, UnitsOf(table));
    return true;
  }
  // Cuts a table in two by the next bit of its keys' prints.
  bool Split(std::uint64_t hash, const Table& table) noexcept {
    std::uint64_t& shard = shards_.get()[ShardOf(hash)];
    const std::uint32_t depth = (shard & kIsDirectory) != 0 ? DirectoryOf(shard).depth : 0;
    if (depth == table.depth && !Deepen(shard, depth)) return false;
    const std::uint64_t bit = std::uint64_t{1} << (kHomeBits + table.depth);
    const std::uint64_t* old = SlotsOf(table);
    std::uint32_t counts[2] = {0, 0};
    for (std::uint32_t i = 0; i < table.slots(); ++i) {
      if (old[i] != kEmpty) ++counts[(old[i] & bit) != 0 ? 1 : 0];
    }
    Table halves[2];
    for (int side : {0, 1}) {
      halves[side] = NewTable(counts[side] * 16 < kSlots[kHalfSize] * 13u ? kHalfSize : kMostSize, table.depth + 1);
      halves[side].moves = table.moves + 2;
      if (halves[side].size != 0) continue;
      if (side == 1) arena_.Free(halves[0].chunk, UnitsOf(halves[0]));
      return false;
    }
    for (std::uint32_t i = 0; i < table.slots(); ++i) {
      if (old[i] == kEmpty) continue;
      Table& half = halves[(old[i] & bit) != 0 ? 1 : 0];
      Put(half, old[i]);
      ++half.count;
    }
    SetTable(hash & ~bit, halves[0]);
    SetTable(hash | bit, halves[1]);
    arena_.Free(table.chunk, UnitsOf(table));
    return true;
  }
  bool Deepen(std::uint64_t& shard, std::uint32_t depth) noexcept {
    if (depth == kMostDepth) return false;
    const std::uint32_t chunk = arena_.Allocate(UnitsOf(Directory{0, depth + 1}));
    if (chunk == kNone) return false;
    auto* entries = arena_.At<std::uint64_t>(chunk);
    const std::uint64_t word = shard;
    const std::uint64_t* old = (word & kIsDirectory) != 0 ? arena_.At<std::uint64_t>(DirectoryOf(word).chunk) : &word;
    for (std::uint32_t i = 0; i < (2u << depth); ++i) Store(entries[i], old[i & ((1u << depth) - 1)]);
    Store(shard, Pack(Directory{chunk, depth + 1}));
    if ((word & kIsDirectory) != 0) arena_.Free(DirectoryOf(word).chunk, UnitsOf(DirectoryOf(word)));
    return true;
  }

  // F(table), once each.
  template <class F>
  void ForEachTable(std::uint64_t word, F&& f) const {
    if (word == 0) return;
    if ((word & kIsDirectory) == 0) return f(Unpack(word));
    const Directory directory = DirectoryOf(word);
    const auto* entries = arena_.At<std::uint64_t>(directory.chunk);
    for (std::uint32_t i = 0; i < (1u << directory.depth); ++i) {
      const Table table = Unpack(entries[i]);
      if (i < (1u << table.depth)) f(table);
    }
  }

  Arena& arena_;
  const std::uint64_t secret_;
  const int shard_bits_;
  const std::unique_ptr<std::uint64_t, void (*)(void*)> shards_;
  std::int64_t size_ = 0;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_PLACE_TABLE_H_

// A hash table from 64-bit keys to values that never stops the world to grow.
//
// Private to src/prefix. Extendible hashing: a directory of small open-addressing tables (at most 64 KiB each), which
// grow by a quarter, split and shrink one at a time. The longest pause is the rehash of 4096 slots, some 20 us, where
// one flat table of 2.5 M keys took 90 ms. Tables live in the arena, so the memory cap covers them. All keys' tables
// are about as full as each other, between 0.64 and 0.8: 20 to 25 bytes a key, where doubling took 21 to 43.
//
// Any key is legal, 0 included. Order of iteration reaches no caller's result.
#ifndef TOKROUTE_SRC_PREFIX_KEY_MAP_H_
#define TOKROUTE_SRC_PREFIX_KEY_MAP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "prefix/arena.h"

namespace tokroute::internal {

// `kAbsent` is a value that no key has.
template <class Value, Value kAbsent>
class KeyMap {
 public:
  // Where a walk over the slots stands: what part of a table, times 2^32, lies behind it, so that it stays where it was
  // among the keys when the table is resized. (But for a few that growth displaces: the next round meets those.)
  struct Cursor {
    std::uint32_t table = 0;
    std::uint64_t part = 0;
  };

  // `secret` keeps strangers from choosing keys that collide here.
  KeyMap(MemoryBudget& budget, Arena& arena, std::uint64_t secret) noexcept
      : arena_(arena), secret_(secret ^ 0xA0761D6478BD642Fu), directory_(budget), tables_(budget) {}
  ~KeyMap() { Reset(); }
  KeyMap(const KeyMap&) = delete;
  KeyMap& operator=(const KeyMap&) = delete;

  std::int64_t size() const noexcept { return size_; }
  // Slots, full or not. O(tables).
  std::int64_t slots() const noexcept {
    std::int64_t slots = 0;
    for (std::uint32_t i = 0; i < tables_.size(); ++i) slots += tables_[i].slots;
    return slots;
  }
  // Arena units in use. O(tables); for audits.
  std::int64_t units() const noexcept {
    std::int64_t units = 0;
    for (std::uint32_t i = 0; i < tables_.size(); ++i) units += UnitsOf(tables_[i].slots);
    return units;
  }

  // What a look-up begins with, to be fetched ahead of it.
  void Prefetch(std::uint64_t key) const noexcept {
    if (directory_.size() == 0) return;
    const std::uint64_t hash = Hash(key);
    const Table& table = tables_[directory_[DirectoryIndex(hash)]];
    __builtin_prefetch(SlotsOf(table) + HomeOf(hash, table.slots));
  }

  // The key's value, or kAbsent. O(1).
  Value Find(std::uint64_t key) const noexcept {
    if (directory_.size() == 0) return kAbsent;
    const std::uint64_t hash = Hash(key);
    const Table& table = tables_[directory_[DirectoryIndex(hash)]];
    const Slot* slots = SlotsOf(table);
    for (std::uint32_t i = HomeOf(hash, table.slots);; i = After(i, table.slots)) {
      if (slots[i].value == kAbsent) return kAbsent;
      if (slots[i].key == key) return slots[i].value;
    }
  }

  // The key must be absent, and the value not kAbsent. False, and nothing changed, when there is no memory. Amortised
  // O(1).
  bool Insert(std::uint64_t key, Value value) noexcept {
    if (directory_.size() == 0 && !Start()) return false;
    const std::uint64_t hash = Hash(key);
    // A split may leave all on one side; twice is enough for honest keys, and a full table still takes some more.
    for (int attempt = 0; attempt < 2; ++attempt) {
      const std::uint32_t at = directory_[DirectoryIndex(hash)];
      const std::uint32_t slots = tables_[at].slots;
      if ((tables_[at].count + 1) * 5 <= slots * 4) break;
      if (!(slots < kMostSlots ? Resize(at, Rounded(slots + slots / 4)) : Split(at))) break;
    }
    Table& table = tables_[directory_[DirectoryIndex(hash)]];
    // Probing needs an empty slot; 15/16 full is slow and still right.
    if ((table.count + 1) * 16 > 15 * table.slots) return false;
    Put(table, hash, {key, value});
    ++table.count;
    ++size_;
    return true;
  }

  // The key must be present, and the value not kAbsent.
  void Replace(std::uint64_t key, Value value) noexcept {
    const std::uint64_t hash = Hash(key);
    const Table& table = tables_[directory_[DirectoryIndex(hash)]];
    SlotsOf(table)[IndexOf(table, hash, key)].value = value;
  }

  // The key must be present. Moves later entries back over the gap, so no tombstones gather. O(1).
  void Erase(std::uint64_t key) noexcept {
    const std::uint64_t hash = Hash(key);
    const std::uint32_t at = directory_[DirectoryIndex(hash)];
    Table& table = tables_[at];
    Slot* slots = SlotsOf(table);
    const std::uint32_t count = table.slots;
    const auto from = [count](std::uint32_t a, std::uint32_t b) { return b >= a ? b - a : b + count - a; };
    std::uint32_t gap = IndexOf(table, hash, key);
    for (std::uint32_t i = After(gap, count); slots[i].value != kAbsent; i = After(i, count)) {
      if (from(HomeOf(Hash(slots[i].key), count), i) >= from(gap, i)) {
        slots[gap] = slots[i];
        gap = i;
      }
    }
    slots[gap].value = kAbsent;
    --table.count;
    --size_;
    if (table.slots > kLeastSlots && table.count * 3 < table.slots) {
      Resize(at, Fitting(table.count));  // No memory for a smaller one: it stays.
    }
  }

  // Empties the table and gives its memory back to the arena.
  void Reset() noexcept {
    for (std::uint32_t i = 0; i < tables_.size(); ++i) arena_.Free(tables_[i].chunk, UnitsOf(tables_[i].slots));
    tables_.Clear();
    directory_.Clear();
    depth_ = 0;
    size_ = 0;
  }

  template <class F>  // F(key, value); no order.
  void ForEach(F&& f) const {
    for (std::uint32_t t = 0; t < tables_.size(); ++t) {
      const Slot* slots = SlotsOf(tables_[t]);
      for (std::uint32_t i = 0; i < tables_[t].slots; ++i) {
        if (slots[i].value != kAbsent) f(slots[i].key, slots[i].value);
      }
    }
  }
  // Looks at the next `most` slots, F(key, value) for those that are full. False: the walk has come to the end, and
  // begins anew.
  template <class F>
  bool Walk(Cursor& cursor, std::uint32_t most, F&& f) const {
    while (most > 0) {
      if (cursor.table >= tables_.size()) {
        cursor = {};
        return false;
      }
      const Table& table = tables_[cursor.table];
      const std::uint64_t count = table.slots;
      const Slot* slots = SlotsOf(table);
      std::uint64_t i = cursor.part * count >> 32;
      for (; i < count && most > 0; ++i, --most) {
        if (slots[i].value != kAbsent) f(slots[i].key, slots[i].value);
      }
      cursor.part = ((i << 32) + count - 1) / count;  // The least that is slot i again.
      if (i == count) cursor = {cursor.table + 1, 0};
    }
    return true;
  }

 private:
  struct Slot {
    std::uint64_t key;
    Value value;  // kAbsent: empty.
  };
  static_assert(sizeof(Slot) == 16 && Arena::kUnitBytes % sizeof(Slot) == 0);
  struct Table {
    std::uint32_t chunk, count;
    std::uint16_t slots, depth;  // `depth` leading hash bits are common to all its keys.
  };
  static constexpr std::uint32_t kLeastSlots = 64, kMostSlots = 4096;

  static constexpr std::uint32_t UnitsOf(std::uint32_t slots) noexcept { return Arena::UnitsFor(sizeof(Slot) * slots); }
  // Slots fill whole units.
  static constexpr std::uint32_t Rounded(std::uint32_t slots) noexcept {
    constexpr std::uint32_t kInUnit = Arena::kUnitBytes / sizeof(Slot);
    return std::clamp((slots + kInUnit - 1) / kInUnit * kInUnit, kLeastSlots, kMostSlots);
  }
  // Two thirds full.
  static constexpr std::uint32_t Fitting(std::uint32_t count) noexcept { return Rounded(count + count / 2); }
  static std::uint32_t HomeOf(std::uint64_t hash, std::uint32_t slots) noexcept {
    return static_cast<std::uint32_t>((hash & 0xFFFFFFFFu) * slots >> 32);
  }
  static std::uint32_t After(std::uint32_t i, std::uint32_t slots) noexcept { return i + 1 == slots ? 0 : i + 1; }
  std::uint64_t Hash(std::uint64_t key) const noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(key ^ secret_) * 0xE7037ED1A0B428DBu;
    return static_cast<std::uint64_t>(product >> 64) ^ static_cast<std::uint64_t>(product);
  }
  // By the top bits; slots go by the low ones.
  std::uint32_t DirectoryIndex(std::uint64_t hash) const noexcept {
    return static_cast<std::uint32_t>((hash >> 32) >> (32 - depth_));
  }
  Slot* SlotsOf(const Table& table) const noexcept { return arena_.At<Slot>(table.chunk); }
  std::uint32_t IndexOf(const Table& table, std::uint64_t hash, std::uint64_t key) const noexcept {
    const Slot* slots = SlotsOf(table);
    std::uint32_t i = HomeOf(hash, table.slots);
    while (slots[i].value == kAbsent || slots[i].key != key) i = After(i, table.slots);
    return i;
  }
  void Put(const Table& table, std::uint64_t hash, Slot entry) const noexcept {
    Slot* slots = SlotsOf(table);
    std::uint32_t i = HomeOf(hash, table.slots);
    while (slots[i].value != kAbsent) i = After(i, table.slots);
    slots[i] = entry;
  }
  // kNone when there is no memory.
  std::uint32_t NewSlots(std::uint32_t slots) noexcept {
    const std::uint32_t chunk = arena_.Allocate(UnitsOf(slots));
    if (chunk == kNone) return kNone;
    for (std::uint32_t i = 0; i < slots; ++i) {
      ::new (arena_.Address(chunk) + i * sizeof(Slot)) Slot{0, kAbsent};
    }
    return chunk;
  }
  static Table MakeTable(std::uint32_t chunk, std::uint32_t count, std::uint32_t slots, std::uint32_t depth) noexcept {
    return {chunk, count, static_cast<std::uint16_t>(slots), static_cast<std::uint16_t>(depth)};
  }
  bool Start() noexcept {
    const std::uint32_t chunk = NewSlots(kLeastSlots);
    if (chunk == kNone) return false;
    if (!tables_.PushBack(MakeTable(chunk, 0, kLeastSlots, 0)) || !directory_.PushBack(0)) {
      tables_.Clear();
      arena_.Free(chunk, UnitsOf(kLeastSlots));
      return false;
    }
    return true;
  }
  bool Resize(std::uint32_t at, std::uint32_t slots) noexcept {
    const std::uint32_t chunk = NewSlots(slots);
    if (chunk == kNone) return false;
    Table& table = tables_[at];
    const Table resized = MakeTable(chunk, table.count, slots, table.depth);
    const Slot* old = SlotsOf(table);
    for (std::uint32_t i = 0; i < table.slots; ++i) {
      if (old[i].value != kAbsent) Put(resized, Hash(old[i].key), old[i]);
    }
    arena_.Free(table.chunk, UnitsOf(table.slots));
    table = resized;
    return true;
  }
  // Cuts a full-sized table in two by its keys' next hash bit.
  bool Split(std::uint32_t at) noexcept {
    const std::uint32_t depth = tables_[at].depth;
    if (depth == depth_ && !DoubleDirectory()) return false;
    if (!tables_.PushBack(tables_[at])) return false;
    const auto side_of = [depth](std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> (63 - depth)) & 1u; };
    const Table whole = tables_[at];
    const Slot* old = SlotsOf(whole);
    std::uint32_t counts[2] = {0, 0};
    for (std::uint32_t i = 0; i < whole.slots; ++i) {
      if (old[i].value != kAbsent) ++counts[side_of(Hash(old[i].key))];
    }
    Table halves[2];
    for (std::uint32_t side : {0u, 1u}) {
      const std::uint32_t slots = Fitting(counts[side]);
      halves[side] = MakeTable(NewSlots(slots), counts[side], slots, depth + 1);
      if (halves[side].chunk != kNone) continue;
      if (side == 1) arena_.Free(halves[0].chunk, UnitsOf(halves[0].slots));
      tables_.PopBack();
      return false;
    }
    const std::uint32_t sibling = tables_.size() - 1;
    for (std::uint32_t i = 0; i < whole.slots; ++i) {
      if (old[i].value == kAbsent) continue;
      const std::uint64_t hash = Hash(old[i].key);
      Put(halves[side_of(hash)], hash, old[i]);
    }
    arena_.Free(whole.chunk, UnitsOf(whole.slots));
    tables_[at] = halves[0];
    tables_[sibling] = halves[1];
    // The table's directory entries are consecutive; the upper half of them is the sibling's now.
    std::uint32_t first = 0;
    while (directory_[first] != at) ++first;
    const std::uint32_t entries = 1u << (depth_ - depth);
    for (std::uint32_t i = first + entries / 2; i < first + entries; ++i) directory_[i] = sibling;
    return true;
  }
  bool DoubleDirectory() noexcept {
    const std::uint32_t entries = directory_.size();
    // Keys chosen to agree in their leading hash bits must not blow the directory up.
    if (depth_ >= 30 || entries >= 16 * (tables_.size() + 4)) return false;
    if (!directory_.Resize(entries * 2, 0)) return false;
    for (std::uint32_t i = entries; i-- > 0;) directory_[2 * i] = directory_[2 * i + 1] = directory_[i];
    ++depth_;
    return true;
  }

  Arena& arena_;
  const std::uint64_t secret_;
  BudgetArray<std::uint32_t> directory_;  // 2^depth_ entries: which table has the keys with these leading bits.
  BudgetArray<Table> tables_;
  std::uint32_t depth_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_KEY_MAP_H_

// A hash table from 64-bit keys to 32-bit handles that never stops the world to grow.
//
// Private to src/prefix. Extendible hashing: a directory of small open-addressing tables (at most 64 KiB each), which
// double, split and shrink one at a time. The longest pause is the rehash of 4096 slots, some 20 us, where one flat
// table of 2.5 M keys took 90 ms. Tables live in the arena, so the memory cap covers them.
//
// Any key is legal, 0 included. Order of iteration reaches no caller's result.
#ifndef TOKROUTE_SRC_PREFIX_KEY_TABLE_H_
#define TOKROUTE_SRC_PREFIX_KEY_TABLE_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>

#include "prefix/arena.h"

namespace tokroute::internal {

class KeyTable {
 public:
  // `secret` keeps strangers from choosing keys that collide here.
  KeyTable(MemoryBudget& budget, Arena& arena, std::uint64_t secret) noexcept
      : arena_(arena), secret_(secret ^ 0xA0761D6478BD642Fu), directory_(budget), tables_(budget) {}
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;

  std::int64_t size() const noexcept { return size_; }
  // Arena units in use. O(tables); for audits.
  std::int64_t units() const noexcept {
    std::int64_t units = 0;
    for (std::uint32_t i = 0; i < tables_.size(); ++i) units += UnitsOf(tables_[i].log2_slots);
    return units;
  }

  // The key's handle, or kNone. O(1).
  std::uint32_t Find(std::uint64_t key) const noexcept {
    if (directory_.size() == 0) return kNone;
    const std::uint64_t hash = Hash(key);
    const Table& table = tables_[directory_[DirectoryIndex(hash)]];
    const Slot* slots = SlotsOf(table);
    const std::uint32_t mask = (1u << table.log2_slots) - 1;
    for (std::uint32_t i = static_cast<std::uint32_t>(hash) & mask;; i = (i + 1) & mask) {
      if (slots[i].handle == kNone) return kNone;
      if (slots[i].key == key) return slots[i].handle;
    }
  }

  // The key must be absent. False, and nothing changed, when there is no memory. Amortised O(1).
  bool Insert(std::uint64_t key, std::uint32_t handle) noexcept {
    if (directory_.size() == 0 && !Start()) return false;
    const std::uint64_t hash = Hash(key);
    // A split may leave all on one side; twice is enough for honest keys, and a full table still takes some more.
    for (int attempt = 0; attempt < 2; ++attempt) {
      const std::uint32_t at = directory_[DirectoryIndex(hash)];
      const std::uint32_t slots = 1u << tables_[at].log2_slots;
      if ((tables_[at].count + 1) * 4 <= slots * 3) break;
      if (!(slots < kMostSlots ? Resize(at, tables_[at].log2_slots + 1u) : Split(at))) break;
    }
    Table& table = tables_[directory_[DirectoryIndex(hash)]];
    // Probing needs an empty slot; 15/16 full is slow and still right.
    if ((table.count + 1) * 16 > (15u << table.log2_slots)) return false;
    Put(SlotsOf(table), table.log2_slots, hash, {key, handle, 0});
    ++table.count;
    ++size_;
    return true;
  }

  // The key must be present.
  void Replace(std::uint64_t key, std::uint32_t handle) noexcept {
    const std::uint64_t hash = Hash(key);
    const Table& table = tables_[directory_[DirectoryIndex(hash)]];
    SlotsOf(table)[IndexOf(table, hash, key)].handle = handle;
  }

  // The key must be present. Moves later entries back over the gap, so no tombstones gather. O(1).
  void Erase(std::uint64_t key) noexcept {
    const std::uint64_t hash = Hash(key);
    const std::uint32_t at = directory_[DirectoryIndex(hash)];
    Table& table = tables_[at];
    Slot* slots = SlotsOf(table);
    const std::uint32_t mask = (1u << table.log2_slots) - 1;
    std::uint32_t gap = IndexOf(table, hash, key);
    for (std::uint32_t i = (gap + 1) & mask; slots[i].handle != kNone; i = (i + 1) & mask) {
      const std::uint32_t home = static_cast<std::uint32_t>(Hash(slots[i].key)) & mask;
      if (((i - home) & mask) >= ((i - gap) & mask)) {
        slots[gap] = slots[i];
        gap = i;
      }
    }
    slots[gap].handle = kNone;
    --table.count;
    --size_;
    if (table.log2_slots > kLeastLog2 && table.count * 8 < (1u << table.log2_slots)) {
      Resize(at, table.log2_slots - 1u);  // No memory for a smaller one: it stays.
    }
  }

  // Empties the table and gives its memory back to the arena.
  void Reset() noexcept {
    for (std::uint32_t i = 0; i < tables_.size(); ++i) arena_.Free(tables_[i].chunk, UnitsOf(tables_[i].log2_slots));
    tables_.Clear();
    directory_.Clear();
    depth_ = 0;
    size_ = 0;
  }

  template <class F>  // F(key, handle); no order.
  void ForEach(F&& f) const {
    for (std::uint32_t t = 0; t < tables_.size(); ++t) {
      const Slot* slots = SlotsOf(tables_[t]);
      for (std::uint32_t i = 0; i < (1u << tables_[t].log2_slots); ++i) {
        if (slots[i].handle != kNone) f(slots[i].key, slots[i].handle);
      }
    }
  }

 private:
  struct Slot {
    std::uint64_t key;
    std::uint32_t handle;  // kNone: empty.
    std::uint32_t unused;
  };
  struct Table {
    std::uint32_t chunk, count;
    std::uint8_t log2_slots, depth;  // `depth` leading hash bits are common to all its keys.
  };
  static constexpr std::uint32_t kLeastLog2 = 6, kMostLog2 = 12, kMostSlots = 1u << kMostLog2;

  static constexpr std::uint32_t UnitsOf(std::uint32_t log2_slots) noexcept {
    return Arena::UnitsFor(sizeof(Slot) << log2_slots);
  }
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
    const std::uint32_t mask = (1u << table.log2_slots) - 1;
    std::uint32_t i = static_cast<std::uint32_t>(hash) & mask;
    while (slots[i].handle == kNone || slots[i].key != key) i = (i + 1) & mask;
    return i;
  }
  static void Put(Slot* slots, std::uint32_t log2_slots, std::uint64_t hash, Slot entry) noexcept {
    const std::uint32_t mask = (1u << log2_slots) - 1;
    std::uint32_t i = static_cast<std::uint32_t>(hash) & mask;
    while (slots[i].handle != kNone) i = (i + 1) & mask;
    slots[i] = entry;
  }
  // kNone when there is no memory.
  std::uint32_t NewSlots(std::uint32_t log2_slots) noexcept {
    const std::uint32_t chunk = arena_.Allocate(UnitsOf(log2_slots));
    if (chunk == kNone) return kNone;
    for (std::uint32_t i = 0; i < (1u << log2_slots); ++i) {
      ::new (arena_.Address(chunk) + i * sizeof(Slot)) Slot{0, kNone, 0};
    }
    return chunk;
  }
  bool Start() noexcept {
    const std::uint32_t chunk = NewSlots(kLeastLog2);
    if (chunk == kNone) return false;
    if (!tables_.PushBack({chunk, 0, kLeastLog2, 0}) || !directory_.PushBack(0)) {
      tables_.Clear();
      arena_.Free(chunk, UnitsOf(kLeastLog2));
      return false;
    }
    return true;
  }
  bool Resize(std::uint32_t at, std::uint32_t log2_slots) noexcept {
    const std::uint32_t chunk = NewSlots(log2_slots);
    if (chunk == kNone) return false;
    Table& table = tables_[at];
    const Slot* old = SlotsOf(table);
    for (std::uint32_t i = 0; i < (1u << table.log2_slots); ++i) {
      if (old[i].handle != kNone) Put(arena_.At<Slot>(chunk), log2_slots, Hash(old[i].key), old[i]);
    }
    arena_.Free(table.chunk, UnitsOf(table.log2_slots));
    table.chunk = chunk;
    table.log2_slots = static_cast<std::uint8_t>(log2_slots);
    return true;
  }
  // Cuts a full-sized table in two by its keys' next hash bit.
  bool Split(std::uint32_t at) noexcept {
    const std::uint32_t depth = tables_[at].depth;
    if (depth == depth_ && !DoubleDirectory()) return false;
    if (!tables_.PushBack(tables_[at])) return false;
    const std::uint32_t low = NewSlots(kMostLog2), high = low != kNone ? NewSlots(kMostLog2) : kNone;
    if (high == kNone) {
      if (low != kNone) arena_.Free(low, UnitsOf(kMostLog2));
      tables_.PopBack();
      return false;
    }
    const std::uint32_t sibling = tables_.size() - 1;
    const Slot* old = SlotsOf(tables_[at]);
    std::uint32_t counts[2] = {0, 0};
    for (std::uint32_t i = 0; i < kMostSlots; ++i) {
      if (old[i].handle == kNone) continue;
      const std::uint64_t hash = Hash(old[i].key);
      const std::uint32_t side = static_cast<std::uint32_t>(hash >> (63 - depth)) & 1u;
      Put(arena_.At<Slot>(side != 0 ? high : low), kMostLog2, hash, old[i]);
      ++counts[side];
    }
    arena_.Free(tables_[at].chunk, UnitsOf(kMostLog2));
    const auto deeper = static_cast<std::uint8_t>(depth + 1);
    tables_[at] = {low, counts[0], kMostLog2, deeper};
    tables_[sibling] = {high, counts[1], kMostLog2, deeper};
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

#endif  // TOKROUTE_SRC_PREFIX_KEY_TABLE_H_

// Memory for the prefix index: everything it owns comes from here, so that a hard cap in bytes is one comparison.
//
// Private to src/prefix. Nothing here throws or locks; out of memory, by the cap or by the system, is a return value.
//
//   MemoryBudget budget(64 << 20);
//   SegmentPool segments(budget, 60 << 20, {});
//   Arena arena(segments);
//   std::uint32_t chunk = arena.Allocate(3);   // 3 units of 64 bytes, or kNone.
//   arena.Free(chunk + 2, 1);                  // Any part of it may go back by itself.
#ifndef TOKROUTE_SRC_PREFIX_ARENA_H_
#define TOKROUTE_SRC_PREFIX_ARENA_H_

#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "prefix/shared_word.h"
#include "tokroute/prefix/index_memory.h"

namespace tokroute::internal {

inline constexpr std::uint32_t kNone = 0xFFFFFFFFu;  // No handle.

// Bytes taken from the system, and how many there may be.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::int64_t limit) noexcept : limit_(limit) {}
  bool Take(std::int64_t bytes) noexcept {
    if (bytes > limit_ - used_) return false;
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return true;
  }
  void Give(std::int64_t bytes) noexcept { used_ -= bytes; }
  std::int64_t used() const noexcept { return used_; }
  std::int64_t peak() const noexcept { return peak_; }
  std::int64_t limit() const noexcept { return limit_; }

 private:
  std::int64_t limit_, used_ = 0, peak_ = 0;
};

// Where arenas get their segments: from the caller's hook or the system, no more than a limit; and from a reserve that
// is taken and touched at the start and never goes back, so that a steady load meets no page for the first time.
class SegmentPool {
 public:
  static constexpr std::uint32_t kUnitBytes = 64, kSegmentUnits = 1u << 12;
  // One state byte per unit follows the units: order + 1 where a free chunk begins, else 0.
  static constexpr std::size_t kSegmentBytes = std::size_t{kSegmentUnits} * kUnitBytes + kSegmentUnits;

  SegmentPool(MemoryBudget& budget, std::int64_t limit, const IndexMemory& memory) noexcept
      : budget_(budget), limit_(limit / static_cast<std::int64_t>(kSegmentBytes)), memory_(memory) {}
  ~SegmentPool() {
    while (kept_ != nullptr) Release(std::exchange(kept_, *reinterpret_cast<std::byte**>(kept_)));
  }
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  std::int64_t limit() const noexcept { return limit_; }
  // Segments that the reserve has now. O(1).
  std::int64_t kept() const noexcept { return kept_count_; }
  // False: there is no such memory; what was to be had is kept.
  bool Reserve(std::int64_t bytes) noexcept {
    reserve_ = (bytes + static_cast<std::int64_t>(kSegmentBytes) - 1) / static_cast<std::int64_t>(kSegmentBytes);
    while (kept_count_ < reserve_) {
      std::byte* segment = Make();
      if (segment == nullptr) return false;
      Keep(segment);
    }
    return true;
  }
  // A segment in which every word has a value; null: no memory.
  std::byte* Take() noexcept {
    if (kept_ == nullptr) return Make();
    --kept_count_;
    std::byte* segment = std::exchange(kept_, *reinterpret_cast<std::byte**>(kept_));
    std::memset(segment + std::size_t{kSegmentUnits} * kUnitBytes, 0, kSegmentUnits);
    return segment;
  }
  void Give(std::byte* segment) noexcept { kept_count_ < reserve_ ? Keep(segment) : Release(segment); }

 private:
  std::byte* Make() noexcept {
    const auto bytes = static_cast<std::int64_t>(kSegmentBytes);
    if (made_ == limit_ || !budget_.Take(bytes)) return nullptr;
    void* memory = memory_.allocate != nullptr
                       ? memory_.allocate(kSegmentBytes, kUnitBytes, memory_.context)
                       : ::operator new(kSegmentBytes, std::align_val_t{kUnitBytes}, std::nothrow);
    if (memory == nullptr) {
      budget_.Give(bytes);
      return nullptr;
    }
    std::memset(memory, 0, kSegmentBytes);
    ++made_;
    return static_cast<std::byte*>(memory);
  }
  void Keep(std::byte* segment) noexcept {
    *reinterpret_cast<std::byte**>(segment) = kept_;
    kept_ = segment;
    ++kept_count_;
  }
  void Release(std::byte* segment) noexcept {
    if (memory_.allocate != nullptr) memory_.release(segment, kSegmentBytes, memory_.context);
    else ::operator delete(segment, std::align_val_t{kUnitBytes});
    --made_;
    budget_.Give(static_cast<std::int64_t>(kSegmentBytes));
  }

  MemoryBudget& budget_;
  const std::int64_t limit_;
  const IndexMemory memory_;
  std::int64_t made_ = 0, reserve_ = 0, kept_count_ = 0;
  std::byte* kept_ = nullptr;  // Each begins with the next one's address.
};

// A growing array of plain values within a budget.
template <class T>
class BudgetArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  explicit BudgetArray(MemoryBudget& budget) noexcept : budget_(budget) {}
  ~BudgetArray() { Clear(); }
  BudgetArray(const BudgetArray&) = delete;
  BudgetArray& operator=(const BudgetArray&) = delete;

  std::uint32_t size() const noexcept { return size_; }
  T& operator[](std::uint32_t i) noexcept { return data_[i]; }
  const T& operator[](std::uint32_t i) const noexcept { return data_[i]; }

  // False, and nothing changed, when the memory is not to be had.
  bool PushBack(const T& value) noexcept {
    const T copy = value;  // `value` may live in this array.
    if (size_ == capacity_ && !Grow(std::max<std::uint32_t>(16, capacity_ * 2))) return false;
    data_[size_++] = copy;
    return true;
  }
  void PopBack() noexcept { --size_; }
  // New elements are copies of `value`.
  bool Resize(std::uint32_t size, const T& value) noexcept {
    if (size > capacity_ && !Grow(std::max(size, capacity_ + capacity_ / 2))) return false;
    while (size_ < size) data_[size_++] = value;
    size_ = size;
    return true;
  }
  void Clear() noexcept {
    if (data_ != nullptr) Release(data_, capacity_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

 private:
  bool Grow(std::uint32_t capacity) noexcept {
    const std::int64_t bytes = static_cast<std::int64_t>(capacity) * static_cast<std::int64_t>(sizeof(T));
    if (!budget_.Take(bytes)) return false;
    void* memory = ::operator new(static_cast<std::size_t>(bytes), std::nothrow);
    if (memory == nullptr) {
      budget_.Give(bytes);
      return false;
    }
    T* bigger = static_cast<T*>(memory);
    if (size_ > 0) std::memcpy(static_cast<void*>(bigger), data_, size_ * sizeof(T));
    if (data_ != nullptr) Release(data_, capacity_);
    data_ = bigger;
    capacity_ = capacity;
    return true;
  }
  void Release(T* data, std::uint32_t capacity) noexcept {
    ::operator delete(static_cast<void*>(data));
    budget_.Give(static_cast<std::int64_t>(capacity) * static_cast<std::int64_t>(sizeof(T)));
  }

  MemoryBudget& budget_;
  T* data_ = nullptr;
  std::uint32_t size_ = 0, capacity_ = 0;
};

// A buddy allocator of 64-byte units in segments of 256 KiB; chunks of 1 .. 4096 units, addressed by 32-bit handles.
//
// Why a buddy: nodes, key arrays, holder lists and hash tables shrink and grow in different proportions over time.
// Separate pools would strand what one of them once needed, and a hard cap would then starve the others. A chunk of u
// units takes exactly u (the power of two above it is cut at once), and any part of it can be freed by itself, so that
// arrays shrink in place.
//
// Addresses never move. O(log units) per call. Segments that are wholly free go back to the system when they outnumber
// those in use, so a steady load never pays for it; or, where readers may be looking, when the owner says so.
//
// Readers of a structure that lives here may ask for any handle at any time (Try...); what they find is theirs to
// check.
class Arena {
 public:
  static constexpr std::uint32_t kUnitBytes = SegmentPool::kUnitBytes, kSegmentUnits = SegmentPool::kSegmentUnits,
                                 kOrders = 13;
  static_assert(kSegmentUnits == 1u << (kOrders - 1));

  // kShared: other threads read meanwhile. Segments then go back by ReleaseFree and ReleaseSurplus only.
  enum class Use : std::uint8_t { kExclusive, kShared };

  explicit Arena(SegmentPool& pool, Use use = Use::kExclusive) noexcept
      : pool_(pool),
        shared_(use == Use::kShared),
        most_segments_(static_cast<std::uint32_t>(
            std::min<std::int64_t>(pool.limit(), kNone / kSegmentUnits))),  // kNone must not be a handle.
        // Address space only, until it is used.
        segments_(static_cast<std::byte**>(std::calloc(std::max(most_segments_, 1u), sizeof(std::byte*)))) {
    std::fill(std::begin(free_), std::end(free_), kNone);
  }
  ~Arena() {
    for (std::uint32_t i = 0; i < ever_used_; ++i) {
      if (segments_[i] != nullptr) ReleaseSegment(i);
    }
    std::free(segments_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  static constexpr std::uint32_t UnitsFor(std::size_t bytes) noexcept {
    return static_cast<std::uint32_t>((bytes + kUnitBytes - 1) / kUnitBytes);
  }

  // 1 <= units <= kSegmentUnits. kNone when there is no room. The content is whatever was there.
  std::uint32_t Allocate(std::uint32_t units) noexcept {
    assert(units >= 1 && units <= kSegmentUnits);
    auto order = static_cast<std::uint32_t>(std::bit_width(units - 1));
    while (order < kOrders && free_[order] == kNone) ++order;
    if (order == kOrders) {
      if (!AddSegment()) return kNone;
      order = kOrders - 1;
    }
    const std::uint32_t chunk = free_[order];
    Unlink(chunk, order);
    used_units_ += units;
    // The rest is given back without looking for buddies: theirs are in use or were just cut off.
    std::uint32_t begin = chunk + units;
    const std::uint32_t end = chunk + (1u << order);
    while (begin < end) {
      const std::uint32_t piece = LargestPiece(begin, end);
      Link(begin, piece);
      begin += 1u << piece;
    }
    return chunk;
  }

  // Gives back [begin, begin + units), a whole chunk or a part of one.
  void Free(std::uint32_t begin, std::uint32_t units) noexcept {
    used_units_ -= units;
    const std::uint32_t end = begin + units;
    while (begin < end) {
      std::uint32_t order = LargestPiece(begin, end);
      const std::uint32_t next = begin + (1u << order);
      std::uint32_t chunk = begin;
      while (order + 1 < kOrders) {
        const std::uint32_t buddy = chunk ^ (1u << order);
        if (StateOf(buddy) != order + 1) break;
        Unlink(buddy, order);
        chunk = std::min(chunk, buddy);
        ++order;
      }
      Link(chunk, order);
      begin = next;
    }
    if (!shared_) {
      while (HasSurplus()) ReleaseOne();
    }
  }

  // More segments lie free than is sensible to keep.
  bool HasSurplus() const noexcept { return free_segments_ > kSpareSegments && free_segments_ * 2 > live_segments_; }
  void ReleaseSurplus() noexcept {
    while (HasSurplus()) ReleaseOne();
  }

  // Gives free segments back until `keep` are left of them.
  void ReleaseFree(std::uint32_t keep) noexcept {
    while (free_segments_ > keep) ReleaseOne();
  }

  template <class T>
  T* At(std::uint32_t handle) const noexcept {
    return std::launder(reinterpret_cast<T*>(Address(handle)));
  }
  std::byte* Address(std::uint32_t handle) const noexcept {
    return segments_[handle / kSegmentUnits] + std::size_t{handle % kSegmentUnits} * kUnitBytes;
  }

  // Null when there is no such memory now. Any thread; the memory stays as long as a ReaderGate's visit.
  std::byte* TryAddress(std::uint32_t handle) const noexcept {
    if (handle / kSegmentUnits >= most_segments_) return nullptr;
    std::byte* segment = std::atomic_ref<std::byte*>(segments_[handle / kSegmentUnits]).load(std::memory_order_seq_cst);
    return segment != nullptr ? segment + std::size_t{handle % kSegmentUnits} * kUnitBytes : nullptr;
  }
  // The bytes from a handle's unit to its segment's end: what may be read behind it, whatever is there.
  static std::size_t BytesBehind(std::uint32_t handle) noexcept {
    return std::size_t{kSegmentUnits - handle % kSegmentUnits} * kUnitBytes;
  }

  std::int64_t used_units() const noexcept { return used_units_; }
  std::uint32_t segments() const noexcept { return live_segments_; }

  // Units on the free lists, by walking them. O(chunks); for audits.
  std::int64_t CountFreeUnits() const noexcept {
    std::int64_t units = 0;
    for (std::uint32_t order = 0; order < kOrders; ++order) {
      for (std::uint32_t c = free_[order]; c != kNone; c = At<FreeChunk>(c)->next) units += std::int64_t{1} << order;
    }
    return units;
  }

 private:
  struct FreeChunk {
    std::uint32_t previous, next;
  };
  static constexpr std::uint32_t kSpareSegments = 4;

  static std::uint32_t LargestPiece(std::uint32_t begin, std::uint32_t end) noexcept {
    const auto aligned = static_cast<std::uint32_t>(std::countr_zero(begin | kSegmentUnits));
    return std::min(aligned, static_cast<std::uint32_t>(std::bit_width(end - begin)) - 1);
  }
  std::uint8_t* State(std::uint32_t chunk) const noexcept {
    return reinterpret_cast<std::uint8_t*>(segments_[chunk / kSegmentUnits]) + std::size_t{kSegmentUnits} * kUnitBytes +
           chunk % kSegmentUnits;
  }
  std::uint32_t StateOf(std::uint32_t chunk) const noexcept { return *State(chunk); }

  void Link(std::uint32_t chunk, std::uint32_t order) noexcept {
    *State(chunk) = static_cast<std::uint8_t>(order + 1);
    StoreRecord(*At<FreeChunk>(chunk), FreeChunk{kNone, free_[order]});
    if (free_[order] != kNone) Store(At<FreeChunk>(free_[order])->previous, chunk);
    free_[order] = chunk;
    if (order + 1 == kOrders) ++free_segments_;
  }
  void Unlink(std::uint32_t chunk, std::uint32_t order) noexcept {
    *State(chunk) = 0;
    const FreeChunk entry = *At<FreeChunk>(chunk);
    if (entry.previous != kNone) {
      Store(At<FreeChunk>(entry.previous)->next, entry.next);
    } else {
      free_[order] = entry.next;
    }
    if (entry.next != kNone) Store(At<FreeChunk>(entry.next)->previous, entry.previous);
    if (order + 1 == kOrders) --free_segments_;
  }

  bool AddSegment() noexcept {
    if (segments_ == nullptr) return false;
    std::uint32_t index = first_hole_;
    while (index < ever_used_ && segments_[index] != nullptr) ++index;
    std::byte* const segment = index < most_segments_ ? pool_.Take() : nullptr;
    if (segment == nullptr) return false;
    std::atomic_ref<std::byte*>(segments_[index]).store(segment, std::memory_order_seq_cst);
    ever_used_ = std::max(ever_used_, index + 1);
    first_hole_ = index + 1;
    ++live_segments_;
    Link(index * kSegmentUnits, kOrders - 1);
    return true;
  }
  void ReleaseOne() noexcept {
    const std::uint32_t chunk = free_[kOrders - 1];
    Unlink(chunk, kOrders - 1);
    ReleaseSegment(chunk / kSegmentUnits);
  }
  void ReleaseSegment(std::uint32_t index) noexcept {
    std::byte* const segment = segments_[index];
    std::atomic_ref<std::byte*>(segments_[index]).store(nullptr, std::memory_order_seq_cst);
    pool_.Give(segment);
    first_hole_ = std::min(first_hole_, index);
    --live_segments_;
  }

  SegmentPool& pool_;
  const bool shared_;
  const std::uint32_t most_segments_;
  std::byte** const segments_;   // most_segments_ of them; null where there is none.
  std::uint32_t free_[kOrders];  // Heads of the lists of free chunks, by order.
  std::uint32_t first_hole_ = 0, ever_used_ = 0, live_segments_ = 0, free_segments_ = 0;
  std::int64_t used_units_ = 0;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_ARENA_H_

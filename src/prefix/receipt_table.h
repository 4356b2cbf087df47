// What the approximate index knows of each receipt that has not been released.
//
// Private to src/prefix.
#ifndef TOKROUTE_SRC_PREFIX_RECEIPT_TABLE_H_
#define TOKROUTE_SRC_PREFIX_RECEIPT_TABLE_H_

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <new>

#include "prefix/arena.h"

namespace tokroute::internal {

// A receipt's other half. `state` is touched by any thread; the rest is guarded by the index's lock.
struct LiveReceipt {
  // Serial x 16 and flags; 0: free. Serial and flags are one word, so that a late call on a receipt that is gone can
  // never touch its successor.
  static constexpr std::uint64_t kFirstToken = 1, kReleased = 2, kAborted = 4;
  static constexpr int kSerialShift = 4;

  std::atomic<std::uint64_t> state{0};
  std::uint32_t owner = kNone;
  std::uint32_t run = kNone, blocks = 0;  // Where its path ends: after so many blocks of that run.
  std::uint32_t next = kNone;             // In the free list, or in the queue of the released.

  // Sets flags, and returns what it is then. 0: the receipt is another one's, or released.
  std::uint64_t Mark(std::uint64_t serial, std::uint64_t flags) noexcept {
    std::uint64_t is = state.load(std::memory_order_relaxed);
    do {
      if (is >> kSerialShift != serial || (is & kReleased) != 0) return 0;
    } while (!state.compare_exchange_weak(is, is | flags, std::memory_order_acq_rel, std::memory_order_relaxed));
    return is | flags;
  }
};

// They are at addresses that never change: chunks of doubling size, kept as long as the index, since a receipt that is
// long gone may still be asked about. Find is safe from any thread; New and Free are guarded by the index's lock.
class ReceiptTable {
 public:
  explicit ReceiptTable(MemoryBudget& budget) noexcept : budget_(budget) {}
  ~ReceiptTable() {
    for (std::uint32_t i = 0; i < kChunks; ++i) delete[] chunks_[i].load(std::memory_order_relaxed);
  }
  ReceiptTable(const ReceiptTable&) = delete;
  ReceiptTable& operator=(const ReceiptTable&) = delete;

  LiveReceipt& operator[](std::uint32_t entry) const noexcept {
    const std::uint32_t chunk = ChunkOf(entry);
    return chunks_[chunk].load(std::memory_order_acquire)[entry - FirstOf(chunk)];
  }
  // Null: there never was such an entry.
  LiveReceipt* Find(std::uint32_t entry) const noexcept {
    if (entry >= kFirstChunk * ((1u << kChunks) - 1)) return nullptr;
    const std::uint32_t chunk = ChunkOf(entry);
    LiveReceipt* entries = chunks_[chunk].load(std::memory_order_acquire);
    return entries != nullptr ? entries + (entry - FirstOf(chunk)) : nullptr;
  }
  std::uint32_t size() const noexcept { return size_; }
  // kNone: no memory.
  std::uint32_t New() noexcept {
    if (free_ == kNone && !Grow()) return kNone;
    const std::uint32_t entry = free_;
    free_ = (*this)[entry].next;
    return entry;
  }
  void Free(std::uint32_t entry) noexcept {
    LiveReceipt& live = (*this)[entry];
    live.state.store(0, std::memory_order_relaxed);
    live.next = free_;
    free_ = entry;
  }

 private:
  static constexpr std::uint32_t kFirstChunk = 256, kChunks = 23;
  static std::uint32_t ChunkOf(std::uint32_t entry) noexcept {
    return static_cast<std::uint32_t>(std::bit_width(entry / kFirstChunk + 1)) - 1;
  }
  static std::uint32_t FirstOf(std::uint32_t chunk) noexcept { return kFirstChunk * ((1u << chunk) - 1); }
  bool Grow() noexcept {
    const std::uint32_t chunk = ChunkOf(size_);
    if (chunk >= kChunks) return false;
    const std::uint32_t count = kFirstChunk << chunk;
    const std::int64_t bytes = static_cast<std::int64_t>(count) * static_cast<std::int64_t>(sizeof(LiveReceipt));
    if (!budget_.Take(bytes)) return false;
    LiveReceipt* entries = new (std::nothrow) LiveReceipt[count];
    if (entries == nullptr) {
      budget_.Give(bytes);
      return false;
    }
    for (std::uint32_t i = count; i-- > 0;) {
      entries[i].next = free_;
      free_ = size_ + i;
    }
    chunks_[chunk].store(entries, std::memory_order_release);
    size_ += count;
    return true;
  }

  MemoryBudget& budget_;
  std::array<std::atomic<LiveReceipt*>, kChunks> chunks_{};
  std::uint32_t size_ = 0, free_ = kNone;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_RECEIPT_TABLE_H_

// Where tickets live: one entry per leg, at an address that never changes, from chunks that are reused.
#ifndef TOKROUTE_INTERNAL_BOOKING_SLAB_H_
#define TOKROUTE_INTERNAL_BOOKING_SLAB_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "tokroute/booking.h"
#include "tokroute/decision.h"
#include "tokroute/erased.h"
#include "tokroute/route_options.h"

namespace tokroute::internal {

// One leg of one ticket. An entry belongs to its ticket until the ticket is destroyed, so late and repeated calls find
// it in its last phase and do nothing.
struct BookingEntry {
  enum class Phase : std::uint8_t { kFree, kLive, kFinished, kExpired };

  // Written while nobody else may touch the ticket (routing, rerouting); read by its owner without the lock.
  Decision decision;
  // Written by the router's thread after the section; changed by producers under their own locks.
  std::array<AnyRequestProducer::Receipt, kMaxRequestProducers> receipts{};
  // Not zero while receipts are being worked on outside the router's lock by somebody whom Expire must not disturb.
  std::atomic<std::uint8_t> busy{0};

  // The rest is guarded by the router's lock. Phase, deadline and abandoned: of the first leg, for the whole ticket.
  Booking booking;
  std::int64_t max_output_tokens = -1;  // Of the request: MoveTo prices without it.
  std::int64_t deadline_ns = std::numeric_limits<std::int64_t>::max();
  BookingEntry* next_leg = nullptr;
  BookingEntry* next_free = nullptr;
  Phase phase = Phase::kFree;
  bool first_leg = false;
  bool abandoned = false;  // The ticket went while Expire was still telling producers: Expire frees it.
};

// Guarded by the router's lock.
class BookingSlab {
 public:
  struct Chunk {
    std::unique_ptr<BookingEntry[]> entries;
    std::uint32_t count = 0;
  };

  std::uint32_t NextChunkSize() const noexcept { return kFirstChunk << (chunk_count_ < 10 ? chunk_count_ : 10); }
  // Allocated outside the lock, then given to Attach. Null entries: no memory.
  static Chunk NewChunk(std::uint32_t count) noexcept {
    return {std::unique_ptr<BookingEntry[]>(new (std::nothrow) BookingEntry[count]), count};
  }
  void Attach(Chunk chunk) noexcept {
    if (chunk_count_ == chunks_.size()) return;  // 64 chunks: more than 3 million entries.
    for (std::uint32_t i = chunk.count; i-- > 0;) {
      chunk.entries[i].next_free = free_;
      free_ = &chunk.entries[i];
    }
    free_count_ += chunk.count;
    chunks_[chunk_count_++] = std::move(chunk);
  }
  bool Full() const noexcept { return chunk_count_ == chunks_.size(); }
  std::uint32_t free_count() const noexcept { return free_count_; }
  BookingEntry* Take() noexcept {
    BookingEntry* entry = free_;
    free_ = entry->next_free;
    --free_count_;
    entry->next_leg = nullptr;
    return entry;
  }
  void Give(BookingEntry* entry) noexcept {
    entry->phase = BookingEntry::Phase::kFree;
    entry->first_leg = entry->abandoned = false;
    entry->deadline_ns = std::numeric_limits<std::int64_t>::max();
    entry->next_free = free_;
    free_ = entry;
    ++free_count_;
  }
  std::uint32_t chunk_count() const noexcept { return chunk_count_; }
  const Chunk& chunk(std::uint32_t i) const noexcept { return chunks_[i]; }

 private:
  static constexpr std::uint32_t kFirstChunk = 64;
  std::array<Chunk, 64> chunks_;
  std::uint32_t chunk_count_ = 0, free_count_ = 0;
  BookingEntry* free_ = nullptr;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_BOOKING_SLAB_H_

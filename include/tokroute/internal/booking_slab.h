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
// out by its events and do nothing. The first leg's stand for the whole ticket.
struct alignas(64) BookingEntry {  // Whole cache lines: neighbours belong to other threads.
  // What has happened to the ticket. Whoever sets kFirstToken or kClosing first does what follows from it; the books
  // follow when somebody has the router's lock and settles the queue, at the latest before the next decision.
  enum Event : std::uint32_t {
    kFirstToken = 1,
    kClosing = 2,   // Somebody ends it: Finish, Drop or Expire.
    kEnded = 4,     // `outcome` says how.
    kExpired = 8,   // By Expire.
    kDropped = 16,  // The ticket is gone: whoever settles frees the entry.
    kBusy = 32,     // Somebody works on receipts outside the lock, whom Expire must not disturb and Drop not free.
    kQueued = 64,   // In the queue of tickets to settle.
  };

  // What settling touches comes first and together: it may happen on another core.
  std::atomic<std::uint32_t> events{0};
  std::uint32_t home = 0;         // The free list that it goes back to. Guarded by the router's lock, like ...
  BookingEntry* next = nullptr;   // In the queue, or in a free list.
  BookingEntry* next_leg = nullptr;
  // ... the booking; deadline and live, of the first leg, for the whole ticket.
  std::int64_t deadline_ns = std::numeric_limits<std::int64_t>::max();
  Booking booking;
  bool live = false;  // Booked, and its end is not settled yet.
  Outcome outcome;    // Written by who set kClosing, before kEnded.
  std::int64_t max_output_tokens = -1;  // Of the request: MoveTo prices without it.

  // Written while nobody else may touch the ticket (routing, rerouting); read by its owner without the lock.
  Decision decision;
  // Written by the router's thread after the section; changed by producers under their own locks.
  std::array<AnyRequestProducer::Receipt, kMaxRequestProducers> receipts{};
};

// Tickets with events that are not settled yet, first come, first served. Add from any thread; the rest by one at a time.
// A state has several, so that threads need not pass one to and fro.
class BookingQueue {
 public:
  // False: closed.
  bool Add(BookingEntry* entry) noexcept {
    BookingEntry* head = head_.load(std::memory_order_relaxed);
    do {
      if (head == Closed()) return false;
      entry->next = head;
    } while (!head_.compare_exchange_weak(head, entry, std::memory_order_release, std::memory_order_relaxed));
    return true;
  }
  // Chained by `next`, which may be used again as soon as an entry's kQueued is taken away.
  BookingEntry* TakeAll() noexcept {
    BookingEntry* const head = head_.load(std::memory_order_relaxed);
    if (head == nullptr || head == Closed()) return nullptr;
    return Reversed(head_.exchange(nullptr, std::memory_order_acquire));
  }
  // The same, and nothing can be added from now on.
  BookingEntry* Close() noexcept { return Reversed(head_.exchange(Closed(), std::memory_order_acq_rel)); }

 private:
  static BookingEntry* Reversed(BookingEntry* entry) noexcept {
    BookingEntry* reversed = nullptr;
    while (entry != nullptr) {
      BookingEntry* next = std::exchange(entry->next, reversed);
      reversed = entry;
      entry = next;
    }
    return reversed;
  }
  // An address that is no entry's. Not a static object: hidden in two shared objects it would be two.
  BookingEntry* Closed() noexcept { return reinterpret_cast<BookingEntry*>(this); }

  std::atomic<BookingEntry*> head_{nullptr};
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
    for (std::uint32_t i = chunk.count; i-- > 0;) Push(&chunk.entries[i], 0);
    free_count_ += chunk.count;
    chunks_[chunk_count_++] = std::move(chunk);
  }
  bool Full() const noexcept { return chunk_count_ == chunks_.size(); }
  std::uint32_t free_count() const noexcept { return free_count_; }
  // `thread`: any number that tells threads apart. Entries go back to the thread that took them, whoever frees them: one
  // that comes from another core brings a dozen cold lines into the critical section.
  BookingEntry* Take(std::uint32_t thread) noexcept {  // free_count() > 0.
    std::uint32_t list = thread % kLists;
    while (free_[list] == nullptr) list = (list + 1) % kLists;
    BookingEntry* entry = free_[list];
    free_[list] = entry->next;
    --free_count_;
    entry->next_leg = nullptr;
    entry->home = thread % kLists;
    return entry;
  }
  void Give(BookingEntry* entry) noexcept {
    entry->events.store(0, std::memory_order_relaxed);
    entry->live = false;
    entry->deadline_ns = std::numeric_limits<std::int64_t>::max();
    Push(entry, entry->home);
    ++free_count_;
  }
  std::uint32_t chunk_count() const noexcept { return chunk_count_; }
  const Chunk& chunk(std::uint32_t i) const noexcept { return chunks_[i]; }

 private:
  void Push(BookingEntry* entry, std::uint32_t list) noexcept {
    entry->next = free_[list];
    free_[list] = entry;
  }

  static constexpr std::uint32_t kFirstChunk = 64, kLists = 16;
  std::uint32_t chunk_count_ = 0, free_count_ = 0;
  std::array<BookingEntry*, kLists> free_{};
  std::array<Chunk, 64> chunks_;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_BOOKING_SLAB_H_

// Words that one writer changes while any number of readers look: every access a reader may see is atomic.
//
// Private to src/prefix. A reader may find garbage (memory that has been put to another use) and must check what it
// found before it believes it; what it reads is never torn, and ThreadSanitizer knows it as atomic. The writer reads
// its own words plainly. Loads acquire and stores release: free on x86-64, and enough for a version that is read before
// and after.
#ifndef TOKROUTE_SRC_PREFIX_SHARED_WORD_H_
#define TOKROUTE_SRC_PREFIX_SHARED_WORD_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "internal/thread_number.h"

namespace tokroute::internal {

template <class T>
T Load(const T& word) noexcept {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
template <class T>
void Store(T& word, std::type_identity_t<T> value) noexcept {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

// A record of 32-bit words, to or from shared memory, word by word.
template <class T>
T LoadRecord(const T& shared) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0 && alignof(T) >= 4);
  std::array<std::uint32_t, sizeof(T) / 4> words;
  const auto* from = reinterpret_cast<const std::uint32_t*>(&shared);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = Load(from[i]);
  T copy;
  std::memcpy(static_cast<void*>(&copy), words.data(), sizeof(T));
  return copy;
}
template <class T>
void StoreRecord(T& shared, const T& value) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0 && alignof(T) >= 4);
  std::array<std::uint32_t, sizeof(T) / 4> words;
  std::memcpy(words.data(), &value, sizeof(T));
  auto* to = reinterpret_cast<std::uint32_t*>(&shared);
  for (std::size_t i = 0; i < words.size(); ++i) Store(to[i], words[i]);
}

// Keeps memory mapped while somebody reads: the writer gives none back to the system unless all is quiet. (Memory that
// goes to another use inside the arena needs no such care: readers check what they find.)
class ReaderGate {
 public:
  class Visit {
   public:
    explicit Visit(ReaderGate& gate) noexcept : count_(gate.slots_[ThreadNumber() % kSlots].count) {
      count_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Visit() { count_.fetch_sub(1, std::memory_order_release); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    std::atomic<std::uint32_t>& count_;
  };
  // Asked by the writer after it took something out of sight (with a seq_cst store): nobody can still be looking at it.
  bool Quiet() const noexcept {
    for (const Slot& slot : slots_) {
      if (slot.count.load(std::memory_order_seq_cst) != 0) return false;
    }
    return true;
  }

 private:
  static constexpr std::uint32_t kSlots = 64;
  struct alignas(64) Slot {
    std::atomic<std::uint32_t> count{0};
  };
  std::array<Slot, kSlots> slots_;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_SHARED_WORD_H_

// Tells threads apart, from 0 on. A hint and no more: what it chooses (a scratch, a list) must work for any thread.
#ifndef TOKROUTE_SRC_INTERNAL_THREAD_NUMBER_H_
#define TOKROUTE_SRC_INTERNAL_THREAD_NUMBER_H_

#include <atomic>
#include <cstdint>

namespace tokroute::internal {

inline std::uint32_t ThreadNumber() noexcept {
  static std::atomic<std::uint32_t> threads{0};
  thread_local const std::uint32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_INTERNAL_THREAD_NUMBER_H_

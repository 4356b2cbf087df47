// Replaces operator new, for a program that counts allocations or lets them fail. Included by one source of a program.
//
//   testing_support::on_allocation = [] { return ++allocations, true; };  // False: it fails.
#ifndef TOKROUTE_TESTS_SUPPORT_REPLACED_NEW_H_
#define TOKROUTE_TESTS_SUPPORT_REPLACED_NEW_H_

#include <cstddef>
#include <cstdlib>
#include <new>

// ThreadSanitizer's runtime brings its own operator new, which cannot be replaced beside it.
#if defined(__SANITIZE_THREAD__)
#define TOKROUTE_TEST_REPLACES_NEW 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TOKROUTE_TEST_REPLACES_NEW 0
#endif
#endif
#ifndef TOKROUTE_TEST_REPLACES_NEW
#define TOKROUTE_TEST_REPLACES_NEW 1
#endif

namespace tokroute::testing_support {

inline constexpr bool kReplacesNew = TOKROUTE_TEST_REPLACES_NEW != 0;
inline bool (*on_allocation)() = nullptr;

}  // namespace tokroute::testing_support

#if TOKROUTE_TEST_REPLACES_NEW
namespace tokroute::testing_support {

// Not inlined: GCC would see a pointer from operator new reach free, and warn.
[[gnu::noinline]] inline void Free(void* memory) noexcept { std::free(memory); }

[[gnu::noinline]] inline void* Allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (on_allocation != nullptr && !on_allocation()) return nullptr;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes != 0 ? bytes : 1);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
inline void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  void* memory = Allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace tokroute::testing_support

void* operator new(std::size_t bytes) { return tokroute::testing_support::AllocateOrThrow(bytes, 1); }
void* operator new[](std::size_t bytes) { return tokroute::testing_support::AllocateOrThrow(bytes, 1); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return tokroute::testing_support::Allocate(bytes, 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return tokroute::testing_support::Allocate(bytes, 1);
}
void* operator new(std::size_t bytes, std::align_val_t at) {
  return tokroute::testing_support::AllocateOrThrow(bytes, static_cast<std::size_t>(at));
}
void* operator new[](std::size_t bytes, std::align_val_t at) {
  return tokroute::testing_support::AllocateOrThrow(bytes, static_cast<std::size_t>(at));
}
void* operator new(std::size_t bytes, std::align_val_t at, const std::nothrow_t&) noexcept {
  return tokroute::testing_support::Allocate(bytes, static_cast<std::size_t>(at));
}
void* operator new[](std::size_t bytes, std::align_val_t at, const std::nothrow_t&) noexcept {
  return tokroute::testing_support::Allocate(bytes, static_cast<std::size_t>(at));
}
void operator delete(void* memory) noexcept { tokroute::testing_support::Free(memory); }
void operator delete[](void* memory) noexcept { tokroute::testing_support::Free(memory); }
void operator delete(void* memory, std::size_t) noexcept { tokroute::testing_support::Free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { tokroute::testing_support::Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { tokroute::testing_support::Free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { tokroute::testing_support::Free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { tokroute::testing_support::Free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  tokroute::testing_support::Free(memory);
}
#endif

#endif  // TOKROUTE_TESTS_SUPPORT_REPLACED_NEW_H_

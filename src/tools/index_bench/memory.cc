#include "tools/index_bench/memory.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tokroute::index_bench {
namespace {

std::atomic<std::int64_t> counted_bytes{0};
thread_local int counting = 0;
thread_local std::int64_t allocations = 0;

// Each allocation is preceded by its size, in as much room as keeps it aligned.
std::size_t RoomFor(std::size_t alignment) noexcept { return std::max(alignment, alignof(std::max_align_t)); }

void* Allocate(std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t room = RoomFor(alignment);
  if (bytes > std::numeric_limits<std::size_t>::max() - 2 * room) return nullptr;
  const std::size_t whole = (bytes + 2 * room - 1) / room * room;
  const bool plain = alignment <= alignof(std::max_align_t);
  auto* const memory = static_cast<std::byte*>(plain ? std::malloc(whole) : std::aligned_alloc(room, whole));
  if (memory == nullptr) return nullptr;
  ++allocations;
  // The sign tells whose it is: the index may free what it counted, and nobody else's.
  const std::int64_t size = static_cast<std::int64_t>(bytes) * (counting > 0 ? 1 : -1);
  if (counting > 0) counted_bytes.fetch_add(size, std::memory_order_relaxed);
  std::memcpy(memory, &size, sizeof size);
  return memory + room;
}

void Release(void* pointer, std::size_t alignment) noexcept {
  if (pointer == nullptr) return;
  std::byte* const memory = static_cast<std::byte*>(pointer) - RoomFor(alignment);
  std::int64_t size = 0;
  std::memcpy(&size, memory, sizeof size);
  if (size > 0) counted_bytes.fetch_sub(size, std::memory_order_relaxed);
  std::free(memory);
}

void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  void* const memory = Allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

constexpr std::size_t kPlain = alignof(std::max_align_t);

}  // namespace

CountedAllocations::CountedAllocations() noexcept { ++counting; }
CountedAllocations::~CountedAllocations() { --counting; }

std::int64_t CountedBytes() noexcept { return counted_bytes.load(std::memory_order_relaxed); }
std::int64_t ThreadAllocations() noexcept { return allocations; }

void KeepFreedMemory() noexcept {
#ifdef __GLIBC__
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

}  // namespace tokroute::index_bench

using tokroute::index_bench::Allocate;
using tokroute::index_bench::AllocateOrThrow;
using tokroute::index_bench::kPlain;
using tokroute::index_bench::Release;

void* operator new(std::size_t bytes) { return AllocateOrThrow(bytes, kPlain); }
void* operator new[](std::size_t bytes) { return AllocateOrThrow(bytes, kPlain); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, kPlain); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, kPlain); }
void* operator new(std::size_t bytes, std::align_val_t a) {
  return AllocateOrThrow(bytes, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t bytes, std::align_val_t a) {
  return AllocateOrThrow(bytes, static_cast<std::size_t>(a));
}
void* operator new(std::size_t bytes, std::align_val_t a, const std::nothrow_t&) noexcept {
  return Allocate(bytes, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t bytes, std::align_val_t a, const std::nothrow_t&) noexcept {
  return Allocate(bytes, static_cast<std::size_t>(a));
}
void operator delete(void* p) noexcept { Release(p, kPlain); }
void operator delete[](void* p) noexcept { Release(p, kPlain); }
void operator delete(void* p, std::size_t) noexcept { Release(p, kPlain); }
void operator delete[](void* p, std::size_t) noexcept { Release(p, kPlain); }
void operator delete(void* p, const std::nothrow_t&) noexcept { Release(p, kPlain); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { Release(p, kPlain); }
void operator delete(void* p, std::align_val_t a) noexcept { Release(p, static_cast<std::size_t>(a)); }
void operator delete[](void* p, std::align_val_t a) noexcept { Release(p, static_cast<std::size_t>(a)); }
void operator delete(void* p, std::size_t, std::align_val_t a) noexcept { Release(p, static_cast<std::size_t>(a)); }
void operator delete[](void* p, std::size_t, std::align_val_t a) noexcept { Release(p, static_cast<std::size_t>(a)); }
void operator delete(void* p, std::align_val_t a, const std::nothrow_t&) noexcept {
  Release(p, static_cast<std::size_t>(a));
}
void operator delete[](void* p, std::align_val_t a, const std::nothrow_t&) noexcept {
  Release(p, static_cast<std::size_t>(a));
}

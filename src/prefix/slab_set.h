// Equal small records, gathered in slabs so that a slab can go back to the arena when the last of its records does.
//
// Private to src/prefix. Says which places are free, and nothing of what is in them: the owner knows the record, and
// when nobody can be reading an empty slab any more.
#ifndef TOKROUTE_SRC_PREFIX_SLAB_SET_H_
#define TOKROUTE_SRC_PREFIX_SLAB_SET_H_

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "internal/no_memory.h"
#include "prefix/arena.h"

namespace tokroute::internal {

class SlabSet {
 public:
  struct Spot {
    std::uint32_t slab = kNone, item = 0;
    bool first = false;  // Of a slab that was just made.
  };

  // items <= 128.
  SlabSet(std::uint32_t units, std::uint32_t items) noexcept : units_(units), items_(items) {}

  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(slabs_.size()); }
  // Where a slab begins; kNone: there is none by that number now.
  std::uint32_t Handle(std::uint32_t slab) const noexcept { return slabs_[slab].handle; }
  std::int64_t units() const noexcept { return std::int64_t{units_} * live_; }

  // Slab kNone: no memory. O(1).
  Spot New(Arena& arena) noexcept {
    bool fresh = false;
    if (partial_ == kNone) {
      if (!AddSlab(arena)) return {};
      fresh = true;
    }
    Slab& slab = slabs_[partial_];
    const std::uint32_t word = slab.free[0] != 0 ? 0 : 1;
    const auto bit = static_cast<std::uint32_t>(std::countr_zero(slab.free[word]));
    slab.free[word] &= ~(std::uint64_t{1} << bit);
    const Spot spot{partial_, word * 64 + bit, fresh};
    if (slab.used++ == 0) --empty_;
    if (slab.used == items_) Unlink(spot.slab);
    return spot;
  }
  void Free(Spot spot) noexcept {
    Slab& slab = slabs_[spot.slab];
    slab.free[spot.item / 64] |= std::uint64_t{1} << (spot.item % 64);
    if (slab.used-- == items_) Link(spot.slab);
    if (slab.used == 0) ++empty_;
  }

  // More slabs lie empty than is sensible to keep.
  bool HasSurplus() const noexcept { return empty_ > kSpare && empty_ * 2 > live_; }
  void ReleaseEmpty(Arena& arena) noexcept {
    for (std::uint32_t i = 0; i < size() && empty_ > 0; ++i) {
      if (slabs_[i].handle == kNone || slabs_[i].used > 0) continue;
      Unlink(i);
      arena.Free(slabs_[i].handle, units_);
      slabs_[i] = {.next = hole_};
      hole_ = i;
      --empty_;
      --live_;
    }
  }

 private:
  struct Slab {
    std::uint32_t handle = kNone, used = 0;
    std::uint32_t previous = kNone, next = kNone;  // Among those with room; or the next hole.
    std::array<std::uint64_t, 2> free = {};
  };
  static constexpr std::uint32_t kSpare = 4;

  bool AddSlab(Arena& arena) noexcept {
    if (hole_ == kNone) {
      TOKROUTE_TRY { slabs_.push_back({}); }
      TOKROUTE_NO_MEMORY { return false; }
      hole_ = size() - 1;
    }
    const std::uint32_t handle = arena.Allocate(units_);
    if (handle == kNone) return false;
    const std::uint32_t made = hole_;
    hole_ = slabs_[made].next;
    Slab& slab = slabs_[made];
    slab = {.handle = handle};
    for (std::uint32_t i = 0; i < items_; ++i) slab.free[i / 64] |= std::uint64_t{1} << (i % 64);
    Link(made);
    ++live_;
    ++empty_;
    return true;
  }
  void Link(std::uint32_t slab) noexcept {
    slabs_[slab].previous = kNone;
    slabs_[slab].next = partial_;
    if (partial_ != kNone) slabs_[partial_].previous = slab;
    partial_ = slab;
  }
  void Unlink(std::uint32_t slab) noexcept {
    const Slab& was = slabs_[slab];
    (was.previous != kNone ? slabs_[was.previous].next : partial_) = was.next;
    if (was.next != kNone) slabs_[was.next].previous = was.previous;
  }

  const std::uint32_t units_, items_;
  std::vector<Slab> slabs_;
  std::uint32_t partial_ = kNone, hole_ = kNone;
  std::uint32_t live_ = 0, empty_ = 0;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_SLAB_SET_H_

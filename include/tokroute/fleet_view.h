// What code outside the router's lock may ask about a fleet: is this id still the endpoint it was?
#ifndef TOKROUTE_FLEET_VIEW_H_
#define TOKROUTE_FLEET_VIEW_H_

#include <atomic>
#include <cstdint>

#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// A view, valid as long as the fleet or router it came from. Lock-free; any thread; O(1).
class FleetView {
 public:
  FleetView() = default;
  FleetView(const std::atomic<std::uint32_t>* incarnations, std::uint32_t width) noexcept
      : incarnations_(incarnations), width_(width) {}

  // True while the very incarnation that `id` names is in the fleet (drained or ejected ones included).
  bool Alive(EndpointId id) const noexcept {
    return id.incarnation != 0 && id.slot < kMaxEndpoints && incarnations_ != nullptr &&
           incarnations_[id.slot].load(std::memory_order_acquire) == id.incarnation;
  }
  // The id in a slot now; incarnation 0 when it is empty.
  EndpointId At(Row row) const noexcept {
    if (row >= kMaxEndpoints || incarnations_ == nullptr) return {};
    return {row, incarnations_[row].load(std::memory_order_acquire)};
  }
  // Slots in use when the view was taken: rows 0 .. width - 1.
  std::uint32_t width() const noexcept { return width_; }

 private:
  const std::atomic<std::uint32_t>* incarnations_ = nullptr;  // kMaxEndpoints of them; 0 where nobody is.
  std::uint32_t width_ = 0;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_FLEET_VIEW_H_

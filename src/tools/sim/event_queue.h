// Virtual time: events in order of time, those of one instant in the order in which they were scheduled.
#ifndef TOKROUTE_SRC_TOOLS_SIM_EVENT_QUEUE_H_
#define TOKROUTE_SRC_TOOLS_SIM_EVENT_QUEUE_H_

#include <cassert>
#include <cstdint>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

namespace tokroute::tools {

using Nanoseconds = std::int64_t;  // Since the start of the simulation, or a length of time. Integer: sums are exact.

template <class Event>
class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  Nanoseconds now() const { return now_; }

  // at >= now().
  void Schedule(Nanoseconds at, Event event) {
    assert(at >= now_);
    heap_.push({at, next_sequence_++, std::move(event)});
  }
  // Moves the clock to the next event. Only when not empty.
  Event Pop() {
    Entry top = heap_.top();
    heap_.pop();
    now_ = top.at;
    return top.event;
  }

 private:
  struct Entry {
    Nanoseconds at;
    std::uint64_t
        sequence;  // A heap alone would order equal times by its own layout, which standard libraries differ in.
    Event event;
    bool operator<(const Entry& other) const {  // std::priority_queue shows the greatest first.
      return std::tie(other.at, other.sequence) < std::tie(at, sequence);
    }
  };
  std::priority_queue<Entry> heap_;
  std::uint64_t next_sequence_ = 0;
  Nanoseconds now_ = 0;
};

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_SIM_EVENT_QUEUE_H_

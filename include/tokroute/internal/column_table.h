// The storage that Candidates are views of: one pointer per signal, and the rows still alive.
#ifndef TOKROUTE_INTERNAL_COLUMN_TABLE_H_
#define TOKROUTE_INTERNAL_COLUMN_TABLE_H_

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "tokroute/fwd.h"
#include "tokroute/signal.h"

namespace tokroute::internal {

inline constexpr std::uint32_t kMaxColumns = 32;  // Signals of one router, all producers together.

// Which signal sits at which position. Fixed when a router is made.
struct ColumnLayout {
  std::array<SignalInfo, kMaxColumns> columns{};
  std::array<bool, kMaxColumns> per_request{};  // Filled per request (scratch), or kept per endpoint (state).
  std::array<std::string_view, kMaxColumns> producer{};
  std::uint32_t count = 0;

  // The position of a signal of that name and type; -1: nobody fills it; -2: somebody does, with another type.
  int Find(const SignalInfo& wanted) const noexcept {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (columns[i].name == wanted.name) return columns[i].SameType(wanted) ? static_cast<int>(i) : -2;
    }
    return -1;
  }
};

struct ColumnTable {
  std::array<void*, kMaxColumns> columns{};  // Each kMaxEndpoints values long.
  std::uint32_t width = 0;                   // Rows in use.
};

// The candidate rows during one decision. Starts as a view of the fleet's list and narrows into spare buffers: three,
// so that two selections can be held beside the current rows.
struct Survivors {
  const Row* rows = nullptr;
  std::uint32_t count = 0;
  Row* buffers[3] = {};
  std::uint32_t next = 0;

  Row* SpareBuffer() noexcept {
    if (buffers[next] == rows) next = (next + 1) % 3;
    Row* spare = buffers[next];
    next = (next + 1) % 3;
    return spare;
  }
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_COLUMN_TABLE_H_

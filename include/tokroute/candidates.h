// Candidates: the columns a plugin declared, and the rows still alive. WritableColumns: a producer's own columns.
//
//   const auto active = candidates.Column<ActiveRequests>();
//   for (Row row : candidates) most = std::max(most, active[row]);
#ifndef TOKROUTE_CANDIDATES_H_
#define TOKROUTE_CANDIDATES_H_

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tokroute/fwd.h"
#include "tokroute/internal/column_table.h"
#include "tokroute/signal.h"

namespace tokroute {
inline namespace v0 {

// Rows picked by Candidates::Select, in candidate order.
struct Selection {
  const Row* rows = nullptr;
  std::uint32_t count = 0;
};

// A by-value view: the survivors and one pointer per declared signal. Valid during the call it is passed to.
template <Signal... S>
class Candidates {
 public:
  Candidates(internal::Survivors* survivors, std::tuple<const typename S::value_type*...> columns,
             std::uint32_t width) noexcept
      : survivors_(survivors), columns_(columns), width_(width) {}

  // One value per fleet slot, indexed by Row; only the survivors' rows mean anything.
  template <Signal T>
    requires(std::same_as<T, S> || ...)
  std::span<const typename T::value_type> Column() const noexcept {
    return {std::get<IndexOf<T>()>(columns_), width_};
  }

  // The survivors, in ascending row order.
  const Row* begin() const noexcept { return survivors_->rows; }
  const Row* end() const noexcept { return survivors_->rows + survivors_->count; }
  std::uint32_t size() const noexcept { return survivors_->count; }

  // The survivors for which `wanted(row)` holds, in one pass; changes nothing. The last two selections stay valid; a
  // third overwrites the first. Never allocates.
  template <class Wanted>
  Selection Select(Wanted wanted) const noexcept {
    Row* out = survivors_->SpareBuffer();
    std::uint32_t count = 0;
    for (Row row : *this) {
      out[count] = row;  // Written always, counted if wanted: no branch to mispredict.
      count += wanted(row) ? 1U : 0U;
    }
    return {out, count};
  }

  // Makes a selection of this call the survivors. Filters only.
  void Keep(Selection selection) const noexcept {
    survivors_->rows = selection.rows;
    survivors_->count = selection.count;
  }

 private:
  template <Signal T>
  static constexpr std::size_t IndexOf() noexcept {
    constexpr bool same[] = {std::same_as<T, S>...};
    std::size_t i = 0;
    while (!same[i]) ++i;
    return i;
  }
  internal::Survivors* survivors_;
  std::tuple<const typename S::value_type*...> columns_;
  std::uint32_t width_;
};

// What an erased plugin is given: the survivors and the table, from which it makes Candidates<S...> by positions that it
// resolved once, when it was bound.
struct ErasedCandidates {
  internal::Survivors* survivors = nullptr;
  const internal::ColumnTable* table = nullptr;
  const Row* begin() const noexcept { return survivors->rows; }
  const Row* end() const noexcept { return survivors->rows + survivors->count; }
  std::uint32_t size() const noexcept { return survivors->count; }
};

template <class Consumes>
struct CandidatesForT;
template <Signal... S>
struct CandidatesForT<Signals<S...>> {
  using type = Candidates<S...>;
};
template <>
struct CandidatesForT<RuntimeSignals> {
  using type = ErasedCandidates;
};
// What a plugin that declares `using Consumes = Signals<...>` takes.
template <class Consumes>
using CandidatesFor = typename CandidatesForT<Consumes>::type;

// A producer's own columns, to write. Indexed by Row. Valid during the call they are passed to.
template <class Produces>
class WritableColumns;
template <Signal... S>
class WritableColumns<Signals<S...>> {
 public:
  WritableColumns(std::tuple<typename S::value_type*...> columns, std::uint32_t width) noexcept
      : columns_(columns), width_(width) {}
  template <Signal T>
    requires(std::same_as<T, S> || ...)
  std::span<typename T::value_type> Column() const noexcept {
    constexpr bool same[] = {std::same_as<T, S>...};
    constexpr std::size_t index = [&] {
      std::size_t i = 0;
      while (!same[i]) ++i;
      return i;
    }();
    return {std::get<index>(columns_), width_};
  }
  // Some of the columns, for a producer that is made of another one.
  template <class Some>
  WritableColumns<Some> Part() const noexcept {
    return [this]<Signal... T>(Signals<T...>) {
      return WritableColumns<Signals<T...>>({Column<T>().data()...}, width_);
    }(Some{});
  }
  std::uint32_t width() const noexcept { return width_; }

 private:
  std::tuple<typename S::value_type*...> columns_;
  std::uint32_t width_;
};

// What an erased producer is given: the whole table.
template <>
class WritableColumns<RuntimeSignals> {
 public:
  explicit WritableColumns(const internal::ColumnTable& t) noexcept : table(&t) {}
  const internal::ColumnTable* table;
};

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

// Positions of a signal list in a table, resolved once.
template <class List>
struct Positions;
template <Signal... S>
struct Positions<Signals<S...>> {
  std::array<std::uint16_t, sizeof...(S)> at{};

  // Returns the signal that the layout lacks (or holds with another type), or nullptr when all are there.
  const SignalInfo* Resolve(const ColumnLayout& layout) noexcept {
    static constexpr std::array<SignalInfo, sizeof...(S)> kInfo{InfoOf<S>()...};
    for (std::size_t i = 0; i < sizeof...(S); ++i) {
      const int position = layout.Find(kInfo[i]);
      if (position < 0) return &kInfo[i];
      at[i] = static_cast<std::uint16_t>(position);
    }
    return nullptr;
  }
  Candidates<S...> View(Survivors* survivors, const ColumnTable& table) const noexcept {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return Candidates<S...>(
          survivors, std::tuple<const typename S::value_type*...>{static_cast<const typename S::value_type*>(table.columns[at[I]])...},
          table.width);
    }(std::index_sequence_for<S...>());
  }
  WritableColumns<Signals<S...>> Own(const ColumnTable& table) const noexcept {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return WritableColumns<Signals<S...>>(
          std::tuple<typename S::value_type*...>{static_cast<typename S::value_type*>(table.columns[at[I]])...}, table.width);
    }(std::index_sequence_for<S...>());
  }
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_CANDIDATES_H_

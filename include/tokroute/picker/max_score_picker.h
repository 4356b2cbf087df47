// MaxScorePicker: the best total; equal ones are drawn uniformly, never told apart by position.
//
// A fixed order would send every request of an idle fleet to one endpoint: the commonest field report about routers.
#ifndef TOKROUTE_PICKER_MAX_SCORE_PICKER_H_
#define TOKROUTE_PICKER_MAX_SCORE_PICKER_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "tokroute/picker/picker_options.h"

namespace tokroute {
inline namespace v0 {

// How equal totals are broken.
enum class TieBreak : std::uint8_t {
  kRandom,      // Uniformly, from the seeded generator. Consumes no signal.
  kRoundRobin,  // The one whose last dispatch is longest ago; uniformly among those never used.
  kLowestLoad,  // Least uncached tokens in flight, then fewest active requests, then uniformly.
};

template <TieBreak tie_break = TieBreak::kRandom>
class MaxScorePicker {
 public:
  static constexpr std::string_view kName = "max-score-picker";
  using Consumes = std::conditional_t<
      tie_break == TieBreak::kRandom, Signals<>,
      std::conditional_t<tie_break == TieBreak::kRoundRobin, Signals<LastDispatch>,
                         Signals<UncachedTokensInFlight, ActiveRequests>>>;

  MaxScorePicker() = default;
  explicit MaxScorePicker(const PickerOptions& options) : options_(options) {}
  absl::Status Check() const { return internal::CheckPicker(options_); }

  // What one pass over the totals knows. A policy fuses it into its scoring loop (see Policy), so that the arg-max costs
  // no pass of its own; Pick does it in one.
  class Scan {
   public:
    void Add(std::uint32_t i, double total) noexcept {
      if (total > best_) {
        runner_up_ = best_, best_ = total, at_ = i, tied_ = 1;
      } else if (total == best_) {
        ++tied_;
      } else if (total > runner_up_) {
        runner_up_ = total;
      }
    }

   private:
    friend class MaxScorePicker;
    // Below every total. A policy's are >= 0, but a picker may be asked on its own.
    static constexpr double kNone = std::numeric_limits<double>::lowest();
    double best_ = kNone, runner_up_ = kNone;
    std::uint32_t at_ = 0, tied_ = 0;
  };

  Choice Pick(const Request& request, CandidatesFor<Consumes> candidates, std::span<const double> totals, Stage& stage,
              std::span<Row> targets) const noexcept {
    Scan scan;
    for (std::uint32_t i = 0; i < totals.size(); ++i) scan.Add(i, totals[i]);
    return PickScanned(request, candidates, totals, scan, stage, targets);
  }

  // As Pick, with the pass over the totals done. A tie costs one more pass and one draw per target.
  Choice PickScanned(const Request&, CandidatesFor<Consumes> candidates, std::span<const double> totals, const Scan& scan,
                     Stage& stage, std::span<Row> targets) const noexcept {
    Choice choice;
    const auto count = static_cast<std::uint32_t>(totals.size());
    if (count == 0 || targets.empty()) return choice;
    choice.best = scan.best_;
    choice.tied = scan.tied_;
    choice.runner_up = scan.tied_ > 1 || scan.runner_up_ == Scan::kNone ? scan.best_ : scan.runner_up_;
    targets[0] = scan.tied_ == 1                       ? candidates.begin()[scan.at_]
                 : tie_break == TieBreak::kRandom ? Draw(candidates, totals, scan, stage)
                                                  : BreakTie(candidates, totals, scan.best_, stage, targets.data(), 0);
    choice.targets = 1;
    const std::uint32_t wanted = internal::TargetCount(options_, count, targets.size());
    while (choice.targets < wanted) {  // The next best of what is left; k is small.
      double next = 0;
      bool any = false;
      for (std::uint32_t i = 0; i < count; ++i) {
        if ((!any || totals[i] > next) && !internal::Contains(targets.data(), choice.targets, candidates.begin()[i])) {
          next = totals[i], any = true;
        }
      }
      targets[choice.targets] = BreakTie(candidates, totals, next, stage, targets.data(), choice.targets);
      ++choice.targets;
    }
    return choice;
  }

 private:
  // BreakTie for the first target, with what the scan knows: how many are equal, and where the first one is.
  static Row Draw(const CandidatesFor<Consumes>& candidates, std::span<const double> totals, const Scan& scan,
                  Stage& stage) noexcept {
    std::uint32_t skip = stage.random.Below(scan.tied_);
    for (std::size_t i = scan.at_;; ++i) {
      if (totals[i] == scan.best_ && skip-- == 0) return candidates.begin()[i];
    }
  }

  // Among the rows of this total that are no targets yet: the best by the rule, and uniformly among equals.
  static Row BreakTie(const CandidatesFor<Consumes>& candidates, std::span<const double> totals, double total, Stage& stage,
                      const Row* taken, std::uint32_t taken_count) noexcept {
    const Row* rows = candidates.begin();
    const auto open = [&](std::size_t i) {
      return totals[i] == total && !internal::Contains(taken, taken_count, rows[i]);
    };
    const auto less = [&]([[maybe_unused]] Row a, [[maybe_unused]] Row b) {
      if constexpr (tie_break == TieBreak::kRoundRobin) {
        const auto last = candidates.template Column<LastDispatch>();
        return last[a] < last[b];
      } else if constexpr (tie_break == TieBreak::kLowestLoad) {
        const auto tokens = candidates.template Column<UncachedTokensInFlight>();
        const auto active = candidates.template Column<ActiveRequests>();
        return tokens[a] != tokens[b] ? tokens[a] < tokens[b] : active[a] < active[b];
      } else {
        return false;
      }
    };
    std::size_t first = totals.size();
    std::uint32_t equal = 0;
    for (std::size_t i = 0; i < totals.size(); ++i) {
      if (!open(i)) continue;
      if (first == totals.size() || less(rows[i], rows[first])) {
        first = i, equal = 1;
      } else if (!less(rows[first], rows[i])) {
        ++equal;
      }
    }
    std::uint32_t skip = equal > 1 ? stage.random.Below(equal) : 0;
    for (std::size_t i = first;; ++i) {
      if (open(i) && !less(rows[first], rows[i]) && skip-- == 0) return rows[i];
    }
  }

  PickerOptions options_;
};
MaxScorePicker(PickerOptions) -> MaxScorePicker<TieBreak::kRandom>;
static_assert(Picker<MaxScorePicker<>> && Picker<MaxScorePicker<TieBreak::kRoundRobin>> &&
              Picker<MaxScorePicker<TieBreak::kLowestLoad>>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PICKER_MAX_SCORE_PICKER_H_

#include "tools/index_bench/subject.h"

#include <mutex>

#include "tools/index_bench/memory.h"

namespace tokroute::index_bench {

// Until the index takes events: the reference itself.
struct Subject::State {
  mutable std::mutex mutex;
  std::unique_ptr<Reference> reference;
  std::int64_t max_blocks = 0, cap_hits = 0;
};

Subject::Subject(std::unique_ptr<State> state) : state_(std::move(state)) {}
Subject::~Subject() {
  const CountedAllocations counted;
  state_.reset();
}
Subject::Subject(Subject&&) noexcept = default;
Subject& Subject::operator=(Subject&&) noexcept = default;

std::string Subject::Name() { return "reference"; }

absl::StatusOr<Subject> Subject::Create(std::int32_t, std::int64_t max_bytes) {
  const CountedAllocations counted;
  auto state = std::make_unique<State>();
  state->reference = std::make_unique<Reference>(kMaxEndpoints);
  state->max_blocks = max_bytes / 64;
  return Subject(std::move(state));
}

bool Subject::Apply(const Operation& operation, std::span<const BlockKey> keys) noexcept {
  const CountedAllocations counted;
  const std::scoped_lock lock(state_->mutex);
  if (operation.kind == OperationKind::kStore &&
      state_->reference->holder_blocks() + static_cast<std::int64_t>(keys.size()) > state_->max_blocks) {
    ++state_->cap_hits;
    return false;
  }
  state_->reference->Apply(operation, keys);
  return true;
}

void Subject::SweepAll() noexcept {}

SubjectStats Subject::Stats() const {
  const std::scoped_lock lock(state_->mutex);
  SubjectStats stats;
  stats.distinct_blocks = state_->reference->distinct_blocks();
  stats.holder_blocks = state_->reference->holder_blocks();
  stats.unknown_parents = state_->reference->exercised().late_parents;
  stats.cap_hits = state_->cap_hits;
  return stats;
}

Subject::Lookup::Lookup(const Subject& subject) : subject_(subject) {}
void Subject::Lookup::Load(std::span<const BlockKey> keys) noexcept { loaded_ = keys; }
void Subject::Lookup::Match() noexcept {
  const std::scoped_lock lock(subject_.state_->mutex);
  subject_.state_->reference->Match(loaded_, holders_);
}
std::span<const Holder> Subject::Lookup::holders() const noexcept { return holders_; }

}  // namespace tokroute::index_bench

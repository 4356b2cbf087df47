#include "tools/index_bench/subject.h"

#include "tokroute/prefix/kv_event.h"
#include "tools/index_bench/memory.h"

namespace tokroute::index_bench {

struct Subject::State {
  std::shared_ptr<PrefixIndex> index;
};

Subject::Subject(std::unique_ptr<State> state) : state_(std::move(state)) {}
Subject::~Subject() {
  const CountedAllocations counted;
  state_.reset();
}
Subject::Subject(Subject&&) noexcept = default;
Subject& Subject::operator=(Subject&&) noexcept = default;

absl::StatusOr<Subject> Subject::Create(std::int32_t block_size, std::int64_t max_bytes) {
  const CountedAllocations counted;
  absl::StatusOr<std::shared_ptr<PrefixIndex>> index =
      PrefixIndex::Create({.mode = IndexMode::kExact, .block_size = block_size, .max_bytes = max_bytes});
  if (!index.ok()) return index.status();
  auto state = std::make_unique<State>();
  state->index = *std::move(index);
  return Subject(std::move(state));
}

bool Subject::Apply(const Operation& operation, std::span<const BlockKey> keys) noexcept {
  const CountedAllocations counted;
  PrefixIndex& index = *state_->index;
  const KvSource source{.endpoint = operation.endpoint};
  switch (operation.kind) {
    case OperationKind::kMatch: return true;
    case OperationKind::kStore: return index.Stored(source, operation.parent, keys) != KvResult::kNoRoom;
    case OperationKind::kRemove: return index.Removed(source, keys) != KvResult::kNoRoom;
    case OperationKind::kClear: index.ClearEndpoint(operation.endpoint); return true;
    case OperationKind::kRemoveEndpoint: index.RemoveEndpoint(operation.endpoint); return true;
  }
  return true;
}

void Subject::SweepAll() noexcept {
  const CountedAllocations counted;
  while (state_->index->Sweep(4096) > 0) {
  }
}

SubjectStats Subject::Stats() const {
  const PrefixIndexStats stats = state_->index->Stats();
  return {.distinct_blocks = stats.distinct_blocks,
          .holder_blocks = stats.holder_blocks,
          .bytes = stats.bytes,
          .pending_sweep = stats.pending_sweep,
          .unknown_parents = stats.unknown_parents,
          .cap_hits = stats.cap_hits,
          .counters = {{"distinct_blocks", stats.distinct_blocks},
                       {"holder_blocks", stats.holder_blocks},
                       {"runs", stats.runs},
                       {"memberships", stats.memberships},
                       {"bytes", stats.bytes},
                       {"peak_bytes", stats.peak_bytes},
                       {"duplicate_blocks", stats.duplicate_blocks},
                       {"unknown_removes", stats.unknown_removes},
                       {"unknown_parents", stats.unknown_parents},
                       {"conflicting_keys", stats.conflicting_keys},
                       {"forks", stats.forks},
                       {"holed_memberships", stats.holed_memberships},
                       {"refused_events", stats.refused_events},
                       {"cap_hits", stats.cap_hits}}};
}

Subject::Lookup::Lookup(const Subject& subject) : index_(*subject.state_->index) {}
void Subject::Lookup::Load(std::span<const BlockKey> keys) noexcept {
  const KeyOptions options = index_.key_options();
  keys_.Reset(options, {.block_keys = keys, .block_size = options.block_size});
}
void Subject::Lookup::Match() noexcept { index_.Match(keys_, match_); }
std::span<const Holder> Subject::Lookup::holders() const noexcept { return match_.holders(); }

}  // namespace tokroute::index_bench

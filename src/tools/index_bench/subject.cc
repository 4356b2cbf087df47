#include "tools/index_bench/subject.h"

#include <limits>

#include "tokroute/prefix/engine_keys.h"
#include "tokroute/prefix/kv_event.h"
#include "tools/index_bench/memory.h"

namespace tokroute::index_bench {

namespace {

// What the engines call a block. One-to-one, so that names are as many as keys.
EngineKey NameOf(BlockKey key) noexcept {
  key = (key ^ (key >> 32)) * 0xD6E8FEB86659FD93u;
  return key ^ (key >> 32);
}

}  // namespace

struct Subject::State {
  std::shared_ptr<PrefixIndex> index;
  std::shared_ptr<EngineKeys> engine_keys;  // Null: events go to the index.
  HashDomain domain;
  std::vector<EngineKey> names;  // Scratch.
};

Subject::Subject(std::unique_ptr<State> state) : state_(std::move(state)) {}
Subject::~Subject() {
  const CountedAllocations counted;
  state_.reset();
}
Subject::Subject(Subject&&) noexcept = default;
Subject& Subject::operator=(Subject&&) noexcept = default;

absl::StatusOr<Subject> Subject::Create(std::int32_t block_size, std::int64_t max_bytes, bool engine_keys) {
  const CountedAllocations counted;
  absl::StatusOr<std::shared_ptr<PrefixIndex>> index =
      PrefixIndex::Create({.mode = IndexMode::kExact, .block_size = block_size, .max_bytes = max_bytes});
  if (!index.ok()) return index.status();
  auto state = std::make_unique<State>();
  state->index = *std::move(index);
  if (engine_keys) {
    absl::StatusOr<std::shared_ptr<EngineKeys>> made = EngineKeys::Create(state->index, {.max_bytes = max_bytes});
    if (!made.ok()) return made.status();
    state->engine_keys = *std::move(made);
    const absl::StatusOr<HashDomain> domain = state->engine_keys->Domain("all");
    if (!domain.ok()) return domain.status();
    state->domain = *domain;
  }
  return Subject(std::move(state));
}

bool Subject::Apply(const Operation& operation, std::span<const BlockKey> keys) noexcept {
  const CountedAllocations counted;
  PrefixIndex& index = *state_->index;
  const KvSource source{.endpoint = operation.endpoint};
  if (EngineKeys* const engine_keys = state_->engine_keys.get(); engine_keys != nullptr) {
    std::vector<EngineKey>& names = state_->names;
    names.resize(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) names[i] = NameOf(keys[i]);
    switch (operation.kind) {
      case OperationKind::kMatch: return true;
      case OperationKind::kStore: {
        EngineBlocks blocks{.engine_keys = names, .keys = keys};
        if (operation.parent.has_value()) blocks.parent = NameOf(*operation.parent);
        return engine_keys->Stored(source, state_->domain, blocks) != KvResult::kNoRoom;
      }
      case OperationKind::kRemove: return engine_keys->Removed(source, state_->domain, names) != KvResult::kNoRoom;
      case OperationKind::kClear: engine_keys->ClearEndpoint(operation.endpoint); return true;
      case OperationKind::kRemoveEndpoint: engine_keys->RemoveEndpoint(operation.endpoint); return true;
    }
    return true;
  }
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
  if (state_->engine_keys != nullptr) (void)state_->engine_keys->Sweep(std::numeric_limits<std::int64_t>::max());
}

SubjectStats Subject::Stats() const {
  const PrefixIndexStats stats = state_->index->Stats();
  const EngineKeysStats named = state_->engine_keys != nullptr ? state_->engine_keys->Stats() : EngineKeysStats{};
  SubjectStats all{.distinct_blocks = stats.distinct_blocks,
          .holder_blocks = stats.holder_blocks,
          .bytes = stats.bytes + named.bytes,
          .pending_sweep = stats.pending_sweep,
          .unknown_parents = stats.unknown_parents,
          .cap_hits = stats.cap_hits + named.cap_hits,
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
  if (state_->engine_keys == nullptr) return all;
  for (const auto& [name, value] : {std::pair("names", named.names),
                                    {"names_bytes", named.bytes},
                                    {"names_swept", named.swept_names},
                                    {"names_unknown_parents", named.unknown_parents},
                                    {"names_unknown_removes", named.unknown_removes},
                                    {"names_conflicts", named.conflicts},
                                    {"names_refused_events", named.refused_events}}) {
    all.counters.emplace_back(name, value);
  }
  return all;
}

Subject::Lookup::Lookup(const Subject& subject) : index_(*subject.state_->index) {}
void Subject::Lookup::Load(std::span<const BlockKey> keys) noexcept {
  const KeyOptions options = index_.key_options();
  keys_.Reset(options, {.block_keys = keys, .block_size = options.block_size});
}
void Subject::Lookup::Match() noexcept { index_.Match(keys_, match_); }
std::span<const Holder> Subject::Lookup::holders() const noexcept { return match_.holders(); }

}  // namespace tokroute::index_bench

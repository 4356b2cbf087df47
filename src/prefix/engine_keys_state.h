// What EngineKeys is made of.
//
// Private to src/prefix. engine_keys.cc: domains, names, and the hand that looks for names of blocks that are gone;
// engine_keys_waiting.cc: events that wait for their parent.
#ifndef TOKROUTE_SRC_PREFIX_ENGINE_KEYS_STATE_H_
#define TOKROUTE_SRC_PREFIX_ENGINE_KEYS_STATE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "prefix/arena.h"
#include "prefix/key_map.h"
#include "prefix/prefix_engine.h"
#include "tokroute/internal/mutex.h"
#include "tokroute/prefix/engine_keys.h"

namespace tokroute {
inline namespace v0 {

class EngineKeys::State {
  using Arena = internal::Arena;
  using MemoryBudget = internal::MemoryBudget;
  using Mutex = internal::Mutex;

 public:
  State(internal::PrefixEngine& engine, const PrefixIndex& index, std::int64_t max_bytes)
      : engine_(engine),
        index_options_(index.options()),
        key_options_(index.key_options()),
        budget_(max_bytes),
        segments_(budget_, max_bytes, {}),
        arena_(segments_),
        own_(kMaxEndpoints),
        notes_(kMaxEndpoints) {
    named_.reserve(kMaxHashDomains);
    tables_.reserve(kMaxHashDomains + kMaxEndpoints);
    (void)budget_.Take(static_cast<std::int64_t>(kMaxEndpoints * (sizeof own_[0] + sizeof notes_[0]) +
                                                 (kMaxHashDomains + kMaxEndpoints) * sizeof tables_[0]));
  }

  absl::StatusOr<HashDomain> Domain(std::string_view name);
  KvResult Stored(const KvSource& source, HashDomain domain, const EngineBlocks& blocks) noexcept;
  KvResult Removed(const KvSource& source, HashDomain domain, std::span<const EngineKey> engine_keys) noexcept;
  KvSequence Sequence(EndpointId endpoint, std::uint64_t number) noexcept;
  void Forget(EndpointId endpoint, bool for_ever) noexcept;
  std::int64_t Sweep(std::int64_t slots) noexcept;
  EngineKeysStats Stats() noexcept;
  absl::Status Audit();

 private:
  // Named domains are numbered from 1; an endpoint's own is this much and its slot.
  static constexpr std::uint32_t kOwn = 0x80000000u;
  static constexpr std::uint32_t kLeastPace = 1;

  // SplitMix64's finisher.
  static std::uint64_t Mix(std::uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  static std::uint64_t Mix(std::uint64_t a, std::uint64_t b) noexcept {
    return Mix(Mix(a) + 0x9E3779B97F4A7C15u * (b + 1));
  }

  // The name under which part `part` (0 ..) of an engine's block is known; the last part has the block's own. Equal to
  // another block's name once in 2^64, and then it is a conflict.
  static EngineKey NameOfPart(EngineKey engine_key, std::uint32_t part, std::uint32_t parts) noexcept {
    return part + 1 == parts ? engine_key : Mix(engine_key, part + 1);
  }

  using Map = internal::KeyMap<BlockKey, 0>;  // From names to our keys, which are never 0.

  struct Table {
    Table(MemoryBudget& budget, Arena& arena, std::uint64_t secret) noexcept : map(budget, arena, secret) {}
    Map map;
    Map::Cursor cursor = {};
    EndpointId owner = {};   // Of an endpoint's own domain; else nobody.
    std::uint32_t at = 0;    // In tables_.
    bool has_parts = false;  // Some of its blocks are several of the index's.
    std::string name = {};   // Of a named one.
  };

  // An event that waits for its parent.
  struct Kept {
    KvSource source;
    std::uint32_t domain = 0;
    EngineKey parent = 0;
    std::uint32_t parts = 1;
    bool keyed = false;  // `contents` are our keys.
    std::chrono::nanoseconds deadline{};
    std::vector<EngineKey> engine_keys;
    std::vector<std::uint64_t> contents;  // `parts` for each.
    std::vector<bool> gone;               // Removed meanwhile: what is behind them is still to be chained to them.
    std::size_t left = 0;                 // Engine keys that are not.
  };
  using KeptEvents = std::list<Kept>;
  struct KeptBlock {
    KeptEvents::iterator event;
    std::uint32_t at = 0;  // Of its engine_keys.
  };
  struct Note {
    std::uint32_t incarnation = 0;  // Whose events are kept.
    std::int64_t kept = 0;          // Blocks of the index's size.
  };

  static std::uint64_t WaitsFor(std::uint32_t domain, EngineKey parent) noexcept { return Mix(parent, domain); }
  static std::uint64_t KeptAs(const KvSource& source, std::uint32_t domain, EngineKey key) noexcept {
    return Mix(Mix(key, domain), std::uint64_t{source.endpoint.slot} << 8 | static_cast<std::uint64_t>(source.tier));
  }

  KvResult Check(const EngineBlocks& blocks, std::uint32_t& parts) const noexcept;
  KvResult Refuse(KvResult result, EndpointId endpoint) noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- Domains.
  std::optional<std::uint32_t> DomainOf(const KvSource& source, HashDomain domain) noexcept TOKROUTE_REQUIRES(mutex_);
  Table* TableOf(std::uint32_t domain) noexcept TOKROUTE_REQUIRES(mutex_);
  Table* MakeOwn(EndpointId endpoint) noexcept TOKROUTE_REQUIRES(mutex_);
  std::unique_ptr<Table> NewTable(std::string_view name) noexcept TOKROUTE_REQUIRES(mutex_);
  void DropOwn(std::uint32_t slot) noexcept TOKROUTE_REQUIRES(mutex_);
  void Empty(Table& table) noexcept TOKROUTE_REQUIRES(mutex_);
  void GiveBack() noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- Names.
  KvResult Name(Table& table, EngineKey name, BlockKey key, std::span<const BlockKey> event, bool& fresh) noexcept
      TOKROUTE_REQUIRES(mutex_);
  KvResult Place(const KvSource& source, std::uint32_t domain, std::optional<BlockKey> parent,
                 std::span<const EngineKey> engine_keys, std::uint32_t parts, std::span<const BlockKey> keys) noexcept
      TOKROUTE_REQUIRES(mutex_);
  KvResult PlaceSome(const KvSource& source, std::uint32_t domain, std::optional<BlockKey> parent,
                     std::span<const EngineKey> engine_keys, std::uint32_t parts, std::span<const BlockKey> keys,
                     std::size_t& count, bool& refused) noexcept TOKROUTE_REQUIRES(mutex_);
  KvResult PlaceCopies(const KvSource& source, std::uint32_t domain, std::span<const EngineKey> engine_keys) noexcept
      TOKROUTE_REQUIRES(mutex_);
  template <class F>
  bool ForParts(const Table& table, EngineKey engine_key, F&& f) const noexcept TOKROUTE_REQUIRES(mutex_);
  std::int64_t DropGone(Table& table, std::span<const EngineKey> names, std::span<const BlockKey> keys) noexcept
      TOKROUTE_REQUIRES(mutex_);
  std::int64_t TurnHand(std::int64_t slots) noexcept TOKROUTE_REQUIRES(mutex_);
  void Tend(std::size_t blocks) noexcept TOKROUTE_REQUIRES(mutex_);

  // ---- What is kept.
  KvResult Keep(const KvSource& source, std::uint32_t domain, const EngineBlocks& blocks, std::uint32_t parts,
                std::span<const std::uint64_t> contents) noexcept TOKROUTE_REQUIRES(mutex_);
  bool TakeKept(const KvSource& source, std::uint32_t domain, EngineKey key) noexcept TOKROUTE_REQUIRES(mutex_);
  void Unlist(KeptEvents::iterator event) noexcept TOKROUTE_REQUIRES(mutex_);
  void Awaken(std::uint32_t domain, std::span<const EngineKey> engine_keys, KeptEvents& awake) noexcept
      TOKROUTE_REQUIRES(mutex_);
  void Adopt(std::uint32_t domain, std::span<const EngineKey> engine_keys) noexcept TOKROUTE_REQUIRES(mutex_);
  void Apply(Kept& event, BlockKey parent) noexcept TOKROUTE_REQUIRES(mutex_);
  void DropKept(KeptEvents::iterator event) noexcept TOKROUTE_REQUIRES(mutex_);
  void DropKeptOf(std::uint32_t slot) noexcept TOKROUTE_REQUIRES(mutex_);
  void ExpireKept() noexcept TOKROUTE_REQUIRES(mutex_);

  internal::PrefixEngine& engine_;
  const PrefixIndexOptions index_options_;
  const KeyOptions key_options_;
  mutable Mutex mutex_;
  MemoryBudget budget_ TOKROUTE_GUARDED_BY(mutex_);
  internal::SegmentPool segments_ TOKROUTE_GUARDED_BY(mutex_);
  Arena arena_ TOKROUTE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Table>> named_ TOKROUTE_GUARDED_BY(mutex_);  // By number - 1.
  std::vector<std::unique_ptr<Table>> own_ TOKROUTE_GUARDED_BY(mutex_);    // By slot.
  std::vector<Table*> tables_ TOKROUTE_GUARDED_BY(mutex_);                 // All of them; never grows beyond its room.
  std::uint32_t hand_ TOKROUTE_GUARDED_BY(mutex_) = 0;                     // The table where it is.
  std::uint32_t pace_ TOKROUTE_GUARDED_BY(mutex_) = kLeastPace;
  std::uint64_t due_ TOKROUTE_GUARDED_BY(mutex_) = 0;  // Quarters of slots.

  std::vector<Note> notes_ TOKROUTE_GUARDED_BY(mutex_);                                               // By slot.
  KeptEvents kept_ TOKROUTE_GUARDED_BY(mutex_);                                                       // By deadline.
  std::unordered_multimap<std::uint64_t, KeptEvents::iterator> waiting_ TOKROUTE_GUARDED_BY(mutex_);  // By WaitsFor.
  std::unordered_multimap<std::uint64_t, KeptBlock> kept_blocks_ TOKROUTE_GUARDED_BY(mutex_);         // By KeptAs.
  EngineKeysStats stats_ TOKROUTE_GUARDED_BY(mutex_);
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_SRC_PREFIX_ENGINE_KEYS_STATE_H_

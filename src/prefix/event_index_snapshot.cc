// Snapshots of the exact index.
//
// All numbers little-endian. Head: "tokroute", u32 version, u32 block size, u32 key scheme, u64 check of the seed, u32
// endpoints; each endpoint: u32 slot, u32 incarnation, u8 flags (1: sequenced, 2: wants a resync), u64 next sequence
// number. Then runs: u8 1, u64 parent key (0: none), u32 keys, u32 holders, the keys, and each holder: u32 number of
// its endpoint above, u8 tier, u32 cut-off, u32 words of bitmap, which stand for the blocks from the first on and may
// be none. Then u8 0 and the XXH3-64 of all that came before.
#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "internal/no_memory.h"
#include "prefix/event_index.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace tokroute::internal {
namespace {

constexpr std::string_view kMagic = "tokroute";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kBuffer = std::size_t{1} << 16;

std::uint64_t SeedCheck(std::uint64_t seed) noexcept { return XXH3_64bits_withSeed("seed", 4, seed); }

// Gathers bytes and hands them on in large pieces, outside the index's lock.
class Writer {
 public:
  explicit Writer(const std::function<bool(std::span<const std::byte>)>& write) : write_(write) {
    XXH3_64bits_reset(&hash_);
  }
  template <std::unsigned_integral T>
  void Put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<std::byte>(value >> (8 * i) & 0xFF));
  }
  void Put(std::string_view text) {
    for (char c : text) bytes_.push_back(static_cast<std::byte>(c));
  }
  bool full() const noexcept { return bytes_.size() >= kBuffer; }
  bool Flush() {
    XXH3_64bits_update(&hash_, bytes_.data(), bytes_.size());
    const bool done = bytes_.empty() || write_(bytes_);
    bytes_.clear();
    return done;
  }
  bool Finish() {
    if (!Flush()) return false;
    Put(static_cast<std::uint64_t>(XXH3_64bits_digest(&hash_)));
    return write_(bytes_);
  }

 private:
  const std::function<bool(std::span<const std::byte>)>& write_;
  std::vector<std::byte> bytes_;
  XXH3_state_t hash_;
};

// Reads numbers off bytes; after the end it reads zeros and is no longer good.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}
  template <std::unsigned_integral T>
  T Get() noexcept {
    T value = 0;
    if (bytes_.size() < sizeof(T)) {
      good_ = false;
      bytes_ = {};
      return 0;
    }
    for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | static_cast<T>(bytes_[i]) << (8 * i));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }
  std::span<const std::byte> Take(std::size_t count) noexcept {
    if (count > bytes_.size()) {
      good_ = false;
      bytes_ = {};
      return {};
    }
    const std::span<const std::byte> taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  bool good() const noexcept { return good_; }
  std::size_t left() const noexcept { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
  bool good_ = true;
};

absl::Status Foreign(std::string_view what, std::uint64_t want, std::uint64_t got) {
  return absl::InvalidArgumentError(
      absl::StrCat("PrefixIndex::Load: ", absl::string_view(what.data(), what.size()), ": want ", want, ", got ", got));
}
absl::Status Corrupted(std::string_view what) {
  return absl::DataLossError(absl::StrCat("PrefixIndex::Load: ", absl::string_view(what.data(), what.size())));
}

}  // namespace

// A run as the bytes say.
struct EventIndex::SavedRun {
  struct Held {
    std::uint32_t endpoint = 0, tier = 0, cutoff = 0;
    std::vector<std::uint64_t> bits;
  };
  BlockKey parent_key = 0;
  std::vector<BlockKey> keys;
  std::vector<Held> holders;
};

absl::Status EventIndex::SaveTo(const std::function<bool(std::span<const std::byte>)>& write) {
  Writer writer(write);
  writer.Put(kMagic);
  writer.Put(kVersion);
  writer.Put(static_cast<std::uint32_t>(options_.block_size));
  writer.Put(static_cast<std::uint32_t>(options_.scheme));
  writer.Put(SeedCheck(options_.key_seed));
  std::unordered_map<std::uint32_t, std::pair<std::uint32_t, std::uint64_t>> numbers;  // By owner: number and life.
  {
    const MutexLock lock(mutex_);
    std::vector<std::uint32_t> rows;
    for (std::uint32_t row = 0; row < width_; ++row) {
      if (slots_[row].owner_or_0 != 0) rows.push_back(row);
    }
    writer.Put(static_cast<std::uint32_t>(rows.size()));
    for (std::uint32_t row : rows) {
      const Slot& slot = slots_[row];
      const std::uint32_t owner = slot.owner_or_0 - 1;
      numbers[owner] = {static_cast<std::uint32_t>(numbers.size()), OwnerAt(owner).life};
      writer.Put(row);
      writer.Put(slot.incarnation);
      writer.Put(static_cast<std::uint8_t>((slot.sequenced ? 1 : 0) | (slot.resync ? 2 : 0)));
      writer.Put(slot.next_sequence);
    }
  }
  const auto failed = [] { return absl::UnavailableError("PrefixIndex::Save: the writer failed"); };
  for (std::uint32_t s = 0;; ++s) {
    {
      const MutexLock lock(mutex_);
      if (s >= run_slabs_.size()) break;
      const std::uint32_t slab = run_slabs_.Handle(s);
      for (std::uint32_t unit = 1; slab != kNone && unit < kSlabUnits; ++unit) {
        Run& run = At(slab + unit);
        if (run.length == 0) continue;
        std::vector<const Holder*> kept;
        for (const Holder& holder : HoldersOf(run)) {
          const auto number = numbers.find(holder.owner());
          if (holder.tier() != kSpeculative && number != numbers.end() &&
              number->second.second == OwnerAt(number->first).life && OwnerAt(number->first).alive != 0) {
            kept.push_back(&holder);
          }
        }
        if (kept.empty()) continue;
        writer.Put(std::uint8_t{1});
        writer.Put(run.parent_key);
        writer.Put(std::uint32_t{run.length});
        writer.Put(static_cast<std::uint32_t>(kept.size()));
        for (std::uint32_t i = 0; i < run.length; ++i) writer.Put(KeysOf(run)[i]);
        for (const Holder* holder : kept) {
          const std::uint32_t bits = ExtraOf(run, *holder).bits;
          const std::uint32_t words = bits != kNone ? (run.length + 63u) / 64u : 0;
          writer.Put(numbers[holder->owner()].first);
          writer.Put(static_cast<std::uint8_t>(holder->tier()));
          writer.Put(std::uint32_t{holder->cutoff});
          writer.Put(words);
          for (std::uint32_t i = 0; i < words; ++i) writer.Put(arena_.At<std::uint64_t>(bits)[i]);
        }
      }
    }
    if (writer.full() && !writer.Flush()) return failed();
  }
  writer.Put(std::uint8_t{0});
  return writer.Finish() ? absl::OkStatus() : failed();
}

absl::Status EventIndex::LoadFrom(const std::function<std::size_t(std::span<std::byte>)>& read,
                                  const std::function<EndpointId(EndpointId)>& endpoint_of) {
  TOKROUTE_TRY {
    std::vector<std::byte> bytes;
    for (std::size_t size = 0;;) {
      bytes.resize(size + kBuffer);
      const std::size_t got = std::min(read(std::span(bytes).subspan(size)), kBuffer);
      size += got;
      bytes.resize(size);
      if (got == 0) break;
    }
    constexpr std::size_t kChecksum = sizeof(std::uint64_t);
    if (bytes.size() < kMagic.size() + kChecksum) return Corrupted("truncated");
    if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
      return absl::InvalidArgumentError("PrefixIndex::Load: not a snapshot of an index");
    }
    const std::span<const std::byte> body = std::span(bytes).first(bytes.size() - kChecksum);
    Reader reader(body);
    (void)reader.Take(kMagic.size());
    if (const auto version = reader.Get<std::uint32_t>(); version != kVersion)
      return Foreign("version", kVersion, version);
    if (Reader(std::span(bytes).last(kChecksum)).Get<std::uint64_t>() != XXH3_64bits(body.data(), body.size())) {
      return Corrupted("truncated or corrupted: the checksum does not fit");
    }
    const auto block_size = reader.Get<std::uint32_t>(), scheme = reader.Get<std::uint32_t>();
    if (block_size != static_cast<std::uint32_t>(options_.block_size)) {
      return Foreign("block_size", static_cast<std::uint32_t>(options_.block_size), block_size);
    }
    if (scheme != static_cast<std::uint32_t>(options_.scheme)) {
      return Foreign("scheme", static_cast<std::uint32_t>(options_.scheme), scheme);
    }
    if (reader.Get<std::uint64_t>() != SeedCheck(options_.key_seed)) {
      return absl::InvalidArgumentError("PrefixIndex::Load: key_seed: the snapshot's keys were made with another one");
    }
    struct Endpoint {
      EndpointId id;
      std::uint8_t flags = 0;
      std::uint64_t next_sequence = 0;
    };
    const auto endpoint_count = reader.Get<std::uint32_t>();
    if (endpoint_count > kMaxEndpoints) return Corrupted("too many endpoints");
    std::vector<Endpoint> endpoints(endpoint_count);
    for (Endpoint& endpoint : endpoints) {
      endpoint.id = {reader.Get<std::uint32_t>(), 0};
      endpoint.id.incarnation = reader.Get<std::uint32_t>();
      endpoint.flags = reader.Get<std::uint8_t>();
      endpoint.next_sequence = reader.Get<std::uint64_t>();
    }
    // All of it is looked at before any of it counts.
    std::vector<SavedRun> runs;
    std::uint8_t more = reader.Get<std::uint8_t>();
    for (; more == 1 && reader.good(); more = reader.Get<std::uint8_t>()) {
      SavedRun& run = runs.emplace_back();
      run.parent_key = reader.Get<std::uint64_t>();
      const auto length = reader.Get<std::uint32_t>(), holders = reader.Get<std::uint32_t>();
      if (length == 0 || length > kMostKeys || holders == 0 || holders > kMaxEndpoints * kStorageTiers) break;
      if (reader.left() < length * sizeof(BlockKey)) break;
      for (std::uint32_t i = 0; i < length; ++i) run.keys.push_back(reader.Get<std::uint64_t>());
      for (std::uint32_t h = 0; h < holders && reader.good(); ++h) {
        SavedRun::Held& held = run.holders.emplace_back();
        held.endpoint = reader.Get<std::uint32_t>();
        held.tier = reader.Get<std::uint8_t>();
        held.cutoff = reader.Get<std::uint32_t>();
        const auto words = reader.Get<std::uint32_t>();
        if (held.endpoint >= endpoints.size() || held.tier >= kStorageTiers || held.cutoff > length ||
            (words != 0 && words != (length + 63) / 64)) {
          return Corrupted("corrupted: a holder that cannot be");
        }
        for (std::uint32_t i = 0; i < words; ++i) held.bits.push_back(reader.Get<std::uint64_t>());
      }
    }
    if (more != 0 || !reader.good() || reader.left() != 0) return Corrupted("corrupted: a run that cannot be");

    for (Endpoint& endpoint : endpoints) {
      endpoint.id = endpoint_of(endpoint.id);
      const MutexLock lock(mutex_);
      if (Admit(endpoint.id, true) == kNone) {
        endpoint.id = {};
        continue;
      }
      Slot& slot = slots_[endpoint.id.slot];
      slot.resync |= (endpoint.flags & 2) != 0;
      if (slot.sequenced || (endpoint.flags & 1) == 0) continue;
      slot.sequenced = true;
      slot.next_sequence = endpoint.next_sequence;
    }
    // Parents first where they are saved, so that nothing hangs in the air meanwhile.
    std::unordered_map<BlockKey, std::size_t> run_of;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      for (BlockKey key : runs[i].keys) run_of.emplace(key, i);
    }
    std::vector<bool> done(runs.size(), false);
    std::vector<std::size_t> chain;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      for (std::size_t at = i; !done[at];) {
        done[at] = true;
        chain.push_back(at);
        const auto parent = run_of.find(runs[at].parent_key);
        if (parent == run_of.end()) break;
        at = parent->second;
      }
      for (; !chain.empty(); chain.pop_back()) {
        SavedRun& run = runs[chain.back()];
        for (SavedRun::Held& held : run.holders) {
          const EndpointId id = endpoints[held.endpoint].id;
          const MutexLock lock(mutex_);
          const std::uint32_t owner = id.incarnation != 0 ? Admit(id, true) : kNone;
          if (owner != kNone) Restore(owner, run.parent_key, run.keys, held.tier, held.cutoff, held.bits);
        }
      }
    }
    return absl::OkStatus();
  }
  TOKROUTE_NO_MEMORY { return absl::ResourceExhaustedError("PrefixIndex::Load: no memory for the snapshot"); }
}

// What one holder has of a saved run and does not hold here yet, stretch by stretch.
void EventIndex::Restore(std::uint32_t owner, BlockKey parent_key, std::span<const BlockKey> keys, std::uint32_t tier,
                         std::uint32_t cutoff, std::span<const std::uint64_t> bits) noexcept {
  const auto wanted = [&](std::size_t i) TOKROUTE_REQUIRES(mutex_) {
    if (i >= cutoff && (bits.empty() || (bits[i / 64] >> (i % 64) & 1) == 0)) return false;
    const Place place = PlaceOf(keys[i]);
    const Holder* holder = place.run != kNone ? FindHolder(place.run, TagOf(owner), tier) : nullptr;
    return holder == nullptr || !Holds(*holder, ExtraOf(At(place.run), *holder).bits, place.offset);
  };
  for (std::size_t i = 0; i < keys.size();) {
    std::size_t end = i;
    while (end < keys.size() && wanted(end)) ++end;
    if (end > i) {
      std::size_t stored = 0;
      const KvResult result =
          StoreKeys(owner, tier, i > 0 ? keys[i - 1] : parent_key, keys.subspan(i, end - i), stored);
      stats_.stored_blocks += static_cast<std::int64_t>(stored);
      if (result != KvResult::kApplied) (void)Refuse(result, OwnerAt(owner).slot);
    }
    i = std::max(end, i + 1);
  }
}

}  // namespace tokroute::internal

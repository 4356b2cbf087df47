// The approximate index: what the router itself sent where, least recently used first.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "internal/thread_number.h"
#include "prefix/arena.h"
#include "prefix/key_table.h"
#include "prefix/prefix_engine.h"
#include "tokroute/internal/mutex.h"

namespace tokroute::internal {
namespace {

// The structure. A node is a run of up to kMostKeys consecutive keys; the children of a node continue at its end, so a
// path that forks or ends inside a run splits it there. Each node lists the endpoints that hold some of it, with a
// cut-off.
//
// Invariants (Audit checks them), for living endpoints:
//   * Who holds a block of a node holds all of its parent.
//   * A pinned membership holds its whole node, since the pinning request's path ended at a node's end and splits only
//     make nodes shorter. An unpinned one is all confirmed.
//   * In an endpoint's order of use a parent comes after (is more recent than) its children, so trimming the oldest
//     membership's tail never leaves a gap.
// For all:
//   * A node that nobody holds, without children or live receipts, does not exist; and where there are neither children
//     nor receipts, a node is as long as its longest holder.
//
// A node id is the handle of its memory. Live receipts hold a reference on the node their path ends at, so that id
// cannot be reused under them; splits leave the id to the lower half, so it keeps naming the end of that path.
constexpr std::uint32_t kMostKeys = 4096;
// Below this no shorter run is tried when memory is tight; evicting comes first.
constexpr std::uint32_t kLeastSqueezed = 64;
// Shorter runs' keys are copied on the spot.
constexpr std::uint32_t kLeastFill = 64;

// Holders of a node are sorted by tag = slot, then owner: Match then needs no sorting, and a slot's earlier occupant,
// not swept yet, sits beside its successor. 13 bits hold kMaxEndpoints slots, 19 bits the owners.
constexpr std::uint32_t kOwnerBits = 19, kMostOwners = 1u << kOwnerBits;
static_assert((kMaxEndpoints - 1) >> (32 - kOwnerBits) == 0);

constexpr std::int64_t kSweepStep = 64;
constexpr std::int64_t kEvictionStep = 64;  // Blocks evicted at a time when memory is short.
constexpr std::int64_t kFirstBatch = 512;  // Keys hashed before the first walk.

struct Holder {
  std::uint32_t tag;
  std::uint32_t older, newer;  // Neighbours in one of the owner's lists, as node ids: an owner is in a node once.
  std::uint32_t pins;          // Live requests whose path runs through here.
  std::uint16_t cutoff;        // Blocks held, from the run's first on. >= 1.
  std::uint16_t confirmed;     // Of these, known to be real.
};
static_assert(sizeof(Holder) == 20);

struct Node {
  std::uint64_t tail_key;  // The last key: the one compare that verifies the run, without touching the key array.
  std::uint32_t keys;      // Handle of the key array.
  std::uint32_t holders;   // Handle of the holder array; kNone: there is at most one, and it is inline.
  std::uint32_t parent;    // kNone: the run starts prompts.
  std::uint32_t children;
  std::uint32_t references;  // Live receipts that end here, and whoever is working on it.
  std::uint32_t holder_count;
  std::uint32_t top_count;     // Holders whose cutoff is `top`.
  std::uint16_t length, top;   // Keys; the longest cutoff.
  std::uint16_t holder_units;  // Size of the holder array.
  // The keys are there. Not yet: their recorder is still copying them, outside the lock (see Record and KeysOf).
  std::atomic<bool> filled{true};
  Holder inline_holder;        // Most runs have one holder.
};
static_assert(sizeof(Node) == Arena::kUnitBytes);

struct List {
  std::uint32_t oldest = kNone, newest = kNone;
};

// An endpoint, or one life of it: clearing starts another. Dead owners stay until their memberships are swept.
struct Owner {
  EndpointId id;
  std::uint32_t generation = 0;
  bool alive = false;
  List order;   // Unpinned memberships, by use.
  List pinned;  // The others, in no particular order.
  std::int64_t held = 0, memberships = 0;
  std::uint32_t next = kNone;  // In the queue of the dead, or the free list.
};

// What the index knows of a fleet slot.
struct Slot {
  std::uint32_t incarnation = 0;   // The latest seen; 0: none yet.
  std::uint32_t dead_through = 0;  // Incarnations up to this one were removed.
  std::uint32_t owner = kNone;
  std::int64_t capacity_blocks = 0;
};

// A receipt's other half. `state` is touched by any thread; the rest is guarded by the index's lock.
struct Live {
  // Serial x 16 and flags; 0: free. Serial and flags are one word, so that a late call on a receipt that is gone can never
  // touch its successor.
  static constexpr std::uint64_t kFirstToken = 1, kReleased = 2, kAborted = 4;
  static constexpr int kSerialShift = 4;

  std::atomic<std::uint64_t> state{0};
  std::uint32_t node = kNone, owner = kNone, owner_generation = 0;
  std::uint32_t next = kNone;  // In the free list, or in the queue of the released.

  // Sets flags, and returns what it is then. 0: the receipt is another one's, or released.
  std::uint64_t Mark(std::uint64_t serial, std::uint64_t flags) noexcept {
    std::uint64_t is = state.load(std::memory_order_relaxed);
    do {
      if (is >> kSerialShift != serial || (is & kReleased) != 0) return 0;
    } while (!state.compare_exchange_weak(is, is | flags, std::memory_order_acq_rel, std::memory_order_relaxed));
    return is | flags;
  }
};

// The other halves, at addresses that never change: chunks of doubling size, kept as long as the index, since a receipt
// that is long gone may still be asked about. Find is safe from any thread; New and Free are guarded by the index's lock.
class LiveTable {
 public:
  explicit LiveTable(MemoryBudget& budget) noexcept : budget_(budget) {}
  ~LiveTable() {
    for (std::uint32_t i = 0; i < kChunks; ++i) delete[] chunks_[i].load(std::memory_order_relaxed);
  }
  LiveTable(const LiveTable&) = delete;
  LiveTable& operator=(const LiveTable&) = delete;

  Live& operator[](std::uint32_t entry) const noexcept {
    const std::uint32_t chunk = ChunkOf(entry);
    return chunks_[chunk].load(std::memory_order_acquire)[entry - FirstOf(chunk)];
  }
  // Null: there never was such an entry.
  Live* Find(std::uint32_t entry) const noexcept {
    if (entry >= kFirstChunk * ((1u << kChunks) - 1)) return nullptr;
    const std::uint32_t chunk = ChunkOf(entry);
    Live* entries = chunks_[chunk].load(std::memory_order_acquire);
    return entries != nullptr ? entries + (entry - FirstOf(chunk)) : nullptr;
  }
  std::uint32_t size() const noexcept { return size_; }
  // kNone: no memory.
  std::uint32_t New() noexcept {
    if (free_ == kNone && !Grow()) return kNone;
    const std::uint32_t entry = free_;
    free_ = (*this)[entry].next;
    return entry;
  }
  void Free(std::uint32_t entry) noexcept {
    Live& live = (*this)[entry];
    live.state.store(0, std::memory_order_relaxed);
    live.next = free_;
    free_ = entry;
  }

 private:
  static constexpr std::uint32_t kFirstChunk = 256, kChunks = 23;
  static std::uint32_t ChunkOf(std::uint32_t entry) noexcept {
    return static_cast<std::uint32_t>(std::bit_width(entry / kFirstChunk + 1)) - 1;
  }
  static std::uint32_t FirstOf(std::uint32_t chunk) noexcept { return kFirstChunk * ((1u << chunk) - 1); }
  bool Grow() noexcept {
    const std::uint32_t chunk = ChunkOf(size_);
    if (chunk >= kChunks) return false;
    const std::uint32_t count = kFirstChunk << chunk;
    const std::int64_t bytes = static_cast<std::int64_t>(count) * static_cast<std::int64_t>(sizeof(Live));
    if (!budget_.Take(bytes)) return false;
    Live* entries = new (std::nothrow) Live[count];
    if (entries == nullptr) {
      budget_.Give(bytes);
      return false;
    }
    for (std::uint32_t i = count; i-- > 0;) {
      entries[i].next = free_;
      free_ = size_ + i;
    }
    chunks_[chunk].store(entries, std::memory_order_release);
    size_ += count;
    return true;
  }

  MemoryBudget& budget_;
  std::array<std::atomic<Live*>, kChunks> chunks_{};
  std::uint32_t size_ = 0, free_ = kNone;
};

// Which first keys some run begins a prompt with, or perhaps does: counts by key, so that a prompt that nobody holds any of
// is found out without the lock. Asked by any thread; changed under the index's lock.
class RootFilter {
 public:
  bool MayHold(BlockKey key) const noexcept { return counts_[At(key)].load(std::memory_order_acquire) != 0; }
  void Add(BlockKey key) noexcept { Change(key, 1); }
  void Remove(BlockKey key) noexcept { Change(key, -1); }

 private:
  static constexpr int kBits = 15;
  static std::size_t At(BlockKey key) noexcept {
    return static_cast<std::size_t>((key * 0x9E3779B97F4A7C15u) >> (64 - kBits));
  }
  void Change(BlockKey key, int by) noexcept {
    std::atomic<std::uint16_t>& count = counts_[At(key)];
    const std::uint16_t before = count.load(std::memory_order_relaxed);
    if (before == 0xFFFF) return;  // Too many to tell; "perhaps" for ever.
    count.store(static_cast<std::uint16_t>(before + by), std::memory_order_release);
  }

  std::array<std::atomic<std::uint16_t>, std::size_t{1} << kBits> counts_{};
};

bool CanExist(EndpointId id) noexcept { return id.incarnation != 0 && id.slot < kMaxEndpoints; }

std::int64_t SegmentLimit(std::int64_t max_bytes) noexcept {
  // The rest is for directories, owners and receipts, which must be able to grow when the arena is full.
  return max_bytes - std::max(max_bytes / 16, std::int64_t{1} << 20);
}

class HistoryIndex final : public PrefixEngine {
 public:
  explicit HistoryIndex(const PrefixIndexOptions& options) noexcept
      : block_size_(options.block_size),
        default_blocks_(options.default_capacity_tokens / options.block_size),
        budget_(options.max_bytes),
        arena_(budget_, SegmentLimit(options.max_bytes)),
        table_(budget_, arena_, options.key_seed),
        owners_(budget_),
        slots_(budget_),
        live_(budget_) {}

  void Match(PromptKeys& keys, std::vector<PrefixMatch::Holder>& out, std::vector<std::uint32_t>& path) noexcept override {
    out.clear();
    const std::int64_t count = keys.block_count();
    if (count == 0 || !roots_.MayHold(keys.Ensure(1)[0])) return;
    // One batch for a prompt of which little is held; one that is held so far is hashed whole, as recording it will want.
    // Outside the lock.
    for (std::int64_t batch = std::max(kFirstBatch, keys.ready_blocks());; batch = count) {
      const std::span<const BlockKey> ready = keys.Ensure(std::min(batch, count));
      if (ready.empty()) return;
      const Section section(*this, Settled::kOwn);
      // Starts at the root each time: the tree may have changed, and a walk is a few compares per run.
      std::uint32_t last_matched = 0;
      const bool all = Walk(ready, path, last_matched);
      if (all && std::ssize(ready) < count) continue;
      Emit(path, last_matched, out);
      return;
    }
  }

  // No record of the endpoint can be longer, so nothing beyond is hashed for it. 0 for one that is known to be dead.
  std::int64_t RecordableBlocks(EndpointId id, std::int64_t blocks) noexcept override {
    if (!CanExist(id)) return 0;
    // What a prompt of ordinary length could save is less than a lock costs.
    if (blocks <= kMostKeys) return blocks;
    const Section section(*this);
    const std::uint32_t owner = FindOwner(id);
    // It holds more than its capacity if that shrank below what is pinned; all of it may be on this prompt's path.
    return std::min(blocks, std::max(CapacityOf(id), owner != kNone ? owners_[owner].held : 0));
  }

  PrefixReceipt Record(EndpointId id, std::span<const BlockKey> keys, bool shortened, const FleetView* alive) noexcept override {
    Path path{.shortened = shortened};
    PrefixReceipt receipt;
    {
      const Section section(*this, Settled::kOwn);
      receipt = RecordPath(id, keys, path, alive);
    }
    // The new runs' keys: kilobytes into cold memory, which nobody else should wait for. The receipt keeps the runs.
    for (const Fill& fill : std::span(path.fills).first(path.fill_count)) {
      std::uninitialized_copy_n(fill.from, fill.count, fill.to);
      fill.node->filled.store(true, std::memory_order_release);
    }
    return receipt;
  }

  // Takes effect when the receipt is released: until then its own pins keep what it confirms.
  void OnFirstToken(const PrefixReceipt& receipt) noexcept override {
    Live* live = receipt.serial != 0 ? live_.Find(receipt.entry) : nullptr;
    if (live != nullptr) live->Mark(receipt.serial, Live::kFirstToken);
  }

  // An end that takes blocks back is done at once. Any other changes nothing that a match sees: it waits for its thread's
  // next record, or for whoever needs everything settled.
  void OnReleased(PrefixReceipt& receipt, bool aborted) noexcept override {
    const PrefixReceipt was = std::exchange(receipt, {});
    Live* live = was.serial != 0 ? live_.Find(was.entry) : nullptr;
    if (live == nullptr) return;
    const std::uint64_t flags = live->Mark(was.serial, Live::kReleased | (aborted ? Live::kAborted : 0));
    if (flags == 0) return;
    if (aborted && (flags & Live::kFirstToken) == 0) {
      const Section section(*this);
      Release(was.entry);
      SweepSome(kSweepStep);
      return;
    }
    std::atomic<std::uint32_t>& list = released_[ThreadNumber() % kReleasedLists].last;
    std::uint32_t last = list.load(std::memory_order_relaxed);
    do {
      live->next = last;
    } while (!list.compare_exchange_weak(last, was.entry, std::memory_order_release, std::memory_order_relaxed));
  }

  PrefixReceipt Move(PrefixReceipt& from, EndpointId to, const FleetView* alive) noexcept override {
    const Section section(*this);
    SweepSome(kSweepStep);
    Live* live = FindLive(from);
    const PrefixReceipt was = std::exchange(from, {});
    if (live == nullptr || live->Mark(was.serial, Live::kReleased | Live::kAborted) == 0) {
      MaybeReset();
      return {};
    }
    const std::uint32_t end = live->node;  // The record may move the entries.
    const std::uint32_t owner = AdmitOwner(to, alive);
    const std::uint32_t entry = owner != kNone ? NewLive() : kNone;
    PrefixReceipt receipt;
    if (entry == kNone) {
      ++stats_.refused_records;
    } else {
      Path path{.end = end};
      for (std::uint32_t node = end; node != kNone; node = NodeAt(node).parent) path.depth += NodeAt(node).length;
      AddReference(end);
      Book(owner, path, path.depth, {});
      receipt = Finish(entry, owner, path);
    }
    Release(was.entry);
    return receipt;
  }

  absl::Status SetCapacity(EndpointId id, std::int64_t tokens) override {
    const Section section(*this);
    SweepSome(kSweepStep);
    switch (Enter(id)) {
      case Entry::kOk: break;
      case Entry::kDead:
        return absl::NotFoundError(absl::StrCat("PrefixIndex::SetCapacity: endpoint: slot ", id.slot, ", incarnation ",
                                                id.incarnation, " was removed or replaced"));
      case Entry::kNoMemory:
        return absl::ResourceExhaustedError("PrefixIndex::SetCapacity: max_bytes leaves no room for another endpoint");
    }
    Slot& slot = slots_[id.slot];
    slot.capacity_blocks = tokens == 0 ? default_blocks_ : tokens / block_size_;
    if (slot.owner != kNone) EvictOverflow(slot.owner);
    MaybeReset();
    return absl::OkStatus();
  }

  void RemoveEndpoint(EndpointId id) noexcept override {
    if (!CanExist(id)) return;
    const Section section(*this);
    Remove(id);
    SweepSome(kSweepStep);
    MaybeReset();
  }

  void ClearEndpoint(EndpointId id) noexcept override {
    const Section section(*this);
    const std::uint32_t owner = FindOwner(id);
    if (owner != kNone) Retire(owner);
    SweepSome(kSweepStep);
    MaybeReset();
  }

  void RetireDead(const FleetView& alive) noexcept override {
    const Section section(*this);
    for (std::uint32_t row = 0; row < slots_.size(); ++row) {
      const EndpointId id{row, slots_[row].incarnation};
      if (id.incarnation > slots_[row].dead_through && !alive.Alive(id)) Remove(id);
    }
    SweepSome(kSweepStep);
    MaybeReset();
  }

  std::int64_t Sweep(std::int64_t memberships) noexcept override {
    const Section section(*this);
    SweepSome(memberships);
    MaybeReset();
    return stats_.pending_sweep;
  }

  PrefixIndexStats Stats() noexcept override {
    const Section section(*this);
    PrefixIndexStats stats = stats_;
    stats.bytes = budget_.used();
    stats.peak_bytes = budget_.peak();
    return stats;
  }

  std::int64_t HeldBlocks(EndpointId id) noexcept override {
    const Section section(*this);
    const std::uint32_t owner = FindOwner(id);
    return owner != kNone ? owners_[owner].held : 0;
  }

  std::int64_t DeviceBlocks(EndpointId id) const noexcept override { return const_cast<HistoryIndex*>(this)->HeldBlocks(id); }

  void CountRefusal() noexcept override {
    const Section section(*this);
    ++stats_.refused_records;
  }

  absl::Status Audit() override;

 private:
  // The lock, with everything settled that was released before; or with what this thread released, which is enough for
  // who neither counts nor runs out of room.
  enum class Settled { kAll, kOwn };
  class TOKROUTE_SCOPED_CAPABILITY Section {
   public:
    explicit Section(HistoryIndex& impl, Settled settled = Settled::kAll) noexcept TOKROUTE_ACQUIRE(impl.mutex_) : impl_(impl) {
      impl.mutex_.lock();
      settled == Settled::kAll ? impl.SettleAll() : impl.SettleOwn();
    }
    ~Section() TOKROUTE_RELEASE() { impl_.mutex_.unlock(); }
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;

   private:
    HistoryIndex& impl_;
  };

  // A new run's keys, still to be copied.
  struct Fill {
    Node* node;
    BlockKey* to;
    const BlockKey* from;
    std::uint32_t count;
  };
  // The deepest run reached, with a reference held on it, and the depth in blocks at its end. kNone and 0: nothing yet.
  struct Path {
    std::uint32_t end = kNone;
    std::int64_t depth = 0;
    bool shortened = false;  // Capacity or memory allowed no more.
    std::uint32_t fill_count = 0;
    std::array<Fill, 4> fills{};
  };
  enum class Entry : std::uint8_t { kOk, kDead, kNoMemory };

  Node& NodeAt(std::uint32_t node) const noexcept TOKROUTE_REQUIRES(mutex_) { return *arena_.At<Node>(node); }
  const BlockKey* KeysOf(const Node& node) const noexcept TOKROUTE_REQUIRES(mutex_) {
    while (!node.filled.load(std::memory_order_acquire)) PauseBriefly();
    return arena_.At<BlockKey>(node.keys);
  }

  PrefixReceipt RecordPath(EndpointId id, std::span<const BlockKey> keys, Path& path, const FleetView* alive) noexcept
      TOKROUTE_REQUIRES(mutex_) {
    SweepSome(kSweepStep);
    const std::uint32_t owner = AdmitOwner(id, alive);
    const std::uint32_t entry = owner != kNone && !keys.empty() ? NewLive() : kNone;
    if (entry == kNone) {
      // Admitted, but without a single block of capacity: that is shortening, not a refusal.
      ++(owner != kNone && keys.empty() && path.shortened ? stats_.truncated_records : stats_.refused_records);
      MaybeReset();
      return {};
    }
    const auto count = static_cast<std::int64_t>(keys.size());
    std::int64_t wanted = count;
    // Down the runs that are there already.
    std::uint32_t forked = kNone;
    std::uint32_t matched = 0;
    while (path.depth < count) {
      const std::uint32_t child = table_.Find(keys[static_cast<std::size_t>(path.depth)]);
      if (child == kNone) break;
      if (NodeAt(child).parent != path.end) {
        // The same key behind another path: not a chained key, or a collision. The first one stays.
        ++stats_.conflicting_keys;
        wanted = path.depth;
        break;
      }
      matched = MatchLength(NodeAt(child), keys.subspan(static_cast<std::size_t>(path.depth)));
      if (matched < NodeAt(child).length) {
        forked = child;
        break;
      }
      path.end = child;
      path.depth += matched;
    }
    AddReference(path.end);
    if (forked != kNone) {
      const std::uint32_t upper = Split(forked, matched, owner);
      if (upper == kNone) {
        path.shortened = true;
        wanted = path.depth;
      } else {
        DropReference(path.end);
        path.end = upper;
        path.depth += matched;
      }
    }
    Book(owner, path, wanted, keys);
    return Finish(entry, owner, path);
  }

  // ---- Holders of a node ----

  std::span<Holder> HoldersOf(Node& node) const noexcept TOKROUTE_REQUIRES(mutex_) {
    Holder* first = node.holders == kNone ? &node.inline_holder : arena_.At<Holder>(node.holders);
    return {first, node.holder_count};
  }
  static std::uint32_t RoomOf(const Node& node) noexcept {
    if (node.holders == kNone) return 1;
    return node.holder_units * Arena::kUnitBytes / static_cast<std::uint32_t>(sizeof(Holder));
  }
  static std::uint32_t HolderUnits(std::uint32_t count) noexcept { return Arena::UnitsFor(count * sizeof(Holder)); }
  std::uint32_t TagOf(std::uint32_t owner) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return (owners_[owner].id.slot << kOwnerBits) | owner;
  }
  static std::uint32_t OwnerOf(const Holder& holder) noexcept { return holder.tag & (kMostOwners - 1); }

  // Null when the owner holds nothing of the node. Valid until holders of that node change. O(log holders).
  Holder* FindHolder(std::uint32_t node, std::uint32_t tag) const noexcept TOKROUTE_REQUIRES(mutex_) {
    const std::span<Holder> holders = HoldersOf(NodeAt(node));
    const auto it = std::lower_bound(holders.begin(), holders.end(), tag,
                                     [](const Holder& holder, std::uint32_t wanted) { return holder.tag < wanted; });
    return it != holders.end() && it->tag == tag ? &*it : nullptr;
  }

  List& ListOf(const Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_) {
    Owner& owner = owners_[OwnerOf(holder)];
    return holder.pins > 0 ? owner.pinned : owner.order;
  }
  void Unlink(const Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_) {
    List& list = ListOf(holder);
    (holder.older != kNone ? FindHolder(holder.older, holder.tag)->newer : list.oldest) = holder.newer;
    (holder.newer != kNone ? FindHolder(holder.newer, holder.tag)->older : list.newest) = holder.older;
  }
  // As the most recent one.
  void Append(std::uint32_t node, Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_) {
    List& list = ListOf(holder);
    holder.older = list.newest;
    holder.newer = kNone;
    (list.newest != kNone ? FindHolder(list.newest, holder.tag)->newer : list.oldest) = node;
    list.newest = node;
  }
  void Pin(std::uint32_t node, Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (holder.pins > 0) {
      ++holder.pins;
      return;
    }
    Unlink(holder);
    holder.pins = 1;
    Append(node, holder);
  }
  // The last pin goes; the membership is the most recently used one.
  void UnpinLast(std::uint32_t node, Holder& holder) noexcept TOKROUTE_REQUIRES(mutex_) {
    Unlink(holder);
    holder.pins = 0;
    Append(node, holder);
  }

  // Room for one more holder in a node on which the caller holds a reference (or on one below it). May evict
  // `evictor`'s unpinned blocks and sweep, so no Holder pointer survives it.
  bool MakeRoom(std::uint32_t at, std::uint32_t evictor) noexcept TOKROUTE_REQUIRES(mutex_) {
    Node& node = NodeAt(at);
    if (node.holder_count < RoomOf(node)) return true;
    PurgeDead(at);
    if (node.holder_count < RoomOf(node)) return true;
    const std::uint32_t count = node.holder_count;  // Living ones: at most one per slot, so it fits a chunk.
    const std::uint32_t units = HolderUnits(std::min(count + count / 2 + 1, std::max(count + 1, kMaxEndpoints)));
    const std::uint32_t chunk = Obtain(units, evictor);
    if (chunk == kNone) return false;
    const std::span<Holder> old = HoldersOf(node);
    std::uninitialized_copy(old.begin(), old.end(), reinterpret_cast<Holder*>(arena_.Address(chunk)));
    if (node.holders != kNone) arena_.Free(node.holders, node.holder_units);
    node.holders = chunk;
    node.holder_units = static_cast<std::uint16_t>(units);  // A chunk has no more than 4,096.
    return true;
  }

  // Adds a membership where there is room. O(holders) to move those behind it.
  void AddHolder(std::uint32_t at, std::uint32_t owner, std::uint16_t cutoff) noexcept TOKROUTE_REQUIRES(mutex_) {
    Node& node = NodeAt(at);
    const std::uint32_t tag = TagOf(owner);
    ++node.holder_count;
    const std::span<Holder> holders = HoldersOf(node);
    std::size_t i = holders.size() - 1;
    for (; i > 0 && holders[i - 1].tag > tag; --i) holders[i] = holders[i - 1];
    holders[i] = {.tag = tag, .older = kNone, .newer = kNone, .pins = 1, .cutoff = cutoff, .confirmed = 0};
    Append(at, holders[i]);
    ++owners_[owner].memberships;
    ++stats_.memberships;
    owners_[owner].held += cutoff;
    stats_.holder_blocks += cutoff;
    NoteCutoff(node, cutoff);
  }

  // Ends a membership. The node may cease to exist.
  void DropHolder(std::uint32_t at, std::uint32_t tag) noexcept TOKROUTE_REQUIRES(mutex_) {
    Node& node = NodeAt(at);
    Holder* holder = FindHolder(at, tag);
    Unlink(*holder);
    Owner& owner = owners_[OwnerOf(*holder)];
    const std::uint16_t cutoff = holder->cutoff;
    --owner.memberships;
    --stats_.memberships;
    if (!owner.alive) --stats_.pending_sweep;
    owner.held -= cutoff;
    stats_.holder_blocks -= cutoff;
    const std::span<Holder> holders = HoldersOf(node);
    std::copy(holder + 1, holders.data() + holders.size(), holder);
    --node.holder_count;
    ShrinkHolders(node);
    if (cutoff == node.top && --node.top_count == 0) RecomputeTop(node);
    Normalize(at);
  }

  void ShrinkHolders(Node& node) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (node.holders == kNone) return;
    if (node.holder_count <= 1) {
      if (node.holder_count == 1) node.inline_holder = *arena_.At<Holder>(node.holders);
      arena_.Free(node.holders, node.holder_units);
      node.holders = kNone;
      node.holder_units = 0;
      return;
    }
    // Not before half is unused, and not to the last byte, so that one endpoint coming and going moves nothing.
    const std::uint32_t needed = HolderUnits(node.holder_count + node.holder_count / 4);
    if (needed * 2 > node.holder_units) return;
    arena_.Free(node.holders + needed, node.holder_units - needed);
    node.holder_units = static_cast<std::uint16_t>(needed);
  }

  // 0 < cutoff < the holder's. The caller normalizes the node.
  void LowerCutoff(Node& node, Holder& holder, std::uint16_t cutoff) noexcept TOKROUTE_REQUIRES(mutex_) {
    const std::uint16_t before = holder.cutoff;
    holder.cutoff = cutoff;
    holder.confirmed = std::min(holder.confirmed, cutoff);
    owners_[OwnerOf(holder)].held -= before - cutoff;
    stats_.holder_blocks -= before - cutoff;
    if (before == node.top && --node.top_count == 0) RecomputeTop(node);
  }

  void NoteCutoff(Node& node, std::uint16_t cutoff) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (cutoff > node.top) {
      stats_.distinct_blocks += cutoff - node.top;
      node.top = cutoff;
      node.top_count = 1;
    } else if (cutoff == node.top) {
      ++node.top_count;
    }
  }
  void RecomputeTop(Node& node) noexcept TOKROUTE_REQUIRES(mutex_) {
    stats_.distinct_blocks -= node.top;
    node.top = 0;
    node.top_count = 0;
    for (const Holder& holder : HoldersOf(node)) NoteCutoff(node, holder.cutoff);
  }

  // Drops what dead owners hold of a node that the caller keeps alive.
  void PurgeDead(std::uint32_t at) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (stats_.pending_sweep == 0) return;
    for (std::uint32_t i = NodeAt(at).holder_count; i-- > 0;) {
      const Holder& holder = HoldersOf(NodeAt(at))[i];
      if (!owners_[OwnerOf(holder)].alive) DropHolder(at, holder.tag);
    }
  }

  // ---- Nodes ----

  void AddReference(std::uint32_t node) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (node != kNone) ++NodeAt(node).references;
  }
  void DropReference(std::uint32_t node) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (node == kNone) return;
    --NodeAt(node).references;
    Normalize(node);
  }

  // After something let go of a node: cuts it to its longest holder, or frees it and what that leaves bare above.
  void Normalize(std::uint32_t at) noexcept TOKROUTE_REQUIRES(mutex_) {
    while (at != kNone) {
      Node& node = NodeAt(at);
      if (node.references > 0 || node.children > 0) return;
      if (node.top > 0) {
        if (node.top < node.length) {
          const std::uint32_t before = KeyUnits(node.length), after = KeyUnits(node.top);
          node.length = node.top;
          node.tail_key = KeysOf(node)[node.length - 1];
          if (after < before) arena_.Free(node.keys + after, before - after);
        }
        return;
      }
      const std::uint32_t parent = node.parent;
      table_.Erase(KeysOf(node)[0]);
      if (parent == kNone) roots_.Remove(KeysOf(node)[0]);
      arena_.Free(node.keys, KeyUnits(node.length));
      arena_.Free(at, 1);
      --stats_.runs;
      if (parent != kNone) --NodeAt(parent).children;
      at = parent;
    }
  }

  static std::uint32_t KeyUnits(std::uint32_t keys) noexcept { return Arena::UnitsFor(keys * sizeof(BlockKey)); }

  // Leading keys that the run and the prompt's rest (both from the run's first key on, which agrees) have in common.
  // Chained keys: where one agrees, all before it do, so it is one compare, or a binary search. Keys that are not
  // chained give some depth at which they differ; nothing else can go wrong. >= 1.
  std::uint32_t MatchLength(const Node& node, std::span<const BlockKey> keys) const noexcept TOKROUTE_REQUIRES(mutex_) {
    const std::uint32_t length = node.length;
    std::uint32_t differs = length;  // Keys [0, differs) are known to differ in the last one.
    if (keys.size() >= length) {
      if (keys[length - 1] == node.tail_key) return length;
    } else {
      differs = static_cast<std::uint32_t>(keys.size());
      if (keys[differs - 1] == KeysOf(node)[differs - 1]) return differs;
    }
    const BlockKey* own = KeysOf(node);
    std::uint32_t agrees = 1;
    while (differs - agrees > 1) {
      const std::uint32_t middle = agrees + (differs - agrees) / 2;
      (own[middle - 1] == keys[middle - 1] ? agrees : differs) = middle;
    }
    return agrees;
  }

  // The runs along the keys, top down. True when all keys were found; `last_matched`: how many of the last run's.
  bool Walk(std::span<const BlockKey> keys, std::vector<std::uint32_t>& path, std::uint32_t& last_matched) noexcept
      TOKROUTE_REQUIRES(mutex_) {
    path.clear();
    std::uint32_t at = kNone;
    for (std::size_t depth = 0; depth < keys.size(); depth += last_matched) {
      const std::uint32_t child = table_.Find(keys[depth]);
      if (child == kNone || NodeAt(child).parent != at) return false;
      at = child;
      path.push_back(at);
      last_matched = MatchLength(NodeAt(at), keys.subspan(depth));
      if (last_matched < NodeAt(at).length) return depth + last_matched == keys.size();
    }
    return true;
  }

  // Every living holder on the path with its depth. Holders of a run are among those of the run above it, and all are
  // sorted by slot, so deeper runs only raise what is there.
  void Emit(std::span<const std::uint32_t> path, std::uint32_t last_matched,
            std::vector<PrefixMatch::Holder>& out) noexcept TOKROUTE_REQUIRES(mutex_) {
    const bool any_dead = stats_.pending_sweep > 0;
    std::int64_t start = 0;
    for (std::size_t level = 0; level < path.size(); ++level) {
      Node& node = NodeAt(path[level]);
      const std::uint32_t matched = level + 1 < path.size() ? node.length : last_matched;
      auto from = out.begin();
      for (const Holder& holder : HoldersOf(node)) {
        if (any_dead && !owners_[OwnerOf(holder)].alive) continue;
        const std::uint32_t row = holder.tag >> kOwnerBits;
        const std::int64_t blocks = start + std::min<std::uint32_t>(holder.cutoff, matched);
        if (level == 0) {
          out.push_back({.endpoint = {row, slots_[row].incarnation}, .blocks = blocks, .weighted_blocks = static_cast<double>(blocks)});
          continue;
        }
        from = std::lower_bound(from, out.end(), row, [](const PrefixMatch::Holder& known, std::uint32_t wanted) {
          return known.endpoint.slot < wanted;
        });
        if (from != out.end() && from->endpoint.slot == row && from->blocks == start) {
          from->blocks = blocks;
          from->weighted_blocks = static_cast<double>(blocks);
        }
      }
      start += node.length;
    }
  }

  // Cuts a node after `matched` keys, 0 < matched < length. The lower half keeps the id, its children and its receipts;
  // the upper half is new, and returned with a reference for the caller, or kNone (a key in conflict, no memory). The
  // caller holds a reference on the parent. May evict `evictor`'s blocks, so the node may be gone after a failure.
  // O(holders): each of them is in both halves from now on.
  std::uint32_t Split(std::uint32_t lower, std::uint32_t matched, std::uint32_t evictor) noexcept
      TOKROUTE_REQUIRES(mutex_) {
    AddReference(lower);
    PurgeDead(lower);
    Node& low = NodeAt(lower);
    const BlockKey low_key = KeysOf(low)[matched];
    if (table_.Find(low_key) != kNone) {
      ++stats_.conflicting_keys;
      DropReference(lower);
      return kNone;
    }
    const std::uint32_t key_units = KeyUnits(matched);
    const std::uint32_t holder_units = low.holder_count > 1 ? HolderUnits(low.holder_count) : 0;
    const std::uint32_t upper = Obtain(1, evictor);
    const std::uint32_t keys = upper != kNone ? Obtain(key_units, evictor) : kNone;
    const std::uint32_t holders = keys != kNone && holder_units > 0 ? Obtain(holder_units, evictor) : kNone;
    const bool complete = keys != kNone && (holders != kNone || holder_units == 0);
    if (!complete || !InsertKey(low_key, lower, evictor)) {
      if (holders != kNone) arena_.Free(holders, holder_units);
      if (keys != kNone) arena_.Free(keys, key_units);
      if (upper != kNone) arena_.Free(upper, 1);
      DropReference(lower);
      return kNone;
    }
    // From here on nothing is evicted and nothing fails.
    table_.Replace(KeysOf(low)[0], upper);
    Node& up = *::new (arena_.Address(upper)) Node{};
    std::uninitialized_copy_n(KeysOf(low), matched, reinterpret_cast<BlockKey*>(arena_.Address(keys)));
    up.keys = keys;
    up.tail_key = KeysOf(up)[matched - 1];
    up.holders = holders;
    up.holder_units = static_cast<std::uint16_t>(holder_units);
    up.parent = low.parent;
    up.children = 1;
    up.references = 1;
    up.length = static_cast<std::uint16_t>(matched);
    low.parent = upper;
    {
      BlockKey* low_keys = arena_.At<BlockKey>(low.keys);
      const std::uint32_t before = KeyUnits(low.length), after = KeyUnits(low.length - matched);
      low.length = static_cast<std::uint16_t>(low.length - matched);
      std::copy_n(low_keys + matched, low.length, low_keys);
      if (after < before) arena_.Free(low.keys + after, before - after);
    }
    ++stats_.runs;
    SplitHolders(upper, lower);
    if (up.holders != kNone) ShrinkHolders(up);
    DropReference(lower);
    return upper;
  }

  void SplitHolders(std::uint32_t upper, std::uint32_t lower) noexcept TOKROUTE_REQUIRES(mutex_) {
    Node& up = NodeAt(upper);
    Node& low = NodeAt(lower);
    const std::uint16_t cut = up.length;
    stats_.distinct_blocks -= low.top;
    low.top = 0;
    low.top_count = 0;
    const std::span<Holder> old = HoldersOf(low);
    up.holder_count = low.holder_count;
    const std::span<Holder> halves = HoldersOf(up);
    std::uint32_t kept = 0;
    for (std::size_t i = 0; i < old.size(); ++i) {
      const Holder before = old[i];
      Holder& half = halves[i];
      half = before;
      List& list = ListOf(before);
      half.cutoff = std::min(before.cutoff, cut);
      half.confirmed = std::min(before.confirmed, cut);
      NoteCutoff(up, half.cutoff);
      // The neighbours are in other nodes: an owner is in a node once, and in this one with `before`.
      (before.newer != kNone ? FindHolder(before.newer, before.tag)->older : list.newest) = upper;
      if (before.cutoff <= cut) {  // All of it lies above: the membership just changes its node.
        (before.older != kNone ? FindHolder(before.older, before.tag)->newer : list.oldest) = upper;
        continue;
      }
      half.older = lower;  // The parent is the more recent one.
      Holder rest = before;
      rest.newer = upper;
      rest.cutoff = static_cast<std::uint16_t>(before.cutoff - cut);
      rest.confirmed = static_cast<std::uint16_t>(before.confirmed > cut ? before.confirmed - cut : 0);
      old[kept++] = rest;
      NoteCutoff(low, rest.cutoff);
      ++owners_[OwnerOf(before)].memberships;
      ++stats_.memberships;
      if (!owners_[OwnerOf(before)].alive) ++stats_.pending_sweep;
    }
    low.holder_count = kept;
    ShrinkHolders(low);
  }

  // A new run below the path's end, on which the caller holds a reference; recorded for `owner`, pinned. Takes as many keys
  // as memory allows; returns the node, or kNone.
  std::uint32_t NewRun(Path& path, std::span<const BlockKey> keys, std::uint32_t owner) noexcept
      TOKROUTE_REQUIRES(mutex_) {
    const std::uint32_t at = Obtain(1, owner);
    if (at == kNone) return kNone;
    if (!InsertKey(keys[0], at, owner)) {
      arena_.Free(at, 1);
      return kNone;
    }
    auto length = static_cast<std::uint32_t>(std::min<std::size_t>(keys.size(), kMostKeys));
    std::uint32_t chunk = arena_.Allocate(KeyUnits(length));
    while (chunk == kNone) {
      // Memory is short or in pieces: shorter runs before evicting, evicting before giving up.
      if (length > kLeastSqueezed) {
        length /= 2;
      } else if (!Relieve(owner)) {
        table_.Erase(keys[0]);
        arena_.Free(at, 1);
        return kNone;
      }
      chunk = arena_.Allocate(KeyUnits(length));
    }
    Node& node = *::new (arena_.Address(at)) Node{};
    auto* const to = reinterpret_cast<BlockKey*>(arena_.Address(chunk));
    if (length >= kLeastFill && path.fill_count < path.fills.size()) {
      node.filled.store(false, std::memory_order_relaxed);
      path.fills[path.fill_count++] = {&node, to, keys.data(), length};
    } else {
      std::uninitialized_copy_n(keys.data(), length, to);
    }
    node.tail_key = keys[length - 1];
    node.keys = chunk;
    node.holders = kNone;
    node.parent = path.end;
    node.length = static_cast<std::uint16_t>(length);
    if (path.end != kNone) ++NodeAt(path.end).children;
    else roots_.Add(keys[0]);
    ++stats_.runs;
    AddHolder(at, owner, node.length);
    return at;
  }

  // ---- Memory ----

  // Makes some memory free: the dead first, then `evictor`'s oldest blocks. False: there is nothing to take.
  bool Relieve(std::uint32_t evictor) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (stats_.pending_sweep > 0) {
      SweepSome(kSweepStep);
      return true;
    }
    return Evict(evictor, kEvictionStep) > 0;
  }
  std::uint32_t Obtain(std::uint32_t units, std::uint32_t evictor) noexcept TOKROUTE_REQUIRES(mutex_) {
    std::uint32_t chunk = arena_.Allocate(units);
    while (chunk == kNone && Relieve(evictor)) chunk = arena_.Allocate(units);
    return chunk;
  }
  bool InsertKey(BlockKey key, std::uint32_t node, std::uint32_t evictor) noexcept TOKROUTE_REQUIRES(mutex_) {
    while (!table_.Insert(key, node)) {
      if (!Relieve(evictor)) return false;
    }
    return true;
  }
  // With the last run gone, so is every reference to the arena's content.
  void MaybeReset() noexcept TOKROUTE_REQUIRES(mutex_) {
    if (stats_.runs > 0 || table_.size() > 0) return;
    table_.Reset();
    arena_.ReleaseFree(1);  // One stays, so that a lone request does not go to the system each time.
  }

  // Trims the oldest memberships from their tails; returns the blocks evicted. Amortised O(1) per membership touched
  // plus, when a node's longest holder is trimmed, O(holders).
  std::int64_t Evict(std::uint32_t owner, std::int64_t blocks) noexcept TOKROUTE_REQUIRES(mutex_) {
    std::int64_t evicted = 0;
    while (evicted < blocks) {
      const std::uint32_t at = owners_[owner].order.oldest;
      if (at == kNone) {  // Unless other threads have released some of it.
        if (!SettleAll()) break;
        continue;
      }
      Holder& holder = *FindHolder(at, TagOf(owner));
      const std::int64_t trimmed = std::min<std::int64_t>(holder.cutoff, blocks - evicted);
      evicted += trimmed;
      if (trimmed == holder.cutoff) {
        DropHolder(at, holder.tag);
      } else {
        LowerCutoff(NodeAt(at), holder, static_cast<std::uint16_t>(holder.cutoff - trimmed));
        Normalize(at);
      }
    }
    stats_.evicted_blocks += evicted;
    return evicted;
  }
  void EvictOverflow(std::uint32_t owner) noexcept TOKROUTE_REQUIRES(mutex_) {
    Evict(owner, owners_[owner].held - slots_[owners_[owner].id.slot].capacity_blocks);
  }

  // ---- Owners ----

  Entry Enter(EndpointId id) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (!CanExist(id)) return Entry::kDead;
    if (id.slot >= slots_.size() && !slots_.Resize(id.slot + 1, Slot{})) return Entry::kNoMemory;
    Slot& slot = slots_[id.slot];
    // Incarnations of a slot only grow, so an older one is a straggler.
    if (id.incarnation < slot.incarnation || id.incarnation <= slot.dead_through) return Entry::kDead;
    if (id.incarnation > slot.incarnation) {
      if (slot.incarnation > slot.dead_through) Remove({id.slot, slot.incarnation});
      slot.incarnation = id.incarnation;
      slot.capacity_blocks = default_blocks_;
      ++stats_.endpoints;
    }
    return Entry::kOk;
  }

  // The owner to record for, made if need be; kNone: dead, impossible, or no memory for it.
  std::uint32_t AdmitOwner(EndpointId id, const FleetView* alive) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (alive != nullptr && !alive->Alive(id)) return kNone;
    if (Enter(id) != Entry::kOk) return kNone;
    Slot& slot = slots_[id.slot];
    if (slot.owner != kNone) return slot.owner;
    std::uint32_t owner = free_owner_;
    if (owner != kNone) {
      free_owner_ = owners_[owner].next;
    } else {
      owner = owners_.size();
      if (owner == kMostOwners || !owners_.PushBack(Owner{})) return kNone;
    }
    const std::uint32_t generation = owners_[owner].generation + 1;
    owners_[owner] = Owner{};
    owners_[owner].id = id;
    owners_[owner].generation = generation;
    owners_[owner].alive = true;
    slot.owner = owner;
    return owner;
  }

  std::uint32_t FindOwner(EndpointId id) const noexcept TOKROUTE_REQUIRES(mutex_) {
    if (!CanExist(id) || id.slot >= slots_.size() || slots_[id.slot].incarnation != id.incarnation) return kNone;
    return slots_[id.slot].owner;
  }

  // Blocks the endpoint may hold; 0 when it is known to be dead.
  std::int64_t CapacityOf(EndpointId id) const noexcept TOKROUTE_REQUIRES(mutex_) {
    if (id.slot >= slots_.size()) return default_blocks_;
    const Slot& slot = slots_[id.slot];
    if (id.incarnation < slot.incarnation || id.incarnation <= slot.dead_through) return 0;
    return id.incarnation == slot.incarnation ? slot.capacity_blocks : default_blocks_;
  }

  void Remove(EndpointId id) noexcept TOKROUTE_REQUIRES(mutex_) {
    // An id never seen must stay dead too, in case its record comes late.
    if (id.slot >= slots_.size() && !slots_.Resize(id.slot + 1, Slot{})) return;
    Slot& slot = slots_[id.slot];
    if (id.incarnation <= slot.dead_through) return;
    const bool was_alive = slot.incarnation > slot.dead_through;
    slot.dead_through = id.incarnation;
    if (was_alive && slot.incarnation <= slot.dead_through) {
      --stats_.endpoints;
      if (slot.owner != kNone) Retire(slot.owner);
    }
  }

  // From now on nobody sees what the owner holds.
  void Retire(std::uint32_t at) noexcept TOKROUTE_REQUIRES(mutex_) {
    Owner& owner = owners_[at];
    owner.alive = false;
    owner.next = kNone;
    slots_[owner.id.slot].owner = kNone;
    stats_.pending_sweep += owner.memberships;
    (last_dead_ != kNone ? owners_[last_dead_].next : first_dead_) = at;
    last_dead_ = at;
  }

  // Ends up to `memberships` of the dead, and then their owners.
  void SweepSome(std::int64_t memberships) noexcept TOKROUTE_REQUIRES(mutex_) {
    while (first_dead_ != kNone) {
      const std::uint32_t at = first_dead_;
      for (; owners_[at].memberships > 0; --memberships) {
        if (memberships <= 0) return;
        const Owner& owner = owners_[at];
        DropHolder(owner.order.oldest != kNone ? owner.order.oldest : owner.pinned.oldest, TagOf(at));
      }
      first_dead_ = owners_[at].next;
      if (first_dead_ == kNone) last_dead_ = kNone;
      owners_[at].next = free_owner_;
      free_owner_ = at;
    }
  }

  // ---- Receipts ----

  std::uint32_t NewLive() noexcept TOKROUTE_REQUIRES(mutex_) {
    const std::uint32_t entry = live_.New();
    if (entry == kNone) return kNone;
    live_[entry].state.store(++last_serial_ << Live::kSerialShift, std::memory_order_release);
    ++stats_.live_receipts;
    return entry;
  }
  void FreeLive(std::uint32_t entry) noexcept TOKROUTE_REQUIRES(mutex_) {
    live_.Free(entry);
    --stats_.live_receipts;
  }
  Live* FindLive(const PrefixReceipt& receipt) noexcept TOKROUTE_REQUIRES(mutex_) {
    Live* live = receipt.serial != 0 ? live_.Find(receipt.entry) : nullptr;
    const bool same = live != nullptr && live->state.load(std::memory_order_relaxed) >> Live::kSerialShift == receipt.serial;
    return same ? live : nullptr;
  }
  bool OwnerLives(const Live& live) const noexcept TOKROUTE_REQUIRES(mutex_) {
    return owners_[live.owner].alive && owners_[live.owner].generation == live.owner_generation;
  }

  // The path's reference becomes the receipt's.
  PrefixReceipt Finish(std::uint32_t entry, std::uint32_t owner, const Path& path) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (path.shortened) ++stats_.truncated_records;
    if (path.end == kNone) {
      FreeLive(entry);
      MaybeReset();
      return {};
    }
    Live& live = live_[entry];
    live.node = path.end;
    live.owner = owner;
    live.owner_generation = owners_[owner].generation;
    return {.serial = last_serial_, .entry = entry, .blocks = path.depth};
  }

  // Makes the path to the node's end the owner's: pins what it holds of it, makes room, adds what is missing, and goes
  // on with `keys` (of the whole prompt) up to `wanted` blocks. Ends earlier, and says so in the path, where capacity
  // or memory end. On entry the path's end is at most `wanted` deep; its reference moves along.
  void Book(std::uint32_t owner, Path& path, std::int64_t wanted, std::span<const BlockKey> keys) noexcept
      TOKROUTE_REQUIRES(mutex_) {
    const std::uint32_t tag = TagOf(owner);
    // What it holds of the path is a leading part, the last run perhaps not wholly. Pinned first, so that making room
    // does not take it away.
    std::int64_t held = 0;
    std::int64_t end = path.depth;
    for (std::uint32_t at = path.end; at != kNone; at = NodeAt(at).parent) {
      end -= NodeAt(at).length;
      Holder* holder = FindHolder(at, tag);
      if (holder == nullptr) continue;
      held = std::max(held, end + holder->cutoff);
      Pin(at, *holder);
    }
    const std::int64_t capacity = slots_[owners_[owner].id.slot].capacity_blocks;
    Evict(owner, wanted > held ? owners_[owner].held + (wanted - held) - capacity : 0);
    const std::int64_t room = std::clamp(capacity - owners_[owner].held, std::int64_t{0}, wanted - held);
    if (held + room < wanted) path.shortened = true;
    wanted = held + room;
    if (path.depth > wanted) {
      Shorten(owner, path, wanted);
      wanted = path.depth;
    }
    while (!RaisePath(owner, path)) {
      path.shortened = true;
      wanted = path.depth;
    }
    while (path.depth < wanted) {
      const std::span<const BlockKey> rest =
          keys.subspan(static_cast<std::size_t>(path.depth), static_cast<std::size_t>(wanted - path.depth));
      if (table_.Find(rest[0]) != kNone) {  // Elsewhere in the tree, or the key repeats within the prompt.
        ++stats_.conflicting_keys;
        return;
      }
      const std::uint32_t run = NewRun(path, rest, owner);
      if (run == kNone) {
        path.shortened = true;
        return;
      }
      AddReference(run);
      DropReference(path.end);
      path.end = run;
      path.depth += NodeAt(run).length;
    }
  }

  // Moves the path's end up to the parent's end.
  void StepUp(Path& path) noexcept TOKROUTE_REQUIRES(mutex_) {
    const std::uint32_t parent = NodeAt(path.end).parent;
    path.depth -= NodeAt(path.end).length;
    AddReference(parent);
    DropReference(path.end);
    path.end = parent;
  }

  // Lets the path end at `blocks`, at least what the owner holds of it. If the run there cannot be split, above it.
  void Shorten(std::uint32_t owner, Path& path, std::int64_t blocks) noexcept TOKROUTE_REQUIRES(mutex_) {
    while (path.end != kNone && path.depth - NodeAt(path.end).length >= blocks) StepUp(path);
    if (path.depth == blocks) return;
    const std::int64_t start = path.depth - NodeAt(path.end).length;
    const std::uint32_t upper = Split(path.end, static_cast<std::uint32_t>(blocks - start), owner);
    if (upper != kNone) {
      DropReference(path.end);
      path.end = upper;
      path.depth = blocks;
      return;
    }
    path.shortened = true;
    // The owner may hold, and have pinned, a leading part of this run.
    Holder* holder = FindHolder(path.end, TagOf(owner));
    if (holder != nullptr) UnpinLast(path.end, *holder);
    StepUp(path);
  }

  // Gives the owner all of every run on the path. False when memory ran out: the path then ends above the run that
  // could not take another holder, and the caller tries again.
  bool RaisePath(std::uint32_t owner, Path& path) noexcept TOKROUTE_REQUIRES(mutex_) {
    const std::uint32_t tag = TagOf(owner);
    for (std::uint32_t at = path.end; at != kNone; at = NodeAt(at).parent) {
      Holder* holder = FindHolder(at, tag);
      if (holder != nullptr) {  // Pinned before, and so is everything above, which it holds wholly.
        Node& node = NodeAt(at);
        const std::uint16_t before = holder->cutoff;
        if (before == node.length) return true;
        holder->cutoff = node.length;
        owners_[owner].held += node.length - before;
        stats_.holder_blocks += node.length - before;
        if (before == node.top) --node.top_count;
        NoteCutoff(node, node.length);
        return true;
      }
      if (!MakeRoom(at, owner)) {
        while (path.end != at) {
          DropHolder(path.end, tag);  // Added a moment ago; the reference keeps the run.
          StepUp(path);
        }
        StepUp(path);
        return false;
      }
      AddHolder(at, owner, NodeAt(at).length);
    }
    return true;
  }

  void Confirm(std::uint32_t node, std::uint32_t tag) noexcept TOKROUTE_REQUIRES(mutex_) {
    for (std::uint32_t at = node; at != kNone; at = NodeAt(at).parent) {
      Holder* holder = FindHolder(at, tag);
      if (holder->confirmed == holder->cutoff) return;  // Then everything above is as well.
      holder->confirmed = holder->cutoff;
    }
  }

  // Ends what was released, in the order of the calls of each thread. False: nothing was, or we are at it.
  bool Settle(std::atomic<std::uint32_t>& released) noexcept TOKROUTE_REQUIRES(mutex_) {
    if (settling_ || released.load(std::memory_order_relaxed) == kNone) return false;
    settling_ = true;
    std::uint32_t entry = released.exchange(kNone, std::memory_order_acquire), first = kNone;
    while (entry != kNone) entry = std::exchange(live_[entry].next, std::exchange(first, entry));
    while (first != kNone) {
      const std::uint32_t next = live_[first].next;
      Release(first);
      first = next;
    }
    settling_ = false;
    return true;
  }
  bool SettleAll() noexcept TOKROUTE_REQUIRES(mutex_) {
    bool any = false;
    for (ReleasedList& list : released_) any |= Settle(list.last);
    if (any) SweepSome(kSweepStep);
    return any;
  }
  bool SettleOwn() noexcept TOKROUTE_REQUIRES(mutex_) {
    return Settle(released_[ThreadNumber() % kReleasedLists].last);
  }

  void Release(std::uint32_t entry) noexcept TOKROUTE_REQUIRES(mutex_) {
    const Live& live = live_[entry];
    const std::uint64_t flags = live.state.load(std::memory_order_relaxed);
    const bool real = (flags & Live::kFirstToken) != 0 || (flags & Live::kAborted) == 0;
    const std::uint32_t end = live.node, owner = live.owner;
    if (OwnerLives(live)) {
      const std::uint32_t tag = TagOf(owner);
      if (real) Confirm(end, tag);
      // Deepest first, so that parents come out more recent. The reference keeps the path while memberships go.
      for (std::uint32_t at = end; at != kNone; at = NodeAt(at).parent) {
        Holder& holder = *FindHolder(at, tag);
        if (holder.pins > 1) {
          --holder.pins;
          continue;
        }
        stats_.taken_back_blocks += holder.cutoff - holder.confirmed;
        if (holder.confirmed == 0) {
          DropHolder(at, tag);
          continue;
        }
        if (holder.confirmed < holder.cutoff) LowerCutoff(NodeAt(at), holder, holder.confirmed);
        UnpinLast(at, holder);
      }
      EvictOverflow(owner);
    }
    FreeLive(entry);
    DropReference(end);
    MaybeReset();
  }

  const std::int32_t block_size_;
  const std::int64_t default_blocks_;
  mutable Mutex mutex_;
  MemoryBudget budget_ TOKROUTE_GUARDED_BY(mutex_);
  Arena arena_ TOKROUTE_GUARDED_BY(mutex_);
  KeyTable table_ TOKROUTE_GUARDED_BY(mutex_);  // First key of every run -> its node.
  BudgetArray<Owner> owners_ TOKROUTE_GUARDED_BY(mutex_);
  BudgetArray<Slot> slots_ TOKROUTE_GUARDED_BY(mutex_);
  LiveTable live_;  // Guard themselves, as they say.
  RootFilter roots_;
  struct alignas(64) ReleasedList {
    std::atomic<std::uint32_t> last{kNone};  // The others follow by `next`.
  };
  static constexpr std::uint32_t kReleasedLists = 16;
  std::array<ReleasedList, kReleasedLists> released_;  // By thread.
  bool settling_ TOKROUTE_GUARDED_BY(mutex_) = false;
  std::uint32_t free_owner_ TOKROUTE_GUARDED_BY(mutex_) = kNone;
  std::uint32_t first_dead_ TOKROUTE_GUARDED_BY(mutex_) = kNone, last_dead_ TOKROUTE_GUARDED_BY(mutex_) = kNone;
  std::uint64_t last_serial_ TOKROUTE_GUARDED_BY(mutex_) = 0;
  PrefixIndexStats stats_ TOKROUTE_GUARDED_BY(mutex_);  // Without the bytes, which the budget counts.
};

absl::Status HistoryIndex::Audit() {
  const Section section(*this);
  struct Seen {
    std::uint32_t children = 0, references = 0;
  };
  std::unordered_map<std::uint32_t, Seen> nodes;
  const auto fail = [](const auto&... parts) { return absl::InternalError(absl::StrCat("PrefixIndex: ", parts...)); };
  std::vector<std::pair<BlockKey, std::uint32_t>> entries;
  table_.ForEach([&entries](BlockKey key, std::uint32_t at) { entries.emplace_back(key, at); });
  for (const auto& [key, at] : entries) {
    nodes.emplace(at, Seen{});
    if (KeysOf(NodeAt(at))[0] != key) return fail("run ", at, " is in the table by another key");
  }
  if (std::ssize(entries) != stats_.runs || std::ssize(nodes) != stats_.runs || table_.size() != stats_.runs) {
    return fail("table has ", entries.size(), " runs, counted ", stats_.runs);
  }
  std::int64_t units = 0;
  for (auto& [at, seen] : nodes) {
    const Node& node = NodeAt(at);
    units += 1 + KeyUnits(node.length) + (node.holders != kNone ? node.holder_units : 0);
    if (node.parent == kNone) continue;
    const auto parent = nodes.find(node.parent);
    if (parent == nodes.end()) return fail("run ", at, " has a parent that is not in the table");
    ++parent->second.children;
  }
  std::int64_t live_receipts = 0;
  std::unordered_map<std::uint64_t, std::uint32_t> pins;  // By node and owner, of living ones.
  for (std::uint32_t i = 0; i < live_.size(); ++i) {
    if (live_[i].state.load(std::memory_order_relaxed) == 0) continue;
    ++live_receipts;
    const auto node = nodes.find(live_[i].node);
    if (node == nodes.end()) return fail("receipt ", i, " names a run that is gone");
    ++node->second.references;
    if (!OwnerLives(live_[i])) continue;
    for (std::uint32_t at = live_[i].node; at != kNone; at = NodeAt(at).parent) {
      ++pins[(std::uint64_t{at} << 32) | live_[i].owner];
    }
  }
  if (live_receipts != stats_.live_receipts) return fail("live receipts: ", live_receipts);
  std::int64_t distinct = 0, pairs = 0, memberships = 0, dead = 0;
  for (const auto& [at, seen] : nodes) {
    Node& node = NodeAt(at);
    if (node.children != seen.children) return fail("run ", at, " counts ", node.children, " children");
    if (node.references != seen.references) return fail("run ", at, " counts ", node.references, " references");
    if (node.length == 0 || node.length > kMostKeys) return fail("run ", at, " has length ", node.length);
    if (node.tail_key != KeysOf(node)[node.length - 1]) return fail("run ", at, " has another tail key");
    if (node.holders == kNone && node.holder_count > 1) return fail("run ", at, " has too many holders inline");
    if (node.holder_count > RoomOf(node)) return fail("run ", at, " has more holders than room");
    std::uint32_t top = 0, top_count = 0, previous_tag = 0;
    for (const Holder& holder : HoldersOf(node)) {
      if (top > 0 && holder.tag <= previous_tag) return fail("run ", at, " has unordered holders");
      previous_tag = holder.tag;
      if (holder.cutoff == 0 || holder.cutoff > node.length || holder.confirmed > holder.cutoff) {
        return fail("run ", at, " of ", node.length, " has a holder with cutoff ", holder.cutoff);
      }
      top_count = holder.cutoff > top ? 1 : holder.cutoff == top ? top_count + 1 : top_count;
      top = std::max<std::uint32_t>(top, holder.cutoff);
      pairs += holder.cutoff;
      ++memberships;
      const std::uint32_t owner = OwnerOf(holder);
      if (holder.tag != TagOf(owner)) return fail("run ", at, " has a holder of another slot");
      if (!owners_[owner].alive) {
        ++dead;
        continue;
      }
      if (holder.pins > 0 && holder.cutoff != node.length) return fail("run ", at, " is pinned but not whole");
      if (holder.pins == 0 && holder.confirmed != holder.cutoff) return fail("run ", at, " is tentative without a pin");
      const auto pinned = pins.find((std::uint64_t{at} << 32) | owner);
      if (holder.pins != (pinned != pins.end() ? pinned->second : 0))
        return fail("run ", at, " counts ", holder.pins, " pins");
      if (node.parent != kNone) {
        const Holder* above = FindHolder(node.parent, holder.tag);
        if (above == nullptr || above->cutoff != NodeAt(node.parent).length || above->pins < holder.pins) {
          return fail("run ", at, " is held without its parent");
        }
        if (holder.confirmed > 0 && above->confirmed != above->cutoff)
          return fail("run ", at, " is real above tentative");
      }
    }
    if (top != node.top || top_count != node.top_count) return fail("run ", at, " has top ", node.top);
    if (node.children == 0 && node.references == 0 && node.top != node.length) return fail("run ", at, " is too long");
    distinct += top;
  }
  if (distinct != stats_.distinct_blocks || pairs != stats_.holder_blocks || memberships != stats_.memberships ||
      dead != stats_.pending_sweep) {
    return fail("counted ", distinct, " blocks, ", pairs, " pairs, ", memberships, " memberships, ", dead, " dead");
  }
  std::int64_t alive = 0, listed = 0;
  for (std::uint32_t row = 0; row < slots_.size(); ++row) {
    const Slot& slot = slots_[row];
    if (slot.incarnation > slot.dead_through) {
      ++alive;
    } else if (slot.owner != kNone) {
      return fail("slot ", row, " is dead and has an owner");
    }
    if (slot.owner == kNone) continue;
    const Owner& owner = owners_[slot.owner];
    if (!owner.alive || owner.id != EndpointId{row, slot.incarnation})
      return fail("slot ", row, " has a foreign owner");
  }
  for (std::uint32_t i = 0; i < owners_.size(); ++i) {
    std::int64_t held = 0, count = 0;
    std::unordered_set<std::uint32_t> older;
    for (const bool pinned : {false, true}) {
      const List& list = pinned ? owners_[i].pinned : owners_[i].order;
      std::uint32_t previous = kNone;
      for (std::uint32_t at = list.oldest; at != kNone;) {
        const Holder* holder = FindHolder(at, TagOf(i));
        if (holder == nullptr || holder->older != previous || (holder->pins > 0) != pinned)
          return fail("list of owner ", i);
        if (!pinned && owners_[i].alive && older.count(NodeAt(at).parent) > 0)
          return fail("parent older than run ", at);
        older.insert(at);
        held += holder->cutoff;
        ++count;
        previous = at;
        at = holder->newer;
      }
      if (list.newest != previous) return fail("list of owner ", i, " ends elsewhere");
    }
    if (held != owners_[i].held || count != owners_[i].memberships) return fail("owner ", i, " holds ", held);
    listed += count;
  }
  if (alive != stats_.endpoints || listed != memberships) return fail("endpoints ", alive, ", memberships ", listed);
  units += table_.units();
  if (arena_.used_units() != units) return fail("arena has ", arena_.used_units(), " units in use, found ", units);
  if (arena_.CountFreeUnits() + units != std::int64_t{arena_.segments()} * Arena::kSegmentUnits) {
    return fail("arena's free lists are short");
  }
  if (budget_.peak() > budget_.limit()) return fail("over the memory limit");
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<PrefixEngine> MakeHistoryIndex(const PrefixIndexOptions& options) {
  return std::make_unique<HistoryIndex>(options);
}

}  // namespace tokroute::internal

// The index against an obvious model: per endpoint a map of keys and one list of blocks in order of use. Random calls,
// the same to both; after each of them the answers must be equal.
//
//   TOKROUTE_TEST_SEED=7 TOKROUTE_TEST_SCALE=20 prefix_index_differential_test
#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "prefix/prefix_test_util.h"
#include "support/test_run.h"
#include "tokroute/prefix/prefix_index.h"

namespace tokroute {
namespace {

class Model {
 public:
  struct Receipt {
    EndpointId endpoint;
    std::uint64_t life = 0;  // Which life of the endpoint it belongs to; 0: finished, or never recorded.
    bool confirmed = false;
    std::vector<BlockKey> path;
  };

  explicit Model(std::int64_t default_capacity) : default_capacity_(default_capacity) {}

  Receipt Record(EndpointId id, std::span<const BlockKey> keys) {
    Endpoint* endpoint = Enter(id);
    if (endpoint == nullptr) return {};
    return Book(id, *endpoint, {keys.begin(), keys.end()});
  }

  void OnFirstToken(Receipt& receipt) {
    if (receipt.life == 0) return;
    receipt.confirmed = true;
    Endpoint* endpoint = Find(receipt.endpoint);
    if (endpoint == nullptr || endpoint->life != receipt.life) return;
    for (const BlockKey key : receipt.path) endpoint->blocks[key].confirmed = true;
  }

  void OnReleased(Receipt& receipt, bool aborted) {
    if (receipt.life == 0) return;
    if (!aborted) OnFirstToken(receipt);
    Endpoint* endpoint = Find(receipt.endpoint);
    if (endpoint != nullptr && endpoint->life == receipt.life) {
      for (auto key = receipt.path.rbegin(); key != receipt.path.rend(); ++key) {
        Block& block = endpoint->blocks[*key];
        if (--block.pins > 0) continue;
        if (block.confirmed) {
          block.use = endpoint->order.insert(endpoint->order.end(), *key);
        } else {
          endpoint->blocks.erase(*key);
          ++taken_back;
        }
      }
      Evict(*endpoint, Size(*endpoint) - endpoint->capacity);
    }
    receipt = {};
  }

  Receipt Move(Receipt& from, EndpointId to) {
    if (from.life == 0) return {};
    Endpoint* endpoint = Enter(to);
    Receipt receipt;
    if (endpoint != nullptr) receipt = Book(to, *endpoint, from.path);
    OnReleased(from, true);
    return receipt;
  }

  bool SetCapacity(EndpointId id, std::int64_t blocks) {
    Endpoint* endpoint = Enter(id);
    if (endpoint == nullptr) return false;
    endpoint->capacity = blocks;
    Evict(*endpoint, Size(*endpoint) - blocks);
    return true;
  }

  void Remove(EndpointId id) {
    std::uint32_t& dead = dead_through_[id.slot];
    dead = std::max(dead, id.incarnation);
    const auto it = endpoints_.find(id.slot);
    if (it != endpoints_.end() && it->second.incarnation <= dead) endpoints_.erase(it);
  }
  void Clear(EndpointId id) {
    Endpoint* endpoint = Find(id);
    if (endpoint == nullptr) return;
    endpoint->blocks.clear();
    endpoint->order.clear();
    endpoint->life = ++lives_;
  }
  void RetireDead(const FleetView& view) {
    std::vector<EndpointId> dead;
    for (const auto& [slot, endpoint] : endpoints_) {
      if (!view.Alive({slot, endpoint.incarnation})) dead.push_back({slot, endpoint.incarnation});
    }
    for (const EndpointId id : dead) Remove(id);
  }

  // (slot, blocks) by slot.
  std::vector<std::pair<EndpointId, std::int64_t>> Match(std::span<const BlockKey> keys) const {
    std::vector<std::pair<EndpointId, std::int64_t>> found;
    for (const auto& [slot, endpoint] : endpoints_) {
      const std::int64_t held = Leading(endpoint, keys);
      if (held > 0) found.push_back({{slot, endpoint.incarnation}, held});
    }
    return found;
  }
  std::int64_t Held(EndpointId id) const {
    const auto it = endpoints_.find(id.slot);
    return it != endpoints_.end() && it->second.incarnation == id.incarnation ? Size(it->second) : 0;
  }
  std::int64_t DistinctBlocks() const {
    std::set<BlockKey> keys;
    for (const auto& [slot, endpoint] : endpoints_) {
      for (const auto& [key, block] : endpoint.blocks) keys.insert(key);
    }
    return static_cast<std::int64_t>(keys.size());
  }
  std::int64_t HolderBlocks() const {
    std::int64_t blocks = 0;
    for (const auto& [slot, endpoint] : endpoints_) blocks += Size(endpoint);
    return blocks;
  }
  std::int64_t Endpoints() const { return static_cast<std::int64_t>(endpoints_.size()); }

  std::int64_t evicted = 0, taken_back = 0, truncated = 0;

 private:
  struct Block {
    std::int64_t pins = 0;
    bool confirmed = false;
    std::list<BlockKey>::iterator use;  // In `order`, without pins.
  };
  struct Endpoint {
    std::uint32_t incarnation = 0;
    std::uint64_t life = 0;
    std::int64_t capacity = 0;
    std::unordered_map<BlockKey, Block> blocks;
    std::list<BlockKey> order;  // Least recently used first.
  };

  static std::int64_t Size(const Endpoint& endpoint) { return static_cast<std::int64_t>(endpoint.blocks.size()); }
  static std::int64_t Leading(const Endpoint& endpoint, std::span<const BlockKey> keys) {
    std::int64_t held = 0;
    for (const BlockKey key : keys) {
      if (endpoint.blocks.count(key) == 0) break;
      ++held;
    }
    return held;
  }
  Endpoint* Find(EndpointId id) {
    const auto it = endpoints_.find(id.slot);
    return it != endpoints_.end() && it->second.incarnation == id.incarnation ? &it->second : nullptr;
  }
  Endpoint* Enter(EndpointId id) {
    if (id.incarnation == 0 || id.slot >= kMaxEndpoints || id.incarnation <= dead_through_[id.slot]) return nullptr;
    Endpoint& endpoint = endpoints_[id.slot];
    if (id.incarnation < endpoint.incarnation) return nullptr;
    if (id.incarnation > endpoint.incarnation) {
      dead_through_[id.slot] = endpoint.incarnation;
      endpoint = Endpoint{};
      endpoint.incarnation = id.incarnation;
      endpoint.life = ++lives_;
      endpoint.capacity = default_capacity_;
    }
    return &endpoint;
  }
  Receipt Book(EndpointId id, Endpoint& endpoint, std::vector<BlockKey> path) {
    const std::int64_t held = Leading(endpoint, path), missing = std::ssize(path) - held;
    for (std::int64_t i = 0; i < held; ++i) {
      Block& block = endpoint.blocks[path[static_cast<std::size_t>(i)]];
      if (block.pins++ == 0) endpoint.order.erase(block.use);
    }
    if (missing > 0) Evict(endpoint, Size(endpoint) + missing - endpoint.capacity);
    const std::int64_t room = std::clamp(endpoint.capacity - Size(endpoint), std::int64_t{0}, missing);
    if (room < missing) ++truncated;
    path.resize(static_cast<std::size_t>(held + room));
    for (std::int64_t i = held; i < held + room; ++i) endpoint.blocks[path[static_cast<std::size_t>(i)]].pins = 1;
    if (path.empty()) return {};
    return {id, endpoint.life, false, std::move(path)};
  }
  void Evict(Endpoint& endpoint, std::int64_t blocks) {
    for (; blocks > 0 && !endpoint.order.empty(); --blocks) {
      endpoint.blocks.erase(endpoint.order.front());
      endpoint.order.pop_front();
      ++evicted;
    }
  }

  const std::int64_t default_capacity_;
  std::uint64_t lives_ = 0;
  std::map<std::uint32_t, Endpoint> endpoints_;
  std::map<std::uint32_t, std::uint32_t> dead_through_;
};

struct Shape {
  const char* name;
  std::uint64_t alphabet;       // Contents a block may have: small means many shared prefixes.
  std::uint64_t max_extension;  // Blocks by which a prompt goes on beyond an earlier one.
  std::uint64_t max_depth;      // Blocks of the longest prompt.
  std::uint32_t endpoints;
  std::int64_t capacity;    // Blocks, of an endpoint that set none.
  std::uint64_t most_live;  // Requests in flight.
  std::int64_t operations;
  std::int64_t audit_every;  // Calls between complete checks.
  std::uint64_t calm = 1;    // Endpoints come, go and change size this many times more rarely.
};

class Driver {
 public:
  Driver(const Shape& shape, std::uint64_t seed)
      : shape_(shape),
        random_(seed),
        user_({.block_size = 16, .default_capacity_tokens = 16 * shape.capacity}),
        model_(shape.capacity) {
    for (std::uint32_t i = 0; i < shape.endpoints; ++i) {
      // Sparse slots, some beyond what small tables hold.
      slots_.push_back(i < 3 ? i : i * 37 % kMaxEndpoints);
      ids_.push_back(fleet_.Add(slots_.back()));
    }
  }

  void Run() {
    base_ = user_.index->Stats().bytes;
    for (std::int64_t op = 0; op < shape_.operations; ++op) {
      SCOPED_TRACE("operation " + std::to_string(op));
      Step();
      CheckCounts();
      if (op % shape_.audit_every == 0) CheckAll();
      if (::testing::Test::HasFailure()) return;
    }
    CheckAll();
    Wind();
  }

 private:
  struct Flight {
    PrefixReceipt receipt;
    Model::Receipt model;
  };

  std::vector<BlockKey> Prompt() {
    std::vector<std::uint64_t> contents;
    if (!history_.empty() && !random_.OneIn(6)) {
      contents = history_[random_.Below(history_.size())];
      contents.resize(random_.OneIn(2) ? contents.size() : random_.Below(contents.size() + 1));
    }
    const std::uint64_t extension = random_.Below(shape_.max_extension + 1);
    for (std::uint64_t i = 0; i < extension; ++i) contents.push_back(random_.Below(shape_.alphabet));
    if (contents.empty()) contents.push_back(random_.Below(shape_.alphabet));
    if (contents.size() > shape_.max_depth) contents.resize(shape_.max_depth);
    if (history_.size() < 64) {
      history_.push_back(contents);
    } else {
      history_[random_.Below(64)] = contents;
    }
    return ChainKeys(contents);
  }
  EndpointId AnyId() {
    EndpointId id = ids_[random_.Below(ids_.size())];
    if (random_.OneIn(40))
      id.incarnation -= static_cast<std::uint32_t>(random_.Below(id.incarnation + 1));  // Long gone.
    return id;
  }
  void ReAdd(std::size_t i) {
    fleet_.Remove(ids_[i]);
    ids_[i] = fleet_.Add(slots_[i]);
  }

  void Step() {
    PrefixIndex& index = *user_.index;
    const FleetView view = fleet_.View();
    const std::uint64_t what = random_.Below(100);
    if (what < 40 || flights_.empty()) {
      if (flights_.size() >= shape_.most_live) return Finish(random_.Below(flights_.size()));
      const std::vector<BlockKey> prompt = Prompt();
      const EndpointId id = AnyId();
      const bool ask = random_.OneIn(2);
      Flight flight;
      flight.receipt = user_.Record(id, prompt, ask ? &view : nullptr);
      if (!ask || view.Alive(id)) flight.model = model_.Record(id, prompt);
      ASSERT_EQ(flight.receipt.blocks, std::ssize(flight.model.path));
      ASSERT_EQ(static_cast<bool>(flight.receipt), flight.model.life != 0);
      flights_.push_back(std::move(flight));
    } else if (what < 55) {
      Flight& flight = flights_[random_.Below(flights_.size())];
      PrefixReceipt copy = flight.receipt;
      index.OnFirstToken(random_.OneIn(2) ? copy : flight.receipt);
      model_.OnFirstToken(flight.model);
    } else if (what < 84) {
      Finish(random_.Below(flights_.size()));
    } else if (what < 90) {
      Flight& flight = flights_[random_.Below(flights_.size())];
      const EndpointId to = AnyId();
      PrefixReceipt moved = index.Move(flight.receipt, to, &view);
      Model::Receipt model;
      if (view.Alive(to)) {
        model = model_.Move(flight.model, to);
      } else {
        model_.OnReleased(flight.model, true);
      }
      ASSERT_FALSE(flight.receipt);
      ASSERT_EQ(moved.blocks, std::ssize(model.path));
      flight = {moved, std::move(model)};
    } else if (what < 97 && !random_.OneIn(shape_.calm)) {
      Check(Prompt());
    } else if (what < 93) {
      const EndpointId id = AnyId();
      const std::int64_t blocks =
          static_cast<std::int64_t>(random_.Below(static_cast<std::uint64_t>(2 * shape_.capacity)));
      const std::int64_t tokens = random_.OneIn(4) ? 0 : blocks * 16 + 15;
      const bool done = model_.SetCapacity(id, tokens == 0 ? shape_.capacity : blocks);
      if (id.incarnation > 0) {
        ASSERT_EQ(index.SetCapacity(id, tokens).ok(), done);
      } else {
        ASSERT_EQ(index.SetCapacity(id, tokens).code(), absl::StatusCode::kInvalidArgument);
      }
    } else if (what < 95) {
      const std::size_t i = random_.Below(ids_.size());
      const EndpointId id = ids_[i];
      ReAdd(i);
      index.RemoveEndpoint(id);
      model_.Remove(id);
    } else if (what < 96) {
      for (std::uint64_t n = random_.Below(3) + 1; n > 0; --n) ReAdd(random_.Below(ids_.size()));
      index.RetireDead(view);
      model_.RetireDead(view);
    } else if (what < 97) {
      const EndpointId id = AnyId();
      index.ClearEndpoint(id);
      model_.Clear(id);
    } else if (what < 98) {
      index.Sweep(static_cast<std::int64_t>(random_.Below(100)));
    } else {
      Check(Prompt());
    }
  }

  void Finish(std::size_t i) {
    const bool aborted = random_.OneIn(3);
    PrefixReceipt copy = flights_[i].receipt;
    user_.index->OnReleased(flights_[i].receipt, aborted);
    model_.OnReleased(flights_[i].model, aborted);
    ASSERT_FALSE(flights_[i].receipt);
    if (random_.OneIn(4)) {  // Doubled calls, and late ones: long after the entry has another owner.
      PrefixReceipt& late = random_.OneIn(2) ? copy : stale_;
      user_.index->OnFirstToken(late);
      user_.index->OnReleased(late, random_.OneIn(2));
    }
    if (random_.OneIn(4)) stale_ = copy;
    std::swap(flights_[i], flights_.back());
    flights_.pop_back();
  }

  void Check(const std::vector<BlockKey>& prompt) {
    const PrefixMatch& found = user_.Match(prompt);
    const auto want = model_.Match(prompt);
    ASSERT_EQ(found.prompt_blocks(), std::ssize(prompt));
    ASSERT_EQ(found.holders().size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(found.holders()[i].endpoint, want[i].first);
      ASSERT_EQ(found.holders()[i].blocks, want[i].second);
    }
  }
  void CheckCounts() {
    const PrefixIndexStats stats = user_.index->Stats();
    ASSERT_EQ(stats.evicted_blocks, model_.evicted);
    ASSERT_EQ(stats.taken_back_blocks, model_.taken_back);
    ASSERT_EQ(stats.truncated_records, model_.truncated);
    ASSERT_EQ(stats.endpoints, model_.Endpoints());
    ASSERT_EQ(stats.conflicting_keys, 0);
    for (const EndpointId id : ids_) ASSERT_EQ(user_.index->HeldBlocks(id), model_.Held(id));
  }
  void CheckAll() {
    const absl::Status audit = user_.index->Audit();
    ASSERT_TRUE(audit.ok()) << audit;
    for (std::size_t i = 0; i < history_.size(); i += 1 + history_.size() / 8) Check(ChainKeys(history_[i]));
    const PrefixIndexStats stats = user_.index->Stats();
    if (stats.pending_sweep > 0) return;
    ASSERT_EQ(stats.distinct_blocks, model_.DistinctBlocks());
    ASSERT_EQ(stats.holder_blocks, model_.HolderBlocks());
  }
  // Everything ends: nothing may remain.
  void Wind() {
    while (!flights_.empty()) Finish(0);
    CheckAll();
    for (const EndpointId id : ids_) user_.index->RemoveEndpoint(id);
    while (user_.index->Sweep(50) > 0) {
    }
    const PrefixIndexStats stats = user_.index->Stats();
    EXPECT_EQ(stats.distinct_blocks, 0);
    EXPECT_EQ(stats.holder_blocks, 0);
    EXPECT_EQ(stats.runs, 0);
    EXPECT_EQ(stats.memberships, 0);
    EXPECT_EQ(stats.endpoints, 0);
    EXPECT_EQ(stats.live_receipts, 0);
    // Beside the tables of endpoints and receipts one spare segment is kept.
    EXPECT_LE(stats.bytes, base_ + (std::int64_t{1} << 20) + (std::int64_t{kMaxEndpoints} << 7));
  }

  const Shape shape_;
  TestRandom random_;
  ScriptedFleet fleet_;
  IndexUser user_;
  Model model_;
  std::vector<std::uint32_t> slots_;
  std::vector<EndpointId> ids_;
  std::vector<Flight> flights_;
  PrefixReceipt stale_;  // Of a finished request.
  std::vector<std::vector<std::uint64_t>> history_;
  std::int64_t base_ = 0;
};

constexpr Shape kShapes[] = {
    {.name = "TinyAlphabet",
     .alphabet = 2,
     .max_extension = 4,
     .max_depth = 12,
     .endpoints = 3,
     .capacity = 20,
     .most_live = 6,
     .operations = 4000,
     .audit_every = 1},
    {.name = "OneEndpointTight",
     .alphabet = 3,
     .max_extension = 6,
     .max_depth = 20,
     .endpoints = 1,
     .capacity = 12,
     .most_live = 3,
     .operations = 3000,
     .audit_every = 1},
    {.name = "DeepChains",
     .alphabet = 2,
     .max_extension = 40,
     .max_depth = 400,
     .endpoints = 4,
     .capacity = 900,
     .most_live = 8,
     .operations = 3000,
     .audit_every = 3},
    {.name = "WideForks",
     .alphabet = 1000,
     .max_extension = 3,
     .max_depth = 6,
     .endpoints = 5,
     .capacity = 60,
     .most_live = 20,
     .operations = 4000,
     .audit_every = 2},
    {.name = "ManyEndpoints",
     .alphabet = 3,
     .max_extension = 5,
     .max_depth = 15,
     .endpoints = 60,
     .capacity = 40,
     .most_live = 40,
     .operations = 3000,
     .audit_every = 10},
    {.name = "ManyInFlight",
     .alphabet = 2,
     .max_extension = 6,
     .max_depth = 30,
     .endpoints = 3,
     .capacity = 100,
     .most_live = 200,
     .operations = 4000,
     .audit_every = 5},
    {.name = "LongRuns",
     .alphabet = 1u << 30,
     .max_extension = 7000,
     .max_depth = 12000,
     .endpoints = 3,
     .capacity = 30000,
     .most_live = 6,
     .operations = 250,
     .audit_every = 10,
     .calm = 5},
    {.name = "ManyRuns",
     .alphabet = 1u << 30,
     .max_extension = 4,
     .max_depth = 20,
     .endpoints = 4,
     .capacity = 20000,
     .most_live = 50,
     .operations = 20000,
     .audit_every = 2000,
     .calm = 500},
};

class PrefixIndexDifferentialTest : public ::testing::TestWithParam<Shape> {};

TEST_P(PrefixIndexDifferentialTest, AgreesWithTheModelAfterEveryCall) {
  const std::uint64_t first = TestSeed(1);
  for (std::uint64_t seed = first;
       seed < first + static_cast<std::uint64_t>((testing_support::kSanitized ? 1 : 5) * TestScale()); ++seed) {
    SCOPED_TRACE("TOKROUTE_TEST_SEED=" + std::to_string(seed));
    Driver(GetParam(), seed).Run();
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrefixIndexDifferentialTest, ::testing::ValuesIn(kShapes),
                         [](const ::testing::TestParamInfo<Shape>& shape) { return std::string(shape.param.name); });

// ---- Where the model does not reach: short memory and keys that are not chained. The structure must stay sound. ----

TEST(PrefixIndexChaosTest, AtTheMemoryLimitNothingBreaksAndNothingIsMadeUp) {
  const std::uint64_t first = TestSeed(1);
  for (std::uint64_t seed = first;
       seed < first + static_cast<std::uint64_t>((testing_support::kSanitized ? 2 : 4) * TestScale()); ++seed) {
    SCOPED_TRACE("TOKROUTE_TEST_SEED=" + std::to_string(seed));
    TestRandom random(seed);
    constexpr std::int64_t kLimit = std::int64_t{4} << 20;
    // Seed by seed many small runs, or few long ones, or both.
    const std::uint64_t longest = seed % 2 == 0 ? 90 : 3000;
    IndexUser user({.default_capacity_tokens = std::int64_t{1} << 40, .max_bytes = kLimit});
    PrefixIndex& index = *user.index;
    std::vector<PrefixReceipt> live;
    std::map<std::uint32_t, std::map<BlockKey, std::int64_t>> ever;  // Endpoint -> key -> depth it was recorded at.
    std::vector<std::vector<BlockKey>> prompts;
    std::uint32_t incarnation = 1;
    const int operations = seed % 2 == 0 ? 20000 : 6000;
    for (int op = 0; op < operations; ++op) {
      const std::uint64_t what = random.Below(100);
      if (what < 60) {
        std::vector<BlockKey> prompt;
        if (!prompts.empty() && random.OneIn(2)) {
          prompt = prompts[random.Below(prompts.size())];
          prompt.resize(random.Below(prompt.size()) + 1);
        }
        for (std::uint64_t n = random.Below(longest) + 1; n > 0; --n) {
          prompt.push_back(ChainKey(prompt.empty() ? 0 : prompt.back(), random.Next()));
        }
        const EndpointId id{static_cast<std::uint32_t>(random.Below(40)), incarnation};
        live.push_back(user.Record(id, prompt));
        for (std::int64_t i = 0; i < live.back().blocks; ++i) {
          ever[id.slot][prompt[static_cast<std::size_t>(i)]] = i;
        }
        prompts.resize(std::min<std::size_t>(prompts.size(), 30));
        prompts.insert(prompts.begin() + static_cast<std::ptrdiff_t>(random.Below(prompts.size() + 1)),
                       std::move(prompt));
      } else if (what < 95 && !live.empty()) {
        const std::size_t i = random.Below(live.size());
        index.OnReleased(live[i], random.OneIn(3));
        live[i] = live.back();
        live.pop_back();
      } else if (what == 99 && random.OneIn(10)) {
        index.RemoveEndpoint({static_cast<std::uint32_t>(random.Below(40)), incarnation});
      } else if (what == 98 && random.OneIn(20)) {
        ++incarnation;
      } else if (!prompts.empty()) {
        const std::vector<BlockKey>& prompt = prompts[random.Below(prompts.size())];
        for (const PrefixMatch::Holder& holder : user.Match(prompt).holders()) {
          ASSERT_LE(holder.blocks, std::ssize(prompt));
          const auto& known = ever[holder.endpoint.slot];
          ASSERT_EQ(known.count(prompt[static_cast<std::size_t>(holder.blocks - 1)]), 1u);
        }
      }
      ASSERT_LE(index.Stats().peak_bytes, kLimit);
      if (op % 250 == 0) {
        const absl::Status audit = index.Audit();
        ASSERT_TRUE(audit.ok()) << audit << " at " << op;
      }
    }
    const PrefixIndexStats stats = index.Stats();
    EXPECT_GT(stats.evicted_blocks, 0);
    EXPECT_GT(stats.peak_bytes, kLimit / 2);
    for (PrefixReceipt& receipt : live) index.OnReleased(receipt, true);
    for (std::uint32_t slot = 0; slot < 40; ++slot) index.RemoveEndpoint({slot, incarnation});
    while (index.Sweep(1000) > 0) {
    }
    EXPECT_EQ(index.Stats().runs, 0);
    EXPECT_LE(index.Stats().bytes, std::int64_t{1} << 20) << "a segment for data, and one for the table";
    EXPECT_TRUE(index.Audit().ok()) << index.Audit();
  }
}

// A hook that has no memory one time in so many.
struct ScarceMemory {
  TestRandom random{1};
  std::uint64_t one_in = 0;
  std::int64_t pieces = 0, refused = 0;
  static void* Allocate(std::size_t bytes, std::size_t alignment, void* context) noexcept {
    auto& scarce = *static_cast<ScarceMemory*>(context);
    if (scarce.one_in != 0 && scarce.random.OneIn(scarce.one_in)) return ++scarce.refused, nullptr;
    ++scarce.pieces;
    return ::operator new(bytes, std::align_val_t{alignment}, std::nothrow);
  }
  static void Release(void* memory, std::size_t, void* context) noexcept {
    --static_cast<ScarceMemory*>(context)->pieces;
    ::operator delete(memory, std::align_val_t{64});
  }
};

TEST(PrefixIndexChaosTest, MemoryThatIsNotToBeHadBreaksNothing) {
  const std::uint64_t first = TestSeed(1);
  for (const IndexMode mode : {IndexMode::kApproximate, IndexMode::kExact}) {
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(3 * TestScale()); ++seed) {
      SCOPED_TRACE("TOKROUTE_TEST_SEED=" + std::to_string(seed));
      TestRandom random(seed);
      ScarceMemory scarce{.random = TestRandom(seed + 100), .one_in = 2 + seed % 2 * 3};
      {
        IndexUser user({.mode = mode,
                        .default_capacity_tokens = 16 * 200'000,
                        .max_bytes = std::int64_t{16} << 20,
                        .memory = {&ScarceMemory::Allocate, &ScarceMemory::Release, &scarce}});
        PrefixIndex& index = *user.index;
        std::vector<PrefixReceipt> live;
        std::uint32_t incarnation = 1;
        for (int op = 0; op < 2000; ++op) {
          const EndpointId id{static_cast<std::uint32_t>(random.Below(5)), incarnation};
          const std::vector<BlockKey> prompt =
              LongChain(random.Below(40), 1 + static_cast<std::int64_t>(random.Below(random.OneIn(20) ? 9000 : 300)));
          const std::uint64_t what = random.Below(100);
          if (what < 60 && mode == IndexMode::kExact) {
            (void)index.Stored({id}, std::nullopt, prompt);
          } else if (what < 60) {
            live.push_back(user.Record(id, prompt));
          } else if (what < 80 && mode == IndexMode::kExact) {
            (void)index.Removed({id}, prompt);
          } else if (what < 80 && !live.empty()) {
            std::swap(live[random.Below(live.size())], live.back());
            if (random.OneIn(4)) {
              live.back() =
                  index.Move(live.back(), {static_cast<std::uint32_t>(random.Below(5)), incarnation}, nullptr);
            } else {
              index.OnReleased(live.back(), random.OneIn(3));
              live.pop_back();
            }
          } else if (what == 99) {
            index.ClearEndpoint(id);
          } else if (what == 98 && random.OneIn(10)) {
            for (std::uint32_t slot = 0; slot < 5; ++slot) index.RemoveEndpoint({slot, incarnation});
            ++incarnation;
          } else {
            for (const PrefixMatch::Holder& holder : user.Match(prompt).holders()) {
              ASSERT_LE(holder.blocks, index.HeldBlocks(holder.endpoint));
            }
          }
          if (op % 50 == 0) {
            const absl::Status audit = index.Audit();
            ASSERT_TRUE(audit.ok()) << audit << " at " << op;
          }
        }
        for (PrefixReceipt& receipt : live) index.OnReleased(receipt, true);
        for (std::uint32_t slot = 0; slot < 5; ++slot) index.RemoveEndpoint({slot, incarnation});
        while (index.Sweep(1000) > 0) {
        }
        EXPECT_EQ(index.Stats().runs, 0);
        EXPECT_LE(scarce.pieces, 2);
        EXPECT_TRUE(index.Audit().ok()) << index.Audit();
      }
      EXPECT_EQ(scarce.pieces, 0);
      EXPECT_GT(scarce.refused, 0);
    }
  }
}

TEST(PrefixIndexChaosTest, R74KeysThatAreNotChainedCorruptNothing) {
  const std::uint64_t first = TestSeed(1);
  for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(20 * TestScale()); ++seed) {
    SCOPED_TRACE("TOKROUTE_TEST_SEED=" + std::to_string(seed));
    TestRandom random(seed);
    const std::uint64_t alphabet = 1 + random.Below(8);
    IndexUser user({.default_capacity_tokens = 16 * 40});
    PrefixIndex& index = *user.index;
    std::vector<PrefixReceipt> live;
    for (int op = 0; op < 1500; ++op) {
      std::vector<BlockKey> prompt(random.Below(12) + 1);
      for (BlockKey& key : prompt) key = random.Below(alphabet);  // 0 among them.
      const EndpointId id{static_cast<std::uint32_t>(random.Below(3)), 1};
      const std::uint64_t what = random.Below(10);
      if (what < 5) {
        live.push_back(user.Record(id, prompt));
        ASSERT_LE(live.back().blocks, std::ssize(prompt));
      } else if (what < 6 && !live.empty()) {
        index.OnFirstToken(live[random.Below(live.size())]);
      } else if (what < 9 && !live.empty()) {
        const std::size_t i = random.Below(live.size());
        index.OnReleased(live[i], random.OneIn(2));
        live[i] = live.back();
        live.pop_back();
      } else if (!live.empty()) {
        PrefixReceipt& receipt = live[random.Below(live.size())];
        receipt = index.Move(receipt, id, nullptr);
      }
      for (const PrefixMatch::Holder& holder : user.Match(prompt).holders()) {
        ASSERT_LE(holder.blocks, std::ssize(prompt));
        ASSERT_LE(holder.blocks, index.HeldBlocks(holder.endpoint));
      }
      const absl::Status audit = index.Audit();
      ASSERT_TRUE(audit.ok()) << audit << " at " << op;
    }
    if (alphabet > 1) {
      EXPECT_GT(index.Stats().conflicting_keys, 0);
    }
    for (PrefixReceipt& receipt : live) index.OnReleased(receipt, false);
    for (std::uint32_t slot = 0; slot < 3; ++slot) index.RemoveEndpoint({slot, 1});
    EXPECT_EQ(index.Sweep(100000), 0);
    EXPECT_EQ(index.Stats().runs, 0);
  }
}

}  // namespace
}  // namespace tokroute

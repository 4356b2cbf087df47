// What the prefix tests share: prompts as lists of made-up blocks, with properly chained keys.
#ifndef TOKROUTE_TESTS_PREFIX_PREFIX_TEST_UTIL_H_
#define TOKROUTE_TESTS_PREFIX_PREFIX_TEST_UTIL_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tokroute/fleet_view.h"
#include "tokroute/fwd.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/prefix/kv_event.h"
#include "tokroute/prefix/prefix_index.h"
#include "tokroute/request.h"

namespace tokroute {

// SplitMix64: the same numbers everywhere.
class TestRandom {
 public:
  explicit TestRandom(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::uint64_t Below(std::uint64_t n) { return Next() % n; }
  bool OneIn(std::uint64_t n) { return Below(n) == 0; }

 private:
  std::uint64_t state_;
};

// The key of a block with this content behind `parent`: all that matters is that it depends on both.
inline BlockKey ChainKey(BlockKey parent, std::uint64_t content) {
  return TestRandom(parent * 0xD1342543DE82EF95u + content * 2 + 1).Next() | 1;
}
inline std::vector<BlockKey> ChainKeys(const std::vector<std::uint64_t>& contents, std::uint64_t root = 0) {
  std::vector<BlockKey> keys;
  keys.reserve(contents.size());
  for (const std::uint64_t content : contents) keys.push_back(ChainKey(keys.empty() ? root : keys.back(), content));
  return keys;
}
// A prompt of `blocks` blocks that shares nothing with another root's.
inline std::vector<BlockKey> LongChain(std::uint64_t root, std::int64_t blocks) {
  std::vector<BlockKey> keys(static_cast<std::size_t>(blocks));
  BlockKey parent = root;
  for (BlockKey& key : keys) key = parent = ChainKey(parent, 0);
  return keys;
}

// A clock that stands still until it is set.
struct ManualClock {
  std::chrono::nanoseconds now{};
  std::chrono::nanoseconds Now() const noexcept { return now; }
};

// Sources of events.
inline constexpr EndpointId kA{0, 1}, kB{1, 1}, kC{2, 1};
inline const KvSource kDeviceA{kA}, kHostA{kA, StorageTier::kHost}, kDeviceB{kB};

// An index and one caller's scratch.
struct IndexUser {
  explicit IndexUser(const PrefixIndexOptions& options) {
    absl::StatusOr<std::shared_ptr<PrefixIndex>> made = PrefixIndex::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    if (made.ok()) index = *std::move(made);
  }
  explicit IndexUser(std::shared_ptr<PrefixIndex> shared) : index(std::move(shared)) {}

  PromptKeys& Load(std::span<const BlockKey> block_keys) {
    keys.Reset(index->key_options(), {.block_keys = block_keys, .block_size = index->options().block_size});
    return keys;
  }
  const PrefixMatch& Match(std::span<const BlockKey> block_keys) {
    index->Match(Load(block_keys), match);
    return match;
  }
  std::int64_t Matched(EndpointId endpoint, std::span<const BlockKey> block_keys) {
    return Match(block_keys).BlocksOf(endpoint);
  }
  PrefixReceipt Record(EndpointId endpoint, std::span<const BlockKey> block_keys, const FleetView* alive = nullptr) {
    return index->Record(endpoint, Load(block_keys), alive);
  }
  // Recorded and done.
  void Store(EndpointId endpoint, std::span<const BlockKey> block_keys) {
    PrefixReceipt receipt = Record(endpoint, block_keys);
    index->OnReleased(receipt, false);
  }
  // The same for a request with tokens.
  std::int64_t Matched(EndpointId endpoint, const Request& request) {
    keys.Reset(index->key_options(), request);
    index->Match(keys, match);
    return match.BlocksOf(endpoint);
  }
  void Store(EndpointId endpoint, const Request& request) {
    keys.Reset(index->key_options(), request);
    PrefixReceipt receipt = index->Record(endpoint, keys, nullptr);
    index->OnReleased(receipt, false);
  }

  std::shared_ptr<PrefixIndex> index;
  PromptKeys keys;
  PrefixMatch match;
};

// A fleet, as far as the index asks about it.
struct ScriptedFleet {
  EndpointId Add(std::uint32_t slot) {
    const std::uint32_t incarnation = ++last[slot];
    incarnations[slot].store(incarnation);
    return {slot, incarnation};
  }
  void Remove(EndpointId id) { incarnations[id.slot].store(0); }
  FleetView View() const { return {incarnations.data(), kMaxEndpoints}; }

  std::vector<std::atomic<std::uint32_t>> incarnations = std::vector<std::atomic<std::uint32_t>>(kMaxEndpoints);
  std::vector<std::uint32_t> last = std::vector<std::uint32_t>(kMaxEndpoints);
};

// TOKROUTE_TEST_SEED repeats one run, TOKROUTE_TEST_SCALE does more of everything.
inline std::uint64_t TestSeed(std::uint64_t otherwise) {
  const char* text = std::getenv("TOKROUTE_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : otherwise;
}
inline std::int64_t TestScale() {
  const char* text = std::getenv("TOKROUTE_TEST_SCALE");
  const long long scale = text != nullptr ? std::atoll(text) : 1;
  return scale >= 1 ? scale : 1;
}

}  // namespace tokroute

#endif  // TOKROUTE_TESTS_PREFIX_PREFIX_TEST_UTIL_H_

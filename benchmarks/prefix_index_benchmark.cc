// The prefix index at 2.5 M distinct blocks over 128 endpoints: matching a prompt of 4,400 blocks, and a request's
// whole way (record, first token, release) at capacity. Keys are given, so no hashing is in it.
//
// Beside the time stands `misses`: the time in units of a dependent random read in 256 MiB, measured in the same run,
// which is what makes figures comparable between machines.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/prefix/prefix_index.h"
#include "tokroute/request.h"

namespace {

using tokroute::BlockKey;
using tokroute::EndpointId;
using tokroute::PrefixIndex;

constexpr std::uint32_t kEndpoints = 128;
constexpr std::size_t kPromptBlocks = 4400, kSystemBlocks = 128;
constexpr std::size_t kConversations = 2'500'000 / (kPromptBlocks - kSystemBlocks);

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::uint64_t Below(std::uint64_t n) { return Next() % n; }

 private:
  std::uint64_t state_;
};

// Eight system prompts, each behind an eighth of the conversations. `turns`: into how many records a conversation
// falls, hence the runs on its path.
std::vector<BlockKey> Conversation(std::size_t i) {
  std::vector<BlockKey> keys(kPromptBlocks);
  Random system(i % 8 + 1), own(i + 1000);
  for (std::size_t b = 0; b < keys.size(); ++b) keys[b] = (b < kSystemBlocks ? system : own).Next() | 1;
  return keys;
}

struct World {
  explicit World(std::size_t turns) {
    index = *PrefixIndex::Create({.default_capacity_tokens = std::int64_t{1} << 30});
    Random random(1);
    tokroute::PromptKeys keys;
    prompts.reserve(kConversations);
    for (std::size_t i = 0; i < kConversations; ++i) {
      prompts.push_back(Conversation(i));
      holders.push_back(static_cast<std::uint32_t>(random.Below(kEndpoints)));
      for (std::size_t turn = 1; turn <= turns; ++turn) {
        Load(keys, std::span(prompts.back()).first(kPromptBlocks * turn / turns));
        tokroute::PrefixReceipt receipt = index->Record({holders.back(), 1}, keys, nullptr);
        index->OnReleased(receipt, false);
      }
    }
  }
  void Load(tokroute::PromptKeys& keys, std::span<const BlockKey> prompt) const {
    keys.Reset(index->key_options(), {.block_keys = prompt, .block_size = 16});
  }

  std::shared_ptr<PrefixIndex> index;
  std::vector<std::vector<BlockKey>> prompts;
  std::vector<std::uint32_t> holders;
};

// Built once per number of turns and kept: building takes longer than measuring.
const World& TheWorld(std::size_t turns) {
  static std::vector<std::pair<std::size_t, std::unique_ptr<World>>> worlds;
  for (const auto& [known, world] : worlds) {
    if (known == turns) return *world;
  }
  worlds.clear();  // One at a time.
  worlds.emplace_back(turns, std::make_unique<World>(turns));
  return *worlds.back().second;
}

// One dependent random read, in seconds.
class Miss {
 public:
  Miss() : next_(std::size_t{1} << 22) {
    // One cycle through all lines, in random order (Sattolo's shuffle).
    for (std::size_t i = 0; i < next_.size(); ++i) next_[i].to = static_cast<std::uint32_t>(i);
    Random random(5);
    for (std::size_t i = next_.size() - 1; i > 0; --i) std::swap(next_[i].to, next_[random.Below(i)].to);
  }
  double Measure() {
    constexpr int kReads = 64;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kReads; ++i) at_ = next_[at_].to;
    benchmark::DoNotOptimize(at_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kReads;
  }

 private:
  struct alignas(64) Line {
    std::uint32_t to;
  };
  std::vector<Line> next_;
  std::uint32_t at_ = 0;
};

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Another random conversation each time, so that caches do not hold its part of the index.
void BM_PrefixIndexMatch(benchmark::State& state) {
  const World& world = TheWorld(static_cast<std::size_t>(state.range(0)));
  static Miss miss;
  tokroute::PromptKeys keys;
  tokroute::PrefixMatch match;
  for (std::size_t i = 0; i < kConversations; ++i) {
    world.Load(keys, world.prompts[i]);
    world.index->Match(keys, match);
    if (match.BlocksOf({world.holders[i], 1}) != std::int64_t{kPromptBlocks}) {
      state.SkipWithError("a conversation is not matched by its holder");
      return;
    }
  }
  Random random(9);
  std::vector<double> times, misses;
  for (auto _ : state) {
    misses.push_back(miss.Measure());
    world.Load(keys, world.prompts[random.Below(kConversations)]);
    const auto start = std::chrono::steady_clock::now();
    world.index->Match(keys, match);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    benchmark::DoNotOptimize(match.holders().data());
    times.push_back(seconds);
    state.SetIterationTime(seconds);
  }
  const tokroute::PrefixIndexStats stats = world.index->Stats();
  state.counters["misses"] = Median(times) / Median(misses);
  state.counters["p50_us"] = Median(times) * 1e6;
  state.counters["holders"] = static_cast<double>(match.holders().size());
  state.counters["blocks"] = static_cast<double>(stats.distinct_blocks);
  state.counters["bytes_per_block"] = static_cast<double>(stats.bytes) / static_cast<double>(stats.distinct_blocks);
}
BENCHMARK(BM_PrefixIndexMatch)
    ->ArgName("turns")
    ->Arg(1)
    ->Arg(10)
    ->Arg(100)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// New conversations at capacity: every record evicts as much as it brings. Two thirds of a record's blocks are new.
void BM_PrefixIndexRecordFinish(benchmark::State& state) {
  const auto blocks = static_cast<std::size_t>(state.range(0));
  // 2.5 M blocks in all.
  auto index = *PrefixIndex::Create({.default_capacity_tokens = 16 * (2'500'000 / kEndpoints)});
  Random random(3);
  std::vector<BlockKey> prompt(blocks);
  tokroute::PromptKeys keys;
  const auto next = [&] {
    Random system(random.Below(64) + 1);
    for (std::size_t b = 0; b < blocks; ++b) prompt[b] = (b < blocks / 3 ? system : random).Next() | 1;
    keys.Reset(index->key_options(), {.block_keys = prompt, .block_size = 16});
    return EndpointId{static_cast<std::uint32_t>(random.Below(kEndpoints)), 1};
  };
  while (index->Stats().evicted_blocks < 2'000'000) {
    tokroute::PrefixReceipt receipt = index->Record(next(), keys, nullptr);
    index->OnReleased(receipt, false);
  }
  std::array<tokroute::PrefixReceipt, 64> live{};
  std::vector<double> times;
  std::int64_t recorded = 0;
  for (auto _ : state) {
    const EndpointId endpoint = next();
    tokroute::PrefixReceipt& slot = live[random.Below(live.size())];
    const auto start = std::chrono::steady_clock::now();
    tokroute::PrefixReceipt receipt = index->Record(endpoint, keys, nullptr);
    index->OnFirstToken(receipt);
    index->OnReleased(slot, false);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(times.back());
    recorded += receipt.blocks;  // Now and then fewer than the prompt's: live requests may pin most of an endpoint.
    slot = receipt;
  }
  state.SetItemsProcessed(recorded);  // Blocks recorded per second.
  state.counters["p50_us"] = Median(times) * 1e6;
  state.counters["bytes"] = static_cast<double>(index->Stats().bytes);
  const absl::Status audit = index->Audit();
  if (!audit.ok()) state.SkipWithError("the index is not sound");
}
BENCHMARK(BM_PrefixIndexRecordFinish)
    ->ArgName("blocks")
    ->Arg(64)
    ->Arg(1000)
    ->Arg(4400)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace

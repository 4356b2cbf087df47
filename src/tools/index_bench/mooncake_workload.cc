#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "tools/index_bench/random.h"
#include "tools/index_bench/reference.h"
#include "tools/index_bench/workloads.h"

namespace tokroute::index_bench {
namespace {

constexpr std::uint64_t kLengthFactor = 4, kCopies = 20, kCapacityBlocks = 16'384;
constexpr double kEndpoints = 128;
constexpr std::int64_t kBlockTokens = tools::kTraceBlockTokens / static_cast<std::int64_t>(kLengthFactor);

// An engine's cache: blocks in use are on no list, the others in the order in which they were given back.
class LruCache {
 public:
  bool Contains(BlockKey key) const { return nodes_.contains(key); }
  std::size_t size() const { return nodes_.size(); }
  // Takes a block that is there, or a new one, into use.
  void Use(BlockKey key) {
    const auto [found, is_new] = nodes_.try_emplace(key, kNone);
    if (!is_new) {
      if (links_[found->second].listed) Unlink(found->second);
      return;
    }
    if (free_.empty()) {
      found->second = static_cast<std::uint32_t>(links_.size());
      links_.push_back({.key = key});
    } else {
      found->second = free_.back();
      free_.pop_back();
      links_[found->second] = {.key = key};
    }
  }
  // Gives a block in use back, as the most recent.
  void GiveBack(BlockKey key) {
    const std::uint32_t node = nodes_.find(key)->second;
    if (links_[node].listed) return;
    links_[node].listed = true;
    links_[node].older = newest_;
    links_[node].newer = kNone;
    (newest_ == kNone ? oldest_ : links_[newest_].newer) = node;
    newest_ = node;
  }
  // The least recent block that is not in use; 0: all are.
  BlockKey Evict() {
    if (oldest_ == kNone) return 0;
    const std::uint32_t node = oldest_;
    Unlink(node);
    nodes_.erase(links_[node].key);
    free_.push_back(node);
    return links_[node].key;
  }

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  struct Link {
    BlockKey key = 0;
    std::uint32_t older = kNone, newer = kNone;
    bool listed = false;
  };
  void Unlink(std::uint32_t node) {
    Link& link = links_[node];
    (link.older == kNone ? oldest_ : links_[link.older].newer) = link.newer;
    (link.newer == kNone ? newest_ : links_[link.newer].older) = link.older;
    link.listed = false;
  }

  absl::flat_hash_map<BlockKey, std::uint32_t, KeyHash> nodes_;
  std::vector<Link> links_;
  std::vector<std::uint32_t> free_;
  std::uint32_t oldest_ = kNone, newest_ = kNone;
};

// When each request comes, 0 .. 1: equal time stamps (the trace's clock is coarse) are spread up to the next one, at
// most 3 s.
std::vector<double> Arrivals(const std::vector<tools::TraceRequest>& requests, std::size_t count) {
  constexpr double kMostSpreadMs = 3000;
  std::vector<double> at(count);
  const double first = static_cast<double>(requests[0].timestamp_ms);
  for (std::size_t i = 0; i < count;) {
    std::size_t end = i + 1;
    while (end < count && requests[end].timestamp_ms == requests[i].timestamp_ms) ++end;
    const auto stamp = static_cast<double>(requests[i].timestamp_ms);
    const double next = end < count ? static_cast<double>(requests[end].timestamp_ms) : stamp + kMostSpreadMs;
    const double step = std::min(next - stamp, kMostSpreadMs) / static_cast<double>(end - i);
    for (std::size_t k = i; k < end; ++k) at[k] = stamp - first + step * static_cast<double>(k - i);
    i = end;
  }
  const double last = std::max(at.back(), 1.0);
  for (double& t : at) t /= last;
  return at;
}

}  // namespace

OperationStream MakeMooncake(const tools::Trace& trace, const WorkloadOptions& options) {
  OperationStream stream;
  stream.endpoints = static_cast<std::uint32_t>(std::max(2.0, std::round(kEndpoints * options.scale)));
  stream.block_size = kBlockTokens;
  const auto requests = static_cast<double>(trace.requests.size());
  const auto count = static_cast<std::size_t>(std::clamp(std::ceil(requests * options.scale), 1.0, requests));
  std::uint64_t most_id = 0;
  for (const tools::TraceRequest& request : trace.requests) {
    for (const std::uint64_t id : request.hash_ids) most_id = std::max(most_id, id);
  }
  const std::uint64_t salt = Mix(options.seed ^ 0xBB67AE8584CAA73Bu);
  // Ids of the trace are chained as block keys are, so any bijection of them will do for keys.
  const auto key_of = [&](std::uint64_t block) {
    const BlockKey key = Mix(block + salt);
    return key != 0 ? key : 1;
  };
  const std::vector<double> arrivals = Arrivals(trace.requests, count);
  std::vector<LruCache> caches(stream.endpoints);
  Random random(options.seed);
  FreshKeys fresh(options.seed + 1);
  std::vector<BlockKey> path, evicted;
  for (std::size_t i = 0; i < count; ++i) {
    const tools::TraceRequest& request = trace.requests[i];
    for (std::uint64_t copy = 0; copy < kCopies; ++copy) {
      const std::size_t first_record = stream.records.size();
      const EndpointId endpoint{static_cast<std::uint32_t>(random.Below(stream.endpoints)), 1};
      LruCache& cache = caches[endpoint.slot];
      path.clear();
      for (const std::uint64_t id : request.hash_ids) {
        for (std::uint64_t part = 0; part < kLengthFactor; ++part) {
          path.push_back(key_of((id + copy * (most_id + 1)) * kLengthFactor + part));
        }
      }
      const KeyRange prompt = stream.AddKeys(path);
      stream.Match(prompt);

      // Makes room for `blocks` more, and tells of it in one event.
      const auto evict_for = [&](std::size_t blocks) {
        evicted.clear();
        while (cache.size() + blocks > kCapacityBlocks) {
          const BlockKey key = cache.Evict();
          if (key == 0) break;
          evicted.push_back(key);
        }
        if (!evicted.empty()) stream.Remove(endpoint, stream.AddKeys(evicted));
      };
      std::uint32_t cached = 0;
      while (cached < prompt.count && cache.Contains(path[cached])) cache.Use(path[cached++]);
      const auto kept = static_cast<std::uint32_t>(std::min<std::uint64_t>(prompt.count, kCapacityBlocks));
      if (cached < kept) {
        evict_for(kept - cached);
        for (std::uint32_t b = cached; b < kept; ++b) cache.Use(path[b]);
        stream.Store(endpoint, ParentOf(stream, prompt, cached), {prompt.first + cached, kept - cached});
      }
      path.resize(kept);
      const std::int64_t output_blocks = kept < prompt.count ? 0 : request.output_tokens / kBlockTokens;
      for (std::int64_t b = 0; b < output_blocks && path.size() < kCapacityBlocks; ++b) {
        evict_for(1);
        const BlockKey key = fresh.Next();
        stream.Store(endpoint, path.back(), stream.AddKeys({&key, 1}));
        cache.Use(key);
        path.push_back(key);
      }
      std::for_each(path.rbegin(), path.rend(), [&](BlockKey key) { cache.GiveBack(key); });
      for (std::size_t r = first_record; r < stream.records.size(); ++r) stream.records[r].at = arrivals[i];
    }
  }
  return stream;
}

}  // namespace tokroute::index_bench

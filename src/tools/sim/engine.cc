#include "tools/sim/engine.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace tokroute::tools {

std::int64_t LruBlockCache::Match(std::span<const BlockKey> keys) const {
  std::int64_t held = 0;
  for (const BlockKey key : keys) {
    if (!index_.contains(key)) break;
    ++held;
  }
  return held;
}

std::int64_t LruBlockCache::PinMatched(std::span<const BlockKey> keys) {
  std::int64_t pinned = 0;
  for (const BlockKey key : keys) {
    const auto found = index_.find(key);
    if (found == index_.end()) break;
    Pin(found->second);
    ++pinned;
  }
  return pinned;
}

std::int64_t LruBlockCache::PinRest(std::span<const BlockKey> keys, std::int64_t pinned) {
  for (const BlockKey key : keys.subspan(static_cast<std::size_t>(pinned))) {
    if (const auto found = index_.find(key); found != index_.end()) {
      Pin(found->second);
    } else {
      if (size() >= capacity_ && !EvictOldest()) break;
      std::uint32_t block = static_cast<std::uint32_t>(blocks_.size());
      if (free_.empty()) {
        blocks_.emplace_back();
      } else {
        block = free_.back();
        free_.pop_back();
      }
      blocks_[block] = {.key = key, .pins = 1};
      index_.emplace(key, block);
    }
    ++pinned;
  }
  return pinned;
}

void LruBlockCache::Unpin(std::span<const BlockKey> keys) {
  for (std::size_t i = keys.size(); i-- > 0;) {
    const std::uint32_t index = index_.at(keys[i]);
    Block& block = blocks_[index];
    assert(block.pins > 0);
    if (--block.pins > 0) continue;
    block.older = newest_;
    block.newer = kNone;
    (newest_ == kNone ? oldest_ : blocks_[newest_].newer) = index;
    newest_ = index;
  }
}

void LruBlockCache::Pin(std::uint32_t block) {
  if (blocks_[block].pins++ == 0) Unlink(block);
}

void LruBlockCache::Unlink(std::uint32_t index) {
  const Block& block = blocks_[index];
  (block.older == kNone ? oldest_ : blocks_[block.older].newer) = block.newer;
  (block.newer == kNone ? newest_ : blocks_[block.newer].older) = block.older;
}

bool LruBlockCache::EvictOldest() {
  if (oldest_ == kNone) return false;
  const std::uint32_t block = oldest_;
  Unlink(block);
  index_.erase(blocks_[block].key);
  free_.push_back(block);
  return true;
}

std::optional<SerialEngine::Admission> SerialEngine::TryStart(Nanoseconds now) {
  if (prefilling_.has_value() || waiting_.empty()) return std::nullopt;
  if (options_.max_running > 0 && static_cast<std::int64_t>(running_.size()) >= options_.max_running) {
    return std::nullopt;
  }
  const EngineJob job = waiting_.front();
  waiting_.pop_front();
  const std::int64_t pinned = cache_.PinMatched(job.block_keys);
  const std::int64_t hit_tokens = pinned * options_.block_size;
  // The last prompt token is computed even if all is cached: its logits give the first token.
  const std::int64_t computed = std::max<std::int64_t>(job.prompt_tokens - hit_tokens, 1);
  const double prefill_ns = static_cast<double>(computed) * 1e9 / options_.prefill_tokens_per_s;
  running_.emplace(job.id, Running{.job = job, .pinned = pinned});
  prefilling_ = job.id;
  return Admission{.id = job.id, .hit_tokens = hit_tokens, .prefill_end = now + std::llround(prefill_ns)};
}

SerialEngine::FirstToken SerialEngine::EndPrefill(Nanoseconds now) {
  assert(prefilling_.has_value());
  Running& running = running_.at(*prefilling_);
  prefilling_.reset();
  running.pinned = cache_.PinRest(running.job.block_keys, running.pinned);
  return {.id = running.job.id, .finish = now + (running.job.output_tokens - 1) * options_.decode_ns};
}

void SerialEngine::Finish(std::uint32_t id) {
  const auto found = running_.find(id);
  assert(found != running_.end());
  cache_.Unpin(found->second.job.block_keys.first(static_cast<std::size_t>(found->second.pinned)));
  running_.erase(found);
}

}  // namespace tokroute::tools

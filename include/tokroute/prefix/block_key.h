// Block keys: 64-bit hashes of a prompt's full blocks, each chained to the one before, so that equal keys at block i
// mean equal prompts up to there.
//
// For whoever fills a prefix index or wants to name prompt prefixes between processes. Hashing is lazy: a prompt that
// misses at its first block costs a few blocks of hashing, not its length.
//
//   PromptKeys keys;                                     // Keep it: it owns a buffer that is reused.
//   keys.Reset({.block_size = 16}, request);
//   std::span<const BlockKey> first = keys.Ensure(64);   // At most 64, fewer if the prompt is shorter.
//   std::span<const BlockKey> all = keys.Ensure(keys.block_count());  // Goes on where it stopped.
//
// The keys are hints for routing, not a security boundary: XXH3 is not collision resistant against someone who tries. A
// forged key mis-routes a request, it never yields foreign data, because the engine does its own look-up. Where clients
// are hostile and keys stay in one process, give a secret `seed`.
#ifndef TOKROUTE_PREFIX_BLOCK_KEY_H_
#define TOKROUTE_PREFIX_BLOCK_KEY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tokroute/fwd.h"
#include "tokroute/request.h"

namespace tokroute {
inline namespace v0 {

// Tokens per block, the range that options accept. 16 is what engines use; larger blocks cost less memory and hashing
// and lose up to block_size - 1 tokens of every match.
inline constexpr std::int32_t kMinBlockSize = 16, kMaxBlockSize = 512, kDefaultBlockSize = 16;

// How a key is made from its block and the key before it.
enum class KeyScheme : std::uint8_t {
  // Ours. h(i) = XXH3_64 of block i's token ids as little-endian uint32; key(i) = fold(h(i) ^ A, key(i-1) ^ B), where
  // fold xors the halves of the 128-bit product; a result of 0 becomes 1. key(-1) comes from the seed, then model, LoRA
  // and cache salt, each framed by its length. Blocks are hashed independently, only the cheap fold is serial:
  // 1.1-1.25x of not chaining at all at block size 16, where seeding XXH3 with the parent costs 1.8x and two XXH64
  // passes 4.7x.
  kXxh3,
  // The reference router's (llm-d). h(-1) = XXH64(model bytes, then salt bytes, nothing between them); h(i) =
  // XXH64(XXH64(token ids) then h(i-1), both little-endian), seed 0. About 4x the cost of kXxh3 at block size 16; for
  // comparing with it only. The reference knows no adapters here: a non-empty LoRA adds a link of its own, so that
  // adapters stay apart.
  kXxh64Chain,
};

// What keys depend on besides the request. Two sides that compare keys must agree on all of it.
struct KeyOptions {
  std::int32_t block_size = kDefaultBlockSize;  // Unit: tokens. kMinBlockSize .. kMaxBlockSize, any integer.
  KeyScheme scheme = KeyScheme::kXxh3;
  // 0: the same keys in every process, build and byte order. Else a secret of this process (or group of processes).
  // kXxh64Chain has no seed: leave it 0 there.
  std::uint64_t seed = 0;
  friend bool operator==(const KeyOptions&, const KeyOptions&) = default;
};

// The keys of one prompt at a time, hashed on demand. Only full blocks have one; a partial last block never does.
//
//   * A request with `block_keys` is used as it is, without hashing, if its block_size is ours; else it has no blocks.
//   * A request with text only, or shorter than a block, has no blocks: block_count() == 0.
//   * Media: every block that a span overlaps takes in the span's content hash and where the span starts relative to
//     the block. The text before a picture stays shared; everything from its first block on differs. Spans may come in
//     any order and share blocks; spans of token_count <= 0 are ignored.
//
// Keeps views of the request's tokens (or block_keys) until the next Reset: they must live that long. One thread at a
// time. Allocates only while growing, so nothing once warm; gives the buffer of a giant prompt (more than 131072
// blocks) back at the next Reset of a smaller one. A moved-from object may only be Reset, assigned or destroyed.
class PromptKeys {
 public:
  PromptKeys() = default;
  PromptKeys(PromptKeys&&) noexcept = default;
  PromptKeys& operator=(PromptKeys&&) noexcept = default;

  // Starts over with another prompt. Hashes the namespace, no block. A block_size outside 1 .. kMaxBlockSize gives no
  // blocks. O(namespace bytes + media spans, sorted).
  void Reset(const KeyOptions& options, const Request& request) noexcept;

  const KeyOptions& options() const noexcept { return options_; }
  // Full blocks in the prompt. 0: there is nothing to match, which is not the same as a miss.
  std::int64_t block_count() const noexcept { return block_count_; }
  // Blocks whose keys are there already, without further hashing.
  std::int64_t ready_blocks() const noexcept { return ready_; }

  // The keys of the first min(blocks, block_count()) blocks; hashes those that are missing. Valid until the next Ensure
  // or Reset. O(tokens newly hashed).
  std::span<const BlockKey> Ensure(std::int64_t blocks) noexcept {
    if (blocks > block_count_) blocks = block_count_;
    if (blocks <= 0) return {};
    if (blocks > ready_) Hash(blocks);
    return {keys_, static_cast<std::size_t>(blocks)};
  }

 private:
  void Hash(std::int64_t blocks) noexcept;
  void HashRun(std::int64_t blocks) noexcept;
  void Reserve(std::int64_t blocks) noexcept;
  std::uint64_t MixMedia(std::uint64_t hash) noexcept;

  KeyOptions options_;
  std::int64_t block_count_ = 0, ready_ = 0;
  const BlockKey* keys_ = nullptr;   // buffer_, or the request's own.
  const TokenId* tokens_ = nullptr;  // Null when the request brought its keys.
  std::uint64_t chain_ = 0;          // What the next block is chained to: after a Reset the namespace's root.
  std::int64_t capacity_ = 0;        // Of buffer_, in keys.
  std::unique_ptr<BlockKey[]> buffer_;
  std::vector<MediaSpan> media_;     // The request's, ordered by position.
  std::vector<std::uint32_t> open_;  // Of media_: those that reach into the block at hand, in the same order.
  std::size_t next_media_ = 0;       // The first one that has not been opened yet.
};

// The reference router's own list of hashes for a request's tokens: as kXxh64Chain with an empty LoRA and no media, but
// *including* a partial last block, and without remapping 0. For comparing with the reference; an index never uses it.
// block_size >= 1, else the list is empty. max_blocks: the reference's cap on blocks; 0: none. Allocates the result.
std::vector<std::uint64_t> ReferenceBlockHashes(const Request& request, std::int32_t block_size,
                                                std::int64_t max_blocks = 0);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_BLOCK_KEY_H_

// The steps that block keys are made in, for whoever has a chain's blocks in pieces.
//
// Private to src/prefix. A block's content is hashed without knowing what it follows; linking is what needs the parent:
//
//   key(i) = LinkBlock(scheme, content(i), i == 0 ? RootOf(options, request) : key(i - 1))
//
// gives the keys that PromptKeys gives. (But for one: a kXxh64Chain hash of 0 is key 1 and is chained on as 0 there. It
// happens once in 2^64 blocks.)
#ifndef TOKROUTE_SRC_PREFIX_BLOCK_HASH_H_
#define TOKROUTE_SRC_PREFIX_BLOCK_HASH_H_

#include <cstdint>
#include <span>

#include "tokroute/fwd.h"
#include "tokroute/prefix/block_key.h"
#include "tokroute/request.h"

namespace tokroute::internal {

// Into the order in which blocks take them in.
void SortMedia(std::span<MediaSpan> media) noexcept;

// The contents of out.size() blocks, whose tokens are all there; media sorted, positions counted from the first token
// (below 0: the span began before). O(tokens + blocks that spans overlap).
void HashContents(const KeyOptions& options, std::span<const TokenId> tokens, std::span<const MediaSpan> media,
                  std::span<std::uint64_t> out) noexcept;

// What a prompt's first block is linked to: the request's namespace.
std::uint64_t RootOf(const KeyOptions& options, const Request& request) noexcept;

// Never 0.
BlockKey LinkBlock(KeyScheme scheme, std::uint64_t content, std::uint64_t parent) noexcept;

}  // namespace tokroute::internal

#endif  // TOKROUTE_SRC_PREFIX_BLOCK_HASH_H_

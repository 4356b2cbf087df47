#include "tokroute/prefix/block_key.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

// Inlined, so that a block length known at compile time reaches the hash: 19 % less time at block size 16 than the
// shared library.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "prefix/block_hash.h"

namespace tokroute {
inline namespace v0 {
namespace {

// Odd, otherwise arbitrary. Fixed for ever: keys must be equal between processes and builds.
constexpr std::uint64_t kHashMask = 0x9E3779B97F4A7C15u, kParentMask = 0xD1B54A32D192ED03u;
constexpr std::uint64_t kMediaMask = 0x8CB92BA72F3D8DD7u, kOffsetMask = 0xBF58476D1CE4E5B9u;
constexpr std::uint64_t kRoot = 0x746F6B726F757465u;  // "tokroute".

// A buffer for more keys than this (1 MiB; a 2 M token prompt in blocks of 16) is not kept for the next prompt.
constexpr std::int64_t kKeptCapacity = std::int64_t{1} << 17;

constexpr bool kBigEndian = std::endian::native == std::endian::big;

std::uint64_t Fold(std::uint64_t a, std::uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product >> 64) ^ static_cast<std::uint64_t>(product);
}

// The next key of a chain. 0 is reserved for "none": the product folds to 0 about once in 2^63 blocks, 1 does as well.
std::uint64_t Link(std::uint64_t hash, std::uint64_t parent) noexcept {
  const std::uint64_t key = Fold(hash ^ kHashMask, parent ^ kParentMask);
  return key != 0 ? key : 1;
}

[[maybe_unused]] std::uint32_t SwapBytes(std::uint32_t v) noexcept {
  return (v >> 24) | ((v >> 8) & 0xFF00u) | ((v << 8) & 0xFF0000u) | (v << 24);
}

void StoreLittleEndian(std::uint64_t value, unsigned char* out) noexcept {
  for (int i = 0; i < 8; ++i) out[i] = static_cast<unsigned char>(value >> (8 * i));
}

// Token ids as little-endian bytes: the ids themselves, except on big-endian hosts. count <= kMaxBlockSize.
const TokenId* AsLittleEndian(const TokenId* tokens, std::size_t count, TokenId* buffer) noexcept {
  if constexpr (kBigEndian) {
    for (std::size_t i = 0; i < count; ++i) buffer[i] = SwapBytes(tokens[i]);
    return buffer;
  } else {
    (void)count, (void)buffer;
    return tokens;
  }
}

constexpr std::size_t kSwapBuffer = kBigEndian ? kMaxBlockSize : 1;

// XXH3_64bits, with the default secret handed over in a way that the compiler cannot see through. Seen, its words
// become ten constants, too many for the registers of a loop that chains as well, and are loaded anew for each
// block: 1.20-1.29x of unchained hashing at block size 16, against 1.17-1.23x when they are memory operands.
std::uint64_t HashXxh3(const TokenId* tokens, std::size_t count) noexcept {
  TokenId buffer[kSwapBuffer];
  const void* secret = XXH3_kSecret;
  asm("" : "+r"(secret));
  return XXH3_64bits_withSecret(AsLittleEndian(tokens, count, buffer), count * sizeof(TokenId), secret,
                                XXH_SECRET_DEFAULT_SIZE);
}

std::uint64_t HashXxh64(const TokenId* tokens, std::size_t count) noexcept {
  TokenId buffer[kSwapBuffer];
  return XXH64(AsLittleEndian(tokens, count, buffer), count * sizeof(TokenId), 0);
}

std::uint64_t LinkXxh64(std::uint64_t hash, std::uint64_t parent) noexcept {
  unsigned char bytes[16];
  StoreLittleEndian(hash, bytes);
  StoreLittleEndian(parent, bytes + 8);
  return XXH64(bytes, sizeof bytes, 0);
}

// Hashing and chaining in one loop: the hashes do not depend on each other, so the serial latency of the fold hides
// under them. Two loops (all hashes, then the chain) took 25 % longer.
//
// The same as Link for every block, save that the reserved 0 leaves the loop: no compiler can turn that into a
// conditional move that every block waits for. With Link the loop took 1.27-1.30x of unchained hashing.
[[gnu::always_inline]] inline std::uint64_t ChainBlocks(const TokenId* tokens, std::size_t block, std::int64_t blocks,
                                                        std::uint64_t chain, BlockKey* out) noexcept {
  BlockKey* const end = out + blocks;
  while (out != end) {
    for (; out != end; ++out, tokens += block) {
      *out = chain = Fold(HashXxh3(tokens, block) ^ kHashMask, chain ^ kParentMask);
      if (chain == 0) [[unlikely]]
        break;
    }
    if (out == end) break;
    *out++ = chain = 1;
    tokens += block;
  }
  return chain;
}

// A function for each length, so that each has the registers to itself; flattened, since the hash's own functions are
// beyond what GCC inlines unasked.
template <std::size_t kBlock>
[[gnu::noinline, gnu::flatten]] std::uint64_t ChainFixed(const TokenId* tokens, std::int64_t blocks,
                                                         std::uint64_t chain, BlockKey* out) noexcept {
  return ChainBlocks(tokens, kBlock, blocks, chain, out);
}

std::uint64_t Chain(const TokenId* tokens, std::int32_t block, std::int64_t blocks, std::uint64_t chain,
                    BlockKey* out) noexcept {
  switch (block) {
    case 16: return ChainFixed<16>(tokens, blocks, chain, out);
    case 32: return ChainFixed<32>(tokens, blocks, chain, out);
    case 64: return ChainFixed<64>(tokens, blocks, chain, out);
    case 128: return ChainFixed<128>(tokens, blocks, chain, out);
    case 256: return ChainFixed<256>(tokens, blocks, chain, out);
    case 512: return ChainFixed<512>(tokens, blocks, chain, out);
    default: return ChainBlocks(tokens, static_cast<std::size_t>(block), blocks, chain, out);
  }
}

std::uint64_t ChainXxh64(const TokenId* tokens, std::size_t block, std::int64_t blocks, std::uint64_t chain,
                         BlockKey* out) noexcept {
  for (std::int64_t i = 0; i < blocks; ++i, tokens += block) {
    chain = LinkXxh64(HashXxh64(tokens, block), chain);
    out[i] = chain != 0 ? chain : 1;  // The chain itself goes on with what the reference would have.
  }
  return chain;
}

// Length after content: ("ab", "c") and ("a", "bc") end up apart, whatever the parts are.
std::uint64_t LinkPart(std::string_view part, std::uint64_t chain) noexcept {
  chain = Link(XXH3_64bits(part.data(), part.size()), chain);
  return Link(part.size(), chain);
}

// XXH64 over the model's and the salt's bytes as if they stood in one buffer.
std::uint64_t ReferenceRoot(const Request& request) noexcept {
  XXH64_state_t state;
  XXH64_reset(&state, 0);
  if (!request.model.empty()) XXH64_update(&state, request.model.data(), request.model.size());
  if (!request.cache_salt.empty()) XXH64_update(&state, request.cache_salt.data(), request.cache_salt.size());
  return XXH64_digest(&state);
}

std::uint64_t Root(const KeyOptions& options, const Request& request) noexcept {
  if (options.scheme == KeyScheme::kXxh64Chain) {
    const std::uint64_t root = ReferenceRoot(request);
    if (request.lora.empty()) return root;
    return LinkXxh64(XXH64(request.lora.data(), request.lora.size(), 0), root);
  }
  std::uint64_t root = Link(options.seed, kRoot);
  root = LinkPart(request.model, root);
  root = LinkPart(request.lora, root);
  return LinkPart(request.cache_salt, root);
}

// One past the span's last token; saturates.
std::int64_t EndOf(const MediaSpan& span) noexcept {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (span.first_token > 0 && span.token_count > kMost - span.first_token) return kMost;
  return span.first_token + span.token_count;
}

// The hash of a block that begins at `start` and that the span overlaps.
std::uint64_t MixSpan(std::uint64_t hash, const MediaSpan& span, std::int64_t start) noexcept {
  // Unsigned, so that a span from far before the block wraps instead of overflowing.
  const std::uint64_t offset = static_cast<std::uint64_t>(span.first_token) - static_cast<std::uint64_t>(start);
  const std::uint64_t media = Fold(span.content_hash ^ kMediaMask, offset ^ kOffsetMask);
  return Fold(hash ^ kMediaMask, media ^ kOffsetMask);
}

}  // namespace

void PromptKeys::Reset(const KeyOptions& options, const Request& request) noexcept {
  options_ = options;
  block_count_ = ready_ = 0;
  keys_ = nullptr;
  tokens_ = nullptr;
  media_.clear();
  open_.clear();
  next_media_ = 0;
  if (options.block_size >= 1 && options.block_size <= kMaxBlockSize) {
    if (!request.block_keys.empty()) {
      if (request.block_size == options.block_size) {
        block_count_ = ready_ = static_cast<std::int64_t>(request.block_keys.size());
      }
    } else {
      block_count_ = static_cast<std::int64_t>(request.tokens.size()) / options.block_size;
    }
  }
  if (capacity_ > kKeptCapacity && block_count_ <= kKeptCapacity) {
    buffer_.reset();
    capacity_ = 0;
  }
  if (block_count_ == 0) return;
  if (ready_ > 0) {
    keys_ = request.block_keys.data();
    return;
  }
  keys_ = buffer_.get();
  tokens_ = request.tokens.data();
  chain_ = Root(options, request);
  for (const MediaSpan& span : request.media) {
    if (span.token_count > 0 && EndOf(span) > 0) media_.push_back(span);
  }
  if (media_.empty()) return;
  internal::SortMedia(media_);
  open_.reserve(media_.size());
}

void PromptKeys::Reserve(std::int64_t blocks) noexcept {
  if (blocks <= capacity_) return;
  // Left uninitialised: a resized vector would write the whole buffer first.
  const std::int64_t wanted = std::max({blocks, std::min(2 * capacity_, block_count_), std::int64_t{1024}});
  auto bigger = std::make_unique_for_overwrite<BlockKey[]>(static_cast<std::size_t>(wanted));
  if (ready_ > 0) std::memcpy(bigger.get(), buffer_.get(), static_cast<std::size_t>(ready_) * sizeof(BlockKey));
  buffer_ = std::move(bigger);
  capacity_ = wanted;
  keys_ = buffer_.get();
}

void PromptKeys::Hash(std::int64_t blocks) noexcept {
  if (tokens_ == nullptr) return;  // Cannot be: a request's own keys are all ready.
  Reserve(blocks);
  if (media_.empty()) return HashRun(blocks);
  const std::int64_t block_size = options_.block_size;
  while (ready_ < blocks) {
    const std::int64_t start = ready_ * block_size;
    std::erase_if(open_, [&](std::uint32_t i) { return EndOf(media_[i]) <= start; });
    while (next_media_ < media_.size() && media_[next_media_].first_token < start + block_size) {
      open_.push_back(static_cast<std::uint32_t>(next_media_++));
    }
    if (open_.empty()) {  // Plain text up to the block in which the next span starts.
      const bool last = next_media_ == media_.size();
      HashRun(last ? blocks : std::min(blocks, media_[next_media_].first_token / block_size));
      continue;
    }
    const auto count = static_cast<std::size_t>(block_size);
    if (options_.scheme == KeyScheme::kXxh64Chain) {
      chain_ = LinkXxh64(MixMedia(HashXxh64(tokens_ + start, count)), chain_);
    } else {
      chain_ = Link(MixMedia(HashXxh3(tokens_ + start, count)), chain_);
    }
    buffer_[static_cast<std::size_t>(ready_++)] = chain_ != 0 ? chain_ : 1;
  }
}

void PromptKeys::HashRun(std::int64_t blocks) noexcept {
  if (blocks <= ready_) return;
  const TokenId* tokens = tokens_ + ready_ * options_.block_size;
  BlockKey* out = buffer_.get() + ready_;
  if (options_.scheme == KeyScheme::kXxh64Chain) {
    chain_ = ChainXxh64(tokens, static_cast<std::size_t>(options_.block_size), blocks - ready_, chain_, out);
  } else {
    chain_ = Chain(tokens, options_.block_size, blocks - ready_, chain_, out);
  }
  ready_ = blocks;
}

// Where the span starts matters as well as what it shows: the same picture, shifted by a token, is another block.
std::uint64_t PromptKeys::MixMedia(std::uint64_t hash) noexcept {
  const std::int64_t start = ready_ * options_.block_size;
  for (const std::uint32_t i : open_) {
    hash = MixSpan(hash, media_[i], start);
  }
  return hash;
}

std::vector<std::uint64_t> ReferenceBlockHashes(const Request& request, std::int32_t block_size,
                                                std::int64_t max_blocks) {
  std::vector<std::uint64_t> hashes;
  if (block_size < 1) return hashes;
  const auto block = static_cast<std::size_t>(block_size);
  std::vector<TokenId> swapped;
  std::span<const TokenId> tokens = request.tokens;
  if constexpr (kBigEndian) {
    swapped.assign(tokens.begin(), tokens.end());
    for (TokenId& token : swapped) token = SwapBytes(token);
    tokens = swapped;
  }
  std::size_t blocks = tokens.size() / block + (tokens.size() % block != 0 ? 1 : 0);
  if (max_blocks > 0) blocks = std::min(blocks, static_cast<std::size_t>(max_blocks));
  hashes.reserve(blocks);
  std::uint64_t chain = ReferenceRoot(request);
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::size_t count = std::min(block, tokens.size() - i * block);
    chain = LinkXxh64(XXH64(tokens.data() + i * block, count * sizeof(TokenId), 0), chain);
    hashes.push_back(chain);
  }
  return hashes;
}

}  // namespace v0
}  // namespace tokroute

namespace tokroute::internal {

// By position, so that the order in which a gateway lists its pictures makes no difference.
void SortMedia(std::span<MediaSpan> media) noexcept {
  std::sort(media.begin(), media.end(), [](const MediaSpan& a, const MediaSpan& b) {
    if (a.first_token != b.first_token) return a.first_token < b.first_token;
    if (a.token_count != b.token_count) return a.token_count < b.token_count;
    return a.content_hash < b.content_hash;
  });
}

std::uint64_t RootOf(const KeyOptions& options, const Request& request) noexcept { return Root(options, request); }

BlockKey LinkBlock(KeyScheme scheme, std::uint64_t content, std::uint64_t parent) noexcept {
  if (scheme == KeyScheme::kXxh3) return Link(content, parent);
  const std::uint64_t key = LinkXxh64(content, parent);
  return key != 0 ? key : 1;
}

void HashContents(const KeyOptions& options, std::span<const TokenId> tokens, std::span<const MediaSpan> media,
                  std::span<std::uint64_t> out) noexcept {
  const auto count = static_cast<std::size_t>(options.block_size);
  const bool xxh3 = options.scheme == KeyScheme::kXxh3;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const TokenId* block = tokens.data() + i * count;
    out[i] = xxh3 ? HashXxh3(block, count) : HashXxh64(block, count);
  }
  // Span by span, so that each block takes them in by their order, as PromptKeys does block by block.
  const std::int64_t block_size = options.block_size, blocks = std::ssize(out);
  for (const MediaSpan& span : media) {
    if (span.token_count <= 0 || EndOf(span) <= 0) continue;
    const std::int64_t first = std::max<std::int64_t>(span.first_token, 0) / block_size;
    const std::int64_t last = std::min((EndOf(span) - 1) / block_size, blocks - 1);
    for (std::int64_t i = first; i <= last; ++i) {
      std::uint64_t& hash = out[static_cast<std::size_t>(i)];
      hash = MixSpan(hash, span, i * block_size);
    }
  }
}

}  // namespace tokroute::internal
